"""A network of your own: a multi-layer perceptron with residual blocks.

    python examples/my_network.py                                   train PPO with it on the grid world
    podracer train anakin --env gridworld --network examples/my_network.py:recipe --network.blocks 3

A recipe is `(observation spec, rngs) -> flax.nnx module`; the module maps observations [N, ...] to features
[N, size], and the agent puts its heads on them. As a frozen dataclass its fields become flags.
"""

from __future__ import annotations

import dataclasses

import jax
from flax import nnx

from podracer.networks.mlp import flat_size, flatten


class ResidualMlp(nnx.Module):
    def __init__(self, observation_spec, config: Residual, rngs: nnx.Rngs):
        self.first = nnx.Linear(flat_size(observation_spec), config.size, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(config.size, rngs=rngs) for _ in range(config.blocks)])
        self.layers = nnx.List([nnx.Linear(config.size, config.size, rngs=rngs) for _ in range(config.blocks)])

    def __call__(self, observation):  # [N, ...] -> [N, size]
        features = jax.nn.relu(self.first(flatten(observation)))
        for norm, layer in zip(self.norms, self.layers, strict=True):
            features = features + jax.nn.relu(layer(norm(features)))
        return features


@dataclasses.dataclass(frozen=True)
class Residual:
    """Residual blocks over the flattened observation."""

    size: int = 64
    """Features of every layer."""
    blocks: int = 2
    """How many residual blocks."""

    def __call__(self, observation_spec, rngs: nnx.Rngs) -> ResidualMlp:
        return ResidualMlp(observation_spec, self, rngs)


recipe = Residual()


if __name__ == "__main__":
    import sys

    import anakin
    from podracer import agents, envs

    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 500_000
    env = envs.GridWorld()
    agent = agents.ppo(env.spec, network=recipe)
    run = anakin.train(agent, env, total_steps=steps, batch_per_core=32, unroll_length=32)
    print(f"gridworld after {run.steps:,} steps: {run.evaluate().returns.mean():.0%} of the goals reached")
