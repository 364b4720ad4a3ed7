"""What dialogues draw: sizes up to a difficulty, and keys that no `reset` has used."""

from __future__ import annotations

import jax
import jax.numpy as jnp

DEMONSTRATION = 0x64656D6F
"""Folded into a dialogue's key, it gives a demonstration its own."""


def up_to(key: jax.Array, difficulty: jax.Array, most: int) -> jax.Array:
    """A whole number, int32, uniform over 1 to a whole difficulty; between two of them, a mixture of both.

    Difficulties are taken to be at least 1 and at most `most`.
    """
    mixing, drawing = jax.random.split(key)
    bounded = jnp.clip(difficulty, 1.0, most)
    largest = jnp.floor(bounded + jax.random.uniform(mixing)).astype(jnp.int32)
    return jax.random.randint(drawing, (), 1, jnp.clip(largest, 1, most) + 1, jnp.int32)


def cycle(key: jax.Array, size: int) -> jax.Array:
    """A successor for each of `size` things, int32 `[size]`, so that a walk meets all of them before it returns."""
    order = jax.random.permutation(key, jnp.arange(size, dtype=jnp.int32))
    return jnp.zeros((size,), jnp.int32).at[order].set(jnp.roll(order, -1))


def looked_up(table: jax.Array, index: jax.Array) -> jax.Array:
    """`table[index]` `[...]` of an int32 table `[K, ...]`, 0 for an index that it has not; without a gather."""
    here = jnp.arange(table.shape[0]) == index
    return jnp.where(here.reshape(-1, *[1] * (table.ndim - 1)), table, 0).sum(0, dtype=table.dtype)
