"""What a user should know of how a run on a dialogue begins: whether its warm start leaves anything to learn from."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

REASONS = (
    (
        "every row runs out of slots",
        "; a longer length, or a warm start in which it learns to end its rows, would let it end them",
    ),
    (
        "no row is rewarded",
        ", so there is nothing to learn from; more warm_start updates, a larger warm_start_right or a lower difficulty "
        "would give it something",
    ),
    (
        "every row is rewarded in full",
        ", so nothing is left to learn; a lower warm_start_success or a higher difficulty would leave room",
    ),
    (
        "no rollout group has rewards that differ",
        ", so there is nothing to learn from; a larger group_size or another difficulty would give it something",
    ),
)
"""What may be found, and what would help; of several that hold for a seed the first is told."""


def of_the_beginning(telemetry: Mapping[str, np.ndarray], compares: bool = True) -> list[str]:
    """A sentence for each reason why seeds have little to learn from; none where they have enough.

    Args:
      telemetry: the first steps of undisturbed lanes, one a seed, `[seed, step, ...]` by channel; read are "proxy",
        the reward that the learner sees, "truncated" and "no_signal".
      compares: whether rows of one prompt are compared, so that those without a difference teach nothing.
    """
    reward, truncated = (np.asarray(telemetry[name], np.float64) for name in ("proxy", "truncated"))
    quiet = np.asarray(telemetry["no_signal"], np.float64) if compares else np.zeros(reward.shape)
    holds = np.stack([(x == end).all(axis=1) for x, end in ((truncated, 1), (reward, 0), (reward, 1), (quiet, 1))])
    seeds, steps = reward.shape
    found = []
    for number, (what, rest) in enumerate(REASONS):
        count = int((holds[number] & ~holds[:number].any(axis=0)).sum())
        if count:
            whose = "" if count == seeds else f" of {count} of {seeds} seeds"
            when = "step" if steps == 1 else f"{steps} steps"
            found.append(f"in the first {when}{whose} {what}{rest}")
    return found
