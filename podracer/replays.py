"""Replays as architectures see them, which know no agent: what one takes, whether it fits, which cores keep it."""

from __future__ import annotations

import contextlib
import os
import pathlib
from typing import Any

import jax

from podracer import mesh
from podracer.errors import UserError
from podracer.types import Agent, LearnerState


def describe(agent: Agent, runs: int = 1) -> list[str]:
    """What is said of a replay before training: a line, or none where there is no replay.

    Args:
      agent: any agent.
      runs: how many runs' replays a learner core keeps.
    """
    if agent.replay is None:
        return []
    size, each = agent.replay, f" x {runs} runs" if runs > 1 else ""
    return [f"replay of {size.decisions:,} decisions{each}: {runs * size.num_bytes / 1e6:,.0f} MB per learner core"]


def check_fits(agent: Agent, cores: Any, runs: int = 1) -> None:
    """Refuse a replay that the cores of a mesh cannot hold.

    Args:
      agent: any agent.
      cores: the mesh of learner cores.
      runs: how many runs' replays each of them keeps.

    Raises:
      UserError: it is larger than the memory of a core, or than its share of this machine's.
    """
    here = [device for device in mesh.local(cores) if device in jax.local_devices()]
    if agent.replay is None or not here:  # the devices of a program that is only compiled are elsewhere
        return
    device, size = here[0], agent.replay
    if device.platform == "cpu":
        whole = machine_bytes()
        limit, whose = whole // len(here), f"a core's share of this machine's {whole / 1e9:,.1f} GB"
    else:
        limit, whose = (device.memory_stats() or {}).get("bytes_limit"), f"what a {device.device_kind} core has"
    need = runs * size.num_bytes
    if limit is not None and need > limit:
        each = f" x {runs} runs per core" if runs > 1 else ""
        raise UserError(
            f"a replay of {size.decisions:,} decisions x {-(-size.num_bytes // size.decisions):,} B{each} = "
            f"{need / 1e9:,.1f} GB does not fit in {limit / 1e9:,.1f} GB, {whose}. Choose a smaller "
            "--agent.replay-steps, or set --agent.frame-stack where observations are stacked frames."
        )


def machine_bytes(root: pathlib.Path = pathlib.Path("/")) -> int:
    """Memory that this process may use: the machine's, or that of its control group where that is less.

    Args:
      root: where the operating system's files are.
    """
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    groups = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # no Linux
        lines = []
    for _, controllers, group in (line.split(":", 2) for line in lines):
        if "memory" in controllers.split(","):  # version 1
            folder, name = groups / "memory", "memory.limit_in_bytes"
        else:
            folder, name = groups, "memory.max"
        # A limit holds for all groups below it. In a container, the group's own files may be those of the root.
        for part in ("", *pathlib.PurePosixPath(group).parts[1:]):
            folder /= part
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                limits.append(int((folder / name).read_text()))
    return min(limits)


def left_out(learner: LearnerState, kept: int, now: int) -> LearnerState:
    """What is to be read of a checkpoint of a run that goes on: without the memory, on another number of learner cores.

    Every core's ring has a capacity, a write head and priorities of its own, for its share of the environments, and
    cannot be dealt to more or fewer: the run begins with an empty one, as `begun_anew` puts it in and `describe_anew`
    says.

    Args:
      learner: a new one, of this program.
      kept: learner cores of all hosts, in the checkpoint.
      now: and in this program.
    """
    return learner if kept == now else learner._replace(memory=jax.tree.map(lambda _: ..., learner.memory))


def begun_anew(restored: LearnerState, fresh: LearnerState) -> LearnerState:
    """`restored`, with the memory of `fresh` where it was left out."""
    left = any(leaf is ... for leaf in jax.tree.leaves(restored.memory))
    return restored._replace(memory=fresh.memory) if left else restored


def describe_anew(agent: Agent, kept: int, now: int) -> list[str]:
    """What is said of that: a line, or none."""
    if kept == now or not jax.tree.leaves(jax.eval_shape(agent.initial_learner_state, jax.random.key(0)).memory):
        return []
    return [f"the replay was kept on {kept} learner cores and cannot be dealt to {now}: it begins empty"]
