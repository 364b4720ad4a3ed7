"""How familiar a tool's results are: their tokens' probabilities under bigrams counted before the first update.

A policy is not trained on given tokens, so its own probabilities of them do not say what it has read. Counts of what
the undisturbed policy's tools have said do: a result in words that were hardly seen has a low one.
"""

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
        """Of each token given the one before it, as if every pair had been counted once more: float32 `[N, T]`.

        0 at the first slot.
        """
        counts = self.counts + 1
        logs = jnp.log(counts) - jnp.log(jnp.sum(counts, axis=1, keepdims=True))
        return jnp.pad(logs[self._pairs(rows)], ((0, 0), (1, 0)))

    def _pairs(self, rows: Rows) -> tuple[jax.Array, jax.Array]:
        classes = rows.tokens % self.counts.shape[0]
        return classes[:, :-1], classes[:, 1:]
