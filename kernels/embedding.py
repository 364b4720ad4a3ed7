"""Rows of an embedding by their numbers, with a backward rule of its own.

As it is derived, the gradient is a sum in the type of the rows, which in bfloat16 loses what frequent tokens add up to;
and it is a scatter, which XLA makes a loop over all tokens of where operations are to be deterministic on a GPU.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

MOST_ONE_HOT = 2**25
"""Entries of the matrix of ones and zeros that is made at a time: 64 MiB in bfloat16."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def lookup(table: jax.Array, tokens: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """`table[tokens]`: `[V, width]` and int `[...]` to `[..., width]` of a type; NaN for a token that is not there.

    The table's gradient has its own type, and is summed in it. On CPUs it is a scatter, elsewhere a product with a
    matrix of ones and zeros. Differentiable once.
    """
    return jnp.take(table, tokens, axis=0).astype(dtype)


def _forward(table, tokens, dtype):
    return lookup(table, tokens, dtype), (tokens, table[:, :0])  # of the table its length and type alone


def _backward(dtype, residuals, gradient):
    tokens, table = residuals
    del dtype
    flat, rows = tokens.reshape(-1), gradient.reshape(-1, gradient.shape[-1])
    total = {"entries": table.shape[0], "dtype": table.dtype}
    cpu, default = (functools.partial(way, **total) for way in (scatter_rows, multiply_rows))
    return jax.lax.platform_dependent(flat, rows, cpu=cpu, default=default), None


lookup.defvjp(_forward, _backward)


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
