"""Figures against the step: performance per condition, and channels aligned at the onset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from jaxaudit.report import style
from jaxaudit.report.load import CONTROL, Run
from jaxaudit.report.series import CONTROL_KEY, Panel, band_name, frame, thin

CHANNELS = {
    "x_grad": "x_grad: gradient coherence",
    "x_inst": "x_inst: instability index",
    "x_mem": "x_mem: persistence",
    "gradient_norm": "gradient norm",
}


@dataclass(frozen=True)
class Figure:
    """A figure: the file it is stored in, its heading, its chart and its caption."""

    file: str
    title: str
    chart: alt.ConcatChart
    caption: str


@dataclass(frozen=True)
class _Axes:
    """How one panel is drawn: titles, the ends of both axes, and the names of its selections."""

    x_title: str
    y_title: str
    x: tuple[float, float]
    y: alt.Scale
    zoom: Any
    pick: Any


def _zoom(name: str) -> alt.Parameter:
    return alt.selection_interval(name=name, bind="scales", encodings=["x"], zoom="wheel![event.ctrlKey]")


def _pick(name: str) -> alt.Parameter:
    return alt.selection_point(name=name, fields=["label"], bind="legend")


def _colour(panel: Panel) -> alt.Color:
    disturbed = panel.disturbed
    labels = [line.label for line in panel.lines]
    colours = [style.GREY] * (len(labels) - len(disturbed)) + style.ramp(len(disturbed))
    longest = max((len(label) for label in labels), default=0)
    legend = alt.Legend(
        orient="top", title=None, columns=max(1, min(7, 52 // (longest + 5))), symbolStrokeWidth=2.5,
        symbolType="stroke", symbolOpacity=1,
    )  # fmt: skip
    return alt.Color("label:N", scale=alt.Scale(domain=labels, range=colours), legend=legend, sort=None)


def _window(panel: Panel, shift: int, last: float) -> list[alt.Chart]:
    """The onset rule and the shaded windows."""
    onset = panel.onset - shift
    spans = [{"start": onset, "end": min(onset + d, last)} for d in panel.durations]
    shade = alt.Chart(alt.InlineData(values=spans)).mark_rect(color=style.SHADE, opacity=0.22, clip=True)
    rule = alt.Chart(alt.InlineData(values=[{"onset": onset}]))
    rule = rule.mark_rule(color=style.INK, strokeWidth=1, strokeDash=[2, 2], clip=True)
    x = alt.X("start:Q", title=None)
    return [shade.encode(x=x, x2="end:Q"), rule.encode(x=alt.X("onset:Q", title=None))] if spans else []


def _layers(panel: Panel, axes: _Axes) -> list[alt.Chart]:
    """Bands, medians, end marks and an invisible rule per step that carries the tooltip."""
    x = alt.X("step:Q", title=axes.x_title, scale=alt.Scale(domain=list(axes.x), nice=False))
    colour = _colour(panel)
    y = {"title": axes.y_title, "scale": axes.y}
    strong, faint = alt.when(axes.pick).then(alt.value(1.0)), alt.when(axes.pick).then(alt.value(0.16))
    base = alt.Chart()
    band = base.transform_filter("isValid(datum.low) && isValid(datum.high)").mark_area(clip=True)
    line = base.mark_line(clip=True, strokeWidth=1.8, strokeJoin="round")
    lost = base.transform_filter("datum.lost").mark_point(clip=True, shape="cross", angle=45, size=70, filled=True)
    keys = [alt.Tooltip(f"{one.key}:Q", title=one.label, format=".4~g") for one in panel.lines]
    hover = base.transform_pivot("key", value="median", groupby=["step"]).mark_rule(strokeWidth=4)
    here = alt.selection_point(name=f"{axes.pick.name}_here", on="pointerover", clear="pointerout", fields=["step"],
                               empty=False)  # fmt: skip
    shown = alt.when(here).then(alt.value(0.25)).otherwise(alt.value(0.0))
    tips = [alt.Tooltip("step:Q", title="step"), *keys]
    return [
        band.encode(
            x=x, y=alt.Y("low:Q", **y), y2="high:Q", color=colour, opacity=faint.otherwise(alt.value(0.02))
        ),
        line.encode(
            x=x, y=alt.Y("median:Q", **y), color=colour, opacity=strong.otherwise(alt.value(0.08))
        ).add_params(axes.pick, axes.zoom),
        lost.encode(x=x, y=alt.Y("median:Q", **y), color=colour, opacity=strong.otherwise(alt.value(0.08))),
        hover.encode(
            x=x, opacity=shown, tooltip=tips if len(tips) < 40 else tips[:40], color=alt.value(style.INK)
        ).add_params(here),
    ]


def _draw(panel: Panel, data: pd.DataFrame, axes: _Axes, title: Any, extra: list[alt.Chart]) -> alt.LayerChart:
    last = panel.onset + sum(panel.durations) if not len(data) else float(data["step"].max()) + 1
    shift = 0 if axes.x_title == "step" else panel.onset
    layers = [*_window(panel, shift, last), *extra, *_layers(panel, axes)]
    return alt.layer(*layers, data=style.table(data)).properties(width=300, height=190, title=title)


def _mark_lost(data: pd.DataFrame, floor: float) -> pd.DataFrame:
    """Column `lost`: the last finite point of a median that turns non-finite; bands reach down to `floor`."""
    data = data.copy()
    gone = np.isneginf(data["median"].to_numpy())
    same = data["key"].eq(data["key"].shift(-1)).to_numpy()
    after = np.append(gone[1:], False) & same
    data["lost"] = np.where(~gone & after, 1.0, np.nan)
    low, high = data["low"].to_numpy(), data["high"].to_numpy()
    data["low"] = np.where(np.isneginf(low) & np.isfinite(high), floor, low)
    return data


def _threshold(run: Run, panel: Panel) -> tuple[list[alt.Chart], bool]:
    """The collapse threshold J_pre - 2 sigma_pre, median over seeds, from the onset on."""
    metrics = run.metrics
    if metrics is None or not {"performance_before", "performance_std_before", "onset"} <= set(metrics):
        return [], False
    rows = metrics[metrics["onset"] == panel.onset]
    level = (rows["performance_before"] - 2 * rows["performance_std_before"]).median()
    if not np.isfinite(level):
        return [], False
    values = [{"start": panel.onset, "end": int(run.step[-1]), "level": float(level)}]
    rule = alt.Chart(alt.InlineData(values=values)).mark_rule(
        color=style.MUTED, strokeDash=[1, 3], strokeWidth=1.4, strokeCap="round", clip=True
    )
    y = alt.Y("level:Q", title=None)
    return [rule.encode(x=alt.X("start:Q", title=None), x2="end:Q", y=y)], True


def _subtitle(panel: Panel, seeds: int) -> str:
    if not panel.durations:
        return "undisturbed"
    lengths = " or ".join(str(d) for d in panel.durations)
    return f"{panel.dimension} · onset {panel.onset}, open {lengths} {'step' if lengths == '1' else 'steps'}"


def _title(panel: Panel, seeds: int) -> alt.TitleParams:
    return alt.TitleParams(panel.title if panel.perturbation != CONTROL else CONTROL, subtitle=_subtitle(panel, seeds))


def performance(run: Run, groups: list[Panel]) -> Figure:
    """Performance of every condition against the step, one panel per perturbation and onset."""
    window, horizon = run.setting("window", 50), run.setting("horizon", 500)
    frames = []
    for panel in groups:
        kept = thin(run.step, panel.onset, 2 * window)
        frames.append(frame(run, panel, run.performance, kept, lost_is_worst=True))
    ends, cut = style.domain([f[["median", "low", "high"]].to_numpy() for f in frames])
    scale = alt.Scale(domain=list(ends), nice=False, zero=False)
    name = str(run.telemetry.attrs.get("performance_name", "performance"))
    charts, limits = [], False
    for place, (panel, data) in enumerate(zip(groups, frames, strict=True)):
        first = max(int(run.step[0]), panel.onset - 2 * window)
        last = min(int(run.step[-1]), panel.onset + max(panel.durations, default=0) + horizon)
        axes = _Axes("step", name, (first, max(last, first + 1)), scale, _zoom(f"zoom_{place}"), _pick(f"pick_{place}"))
        extra, drawn = _threshold(run, panel)
        limits |= drawn
        charts.append(_draw(panel, _mark_lost(data, ends[0]), axes, _title(panel, run.seeds), extra))
    chart = style.finish(charts, 3, shared=False, width=270, limit=520)
    return Figure("performance", "", chart, _performance_caption(run, cut, limits))


def _performance_caption(run: Run, cut: bool, limits: bool) -> str:
    band = band_name(run.seeds)
    unit = run.telemetry.attrs.get("step_unit")
    parts = [
        f"Line: median over {run.seeds} seeds; band: {band}." if band else "One seed: a line is one lane, no band.",
        "Grey: the undisturbed control. Dashed rule: the onset; shaded: the steps the window is open.",
    ]
    if limits:
        parts.append("Dotted: the collapse threshold J_pre - 2 sigma_pre (median over seeds).")
    parts.append("A cross marks where the median turns non-finite; a lost seed counts as the worst.")
    if cut:
        parts.append("The vertical axis leaves out extreme values, so that the rest stays legible.")
    if len(run.step) > 400:
        parts.append("Every step near the onset is drawn where room allows, fewer of them far from it.")
    if unit:
        parts.append(f"One step is {unit}.")
    return " ".join(parts)


def channels(run: Run, groups: list[Panel]) -> list[Figure]:
    """The meta-state channels round the onset (step 0 = injection), one figure per perturbation and onset."""
    values = {name: v for name in CHANNELS if (v := run.channel(name)) is not None and np.isfinite(v).any()}
    found = []
    for place, panel in enumerate(groups):
        if not panel.disturbed:
            continue
        charts = _aligned(run, panel, values, place)
        if charts:
            chart = style.finish(charts, 4, shared=True, width=190, limit=440)
            subtitle = _subtitle(panel, run.seeds)
            found.append(Figure(f"channels_{style.slug(panel.title)}", f"{panel.title} ({subtitle})", chart, ""))
    return found


def _aligned(run: Run, panel: Panel, values: dict[str, np.ndarray], place: int) -> list[alt.LayerChart]:
    window = run.setting("window", 50)
    first, last = -window, 3 * window + min(max(panel.durations), window)
    near = np.flatnonzero((run.step >= panel.onset + first) & (run.step <= panel.onset + last))
    kept = near[thin(run.step[near], panel.onset, window // 2, limit=160)]
    zoom, pick = _zoom(f"zoom_{place}"), _pick(f"pick_{place}")
    charts = []
    for name, block in values.items():
        data = frame(run, panel, block, kept)
        if not np.isfinite(data["median"]).any():
            continue
        data["step"] -= panel.onset
        data, scale = _channel_scale(data)
        data["lost"] = np.nan
        axes = _Axes("steps since the onset", CHANNELS[name], (first, min(last, run.step[-1] - panel.onset)), scale,
                     zoom, pick)  # fmt: skip
        charts.append(_draw(panel, data, axes, alt.Undefined, []).properties(width=215, height=150))
    return charts


def _channel_scale(data: pd.DataFrame) -> tuple[pd.DataFrame, alt.Scale]:
    """A linear axis without extremes; a logarithmic one for positive values over a wide range."""
    columns = ["median", "low", "high"]
    x = data[columns].to_numpy()
    finite = x[np.isfinite(x)]
    if (finite >= 0).all() and (positive := finite[finite > 0]).size:
        low, high = np.quantile(positive, (0.02, 0.98))
        if high > 30 * low:
            data[columns] = np.where(x > 0, x, np.nan)
            return data, alt.Scale(type="log", nice=False)
    ends, _ = style.domain([x])
    return data, alt.Scale(domain=list(ends), nice=False, zero=False)
