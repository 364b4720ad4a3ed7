"""A diagonal Gaussian squashed into (-1, 1) by tanh (Haarnoja et al., 2018, appendix C)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

LOG_STD_RANGE = (-20.0, 2.0)
"""Bounds on the logarithm of the standard deviation, those of the authors' code."""


def split(output: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A network's output `[..., 2d]` as mean and bounded log standard deviation, `[..., d]` each."""
    mean, log_std = jnp.split(output, 2, axis=-1)
    return mean, jnp.clip(log_std, *LOG_STD_RANGE)


def squashed_gaussian(mean: jax.Array, log_std: jax.Array, noise: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The action tanh(mean + std * noise), and the log density of that action.

    The density is taken from the noise, and tanh's derivative as 1 / cosh^2, so that neither a tiny standard
    deviation nor a saturated action loses digits.

    Args:
      mean, log_std: `[..., d]`.
      noise: standard normal draws, `[..., d]`.

    Returns:
      action `[..., d]` in [-1, 1], log density `[...]`.
    """
    unsquashed = mean + jnp.exp(log_std) * noise
    size = jnp.abs(unsquashed)
    # log(1 + x) and not log1p(x): XLA's CPU backend computes only the first in vectors, and it is added to log 2.
    log_derivative = 2.0 * (jnp.log(2.0) - size - jnp.log(1.0 + jnp.exp(-2.0 * size)))
    log_gaussian = -0.5 * (noise**2 + jnp.log(2.0 * jnp.pi)) - log_std
    return jnp.tanh(unsquashed), jnp.sum(log_gaussian - log_derivative, axis=-1)
