"""The contract between environments, agents and architectures: six records and nothing else.

An agent is four pure functions over these records; an architecture (Anakin, Sebulba) drives any agent without
knowing it by name. `T` is the unroll length, `B` the batch size (per core in Anakin, per actor thread in Sebulba).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

Array = jax.Array
Metrics = dict[str, Array]


class TimeStep(NamedTuple):
    """What an environment says after a step, or after a reset."""

    observation: Any  # [B, ...]
    reward: Array  # [B] float32, earned by the action that led here
    discount: (
        Array  # [B] float32, 0 where the episode terminated, else 1 (also 1 where it was only cut by a time limit)
    )
    first: Array  # [B] bool, `observation` starts an episode
    valid: Array  # [B] bool, the transition that led here is real (False: it is a reset, not a step)


class ActorOutput(NamedTuple):
    """One decision per environment, and what the learner wants to remember of it."""

    action: Any  # [B, ...]
    extras: Any = ()  # [B, ...] behaviour log-probabilities, values; for search agents visit weights, root value


class Trajectory(NamedTuple):
    """T decisions and the T + 1 time steps around them. Time-major; no other layout exists."""

    timestep: TimeStep  # [T + 1, B, ...]
    actor_output: ActorOutput  # [T, B, ...]
    actor_state: Any  # [B, ...] what the actor carried (recurrent state, say) before the first decision


class LearnerState(NamedTuple):
    """Everything a learner keeps. Architectures shard it by field, without knowing the agent."""

    params: Any  # replicated; what actors receive
    opt_state: Any  # replicated
    slow: Any = ()  # replicated; target network, step counters
    memory: Any = ()  # one per learner core, leading axis [N, ...]; replay


class ReplaySize(NamedTuple):
    """What the `memory` of one learner core takes, for one run."""

    decisions: int
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class Agent:
    """A frozen record of four pure functions.

    Attributes:
      initial_learner_state: `(key) -> LearnerState`.
      initial_actor_state: `(batch_size) -> actor state [B, ...]`, a pytree whose leaves all lead with B.
      actor_step: `(params, actor_state, timestep [B], key) -> (ActorOutput, actor_state)`.
      learner_step: `(learner_state, trajectory, key, axis_name | None) -> (LearnerState, metrics)`. Gradients are
        averaged over `axis_name` where one is given. Metrics are scalars.
      greedy_step: like `actor_step`, but the best action instead of a sampled one. Only evaluation uses it;
        None means that the agent can be evaluated with `actor_step` alone.
      name: what is printed.
      config: the agent's own settings, a frozen dataclass, or None.
      network: the recipe of its network, kept so that a run directory can say what was trained.
      rebuild: `(config) -> Agent`, the same agent with other settings; sweeps over many settings in one program
        call it with traced values in the float fields.
      replay: how much `memory` is, where it holds a replay. It is said before training, and refused where it cannot be.
      search: like `greedy_step`, but returns `(ActorOutput, muzero.search.Tree)`, the action and the search trees
        behind it. None for agents that do not plan.
      alarms: `{metric: (greatest good value, what to say once where a row has more)}`.
    """

    initial_learner_state: Callable[[Array], LearnerState]
    initial_actor_state: Callable[[int], Any]
    actor_step: Callable[[Any, Any, TimeStep, Array], tuple[ActorOutput, Any]]
    learner_step: Callable[[LearnerState, Trajectory, Array, str | None], tuple[LearnerState, Metrics]]
    greedy_step: Callable[[Any, Any, TimeStep, Array], tuple[ActorOutput, Any]] | None = None
    name: str = "agent"
    config: Any = None
    network: Any = None
    rebuild: Callable[[Any], Agent] | None = None
    replay: ReplaySize | None = None
    search: Callable[[Any, Any, TimeStep, Array], tuple[ActorOutput, Any]] | None = None
    alarms: Mapping[str, tuple[float, str]] = dataclasses.field(default_factory=dict)
