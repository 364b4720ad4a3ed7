"""A penalty on rows that come near the longest length, instead of a cut (DAPO: Yu et al., 2025)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike


def penalty(length: ArrayLike, longest: ArrayLike, buffer: ArrayLike) -> jax.Array:
    """0 up to `longest - buffer` own tokens, then linearly down to -1 at `longest`, where it stays.

    Args:
        length: own tokens of each row, `[N]`.
        longest: the most that a row can have.
        buffer: tokens before that in which the penalty grows; 0: none up to `longest`.
    """
    length = jnp.asarray(length, jnp.result_type(float))
    excess = length - (longest - jnp.asarray(buffer, length.dtype))
    return -jnp.clip(excess / jnp.maximum(buffer, jnp.finfo(length.dtype).tiny), 0, 1)
