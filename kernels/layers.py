"""Functions of a transformer's layers with backward rules of their own: dense products, embedding lookups and norms."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp


@jax.custom_vjp
def product(x: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns `x @ weights`: `[..., inputs]` and `[inputs, outputs]` to `[..., outputs]`.

    The backward rule avoids the default gradient of the weights. That is a product of transposed rows, for which XLA's
    CPU backend has no fast implementation (measured by `kernels.py` in experiments/benchmarks), and whose bfloat16 form
    accumulates in bfloat16 from jaxlib 0.11 on. Differentiable once.
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
    # The narrower of the two is transposed. Without the barrier XLA would undo that.
    transposed = jax.lax.dot_general(gradient, x, ((rows, rows), ((), ())))
    return by_x, jax.lax.optimization_barrier(transposed).T


product.defvjp(_product_forward, _product_backward)


MOST_ONE_HOT = 2**25
"""The largest number of entries of a one-hot matrix that is held at a time: 64 MiB in bfloat16."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def lookup(table: jax.Array, tokens: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Returns `table[tokens]` in a dtype: `[V, width]` and int `[...]` to `[..., width]`, NaN for an unknown token.

    The backward rule accumulates the table's gradient in the table's dtype: the default gradient accumulates in the
    rows' dtype, where in bfloat16 the sums of frequent tokens lose digits. On CPUs it is a scatter. Elsewhere it is a
    product with a one-hot matrix, because with deterministic operations XLA makes a scatter a loop over all tokens on a
    GPU. Differentiable once.
    """
    return jnp.take(table, tokens, axis=0).astype(dtype)


def _lookup_forward(table, tokens, dtype):
    return lookup(table, tokens, dtype), (tokens, table[:, :0])  # no entries of the table, only its length and dtype


def _lookup_backward(dtype, residuals, gradient):
    tokens, table = residuals
    del dtype
    flat, rows = tokens.reshape(-1), gradient.reshape(-1, gradient.shape[-1])
    options = {"entries": table.shape[0], "dtype": table.dtype}
    cpu, default = (functools.partial(function, **options) for function in (scatter_rows, multiply_rows))
    return jax.lax.platform_dependent(flat, rows, cpu=cpu, default=default), None


lookup.defvjp(_lookup_forward, _lookup_backward)


def scatter_rows(tokens: jax.Array, rows: jax.Array, *, entries: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Sums the rows of each token, `[N, width]` to `[entries, width]`, in the order of the rows."""
    table = jax.ShapeDtypeStruct((entries, rows.shape[1]), dtype)
    (total,) = jax.linear_transpose(lambda table: jnp.take(table, tokens, axis=0), table)(rows.astype(dtype))
    return total


def multiply_rows(tokens: jax.Array, rows: jax.Array, *, entries: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Sums the rows of each token, `[N, width]` to `[entries, width]`, by products with one-hot matrices.

    A one-hot matrix has at most `MOST_ONE_HOT` entries, which the rows' dtype represents exactly. Sums are accumulated
    in `dtype`. A row that is not finite makes the sums of all tokens NaN, because it is multiplied by zeros.
    """
    parts = math.ceil(entries * len(tokens) / MOST_ONE_HOT)
    size = math.ceil(entries / parts)

    def part(first: jax.Array) -> jax.Array:
        one_hot = (tokens == first + jnp.arange(size)[:, None]).astype(rows.dtype)
        return jnp.matmul(one_hot, rows, precision=jax.lax.Precision.HIGHEST, preferred_element_type=dtype)

    if parts == 1:
        return part(jnp.int32(0))
    sums = jax.lax.map(part, size * jnp.arange(parts))
    return sums.reshape(parts * size, -1)[:entries]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float, dtype: Any) -> jax.Array:
    """Returns `scale * (x - mean) / sqrt(variance + epsilon) + bias` over the last axis (Ba et al., 2016), in float32.

    Sums over a row are products with ones on CPUs, because XLA's CPU backend is slow at sums of products over the last
    axis (measured by `kernels.py` in experiments/benchmarks). Elsewhere they are reductions, which are fused with the
    surrounding operations, while a product would write its inputs to memory. Differentiable once.

    Args:
      x: `[..., D]`.
      scale, bias: `[D]`.
      epsilon: added to the population variance.
      dtype: dtype of the result.

    Returns:
      `[..., D]`.
    """
    return _norm_forward(x, scale, bias, epsilon, dtype)[0]


def _norm_forward(x, scale, bias, epsilon, dtype):
    x32 = x.astype(jnp.float32)
    mean = _mean(x32)
    inverse = jax.lax.rsqrt(_mean((x32 - mean) ** 2) + epsilon)
    return ((x32 - mean) * inverse * scale + bias).astype(dtype), (x, scale, mean, inverse)


def _norm_backward(epsilon, dtype, residuals, gradient):
    x, scale, mean, inverse = residuals
    gradient = gradient.astype(jnp.float32)
    normalized = (x.astype(jnp.float32) - mean) * inverse
    by_normalized = gradient * scale
    by_x = inverse * (by_normalized - _mean(by_normalized) - normalized * _mean(by_normalized * normalized))
    rows = tuple(range(x.ndim - 1))
    return by_x.astype(x.dtype), jnp.sum(gradient * normalized, rows), jnp.sum(gradient, rows)


layer_norm.defvjp(_norm_forward, _norm_backward)


def _mean(x: jax.Array) -> jax.Array:
    return jax.lax.platform_dependent(x, cpu=sum_by_product, default=sum_by_reduction) / x.shape[-1]


def sum_by_product(x: jax.Array) -> jax.Array:
    """Sums over the last axis by a product with ones: `[..., D]` to `[..., 1]`."""
    ones = jnp.ones((x.shape[-1], 1), x.dtype)
    return jnp.matmul(x, ones, precision=jax.lax.Precision.HIGHEST)


def sum_by_reduction(x: jax.Array) -> jax.Array:
    """Sums over the last axis by a reduction: `[..., D]` to `[..., 1]`."""
    return jnp.sum(x, -1, keepdims=True)
