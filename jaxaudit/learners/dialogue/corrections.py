"""Weights that undo a mismatch of sampler and trainer: recomputed over sampled probability, truncated or masked.

Both are log-probabilities of the same tokens under what should be the same policy, so the weights are constants to
every gradient. `log_weight` is recomputed - sampled, `[N, T]`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

LEVELS = ("token", "sequence", "geometric")
"""What a weight is of: a token; a row, the product over its own tokens; or (masking alone) a token of a row whose
geometric mean is within the bounds, which does not reject rows for being long."""


def none(log_weight: jax.Array) -> jax.Array:
    """Ones, `[N, T]`."""
    return jnp.ones_like(log_weight)


def tis(log_weight: jax.Array, own: jax.Array, cap: ArrayLike, level: str = "token") -> jax.Array:
    """Truncated importance sampling: `min(weight, cap)`, `[N, T]` (Yao et al., 2025)."""
    return jnp.where(own, jnp.minimum(_weight(log_weight, own, level), cap), 0)


def mis(log_weight: jax.Array, own: jax.Array, low: ArrayLike, high: ArrayLike, level: str = "token") -> jax.Array:
    """Masked importance sampling: the weight, or zero where it is outside [low, high], `[N, T]`."""
    weight = _weight(log_weight, own, "token" if level == "geometric" else level)
    judged = jnp.exp(_row_mean(log_weight, own)) if level == "geometric" else weight
    return jnp.where(own & (judged >= low) & (judged <= high), weight, 0)


def _weight(log_weight: jax.Array, own: jax.Array, level: str) -> jax.Array:
    masked = jax.lax.stop_gradient(jnp.where(own, log_weight, 0))
    return jnp.exp(jnp.sum(masked, -1, keepdims=True) if level == "sequence" else masked)


def _row_mean(log_weight: jax.Array, own: jax.Array) -> jax.Array:
    masked = jax.lax.stop_gradient(jnp.where(own, log_weight, 0))
    count = jnp.sum(own, -1, keepdims=True, dtype=log_weight.dtype)
    return jnp.sum(masked, -1, keepdims=True) / jnp.maximum(count, 1)
