"""What became of disturbed runs: critical magnitudes, which panels are shown, and whether interventions helped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from markupsafe import Markup
from scipy.stats import false_discovery_control, wilcoxon

from jaxaudit.analysis.run_reader import Run
from jaxaudit.analysis.statistics import collapsed, critical_beside, harm_rises, paired_difference, wilson
from jaxaudit.core.perturbation import INTERVENTION
from jaxaudit.report.series import CONTROL_KEY, Panel
from jaxaudit.runtime import registry

EFFECT = "paired_difference_final_performance"

RATE = 0.05
"""Expected share of false ones among the conditions said to cost performance, at most."""


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
        """Returns a sentence on how costs in final performance were judged."""
        if self.count == 1:
            text = Markup(
                "Whether final performance suffers is judged of the one condition whose perturbation collapses no "
                "seed, by a signed-rank test of the difference to the control at {:.0%}."
            ).format(RATE)
        else:
            text = Markup(
                "Whether final performance suffers is judged over all {} conditions of the perturbations that collapse "
                "no seed, by signed-rank tests of the differences to the control: of those said to cost some, at most "
                "{:.0%} are expected to do so by chance (Benjamini and Hochberg's false discovery rate)."
            ).format(self.count, RATE)
        # The least p-value that so many seeds allow is 2 ** -seeds.
        if (fewest := math.ceil(self.count * 0.5**self.seeds / RATE)) > 1:
            takes = Markup("at least {} such conditions are needed for a significant one.").format(fewest)
            text += Markup(" With {} seeds {}").format(
                self.seeds, takes if fewest <= self.count else "none can be significant."
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


def effect(run: Run, panel: Panel) -> list[Markup] | None:
    """What the interventions of a panel did, a sentence for each condition.

    None if it has none, or there is nothing to compare a condition with, or a collapse time is not known.
    """
    if run.metrics is None or run.metrics["collapse_time"].isna().any() or run.channel("alarm") is None:
        return None
    if panel.dimension == INTERVENTION:
        return [_unprovoked(run, line.index) for line in panel.disturbed]
    pairs = [(line.index, _unhelped(run, line.index)) for line in panel.disturbed]
    found = [_prevented(run, helped, alone) for helped, alone in pairs if alone is not None]
    return found if len(found) == len(pairs) else None


def _unhelped(run: Run, index: int) -> int | None:
    """The condition that disturbs as another does, without its interventions."""
    table = run.conditions
    row = table.iloc[index]
    parts = row["perturbation"].split("+")
    words = row["condition"].removeprefix(f"{row['perturbation']} ").split()
    kept = [place for place, part in enumerate(parts) if part not in registry.interventions]
    if len(kept) == len(parts) or len(words) < len(parts):
        return None
    label = ["+".join(parts[place] for place in kept), *(words[place] for place in kept), *words[len(parts) :]]
    alike = (table["target"] == row["target"]) & (table["duration"] == row["duration"])
    found = np.flatnonzero(alike & (table["condition"] == " ".join(label)))
    return int(found[0]) if len(found) else None


def _prevented(run: Run, helped: int, alone: int) -> Markup:
    lost, lost_alone = (_ever_collapsed(run, index) for index in (helped, alone))
    less = paired_difference(lost_alone.astype(float), lost.astype(float), statistic=np.mean)
    interval = f", 95% interval {less.low:.2f} to {less.high:.2f}" if less.low < less.high else ""
    text = "<b>{}</b>: {} of {} seeds collapse without the intervention and {} with it "
    text += "(share prevented {}{}); {} have an alarm."
    counts = lost_alone.sum(), len(lost), lost.sum()
    share = f"{less.value:.2f}"
    return Markup(text).format(_name(run, helped), *counts, share, interval, _alarmed(run, helped).sum())


def _unprovoked(run: Run, index: int) -> Markup:
    alarmed = _alarmed(run, index)
    share = wilson(int(alarmed.sum()), len(alarmed))
    text = Markup("<b>{}</b> with nothing disturbed: {} of {} seeds have an alarm, 95% interval {}.")
    return text.format(_name(run, index), alarmed.sum(), len(alarmed), f"{share.low:.2f} to {share.high:.2f}")


def _name(run: Run, index: int) -> str:
    return str(run.conditions["condition"].iloc[index])


def _ever_collapsed(run: Run, index: int) -> np.ndarray:
    assert run.metrics is not None, "`effect` checks it"
    table = run.metrics[run.metrics["condition"] == _name(run, index)].set_index("seed")
    return np.isfinite(table["collapse_time"].loc[run.telemetry["seed"].values].to_numpy(float))


def _alarmed(run: Run, index: int) -> np.ndarray:
    """Whether each seed had an alarm since the condition's onset, bool `[seed]`."""
    alarm = run.channel("alarm")
    assert alarm is not None, "`effect` checks it"
    return np.asarray((alarm[:, index, run.conditions["onset"].iloc[index] :] > 0).any(axis=-1))


@dataclass(frozen=True)
class Critical:
    """Where the share of collapsed seeds crosses one half: `text` in words, `value` NaN where it does not."""

    value: float
    low: float
    high: float
    text: str


def rows(run: Run, panel: Panel) -> pd.DataFrame:
    """The summary's rows of a panel's disturbed conditions, by rising magnitude.

    Beside the summary's columns: `label` and `rank`; of the seeds whose control does not collapse, `standing`, how many
    collapse, `lost`, and their share, `lost_share`; and `spared`, the seeds of which the control alone collapses.
    """
    if run.summary is None:
        return pd.DataFrame()
    order = {run.conditions["condition"].iloc[line.index]: line for line in panel.disturbed}
    found = run.summary[run.summary["condition"].isin(list(order))].copy()
    found["rank"] = [int(order[c].key[1:]) for c in found["condition"]]
    found["label"] = [order[c].label for c in found["condition"]]
    if "excess_collapse_probability" in found:
        for name in ("lost", "spared", "standing"):
            found[name] = found[f"excess_collapse_{name}"]
        known = found["excess_collapse_probability"].notna() & (found["standing"] > 0)
        found["lost_share"] = (found["lost"] / found["standing"]).where(known)
    elif "collapse_probability" in found:
        found["lost_share"] = found["collapse_probability"]
        found["lost"] = found["collapse_probability"] * run.seeds
        found["standing"], found["spared"] = run.seeds, 0
    return found.sort_values("rank")


def critical_of(run: Run, panel: Panel, kind: str, *, standing: bool = False) -> Critical:
    """The magnitude at which the share of collapsed seeds crosses one half, or why there is none.

    Args:
      run: what is stored.
      panel: the perturbation.
      kind: "collapse_probability", or "divergence_probability" of collapse before the half of the run.
      standing: whether only seeds count whose control does not collapse.
    """
    unknown = float("nan")
    data = rows(run, panel)
    magnitudes = np.unique([line.magnitude for line in panel.disturbed])
    if len(magnitudes) < 2 or len(magnitudes) < len(panel.disturbed) or run.metrics is None or kind not in data:
        return Critical(unknown, unknown, unknown, "")
    if not (np.isfinite(magnitudes) & (magnitudes > 0)).all():
        return Critical(unknown, unknown, unknown, "no critical magnitude: magnitudes are not all positive")
    share = data.set_index("magnitude")[kind].reindex(magnitudes)
    if share.isna().any():
        return Critical(unknown, unknown, unknown, "not known: a share is missing")
    try:
        rising = harm_rises(magnitudes, panel.neutral)
    except ValueError as error:
        return Critical(unknown, unknown, unknown, f"no critical magnitude: {error}")
    names = list(data.set_index("magnitude")["condition"].reindex(magnitudes))
    table, control = _collapsed(run, names, kind), control_of(run, panel, kind)
    if control is None:
        control = np.zeros(len(table))
    found = critical_beside(magnitudes, table, control, standing=standing, increasing=rising, missing="count")
    if np.isfinite(found.value):
        text = f"{found.value:.3g}"
        if run.seeds > 1:
            low = f"{found.low:.3g}" if found.low > 0 else "below all tested"
            high = f"{found.high:.3g}" if np.isfinite(found.high) else "above all tested"
            text += f" (95% interval: {low} to {high})"
        return Critical(found.value, found.low, found.high, text)
    return Critical(unknown, unknown, unknown, found.reason)


def control_of(run: Run, panel: Panel, kind: str = "collapse_probability") -> np.ndarray | None:
    """Whether each seed's control collapses, `[seeds]`: 1, 0 or NaN where it is not known; None without a control."""
    if run.metrics is None or panel.lines[0].key != CONTROL_KEY:
        return None
    return _collapsed(run, [run.conditions["condition"].iloc[panel.lines[0].index]], kind)[:, 0]


def _collapsed(run: Run, conditions: list[str], kind: str) -> np.ndarray:
    """`[seeds, conditions]`: 1 where the lane collapsed (in time, for P_div), NaN where it is not known."""
    times = run.collapse_times.reindex(columns=conditions).to_numpy(np.float64)
    return collapsed(times, run.steps / 2 if kind == "divergence_probability" else np.inf)
