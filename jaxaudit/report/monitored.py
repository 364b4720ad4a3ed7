"""The page of runs that a monitor has watched."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from jaxaudit.analysis.run_reader import table as stored
from jaxaudit.monitoring.calibration import fewest_runs, rate_interval
from jaxaudit.report import monitored_figures
from jaxaudit.report.page import HANDLING, Page, Section, Summary, listing
from jaxaudit.report.tables import Table, figures, number, table, word
from jaxaudit.runtime import zarr_store
from jaxaudit.runtime.files import read_object

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
    drawn = {} if seen is None else monitored_figures.all_of(seen, threshold, starts)
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
    if calibrated_on is None or calibrated_on < fewest_runs(alpha):
        return text + Markup(".")
    low, high = (number(100 * rate, digits=2) for rate in rate_interval(calibrated_on, alpha))
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
    """One row for each alarm."""
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
