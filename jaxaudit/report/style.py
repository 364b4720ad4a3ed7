"""The look of all figures: palette, fonts, number domains."""

from __future__ import annotations

import re
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
    """`count` colours from weak to strong."""
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


def domain(values: Iterable[np.ndarray]) -> tuple[tuple[float, float], bool]:
    """An axis' ends for all values, and whether extremes were cut so that the rest stays legible."""
    flat = np.concatenate([np.ravel(v) for v in values] or [np.empty(0)])
    flat = flat[np.isfinite(flat)]
    if not flat.size:
        return (0.0, 1.0), False
    low, high = float(flat.min()), float(flat.max())
    inner_low, inner_high = (float(q) for q in np.quantile(flat, (0.03, 0.97)))
    reach = 2 * (inner_high - inner_low)
    cut_low, cut_high = max(low, inner_low - reach), min(high, inner_high + reach)
    cut = reach > 0 and (cut_low > low or cut_high < high)
    if cut:
        low, high = cut_low, cut_high
    pad = 0.04 * (high - low) or 0.04 * abs(high) or 1.0
    return (low - pad, high + pad), cut


def slug(text: str) -> str:
    """A file name from any text."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).strip("._-")[:80] or "unnamed"


def finish(charts: list[Any], columns: int, *, shared: bool, width: int, limit: int) -> alt.ConcatChart:
    """Panels side by side; `usermeta` tells the page how wide a panel may become.

    Args:
      charts: panels.
      columns: panels in a row, in the static figure.
      shared: one colour legend for all panels, else one each.
      width: least width of a panel, pixels.
      limit: most.
    """
    chart = alt.concat(*charts, columns=columns, spacing=22)
    chart = chart.resolve_scale(color="shared" if shared else "independent", x="independent", y="independent")
    chart = chart.resolve_legend(color="shared" if shared else "independent")
    chart.usermeta = {"panel": {"least": width, "most": limit, "columns": columns}}
    return chart.configure(**CONFIG)
