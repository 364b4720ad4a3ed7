"""Estimates of KL(policy || reference) from the tokens written (Schulman, 2020), and what their gradients are.

`new` and `reference` are log-probabilities of the same tokens, `[N, T]`; d = reference - new. Under tokens of the
policy k1 = -d and k3 = exp(d) - 1 - d have the KL as their mean, k2 = d^2 / 2 has not. As a part of the loss (Tang and
Munos, 2025):

- k1: its gradient is a score function, of mean zero. It does nothing but add noise.
- k2: its gradient's mean is that of the token's KL, by the token's own probability.
- k3: its gradient's mean is that of KL(reference || policy), the forward one.
- k3 times a differentiable ratio: its gradient's mean is that of KL(policy || reference), off policy, too, and on
  policy, where the ratio is 1.
- k2 times a ratio that is a constant: the same.

None is clamped: a clamp at 10 would take the gradient from exactly the tokens that are farthest away.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike


def k1(new: jax.Array, reference: jax.Array) -> jax.Array:
    """Log-ratio: unbiased, of either sign; the one for the reward."""
    return new - reference


def k2(new: jax.Array, reference: jax.Array) -> jax.Array:
    """Half the squared log-ratio: biased as a value, right as a token's gradient."""
    return 0.5 * (new - reference) ** 2


def k3(new: jax.Array, reference: jax.Array) -> jax.Array:
    """Unbiased, never negative: `exp(d) - 1 - d`."""
    return jnp.expm1(reference - new) - (reference - new)


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}

WEIGHTS = ("none", "ratio", "stopped_ratio")
"""What multiplies an estimate in the loss: nothing, the differentiable ratio (for k3), the ratio as a constant (k2)."""


def weighted(estimate: jax.Array, log_ratio: jax.Array, how: str) -> jax.Array:
    """An estimate in the loss, `[N, T]`, times the token's ratio as `how` of `WEIGHTS` says."""
    if how == "none":
        return estimate
    return estimate * jnp.exp(jax.lax.stop_gradient(log_ratio) if how == "stopped_ratio" else log_ratio)


def penalised(reward: jax.Array, estimate: jax.Array, own: jax.Array, weight: ArrayLike) -> jax.Array:
    """Token rewards less `weight` times an estimate at own slots, `[N, T]`, a constant; its sum is a row's score."""
    return reward - weight * jax.lax.stop_gradient(jnp.where(own, estimate, 0))
