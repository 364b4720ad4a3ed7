"""Collapse probabilities: the map over perturbations and magnitudes, and the dose-response curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
from markupsafe import Markup

from jaxaudit.analysis.run_reader import Run
from jaxaudit.report import style
from jaxaudit.report.outcomes import Critical, control_of, critical_of, rows
from jaxaudit.report.panel import Figure
from jaxaudit.report.series import Panel


@dataclass(frozen=True)
class Fallen:
    """Controls that collapse, at the onset where most of them do.

    Attributes:
      count: how many.
      known: the controls whose collapse time is known.
      when: at which steps.
    """

    count: int
    known: int
    when: str

    @property
    def sentence(self) -> Markup:
        """How many seeds collapse undisturbed, and when: the beginning of the verdict, without a full stop."""
        if self.known == 1:
            return Markup("The one seed collapses undisturbed {}").format(self.when)
        verb = "collapses" if self.count == 1 else "collapse"
        return Markup("{} of {} seeds {} undisturbed {}").format(self.count, self.known, verb, self.when)


def fallen_controls(run: Run, panels: Sequence[Panel]) -> Fallen | None:
    """Returns the controls that collapse, of the onset with the most, or None where none is known to."""
    found = [(panel, events) for panel in panels if (events := control_of(run, panel)) is not None]
    if not found:
        return None
    panel, events = max(found, key=lambda pair: (int(np.nansum(pair[1])), -pair[0].onset))
    if not (events == 1).any():
        return None
    return Fallen(int(np.nansum(events)), int((~np.isnan(events)).sum()), _when(run, panel, events == 1))


def _when(run: Run, panel: Panel, fallen: np.ndarray) -> str:
    """At which steps; where one was not finite before the onset already, the step by which all had."""
    assert run.metrics is not None, "`control_of` found it"
    name = run.conditions["condition"].iloc[panel.lines[0].index]
    lanes = run.metrics[run.metrics["condition"] == name].sort_values("seed")[fallen]
    times = lanes["collapse_time"].astype(int)
    if "performance_before" in lanes and lanes["performance_before"].isna().any():
        return f"by step {times.max()}"
    if times.nunique() == 1:
        return f"at step {times.iloc[0]}"
    return f"between steps {times.min()} and {times.max()}"


CELL = 64
"""Pixels of a cell that its interval has room in."""

WIDEST = 1000
"""Pixels of a map; of one whose cells are narrower for it, intervals are in the tooltips alone."""

KINDS = {
    "divergence_probability": "P_div: collapse before T_max / 2",
    "collapse_probability": "collapse at any time",
}


def _cells(run: Run, groups: list[Panel], kind: str) -> pd.DataFrame:
    parts = []
    for panel in groups:
        found = rows(run, panel)
        if kind not in found or found.empty:
            continue
        p, low, high = (found.get(f"{kind}{end}", pd.Series(np.nan, found.index)) for end in ("", "_low", "_high"))
        parts.append(
            pd.DataFrame(
                {
                    "perturbation": panel.title,
                    "rank": found["rank"],
                    "p": p,
                    "label": [str(label)[:22] for label in found["label"]],
                    "share": [f"{v:.3g}" if np.isfinite(v) else "n/a" for v in p],
                    "interval": [
                        f"{a:.2f} to {b:.2f}" if np.isfinite(a + b) else " " for a, b in zip(low, high, strict=True)
                    ],
                    "condition": found["condition"],
                }
            )
        )
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def collapse_map(run: Run, groups: list[Panel]) -> Figure | None:
    """Perturbation by magnitude: the share of seeds that collapse, with its interval in the cell."""
    if not groups:
        return None
    titles, widest = max(len(p.title) for p in groups), max(len(p.disturbed) for p in groups)
    least, roomy = min(WIDEST, CELL * widest), CELL * widest <= WIDEST
    charts = [
        _map(data, title, max(380, least), roomy)
        for kind, title in KINDS.items()
        if len(data := _cells(run, groups, kind))
    ]
    if not charts:
        return None
    gutter = round(min(200, max(60, 6.4 * titles))) + 26
    limit = max(least, min(620, 150 * widest))
    columns = 2 if least <= WIDEST / 2 else 1
    chart = style.finish(charts, columns, shared=True, width=max(least, min(300, limit)), limit=limit, gutter=gutter)
    caption = "Each cell: the magnitude, the share of seeds, its 95% Wilson interval. Magnitudes rise to the right."
    if not roomy:
        caption = "Each cell: the magnitude and the share of seeds; pointed at, its 95% Wilson interval. "
        caption += "Magnitudes rise to the right."
    if run.seeds < 2:
        caption = "Each cell: the magnitude and the share of seeds. One seed: the share can only be 0 or 1."
    late = sorted({p.onset for p in groups if p.onset >= run.steps / 2})
    if late:
        steps = ", ".join(map(str, late))
        caption += f" P_div is 0 by definition for an onset at or after T_max / 2 (here: {steps})."
    if (fallen := fallen_controls(run, groups)) is not None:
        caption += f" The shares are of all seeds: {fallen.sentence}."
    return Figure("collapse_map", "", chart, caption)


def _map(data: pd.DataFrame, title: str, width: int, intervals: bool) -> Any:
    names = list(dict.fromkeys(data["perturbation"]))
    y = alt.Y("perturbation:N", title=None, sort=names, axis=alt.Axis(
        labelLimit=200, labelFontSize=12, labelColor=style.INK, domain=False, ticks=False, labelPadding=8),
        scale=alt.Scale(paddingInner=0.05))  # fmt: skip
    x = alt.X("rank:O", title=None, axis=None, scale=alt.Scale(paddingInner=0.03))
    base = alt.Chart().encode(x=x, y=y)
    scale = alt.Scale(domain=[0, 1], range=list(style.SHARE))
    legend = alt.Legend(title="share of seeds", orient="bottom", gradientLength=160, gradientThickness=8, format=".1f")
    tips = [alt.Tooltip(f"{f}:N", title=t) for f, t in
            (("condition", "condition"), ("share", "share"), ("interval", "95% interval"))]  # fmt: skip
    cell = base.mark_rect(cornerRadius=3, invalid=None).encode(
        color=alt.Color("p:Q", scale=scale, legend=legend), tooltip=tips
    )
    ink = alt.condition("datum.p > 0.55", alt.value("#ffffff"), alt.value(style.INK))

    def text(field: str, dy: int, size: float, weight: str) -> alt.Chart:
        mark = base.mark_text(dy=dy, fontSize=size, fontWeight=weight, limit=120)  # type: ignore[arg-type]
        return mark.encode(text=f"{field}:N", color=ink)

    layers = [
        cell,
        text("label", -17, 10.5, "normal"),
        text("share", 0, 15 if intervals else 11, "bold"),
        *([text("interval", 16, 10, "normal")] if intervals else []),
    ]
    height = alt.Step(58)
    return alt.layer(*layers, data=style.table(data)).properties(width=width, height=height, title=title)


def dose_response(run: Run, groups: list[Panel]) -> Figure | None:
    """P_div against the magnitude with Wilson intervals, for perturbations with two magnitudes or more."""
    charts = [chart for panel in groups if (chart := _dose(run, panel)) is not None]
    if not charts:
        return None
    caption = "Filled: P_div (collapse before T_max / 2)"
    caption += ", bars: 95% Wilson intervals. " if run.seeds > 1 else " (one seed: 0 or 1, no interval). "
    caption += "Rings: collapse at any time. Vertical rule: the critical magnitude of P_div, where the isotonic fit "
    caption += "on the logarithm of the magnitude crosses one half; shaded: its 95% interval."
    if fallen_controls(run, groups) is not None:
        caption += " Where controls collapse: grey line, P_div of the control; triangles, P_div of the seeds whose "
        caption += "control does not, with their critical magnitude in grey."
    return Figure("dose_response", "", style.finish(charts, 4, shared=False, width=200, limit=520, gutter=72), caption)


def _dose(run: Run, panel: Panel) -> Any:
    data = rows(run, panel)
    if not {"divergence_probability", "magnitude"} <= set(data) or data["magnitude"].nunique() < 2:
        return None
    kind = "divergence_probability"
    names = {kind: "p", f"{kind}_low": "low", f"{kind}_high": "high", "collapse_probability": "ever"}
    data = data.rename(columns=names)
    control = control_of(run, panel, kind)
    undisturbed = float(np.nanmean(control)) if control is not None and np.isfinite(control).any() else 0.0
    if undisturbed:
        data["of_standing"] = data["excess_divergence_lost"] / data["excess_divergence_standing"]
    kept = [c for c in (*names.values(), "of_standing") if c in data]
    data = data[["condition", "magnitude", *kept]].sort_values("magnitude")
    m = data["magnitude"].to_numpy()
    log = bool((m > 0).all())
    critical = critical_of(run, panel, kind)
    standing = critical_of(run, panel, kind, standing=True) if undisturbed else None
    span = (m.min() / 1.4, m.max() * 1.4) if log else (m.min() - 0.1 * np.ptp(m), m.max() + 0.1 * np.ptp(m))
    ticks = [float(v) for v in m]
    x = alt.X("magnitude:Q", title="magnitude (log)" if log else "magnitude",
              scale=alt.Scale(type="log" if log else "linear", domain=list(span), nice=False),
              axis=alt.Axis(values=ticks, format="~g", grid=False))  # fmt: skip
    layers = _dose_layers(data, x, critical if log else None, span)
    subtitle = [_caption(critical)]
    if standing is not None:
        layers += _standing_layers(x, undisturbed, standing if log else None)
        subtitle.append(f"where the control stands: {standing.text}")
    title = alt.TitleParams(panel.title, subtitle=subtitle)
    return alt.layer(*layers, data=style.table(data)).properties(width=215, height=170, title=title)


def _caption(critical: Critical) -> str:
    return f"critical: {critical.text}" if np.isfinite(critical.value) else critical.text


def _dose_layers(data: pd.DataFrame, x: alt.X, critical: Critical | None, span: tuple[float, float]) -> list[Any]:
    base = alt.Chart()
    y: dict[str, Any] = {"title": "share of seeds", "scale": alt.Scale(domain=[0, 1.0], nice=False)}
    tips = [alt.Tooltip("condition:N"), alt.Tooltip("p:Q", title="P_div", format=".3~g")]
    tips += [alt.Tooltip(f"{c}:Q", format=".3~g") for c in ("low", "high", "ever") if c in data]
    layers: list[Any] = []
    if critical is not None and np.isfinite(critical.value):
        ends = [{"low": max(critical.low, span[0]), "high": min(critical.high, span[1]), "at": critical.value}]
        where = alt.Chart(alt.InlineData(values=ends))
        x_low = x.copy()
        x_low.shorthand, x_at = "low:Q", x.copy()
        x_at.shorthand = "at:Q"
        layers.append(where.mark_rect(color=style.ACCENT, opacity=0.1).encode(x=x_low, x2="high:Q"))
        layers.append(where.mark_rule(color=style.ACCENT, strokeWidth=1.5).encode(x=x_at))
    half = base.mark_rule(color=style.GREY, strokeDash=[3, 3]).encode(y=alt.datum(0.5))
    layers.append(half)
    if {"low", "high"} <= set(data):
        layers.append(base.mark_rule(strokeWidth=1.6, color=style.INK).encode(x=x, y=alt.Y("low:Q", **y), y2="high:Q"))
    if "ever" in data:
        ring = base.mark_point(size=110, color=style.RAMP[0], strokeWidth=2, opacity=1)
        layers.append(ring.encode(x=x, y=alt.Y("ever:Q", **y), tooltip=tips))
    layers.append(base.mark_line(color=style.INK, strokeWidth=1.2, opacity=0.5).encode(x=x, y=alt.Y("p:Q", **y)))
    dot = base.mark_point(filled=True, size=55, color=style.INK, opacity=1)
    layers.append(dot.encode(x=x, y=alt.Y("p:Q", **y), tooltip=tips))
    return layers


def _standing_layers(x: alt.X, undisturbed: float, critical: Critical | None) -> list[Any]:
    """The control's share of collapsed seeds, and the shares of the seeds whose control does not collapse."""
    base = alt.Chart()
    y: dict[str, Any] = {"title": "share of seeds", "scale": alt.Scale(domain=[0, 1.0], nice=False)}
    tips = [alt.Tooltip("condition:N"), alt.Tooltip("of_standing:Q", title="where the control stands", format=".3~g")]
    triangle = base.mark_point(shape="triangle-up", size=70, color=style.GREY, filled=True, opacity=1)
    layers = [
        base.mark_rule(color=style.GREY, strokeWidth=1).encode(y=alt.datum(undisturbed)),
        triangle.encode(x=x, y=alt.Y("of_standing:Q", **y), tooltip=tips),
    ]
    if critical is not None and np.isfinite(critical.value):
        at = x.copy()
        at.shorthand = "at:Q"
        where = alt.Chart(alt.InlineData(values=[{"at": critical.value}]))
        layers.append(where.mark_rule(color=style.GREY, strokeWidth=1.5).encode(x=at))
    return layers
