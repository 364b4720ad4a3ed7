"""The page of runs that a monitor has watched."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from markupsafe import Markup

from jaxaudit.report import monitored_figures
from jaxaudit.report.output import write_figures, write_page
from jaxaudit.report.tables import Cell, Table, number
from jaxaudit.stored import table

ABOUT = "monitored.json"
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
        "probability of at most alpha.",
    ),
    (
        "distance",
        "How far a channel is from the mean of the clean runs at the same step, in their standard deviations.",
    ),
    ("latent", "The state of the monitor's model, here in the two directions in which it varies most."),
    ("surprise", "Statistic: how badly the model expected the steps of late, over all channels."),
    ("burst", "Statistic: the same, of the worst channel."),
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
    watched = _load(folder)
    figures = {} if watched.seen is None else monitored_figures.all_of(watched.seen, watched.threshold, watched.starts)
    write_figures(folder / "figures", figures.values())
    return write_page(folder / "report.html", "monitored.html", watched=watched, figures=figures, glossary=GLOSSARY)


@dataclass(frozen=True)
class Watched:
    """Monitored runs, as stored.

    Attributes:
      about: runs, threshold, alpha, channels, notes.
      alarms: a row for each run with an alarm: run, step, score, kind, channels.
      seen: score, latent, distances and values by run and step, or None.
    """

    about: dict[str, Any]
    alarms: pd.DataFrame
    seen: xr.Dataset | None

    @property
    def runs(self) -> list[str]:
        """Their names."""
        stored = [] if self.seen is None else [str(name) for name in self.seen["run"].values]
        return [str(name) for name in self.about.get("runs", [])] or stored

    @property
    def threshold(self) -> float:
        """The score above which there is an alarm; NaN if it is not stored."""
        return float(self.about.get("threshold", np.nan))

    @property
    def starts(self) -> dict[str, int]:
        """The step of the first alarm, by run."""
        return {row["run"]: int(row["step"]) for _, row in self.alarms.iterrows()}

    @property
    def keys(self) -> list[tuple[str, str]]:
        """The strip under the verdict."""
        found = [("runs", f"{len(self.runs)}"), ("with an alarm", f"{len(self.alarms)}")]
        known = {"clean runs": "clean_runs", "of them to calibrate on": "calibrated_on"}
        found += [(label, f"{self.about[key]}") for label, key in known.items() if key in self.about]
        if "alpha" in self.about:
            found.append(("alpha", number(float(self.about["alpha"]))))
        found.append(("threshold", number(self.threshold, digits=3)))
        if "channels" in self.about:
            found.append(("channels", f"{len(self.about['channels'])}"))
        return found

    @property
    def lead(self) -> Markup:
        """Which runs have an alarm, and how often a clean run would."""
        total, hit = len(self.runs), len(self.alarms)
        if not hit:
            text = Markup("No alarm in {}.").format("the run" if total == 1 else f"{total} runs")
        elif total == 1:
            text = _sentence(self.alarms.iloc[0], self.threshold)
        else:
            text = Markup("An alarm in {} of {} runs.").format("all" if hit == total else hit, total)
        alpha = self.about.get("alpha")
        if isinstance(alpha, int | float):
            text += Markup(" False alarms come in at most {}% of clean runs.").format(number(100 * alpha, digits=3))
        return text

    @property
    def sentences(self) -> list[Markup]:
        """A sentence for each alarm, where there are several runs, and what there is to know besides."""
        told = [] if len(self.runs) == 1 else [_sentence(row, self.threshold) for _, row in self.alarms.iterrows()]
        if len(told) > MOST:
            told = [*told[:MOST], Markup("Further alarms: {}, in the table.").format(len(told) - MOST)]
        return told

    @property
    def table(self) -> Table | None:
        """One row for each alarm."""
        if self.alarms.empty:
            return None
        numbers = ("first alarm (step)", "score there", "beyond the threshold")
        head = [("run", False), ("statistic", False), *((name, True) for name in numbers)]
        return Table(
            [*head, ("furthest channels (standard deviations)", False)],
            [self._row(row) for _, row in self.alarms.iterrows()],
        )

    def _row(self, row: pd.Series) -> list[Cell]:
        run, kind, channels = (Cell(row[name], value=row[name]) for name in ("run", "kind", "channels"))
        found = (float(row["step"]), float(row["score"]), float(row["score"]) - self.threshold)
        return [run, kind, *(Cell(number(x, digits=3), value=repr(x)) for x in found), channels]


MOST = 8
"""Alarms that have a sentence of their own."""


def _sentence(row: pd.Series, threshold: float) -> Markup:
    beyond = row["score"] - threshold
    text = Markup("<b>{}</b>: alarm at step {}").format(row["run"], int(row["step"]))
    if beyond == np.inf:
        text += Markup(", as a value is missing that every clean run has")
    elif np.isfinite(beyond):
        text += Markup(", {} beyond the threshold").format(number(beyond, digits=2))
    if row["channels"]:
        text += Markup(", mostly in {} standard deviations off").format(row["channels"])
    return text + Markup(".")


def _load(folder: Path) -> Watched:
    store = folder / "monitored.zarr"
    alarms = table(folder / "alarms.csv", ("run", "kind", "channels"))
    columns = ["run", "step", "score", "kind", "channels"]
    alarms = pd.DataFrame(columns=columns) if alarms is None else alarms.reindex(columns=columns)
    alarms = alarms[np.isfinite(alarms["step"].astype(float))].sort_values("step", kind="stable")
    return Watched(
        about=json.loads((folder / ABOUT).read_text(encoding="utf-8")),
        alarms=alarms.fillna({"kind": "", "channels": ""}),
        seen=xr.open_zarr(store, chunks=None) if store.exists() else None,
    )
