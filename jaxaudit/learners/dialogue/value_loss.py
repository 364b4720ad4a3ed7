"""The critic's loss of each token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike


def squared(value: jax.Array, target: jax.Array) -> jax.Array:
    """Half the squared error, `[N, T]`."""
    return 0.5 * (value - target) ** 2


def clipped(value: jax.Array, old: jax.Array, target: jax.Array, clip: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Half the larger squared error of the value and of one that moves at most `clip` from the old one, `[N, T]`.

    Returns beside it, bool `[N, T]`, where the clipped one is larger, so that the gradient is zero.
    """
    free = squared(value, target)
    near = squared(jnp.clip(value, old - clip, old + clip), target)
    return jnp.maximum(free, near), near > free
