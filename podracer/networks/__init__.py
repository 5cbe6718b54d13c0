"""Networks: recipes `(observation spec, rngs) -> flax.nnx module`, and the heads that agents put on them."""

from podracer.networks.mlp import mlp
from podracer.networks.recurrent import gru, lstm, recurrent

__all__ = ["gru", "lstm", "mlp", "recurrent"]
