"""Telemetry as a monitor reads it: named series, standardised by clean runs, missing where a value is not finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxaudit.core.channel_names import PERFORMANCE

if TYPE_CHECKING:
    import xarray as xr

DERIVED = ("baseline_performance", "x_gen", "x_inst", "monitor_score", "alarm")
"""Channels that a step does not measure: another lane's, functions of performance, and what a monitor says itself."""

ROUNDING = 1e-5
"""Relative, by which runs of different programs may differ in what is the same."""


def series(telemetry: xr.Dataset, names: Sequence[str] | None = None) -> xr.DataArray:
    """Channels of a dataset side by side: `[..., step, channel]`, float32; a vector's entries become channels.

    Args:
      telemetry: variables along "step", and others of "seed", "condition" or a vector's own dimension.
      names: the variables; None: all but DERIVED and those that are not `monitored` (`jaxaudit.core.learner.Channel`).

    Raises:
      ValueError: for a name that is not there.
    """
    import xarray as xr

    known = [str(name) for name, values in telemetry.data_vars.items() if "step" in values.dims]
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise ValueError(f"no channel '{unknown[0]}'; there are: {', '.join(sorted(known))}")
    lanes = [dim for dim in ("seed", "condition", "step") if dim in telemetry.dims]
    parts = []
    read = [name for name in known if name not in DERIVED and telemetry[name].attrs.get("monitored", 1)]
    for name in read if names is None else names:
        values = telemetry[name].astype(np.float32)
        vector = [str(dim) for dim in values.dims if dim not in lanes]
        if vector:
            values = values.stack(channel=vector, create_index=False)
            entries = [f"{name}[{', '.join(map(str, entry))}]" for entry in _labels(telemetry[name], vector)]
        else:
            values, entries = values.expand_dims(channel=1), [name]
        parts.append(
            values.transpose(*lanes, "channel").drop_vars(vector, errors="ignore").assign_coords(channel=entries)
        )
    return xr.concat(parts, "channel")


def measured(runs: np.ndarray) -> np.ndarray:
    """Which channels of runs `[n, T, d]` differ between runs at some step, by more than float32 rounds: bool `[d]`.

    Of one run alone, those that vary.
    """
    lowest, highest = (np.where(np.isfinite(runs), runs, end) for end in (np.inf, -np.inf))
    axis = 0 if len(runs) > 1 else 1
    low, high = lowest.min(axis), highest.max(axis)
    with np.errstate(invalid="ignore"):
        return (high - low > ROUNDING * np.maximum(np.abs(low), np.abs(high))).any(axis=0)


def repeated(runs: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Which channels of runs `[n, T, d]` with these names are bitwise another that is not: bool `[d]`.

    Of channels that say the same that is the performance, if it is one of them, else the first.
    """
    columns = [np.ascontiguousarray(runs[..., i]).tobytes() for i in range(runs.shape[-1])]
    order = sorted(range(len(columns)), key=lambda i: names[i] != PERFORMANCE)
    first = {columns[i]: i for i in reversed(order)}
    return np.array([first[column] != i for i, column in enumerate(columns)], bool)


def _labels(values: xr.DataArray, dims: Sequence[str]) -> list[tuple]:
    grids = np.meshgrid(*(values[dim].values for dim in dims), indexing="ij")
    return list(zip(*(grid.ravel() for grid in grids), strict=True))


@dataclass(frozen=True)
class Channels:
    """Which series a monitor reads, and how each is standardised.

    Attributes:
      names: of the d series, in order.
      center: median of the clean runs' values, `[d]`.
      scale: their interquartile range, as the standard deviation of a normal that has it, `[d]`.
      complete: whether every step of a clean run that had any value had one of it, `[d]`; a run that has none at a step
        has diverged.
    """

    names: tuple[str, ...]
    center: np.ndarray
    scale: np.ndarray
    complete: np.ndarray

    @classmethod
    def of(cls, names: Sequence[str], clean: np.ndarray) -> Channels:
        """Returns the channels of clean runs, `[..., T, d]`, that were measured.

        Left out is what is never there, what is the same in all runs at every step: it was set, as a schedule of the
        learning rate is, and to read a setting would be to be told of a disturbance of it; and what another channel
        says at every step of every clean run, as the acting performance does what the performance does.

        Raises:
          ValueError: none is left.
        """
        runs = np.asarray(clean, np.float64).reshape(-1, *np.shape(clean)[-2:])
        runs = np.where(np.isfinite(runs), runs, np.nan)
        kept = measured(runs)
        if not kept.any():
            raise ValueError(f"none of the channels differs between the clean runs: {', '.join(names)}")
        kept &= ~repeated(runs, names)
        values = runs.reshape(-1, len(names))[:, kept]
        there = np.isfinite(values)
        complete = there[there.any(axis=1)].all(axis=0)
        quarters = np.nanpercentile(values, [25, 50, 75], axis=0)
        spread = (quarters[2] - quarters[0]) / 1.349
        spread = np.where(spread > 0, spread, np.nanstd(values, axis=0))
        chosen = tuple(name for name, keep in zip(names, kept, strict=True) if keep)
        return cls(chosen, quarters[1], spread, np.asarray(complete))

    def select(self, values: xr.DataArray) -> np.ndarray:
        """These series out of `[..., step, channel]`, as `[..., T, d]`.

        Raises:
          ValueError: one is not there.
        """
        there = {str(name) for name in values.channel.values}
        missing = [name for name in self.names if name not in there]
        if missing:
            raise ValueError(
                f"the monitor reads channel '{missing[0]}', which is not there: {', '.join(sorted(there))}"
            )
        return values.sel(channel=list(self.names)).transpose(..., "step", "channel").values

    def pick(self, values: np.ndarray, names: Sequence[str]) -> np.ndarray:
        """These series out of `[..., d]`, whose channels have the names; as they were in `of`."""
        return values[..., [list(names).index(name) for name in self.names]]

    def standardise(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What a model reads of `[..., T, d]`: values in units of the clean runs' spread, and which there are.

        Beyond a few spreads they grow as a logarithm (arsinh), so that what a collapsing run writes stays finite and
        does not drown what it wrote before. A value that is not there is zero.
        """
        with np.errstate(over="ignore"):
            y, seen = standardise(values, self.center, self.scale, np)
        return y.astype(np.float32), seen.astype(np.float32)


def standardise(values: Any, center: Any, scale: Any, numpy: Any) -> tuple[Any, Any]:
    """`Channels.standardise` in NumPy or `jax.numpy`, whichever `numpy` is; which values there are is bool."""
    seen = numpy.isfinite(values)
    return numpy.arcsinh((numpy.where(seen, values, center) - center) / scale), seen
