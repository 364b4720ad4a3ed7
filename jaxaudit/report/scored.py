"""Stored series of a monitor, and the axis of its score: what is far above the threshold must not hide it."""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
import pandas as pd
import xarray as xr

from jaxaudit.report import style
from jaxaudit.report.series import CONTROL_KEY


def values(found: xr.Dataset, name: str, *dims: str) -> np.ndarray | None:
    """A variable as float64 with dims in this order; None where it is not stored."""
    if name not in found or set(found[name].dims) != set(dims):
        return None
    return found[name].transpose(*dims).values.astype(np.float64)


def steps(found: xr.Dataset) -> np.ndarray:
    """The step of every column, int `[step]`."""
    return found["step"].values.astype(int) if "step" in found.coords else np.arange(found.sizes["step"])


def names_of(seen: xr.Dataset, dim: str) -> list[str]:
    """The names along a dimension; numbers where none are stored."""
    return [str(name) for name in seen[dim].values] if dim in seen.coords else [str(i) for i in range(seen.sizes[dim])]


def at_edge(data: pd.DataFrame, top: float) -> pd.DataFrame:
    """Infinite values at the upper edge of the axis, and column `lost` where a median becomes one."""
    data = data.copy()
    columns = ["median", "low", "high"]
    gone = np.isposinf(data["median"].to_numpy())
    before = np.append(False, gone[:-1]) & data["key"].eq(data["key"].shift()).to_numpy()
    data["lost"] = np.where(gone & ~before, 1.0, np.nan)
    data[columns] = np.where(np.isposinf(data[columns].to_numpy()), top, data[columns].to_numpy())
    return data


def score_scale(data: pd.DataFrame, limit: float) -> tuple[pd.DataFrame, alt.Scale, list[alt.Chart], bool]:
    """The data with infinite scores at the edge, the vertical scale, the rule of the threshold, and whether it cuts.

    Where the threshold and what clean runs score would fill less than a quarter of the axis, it is logarithmic far
    from zero. It leaves out the lowest scores.
    """
    x = data[["median", "low", "high"]].to_numpy()
    level = np.array([limit] if np.isfinite(limit) else [])
    known = np.append(x[np.isfinite(x)], level)
    clean = x[(data["key"] == CONTROL_KEY).to_numpy()]
    calm = np.append(clean[np.isfinite(clean)], level)
    low, high = (float(np.quantile(known, 0.02)), float(known.max())) if known.size else (0.0, 1.0)
    low = min(low, *level) if level.size else low
    reach = (float(calm.max()) - low if calm.size else high - low) or 1.0
    far = high > low + 4 * reach
    bottom, top = low - 0.1 * reach, high + (0.2 * (high - low) if far else 0.1 * reach)
    kind: dict[str, Any] = {"type": "symlog", "constant": reach} if far else {}
    scale = alt.Scale(domain=[bottom, top], nice=False, zero=False, **kind)
    ends = [{"start": float(data["step"].min()), "end": float(data["step"].max()), "level": limit}]
    rule = alt.Chart(alt.InlineData(values=ends if np.isfinite(limit) else [])).mark_rule(
        color=style.INK, strokeDash=[1, 3], strokeWidth=1.6, strokeCap="round", clip=True
    )
    extra = [rule.encode(x=alt.X("start:Q"), x2=alt.X2("end:Q"), y=alt.Y("level:Q"))] if np.isfinite(limit) else []
    return at_edge(data, top), scale, extra, bool((np.isposinf(x) | (x < bottom)).any())
