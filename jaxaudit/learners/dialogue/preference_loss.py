"""Direct preference optimization (Rafailov et al., 2023) on pairs of rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import ArrayLike


@struct.dataclass
class PreferencePair:
    """Of each pair, `[P]`.

    Attributes:
      loss: cross entropy of the preference.
      margin: implicit reward of the chosen row less the rejected one's, `beta` times the difference of log-ratios.
      accuracy: 1 where the margin is positive, else 0.
      chosen, rejected: implicit rewards.
    """

    loss: Any
    margin: Any
    accuracy: Any
    chosen: Any
    rejected: Any


def dpo(
    chosen: jax.Array,
    rejected: jax.Array,
    reference_chosen: jax.Array,
    reference_rejected: jax.Array,
    beta: ArrayLike,
    smoothing: ArrayLike = 0.0,
) -> PreferencePair:
    """`-(1 - smoothing) log sigmoid(margin) - smoothing log sigmoid(-margin)` of each pair.

    Args:
        chosen, rejected: log-probabilities of rows, summed over own tokens, `[P]`.
        reference_chosen, reference_rejected: the reference's, `[P]`.
        beta: scale of the implicit reward.
        smoothing: the probability that a pair is the wrong way round (conservative DPO: Mitchell, 2023).
    """
    good = beta * (chosen - reference_chosen)
    bad = beta * (rejected - reference_rejected)
    margin = good - bad
    loss = -(1 - smoothing) * jax.nn.log_sigmoid(margin) - smoothing * jax.nn.log_sigmoid(-margin)
    return PreferencePair(loss, margin, (margin > 0).astype(margin.dtype), good, bad)


def of_rows(
    new: jax.Array, reference: jax.Array, own: jax.Array, beta: ArrayLike, smoothing: ArrayLike = 0.0
) -> PreferencePair:
    """`dpo` of `[N, T]` log-probabilities, whose rows are pairs: the chosen, then the rejected one, `[P = N / 2]`."""
    chosen, rejected = jnp.sum(jnp.where(own, new, 0), -1).reshape(-1, 2).T
    reference_chosen, reference_rejected = jnp.sum(jnp.where(own, reference, 0), -1).reshape(-1, 2).T
    return dpo(chosen, rejected, reference_chosen, reference_rejected, beta, smoothing)
