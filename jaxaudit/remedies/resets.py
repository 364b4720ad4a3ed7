"""Remedies that begin training anew from what has been collected."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxaudit.core.remedy import Trained, remedy


def _no_resets(value: Trained) -> jax.Array:
    return jnp.zeros((), jnp.int32)


@remedy(
    "trained",
    strength=4.0,
    neutral=0.0,
    limits=(0.0, float("inf")),
    whole=True,
    needs=("reinitialise", "new_moments", "progress", "key"),
    init=_no_resets,
)
def periodic_reset(value, strength, state, *, reinitialise, new_moments, progress, key):
    """Replaces all parameters by fresh ones, and the optimizer's state by a new one, so many times in a run.

    After equal parts of the run, and not at its end. What is collected stays: a replay buffer, statistics of
    observations (Nikishin et al., 2022, who reset the last layers or all; Nauman et al., 2024, reset all, after fixed
    numbers of updates).
    """
    due = jnp.floor(progress * (strength + 1.0) + 1e-4).astype(jnp.int32)
    resets = (due > state) & (progress < 1.0)
    params = reinitialise(key)
    fresh = Trained(params, new_moments(params))
    changed = jax.tree.map(lambda new, old: jnp.where(resets, new, old), fresh, value)
    return changed, jnp.where(resets, due, state)
