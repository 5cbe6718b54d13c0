"""What the figures of `podracer bench` share: what is measured, how it is asked for, and the files that come of it."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any, Literal

from launch import turns
from launch.machine import Platform
from launch.worker import Task
from podracer import config, plot, presets
from podracer.config import Recipe
from podracer.errors import UserError, check_number

Architecture = Literal["anakin", "sebulba"]
# The very program that this is, wherever it was started from: `python -m` would take the installed one.
ROOT = pathlib.Path(__file__).resolve().parents[1]
WORKER = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from launch.worker import main; main(sys.argv[1:])"


@dataclasses.dataclass(frozen=True)
class Workload:
    """Options that all figures have."""

    architecture: Architecture = "anakin"
    """anakin or sebulba."""
    env: str = "catch"
    """Environment: a name of `podracer envs`, or path.py:Object. --env.OPTION VALUE sets its options."""
    agent: str = "ppo"
    """Agent: a name of `podracer agents`, or path.py:Object; with its preset for this environment, if there is one.
    --agent.OPTION VALUE sets its options."""
    network: str | None = None
    """Network: a name such as impala, or path.py:Object; None takes the preset's, or the agent's own."""
    platform: Platform | None = None
    """cpu, gpu or tpu; None takes what is there."""
    unroll_length: int = 32
    """Decisions per environment between two updates."""
    updates_per_call: int = 16
    """Anakin: updates per compiled call."""
    threads_per_core: int = 2
    """Sebulba: actor threads per actor core."""
    lag: str = "fixed"
    """Sebulba: updates between acting and learning, as in `train sebulba`."""
    seconds: float = 5.0
    """Length of each measurement; whole calls or updates, at least one."""
    rounds: int = 5
    """How often everything is measured, in turns."""
    out: str = "bench.png"
    """Picture to write, .png, .svg or .pdf; the numbers go beside it as .csv, versions and raw samples as .json."""

    def check(self) -> None:
        """Refuse what can be seen without JAX.

        Raises:
          UserError: a name or a value cannot be.
        """
        config.agent_maker(self.agent)
        if self.network is not None:
            config.network_recipe(self.network)
        check_number("--seconds", self.seconds, minimum=0, exclusive=True)
        for name in ("rounds", "unroll_length", "updates_per_call", "threads_per_core"):
            check_number(f"--{name.replace('_', '-')}", getattr(self, name), minimum=1)
        plot.check_out(pathlib.Path(self.out))

    def settings(self, environments: int, actor_cores: int) -> dict[str, Any]:
        """Of the architecture. `environments`: per core on Anakin, per actor thread on Sebulba."""
        shared: dict[str, Any] = {"unroll_length": self.unroll_length}
        if self.architecture == "anakin":
            return shared | {"batch_per_core": environments, "updates_per_call": self.updates_per_call}
        threads = {"actor_cores": actor_cores, "threads_per_core": self.threads_per_core}
        return shared | threads | {"batch_size": environments, "lag": self.lag}


def recipe(options: Workload, env_options: dict[str, Any], agent_options: dict[str, Any]) -> dict[str, Any]:
    """What `podracer train` would train with these names, as `podracer.config.build` takes it."""
    found = presets.find(options.env, options.agent)
    preset = presets.Preset(options.env, options.agent) if found is None else found[1]
    network, network_config = options.network, None
    if network is None and preset.network is not None:
        network, network_config = preset.network, preset.network_config
    has_config = config.default_of(config.agent_maker(options.agent), "config") is not None
    if agent_options and not has_config:
        raise UserError(f"agent {options.agent} has no options; got --agent.{next(iter(agent_options))}. Remove it.")
    agent_config = {**preset.config, **agent_options} if has_config else None
    env_config = {**preset.env_options, **env_options}
    return dataclasses.asdict(Recipe(options.env, env_config, options.agent, agent_config, network, network_config))


def look(on_cpu: list[Task] | str, elsewhere: list[Task] | str) -> dict[str, Any]:
    """Versions, devices, sizes; asked of a process of its own, so that the measured ones can have the devices.

    Args:
      on_cpu, elsewhere: what is built and traced where JAX starts on a CPU, and elsewhere; or why nothing can be.

    Raises:
      UserError: one of the tasks cannot work.
    """
    as_json = lambda tasks: tasks if isinstance(tasks, str) else [dataclasses.asdict(task) for task in tasks]
    given = json.dumps({"cpu": as_json(on_cpu), "elsewhere": as_json(elsewhere)})
    done = subprocess.run(_command(given), capture_output=True, text=True)
    if done.returncode or not done.stdout:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"the process that looks first ended with status {done.returncode}: {last}")
    found = json.loads(done.stdout.splitlines()[-1])
    if "error" in found:
        raise UserError(found["error"])
    return found | {"command": [pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]}


def measure(tasks: dict[str, list[Task]], rounds: int, alone: bool) -> dict[str, turns.Measured | turns.Failed]:
    """Measure all in turns.

    Args:
      tasks: by name, the processes that are measured together.
      alone: only one process can hold the devices: every measurement is by a new one.
    """
    commands: dict[str, turns.Command] = {name: [_command(t.json()) for t in team] for name, team in tasks.items()}
    logs = pathlib.Path(tempfile.mkdtemp(prefix="podracer_bench_"))
    if alone:
        return turns.one_at_a_time(commands, rounds, logs, say)
    freeze = any(task.architecture == "sebulba" for team in tasks.values() for task in team)
    return turns.in_turns(commands, rounds, logs, freeze=freeze, say=say)


def _command(given: str) -> list[str]:
    return [sys.executable, "-c", WORKER, given]


def whole(found: dict[str, turns.Measured | turns.Failed]) -> dict[str, turns.Measured]:
    """What was measured. What failed is said on standard error.

    Raises:
      UserError: nothing is left.
    """
    good = {name: row for name, row in found.items() if isinstance(row, turns.Measured)}
    bad = {name: row for name, row in found.items() if isinstance(row, turns.Failed)}
    for name, row in bad.items():
        say(f"no number for {name}: {row.reason}")
    if not good:
        raise UserError(
            f"nothing could be measured: {next(iter(bad.values())).reason}. Measure fewer or smaller points."
        )
    return good


def by_point(good: dict[str, turns.Measured]) -> dict[str, Any]:
    """What the JSON says of each point by its name: its raw samples, and the flags that its processes had."""
    raw = {name: measured.blocks for name, measured in good.items()}
    return {"samples": raw, "flags": {name: measured.flags for name, measured in good.items()}}


def samples(measured: turns.Measured) -> dict[str, list[float]]:
    """What was measured, round by round."""
    return {
        "steps_per_s": [block["steps_per_s"] for block in measured.blocks],
        "cpu_us_per_step": [1e6 * block["cpu_seconds"] / block["steps"] for block in measured.blocks],
    }


def columns(measured: turns.Measured, frame_skip: int) -> dict[str, float]:
    """The columns of throughput and of work."""
    found = samples(measured)
    frames = [speed * frame_skip for speed in found["steps_per_s"]]
    return {
        **spread("steps_per_s", found["steps_per_s"]),
        **spread("frames_per_s", frames),
        **spread("cpu_us_per_step", found["cpu_us_per_step"]),
    }


def headline(steps_per_s: float, cores: int, steps_per_update: int) -> dict[str, Any]:
    """One point of a figure, as `podracer bench cost` and `predict` read it from the JSON."""
    return {"steps_per_s": steps_per_s, "num_cores": cores, "update_s": steps_per_update / steps_per_s}


def spread(name: str, values: list[float]) -> dict[str, float]:
    """The columns of one quantity."""
    return {f"{name}_{which}": value for which, value in turns.Spread.of(values)._asdict().items()}


def numbers(flag: str, text: str) -> list[int]:
    """`16,32` as numbers, each once, in order.

    Raises:
      UserError: it is something else.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() and int(word) for word in words):
        raise UserError(f"{flag} is '{text}'; expected whole numbers >= 1 with commas, such as 16,32. Change {flag}.")
    return sorted({int(word) for word in words})


def named(options: Workload) -> str:
    """Agent and environment, in words."""
    short = lambda name: name.rpartition(":")[2] if ".py:" in name else name
    return f"{short(options.agent)} on {short(options.env)}"


def say(text: str) -> None:
    """Progress, for whoever waits."""
    print(text, file=sys.stderr, flush=True)
