"""MuZero: agents that search, with a model that they learn. They run on every architecture."""

from muzero.agent import gumbel_muzero, muzero, sampled_muzero
from muzero.config import Config, GumbelConfig, SampledConfig
from muzero.model import network
from podracer import config as _config

__all__ = ["Config", "GumbelConfig", "SampledConfig", "gumbel_muzero", "muzero", "network", "sampled_muzero"]

_AGENTS = {"muzero": muzero, "gumbel-muzero": gumbel_muzero, "sampled-muzero": sampled_muzero}
_config.register(_AGENTS, {"muzero": network()})
