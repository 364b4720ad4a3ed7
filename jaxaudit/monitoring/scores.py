"""How unusual a run is at each step, from a state-space model's latents and innovations; higher is more unusual.

Of the model's innovations: `surprise`, how badly it expected the steps of late; `burst`, the same of the worst channel;
`shift`, how far all channels together have moved to one side, where each may have moved too little to be seen alone (a
multivariate exponentially weighted moving average: Lowry et al., 1992). Of what a run is at a step, beside the clean
runs at that step: `departure` and `outlier`, which are a chart's and need no model (`charts.py`); `deviation`, the
distance of the latent, which is the whitened, drift-corrected MSD of Table S5, squared.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxaudit.analysis.statistics.whitening import whitening
from jaxaudit.monitoring.charts import NONE, Chart, ChartProgress, ChartReference, averaged, squared_weights
from jaxaudit.monitoring.envelope import SHRINKAGE, StepwiseStats, filled, in_gap
from jaxaudit.monitoring.model import Innovations, MetaStateModel, Params, State, follow
from jaxaudit.monitoring.scanned import Scanned
from jaxaudit.monitoring.training import Training, train_one
from jaxaudit.runtime.tracing import float32_products

SURPRISE = (1.0, 0.1)
SHIFT = (0.2, 0.05, 0.02)
"""Rates of the moving averages that scores are taken of; at 1, of the step alone."""

TELEMETRY = Chart(departure=(1.0, 0.1, 0.03), outlier=(1.0, 0.1, 0.03))
"""The scores that need no model."""

SCORES = (
    *(f"surprise_{rate:g}" for rate in SURPRISE),
    *(f"burst_{rate:g}" for rate in SURPRISE),
    *(f"shift_{rate:g}" for rate in SHIFT),
    *TELEMETRY.kinds,
    "deviation_1",
)

MOST = 4.0
"""Standard deviations that one innovation adds to `shift`: a single step's outlier is `surprise`'s to notice."""


class CleanReference(NamedTuple):
    """What clean runs look like to a model.

    Attributes:
      innovations: at each step, standardised ones `[T, d]`.
      latents: at each step `[T, n]`.
      decorrelate: of each of the two, the matrix by which it becomes uncorrelated with unit variance.
      chart: what they look like without it.
    """

    innovations: StepwiseStats
    latents: StepwiseStats
    decorrelate: tuple[Any, Any]
    chart: ChartReference

    @property
    def telemetry(self) -> StepwiseStats:
        """Each channel's latest standardised value, `[T, d]`."""
        return self.chart.telemetry

    def whitened(self, latents: np.ndarray) -> np.ndarray:
        """Distances of meta-states `[n, T, m]` from the clean runs', in their standard deviations, uncorrelated."""
        return self.latents.standardise(latents) @ self.decorrelate[1]


@struct.dataclass
class Progress:
    """What is carried from step to step while a run is scored.

    Attributes:
      step: int32.
      state: the model's.
      squares: moving averages of the mean squared innovation, `[rates]`.
      bursts: of each channel's squared innovation, `[rates, d]`.
      shifts: of the innovations, `[rates, d]`.
      weight: sum of squared weights of each moving average of shifts, `[rates]`.
      chart: the chart's.
      gap: whether the step before was in a gap.
    """

    step: jax.Array
    state: State
    squares: jax.Array
    bursts: jax.Array
    shifts: jax.Array
    weight: jax.Array
    chart: ChartProgress
    gap: jax.Array


def begin(model: MetaStateModel, params: Params, channels: int) -> Progress:
    return Progress(
        step=jnp.int32(0),
        state=model.initial(params),
        squares=jnp.ones(len(SURPRISE)),
        bursts=jnp.ones((len(SURPRISE), channels)),
        shifts=jnp.zeros((len(SHIFT), channels)),
        weight=jnp.zeros(len(SHIFT)),
        chart=TELEMETRY.begin({}, channels),
        gap=jnp.bool_(False),
    )


def score(
    model: MetaStateModel, params: Params, reference: CleanReference, progress: Progress, y: jax.Array, seen: jax.Array
) -> tuple[Progress, jax.Array]:
    """A step's scores `[len(SCORES)]`, given standardised telemetry `[d]` and which of it was there.

    In a gap, steps without any where clean runs had some, a run is taken to be what they are on average: a model that
    saw nothing would be somewhere else when the run goes on. What it expects of the first step after is not held
    against that.
    """
    y, seen, gap = filled(reference.telemetry, reference.chart.recorded, progress.step, y, seen)
    found = model.innovations(params, progress.state, y, seen)
    state = model.advance(params, progress.state, y, seen)
    for_innovations, for_latents = reference.decorrelate

    expected = seen * ~(gap | progress.gap)
    innovation = expected * reference.innovations.standardise_step(found.standardised, progress.step)
    square = jnp.mean((innovation @ for_innovations) ** 2)
    squares = averaged(progress.squares, SURPRISE, square)
    bursts = averaged(progress.bursts, SURPRISE, innovation**2)

    clipped = jnp.clip(innovation, -MOST, MOST) @ for_innovations
    shifts = averaged(progress.shifts, SHIFT, clipped)
    weight = squared_weights(progress.weight, SHIFT)

    chart, distances = TELEMETRY.score({}, reference.chart, progress.chart, y, seen)
    latent = reference.latents.standardise_step(model.latent(params, state), progress.step) @ for_latents
    scores = jnp.concatenate(
        [
            squares,
            jnp.max(bursts, -1),
            jnp.mean(shifts**2, -1) / weight,
            distances,
            jnp.mean(latent**2)[None],
        ]
    )
    return Progress(progress.step + 1, state, squares, bursts, shifts, weight, chart, gap), scores


def refer(model: MetaStateModel, params: Params, y: np.ndarray, seen: np.ndarray) -> CleanReference:
    """The reference from clean runs `[n, T, d]`; what `score` does not hold against a run is not in it."""
    chart, gap = ChartReference.of(y, seen), in_gap(seen)
    filled = np.where(gap, np.nan_to_num(chart.telemetry.mean), y).astype(y.dtype)
    latents, found = _followed(model, params, filled, np.where(gap, chart.recorded, seen).astype(seen.dtype))
    unexpected = gap | np.pad(gap, ((0, 0), (1, 0), (0, 0)))[:, :-1] | (seen == 0)
    series = (
        np.where(unexpected, np.nan, np.asarray(found.standardised)),
        np.where(gap, np.nan, np.asarray(latents)),
    )
    envelopes = [StepwiseStats.of(x) for x in series]
    matrices = [whitening(e.standardise(x), SHRINKAGE) for e, x in zip(envelopes, series, strict=True)]
    innovations, usual = envelopes
    return CleanReference(innovations, usual, (matrices[0], matrices[1]), chart)


@partial(jax.jit, static_argnums=0)
@float32_products
def _followed(model: MetaStateModel, params: Params, y: jax.Array, seen: jax.Array) -> tuple[jax.Array, Innovations]:
    return jax.vmap(partial(follow, model, params))(y, seen)


class StateSpace(Scanned):
    """What makes a `MetaStateModel` a `Scorer`: all of SCORES; its meta-state is the latent."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The names of the S kinds of score, in their order."""
        return SCORES

    @property
    def title(self) -> str:
        """The name of the scorer in tables and figures."""
        return f"meta-state ({type(self).__name__})"

    def fit(self: MetaStateModel, training: Training | None, y: np.ndarray, seen: np.ndarray, seed: int) -> Params:
        """Parameters of the highest likelihood of clean runs `[n, T, d]`."""
        return train_one(self, training or Training(), y, seen, seed)

    def refer(self: MetaStateModel, params: Params, y: np.ndarray, seen: np.ndarray) -> CleanReference:
        """What clean runs `[n, T, d]` look like to it."""
        return refer(self, params, y, seen)

    def blank(self) -> CleanReference:
        """A reference in whose shape one is read."""
        return CleanReference(
            StepwiseStats(NONE, NONE), StepwiseStats(NONE, NONE), (NONE, NONE), ChartReference.blank()
        )

    def begin(self: MetaStateModel, params: Params, channels: int) -> Progress:
        return begin(self, params, channels)

    def score(
        self: MetaStateModel,
        params: Params,
        reference: CleanReference,
        progress: Progress,
        y: jax.Array,
        seen: jax.Array,
    ) -> tuple[Progress, jax.Array]:
        """A step's scores `[S]`, given standardised telemetry `[d]` and which of it was there."""
        return score(self, params, reference, progress, y, seen)

    def meta_state(self: MetaStateModel, params: Params, progress: Progress) -> jax.Array:
        """Returns the latent, `[n]`."""
        return self.latent(params, progress.state)
