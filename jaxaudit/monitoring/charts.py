"""Control charts of several channels: how far telemetry is from the clean runs at the same step, without a model.

`departure` is the distance of all channels together: at a rate of 1 Hotelling's T2 of a step (Hotelling, 1947), below
it that of a multivariate exponentially weighted moving average (MEWMA; Lowry et al., 1992), for shifts too small to be
seen in one step. `outlier` is the distance of the furthest channel, for shifts of one among many.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxaudit.analysis.statistics.whitening import whitening
from jaxaudit.monitoring.envelope import SHRINKAGE, StepwiseStats, filled, latest
from jaxaudit.monitoring.model import Params
from jaxaudit.monitoring.scanned import Scanned
from jaxaudit.monitoring.training import Training

NONE = np.zeros(0)


class ChartReference(NamedTuple):
    """What clean runs look like, step by step.

    Attributes:
      telemetry: each channel's latest standardised value, `[T, d]`.
      recorded: whether any run has a value of its own at that step, `[T, d]`.
      decorrelate: the matrix by which channels become uncorrelated with unit variance, `[d, d]`.
    """

    telemetry: StepwiseStats
    recorded: Any
    decorrelate: Any

    @classmethod
    def blank(cls) -> ChartReference:
        """An empty reference, whose shape tells how one is read from a file."""
        return cls(StepwiseStats(NONE, NONE), NONE, NONE)

    @classmethod
    def of(cls, y: np.ndarray, seen: np.ndarray) -> ChartReference:
        """Returns the reference of clean runs' standardised telemetry `[n, T, d]`; `seen` is 1 where a value is."""
        telemetry = latest(y, seen)
        usual = StepwiseStats.of(telemetry)
        matrix = whitening(usual.standardise(telemetry), SHRINKAGE)
        return cls(usual, (seen > 0).any(0), matrix)

    def whitened(self, latents: np.ndarray) -> np.ndarray:
        """Distances of meta-states `[n, T, d]` from the clean runs', in their standard deviations, uncorrelated."""
        return self.telemetry.standardise(latents) @ self.decorrelate


@struct.dataclass
class ChartProgress:
    """What is carried from step to step of a run.

    Attributes:
      step: int32.
      last: the latest telemetry of each channel, `[d]`; NaN before the first.
      averages: moving averages of its standardised distances, `[rates, d]`.
      weight: sum of the squared weights of each, `[rates]`: their variance where steps are independent.
    """

    step: jax.Array
    last: jax.Array
    averages: jax.Array
    weight: jax.Array


@dataclass(frozen=True)
class Chart(Scanned):
    """Distances of telemetry from the clean runs', at one or several rates; the meta-state is the telemetry itself.

    Attributes:
      departure: rates of the moving averages whose squared length is taken, in (0, 1]; at 1, of the step alone.
      outlier: of those whose furthest channel is.
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
    def kinds(self) -> tuple[str, ...]:
        """The names of the S kinds of score, in their order."""
        return tuple(f"departure_{r:g}" for r in self.departure) + tuple(f"outlier_{r:g}" for r in self.outlier)

    @property
    def title(self) -> str:
        """The name of the scorer in tables and figures."""
        far = ["T2" if rate == 1 else f"MEWMA {rate:g}" for rate in self.departure]
        furthest = ["max |z|" if rate == 1 else f"max |EWMA {rate:g}|" for rate in self.outlier]
        return " + ".join(far + furthest)

    def init(self, key: jax.Array, channels: int) -> Params:
        return {}

    def fit(self, training: Training | None, y: np.ndarray, seen: np.ndarray, seed: int) -> Params:
        """No parameters: all that is learned of clean runs is the reference."""
        return {}

    def refer(self, params: Params, y: np.ndarray, seen: np.ndarray) -> ChartReference:
        """What clean runs `[n, T, d]` look like."""
        return ChartReference.of(y, seen)

    def blank(self) -> ChartReference:
        """A reference in whose shape one is read."""
        return ChartReference.blank()

    def begin(self, params: Params, channels: int) -> ChartProgress:
        rates = len(self.rates)
        return ChartProgress(jnp.int32(0), jnp.full(channels, jnp.nan), jnp.zeros((rates, channels)), jnp.zeros(rates))

    def score(
        self, params: Params, reference: ChartReference, progress: ChartProgress, y: jax.Array, seen: jax.Array
    ) -> tuple[ChartProgress, jax.Array]:
        """A step's scores `[S]`, given standardised telemetry `[d]` and which of it was there.

        Each is in units of its mean over clean runs, were steps independent: mean squares and the largest square of a
        moving average over its variance, r / (2 - r) (1 - (1 - r)^2t) at step t = 1, 2, ... of rate r.
        """
        y, seen, _ = filled(reference.telemetry, reference.recorded, progress.step, y, seen)
        last = jnp.where(seen > 0, y, progress.last)
        z = reference.telemetry.standardise_step(last, progress.step)
        averages = averaged(progress.averages, self.rates, z)
        weight = squared_weights(progress.weight, self.rates)
        far, furthest = jnp.split(averages, [len(self.departure)])
        squares = jnp.concatenate([jnp.mean((far @ reference.decorrelate) ** 2, -1), jnp.max(furthest**2, -1)])
        return ChartProgress(progress.step + 1, last, averages, weight), squares / weight

    def meta_state(self, params: Params, progress: ChartProgress) -> jax.Array:
        """The latest standardised telemetry, `[d]`; zero before the first."""
        return jnp.nan_to_num(progress.last)


def averaged(average: jax.Array, rates: tuple[float, ...], value: jax.Array) -> jax.Array:
    """Moving averages `[rates, ...]`, one value `[...]` on."""
    rate = jnp.array(rates).reshape(-1, *(1,) * value.ndim)
    return (1 - rate) * average + rate * value


def squared_weights(weight: jax.Array, rates: tuple[float, ...]) -> jax.Array:
    """The sums of the squared weights of moving averages, `[rates]`, a step on."""
    rate = jnp.array(rates)
    return (1 - rate) ** 2 * weight + rate**2
