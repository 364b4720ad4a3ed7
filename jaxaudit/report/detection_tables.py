"""Tables of a comparison of detectors besides that of all of them: by condition, and fitted to other learners."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from jaxaudit.report.detectors import figure, percent, share, signed
from jaxaudit.report.tables import Cell, Table

CLEAN = "clean"

OWN = "own"

WAYS = {
    OWN: "fitted to and calibrated on its own clean lanes",
    "as it is": "not touched",
    "recalibrated": "threshold from its own clean lanes",
    "restandardised": "model's parameters alone; scale, envelopes and threshold from its own clean lanes",
    "untrained": "random parameters; the rest from its own clean lanes",
}


def told(conditions: pd.DataFrame) -> list[str]:
    """The detectors whose figures are stored by condition, as they come."""
    return [name for name in conditions.columns if f"{name} auroc" in conditions]


def condition_table(rows: pd.DataFrame, detectors: Sequence[str]) -> Table:
    """A row for each condition: lanes, how many collapse, and each detector's share detected and AUROC."""
    head = [("condition", False), ("lanes", True), ("collapsed", True)]
    head += [(f"{name}: {title}", True) for name in detectors for title in ("detected", "AUROC")]
    cells = []
    for _, row in rows.iterrows():
        clean = row["condition"] == CLEAN
        line = [Cell("clean: false alarms" if clean else row["condition"], value=row["condition"])]
        line += [Cell(f"{row[name]:.0f}", value=f"{row[name]:.0f}") for name in ("lanes", "collapsed")]
        for name in detectors:
            detected = (row[name], row[f"{name} detected_low"], row[f"{name} detected_high"])
            auroc = (row[f"{name} auroc{end}"] for end in ("", "_low", "_high"))
            line += [figure(*detected, show=percent), Cell("") if clean else figure(*auroc, show=share)]
        cells.append(line)
    return Table(head, cells)


def transfer_table(rows: pd.DataFrame) -> Table:
    """A row for each monitor of one tested learner: fitted to whose lanes, what is its own, and the figures."""
    columns = {
        "auroc": ("AUROC", share),
        "gain_auroc": ("own monitor's gain in AUROC", signed),
        "false_alarms": ("false alarms per clean run", percent),
        "detected": ("detected", percent),
    }
    head = [("fitted to", False), ("how", False), *((title, True) for title, _ in columns.values())]
    cells = []
    for _, row in rows.iterrows():
        own = row["way"] == OWN
        line = [
            Cell(row["fitted_to"], value=row["fitted_to"]),
            Cell(WAYS.get(row["way"], row["way"]), value=row["way"]),
        ]
        for name, (_, show) in columns.items():
            values = (float(row[f"{name}{end}"]) for end in ("", "_low", "_high"))
            line.append(Cell("") if own and name == "gain_auroc" else figure(*values, show=show))
        cells.append(line)
    places = np.flatnonzero(rows["way"] == OWN)
    return Table(head, cells, marked=int(places[0]) if len(places) else None)
