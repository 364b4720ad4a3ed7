"""Tables of a comparison of detectors: all of them, by condition, and fitted to other learners."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pandas as pd

from jaxaudit.monitoring.summary import CLEAN
from jaxaudit.monitoring.transfer import AS_IT_IS, OWN, RECALIBRATED, RESTANDARDISED, UNTRAINED
from jaxaudit.report.tables import (
    Cell,
    Column,
    Show,
    Table,
    estimate,
    figures,
    number,
    percent,
    share,
    signed,
    table,
    word,
)

WAYS = {
    OWN: "fitted to and calibrated on its own clean lanes",
    AS_IT_IS: "not touched",
    RECALIBRATED: "threshold from its own clean lanes",
    RESTANDARDISED: "model's parameters alone; scale, envelopes and threshold from its own clean lanes",
    UNTRAINED: "random parameters; the rest from its own clean lanes",
}


def _lead(value: float) -> str:
    return "no alarm" if value == -math.inf else number(value)


def _gain(value: float) -> str:
    return ("+" if value > 0 else "") + number(value)


FIGURES: dict[str, tuple[str, Show]] = {
    "auroc": ("AUROC", share),
    "gain_auroc": ("monitor's gain in AUROC", signed),
    "false_alarms": ("false alarms per clean run", percent),
    "detected": ("detected", percent),
    "lead_time": ("lead time (steps)", _lead),
    "gain_lead_time": ("monitor's gain in lead time", _gain),
}


def detector_table(rows: pd.DataFrame, mine: str) -> Table:
    """A row for each, with intervals; the monitor's stands out."""
    shown = [
        Column(title, partial(_figure, name=name, show=show, own=rows["detector"] == mine))
        for name, (title, show) in FIGURES.items()
        if name in rows
    ]
    words = [word("detector"), *([word("family", "reads")] if "family" in rows else [])]
    return table(rows, [*words, *shown], rows["detector"] == mine, look="sortable roomy")


def _figure(row: pd.Series, name: str, show: Show, own: pd.Series) -> Cell:
    """A figure of a detector; none of what the monitor gains over itself."""
    if name.startswith("gain_") and own[row.name]:
        return Cell("")
    if math.isnan(row[name]) and "lead_time" in name:
        return Cell("none collapsed", reason="no disturbed lane collapsed, so there is nothing to be ahead of")
    cell = estimate(row, name, show)
    return replace(cell, text="no alarm in most") if name == "lead_time" and row[name] == -math.inf else cell


def told(conditions: pd.DataFrame) -> list[str]:
    """The detectors whose figures are stored by condition, as they come."""
    return [name for name in conditions.columns if f"{name} auroc" in conditions]


def condition_table(rows: pd.DataFrame, detectors: Sequence[str]) -> Table:
    """A row for each condition: lanes, how many collapse, and each detector's share detected and AUROC."""

    def detected(row: pd.Series, name: str) -> Cell:
        return estimate(row, f"{name} detected", percent, value=float(row[name]))

    def auroc(row: pd.Series, name: str) -> Cell:
        return Cell("") if row["condition"] == CLEAN else estimate(row, f"{name} auroc", share)

    columns = [word("condition", show=lambda name: "clean: false alarms" if name == CLEAN else name)]
    columns += [figures(name, name, "{:.0f}".format) for name in ("lanes", "collapsed")]
    for name in detectors:
        columns.append(Column(f"{name}: detected", partial(detected, name=name)))
        columns.append(Column(f"{name}: AUROC", partial(auroc, name=name)))
    return table(rows, columns)


def transfer_table(rows: pd.DataFrame) -> Table:
    """A row for each monitor of one tested learner: fitted to whose lanes, what is its own, and the figures."""
    own = rows["way"] == OWN
    columns = [word("fitted_to", "fitted to"), word("way", "how", lambda way: WAYS.get(way, way))]
    for name in ("auroc", "gain_auroc", "false_alarms", "detected"):
        title, show = FIGURES[name]
        title = title.replace("monitor's", "own monitor's")
        columns.append(Column(title, partial(_figure, name=name, show=show, own=own)))
    return table(rows, columns, own, look="sortable roomy")
