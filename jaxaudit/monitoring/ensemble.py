"""An ensemble of control charts, which needs no model: each detects another kind of change in telemetry.

`z` is a channel's latest value in standard deviations from the clean runs' mean at that step. `e` is its innovation,
the residual of a vector autoregression of order 1. `h` is the innovation adjusted for those of the other channels
(Hawkins, 1991). The charts are

- `departure`: the squared length of the moving average of whitened z (Hotelling, 1947; MEWMA: Lowry et al., 1992);
- `outlier`: the largest squared moving average of z of a channel;
- `burst`: the largest squared h of a channel;
- `surprise`: the moving average of the squared length of whitened e;
- `spread_z`, `spread_e`, `spread_h`: the channel whose moving average of squares is furthest from its values in clean
  runs, above or below (an exponentially weighted mean square: MacGregor and Harris, 1993);
- `dynamics`: the channel whose h covaries most with its z of the step before.

A channel's averages advance where it has a value. All computations are in NumPy, except those of `Ensemble.score_step`,
which scores a step inside a JAX program. Functions with an argument `xp` compute with it: NumPy or `jax.numpy`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from jaxaudit.analysis.statistics.whitening import covariance, whitening
from jaxaudit.monitoring.scoring import ParameterFree, Params
from jaxaudit.monitoring.telemetry import SHRINKAGE, StepwiseStats, clip_z, fill_gap_step, forward_fill, latest_values

if TYPE_CHECKING:
    import jax

RIDGE = 0.01
"""The ridge penalty of the vector autoregression, whose variables have variance 1; channels per row are added to it."""

MIN_SQUARE = 1e-4
"""The smallest moving average of squares whose logarithm is taken; the averages' mean is 1."""

MIN_STD_SHARE = 0.5
"""The smallest std of a statistic, relative to its std if values were independent and normal."""

MAX_AVERAGED_Z = 4.0
"""The standard deviations at which averaged values are clipped: rates of 1 detect outliers of single steps."""

BLOCK = 256
"""The number of steps whose averages are in memory at a time."""


class Location(NamedTuple):
    """Mean and standard deviation of a statistic over the steps of clean runs, `[rates, d]` each."""

    mean: Any
    std: Any

    @classmethod
    def fit(cls, values: np.ndarray, independent_std: np.ndarray) -> Location:
        """Returns the location of statistics `[n, T, rates, d]`.

        The std is at least MIN_STD_SHARE of `independent_std`, the std if values were independent: `[rates, d]`.
        """
        return cls(values.mean((0, 1)), np.maximum(values.std((0, 1)), MIN_STD_SHARE * independent_std))

    def max_squared_z(self, values: Any, xp: Any) -> Any:
        """Returns the largest squared distance in std over channels: `[..., rates, d]` to `[..., rates]`."""
        return xp.max(((values - self.mean) / self.std) ** 2, axis=-1)


class EnsembleReference(NamedTuple):
    """What an ensemble has learned of clean runs.

    Attributes:
      telemetry: statistics of each channel's latest standardised value, `[T, d]`.
      recorded: whether any run has a value at a step, `[T, d]`.
      transition: matrix of the vector autoregression, `z_t = z_{t-1} @ transition + e_t`: `[d, d]`.
      innovations: statistics of e, `[T, d]`.
      decorrelate_innovations: the matrix that whitens standardised e, `[d, d]`.
      adjust: the matrix that maps standardised e to h, which has a mean square of 1, `[d, d]`.
      decorrelate: the matrices that whiten the moving averages of z, one per rate, `[rates, d, d]`.
      scale: root mean square of the moving averages of z, `[rates, d]`.
      surprise: location of the logarithm of moving averages of the squared length of e, `[rates, 1]`.
      squares: location of the logarithms of the channels' moving averages of squares, `[charts, d]`.
      products: location of the moving averages of h times the z before, `[rates, d]`.
    """

    telemetry: StepwiseStats
    recorded: Any
    transition: Any
    innovations: StepwiseStats
    decorrelate_innovations: Any
    adjust: Any
    decorrelate: Any
    scale: Any
    surprise: Location
    squares: Location
    products: Location

    def whiten(self, latents: np.ndarray) -> np.ndarray:
        """Returns meta-states `[n, T, d]` minus the clean runs' mean, whitened to unit variance in clean runs."""
        return self.telemetry.standardise(latents) @ self.decorrelate[0]


class Averages(NamedTuple):
    """Moving averages at a step of a run; leading dimensions are runs and steps.

    Attributes:
      weight: the variance of each average of z if steps were independent, `[..., rates, d]`; 0 before a first value.
      level: averages of z, `[..., rates, d]`.
      surprise: averages of the squared length of e, `[..., rates, 1]`.
      squares: averages of the squares of z, e and h, `[..., charts, d]`.
      products: averages of h times the z before, `[..., rates, d]`.
    """

    weight: Any
    level: Any
    surprise: Any
    squares: Any
    products: Any


class EnsembleProgress(NamedTuple):
    """What is carried from step to step of a run.

    Attributes:
      step: int32.
      last: the latest value of each channel, `[d]`; NaN before the first.
      z: the previous step's z, `[d]`; 0 before the first.
      averages: moving averages.
    """

    step: Any
    last: Any
    z: Any
    averages: Averages


@dataclass(frozen=True)
class Ensemble(ParameterFree):
    """Several control charts at once; the meta-state is the telemetry itself.

    Attributes:
      departure, outlier: rates of the moving averages of z, in (0, 1]; a rate of 1 takes the step alone.
      surprise: rates of the moving averages of the squared length of e.
      spread_z, spread_e, spread_h: rates of the moving averages of each channel's squares.
      dynamics: rates of the moving averages of the products of h and the z before.
    """

    departure: tuple[float, ...] = (1.0, 0.1, 0.03)
    outlier: tuple[float, ...] = (1.0, 0.1)
    surprise: tuple[float, ...] = (0.03,)
    spread_z: tuple[float, ...] = (0.1, 0.03)
    spread_e: tuple[float, ...] = (0.1,)
    spread_h: tuple[float, ...] = (0.03,)
    dynamics: tuple[float, ...] = (0.1, 0.03)

    title: ClassVar[str] = "ensemble of charts"

    def __post_init__(self):
        rates = (*self.levels, *self.surprise, *self.squares, *self.dynamics)
        if not self.departure or not all(0 < rate <= 1 for rate in rates):
            raise ValueError(f"an ensemble takes rates in (0, 1] and at least one of departure, not {rates}")

    @property
    def levels(self) -> tuple[float, ...]:
        """The rates of the moving averages of z, the largest first."""
        return tuple(sorted({*self.departure, *self.outlier}, reverse=True))

    @property
    def squares(self) -> tuple[float, ...]:
        """The rates of the moving averages of squares of z, e and h."""
        return self.spread_z + self.spread_e + self.spread_h

    @property
    def score_names(self) -> tuple[str, ...]:
        """The names of the S scores, in order."""
        rates = {"departure": self.departure, "outlier": self.outlier, "burst": (1.0,)} | asdict(self)
        return tuple(f"{name}_{rate:g}" for name, chart_rates in rates.items() for rate in chart_rates)

    def empty_reference(self) -> EnsembleReference:
        """Returns a reference of empty arrays, whose tree structure tells how one is read from a file."""
        empty = np.zeros(0)
        stats, location = StepwiseStats(empty, empty), Location(empty, empty)
        return EnsembleReference(stats, empty, empty, stats, empty, empty, empty, empty, location, location, location)

    def fit_reference(self, params: Params, y: np.ndarray, observed: np.ndarray) -> EnsembleReference:
        """Returns the reference of clean runs `[n, T, d]`."""
        telemetry = latest_values(y, observed)
        telemetry_stats = StepwiseStats.fit(telemetry)
        z, previous = _standardised_and_previous(telemetry_stats, telemetry)
        has_value = observed > 0
        transition = fit_vector_autoregression(previous, z, has_value)
        raw = np.where(has_value, z - previous @ transition, np.nan)
        # Where no clean run moves a channel, its innovations have no scale: only its level is judged there.
        innovations = StepwiseStats.fit(raw).ignoring_constant_steps(telemetry)
        e = clip_z(innovations.standardise(raw), np)
        precision = np.linalg.inv(covariance(e, SHRINKAGE))
        adjust = precision / np.sqrt(np.diag(precision))
        root_mean_square = np.sqrt(_mean_of_values((e @ adjust) ** 2, has_value))
        adjust = adjust / np.maximum(root_mean_square, MIN_STD_SHARE)
        reference = self.empty_reference()._replace(
            telemetry=telemetry_stats,
            recorded=has_value.any(0),
            transition=transition,
            innovations=innovations,
            decorrelate_innovations=whitening(e, SHRINKAGE),
            adjust=adjust,
        )
        averages = [block for block, _ in self._moving_averages(reference, z, previous, has_value)]
        level = np.concatenate([_normalised_level(block, np) for block in averages], 1)
        channels = z.shape[-1]
        surprise, squares = (
            Location.fit(np.concatenate([_log_square(getattr(block, name), np) for block in averages], 1), std)
            for name, std in (
                ("surprise", _independent_std(self.surprise, 2 / channels)),
                ("squares", _independent_std(self.squares, 2)),
            )
        )
        products = np.concatenate([block.products for block in averages], 1)
        return reference._replace(
            decorrelate=np.stack([whitening(level[..., i, :], SHRINKAGE) for i in range(len(self.levels))]),
            scale=np.maximum(np.sqrt((level**2).mean((0, 1))), MIN_STD_SHARE),
            surprise=surprise,
            squares=squares,
            products=Location.fit(products, _independent_std(self.dynamics, 1)),
        )

    def score_runs(
        self, params: Params, reference: EnsembleReference, y: np.ndarray, observed: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns scores `[n, T, S]` and meta-states `[n, T, d]` of runs `[n, T, d]`."""
        y, has_value = _fill_gaps(reference, y, observed)
        telemetry = forward_fill(np.where(has_value, y, np.nan))
        z, previous = _standardised_and_previous(reference.telemetry, telemetry)
        blocks = [
            self._scores(reference, averages, h, np)
            for averages, h in self._moving_averages(reference, z, previous, has_value)
        ]
        return np.concatenate(blocks, axis=1), np.nan_to_num(telemetry)

    def begin(self, params: Params, channels: int) -> EnsembleProgress:
        import jax.numpy as jnp

        averages = Averages(*(jnp.asarray(x, jnp.float32) for x in self._initial_averages(channels)))
        return EnsembleProgress(jnp.int32(0), jnp.full(channels, jnp.nan), jnp.zeros(channels), averages)

    def score_step(
        self,
        params: Params,
        reference: EnsembleReference,
        progress: EnsembleProgress,
        y: jax.Array,
        observed: jax.Array,
    ) -> tuple[EnsembleProgress, jax.Array]:
        """Returns what is carried after a step with telemetry `[d]`, and the step's scores `[S]`."""
        import jax.numpy as jnp

        step = progress.step
        y, observed, _ = fill_gap_step(reference.telemetry, reference.recorded, step, y, observed)
        has_value = observed > 0
        last = jnp.where(has_value, y, progress.last)
        z = clip_z(reference.telemetry.standardise_step(last, step), jnp)
        raw = z - progress.z @ reference.transition
        e = jnp.where(has_value, clip_z(reference.innovations.standardise_step(raw, step), jnp), 0.0)
        values, h = self._averaged_values(reference, z, progress.z, e, has_value, jnp)
        averages = self._update(progress.averages, values, has_value, jnp)
        return EnsembleProgress(step + 1, last, z, averages), self._scores(reference, averages, h, jnp)

    def _initial_averages(self, channels: int) -> Averages:
        """Returns the averages before a run's first step: 1 for squares, their mean in clean runs, and 0 otherwise."""
        levels, products = np.zeros((len(self.levels), channels)), np.zeros((len(self.dynamics), channels))
        surprise, squares = np.ones((len(self.surprise), 1)), np.ones((len(self.squares), channels))
        return Averages(np.zeros_like(levels), levels, surprise, squares, products)

    def _averaged_values(
        self, reference: EnsembleReference, z: Any, previous: Any, e: Any, has_value: Any, xp: Any
    ) -> tuple[Averages, Any]:
        """Returns the values of steps `[..., d]` that each average takes, in the average's field; and h, `[..., d]`."""
        h = xp.where(has_value, e @ reference.adjust, 0.0)
        count = xp.maximum(xp.sum(has_value, axis=-1, keepdims=True), 1)
        square = xp.sum((e @ reference.decorrelate_innovations) ** 2, axis=-1, keepdims=True) / count
        clipped_z, clipped_e, clipped_h, clipped_previous = (
            xp.clip(x, -MAX_AVERAGED_Z, MAX_AVERAGED_Z) for x in (z, e, h, previous)
        )
        spread = (
            [clipped_z**2] * len(self.spread_z)
            + [clipped_e**2] * len(self.spread_e)
            + [clipped_h**2] * len(self.spread_h)
        )
        squares = xp.stack(spread, -2) if spread else xp.zeros((*z.shape[:-1], 0, z.shape[-1]))
        levels = xp.stack([z if rate == 1 else clipped_z for rate in self.levels], -2)
        surprise = xp.minimum(square, MAX_AVERAGED_Z**2)[..., None, :]
        return Averages(0.0, levels, surprise, squares, (clipped_h * clipped_previous)[..., None, :]), h

    def _update(self, averages: Averages, values: Averages, has_value: Any, xp: Any) -> Averages:
        """Returns the moving averages `[..., rates, d]` after one more step, for channels that have a value."""
        each = has_value[..., None, :]
        some = xp.any(has_value, axis=-1)[..., None, None]
        level, squares, products, surprise = (
            xp.asarray(rates).reshape(-1, 1).astype(averages.level.dtype)
            for rates in (self.levels, self.squares, self.dynamics, self.surprise)
        )
        return Averages(
            xp.where(each, (1 - level) ** 2 * averages.weight + level**2, averages.weight),
            averages.level + each * level * (values.level - averages.level),
            averages.surprise + some * surprise * (values.surprise - averages.surprise),
            averages.squares + each * squares * (values.squares - averages.squares),
            averages.products + each * products * (values.products - averages.products),
        )

    def _moving_averages(
        self, reference: EnsembleReference, z: np.ndarray, previous: np.ndarray, has_value: np.ndarray
    ) -> Iterator[tuple[Averages, np.ndarray]]:
        """Yields the moving averages of runs `[n, T, d]` and their h, BLOCK steps at a time."""
        current = Averages(*(np.repeat(x[None], len(z), 0) for x in self._initial_averages(z.shape[-1])))
        steps = np.minimum(np.arange(z.shape[1]), len(reference.innovations.mean) - 1)
        for start in range(0, z.shape[1], BLOCK):
            block = slice(start, start + BLOCK)
            stats = StepwiseStats(*(x[steps[block]] for x in reference.innovations))
            raw = z[:, block] - previous[:, block] @ reference.transition
            e = np.where(has_value[:, block], clip_z(stats.standardise(raw), np), 0.0)
            values, h = self._averaged_values(reference, z[:, block], previous[:, block], e, has_value[:, block], np)
            rows = []
            for t in range(h.shape[1]):
                step_values = Averages(0.0, *(x[:, t] for x in values[1:]))
                current = self._update(current, step_values, has_value[:, start + t], np)
                rows.append(current)
            yield Averages(*(np.stack(x, 1) for x in zip(*rows, strict=True))), h

    def _scores(self, reference: EnsembleReference, averages: Averages, h: Any, xp: Any) -> Any:
        """Returns the S scores, `[..., S]`, given moving averages and the step's h, `[..., d]`."""
        level = _normalised_level(averages, xp)
        departures = [
            xp.mean((level[..., i, :] @ reference.decorrelate[i]) ** 2, -1)
            for i in map(self.levels.index, self.departure)
        ]
        largest = xp.max((level / reference.scale) ** 2, -1)
        outliers = [largest[..., self.levels.index(rate)] for rate in self.outlier]
        scores = [*departures, *outliers, xp.max(h**2, -1)]
        others = [
            reference.surprise.max_squared_z(_log_square(averages.surprise, xp), xp),
            reference.squares.max_squared_z(_log_square(averages.squares, xp), xp),
            reference.products.max_squared_z(averages.products, xp),
        ]
        return xp.concatenate([xp.stack(scores, -1), *others], -1)


def fit_vector_autoregression(previous: np.ndarray, z: np.ndarray, has_value: np.ndarray) -> np.ndarray:
    """Returns the matrix `[d, d]` in `z_t = z_{t-1} @ matrix + e_t`, by ridge regression over runs `[n, T, d]`.

    A channel's equation is fitted to the steps at which it has a value.
    """
    channels = z.shape[-1]
    any_value = has_value.any(-1)
    x, y, counts = previous[any_value], z[any_value], has_value[any_value]
    rows = np.maximum(counts.sum(0), 1)
    moments = x.T @ x / max(len(x), 1)
    cross_moments = x.T @ np.where(counts, y, 0.0) / rows
    return np.linalg.solve(moments + (RIDGE + channels / max(len(x), 1)) * np.eye(channels), cross_moments)


def _standardised_and_previous(stats: StepwiseStats, telemetry: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns z of runs `[n, T, d]`, and z at the step before, which is 0 before the first."""
    z = clip_z(stats.standardise(telemetry), np)
    return z, np.concatenate([np.zeros_like(z[:, :1]), z[:, :-1]], axis=1)


def _fill_gaps(reference: EnsembleReference, y: np.ndarray, observed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Computes `telemetry.fill_gap_step` for runs `[n, T, d]` in NumPy: telemetry, and where it has a value (bool)."""
    rows = np.minimum(np.arange(y.shape[1]), len(reference.recorded) - 1)
    recorded = np.asarray(reference.recorded)[rows] > 0
    gap = ~(observed > 0).any(-1, keepdims=True) & recorded.any(-1, keepdims=True)
    return np.where(gap, np.nan_to_num(reference.telemetry.mean[rows]), y), np.where(gap, recorded, observed > 0)


def _normalised_level(averages: Averages, xp: Any) -> Any:
    """Returns averages of z over their standard deviation if steps were independent, `[..., rates, d]`."""
    begun = averages.weight > 0
    return xp.where(begun, averages.level / xp.sqrt(xp.where(begun, averages.weight, 1.0)), 0.0)


def _independent_std(rates: tuple[float, ...], variance: float) -> np.ndarray:
    """Returns the standard deviation of moving averages of independent values of this variance, `[rates, 1]`."""
    rate = np.array(rates).reshape(-1, 1)
    return np.sqrt(variance * rate / (2 - rate))


def _log_square(squares: Any, xp: Any) -> Any:
    return xp.log(xp.maximum(squares, MIN_SQUARE))


def _mean_of_values(values: np.ndarray, has_value: np.ndarray) -> np.ndarray:
    return np.where(has_value, values, 0.0).sum((0, 1)) / np.maximum(has_value.sum((0, 1)), 1)
