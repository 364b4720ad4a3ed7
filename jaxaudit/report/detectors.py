"""Compared detectors in words and in a table."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from jaxaudit.report.tables import Cell, Table, number

SINGLE = "deviation of "
"""How the names of detectors that are one channel's distance begin."""

SHOWN = 10
"""Of them, the best that are always shown."""

MINUS = "\N{MINUS SIGN}"


def further(rows: pd.DataFrame) -> pd.Series:
    """Which rows, the best first, are single channels that are not among the SHOWN best of them."""
    single = rows["detector"].str.startswith(SINGLE)
    return single & (single.cumsum() > SHOWN)


def verdict(rows: pd.DataFrame | None, mine: str, alpha: float | None, clean: int | None) -> Markup:
    """Who is best, how the monitor compares to the best baseline, and its false alarms.

    Args:
      rows: detectors, the best AUROC first.
      mine: the monitor's name.
      alpha: false alarms per clean run that were allowed.
      clean: how many clean runs there are.
    """
    if rows is None or rows["auroc"].isna().all():
        return Markup("No detector has an AUROC yet, so there is no verdict.")
    best = rows.iloc[0]
    text = Markup("<b>{}</b> has the highest AUROC, {:.3f}{}.").format(
        best["detector"], best["auroc"], _interval(best, "auroc", share)
    )
    own, others = rows[rows["detector"] == mine], rows[rows["detector"] != mine]
    if own.empty:
        return text
    if len(others):
        text += _against(others.iloc[0], best["detector"] == mine)
    return text + _false_alarms(own.iloc[0], alpha, clean)


def _false_alarms(row: pd.Series, alpha: float | None, clean: int | None) -> Markup:
    alarms = float(row.get("false_alarms", np.nan))
    if math.isnan(alarms):
        return Markup("")
    allowed = "" if alpha is None else f", where {number(100 * alpha, digits=3)}% was allowed"
    runs = "clean runs" if clean is None else f"{clean} clean runs"
    return Markup(" The monitor gave a false alarm in {} of {}{}{}.").format(
        percent(alarms), runs, _interval(row, "false_alarms", percent), allowed
    )


def _against(baseline: pd.Series, leads: bool) -> Markup:
    """The monitor's gain in AUROC over the best baseline, in words."""
    gain, low, high = (float(baseline.get(f"gain_auroc{end}", np.nan)) for end in ("", "_low", "_high"))
    if math.isnan(gain):
        return Markup("")
    who = "It" if leads else "The monitor"
    best = Markup("the best baseline, <b>{}</b>").format(baseline["detector"]) if leads else "it"
    if low > 0 or high < 0:
        verb = "beats" if low > 0 else "is beaten by"
        return Markup(" {} {} {}, by {}{}.").format(
            who, verb, best, f"{abs(gain):.3f}", _interval(baseline, "gain_auroc", share, flip=high < 0)
        )
    return Markup(" {} cannot be told from {}: its AUROC differs by {}{}.").format(
        who, best, signed(gain), _interval(baseline, "gain_auroc", signed)
    )


def _interval(row: pd.Series, name: str, show: Any, *, flip: bool = False) -> str:
    """A figure's interval in brackets; empty where there is none. `flip`: of minus the figure."""
    low, high = (float(row.get(f"{name}_{end}", np.nan)) for end in ("low", "high"))
    if math.isnan(low) or math.isnan(high):
        return ""
    low, high = (-high, -low) if flip else (low, high)
    return f" (95% interval {show(low)} to {show(high)})"


def detector_table(rows: pd.DataFrame, mine: str) -> Table:
    """A row for each, with intervals; the monitor's stands out."""
    shown = {name: column for name, column in COLUMNS.items() if name in rows}
    head = [("detector", False), *((title, True) for title, _ in shown.values())]
    cells = [
        [Cell(row["detector"], value=row["detector"]), *(_cell(row, name, mine) for name in shown)]
        for _, row in rows.iterrows()
    ]
    places = np.flatnonzero(rows["detector"] == mine)
    return Table(head, cells, marked=int(places[0]) if len(places) else None)


def _cell(row: pd.Series, name: str, mine: str) -> Cell:
    if name.startswith("gain_") and row["detector"] == mine:
        return Cell("")
    show = COLUMNS[name][1]
    value, low, high = (float(row.get(f"{name}{end}", np.nan)) for end in ("", "_low", "_high"))
    if math.isnan(value) and "lead_time" in name:
        return Cell("none collapsed", reason="no disturbed lane collapsed, so there is nothing to be ahead of")
    cell = figure(value, low, high, show=show)
    return replace(cell, text="no alarm in most") if name == "lead_time" and value == -math.inf else cell


def figure(value: float, low: float, high: float, *, show: Callable[[float], str]) -> Cell:
    """A figure with its interval, where it has one."""
    if math.isnan(value):
        return Cell("n/a", reason="not defined here")
    known = not (math.isnan(low) or math.isnan(high) or (math.isinf(low) and low == high))
    return Cell(show(value), f"{show(low)} to {show(high)}" if known else "", repr(value))


def share(value: float) -> str:
    """A share or a probability."""
    return f"{value:.3f}"


def percent(value: float) -> str:
    """A share in percent."""
    return f"{100 * value:.1f}%"


def signed(value: float) -> str:
    """A difference of shares."""
    if math.isinf(value):
        return f"{'+' if value > 0 else MINUS}\N{INFINITY}"
    return f"{value:+.3f}".replace("-", MINUS)


def _lead(value: float) -> str:
    return "no alarm" if value == -math.inf else number(value)


def _gain(value: float) -> str:
    return ("+" if value > 0 else "") + number(value)


COLUMNS: dict[str, tuple[str, Any]] = {
    "auroc": ("AUROC", share),
    "gain_auroc": ("monitor's gain in AUROC", signed),
    "false_alarms": ("false alarms per clean run", percent),
    "detected": ("detected", percent),
    "lead_time": ("lead time (steps)", _lead),
    "gain_lead_time": ("monitor's gain in lead time", _gain),
}
