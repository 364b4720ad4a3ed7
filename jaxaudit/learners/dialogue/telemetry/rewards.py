"""What is measured of rows: what they earn, how prompts' rollout groups differ, and how long they are."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from jaxaudit.kernels.tails import masked_quantiles
from jaxaudit.learner import ACTING
from jaxaudit.learners.dialogue import advantages
from jaxaudit.learners.dialogue.telemetry.strata import Statistic, Statistics, mean

LENGTH_QUANTILES = (0.1, 0.5, 0.9)


def reward_statistics(gold: jax.Array, proxy: jax.Array, parts: Mapping[str, jax.Array], kept: jax.Array) -> Statistics:
    """Means over rows.

    Args:
      gold: the verifier's, `[N]`.
      proxy: what the learner sees, `[N]`.
      parts: of the gold reward by name, `[N]` each; may be empty.
      kept: the rows that count, bool `[N]`.

    Returns:
      acting_performance (gold), reward (proxy), reward_gap (proxy less gold), and reward_part `[parts]` in the order of
      the names, if there are any.
    """
    count = jnp.sum(kept)
    means = {ACTING: mean(gold, kept), "reward": mean(proxy, kept), "reward_gap": mean(proxy - gold, kept)}
    found = {name: Statistic(value, count) for name, value in means.items()}
    if parts:
        found["reward_part"] = Statistic(jnp.stack([mean(parts[name], kept) for name in sorted(parts)]), count)
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
    return {"success": Statistic(mean(jnp.mean(right, axis=1), kept), count), "pass_at": Statistic(at, count)}


def group_statistics(rewards: jax.Array, kept: jax.Array) -> Statistics:
    """How much rows of one prompt differ in what the learner sees.

    Args:
      rewards: `[P, G]`.
      kept: the rows that count, bool `[P, G]`.

    Returns:
      groups_with_signal, the share of rollout groups whose rewards are not all equal: group-relative advantages learn
      nothing from the others; group_std, the mean over groups of the standard deviation (ddof 1) within.
    """
    there = jnp.any(kept, axis=1)
    members, squares = jnp.sum(kept, axis=1), jnp.sum(advantages.group_mean(rewards, kept) ** 2, axis=1)
    std = jnp.sqrt(squares / jnp.maximum(members - 1, 1))
    count = jnp.sum(there)
    return {
        "groups_with_signal": Statistic(mean(advantages.differ(rewards, kept), there), count),
        "group_std": Statistic(mean(std, there), count),
    }


def length_statistics(
    lengths: jax.Array, turns: jax.Array, calls: jax.Array, truncated: jax.Array, kept: jax.Array
) -> Statistics:
    """How long rows are.

    Args:
      lengths: own tokens, `[N]`.
      turns: runs of them, `[N]`.
      calls: of tools, `[N]`.
      truncated: whether a row ran out of slots before its end, bool `[N]`.
      kept: the rows that count, bool `[N]`.

    Returns:
      own_tokens, turns, calls, truncated, means; length_quantile `[3]`, of own tokens.
    """
    count = jnp.sum(kept)
    means = {"own_tokens": lengths, "turns": turns, "calls": calls, "truncated": truncated}
    found = {name: Statistic(mean(value, kept), count) for name, value in means.items()}
    found["length_quantile"] = Statistic(masked_quantiles(lengths, kept, LENGTH_QUANTILES), count)
    return found
