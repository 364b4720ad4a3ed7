"""Figures of monitors: latent trajectories, scores around the onset, and the shares of lanes detected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
import xarray as xr

from jaxaudit.monitoring.comparison import CLEAN
from jaxaudit.report import line_panels, style
from jaxaudit.report.page import Figure

TUBE = "#e3e5ea"
MAX_TUBE_STEPS, MAX_PATH_STEPS = 80, 240
"""The most steps that are drawn of the tube of clean runs, and of a path."""

MAX_CONDITIONS = 6
"""The most conditions that are drawn as lines or latent trajectories."""

COLLAPSED = "lanes that collapsed"
"""The title of the column of counts in the map of detections."""

CLEAN_ROW = "clean: false alarms"
"""The title of the row of clean lanes."""

DETECTOR_LABEL = "split(replace(datum.label, '[', ' of ['), ' of ')"
"""The Vega expression that breaks a detector's name into lines: the statistic, the channel, the channel's entry."""

AROUND_ONSET = {
    "performance": "performance",
    "deviation": "meta-state deviation",
    "score": "score of the monitor",
}
"""The variables that are drawn around the onset, and their titles."""


def variable(data: xr.Dataset, name: str, *dims: str) -> np.ndarray | None:
    """Returns a variable as float64 with its dimensions in this order; None if it is not stored with them."""
    if name not in data or set(data[name].dims) != set(dims):
        return None
    return data[name].transpose(*dims).values.astype(np.float64)


def steps(data: xr.Dataset) -> np.ndarray:
    """Returns the steps, int `[step]`; these are 0, 1, ... if they are not stored."""
    return data["step"].values.astype(int) if "step" in data.coords else np.arange(data.sizes["step"])


def names_along(data: xr.Dataset, dim: str) -> list[str]:
    """Returns the names along a dimension; these are 0, 1, ... if they are not stored."""
    return [str(name) for name in (data[dim].values if dim in data.coords else range(data.sizes[dim]))]


def onsets(data: xr.Dataset) -> np.ndarray:
    """Returns the onset of every condition, int `[condition]`; the first step where it is not stored."""
    if "onset" not in data.coords:
        return np.full(data.sizes["condition"], steps(data)[0])
    return np.nan_to_num(data["onset"].values.astype(float)).astype(int)


def place_at_edge(data: pd.DataFrame, top: float) -> pd.DataFrame:
    """Returns lines with infinite values at the upper end of the axis, and a column `lost`.

    `lost` marks where a median becomes infinite.
    """
    data = data.copy()
    columns = ["median", "low", "high"]
    is_infinite = np.isposinf(data["median"].to_numpy())
    was_infinite = np.append(False, is_infinite[:-1]) & data["key"].eq(data["key"].shift()).to_numpy()
    data["lost"] = np.where(is_infinite & ~was_infinite, 1.0, np.nan)
    data[columns] = np.where(np.isposinf(data[columns].to_numpy()), top, data[columns].to_numpy())
    return data


def score_scale(data: pd.DataFrame, threshold: float) -> tuple[pd.DataFrame, alt.Scale, list[alt.Chart], bool]:
    """Returns lines of scores with infinite values at the edge, their vertical scale, and the threshold's rule.

    If the threshold and the scores of clean runs would fill less than a quarter of the axis, the scale is logarithmic
    far from zero. The lowest scores are left out; the last result is whether any is, or any is infinite.

    Args:
      data: lines as `line_panels.line_frame` returns them.
      threshold: the score above which there is an alarm; NaN if it is unknown.
    """
    x = data[["median", "low", "high"]].to_numpy()
    level = np.array([threshold] if np.isfinite(threshold) else [])
    known = np.append(x[np.isfinite(x)], level)
    clean = x[(data["key"] == line_panels.CONTROL_KEY).to_numpy()]
    reference = np.append(clean[np.isfinite(clean)], level)
    low, high = (float(np.quantile(known, 0.02)), float(known.max())) if known.size else (0.0, 1.0)
    low = min(low, *level) if level.size else low
    reach = (float(reference.max()) - low if reference.size else high - low) or 1.0
    is_wide = high > low + 4 * reach
    bottom, top = low - 0.1 * reach, high + (0.2 * (high - low) if is_wide else 0.1 * reach)
    kind: dict[str, Any] = {"type": "symlog", "constant": reach} if is_wide else {}
    scale = alt.Scale(domain=[bottom, top], nice=False, zero=False, **kind)
    layers = []
    if np.isfinite(threshold):
        values = [{"start": float(data["step"].min()), "end": float(data["step"].max()), "level": threshold}]
        rule = alt.Chart(alt.InlineData(values=values)).mark_rule(
            color=style.INK, strokeDash=[1, 3], strokeWidth=1.6, strokeCap="round", clip=True
        )
        layers.append(rule.encode(x=alt.X("start:Q"), x2=alt.X2("end:Q"), y=alt.Y("level:Q")))
    return place_at_edge(data, top), scale, layers, bool((np.isposinf(x) | (x < bottom)).any())


@dataclass(frozen=True)
class LatentPanel:
    """The panel of one condition or run in a figure of latent trajectories.

    Attributes:
      paths: the trajectories, `[T, 2]` each; NaN at steps without a value.
      start: the index of the step from which on a path is coloured; before it, the path is thin and grey.
      colour: the colour of the paths.
      title: the title of the panel.
      subtitle: the text under the title; empty for none.
    """

    paths: Sequence[np.ndarray]
    start: int
    colour: str
    title: str
    subtitle: str = ""


def latent_figure(file: str, clean: np.ndarray | None, panels: Sequence[LatentPanel], caption: str) -> Figure:
    """Returns trajectories in the plane of the latent's first two components, with the tube of clean runs.

    Args:
      file: the stem of the figure's file names.
      clean: the clean runs' low, middle and high quantiles, `[T, 2, 3]`.
      panels: the panels.
      caption: what the colours and the ring mean.
    """
    drawn = [_latent_chart(panel, clean) for panel in panels]
    chart = style.finish([chart for chart, _ in drawn], 3, shared=False, min_width=270, max_width=520, gutter=62)
    text = f"Grey tube and line: the 10% to 90% range and the median of clean runs at each step. {caption} "
    text += "Dot: the last step. Every panel has its own axes."
    if any(is_cut for _, is_cut in drawn):
        text += " Axes leave out extreme values, so that the tube stays legible."
    return Figure(file, "", chart, text)


def _latent_chart(panel: LatentPanel, clean: np.ndarray | None) -> tuple[Any, bool]:
    """Returns the chart of a panel, and whether its axes leave out extreme values."""
    reference = np.empty((0, 2, 3)) if clean is None else clean
    data = pd.concat([_path_frame(path, i, panel.start) for i, path in enumerate(panel.paths)], ignore_index=True)
    values = data[["x", "y"]].to_numpy()
    ends, is_cut = zip(*(style.domain([values[:, k], reference[:, k]], [reference[:, k]]) for k in (0, 1)), strict=True)
    scales = [alt.Scale(domain=list(end), nice=False, zero=False) for end in ends]
    x: dict[str, Any] = {"scale": scales[0], "title": "first component"}
    y: dict[str, Any] = {"scale": scales[1], "title": "second component"}
    layers = [] if clean is None else _tube_layers(clean, x, y)
    layers += _path_layers(data, panel.colour, x, y)
    subtitle: dict[str, Any] = {"subtitle": panel.subtitle} if panel.subtitle else {}
    title = alt.TitleParams(panel.title, limit=310, **subtitle)
    return alt.layer(*layers).properties(width=300, height=270, title=title), any(is_cut)


def _path_frame(path: np.ndarray, number: int, start: int) -> pd.DataFrame:
    """Returns the rows path, part, order, x, y and mark of the parts before and after a step, which both contain."""
    selected = line_panels.select_steps(np.arange(len(path)), start, len(path) // 8, MAX_PATH_STEPS)
    selected = selected[np.isfinite(path[selected]).all(axis=1)]
    parts = []
    for part, order in (("before", selected[selected <= start]), ("after", selected[selected >= start])):
        rows = pd.DataFrame({"order": order, "x": path[order, 0], "y": path[order, 1]})
        rows.insert(0, "path", f"{number} {part}")
        rows.insert(1, "part", part)
        rows["mark"] = ""
        parts.append(rows)
    after = parts[1]
    if len(after):
        after.loc[0, "mark"] = "start"
        after.loc[len(after) - 1, "mark"] = "end"
    return pd.concat(parts, ignore_index=True)


def _tube_layers(clean: np.ndarray, x: dict[str, Any], y: dict[str, Any]) -> list[Any]:
    """Returns opaque boxes, one per step, whose union is the tube, and the median path inside it."""
    selected = np.unique(np.linspace(0, len(clean) - 1, MAX_TUBE_STEPS).round().astype(int))
    selected = selected[np.isfinite(clean[selected]).all(axis=(1, 2))]
    low, middle, high = (clean[selected, :, k] for k in range(3))
    columns = {"order": selected, "x": middle[:, 0], "y": middle[:, 1]}
    columns |= {"left": low[:, 0], "right": high[:, 0], "lower": low[:, 1], "upper": high[:, 1]}
    base = alt.Chart(style.inline_csv(pd.DataFrame(columns)))
    box = base.mark_rect(color=TUBE, stroke=TUBE, strokeWidth=3, strokeJoin="round", clip=True)
    line = base.mark_line(color=style.GREY, strokeWidth=1.4, clip=True)
    return [
        box.encode(x=alt.X("left:Q", **x), x2=alt.X2("right:Q"), y=alt.Y("lower:Q", **y), y2=alt.Y2("upper:Q")),
        line.encode(x=alt.X("x:Q", **x), y=alt.Y("y:Q", **y), order=alt.Order("order:Q")),
    ]


def _path_layers(data: pd.DataFrame, colour: str, x: dict[str, Any], y: dict[str, Any]) -> list[Any]:
    base = alt.Chart(style.inline_csv(data)).encode(x=alt.X("x:Q", **x), y=alt.Y("y:Q", **y))
    before = base.transform_filter("datum.part == 'before'").mark_line(
        color=style.GREY, strokeWidth=0.7, opacity=0.45, clip=True
    )
    after = base.transform_filter("datum.part == 'after'").mark_line(
        color=colour, strokeWidth=1.1, opacity=0.75, strokeJoin="round", clip=True
    )
    start = base.transform_filter("datum.mark == 'start'").mark_point(
        filled=True, fill="#ffffff", stroke=style.INK, strokeWidth=1.4, size=40, opacity=1, clip=True
    )
    end = base.transform_filter("datum.mark == 'end'").mark_point(
        filled=True, fill=colour, stroke="#ffffff", strokeWidth=0.8, size=55, opacity=1, clip=True
    )
    lines: dict[str, Any] = {"detail": alt.Detail("path:N"), "order": alt.Order("order:Q")}
    return [before.encode(**lines), after.encode(**lines), start, end]


def select_conditions(data: xr.Dataset) -> list[int]:
    """Returns up to `MAX_CONDITIONS` disturbed conditions, spaced evenly from the least to the most deviating one."""
    disturbed = np.arange(1, data.sizes["condition"])
    deviation = variable(data, "deviation", "condition", "step", "quantile")
    if deviation is not None:
        is_after = steps(data) >= onsets(data)[:, None]
        peak = np.where(is_after, np.nan_to_num(deviation[..., 1], posinf=np.inf), 0.0).max(axis=1)
        disturbed = disturbed[np.argsort(peak[disturbed], kind="stable")]
    if not len(disturbed):
        return []
    positions = np.unique(np.linspace(0, len(disturbed) - 1, MAX_CONDITIONS).round().astype(int))
    return [int(i) for i in disturbed[positions]]


def latent_trajectories(data: xr.Dataset, file: str) -> Figure | None:
    """Returns the latent trajectories of disturbed lanes beside the tube of clean ones, with a panel per condition."""
    quantiles = variable(data, "latent", "condition", "step", "component", "quantile")
    samples = variable(data, "latent_samples", "condition", "sample", "step", "component")
    if samples is None or not len(steps(data)):
        return None
    conditions = select_conditions(data) or [0]
    names, step, onset = names_along(data, "condition"), steps(data), onsets(data)
    panels = []
    for i, colour in zip(conditions, style.ramp(len(conditions)), strict=True):
        start = int(np.clip(np.searchsorted(step, onset[i]), 0, len(step) - 1))
        panels.append(LatentPanel(_distinct_lanes(samples[i]), start, colour, names[i]))
    caption = (
        "Thin grey lines: lanes before the onset; coloured: after it. Axes: the two directions of the latent in which "
        "lanes vary most, in standard deviations of the clean runs. Ring: the onset."
    )
    return latent_figure(f"{file}_latent", None if quantiles is None else quantiles[0], panels, caption)


def _distinct_lanes(samples: np.ndarray) -> list[np.ndarray]:
    """Returns each lane that has values once; a condition with few lanes has them stored several times."""
    lanes: list[np.ndarray] = []
    for sample in samples:
        if np.isfinite(sample).any() and not any(np.array_equal(sample, lane, equal_nan=True) for lane in lanes):
            lanes.append(sample)
    return lanes or [samples[0]]


def around_onset(data: xr.Dataset, file: str) -> Figure | None:
    """Returns performance, deviation and score against the steps since the onset, one below the other."""
    blocks = {
        name: block
        for name in AROUND_ONSET
        if (block := variable(data, name, "condition", "step", "quantile")) is not None and np.isfinite(block).any()
    }
    if not blocks or not len(steps(data)):
        return None
    names, onset, conditions = names_along(data, "condition"), onsets(data), select_conditions(data)
    disturbed = [line_panels.PlotLine(i, f"m{rank}", names[i], float("nan")) for rank, i in enumerate(conditions)]
    lines = (line_panels.PlotLine(0, line_panels.CONTROL_KEY, CLEAN, float("nan")), *disturbed)
    clean_onset = int(np.median(onset[conditions])) if conditions else int(steps(data)[0])
    panel = line_panels.Panel("", "", "", 0, (0,) if conditions else (), lines, float("-inf"))
    threshold = float(data.attrs.get("threshold", np.nan))
    charts: list[Any] = []
    any_cut = False
    for name, block in blocks.items():
        frame = pd.concat([_frame_since_onset(data, block, line, clean_onset) for line in lines], ignore_index=True)
        frame, scale, layers, is_cut = _with_scale(name, frame, block[0], threshold)
        any_cut |= is_cut
        first = int(frame["step"].min())
        span = (first, max(int(frame["step"].max()), first + 1))
        axes = line_panels.Axes(True, None, span, scale, "0", len(charts), legend_chars=170)
        charts.append(
            line_panels.draw(
                panel, frame, axes, line_panels.small_title(AROUND_ONSET[name]), layers, width=860, height=170
            )
        )
    chart = style.finish(charts, 1, shared=True, min_width=300, max_width=1120, gutter=60)
    parts = ["Line: median over lanes; band: their 10% to 90% range, from the onset on. Grey: clean runs."]
    n_disturbed = data.sizes["condition"] - 1
    if len(conditions) < n_disturbed:
        parts.append(f"{len(conditions)} of {n_disturbed} conditions, from the least to the most deviating.")
    if len({int(onset[i]) for i in conditions}) > 1:
        parts.append(f"Onsets differ between conditions; step 0 of the clean runs is step {clean_onset}.")
    if "score" in blocks and np.isfinite(threshold):
        parts.append(f"Dotted: the threshold of the score, {threshold:.3g}; a score above it is an alarm.")
    parts.append("A wide range has a logarithmic axis, which is linear around zero.")
    if any_cut:
        parts.append("Axes leave out extreme values; a cross at the edge marks where a median becomes infinite.")
    return Figure(f"{file}_onset", "", chart, " ".join(parts))


def _frame_since_onset(
    data: xr.Dataset, block: np.ndarray, line: line_panels.PlotLine, clean_onset: int
) -> pd.DataFrame:
    """Returns a condition's quantiles against the steps since its onset, as `line_panels.line_frame` does."""
    is_clean = line.key == line_panels.CONTROL_KEY
    since = steps(data) - (clean_onset if is_clean else onsets(data)[line.index])
    near = np.flatnonzero(since >= -max(10, int(since[-1]) // 3))
    selected = near[line_panels.select_steps(since[near], 0, max(len(near) // 8, 10), 300)]
    low, median, high = block[line.index, selected].T
    if not is_clean:
        low, high = (np.where(since[selected] < 0, np.nan, end) for end in (low, high))
    return line_panels.line_rows(line, since[selected], median, low, high)


def _with_scale(
    name: str, data: pd.DataFrame, clean: np.ndarray, threshold: float
) -> tuple[pd.DataFrame, alt.Scale, list[alt.Chart], bool]:
    """Returns the lines of a variable with a column `lost`, their scale, further layers, and whether any is cut."""
    if name == "performance":
        ends, is_cut = style.domain([data[["median", "low", "high"]].to_numpy()], [clean])
        return line_panels.mark_lost(data, ends[0]), alt.Scale(domain=list(ends), nice=False, zero=False), [], is_cut
    if name == "score":
        return score_scale(data, threshold)
    data, scale = line_panels.channel_scale(data)
    top = float(scale["domain"][1])
    return place_at_edge(data, top), scale, [], bool((data[["median", "high"]] > top).to_numpy().any())


def detection_map(table: pd.DataFrame, monitor: str, detectors: list[str], file: str) -> Figure:
    """Returns a map of condition by detector with the share of lanes detected, or of false alarms on clean lanes.

    Args:
      table: `conditions.csv`.
      monitor: the name of the monitor, which is written in bold if it comes first.
      detectors: the detectors, in the order of the map's columns.
      file: the prefix of the figure's file names.
    """
    columns = [*detectors, COLLAPSED] if {"lanes", "collapsed"} <= set(table) else detectors
    cells = _detection_cells(table, columns)
    is_wide = len(columns) > 8
    label_rows = max(1 + (" of " in name) + ("[" in name) for name in columns)
    ink: dict[str, Any] = {"domain": False, "ticks": False, "labelColor": style.INK, "labelOverlap": False}
    bold = {"condition": {"test": "datum.index == 0", "value": "bold"}, "value": "normal"}
    weight: dict[str, Any] = {"labelFontWeight": bold} if detectors[0] == monitor else {}
    x = alt.X("detector:N", title=None, sort=columns, scale=alt.Scale(paddingInner=0.02),
              axis=alt.Axis(orient="top", labelAngle=-35 if is_wide else 0, labelLimit=136, labelLineHeight=13,
                            labelExpr="datum.label" if is_wide else DETECTOR_LABEL,
                            labelPadding=6 if is_wide else 13 * label_rows - 8, **weight, **ink))  # fmt: skip
    y = alt.Y("condition:N", title=None, sort=list(dict.fromkeys(cells["condition"])),
              scale=alt.Scale(paddingInner=0.05),
              axis=alt.Axis(labelLimit=290, labelFontSize=11.5, labelPadding=8, **ink))  # fmt: skip
    base = alt.Chart().encode(x=x, y=y)
    legend = alt.Legend(title="share of lanes", orient="bottom", gradientLength=160, gradientThickness=8, format=".0%")
    colour = alt.Color("p:Q", scale=alt.Scale(domain=[0, 1], range=list(style.SHARE)), legend=legend)
    tooltip = [alt.Tooltip(f"{name}:N") for name in ("condition", "detector", "share")]
    rectangle = base.transform_filter("isValid(datum.p)").mark_rect(cornerRadius=3)
    text_colour = alt.condition("datum.p > 0.55", alt.value("#ffffff"), alt.value(style.INK))
    text = base.mark_text(fontSize=11.5).encode(text=alt.Text("share:N"), color=text_colour)
    chart: Any = alt.layer(rectangle.encode(color=colour, tooltip=tooltip), text, data=style.inline_csv(cells))
    chart = chart.properties(width=120 * len(columns), height=alt.Step(28))
    gutter = round(min(300, 7 * cells["condition"].str.len().max())) + 20
    least, most = (40 if is_wide else 112) * len(columns), 150 * len(columns)
    finished = style.finish([chart], 1, shared=True, min_width=least, max_width=most, gutter=gutter, has_cells=True)
    caption = (
        "The share of lanes with an alarm at or after the onset; in the first row, the share of clean lanes with a "
        "false alarm."
    )
    return Figure(f"{file}_conditions", "", finished, caption)


def _detection_cells(table: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """Returns a row per condition and column: condition, detector, p (NaN for a count of lanes), share as text."""
    rows = []
    for _, row in table.iterrows():
        condition = CLEAN_ROW if row["condition"] == CLEAN else row["condition"]
        for column in columns:
            if column == COLLAPSED:
                counts = row[["collapsed", "lanes"]].astype(float)
                p, text = np.nan, "{:.0f} of {:.0f}".format(*counts) if counts.notna().all() else "n/a"
            else:
                p = float(row[column])
                text = f"{p:.0%}" if np.isfinite(p) else "n/a"
            rows.append((condition, column, p, text))
    return pd.DataFrame(rows, columns=["condition", "detector", "p", "share"])
