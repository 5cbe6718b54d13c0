"""What a replay takes, where it fits and where it may go on, by arithmetic."""

from __future__ import annotations

import os
import pathlib

import jax.numpy as jnp
import pytest

from podracer import leaves, mesh, replays
from podracer.errors import UserError
from podracer.types import Agent, LearnerState, ReplaySize


def agent(replay=None, memory=()) -> Agent:
    step = lambda *_: None
    return Agent(lambda key: LearnerState((), (), (), memory), step, step, step, replay=replay)


SIZE = ReplaySize(65_536, 65_536 * 2_088 - 5)  # a rounded 2,088 B per decision


def test_what_is_said_is_the_size_on_a_core():
    assert replays.describe(agent()) == []
    assert replays.describe(agent(SIZE)) == ["replay of 65,536 decisions: 137 MB per learner core"]
    assert replays.describe(agent(SIZE), 16) == ["replay of 65,536 decisions x 16 runs: 2,189 MB per learner core"]


def test_the_refusal_shows_its_arithmetic_and_counts_the_runs(monkeypatch):
    """8 virtual cores share 16 GB, so that 14 replays of 137 MB fit, and 15 do not; 4 cores have 4 GB each."""
    monkeypatch.setattr(replays, "machine_bytes", lambda: 16 * 10**9)
    replays.check_fits(agent(), mesh.make(8), 10**9)
    replays.check_fits(agent(SIZE), mesh.make(8), 14)
    with pytest.raises(UserError, match=r"x 2,088 B x 15 runs per core = 2\.1 GB does not fit in 2\.0 GB"):
        replays.check_fits(agent(SIZE), mesh.make(8), 15)
    replays.check_fits(agent(SIZE), mesh.make(4), 16)
    with pytest.raises(UserError) as refusal:
        replays.check_fits(agent(ReplaySize(10_000, 5 * 10**9)), mesh.make(4))
    assert str(refusal.value) == (
        "a replay of 10,000 decisions x 500,000 B = 5.0 GB does not fit in 4.0 GB, a core's share of this machine's "
        "16.0 GB. Choose a smaller --agent.replay-steps, or set --agent.frame-stack where observations are stacked "
        "frames."
    )


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "1000000\n"}, 1_000_000),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{2**60}\n"}, None),
        # The limit of a group above; in a container the group's name may be that on the machine.
        ({"proc/self/cgroup": "0::/job/step\n", "sys/fs/cgroup/job/memory.max": "5\n"}, 5),
        ({"proc/self/cgroup": "0::/docker/abc\n", "sys/fs/cgroup/memory.max": "6\n"}, 6),
        (
            {
                "proc/self/cgroup": "2:cpu,cpuacct:/a\n1:cpuset,memory:/a\n0::/a\n",
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "7\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            7,
        ),
    ],
)
def test_a_control_group_may_allow_less_than_the_machine_has(tmp_path: pathlib.Path, files, expected):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert replays.machine_bytes(tmp_path) == (expected or machine)


def test_a_memory_is_read_where_as_many_cores_keep_it_and_begins_empty_elsewhere():
    fresh = LearnerState("p", "o", "s", {"ring": jnp.zeros((2, 3)), "count": jnp.zeros(2)})
    assert replays.left_out(fresh, 2, 2) is fresh
    wanted = replays.left_out(fresh, 4, 2)
    assert wanted == fresh._replace(memory={"ring": ..., "count": ...})
    assert leaves.unwanted(wanted._replace(params=())) == {"memory.ring", "memory.count"}
    restored = fresh._replace(params="P", memory={"ring": ..., "count": ...})
    assert replays.begun_anew(restored, fresh) == fresh._replace(params="P")
    assert replays.begun_anew(fresh, None) is fresh  # type: ignore
    assert replays.describe_anew(agent(), 4, 2) == replays.describe_anew(agent(SIZE, jnp.zeros(3)), 4, 4) == []
    (said,) = replays.describe_anew(agent(SIZE, jnp.zeros(3)), 4, 2)
    assert said == "the replay was kept on 4 learner cores and cannot be dealt to 2: it begins empty"
