"""What dialogues share: random choices made of uniform numbers, tasks held out, and look-ups in small tables.

A row draws all its uniform numbers with one call: every call to a generator is a program of its own to compile.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import jax
import jax.numpy as jnp

from jaxaudit.dialogues.protocol import Dialogue

DEMONSTRATION = 0x64656D6F
"""Folded into a dialogue's key, it gives a demonstration its own."""

ATTEMPTS = 256
"""To draw a task of the right split. At a share of 1/8, one row in 10^15 needs more."""

SALT = 11516
"""Of the hash that splits, chosen so that small worlds have their share held out: three of the 24 tasks of `chain` at
difficulty 1, and one of the six of a `hop` with three entities and one hop."""


@dataclass(frozen=True)
class Split(Dialogue):
    """A dialogue that draws its tasks, of which one in eight is held out, by a hash of what makes it the same task.

    Attributes:
      for_evaluation: whether its tasks are those that are held out, as `held_out` makes it; else they are the others.
    """

    for_evaluation: bool = field(default=False, init=False)

    def held_out(self) -> Self:
        """The dialogue of the tasks that are held out."""
        other = copy.copy(self)
        other.derive(for_evaluation=True)
        return other

    def draw_task(self, key: jax.Array, count: int, task: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Uniform numbers in [0, 1), float32 `[count]`, of which a task of this split is made.

        Every attempt has numbers of its own, of the key and the attempt's number; the first whose task is of the split
        is taken. In a world so small that none of its tasks is of the split, or where `ATTEMPTS` have found none, the
        last attempt is taken, and its task is of the other split.

        Args:
          key: of the row.
          count: how many numbers a task is made of.
          task: `task(numbers)`, what makes it the same task, as `is_held_out` takes it.
        """

        def attempt(made: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            number = made[0]
            uniform = jax.random.uniform(jax.random.fold_in(key, number), (count,), jnp.float32)
            return number + 1, uniform, is_held_out(task(uniform)) == self.for_evaluation

        def goes_on(made: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            return ~made[2] & (made[0] < ATTEMPTS)

        nothing = jnp.int32(0), jnp.zeros((count,), jnp.float32), jnp.zeros((), bool)
        return jax.lax.while_loop(goes_on, attempt, nothing)[1]


def is_held_out(task: jax.Array) -> jax.Array:
    """Whether a task is one of the eighth that is held out, bool.

    Each number is hashed with its place, and their sum again, as Zobrist (1970) has it for positions in games; the hash
    is the finaliser of MurmurHash3 (Appleby, 2011).

    Args:
      task: whole numbers that say what it is, int32 `[K]`; one below 0 says nothing.
    """
    place = jnp.arange(1, task.shape[0] + 1, dtype=jnp.uint32) * jnp.uint32(0x9E3779B9)
    hashed = jnp.where(task >= 0, _mixed(task.astype(jnp.uint32) + place), jnp.uint32(0))
    return _mixed(hashed.sum(dtype=jnp.uint32) + jnp.uint32(SALT)) < jnp.uint32(2**29)


def _mixed(hashed: jax.Array) -> jax.Array:
    """Numbers uint32 of which every bit depends on every bit."""
    hashed = (hashed ^ (hashed >> 16)) * jnp.uint32(0x85EBCA6B)
    hashed = (hashed ^ (hashed >> 13)) * jnp.uint32(0xC2B2AE35)
    return hashed ^ (hashed >> 16)


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
