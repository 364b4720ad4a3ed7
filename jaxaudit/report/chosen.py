"""What is drawn of very many conditions: the panels that tell most, and of a panel's lines some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxaudit.analysis.run_reader import Run
from jaxaudit.report.critical import rows
from jaxaudit.report.series import Panel

MOST_PANELS = 12
"""In a figure; beyond, nobody finds their way through it."""

MOST_LINES = 12
"""Disturbed ones in a panel: more colours cannot be told apart."""

MOST_COLUMNS = 24
"""Magnitudes in a row of the map."""


def foremost(run: Run, groups: Sequence[Panel], most: int = MOST_PANELS) -> list[Panel]:
    """At most so many panels, in their order: those whose conditions collapse most seeds, then cost performance."""
    if len(groups) <= most:
        return list(groups)
    order = sorted(range(len(groups)), key=lambda place: _harm(run, groups[place]), reverse=True)
    return [groups[place] for place in sorted(order[:most])]


def _harm(run: Run, panel: Panel) -> tuple[float, float, float]:
    """The largest share of seeds that collapse beside their control, their sum, and the largest cost; or -inf."""
    found = rows(run, panel)
    share, change = (
        found[name].dropna() if name in found else np.empty(0)
        for name in ("lost_share", "paired_difference_final_performance")
    )
    if not len(share):
        return -np.inf, -np.inf, -np.inf
    return float(share.max()), float(share.sum()), float(-change.min()) if len(change) else -np.inf


def thinned(panel: Panel, most: int = MOST_LINES) -> Panel:
    """A panel with at most so many disturbed lines, evenly chosen from the weakest to the strongest."""
    disturbed = panel.disturbed
    if len(disturbed) <= most:
        return panel
    kept = {disturbed[place].key for place in np.linspace(0, len(disturbed) - 1, most).round().astype(int)}
    return replace(panel, lines=tuple(x for x in panel.lines if x.key in kept or x not in disturbed))
