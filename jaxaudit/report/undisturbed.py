"""Seeds that collapse with nothing disturbed, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from jaxaudit.analysis.run_reader import Run
from jaxaudit.report.critical import control_of
from jaxaudit.report.series import Panel


@dataclass(frozen=True)
class Fallen:
    """Controls that collapse, at the onset where most of them do.

    Attributes:
      count: how many.
      known: the controls whose collapse time is known.
      when: at which steps.
    """

    count: int
    known: int
    when: str

    @property
    def sentence(self) -> Markup:
        """How many seeds collapse undisturbed, and when: the beginning of the verdict, without a full stop."""
        if self.known == 1:
            return Markup("The one seed collapses undisturbed {}").format(self.when)
        verb = "collapses" if self.count == 1 else "collapse"
        return Markup("{} of {} seeds {} undisturbed {}").format(self.count, self.known, verb, self.when)


def fallen_controls(run: Run, panels: Sequence[Panel]) -> Fallen | None:
    """Those of the onset where most collapse, the first of several; None where no control is known to collapse."""
    found = [(panel, events) for panel in panels if (events := control_of(run, panel)) is not None]
    if not found:
        return None
    panel, events = max(found, key=lambda pair: (int(np.nansum(pair[1])), -pair[0].onset))
    if not (events == 1).any():
        return None
    return Fallen(int(np.nansum(events)), int((~np.isnan(events)).sum()), _when(run, panel, events == 1))


def _when(run: Run, panel: Panel, fallen: np.ndarray) -> str:
    """At which steps; where one was not finite before the onset already, the step by which all had."""
    assert run.metrics is not None, "`control_of` found it"
    name = run.conditions["condition"].iloc[panel.lines[0].index]
    lanes = run.metrics[run.metrics["condition"] == name].sort_values("seed")[fallen]
    times = lanes["collapse_time"].astype(int)
    if "performance_before" in lanes and lanes["performance_before"].isna().any():
        return f"by step {times.max()}"
    if times.nunique() == 1:
        return f"at step {times.iloc[0]}"
    return f"between steps {times.min()} and {times.max()}"
