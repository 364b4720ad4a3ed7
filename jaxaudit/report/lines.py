"""Figures against the step: performance per condition, and channels aligned at the onset."""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from jaxaudit.analysis.run_reader import CONTROL, Run
from jaxaudit.core.channel_names import ACTING, PERFORMANCE_ERROR
from jaxaudit.report import style
from jaxaudit.report.panel import Axes, Figure, draw, pick, zoom
from jaxaudit.report.series import CONTROL_KEY, Panel, band_name, frame, thin

CHANNELS = {
    "x_grad": "x_grad: gradient coherence",
    "x_inst": "x_inst: instability index",
    "x_mem": "x_mem: persistence",
    "x_used": "x_used: gradient as used",
    ACTING: "acting performance",
    "gradient_norm": "gradient norm",
}


def mark_lost(data: pd.DataFrame, floor: float) -> pd.DataFrame:
    """Column `lost`: the last finite point of a median that turns non-finite; bands reach down to `floor`."""
    data = data.copy()
    gone = np.isneginf(data["median"].to_numpy())
    same = data["key"].eq(data["key"].shift(-1)).to_numpy()
    after = np.append(gone[1:], False) & same
    data["lost"] = np.where(~gone & after, 1.0, np.nan)
    low, high = data["low"].to_numpy(), data["high"].to_numpy()
    data["low"] = np.where(np.isneginf(low) & np.isfinite(high), floor, low)
    return data


def _threshold(run: Run, panel: Panel, name: str) -> tuple[list[alt.Chart], bool]:
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
    y = alt.Y("level:Q", title=name)
    return [rule.encode(x=alt.X("start:Q", title="step"), x2="end:Q", y=y)], True


def _subtitle(panel: Panel) -> str:
    if not panel.durations:
        return "undisturbed"
    lengths = " or ".join(str(d) for d in panel.durations)
    return f"{panel.dimension} · onset {panel.onset}, open {lengths} {'step' if lengths == '1' else 'steps'}"


def _title(panel: Panel) -> alt.TitleParams:
    return alt.TitleParams(panel.title if panel.perturbation != CONTROL else CONTROL, subtitle=_subtitle(panel))


def _spans(frames: list[pd.DataFrame]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """All drawn values, and those of the controls alone."""
    columns = ["median", "low", "high"]
    return [f[columns].to_numpy() for f in frames], [f.loc[f["key"] == CONTROL_KEY, columns].to_numpy() for f in frames]


def performance(run: Run, groups: list[Panel]) -> Figure:
    """Performance of every condition against the step, one panel per perturbation and onset."""
    window, horizon = run.setting("window", 50), run.setting("horizon", 500)
    frames = []
    for panel in groups:
        kept = thin(run.step, panel.onset, 2 * window)
        frames.append(frame(run, panel, run.performance, kept, lost_is_worst=not run.is_sparse("performance")))
    ends, cut = style.domain(*_spans(frames))
    scale = alt.Scale(domain=list(ends), nice=False, zero=False)
    name = str(run.telemetry.attrs.get("performance_name", "performance"))
    charts: list[Any] = []
    limits = False
    for place, (panel, data) in enumerate(zip(groups, frames, strict=True)):
        first = max(int(run.step[0]), panel.onset - 2 * window)
        last = min(int(run.step[-1]), panel.onset + max(panel.durations, default=0) + horizon)
        axes = Axes(
            False,
            name,
            (first, max(last, first + 1)),
            scale,
            zoom(f"zoom_{place}"),
            pick(f"pick_{place}"),
            f"{place}",
        )
        extra, drawn = _threshold(run, panel, name)
        limits |= drawn
        charts.append(draw(panel, mark_lost(data, ends[0]), axes, _title(panel), extra))
    chart = style.finish(charts, 3, shared=False, width=270, limit=560, gutter=76)
    return Figure("performance", "", chart, _performance_caption(run, cut, limits))


def _performance_caption(run: Run, cut: bool, limits: bool) -> str:
    band = band_name(run.seeds)
    unit = run.telemetry.attrs.get("step_unit")
    parts = [
        f"Line: median over {run.seeds} seeds; band: {band}." if band else "One seed: a line is one lane, no band.",
        "Grey: the undisturbed control. Dark rule: the onset; shaded: the steps the window is open.",
    ]
    if limits:
        parts.append("Dotted: the collapse threshold J_pre - 2 sigma_pre (median over seeds).")
    parts.append("A cross marks where the median turns non-finite; a lost seed counts as the worst.")
    if cut:
        parts.append("The vertical axis leaves out extreme values, so that the rest stays legible.")
    if len(run.step) > 400:
        parts.append("Every step near the onset is drawn where room allows, fewer of them far from it.")
    if unit and unit != "step":
        parts.append(f"One step is {unit}.")
    if (errors := run.channel(PERFORMANCE_ERROR)) is not None and np.isfinite(errors).any():
        parts.append(
            f"Each measurement is of a sample, with a standard error of {np.nanmedian(errors):.2g} (the median) beside "
            "the spread over seeds."
        )
    return " ".join(parts)


def channels(run: Run, groups: list[Panel]) -> list[Figure]:
    """The meta-state channels round the onset (step 0 = injection), one figure per perturbation and onset."""
    values = {title: v for name, title in CHANNELS.items() if (v := run.channel(name)) is not None}
    return aligned(run, groups, values, "channels")


def aligned(
    run: Run, groups: list[Panel], values: dict[str, np.ndarray], file: str, zeros: bool = False
) -> list[Figure]:
    """Series round the onset (step 0 = injection), one figure per perturbation and onset, a panel for each series.

    Args:
      run: the run.
      groups: its panels.
      values: `[seed, condition, step]` by title; those without a value, or that are all the same, are left out.
      file: what the figures' files begin with.
      zeros: whether a median of zero is to be seen, which has no place on a logarithmic axis.
    """
    values = {title: v for title, v in values.items() if np.isfinite(v).any()}
    found = []
    for place, panel in enumerate(groups):
        if not panel.disturbed:
            continue
        charts = _aligned(run, panel, values, f"{file}_{place}", zeros)
        if charts:
            chart = style.finish(charts, 4, shared=True, width=190, limit=440, gutter=70)
            subtitle = _subtitle(panel)
            found.append(Figure(f"{file}_{style.slug(panel.title)}", f"{panel.title} ({subtitle})", chart, ""))
    return found


def _aligned(run: Run, panel: Panel, values: dict[str, np.ndarray], mark: str, zeros: bool) -> list[Any]:
    window = run.setting("window", 50)
    first, last = -window, 3 * window + min(max(panel.durations), window)
    near = np.flatnonzero((run.step >= panel.onset + first) & (run.step <= panel.onset + last))
    kept = near[thin(run.step[near], panel.onset, window // 2, limit=160)]
    zooming, picking = zoom(f"zoom_{mark}"), pick(f"pick_{mark}")
    charts: list[Any] = []
    for title, block in values.items():
        lanes = block[:, [line.index for line in panel.lines]]
        if np.nanmin(lanes) == np.nanmax(lanes) or (title == CHANNELS[ACTING] and _as_performance(run, panel, lanes)):
            continue  # nothing to be seen
        data = frame(run, panel, block, kept)
        if not np.isfinite(data["median"]).any():
            continue
        data["step"] -= panel.onset
        data, scale = channel_scale(data, zeros)
        data["lost"] = np.nan
        heading = alt.TitleParams(title, fontSize=11.5, fontWeight="normal", color=style.MUTED)
        axes = Axes(True, None, (first, min(last, run.step[-1] - panel.onset)), scale,
                     zooming, picking, f"{mark}_{len(charts)}", owner=not charts)  # fmt: skip
        charts.append(draw(panel, data, axes, heading, []).properties(width=215, height=150))
    return charts


def _as_performance(run: Run, panel: Panel, acting: np.ndarray) -> bool:
    """Whether a panel's lanes act as well as they are worth, to the bit."""
    return np.array_equal(acting, run.performance[:, [line.index for line in panel.lines]], equal_nan=True)


def channel_scale(data: pd.DataFrame, zeros: bool = False) -> tuple[pd.DataFrame, alt.Scale]:
    """A linear axis without extremes; a logarithmic one for positive values over a wide range.

    With `zeros` it is linear where a median is zero.
    """
    columns = ["median", "low", "high"]
    x = data[columns].to_numpy()
    finite = x[np.isfinite(x)]
    hidden = zeros and bool((data["median"] == 0).any())
    if not hidden and (finite >= 0).all() and (positive := finite[finite > 0]).size:
        low, high = np.quantile(positive, (0.02, 0.98))
        if high > 30 * low:
            data[columns] = np.where(x > 0, x, np.nan)
            return data, alt.Scale(type="log", domain=[0.9 * positive.min(), 1.1 * positive.max()], nice=False)
    ends, _ = style.domain(*_spans([data]))
    return data, alt.Scale(domain=list(ends), nice=False, zero=False)
