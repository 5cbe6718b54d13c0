"""From names to objects and back, through the JSON of a run directory."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

import muzero
from podracer import agents, config, envs, networks
from podracer.config import Recipe
from podracer.envs.pgx import random_opponent
from podracer.errors import UserError

CHANGES = {
    "a2c": {"learning_rate": 0.125, "n_step": 3, "optimizer": "sgd"},
    "impala": {"discount": 0.5, "anneal_steps": 77},
    "ppo": {"value_clip": 0.25, "normalize_observations": True, "minibatches": 2},
    "pqn": {"q_lambda": 0.5, "epsilon_updates": 9},
    "muzero": {"num_simulations": 3, "temperature_updates": 9},
    "gumbel-muzero": {"num_simulations": 3, "search": "rounds"},
    "stochastic-muzero": {"num_simulations": 3, "num_outcomes": 7},
    "sampled-muzero": {"num_simulations": 3, "rule": "puct", "num_samples": 5},
    "alphazero": {"num_simulations": 3, "rule": "puct"},
}
NETWORKS = {
    "mlp": networks.mlp((8, 4), "relu", True),
    "lstm": networks.lstm(4, networks.mlp((8,))),
    "gru": networks.gru(3, networks.mlp((5,), "elu")),
}
PLANNERS = ("alphazero", "gumbel-muzero", "muzero", "sampled-muzero", "stochastic-muzero")
PLANNING = {"muzero": muzero.network(8, 2, 16, "mlp")}
CONVOLUTIONAL = {
    "nature": networks.cnn((4, 8), ((5, 3), (3, 1)), 16),
    "impala-shallow": networks.cnn((4, 8), ((8, 4), (4, 2)), 16),
    "impala": networks.resnet((4, 8), 16, True),
    "impala-lstm": networks.lstm(8, networks.resnet((4,))),
    "nature-gru": networks.gru(8, networks.nature()),
    "impala-shallow-lstm": networks.lstm(8, networks.impala_shallow()),
}
ENVS = {
    "catch": envs.Catch(rows=6),
    "gridworld": envs.GridWorld(),
    "cartpole": envs.CartPole(max_steps=77),
    "cartpole-masked": envs.CartPole(mask_velocity=True),
    "memory-chain": envs.MemoryChain(length=2),
    "gymnax/CartPole-v1": envs.make("gymnax/CartPole-v1"),
    "gymnax/CartPole-v1, options": envs.make("gymnax/CartPole-v1", max_steps_in_episode=33),
    "pgx/tic_tac_toe": envs.make("pgx/tic_tac_toe"),
    "pgx/tic_tac_toe, self": envs.make("pgx/tic_tac_toe", opponent="self"),
    "atari/Pong": envs.make("atari/Pong"),
    "atari/Pong, options": envs.make("atari/Pong", protocol="classic", stack=2, num_threads=3),
    "envpool/CartPole-v1": envs.make("envpool/CartPole-v1", num_threads=1),
    "gymnasium/CartPole-v1": envs.make("gymnasium/CartPole-v1", vectorization="async", max_episode_steps=9),
}


def make(agent, network, env):
    maker = config.AGENTS[agent]
    changed = dataclasses.replace(config.default_of(maker, "config"), **CHANGES[agent])
    return maker(env.spec, changed, (NETWORKS | PLANNING)[network])


def through_json(recipe):
    return Recipe(**json.loads(json.dumps(dataclasses.asdict(recipe))))


@pytest.mark.parametrize(
    ("agent", "network"), [(a, n) for a in config.AGENTS for n in (PLANNING if a in PLANNERS else NETWORKS)]
)
def test_every_agent_with_every_network_comes_back_from_its_recipe(agent, network):
    """The same config and network, field by field, after a trip through JSON."""
    env = config.environment_for(config.AGENTS[agent], ENVS["catch"])
    made = make(agent, network, env)
    recipe = config.describe(made, env)
    assert recipe is not None and recipe.network == network
    again, env_again = config.build(through_json(recipe))
    assert (again.name, again.config, again.network) == (made.name, made.config, made.network)
    assert type(again.config) is type(made.config)
    assert env_again == env
    assert config.describe(again, env_again) == recipe


@pytest.mark.parametrize("network", list(CONVOLUTIONAL))
def test_convolutional_networks_come_back_from_their_recipes(network):
    """With windows of one's own, and under a cell."""
    env = envs.make("atari/Pong")
    agent = agents.impala(env.spec, network=CONVOLUTIONAL[network])
    recipe = config.describe(agent, env)
    assert recipe is not None and recipe.network == network
    assert config.build(through_json(recipe))[0].network == CONVOLUTIONAL[network]


def test_pictures_get_a_network_for_pictures():
    """Where none is named; by name an mlp is refused."""
    pong = envs.make("atari/Pong").spec
    assert config.default_network(agents.ppo, pong) == networks.nature()
    assert config.default_network(agents.pqn, pong) == networks.cnn(layer_norm=True)
    assert config.default_network(agents.ppo, envs.Catch().spec) == networks.mlp()
    assert config.make_agent(pong, agents.a2c).network == networks.nature()
    with pytest.raises(UserError, match=r"an mlp got pictures of shape \(4, 84, 84\); choose --network nature"):
        agents.ppo(pong)


@pytest.mark.parametrize("name", list(ENVS))
def test_every_environment_comes_back_with_its_options(name):
    """Our own, and adapters with options of their library."""
    env = ENVS[name]
    agent = config.make_agent(env.spec, agents.a2c)
    recipe = config.describe(agent, env)
    assert recipe is not None
    _, again = config.build(through_json(recipe))
    assert again == env and again.spec == env.spec


def test_agents_that_plan_with_the_game_play_it_against_themselves():
    """Where the recipe says nothing of the opponent; one that it names stays."""
    for options, opponent in (({}, "self"), ({"opponent": "random"}, "random"), ({"opponent": "self"}, "self")):
        agent, env = config.build(Recipe("pgx/tic_tac_toe", options, "alphazero", None, None, None))
        assert env == envs.WithState(envs.Pgx("tic_tac_toe", opponent))
        recipe = config.describe(agent, env)
        assert recipe is not None and recipe.env_options == {"opponent": opponent}
        assert config.build(through_json(recipe))[1] == env
        on_host = config.describe(agent, envs.on_host(env, 7))
        assert on_host == recipe
    assert config.build(Recipe("pgx/2048", {}, "alphazero", None, None, None))[1] == envs.WithState(envs.Pgx("2048"))
    # The form is the agent's wish: others get the environment as it is, and have no recipe for another.
    assert config.build(Recipe("pgx/tic_tac_toe", {}, "a2c", None, None, None))[1] == envs.Pgx("tic_tac_toe")
    assert config.describe(agents.a2c(env.spec), env) is None


def test_batch_sizes_on_the_host_are_not_kept():
    """They are settings of the run; a compiled environment on the host comes back as what it was."""
    env = envs.make("envpool/CartPole-v1")
    recipe = config.describe(make("a2c", "mlp", env), envs.on_host(env, 7))
    assert recipe is not None and recipe.env_options == {}
    recipe = config.describe(make("a2c", "mlp", envs.Catch()), envs.on_host(envs.Catch(rows=6), 7))
    assert recipe is not None and recipe.env_options == {"rows": 6}
    assert envs.on_host(config.build(through_json(recipe))[1], 7) == envs.on_host(envs.Catch(rows=6), 7)


@dataclasses.dataclass(frozen=True)
class Mine(envs.Catch):
    """Looks like Catch by name."""


@dataclasses.dataclass(frozen=True)
class Trunk(networks.mlp):
    """Looks like an MLP by its fields."""


@pytest.mark.parametrize(
    "env, network",
    [
        (Mine(), networks.mlp((8,))),
        (envs.TimeLimit(envs.Catch(), 3), networks.mlp((8,))),
        (envs.Catch(), Trunk((8,))),
        (envs.Catch(), networks.lstm(4, Trunk((8,)))),
        (envs.Catch(), lambda spec, rngs: networks.mlp((8,))(spec, rngs)),
        (envs.make("pgx/tic_tac_toe", opponent=random_opponent), networks.mlp((8,))),
    ],
)
def test_objects_that_names_cannot_make_again_have_no_recipe(env, network):
    """Rather than one that makes something else."""
    assert config.describe(agents.a2c(env.spec, network=network), env) is None


def test_an_agent_of_ones_own_has_no_recipe():
    """Whatever it calls itself."""
    agent = agents.a2c(envs.Catch().spec)
    assert config.describe(dataclasses.replace(agent, name="mine"), envs.Catch()) is None
    assert config.describe(dataclasses.replace(agent, config=None), envs.Catch()) is None
    assert config.describe(dataclasses.replace(agent, name="ppo"), envs.Catch()) is None


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"agent": "pp"}, "unknown agent 'pp'. Did you mean 'ppo'"),
        ({"env": "cach"}, "unknown environment 'cach'. Did you mean 'catch'"),
        ({"network": "lstn"}, "unknown network 'lstn'. Did you mean 'lstm'"),
        ({"agent_config": {"learning_rat": 1}}, "unknown agent setting 'learning_rat'. Did you mean 'learning_rate'"),
        ({"network_config": {"hiden": [1]}}, "unknown network setting 'hiden'. Did you mean 'hidden'"),
        ({"agent_config": {"learning_rate": -1}}, "learning_rate is -1"),
        ({"env_options": {"row": 1}}, "catch has no option 'row'. Did you mean 'rows'"),
    ],
)
def test_recipes_with_unknown_names_are_answered_with_the_nearest(changes, says):
    """Agents, environments, networks, and the settings of each."""
    recipe = Recipe("catch", {}, "ppo", {}, "mlp", {})
    with pytest.raises(UserError) as caught:
        config.build(dataclasses.replace(recipe, **changes))
    assert says in str(caught.value)


AGENT_FILE = """
from podracer import agents
def mine(spec):
    return agents.a2c(spec)
def wrong(spec):
    return 3
number = 4
"""


def test_agents_and_networks_of_ones_own_are_named_by_their_file(tmp_path):
    """A function of the spec is enough; what is none is refused."""
    path = tmp_path / "mine.py"
    path.write_text(AGENT_FILE)
    recipe = Recipe("catch", {}, f"{path}:mine", None, None, None)
    agent, _ = config.build(through_json(recipe))
    assert agent.name == "a2c"
    for name, says in (
        ("number", "is a int; expected a function"),
        ("wrong", "made a int; expected an Agent"),
        ("mini", "Did you mean 'mine'"),
    ):
        with pytest.raises(UserError, match=says):
            config.build(dataclasses.replace(recipe, agent=f"{path}:{name}"))
    with pytest.raises(UserError, match="is a int; expected a function"):
        config.network_recipe(f"{path}:number")


@pytest.mark.parametrize(
    "text, says",
    [
        ("def agent(): ...", "agent agent cannot be called: too many positional arguments; expected a function (spec"),
        ("def agent(spec, size): ...", "missing a required argument: 'size'; expected a function (spec, config=..."),
    ],
)
def test_agents_of_ones_own_with_a_wrong_signature_are_one_sentence(tmp_path, text, says):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(UserError, match=re.escape(says)):
        config.make_agent(envs.Catch().spec, config.agent_maker(f"{path}:agent"))


def test_networks_of_ones_own_with_a_wrong_signature_are_one_sentence(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def network(observation_spec): ...")
    with pytest.raises(UserError, match=re.escape("expected a function (observation_spec, rngs) -> module.")):
        config.make_agent(envs.Catch().spec, agents.ppo, network=config.network_recipe(f"{path}:network"))


@pytest.mark.parametrize(("agent", "network"), [("pqn", "muzero"), ("a2c", "muzero"), ("gumbel-muzero", "mlp")])
def test_networks_of_other_agents_are_refused_in_one_sentence(agent, network):
    """A planner's network has other parts than an actor-critic's."""
    with pytest.raises(UserError, match=rf"{agent}'s network \w+ cannot be called: .*; expected a function \("):
        config.make_agent(envs.Catch().spec, config.AGENTS[agent], network=config.NETWORKS[network])


def test_config_files_that_are_none_are_one_sentence(tmp_path):
    """No directory, no file, no JSON, JSON of something else."""
    with pytest.raises(UserError, match="is not a run directory"):
        config.read(tmp_path / "missing")
    for text, says in (
        ("{", "not readable JSON"),
        ("[]", "lacks the settings"),
        ('{"settings": 3}', "lacks the settings"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=says):
            config.read(tmp_path)
