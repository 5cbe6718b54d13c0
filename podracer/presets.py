"""Presets: settings that were run, with what they reached. `train` uses the one that fits the environment and agent.

Those for all Atari games are the published ones of cleanba and were not run to the end here; they say so.

A preset is a starting point: every flag overrides its value. Where none fits, the agent's and the architecture's own
defaults are used.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Preset:
    """Settings for one environment and agent.

    Attributes:
      env: the environment's name, or its start with a final "*".
      agent: the agent's name.
      config: fields of the agent's config.
      network: name of the network recipe.
      network_config: fields of the recipe.
      settings: fields of the architecture's settings; the same on every architecture that has them.
      result: command, machine, duration and score of a run with it.
      env_options: options of the environment.
      automatic: taken where it fits without being asked for by its name.
    """

    env: str
    agent: str
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    network: str | None = None
    network_config: dict[str, Any] = dataclasses.field(default_factory=dict)
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    result: str = ""
    env_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    automatic: bool = True

    def fits(self, env: str, agent: str) -> bool:
        """Whether it is for this environment and agent."""
        matches = env.startswith(self.env[:-1]) if self.env.endswith("*") else env == self.env
        return matches and agent == self.agent


_CLEANBA = "not run to the end here: the hyperparameters of cleanba (Huang et al. 2023)"

PRESETS: dict[str, Preset] = {
    "catch-ppo": Preset(
        "catch",
        "ppo",
        config={"learning_rate": 1e-3, "anneal_steps": 400_000},
        settings={"total_steps": 400_000, "batch_per_core": 32, "unroll_length": 32},
        result="train anakin --env catch --agent ppo; 2 CPU cores, half a minute: return 1.00 over 640 episodes",
    ),
    "catch-a2c": Preset(
        "catch",
        "a2c",
        config={"learning_rate": 3e-3},
        settings={"total_steps": 400_000, "batch_per_core": 32, "unroll_length": 16},
        result="train anakin --env catch --agent a2c; 2 CPU cores, 18 s: return 1.00 over 640 episodes",
    ),
    "catch-impala": Preset(
        "catch",
        "impala",
        config={"learning_rate": 3e-3},
        settings={"total_steps": 400_000, "batch_per_core": 32, "unroll_length": 16},
        result="train anakin --env catch --agent impala; 2 CPU cores, 12 s: return 1.00 over 640 episodes",
    ),
    "catch-pqn": Preset(
        "catch",
        "pqn",
        config={"learning_rate": 1e-3, "epsilon_updates": 60, "epsilon_end": 0.01},
        settings={"total_steps": 400_000, "batch_per_core": 32, "unroll_length": 32},
        result="train anakin --env catch --agent pqn; 2 CPU cores, 16 s: return 1.00 over 640 episodes",
    ),
    "catch-gumbel-muzero": Preset(
        "catch",
        "gumbel-muzero",
        config={
            "num_simulations": 8,
            "learning_rate": 3e-3,
            "batch_size": 64,
            "replay_ratio": 2.0,
            "replay_steps": 16_384,
            "min_replay": 1_024,
            "value_limit": 10.0,
            "value_bins": 21,
            "reward_limit": 10.0,
            "reward_bins": 21,
        },
        network="muzero",
        network_config={"width": 32, "head_width": 32},
        settings={"total_steps": 300_000, "batch_per_core": 16, "unroll_length": 32},
        result="train anakin --env catch --agent gumbel-muzero; 2 shared CPU cores, 44 s: 1.00 over 640 episodes; "
        "train sebulba, --batch-size 32: 1.00",
    ),
    "cartpole-gumbel-muzero": Preset(
        "cartpole",
        "gumbel-muzero",
        config={
            "num_simulations": 8,
            "learning_rate": 3e-3,
            "batch_size": 128,
            "td_steps": 20,
            "value_limit": 300.0,
            "value_bins": 51,
            "reward_limit": 10.0,
            "reward_bins": 21,
        },
        network="muzero",
        network_config={"width": 64, "head_width": 32},
        settings={"total_steps": 400_000, "batch_per_core": 16, "unroll_length": 32},
        result="train anakin --env cartpole --agent gumbel-muzero; 2 shared CPU cores, 53 s: 500 over 640 episodes; "
        "train sebulba, --batch-size 32: 500",
    ),
    "pendulum-sampled-muzero": Preset(
        "gymnax/Pendulum-v1",
        "sampled-muzero",
        config={
            "num_samples": 8,
            "num_simulations": 16,
            "exploration_fraction": 0.25,
            "entropy_cost": 0.005,
            "learning_rate": 2e-3,
            "discount": 0.97,
            "td_steps": 10,
            "batch_size": 128,
            "min_replay": 2_000,
            "value_limit": 600.0,
            "value_bins": 51,
            "reward_limit": 20.0,
            "reward_bins": 51,
            "normalize_observations": True,
        },
        network="muzero",
        settings={"total_steps": 500_000, "batch_per_core": 16, "unroll_length": 32, "evaluations": 6},
        result=(
            "train anakin --env gymnax/Pendulum-v1 --agent sampled-muzero --cores 1; one shared CPU core, 72 s: return "
            "-200 and -158 over 640 episodes, seeds 0 and 1"
        ),
    ),
    "2048-stochastic-muzero": Preset(
        "pgx/2048",
        "stochastic-muzero",
        config={
            "num_simulations": 20,
            "learning_rate": 1e-3,
            "discount": 0.99,
            "td_steps": 10,
            "min_replay": 4_000,
            "value_limit": 5_000.0,
            "reward_limit": 2_100.0,
            "temperature_updates": 200,
        },
        network="muzero",
        network_config={"kind": "mlp", "width": 128, "head_width": 64},
        settings={"total_steps": 80_000, "batch_per_core": 32, "unroll_length": 32, "evaluations": 4},
        result=(
            "train anakin --env pgx/2048 --agent stochastic-muzero --cores 1; one shared CPU core, about a minute: "
            "score 2,447 over 640 games; muzero with the same settings: 1,437"
        ),
    ),
    "tic-tac-toe-alphazero": Preset(
        "pgx/tic_tac_toe",
        "alphazero",
        config={
            "num_simulations": 24,
            "learning_rate": 2e-3,
            "anneal_steps": 800_000,
            "replay_ratio": 2.0,
            "replay_steps": 65_536,
            "min_replay": 4_096,
            "sequence_length": 32,
        },
        network="muzero",
        network_config={"depth": 2, "kind": "mlp"},
        settings={"total_steps": 800_000, "batch_per_core": 64, "unroll_length": 32},
        result="train anakin --preset tic-tac-toe-alphazero --cores 1; 2 shared CPU cores, 2 minutes: 100 draws in 100 "
        "games against minimax",
    ),
    "connect-four-alphazero": Preset(
        "pgx/connect_four",
        "alphazero",
        config={
            "num_simulations": 24,
            "learning_rate": 2e-3,
            "anneal_steps": 15_000_000,
            "batch_size": 512,
            "replay_ratio": 2.0,
            "replay_steps": 258_048,
            "min_replay": 16_384,
            "sequence_length": 42,
        },
        network="muzero",
        network_config={"width": 256, "depth": 2, "head_width": 128, "kind": "mlp"},
        settings={"total_steps": 15_000_000, "batch_per_core": 128, "unroll_length": 42, "starts": "optimistic"},
        env_options={"opening_moves": 12},
        result="train anakin --env pgx/connect_four --agent alphazero --cores 1; one CPU core, 48 minutes: 96 wins, 0 "
        "draws in 100 games against mcts:400, 97 and 0 with --simulations 128, 100 with 400 (--params last)",
    ),
    "memory-chain-ppo": Preset(
        "memory-chain",
        "ppo",
        config={"learning_rate": 2e-3},
        network="lstm",
        network_config={"size": 32},
        settings={"total_steps": 300_000, "batch_per_core": 32, "unroll_length": 32},
        result="train anakin --env memory-chain --agent ppo; 2 CPU cores, 25 s: return 1.00 over 640 episodes",
    ),
    "pendulum-ppo": Preset(
        "brax/inverted_pendulum",
        "ppo",
        config={
            "learning_rate": 1e-3,
            "minibatches": 8,
            "normalize_observations": True,
            "normalize_rewards": True,
            "entropy_cost": 0.0,
        },
        settings={"total_steps": 400_000, "batch_per_core": 64, "unroll_length": 32, "starts": "cached"},
        result="train anakin --env brax/inverted_pendulum --env.backend spring; 2 cores: return 460 at 300,000 steps",
    ),
    "cartpole-ppo": Preset(
        "cartpole",
        "ppo",
        config={"learning_rate": 2.5e-4, "anneal_steps": 500_000},
        settings={"total_steps": 500_000, "batch_per_core": 4, "unroll_length": 128},
        result="train anakin --env cartpole --agent ppo; 2 CPU cores, 15 s: 499 to 500, seeds 0 to 2",
    ),
    "minatar-ppo": Preset(
        "minatar/*",
        "ppo",
        config={"learning_rate": 5e-3, "anneal_steps": 10_000_000, "minibatches": 8, "value_clip": 0.2},
        network="mlp",
        network_config={"activation": "relu"},
        settings={"total_steps": 10_000_000, "batch_per_core": 32, "unroll_length": 128},
        result="train anakin --env minatar/Breakout --agent ppo; 2 CPU cores, 240 CPU seconds: 62.6 over 640 episodes",
    ),
    # A temperature of 0.02 in units of value (decision 23): where nothing matters, the policy stays undecided.
    "breakout-gumbel-muzero": Preset(
        "minatar/Breakout",
        "gumbel-muzero",
        config={
            "num_simulations": 8,
            "learning_rate": 2e-3,
            "anneal_steps": 1_000_000,
            "discount": 0.97,
            "td_steps": 10,
            "batch_size": 128,
            "replay_ratio": 16.0,
            "replay_steps": 32_768,
            "min_replay": 4_096,
            "value_limit": 20.0,
            "value_bins": 81,
            "reward_limit": 2.0,
            "reward_bins": 11,
            "value_range": 1.0,
            "value_scale": 0.2,
            "entropy_cost": 0.25,
        },
        network="muzero",
        network_config={"width": 128, "depth": 2, "head_width": 64, "kind": "mlp"},
        settings={"total_steps": 500_000, "batch_per_core": 32, "unroll_length": 32},
        result="train anakin --env minatar/Breakout --agent gumbel-muzero --cores 1; one CPU core, 9 minutes, "
        "seeds 0 to 3: 20.9 while training (20.0 to 21.9), best params 24.0 to 28.5 over 640 episodes",
    ),
    "atari-ppo": Preset(
        "atari/*",
        "ppo",
        config={
            "learning_rate": 2.5e-4,
            "anneal_steps": 50_000_000,
            "clip": 0.1,
            "shared_trunk": True,
        },
        network="impala",
        settings={"total_steps": 50_000_000, "batch_size": 64, "unroll_length": 128},
        result=f"{_CLEANBA}, which reached Breakout 411, Pong 18.7, Qbert 14,777 with it in 29 minutes on 8 A100",
    ),
    # cleanba's loss is a sum over the 20 x 32 decisions of a learner step and ours is a mean, so its gradient norm of
    # 40 and its epsilon of 0.01 are divided by 640; the steps taken are the same.
    "atari-impala": Preset(
        "atari/*",
        "impala",
        config={
            "learning_rate": 6e-4,
            "anneal_steps": 50_000_000,
            "optimizer": "rmsprop",
            "optimizer_epsilon": 0.01 / 640,
            "max_grad_norm": 40.0 / 640,
            "shared_trunk": True,
        },
        network="impala",
        settings={"total_steps": 50_000_000, "batch_size": 64, "unroll_length": 20, "learner_splits": 4},
        result=f"{_CLEANBA}, which reached Breakout 481, Pong 19.1, Qbert 20,182 with it in 22 minutes on 8 A100",
    ),
    # Small pictures and a small network, for two CPU cores; not Machado's protocol, so it must be asked for.
    "pong-cpu": Preset(
        "atari/Pong",
        "ppo",
        config={
            "learning_rate": 1e-3,
            "anneal_steps": 800_000,
            "epochs": 2,
            "minibatches": 8,
            "normalize_observations": True,
            "shared_trunk": True,
        },
        network="nature",
        network_config={"widths": (16, 32), "windows": ((6, 3), (4, 2)), "dense": 256},
        settings={"total_steps": 400_000, "batch_size": 16, "unroll_length": 64, "evaluations": 4},
        env_options={"protocol": "classic", "life_loss_ends": False, "image_size": 42, "num_threads": 1},
        automatic=False,
        result="train sebulba --preset pong-cpu; 2 CPU cores, 4 minutes: score 20.1 over 20 games, the worst 20",
    ),
    "pong-gumbel-muzero": Preset(
        "atari/Pong",
        "gumbel-muzero",
        config={
            "num_simulations": 8,
            "learning_rate": 1e-3,
            "discount": 0.98,
            "normalize_observations": True,
            "td_steps": 15,
            "batch_size": 128,
            "replay_ratio": 4.0,
            "replay_steps": 65_536,
            "min_replay": 8_192,
            "sequence_length": 64,
            "frame_stack": 4,
            "value_limit": 5.0,
            "value_bins": 51,
            "reward_limit": 2.0,
            "reward_bins": 11,
            "value_range": 0.3,
            "value_scale": 0.3,
            "entropy_cost": 0.35,
        },
        network="muzero",
        network_config={
            "kind": "cnn",
            "width": 128,
            "head_width": 64,
            "trunk": {"widths": (16, 32), "windows": ((6, 3), (4, 2)), "dense": 256},
        },
        settings={"total_steps": 1_900_000, "batch_size": 16, "unroll_length": 64, "eval_episodes": 4},
        env_options={"protocol": "classic", "life_loss_ends": False, "image_size": 42, "num_threads": 1},
        automatic=False,
        result="train sebulba --preset pong-gumbel-muzero; 2 CPU cores, 28 minutes: -4.7 while training, from -20.4",
    ),
}


def find(env: str, agent: str) -> tuple[str, Preset] | None:
    """`(name, preset)` for an environment and agent, or None; one for that very environment comes first."""
    fitting = [(name, preset) for name, preset in PRESETS.items() if preset.automatic and preset.fits(env, agent)]
    return min(fitting, key=lambda found: found[1].env.endswith("*"), default=None)
