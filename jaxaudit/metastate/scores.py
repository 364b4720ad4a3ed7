"""How unusual a run is at each step, from a model's latents and innovations; higher is more unusual.

Of the model's innovations: `surprise`, how badly it expected the steps of late; `burst`, the same of the worst channel;
`shift`, how far all channels together have moved to one side, where each may have moved too little to be seen alone (a
multivariate exponentially weighted moving average: Lowry et al., 1992). Of what a run is at a step, beside the clean
runs at that step: `departure`, the distance of its telemetry; `outlier`, that of the furthest channel; `deviation`, the
distance of the latent, which is the whitened, drift-corrected MSD of Table S5, squared.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import ArrayLike

from jaxaudit.metastate.envelope import Envelope, forward_filled
from jaxaudit.metastate.model import Innovations, MetaStateModel, Params, State, follow
from jaxaudit.statistics.whitening import whitening

SURPRISE = (1.0, 0.1)
SHIFT = (0.2, 0.05, 0.02)
DEPARTURE = (1.0, 0.1, 0.03)
"""Rates of the moving averages that scores are taken of; at 1, of the step alone."""

SCORES = tuple(
    f"{kind}_{rate:g}"
    for kind, rates in (
        ("surprise", SURPRISE),
        ("burst", SURPRISE),
        ("shift", SHIFT),
        ("departure", DEPARTURE),
        ("outlier", DEPARTURE),
        ("deviation", (1.0,)),
    )
    for rate in rates
)

MOST = 4.0
"""Standard deviations that one innovation adds to `shift`: a single step's outlier is `surprise`'s to notice."""

LEAST, LEAST_SPREAD = 1e-6, 0.05
"""Of a score, and of the spread of its logarithm over clean runs."""

SHRINKAGE = 0.05
"""Of covariances towards a multiple of one, so that what channels always have in common is not divided by nothing."""


@struct.dataclass
class Reference:
    """What clean runs look like to a model.

    Attributes:
      innovations: at each step, standardised ones `[T, d]`.
      latents: at each step `[T, n]`.
      telemetry: at each step, standardised `[T, d]`.
      decorrelate: of each of the three, the matrix by which it becomes uncorrelated with unit variance.
    """

    innovations: Envelope
    latents: Envelope
    telemetry: Envelope
    decorrelate: tuple[Any, Any, Any]


@struct.dataclass
class Yardstick:
    """By which scores of different kinds become one: what the largest of a clean run's steps is usually like.

    Attributes:
      middle: median, over clean runs, of the logarithm of each score's largest value, `[S]`.
      spread: from there to the 97th percentile, `[S]`.
    """

    middle: Any
    spread: Any

    @classmethod
    def of(cls, scores: np.ndarray) -> Yardstick:
        """Of clean runs' scores `[n, T, S]`."""
        largest = np.log(np.maximum(np.max(scores, axis=1), LEAST))
        middle = np.median(largest, axis=0)
        spread = np.percentile(largest, 97, axis=0) - middle
        return cls(np.float32(middle), np.float32(np.maximum(spread, LEAST_SPREAD)))

    def compare(self, scores: ArrayLike) -> jax.Array:
        """Scores `[..., S]` on one scale: 0 and 1 are what middle and spread of clean runs' largest ones are."""
        return (jnp.log(jnp.maximum(scores, LEAST)) - self.middle) / self.spread

    def combine(self, scores: ArrayLike) -> jax.Array:
        """The one of the scores `[..., S]` that is the most unusual: `[...]`."""
        return jnp.max(self.compare(scores), axis=-1)


@struct.dataclass
class Progress:
    """What is carried from step to step while a run is scored.

    Attributes:
      step: int32.
      state: the model's.
      squares: moving averages of the mean squared innovation, `[rates]`.
      bursts: of each channel's squared innovation, `[rates, d]`.
      shifts: of the innovations, `[rates, d]`.
      departures: of the telemetry's distance, `[rates, d]`.
      last: the latest telemetry of each channel, `[d]`.
      weight: sum of squared weights of each moving average of shifts, `[rates]`.
      gap: whether the step before was in a gap.
    """

    step: jax.Array
    state: State
    squares: jax.Array
    bursts: jax.Array
    shifts: jax.Array
    weight: jax.Array
    departures: jax.Array
    last: jax.Array
    gap: jax.Array


def begin(model: MetaStateModel, params: Params, channels: int) -> Progress:
    """Before a run's first step."""
    return Progress(
        step=jnp.int32(0),
        state=model.initial(params),
        squares=jnp.ones(len(SURPRISE)),
        bursts=jnp.ones((len(SURPRISE), channels)),
        shifts=jnp.zeros((len(SHIFT), channels)),
        weight=jnp.zeros(len(SHIFT)),
        departures=jnp.zeros((len(DEPARTURE), channels)),
        last=jnp.zeros(channels),
        gap=jnp.bool_(False),
    )


def score(
    model: MetaStateModel, params: Params, reference: Reference, progress: Progress, y: jax.Array, seen: jax.Array
) -> tuple[Progress, jax.Array]:
    """A step's scores `[len(SCORES)]`, given standardised telemetry `[d]` and which of it was there.

    In a gap, steps without any where clean runs had some, a run is taken to be what they are on average: a model that
    saw nothing would be somewhere else when the run goes on. What it expects of the first step after is not held
    against that.
    """
    recorded = jnp.isfinite(reference.innovations.mean_at(progress.step))
    gap = ~jnp.any(seen > 0) & jnp.any(recorded)
    y = jnp.where(gap, jnp.nan_to_num(reference.telemetry.mean_at(progress.step)), y)
    seen = jnp.where(gap, recorded, seen)

    found = model.innovations(params, progress.state, y, seen)
    state = model.advance(params, progress.state, y, seen)
    for_innovations, for_latents, for_telemetry = reference.decorrelate

    expected = seen * ~(gap | progress.gap)
    innovation = expected * reference.innovations.standardise_step(found.standardised, progress.step)
    square = jnp.mean((innovation @ for_innovations) ** 2)
    squares = _averaged(progress.squares, SURPRISE, square)
    bursts = _averaged(progress.bursts, SURPRISE, innovation**2)

    clipped = jnp.clip(innovation, -MOST, MOST) @ for_innovations
    shifts = _averaged(progress.shifts, SHIFT, clipped)
    rates = jnp.array(SHIFT)
    weight = (1 - rates) ** 2 * progress.weight + rates**2

    last = jnp.where(seen > 0, y, progress.last)
    departures = _averaged(progress.departures, DEPARTURE, reference.telemetry.standardise_step(last, progress.step))

    latent = reference.latents.standardise_step(model.latent(params, state), progress.step) @ for_latents
    scores = jnp.concatenate(
        [
            squares,
            jnp.max(bursts, -1),
            jnp.mean(shifts**2, -1) / weight,
            jnp.mean((departures @ for_telemetry) ** 2, -1),
            jnp.max(departures**2, -1),
            jnp.mean(latent**2)[None],
        ]
    )
    return Progress(progress.step + 1, state, squares, bursts, shifts, weight, departures, last, gap), scores


def _averaged(average: jax.Array, rates: tuple[float, ...], value: jax.Array) -> jax.Array:
    """Moving averages `[rates, ...]`, one value `[...]` on."""
    rate = jnp.array(rates).reshape(-1, *(1,) * value.ndim)
    return (1 - rate) * average + rate * value


def score_all(
    model: MetaStateModel, params: Params, reference: Reference, y: jax.Array, seen: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Scores `[T, len(SCORES)]` and latents `[T, n]` of a whole run, `[T, d]`."""

    def step(progress: Progress, row: tuple[jax.Array, jax.Array]) -> tuple[Progress, tuple[jax.Array, jax.Array]]:
        progress, scores = score(model, params, reference, progress, *row)
        return progress, (scores, model.latent(params, progress.state))

    return jax.lax.scan(step, begin(model, params, y.shape[-1]), (y, seen))[1]


def refer(model: MetaStateModel, params: Params, y: np.ndarray, seen: np.ndarray) -> Reference:
    """The reference from clean runs `[n, T, d]`; what `score` does not hold against a run is not in it."""
    absent = np.where(seen > 0, 0.0, np.nan)
    recorded = (seen > 0).any(0)
    gap = ~(seen > 0).any(-1, keepdims=True) & recorded.any(-1, keepdims=True)
    telemetry = np.where(gap, np.nan, forward_filled(y + absent))
    usual = Envelope.of(telemetry)
    filled = np.where(gap, np.nan_to_num(usual.mean), y).astype(y.dtype)
    latents, found = _followed(model, params, filled, np.where(gap, recorded, seen).astype(seen.dtype))
    unexpected = gap | np.pad(gap, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    series = (
        np.where(unexpected, np.nan, np.asarray(found.standardised) + absent),
        np.where(gap, np.nan, np.asarray(latents)),
        telemetry,
    )
    envelopes = [*(Envelope.of(x) for x in series[:2]), usual]
    matrices = [whitening(e.standardise(x), SHRINKAGE) for e, x in zip(envelopes, series, strict=True)]
    reference = Reference(envelopes[0], envelopes[1], envelopes[2], (matrices[0], matrices[1], matrices[2]))
    return jax.tree.map(np.float32, reference)


@partial(jax.jit, static_argnums=0)
def _followed(model: MetaStateModel, params: Params, y: jax.Array, seen: jax.Array) -> tuple[jax.Array, Innovations]:
    return jax.vmap(partial(follow, model, params))(y, seen)
