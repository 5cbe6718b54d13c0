"""The user's project as one file to copy, and a run directory that came back as one."""

from __future__ import annotations

import fnmatch
import pathlib
import shlex
import shutil
import subprocess
import tarfile
import tempfile

from podracer.errors import UserError

# What may hold secrets stays here, whatever git says.
SECRET = (".env", ".env.*", "*.pem", "*.key", "*credentials*.json", ".netrc", "id_rsa*", "id_ed25519*", "*token*.txt")
SKIPPED = ("__pycache__", ".git", ".venv*", "runs", ".cache", "*.egg-info", "build", "dist", "node_modules")
LIMIT_BYTES = 500_000_000


def files(source: pathlib.Path) -> list[pathlib.Path]:
    """The files of a project, relative to it: those that git knows or does not ignore; without git all but caches.

    Raises:
      UserError: it is no project that could be installed, or too large to be meant.
    """
    if not (source / "pyproject.toml").is_file():
        raise UserError(f"--source {source} has no pyproject.toml; expected a checkout of a project. Change --source.")
    found = [path for path in _from_git(source) or _walk(source) if (source / path).is_file()]
    kept = [path for path in found if not any(_matches(part, SECRET) for part in path.parts)]
    total = sum((source / path).stat().st_size for path in kept)
    if total > LIMIT_BYTES:
        raise UserError(
            f"--source {source} holds {total / 1e6:,.0f} MB; expected at most {LIMIT_BYTES / 1e6:,.0f}. "
            "Name large files in .gitignore."
        )
    return sorted(kept)


def pack(source: pathlib.Path, chosen: list[pathlib.Path], out: pathlib.Path) -> None:
    """Write the files as a .tar.gz, without the names of users of this machine."""

    def anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        return info

    with tarfile.open(out, "w:gz") as archive:
        for path in chosen:
            archive.add(source / path, str(path), filter=anonymous)


def packing(source: pathlib.Path, out: str) -> str:
    """What one would type for `files` and `pack`."""
    secrets = " ".join(f"--exclude={shlex.quote(pattern)}" for pattern in SECRET)
    here = shlex.quote(str(source))
    if _from_git(source):
        listed = f"git -C {here} ls-files -z --cached --others --exclude-standard"
        return f"{listed} | tar -czf {out} {secrets} -C {here} --null -T -"
    skipped = " ".join(f"--exclude={shlex.quote(pattern)}" for pattern in SKIPPED)
    # The file first: tar notices a folder that gets one while it is read.
    return f": > {out} && tar -czf {out} --exclude={out} {secrets} {skipped} -C {here} ."


def unpacking(archive: pathlib.Path, out: pathlib.Path, host: int) -> str:
    """What one would type for `unpack`."""
    folder = shlex.quote(str(out))
    unpacked = f"tar -xzf {archive} -C {folder} --strip-components=1 run"
    return f"mkdir -p {folder} && {unpacked} && tar -xzOf {archive} train.log > {folder}/train-{host}.log"


def unpack(archive: pathlib.Path, out: pathlib.Path, host: int) -> None:
    """Put `run/` of an archive from a host at `out`, over what is there, and its log into it as train-HOST.log.

    Raises:
      UserError: the archive is damaged, or holds names that lead out of it.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            with tarfile.open(archive) as file:
                file.extractall(folder, filter="data")
        except (tarfile.TarError, OSError, EOFError) as error:
            raise UserError(f"the run that came back cannot be unpacked: {error}. Fetch it again.") from None
        shutil.copytree(pathlib.Path(folder) / "run", out, dirs_exist_ok=True)
        log = pathlib.Path(folder) / "train.log"
        if log.is_file():
            shutil.copy(log, out / f"train-{host}.log")


def _from_git(source: pathlib.Path) -> list[pathlib.Path]:
    """Tracked files and new ones that are not ignored; empty where it is no work tree of git."""
    words = ["git", "-C", str(source), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return []
    return [pathlib.Path(name) for name in done.stdout.split("\0") if name]


def _walk(source: pathlib.Path) -> list[pathlib.Path]:
    paths = (path.relative_to(source) for path in source.rglob("*"))
    return [path for path in paths if not any(_matches(part, SKIPPED) for part in path.parts)]


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
