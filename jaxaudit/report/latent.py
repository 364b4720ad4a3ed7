"""Latent trajectories in a plane: the tube that clean runs keep to, and paths that leave it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from jaxaudit.report import style
from jaxaudit.report.panel import Figure
from jaxaudit.report.series import thin

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
