"""Scores of whole runs, of a scorer that takes them step by step."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxaudit.monitoring.model import Params
from jaxaudit.monitoring.scorer import Carry, Scorer
from jaxaudit.runtime.tracing import float32_products


def score_all(
    scorer: Scorer, params: Params, reference: Any, y: jax.Array, seen: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Scores `[T, S]` and meta-states `[T, m]` of a whole run, `[T, d]`."""

    def step(progress: Carry, row: tuple[jax.Array, jax.Array]) -> tuple[Carry, tuple[jax.Array, jax.Array]]:
        progress, scores = scorer.score(params, reference, progress, *row)
        return progress, (scores, scorer.meta_state(params, progress))

    return jax.lax.scan(step, scorer.begin(params, y.shape[-1]), (y, seen))[1]


@partial(jax.jit, static_argnums=0)
@float32_products
def _scored(
    scorer: Scorer, params: Params, reference: Any, y: jax.Array, seen: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return jax.vmap(partial(score_all, scorer, params, reference))(jnp.asarray(y), jnp.asarray(seen))


class Scanned:
    """A `Scorer` whose runs are scored by a scan over their steps."""

    def score_runs(
        self: Scorer, params: Params, reference: Any, y: np.ndarray, seen: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Scores `[n, T, S]` and meta-states `[n, T, m]` of runs `[n, T, d]`."""
        scores, latents = _scored(self, params, reference, y, seen)
        return np.asarray(scores), np.asarray(latents)
