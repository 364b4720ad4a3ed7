"""Statistics of rows: their rewards, the differences within rollout groups, and their lengths."""

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
from jaxaudit.learners.dialogue.telemetry.token_statistics import Statistic, Statistics, mean

LENGTH_QUANTILES = (0.1, 0.5, 0.9)


@struct.dataclass
class Scale:
    """Mean and standard deviation of the rewards of rows before the first iteration; scalars."""

    mean: Any
    std: Any

    def __call__(self, reward: jax.Array) -> jax.Array:
        """Returns rewards in standard deviations above the mean; if the deviation is 0, minus the mean."""
        return (reward - self.mean) / jnp.where(self.std == 0, 1.0, self.std)

    @classmethod
    def of(cls, reward: jax.Array) -> Scale:
        """Returns the mean and standard deviation of rewards `[N]`."""
        return cls(jnp.mean(reward), jnp.std(reward))


def reward_statistics(
    gold: jax.Array,
    proxy: jax.Array,
    parts: Mapping[str, jax.Array],
    row_mask: jax.Array,
    scales: Mapping[str, Scale] | None = None,
) -> Statistics:
    """Computes mean rewards over rows.

    Args:
      gold: the verifier's rewards, `[N]`.
      proxy: the rewards that the learner receives, `[N]`.
      parts: parts of the gold reward by name, `[N]` each; may be empty.
      row_mask: rows that count, bool `[N]`.
      scales: scales of "proxy" and "gold", which make a learned score comparable with gold; None or empty if both are
        in gold's units.

    Returns:
      acting_performance (gold), proxy, reward_gap (proxy minus gold, both scaled if there are scales), and, if there
      are parts, reward_part `[parts]` in the order of their names.
    """
    count = jnp.sum(row_mask)
    gap = scales["proxy"](proxy) - scales["gold"](gold) if scales else proxy - gold
    means = {ACTING: mean(gold, row_mask), "proxy": mean(proxy, row_mask), "reward_gap": mean(gap, row_mask)}
    statistics = {name: Statistic(value, count) for name, value in means.items()}
    if parts:
        part_means = jnp.stack([mean(parts[name], row_mask) for name in sorted(parts)])
        statistics["reward_part"] = Statistic(part_means, count)
    return statistics


def powers_of_two(maximum: int) -> tuple[int, ...]:
    """Returns 1, 2, 4 and so on up to `maximum`, and `maximum` itself: the k of pass@k."""
    return tuple(sorted({2**i for i in range(maximum.bit_length()) if 2**i <= maximum} | {maximum}))


@cache
def _pass_at(group_size: int) -> np.ndarray:
    """Returns pass@k of a group of n rows, c of which succeed, float32 `[n + 1, k]`: 1 - C(n - c, k) / C(n, k)."""
    table = np.ones((group_size + 1, len(powers_of_two(group_size))))
    for successes in range(group_size + 1):
        for column, k in enumerate(powers_of_two(group_size)):
            failure = [(group_size - successes - i) / (group_size - i) for i in range(k)]
            table[successes, column] = 1.0 - np.prod(np.maximum(failure, 0.0))
    return table.astype(np.float32)


def success_statistics(success: jax.Array, prompt_mask: jax.Array) -> Statistics:
    """Computes how often rows succeed, and how often at least one of k rows does.

    Args:
      success: whether each row succeeds, bool `[P, G]`.
      prompt_mask: prompts that count, bool `[P]`.

    Returns:
      success, and pass_at `[k]` for the k of `powers_of_two(G)`: the share of prompts that at least one of k rows
      solves, an unbiased estimate from G rows (Chen et al., 2021).
    """
    group_size = success.shape[1]
    solved = jnp.asarray(_pass_at(group_size))[jnp.sum(success, axis=1)]
    count = jnp.sum(prompt_mask)
    pass_at = jax.vmap(mean, in_axes=(1, None))(solved, prompt_mask)
    return {
        "success": Statistic(mean(jnp.mean(success, axis=1), prompt_mask), count),
        "pass_at": Statistic(pass_at, count),
    }


def group_statistics(rewards: jax.Array, prompt_mask: jax.Array) -> Statistics:
    """Computes how much the rewards within rollout groups differ.

    Args:
      rewards: the rewards that the learner receives, `[P, G]`.
      prompt_mask: prompts that count, bool `[P]`.

    Returns:
      no_signal, the share of rollout groups whose rewards are all equal, from which group-relative advantages learn
      nothing; group_std, the mean standard deviation within a group (ddof 1; 0 if G is 1).
    """
    group_size, count = rewards.shape[1], jnp.sum(prompt_mask)
    equal = jnp.max(rewards, axis=1) == jnp.min(rewards, axis=1)
    std = jnp.std(rewards, axis=1, ddof=1) if group_size > 1 else jnp.zeros(len(rewards))
    # Rounding of the mean can leave equal rewards a deviation above 0.
    std = jnp.where(equal, 0.0, std)
    return {
        "no_signal": Statistic(mean(equal, prompt_mask), count),
        "group_std": Statistic(mean(std, prompt_mask), count),
    }


def order(score: jax.Array, gold: jax.Array) -> Statistics:
    """Computes how well a reward model orders pairs of rows of one prompt whose gold rewards differ.

    Args:
      score: the reward model's scores, `[P, G]`.
      gold: the verifier's rewards, `[P, G]`.

    Returns:
      reward_model_accuracy, the share of these pairs that are ordered as by gold, equal scores counting half.
    """

    def differences(x: jax.Array) -> jax.Array:
        return x[:, :, None] - x[:, None, :]

    is_better = differences(gold) > 0  # each pair once, the better row first
    accuracy = (jnp.sign(differences(score)) + 1) / 2
    return {"reward_model_accuracy": Statistic(mean(accuracy, is_better), jnp.sum(is_better))}


def turns(response_mask: jax.Array) -> jax.Array:
    """Returns the number of turns of each row, which are maximal runs of response tokens: `[N, T]` to int32 `[N]`."""
    previous = jnp.pad(response_mask[:, :-1], ((0, 0), (1, 0)))
    return jnp.sum(response_mask & ~previous, axis=1, dtype=jnp.int32)


def length_statistics(
    response_mask: jax.Array, calls: jax.Array, truncated: jax.Array, row_mask: jax.Array
) -> Statistics:
    """Computes how long rows are.

    Args:
      response_mask: bool `[N, T]`.
      calls: number of completed tool calls, `[N]`.
      truncated: whether a row ran out of slots before its end, bool `[N]`.
      row_mask: rows that count, bool `[N]`.

    Returns:
      the means row_tokens (response tokens), turns, calls and truncated; length_quantile `[3]`, of response tokens.
    """
    count, lengths = jnp.sum(row_mask), jnp.sum(response_mask, axis=1).astype(jnp.float32)
    values = {"row_tokens": lengths, "turns": turns(response_mask), "calls": calls, "truncated": truncated}
    statistics = {name: Statistic(mean(value, row_mask), count) for name, value in values.items()}
    statistics["length_quantile"] = Statistic(masked_quantiles(lengths, row_mask, LENGTH_QUANTILES), count)
    return statistics
