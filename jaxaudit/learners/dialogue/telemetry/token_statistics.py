"""Token statistics by stratum, and what a channel says where there is nothing to measure.

A stratum is the entry of a labelled dimension, "stratum", not a channel with brackets in its name: a monitor, a
detector and a report spell its entries "entropy[tool]" themselves, `telemetry.sel(stratum="tool")` takes all
statistics of one, and a run's stored arrays need no names of their own for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


STRATA = ("all", "tool", "text", "turn_0", "turn_1", "turn_2", "turn_3+")
"""Entries of the first dimension of every token statistic, `stratum`: all own tokens; those soon after a tool's result,
and the others; and by turn, those before the row's first result, after one, after two, and after three or more. Of a
dialogue without tools the first alone."""

TURNS = 4
"""How many strata by turn there are: the last one is of all turns from the fourth on."""

SOURCES = ("tool", "rest")
"""The tokens that gradients are told apart by: the stratum "tool", and all others."""


@struct.dataclass
class Measured:
    """A statistic, and how much it is of.

    Attributes:
      value: any shape.
      count: how many values it is of, of the leading dimensions of `value`, e.g. `[S]`; 0 where it says nothing.
    """

    value: Any
    count: Any


Statistics = dict[str, Measured]


@struct.dataclass
class LastSeen:
    """What every channel said last, for steps at which it has nothing to say: zeros at first.

    So an empty stratum leaves no gap in telemetry. A statistic that is there and not finite is told as it is, and not
    remembered.

    Attributes:
      values: by name.
    """

    values: dict[str, Any]

    @classmethod
    def zeros(cls, shapes: Mapping[str, tuple[int, ...]]) -> LastSeen:
        """Before the first step, for statistics of these shapes."""
        return cls({name: jnp.zeros(shape, jnp.float32) for name, shape in shapes.items()})

    def update(self, found: Mapping[str, Measured]) -> tuple[LastSeen, dict[str, jax.Array]]:
        """What is remembered now, and what the channels say: what was found, or what was seen last.

        Statistics that are not found at all are left as they are, and said nothing of.
        """
        said, remembered = {}, dict(self.values)
        for name, statistic in found.items():
            last = self.values[name]
            value = jnp.asarray(statistic.value, jnp.float32)
            count = jnp.asarray(statistic.count)
            there = count.reshape(count.shape + (1,) * (value.ndim - count.ndim)) > 0
            said[name] = jnp.where(there, value, last)
            remembered[name] = jnp.where(there & jnp.isfinite(value), value, last)
        return LastSeen(remembered), said


def strata_of(own: jax.Array, given: jax.Array | None = None, window: int = 1) -> jax.Array:
    """The masks of STRATA, bool `[S, N, T]`.

    Args:
      own: bool `[N, T]`.
      given: the tokens of tools' results, bool `[N, T]`; None, of a dialogue without tools: S is 1.
      window: slots after a result whose own tokens are the stratum "tool".
    """
    if given is None:
        return own[None]
    tool, before = soon_after(given, own, window), jnp.minimum(results_before(given), TURNS - 1)
    return jnp.stack([own, own & tool, own & ~tool, *(own & (before == turn) for turn in range(TURNS))])


def results_before(given: jax.Array) -> jax.Array:
    """How many tools' results have begun up to each slot: int32 `[N, T]`, of their tokens, bool `[N, T]`."""
    begins = given & ~jnp.pad(given[:, :-1], ((0, 0), (1, 0)))
    return jnp.cumsum(begins, axis=1, dtype=jnp.int32)


def soon_after(given: jax.Array, own: jax.Array, slots: int) -> jax.Array:
    """Which own tokens are within so many slots after a tool's result: bool `[N, T]`.

    Args:
      given: the result's tokens, bool `[N, T]`.
      own: bool `[N, T]`.
      slots: at least 1; 1 is the token right after the result's last.
    """
    places = jnp.arange(given.shape[-1])
    last = jax.lax.cummax(jnp.where(given, places, -slots - 1), axis=given.ndim - 1)
    return own & (places - last <= slots)


def by_stratum(statistic: Callable[..., jax.Array], masks: jax.Array, *values: jax.Array) -> Measured:
    """`statistic(*values, mask)` of every stratum.

    Args:
      statistic: of arrays like a mask, and the mask.
      masks: bool `[S, ...]`.
      values: arrays `[...]`.
    """
    return Measured(jax.vmap(lambda mask: statistic(*values, mask))(masks), counts_of(masks))


def counts_of(masks: jax.Array) -> jax.Array:
    """How many tokens every stratum has: int32 `[S]`."""
    return jnp.sum(masks, axis=tuple(range(1, masks.ndim)), dtype=jnp.int32)


def mean(x: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean under a mask; 0 where that is empty. What is not under it is not looked at, NaN or not."""
    return jnp.sum(jnp.where(mask, x, 0.0)) / jnp.maximum(jnp.sum(mask), 1)


def token_means(masks: jax.Array, **values: jax.Array) -> Statistics:
    """The means of values `[N, T]` by stratum `[S]`, under their names."""
    return {name: by_stratum(mean, masks, value) for name, value in values.items()}
