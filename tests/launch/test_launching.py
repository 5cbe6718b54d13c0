"""`podracer launch`: what it refuses, and what it makes of the command."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from launch import launching, local
from podracer.errors import UserError
from tests.launch.hosts import environment


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("locl -- train anakin", "unknown kind of launch 'locl'. Did you mean 'local'?"),
        ("local", "launch local has no command; expected one after --"),
        ("local --", "launch local has no command"),
        ("local -- eval runs/x", "'eval' cannot be launched; expected train or resume"),
        ("local -- train anakin --host 1", "--host is set by the launcher"),
        ("local -- train anakin --coordinator=1.2.3.4:5", "--coordinator is set by the launcher"),
        ("local --hosts 0 -- train anakin", "--hosts is 0; expected a finite number >= 1"),
        ("local --cores-per-host 0 -- train anakin", "--cores-per-host is 0"),
        ("local --max-restarts -1 -- train anakin", "--max-restarts is -1"),
        ("local --host 2 -- train anakin", "unknown flag --host. Did you mean '--hosts'?"),
        ("local --hosts 5000 --pin -- train anakin", "--pin gives each of 5000 hosts a core"),
    ],
)
def test_what_cannot_be_launched_is_refused_before_anything_starts(line, says, monkeypatch):
    monkeypatch.setattr(local.subprocess, "Popen", lambda *_, **__: pytest.fail("it was started"))
    with pytest.raises(UserError, match=re.escape(says)):
        launching.main(line.split())


def test_it_explains_itself_at_once(capsys):
    """Without JAX, which takes seconds; each kind has its options."""
    launching.main(["--help"])
    assert "local" in capsys.readouterr().out
    script = "import sys; from launch import cli; cli.main(['launch', 'local', '--help'])"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", script],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and "--cores-per-host" in done.stdout and "--max-restarts" in done.stdout
    assert not re.search(r"\| +jax$", done.stderr, re.MULTILINE)


def test_a_command_becomes_one_that_can_be_repeated():
    """All hosts and restarts share one directory; a restart goes on where there is a checkpoint."""
    command = launching.with_directory(["train", "anakin", "--env", "minatar/Breakout", "--agent", "ppo"])
    assert command[:-1] == ["train", "anakin", "--env", "minatar/Breakout", "--agent", "ppo", "--run"]
    assert re.fullmatch(r"runs/minatar-Breakout-ppo-\d{8}-\d{6}", command[-1])
    assert launching.with_directory(command) == command
    assert launching.repeatable(command) == [*command, "--or-resume"]
    assert launching.repeatable([*command, "--or-resume"]) == [*command, "--or-resume"]
    assert launching.repeatable(["resume", "runs/x"]) == ["resume", "runs/x"]


@pytest.mark.parametrize(
    ("statuses", "cause"),
    [
        *[([0, 0], None), ([71, 70], 1), ([70, 71], 0), ([134, 137], 1), ([71, 134], 0), ([2, 2], 0), ([75, 130], 0)],
        *[([73, 70], 1), ([73, 71], 0), ([71, 73], 1), ([73, 137], 1)],
    ],
)
def test_the_host_that_failed_first_is_the_cause(statuses, cause):
    """But one that only saw another go is not, where there is a better one."""

    class Fake:
        def __init__(self, index, status):
            self.index, self.status, self.ended = index, status, 1.0 + index

    found = local._cause([Fake(index, status) for index, status in enumerate(statuses)])
    assert (None if found is None else found.index) == cause
