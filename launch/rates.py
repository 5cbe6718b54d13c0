"""How fast training is, and who says so: given on the command line, read from a run, or measured here and now."""

from __future__ import annotations

import itertools
import json
import pathlib
import statistics
import time
from typing import Any, NamedTuple

from podracer import config, plugins
from podracer.errors import UserError, check_number

FROM = "A run directory, or a JSON file of podracer bench, to take the measurement from."  # help of --from
TWO = "--steps-per-s and --from are both given; expected one measurement. Leave one out."

BATCH_PER_CORE, UPDATES = 256, 20  # of a measurement here


class Rate(NamedTuple):
    """A measured speed of training."""

    steps_per_s: float  # agent steps that were learned from
    frame_skip: int  # frames per step
    cores: int | None  # that made it, of all hosts; None where nobody said
    update_s: float | None  # length of one update
    params_bytes: int | None
    source: str  # whose measurement it is, and on what, in words
    reduces: int | None = None  # sums of gradients over the cores per update; None where nobody said

    @property
    def frames_per_s(self) -> float:
        return self.steps_per_s * self.frame_skip


def given(steps_per_s: float, frame_skip: int, cores: int | None = None) -> Rate:
    """What the user says.

    Raises:
      UserError: it is no speed.
    """
    check_number("--steps-per-s", steps_per_s, minimum=0, exclusive=True)
    return Rate(steps_per_s, frame_skip, cores, None, None, "your measurement (--steps-per-s); not checked here")


def read(path: pathlib.Path) -> Rate:
    """What a run directory says, or a JSON file that has `steps_per_s` in it or in the CSV beside it.

    Raises:
      UserError: there is no speed in it.
    """
    return of_run(path)._replace(params_bytes=_params_bytes(path)) if path.is_dir() else _from_json(path)


def of_run(path: pathlib.Path) -> Rate:
    """How fast a run was on the cores that it had last, without the size of its parameters.

    Raises:
      UserError: it has not trained yet.
    """
    content = config.read(path)
    rows = _rows(path / "metrics.jsonl")
    if not rows:
        raise UserError(
            f"{path} has no row with steps_per_s yet; expected a run that has trained. Choose another --from."
        )
    last = rows[-1]
    # A run that went on on other cores has rows of another speed before these.
    mine = list(itertools.takewhile(lambda row: row.get("num_cores") == last.get("num_cores"), reversed(rows)))
    # The first row of several may still hold what only happens once.
    speed = statistics.median(row["steps_per_s"] for row in (mine[:-1] or mine))
    skip = max(round(last.get("frames", last["steps"]) / max(last["steps"], 1)), 1)
    steps, updates = (last.get(name, 0) - mine[-1].get(name, 0) or last.get(name, 0) for name in ("steps", "updates"))
    update_s = steps / updates / speed if updates > 0 else None
    cores = last.get("num_cores", content.get("num_cores"))
    when = str(content.get("started", "date unknown"))[:10]
    devices = content.get("devices", "devices unknown")
    if cores != content.get("num_cores"):
        devices += f", later {cores} cores"
    settings = content.get("settings") or {}
    if settings.get("seeds", 1) > 1 or settings.get("sweep"):
        update_s = None  # many runs at once, each with the updates of one
    source = f"measured by the run {path.name} on {devices}, {when}"
    return Rate(speed, skip, cores, update_s, None, source, _reduces(content))


def _reduces(content: dict[str, Any]) -> int | None:
    """By the recipe in what a run or a measurement says of itself."""
    recipe = content.get("recipe") or {}
    name = recipe.get("agent", "")
    if plugins.is_reference(name):  # a file of the user's, which may say anything
        return None
    try:
        default = config.default_of(config.agent_maker(name), "config")
    except UserError:  # of a library that is not here
        return None
    chosen = recipe.get("agent_config") or {}
    epochs, minibatches = (chosen.get(name, getattr(default, name, None)) for name in ("epochs", "minibatches"))
    return epochs * minibatches if epochs and minibatches else None


def _rows(path: pathlib.Path) -> list[dict[str, Any]]:
    rows = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue  # half of a line, of a run that was killed
        if isinstance(row, dict) and row.get("steps_per_s") and row.get("steps"):
            rows.append(row)
    return rows


def _params_bytes(path: pathlib.Path) -> int | None:
    """Bytes of the params of a run, from its recipe; None where it was made from Python objects."""
    import jax

    import muzero  # noqa: F401  # its agents get their names

    try:
        agent, _ = config.build(config.read_recipe(path))
    except UserError:
        return None
    params = jax.eval_shape(agent.initial_learner_state, jax.random.key(0)).params
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))


def _from_json(path: pathlib.Path) -> Rate:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"--from {path} does not exist; expected a run directory or a JSON file.") from None
    except (ValueError, OSError) as error:
        raise UserError(f"--from {path} is not readable JSON ({error}). Choose another --from.") from None
    content = content if isinstance(content, dict) else {}
    speed = content.get("steps_per_s")
    if not isinstance(speed, int | float) or isinstance(speed, bool) or not 0 < speed < float("inf"):
        raise UserError(f"--from {path} has no steps_per_s above 0. Choose another --from.")
    skip, update_s = content.get("frame_skip") or 1, content.get("update_s")
    source = f"measured in {path.name} on {content.get('devices', 'devices unknown')}"
    cores, size = content.get("num_cores"), content.get("params_bytes")
    return Rate(float(speed), int(skip), cores, update_s, size, source, _reduces(content))


def measure(env_name: str, agent_name: str, seconds: float, cores: int | None = None) -> Rate:
    """Train on Anakin here, on so many cores, for so long; median of the calls after the first two.

    Raises:
      UserError: there is no such environment or agent, or it does not compile.
    """
    import jax

    import anakin
    from podracer import envs, mesh

    env = envs.make(env_name)
    if envs.is_host(env):
        how = "podracer bench sweep --architecture sebulba"
        raise UserError(f"--env {env_name} steps on the host; measure it with {how}, then give --from.")
    agent = config.make_agent(env.spec, config.agent_maker(agent_name))
    loop = anakin.Anakin(agent, env, BATCH_PER_CORE, unroll_length=20, updates_per_call=UPDATES, num_cores=cores)
    state, laps, until = loop.init(0), [], float("inf")
    while time.perf_counter() < until or len(laps) < 3:
        began = time.perf_counter()
        state, metrics = loop.step(state)
        jax.block_until_ready(metrics)
        ended = time.perf_counter()
        if until == float("inf"):  # the first call compiles
            until = ended + seconds
        else:
            laps.append(ended - began)
    lap = statistics.median(laps[1:])
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state.learner.params))
    source = f"measured here and now: {agent_name} on {env_name}, Anakin, {mesh.describe(list(loop.mesh.devices.flat))}"
    steps_per_s = loop.steps_per_call / lap
    return Rate(steps_per_s, env.spec.frame_skip, loop.num_cores, lap / UPDATES, size, source)
