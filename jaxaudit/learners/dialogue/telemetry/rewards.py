"""What is measured of rows: what they earn, how prompts' rollout groups differ, and how long they are."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxaudit.core.channel_names import ACTING
from jaxaudit.kernels.tails import masked_quantiles
from jaxaudit.learners.dialogue.telemetry.token_statistics import Measured, Statistics, mean

LENGTH_QUANTILES = (0.1, 0.5, 0.9)


@struct.dataclass
class Scale:
    """A scale of rewards: their mean over rows before the first iteration, and their standard deviation; scalars."""

    mean: Any
    std: Any

    def __call__(self, reward: jax.Array) -> jax.Array:
        """How many standard deviations rewards are above that mean; without a deviation, how far above they are."""
        return (reward - self.mean) / jnp.where(self.std == 0, 1.0, self.std)

    @classmethod
    def of(cls, reward: jax.Array) -> Scale:
        """The mean and standard deviation of the rewards of some rows, `[N]`."""
        return cls(jnp.mean(reward), jnp.std(reward))


def reward_statistics(
    gold: jax.Array,
    proxy: jax.Array,
    parts: Mapping[str, jax.Array],
    kept: jax.Array,
    scales: Mapping[str, Scale] | None = None,
) -> Statistics:
    """Means over rows.

    Args:
      gold: the verifier's, `[N]`.
      proxy: what the learner sees, `[N]`.
      parts: of the gold reward by name, `[N]` each; may be empty.
      kept: the rows that count, bool `[N]`.
      scales: of "proxy" and "gold", by which a score without a scale of its own is compared with gold; None or empty:
        both are in gold's units.

    Returns:
      acting_performance (gold), proxy, reward_gap (proxy less gold, by `scales` if there are any), and
      reward_part `[parts]` in the order of the names, if there are any.
    """
    count = jnp.sum(kept)
    gap = scales["proxy"](proxy) - scales["gold"](gold) if scales else proxy - gold
    means = {ACTING: mean(gold, kept), "proxy": mean(proxy, kept), "reward_gap": mean(gap, kept)}
    found = {name: Measured(value, count) for name, value in means.items()}
    if parts:
        found["reward_part"] = Measured(jnp.stack([mean(parts[name], kept) for name in sorted(parts)]), count)
    return found


def powers_of_two(most: int) -> tuple[int, ...]:
    """1, 2, 4 and so on, and `most` itself: the k of pass@k."""
    return tuple(sorted({2**i for i in range(most.bit_length()) if 2**i <= most} | {most}))


@cache
def _pass_at(members: int) -> np.ndarray:
    """pass@k of a group with c right rows, float32 `[members + 1, k]`: 1 - C(n - c, k) / C(n, k)."""
    table = np.ones((members + 1, len(powers_of_two(members))))
    for right in range(members + 1):
        for place, k in enumerate(powers_of_two(members)):
            miss = [(members - right - i) / (members - i) for i in range(k)]
            table[right, place] = 1.0 - np.prod(np.maximum(miss, 0.0))
    return table.astype(np.float32)


def success_statistics(right: jax.Array, kept: jax.Array) -> Statistics:
    """How often rows succeed, and how often one of k does.

    Args:
      right: whether a row has succeeded, bool `[P, G]`.
      kept: the prompts that count, bool `[P]`.

    Returns:
      success, and pass_at `[k]` for the k of `powers_of_two(G)`: the share of prompts that one of k rows solves, from G
      rows without bias (Chen et al., 2021).
    """
    members = right.shape[1]
    solved = jnp.asarray(_pass_at(members))[jnp.sum(right, axis=1)]
    count = jnp.sum(kept)
    at = jax.vmap(mean, in_axes=(1, None))(solved, kept)
    return {"success": Measured(mean(jnp.mean(right, axis=1), kept), count), "pass_at": Measured(at, count)}


def group_statistics(rewards: jax.Array, kept: jax.Array) -> Statistics:
    """How much rows of one prompt differ in what the learner sees.

    Args:
      rewards: `[P, G]`.
      kept: the prompts that count, bool `[P]`.

    Returns:
      no_signal, the share of rollout groups whose rewards are all equal, from which group-relative advantages learn
      nothing; group_std, the mean standard deviation within a group (n - 1 in the divisor; 0 where G is 1).
    """
    members, count = rewards.shape[1], jnp.sum(kept)
    flat = jnp.max(rewards, axis=1) == jnp.min(rewards, axis=1)
    std = jnp.std(rewards, axis=1, ddof=1) if members > 1 else jnp.zeros(len(rewards))
    # Of equal rewards the rounded mean leaves a deviation that is none.
    std = jnp.where(flat, 0.0, std)
    return {"no_signal": Measured(mean(flat, kept), count), "group_std": Measured(mean(std, kept), count)}


def order(score: jax.Array, gold: jax.Array) -> Statistics:
    """How a reward model orders pairs of rows of one prompt whose gold rewards differ.

    Args:
      score: the model's, `[P, G]`.
      gold: the verifier's, `[P, G]`.

    Returns:
      reward_model_accuracy, the share of these pairs ordered as gold does, equal scores counting half.
    """

    def gaps(x: jax.Array) -> jax.Array:
        return x[:, :, None] - x[:, None, :]

    better = gaps(gold) > 0  # each pair once, the better row first
    right = (jnp.sign(gaps(score)) + 1) / 2
    return {"reward_model_accuracy": Measured(mean(right, better), jnp.sum(better))}


def turns(own: jax.Array) -> jax.Array:
    """How many turns, maximal runs of own tokens, the rows of bool `[N, T]` have: int32 `[N]`."""
    before = jnp.pad(own[:, :-1], ((0, 0), (1, 0)))
    return jnp.sum(own & ~before, axis=1, dtype=jnp.int32)


def length_statistics(own: jax.Array, calls: jax.Array, truncated: jax.Array, kept: jax.Array) -> Statistics:
    """How long rows are.

    Args:
      own: bool `[N, T]`.
      calls: completed tool calls, `[N]`.
      truncated: whether a row ran out of slots before its end, bool `[N]`.
      kept: the rows that count, bool `[N]`.

    Returns:
      row_tokens (own ones), turns, calls, truncated, means; length_quantile `[3]`, of own tokens.
    """
    count, lengths = jnp.sum(kept), jnp.sum(own, axis=1).astype(jnp.float32)
    means = {"row_tokens": lengths, "turns": turns(own), "calls": calls, "truncated": truncated}
    found = {name: Measured(mean(value, kept), count) for name, value in means.items()}
    found["length_quantile"] = Measured(masked_quantiles(lengths, kept, LENGTH_QUANTILES), count)
    return found
