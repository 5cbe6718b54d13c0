"""Agents that search, with a model that they learn or with the environment itself. They run on every architecture."""

from muzero.agent import gumbel_muzero, muzero, sampled_muzero, stochastic_muzero
from muzero.alphazero import alphazero
from muzero.config import AlphaZeroConfig, Config, GumbelConfig, SampledConfig, StochasticConfig
from muzero.model import network
from podracer import config as _config

__all__ = [
    "AlphaZeroConfig",
    "Config",
    "GumbelConfig",
    "SampledConfig",
    "StochasticConfig",
    "alphazero",
    "gumbel_muzero",
    "muzero",
    "network",
    "sampled_muzero",
    "stochastic_muzero",
]

_AGENTS = {
    "alphazero": alphazero,
    "muzero": muzero,
    "gumbel-muzero": gumbel_muzero,
    "sampled-muzero": sampled_muzero,
    "stochastic-muzero": stochastic_muzero,
}
_config.register(_AGENTS, {"muzero": network()})
