"""Compared detectors in words."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from jaxaudit.monitoring.summary import best_chart
from jaxaudit.report.tables import number, percent, share, signed

SINGLE = "deviation of "
"""How the names of detectors that are one channel's distance begin."""

SHOWN = 10
"""Of them, the best that are always shown."""


def further(rows: pd.DataFrame) -> pd.Series:
    """Which rows, the best first, are single channels that are not among the SHOWN best of them."""
    single = rows["detector"].str.startswith(SINGLE)
    return single & (single.cumsum() > SHOWN)


def verdict(rows: pd.DataFrame | None, mine: str, alpha: float | None, clean: int | None) -> Markup:
    """Who is best, how the monitor compares to the best baseline and to the best chart, and its false alarms.

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
    chart = best_chart(rows, mine)
    if chart is not None and chart["detector"] != others.iloc[0]["detector"]:
        text += _over_chart(chart)
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


def _over_chart(chart: pd.Series) -> Markup:
    """The monitor's gain in AUROC over the best chart of all channels, in words."""
    return Markup(" Over the best chart of all channels without a model, <b>{}</b>, the monitor gains {}{}.").format(
        chart["detector"], signed(float(chart["gain_auroc"])), _interval(chart, "gain_auroc", signed)
    )


def _interval(row: pd.Series, name: str, show: Any, *, flip: bool = False) -> str:
    """A figure's interval in brackets; empty where there is none. `flip`: of minus the figure."""
    low, high = (float(row.get(f"{name}_{end}", np.nan)) for end in ("low", "high"))
    if math.isnan(low) or math.isnan(high):
        return ""
    low, high = (-high, -low) if flip else (low, high)
    return f" (95% interval {show(low)} to {show(high)})"
