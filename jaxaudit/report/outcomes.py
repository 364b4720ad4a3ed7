"""Outcomes of a run's conditions: collapses compared with the control, critical magnitudes, costs, interventions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from markupsafe import Markup
from scipy.stats import false_discovery_control, wilcoxon

from jaxaudit.analysis.run_reader import Run
from jaxaudit.analysis.statistics import collapsed, critical_beside, harm_rises, paired_difference, wilson
from jaxaudit.core.perturbation import INTERVENTION
from jaxaudit.report.line_panels import CONTROL_KEY, Panel
from jaxaudit.runtime import registry

DIFFERENCE = "paired_difference_final_performance"
"""The summary's column of final performance minus the control's, paired by seed."""

FALSE_DISCOVERY_RATE = 0.05
"""The largest expected share of false positives among the conditions said to lower final performance."""

MAX_PANELS = 12
"""The most panels in a figure that a reader can find their way through."""

MAX_LINES = 12
"""The most disturbed lines in a panel whose colours can be told apart."""


def condition_rows(run: Run, panel: Panel) -> pd.DataFrame:
    """Returns the summary's rows of a panel's disturbed conditions, by ascending magnitude, with further columns.

    `label` and `rank` are the line's. `control_survives` is the number of seeds whose control does not collapse,
    `added` is the number of these that collapse when disturbed, `added_share` is their share, and `avoided` is the
    number of seeds whose control collapses although the disturbed lane does not. These four are missing if the summary
    has no collapse probability. The frame is empty if there is no summary.
    """
    if run.summary is None:
        return pd.DataFrame()
    lines = {run.conditions["condition"].iloc[line.index]: line for line in panel.disturbed}
    rows = run.summary[run.summary["condition"].isin(list(lines))].copy()
    rows["rank"] = [int(lines[c].key[1:]) for c in rows["condition"]]
    rows["label"] = [lines[c].label for c in rows["condition"]]
    if "excess_collapse_probability" in rows:
        rows["added"] = rows["excess_collapse_lost"]
        rows["avoided"] = rows["excess_collapse_spared"]
        rows["control_survives"] = rows["excess_collapse_standing"]
        is_known = rows["excess_collapse_probability"].notna() & (rows["control_survives"] > 0)
        rows["added_share"] = (rows["added"] / rows["control_survives"]).where(is_known)
    elif "collapse_probability" in rows:
        rows["added_share"] = rows["collapse_probability"]
        rows["added"] = rows["collapse_probability"] * run.seeds
        rows["control_survives"], rows["avoided"] = run.seeds, 0
    return rows.sort_values("rank")


def control_collapses(run: Run, panel: Panel, kind: str = "collapse_probability") -> np.ndarray | None:
    """Returns whether each seed's control collapses, `[seeds]`: 1, 0, or NaN if unknown; None without a control."""
    if run.metrics is None or panel.lines[0].key != CONTROL_KEY:
        return None
    return _collapses(run, [run.conditions["condition"].iloc[panel.lines[0].index]], kind)[:, 0]


def _collapses(run: Run, conditions: list[str], kind: str) -> np.ndarray:
    """Returns `[seeds, conditions]`: 1 if the lane collapses (for P_div, before T_max / 2), 0, or NaN if unknown."""
    times = run.collapse_times.reindex(columns=conditions).to_numpy(np.float64)
    return collapsed(times, run.steps / 2 if kind == "divergence_probability" else np.inf)


@dataclass(frozen=True)
class CollapsedControls:
    """How many controls collapse at one onset.

    Attributes:
      count: the number of controls that collapse.
      known: the number of controls whose collapse time is known.
      when: the steps at which they collapse, as text.
    """

    count: int
    known: int
    when: str

    @property
    def sentence(self) -> Markup:
        """How many seeds collapse undisturbed, and when: the beginning of a sentence."""
        if self.known == 1:
            return Markup("The one seed collapses undisturbed {}").format(self.when)
        verb = "collapses" if self.count == 1 else "collapse"
        return Markup("{} of {} seeds {} undisturbed {}").format(self.count, self.known, verb, self.when)


def collapsed_controls(run: Run, panels: Sequence[Panel]) -> CollapsedControls | None:
    """Returns the collapsed controls of the onset that has the most of them, or None if no control collapses."""
    events = [(panel, event) for panel in panels if (event := control_collapses(run, panel)) is not None]
    if not events:
        return None
    panel, event = max(events, key=lambda pair: (int(np.nansum(pair[1])), -pair[0].onset))
    if not (event == 1).any():
        return None
    return CollapsedControls(
        int(np.nansum(event)), int((~np.isnan(event)).sum()), _collapse_steps(run, panel, event == 1)
    )


def _collapse_steps(run: Run, panel: Panel, is_collapsed: np.ndarray) -> str:
    """Returns the steps as text; if performance was not finite before the onset, the step by which all collapsed."""
    assert run.metrics is not None, "`control_collapses` has checked it"
    name = run.conditions["condition"].iloc[panel.lines[0].index]
    lanes = run.metrics[run.metrics["condition"] == name].sort_values("seed")[is_collapsed]
    times = lanes["collapse_time"].astype(int)
    if "performance_before" in lanes and lanes["performance_before"].isna().any():
        return f"by step {times.max()}"
    if times.nunique() == 1:
        return f"at step {times.iloc[0]}"
    return f"between steps {times.min()} and {times.max()}"


@dataclass(frozen=True)
class CriticalMagnitude:
    """The magnitude at which the share of collapsed seeds crosses one half.

    Attributes:
      value: the magnitude; NaN if there is none.
      low: the lower end of its 95% interval.
      high: the upper end.
      text: the magnitude with its interval, or the reason why there is none; empty if it does not apply.
    """

    value: float
    low: float
    high: float
    text: str


def critical_magnitude(run: Run, panel: Panel, kind: str, *, surviving_controls: bool = False) -> CriticalMagnitude:
    """Returns the magnitude at which the share of collapsed seeds crosses one half.

    Args:
      run: the run.
      panel: the perturbation.
      kind: "collapse_probability", or "divergence_probability" for collapses in the first half of the run.
      surviving_controls: whether only seeds count whose control does not collapse.
    """
    rows = condition_rows(run, panel)
    disturbed = [line.magnitude for line in panel.disturbed]
    if panel.neutral == 0:
        disturbed = [magnitude for magnitude in disturbed if magnitude]  # there is no logarithm of 0
    magnitudes = np.unique(disturbed)
    if len(magnitudes) < 2 or len(magnitudes) < len(disturbed) or run.metrics is None or kind not in rows:
        return _no_critical_magnitude("")
    if not (np.isfinite(magnitudes) & (magnitudes > 0)).all():
        return _no_critical_magnitude("no critical magnitude: magnitudes are not all positive")
    by_magnitude = rows.set_index("magnitude").reindex(magnitudes)
    if by_magnitude[kind].isna().any():
        return _no_critical_magnitude("unknown: the collapse share of a magnitude is missing")
    try:
        increasing = harm_rises(magnitudes, panel.neutral)
    except ValueError as error:
        return _no_critical_magnitude(f"no critical magnitude: {error}")
    events = _collapses(run, list(by_magnitude["condition"]), kind)
    control = control_collapses(run, panel, kind)
    if control is None:
        control = np.zeros(len(events))
    critical = critical_beside(
        magnitudes, events, control, standing=surviving_controls, increasing=increasing, missing="count"
    )
    if not np.isfinite(critical.value):
        return _no_critical_magnitude(critical.reason)
    text = f"{critical.value:.3g}"
    if run.seeds > 1:
        low = f"{critical.low:.3g}" if critical.low > 0 else "below all tested"
        high = f"{critical.high:.3g}" if np.isfinite(critical.high) else "above all tested"
        text += f" (95% interval: {low} to {high})"
    return CriticalMagnitude(critical.value, critical.low, critical.high, text)


def _no_critical_magnitude(reason: str) -> CriticalMagnitude:
    return CriticalMagnitude(math.nan, math.nan, math.nan, reason)


@dataclass(frozen=True)
class CostTests:
    """Tests of whether conditions lower final performance below the control's.

    Attributes:
      count: the number of conditions tested.
      significant: the conditions whose final performance is significantly below the control's.
      seeds: the number of seeds.
    """

    count: int
    significant: frozenset[str]
    seeds: int

    @property
    def sentence(self) -> Markup:
        """A sentence on the tests, for the reader of the report."""
        if self.count == 1:
            text = Markup(
                "Final performance was compared with the control's in the one condition whose perturbation collapses "
                "no seed, by a one-sided signed-rank test at a significance level of {:.0%}."
            ).format(FALSE_DISCOVERY_RATE)
        else:
            text = Markup(
                "Final performance was compared with the control's in all {} conditions of the perturbations that "
                "collapse no seed, by one-sided signed-rank tests at a false discovery rate of {:.0%} (Benjamini and "
                "Hochberg)."
            ).format(self.count, FALSE_DISCOVERY_RATE)
        # The least p-value that a signed-rank test of n seeds can have is 2 ** -n.
        fewest = math.ceil(self.count * 0.5**self.seeds / FALSE_DISCOVERY_RATE)
        if fewest > self.count:
            text += Markup(" With {} seeds, none can be significant.").format(self.seeds)
        elif fewest > 1:
            text += Markup(" With {} seeds, a difference can be significant only if at least {} are.").format(
                self.seeds, fewest
            )
        return text


def cost_tests(run: Run, panels: Sequence[Panel]) -> CostTests:
    """Tests whether the panels' conditions lower final performance below the control's.

    The procedure is Benjamini and Hochberg's (1995) at `FALSE_DISCOVERY_RATE`. It stays valid under positive
    dependence (Benjamini and Yekutieli, 2001), which conditions have that share their controls. A condition's p-value
    is that of Wilcoxon's one-sided signed-rank test of the differences paired by seed, or 1 if the 95% interval of the
    report's table reaches zero.
    """
    differences = _paired_differences(run, panels)
    p = np.ones(len(differences))
    if below_zero := [i for i, values in enumerate(differences.values()) if values is not None]:
        tested = np.stack([values for values in differences.values() if values is not None])
        p[below_zero] = wilcoxon(tested, axis=1, alternative="less").pvalue
    adjusted = false_discovery_control(p, method="bh") if len(p) else p
    significant = [name for name, value in zip(differences, adjusted, strict=True) if value <= FALSE_DISCOVERY_RATE]
    return CostTests(len(p), frozenset(significant), run.seeds)


def _paired_differences(run: Run, panels: Sequence[Panel]) -> dict[str, np.ndarray | None]:
    """Returns final performance minus the control's, `[seeds]`, by condition; None if the interval reaches zero."""
    if run.metrics is None or run.summary is None or f"{DIFFERENCE}_high" not in run.summary:
        return {}
    names = run.conditions["condition"].to_numpy()
    final = run.metrics.pivot(index="seed", columns="condition", values="final_performance")
    highs = run.summary.set_index("condition")[f"{DIFFERENCE}_high"].dropna().to_dict()
    differences: dict[str, np.ndarray | None] = {}
    for panel in panels:
        control = panel.lines[0]
        if control.key != CONTROL_KEY:
            continue
        for line in panel.disturbed:
            name = names[line.index]
            if name in highs:
                differences[str(name)] = None
                if highs[name] < 0:
                    differences[str(name)] = final[name].to_numpy() - final[names[control.index]].to_numpy()
    return differences


def intervention_sentences(run: Run, panel: Panel) -> list[Markup] | None:
    """Returns a sentence for each condition on what the panel's interventions did.

    Returns None if it has no interventions, if there is no condition to compare with, or if a collapse time is unknown.
    """
    if run.metrics is None or run.metrics["collapse_time"].isna().any() or run.channel("alarm") is None:
        return None
    if panel.dimension == INTERVENTION:
        return [_false_alarm_sentence(run, line.index) for line in panel.disturbed]
    sentences = []
    for line in panel.disturbed:
        without = _without_interventions(run, line.index)
        if without is None:
            return None
        sentences.append(_prevention_sentence(run, line.index, without))
    return sentences


def _without_interventions(run: Run, index: int) -> int | None:
    """Returns the condition with the same perturbations as another one, but without its interventions."""
    table = run.conditions
    row = table.iloc[index]
    parts = row["perturbation"].split("+")
    words = row["condition"].removeprefix(f"{row['perturbation']} ").split()
    disturbing = [i for i, part in enumerate(parts) if part not in registry.interventions]
    if len(disturbing) == len(parts) or len(words) < len(parts):
        return None
    name = "+".join(parts[i] for i in disturbing)
    label = " ".join([name, *(words[i] for i in disturbing), *words[len(parts) :]])
    same_window = (table["target"] == row["target"]) & (table["duration"] == row["duration"])
    matches = np.flatnonzero(same_window & (table["condition"] == label))
    return int(matches[0]) if len(matches) else None


def _prevention_sentence(run: Run, index: int, without: int) -> Markup:
    with_it, without_it = (_ever_collapses(run, i) for i in (index, without))
    prevented = paired_difference(without_it.astype(float), with_it.astype(float), statistic=np.mean)
    has_interval = prevented.low < prevented.high
    interval = f", 95% interval {prevented.low:.2f} to {prevented.high:.2f}" if has_interval else ""
    text = "<b>{}</b>: {} of {} seeds collapse without the intervention and {} with it "
    text += "(share prevented {}{}); {} have an alarm."
    counts = without_it.sum(), len(with_it), with_it.sum()
    share = f"{prevented.value:.2f}"
    return Markup(text).format(_condition(run, index), *counts, share, interval, _has_alarm(run, index).sum())


def _false_alarm_sentence(run: Run, index: int) -> Markup:
    has_alarm = _has_alarm(run, index)
    share = wilson(int(has_alarm.sum()), len(has_alarm))
    text = Markup("<b>{}</b> with nothing disturbed: {} of {} seeds have an alarm, 95% interval {}.")
    interval = f"{share.low:.2f} to {share.high:.2f}"
    return text.format(_condition(run, index), has_alarm.sum(), len(has_alarm), interval)


def _condition(run: Run, index: int) -> str:
    return str(run.conditions["condition"].iloc[index])


def _ever_collapses(run: Run, index: int) -> np.ndarray:
    assert run.metrics is not None, "`intervention_sentences` has checked it"
    table = run.metrics[run.metrics["condition"] == _condition(run, index)].set_index("seed")
    return np.isfinite(table["collapse_time"].loc[run.telemetry["seed"].values].to_numpy(float))


def _has_alarm(run: Run, index: int) -> np.ndarray:
    """Returns whether each seed has an alarm at or after the condition's onset, bool `[seed]`."""
    alarm = run.channel("alarm")
    assert alarm is not None, "`intervention_sentences` has checked it"
    return np.asarray((alarm[:, index, run.conditions["onset"].iloc[index] :] > 0).any(axis=-1))


def most_harmful(run: Run, panels: Sequence[Panel], limit: int = MAX_PANELS) -> list[Panel]:
    """Returns at most `limit` panels, in their order: those that collapse the most seeds, then the costliest ones."""
    if len(panels) <= limit:
        return list(panels)
    order = sorted(range(len(panels)), key=lambda i: _harm(run, panels[i]), reverse=True)
    return [panels[i] for i in sorted(order[:limit])]


def _harm(run: Run, panel: Panel) -> tuple[float, float, float]:
    """Returns the largest share of added collapses, the sum of the shares, and the largest cost; -inf if unknown."""
    rows = condition_rows(run, panel)
    share, change = (rows[name].dropna() if name in rows else np.empty(0) for name in ("added_share", DIFFERENCE))
    if not len(share):
        return -np.inf, -np.inf, -np.inf
    return float(share.max()), float(share.sum()), float(-change.min()) if len(change) else -np.inf


def with_fewer_lines(panel: Panel, limit: int = MAX_LINES) -> Panel:
    """Returns the panel with at most `limit` disturbed lines, spaced evenly from the weakest to the strongest."""
    disturbed = panel.disturbed
    if len(disturbed) <= limit:
        return panel
    kept = {disturbed[i].key for i in np.linspace(0, len(disturbed) - 1, limit).round().astype(int)}
    return replace(panel, lines=tuple(line for line in panel.lines if line.key in kept or line not in disturbed))
