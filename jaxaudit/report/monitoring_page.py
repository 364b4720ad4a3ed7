"""The report page of runs that a monitor has scored."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
import xarray as xr
from markupsafe import Markup

from jaxaudit.analysis.run_reader import read_table
from jaxaudit.monitoring.scoring import false_alarm_interval, min_calibration_runs
from jaxaudit.report import line_panels, page, score_figures, style
from jaxaudit.runtime import array_store
from jaxaudit.runtime.files import read_object

ABOUT = "monitored.json"

MAX_RUNS = 6
"""The most runs that are drawn as coloured lines."""

MAX_CHANNELS = 6
"""The most channels whose values are drawn."""

MAX_MAPPED_RUNS, MAX_MAPPED_CHANNELS, MAX_BINS = 4, 20, 90
"""The most runs, channels, and ranges of steps in the map of distances."""

DARKEST_DISTANCE = 10.0
"""The distance, in standard deviations, from which on the map's colour is the darkest."""

MAX_SENTENCES = 8
"""The most alarms that have a sentence of their own."""

KINDS_WITHOUT_SCORE = ("not finite", "silent")
"""The kinds of alarms that do not depend on a score."""

ALARMS_HINT = Markup("Click a heading to sort. Exact values: <code>alarms.csv</code>.")


def build(folder: Path) -> Path:
    """Writes `report.html`, `figures/*.svg` and `figures/*.png` for monitored runs, and returns the page's path."""
    about = read_object(folder / ABOUT)
    threshold = float(about.get("threshold", np.nan))
    store = folder / "monitored.zarr"
    data = None
    if store.exists():
        array_store.check(store)
        data = array_store.open_dataset(store)
    alarms = _read_alarms(folder)
    runs = [str(name) for name in about.get("runs", [])]
    runs = runs or ([] if data is None else [str(name) for name in data["run"].values])
    alarm_steps = {row["run"]: int(row["step"]) for _, row in alarms.iterrows()}
    figures = {} if data is None else _figures(data, threshold, alarm_steps)
    score = figures.get("score")
    return page.Page(
        kicker="Monitored",
        heading=runs[0] if len(runs) == 1 else f"{len(runs)} runs",
        summary=_summary(about, runs, alarms, threshold),
        sections=[
            page.section("monitoring", "score", *([page.INTERACTION, score] if score else [])),
            page.section(
                "monitoring", "alarms", *([] if alarms.empty else [ALARMS_HINT, _alarm_table(alarms, threshold)])
            ),
            *(page.section("monitoring", id, figures.get(id)) for id in ("distance", "values", "latents")),
            page.Section(
                "about",
                "",
                "",
                "",
                [
                    page.collapsed_list("Runs", runs if len(runs) > 1 else None),
                    page.collapsed_list("Channels", about.get("channels")),
                ],
            ),
        ],
        glossary=page.glossary("monitoring"),
    ).write(folder)


def _read_alarms(folder: Path) -> pd.DataFrame:
    """Returns the first alarm of every run that has one, by step, with run, step, score, kind and channels."""
    columns = ["run", "step", "score", "kind", "channels"]
    alarms = read_table(folder / "alarms.csv", ("run", "kind", "channels"))
    alarms = pd.DataFrame(columns=columns) if alarms is None else alarms.reindex(columns=columns)
    alarms = alarms[np.isfinite(alarms["step"].astype(float))].sort_values("step", kind="stable")
    return alarms.fillna({"kind": "", "channels": ""})


def _summary(about: dict[str, Any], runs: Sequence[str], alarms: pd.DataFrame, threshold: float) -> page.Summary:
    total, n_alarms = len(runs), len(alarms)
    sentences = [_alarm_sentence(row, threshold) for _, row in alarms.iterrows()]
    if not n_alarms:
        lead = Markup("No alarm in {}.").format("the run" if total == 1 else f"{total} runs")
    elif total == 1:
        lead = sentences.pop(0)
    else:
        lead = Markup("An alarm in {} of {} runs.").format("all" if n_alarms == total else n_alarms, total)
    alpha = about.get("alpha")
    if about.get("attempts"):
        lead += Markup(" A restart from a checkpoint begins a new attempt, and each attempt is judged separately.")
    if isinstance(alpha, int | float):
        lead += _false_alarm_text(float(alpha), about.get("calibrated_on"))
    if len(sentences) > MAX_SENTENCES:
        more = len(sentences) - MAX_SENTENCES
        sentences = [*sentences[:MAX_SENTENCES], Markup("The table lists {} further alarms.").format(more)]
    labels = {"clean_runs": "clean runs", "calibrated_on": "of which for calibration"}
    keys = [("runs", f"{total}"), ("with an alarm", f"{n_alarms}")]
    keys += [(label, f"{about[key]}") for key, label in labels.items() if key in about]
    keys += [("alpha", page.number(float(alpha)))] if alpha is not None else []
    keys += [("threshold", page.number(threshold, digits=3))] if np.isfinite(threshold) else []
    keys += [("channels", f"{len(about['channels'])}")] if "channels" in about else []
    return page.Summary(lead, sentences, about.get("notes") or (), keys)


def _false_alarm_text(alpha: float, calibrated_on: int | None) -> Markup:
    """Returns a sentence on the share of clean runs that have a false alarm: on average at most `alpha`.

    It adds the interval of the share for nine in ten sets of `calibrated_on` calibration runs, unless that number is
    None or too small for `alpha`.
    """
    text = Markup(" False alarms occur in at most {}% of clean runs on average").format(
        page.number(100 * alpha, digits=3)
    )
    if calibrated_on is None or calibrated_on < min_calibration_runs(alpha):
        return text + Markup(".")
    low, high = (page.number(100 * rate, digits=2) for rate in false_alarm_interval(calibrated_on, alpha))
    return text + Markup("; for nine in ten sets of {} calibration runs, in {}% to {}%.").format(
        calibrated_on, low, high
    )


def _alarm_sentence(row: pd.Series, threshold: float) -> Markup:
    text = Markup("<b>{}</b>: alarm at step {}").format(row["run"], int(row["step"]))
    if row["kind"] in KINDS_WITHOUT_SCORE:
        return text + Markup(": {}.").format(row["channels"])
    excess = row["score"] - threshold
    if excess == np.inf:
        text += Markup(", because a value is missing that every clean run has")
    elif np.isfinite(excess):
        text += Markup(", {} above the threshold").format(page.number(excess, digits=2))
    if row["channels"]:
        text += Markup("; furthest from the clean runs, in standard deviations: {}").format(row["channels"])
    return text + Markup(".")


def _alarm_table(alarms: pd.DataFrame, threshold: float) -> page.Table:
    formatter = partial(page.number, digits=3)
    columns = [
        page.text_column("run"),
        page.text_column("kind", "statistic"),
        page.number_column("step", "first alarm (step)", formatter),
        page.number_column("score", "score at the alarm", formatter),
        page.number_column("excess", "above the threshold", formatter),
        page.text_column("channels", "furthest channels (standard deviations)"),
    ]
    return page.table(alarms.assign(excess=alarms["score"] - threshold), columns, look="sortable roomy")


def _figures(data: xr.Dataset, threshold: float, alarm_steps: dict[str, int]) -> dict[str, page.Figure]:
    """Returns the figures of all stored variables, by the id of their section.

    Args:
      data: the stored series.
      threshold: the score above which there is an alarm.
      alarm_steps: the step of the first alarm, by run.
    """
    if not len(score_figures.steps(data)) or not data.sizes.get("run"):
        return {}
    ranked_runs = _by_peak_score(data)
    ranked_channels = _by_peak_distance(data, ranked_runs[:MAX_RUNS])
    figures = {
        "score": _score_figure(data, ranked_runs, threshold, alarm_steps),
        "distance": _distance_map(data, ranked_runs, ranked_channels),
        "values": _values_figure(data, ranked_runs, ranked_channels, alarm_steps),
        "latents": _latent_figure(data, ranked_runs, alarm_steps),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def _by_peak_score(data: xr.Dataset) -> list[int]:
    score = score_figures.variable(data, "score", "run", "step")
    if score is None:
        return list(range(data.sizes["run"]))
    return _descending(np.where(np.isnan(score), -np.inf, score).max(axis=1))


def _by_peak_distance(data: xr.Dataset, runs: list[int]) -> list[int]:
    """Returns the channels by their largest distance from the clean runs, averaged over ranges of steps."""
    distance = score_figures.variable(data, "distance", "run", "channel", "step")
    if distance is None:
        return list(range(data.sizes.get("channel", 0)))
    means, _, _ = _binned(data, np.abs(distance[runs]))
    return _descending(np.where(np.isnan(means), -np.inf, means).max(axis=(0, 2)))


def _descending(values: np.ndarray) -> list[int]:
    return [int(i) for i in np.argsort(-values, kind="stable")]


def _binned(data: xr.Dataset, distance: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns means over ranges of steps, `[..., bins]`, and the steps at which the ranges begin and end."""
    step = score_figures.steps(data)
    edges = np.unique(np.linspace(0, len(step), min(MAX_BINS, len(step)) + 1).round().astype(int))
    bins = [distance[..., first:last] for first, last in pairwise(edges)]
    counts = [np.sum(~np.isnan(values), axis=-1) for values in bins]
    means = [np.nansum(values, axis=-1) / np.where(n, n, np.nan) for values, n in zip(bins, counts, strict=True)]
    return np.stack(means, axis=-1), step[edges[:-1]], np.append(step[edges[1:-1]], step[-1] + 1)


def _highest_lines(data: xr.Dataset, ranked: Sequence[int]) -> list[line_panels.PlotLine]:
    """Returns the lines of the runs with the highest scores, the highest of which comes last."""
    names = score_figures.names_along(data, "run")
    return [
        line_panels.PlotLine(run, f"m{rank}", names[run], float("nan"))
        for rank, run in enumerate(reversed(ranked[:MAX_RUNS]))
    ]


def _panel(lines: Sequence[line_panels.PlotLine]) -> line_panels.Panel:
    return line_panels.Panel("", "", "", 0, (), tuple(lines), float("-inf"))


def _step_span(data: xr.Dataset) -> tuple[int, int]:
    step = score_figures.steps(data)
    return int(step[0]), max(int(step[-1]), int(step[0]) + 1)


def _select_steps(data: xr.Dataset, alarm_steps: dict[str, int], limit: int) -> np.ndarray:
    """Returns the indices of the steps to draw, which are dense near the first alarm."""
    step = score_figures.steps(data)
    centre = min(alarm_steps.values(), default=int(step[len(step) // 2]))
    return line_panels.select_steps(step, centre, len(step) // 10, limit)


def _line_frame(
    data: xr.Dataset, block: np.ndarray, lines: Sequence[line_panels.PlotLine], selected: np.ndarray
) -> pd.DataFrame:
    """Returns series `[run, T]` as `line_panels.line_frame` does, without bands."""
    step = score_figures.steps(data)[selected]
    parts = [line_panels.line_rows(line, step, block[line.index, selected]) for line in lines]
    return pd.concat(parts, ignore_index=True)


def _score_figure(
    data: xr.Dataset, ranked: list[int], threshold: float, alarm_steps: dict[str, int]
) -> page.Figure | None:
    score = score_figures.variable(data, "score", "run", "step")
    if score is None or np.isnan(score).all():
        return None
    lines = _highest_lines(data, ranked)
    frame = _line_frame(data, score, lines, _select_steps(data, alarm_steps, 500))
    frame, scale, threshold_layers, is_cut = score_figures.score_scale(frame, threshold)
    other_layers = _other_runs(data, score, ranked[MAX_RUNS:])
    alarm_layers = _alarm_layers(data, score, alarm_steps, float(scale["domain"][1]))
    axes = line_panels.Axes(False, "score", _step_span(data), scale, "0", 0, legend_chars=170)
    layers = [*other_layers, *threshold_layers, *alarm_layers]
    chart = line_panels.draw(_panel(lines), frame, axes, "", layers, width=860, height=260)
    parts = ["Dotted: the threshold. Diamond: a run's first alarm."]
    parts.append("A wide range has a logarithmic axis, which is linear around zero.")
    if other_layers:
        parts.append(
            f"Coloured: the {MAX_RUNS} runs with the highest scores; grey: the other {len(ranked) - MAX_RUNS}."
        )
    if is_cut:
        parts.append("The axis leaves out the lowest scores; a cross at the edge marks where one becomes infinite.")
    finished = style.finish([chart], 1, shared=False, min_width=300, max_width=1120, gutter=60)
    return page.Figure("score", "", finished, " ".join(parts))


def _alarm_layers(data: xr.Dataset, score: np.ndarray, alarm_steps: dict[str, int], top: float) -> list[alt.Chart]:
    """Returns the diamonds at the first alarms, those of infinite scores at the upper end `top` of the axis."""
    step, names = score_figures.steps(data), score_figures.names_along(data, "run")
    marks: list[dict[str, Any]] = [
        {"step": alarm, "score": min(float(score[names.index(run), np.searchsorted(step, alarm)]), top), "run": run}
        for run, alarm in alarm_steps.items()
        if run in names and step[0] <= alarm <= step[-1]
    ]
    if not marks:
        return []
    values = [mark for mark in marks if mark["score"] <= top]  # which leaves out NaN
    diamond = alt.Chart(alt.InlineData(values=values)).mark_point(
        shape="diamond", filled=True, size=110, color=style.INK, opacity=1
    )
    tooltip = [alt.Tooltip("run:N"), alt.Tooltip("step:Q", title="first alarm")]
    return [diamond.encode(x=alt.X("step:Q"), y=alt.Y("score:Q"), tooltip=tooltip)]


def _other_runs(data: xr.Dataset, score: np.ndarray, runs: Sequence[int]) -> list[alt.Chart]:
    """Returns thin grey lines of the runs that have no coloured line."""
    if not runs:
        return []
    selected = np.unique(np.linspace(0, score.shape[1] - 1, 150).round().astype(int))
    step = score_figures.steps(data)[selected]
    parts = [pd.DataFrame({"step": step, "run": run, "score": score[run, selected]}) for run in runs]
    base = alt.Chart(style.inline_csv(pd.concat(parts, ignore_index=True)))
    line = base.mark_line(color=style.GREY, strokeWidth=0.7, opacity=0.6, clip=True)
    return [line.encode(x=alt.X("step:Q"), y=alt.Y("score:Q"), detail=alt.Detail("run:N"))]


def _distance_map(data: xr.Dataset, ranked_runs: list[int], ranked_channels: list[int]) -> page.Figure | None:
    """Returns maps of channel by step with the distance from the clean runs, for the runs with the highest scores."""
    distance = score_figures.variable(data, "distance", "run", "channel", "step")
    if distance is None or np.isnan(distance).all():
        return None
    names, runs = score_figures.names_along(data, "channel"), score_figures.names_along(data, "run")
    means, begin, end = _binned(data, np.abs(distance))
    channels, mapped = ranked_channels[:MAX_MAPPED_CHANNELS], ranked_runs[:MAX_MAPPED_RUNS]
    labels = [names[i] for i in channels]
    largest = float(np.max(means[mapped], where=np.isfinite(means[mapped]), initial=4.0))
    darkest = min(largest, DARKEST_DISTANCE)
    charts = [
        _map(means[run][channels], labels, begin, end, darkest, runs[run] if len(runs) > 1 else "") for run in mapped
    ]
    parts = [
        "Mean distance from the clean runs at the same step, in their standard deviations. The channels that moved"
    ]
    n_channels = "" if len(channels) == len(ranked_channels) else f" ({len(channels)} of {len(ranked_channels)})"
    parts.append(f"most come first{n_channels}.")
    if len(mapped) < len(runs):
        parts.append(f"The {len(mapped)} runs with the highest scores.")
    if largest > DARKEST_DISTANCE:
        parts.append(f"Distances above {DARKEST_DISTANCE:g} have the darkest colour.")
    gutter = round(min(250, 6.6 * max(map(len, labels)))) + 30
    chart = style.finish(charts, 2, shared=True, min_width=260, max_width=1000, gutter=gutter)
    return page.Figure("distance", "", chart, " ".join(parts))


def _map(
    means: np.ndarray, labels: Sequence[str], begin: np.ndarray, end: np.ndarray, darkest: float, title: str
) -> Any:
    # A range of steps reaches a little under the next one, so that no seam shows between them.
    overlapping_end = np.minimum(end + 0.25 * (end - begin), end[-1])
    rows = pd.DataFrame(
        {
            "channel": np.repeat(labels, len(begin)),
            "begin": np.tile(begin, len(labels)),
            "end": np.tile(overlapping_end, len(labels)),
            "distance": np.where(np.isposinf(means), 1e6, means).ravel(),
        }
    )
    x = alt.X("begin:Q", title="step", scale=alt.Scale(domain=[int(begin[0]), int(end[-1])], nice=False),
              axis=alt.Axis(grid=False))  # fmt: skip
    y = alt.Y("channel:N", title=None, sort=list(labels), axis=alt.Axis(
        labelLimit=250, domain=False, labelPadding=6, ticks=False, labelColor=style.INK,
        labelOverlap=False))  # fmt: skip
    legend = alt.Legend(title="standard deviations", orient="bottom", gradientLength=160, gradientThickness=8)
    scale = alt.Scale(domain=[0, darkest], range=list(style.SHARE), clamp=True)
    tooltip = [
        alt.Tooltip("channel:N"),
        alt.Tooltip("begin:Q", title="from step"),
        alt.Tooltip("distance:Q", format=".3~g"),
    ]
    colour = alt.Color("distance:Q", scale=scale, legend=legend)
    rectangle = alt.Chart().mark_rect().encode(x=x, x2=alt.X2("end:Q"), y=y, color=colour, tooltip=tooltip)
    data = style.inline_csv(rows[rows["distance"].notna()])
    return alt.layer(rectangle, data=data).properties(width=380, height=alt.Step(16), title=title)


def _values_figure(
    data: xr.Dataset, ranked_runs: list[int], ranked_channels: list[int], alarm_steps: dict[str, int]
) -> page.Figure | None:
    """Returns the values of the channels that moved most, over the band of the clean runs."""
    block = score_figures.variable(data, "values", "run", "channel", "step")
    if block is None:
        return None
    clean = score_figures.variable(data, "clean_values", "channel", "step", "quantile")
    runs = _highest_lines(data, ranked_runs)
    lines = [
        *([] if clean is None else [line_panels.PlotLine(0, line_panels.CONTROL_KEY, "clean runs", float("nan"))]),
        *runs,
    ]
    names, selected = score_figures.names_along(data, "channel"), _select_steps(data, alarm_steps, 300)
    charts: list[Any] = []
    for channel in ranked_channels[:MAX_CHANNELS]:
        frame = _line_frame(data, block[:, channel], runs, selected)
        if clean is not None:
            low, median, high = clean[channel, selected].T
            band = line_panels.line_rows(lines[0], score_figures.steps(data)[selected], median, low, high)
            frame = pd.concat([band, frame], ignore_index=True)
        if not np.isfinite(frame["median"]).any():
            continue
        frame, scale = line_panels.channel_scale(frame)
        frame = score_figures.place_at_edge(frame, float(scale["domain"][1]))
        axes = line_panels.Axes(False, None, _step_span(data), scale, "0", len(charts), legend_chars=170)
        title = line_panels.small_title(names[channel][:48])
        charts.append(line_panels.draw(_panel(lines), frame, axes, title, [], width=270, height=150))
    if not charts:
        return None
    caption = "Grey: median of the clean runs and their 10% to 90% range. " if clean is not None else ""
    caption += "Positive values over a wide range have a logarithmic axis."
    chart = style.finish(charts, 3, shared=True, min_width=220, max_width=520, gutter=66)
    return page.Figure("values", "", chart, caption)


def _latent_figure(data: xr.Dataset, ranked: list[int], alarm_steps: dict[str, int]) -> page.Figure | None:
    paths = score_figures.variable(data, "latent", "run", "step", "component")
    if paths is None or paths.shape[-1] < 2:
        return None
    clean = score_figures.variable(data, "clean_latent", "step", "component", "quantile")
    lines = [
        line for line in reversed(_highest_lines(data, ranked)) if np.isfinite(paths[line.index]).all(axis=1).any()
    ]
    panels = []
    for line, colour in zip(lines, reversed(style.ramp(len(lines))), strict=True):
        alarm = alarm_steps.get(line.label)
        start = 0 if alarm is None else int(np.searchsorted(score_figures.steps(data), alarm))
        subtitle = "no alarm" if alarm is None else f"alarm at step {alarm}"
        panels.append(score_figures.LatentPanel([paths[line.index, :, :2]], start, colour, line.label, subtitle))
    if not panels:
        return None
    caption = (
        "Thin grey line: the run before its alarm. Coloured: from the alarm on, or the whole run if it has none. Ring: "
        "where the colour begins."
    )
    return score_figures.latent_figure("latent", None if clean is None else clean[:, :2], panels, caption)
