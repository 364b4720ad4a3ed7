"""Layer normalisation with a backward rule of its own.

Its sums over a row are, on CPUs, products with ones: XLA for CPUs is slow at sums of products over the last axis
(measured by `kernels.py` in experiments/benchmarks). Elsewhere a product is a kernel of its own, and what it sums is
written to memory first; sums are made in one kernel with what surrounds them.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp


@jax.custom_vjp
def product(x: jax.Array, weights: jax.Array) -> jax.Array:
    """`x @ weights`: `[..., inputs]` and `[inputs, outputs]` to `[..., outputs]`.

    Differentiable once.
    """
    return x @ weights


def _product_forward(x, weights):
    return x @ weights, (x, weights)


def _product_backward(residuals, gradient):
    x, weights = residuals
    rows = tuple(range(x.ndim - 1))
    by_x = jax.lax.dot_general(gradient, weights, (((x.ndim - 1,), (1,)), ((), ())))
    if x.shape[-1] <= gradient.shape[-1]:
        return by_x, jax.lax.dot_general(x, gradient, ((rows, rows), ((), ())))
    # The narrower of the two is transposed; without the barrier XLA turns that around.
    turned = jax.lax.dot_general(gradient, x, ((rows, rows), ((), ())))
    return by_x, jax.lax.optimization_barrier(turned).T


product.defvjp(_product_forward, _product_backward)


MOST_ONE_HOT = 2**25
"""Entries of the matrix of ones and zeros that is made at a time: 64 MiB in bfloat16."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def lookup(table: jax.Array, tokens: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """`table[tokens]`: `[V, width]` and int `[...]` to `[..., width]` of a type; NaN for a token that is not there.

    The table's gradient has its own type, and is summed in it. On CPUs it is a scatter, elsewhere a product with a
    matrix of ones and zeros. Differentiable once.
    """
    return jnp.take(table, tokens, axis=0).astype(dtype)


def _lookup_forward(table, tokens, dtype):
    return lookup(table, tokens, dtype), (tokens, table[:, :0])  # of the table its length and type alone


def _lookup_backward(dtype, residuals, gradient):
    tokens, table = residuals
    del dtype
    flat, rows = tokens.reshape(-1), gradient.reshape(-1, gradient.shape[-1])
    total = {"entries": table.shape[0], "dtype": table.dtype}
    cpu, default = (functools.partial(way, **total) for way in (scatter_rows, multiply_rows))
    return jax.lax.platform_dependent(flat, rows, cpu=cpu, default=default), None


lookup.defvjp(_lookup_forward, _lookup_backward)


def scatter_rows(tokens: jax.Array, rows: jax.Array, *, entries: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The sum of the rows of each token, `[N, width]` to `[entries, width]`, in the order of the rows."""
    table = jax.ShapeDtypeStruct((entries, rows.shape[1]), dtype)
    (total,) = jax.linear_transpose(lambda table: jnp.take(table, tokens, axis=0), table)(rows.astype(dtype))
    return total


def multiply_rows(tokens: jax.Array, rows: jax.Array, *, entries: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The sum of the rows of each token, `[N, width]` to `[entries, width]`, by products of matrices.

    A product has at most `MOST_ONE_HOT` entries of ones and zeros, which the type of the rows represents exactly; sums
    are of the table's type. A row that is not finite makes the sums of all tokens NaN, for it is multiplied by zeros.
    """
    parts = math.ceil(entries * len(tokens) / MOST_ONE_HOT)
    size = math.ceil(entries / parts)

    def part(first: jax.Array) -> jax.Array:
        ones = (tokens == first + jnp.arange(size)[:, None]).astype(rows.dtype)
        return jnp.matmul(ones, rows, precision=jax.lax.Precision.HIGHEST, preferred_element_type=dtype)

    if parts == 1:
        return part(jnp.int32(0))
    sums = jax.lax.map(part, size * jnp.arange(parts))
    return sums.reshape(parts * size, -1)[:entries]


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
