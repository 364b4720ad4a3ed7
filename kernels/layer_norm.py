"""Layer normalisation with a backward rule of its own.

Its sums over a row are, on CPUs, products with ones: XLA for CPUs is slow at sums of products over the last axis
(measured by `kernels.py` in experiments/benchmarks). Elsewhere a product is a kernel of its own, and what it sums is
written to memory first; sums are made in one kernel with what surrounds them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float, dtype: Any) -> jax.Array:
    """`scale * (x - mean) / sqrt(variance + epsilon) + bias` over the last axis (Ba et al., 2016), in float32.

    Differentiable once.

    Args:
      x: `[..., D]`.
      scale, bias: `[D]`.
      epsilon: added to the variance, which is the population's.
      dtype: of the result.

    Returns:
      `[..., D]`.
    """
    return _forward(x, scale, bias, epsilon, dtype)[0]


def _forward(x, scale, bias, epsilon, dtype):
    whole = x.astype(jnp.float32)
    mean = _mean(whole)
    inverse = jax.lax.rsqrt(_mean((whole - mean) ** 2) + epsilon)
    return ((whole - mean) * inverse * scale + bias).astype(dtype), (x, scale, mean, inverse)


def _backward(epsilon, dtype, residuals, gradient):
    x, scale, mean, inverse = residuals
    gradient = gradient.astype(jnp.float32)
    normal = (x.astype(jnp.float32) - mean) * inverse
    by_normal = gradient * scale
    by_x = inverse * (by_normal - _mean(by_normal) - normal * _mean(by_normal * normal))
    rows = tuple(range(x.ndim - 1))
    return by_x.astype(x.dtype), jnp.sum(gradient * normal, rows), jnp.sum(gradient, rows)


layer_norm.defvjp(_forward, _backward)


def _mean(x: jax.Array) -> jax.Array:
    """Over the last axis, which stays: `[..., 1]`."""
    return jax.lax.platform_dependent(x, cpu=sum_by_product, default=sum_by_reduction) / x.shape[-1]


def sum_by_product(x: jax.Array) -> jax.Array:
    """The sum over the last axis, which stays: `[..., 1]`."""
    ones = jnp.ones((x.shape[-1], 1), x.dtype)
    return jnp.matmul(x, ones, precision=jax.lax.Precision.HIGHEST)


def sum_by_reduction(x: jax.Array) -> jax.Array:
    """The sum over the last axis, which stays: `[..., 1]`."""
    return jnp.sum(x, -1, keepdims=True)
