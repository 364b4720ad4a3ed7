"""Collapse probabilities: the map over perturbations and magnitudes, and the dose-response curves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from jaxaudit.report import style
from jaxaudit.report.lines import Figure
from jaxaudit.report.load import CONTROL, Run
from jaxaudit.report.series import Panel
from jaxaudit.statistics import critical_magnitude

KINDS = {"divergence_probability": "P_div: collapse before T_max / 2", "collapse_probability": "collapse at any time"}


@dataclass(frozen=True)
class Critical:
    """Where the share of collapsed seeds crosses one half: `text` in words, `value` NaN where it does not."""

    value: float
    low: float
    high: float
    text: str


def rows(run: Run, panel: Panel) -> pd.DataFrame:
    """The summary's rows of a panel's disturbed conditions, by rising magnitude, with `label` and `rank`."""
    if run.summary is None:
        return pd.DataFrame()
    order = {run.conditions["condition"].iloc[line.index]: line for line in panel.disturbed}
    found = run.summary[run.summary["condition"].isin(list(order))].copy()
    found["rank"] = [int(order[c].key[1:]) for c in found["condition"]]
    found["label"] = [order[c].label for c in found["condition"]]
    return found.sort_values("rank")


def _cells(run: Run, groups: list[Panel], kind: str) -> pd.DataFrame:
    parts = []
    for panel in groups:
        found = rows(run, panel)
        if kind not in found:
            continue
        p, low, high = (found.get(f"{kind}{end}", pd.Series(np.nan, found.index)) for end in ("", "_low", "_high"))
        parts.append(
            pd.DataFrame(
                {
                    "perturbation": panel.title,
                    "rank": found["rank"],
                    "p": p,
                    "label": found["label"].str.slice(0, 22),
                    "share": [f"{v:.2f}" if np.isfinite(v) else "n/a" for v in p],
                    "interval": [f"{a:.2f} to {b:.2f}" if np.isfinite(a + b) else "" for a, b in zip(low, high, strict=True)],
                    "condition": found["condition"],
                }
            )
        )
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def collapse_map(run: Run, groups: list[Panel]) -> Figure | None:
    """Perturbation by magnitude: the share of seeds that collapse, with its interval in the cell."""
    charts = [_map(data, title) for kind, title in KINDS.items() if len(data := _cells(run, groups, kind))]
    if not charts:
        return None
    chart = style.finish(charts, 2, shared=True, width=330, limit=760)
    caption = "Each cell: the magnitude, the share of seeds, and its 95% Wilson interval. Magnitudes rise to the right."
    if run.seeds < 2:
        caption = "Each cell: the magnitude and the share of seeds. One seed: the share can only be 0 or 1."
    late = sorted({p.onset for p in groups if p.onset >= run.steps / 2})
    if late:
        steps = ", ".join(map(str, late))
        caption += f" P_div is 0 by definition for an onset at or after T_max / 2 (here: {steps})."
    return Figure("collapse_map", "", chart, caption)


def _map(data: pd.DataFrame, title: str) -> alt.LayerChart:
    names = list(dict.fromkeys(data["perturbation"]))
    y = alt.Y("perturbation:N", title=None, sort=names, axis=alt.Axis(
        labelLimit=170, labelFontSize=12, labelColor=style.INK, domain=False, ticks=False, labelPadding=8))  # fmt: skip
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

    layers = [cell, text("label", -17, 10.5, "normal"), text("share", 0, 15, "bold"), text("interval", 16, 10, "normal")]
    height = alt.Step(58)
    return alt.layer(*layers, data=style.table(data)).properties(width=380, height=height, title=title)


def dose_response(run: Run, groups: list[Panel]) -> Figure | None:
    """P_div against the magnitude with Wilson intervals, for perturbations with two magnitudes or more."""
    charts = [chart for panel in groups if (chart := _dose(run, panel)) is not None]
    if not charts:
        return None
    caption = "Filled: P_div (collapse before T_max / 2)"
    caption += ", bars: 95% Wilson intervals. " if run.seeds > 1 else " (one seed: 0 or 1, no interval). "
    caption += "Rings: collapse at any time. Vertical rule: the critical magnitude of P_div, where the isotonic fit "
    caption += "on the logarithm of the magnitude crosses one half; shaded: its 95% interval."
    return Figure("dose_response", "", style.finish(charts, 4, shared=False, width=200, limit=380), caption)


def _dose(run: Run, panel: Panel) -> alt.LayerChart | None:
    data = rows(run, panel)
    if not {"divergence_probability", "magnitude"} <= set(data) or data["magnitude"].nunique() < 2:
        return None
    names = {"divergence_probability": "p", "divergence_probability_low": "low", "divergence_probability_high": "high",
             "collapse_probability": "ever"}  # fmt: skip
    data = data.rename(columns=names)
    data = data[["condition", "magnitude", *[c for c in names.values() if c in data]]].sort_values("magnitude")
    m = data["magnitude"].to_numpy()
    log = bool((m > 0).all())
    critical = critical_of(run, panel, "divergence_probability")
    span = (m.min() / 1.4, m.max() * 1.4) if log else (m.min() - 0.1 * np.ptp(m), m.max() + 0.1 * np.ptp(m))
    ticks = [float(v) for v in m]
    x = alt.X("magnitude:Q", title="magnitude (log)" if log else "magnitude",
              scale=alt.Scale(type="log" if log else "linear", domain=list(span), nice=False),
              axis=alt.Axis(values=ticks, format="~g", grid=False))  # fmt: skip
    layers = _dose_layers(data, x, critical if log else None, span)
    title = alt.TitleParams(panel.title, subtitle=critical.text)
    return alt.layer(*layers, data=style.table(data)).properties(width=215, height=170, title=title)


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


def critical_of(run: Run, panel: Panel, kind: str) -> Critical:
    """The magnitude at which the share of collapsed seeds crosses one half, or why there is none."""
    unknown = float("nan")
    data = rows(run, panel)
    magnitudes = np.unique([line.magnitude for line in panel.disturbed])
    if len(magnitudes) < 2 or len(magnitudes) < len(panel.disturbed) or run.metrics is None or kind not in data:
        return Critical(unknown, unknown, unknown, "")
    if not (np.isfinite(magnitudes) & (magnitudes > 0)).all():
        return Critical(unknown, unknown, unknown, "no critical magnitude: magnitudes are not all positive")
    share = data.set_index("magnitude")[kind].reindex(magnitudes)
    span = f"{magnitudes[0]:g} to {magnitudes[-1]:g}"
    if share.isna().any():
        return Critical(unknown, unknown, unknown, "not known: a share is missing")
    table = _collapsed(run, data, magnitudes, kind)
    found = critical_magnitude(magnitudes, table, increasing=bool(share.iloc[-1] >= share.iloc[0]), missing="count")
    if np.isfinite(found.value):
        text = f"one half crossed at {found.value:.3g}"
        if run.seeds > 1:
            low = f"{found.low:.3g}" if found.low > 0 else "below all tested"
            high = f"{found.high:.3g}" if np.isfinite(found.high) else "above all tested"
            text += f" ({low} to {high})"
        return Critical(found.value, found.low, found.high, text)
    side = "below" if (share < 0.5).all() else "above"
    return Critical(unknown, unknown, unknown, f"not crossed: {side} one half from {span}")


def _collapsed(run: Run, data: pd.DataFrame, magnitudes: np.ndarray, kind: str) -> np.ndarray:
    """`[seeds, M]`: 1 where the lane collapsed (in time, for P_div), NaN where it is not known."""
    assert run.metrics is not None
    names = data.set_index("magnitude")["condition"].reindex(magnitudes)
    times = run.metrics.pivot_table(index="seed", columns="condition", values="collapse_time", dropna=False)
    x = times.reindex(columns=list(names)).to_numpy(np.float64)
    limit = run.steps / 2 if kind == "divergence_probability" else np.inf
    return np.where(np.isnan(x), np.nan, (x < limit).astype(float))


def control_share(run: Run) -> float:
    """The largest share of control lanes that collapse by themselves; NaN if not known."""
    if run.summary is None or "collapse_probability" not in run.summary:
        return float("nan")
    own = run.summary[run.summary["perturbation"] == CONTROL]["collapse_probability"]
    return float(own.max()) if len(own) else float("nan")
