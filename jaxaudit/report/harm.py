"""Which conditions cost final performance, judged together: of many, some differ by chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from scipy.stats import false_discovery_control, wilcoxon

from jaxaudit.analysis.run_reader import Run
from jaxaudit.report.series import CONTROL_KEY, Panel

EFFECT = "paired_difference_final_performance"

RATE = 0.05
"""Expected share of false ones among the conditions that are told to cost performance, at most."""


@dataclass(frozen=True)
class Judged:
    """Conditions whose final performance was compared with the control's.

    Attributes:
      count: how many.
      costly: the names of those whose final performance lies below it.
      seeds: of the run.
    """

    count: int
    costly: frozenset[str]
    seeds: int

    @property
    def sentence(self) -> Markup:
        """How it was judged, in words."""
        if self.count == 1:
            text = Markup(
                "Whether final performance suffers is judged of the one condition whose perturbation collapses no "
                "seed, by a signed-rank test of the difference to the control at {:.0%}."
            ).format(RATE)
        else:
            text = Markup(
                "Whether final performance suffers is judged over all {} conditions of the perturbations that collapse "
                "no seed, by signed-rank tests of the differences to the control: of those told to cost some, at most "
                "{:.0%} are expected to do so by chance (Benjamini and Hochberg's false discovery rate)."
            ).format(self.count, RATE)
        # The least p-value that so many seeds allow is 2 ** -seeds.
        if (fewest := math.ceil(self.count * 0.5**self.seeds / RATE)) > 1:
            takes = Markup("it takes {} such conditions for any to be told.").format(fewest)
            text += Markup(" With {} seeds {}").format(
                self.seeds, takes if fewest <= self.count else "none can be told."
            )
        return text


def judge(run: Run, panels: Sequence[Panel]) -> Judged:
    """Judges the conditions of these panels.

    By Benjamini and Hochberg's procedure (1995) at RATE, which positive dependence, as of conditions that share their
    controls, leaves valid (Benjamini and Yekutieli, 2001). A condition's p-value is that of Wilcoxon's signed-rank
    test, one-sided, of the differences paired by seed; 1 where the 95% interval that is shown reaches zero.
    """
    differences = _differences(run, panels)
    p = np.ones(len(differences))
    if below := [place for place, values in enumerate(differences.values()) if values is not None]:
        tested = np.stack([values for values in differences.values() if values is not None])
        p[below] = wilcoxon(tested, axis=1, alternative="less").pvalue
    adjusted = false_discovery_control(p, method="bh") if len(p) else p
    costly = frozenset(name for name, value in zip(differences, adjusted, strict=True) if value <= RATE)
    return Judged(len(p), costly, run.seeds)


def _differences(run: Run, panels: Sequence[Panel]) -> dict[str, np.ndarray | None]:
    """Each condition's final performance minus the control's `[seeds]`; None where their interval reaches zero."""
    if run.metrics is None or run.summary is None or f"{EFFECT}_high" not in run.summary:
        return {}
    names = run.conditions["condition"].to_numpy()
    final = run.metrics.pivot(index="seed", columns="condition", values="final_performance")
    final = {name: values.to_numpy() for name, values in final.items()}
    highs = run.summary.set_index("condition")[f"{EFFECT}_high"].dropna().to_dict()
    return {
        str(names[line.index]): final[names[line.index]] - final[names[panel.lines[0].index]] if high < 0 else None
        for panel in panels
        if panel.lines[0].key == CONTROL_KEY
        for line in panel.disturbed
        if (high := highs.get(names[line.index])) is not None
    }
