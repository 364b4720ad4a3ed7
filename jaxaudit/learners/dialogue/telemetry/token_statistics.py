"""Statistics over tokens: their strata, their full distributions over the vocabulary, and bigram counts of tools.

A stratum is an entry of a labelled dimension, "stratum", not a channel with brackets in its name: monitors, detectors
and reports spell an entry "entropy[tool]" themselves, `telemetry.sel(stratum="tool")` takes all statistics of one
stratum, and a run's stored arrays need no name for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxaudit.dialogues.protocol import TOOL
from jaxaudit.learners.dialogue.rollout import Rows

STRATA = ("all", "tool", "text", "turn_0", "turn_1", "turn_2", "turn_3+")
"""Entries of the dimension `stratum`, the first dimension of every token statistic: all response tokens; those soon
after a tool's result, and the others; and by turn, those before the row's first result, after one, after two, and after
three or more. A dialogue without tools has the first entry alone."""

TURNS = 4
"""Number of strata by turn; the last one contains all turns from the fourth on."""

SOURCES = ("tool", "rest")
"""The tokens whose gradients are measured separately: the stratum "tool", and all other tokens."""


@struct.dataclass
class Statistic:
    """A statistic with the number of values it is computed from.

    Attributes:
      value: array of any shape.
      count: number of values, with the leading dimensions of `value`, e.g. `[S]`; 0 where the statistic is undefined.
    """

    value: Any
    count: Any


Statistics = dict[str, Statistic]


def defined(value: Any) -> Statistic:
    """Returns a statistic that is always defined."""
    return Statistic(value, jnp.asarray(1))


@struct.dataclass
class LastValues:
    """The last defined value of each channel, which fills steps at which the channel's statistic is undefined.

    So an empty stratum leaves no gap in telemetry. A statistic that is defined but not finite is reported as it is and
    not remembered.

    Attributes:
      values: arrays by channel name; zeros at first.
    """

    values: dict[str, Any]

    @classmethod
    def zeros(cls, shapes: Mapping[str, tuple[int, ...]]) -> LastValues:
        """Returns zeros for channels of these shapes."""
        return cls({name: jnp.zeros(shape, jnp.float32) for name, shape in shapes.items()})

    def update(self, statistics: Mapping[str, Statistic]) -> tuple[LastValues, dict[str, jax.Array]]:
        """Returns the new last values, and the value of each given statistic, filled where it is undefined.

        Channels that are not in `statistics` keep their last value and are not returned.
        """
        filled, remembered = {}, dict(self.values)
        for name, statistic in statistics.items():
            last = self.values[name]
            value = jnp.asarray(statistic.value, jnp.float32)
            count = jnp.asarray(statistic.count)
            is_defined = count.reshape(count.shape + (1,) * (value.ndim - count.ndim)) > 0
            filled[name] = jnp.where(is_defined, value, last)
            remembered[name] = jnp.where(is_defined & jnp.isfinite(value), value, last)
        return LastValues(remembered), filled


def strata_masks(response_mask: jax.Array, tool_mask: jax.Array | None = None, window: int = 1) -> jax.Array:
    """Returns the masks of `STRATA`, bool `[S, N, T]`.

    Args:
      response_mask: bool `[N, T]`.
      tool_mask: tokens of tools' results, bool `[N, T]`; None for a dialogue without tools, whose S is 1.
      window: number of slots after a result whose response tokens belong to the stratum "tool".
    """
    if tool_mask is None:
        return response_mask[None]
    after_result = soon_after(tool_mask, response_mask, window)
    turn = jnp.minimum(results_before(tool_mask), TURNS - 1)
    by_turn = (response_mask & (turn == number) for number in range(TURNS))
    return jnp.stack([response_mask, response_mask & after_result, response_mask & ~after_result, *by_turn])


def results_before(tool_mask: jax.Array) -> jax.Array:
    """Returns how many tools' results have begun up to each slot, int32 `[N, T]`, from a mask of their tokens."""
    begins = tool_mask & ~jnp.pad(tool_mask[:, :-1], ((0, 0), (1, 0)))
    return jnp.cumsum(begins, axis=1, dtype=jnp.int32)


def soon_after(tool_mask: jax.Array, response_mask: jax.Array, window: int) -> jax.Array:
    """Returns which response tokens are at most `window` slots after a tool's result: bool `[N, T]`.

    Args:
      tool_mask: tokens of tools' results, bool `[N, T]`.
      response_mask: bool `[N, T]`.
      window: at least 1, which selects the token right after the result's last.
    """
    slots = jnp.arange(tool_mask.shape[-1])
    last = jax.lax.cummax(jnp.where(tool_mask, slots, -window - 1), axis=tool_mask.ndim - 1)
    return response_mask & (slots - last <= window)


def by_stratum(statistic: Callable[..., jax.Array], masks: jax.Array, *values: jax.Array) -> Statistic:
    """Computes `statistic(*values, mask)` for every stratum.

    Args:
      statistic: function of arrays `[...]` and a mask of their shape.
      masks: bool `[S, ...]`.
      values: arrays `[...]`.
    """
    return Statistic(jax.vmap(lambda mask: statistic(*values, mask))(masks), counts_of(masks))


def counts_of(masks: jax.Array) -> jax.Array:
    """Returns how many tokens every stratum has: int32 `[S]`."""
    return jnp.sum(masks, axis=tuple(range(1, masks.ndim)), dtype=jnp.int32)


def mean(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the mean of unmasked values; 0 if there are none. Masked values are ignored even if they are NaN."""
    return jnp.sum(jnp.where(mask, x, 0.0)) / jnp.maximum(jnp.sum(mask), 1)


def token_means(masks: jax.Array, **values: jax.Array) -> Statistics:
    """Returns the means `[S]` of values `[N, T]` by stratum, under the values' names."""
    return {name: by_stratum(mean, masks, value) for name, value in values.items()}


MAX_BIGRAM_CLASSES = 256
"""The largest number of token classes that bigrams distinguish; the tokens of a larger vocabulary are classified by
their remainder."""

BIGRAM_ROWS = 512
"""Number of rows of the initial policy whose tool results are counted."""


@struct.dataclass
class Bigrams:
    """Counts of a tool's tokens by the token before them.

    Attributes:
      counts: int32 `[C, C]`, indexed by the previous token's class first.
    """

    counts: Any

    @classmethod
    def empty(cls, vocabulary: int) -> Bigrams:
        """Returns zero counts for a vocabulary of this size."""
        classes = min(vocabulary, MAX_BIGRAM_CLASSES)
        return cls(jnp.zeros((classes, classes), jnp.int32))

    def add(self, rows: Rows) -> Bigrams:
        """Returns the counts with the tool results of further rows `[N, T]`."""
        previous, token = (jax.nn.one_hot(x.reshape(-1), self.counts.shape[0]) for x in self._pairs(rows))
        tool_mask = (rows.role[:, 1:] == TOOL).reshape(-1, 1)
        # A product, because a scatter would be a loop on a GPU with deterministic operations. Its sums are integers.
        counts = jnp.matmul((previous * tool_mask).T, token, precision=jax.lax.Precision.HIGHEST)
        return Bigrams(self.counts + counts.astype(jnp.int32))

    def log_prob(self, rows: Rows) -> jax.Array:
        """Returns the log-probability of each token given the token before it: float32 `[N, T]`, 0 at the first slot.

        One count is added to every pair.
        """
        counts = self.counts + 1
        log_probs = jnp.log(counts) - jnp.log(jnp.sum(counts, axis=1, keepdims=True))
        return jnp.pad(log_probs[self._pairs(rows)], ((0, 0), (1, 0)))

    def _pairs(self, rows: Rows) -> tuple[jax.Array, jax.Array]:
        classes = rows.tokens % self.counts.shape[0]
        return classes[:, :-1], classes[:, 1:]


SMALL_VOCABULARY = 4096
"""The largest vocabulary whose distributions are computed at all slots."""

MAX_SELECTED_SLOTS = 256
"""Number of response slots at which distributions over a larger vocabulary are computed."""


@struct.dataclass
class SelectedSlots:
    """The slots of rows `[N, T]` at which expensive statistics are computed.

    Attributes:
      index: flat indices of the slots, int32 `[K]`, ascending, some of them repeated; None for all slots.
      mask: bool `[N, T]`, the selected slots.
    """

    index: Any
    mask: Any

    def gather(self, x: jax.Array) -> jax.Array:
        """Returns the selected entries, `[K, ...]`, of an array `[N, T, ...]`."""
        flat = x.reshape(-1, *x.shape[2:])
        return flat if self.index is None else flat[self.index]

    def scatter(self, x: jax.Array) -> jax.Array:
        """Returns `[K]` values of the selected slots as `[N, T]`, zero at other slots."""
        if self.index is None:
            return x.reshape(self.mask.shape)
        rank, is_selected = _last_rank(self.index, self.mask.size)
        return jnp.where(is_selected, x[rank], 0).reshape(self.mask.shape)


def select_slots(response_mask: jax.Array, max_count: int) -> SelectedSlots:
    """Selects at most `max_count` response slots, evenly spaced among those in `response_mask`, bool `[N, T]`."""
    if response_mask.size <= max_count:
        return SelectedSlots(None, response_mask)
    cumulative = jnp.cumsum(response_mask.reshape(-1))
    ordinals = jnp.arange(max_count) * cumulative[-1] // max_count + 1
    index = jnp.minimum(jnp.searchsorted(cumulative, ordinals), response_mask.size - 1)
    _, is_selected = _last_rank(index, response_mask.size)
    return SelectedSlots(index, is_selected.reshape(response_mask.shape) & response_mask)


def _last_rank(index: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Returns where each of 0 to `size` - 1 is last in an ascending index, int `[size]`, and whether it is in it."""
    numbers = jnp.arange(size)
    rank = jnp.maximum(jnp.searchsorted(index, numbers, side="right") - 1, 0)
    return rank, index[rank] == numbers


def select_distribution_slots(response_mask: jax.Array, vocabulary: int) -> SelectedSlots:
    """Selects all slots if the vocabulary is small, else `MAX_SELECTED_SLOTS` response slots."""
    if vocabulary <= SMALL_VOCABULARY:
        return SelectedSlots(None, jnp.ones_like(response_mask))
    return select_slots(response_mask, MAX_SELECTED_SLOTS)


def log_distributions(
    hidden: jax.Array, embedding: jax.Array, temperature: jax.Array, slots: SelectedSlots
) -> jax.Array:
    """Returns the log-probabilities of all tokens at the selected slots: float32 `[K, V]`.

    Args:
      hidden: hidden state of every slot, `[N, T, D]`; a slot's distribution comes from the slot before it.
      embedding: output embedding, `[V, D]`.
      temperature: scalar.
      slots: the selected slots; at a row's first slot the distribution is meaningless.
    """
    before = slots.gather(jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0))))
    weights = embedding.astype(before.dtype)
    logits = jnp.einsum("kd,vd->kv", before, weights, preferred_element_type=jnp.float32)
    return jax.nn.log_softmax(logits / temperature)


def kl_divergence(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    """Returns KL(p || q) in nats, `[K]`, of log-probabilities `[K, V]`."""
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
