"""Helpers of dialogues: random choices from uniform numbers, the held-out split, small tables and rows of tokens.

A row draws its uniform numbers in one call, because every call to a random generator is compiled separately.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxaudit.dialogues.protocol import NO_TOKEN, Dialogue

DEMONSTRATION = 0x64656D6F
"""The number that is folded into a row's key for the random choices of its demonstration."""

ATTEMPTS = 256
"""The largest number of draws for a task of the right split. With a share of 1/8, one row in 10^15 needs more."""

SALT = 11516
"""The salt of the hash that splits tasks, chosen so that small task sets have their share held out: three of 24 tasks
of `chain` at difficulty 1, and one of the six tasks of a `hop` with three entities and one hop."""


@dataclass(frozen=True)
class Split(Dialogue):
    """A dialogue with random tasks, one in eight of which is held out for evaluation, chosen by a hash of the task.

    Attributes:
      for_evaluation: Whether the dialogue draws held-out tasks, as the one that `held_out` returns, or the others.
    """

    for_evaluation: bool = field(default=False, init=False)

    def held_out(self) -> Self:
        """Returns the dialogue of the held-out tasks."""
        return self.copy_with(for_evaluation=True)

    def draw_task(self, key: jax.Array, count: int, task: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Returns uniform numbers in [0, 1), float32 `[count]`, from which a task of this split is made.

        Each attempt draws numbers from the key with the attempt's number folded in; the first attempt whose task
        belongs to the split is returned. After `ATTEMPTS` attempts, as when no task belongs to the split, the last
        attempt is returned although its task belongs to the other split.

        Args:
          key: The key of the row.
          count: How many numbers a task is made from.
          task: Maps these numbers to the integers that identify the task, which `is_held_out` hashes.
        """

        def attempt(carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            number = carry[0]
            uniform = jax.random.uniform(jax.random.fold_in(key, number), (count,), jnp.float32)
            return number + 1, uniform, is_held_out(task(uniform)) == self.for_evaluation

        def unfinished(carry: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            return ~carry[2] & (carry[0] < ATTEMPTS)

        initial = jnp.int32(0), jnp.zeros((count,), jnp.float32), jnp.zeros((), bool)
        return jax.lax.while_loop(unfinished, attempt, initial)[1]


def is_held_out(task: jax.Array) -> jax.Array:
    """Returns whether a task is among the eighth that is held out, bool.

    Each number is hashed with its index, and the sum of the hashes is hashed again, as positions in games by Zobrist
    (1970). The hash is the finaliser of MurmurHash3 (Appleby, 2011).

    Args:
      task: The integers that identify the task, int32 `[K]`; negative ones are ignored.
    """
    offsets = jnp.arange(1, task.shape[0] + 1, dtype=jnp.uint32) * jnp.uint32(0x9E3779B9)
    hashes = jnp.where(task >= 0, _murmur_finaliser(task.astype(jnp.uint32) + offsets), jnp.uint32(0))
    return _murmur_finaliser(hashes.sum(dtype=jnp.uint32) + jnp.uint32(SALT)) < jnp.uint32(2**29)


def _murmur_finaliser(value: jax.Array) -> jax.Array:
    value = (value ^ (value >> 16)) * jnp.uint32(0x85EBCA6B)
    value = (value ^ (value >> 13)) * jnp.uint32(0xC2B2AE35)
    return value ^ (value >> 16)


def below(uniform: jax.Array, bound: jax.Array | int) -> jax.Array:
    """Maps a uniform number in [0, 1) to an integer, int32, uniform over 0 to `bound` - 1."""
    return jnp.minimum((uniform * bound).astype(jnp.int32), bound - 1)


def rounded(uniform: jax.Array, difficulty: jax.Array, most: int) -> jax.Array:
    """Rounds a difficulty at random to an adjacent integer from 1 to `most`, int32, whose mean is the difficulty."""
    bounded = jnp.clip(difficulty, 1.0, most)
    return jnp.clip(jnp.floor(bounded + uniform).astype(jnp.int32), 1, most)


def up_to(uniforms: jax.Array, difficulty: jax.Array, most: int) -> jax.Array:
    """Maps two uniform numbers `[2]` to an integer, int32, uniform over 1 to the difficulty as `rounded` rounds it."""
    return 1 + below(uniforms[0], rounded(uniforms[1], difficulty, most))


def cycle(uniforms: jax.Array) -> jax.Array:
    """Maps uniform numbers `[n]` to a random cyclic permutation: the successor of each of 0 to n - 1, int32 `[n]`."""
    order = jnp.argsort(uniforms).astype(jnp.int32)
    return jnp.zeros(order.shape, jnp.int32).at[order].set(jnp.roll(order, -1), unique_indices=True)


def looked_up(table: jax.Array, index: jax.Array) -> jax.Array:
    """Returns `table[index]` of a small int32 table `[K]`, without a gather; 0 if the index is out of range."""
    return jnp.where(jnp.arange(table.shape[0]) == index, table, 0).sum(dtype=table.dtype)


def digits(value: jax.Array, most: int) -> jax.Array:
    """Returns the decimal digits of a number of at most `most` (up to 10) digits, int32 `[most]`, then `NO_TOKEN`."""
    powers = jnp.asarray(10 ** np.arange(most, dtype=np.int32))
    length = jnp.maximum((value >= powers).sum(dtype=jnp.int32), 1)
    exponent = length - 1 - jnp.arange(most, dtype=jnp.int32)
    power = jax.vmap(looked_up, (None, 0))(powers, exponent)
    return jnp.where(exponent >= 0, value // jnp.maximum(power, 1) % 10, NO_TOKEN)


def joined(parts: list[jax.Array]) -> jax.Array:
    """Concatenates token arrays `[n]` and moves their padding, `NO_TOKEN`, to the end."""
    tokens = jnp.concatenate(parts)
    present = tokens >= 0
    slot = jnp.where(present, jnp.cumsum(present) - 1, NO_TOKEN)
    return jnp.where(
        jnp.arange(tokens.size) < present.sum(),
        jnp.where(slot == jnp.arange(tokens.size)[:, None], tokens, 0).sum(1, dtype=jnp.int32),
        NO_TOKEN,
    )
