"""Tokens whose advantage and log-probability vary together, which take entropy away (Cui et al., 2025).

Clip-Cov takes a random few of them out of the gradient, KL-Cov holds the most extreme ones near the old policy. The
authors' code chooses them in each minibatch by the current policy; here they are chosen once an iteration, among all
its own tokens and by the policy before the first update, where the two policies are the same.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

TREATMENTS = ("none", "clip", "kl")

LOWEST, HIGHEST = 1.0, 5.0
"""Between these covariances Clip-Cov chooses its tokens."""


def covariance(advantage: jax.Array, log_probability: jax.Array, own: jax.Array) -> jax.Array:
    """Each own token's (A - mean A)(log pi - mean log pi), `[N, T]`, means over own tokens; 0 at given ones."""
    count = jnp.maximum(jnp.sum(own), 1)

    def centred(x: jax.Array) -> jax.Array:
        x = jnp.where(own, x, 0.0)
        return jnp.where(own, x - jnp.sum(x) / count, 0.0)

    return centred(advantage) * centred(log_probability)


def select_tokens(
    how: str, share: ArrayLike, advantage: jax.Array, log_probability: jax.Array, own: jax.Array, key: jax.Array
) -> jax.Array:
    """The tokens that are treated apart, bool `[N, T]`: a share of the own ones, rounded down, but at least one.

    Args:
        how: "clip": random ones among those whose covariance lies in (1, 5); "kl": those of highest covariance.
        share: scalar in [0, 1].
        advantage, log_probability: constants, `[N, T]`.
        own: bool `[N, T]`.
        key: for the random ones.
    """
    found = covariance(advantage, log_probability, own)
    if how == "clip":
        eligible = own & (found > LOWEST) & (found < HIGHEST)
        turn = jax.random.uniform(key, own.shape)
    else:
        eligible, turn = own, found
    order = jnp.argsort(jnp.where(eligible, -turn, jnp.inf), axis=None)
    rank = jnp.zeros(own.size, jnp.int32).at[order].set(jnp.arange(own.size, dtype=jnp.int32)).reshape(own.shape)
    most = jnp.maximum(jnp.floor(share * jnp.sum(own)), 1)
    return eligible & (rank < most)


def treated(how: str, objective: jax.Array, log_ratio: jax.Array, apart: jax.Array) -> jax.Array:
    """The surrogate of tokens, `[N, T]`, with 0 ("clip") or less |log ratio| ("kl") at those that are treated apart."""
    if how == "clip":
        return jnp.where(apart, 0.0, objective)
    # Its slope at zero is zero, as PyTorch's; JAX' own is one.
    absolute = jax.lax.stop_gradient(jnp.sign(log_ratio)) * log_ratio
    return objective - jnp.where(apart, absolute, 0.0)
