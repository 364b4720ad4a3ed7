"""Multivariate control charts: scores of how far telemetry is from the clean runs at the same step.

`departure` is the distance of all channels together: Hotelling's T2 of a step at a rate of 1 (Hotelling, 1947), and of
a multivariate exponentially weighted moving average below it (MEWMA; Lowry et al., 1992), which detects shifts too
small to be seen in one step. `outlier` is the distance of the furthest channel, for shifts of a single channel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxaudit.analysis.statistics.whitening import whitening
from jaxaudit.monitoring.scoring import Carry, ParameterFree, Params, Scorer
from jaxaudit.monitoring.telemetry import SHRINKAGE, StepwiseStats, fill_gap_step, latest_values
from jaxaudit.runtime.tracing import float32_products

EMPTY = np.zeros(0)


def scan_scores(
    scorer: Scorer, params: Params, reference: Any, y: jax.Array, observed: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the scores `[T, S]` and meta-states `[T, m]` of a run `[T, d]`, by a scan over its steps."""

    def step(progress: Carry, row: tuple[jax.Array, jax.Array]) -> tuple[Carry, tuple[jax.Array, jax.Array]]:
        progress, scores = scorer.score_step(params, reference, progress, *row)
        return progress, (scores, scorer.meta_state(params, progress))

    return jax.lax.scan(step, scorer.begin(params, y.shape[-1]), (y, observed))[1]


@partial(jax.jit, static_argnums=0)
@float32_products
def _scan_runs(
    scorer: Scorer, params: Params, reference: Any, y: jax.Array, observed: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return jax.vmap(partial(scan_scores, scorer, params, reference))(jnp.asarray(y), jnp.asarray(observed))


class ScanScorer:
    """A `Scorer` that scores whole runs by a scan over their steps."""

    def score_runs(
        self: Scorer, params: Params, reference: Any, y: np.ndarray, observed: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns scores `[n, T, S]` and meta-states `[n, T, m]` of runs `[n, T, d]`."""
        scores, latents = _scan_runs(self, params, reference, y, observed)
        return np.asarray(scores), np.asarray(latents)


class ChartReference(NamedTuple):
    """What a chart has learned of clean runs.

    Attributes:
      telemetry: statistics of each channel's latest standardised value, `[T, d]`.
      recorded: whether any run has a value at a step, `[T, d]`.
      decorrelate: the matrix that whitens the channels, `[d, d]`.
    """

    telemetry: StepwiseStats
    recorded: Any
    decorrelate: Any

    @classmethod
    def fit(cls, y: np.ndarray, observed: np.ndarray) -> ChartReference:
        """Returns the reference of clean runs `[n, T, d]`; `observed` is 1 where there is a value."""
        telemetry = latest_values(y, observed)
        stats = StepwiseStats.fit(telemetry)
        return cls(stats, (observed > 0).any(0), whitening(stats.standardise(telemetry), SHRINKAGE))

    def whiten(self, latents: np.ndarray) -> np.ndarray:
        """Returns meta-states `[n, T, d]` minus the clean runs' mean, whitened to unit variance in clean runs."""
        return self.telemetry.standardise(latents) @ self.decorrelate


@struct.dataclass
class ChartProgress:
    """What a chart carries from step to step of a run.

    Attributes:
      step: int32.
      last: the latest value of each channel, `[d]`; NaN before the first.
      averages: moving averages of the standardised distances, `[rates, d]`.
      weight: the sum of squared weights of each average, `[rates]`: its variance if steps are independent.
    """

    step: jax.Array
    last: jax.Array
    averages: jax.Array
    weight: jax.Array


@dataclass(frozen=True)
class Chart(ParameterFree, ScanScorer):
    """Distances of telemetry from the clean runs, at one or several rates; the meta-state is the telemetry itself.

    Attributes:
      departure: rates of the moving averages whose whitened length is scored, in (0, 1]; a rate of 1 takes the step
        alone.
      outlier: rates of the moving averages whose furthest channel is scored.
    """

    departure: tuple[float, ...] = (0.05,)
    outlier: tuple[float, ...] = ()

    def __post_init__(self):
        if not self.rates or not all(0 < rate <= 1 for rate in self.rates):
            raise ValueError(f"a chart takes rates in (0, 1], not {self.rates}")

    @property
    def rates(self) -> tuple[float, ...]:
        return self.departure + self.outlier

    @property
    def score_names(self) -> tuple[str, ...]:
        """The names of the S scores, in order."""
        return tuple(f"departure_{r:g}" for r in self.departure) + tuple(f"outlier_{r:g}" for r in self.outlier)

    @property
    def title(self) -> str:
        """The name of the scorer in tables and figures."""
        departures = ["T2" if rate == 1 else f"MEWMA {rate:g}" for rate in self.departure]
        outliers = ["max |z|" if rate == 1 else f"max |EWMA {rate:g}|" for rate in self.outlier]
        return " + ".join(departures + outliers)

    def fit_reference(self, params: Params, y: np.ndarray, observed: np.ndarray) -> ChartReference:
        """Returns the reference of clean runs `[n, T, d]`."""
        return ChartReference.fit(y, observed)

    def empty_reference(self) -> ChartReference:
        """Returns a reference of empty arrays, whose tree structure tells how one is read from a file."""
        return ChartReference(StepwiseStats(EMPTY, EMPTY), EMPTY, EMPTY)

    def begin(self, params: Params, channels: int) -> ChartProgress:
        rates = len(self.rates)
        return ChartProgress(jnp.int32(0), jnp.full(channels, jnp.nan), jnp.zeros((rates, channels)), jnp.zeros(rates))

    def score_step(
        self, params: Params, reference: ChartReference, progress: ChartProgress, y: jax.Array, observed: jax.Array
    ) -> tuple[ChartProgress, jax.Array]:
        """Returns what is carried after a step with telemetry `[d]`, and the step's scores `[S]`.

        Each score is a mean square, or the largest square, of a moving average over its variance if steps were
        independent: r / (2 - r) (1 - (1 - r)^2t) at step t = 1, 2, ... for rate r.
        """
        y, observed, _ = fill_gap_step(reference.telemetry, reference.recorded, progress.step, y, observed)
        last = jnp.where(observed > 0, y, progress.last)
        z = reference.telemetry.standardise_step(last, progress.step)
        averages = update_averages(progress.averages, self.rates, z)
        weight = update_squared_weights(progress.weight, self.rates)
        departures, outliers = jnp.split(averages, [len(self.departure)])
        squares = jnp.concatenate([jnp.mean((departures @ reference.decorrelate) ** 2, -1), jnp.max(outliers**2, -1)])
        return ChartProgress(progress.step + 1, last, averages, weight), squares / weight


def update_averages(average: jax.Array, rates: tuple[float, ...], value: jax.Array) -> jax.Array:
    """Returns exponentially weighted moving averages `[rates, ...]` after one more value `[...]`."""
    rate = jnp.array(rates).reshape(-1, *(1,) * value.ndim)
    return (1 - rate) * average + rate * value


def update_squared_weights(weight: jax.Array, rates: tuple[float, ...]) -> jax.Array:
    """Returns the sums of squared weights of moving averages, `[rates]`, after one more value."""
    rate = jnp.array(rates)
    return (1 - rate) ** 2 * weight + rate**2
