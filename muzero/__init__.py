"""MuZero: agents that search, with a model that they learn. They run on every architecture."""

from muzero.agent import gumbel_muzero, muzero
from muzero.config import Config, GumbelConfig
from muzero.model import network
from podracer import config as _config

__all__ = ["Config", "GumbelConfig", "gumbel_muzero", "muzero", "network"]

_config.register({"muzero": muzero, "gumbel-muzero": gumbel_muzero}, {"muzero": network()})
