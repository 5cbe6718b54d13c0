"""The subcommands of `podracer`, each a function of its command-line arguments."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
import os
import pathlib
import sys
from typing import Annotated, Any, Literal

from launch.parse import parse, take, take_options
from podracer import config, envs, mesh, plugins, presets, runs
from podracer.errors import UserError, check_number, closest

Platform = Literal["cpu", "gpu", "tpu"]


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where a command runs."""

    cores: str = "auto"
    """How many cores; auto takes all of an accelerator, or one virtual core per physical core of a CPU."""
    platform: Platform | None = None
    """cpu, gpu or tpu; None takes what is there."""

    def start(self) -> int | None:
        """Start JAX; the number of cores, or None for all."""
        number = None
        if self.cores != "auto":
            if not self.cores.isdigit():
                raise UserError(f"--cores is '{self.cores}'; expected auto or a number. Leave it out for all cores.")
            number = int(self.cores)
            check_number("--cores", number, minimum=1)
        mesh.start_backend(self.platform, number)
        use_compilation_cache()
        return number


def use_compilation_cache() -> None:
    """Keep compiled programs between commands, in the user's cache folder: the second start is fast."""

    import jax

    if jax.config.jax_compilation_cache_dir is None:  # type: ignore  # JAX's own variable, or whoever calls this, comes first
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        jax.config.update("jax_compilation_cache_dir", os.path.join(base, "podracer", "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def train(arguments: list[str]) -> None:
    """`podracer train ARCHITECTURE --env ENV --agent AGENT [OPTIONS]`."""
    architectures = ("anakin",)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: podracer train {{{','.join(architectures)}}} --env ENV --agent AGENT [OPTIONS]\n")
        print("`podracer train anakin --env ENV --agent AGENT --help` lists the options of that agent.")
        return
    if arguments[0] not in architectures:
        name = arguments[0]
        if name == "sebulba":
            raise UserError("train sebulba is not there yet; expected anakin. From Python, see sebulba/loop.py.")
        raise UserError(f"unknown architecture '{name}'.{closest(name, architectures)} Expected anakin.")
    _train_anakin(arguments[1:])


def _train_anakin(arguments: list[str]) -> None:
    import anakin

    env_name, arguments = take(arguments, "env", "catch")
    agent_name, arguments = take(arguments, "agent", "ppo")
    network_name, arguments = take(arguments, "network")
    preset_name, arguments = take(arguments, "preset", "auto")
    env_options, arguments = take_options(arguments, "env")
    assert env_name and agent_name and preset_name
    maker = config.agent_maker(agent_name)
    preset = _preset(preset_name, env_name, agent_name)
    agent_config = config.default_of(maker, "config")
    network = config.default_of(maker, "network")
    settings = anakin.Settings()
    if preset is not None:
        agent_config = dataclasses.replace(agent_config, **preset.config)
        settings = dataclasses.replace(settings, **preset.settings)
        if network_name is None and preset.network is not None:
            network = dataclasses.replace(config.network_recipe(preset.network), **preset.network_config)
    if network_name is not None:
        network = config.network_recipe(network_name)
        if config.default_of(maker, "network") is None:
            raise UserError(f"agent {agent_name} takes no network; expected one with a `network` argument.")

    names = {
        "env": (
            "Environment: a name of `podracer envs`, or path.py:Object. --env.OPTION VALUE sets its options.",
            env_name,
        ),
        "agent": ("Agent: a name of `podracer agents`, or path.py:Object.", agent_name),
        "network": (f"Network: {', '.join(config.NETWORKS)}, or path.py:Object.", network_name),
        "preset": (f"Settings that were run: {', '.join(presets.PRESETS)}; auto takes what fits.", preset_name),
    }
    kind = _flags(names, settings, agent_config, network)
    description = _train_description(env_name, agent_name, preset)
    options = parse(kind, arguments, "podracer train anakin", description)
    settings_type = {field.name for field in dataclasses.fields(anakin.Settings)}
    settings = anakin.Settings(**{name: getattr(options, name) for name in settings_type})
    directory = pathlib.Path(options.run) if options.run else _default_directory(env_name, agent_name)
    runs.check_new(directory)
    cores = Machine(options.cores, options.platform).start()

    agent_config, network = getattr(options, "agent", None), getattr(options, "network", network)
    references = [env_name, agent_name, network_name]
    env, agent = _with_blame(references, lambda: _build(env_name, env_options, maker, agent_config, network))
    recipe = config.Recipe(
        env=_absolute(env_name),
        env_options=env_options,
        agent=_absolute(agent_name),
        agent_config=None if agent_config is None else dataclasses.asdict(agent_config),
        network=_absolute(network_name) if network_name else config.network_name(network),
        network_config=dataclasses.asdict(network) if dataclasses.is_dataclass(network) else None,
    )
    notes = [] if preset is None else [f"preset {_preset_name(preset)} (--preset none leaves it out)"]
    run = _with_blame(
        references,
        lambda: anakin.train(agent, env, settings, cores=cores, run_dir=directory, recipe=recipe, notes=notes),
    )
    _report(run)


def resume(arguments: list[str]) -> None:
    """`podracer resume RUN [OPTIONS]`."""
    import anakin

    @dataclasses.dataclass(frozen=True)
    class Options(Machine):
        total_steps: int | None = None
        """Another end for the run; None keeps its own."""

    directory, rest = _run_directory(arguments, "resume", Options, "Go on with a run from its newest checkpoint.")
    options = parse(Options, rest, "podracer resume RUN", "Go on with a run from its newest checkpoint.")
    check_number("--total-steps", options.total_steps, minimum=1)
    recipe = config.read_recipe(directory)
    cores = options.start()
    run = _with_blame(
        [recipe.env, recipe.agent, recipe.network],
        lambda: anakin.resume(directory, cores=cores, total_steps=options.total_steps),
    )
    _report(run)


@dataclasses.dataclass(frozen=True)
class EvalOptions:
    """Options of `eval`."""

    episodes: int = 128
    """How many episodes, one per environment."""
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
    platform: Platform | None = None
    """cpu, gpu or tpu; None takes what is there."""


def evaluate(arguments: list[str]) -> None:
    """`podracer eval RUN [OPTIONS]`."""
    from podracer.evaluate import Evaluator

    text = "Measure a trained agent."
    directory, rest = _run_directory(arguments, "eval", EvalOptions, text)
    options = parse(EvalOptions, rest, "podracer eval RUN", text)
    check_number("--episodes", options.episodes, minimum=1)
    check_number("--max-steps", options.max_steps, minimum=1)
    check_number("--seed", options.seed, minimum=0, maximum=2**32 - 1)
    agent, env, params, members, steps = _load(directory, options.params, options.member, options.platform)
    many = members is not None
    recipe, settings = config.read_recipe(directory), config.read(directory)["settings"]
    evaluator = Evaluator(agent, env, options.episodes, options.max_steps, options.greedy, many=many)
    summary = evaluator(params, options.seed).summary()
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


@dataclasses.dataclass(frozen=True)
class RenderOptions:
    """Options of `render`."""

    out: str | None = None
    """File to write, .gif or .mp4; None: RUN/play.gif."""
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
    directory, rest = _run_directory(arguments, "render", RenderOptions, text)
    options = parse(RenderOptions, rest, "podracer render RUN", text)
    out = pathlib.Path(options.out) if options.out else directory / "play.gif"
    pictures.check_out(out)
    check_number("--episodes", options.episodes, minimum=1)
    check_number("--max-steps", options.max_steps, minimum=1)
    check_number("--frames-per-s", options.frames_per_s, minimum=0, exclusive=True)
    agent, env, params, _, _ = _load(directory, options.params, options.member or 0, options.platform)
    recipe = config.read_recipe(directory)
    frames = _with_blame(
        [recipe.env], lambda: pictures.play(agent, env, params, options.episodes, options.max_steps, options.seed)
    )
    pictures.write(out, frames, options.frames_per_s)
    print(f"{out}: {len(frames)} frames")


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


def list_envs(arguments: list[str]) -> None:
    """`podracer envs`."""
    _no_options(arguments, "envs", "List the environments that --env takes.")
    rows = [*envs.names(), ("path.py:Object", "an environment of yours: an object, class or function in a file")]
    width = max(len(name) for name, _ in rows) + 2
    for name, text in rows:
        print(f"{name:<{width}}{text}")


def list_agents(arguments: list[str]) -> None:
    """`podracer agents`."""
    _no_options(arguments, "agents", "List the agents that --agent takes.")
    for name, maker in sorted(config.AGENTS.items()):
        print(f"{name:<28}{(sys.modules[maker.__module__].__doc__ or '').splitlines()[0]}")
    print(f"{'path.py:Object':<28}an agent of yours: a function (spec) -> Agent in a file")


def demo(arguments: list[str]) -> None:
    """`podracer demo [OPTIONS]`."""
    from launch import demo as show

    show.main(arguments)


def _flags(names: dict[str, tuple[str, str | None]], settings: Any, agent_config: Any, network: Any) -> type:
    """A dataclass with the fields of `settings`, and `--agent.*` and `--network.*`, as tyro reads it.

    `names` (help, value) were taken before parsing, because the other flags depend on them; `--help` lists them first.
    """
    import tyro

    def flag(field: dataclasses.Field, default: Any, kind: Any, text: str | None) -> tuple:
        return field.name, Annotated[kind, tyro.conf.arg(help=text)], dataclasses.field(default=default)

    import typing

    hints = typing.get_type_hints(type(settings))
    docs = _field_texts(type(settings))
    fields: list[tuple] = [
        (f"{name}_", Annotated[str | None, tyro.conf.arg(name=name, help=text)], dataclasses.field(default=value))
        for name, (text, value) in names.items()
    ]
    fields += [
        flag(field, getattr(settings, field.name), hints[field.name], docs.get(field.name))
        for field in dataclasses.fields(settings)
    ]
    extra = {
        "run": ("Directory of the run; must not exist. None: runs/ENV-AGENT-DATE.", str | None, None),
        "cores": (_field_texts(Machine)["cores"], str, "auto"),
        "platform": (_field_texts(Machine)["platform"], Platform | None, None),
    }
    for name, (text, kind, default) in extra.items():
        fields.append((name, Annotated[kind, tyro.conf.arg(help=text)], dataclasses.field(default=default)))
    for name, value in {"agent": agent_config, "network": network}.items():
        if dataclasses.is_dataclass(value):
            fields.append((name, type(value), dataclasses.field(default=value)))
    return dataclasses.make_dataclass("Options", fields, frozen=True)


def _field_texts(kind: type) -> dict[str, str]:
    """The string below each field of a dataclass."""
    import ast
    import inspect
    import textwrap

    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body  # type: ignore[attr-defined]
    texts = {}
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            texts[field.target.id] = str(text.value.value)  # type: ignore[union-attr]
    return texts


def _preset(name: str, env: str, agent: str) -> presets.Preset | None:
    if name == "none":
        return None
    if name == "auto":
        found = presets.find(env, agent)
        return None if found is None else found[1]
    if name not in presets.PRESETS:
        known = [*presets.PRESETS, "auto", "none"]
        raise UserError(f"unknown preset '{name}'.{closest(name, known)} There are {', '.join(known)}.")
    preset = presets.PRESETS[name]
    if not preset.fits(env, agent):
        raise UserError(
            f"preset {name} is for {preset.agent} on {preset.env}, not {agent} on {env}. "
            "Choose another --preset, or none."
        )
    return preset


def _train_description(env: str, agent: str, preset: presets.Preset | None) -> str:
    used = f"preset {_preset_name(preset)}" if preset else "no preset"
    return (
        f"Train {agent} on {env} with environment and learner in one compiled program. "
        f"The defaults below are those of this agent and environment ({used})."
    )


def _preset_name(preset: presets.Preset) -> str:
    return next(name for name, known in presets.PRESETS.items() if known is preset)


def _default_directory(env: str, agent: str) -> pathlib.Path:
    def short(name: str) -> str:
        return pathlib.Path(name.partition(":")[0]).stem if ".py" in name else name.replace("/", "-")

    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return pathlib.Path("runs") / f"{short(env)}-{short(agent)}-{now}"


def _run_directory(arguments: list[str], command: str, kind: type, text: str) -> tuple[pathlib.Path, list[str]]:
    """The RUN of a command and its other arguments; `--help` prints and exits."""
    if {"-h", "--help"} & set(arguments):
        parse(kind, ["--help"], f"podracer {command} RUN", text)
    if not arguments or arguments[0].startswith("-"):
        raise UserError(f"{command} needs a run directory; expected podracer {command} RUN [OPTIONS].")
    directory = pathlib.Path(arguments[0])
    config.read(directory)
    return directory, arguments[1:]


def _load(
    directory: pathlib.Path, which: str, member: int | None, platform: str | None
) -> tuple[Any, Any, Any, int | None, Any]:
    """`(agent, env, params, members, steps)` of a run directory; members is None where the params are of one run.

    `steps` is when the params were current, a list with many members.
    """
    import jax

    from podracer.checkpoint import Checkpoints

    recipe = config.read_recipe(directory)
    settings = config.read(directory)["settings"]
    mesh.start_backend(platform, 1)
    use_compilation_cache()
    agent, env = _with_blame([recipe.env, recipe.agent, recipe.network], lambda: config.build(recipe))
    like = jax.eval_shape(agent.initial_learner_state, jax.random.key(0)).params
    many = settings.get("seeds", 1) > 1 or bool(settings.get("sweep"))
    best = Checkpoints(directory / "best", 1)
    found = best if which == "best" and best.steps() else Checkpoints(directory / "checkpoints")
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


def _with_blame(references: list[str | None], function: Any) -> Any:
    """Call `function`; an exception that passes through a file of the user's becomes one that names their line."""
    import traceback

    try:
        return function()
    except UserError:
        raise
    except Exception as error:
        mine = [r for r in references if r is not None and plugins.is_reference(r)]
        frames = {pathlib.Path(f.filename).resolve() for f in traceback.extract_tb(error.__traceback__)}
        for reference in mine:
            if pathlib.Path(reference.rpartition(":")[0]).resolve() in frames:
                with plugins.blame(reference):
                    raise
        if isinstance(error, runs.NonFiniteLoss):
            print(f"podracer: {error}", file=sys.stderr)
            sys.exit(1)
        raise


def _build(name: str, options: dict[str, Any], maker: Any, agent_config: Any, network: Any) -> tuple[Any, Any]:
    """`(environment, agent)`, traced once: values of the wrong kind may fail anywhere below."""
    import jax

    try:
        env = envs.make(name, **options)
        jax.eval_shape(env.reset, jax.random.key(0))
        agent = config.make_agent(env.spec, maker, agent_config, network)
        jax.eval_shape(agent.initial_learner_state, jax.random.key(0))
    except (TypeError, ValueError, ArithmeticError) as error:
        if isinstance(error, UserError):
            raise
        if options and not plugins.is_reference(name):
            given = ", ".join(f"{key} = {value!r}" for key, value in options.items())
            raise UserError(f"{name} does not work with {given}: {_first_line(error)} Change --env.*.") from error
        if config.network_name(network) is not None:
            raise UserError(
                f"no weights can be made for {network}: {_first_line(error)} Change --network.*."
            ) from error
        raise
    return env, agent


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0].rstrip('.')}."


def _absolute(name: str) -> str:
    """`path.py:Object` with the path from the root, so that a run directory works from anywhere; other names as is."""
    if not plugins.is_reference(name):
        return name
    path, _, found = name.rpartition(":")
    return f"{pathlib.Path(path).absolute()}:{found}"


def _pick(value: Any, member: int) -> Any:
    return value[member] if isinstance(value, list) else value


def _no_options(arguments: list[str], command: str, text: str) -> None:
    if {"-h", "--help"} & set(arguments):
        print(f"usage: podracer {command}\n\n{text}")
        sys.exit(0)
    if arguments:
        raise UserError(f"{command} takes no options; got '{arguments[0]}'. Write podracer {command}.")


def _report(run: Any) -> None:
    """What a finished run came to."""
    import numpy as np

    score = "" if run.best_score is None else f"; best evaluation {np.mean(run.best_score):.2f}"
    if run.absolute_score is not None:
        score += f", measured again on {run.metrics['absolute_episodes']} episodes {np.mean(run.absolute_score):.2f}"
        score += f" (means of {run.absolute_score.size} runs)" if run.absolute_score.size > 1 else ""
    print(f"{run.directory}: {run.steps:,} steps{score}")
    drawn = hasattr(run.loop.batch.env, "render")
    print(
        "next:",
        *(f"  podracer {do} {run.directory}" for do in ("eval", "render", "plot") if drawn or do != "render"),
        sep="\n",
    )
