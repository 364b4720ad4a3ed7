"""Scores from meta-state models: state-space models of telemetry, trained by maximum likelihood on clean runs.

A meta-state model predicts the next step's telemetry. Three scores are of its innovations: `surprise`, the mean squared
innovation of recent steps; `burst`, that of the worst channel; and `shift`, the distance by which all channels together
have moved to one side, which may be too small in each channel to be seen alone (a multivariate exponentially weighted
moving average: Lowry et al., 1992). The others compare a step with the clean runs at the same step: `departure` and
`outlier` are scores of a chart, which needs no model (`charts.py`), and `deviation` is the distance of the latent: the
whitened, drift-corrected MSD of Table S5, squared.

`observed` is 1 where a channel has a value at a step, else 0; the telemetry may be anything finite where it is 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.typing import ArrayLike

from jaxaudit.analysis.statistics.whitening import whitening
from jaxaudit.monitoring.charts import (
    EMPTY,
    Chart,
    ChartProgress,
    ChartReference,
    ScanScorer,
    update_averages,
    update_squared_weights,
)
from jaxaudit.monitoring.scoring import Params
from jaxaudit.monitoring.telemetry import SHRINKAGE, StepwiseStats, fill_gap_step, gap_mask
from jaxaudit.runtime.tracing import float32_products

SURPRISE_RATES = (1.0, 0.1)
SHIFT_RATES = (0.2, 0.05, 0.02)
"""The rates of the moving averages that are scored; a rate of 1 takes the step alone."""

TELEMETRY_CHART = Chart(departure=(1.0, 0.1, 0.03), outlier=(1.0, 0.1, 0.03))
"""The chart whose scores are added to the model's."""

SCORE_NAMES = (
    *(f"surprise_{rate:g}" for rate in SURPRISE_RATES),
    *(f"burst_{rate:g}" for rate in SURPRISE_RATES),
    *(f"shift_{rate:g}" for rate in SHIFT_RATES),
    *TELEMETRY_CHART.score_names,
    "deviation_1",
)

MAX_SHIFT_Z = 4.0
"""The standard deviations at which innovations are clipped for `shift`: `surprise` detects outliers of single steps."""

State = Any


class Innovations(NamedTuple):
    """The differences of a step's telemetry from its prediction: `[..., d]` each, zero where there is no value.

    Attributes:
      standardised: (y - mean) / std; independent standard normals if the model holds.
      log_std: log of the predicted standard deviation.
      observed: 1 where there is a value, else 0.
    """

    standardised: jax.Array
    log_std: jax.Array
    observed: jax.Array

    @property
    def log_likelihood(self) -> jax.Array:
        """The log density of the observed values in nats, `[...]`."""
        each = -0.5 * self.standardised**2 - self.log_std - 0.5 * jnp.log(2.0 * jnp.pi) * self.observed
        return each.sum(-1)

    @property
    def squared(self) -> jax.Array:
        """The normalised innovation squared, `[...]`: chi-squared with a degree of freedom per observed value."""
        return jnp.sum(self.standardised**2, axis=-1)


class CleanReference(NamedTuple):
    """What a meta-state model's scores have learned of clean runs.

    Attributes:
      innovations: statistics of the standardised innovations, `[T, d]`.
      latents: statistics of the latents, `[T, n]`.
      decorrelate: the matrices that whiten innovations and latents.
      chart: the reference of TELEMETRY_CHART.
    """

    innovations: StepwiseStats
    latents: StepwiseStats
    decorrelate: tuple[Any, Any]
    chart: ChartReference

    @property
    def telemetry(self) -> StepwiseStats:
        """The statistics of each channel's latest standardised value in clean runs, `[T, d]`."""
        return self.chart.telemetry

    def whiten(self, latents: np.ndarray) -> np.ndarray:
        """Returns meta-states `[n, T, m]` minus the clean runs' mean, whitened to unit variance in clean runs."""
        return self.latents.standardise(latents) @ self.decorrelate[1]


@struct.dataclass
class Progress:
    """What is carried from step to step while a run is scored.

    Attributes:
      step: int32.
      state: the model's state.
      squares: moving averages of the mean squared innovation, `[rates]`.
      bursts: moving averages of each channel's squared innovation, `[rates, d]`.
      shifts: moving averages of the innovations, `[rates, d]`.
      weight: the sum of squared weights of each moving average in `shifts`, `[rates]`.
      chart: the chart's progress.
      gap: whether the previous step was in a gap.
    """

    step: jax.Array
    state: State
    squares: jax.Array
    bursts: jax.Array
    shifts: jax.Array
    weight: jax.Array
    chart: ChartProgress
    gap: jax.Array


class StateSpace(ScanScorer, ABC):
    """A model h_{t+1} = f(h_t, y_t) with a Gaussian for y_t given h_t; a `Scorer` whose meta-state is its latent."""

    score_names: ClassVar[tuple[str, ...]] = SCORE_NAMES

    @abstractmethod
    def init(self, key: jax.Array, channels: int) -> Params:
        """Returns initial parameters for telemetry with d channels."""

    @abstractmethod
    def initial(self, params: Params) -> State:
        """Returns the state before the first step of a run."""

    @abstractmethod
    def advance(self, params: Params, state: State, y: jax.Array, observed: jax.Array) -> State:
        """Returns the state after a step with telemetry `[d]`."""

    @abstractmethod
    def innovations(self, params: Params, state: State, y: jax.Array, observed: jax.Array) -> Innovations:
        """Returns the innovations of a step's telemetry `[d]`, given the state before it."""

    @abstractmethod
    def latent(self, params: Params, state: State) -> jax.Array:
        """Returns the latent of a state, `[n]`, which is the scorer's meta-state."""

    def advance_all(self, params: Params, y: jax.Array, observed: jax.Array) -> tuple[State, Innovations]:
        """Returns the states after each step of a run `[T, d]`, with leaves `[T, ...]`, and all innovations."""

        def step(state: State, row: tuple[jax.Array, jax.Array]) -> tuple[State, State]:
            state = self.advance(params, state, *row)
            return state, state

        after = jax.lax.scan(step, self.initial(params), (y, observed))[1]
        return after, self.innovations_all(params, after, y, observed)

    def innovations_all(self, params: Params, after: State, y: jax.Array, observed: jax.Array) -> Innovations:
        """Returns the innovations of all steps at once, given the states after each step."""
        first = self.initial(params)
        before = jax.tree.map(lambda x, rest: jnp.concatenate([x[None], rest[:-1]]), first, after)
        return jax.vmap(self.innovations, in_axes=(None, 0, 0, 0))(params, before, y, observed)

    def filter_run(self, params: Params, y: jax.Array, observed: jax.Array) -> tuple[jax.Array, Innovations]:
        """Returns the latents `[T, n]` after each step of a run `[T, d]`, and the innovations of each step."""
        after, innovations = self.advance_all(params, y, observed)
        return jax.vmap(self.latent, in_axes=(None, 0))(params, after), innovations

    @property
    def title(self) -> str:
        """The name of the scorer in tables and figures."""
        return f"meta-state ({type(self).__name__})"

    def fit(self, training: Training | None, y: np.ndarray, observed: np.ndarray, seed: int) -> Params:
        """Returns parameters of the highest likelihood of clean runs `[n, T, d]`."""
        members, _ = train_members(self, training or Training(), y, observed, np.ones((1, len(y))), seed)
        return jax.tree.map(lambda x: x[0], members)

    def fit_reference(self, params: Params, y: np.ndarray, observed: np.ndarray) -> CleanReference:
        """Returns the reference of clean runs `[n, T, d]`, without the steps that `score_step` leaves out."""
        chart, gap = ChartReference.fit(y, observed), gap_mask(observed)
        filled = np.where(gap, np.nan_to_num(chart.telemetry.mean), y).astype(y.dtype)
        latents, innovations = _filter_runs(
            self, params, filled, np.where(gap, chart.recorded, observed).astype(observed.dtype)
        )
        after_gap = np.pad(gap, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        series = (
            np.where(gap | after_gap | (observed == 0), np.nan, np.asarray(innovations.standardised)),
            np.where(gap, np.nan, np.asarray(latents)),
        )
        stats = [StepwiseStats.fit(values) for values in series]
        matrices = [whitening(s.standardise(values), SHRINKAGE) for s, values in zip(stats, series, strict=True)]
        return CleanReference(stats[0], stats[1], (matrices[0], matrices[1]), chart)

    def empty_reference(self) -> CleanReference:
        """Returns a reference of empty arrays, whose tree structure tells how one is read from a file."""
        empty = StepwiseStats(EMPTY, EMPTY)
        return CleanReference(empty, empty, (EMPTY, EMPTY), TELEMETRY_CHART.empty_reference())

    def begin(self, params: Params, channels: int) -> Progress:
        return Progress(
            step=jnp.int32(0),
            state=self.initial(params),
            squares=jnp.ones(len(SURPRISE_RATES)),
            bursts=jnp.ones((len(SURPRISE_RATES), channels)),
            shifts=jnp.zeros((len(SHIFT_RATES), channels)),
            weight=jnp.zeros(len(SHIFT_RATES)),
            chart=TELEMETRY_CHART.begin({}, channels),
            gap=jnp.bool_(False),
        )

    def score_step(
        self, params: Params, reference: CleanReference, progress: Progress, y: jax.Array, observed: jax.Array
    ) -> tuple[Progress, jax.Array]:
        """Returns what is carried after a step with telemetry `[d]`, and the step's scores `[S]`.

        In a gap, a step without any value at which clean runs have one, the run is assumed to be at the clean runs'
        mean, because the state of a model without input would drift. Innovations of the first step after a gap do not
        count.
        """
        y, observed, gap = fill_gap_step(reference.telemetry, reference.chart.recorded, progress.step, y, observed)
        innovations = self.innovations(params, progress.state, y, observed)
        state = self.advance(params, progress.state, y, observed)
        whiten_innovations, whiten_latents = reference.decorrelate

        counts = observed * ~(gap | progress.gap)
        innovation = counts * reference.innovations.standardise_step(innovations.standardised, progress.step)
        square = jnp.mean((innovation @ whiten_innovations) ** 2)
        squares = update_averages(progress.squares, SURPRISE_RATES, square)
        bursts = update_averages(progress.bursts, SURPRISE_RATES, innovation**2)

        clipped = jnp.clip(innovation, -MAX_SHIFT_Z, MAX_SHIFT_Z) @ whiten_innovations
        shifts = update_averages(progress.shifts, SHIFT_RATES, clipped)
        weight = update_squared_weights(progress.weight, SHIFT_RATES)

        chart, chart_scores = TELEMETRY_CHART.score_step({}, reference.chart, progress.chart, y, observed)
        latent = reference.latents.standardise_step(self.latent(params, state), progress.step) @ whiten_latents
        scores = jnp.concatenate(
            [
                squares,
                jnp.max(bursts, -1),
                jnp.mean(shifts**2, -1) / weight,
                chart_scores,
                jnp.mean(latent**2)[None],
            ]
        )
        return Progress(progress.step + 1, state, squares, bursts, shifts, weight, chart, gap), scores

    def meta_state(self, params: Params, progress: Progress) -> jax.Array:
        """Returns the latent after a step, `[n]`, as `latent` does."""
        return self.latent(params, progress.state)


@partial(jax.jit, static_argnums=0)
@float32_products
def _filter_runs(model: StateSpace, params: Params, y: jax.Array, observed: jax.Array) -> tuple[jax.Array, Innovations]:
    return jax.vmap(partial(model.filter_run, params))(y, observed)


@dataclass(frozen=True)
class Training:
    """The settings of a model's training.

    Attributes:
      iterations: iterations of Adam.
      learning_rate: the initial learning rate; it falls to zero along a cosine.
      batch_size: runs per iteration, sampled with replacement.
      max_norm: the norm to which gradients are clipped.
    """

    iterations: int = 400
    learning_rate: float = 3e-2
    batch_size: int = 16
    max_norm: float = 1.0


def log_likelihood(model: StateSpace, params: Params, y: jax.Array, observed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the log likelihood of a run `[T, d]` in nats, and the number of its values."""
    _, innovations = model.filter_run(params, y, observed)
    return innovations.log_likelihood.sum(), observed.sum()


def train(
    model: StateSpace,
    settings: Training,
    y: jax.Array,
    observed: jax.Array,
    key: jax.Array,
    weights: jax.Array,
) -> tuple[Params, jax.Array]:
    """Trains a model on some of the runs by maximum likelihood.

    Args:
      model: the model.
      settings: the settings of the training.
      y: standardised telemetry, `[runs, T, d]`.
      observed: 1 where there is a value, `[runs, T, d]`.
      key: PRNG key.
      weights: the relative frequency with which a run is sampled, `[runs]`; zero leaves it out.

    Returns:
      the parameters, and minus the mean log likelihood per value at each iteration, `[iterations]`.
    """
    init_key, sample_key = jax.random.split(key)
    params = model.init(init_key, y.shape[-1])
    schedule = optax.cosine_decay_schedule(settings.learning_rate, settings.iterations)
    optimizer = optax.chain(optax.clip_by_global_norm(settings.max_norm), optax.adam(schedule))

    def loss(params: Params, y: jax.Array, observed: jax.Array) -> jax.Array:
        likelihood, values = jax.vmap(partial(log_likelihood, model, params))(y, observed)
        return -likelihood.sum() / jnp.maximum(values.sum(), 1.0)

    def iteration(carry: tuple[Params, Any], key: jax.Array) -> tuple[tuple[Params, Any], jax.Array]:
        params, state = carry
        batch = jax.random.choice(key, len(y), (settings.batch_size,), p=weights / weights.sum())
        value, gradient = jax.value_and_grad(loss)(params, y[batch], observed[batch])
        updates, state = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), value

    begin = (params, optimizer.init(params))
    (params, _), losses = jax.lax.scan(iteration, begin, jax.random.split(sample_key, settings.iterations))
    return params, losses


def train_members(
    model: StateSpace, settings: Training, y: ArrayLike, observed: ArrayLike, weights: ArrayLike, seed: int = 0
) -> tuple[Params, np.ndarray]:
    """Trains several models side by side in one program, for folds or seeds.

    Arguments and results are those of `train`, with a leading axis `[members]` of the results and of `weights`, which
    is `[members, runs]`; `seed` is the seed of the members' keys.
    """
    weights = jnp.asarray(weights, jnp.float32)
    keys = jax.random.split(jax.random.key(seed), len(weights))
    params, losses = _train_members(model, settings, jnp.asarray(y), jnp.asarray(observed), keys, weights)
    return params, np.asarray(losses)


@partial(jax.jit, static_argnums=(0, 1))
@float32_products
def _train_members(
    model: StateSpace, settings: Training, y: jax.Array, observed: jax.Array, keys: jax.Array, weights: jax.Array
) -> tuple[Params, jax.Array]:
    return jax.vmap(partial(train, model, settings), in_axes=(None, None, 0, 0))(y, observed, keys, weights)
