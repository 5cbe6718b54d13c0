"""The learner: `agent.learner_step` under the mesh of learner cores, on trajectories that lie there already."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer import mesh
from podracer.errors import check_divides
from podracer.types import Agent, LearnerState, Trajectory

STATE = LearnerState(mesh.REPLICATED, mesh.REPLICATED, mesh.REPLICATED, mesh.SHARDED)
TRAJECTORY = Trajectory(mesh.SHARDED_SECOND, mesh.SHARDED_SECOND, mesh.SHARDED)


class Learner:
    """The compiled update, and the state it changes.

    Args:
      agent: any agent.
      cores: the mesh of learner cores.
      num_trajectories: how many trajectories form one batch (threads x accumulate).
      splits: learner steps that each batch is cut into, one after the other.
      key: the run's PRNG key, the same on every host.
    """

    def __init__(self, agent: Agent, cores: Any, num_trajectories: int, splits: int, key: jax.Array):
        self._agent, self.mesh, self._splits = agent, cores, splits
        self._num_trajectories = num_trajectories
        shardings = mesh.shardings(cores, STATE)
        self._init = jax.jit(self._initial, out_shardings=shardings)
        specs = (STATE, [TRAJECTORY] * num_trajectories, mesh.REPLICATED, mesh.REPLICATED)
        call = mesh.over_cores(self._call, cores, specs, (STATE, mesh.REPLICATED))
        self._update = jax.jit(call, donate_argnums=0)
        self._learner_key, _, self._run_key = jax.random.split(key, 3)
        self.updates = 0
        self._compiled: Any = None

    # Made when they are first used: a program for devices that are not here can be compiled all the same.
    @functools.cached_property
    def state(self) -> LearnerState:
        """The state after the last update."""
        return self._init(self._learner_key)

    @functools.cached_property
    def _key_data(self) -> jax.Array:
        return mesh.replicate(self.mesh, jax.random.key_data(self._run_key))

    def update(self, batches: list[list[Trajectory]]) -> dict[str, jax.Array]:
        """One update. `batches`: per trajectory, its part on each learner core; returns metrics [splits]."""
        update = self._compiled or self._update
        self.state, metrics = update(self.state, *self._inputs(batches))
        self.updates += 1
        return metrics

    def compile(self, batches: list[list[Trajectory]]) -> Any:
        """Compile the update for batches like these; its `memory_analysis()` tells what it needs."""
        self._compiled = self._update.lower(self.state, *self._inputs(batches)).compile()
        return self._compiled

    def trace(self, trajectory: Trajectory) -> Any:
        """The update as JAX sees it, traced without any device.

        Args:
          trajectory: shapes of one trajectory of the batch, over all cores of the mesh: [T, B, ...].
        """

        def placed(leaves, specs):
            fill = lambda spec, part: jax.tree.map(lambda leaf: self._placed(leaf, spec), part)
            return type(leaves)(*(fill(spec, part) for spec, part in zip(specs, leaves, strict=True)))

        state = placed(jax.eval_shape(self._init, self._learner_key), STATE)
        batches = [placed(trajectory, TRAJECTORY)] * self._num_trajectories
        key = self._placed(jax.eval_shape(jax.random.key_data, self._run_key), mesh.REPLICATED)
        number = self._placed(jax.ShapeDtypeStruct((), jnp.uint32), mesh.REPLICATED)
        return self._update.trace(state, batches, key, number)

    def _placed(self, leaf: Any, spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=mesh.shardings(self.mesh, spec))

    def _inputs(self, batches: list[list[Trajectory]]) -> tuple[Any, ...]:
        number = mesh.replicate(self.mesh, np.uint32(self.updates))
        return [self._global(shards) for shards in batches], self._key_data, number

    def _global(self, shards: list[Trajectory]) -> Trajectory:
        """One array over all learner cores from the parts that lie on them; nothing moves."""
        return Trajectory(
            mesh.from_shards(self.mesh, [shard.timestep for shard in shards], axis=1),
            mesh.from_shards(self.mesh, [shard.actor_output for shard in shards], axis=1),
            mesh.from_shards(self.mesh, [shard.actor_state for shard in shards], axis=0),
        )

    def _initial(self, key: jax.Array) -> LearnerState:
        state = self._agent.initial_learner_state(key)
        size = mesh.size(self.mesh)
        memory = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[None], (size, *leaf.shape)), state.memory)
        return state._replace(memory=memory)

    def _call(self, state: LearnerState, trajectories: list[Trajectory], key_data: jax.Array, number: jax.Array):
        state = state._replace(memory=jax.tree.map(lambda leaf: leaf[0], state.memory))
        batch = _join(trajectories)
        check_divides("the batch per learner core", batch.timestep.first.shape[1], "learner_splits", self._splits)
        key = jax.random.fold_in(jax.random.wrap_key_data(key_data, impl=jax.random.key_impl(self._run_key)), number)
        key = jax.random.split(jax.random.fold_in(key, mesh.index(mesh.CORE)))[1]

        def step(state, inputs):
            part, key = inputs
            state, metrics = self._agent.learner_step(state, part, key, mesh.CORE)
            return state, mesh.mean(metrics, mesh.CORE)

        keys = key[None] if self._splits == 1 else jax.random.split(key, self._splits)
        state, metrics = jax.lax.scan(step, state, (_split(batch, self._splits), keys))
        return state._replace(memory=jax.tree.map(lambda leaf: leaf[None], state.memory)), metrics


def _join(trajectories: list[Trajectory]) -> Trajectory:
    """Several trajectories side by side along the batch."""

    def along(axis, name):
        parts = [getattr(trajectory, name) for trajectory in trajectories]
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis), *parts)

    return Trajectory(along(1, "timestep"), along(1, "actor_output"), along(0, "actor_state"))


def _split(batch: Trajectory, parts: int) -> Trajectory:
    """[T, B, ...] -> [parts, T, B / parts, ...]."""

    def second(leaf):
        return jnp.moveaxis(leaf.reshape(leaf.shape[0], parts, -1, *leaf.shape[2:]), 1, 0)

    def first(leaf):
        return leaf.reshape(parts, -1, *leaf.shape[1:])

    return Trajectory(
        jax.tree.map(second, batch.timestep),
        jax.tree.map(second, batch.actor_output),
        jax.tree.map(first, batch.actor_state),
    )
