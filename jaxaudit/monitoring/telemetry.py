"""Telemetry as monitors read it: a dataset's channels in one array, standardised by clean runs, with clean statistics.

A clean run is a training that nothing disturbs. `observed` is 1 where a channel has a value at a step, else 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxaudit.core.channel_names import PERFORMANCE

if TYPE_CHECKING:
    import jax
    import xarray as xr

DERIVED_CHANNELS = ("baseline_performance", "x_gen", "x_inst", "monitor_score", "alarm")
"""Channels that a step does not measure: another lane's, functions of performance, and what a monitor adds itself."""

ROUNDING_TOLERANCE = 1e-5
"""The relative difference up to which values of two compiled programs count as equal."""

SHRINKAGE = 0.05
"""The shrinkage of covariances towards a multiple of the identity, so that whitening never divides by zero."""

MAX_Z = 1e4
"""The number of standard deviations at which distances are clipped, so that their squares stay finite."""

MAX_VALUE = 1e38
"""The magnitude at which values are clipped, so that their squares stay finite."""

HALF_WIDTH = 5
"""The steps to either side whose spread is pooled with a step's own, so that 20 runs suffice for an estimate."""

MIN_STD_OF_ALL_STEPS = 0.01
"""The smallest standard deviation of a step, relative to that over all steps together."""

MIN_STD_OF_AVERAGE = 0.1
"""The smallest standard deviation of a step, relative to the average of steps that vary.

Runs that agree at a step by chance would otherwise have no spread there.
"""


def entry_names(name: str, labels: Sequence[Iterable[Any]]) -> list[str]:
    """Returns a channel name such as "words[0, a]" for each entry of a variable whose axes have these labels."""
    return [f"{name}[{', '.join(map(str, entry))}]" for entry in itertools.product(*labels)]


def stack_channels(telemetry: xr.Dataset, names: Sequence[str] | None = None) -> xr.DataArray:
    """Returns a dataset's variables as one float32 array `[..., step, channel]`; entries of a vector become channels.

    Args:
      telemetry: variables along "step" and any of "run", "seed", "condition" and dimensions of their own.
      names: the variables to stack; None stacks all but DERIVED_CHANNELS and those whose `Channel.monitored`
        (`jaxaudit.core.learner`) is false.

    Raises:
      ValueError: the dataset lacks one of `names`, or no variable is left.
    """
    import xarray as xr

    available = [str(name) for name, values in telemetry.data_vars.items() if "step" in values.dims]
    unknown = [name for name in names or () if name not in available]
    if unknown:
        raise ValueError(f"no channel '{unknown[0]}'; there are: {', '.join(sorted(available))}")
    if names is None:
        names = [
            name for name in available if name not in DERIVED_CHANNELS and telemetry[name].attrs.get("monitored", 1)
        ]
    if not names:
        others = f"; its variables: {', '.join(map(str, telemetry.data_vars))}" if telemetry.data_vars else ""
        raise ValueError(f"the dataset has no channel along 'step' to monitor{others}")
    lane_dims = [dim for dim in ("run", "seed", "condition", "step") if dim in telemetry.dims]
    parts = []
    for name in names:
        values = telemetry[name].astype(np.float32)
        own_dims = [str(dim) for dim in values.dims if dim not in lane_dims]
        if own_dims:
            values = values.stack(channel=own_dims, create_index=False)
            entries = entry_names(name, [telemetry[name][dim].values for dim in own_dims])
        else:
            values, entries = values.expand_dims(channel=1), [name]
        parts.append(
            values.transpose(*lane_dims, "channel").drop_vars(own_dims, errors="ignore").assign_coords(channel=entries)
        )
    return xr.concat(parts, "channel")


def varying_channels(runs: np.ndarray) -> np.ndarray:
    """Returns which channels of runs `[n, T, d]` differ between runs by more than rounding at some step: bool `[d]`.

    With a single run, these are the channels that vary over its steps.
    """
    lowest, highest = (np.where(np.isfinite(runs), runs, fill) for fill in (np.inf, -np.inf))
    axis = 0 if len(runs) > 1 else 1
    low, high = lowest.min(axis), highest.max(axis)
    with np.errstate(invalid="ignore"):
        return (high - low > ROUNDING_TOLERANCE * np.maximum(np.abs(low), np.abs(high))).any(axis=0)


def duplicate_channels(runs: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Returns which channels of runs `[n, T, d]` are bitwise copies of a channel that is kept: bool `[d]`.

    Among equal channels, the performance is kept if it is one of them, else the first.
    """
    columns = [np.ascontiguousarray(runs[..., i]).tobytes() for i in range(runs.shape[-1])]
    order = sorted(range(len(columns)), key=lambda i: names[i] != PERFORMANCE)
    kept = {columns[i]: i for i in reversed(order)}
    return np.array([kept[column] != i for i, column in enumerate(columns)], bool)


@dataclass(frozen=True)
class ChannelScaler:
    """The channels that a monitor reads, and the location and scale of each in clean runs.

    Attributes:
      names: the d channels, in order.
      center: medians of the clean runs' values, `[d]`.
      scale: interquartile ranges, divided by that of a standard normal, `[d]`.
      complete: whether a channel has a value at every step of the clean runs that has any, `[d]`. A run without a
        value of such a channel at a step has diverged.
    """

    names: tuple[str, ...]
    center: np.ndarray
    scale: np.ndarray
    complete: np.ndarray

    @classmethod
    def fit(cls, names: Sequence[str], clean: np.ndarray) -> ChannelScaler:
        """Selects and scales channels by clean runs `[..., T, d]`, whose d channels have these names.

        A channel is left out if it has no values, if it is the same in all runs at every step, or if it equals another
        channel at every step of every run. A channel that is the same in all runs is a setting, such as a scheduled
        learning rate, by which a monitor would know of disturbances without detecting them.

        Raises:
          ValueError: no channel remains.
        """
        runs = np.asarray(clean, np.float64).reshape(-1, *np.shape(clean)[-2:])
        runs = np.where(np.isfinite(runs), runs, np.nan)
        selected = varying_channels(runs)
        if not selected.any():
            raise ValueError(f"none of the channels differs between the clean runs: {', '.join(names)}")
        selected &= ~duplicate_channels(runs, names)
        values = runs.reshape(-1, len(names))[:, selected]
        observed = np.isfinite(values)
        complete = observed[observed.any(axis=1)].all(axis=0)
        quartiles = np.nanpercentile(values, [25, 50, 75], axis=0)
        scale = (quartiles[2] - quartiles[0]) / 1.349
        scale = np.where(scale > 0, scale, np.nanstd(values, axis=0))
        kept_names = tuple(name for name, keep in zip(names, selected, strict=True) if keep)
        return cls(kept_names, quartiles[1], scale, np.asarray(complete))

    def select(self, values: xr.DataArray) -> np.ndarray:
        """Returns these channels of an array `[..., step, channel]`, as `[..., T, d]`.

        Raises:
          ValueError: a channel is missing.
        """
        available = {str(name) for name in values.channel.values}
        missing = [name for name in self.names if name not in available]
        if missing:
            raise ValueError(
                f"the monitor reads channel '{missing[0]}', which is not there: {', '.join(sorted(available))}"
            )
        return values.sel(channel=list(self.names)).transpose(..., "step", "channel").values

    def select_columns(self, values: np.ndarray, names: Sequence[str]) -> np.ndarray:
        """Returns these channels of an array whose last axis has channels of the given names."""
        return values[..., [list(names).index(name) for name in self.names]]

    def standardise(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns values `[..., T, d]` in units of the clean runs' scale, and where there is a value, both float32.

        The scale is arsinh: linear near the median, logarithmic beyond a few standard deviations. The values of a
        collapsing run therefore stay finite and comparable to what the run had before. Missing values become zero.
        """
        with np.errstate(over="ignore"):
            y, observed = standardise(values, self.center, self.scale, np)
        return y.astype(np.float32), observed.astype(np.float32)


def standardise(values: Any, center: Any, scale: Any, xp: Any) -> tuple[Any, Any]:
    """Computes `ChannelScaler.standardise` with `xp`, NumPy or `jax.numpy`; where there is a value is bool."""
    observed = xp.isfinite(values)
    return xp.arcsinh((xp.where(observed, values, center) - center) / scale), observed


class StepwiseStats(NamedTuple):
    """The clean runs' mean and standard deviation at each of T steps.

    Attributes:
      mean: `[T, ...]`; NaN at steps where no run has a value.
      std: `[T, ...]`; NaN at the same steps.
    """

    mean: Any
    std: Any

    @classmethod
    def fit(cls, clean: np.ndarray) -> StepwiseStats:
        """Computes the statistics of clean runs `[n, T, ...]`; values that are not finite are left out.

        The mean is a single step's, because it may move fast. The variance about it is pooled over HALF_WIDTH
        neighbouring steps.
        """
        observed = np.isfinite(clean)
        x = np.where(observed, clean, 0.0).astype(np.float64)
        count = observed.sum(axis=0)
        with np.errstate(invalid="ignore"):
            mean = np.where(count > 0, x.sum(axis=0) / count, np.nan)
            squares = np.where(observed, (x - mean) ** 2, 0.0).sum(axis=0)
            pooled = _neighbourhood_sums(squares) / np.maximum(_neighbourhood_sums(np.maximum(count - 1, 0)), 1)
            std = np.sqrt(pooled)
            floor = std_floor(clean)
            varies = (count > 0) & (std > floor)
            average = np.where(varies, std, 0.0).sum(0) / np.maximum(varies.sum(0), 1)
            std = np.where(count > 0, np.maximum(np.maximum(std, MIN_STD_OF_AVERAGE * average), floor), np.nan)
        return cls(mean, std)

    def ignoring_constant_steps(self, clean: np.ndarray) -> StepwiseStats:
        """Returns the statistics with an infinite std at steps near which clean runs `[n, T, ...]` do not differ."""
        observed = np.isfinite(clean)
        lowest, highest = (
            extreme(np.where(observed, clean, fill), axis=0) for extreme, fill in ((np.min, np.inf), (np.max, -np.inf))
        )
        differ = _neighbourhood_sums((highest > lowest).astype(np.float64)) > 0
        return self._replace(std=np.where(differ, self.std, np.inf))

    def mean_at(self, step: jax.Array) -> jax.Array:
        """Returns the mean `[...]` at a step, or at the clean runs' last step if that is earlier."""
        import jax.numpy as jnp

        return jnp.asarray(self.mean)[jnp.minimum(step, len(self.mean) - 1)]

    def standardise_step(self, values: jax.Array, step: jax.Array) -> jax.Array:
        """Returns a step's values `[...]` in standard deviations from the mean, and 0 where there is no value.

        Steps after the clean runs' last are compared to their last.
        """
        import jax.numpy as jnp

        row = jnp.minimum(step, len(self.mean) - 1)
        z = (values - self.mean_at(step)) / jnp.asarray(self.std)[row]
        return jnp.where(jnp.isfinite(z), z, 0.0)

    def standardise(self, values: np.ndarray) -> np.ndarray:
        """Computes `standardise_step` for all steps of runs `[n, T', ...]` in NumPy."""
        rows = np.minimum(np.arange(values.shape[1]), len(self.mean) - 1)
        z = (values - self.mean[rows]) / self.std[rows]
        return np.where(np.isfinite(z), z, 0.0)


def std_floor(clean: np.ndarray) -> np.ndarray:
    """Returns the smallest standard deviation to divide by, for each entry of clean runs `[n, T, ...]`: positive."""
    observed = np.isfinite(clean)
    x = np.where(observed, clean, 0.0).astype(np.float64)
    count = np.maximum(observed.sum(axis=(0, 1)), 1)
    mean = x.sum(axis=(0, 1)) / count
    std = np.sqrt(np.where(observed, (x - mean) ** 2, 0.0).sum(axis=(0, 1)) / count)
    # A constant channel gets the rounding error of float32.
    floor = np.maximum(np.maximum(MIN_STD_OF_ALL_STEPS * std, 1e-6 * np.abs(x).max(axis=(0, 1))), 1e-12)
    return np.where(observed.any(axis=(0, 1)), floor, 1.0)


def forward_fill(values: np.ndarray) -> np.ndarray:
    """Returns runs `[n, T, ...]` with each missing value replaced by the latest before it, float64.

    Values before the first are NaN, and values are clipped to MAX_VALUE.
    """
    observed = np.isfinite(values)
    steps = np.arange(values.shape[1]).reshape(-1, *(1,) * (values.ndim - 2))
    latest_step = np.maximum.accumulate(np.where(observed, steps, -1), axis=1)
    filled = np.take_along_axis(np.asarray(values, np.float64), np.maximum(latest_step, 0), axis=1)
    return np.where(latest_step >= 0, np.clip(filled, -MAX_VALUE, MAX_VALUE), np.nan)


def gap_mask(observed: np.ndarray) -> np.ndarray:
    """Returns whether a run `[n, T, d]` has no value at a step at which another run has one: bool `[n, T, 1]`."""
    return np.logical_and(~(observed > 0).any(-1, keepdims=True), (observed > 0).any(0).any(-1, keepdims=True))


def latest_values(y: np.ndarray, observed: np.ndarray) -> np.ndarray:
    """Returns the latest value of each channel of runs `[n, T, d]`; NaN before the first and in gaps."""
    return np.where(gap_mask(observed), np.nan, forward_fill(np.where(observed > 0, y, np.nan)))


def fill_gap_step(
    telemetry: StepwiseStats, recorded: Any, step: jax.Array, y: jax.Array, observed: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Replaces a step's telemetry by the clean runs' mean if the step is in a gap, inside a JAX program.

    A gap is a step without any value at which clean runs have one.

    Args:
      telemetry: statistics of the clean runs' telemetry, `[T, d]`.
      recorded: whether any clean run has a value at a step, `[T, d]`.
      step: int32.
      y: the run's standardised telemetry at the step, `[d]`.
      observed: 1 where there is a value, `[d]`.

    Returns:
      the telemetry `[d]`, where it counts as observed `[d]`, and whether the step is in a gap, a scalar.
    """
    import jax.numpy as jnp

    expected = jnp.asarray(recorded)[jnp.minimum(step, len(recorded) - 1)]
    gap = ~jnp.any(observed > 0) & jnp.any(expected > 0)
    y = jnp.where(gap, jnp.nan_to_num(telemetry.mean_at(step)), y)
    return y, jnp.where(gap, expected, observed), gap


def clip_z(z: Any, xp: Any) -> Any:
    """Clips distances `[..., d]` in standard deviations to MAX_Z; `xp` is NumPy or `jax.numpy`."""
    return xp.clip(z, -MAX_Z, MAX_Z)


def _neighbourhood_sums(x: np.ndarray) -> np.ndarray:
    """Returns sums of `[T, ...]` over each step and its HALF_WIDTH neighbours to either side, as far as there are."""
    total = np.concatenate([np.zeros_like(x[:1]), np.cumsum(x, axis=0)])
    steps = np.arange(len(x))
    return total[np.minimum(steps + HALF_WIDTH + 1, len(x))] - total[np.maximum(steps - HALF_WIDTH, 0)]
