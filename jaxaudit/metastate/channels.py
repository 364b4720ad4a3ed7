"""Telemetry as a monitor reads it: named series, standardised by clean runs, missing where a value is not finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr


def series(telemetry: xr.Dataset, names: Sequence[str] | None = None) -> xr.DataArray:
    """Channels of a dataset side by side: `[..., step, channel]`, float32; a vector's entries become channels.

    Args:
      telemetry: variables along "step", and others of "seed", "condition" or a vector's own dimension.
      names: the variables; None: all.

    Raises:
      ValueError: for a name that is not there.
    """
    known = [str(name) for name, values in telemetry.data_vars.items() if "step" in values.dims]
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise ValueError(f"no channel '{unknown[0]}'; there are: {', '.join(sorted(known))}")
    lanes = [dim for dim in ("seed", "condition", "step") if dim in telemetry.dims]
    parts = []
    for name in known if names is None else names:
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
      complete: whether every step of every clean run had a value, `[d]`; without one there later, something is wrong.
    """

    names: tuple[str, ...]
    center: np.ndarray
    scale: np.ndarray
    complete: np.ndarray

    @classmethod
    def of(cls, names: Sequence[str], clean: np.ndarray) -> Channels:
        """Those of clean runs, `[..., T, d]`, that vary: a channel that is constant or never there is left out.

        Raises:
          ValueError: none is left.
        """
        values = np.asarray(clean, np.float64).reshape(-1, len(names))
        values = np.where(np.isfinite(values), values, np.nan)
        there = np.isfinite(values)
        kept = np.array([len(np.unique(column[here])) > 1 for column, here in zip(values.T, there.T, strict=True)])
        if not kept.any():
            raise ValueError(f"none of the channels varies in the clean runs: {', '.join(names)}")
        values, there = values[:, kept], there[:, kept]
        quarters = np.nanpercentile(values, [25, 50, 75], axis=0)
        spread = (quarters[2] - quarters[0]) / 1.349
        spread = np.where(spread > 0, spread, np.nanstd(values, axis=0))
        chosen = tuple(name for name, keep in zip(names, kept, strict=True) if keep)
        return cls(chosen, quarters[1], spread, np.asarray(there.all(axis=0)))

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

    def standardise(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What a model reads of `[..., T, d]`: values in units of the clean runs' spread, and which there are.

        Beyond a few spreads they grow as a logarithm (arsinh), so that what a collapsing run writes stays finite and
        does not drown what it wrote before. A value that is not there is zero.
        """
        seen = np.isfinite(values)
        with np.errstate(over="ignore", invalid="ignore"):
            y = np.arcsinh((np.where(seen, values, self.center).astype(np.float64) - self.center) / self.scale)
        return y.astype(np.float32), seen.astype(np.float32)
