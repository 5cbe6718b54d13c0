"""The commands that train: `train` and `resume`."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import pathlib
from typing import Any

from launch import cost, rates
from launch.flags import flags
from launch.machine import Machines, run_directory, with_blame
from launch.parse import default_directory, parse, take, take_options
from podracer import config, envs, hosts, plugins, presets, runs
from podracer.errors import UserError, check_number, closest

ARCHITECTURES = {
    "anakin": "with environment and learner in one compiled program",
    "sebulba": "with environments on the host, cores that act and cores that learn",
}


def train(arguments: list[str]) -> None:
    """`podracer train ARCHITECTURE --env ENV --agent AGENT [OPTIONS]`."""
    asked = read(arguments)
    if asked is None:
        return
    directory, options = asked.directory, asked.options
    if not options.or_resume:
        runs.check_new(directory)
    elif options.run is None:
        raise UserError("--or-resume needs the directory that it may find; expected --run DIRECTORY beside it.")
    per_dollar = None if options.cost_type is None else cost.PerDollar(options.cost_type)
    cores = Machines(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Machines)}).start()
    env, agent = asked.make()
    trainer = importlib.import_module(asked.architecture)
    given = {"cores": cores, "run_dir": directory, "recipe": asked.recipe, "notes": asked.notes}
    given |= {"or_resume": options.or_resume}
    try:
        run = with_blame(asked.references, lambda: trainer.train(agent, env, asked.settings, **given))
        _report(run, per_dollar)
    except runs.Finished as finished:
        if not options.or_resume:
            raise
        print(finished)


@dataclasses.dataclass(frozen=True)
class Training:
    """What the arguments of `train` ask for."""

    architecture: str
    options: Any
    settings: Any
    env_name: str
    agent_name: str
    make: Any
    """() -> (environment, agent), traced once; JAX must have been started."""
    references: list[Any]
    """Names of environment, agent and network, which may be files of the user's."""
    recipe: config.Recipe
    notes: list[str]

    @property
    def directory(self) -> pathlib.Path:
        given = self.options.run
        return pathlib.Path(given) if given else default_directory(self.env_name, self.agent_name)


def read(arguments: list[str], command: str = "podracer train") -> Training | None:
    """The arguments behind `train`; None where they only ask for help, which is printed."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: {command} {{{','.join(ARCHITECTURES)}}} --env ENV --agent AGENT [OPTIONS]\n")
        for name, text in ARCHITECTURES.items():
            print(f"  {name:<9} {text}")
        print(f"\n`{command} ARCHITECTURE --env ENV --agent AGENT --help` lists the options of that agent.")
        return None
    name = arguments[0]
    if name not in ARCHITECTURES:
        expected = " or ".join(ARCHITECTURES)
        raise UserError(f"unknown architecture '{name}'.{closest(name, ARCHITECTURES)} Expected {expected}.")
    return _read(name, arguments[1:], command)


def _read(architecture: str, arguments: list[str], command: str) -> Training:
    trainer = importlib.import_module(architecture)
    preset_name, arguments = take(arguments, "preset", "auto")
    named = presets.PRESETS.get(preset_name or "")
    whole = named is not None and not named.env.endswith("*")
    env_name, arguments = take(arguments, "env", named.env if named and whole else "catch")
    agent_name, arguments = take(arguments, "agent", named.agent if named else "ppo")
    network_name, arguments = take(arguments, "network")
    env_options, arguments = take_options(arguments, "env")
    assert env_name and agent_name and preset_name
    maker = config.agent_maker(agent_name)
    preset = _preset(preset_name, env_name, agent_name)
    if preset is not None:
        env_options = preset.env_options | env_options
    agent_config = config.default_of(maker, "config")
    network = config.default_of(maker, "network")
    if envs.is_host_name(env_name):  # pictures are known before the flags of a network for them are read
        network = config.default_network(maker, envs.make(env_name, **env_options).spec)
    settings = trainer.Settings()
    if preset is not None:
        agent_config = dataclasses.replace(agent_config, **preset.config)
        known = {field.name for field in dataclasses.fields(settings)}
        settings = dataclasses.replace(settings, **{k: v for k, v in preset.settings.items() if k in known})
        if network_name is None and preset.network is not None:
            network = config.network_recipe(preset.network, preset.network_config)
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
    kind = flags(names, settings, agent_config, network)
    description = _train_description(architecture, env_name, agent_name, preset)
    options = parse(kind, arguments, f"{command} {architecture}", description)
    settings_type = {field.name for field in dataclasses.fields(settings)}
    settings = trainer.Settings(**{name: getattr(options, name) for name in settings_type})
    agent_config, network = getattr(options, "agent", None), getattr(options, "network", network)
    references = [env_name, agent_name, network_name]
    make = lambda: build(references, architecture, env_options, maker, agent_config, network)
    recipe = config.Recipe(
        env=_absolute(env_name),
        env_options=env_options,
        agent=_absolute(agent_name),
        agent_config=None if agent_config is None else dataclasses.asdict(agent_config),
        network=_absolute(network_name) if network_name else config.network_name(network),
        network_config=dataclasses.asdict(network) if config.is_record(network) else None,
    )
    notes = [] if preset is None else [f"preset {_preset_name(preset)} (--preset none leaves it out)"]
    make_it = lambda: with_blame(references, make)
    return Training(architecture, options, settings, env_name, agent_name, make_it, references, recipe, notes)


@dataclasses.dataclass(frozen=True)
class AnakinOptions(Machines):
    """Options of `resume` for a run on Anakin."""

    total_steps: int | None = None
    """Another end for the run; None keeps its own."""
    profile: str | None = None
    """Trace the updates START:STOP, counted from 1; None keeps the run's own."""
    metrics_port: int | None = None
    """Serve the newest metrics as Prometheus text on this port of 127.0.0.1; None keeps the run's own."""
    cost_type: str | None = None
    """Machine type, such as v3-8: the end says frames per dollar at its price, at this run's speed."""


@dataclasses.dataclass(frozen=True)
class SebulbaOptions(AnakinOptions):
    """Options of `resume` for a run on Sebulba; what is not given stays as it was."""

    actor_cores: int | None = None
    """Cores that choose actions."""
    threads_per_core: int | None = None
    """Actor threads per actor core."""
    batch_size: int | None = None
    """Environments per actor thread."""
    lag: str | None = None
    """Updates between acting and learning: fixed[:K], sync, bounded:K."""


def resume(arguments: list[str]) -> None:
    """`podracer resume RUN [OPTIONS]`."""
    text = "Go on with a run from its newest checkpoint."
    directory, rest = run_directory(arguments, "resume", SebulbaOptions, text)
    architecture = config.read(directory).get("architecture")
    if architecture not in ARCHITECTURES:
        expected = " or ".join(ARCHITECTURES)
        raise UserError(
            f"{directory}/config.json has the architecture {architecture}; expected {expected}. Restore it."
        )
    kind = SebulbaOptions if architecture == "sebulba" else AnakinOptions
    options = parse(kind, rest, "podracer resume RUN", text)
    check_number("--total-steps", options.total_steps, minimum=1)
    recipe = config.read_recipe(directory)
    own = {field.name for field in dataclasses.fields(kind)} - {field.name for field in dataclasses.fields(Machines)}
    own.remove("cost_type")
    per_dollar = None if options.cost_type is None else cost.PerDollar(options.cost_type)
    changes = {name: getattr(options, name) for name in own if getattr(options, name) is not None}
    cores = options.start()
    run = with_blame(
        [recipe.env, recipe.agent, recipe.network],
        lambda: importlib.import_module(architecture).resume(directory, cores=cores, **changes),
    )
    _report(run, per_dollar)


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


def _train_description(architecture: str, env: str, agent: str, preset: presets.Preset | None) -> str:
    used = f"preset {_preset_name(preset)}" if preset else "no preset"
    return (
        f"Train {agent} on {env}, {ARCHITECTURES[architecture]}. "
        f"The defaults below are those of this agent and environment ({used})."
    )


def _preset_name(preset: presets.Preset) -> str:
    return next(name for name, known in presets.PRESETS.items() if known is preset)


def build(
    references: list[Any], architecture: str, options: dict[str, Any], maker: Any, agent_config: Any, network: Any
) -> tuple[Any, Any]:
    """`(environment, agent)`, traced once: values of the wrong kind may fail anywhere below.

    `references` are the names of the environment, the agent and the network.
    """
    import jax

    name = references[0]
    try:
        env = config.environment_for(maker, envs.make(name, **options))
        if architecture == "anakin" or not envs.is_host(env):
            jax.eval_shape(envs.jittable(env).reset, jax.random.key(0))
        agent = config.make_agent(env.spec, maker, agent_config, network)
        jax.eval_shape(agent.initial_learner_state, jax.random.key(0))
    except (TypeError, ValueError, ArithmeticError) as error:
        if isinstance(error, UserError) or any(plugins.passes_through(each, error) for each in references):
            raise
        if options:
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


def _report(run: Any, per_dollar: cost.PerDollar | None = None) -> None:
    """What a finished run came to."""
    if not hosts.is_first():
        return
    import numpy as np

    from podracer.render import can_draw

    score = "" if run.best_score is None else f"; best evaluation {np.mean(run.best_score):.2f}"
    if run.absolute_score is not None:
        score += f", measured again on {run.metrics['absolute_episodes']} episodes {np.mean(run.absolute_score):.2f}"
        score += f" (means of {run.absolute_score.size} runs)" if run.absolute_score.size > 1 else ""
    print(f"{run.directory}: {run.steps:,} steps{score}")
    if per_dollar is not None:
        with contextlib.suppress(UserError):  # a run without rows has trained all the same
            rate = rates.of_run(run.directory)
            print(per_dollar.line(rate.frames_per_s, rate.frame_skip))
    drawn = can_draw(run.env)
    print(
        "next:",
        *(f"  podracer {do} {run.directory}" for do in ("eval", "render", "plot") if drawn or do != "render"),
        sep="\n",
    )
