"""Generalised advantage estimation (Schulman et al., 2016), which distinguishes termination from truncation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike


def gae(
    rewards: ArrayLike,
    values: ArrayLike,
    next_values: ArrayLike,
    terminated: ArrayLike,
    done: ArrayLike,
    gamma: ArrayLike,
    lam: ArrayLike,
) -> jax.Array:
    """Returns the advantages `A_t = delta_t + gamma lam A_{t+1}`, `delta_t = r_t + gamma V(s'_t) - V(s_t)`.

    A terminated step does not bootstrap. A truncated step, which is done but not terminated, bootstraps from its true
    final observation. The recursion ends at both, by selection instead of a product with zero: a NaN after a boundary
    does not cross it, and `next_values` of a terminated step may be anything.

    Args:
      rewards: `[T, N]`.
      values: V(s_t), `[T, N]`.
      next_values: V of the true next observation, before any reset, `[T, N]`.
      terminated: bool, `[T, N]`.
      done: bool, terminated or truncated, `[T, N]`.
      gamma: discount factor, scalar.
      lam: lambda, scalar.

    Returns:
      advantages `[T, N]`. The critic's targets are `advantages + values`.
    """
    terminated = jnp.asarray(terminated, bool)
    ends = terminated | jnp.asarray(done, bool)
    bootstrap = jnp.asarray(gamma) * jnp.where(terminated, 0, next_values)
    deltas = jnp.asarray(rewards) + bootstrap - jnp.asarray(values)
    decay = (jnp.asarray(gamma) * jnp.asarray(lam)).astype(deltas.dtype)

    def backward(advantage: jax.Array, step: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        delta, end = step
        advantage = delta + decay * jnp.where(end, 0, advantage)
        return advantage, advantage

    _, advantages = jax.lax.scan(backward, jnp.zeros_like(deltas[0]), (deltas, ends), reverse=True)
    return advantages
