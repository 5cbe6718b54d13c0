"""Agents under test, on every kind of action, observation and network, and trajectories to feed them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import muzero
from podracer import agents, config, mesh, networks, specs
from podracer.envs import api
from podracer.types import Agent, LearnerState, TimeStep, Trajectory

T, B = 5, 16

# What is compiled here runs a few times on a few numbers: compiling is what takes time.
fast_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

TRUNK = networks.mlp((8,))
NETWORKS = {"mlp": TRUNK, "lstm": networks.lstm(4, TRUNK), "gru": networks.gru(4, TRUNK)}
NETWORKS["muzero"] = muzero.network(8, 1, 8)

FLAT = specs.Array((3,))
MASKED = {"observation": specs.Array((3,)), "action_mask": specs.Array((4,), np.bool_)}
DICT = {
    "picture": specs.Array((2, 2), np.uint8),
    "speed": specs.Array((3,)),
    "action_mask": specs.Array((4,), np.bool_),
}


@dataclasses.dataclass(frozen=True)
class Drift:
    """A model whose state is three numbers, which an action moves; it ends far from 0."""

    def state_of(self, observation):
        return observation[specs.STATE][0]

    def step(self, state, action, key):
        state = state + 0.1 * (action - 1.0) + 0.1 * jax.random.normal(key, state.shape)
        seen = {"observation": state, "action_mask": jnp.arange(4) != 0, specs.STATE: (state,)}
        return state, api.Step(seen, jnp.sum(state), jnp.sum(state**2) > 9, jnp.zeros((), bool))


SPECS = {
    "discrete": specs.Spec("discrete", FLAT, specs.Discrete(4), truncates=True),
    "masked": specs.Spec("masked", MASKED, specs.Discrete(4), truncates=True),
    "dict": specs.Spec("dict", DICT, specs.Discrete(4), truncates=True),
    "multi-discrete": specs.Spec("multi-discrete", FLAT, specs.MultiDiscrete((2, 3)), truncates=True),
    "modelled": specs.Spec(
        "modelled", MASKED | {specs.STATE: (FLAT,)}, specs.Discrete(4), truncates=True, model=Drift()
    ),
    "continuous": specs.Spec("continuous", FLAT, specs.Continuous((-1.0, -2.0), (1.0, np.inf)), truncates=True),
}

# What makes an update comparable between one core and eight: plain descent, one minibatch, no clipping of gradients.
PLAIN = {"optimizer": "sgd", "learning_rate": 0.05, "max_grad_norm": 1e6}
EPOCHS = {"epochs": 2, "minibatches": 1}

MAKERS = {name: getattr(agents, name) for name in ("a2c", "impala", "ppo", "pqn")}
MAKERS |= {"gumbel-muzero": muzero.gumbel_muzero, "sampled-muzero": muzero.sampled_muzero}
MAKERS |= {"stochastic-muzero": muzero.stochastic_muzero, "alphazero": muzero.alphazero}
# They learn from a sample of what they have seen.
REPLAYING = ("gumbel-muzero", "sampled-muzero", "stochastic-muzero", "alphazero")
# Small, and learning from the first trajectory on.
PLANNING = {
    "num_simulations": 4,
    "unroll_steps": 2,
    "td_steps": 2,
    "sequence_length": T,
    "batch_size": 64,
    "num_samples": 3,
    "num_outcomes": 3,
}
PLANNING |= {"replay_steps": 4 * T * B, "min_replay": 1, "value_bins": 11, "reward_bins": 11}


@dataclasses.dataclass(frozen=True)
class Case:
    agent: str
    network: str
    spec: str
    normalise: bool

    def __str__(self):
        return f"{self.agent}-{self.network}-{self.spec}-{'normalised' if self.normalise else 'raw'}"


def _cases():
    for agent in ("a2c", "impala", "ppo", "pqn"):
        yield Case(agent, "mlp", "discrete", False)
        yield Case(agent, "mlp", "dict", True)
        yield Case(agent, "lstm", "discrete", True)
        yield Case(agent, "gru", "masked", False)
        if agent != "pqn":
            yield Case(agent, "mlp", "multi-discrete", False)
            yield Case(agent, "mlp", "continuous", True)
            yield Case(agent, "lstm", "continuous", False)
    yield Case("gumbel-muzero", "muzero", "discrete", False)
    yield Case("gumbel-muzero", "muzero", "dict", True)
    yield Case("stochastic-muzero", "muzero", "dict", True)
    yield Case("sampled-muzero", "muzero", "dict", True)
    yield Case("sampled-muzero", "muzero", "continuous", True)
    yield Case("alphazero", "muzero", "modelled", False)
    yield Case("alphazero", "muzero", "modelled", True)


CASES = list(_cases())


def config_class(name: str) -> type:
    return type(config.default_of(MAKERS[name], "config"))


def make(name: str, spec: specs.Spec, network: str = "mlp", **settings: Any) -> Agent:
    fields = {field.name for field in dataclasses.fields(config_class(name))}
    small = {key: value for key, value in (EPOCHS | PLANNING).items() if key in fields}
    return MAKERS[name](spec, config_class(name)(**{**PLAIN, **small, **settings}), NETWORKS[network])


def make_case(case: Case, **settings: Any) -> Agent:
    fields = {field.name for field in dataclasses.fields(config_class(case.agent))}
    normalise = {name: case.normalise for name in ("normalize_observations", "normalize_rewards") if name in fields}
    return make(case.agent, SPECS[case.spec], case.network, **normalise, **settings)


def observations(observation_spec: Any, shape: tuple[int, ...], seed: int) -> Any:
    """Random ones, off-centre so that normalising matters; masks leave at least one legal action."""
    rng = np.random.default_rng(seed)

    def leaf(spec):
        full = (*shape, *spec.shape)
        if spec.dtype == np.uint8:
            return jnp.asarray(rng.integers(0, 4, full), jnp.uint8)
        if spec.dtype == np.bool_:
            legal = rng.random(full) < 0.5
            return jnp.asarray(legal | (np.arange(full[-1]) == rng.integers(0, full[-1], (*shape, 1))))
        return jnp.asarray(0.5 + 1.5 * rng.normal(size=full), jnp.float32)

    return jax.tree.map(leaf, observation_spec)


def timesteps(spec: specs.Spec, seed: int, length: int = T, batch_size: int = B, next_step: bool = True) -> TimeStep:
    """T + 1 time steps [T + 1, B]; ends are crowded into the first environments, and some have none at all."""
    rng = np.random.default_rng(seed)
    shape = (length + 1, batch_size)
    reward, discount = rng.normal(size=shape).astype(np.float32), np.ones(shape, np.float32)
    first, valid = np.zeros(shape, bool), np.ones(shape, bool)
    first[0] = rng.random(batch_size) < 0.3
    for b in range(batch_size):
        often = 0.7 if b < batch_size // 4 else 0.3 if b < batch_size // 2 else 0.0
        over = rng.random() < often
        for t in range(1, length + 1):
            if over:
                first[t, b], valid[t, b], reward[t, b], over = True, False, 0.0, False
            elif rng.random() < often:
                discount[t, b] = float(next_step and rng.random() < 0.5)
                over, first[t, b] = next_step, not next_step
    flags = (jnp.asarray(each) for each in (reward, discount, first, valid))
    return TimeStep(observations(spec.observation, shape, seed), *flags)


class Bench:
    """One agent with its functions compiled: acting, learning on one core, learning on eight."""

    def __init__(self, agent: Agent, spec: specs.Spec):
        self.agent, self.spec = agent, spec
        self.init = fast_jit(agent.initial_learner_state)
        self.learn = fast_jit(lambda state, trajectory, key: agent.learner_step(state, trajectory, key, None))
        self._unroll = fast_jit(self._scan)

    def _scan(self, params, actor, timestep, key):
        def step(actor, inputs):
            now, key = inputs
            output, actor = self.agent.actor_step(params, actor, now, key)
            return actor, output

        length = timestep.reward.shape[0] - 1
        before = jax.tree.map(lambda leaf: leaf[:-1], timestep)
        return jax.lax.scan(step, actor, (before, jax.random.split(key, length)))

    def unroll(self, params: Any, seed: int, actor: Any = None, **how: Any) -> tuple[Trajectory, Any]:
        """A trajectory on which `params` acted, and the actor's state after it."""
        timestep = timesteps(self.spec, seed, **how)
        actor = self.agent.initial_actor_state(timestep.reward.shape[1]) if actor is None else actor
        after, outputs = self._unroll(params, actor, timestep, jax.random.key(seed))
        return Trajectory(timestep, outputs, actor), after

    @functools.cached_property
    def learn_on_eight(self):
        """Like `learn`, with the batch spread over eight cores; metrics averaged as architectures do."""

        def learn(state, trajectory, key):
            trajectory = Trajectory(
                *(jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), part) for part in trajectory[:2]), trajectory[2]
            )
            state, metrics = self.agent.learner_step(state, trajectory, key, mesh.CORE)
            return state, mesh.mean(metrics, mesh.CORE)

        state_specs = LearnerState(mesh.REPLICATED, mesh.REPLICATED, mesh.REPLICATED, mesh.SHARDED)
        over = mesh.over_cores(
            learn, mesh.make(8), (state_specs, mesh.SHARDED, mesh.REPLICATED), (state_specs, mesh.REPLICATED)
        )

        def call(state, trajectory, key):
            leading = (jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), part) for part in trajectory[:2])
            return over(state, Trajectory(*leading, trajectory[2]), key)

        return fast_jit(call)

    def trained(self, updates: int, seed: int = 0) -> tuple[LearnerState, Any]:
        """The learner and the actor after some updates, acting in between."""
        state, actor = self.init(jax.random.key(seed)), None
        for update in range(updates):
            trajectory, actor = self.unroll(state.params, 100 + update, actor)
            state, _ = self.learn(state, trajectory, jax.random.key(update))
        return state, actor


def disturbed(params: Any) -> Any:
    """Params whose policy is far from that of `params`."""
    leaves, structure = jax.tree.flatten(params.weights)
    keys = jax.random.split(jax.random.key(9), len(leaves))
    noisy = [leaf + 0.5 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    return params._replace(weights=jax.tree.unflatten(structure, noisy))


@functools.cache
def bench(case: Case, **settings: Any) -> Bench:
    return Bench(make_case(case, **settings), SPECS[case.spec])
