"""Colours, fonts and axis ranges that all figures share, and the final form of a figure's Vega-Lite specification."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

INK = "#1f2430"
MUTED = "#5b6372"
GREY = "#8b929e"
ACCENT = "#7b2d6b"
SHADE = "#c9a227"
FONT = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, 'Liberation Sans', sans-serif"
RAMP = ("#e8952c", "#dc5f4b", "#b02f72", "#6c1d80", "#230a4a")
"""Colours from a weak to a strong disturbance. They darken steadily, so they stay distinct in greyscale print."""
SHARE = ("#f4f1f5", "#dcc3da", "#b57fae", "#8a3f7d", "#571a50")
"""Colours of a share, from 0 to 1."""

CONFIG: dict[str, Any] = {
    "font": FONT,
    "background": "#ffffff",
    "view": {"stroke": None},
    "axis": {
        "labelColor": MUTED,
        "titleColor": MUTED,
        "titleFontWeight": "normal",
        "titleFontSize": 11,
        "labelFontSize": 10.5,
        "gridColor": "#eceef2",
        "domainColor": "#b6bcc8",
        "tickColor": "#b6bcc8",
        "tickCount": 5,
        "tickSize": 4,
        "titlePadding": 6,
        "labelOverlap": True,
    },
    "title": {
        "anchor": "start",
        "color": INK,
        "fontSize": 13,
        "fontWeight": 600,
        "subtitleColor": MUTED,
        "subtitleFontSize": 11,
        "offset": 6,
        "limit": 420,
    },
    "legend": {"labelColor": INK, "titleColor": MUTED, "titleFontWeight": "normal", "labelLimit": 260},
}


def ramp(count: int) -> list[str]:
    """Returns `count` colours between the ends of `RAMP`, for disturbances from weak to strong."""
    if count == 1:
        return [RAMP[2]]
    positions = np.linspace(0, len(RAMP) - 1, count)
    anchors = np.array([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in RAMP])
    channels = [np.interp(positions, range(len(RAMP)), anchors[:, k]) for k in range(3)]
    return ["#{:02x}{:02x}{:02x}".format(*map(round, rgb)) for rgb in zip(*channels, strict=True)]


def inline_csv(frame: pd.DataFrame) -> alt.InlineData:
    """Returns a frame as CSV text inside a chart, which takes a quarter of the space of JSON records.

    NaN and infinities become empty cells, which Vega reads as null.
    """
    types = {c: "number" if pd.api.types.is_numeric_dtype(frame[c]) else "string" for c in frame.columns}
    text = frame.replace([np.inf, -np.inf], np.nan).to_csv(index=False, float_format="%.6g")
    return alt.InlineData(values=text, format=alt.CsvDataFormat(type="csv", parse=types))


def domain(values: Iterable[np.ndarray], control: Iterable[np.ndarray]) -> tuple[tuple[float, float], bool]:
    """Returns the ends of an axis, and whether they leave out extreme values.

    Values that lie more than 40 times the control's range away from the control are left out, so that the control
    stays legible: the axis then ends 3 times the control's range from the control.

    Args:
      values: all values to be drawn; values that are not finite are ignored.
      control: the values of the undisturbed control, or of clean runs.
    """
    drawn, reference = (np.concatenate([np.empty(0), *map(np.ravel, arrays)]) for arrays in (values, control))
    drawn, reference = drawn[np.isfinite(drawn)], reference[np.isfinite(reference)]
    if not drawn.size:
        return (0.0, 1.0), False
    low, high, is_cut = float(drawn.min()), float(drawn.max()), False
    if reference.size:
        spread = max(float(np.ptp(reference)), 1e-3 * float(np.abs(reference).max()))
        if low < reference.min() - 40 * spread:
            low, is_cut = float(reference.min()) - 3 * spread, True
        if high > reference.max() + 40 * spread:
            high, is_cut = float(reference.max()) + 3 * spread, True
    pad = 0.04 * (high - low) or 0.04 * abs(high) or 1.0
    return (low - pad, high + pad), is_cut


def slug(text: str) -> str:
    """Returns a file name for a text: its letters and digits, with underscores in place of other characters."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).strip("._-")[:80] or "unnamed"


def finish(
    panels: list[Any],
    columns: int,
    *,
    shared: bool,
    min_width: int,
    max_width: int,
    gutter: int,
    has_cells: bool = False,
) -> alt.ConcatChart:
    """Returns panels side by side in one chart; its `usermeta` tells the page's script how wide a panel may become.

    Args:
      panels: the charts to place side by side.
      columns: the most panels in a row of the static figure.
      shared: whether all panels share one colour legend; otherwise each has its own.
      min_width: the width of a panel, in pixels, below which a row has fewer panels. A single panel shrinks further on
        a narrow page.
      max_width: the largest width of a panel, in pixels.
      gutter: the pixels that a panel needs beside its width, for its axis and the space to the next panel.
      has_cells: whether panels have cells with text, which would overlap below `min_width`. They do not shrink
        further, and a narrow page scrolls them.
    """
    rows = -(-len(panels) // columns)
    columns = -(-len(panels) // rows)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Automatically deduplicated selection parameter")
        chart = alt.concat(*panels, columns=columns, spacing=22)
    # These attributes are set directly, because each of Altair's own methods copies every panel.
    resolve: Any = "shared" if shared else "independent"
    scales = alt.ScaleResolveMap(color=resolve, x="independent", y="independent")
    chart.resolve = alt.Resolve(scale=scales, legend=alt.LegendResolveMap(color=resolve))
    widths = {"least": min_width, "most": max_width, "floor": min_width if has_cells else 140}
    chart.usermeta = {"panel": {**widths, "gutter": gutter, "columns": columns}}
    chart.config = alt.Config(**CONFIG)
    return chart


def specification(chart: alt.ConcatChart) -> dict[str, Any]:
    """Returns a chart as Vega-Lite JSON in which every selection is declared in one layer of a panel only.

    Altair lists all named layers of a panel for each of its selections, and Vega-Lite refuses the duplicates.
    Selections called `hover_*` belong to layers called `rules_*`, and all others to layers called `lines_*`.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Automatically deduplicated selection parameter")
        spec = chart.to_dict(validate=False)
    for parameter in spec.get("params", []):
        prefix = "rules_" if parameter["name"].startswith("hover_") else "lines_"
        parameter["views"] = [view for view in parameter["views"] if view.startswith(prefix)]
    return spec


def static_specification(spec: dict[str, Any], title: str) -> dict[str, Any]:
    """Returns a page's figure for a file: with its title, and without the invisible layers that carry tooltips."""
    panels = [
        dict(panel, layer=[layer for layer in panel["layer"] if not layer.get("name", "").startswith("rules_")])
        for panel in spec["concat"]
    ]
    params = [p for p in spec.get("params", []) if not p["name"].startswith("hover_")]
    heading = {"title": {"text": title, "offset": 12}} if title else {}
    return {**spec, **heading, "concat": panels, "params": params}
