"""What dialogues share: sizes drawn by a difficulty, keys that no `reset` has used, and look-ups in small tables."""

from __future__ import annotations

import jax
import jax.numpy as jnp

DEMONSTRATION = 0x64656D6F
"""Folded into a dialogue's key, it gives a demonstration its own."""


def rounded(key: jax.Array, difficulty: jax.Array, most: int) -> jax.Array:
    """A difficulty as a whole number from 1 to `most`, int32; of one between two, either, so that it is the mean."""
    bounded = jnp.clip(difficulty, 1.0, most)
    return jnp.clip(jnp.floor(bounded + jax.random.uniform(key)).astype(jnp.int32), 1, most)


def up_to(key: jax.Array, difficulty: jax.Array, most: int) -> jax.Array:
    """A whole number, int32, uniform over 1 to a difficulty that is `rounded`."""
    rounding, drawing = jax.random.split(key)
    return jax.random.randint(drawing, (), 1, rounded(rounding, difficulty, most) + 1, jnp.int32)


def cycle(key: jax.Array, size: int) -> jax.Array:
    """A successor for each of `size` things, int32 `[size]`, so that a walk meets all of them before it returns."""
    order = jax.random.permutation(key, jnp.arange(size, dtype=jnp.int32))
    return jnp.zeros((size,), jnp.int32).at[order].set(jnp.roll(order, -1))


def looked_up(table: jax.Array, index: jax.Array) -> jax.Array:
    """`table[index]` of a small int32 table `[K]`, 0 for an index that it has not; without a gather."""
    return jnp.where(jnp.arange(table.shape[0]) == index, table, 0).sum(dtype=table.dtype)
