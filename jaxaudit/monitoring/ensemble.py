"""An ensemble of control charts, which needs no model: each sees another kind of change in telemetry.

`z` is a channel's latest value in standard deviations from the clean runs' mean at that step; `e`, its innovation, is
what a vector autoregression of order 1 did not expect of it; `h` is the innovation adjusted for what the innovations of
the other channels say of it (Hawkins, 1991). The charts are of

- `departure`: the squared length of the moving average of whitened z (Hotelling, 1947; MEWMA: Lowry et al., 1992);
- `outlier`: the largest moving average of z of a channel, squared;
- `burst`: the largest h of a channel, squared;
- `surprise`: the moving average of the squared length of whitened e;
- `spread_z`, `spread_e`, `spread_h`: the channel whose moving average of squares is furthest from what it is in clean
  runs, above or below (an exponentially weighted mean square: MacGregor and Harris, 1993);
- `dynamics`: the channel whose h covaries most with its z of the step before.

A channel's averages advance where it has a value of its own. Everything is in NumPy but `Ensemble.score`, which is the
same for a step inside a JAX program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from jaxaudit.analysis.statistics.whitening import covariance, whitening
from jaxaudit.monitoring.envelope import SHRINKAGE, StepwiseStats, clipped, filled, forward_filled, latest

if TYPE_CHECKING:
    import jax

    from jaxaudit.monitoring.model import Params
    from jaxaudit.monitoring.training import Training

RIDGE = 0.01
"""Added to the variances of 1 that a vector autoregression is fitted to, beside the channels per row."""

LEAST_SQUARE = 1e-4
"""Of a moving average of squares whose logarithm is taken; their mean is 1."""

LEAST_SHARE = 0.5
"""Of the deviation that a statistic of independent normal values would have: the least it is taken to have."""

MOST = 4.0
"""Standard deviations that a value adds to a moving average at most: a single outlier is what rates of 1 notice."""

BLOCK = 256
"""Steps whose averages are in memory at a time."""


class Location(NamedTuple):
    """Mean and standard deviation of a statistic over the steps of clean runs, `[rates, d]` each."""

    mean: Any
    std: Any

    @classmethod
    def of(cls, values: np.ndarray, usual: np.ndarray) -> Location:
        """That of statistics `[n, T, rates, d]`, whose deviations would be `[rates, d]` if values were independent."""
        return cls(values.mean((0, 1)), np.maximum(values.std((0, 1)), LEAST_SHARE * usual))

    def furthest(self, values: Any, numpy: Any) -> Any:
        """The largest squared distance in standard deviations over channels, `[..., rates, d]` to `[..., rates]`."""
        return numpy.max(((values - self.mean) / self.std) ** 2, axis=-1)


class EnsembleReference(NamedTuple):
    """What clean runs look like.

    Attributes:
      telemetry: each channel's latest standardised value, `[T, d]`.
      recorded: whether any run has a value of its own at that step, `[T, d]`.
      transition: of the vector autoregression, `z_t = z_{t-1} @ transition + e_t`: `[d, d]`.
      innovations: e at each step, `[T, d]`.
      decorrelate_innovations: the matrix that whitens e in units of its spread, `[d, d]`.
      adjust: the matrix that makes h of those, with a mean square of 1, `[d, d]`.
      decorrelate: those that whiten the moving averages of z, one for each rate, `[rates, d, d]`.
      scale: root mean square of the moving averages of z, `[rates, d]`.
      surprise: of the logarithm of moving averages of the squared length of e, `[rates, 1]`.
      squares: of the logarithms of the channels' moving averages of squares, `[charts, d]`.
      products: of the moving averages of h times the z before, `[rates, d]`.
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

    @classmethod
    def blank(cls) -> EnsembleReference:
        """An empty reference, whose shape tells how one is read from a file."""
        none = np.zeros(0)
        envelope, location = StepwiseStats(none, none), Location(none, none)
        return cls(envelope, none, none, envelope, none, none, none, none, location, location, location)

    def whitened(self, latents: np.ndarray) -> np.ndarray:
        """Distances of meta-states `[n, T, d]` from the clean runs', in their standard deviations, uncorrelated."""
        return self.telemetry.standardise(latents) @ self.decorrelate[0]


class Averages(NamedTuple):
    """Moving averages at a step of a run; leading dimensions are of runs and steps.

    Attributes:
      weight: the variance of each average of z if steps were independent, `[..., rates, d]`; 0 before a first value.
      level: of z, `[..., rates, d]`.
      surprise: of the squared length of e, `[..., rates, 1]`.
      squares: of the squares of z, e and h, `[..., charts, d]`.
      products: of h times the z before, `[..., rates, d]`.
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
      last: the latest telemetry of each channel, `[d]`; NaN before the first.
      z: its distances at the step before, `[d]`; 0 before the first.
      averages: moving averages.
    """

    step: Any
    last: Any
    z: Any
    averages: Averages


@dataclass(frozen=True)
class Ensemble:
    """Several control charts at once; the meta-state is the telemetry itself.

    Attributes:
      departure, outlier: rates of the moving averages of z, in (0, 1]; at 1, of the step alone.
      surprise: of the squared length of e.
      spread_z, spread_e, spread_h: of the squares of each channel.
      dynamics: of the products of h and z.
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
            raise ValueError(f"an ensemble takes rates in (0, 1], at least one of departure, not {rates}")

    @property
    def levels(self) -> tuple[float, ...]:
        """Rates of the moving averages of z, the largest first."""
        return tuple(sorted({*self.departure, *self.outlier}, reverse=True))

    @property
    def squares(self) -> tuple[float, ...]:
        """Rates of the moving averages of squares."""
        return self.spread_z + self.spread_e + self.spread_h

    @property
    def kinds(self) -> tuple[str, ...]:
        """The names of the S kinds of score, in their order."""
        rates = {
            "departure": self.departure,
            "outlier": self.outlier,
            "burst": (1.0,),
            "surprise": self.surprise,
            "spread_z": self.spread_z,
            "spread_e": self.spread_e,
            "spread_h": self.spread_h,
            "dynamics": self.dynamics,
        }
        return tuple(f"{name}_{rate:g}" for name, chosen in rates.items() for rate in chosen)

    def init(self, key: jax.Array, channels: int) -> Params:
        return {}

    def fit(self, training: Training | None, y: np.ndarray, seen: np.ndarray, seed: int) -> Params:
        """No parameters: all that is learned of clean runs is the reference."""
        return {}

    def blank(self) -> EnsembleReference:
        """A reference in whose shape one is read."""
        return EnsembleReference.blank()

    def refer(self, params: Params, y: np.ndarray, seen: np.ndarray) -> EnsembleReference:
        """What clean runs `[n, T, d]` look like."""
        telemetry = latest(y, seen)
        usual = StepwiseStats.of(telemetry)
        z, before = _distances(usual, telemetry)
        fresh = seen > 0
        transition = autoregression(before, z, fresh)
        raw = np.where(fresh, z - before @ transition, np.nan)
        # Where no clean run moves a channel, how far it moves has no scale: its level alone is judged there.
        innovations = StepwiseStats.of(raw).where_still(telemetry)
        e = clipped(innovations.standardise(raw), np)
        spread = covariance(e, SHRINKAGE)
        precision = np.linalg.inv(spread)
        adjust = precision / np.sqrt(np.diag(precision))
        mean_square = np.sqrt(_mean((e @ adjust) ** 2, fresh))
        adjust = adjust / np.maximum(mean_square, LEAST_SHARE)
        blank = self.blank()._replace(
            telemetry=usual,
            recorded=fresh.any(0),
            transition=transition,
            innovations=innovations,
            decorrelate_innovations=whitening(e, SHRINKAGE),
            adjust=adjust,
        )
        averages = [a for a, _ in self._averaged(blank, z, before, fresh)]
        level = np.concatenate([_normalised(a, np) for a in averages], 1)
        channels = z.shape[-1]
        surprise, squares = (
            Location.of(np.concatenate([_log(getattr(a, name), np) for a in averages], 1), usual)
            for name, usual in (
                ("surprise", _deviation(self.surprise, 2 / channels)),
                ("squares", _deviation(self.squares, 2)),
            )
        )
        return blank._replace(
            decorrelate=np.stack([whitening(level[..., i, :], SHRINKAGE) for i in range(len(self.levels))]),
            scale=np.maximum(np.sqrt((level**2).mean((0, 1))), LEAST_SHARE),
            surprise=surprise,
            squares=squares,
            products=Location.of(np.concatenate([a.products for a in averages], 1), _deviation(self.dynamics, 1)),
        )

    def score_runs(
        self, params: Params, reference: EnsembleReference, y: np.ndarray, seen: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Scores `[n, T, S]` and meta-states `[n, T, d]` of runs `[n, T, d]`."""
        y, fresh = _filled_runs(reference, y, seen)
        known = forward_filled(np.where(fresh, y, np.nan))
        z, before = _distances(reference.telemetry, known)
        blocks = [self._statistics(reference, a, h, np) for a, h in self._averaged(reference, z, before, fresh)]
        return np.concatenate(blocks, axis=1), np.nan_to_num(known)

    def begin(self, params: Params, channels: int) -> EnsembleProgress:
        import jax.numpy as jnp

        averages = Averages(*(jnp.asarray(x, jnp.float32) for x in self._first(channels)))
        return EnsembleProgress(jnp.int32(0), jnp.full(channels, jnp.nan), jnp.zeros(channels), averages)

    def score(
        self, params: Params, reference: EnsembleReference, progress: EnsembleProgress, y: jax.Array, seen: jax.Array
    ) -> tuple[EnsembleProgress, jax.Array]:
        """A step's scores `[S]`, given standardised telemetry `[d]` and which of it was there."""
        import jax.numpy as jnp

        step = progress.step
        y, seen, _ = filled(reference.telemetry, reference.recorded, step, y, seen)
        fresh = seen > 0
        last = jnp.where(fresh, y, progress.last)
        z = clipped(reference.telemetry.standardise_step(last, step), jnp)
        raw = z - progress.z @ reference.transition
        e = jnp.where(fresh, clipped(reference.innovations.standardise_step(raw, step), jnp), 0.0)
        values, h = self._values(reference, z, progress.z, e, fresh, jnp)
        averages = self._advanced(progress.averages, values, fresh, jnp)
        return EnsembleProgress(step + 1, last, z, averages), self._statistics(reference, averages, h, jnp)

    def meta_state(self, params: Params, progress: EnsembleProgress) -> jax.Array:
        """The latest standardised telemetry, `[d]`; zero before the first."""
        import jax.numpy as jnp

        return jnp.nan_to_num(progress.last)

    def _first(self, channels: int) -> Averages:
        """The moving averages of a run that has no step yet: of squares 1, as they are in clean runs, of all else 0."""
        levels, products = np.zeros((len(self.levels), channels)), np.zeros((len(self.dynamics), channels))
        surprise, squares = np.ones((len(self.surprise), 1)), np.ones((len(self.squares), channels))
        return Averages(np.zeros_like(levels), levels, surprise, squares, products)

    def _values(
        self, reference: EnsembleReference, z: Any, before: Any, e: Any, fresh: Any, numpy: Any
    ) -> tuple[Averages, Any]:
        """What is averaged, of steps `[..., d]`, in the places of its averages; and h, `[..., d]`."""
        h = numpy.where(fresh, e @ reference.adjust, 0.0)
        count = numpy.maximum(numpy.sum(fresh, axis=-1, keepdims=True), 1)
        square = numpy.sum((e @ reference.decorrelate_innovations) ** 2, axis=-1, keepdims=True) / count
        near_z, near_e, near_h, near = (numpy.clip(x, -MOST, MOST) for x in (z, e, h, before))
        spread = [near_z**2] * len(self.spread_z) + [near_e**2] * len(self.spread_e) + [near_h**2] * len(self.spread_h)
        squares = numpy.stack(spread, -2) if spread else numpy.zeros((*z.shape[:-1], 0, z.shape[-1]))
        levels = numpy.stack([z if rate == 1 else near_z for rate in self.levels], -2)
        return Averages(
            0.0, levels, numpy.minimum(square, MOST**2)[..., None, :], squares, (near_h * near)[..., None, :]
        ), h

    def _advanced(self, averages: Averages, values: Averages, fresh: Any, numpy: Any) -> Averages:
        """Moving averages `[..., rates, d]` a step on, where channels have a value of their own."""
        each = fresh[..., None, :]
        some = numpy.any(fresh, axis=-1)[..., None, None]
        level, squares, products, surprise = (
            numpy.asarray(rates).reshape(-1, 1).astype(averages.level.dtype)
            for rates in (self.levels, self.squares, self.dynamics, self.surprise)
        )
        return Averages(
            numpy.where(each, (1 - level) ** 2 * averages.weight + level**2, averages.weight),
            averages.level + each * level * (values.level - averages.level),
            averages.surprise + some * surprise * (values.surprise - averages.surprise),
            averages.squares + each * squares * (values.squares - averages.squares),
            averages.products + each * products * (values.products - averages.products),
        )

    def _averaged(self, reference: EnsembleReference, z: np.ndarray, before: np.ndarray, fresh: np.ndarray):
        """Moving averages of runs `[n, T, ...]` and their h, some steps at a time."""
        now = Averages(*(np.repeat(x[None], len(z), 0) for x in self._first(z.shape[-1])))
        steps = np.minimum(np.arange(z.shape[1]), len(reference.innovations.mean) - 1)
        for start in range(0, z.shape[1], BLOCK):
            part = slice(start, start + BLOCK)
            known = StepwiseStats(*(x[steps[part]] for x in reference.innovations))
            raw = z[:, part] - before[:, part] @ reference.transition
            e = np.where(fresh[:, part], clipped(known.standardise(raw), np), 0.0)
            values, h = self._values(reference, z[:, part], before[:, part], e, fresh[:, part], np)
            rows = []
            for t in range(h.shape[1]):
                given = Averages(0.0, *(x[:, t] for x in values[1:]))
                now = self._advanced(now, given, fresh[:, start + t], np)
                rows.append(now)
            yield Averages(*(np.stack(x, 1) for x in zip(*rows, strict=True))), h

    def _statistics(self, reference: EnsembleReference, averages: Averages, h: Any, numpy: Any) -> Any:
        """The S scores, `[..., S]`, of moving averages and of the step's h, `[..., d]`."""
        level = _normalised(averages, numpy)
        far = [
            numpy.mean((level[..., i, :] @ reference.decorrelate[i]) ** 2, -1)
            for i in map(self.levels.index, self.departure)
        ]
        furthest = numpy.max((level / reference.scale) ** 2, -1)
        scores = [
            *far,
            *(furthest[..., self.levels.index(rate)] for rate in self.outlier),
            numpy.max(h**2, -1),
        ]
        several = [
            reference.surprise.furthest(_log(averages.surprise, numpy), numpy),
            reference.squares.furthest(_log(averages.squares, numpy), numpy),
            reference.products.furthest(averages.products, numpy),
        ]
        return numpy.concatenate([numpy.stack(scores, -1), *several], -1)


def autoregression(before: np.ndarray, z: np.ndarray, fresh: np.ndarray) -> np.ndarray:
    """The matrix `[d, d]` for `z_t = z_{t-1} @ matrix + e_t`, by ridge regression over the steps of runs `[n, T, d]`.

    A channel's row counts where it has a value of its own.
    """
    channels = z.shape[-1]
    there = fresh.any(-1)
    x, y, own = before[there], z[there], fresh[there]
    rows = np.maximum(own.sum(0), 1)
    shared = x.T @ x / max(len(x), 1)
    with_z = x.T @ np.where(own, y, 0.0) / rows
    return np.linalg.solve(shared + (RIDGE + channels / max(len(x), 1)) * np.eye(channels), with_z)


def _distances(usual: StepwiseStats, telemetry: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """z of runs `[n, T, d]`, and z at the step before each, 0 before the first."""
    z = clipped(usual.standardise(telemetry), np)
    return z, np.concatenate([np.zeros_like(z[:, :1]), z[:, :-1]], axis=1)


def _filled_runs(reference: EnsembleReference, y: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`envelope.filled` for whole runs in NumPy: telemetry `[n, T, d]`, and where it was seen."""
    rows = np.minimum(np.arange(y.shape[1]), len(reference.recorded) - 1)
    recorded = np.asarray(reference.recorded)[rows] > 0
    gap = ~(seen > 0).any(-1, keepdims=True) & recorded.any(-1, keepdims=True)
    return np.where(gap, np.nan_to_num(reference.telemetry.mean[rows]), y), np.where(gap, recorded, seen > 0)


def _normalised(averages: Averages, numpy: Any) -> Any:
    """Moving averages of z in units of their standard deviation if steps were independent, `[..., rates, d]`."""
    there = averages.weight > 0
    return numpy.where(there, averages.level / numpy.sqrt(numpy.where(there, averages.weight, 1.0)), 0.0)


def _deviation(rates: tuple[float, ...], variance: float) -> np.ndarray:
    """The standard deviation of moving averages of independent values of this variance, `[rates, 1]`."""
    rate = np.array(rates).reshape(-1, 1)
    return np.sqrt(variance * rate / (2 - rate))


def _log(squares: Any, numpy: Any) -> Any:
    return numpy.log(numpy.maximum(squares, LEAST_SQUARE))


def _mean(values: np.ndarray, there: np.ndarray) -> np.ndarray:
    """Of runs `[n, T, d]` where there is a value, `[d]`."""
    return np.where(there, values, 0.0).sum((0, 1)) / np.maximum(there.sum((0, 1)), 1)
