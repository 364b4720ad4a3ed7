"""What dialogues share: random choices made of uniform numbers, and look-ups in small tables.

A row draws all its uniform numbers with one call: every call to a generator is a program of its own to compile.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

DEMONSTRATION = 0x64656D6F
"""Folded into a dialogue's key, it gives a demonstration its own."""


def below(uniform: jax.Array, bound: jax.Array | int) -> jax.Array:
    """A whole number from 0 to `bound` - 1, int32, all equally likely, made of a uniform one in [0, 1)."""
    return jnp.minimum((uniform * bound).astype(jnp.int32), bound - 1)


def rounded(uniform: jax.Array, difficulty: jax.Array, most: int) -> jax.Array:
    """A difficulty as a whole number from 1 to `most`, int32; of one between two, either, so that it is the mean."""
    bounded = jnp.clip(difficulty, 1.0, most)
    return jnp.clip(jnp.floor(bounded + uniform).astype(jnp.int32), 1, most)


def up_to(uniforms: jax.Array, difficulty: jax.Array, most: int) -> jax.Array:
    """A whole number, int32, all from 1 to a difficulty that is `rounded` equally likely; of two uniform ones `[2]`."""
    return 1 + below(uniforms[0], rounded(uniforms[1], difficulty, most))


def cycle(uniforms: jax.Array) -> jax.Array:
    """A successor for each of n things, int32 `[n]`, so that a walk meets all before it returns; of uniform numbers."""
    order = jnp.argsort(uniforms).astype(jnp.int32)
    return jnp.zeros(order.shape, jnp.int32).at[order].set(jnp.roll(order, -1), unique_indices=True)


def looked_up(table: jax.Array, index: jax.Array) -> jax.Array:
    """`table[index]` of a small int32 table `[K]`, 0 for an index that it has not; without a gather."""
    return jnp.where(jnp.arange(table.shape[0]) == index, table, 0).sum(dtype=table.dtype)
