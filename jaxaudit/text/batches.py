"""Sequences cut from a corpus: which ones depends on a key alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def draw(key: jax.Array, tokens: jax.Array, batch: int, length: int) -> jax.Array:
    """Sequences of `tokens` `[N]` that begin anywhere, independently: int32 `[batch, length]`."""
    starts = jax.random.randint(key, (batch,), 0, tokens.shape[0] - length + 1)
    return jax.vmap(lambda start: jax.lax.dynamic_slice(tokens, (start,), (length,)))(starts).astype(jnp.int32)


def evenly_spaced(tokens: np.ndarray, count: int, length: int) -> np.ndarray:
    """`count` sequences of `tokens` `[N]`, evenly spaced, which do not overlap if they fit: `[count, length]`."""
    starts = np.linspace(0, len(tokens) - length, count).astype(np.int64)
    return np.stack([tokens[start : start + length] for start in starts])
