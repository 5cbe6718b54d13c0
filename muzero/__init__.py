"""Agents that search, with a model that they learn or with the environment itself. They run on every architecture."""

from muzero.agent import gumbel_muzero, muzero
from muzero.alphazero import alphazero
from muzero.config import AlphaZeroConfig, Config, GumbelConfig
from muzero.model import network
from podracer import config as _config

__all__ = ["AlphaZeroConfig", "Config", "GumbelConfig", "alphazero", "gumbel_muzero", "muzero", "network"]

_config.register({"alphazero": alphazero, "muzero": muzero, "gumbel-muzero": gumbel_muzero}, {"muzero": network()})
