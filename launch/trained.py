"""The commands on what was trained: `eval`, `render`, `plot`."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any, Literal

from launch.compiled import use_compilation_cache
from launch.machine import Platform, run_directory, with_blame
from launch.parse import parse
from podracer import config, envs, mesh
from podracer.errors import UserError, check_number


@dataclasses.dataclass(frozen=True)
class EvalOptions:
    """Options of `eval`."""

    episodes: int | None = None
    """How many episodes, one per environment; None: 128, or 20 whole games where the environment is on the host."""
    greedy: bool = True
    """The best action instead of a sampled one."""
    max_steps: int | None = None
    """Steps after which an episode is cut; None: the environment's own limit, or 10,000."""
    seed: int = 0
    """Seed of the episodes."""
    params: Literal["best", "last"] = "best"
    """The params that evaluated best during the run, or the last ones."""
    member: int | None = None
    """Which run, where many were trained in one program; None: all of them."""
    json: bool = False
    """Print one JSON object instead of words."""
    against: str | None = None
    """Play a board game against: random, mcts:SIMULATIONS, minimax (tic-tac-toe), another RUN, or earlier: all
    checkpoints of this run are rated by games among them."""
    games: int = 100
    """With --against: games per opponent, the agent moving first in half of them."""
    simulations: int | None = None
    """With --against: simulations per move of the agent's search; None: as it was trained."""
    platform: Platform | None = None
    """cpu, gpu or tpu; None takes what is there."""


def evaluate(arguments: list[str]) -> None:
    """`podracer eval RUN [OPTIONS]`."""
    from podracer.evaluate import evaluator

    text = "Measure a trained agent."
    directory, rest = run_directory(arguments, "eval", EvalOptions, text)
    options = parse(EvalOptions, rest, "podracer eval RUN", text)
    check_number("--episodes", options.episodes, minimum=1)
    check_number("--max-steps", options.max_steps, minimum=1)
    check_number("--seed", options.seed, minimum=0, maximum=2**32 - 1)
    if options.against is not None:
        _against(directory, options)
        return
    agent, env, params, members, steps = load(directory, options.params, options.member, options.platform)
    many = members is not None
    recipe, settings = config.read_recipe(directory), config.read(directory)["settings"]
    episodes = options.episodes or (20 if envs.is_host(env) else 128)
    measure = evaluator(agent, env, episodes, options.max_steps, options.greedy, many)
    summary = with_blame([recipe.env], lambda: measure(params, options.seed)).summary()
    if options.json:
        print(json.dumps({"run": str(directory), "steps": steps, "greedy": options.greedy, **summary}))
        return
    rows = [summary] if members is None else [{k: _pick(v, m) for k, v in summary.items()} for m in range(members)]
    for number, row in enumerate(rows):
        who = f"{agent.name} on {recipe.env}"
        if many:
            who += f", member {number} ({config.member_name(settings, number)})"
        cut = f", {row['unfinished']} cut at the step cap" if row["unfinished"] else ""
        print(
            f"{who}, {options.params} params (step {_pick(steps, number):,}): "
            f"return {row['return_mean']:.2f} +- {row['return_std']:.2f} "
            f"(min {row['return_min']:.2f}, max {row['return_max']:.2f}), "
            f"length {row['length_mean']:.1f}, {row['episodes']} episodes{cut}"
        )


def _against(directory: pathlib.Path, options: EvalOptions) -> None:
    from launch.matches import against

    def one_run(directory):
        agent, env, params, _, steps = load(directory, options.params, options.member or 0, options.platform)
        return agent, env, params, steps

    against(directory, options, one_run)


@dataclasses.dataclass(frozen=True)
class RenderOptions:
    """Options of `render`."""

    out: str | None = None
    """File to write, .gif or .mp4; None: RUN/play.gif. With --tree .png, .svg or .pdf; None: RUN/tree.png."""
    tree: bool = False
    """Draw the search tree behind one decision instead, of an agent that plans."""
    decision: int = 0
    """With --tree: which decision, counted from 0."""
    episodes: int = 3
    """How many episodes."""
    max_steps: int = 500
    """At most this many steps in all."""
    frames_per_s: float = 30.0
    """Speed of the picture."""
    seed: int = 0
    """Seed of the episodes."""
    params: Literal["best", "last"] = "best"
    """The params that evaluated best during the run, or the last ones."""
    member: int | None = None
    """Which run, where many were trained in one program; None: the first."""
    platform: Platform | None = None
    """cpu, gpu or tpu; None takes what is there."""


def render(arguments: list[str]) -> None:
    """`podracer render RUN [OPTIONS]`."""
    from podracer import render as pictures

    text = "Draw a trained agent playing, as GIF or MP4."
    directory, rest = run_directory(arguments, "render", RenderOptions, text)
    options = parse(RenderOptions, rest, "podracer render RUN", text)
    if options.tree:
        return _render_tree(directory, options)
    out = pathlib.Path(options.out) if options.out else directory / "play.gif"
    pictures.check_out(out)
    check_number("--episodes", options.episodes, minimum=1)
    check_number("--max-steps", options.max_steps, minimum=1)
    check_number("--frames-per-s", options.frames_per_s, minimum=0, exclusive=True)
    agent, env, params, _, _ = load(directory, options.params, options.member or 0, options.platform)
    recipe = config.read_recipe(directory)
    frames = with_blame(
        [recipe.env], lambda: pictures.play(agent, env, params, options.episodes, options.max_steps, options.seed)
    )
    pictures.write(out, frames, options.frames_per_s)
    print(f"{out}: {len(frames)} frames")


def _render_tree(directory: pathlib.Path, options: RenderOptions) -> None:
    """`podracer render RUN --tree`."""
    import itertools

    import jax

    from muzero import picture
    from podracer import plot, render

    out = pathlib.Path(options.out) if options.out else directory / "tree.png"
    plot.check_out(out)
    check_number("--decision", options.decision, minimum=0)
    agent, env, params, _, _ = load(directory, options.params, options.member or 0, options.platform)
    recipe = config.read_recipe(directory)
    if agent.search is None:
        raise UserError(f"{agent.name} does not plan: there is no tree to draw. Leave --tree out.")
    moments = render.moments(agent, env, params, options.seed)
    moment = with_blame([recipe.env], lambda: next(itertools.islice(moments, options.decision, None)))
    output, tree = jax.jit(agent.search)(params, moment.actor, moment.timestep, moment.key)
    chosen = int(output.action[0])
    plot.save(picture.draw(tree, chosen=chosen), out)
    print(f"{out}: decision {options.decision}, action {chosen}")


@dataclasses.dataclass(frozen=True)
class PlotOptions:
    """Options of `plot`."""

    out: str = "learning-curves.png"
    """File to write, .png, .svg or .pdf."""
    metric: str = "return_mean"
    """Which number of metrics.jsonl."""
    x: Literal["steps", "frames", "train_s", "updates"] = "steps"
    """What the horizontal axis counts."""
    title: str | None = None
    """Title of the picture."""


def plot(arguments: list[str]) -> None:
    """`podracer plot RUN [RUN ...] [OPTIONS]`."""
    from podracer import plot as curves

    text = "Learning curves of runs. Runs that differ only in their seed become one curve with a 95 % confidence band."
    split = next((i for i, argument in enumerate(arguments) if argument.startswith("-")), len(arguments))
    if not split and not {"-h", "--help"} & set(arguments):
        raise UserError("plot needs run directories; expected podracer plot RUN [RUN ...] [OPTIONS].")
    options = parse(PlotOptions, arguments[split:], "podracer plot RUN [RUN ...]", text)
    directories = [pathlib.Path(argument) for argument in arguments[:split]]
    print(curves.plot(directories, pathlib.Path(options.out), options.metric, options.x, options.title))


def load(
    directory: pathlib.Path, which: str, member: int | None, platform: str | None
) -> tuple[Any, Any, Any, int | None, Any]:
    """`(agent, env, params, members, steps)` of a run directory; members is None where the params are of one run.

    `steps` is when the params were current, a list with many members.
    """
    import jax

    from podracer.saving import open_checkpoints

    recipe = config.read_recipe(directory)
    settings = config.read(directory)["settings"]
    mesh.start_backend(platform, 1)
    use_compilation_cache()
    agent, env = with_blame([recipe.env, recipe.agent, recipe.network], lambda: config.build(recipe))
    like = jax.eval_shape(agent.initial_learner_state, jax.random.key(0)).params
    many = settings.get("seeds", 1) > 1 or bool(settings.get("sweep"))
    best = open_checkpoints(directory, "best", 1)
    found = best if which == "best" and best.names() else open_checkpoints(directory)
    meta, members = found.meta(), None
    steps = meta.get("chosen_at", meta["steps"])
    if many:
        members = len(meta["score"]) if "score" in meta else len(meta["windows"])
        steps = steps if isinstance(steps, list) else [steps] * members
        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((members, *leaf.shape), leaf.dtype), like)
    elif member:
        raise UserError(f"--member is {member}, but {directory} holds one run. Leave it out.")
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), like)
    params = found.params(like)
    for checkpoints in (best, found):
        checkpoints.close()
    if members is not None and member is not None:
        if not 0 <= member < members:
            raise UserError(f"--member is {member}; expected 0 to {members - 1}, the runs in {directory}.")
        params, members, steps = jax.tree.map(lambda leaf: leaf[member], params), None, steps[member]
    return agent, env, params, members, steps


def _pick(value: Any, member: int) -> Any:
    return value[member] if isinstance(value, list) else value
