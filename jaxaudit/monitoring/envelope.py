"""What clean runs are like at every step: their mean, and how far they spread about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import jax

SHRINKAGE = 0.05
"""Of covariances towards a multiple of one, so that what channels always have in common is not divided by nothing."""

FURTHEST = 1e4
"""Standard deviations that a value counts for at most, so that squares of it stay finite."""

LARGEST = 1e38
"""Values beyond are taken for it, so that their squares stay finite."""

HALF_WIDTH = 5
"""Steps to either side whose spread is pooled with a step's, so that 20 runs are enough."""

FLOOR = 0.01
"""The least spread of a step, in parts of the spread of all steps together."""

LEAST = 0.1
"""The least spread of a step, in parts of the average over steps with any: so that runs alike by chance have one."""


class StepwiseStats(NamedTuple):
    """Mean and standard deviation at each of T steps.

    Attributes:
      mean: `[T, ...]`, of the runs at that step; NaN where none has a value.
      std: `[T, ...]`, likewise.
    """

    mean: Any
    std: Any

    @classmethod
    def of(cls, clean: np.ndarray) -> StepwiseStats:
        """That of clean runs `[n, T, ...]`; values that are not finite are left out.

        The mean is of one step alone, for it may move fast; distances from it are pooled over the neighbouring steps.
        """
        seen = np.isfinite(clean)
        x = np.where(seen, clean, 0.0).astype(np.float64)
        count = seen.sum(axis=0)
        with np.errstate(invalid="ignore"):
            mean = np.where(count > 0, x.sum(axis=0) / count, np.nan)
            squares = np.where(seen, (x - mean) ** 2, 0.0).sum(axis=0)
            pooled = _pooled(squares) / np.maximum(_pooled(np.maximum(count - 1, 0)), 1)
            std = np.sqrt(pooled)
            least = least_spread(clean)
            moves = (count > 0) & (std > least)
            average = np.where(moves, std, 0.0).sum(0) / np.maximum(moves.sum(0), 1)
            std = np.where(count > 0, np.maximum(np.maximum(std, LEAST * average), least), np.nan)
        return cls(mean, std)

    def where_still(self, clean: np.ndarray) -> StepwiseStats:
        """The same with an infinite spread at steps at which, and near which, no clean run `[n, T, ...]` differs."""
        seen = np.isfinite(clean)
        lowest, highest = (
            edge(np.where(seen, clean, fill), axis=0) for edge, fill in ((np.min, np.inf), (np.max, -np.inf))
        )
        differ = _pooled((highest > lowest).astype(np.float64)) > 0
        return self._replace(std=np.where(differ, self.std, np.inf))

    def mean_at(self, step: jax.Array) -> jax.Array:
        """The mean `[...]` at a step; at a step later than the clean runs', at their last."""
        import jax.numpy as jnp

        return jnp.asarray(self.mean)[jnp.minimum(step, len(self.mean) - 1)]

    def standardise_step(self, values: jax.Array, step: jax.Array) -> jax.Array:
        """Values `[...]` of a step in standard deviations from the mean, 0 where there is nothing to compare.

        A step later than the clean runs' is compared to their last.
        """
        import jax.numpy as jnp

        row = jnp.minimum(step, len(self.mean) - 1)
        z = (values - self.mean_at(step)) / jnp.asarray(self.std)[row]
        return jnp.where(jnp.isfinite(z), z, 0.0)

    def standardise(self, values: np.ndarray) -> np.ndarray:
        """The same for all steps of runs `[n, T', ...]`."""
        rows = np.minimum(np.arange(values.shape[1]), len(self.mean) - 1)
        z = (values - self.mean[rows]) / self.std[rows]
        return np.where(np.isfinite(z), z, 0.0)


def least_spread(clean: np.ndarray) -> np.ndarray:
    """The smallest standard deviation to divide by, for each entry of clean runs `[n, T, ...]`; positive, `[...]`."""
    there = np.isfinite(clean)
    x = np.where(there, clean, 0.0).astype(np.float64)
    count = np.maximum(there.sum(axis=(0, 1)), 1)
    mean = x.sum(axis=(0, 1)) / count
    spread = np.sqrt(np.where(there, (x - mean) ** 2, 0.0).sum(axis=(0, 1)) / count)
    # What never moves is held to its rounding errors, in float32.
    least = np.maximum(np.maximum(FLOOR * spread, 1e-6 * np.abs(x).max(axis=(0, 1))), 1e-12)
    return np.where(there.any(axis=(0, 1)), least, 1.0)


def forward_filled(values: np.ndarray) -> np.ndarray:
    """Runs `[n, T, ...]` with the latest value where there is none, float64; NaN before the first."""
    seen = np.isfinite(values)
    steps = np.arange(values.shape[1]).reshape(-1, *(1,) * (values.ndim - 2))
    latest = np.maximum.accumulate(np.where(seen, steps, -1), axis=1)
    filled = np.take_along_axis(np.asarray(values, np.float64), np.maximum(latest, 0), axis=1)
    return np.where(latest >= 0, np.clip(filled, -LARGEST, LARGEST), np.nan)


def in_gap(seen: np.ndarray) -> np.ndarray:
    """Whether a step of runs `[n, T, d]` is without any value where another run had some: bool `[n, T, 1]`."""
    return np.logical_and(~(seen > 0).any(-1, keepdims=True), (seen > 0).any(0).any(-1, keepdims=True))


def latest(y: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Runs `[n, T, d]` with each channel's latest value, NaN before the first and in gaps."""
    return np.where(in_gap(seen), np.nan, forward_filled(np.where(seen > 0, y, np.nan)))


def filled(
    telemetry: StepwiseStats, recorded: Any, step: jax.Array, y: jax.Array, seen: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A step's telemetry `[d]`, what was seen, and whether the step is in a gap, inside a JAX program.

    In a gap, steps without any value where clean runs had some, a run is taken to be what they are on average.

    Args:
      telemetry: clean runs', `[T, d]`.
      recorded: whether any clean run has a value of its own at a step, `[T, d]`.
      step: int32.
      y: the run's, `[d]`.
      seen: 1 where there is a value, `[d]`.
    """
    import jax.numpy as jnp

    expected = jnp.asarray(recorded)[jnp.minimum(step, len(recorded) - 1)]
    gap = ~jnp.any(seen > 0) & jnp.any(expected > 0)
    y = jnp.where(gap, jnp.nan_to_num(telemetry.mean_at(step)), y)
    return y, jnp.where(gap, expected, seen), gap


def clipped(z: Any, numpy: Any) -> Any:
    """Distances `[..., d]` in standard deviations, cut off at FURTHEST to either side."""
    return numpy.clip(z, -FURTHEST, FURTHEST)


def _pooled(x: np.ndarray) -> np.ndarray:
    """Sums of `[T, ...]` over each step's neighbourhood, cut off at the ends."""
    total = np.concatenate([np.zeros_like(x[:1]), np.cumsum(x, axis=0)])
    steps = np.arange(len(x))
    return total[np.minimum(steps + HALF_WIDTH + 1, len(x))] - total[np.maximum(steps - HALF_WIDTH, 0)]
