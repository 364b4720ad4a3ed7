"""Statistics of a distribution's upper tail, of the values under a mask, without a sort.

XLA's sort on a CPU is slow (24 rows of 1,536 values: 7 ms; a selection below: 0.3 ms), and every one of these is a
masked sum once an order statistic is known. That is found by bisection on the bits of float32, exactly.

Values and mask have one shape, of any rank, and everything is a scalar of all of them; `jax.vmap` gives more. Where
the mask is empty a statistic is 0, never NaN; a NaN under the mask makes it NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

LARGEST_INDEX = 100.0
"""What `hill` says at most: of a tail of values that are all but equal the index is infinite."""

_SLACK = 5e-4
"""Added to a share times a count, in float32, before it is rounded down: shares are whole thousandths."""


def order_statistics(x: ArrayLike, mask: ArrayLike, ranks: ArrayLike) -> jax.Array:
    """The values of the ranks given, the largest having rank 1.

    Args:
      x: float, in float32.
      mask: bool, of the same shape.
      ranks: int32 `[Q]`; brought into 1 to n, n being the number of values under the mask.

    Returns:
      float32 `[Q]`; 0 where the mask is empty.
    """
    x, mask = _flat(x, mask)
    n = jnp.sum(mask)
    wanted = jnp.clip(jnp.asarray(ranks, jnp.int32), 1, jnp.maximum(n, 1))
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    keys = jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)  # ordered as the values are
    lowest = jnp.int32(-(2**31))
    keys = jnp.where(mask, keys, lowest)

    def narrow(turn: jax.Array, found: jax.Array) -> jax.Array:
        higher = found + jnp.left_shift(jnp.int32(1), 31 - turn)
        enough = jnp.sum(keys >= higher[:, None], axis=-1) >= wanted
        return jnp.where(enough, higher, found)

    found = jax.lax.fori_loop(0, 32, narrow, jnp.full(wanted.shape, lowest))
    values = jax.lax.bitcast_convert_type(jnp.where(found < 0, found ^ jnp.int32(0x7FFFFFFF), found), jnp.float32)
    unknown = jnp.any(mask & jnp.isnan(x))
    return jnp.where(n == 0, 0.0, jnp.where(unknown, jnp.nan, values))


def masked_quantiles(x: ArrayLike, mask: ArrayLike, qs: Sequence[float]) -> jax.Array:
    """Quantiles, each the smallest value that a share of at least q does not exceed (the inverse of the distribution).

    Args:
      x: float, in float32.
      mask: bool, of the same shape.
      qs: shares from 0 to 1, whole thousandths.

    Returns:
      float32 `[len(qs)]`.
    """
    n = jnp.sum(jnp.asarray(mask)).astype(jnp.float32)
    above = jnp.asarray([1.0 - q for q in qs], jnp.float32)
    return order_statistics(x, mask, jnp.floor(above * n + _SLACK).astype(jnp.int32) + 1)


def effective_sample_size(log_weights: ArrayLike, mask: ArrayLike) -> jax.Array:
    """Kish's effective sample size as a share of n: (sum w)^2 / (n sum w^2), from weights that nothing has clamped.

    1 of equal weights, 1 / n where one outweighs the rest; exp(-s^2) of lognormal weights whose logarithm has the
    standard deviation s (n large).

    Args:
      log_weights: their logarithms; the largest is taken off first, so none overflows.
      mask: bool, of the same shape.
    """
    x, mask = _flat(log_weights, mask)
    largest = jnp.max(jnp.where(mask, x, -jnp.inf), initial=-jnp.inf)
    weights = jnp.where(mask, jnp.exp(x - jnp.where(jnp.isneginf(largest), 0.0, largest)), 0.0)
    squares = jnp.sum(weights**2)
    return jnp.sum(weights) ** 2 / _or_one(jnp.sum(mask) * squares)


def cvar(x: ArrayLike, mask: ArrayLike, share: float) -> jax.Array:
    """The mean of the largest share of the values, the conditional value at risk (Rockafellar and Uryasev, 2000).

    Of n values share * n count, one of them in part; the largest alone where that is less than one.
    """
    n = jnp.maximum(jnp.sum(jnp.asarray(mask)), 1)
    return _largest_sum(x, mask, share) / (share * n)


def top_share(x: ArrayLike, mask: ArrayLike, share: float = 0.01) -> jax.Array:
    """What part of the sum of values, none of them negative, is in the largest share of them.

    Equal values give the share itself, of whatever number.
    """
    flat, flat_mask = _flat(x, mask)
    return _largest_sum(x, mask, share) / _or_one(jnp.sum(jnp.where(flat_mask, flat, 0.0)))


def extreme_value_index(x: ArrayLike, mask: ArrayLike, k: ArrayLike | None = None) -> jax.Array:
    """Hill's estimate (1975) of the extreme value index: the mean log excess of the k largest over the one after them.

    0 of a thin tail; 1/2 and above where the variance is infinite. Unlike its reciprocal, the tail index, it is
    finite also of values that are all equal.

    Args:
      x: float; values that are not positive are left out.
      mask: bool, of the same shape.
      k: values in the tail; None: the square root of their number, rounded down.
    """
    x, mask = _flat(x, mask)
    mask &= ~(x <= 0)
    n = jnp.sum(mask)
    wanted = jnp.floor(jnp.sqrt(n.astype(jnp.float32))) if k is None else jnp.asarray(k)
    k = jnp.clip(wanted.astype(jnp.int32), 1, jnp.maximum(n - 1, 1))
    threshold = order_statistics(x, mask, k[None] + 1)[0]
    excess = jnp.where(mask & ~(x <= threshold), jnp.log(x) - jnp.log(_or_one(threshold)), 0.0)
    return jnp.sum(excess) / k


def hill(x: ArrayLike, mask: ArrayLike, k: ArrayLike | None = None) -> jax.Array:
    """Hill's estimate of the tail index, the a of P(X > x) ~ x^-a: the reciprocal of `extreme_value_index`.

    Its standard error is a / sqrt(k). LARGEST_INDEX at most; 0 of fewer than two values.
    """
    excess = extreme_value_index(x, mask, k)
    several = jnp.sum(jnp.asarray(mask) & ~(jnp.asarray(x) <= 0)) > 1
    return jnp.where(several, 1.0 / jnp.maximum(excess, 1.0 / LARGEST_INDEX), 0.0)


def _largest_sum(x: ArrayLike, mask: ArrayLike, share: float) -> jax.Array:
    """The sum of the largest share of n values: of share * n of them, the last in part or several times."""
    x, mask = _flat(x, mask)
    counted = share * jnp.sum(mask)
    threshold = order_statistics(x, mask, jnp.ceil(counted - _SLACK).astype(jnp.int32)[None])[0]
    above = mask & ~(x <= threshold)
    return jnp.sum(jnp.where(above, x, 0.0)) + (counted - jnp.sum(above)) * threshold


def _flat(x: ArrayLike, mask: ArrayLike) -> tuple[jax.Array, jax.Array]:
    return jnp.asarray(x, jnp.float32).reshape(-1), jnp.asarray(mask, bool).reshape(-1)


def _or_one(x: jax.Array) -> jax.Array:
    """A divisor, one in the place of zero."""
    return jnp.where(x == 0, 1.0, x)
