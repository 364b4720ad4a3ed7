"""Figures of results that are in memory, for notebooks: what `Result.plot` and `Margins.plot` return."""

from __future__ import annotations

import math
import textwrap
from typing import Any, cast

import altair as alt
import pandas as pd
import xarray as xr

from jaxaudit.analysis.metrics import MetricSettings
from jaxaudit.analysis.run_reader import in_memory
from jaxaudit.report import outcomes, run_figures, style
from jaxaudit.report.audit_page import MAX_MAP_COLUMNS
from jaxaudit.report.line_panels import panels
from jaxaudit.report.page import Figure
from jaxaudit.runs.margins.bisection import MarginEstimate
from jaxaudit.runs.margins.table import Margins
from jaxaudit.runtime import registry

FIGURES = ("performance", "map", "dose_response")
"""The names of the figures that `Result.plot` can draw."""

CHARACTER_WIDTH = 6.2
"""The mean width of a caption's characters in pixels, in a font that is rather wide."""

PADDING = 14
"""The pixels around a figure: a font that is wider than the one measured may reach into them."""

MARGIN_WIDTH = 480
"""The width in pixels of a figure of margins, without its labels."""


@registry.plots.register("audit")
def plot_audit(
    telemetry: xr.Dataset, metrics: pd.DataFrame, summary: pd.DataFrame, settings: MetricSettings, figure: str
) -> alt.ConcatChart:
    """Returns a figure of an audit as the page of a report has it, with its caption below.

    Args:
      telemetry: the telemetry of the audit.
      metrics: the table with one row for each lane.
      summary: the table with one row for each condition.
      settings: the windows of the metrics.
      figure: one of `FIGURES`.

    Raises:
      ValueError: there is no such figure, or nothing to draw in it.
    """
    if figure not in FIGURES:
        raise ValueError(f"figure must be one of {', '.join(map(repr, FIGURES))}, not {figure!r}")
    run = in_memory(telemetry, metrics, summary, settings)
    groups = panels(run)
    harmful = outcomes.most_harmful(run, groups)
    panel_figure: Figure | None
    if figure == "performance":
        panel_figure = run_figures.performance(run, [outcomes.with_fewer_lines(panel) for panel in harmful])
    elif figure == "map":
        panel_figure = run_figures.collapse_map(run, [outcomes.with_fewer_lines(p, MAX_MAP_COLUMNS) for p in groups])
    else:
        panel_figure = run_figures.dose_response(run, harmful)
    if panel_figure is None:
        needed = "a perturbation" if figure == "map" else "a perturbation with two magnitudes or more"
        raise ValueError(f"the figure '{figure}' needs {needed}, and this audit has none")
    caption = panel_figure.caption
    if figure != "map" and len(harmful) < len(groups):
        caption += f" Of {len(groups)} panels, the {len(harmful)} most harmful ones are drawn."
    return _with_caption(panel_figure.chart, caption)


@registry.plots.register("margins")
def plot_margins(margins: Margins) -> alt.ConcatChart:
    """Returns a figure with one row for each margin, in multiples of the perturbation's standard magnitude."""
    ranges, thresholds, beyond = [], [], []
    for estimate, verdict in zip(margins.estimates, margins.table["verdict"], strict=True):
        row = _range(estimate, verdict)
        ranges.append(row)
        inside = [b.middle for b in estimate.brackets if math.isfinite(b.middle)]
        thresholds += [{"name": row["name"], "threshold": math.exp(middle)} for middle in inside]
        ends = {"first": -math.inf, "last": math.inf}
        for end, value in ends.items():
            if seeds := sum(b.middle == value for b in estimate.brackets):
                beyond.append({"name": row["name"], "at": row[end], "end": end, "seeds": str(seeds)})
    chart = _margin_layers(pd.DataFrame(ranges), pd.DataFrame(thresholds), pd.DataFrame(beyond))
    chart = style.finish([chart], 1, shared=True, min_width=300, max_width=620, gutter=200)
    caption = (
        "Point: the margin, from which on half of the seeds collapse; bar: its confidence interval. Ticks: thresholds "
        "of single seeds, which are known most exactly near the margin. Shaded: the magnitudes that were searched. "
        "Triangle with a number: how many seeds have a threshold beyond them. Dashed: the standard magnitude."
    )
    return _with_caption(chart, caption)


def _range(estimate: MarginEstimate, verdict: str) -> dict[str, Any]:
    """Returns the row of a margin; its ends lie within the searched range, and are NaN where there is none."""
    direction, (value, low, high, _) = estimate.direction, estimate.median

    def within(log_scale: float) -> float:
        return math.exp(min(max(log_scale, direction.low), direction.high)) if not math.isnan(log_scale) else math.nan

    return {
        "name": direction.name,
        "first": math.exp(direction.low),
        "last": math.exp(direction.high),
        "margin": math.exp(value) if math.isfinite(value) else math.nan,
        "low": within(low),
        "high": within(high),
        "verdict": verdict,
    }


def _margin_layers(ranges: pd.DataFrame, thresholds: pd.DataFrame, beyond: pd.DataFrame) -> Any:
    names = list(ranges["name"])
    ends = [min(ranges["first"].min(), 1.0) / 1.6, max(ranges["last"].max(), 1.0) * 1.6]
    scale = alt.Scale(type="log", domain=ends, nice=False)

    def x(field: str) -> alt.X:
        return alt.X(f"{field}:Q", title="times the standard magnitude (log)", scale=scale, axis=alt.Axis(format="~g"))

    labels: dict[str, Any] = {"labelLimit": 220, "labelFontSize": 12, "labelColor": style.INK, "labelPadding": 8}
    y = alt.Y("name:N", title=None, sort=names, axis=alt.Axis(domain=False, ticks=False, grid=False, **labels))
    texts = [alt.Tooltip("name:N", title="perturbation"), alt.Tooltip("verdict:N")]
    texts += [alt.Tooltip(f"{name}:Q", format=".3~g") for name in ("margin", "low", "high")]
    base = alt.Chart(style.inline_csv(ranges))
    layers: list[Any] = [
        base.mark_bar(size=20, color="#eceef2").encode(x=x("first"), x2="last:Q", y=y, tooltip=texts),
        alt.Chart(alt.InlineData(values=[{"at": 1}])).mark_rule(color=style.GREY, strokeDash=[3, 3]).encode(x=x("at")),
    ]
    if len(thresholds):
        tick = alt.Chart(style.inline_csv(thresholds)).mark_tick(size=16, thickness=1.2, color=style.RAMP[1])
        layers.append(tick.encode(x=x("threshold"), y=y))
    if len(beyond):
        for end, angle, dx in (("first", 270, -12), ("last", 90, 12)):
            data = alt.Chart(style.inline_csv(beyond)).transform_filter(f"datum.end == '{end}'")
            look: dict[str, Any] = {"size": 45, "filled": True, "color": style.RAMP[1], "opacity": 1}
            mark = data.mark_point(shape="triangle-up", angle=angle, **look)
            text = data.mark_text(dx=dx, fontSize=10.5, color=style.MUTED)
            layers += [mark.encode(x=x("at"), y=y), text.encode(x=x("at"), y=y, text="seeds:N")]
    layers += [
        base.mark_rule(strokeWidth=2, color=style.INK).encode(x=x("low"), x2="high:Q", y=y, tooltip=texts),
        base.mark_point(filled=True, size=80, color=style.ACCENT, opacity=1).encode(x=x("margin"), y=y, tooltip=texts),
    ]
    return alt.layer(*layers).properties(width=MARGIN_WIDTH, height=alt.Step(32))


def _with_caption(chart: alt.ConcatChart, caption: str) -> alt.ConcatChart:
    """Returns a chart that every renderer of Altair can draw, with a caption below it."""
    spec = style.specification(chart)
    width = spec["columns"] * (max(panel["width"] for panel in spec["concat"]) + 40)
    spec["padding"] = PADDING
    spec["title"] = {
        "text": textwrap.wrap(caption, max(40, round(width / CHARACTER_WIDTH))),
        "orient": "bottom",
        "color": style.MUTED,
        "fontSize": 11,
        "fontWeight": "normal",
        "limit": 2000,
        "offset": 14,
    }
    return cast(alt.ConcatChart, alt.ConcatChart.from_dict(spec, validate=False))
