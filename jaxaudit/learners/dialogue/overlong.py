"""A penalty on rows that come near the longest length, instead of a cut (DAPO: Yu et al., 2025)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike


def penalty(length: ArrayLike, longest: ArrayLike, buffer: ArrayLike) -> jax.Array:
    """0 up to a length of `longest - buffer`, then linearly down to -1 at `longest`, where it stays.

    Lengths are those of responses: all slots after a row's own prompt, whether the policy or a tool wrote them. These
    are what runs out when a row is cut off, and what verl's DAPO reward manager counts by the attention mask.

    Args:
        length: slots of each row's response, `[N]`.
        longest: the most slots that a response can have, scalar or `[N]`.
        buffer: slots before that in which the penalty grows, scalar or `[N]`; 0: none up to `longest`.
    """
    length = jnp.asarray(length, jnp.result_type(float))
    excess = length - (longest - jnp.asarray(buffer, length.dtype))
    return -jnp.clip(excess / jnp.maximum(buffer, jnp.finfo(length.dtype).tiny), 0, 1)
