"""Networks: recipes `(observation spec, rngs) -> flax.nnx module`, and the heads that agents put on them."""

from podracer.networks.atari import cnn, impala_resnet, impala_shallow, nature, resnet
from podracer.networks.mlp import mlp, pictures
from podracer.networks.recurrent import gru, lstm, recurrent

__all__ = [
    "cnn",
    "gru",
    "impala_resnet",
    "impala_shallow",
    "lstm",
    "mlp",
    "nature",
    "pictures",
    "recurrent",
    "resnet",
]
