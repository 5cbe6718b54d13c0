"""Settings of agents that search: what all have, what those have that learn a model, and of each search."""

from __future__ import annotations

import dataclasses
import typing
from typing import Literal

from podracer.agents.common import LearningConfig
from podracer.errors import UserError, check_number, unknown


@dataclasses.dataclass(frozen=True)
class SearchConfig(LearningConfig):
    """What all have: a search, and a memory to learn from. Without a model to learn, nothing is unrolled."""

    # What only agents with a learnt model have settings for.
    unroll_steps = 0
    reward_bins = 0
    reward_limit = 1.0
    reward_cost = 0.0
    self_consistency = False
    consistency_cost = 0.0
    reanalysed = 0
    # And what only those have whose model has chance in it.
    num_outcomes = 0
    outcome_cost = 0.0
    commitment_cost = 0.0

    learning_rate: float = 1e-3
    """Step size of the optimizer."""
    discount: float = 0.997
    """Gamma: what a reward one step later is worth."""
    max_grad_norm: float = 5.0
    """Gradients are scaled down to this global norm."""
    num_simulations: int = 16
    """Calls of the model per decision. Gumbel MuZero learns with as few as there are actions, MuZero wants 50."""
    search: Literal["fast", "mctx"] = "fast"
    """Our search, or DeepMind's."""
    td_steps: int = 5
    """n: rewards added up before a value takes over."""
    td_lambda: float = 1.0
    """1 takes n-step returns; less mixes those of 1 to n steps."""
    value_target: Literal["root", "network"] = "root"
    """What returns end with: the value that the search found when it acted, or the target network's."""
    value_limit: float = 1000.0
    """Largest value that the value head can express; larger targets are clipped, and counted."""
    value_bins: int = 101
    """Bins of the value head."""
    value_cost: float = 0.25
    """Weight of the value loss."""
    entropy_cost: float = 0.0
    """Weight of a bonus for the entropy of the policy, which keeps it from settling early."""
    batch_size: int = 256
    """Starts of unrolls per gradient step, over all cores."""
    replay_ratio: float = 1.0
    """How often each decision is, on average, the start of an unroll."""
    replay_steps: int = 65_536
    """Decisions that each learner core keeps."""
    min_replay: int = 2_048
    """Decisions in memory, over all cores, before the first gradient step."""
    sequence_length: int = 32
    """Decisions per stored sequence; must divide the run's unroll_length, and is best equal to it."""
    frame_stack: int = 1
    """Frames per observation, where it is a stack of them: each is then kept once. 1: observations as they are."""
    sampling: Literal["uniform", "prioritised"] = "uniform"
    """Every start alike, or those more often whose value was wrong."""
    priority_exponent: float = 0.6
    """With prioritised: how much more often; 0 is uniform."""
    importance_exponent: float = 0.4
    """With prioritised: how much of that bias is undone by the loss's weights; 1 is all."""
    target_update: Literal["ema", "copy"] = "ema"
    """How the target network follows: by a moving average, or by a copy now and then."""
    target_decay: float = 0.99
    """With ema: what the target network keeps of itself per gradient step."""
    target_period: int = 200
    """With copy: gradient steps between two copies."""

    def __post_init__(self):
        super().__post_init__()
        counts = ("num_simulations", "td_steps", "batch_size", "replay_steps", "min_replay")
        for name in (*counts, "sequence_length", "frame_stack", "target_period"):
            check_number(name, getattr(self, name), minimum=1, whole=True)
        check_number("replay_steps", self.replay_steps, maximum=2**31 - 1)  # starts are counted in int32
        self._check_head("value")
        check_number("replay_ratio", self.replay_ratio, minimum=0, exclusive=True)
        for name in ("value_cost", "entropy_cost"):
            check_number(name, getattr(self, name), minimum=0)
        for name in ("td_lambda", "target_decay", "priority_exponent", "importance_exponent"):
            check_number(name, getattr(self, name), minimum=0, maximum=1)
        for name, kind in typing.get_type_hints(type(self)).items():
            options, value = typing.get_args(kind), getattr(self, name)
            if typing.get_origin(kind) is Literal and value not in options:
                raise unknown(name, str(value), options, f"Expected {' or '.join(options)}.")
        if self.replay_steps < self.sequence_length:
            raise UserError(
                f"replay_steps is {self.replay_steps}; expected at least one sequence, sequence_length = "
                f"{self.sequence_length}. Raise replay_steps."
            )

    def _check_head(self, head: str) -> None:
        bins = getattr(self, f"{head}_bins")
        check_number(f"{head}_bins", bins, minimum=3, whole=True)
        if bins % 2 == 0:
            raise UserError(f"{head}_bins is {bins}; expected an odd number, so that 0 is a bin.")
        check_number(f"{head}_limit", getattr(self, f"{head}_limit"), minimum=0, exclusive=True)

    @property
    def has_target(self) -> bool:
        """Whether a target network is used at all."""
        return self.value_target == "network" or self.reanalysed > 0


@dataclasses.dataclass(frozen=True)
class PlannerConfig(SearchConfig):
    """What agents have that learn a model."""

    unroll_steps: int = 5
    """K: steps that the model is unrolled in training."""
    reward_limit: float = 100.0
    """Largest reward that the reward head can express."""
    reward_bins: int = 51
    """Bins of the reward head."""
    reward_cost: float = 1.0
    """Weight of the reward loss."""
    self_consistency: bool = False
    """Pull the unrolled latents towards those of the observations that came (EfficientZero)."""
    consistency_cost: float = 2.0
    """Weight of that loss."""
    reanalysed: int = 0
    """Of the batch_size starts, how many get policies and root values from a new search with the target network."""

    def __post_init__(self):
        super().__post_init__()
        check_number("unroll_steps", self.unroll_steps, minimum=1, whole=True)
        self._check_head("reward")
        for name in ("reward_cost", "consistency_cost"):
            check_number(name, getattr(self, name), minimum=0)
        check_number("reanalysed", self.reanalysed, minimum=0, maximum=self.batch_size, whole=True)
        if self.sequence_length < self.unroll_steps:
            raise UserError(
                f"sequence_length is {self.sequence_length} and unroll_steps {self.unroll_steps}; expected sequences "
                "at least as long as unrolls. Raise sequence_length or lower unroll_steps."
            )


@dataclasses.dataclass(frozen=True)
class Puct:
    """Settings of a search by PUCT."""

    dirichlet_fraction: float = 0.25
    """Share of noise in the root's policy while acting."""
    dirichlet_alpha: float = 0.3
    """Concentration of that noise; small with many actions."""
    pb_c_init: float = 1.25
    """c1 of the PUCT rule: weight of the policy against the values."""
    pb_c_base: float = 19652.0
    """c2 of the PUCT rule: visits after which that weight grows."""
    temperature_start: float = 1.0
    """At first, actions are drawn from visits to the power 1 / temperature."""
    temperature_end: float = 0.25
    """The temperature after `temperature_updates`; half-way it is the geometric mean of both."""
    temperature_updates: int = 2_000
    """Learner updates over which the temperature falls, in two steps: at a half and at three quarters of them."""

    def __post_init__(self):
        super().__post_init__()  # type: ignore[misc]  # of the config that has these settings
        check_number("dirichlet_fraction", self.dirichlet_fraction, minimum=0, maximum=1)
        for name in ("dirichlet_alpha", "pb_c_init", "pb_c_base", "temperature_start", "temperature_end"):
            check_number(name, getattr(self, name), minimum=0, exclusive=True)
        check_number("temperature_updates", self.temperature_updates, minimum=1, whole=True)


@dataclasses.dataclass(frozen=True)
class Gumbel:
    """Settings of a search with Gumbel noise."""

    max_considered_actions: int = 16
    """Actions that the search tries at the root, at most."""
    gumbel_scale: float = 1.0
    """Scale of the noise while acting; 0 always takes the action that looks best."""
    value_scale: float = 0.1
    """c_scale: the weight of values against the policy. The less, the longer the policy stays undecided."""
    value_range: float = 1e-8
    """Each node's values are stretched to [0, 1], but by no more than if they spanned this: what differs less than it
    by the model's errors alone then decides less. Try about the worth of one reward where most choices do not matter.
    """

    def __post_init__(self):
        super().__post_init__()  # type: ignore[misc]  # of the config that has these settings
        check_number("max_considered_actions", self.max_considered_actions, minimum=1, whole=True)
        check_number("gumbel_scale", self.gumbel_scale, minimum=0)
        for name in ("value_scale", "value_range"):
            check_number(name, getattr(self, name), minimum=0, exclusive=True)


@dataclasses.dataclass(frozen=True)
class Config(Puct, PlannerConfig):
    """Settings of MuZero."""

    num_simulations: int = 50
    """Calls of the model per decision."""


@dataclasses.dataclass(frozen=True)
class GumbelConfig(Gumbel, PlannerConfig):
    """Settings of Gumbel MuZero."""

    search: Literal["fast", "rounds", "mctx"] = "fast"  # type: ignore[assignment]  # one more than PUCT has
    """Our search, ours with whole rounds of simulations at once (fewer, larger calls of the model), or DeepMind's."""


@dataclasses.dataclass(frozen=True)
class AlphaZeroConfig(Gumbel, Puct, SearchConfig):
    """Settings of AlphaZero."""

    rule: Literal["gumbel", "puct"] = "gumbel"
    """Gumbel's search, which improves the policy with any number of simulations, or PUCT as in the paper."""
    search: Literal["fast", "rounds", "mctx"] = "fast"  # type: ignore[assignment]
    """Our search, ours with whole rounds of simulations at once (with gumbel), or DeepMind's."""
    value_scale: float = 0.2
    """With gumbel: c_scale, the weight of values against the policy."""
    num_simulations: int = 32
    """Steps of the environment, and calls of the network, per decision."""
    discount: float = 1.0
    """Gamma: what a reward one step later is worth."""
    td_steps: int = 256
    """n: rewards added up before a value takes over; by default all of the game that a sequence holds."""
    value_limit: float = 1.0
    """Largest value that the value head can express; larger targets are clipped, and counted."""
    value_bins: int = 21
    """Bins of the value head."""
    value_cost: float = 1.0
    """Weight of the value loss."""

    def __post_init__(self):
        super().__post_init__()
        _check_rounds(self)


@dataclasses.dataclass(frozen=True)
class StochasticConfig(Config):
    """Settings of Stochastic MuZero."""

    num_outcomes: int = 32
    """M: what chance can do after an action, at most."""
    outcome_cost: float = 1.0
    """Weight of the loss of the outcomes' probabilities."""
    commitment_cost: float = 1.0
    """Weight of the loss that keeps the encoder of outcomes near the codes it chose."""

    def __post_init__(self):
        super().__post_init__()
        check_number("num_outcomes", self.num_outcomes, minimum=1, whole=True)
        for name in ("outcome_cost", "commitment_cost"):
            check_number(name, getattr(self, name), minimum=0)


@dataclasses.dataclass(frozen=True)
class SampledConfig(Gumbel, Puct, PlannerConfig):
    """Settings of Sampled MuZero; those of both searches, of which `rule` takes one."""

    search: Literal["fast", "rounds", "mctx"] = "fast"  # type: ignore[assignment]
    """Our search, ours with whole rounds of simulations at once (with gumbel), or DeepMind's."""
    num_simulations: int = 32
    """Calls of the model per decision."""
    rule: Literal["gumbel", "puct"] = "gumbel"
    """How the sampled actions are searched: as Gumbel MuZero does, or as MuZero does."""
    num_samples: int = 16
    """K: actions that each node samples. Spaces of no more actions than that are searched whole."""
    exploration_fraction: float = 0.0
    """While acting, share of the root's samples that come from the widest policy there is instead of the network's."""

    def __post_init__(self):
        super().__post_init__()
        check_number("num_samples", self.num_samples, minimum=1, whole=True)
        check_number("exploration_fraction", self.exploration_fraction, minimum=0, maximum=0.99)
        _check_rounds(self)


def _check_rounds(config: AlphaZeroConfig | SampledConfig) -> None:
    if config.rule == "puct" and config.search == "rounds":
        raise UserError("search is rounds and rule puct; expected fast or mctx. Rounds are of gumbel's search.")
