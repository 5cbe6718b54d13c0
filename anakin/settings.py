"""Settings of a run on Anakin, and the loop they ask for."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Literal

from anakin.loop import Anakin
from anakin.members import Members
from podracer import hosts, mesh
from podracer.envs.batch import Batch
from podracer.envs.host import jittable
from podracer.errors import UserError, check_number
from podracer.settings import RunSettings
from podracer.types import Agent


@dataclasses.dataclass(frozen=True)
class Settings(RunSettings):
    """Settings of a run on Anakin."""

    batch_per_core: int = 64
    """Environments per core."""
    updates_per_call: int | None = None
    """Updates per compiled call; None: about a hundredth of the run."""
    seeds: int = 1
    """Runs with consecutive seeds, trained in one program."""
    sweep: tuple[str, ...] = ()
    """Floats of the agent to vary, as name=v1,v2,...; all combinations train in one program."""
    starts: Literal["fresh", "cached", "optimistic"] = "fresh"
    """Where episodes start: anew, from the first episodes' starts, or anew but few per step."""
    stall_timeout: float = 1800.0
    """Seconds without a finished call that end the run; compiling, evaluating and saving do not count."""
    prng: Literal["threefry2x32", "rbg", "unsafe_rbg"] = "threefry2x32"
    """JAX's random generator."""

    def __post_init__(self):
        super().__post_init__()
        self._check_at_least(1, "batch_per_core", "updates_per_call", "seeds")
        check_number("stall_timeout", self.stall_timeout, minimum=0, exclusive=True)
        check_number("seed", self.seed, minimum=0, maximum=2**32 - self.seeds)


def build_loop(agent: Agent, env: Any, settings: Settings, cores: int | None, over: Any = None) -> Anakin:
    """The loop for these settings, on `cores` cores or on the mesh `over`; nothing is compiled yet."""
    batch = env if isinstance(env, Batch) else Batch(jittable(env), starts=settings.starts)
    members = _members(agent, settings)
    if members is not None and hosts.count() > 1:
        raise UserError(
            f"{len(members)} runs in one program (seeds, sweep) train on one host; there are {hosts.count()}. "
            "Start them on each host by itself, or one run on all."
        )
    over = mesh.make(cores) if over is None else over
    num_cores = mesh.size(over)
    updates = settings.updates_per_call
    if updates is None:
        per_update = settings.batch_per_core * settings.unroll_length * (num_cores if members is None else 1)
        # Short enough for Ctrl-C and the progress bar, long enough that Python does not matter.
        most = 2**18 if mesh.platform() == "cpu" else 2**22
        updates = max(1, min(settings.total_steps // 100, most) // per_update)
    sizes = (settings.batch_per_core, settings.unroll_length, updates)
    return Anakin(agent, batch, *sizes, members=members, prng=settings.prng, over=over)


def _members(agent: Agent, settings: Settings) -> Members | None:
    """The runs that `seeds` and `sweep` ask for: all combinations."""
    if settings.seeds == 1 and not settings.sweep:
        return None
    names: list[str] = []
    choices: list[tuple[float, ...]] = []
    fields = {} if agent.config is None else dataclasses.asdict(agent.config)
    floats = [name for name, value in fields.items() if isinstance(value, float)]
    for item in settings.sweep:
        name, _, values = item.partition("=")
        name = name.strip().replace("-", "_")
        if name not in floats:
            raise UserError(
                f"sweep has '{name}', which is not a float of {agent.name}'s config; "
                f"expected one of {', '.join(floats)}."
            )
        try:
            numbers = tuple(float(value) for value in values.split(","))
        except ValueError:
            raise UserError(f"sweep has '{item}'; expected name=v1,v2,... with numbers.") from None
        assert agent.config is not None  # it has this field
        for number in numbers:
            dataclasses.replace(agent.config, **{name: number})  # the config's own checks
        names.append(name)
        choices.append(numbers)
    if len(set(names)) < len(names):
        raise UserError(f"sweep names a setting twice ({', '.join(names)}); expected each once, with all its values.")
    combinations = list(itertools.product(*choices, range(settings.seeds)))
    floats_of: dict[str, tuple[float, ...]] = {name: tuple(c[i] for c in combinations) for i, name in enumerate(names)}
    return Members(tuple(int(c[-1]) for c in combinations), floats_of)
