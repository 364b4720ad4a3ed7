"""Logarithms of the policy's probability over the old policy's, by token or by row; differentiable in the new ones.

All take log-probabilities of the tokens written, now and before, `[N, T]`, and the own-mask, bool `[N, T]`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def token(new: jax.Array, old: jax.Array, own: jax.Array) -> jax.Array:
    """Of each token, `[N, T]`; zero where it is given."""
    return jnp.where(own, new - old, 0)


def sequence_mean(new: jax.Array, old: jax.Array, own: jax.Array) -> jax.Array:
    """A row's mean over its own tokens, whose gradient goes to each token's own probability, `[N, T]`.

    GSPO's ratio `sg(exp(mean log rho)) pi / sg(pi)` (Zheng et al., 2025). Where a row's tokens share one advantage, the
    gradient is that of the mean itself.
    """
    log_ratio = token(new, old, own)
    mean = jnp.sum(log_ratio, -1, keepdims=True) / jnp.maximum(jnp.sum(own, -1, keepdims=True, dtype=new.dtype), 1)
    # The difference is exactly zero: GSPO's clip ranges are so narrow that rounding must not add to the mean.
    return jnp.where(own, jax.lax.stop_gradient(mean) + (log_ratio - jax.lax.stop_gradient(log_ratio)), 0)


def sequence_sum(new: jax.Array, old: jax.Array, own: jax.Array) -> jax.Array:
    """Of the whole row, the sum over its own tokens, `[N, 1]` (RLOO: Ahmadian et al., 2024)."""
    return jnp.sum(token(new, old, own), -1, keepdims=True)


RATIOS = {"token": token, "sequence_mean": sequence_mean, "sequence_sum": sequence_sum}
