"""Stored series of a monitor, and the axis of its score: what is far above the threshold must not hide it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
import xarray as xr

from jaxaudit.report import style
from jaxaudit.report.panel import Figure
from jaxaudit.report.series import CONTROL_KEY, thin

TUBE = "#e3e5ea"
TUBE_STEPS, PATH_STEPS = 80, 240
"""Most steps that are drawn of the tube and of a path."""


CAPTION = "Grey tube and line: the 10% to 90% range and median of clean runs at each step. "
ENDS = " dot: the last step. Every panel has axes of its own."
CUT = " Axes leave out extreme values, so that the tube stays legible."


def figure(file: str, panels: Sequence[tuple[Any, bool]], words: str) -> Figure:
    """Panels beside one another; `words` on what the paths' grey part, their colour and the ring mean."""
    charts = [chart for chart, _ in panels]
    finished = style.finish(charts, 3, shared=False, width=270, limit=520, gutter=62)
    return Figure(file, "", finished, CAPTION + words + ENDS + (CUT if any(cut for _, cut in panels) else ""))


def panel(
    clean: np.ndarray | None, paths: Sequence[np.ndarray], since: int, colour: str, title: str, subtitle: str = ""
) -> tuple[Any, bool]:
    """A panel, and whether its axes leave out extremes.

    Args:
      clean: the clean runs' quantiles, low, middle and high, `[T, 2, 3]`.
      paths: `[T, 2]` each; NaN where a step was not there.
      since: the place of the step from which on a path has its colour; before it, it is thin and grey.
      colour: of the paths.
      title: of the panel.
      subtitle: under it.
    """
    calm = np.empty((0, 2, 3)) if clean is None else clean
    lines = pd.concat([_path(path, number, since) for number, path in enumerate(paths)], ignore_index=True)
    values = lines[["x", "y"]].to_numpy()
    ends, cut = zip(*(style.domain([values[:, k], calm[:, k]], [calm[:, k]]) for k in (0, 1)), strict=True)
    axes: list[dict[str, Any]] = [{"scale": alt.Scale(domain=list(end), nice=False, zero=False)} for end in ends]
    x, y = axes
    x["title"], y["title"] = "first component", "second component"
    at: dict[str, Any] = {"x": alt.X("x:Q", **x), "y": alt.Y("y:Q", **y)}
    layers = [] if clean is None else _tube(calm, at, x, y)
    layers += _lines(lines, at, colour)
    told: dict[str, Any] = {"subtitle": subtitle} if subtitle else {}
    heading = alt.TitleParams(title, limit=310, **told)
    return alt.layer(*layers).properties(width=300, height=270, title=heading), any(cut)


def _path(path: np.ndarray, number: int, since: int) -> pd.DataFrame:
    """Rows path, part, order, x, y, mark of a path before and after the step; the parts share that step."""
    kept = thin(np.arange(len(path)), since, len(path) // 8, PATH_STEPS)
    kept = kept[np.isfinite(path[kept]).all(axis=1)]
    parts = []
    for part, chosen in (("before", kept[kept <= since]), ("after", kept[kept >= since])):
        rows = pd.DataFrame({"order": chosen, "x": path[chosen, 0], "y": path[chosen, 1]})
        rows.insert(0, "path", f"{number} {part}")
        rows.insert(1, "part", part)
        rows["mark"] = ""
        parts.append(rows)
    after = parts[1]
    if len(after):
        after.loc[0, "mark"] = "start"
        after.loc[len(after) - 1, "mark"] = "end"
    return pd.concat(parts, ignore_index=True)


def _tube(clean: np.ndarray, at: dict[str, Any], x: dict[str, Any], y: dict[str, Any]) -> list[Any]:
    """Opaque boxes, one a step, whose union is the tube, and the median path inside."""
    kept = np.unique(np.linspace(0, len(clean) - 1, TUBE_STEPS).round().astype(int))
    kept = kept[np.isfinite(clean[kept]).all(axis=(1, 2))]
    low, middle, high = (clean[kept, :, k] for k in range(3))
    columns = {"order": kept, "x": middle[:, 0], "y": middle[:, 1]}
    columns |= {"left": low[:, 0], "right": high[:, 0], "lower": low[:, 1], "upper": high[:, 1]}
    base = alt.Chart(style.table(pd.DataFrame(columns)))
    box = base.mark_rect(color=TUBE, stroke=TUBE, strokeWidth=3, strokeJoin="round", clip=True)
    line = base.mark_line(color=style.GREY, strokeWidth=1.4, clip=True)
    return [
        box.encode(x=alt.X("left:Q", **x), x2=alt.X2("right:Q"), y=alt.Y("lower:Q", **y), y2=alt.Y2("upper:Q")),
        line.encode(**at, order=alt.Order("order:Q")),
    ]


def _lines(data: pd.DataFrame, at: dict[str, Any], colour: str) -> list[Any]:
    base = alt.Chart(style.table(data)).encode(**at)
    before = base.transform_filter("datum.part == 'before'").mark_line(
        color=style.GREY, strokeWidth=0.7, opacity=0.45, clip=True
    )
    after = base.transform_filter("datum.part == 'after'").mark_line(
        color=colour, strokeWidth=1.1, opacity=0.75, strokeJoin="round", clip=True
    )
    apart: dict[str, Any] = {"detail": alt.Detail("path:N"), "order": alt.Order("order:Q")}
    start = base.transform_filter("datum.mark == 'start'").mark_point(
        filled=True, fill="#ffffff", stroke=style.INK, strokeWidth=1.4, size=40, opacity=1, clip=True
    )
    end = base.transform_filter("datum.mark == 'end'").mark_point(
        filled=True, fill=colour, stroke="#ffffff", strokeWidth=0.8, size=55, opacity=1, clip=True
    )
    return [before.encode(**apart), after.encode(**apart), start, end]


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


RUNS, BINS, CHANNELS = 4, 90, 20
"""Most runs, spans of steps and channels."""

FAR = 10.0
"""Standard deviations at which the colour of a distance is at its darkest."""


def _binned(seen: xr.Dataset, distance: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Means over spans of steps `[..., bins]`, the steps where they begin, and where they end."""
    step = steps(seen)
    starts = np.unique(np.linspace(0, len(step), min(BINS, len(step)) + 1).round().astype(int))
    parts = [distance[..., a:b] for a, b in pairwise(starts)]
    count = [np.sum(~np.isnan(part), axis=-1) for part in parts]
    means = [np.nansum(part, axis=-1) / np.where(n, n, np.nan) for part, n in zip(parts, count, strict=True)]
    return np.stack(means, axis=-1), step[starts[:-1]], np.append(step[starts[1:-1]], step[-1] + 1)


def furthest(seen: xr.Dataset, runs: list[int]) -> list[int]:
    """All channels, the one first that was the furthest from the clean runs in a span of steps of these runs."""
    distance = values(seen, "distance", "run", "channel", "step")
    if distance is None:
        return list(range(seen.sizes.get("channel", 0)))
    means, _, _ = _binned(seen, np.abs(distance[runs]))
    peak = np.where(np.isnan(means), -np.inf, means).max(axis=(0, 2))
    return [int(channel) for channel in np.argsort(-peak, kind="stable")]


def distance_map(seen: xr.Dataset, ranked: list[int], moved: list[int]) -> Figure | None:
    """Channel by step: the distance from clean runs; a panel for each of the runs with the highest scores."""
    distance = values(seen, "distance", "run", "channel", "step")
    if distance is None or np.isnan(distance).all():
        return None
    channels, runs = names_of(seen, "channel"), names_of(seen, "run")
    means, begin, end = _binned(seen, np.abs(distance))
    chosen, mapped = moved[:CHANNELS], ranked[:RUNS]
    labels = [channels[place] for place in chosen]
    most = float(np.max(means[mapped], where=np.isfinite(means[mapped]), initial=4.0))
    charts = [
        _map(means[run][chosen], labels, begin, end, min(most, FAR), runs[run] if len(runs) > 1 else "")
        for run in mapped
    ]
    parts = ["Mean distance from the clean runs at the same step, in their standard deviations; channels that moved"]
    parts.append(f"most come first{'' if len(chosen) == len(moved) else f' ({len(chosen)} of {len(moved)})'}.")
    if len(mapped) < len(runs):
        parts.append(f"The {len(mapped)} runs with the highest scores.")
    if most > FAR:
        parts.append(f"Distances above {FAR:g} have the darkest colour.")
    gutter = round(min(250, 6.6 * max(map(len, labels)))) + 30
    finished = style.finish(charts, 2, shared=True, width=260, limit=1000, gutter=gutter)
    return Figure("distance", "", finished, " ".join(parts))


def _map(means: np.ndarray, labels: Sequence[str], begin: np.ndarray, end: np.ndarray, most: float, title: str) -> Any:
    # A span reaches a little under the next, so that no seam shows between them.
    reach = np.minimum(end + 0.25 * (end - begin), end[-1])
    rows = pd.DataFrame(
        {
            "channel": np.repeat(labels, len(begin)),
            "begin": np.tile(begin, len(labels)),
            "end": np.tile(reach, len(labels)),
            "distance": np.where(np.isposinf(means), 1e6, means).ravel(),
        }
    )
    x = alt.X("begin:Q", title="step", scale=alt.Scale(domain=[int(begin[0]), int(end[-1])], nice=False),
              axis=alt.Axis(grid=False))  # fmt: skip
    y = alt.Y("channel:N", title=None, sort=list(labels), axis=alt.Axis(
        labelLimit=250, domain=False, labelPadding=6, ticks=False, labelColor=style.INK,
        labelOverlap=False))  # fmt: skip
    legend = alt.Legend(title="standard deviations", orient="bottom", gradientLength=160, gradientThickness=8)
    scale = alt.Scale(domain=[0, most], range=list(style.SHARE), clamp=True)
    tips = [alt.Tooltip("channel:N"), alt.Tooltip("begin:Q", title="from step"),
            alt.Tooltip("distance:Q", format=".3~g")]  # fmt: skip
    cell = alt.Chart().mark_rect().encode(
        x=x, x2=alt.X2("end:Q"), y=y, color=alt.Color("distance:Q", scale=scale, legend=legend), tooltip=tips
    )  # fmt: skip
    shown = style.table(rows[rows["distance"].notna()])
    return alt.layer(cell, data=shown).properties(width=380, height=alt.Step(16), title=title)
