"""Sequences cut from a corpus: which ones depends on a key alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def draw(key: jax.Array, tokens: jax.Array, batch: int, length: int) -> jax.Array:
    """Sequences of `tokens` `[N]` that begin anywhere, independently: int32 `[batch, length]`."""
    starts = jax.random.randint(key, (batch,), 0, tokens.shape[0] - length + 1)
    return at(tokens, starts, length)


def at(tokens: jax.Array, starts: jax.Array, length: int) -> jax.Array:
    """The sequences of `tokens` `[N]` that begin at `starts` `[B]`: int32 `[B, length]`."""
    return jax.vmap(lambda start: jax.lax.dynamic_slice(tokens, (start,), (length,)))(starts).astype(jnp.int32)


def evenly_spaced(tokens: np.ndarray, most: int, length: int) -> np.ndarray:
    """At most `most` sequences of `tokens` `[N]` that do not overlap, evenly spaced: `[B, length]`, tokens' dtype.

    Raises ValueError if there is not one.
    """
    count = min(most, len(tokens) // length)
    if not count:
        raise ValueError(f"the corpus has {len(tokens)} tokens to validate on, and a sequence has {length}")
    starts = np.linspace(0, len(tokens) - length, count).astype(np.int64)
    return np.stack([tokens[start : start + length] for start in starts])
