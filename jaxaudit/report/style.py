"""The look of all figures: palette, fonts, number domains."""

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
"""Weak to strong disturbance: rising darkness, so it survives colour blindness and grey printing."""
SHARE = ("#f4f1f5", "#dcc3da", "#b57fae", "#8a3f7d", "#571a50")
"""A share of seeds, 0 to 1."""

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
    """Returns `count` colours, from weak to strong."""
    if count == 1:
        return [RAMP[2]]
    places = np.linspace(0, len(RAMP) - 1, count)
    channels = np.array([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in RAMP])
    mixed = [np.interp(places, range(len(RAMP)), channels[:, k]) for k in range(3)]
    return ["#{:02x}{:02x}{:02x}".format(*map(round, rgb)) for rgb in zip(*mixed, strict=True)]


def table(frame: pd.DataFrame) -> alt.InlineData:
    """A frame as inline CSV: a quarter of the size of JSON records; empty cells are null."""
    numbers = {c: "number" for c in frame.columns if pd.api.types.is_numeric_dtype(frame[c])}
    words = {c: "string" for c in frame.columns if c not in numbers}
    text = frame.replace([np.inf, -np.inf], np.nan).to_csv(index=False, float_format="%.6g")
    return alt.InlineData(values=text, format=alt.CsvDataFormat(type="csv", parse=numbers | words))


def domain(values: Iterable[np.ndarray], control: Iterable[np.ndarray]) -> tuple[tuple[float, float], bool]:
    """An axis' ends for all values, and whether extremes were cut so that the control stays legible.

    An end is cut, to 3 times the control's range from the control, where values lie more than 40 times away.
    """
    flat, calm = (np.concatenate([np.empty(0), *map(np.ravel, part)]) for part in (values, control))
    flat, calm = flat[np.isfinite(flat)], calm[np.isfinite(calm)]
    if not flat.size:
        return (0.0, 1.0), False
    low, high, cut = float(flat.min()), float(flat.max()), False
    if calm.size:
        reach = max(float(np.ptp(calm)), 1e-3 * float(np.abs(calm).max()))
        if low < calm.min() - 40 * reach:
            low, cut = float(calm.min()) - 3 * reach, True
        if high > calm.max() + 40 * reach:
            high, cut = float(calm.max()) + 3 * reach, True
    pad = 0.04 * (high - low) or 0.04 * abs(high) or 1.0
    return (low - pad, high + pad), cut


def slug(text: str) -> str:
    """Returns a file name for any text."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).strip("._-")[:80] or "unnamed"


def finish(charts: list[Any], columns: int, *, shared: bool, width: int, limit: int, gutter: int) -> alt.ConcatChart:
    """Panels side by side; `usermeta` tells the page how wide a panel may become.

    Args:
      charts: panels.
      columns: panels in a row, in the static figure.
      shared: one colour legend for all panels, else one each.
      width: least width of a panel, pixels.
      limit: most.
      gutter: what a panel needs beside that for its axis and the space to the next.
    """
    columns = -(-len(charts) // -(-len(charts) // columns))
    resolve: Any = "shared" if shared else "independent"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Automatically deduplicated selection parameter")
        chart = alt.concat(*charts, columns=columns, spacing=22)
    # Set, not through Altair's methods: each of them copies every panel.
    scales = alt.ScaleResolveMap(color=resolve, x="independent", y="independent")
    chart.resolve = alt.Resolve(scale=scales, legend=alt.LegendResolveMap(color=resolve))
    chart.usermeta = {"panel": {"least": width, "most": limit, "gutter": gutter, "columns": columns}}
    chart.config = alt.Config(**CONFIG)
    return chart


def specification(chart: alt.ConcatChart) -> dict[str, Any]:
    """A chart as Vega-Lite JSON, every selection declared in one layer of a panel alone.

    Altair lists all named layers of a panel for each of its selections; Vega-Lite refuses the duplicates.
    Selections called `hover_*` belong to layers called `rules_*`, all others to `lines_*`.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Automatically deduplicated selection parameter")
        spec = chart.to_dict(validate=False)
    for parameter in spec.get("params", []):
        owner = "rules_" if parameter["name"].startswith("hover_") else "lines_"
        parameter["views"] = [view for view in parameter["views"] if view.startswith(owner)]
    return spec


def static(spec: dict[str, Any], title: str) -> dict[str, Any]:
    """Returns the same figure for files: with a title, and without the invisible layers that carry tooltips."""
    panels = [dict(panel, layer=[x for x in panel["layer"] if not x.get("name", "").startswith("rules_")])
              for panel in spec["concat"]]  # fmt: skip
    kept = [p for p in spec.get("params", []) if not p["name"].startswith("hover_")]
    heading = {"title": {"text": title, "offset": 12}} if title else {}
    return {**spec, **heading, "concat": panels, "params": kept}
