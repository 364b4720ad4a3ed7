"""What is measured of a critic: how well it predicts returns, where in a row, and whether it sees a wrong token."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxaudit.learners.dialogue.telemetry.strata import Measured, Statistics, mean

DISTANCES = (0, 1, 2, 4, 8, 16, 32, 64)
"""Where bins of the distance from a row's end begin, in own tokens; the last has no end."""

DISTANCE_LABELS = ("0", "1", "2-3", "4-7", "8-15", "16-31", "32-63", "64+")


ROUNDING = 8
"""Returns whose standard deviation is at most so many roundings of the largest value are taken for equal."""


def value_statistics(values: jax.Array, returns: jax.Array, own: jax.Array) -> Statistics:
    """How well values predict what tokens return.

    Args:
      values: `[N, T]`.
      returns: what they should be, `[N, T]`.
      own: bool `[N, T]`.

    Returns:
      explained_variance, 1 - var(return - value) / var(return), with nothing to say where returns are all equal, but
      for the rounding of sums of values; value_bias, the mean of value less return.
    """
    count = jnp.sum(own)
    error = returns - values
    bias = mean(error, own)
    centre = mean(returns, own)
    unexplained, variance = mean((error - bias) ** 2, own), mean((returns - centre) ** 2, own)
    largest = jnp.max(jnp.where(own, jnp.maximum(jnp.abs(returns), jnp.abs(values)), 0.0), initial=0.0)
    equal = variance <= (ROUNDING * jnp.finfo(variance.dtype).eps * largest) ** 2
    explained = 1.0 - unexplained / jnp.where(equal, 1.0, variance)
    return {
        "explained_variance": Measured(explained, jnp.where(equal, 0, count)),
        "value_bias": Measured(-bias, count),
    }


def of_scores(values: jax.Array, returns: jax.Array, own: jax.Array) -> Statistics:
    """`value_statistics` against what the rows' scores alone return, without a KL penalty, by names of their own."""
    return {f"score_{name}": one for name, one in value_statistics(values, returns, own).items()}


def critic_errors(collected: jax.Array, own: jax.Array, held_out: jax.Array, held_out_own: jax.Array) -> Statistics:
    """The mean squared error on rows trained on and on others: a critic that memorises has a gap between them.

    Args:
      collected: value less return on the rows trained on, `[N, T]`, and `own`, bool `[N, T]`.
      held_out: that on held-out rows, `[M, T]`, and `held_out_own`.

    Returns:
      critic_error `[2]`: collected, held out (or of fixed prompts, of a dialogue that is not split).
    """
    errors = jnp.stack([mean(collected**2, own), mean(held_out**2, held_out_own)])
    return {"critic_error": Measured(errors, jnp.stack([jnp.sum(own), jnp.sum(held_out_own)]))}


def distances(own: jax.Array) -> jax.Array:
    """How many own tokens of its row come after every slot: int32 `[N, T]`, 0 at the last own token."""
    after = jnp.cumsum(own[:, ::-1], axis=1, dtype=jnp.int32)[:, ::-1]
    return after - own


def correlation_by_distance(
    values: jax.Array, returns: jax.Array, own: jax.Array, begins: Sequence[int] = DISTANCES
) -> Statistics:
    """Pearson's correlation of values and returns, by the distance from the row's end.

    Where the reward comes at the end, a value signal that decays over a row shows as a correlation that falls with the
    distance.

    Args:
      values: `[N, T]`.
      returns: `[N, T]`.
      own: bool `[N, T]`.
      begins: where bins begin, rising from 0.

    Returns:
      value_correlation `[bins]`; a bin where values or returns are all equal has nothing to say.
    """
    far = distances(own)
    ends = jnp.asarray([*begins[1:], jnp.iinfo(jnp.int32).max])
    bins = own & (far >= jnp.asarray(begins)[:, None, None]) & (far < ends[:, None, None])

    def correlation(mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = jnp.where(mask, values - mean(values, mask), 0.0)
        y = jnp.where(mask, returns - mean(returns, mask), 0.0)
        # Each brought to a largest entry of one, or squares of small values would vanish.
        largest_x, largest_y = jnp.max(jnp.abs(x)), jnp.max(jnp.abs(y))
        x, y = (z / jnp.where(largest == 0, 1.0, largest) for z, largest in ((x, largest_x), (y, largest_y)))
        there = (largest_x != 0) & (largest_y != 0)
        length = jnp.sqrt(jnp.sum(x**2) * jnp.sum(y**2))
        return jnp.sum(x * y) / jnp.where(there, length, 1.0), jnp.where(there, jnp.sum(mask), 0)

    found, count = jax.vmap(correlation)(bins)
    return {"value_correlation": Measured(found, count)}


def separation(right: jax.Array, wrong: jax.Array, there: jax.Array) -> Statistics:
    """Whether a critic tells rows apart that differ in one token, after which one can succeed and the other cannot.

    Args:
      right: values after the right token, `[M]`.
      wrong: values after the wrong one, `[M]`.
      there: the pairs that count, bool `[M]`.

    Returns:
      critic_separation, the mean difference in reward units; critic_order, the share of pairs in which the right one's
      value is higher, equal ones counting half: 1/2 by chance.
    """
    count = jnp.sum(there)
    order = jnp.where(right > wrong, 1.0, jnp.where(right == wrong, 0.5, jnp.where(right < wrong, 0.0, jnp.nan)))
    return {
        "critic_separation": Measured(mean(right - wrong, there), count),
        "critic_order": Measured(mean(order, there), count),
    }
