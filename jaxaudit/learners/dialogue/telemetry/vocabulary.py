"""What is known of whole distributions over the vocabulary: at all slots of a small one, some of a large."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxaudit.dialogues.protocol import TOOL
from jaxaudit.learners.dialogue.rows import Rows

CLASSES = 256
"""The most tokens that are told apart; those of a larger vocabulary fall into as many classes, by their remainders."""

ROWS = 512
"""Rows of the initial policy whose results are counted."""


@struct.dataclass
class Bigrams:
    """Counts of a tool's tokens by the tokens before them.

    Attributes:
      counts: int32 `[C, C]`, the token before first.
    """

    counts: Any

    @classmethod
    def empty(cls, vocabulary: int) -> Bigrams:
        """The table of a vocabulary before any row is counted: zeros."""
        classes = min(vocabulary, CLASSES)
        return cls(jnp.zeros((classes, classes), jnp.int32))

    def add(self, rows: Rows) -> Bigrams:
        """With the results of further rows `[N, T]`."""
        before, token = (jax.nn.one_hot(x.reshape(-1), self.counts.shape[0]) for x in self._pairs(rows))
        given = (rows.role[:, 1:] == TOOL).reshape(-1, 1)
        # A product: a scatter would be a loop on a GPU with deterministic operations. Its sums are whole numbers.
        found = jnp.matmul((before * given).T, token, precision=jax.lax.Precision.HIGHEST)
        return Bigrams(self.counts + found.astype(jnp.int32))

    def log_probability(self, rows: Rows) -> jax.Array:
        """Returns the log-probability of each token given the one before it, with one count added to every pair:
        float32 `[N, T]`.

        0 at the first slot.
        """
        counts = self.counts + 1
        logs = jnp.log(counts) - jnp.log(jnp.sum(counts, axis=1, keepdims=True))
        return jnp.pad(logs[self._pairs(rows)], ((0, 0), (1, 0)))

    def _pairs(self, rows: Rows) -> tuple[jax.Array, jax.Array]:
        classes = rows.tokens % self.counts.shape[0]
        return classes[:, :-1], classes[:, 1:]


SMALL = 4096
"""Up to so many tokens are a small vocabulary, whose distributions are held at all slots."""

LOOKED_AT = 256
"""Own slots that distributions over a large vocabulary are held at."""


@struct.dataclass
class Slots:
    """Slots of rows `[N, T]` that are looked at.

    Attributes:
      index: int32 `[K]`, of the slots one after the other, row by row, ascending, some repeated; None: all of them.
      known: bool `[N, T]`, those that are looked at.
    """

    index: Any
    known: Any

    def of(self, x: jax.Array) -> jax.Array:
        """What is at them, `[K, ...]`, of `[N, T, ...]`."""
        flat = x.reshape(-1, *x.shape[2:])
        return flat if self.index is None else flat[self.index]

    def back(self, x: jax.Array) -> jax.Array:
        """`[K]` as `[N, T]`, zero at slots that are not looked at."""
        if self.index is None:
            return x.reshape(self.known.shape)
        place, is_there = _places(self.index, self.known.size)
        return jnp.where(is_there, x[place], 0).reshape(self.known.shape)


def some(own: jax.Array, most: int) -> Slots:
    """At most so many own slots of bool `[N, T]`, evenly spaced among them."""
    if own.size <= most:
        return Slots(None, own)
    rising = jnp.cumsum(own.reshape(-1))
    wanted = jnp.arange(most) * rising[-1] // most + 1
    index = jnp.minimum(jnp.searchsorted(rising, wanted), own.size - 1)
    _, known = _places(index, own.size)
    return Slots(index, known.reshape(own.shape) & own)


def _places(index: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """The last place of each of 0 to `size` - 1 in an ascending index, int `[size]`, and whether it is there."""
    wanted = jnp.arange(size)
    place = jnp.maximum(jnp.searchsorted(index, wanted, side="right") - 1, 0)
    return place, index[place] == wanted


def slots_of(own: jax.Array, vocabulary: int) -> Slots:
    """All slots where the vocabulary is small, else some of the own ones."""
    return Slots(None, jnp.ones_like(own)) if vocabulary <= SMALL else some(own, LOOKED_AT)


def log_distributions(hidden: jax.Array, embedding: jax.Array, temperature: jax.Array, slots: Slots) -> jax.Array:
    """Log-probabilities of all tokens that may be written at slots, by the hidden states before: float32 `[K, V]`.

    Args:
      hidden: of every slot, `[N, T, D]`.
      embedding: `[V, D]`.
      temperature: scalar.
      slots: looked at; at a row's first nothing is known.
    """
    before = slots.of(jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0))))
    weights = embedding.astype(before.dtype)
    logits = jnp.einsum("kd,vd->kv", before, weights, preferred_element_type=jnp.float32)
    return jax.nn.log_softmax(logits / temperature)


def divergence(one: jax.Array, other: jax.Array) -> jax.Array:
    """KL(one || other), nats, of log-probabilities `[K, V]`: `[K]`."""
    return jnp.sum(jnp.exp(one) * (one - other), axis=-1)
