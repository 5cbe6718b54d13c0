"""One process of a figure of `podracer bench`; what it says on its pipes is in `launch/blocks.py`.

It builds what `podracer train` would build from the same names and settings, and trains in blocks. With `{"cpu": tasks,
"elsewhere": tasks}` it measures nothing: it builds and traces each task of the list for the platform that it finds, and
answers with one line of what there is, or of what is wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
from typing import Any

from launch import blocks
from podracer import hosts
from podracer.errors import UserError

HEARTBEAT_S = 86_400  # a process that waits for its turn, or is frozen, has not died


@dataclasses.dataclass(frozen=True)
class Task:
    """What is measured."""

    architecture: str
    recipe: dict[str, Any]  # see `podracer.config.Recipe`
    settings: dict[str, Any]  # of the architecture
    cores: int | None = None  # of each process; None: all
    platform: str | None = None
    environments_alone: bool = False
    seconds: float = 5.0  # of a block
    cpus: tuple[int, ...] = ()  # that the process is pinned to
    host: int = 0  # which of `hosts` processes this is
    hosts: int = 1
    coordinator: str = ""  # address:port of the first one

    def json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def main(arguments: list[str]) -> None:
    say, given = blocks.take_stdout(), json.loads(arguments[0])
    if "cpu" in given:
        try:
            say(look(**given))
        except UserError as error:
            say({"error": str(error)})
        return
    task = Task(**given)
    if task.cpus:
        os.sched_setaffinity(0, task.cpus)
    if task.hosts > 1:
        hosts.connect(task.coordinator, task.hosts, task.host, heartbeat_s=HEARTBEAT_S)
    else:
        hosts.connect()  # a slice, where this is started on each of its hosts
    start(task.platform, task.cores)
    serve(task, say)


def start(platform: str | None, cores: int | None) -> None:
    """Start JAX as the commands do."""
    import muzero  # noqa: F401  # its agents get their names
    from launch.compiled import use_compilation_cache
    from podracer import mesh

    mesh.start_backend(platform, cores)
    use_compilation_cache()


def serve(task: Task, say: blocks.Say) -> None:
    """Measure."""
    config = dataclasses.asdict(task)
    if task.environments_alone:
        blocks.serve(lambda: {"": alone(task)}, config, task.seconds, say)
    elif task.architecture == "sebulba":
        blocks.serve_sebulba(lambda: build(task), config, task.seconds, say)
    else:
        blocks.serve_anakin(lambda: build(task), config, task.seconds, say)


def build(task: Task) -> Any:
    """The loop, as `podracer train` builds it."""
    from launch.machine import with_blame
    from podracer import config

    recipe = config.Recipe(**task.recipe)
    settings = importlib.import_module(f"{task.architecture}.settings")
    given = task.settings | ({"stall_timeout": blocks.NEVER_S} if task.architecture == "sebulba" else {})

    def make() -> Any:
        agent, env = config.build(recipe)
        return settings.build_loop(agent, env, settings.Settings(**given), task.cores if task.hosts == 1 else None)

    return with_blame([recipe.env, recipe.agent, recipe.network], make)


def alone(task: Task) -> Any:
    """A function that measures the environments with random actions, from as many threads as the training has."""
    from sebulba import measure

    loop = build(task)
    return functools.partial(measure.ceiling, loop.env, loop.topology.num_threads)


def look(cpu: list[dict[str, Any]] | str, elsewhere: list[dict[str, Any]] | str) -> dict[str, Any]:
    """What a figure must know before it measures; mistakes in any of its tasks show here.

    Raises:
      UserError: one of them cannot work.
    """
    import jax

    from podracer import mesh
    from podracer.facts import environment_facts

    hosts.connect()
    tasks = [Task(**each) for given in (cpu, elsewhere) if not isinstance(given, str) for each in given]
    platform = next((task.platform for task in tasks), None)
    # More virtual cores than a task asks for do no harm; the count is for CPUs alone.
    start(platform, max((task.cores for task in tasks if task.cores is not None), default=None))
    chosen = cpu if jax.default_backend() == "cpu" else elsewhere
    if isinstance(chosen, str):
        raise UserError(chosen)
    loops = [_traced(Task(**each)) for each in chosen]
    spec = loops[0].batch.spec if hasattr(loops[0], "batch") else loops[0].env.spec
    facts = environment_facts(mesh.make()) | {"frame_skip": spec.frame_skip}
    facts |= {"device_kind": jax.devices()[0].device_kind, "local_devices": jax.local_device_count()}
    facts |= {"processors": mesh.physical_cores(), "processes": hosts.count()}
    facts |= {"first_process": hosts.is_first()}
    learner = jax.eval_shape(loops[0].agent.initial_learner_state, jax.random.key(0))
    facts |= {"params_bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(learner.params))}
    return facts


def _traced(task: Task) -> Any:
    """The loop of a task, traced.

    Raises:
      UserError: it cannot be built.
    """
    try:
        loop = build(task)
        loop.check()
    except (TypeError, ValueError, ArithmeticError) as error:
        if isinstance(error, UserError):
            raise
        text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0].rstrip('.')}"
        raise UserError(
            f"{task.recipe['agent']} on {task.recipe['env']} cannot be built ({text}). "
            "Change --agent.*, --env.* or --network."
        ) from error
    return loop
