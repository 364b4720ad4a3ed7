"""Whole numbers as digits, one after the other, int32: what tools that calculate read and write."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxaudit.dialogues.protocol import NOTHING
from jaxaudit.dialogues.sampling import looked_up

OPERATORS = ("+", "-", "*")

MOST_DIGITS = 4
"""Of an operand; a product of two is an int32."""


def evaluate(first: jax.Array, operator: jax.Array, second: jax.Array) -> jax.Array:
    """`first operator second`, the operator by its place in `OPERATORS`."""
    return jnp.where(operator == 0, first + second, jnp.where(operator == 1, first - second, first * second))


def digits(value: jax.Array, most: int) -> jax.Array:
    """A number of at most `most` (up to 10) digits from its highest on, int32 `[most]`, `NOTHING` after the last."""
    powers = jnp.asarray(10 ** np.arange(most, dtype=np.int32))
    length = jnp.maximum((value >= powers).sum(dtype=jnp.int32), 1)
    place = length - 1 - jnp.arange(most, dtype=jnp.int32)
    power = jax.vmap(looked_up, (None, 0))(powers, place)
    return jnp.where(place >= 0, value // jnp.maximum(power, 1) % 10, NOTHING)


def joined(parts: list[jax.Array]) -> jax.Array:
    """Tokens of several parts `[n]`, each with `NOTHING` after its last, as one row with `NOTHING` after its last."""
    tokens = jnp.concatenate(parts)
    said = tokens >= 0
    place = jnp.where(said, jnp.cumsum(said) - 1, NOTHING)
    return jnp.where(
        jnp.arange(tokens.size) < said.sum(),
        jnp.where(place == jnp.arange(tokens.size)[:, None], tokens, 0).sum(1, dtype=jnp.int32),
        NOTHING,
    )
