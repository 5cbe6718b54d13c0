"""What is copied to other machines, and what may come back."""

from __future__ import annotations

import io
import subprocess
import tarfile

import pytest

from launch import project
from podracer.errors import UserError


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    for name in (
        "pyproject.toml",
        "mine.py",
        "examples/env.py",
        ".env",
        "keys/id_rsa",
        "gcp-credentials.json",
        "a.pem",
    ):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    return folder


def names(source):
    return [str(path) for path in project.files(source)]


def test_what_may_hold_a_secret_stays(source):
    """With and without git; ignored files stay too, new ones go."""
    (source / "runs" / "one").mkdir(parents=True)
    (source / "runs" / "one" / "config.json").write_text("{}")
    expected = ["examples/env.py", "mine.py", "pyproject.toml"]
    assert names(source) == expected
    subprocess.run(["git", "init", "-q", str(source)], check=True)
    (source / ".gitignore").write_text("runs\nmine.py\n")
    assert names(source) == [".gitignore", "examples/env.py", "pyproject.toml"]


def test_no_project_and_too_much_are_refused(source, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"has no pyproject.toml"):
        project.files(tmp_path)
    monkeypatch.setattr(project, "LIMIT_BYTES", 1)
    with pytest.raises(UserError, match=r"Name large files in .gitignore"):
        project.files(source)


def test_an_archive_says_nothing_of_its_maker(source, tmp_path):
    project.pack(source, project.files(source), tmp_path / "p.tar.gz")
    with tarfile.open(tmp_path / "p.tar.gz") as archive:
        for member in archive.getmembers():
            assert (member.uid, member.gid, member.uname, member.gname) == (0, 0, "", "")
            assert not member.name.startswith(("/", ".."))


def archive_of(path, **members):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            if content.startswith("->"):
                info.type, info.linkname = tarfile.SYMTYPE, content[2:]
                archive.addfile(info)
            else:
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content.encode()))
    return path


def test_a_run_comes_back_with_the_log_of_every_host(tmp_path):
    for host in (1, 0):
        members = {"run/config.json": f"of {host}", "train.log": f"said by {host}"}
        project.unpack(archive_of(tmp_path / "run.tar.gz", **members), tmp_path / "out", host)
    assert (tmp_path / "out" / "config.json").read_text() == "of 0"
    assert [(tmp_path / "out" / f"train-{host}.log").read_text() for host in (0, 1)] == ["said by 0", "said by 1"]


@pytest.mark.parametrize(
    "members",
    [
        {"../evil": "x"},
        {"run/../../evil": "x"},
        {"run/link": "->/etc"},
        {"run/link": "->../../..", "run/link/evil": "x"},
    ],
)
def test_names_that_lead_out_are_refused(tmp_path, members):
    """A host that was taken over must not write into the user's files."""
    path = archive_of(tmp_path / "run.tar.gz", **members)
    with pytest.raises(UserError, match="cannot be unpacked"):
        project.unpack(path, tmp_path / "out", 0)
    assert not (tmp_path / "out").exists() and not list(tmp_path.rglob("evil"))


def test_half_an_archive_is_refused(tmp_path):
    path = archive_of(tmp_path / "run.tar.gz", **{"run/weights": "x" * 10_000})
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(UserError, match="cannot be unpacked"):
        project.unpack(path, tmp_path / "out", 0)
