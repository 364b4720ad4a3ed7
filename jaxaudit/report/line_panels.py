"""Panels of lines over steps: which conditions a panel shows, their medians and bands, and the chart of a panel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from jaxaudit.analysis.run_reader import CONTROL, Run
from jaxaudit.monitoring.page_arrays import lane_quantiles
from jaxaudit.report import style

CONTROL_KEY = "c"
"""The `PlotLine.key` of undisturbed lanes."""

MAX_TOOLTIP_ENTRIES = 40


@dataclass(frozen=True)
class PlotLine:
    """A condition, or a run, that is drawn as a line.

    Attributes:
      index: its position along the dimension "condition" or "run" of the data.
      key: its column in the tooltip's table: `CONTROL_KEY`, or m0, m1, ... from the weakest to the strongest.
      label: its name in the legend.
      magnitude: the perturbation's magnitude; NaN if there is none.
    """

    index: int
    key: str
    label: str
    magnitude: float


@dataclass(frozen=True)
class Panel:
    """One perturbation at one onset.

    Attributes:
      perturbation: its name; a chain's parts are joined by "+".
      dimension: what it disturbs, such as "data" or "optimization".
      title: its name for the reader, with target and onset where these differ between panels.
      onset: the step at which it begins.
      durations: the distinct lengths of its windows in steps, in ascending order.
      lines: the control, if there is one, and then the conditions by ascending magnitude.
      neutral: the magnitude that disturbs nothing; minus infinity if the run does not say.
    """

    perturbation: str
    dimension: str
    title: str
    onset: int
    durations: tuple[int, ...]
    lines: tuple[PlotLine, ...]
    neutral: float

    @property
    def disturbed(self) -> tuple[PlotLine, ...]:
        """The lines of the disturbed conditions, without the control's."""
        return tuple(line for line in self.lines if line.key != CONTROL_KEY)


def panels(run: Run) -> list[Panel]:
    """Returns one panel per perturbation, target and onset, in the order of the run's conditions."""
    table = run.conditions
    disturbed = table[table["perturbation"] != CONTROL]
    if disturbed.empty:
        return [_panel(table, table.iloc[:0], CONTROL, CONTROL, int(table["onset"].iloc[0]))]
    n_onsets, n_targets = (disturbed.groupby("perturbation")[name].nunique() for name in ("onset", "target"))
    result = []
    for (name, target, onset), rows in disturbed.groupby(["perturbation", "target", "onset"], sort=False):
        title = f"{name} of {target or 'all'}" if n_targets[name] > 1 else str(name)
        title += f" at step {onset}" if n_onsets[name] > 1 else ""
        result.append(_panel(table, rows, str(name), title, int(onset)))
    return result


def _panel(table: pd.DataFrame, rows: pd.DataFrame, name: str, title: str, onset: int) -> Panel:
    controls = table[table["perturbation"] == CONTROL]
    same_onset = controls[controls["onset"] == onset]
    control = same_onset if len(same_onset) else controls
    lines = [PlotLine(int(i), CONTROL_KEY, CONTROL, float("nan")) for i in control.index[:1]]
    rows = rows.sort_values("magnitude", kind="stable")
    magnitude_is_label = rows["magnitude"].notna().all() and rows["magnitude"].is_unique
    for rank, (index, row) in enumerate(rows.iterrows()):
        label = f"{row['magnitude']:g}" if magnitude_is_label else row["condition"]
        lines.append(PlotLine(int(index), f"m{rank}", label, float(row["magnitude"])))  # type: ignore[call-overload]
    return Panel(
        perturbation=name,
        dimension=str(rows["dimension"].iloc[0]) if len(rows) else CONTROL,
        title=title,
        onset=onset,
        durations=tuple(sorted({int(d) for d in rows["duration"]})),
        lines=tuple(lines),
        neutral=float(rows["neutral"].iloc[0]) if len(rows) else float("-inf"),
    )


def band_description(seeds: int) -> str:
    """Returns what a line's band shows for this number of seeds; empty for a single seed."""
    if seeds < 2:
        return ""
    return "the range over seeds" if seeds < 4 else "the interquartile range over seeds"


def median_and_band(values: np.ndarray, *, lost_is_worst: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the median over seeds and the ends of the band about it, each `[T]`.

    A result is -inf where it falls on a seed without a finite value, and NaN where there is no seed.

    Args:
      values: `[seed, T]`; a seed is lost where its value is NaN or infinite.
      lost_is_worst: whether a lost seed counts as -inf rather than being left out. This is right for performance,
        where nothing worse can happen.
    """
    tail = 0.0 if len(values) < 4 else 0.25
    values = np.where(np.isfinite(values), values, -np.inf if lost_is_worst else np.nan)
    median, low, high = np.moveaxis(lane_quantiles(values, (0.5, tail, 1 - tail)), -1, 0)
    if len(values) < 2:
        low, high = np.full_like(median, np.nan), np.full_like(median, np.nan)
    return median, low, high


def select_steps(steps: np.ndarray, centre: int, radius: int, limit: int = 400) -> np.ndarray:
    """Returns the indices of about `limit` steps at most, half of which lie within `radius` of `centre`."""
    if len(steps) <= limit:
        return np.arange(len(steps))
    near = np.abs(steps - centre) <= radius
    selected = [_spaced_evenly(np.flatnonzero(part), limit // 2 - 2) for part in (near, ~near)]
    selected.append(np.flatnonzero(np.abs(steps - centre) <= 1))
    return np.unique(np.concatenate(selected))


def _spaced_evenly(indices: np.ndarray, limit: int) -> np.ndarray:
    if len(indices) <= limit:
        return indices
    return indices[np.linspace(0, len(indices) - 1, limit).round().astype(int)]


def line_rows(line: PlotLine, steps: np.ndarray, median: Any, low: Any = np.nan, high: Any = np.nan) -> pd.DataFrame:
    """Returns a line in long form, with the columns step, key, label, median, low and high."""
    columns = {"step": steps, "key": line.key, "label": line.label}
    return pd.DataFrame({**columns, "median": median, "low": low, "high": high})


def line_frame(
    run: Run, panel: Panel, values: np.ndarray, selected: np.ndarray, *, lost_is_worst: bool = False
) -> pd.DataFrame:
    """Returns a panel's lines in long form, with the columns step, key, label, median, low and high.

    A disturbed line begins one step before the onset, up to which it equals the control's. Steps at which no line of
    the panel has a value (the channel was not measured there) are left out, and so are steps that have not been run.

    Args:
      run: the run.
      panel: the panel, whose lines are drawn.
      values: `[seed, condition, step]`.
      selected: the indices of the steps to draw.
      lost_is_worst: see `median_and_band`.
    """
    indices = [line.index for line in panel.lines]
    selected = selected[selected < run.computed[indices].max(initial=0)]
    block = values[:, indices][..., selected]
    has_value = ~np.isnan(block).all(axis=(0, 1))
    selected, block = selected[has_value], block[..., has_value]
    parts = []
    for position, line in enumerate(panel.lines):
        band = median_and_band(block[:, position], lost_is_worst=lost_is_worst)
        rows = line_rows(line, run.step[selected], *band)
        parts.append(rows if line.key == CONTROL_KEY else rows[rows["step"] >= panel.onset - 1])
    return pd.concat(parts, ignore_index=True)


def mark_lost(data: pd.DataFrame, floor: float) -> pd.DataFrame:
    """Returns the lines with a column `lost`, which marks the last finite median before a median of -inf.

    Args:
      data: lines as `line_frame` returns them.
      floor: the lower end of the axis, to which a band reaches down where its lower end is -inf.
    """
    data = data.copy()
    is_lost = np.isneginf(data["median"].to_numpy())
    same_line = data["key"].eq(data["key"].shift(-1)).to_numpy()
    lost_next = np.append(is_lost[1:], False) & same_line
    data["lost"] = np.where(~is_lost & lost_next, 1.0, np.nan)
    low, high = data["low"].to_numpy(), data["high"].to_numpy()
    data["low"] = np.where(np.isneginf(low) & np.isfinite(high), floor, low)
    return data


def line_domain(frames: Sequence[pd.DataFrame]) -> tuple[tuple[float, float], bool]:
    """Returns the ends of an axis for lines as `line_frame` returns them; see `style.domain`."""
    columns = ["median", "low", "high"]
    controls = [data.loc[data["key"] == CONTROL_KEY, columns].to_numpy() for data in frames]
    return style.domain([data[columns].to_numpy() for data in frames], controls)


def channel_scale(data: pd.DataFrame, zeros: bool = False) -> tuple[pd.DataFrame, alt.Scale]:
    """Returns the lines and their vertical scale: logarithmic for positive values over a wide range, or else linear.

    Args:
      data: lines as `line_frame` returns them; on a logarithmic scale, values that are not positive become NaN.
      zeros: whether a scale must be linear if a median is zero, because zero has no place on a logarithmic one.
    """
    columns = ["median", "low", "high"]
    x = data[columns].to_numpy()
    finite = x[np.isfinite(x)]
    needs_zero = zeros and bool((data["median"] == 0).any())
    if not needs_zero and (finite >= 0).all() and (positive := finite[finite > 0]).size:
        low, high = np.quantile(positive, (0.02, 0.98))
        if high > 30 * low:
            data[columns] = np.where(x > 0, x, np.nan)
            return data, alt.Scale(type="log", domain=[0.9 * positive.min(), 1.1 * positive.max()], nice=False)
    ends, _ = line_domain([data])
    return data, alt.Scale(domain=list(ends), nice=False, zero=False)


@dataclass(frozen=True)
class Axes:
    """The axes and selections of one panel.

    Attributes:
      relative: whether steps are counted from the onset.
      y_title: the title of the vertical axis; None for none.
      x: the first and the last step shown.
      y: the vertical scale.
      group: the name of the panels that share their zoom and their legend selection.
      number: the number of the panel in its group. The first one declares the legend selection, as only one may.
      legend_chars: about how many characters fit in a row of the legend.
    """

    relative: bool
    y_title: str | None
    x: tuple[float, float]
    y: alt.Scale
    group: str
    number: int
    legend_chars: int = 62

    @property
    def x_title(self) -> str:
        return "steps since the onset" if self.relative else "step"

    @property
    def name(self) -> str:
        """The suffix of the views' names, which have to be explicit because those that Altair generates go stale."""
        return f"{self.group}_{self.number}"


def small_title(text: str) -> alt.TitleParams:
    """Returns the title of a small panel."""
    return alt.TitleParams(text, fontSize=11.5, fontWeight="normal", color=style.MUTED)


def draw(
    panel: Panel,
    data: pd.DataFrame,
    axes: Axes,
    title: Any,
    extra: list[alt.Chart],
    width: int = 300,
    height: int = 190,
) -> Any:
    """Returns the layered chart of a panel.

    Args:
      panel: what is drawn.
      data: lines as `line_frame` returns them, with a column `lost`.
      axes: the axes and selections.
      title: the title of the panel.
      extra: layers to be drawn below the lines.
      width: the panel's width in the static figure, in pixels.
      height: its height.
    """
    last = float(data["step"].max()) + 1 if len(data) else panel.onset + sum(panel.durations)
    layers = [*_window_layers(panel, axes, last), *extra, *_line_layers(panel, axes)]
    return alt.layer(*layers, data=style.inline_csv(data)).properties(width=width, height=height, title=title)


def _window_layers(panel: Panel, axes: Axes, last: float) -> list[alt.Chart]:
    """Returns the rule at the onset and the shaded windows."""
    onset = 0 if axes.relative else panel.onset
    spans = [{"start": onset, "end": min(onset + d, last)} for d in panel.durations]
    shade = alt.Chart(alt.InlineData(values=spans)).mark_rect(color=style.SHADE, opacity=0.22, clip=True)
    rule = alt.Chart(alt.InlineData(values=[{"onset": onset}]))
    rule = rule.mark_rule(color=style.INK, strokeWidth=1, clip=True)
    x_start, x_onset = (alt.X(f"{name}:Q", title=axes.x_title) for name in ("start", "onset"))
    return [shade.encode(x=x_start, x2="end:Q"), rule.encode(x=x_onset)] if spans else []


def _line_layers(panel: Panel, axes: Axes) -> list[alt.Chart]:
    """Returns bands, medians, crosses where a median is lost, and an invisible rule per step with the tooltip."""
    zoom = alt.selection_interval(
        name=f"zoom_{axes.group}", bind="scales", encodings=["x"], zoom="wheel![event.ctrlKey]"
    )
    pick = alt.selection_point(name=f"pick_{axes.group}", fields=["label"], bind="legend")
    selections = [zoom] if axes.number else [pick, zoom]
    x = alt.X("step:Q", title=axes.x_title, scale=alt.Scale(domain=list(axes.x), nice=False))
    colour = _colour(panel, axes.legend_chars)
    y: dict[str, Any] = {"title": axes.y_title, "scale": axes.y}
    strong, faint = _opacity(pick, 1.0, 0.08), _opacity(pick, 0.16, 0.02)
    base = alt.Chart()
    band = base.transform_filter("isValid(datum.low) && isValid(datum.high)").mark_area(clip=True)
    line = base.mark_line(clip=True, strokeWidth=1.8, strokeJoin="round")
    lost = base.transform_filter("datum.lost").mark_point(clip=True, shape="cross", angle=45, size=70, filled=True)
    # The trailing space keeps the order: a JavaScript object puts keys that read as integers first.
    entries = [alt.Tooltip(f"{line.key}:Q", title=f"{line.label} ", format=".4~g") for line in panel.lines]
    tooltip = [alt.Tooltip("step:Q", title="step"), *entries][:MAX_TOOLTIP_ENTRIES]
    rule = base.transform_pivot("key", value="median", groupby=["step"]).mark_rule(strokeWidth=4)
    hover = alt.selection_point(
        name=f"hover_{axes.name}", on="pointerover", clear="pointerout", fields=["step"], empty=False
    )
    return [
        band.encode(x=x, y=alt.Y("low:Q", **y), y2="high:Q", color=colour, opacity=faint),
        line.encode(x=x, y=alt.Y("median:Q", **y), color=colour, opacity=strong)
        .properties(name=f"lines_{axes.name}")
        .add_params(*selections),
        lost.encode(x=x, y=alt.Y("median:Q", **y), color=colour, opacity=strong),
        rule.encode(x=x, opacity=_opacity(hover, 0.25, 0.0), tooltip=tooltip, color=alt.ColorValue(style.INK))
        .properties(name=f"rules_{axes.name}")
        .add_params(hover),
    ]


def _colour(panel: Panel, legend_chars: int) -> alt.Color:
    labels = [line.label for line in panel.lines]
    n_disturbed = len(panel.disturbed)
    colours = [style.GREY] * (len(labels) - n_disturbed) + style.ramp(n_disturbed)
    longest = max((len(label) for label in labels), default=0)
    fits_one_row = sum(len(label) + 5 for label in labels) <= legend_chars
    legend = alt.Legend(
        orient="top",
        title=None,
        labelFontSize=11,
        columnPadding=9,
        offset=4,
        columns=len(labels) if fits_one_row else max(1, legend_chars // (longest + 5)),
        symbolStrokeWidth=2.5,
        symbolType="stroke",
        symbolOpacity=1,
    )
    return alt.Color("label:N", scale=alt.Scale(domain=labels, range=colours), legend=legend, sort=None)


def _opacity(selection: alt.Parameter, selected: float, other: float) -> alt.OpacityValue:
    """Returns the opacities of what is selected and of all else; Altair is slow to parse them if they are a dict."""
    condition = alt.when(selection).then(alt.value(selected)).to_dict()["condition"]
    return alt.OpacityValue(other, condition=condition)
