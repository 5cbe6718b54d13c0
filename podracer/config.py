"""From names to objects and back: what the command line types, and what `config.json` of a run directory keeps."""

from __future__ import annotations

import dataclasses
import inspect
import json
import pathlib
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, cast

from podracer import agents, envs, networks
from podracer.envs.atari_protocol import Atari
from podracer.envs.batch import Batch
from podracer.envs.host import OnHost
from podracer.envs.with_state import WithState
from podracer.errors import UserError, unknown
from podracer.plugins import blame, check_call, is_reference, load_object
from podracer.specs import features
from podracer.types import Agent

AGENTS: dict[str, Callable[..., Agent]] = {
    "a2c": agents.a2c,
    "impala": agents.impala,
    "ppo": agents.ppo,
    "pqn": agents.pqn,
}
_TRUNKS: dict[str, Any] = {
    "nature": networks.nature(),
    "impala-shallow": networks.impala_shallow(),
    "impala": networks.impala_resnet(),
}
NETWORKS: dict[str, Any] = {
    "mlp": networks.mlp(),
    "lstm": networks.lstm(),
    "gru": networks.gru(),
    **_TRUNKS,
    # As large as in Espeholt et al. 2018.
    **{f"{name}-lstm": networks.lstm(256, trunk) for name, trunk in _TRUNKS.items()},
    **{f"{name}-gru": networks.gru(256, trunk) for name, trunk in _TRUNKS.items()},
}


def register(agents: Mapping[str, Callable[..., Agent]], networks: Mapping[str, Any]) -> None:
    """Make agents and networks of another package known by name; it does so when it is imported.

    Args:
      agents: name -> `(spec, config=..., network=...) -> Agent`; the agents made have this name.
      networks: name -> recipe, a dataclass with all its settings in fields.
    """
    AGENTS.update(agents)
    NETWORKS.update(networks)


def played_in(form: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A decorator of agents' makers: `form(env)` is the form of an environment that the agent wants to be made for."""

    def mark(maker):
        maker.environment = form
        return maker

    return mark


def environment_for(maker: Callable, env: Any) -> Any:
    """`env` in the form that an agent's maker wants, if it wants any."""
    form = getattr(maker, "environment", None)
    return env if form is None else form(env)


NAME_A_FILE = "A file of yours works too: --{} path.py:Object."


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How an agent and its environment are made again. All fields are JSON."""

    env: str
    env_options: dict[str, Any]
    agent: str
    agent_config: dict[str, Any] | None
    network: str | None
    network_config: dict[str, Any] | None


def agent_maker(name: str) -> Callable[..., Agent]:
    """The function `(spec, config=..., network=...) -> Agent` behind an agent's name or `path.py:Object`.

    Raises:
      UserError: there is no such agent.
    """
    if is_reference(name):
        maker = load_object(name)
        if not callable(maker):
            raise UserError(f"{name} is a {type(maker).__name__}; expected a function (spec) -> Agent.")
        return cast(Callable[..., Agent], maker)
    if name not in AGENTS:
        do = f"`podracer agents` lists {', '.join(sorted(AGENTS))}. {NAME_A_FILE.format('agent')}"
        raise unknown("agent", name, AGENTS, do)
    return AGENTS[name]


def default_of(maker: Callable, parameter: str) -> Any:
    """The default of one of a maker's parameters (`config`, `network`), or None where it has no such parameter."""
    found = inspect.signature(maker).parameters.get(parameter)
    return None if found is None or found.default is inspect.Parameter.empty else found.default


def default_network(maker: Callable, spec: Any) -> Any:
    """The network of a maker that was given none: its own default, or `nature` for an mlp that would see pictures."""
    found = default_of(maker, "network")
    if isinstance(found, networks.mlp) and networks.pictures(features(spec.observation)):
        return dataclasses.replace(networks.nature(), layer_norm=found.layer_norm)
    return found


def network_recipe(name: str, changes: dict[str, Any] | None = None) -> Any:
    """The network recipe behind a name or `path.py:Object`, with other values in some of its fields.

    Raises:
      UserError: there is no such network, or no such field.
    """
    recipe = _named_network(name)
    return recipe if changes is None else _replace(recipe, changes, "network")


def _named_network(name: str) -> Any:
    if is_reference(name):
        recipe = found = load_object(name)
        if not callable(found):
            raise UserError(
                f"{name} is a {type(found).__name__}; expected a function (observation_spec, rngs) -> module."
            )
        if inspect.isclass(found):
            if not dataclasses.is_dataclass(found):
                raise UserError(
                    f"{name} is a class; expected a function (observation_spec, rngs) -> module that uses it."
                )
            with blame(name):
                recipe = cast(Any, found)()  # with its defaults
        return recipe
    if name not in NETWORKS:
        do = f"There are {', '.join(sorted(NETWORKS))}. {NAME_A_FILE.format('network')}"
        raise unknown("network", name, NETWORKS, do)
    return NETWORKS[name]


def make_agent(spec: Any, maker: Callable, config: Any = None, network: Any = None) -> Agent:
    """Call an agent's maker with what it takes.

    Raises:
      UserError: the maker does not return an Agent.
    """
    if network is None and default_of(maker, "network") is not None:
        network = default_network(maker, spec)
    given = {name: value for name, value in {"config": config, "network": network}.items() if value is not None}
    name = getattr(maker, "__name__", maker)
    check_call(f"agent {name}", maker, "a function (spec, config=..., network=...) -> Agent", spec, **given)
    agent = maker(spec, **given)
    if not isinstance(agent, Agent):
        raise UserError(f"agent {name} made a {type(agent).__name__}; expected an Agent.")
    return agent


def build(recipe: Recipe) -> tuple[Agent, Any]:
    """`(agent, environment)` of a recipe. The batch size of a host environment is a setting of the run, not kept here.

    Raises:
      UserError: a name is gone or an option no longer fits.
    """
    maker = agent_maker(recipe.agent)
    env = environment_for(maker, envs.make(recipe.env, **recipe.env_options))
    config, network = default_of(maker, "config"), None
    if recipe.agent_config is not None:
        config = _replace(config, recipe.agent_config, "agent")
    if recipe.network is not None:
        network = network_recipe(recipe.network, recipe.network_config)
    return make_agent(env.spec, maker, config, network), env


def describe(agent: Agent, env: Any) -> Recipe | None:
    """The recipe of objects that were made in Python, or None where names cannot make them again.

    Of a jittable environment on the host the recipe keeps the environment itself.
    """
    if isinstance(env, OnHost) and env.env == Batch(env.env.env):
        env = env.env.env
    network = network_name(agent.network)
    if agent.name not in AGENTS or network is None or not is_record(agent.config):
        return None
    config, network_config = dataclasses.asdict(agent.config), dataclasses.asdict(agent.network)
    try:
        named = env.env if isinstance(env, WithState) else env
        recipe = Recipe(env.spec.name, _changed_fields(named), agent.name, config, network, network_config)
        # What comes back from the file must be what went in: functions, wrappers and subclasses do not.
        again, env_again = build(Recipe(**json.loads(json.dumps(dataclasses.asdict(recipe)))))
    except Exception:
        return None
    if envs.is_host(env):
        env = envs.on_host(env, env_again.batch_size)
    same = (again.config, again.network, env_again) == (agent.config, agent.network, env)
    return recipe if same else None


def network_name(recipe: Any) -> str | None:
    """The name of a built-in network recipe, whatever its settings; None for others."""
    alike = [name for name, known in NETWORKS.items() if _alike(known, recipe)]
    same_windows = [name for name in alike if _windows(NETWORKS[name]) == _windows(recipe)]
    return next(iter(same_windows + alike), None)


def _alike(one: Any, other: Any) -> bool:
    """Whether two recipes differ in settings only."""
    if type(one) is not type(other):
        return False
    return not isinstance(one, networks.recurrent) or (one.cell == other.cell and _alike(one.trunk, other.trunk))


def _windows(recipe: Any) -> Any:
    return getattr(getattr(recipe, "trunk", recipe), "windows", None)


def write(directory: pathlib.Path, content: dict[str, Any]) -> None:
    """Write `config.json` of a run directory."""
    (directory / "config.json").write_text(json.dumps(content, indent=2, default=str) + "\n")


def read(directory: pathlib.Path, architecture: str | None = None) -> dict[str, Any]:
    """Read `config.json` of a run directory.

    Args:
      directory: what `train` wrote.
      architecture: refuse the runs of another one.

    Raises:
      UserError: it is not a run directory.
    """
    path = pathlib.Path(directory) / "config.json"
    if not path.is_file():
        raise UserError(
            f"{directory} is not a run directory: it has no config.json. Name one that `train --run` wrote."
        )
    try:
        content = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise UserError(f"{path} is not readable JSON ({error}). Restore it, or train again.") from error
    parts = content if isinstance(content, dict) else {}
    if not isinstance(parts.get("settings"), dict) or not isinstance(parts.get("recipe", ""), dict | NoneType):
        raise UserError(f"{path} lacks the settings and recipe of a run. Name a directory that `train --run` wrote.")
    if architecture is not None and parts.get("architecture") != architecture:
        raise UserError(f"{directory} is a run of {parts.get('architecture')}; expected one of {architecture}.")
    return content


def read_recipe(directory: pathlib.Path) -> Recipe:
    """The recipe of a run directory.

    Raises:
      UserError: the run was made from Python objects that have no names.
    """
    return recipe_of(read(directory), directory)


def recipe_of(content: dict[str, Any], directory: pathlib.Path) -> Recipe:
    """The recipe in what `read` found in a run directory; raises like `read_recipe`."""
    recipe = content.get("recipe")
    if recipe is None:
        raise UserError(
            f"{directory} was trained from Python objects that names cannot make again. "
            "Call the same function from Python with those objects."
        )
    fields, given = {field.name for field in dataclasses.fields(Recipe)}, set(recipe)
    if fields != given:
        raise UserError(
            f"{pathlib.Path(directory) / 'config.json'}: the recipe has the fields {', '.join(sorted(given))}; "
            f"expected {', '.join(sorted(fields))}. Restore it, or train again."
        )
    return Recipe(**recipe)


def swept_values(settings: dict[str, Any], member: int) -> dict[str, float]:
    """What was varied, in one member of a run of many. Members are the product of the values and, innermost, seeds."""
    values, combination = {}, member // settings["seeds"]
    for item in reversed(settings.get("sweep") or []):
        name, _, listed = item.partition("=")
        choices = listed.split(",")
        combination, which = divmod(combination, len(choices))
        values[name.strip().replace("-", "_")] = float(choices[which])
    return dict(reversed(values.items()))


def member_name(settings: dict[str, Any], member: int) -> str:
    """A member in words: its swept values and its seed."""
    parts = [f"{name}={value:g}" for name, value in swept_values(settings, member).items()]
    return ", ".join([*parts, f"seed {settings['seed'] + member % settings['seeds']}"])


def is_record(value: Any) -> bool:
    """Whether `value` is a dataclass's instance, which JSON can keep."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _changed_fields(env: Any) -> dict[str, Any]:
    """What makes `env` of the plain one of its name; adapters keep options of their library in one field, as pairs."""
    plain = envs.make(env.spec.name)
    if type(plain) is not type(env):
        return {}
    fields = {f.name: (getattr(env, f.name), getattr(plain, f.name)) for f in dataclasses.fields(env) if f.init}
    changed = {name: now for name, (now, default) in fields.items() if now != default}
    if envs.is_host(env):
        changed.pop("batch_size", None)
    options = dict(changed.pop("options", ()))
    for name in [name for name, value in changed.items() if isinstance(value, Atari)]:
        now, default = fields[name]
        del changed[name]
        options |= {key: value for key, value in vars(now).items() if value != getattr(default, key)}
    return {**changed, **options}


def _replace(default: Any, changes: dict[str, Any], what: str) -> Any:
    """`default` (a dataclass) with `changes`; nested dataclasses and tuples come from JSON."""
    fields = {field.name: getattr(default, field.name) for field in dataclasses.fields(default)}
    strange = sorted(set(changes) - set(fields))
    if strange:
        raise unknown(f"{what} setting", strange[0], fields, f"There are {', '.join(fields)}.")
    values = {}
    for name, value in changes.items():
        if dataclasses.is_dataclass(fields[name]):
            value = _replace(fields[name], value, what)
        values[name] = _tuples(value)
    return dataclasses.replace(default, **values)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value
