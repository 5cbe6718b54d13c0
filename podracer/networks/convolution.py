"""A convolution whose gradient is fast inside `lax.scan` on a CPU.

XLA:CPU takes a convolution's gradient to its fast path only outside loops: inside one, a Nature CNN's gradient step
costs 16 to 30 times as much. So on a CPU the backward pass is written as matrix products over image patches; the
forward pass, which is fast everywhere, stays a convolution. On other backends nothing is changed.
"""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp

Padding = Literal["SAME", "VALID"]


def convolve(images: jax.Array, kernel: jax.Array, stride: int, padding: Padding) -> jax.Array:
    """2-D convolution of `images` [N, H, W, C] with `kernel` [k, k, C, F] -> [N, H', W', F]."""
    if jax.default_backend() == "cpu":
        return _with_patches(images, kernel, stride, padding)
    return _plain(images, kernel, stride, padding)


def _plain(images, kernel, stride, padding):
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(images, kernel, (stride, stride), padding, dimension_numbers=layout)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _with_patches(images, kernel, stride, padding):
    return _plain(images, kernel, stride, padding)


def _forward(images, kernel, stride, padding):
    return _plain(images, kernel, stride, padding), (images, kernel)


def _backward(stride, padding, saved, gradient):
    images, kernel = saved
    size, features = kernel.shape[0], kernel.shape[-1]
    cut = functools.partial(_patches, size=size, stride=stride, padding=padding)
    flat = gradient.reshape(-1, features)
    patches = cut(images)
    kernel_gradient = patches.reshape(-1, patches.shape[-1]).T @ flat
    patch_gradient = (flat @ kernel.reshape(-1, features).T).reshape(patches.shape)
    (image_gradient,) = jax.linear_transpose(cut, images)(patch_gradient)
    return image_gradient, kernel_gradient.reshape(kernel.shape)


_with_patches.defvjp(_forward, _backward)


def _patches(images: jax.Array, size: int, stride: int, padding: Padding) -> jax.Array:
    """All patches side by side, [N, H', W', size * size * C], by strided slices."""
    _, height, width, channels = images.shape
    pads = jax.lax.padtype_to_pads((height, width), (size, size), (stride, stride), padding)
    images = jnp.pad(images, ((0, 0), *pads, (0, 0)))
    rows, columns = ((length - size) // stride + 1 for length in images.shape[1:3])
    parts = [
        jax.lax.slice(
            images,
            (0, row, column, 0),
            (images.shape[0], row + (rows - 1) * stride + 1, column + (columns - 1) * stride + 1, channels),
            (1, stride, stride, 1),
        )
        for row in range(size)
        for column in range(size)
    ]
    return jnp.concatenate(parts, -1)
