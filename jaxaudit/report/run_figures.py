"""The figures of a run: performance and channels over steps, the collapse map, and dose-response curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from jaxaudit.analysis.run_reader import Run
from jaxaudit.core.channel_names import ACTING, PERFORMANCE_ERROR
from jaxaudit.report import line_panels, outcomes, style
from jaxaudit.report.page import Figure

CHANNELS = {
    "x_grad": "x_grad: gradient coherence",
    "x_inst": "x_inst: instability index",
    "x_mem": "x_mem: persistence",
    "x_used": "x_used: gradient as used",
    ACTING: "acting performance",
    "gradient_norm": "gradient norm",
}
"""The channels that are drawn around the onset, and their titles."""

COLLAPSE_KINDS = {
    "divergence_probability": "P_div: collapse before T_max / 2",
    "collapse_probability": "collapse at any time",
}
"""The summary's columns that the collapse map shows, and their titles."""

CELL_WIDTH = 64
"""The width in pixels of a map's cell that has room for its interval."""

MAX_MAP_WIDTH = 1000
"""The largest width of a map in pixels; cells that have to be narrower have their intervals in tooltips only."""


def performance(run: Run, groups: Sequence[line_panels.Panel]) -> Figure:
    """Returns the performance of every condition over steps, with one panel per perturbation and onset."""
    window, horizon = run.setting("window", 50), run.setting("horizon", 500)
    lost_is_worst = not run.is_sparse("performance")
    frames = [
        line_panels.line_frame(
            run,
            panel,
            run.performance,
            line_panels.select_steps(run.step, panel.onset, 2 * window),
            lost_is_worst=lost_is_worst,
        )
        for panel in groups
    ]
    ends, is_cut = line_panels.line_domain(frames)
    scale = alt.Scale(domain=list(ends), nice=False, zero=False)
    name = str(run.telemetry.attrs.get("performance_name", "performance"))
    charts: list[Any] = []
    has_threshold = False
    for i, (panel, data) in enumerate(zip(groups, frames, strict=True)):
        first = max(int(run.step[0]), panel.onset - 2 * window)
        last = min(int(run.step[-1]), panel.onset + max(panel.durations, default=0) + horizon)
        axes = line_panels.Axes(False, name, (first, max(last, first + 1)), scale, f"{i}", 0)
        threshold = _collapse_threshold(run, panel, name)
        has_threshold |= bool(threshold)
        title = alt.TitleParams(panel.title, subtitle=_subtitle(panel))
        charts.append(line_panels.draw(panel, line_panels.mark_lost(data, ends[0]), axes, title, threshold))
    chart = style.finish(charts, 3, shared=False, min_width=270, max_width=560, gutter=76)
    return Figure("performance", "", chart, _performance_caption(run, is_cut, has_threshold))


def _collapse_threshold(run: Run, panel: line_panels.Panel, name: str) -> list[alt.Chart]:
    """Returns a dotted rule at J_pre - 2 sigma_pre, median over seeds, from the onset on; empty if it is unknown."""
    metrics = run.metrics
    if metrics is None or not {"performance_before", "performance_std_before", "onset"} <= set(metrics):
        return []
    rows = metrics[metrics["onset"] == panel.onset]
    level = (rows["performance_before"] - 2 * rows["performance_std_before"]).median()
    if not np.isfinite(level):
        return []
    values = [{"start": panel.onset, "end": int(run.step[-1]), "level": float(level)}]
    rule = alt.Chart(alt.InlineData(values=values)).mark_rule(
        color=style.MUTED, strokeDash=[1, 3], strokeWidth=1.4, strokeCap="round", clip=True
    )
    y = alt.Y("level:Q", title=name)
    return [rule.encode(x=alt.X("start:Q", title="step"), x2="end:Q", y=y)]


def _subtitle(panel: line_panels.Panel) -> str:
    if not panel.durations:
        return "undisturbed"
    lengths = " or ".join(str(d) for d in panel.durations)
    return f"{panel.dimension} · onset {panel.onset}, lasts {lengths} {'step' if lengths == '1' else 'steps'}"


def _performance_caption(run: Run, is_cut: bool, has_threshold: bool) -> str:
    band = line_panels.band_description(run.seeds)
    unit = run.telemetry.attrs.get("step_unit")
    if band:
        parts = [f"Line: median over {run.seeds} seeds; band: {band}."]
    else:
        parts = ["There is one seed, so each line is a single training run and there is no band."]
    parts.append("Grey: the undisturbed control. Dark vertical line: the onset. Shaded: while the disturbance acts.")
    if has_threshold:
        parts.append("Dotted: the collapse threshold J_pre - 2 sigma_pre (median over seeds).")
    parts.append("A cross marks where the median stops being finite. A seed that is not finite counts as the worst.")
    if is_cut:
        parts.append("The vertical axis leaves out extreme values, so that the rest stays legible.")
    if len(run.step) > 400:
        parts.append("Far from the onset, not every step is drawn.")
    if unit and unit != "step":
        parts.append(f"One step is {unit}.")
    if (errors := run.channel(PERFORMANCE_ERROR)) is not None and np.isfinite(errors).any():
        parts.append(
            f"Performance is estimated from a sample, with a standard error of {np.nanmedian(errors):.2g} (the "
            "median), which adds to the spread over seeds."
        )
    return " ".join(parts)


def channels(run: Run, groups: Sequence[line_panels.Panel]) -> list[Figure]:
    """Returns one figure per perturbation and onset with the channels of `CHANNELS` around the onset."""
    values = {title: v for name, title in CHANNELS.items() if (v := run.channel(name)) is not None}
    return around_onset(run, groups, values, "channels")


def around_onset(
    run: Run, groups: Sequence[line_panels.Panel], values: dict[str, np.ndarray], file: str, zeros: bool = False
) -> list[Figure]:
    """Returns one figure per perturbation and onset, with a panel for each series against the steps since the onset.

    Args:
      run: the run.
      groups: the panels that say which conditions are drawn.
      values: `[seed, condition, step]` by title. Series that have no value or are constant are left out.
      file: the prefix of the figures' file names.
      zeros: whether a median of zero must be visible, which a logarithmic axis would hide.
    """
    values = {title: v for title, v in values.items() if np.isfinite(v).any()}
    figures = []
    for i, panel in enumerate(groups):
        if not panel.disturbed:
            continue
        if charts := _charts_around_onset(run, panel, values, f"{file}_{i}", zeros):
            chart = style.finish(charts, 4, shared=True, min_width=190, max_width=440, gutter=70)
            title = f"{panel.title} ({_subtitle(panel)})"
            figures.append(Figure(f"{file}_{style.slug(panel.title)}", title, chart, ""))
    return figures


def _charts_around_onset(
    run: Run, panel: line_panels.Panel, values: dict[str, np.ndarray], group: str, zeros: bool
) -> list[Any]:
    window = run.setting("window", 50)
    first, last = -window, 3 * window + min(max(panel.durations), window)
    near = np.flatnonzero((run.step >= panel.onset + first) & (run.step <= panel.onset + last))
    selected = near[line_panels.select_steps(run.step[near], panel.onset, window // 2, limit=160)]
    x_domain = (first, min(last, run.step[-1] - panel.onset))
    indices = [line.index for line in panel.lines]
    charts: list[Any] = []
    for title, block in values.items():
        lanes = block[:, indices]
        is_constant = np.nanmin(lanes) == np.nanmax(lanes)
        repeats_performance = title == CHANNELS[ACTING] and np.array_equal(
            lanes, run.performance[:, indices], equal_nan=True
        )
        if is_constant or repeats_performance:
            continue
        data = line_panels.line_frame(run, panel, block, selected)
        if not np.isfinite(data["median"]).any():
            continue
        data["step"] -= panel.onset
        data, scale = line_panels.channel_scale(data, zeros)
        data["lost"] = np.nan
        axes = line_panels.Axes(True, None, x_domain, scale, group, len(charts))
        charts.append(line_panels.draw(panel, data, axes, line_panels.small_title(title), [], width=215, height=150))
    return charts


def collapse_map(run: Run, groups: Sequence[line_panels.Panel]) -> Figure | None:
    """Returns a map of perturbation by magnitude with the share of seeds that collapse; None if it is unknown."""
    longest_title, most_cells = max(len(p.title) for p in groups), max(len(p.disturbed) for p in groups)
    min_width, has_room = min(MAX_MAP_WIDTH, CELL_WIDTH * most_cells), CELL_WIDTH * most_cells <= MAX_MAP_WIDTH
    charts = [
        _map(cells, title, max(380, min_width), has_room)
        for kind, title in COLLAPSE_KINDS.items()
        if len(cells := _cells(run, groups, kind))
    ]
    if not charts:
        return None
    gutter = round(min(200, max(60, 6.4 * longest_title))) + 26
    max_width = max(min_width, min(620, 150 * most_cells))
    chart = style.finish(
        charts,
        2 if min_width <= MAX_MAP_WIDTH / 2 else 1,
        shared=True,
        min_width=max(min_width, min(300, max_width)),
        max_width=max_width,
        gutter=gutter,
        has_cells=True,
    )
    return Figure("collapse_map", "", chart, _map_caption(run, groups, has_room))


def _map_caption(run: Run, groups: Sequence[line_panels.Panel], has_room: bool) -> str:
    if run.seeds < 2:
        caption = "Each cell: the magnitude, and the share of seeds, which for one seed can only be 0 or 1."
    elif has_room:
        caption = "Each cell: the magnitude, the share of seeds that collapse, and its 95% Wilson interval."
    else:
        caption = (
            "Each cell: the magnitude and the share of seeds that collapse; its tooltip has the 95% Wilson interval."
        )
    caption += " Magnitudes increase to the right."
    late = sorted({p.onset for p in groups if p.onset >= run.steps / 2})
    if late:
        steps = ", ".join(map(str, late))
        caption += f" P_div is 0 by definition for an onset at or after T_max / 2 (here: {steps})."
    if (controls := outcomes.collapsed_controls(run, groups)) is not None:
        caption += f" The shares are of all seeds, including those whose control collapses: {controls.sentence}."
    return caption


def _cells(run: Run, groups: Sequence[line_panels.Panel], kind: str) -> pd.DataFrame:
    parts = []
    for panel in groups:
        rows = outcomes.condition_rows(run, panel)
        if kind not in rows or rows.empty:
            continue
        p, low, high = (rows.get(f"{kind}{end}", pd.Series(np.nan, rows.index)) for end in ("", "_low", "_high"))
        parts.append(
            pd.DataFrame(
                {
                    "perturbation": panel.title,
                    "rank": rows["rank"],
                    "p": p,
                    "label": [str(label)[:22] for label in rows["label"]],
                    "share": [f"{v:.3g}" if np.isfinite(v) else "n/a" for v in p],
                    "interval": [
                        f"{a:.2f} to {b:.2f}" if np.isfinite(a + b) else " " for a, b in zip(low, high, strict=True)
                    ],
                    "condition": rows["condition"],
                }
            )
        )
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def _map(cells: pd.DataFrame, title: str, width: int, has_intervals: bool) -> Any:
    names = list(dict.fromkeys(cells["perturbation"]))
    y = alt.Y("perturbation:N", title=None, sort=names, axis=alt.Axis(
        labelLimit=200, labelFontSize=12, labelColor=style.INK, domain=False, ticks=False, labelPadding=8),
        scale=alt.Scale(paddingInner=0.05))  # fmt: skip
    x = alt.X("rank:O", title=None, axis=None, scale=alt.Scale(paddingInner=0.03))
    base = alt.Chart().encode(x=x, y=y)
    scale = alt.Scale(domain=[0, 1], range=list(style.SHARE))
    legend = alt.Legend(title="share of seeds", orient="bottom", gradientLength=160, gradientThickness=8, format=".1f")
    titles = {"condition": "condition", "share": "share", "interval": "95% interval"}
    rectangle = base.mark_rect(cornerRadius=3, invalid=None).encode(
        color=alt.Color("p:Q", scale=scale, legend=legend),
        tooltip=[alt.Tooltip(f"{field}:N", title=text) for field, text in titles.items()],
    )
    ink = alt.condition("datum.p > 0.55", alt.value("#ffffff"), alt.value(style.INK))

    def text(field: str, dy: int, size: float, weight: str) -> alt.Chart:
        mark = base.mark_text(dy=dy, fontSize=size, fontWeight=weight, limit=120)  # type: ignore[arg-type]
        return mark.encode(text=f"{field}:N", color=ink)

    layers = [
        rectangle,
        text("label", -17, 10.5, "normal"),
        text("share", 0, 15 if has_intervals else 11, "bold"),
        *([text("interval", 16, 10, "normal")] if has_intervals else []),
    ]
    return alt.layer(*layers, data=style.inline_csv(cells)).properties(width=width, height=alt.Step(58), title=title)


def dose_response(run: Run, groups: Sequence[line_panels.Panel]) -> Figure | None:
    """Returns P_div against the magnitude, for perturbations with two or more magnitudes; None if there are none."""
    charts = [chart for panel in groups if (chart := _dose_chart(run, panel)) is not None]
    if not charts:
        return None
    caption = "Filled points: P_div (collapse before T_max / 2)"
    caption += "; bars: 95% Wilson intervals. " if run.seeds > 1 else " (one seed: 0 or 1, no interval). "
    caption += (
        "Rings: collapse at any time. Vertical line: the critical magnitude of P_div, where an isotonic fit over "
    )
    caption += "the logarithm of the magnitude crosses one half; shaded: its 95% interval."
    if outcomes.collapsed_controls(run, groups) is not None:
        caption += (
            " Where controls collapse: horizontal grey line, P_div of the control; triangles, P_div of the seeds "
        )
        caption += "whose control survives, with their critical magnitude as a vertical grey line."
    chart = style.finish(charts, 4, shared=False, min_width=200, max_width=520, gutter=72)
    return Figure("dose_response", "", chart, caption)


def _dose_chart(run: Run, panel: line_panels.Panel) -> Any:
    kind = "divergence_probability"
    rows = outcomes.condition_rows(run, panel)
    if not {kind, "magnitude"} <= set(rows):
        return None
    if panel.neutral == 0:
        rows = rows[rows["magnitude"] != 0]  # there is no logarithm of it
    if rows["magnitude"].nunique() < 2:
        return None
    names = {kind: "p", f"{kind}_low": "low", f"{kind}_high": "high", "collapse_probability": "ever"}
    rows = rows.rename(columns=names)
    control = outcomes.control_collapses(run, panel, kind)
    control_share = float(np.nanmean(control)) if control is not None and np.isfinite(control).any() else 0.0
    if control_share:
        rows["of_standing"] = rows["excess_divergence_lost"] / rows["excess_divergence_standing"]
    columns = [c for c in (*names.values(), "of_standing") if c in rows]
    data = rows[["condition", "magnitude", *columns]].sort_values("magnitude")
    m = data["magnitude"].to_numpy()
    is_log = bool((m > 0).all())
    critical = outcomes.critical_magnitude(run, panel, kind)
    ends = (m.min() / 1.4, m.max() * 1.4) if is_log else (m.min() - 0.1 * np.ptp(m), m.max() + 0.1 * np.ptp(m))
    x = alt.X("magnitude:Q", title="magnitude (log)" if is_log else "magnitude",
              scale=alt.Scale(type="log" if is_log else "linear", domain=list(ends), nice=False),
              axis=alt.Axis(values=[float(v) for v in m], format="~g", grid=False))  # fmt: skip
    layers = _dose_layers(data, x, critical if is_log else None, ends)
    subtitle = [f"critical: {critical.text}" if np.isfinite(critical.value) else critical.text]
    if control_share:
        of_survivors = outcomes.critical_magnitude(run, panel, kind, surviving_controls=True)
        layers += _control_layers(x, control_share, of_survivors if is_log else None)
        subtitle.append(f"where the control survives: {of_survivors.text}")
    title = alt.TitleParams(panel.title, subtitle=subtitle)
    return alt.layer(*layers, data=style.inline_csv(data)).properties(width=215, height=170, title=title)


def _share_axis() -> dict[str, Any]:
    return {"title": "share of seeds", "scale": alt.Scale(domain=[0, 1.0], nice=False)}


def _dose_layers(
    data: pd.DataFrame, x: alt.X, critical: outcomes.CriticalMagnitude | None, ends: tuple[float, float]
) -> list[Any]:
    base = alt.Chart()
    y = _share_axis()
    tooltip = [alt.Tooltip("condition:N"), alt.Tooltip("p:Q", title="P_div", format=".3~g")]
    tooltip += [alt.Tooltip(f"{c}:Q", format=".3~g") for c in ("low", "high", "ever") if c in data]
    layers: list[Any] = []
    if critical is not None and np.isfinite(critical.value):
        low, high = max(critical.low, ends[0]), min(critical.high, ends[1])
        chart = alt.Chart(alt.InlineData(values=[{"low": low, "high": high, "at": critical.value}]))
        interval = chart.mark_rect(color=style.ACCENT, opacity=0.1)
        layers.append(interval.encode(x=_of_field(x, "low:Q"), x2="high:Q"))
        layers.append(chart.mark_rule(color=style.ACCENT, strokeWidth=1.5).encode(x=_of_field(x, "at:Q")))
    layers.append(base.mark_rule(color=style.GREY, strokeDash=[3, 3]).encode(y=alt.datum(0.5)))
    if {"low", "high"} <= set(data):
        layers.append(base.mark_rule(strokeWidth=1.6, color=style.INK).encode(x=x, y=alt.Y("low:Q", **y), y2="high:Q"))
    if "ever" in data:
        ring = base.mark_point(size=110, color=style.RAMP[0], strokeWidth=2, opacity=1)
        layers.append(ring.encode(x=x, y=alt.Y("ever:Q", **y), tooltip=tooltip))
    layers.append(base.mark_line(color=style.INK, strokeWidth=1.2, opacity=0.5).encode(x=x, y=alt.Y("p:Q", **y)))
    point = base.mark_point(filled=True, size=55, color=style.INK, opacity=1)
    layers.append(point.encode(x=x, y=alt.Y("p:Q", **y), tooltip=tooltip))
    return layers


def _control_layers(x: alt.X, control_share: float, critical: outcomes.CriticalMagnitude | None) -> list[Any]:
    """Returns the control's share of collapsed seeds, and the shares of the seeds whose control survives."""
    base = alt.Chart()
    tooltip = [
        alt.Tooltip("condition:N"),
        alt.Tooltip("of_standing:Q", title="where the control survives", format=".3~g"),
    ]
    triangle = base.mark_point(shape="triangle-up", size=70, color=style.GREY, filled=True, opacity=1)
    layers = [
        base.mark_rule(color=style.GREY, strokeWidth=1).encode(y=alt.datum(control_share)),
        triangle.encode(x=x, y=alt.Y("of_standing:Q", **_share_axis()), tooltip=tooltip),
    ]
    if critical is not None and np.isfinite(critical.value):
        chart = alt.Chart(alt.InlineData(values=[{"at": critical.value}]))
        layers.append(chart.mark_rule(color=style.GREY, strokeWidth=1.5).encode(x=_of_field(x, "at:Q")))
    return layers


def _of_field(x: alt.X, shorthand: str) -> alt.X:
    """Returns the same axis for another field."""
    result = x.copy()
    result.shorthand = shorthand
    return result
