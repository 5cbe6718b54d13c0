"""Anakin: environment, acting and learning in ONE compiled program, replicated over every core.

    step = one call from Python
    +--------------------------------------------------------------------------------------+
    | scan over updates_per_call                                                           |
    |   +------------------------------------------------------------------------------+   |
    |   | scan over unroll_length                                                      |   |
    |   |    time step [B] -> actor_step -> action [B] -> environments -> time step [B] |   |
    |   +------------------------------------------------------------------------------+   |
    |   trajectory [T + 1, B] -> learner_step -> gradients  ---- mean over the cores ----   |
    |   metrics of this update: a few numbers                                              |
    +--------------------------------------------------------------------------------------+
      one of these per core, each with its own B environments; nothing leaves the device inside

After Hessel et al. 2021, "Podracer architectures for scalable reinforcement learning", section 3.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from anakin.members import Members
from anakin.state import SPECS, AnakinState, CallMetrics
from podracer import mesh as cores
from podracer import profile, replays
from podracer.envs.batch import Batch
from podracer.envs.host import jittable
from podracer.errors import check_number
from podracer.metrics import Episodes, EpisodeSums
from podracer.types import Agent, Trajectory


class Anakin:
    """Builds the two compiled functions of a run; the loop around them is the caller's.

    Args:
      agent: any `Agent`.
      env: an environment (see `podracer/envs/api.py`) or a `Batch` of one, which says how it is reset.
      batch_per_core: B, environments per core (per run, where many runs train in one program).
      unroll_length: T, decisions per environment and update.
      updates_per_call: learner steps per call of `step`.
      num_cores: N; None takes all there are. With `members`, at most the largest divisor of their number.
      members: many runs in one program, spread over the cores; each is trained by one core alone.
      prng: JAX's generator for everything random in the run, e.g. "threefry2x32" or "rbg".
      over: the mesh to take, instead of `num_cores` of the devices there are.

    Raises:
      UserError: sizes that cannot work, or a replay that the cores cannot hold.
    """

    def __init__(
        self,
        agent: Agent,
        env: Any,
        batch_per_core: int,
        unroll_length: int,
        updates_per_call: int = 1,
        num_cores: int | None = None,
        members: Members | None = None,
        prng: str = "threefry2x32",
        over: Any = None,
    ):
        sizes = {"batch_per_core": batch_per_core, "unroll_length": unroll_length, "updates_per_call": updates_per_call}
        for name, value in sizes.items():
            check_number(name, value, minimum=1, whole=True)
        self.agent, self.members, self.prng = agent, members, prng
        self.batch = env if isinstance(env, Batch) else Batch(jittable(env))
        self.batch_per_core, self.unroll_length, self.updates_per_call = batch_per_core, unroll_length, updates_per_call
        self.mesh = cores.make(num_cores) if over is None else over
        if members is not None:
            members.check(agent)
            fitting = max(n for n in range(1, cores.size(self.mesh) + 1) if len(members) % n == 0)
            self.mesh = cores.over(list(self.mesh.devices.flat)[:fitting])
        self.num_cores = cores.size(self.mesh)
        self.runs_per_core = self.num_members // self.num_cores if members is not None else 1
        replays.check_fits(agent, self.mesh, self.runs_per_core)
        self.axis_name = cores.CORE if members is None else None
        self.steps_per_update = batch_per_core * unroll_length * (self.num_cores if members is None else 1)
        self.steps_per_call = self.steps_per_update * updates_per_call
        specs = SPECS if members is None else cores.SHARDED
        self.shardings = cores.shardings(self.mesh, specs)
        if members is None:
            call = cores.over_cores(self._call, self.mesh, (SPECS,), (SPECS, cores.REPLICATED))
            self._init = cores.compiled_quickly(self._initial_state, out_shardings=self.shardings)
        else:
            over = jax.vmap(self._call)
            call = cores.over_cores(over, self.mesh, (cores.SHARDED,) * 2, (cores.SHARDED,) * 2)
            self._init = cores.compiled_quickly(jax.vmap(self._initial_state), out_shardings=self.shardings)
        inputs = (self.shardings,) * (1 if members is None else 2)
        self._jitted = jax.jit(call, in_shardings=inputs, donate_argnums=0)
        self._traced: Any = None
        self._compiled: Any = None
        # On the devices once and for all: `step` must move nothing from the host.
        self._floats = jax.device_put(self._seed_and_floats(0)[1:], None if members is None else self.shardings)

    @property
    def num_members(self) -> int:
        """M: runs in this program."""
        return 1 if self.members is None else len(self.members)

    def init(self, seed: int = 0) -> AnakinState:
        """The state of a run before its first update. With members, `seed` is added to each of their seeds."""
        return self._init(*self._seed_and_floats(seed))

    def step(self, state: AnakinState) -> tuple[AnakinState, CallMetrics]:
        """`updates_per_call` updates in one call. `state` is donated: use only the one that comes back."""
        out = self.compile()(state, *self._floats)
        if jax.default_backend() == "cpu":
            # A virtual core takes at most 32 programs at a time. A caller that queues more of them than that without
            # reading anything lets one core wait for a place while another waits for it in a mean: for ever.
            jax.block_until_ready(out)
        return out

    def check(self) -> None:
        """Trace the whole call without compiling or running it: mistakes in an agent or environment show here."""
        self.trace()

    def trace(self) -> Any:
        """The whole call as JAX sees it, which needs no device."""
        if self._traced is None:
            inputs = self._seed_and_floats(0)
            self._traced = self._jitted.trace(jax.eval_shape(self._init, *inputs), *inputs[1:])
        return self._traced

    def compile(self) -> Any:
        """The compiled call, ahead of time; its `memory_analysis()` tells what it needs."""
        if self._compiled is None:
            self._compiled = self.trace().lower().compile()
        return self._compiled

    def _seed_and_floats(self, seed: int) -> tuple[Any, ...]:
        """What `_initial_state` takes; its tail is what `_call` takes beside the state."""
        if self.members is None:
            return (jnp.asarray(seed, jnp.uint32),)
        seeds = jnp.asarray([seed + own for own in self.members.seeds], jnp.uint32)
        floats = {name: jnp.asarray(values, jnp.float32) for name, values in self.members.floats.items()}
        return seeds, floats

    def _agent(self, floats: dict[str, jax.Array]) -> Agent:
        if not floats:
            return self.agent
        assert self.agent.rebuild is not None  # or there would be nothing to sweep
        return self.agent.rebuild(dataclasses.replace(self.agent.config, **floats))

    def _initial_state(self, seed: jax.Array, floats: dict[str, jax.Array] | None = None) -> AnakinState:
        key = jax.random.key(seed, impl=self.prng)
        learner_key, env_key, run_key = jax.random.split(key, 3)
        agent = self._agent(floats or {})
        total = self.batch_per_core * (self.num_cores if self.axis_name else 1)
        env, timestep = self.batch.init(jax.random.split(env_key, total))
        learner = agent.initial_learner_state(learner_key)
        learner = learner._replace(memory=self._per_core(learner.memory))
        actor = agent.initial_actor_state(total)
        state = AnakinState(learner, actor, env, timestep, Episodes.start(total), run_key, jnp.zeros((), jnp.int32))
        # Weakly typed leaves (a Python number somewhere) would make the second call compile again.
        return jax.tree.map(
            lambda leaf: jax.lax.convert_element_type(leaf, leaf.dtype) if _is_number(leaf) else leaf, state
        )

    def _per_core(self, memory: Any) -> Any:
        copies = self.num_cores if self.axis_name else 1
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[None], (copies, *leaf.shape)), memory)

    def _call(self, state: AnakinState, floats: dict[str, jax.Array] | None = None):
        agent = self._agent(floats or {})
        state = state._replace(
            learner=state.learner._replace(memory=jax.tree.map(lambda x: x[0], state.learner.memory))
        )

        def update(state, _):
            # Barriers: XLA inlines a loop of one update, and would then round some sums another way than in a loop.
            return jax.lax.optimization_barrier(self._update(agent, jax.lax.optimization_barrier(state)))

        state, metrics = jax.lax.scan(update, state, None, self.updates_per_call)
        # The numbers of all updates at once: where the cores meet over a network, each meeting costs.
        axis = self.axis_name
        metrics = CallMetrics(cores.mean(metrics.learner, axis), metrics.episodes.over_cores(axis))
        memory = jax.tree.map(lambda x: x[None], state.learner.memory)
        return state._replace(learner=state.learner._replace(memory=memory)), metrics

    def _update(self, agent: Agent, state: AnakinState) -> tuple[AnakinState, CallMetrics]:
        """The minimal unit: unroll, then learn. The metrics are this core's own."""
        axis, batch_size = self.axis_name, self.batch_per_core
        key = jax.random.fold_in(state.key, state.updates)
        core = cores.index(axis)
        actor_key, learner_key = jax.random.split(jax.random.fold_in(key, core))
        # An environment's keys depend on its own number, not on the core it lives on.
        env_numbers = core * batch_size + jnp.arange(batch_size)
        env_keys = jax.vmap(lambda n: jax.random.split(jax.random.fold_in(key, n), self.unroll_length), out_axes=1)(
            jnp.asarray(env_numbers, jnp.uint32) | jnp.uint32(1 << 31)
        )

        def decide(carry, keys):
            actor, env, timestep, episodes = carry
            actor_key, env_keys = keys
            with profile.scope("acting"):
                output, actor = agent.actor_step(state.learner.params, actor, timestep, actor_key)
            with profile.scope("environment"):
                env, following = self.batch.step(env, output.action, env_keys)
            episodes, ended = episodes.add(following)
            return (actor, env, following, episodes), (timestep, output, ended)

        start = (state.actor, state.env, state.timestep, state.episodes)
        keys = (jax.random.split(actor_key, self.unroll_length), env_keys)
        (actor, env, last, episodes), (timesteps, outputs, ended) = jax.lax.scan(decide, start, keys)
        timesteps = jax.tree.map(lambda many, one: jnp.concatenate([many, one[None]]), timesteps, last)
        trajectory = Trajectory(timesteps, outputs, state.actor)
        with profile.scope("learning"):
            learner, metrics = agent.learner_step(state.learner, trajectory, learner_key, axis)
        metrics = CallMetrics(metrics, EpisodeSums.of(ended))
        return AnakinState(learner, actor, env, last, episodes, state.key, state.updates + 1), metrics


def _is_number(leaf: Any) -> bool:
    return not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
