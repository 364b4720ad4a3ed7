"""The page of runs that a monitor has watched."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
import xarray as xr
from markupsafe import Markup

from jaxaudit.analysis.run_reader import table as stored
from jaxaudit.monitoring.scoring import false_alarm_interval, min_calibration_runs
from jaxaudit.report import lines, scored, style
from jaxaudit.report.page import HANDLING, Page, Section, Summary, listing
from jaxaudit.report.panel import Axes, Figure, draw, pick, zoom
from jaxaudit.report.scored import at_edge, distance_map, furthest, names_of, score_scale, steps, values
from jaxaudit.report.series import CONTROL_KEY, Panel, PlotLine, thin
from jaxaudit.report.tables import Table, figures, number, table, word
from jaxaudit.runtime import zarr_store
from jaxaudit.runtime.files import read_object

PICKED = 6
"""Most runs with a line of their own."""

DRAWN = 6
"""Most channels whose values are drawn."""


def all_of(seen: xr.Dataset, threshold: float, starts: dict[str, int]) -> dict[str, Figure]:
    """Every figure there are values for.

    Args:
      seen: stored series of runs.
      threshold: of the score.
      starts: the step of the first alarm, by run.
    """
    if not len(steps(seen)) or not seen.sizes.get("run"):
        return {}
    ranked = _ranked(seen)
    moved = furthest(seen, ranked[:PICKED])
    found = {
        "score": _score(seen, ranked, threshold, starts),
        "distance": distance_map(seen, ranked, moved),
        "moved": _values(seen, ranked, moved, starts),
        "latents": _latents(seen, ranked, starts),
    }
    return {name: figure for name, figure in found.items() if figure is not None}


def _ranked(seen: xr.Dataset) -> list[int]:
    score = values(seen, "score", "run", "step")
    if score is None:
        return list(range(seen.sizes["run"]))
    peak = np.where(np.isnan(score), -np.inf, score).max(axis=1)
    return [int(run) for run in np.argsort(-peak, kind="stable")]


def _shown(seen: xr.Dataset, ranked: Sequence[int]) -> list[PlotLine]:
    """The runs with the highest scores, the highest last."""
    names = names_of(seen, "run")
    picked = ranked[:PICKED][::-1]
    return [PlotLine(run, f"m{rank}", names[run], float("nan")) for rank, run in enumerate(picked)]


def _panel(shown: Sequence[PlotLine]) -> Panel:
    return Panel("", "", "", 0, (), tuple(shown), float("-inf"))


def _span(seen: xr.Dataset) -> tuple[int, int]:
    step = steps(seen)
    return int(step[0]), max(int(step[-1]), int(step[0]) + 1)


def _kept(seen: xr.Dataset, starts: dict[str, int], limit: int) -> np.ndarray:
    """Places of the steps to draw, every one of them near the first alarm."""
    step = steps(seen)
    centre = min(starts.values(), default=int(step[len(step) // 2]))
    return thin(step, centre, len(step) // 10, limit)


def _lines(seen: xr.Dataset, block: np.ndarray, shown: Sequence[PlotLine], kept: np.ndarray) -> pd.DataFrame:
    """Runs `[run, T]` in long form, without bands."""
    step = steps(seen)[kept]
    parts = [
        pd.DataFrame({"step": step, "key": line.key, "label": line.label, "median": block[line.index, kept]})
        for line in shown
    ]
    return pd.concat(parts, ignore_index=True).assign(low=np.nan, high=np.nan)


def _score(seen: xr.Dataset, ranked: list[int], threshold: float, starts: dict[str, int]) -> Figure | None:
    score = values(seen, "score", "run", "step")
    if score is None or np.isnan(score).all():
        return None
    shown, names = _shown(seen, ranked), names_of(seen, "run")
    data, scale, extra, cut = score_scale(_lines(seen, score, shown, _kept(seen, starts, 500)), threshold)
    top = float(scale["domain"][1])
    others = _others(seen, score, ranked[PICKED:])
    step = steps(seen)
    marks: list[dict[str, Any]] = [
        {"step": at, "score": min(float(score[names.index(run), np.searchsorted(step, at)]), top), "run": run}
        for run, at in starts.items()
        if run in names and step[0] <= at <= step[-1]
    ]
    alarm = alt.Chart(alt.InlineData(values=[mark for mark in marks if mark["score"] <= top])).mark_point(
        shape="diamond", filled=True, size=110, color=style.INK, opacity=1
    )
    tips = [alt.Tooltip("run:N"), alt.Tooltip("step:Q", title="first alarm")]
    axes = Axes(False, "score", _span(seen), scale, zoom("zoom_0"), pick("pick_0"), "0", letters=170)
    layers = [*others, *extra, *([alarm.encode(x=alt.X("step:Q"), y=alt.Y("score:Q"), tooltip=tips)] if marks else [])]
    chart = draw(_panel(shown), data, axes, "", layers).properties(width=860, height=260)
    parts = [
        "Dotted: the threshold. Diamond: a run's first alarm. A wide range has a logarithmic axis, linear about zero."
    ]
    if others:
        parts.append(f"In colour the {PICKED} runs with the highest scores, in grey the other {len(ranked) - PICKED}.")
    if cut:
        parts.append("The axis leaves out the lowest scores; a cross marks where one turns infinite, at the edge.")
    finished = style.finish([chart], 1, shared=False, width=300, limit=1120, gutter=60)
    return Figure("score", "", finished, " ".join(parts))


def _others(seen: xr.Dataset, score: np.ndarray, runs: Sequence[int]) -> list[alt.Chart]:
    """Thin grey lines of runs without one of their own."""
    if not runs:
        return []
    kept = np.unique(np.linspace(0, score.shape[1] - 1, 150).round().astype(int))
    parts = [pd.DataFrame({"step": steps(seen)[kept], "run": run, "score": score[run, kept]}) for run in runs]
    base = alt.Chart(style.table(pd.concat(parts, ignore_index=True)))
    line = base.mark_line(color=style.GREY, strokeWidth=0.7, opacity=0.6, clip=True)
    return [line.encode(x=alt.X("step:Q"), y=alt.Y("score:Q"), detail=alt.Detail("run:N"))]


def _values(seen: xr.Dataset, ranked: list[int], moved: list[int], starts: dict[str, int]) -> Figure | None:
    """The values of the channels that moved most, over the clean runs' band."""
    block = values(seen, "values", "run", "channel", "step")
    if block is None:
        return None
    clean = values(seen, "clean_values", "channel", "step", "quantile")
    shown = _shown(seen, ranked)
    calm = [] if clean is None else [PlotLine(0, CONTROL_KEY, "clean runs", float("nan"))]
    channels, kept = names_of(seen, "channel"), _kept(seen, starts, 300)
    zooming, picking = zoom("zoom_0"), pick("pick_0")
    charts: list[Any] = []
    for channel in moved[:DRAWN]:
        data = _lines(seen, block[:, channel], shown, kept)
        if clean is not None:
            low, median, high = clean[channel, kept].T
            band = {"step": steps(seen)[kept], "key": CONTROL_KEY, "label": "clean runs", "median": median}
            data = pd.concat([pd.DataFrame({**band, "low": low, "high": high}), data], ignore_index=True)
        if not np.isfinite(data["median"]).any():
            continue
        data, scale = lines.channel_scale(data)
        data = at_edge(data, float(scale["domain"][1]))
        heading = alt.TitleParams(channels[channel][:48], fontSize=11.5, fontWeight="normal", color=style.MUTED)
        axes = Axes(
            False, None, _span(seen), scale, zooming, picking, f"0_{len(charts)}", owner=not charts, letters=170
        )
        charts.append(draw(_panel([*calm, *shown]), data, axes, heading, []).properties(width=270, height=150))
    if not charts:
        return None
    caption = "Grey: median of clean runs and their 10% to 90% range. " if clean is not None else ""
    caption += "Wide positive ranges have a logarithmic axis."
    return Figure("values", "", style.finish(charts, 3, shared=True, width=220, limit=520, gutter=66), caption)


def _latents(seen: xr.Dataset, ranked: list[int], starts: dict[str, int]) -> Figure | None:
    paths = values(seen, "latent", "run", "step", "component")
    if paths is None or paths.shape[-1] < 2:
        return None
    clean = values(seen, "clean_latent", "step", "component", "quantile")
    shown = [line for line in _shown(seen, ranked)[::-1] if np.isfinite(paths[line.index]).all(axis=1).any()]
    colours = style.ramp(len(shown))[::-1] if shown else []
    panels = []
    for line, colour in zip(shown, colours, strict=True):
        since = int(np.searchsorted(steps(seen), starts.get(line.label, steps(seen)[0])))
        told = f"alarm at step {starts[line.label]}" if line.label in starts else "no alarm"
        calm = None if clean is None else clean[:, :2]
        panels.append(scored.panel(calm, [paths[line.index, :, :2]], since, colour, line.label, told))
    words = "Thin grey: the run before its alarm; colour: from it on, or the whole of a run without one. Ring: where "
    return scored.figure("latent", panels, f"{words}the colour begins;") if panels else None


ABOUT = "monitored.json"

MOST = 8
"""Alarms that have a sentence of their own."""

FIRST = Markup(
    "The first alarm of every run that has one. Click a heading to sort. Exact values: <code>alarms.csv</code>."
)

CERTAIN = ("not finite", "silent")
"""Kinds of alarms that need no score."""

GLOSSARY = [
    ("clean run", "A training that nothing disturbs. The monitor is fitted to some and calibrated on others."),
    (
        "score",
        "What the monitor says of every step, from that step and those before: the most unusual of its statistics, on "
        "a common scale. Higher is more unusual.",
    ),
    (
        "threshold, alpha",
        "An alarm is a score above the threshold, which is set so that a further clean run has one at any step with a "
        "probability of at most alpha, on average over the clean runs it might have been calibrated on. With those it "
        "was, the probability is some value about that: the fewer they are, the further it may be off.",
    ),
    (
        "distance",
        "How far a channel is from the mean of the clean runs at the same step, in their standard deviations.",
    ),
    (
        "latent",
        "The state of the monitor's model, of charts the standardised telemetry itself; here in the two directions in "
        "which it varies most.",
    ),
    (
        "not finite, silent",
        "Alarms without a score: a value that is NaN, infinite or a text, where clean runs have numbers; and a channel "
        "without a value for longer than in any clean run, while others go on.",
    ),
    (
        "innovation",
        "The part of a value that was not expected: by a model, or by a linear prediction from the step before.",
    ),
    ("surprise", "Statistic: how large innovations have been of late, over all channels."),
    ("burst", "Statistic: the largest innovation of a channel, beside those of the other channels at the same step."),
    (
        "spread_z, spread_e, spread_h",
        "Statistic: how far the fluctuations of a channel are from those of clean runs, larger or smaller: of its "
        "distance (z), of its innovation (e), of its innovation beside those of the other channels (h).",
    ),
    ("dynamics", "Statistic: how much innovations depend on the step before, as where a channel reacts faster."),
    ("shift", "Statistic: how far all channels together have moved to one side of what the model expected."),
    ("departure", "Statistic: distance of the telemetry from the clean runs at the same step, over all channels."),
    ("outlier", "Statistic: the same, of the furthest channel."),
    ("deviation", "Statistic: meta-state deviation, the whitened distance of the latent from the clean runs'."),
    ("_0.1, _1, ...", "The rate of a statistic's moving average; at 1 it is of the step alone."),
]


def is_here(folder: Path) -> bool:
    """Whether a folder is one of monitored runs."""
    return (folder / ABOUT).exists()


def build(folder: Path) -> Path:
    """Write `report.html` and `figures/*.svg|png` for monitored runs, from what is stored; the page's path."""
    about = read_object(folder / ABOUT)
    threshold = float(about.get("threshold", np.nan))
    store = folder / "monitored.zarr"
    seen = None
    if store.exists():
        zarr_store.check(store)
        seen = zarr_store.open_dataset(store)
    alarms = _alarms(folder)
    runs = [str(name) for name in about.get("runs", [])]
    runs = runs or ([] if seen is None else [str(name) for name in seen["run"].values])
    starts = {row["run"]: int(row["step"]) for _, row in alarms.iterrows()}
    drawn = {} if seen is None else all_of(seen, threshold, starts)
    score = drawn.get("score")
    return Page(
        kicker="Monitored",
        heading=runs[0] if len(runs) == 1 else f"{len(runs)} runs",
        summary=_summary(about, runs, alarms, threshold),
        sections=[
            Section("score", "Score and alarms", "Score", [HANDLING, score] if score else []),
            Section("alarms", "Alarms", "Alarms", [] if alarms.empty else [FIRST, _table(alarms, threshold)]),
            Section("distance", "What moved, and when", "What moved", [drawn.get("distance")]),
            Section("values", "The channels that moved most", "Values", [drawn.get("moved")]),
            Section("latents", "Latent trajectory", "Latent trajectory", [drawn.get("latents")]),
            Section(
                "about",
                "",
                "",
                [listing("Runs", runs if len(runs) > 1 else None), listing("Channels", about.get("channels"))],
            ),
        ],
        glossary=GLOSSARY,
    ).write(folder)


def _alarms(folder: Path) -> pd.DataFrame:
    """A row for each run with an alarm: run, step, score, kind, channels."""
    alarms = stored(folder / "alarms.csv", ("run", "kind", "channels"))
    columns = ["run", "step", "score", "kind", "channels"]
    alarms = pd.DataFrame(columns=columns) if alarms is None else alarms.reindex(columns=columns)
    alarms = alarms[np.isfinite(alarms["step"].astype(float))].sort_values("step", kind="stable")
    return alarms.fillna({"kind": "", "channels": ""})


def _summary(about: dict[str, Any], runs: Sequence[str], alarms: pd.DataFrame, threshold: float) -> Summary:
    """Which runs have an alarm, how often a clean run would, and what there is to know besides."""
    total, hit = len(runs), len(alarms)
    told = [_sentence(row, threshold) for _, row in alarms.iterrows()]
    if not hit:
        lead = Markup("No alarm in {}.").format("the run" if total == 1 else f"{total} runs")
    elif total == 1:
        lead = told.pop(0)
    else:
        lead = Markup("An alarm in {} of {} runs.").format("all" if hit == total else hit, total)
    alpha = about.get("alpha")
    if about.get("attempts"):
        lead += Markup(" A restart from a checkpoint begins an attempt, and each has a verdict of its own.")
    if isinstance(alpha, int | float):
        lead += _false_alarms(float(alpha), about.get("calibrated_on"))
    if len(told) > MOST:
        told = [*told[:MOST], Markup("Further alarms: {}, in the table.").format(len(told) - MOST)]
    known = {"clean runs": "clean_runs", "of them to calibrate on": "calibrated_on"}
    keys = [("runs", f"{total}"), ("with an alarm", f"{hit}")]
    keys += [(label, f"{about[key]}") for label, key in known.items() if key in about]
    keys += [("alpha", number(float(alpha)))] if alpha is not None else []
    keys += [("threshold", number(threshold, digits=3))] if np.isfinite(threshold) else []
    keys += [("channels", f"{len(about['channels'])}")] if "channels" in about else []
    return Summary(lead, told, about.get("notes") or (), keys)


def _false_alarms(alpha: float, calibrated_on: int | None) -> Markup:
    """What share of clean runs has an alarm: on average over sets to calibrate on, and with one of this size."""
    text = Markup(" False alarms come in at most {}% of clean runs on average").format(number(100 * alpha, digits=3))
    if calibrated_on is None or calibrated_on < min_calibration_runs(alpha):
        return text + Markup(".")
    low, high = (number(100 * rate, digits=2) for rate in false_alarm_interval(calibrated_on, alpha))
    return text + Markup("; with {} to calibrate on, in {}% to {}% (nine sets of them in ten).").format(
        calibrated_on, low, high
    )


def _sentence(row: pd.Series, threshold: float) -> Markup:
    beyond = row["score"] - threshold
    text = Markup("<b>{}</b>: alarm at step {}").format(row["run"], int(row["step"]))
    if row["kind"] in CERTAIN:
        return text + Markup(": {}.").format(row["channels"])
    if beyond == np.inf:
        text += Markup(", as a value is missing that every clean run has")
    elif np.isfinite(beyond):
        text += Markup(", {} beyond the threshold").format(number(beyond, digits=2))
    if row["channels"]:
        text += Markup(", mostly in {} standard deviations off").format(row["channels"])
    return text + Markup(".")


def _table(alarms: pd.DataFrame, threshold: float) -> Table:
    show = partial(number, digits=3)
    columns = [
        word("run"),
        word("kind", "statistic"),
        figures("step", "first alarm (step)", show),
        figures("score", "score there", show),
        figures("beyond", "beyond the threshold", show),
        word("channels", "furthest channels (standard deviations)"),
    ]
    return table(alarms.assign(beyond=alarms["score"] - threshold), columns, look="sortable roomy")
