"""What interventions did, in plain words: against a disturbance, and where nothing was disturbed."""

from __future__ import annotations

import numpy as np
from markupsafe import Markup

from jaxaudit.analysis.run_reader import Run
from jaxaudit.analysis.statistics import paired_difference, wilson
from jaxaudit.core.perturbation import INTERVENTION
from jaxaudit.report.series import Panel
from jaxaudit.runtime import registry


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
    lost, lost_alone = (_collapsed(run, index) for index in (helped, alone))
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


def _collapsed(run: Run, index: int) -> np.ndarray:
    """Whether each seed collapsed, bool `[seed]`."""
    assert run.metrics is not None, "`effect` checks it"
    table = run.metrics[run.metrics["condition"] == _name(run, index)].set_index("seed")
    return np.isfinite(table["collapse_time"].loc[run.telemetry["seed"].values].to_numpy(float))


def _alarmed(run: Run, index: int) -> np.ndarray:
    """Whether each seed had an alarm since the condition's onset, bool `[seed]`."""
    alarm = run.channel("alarm")
    assert alarm is not None, "`effect` checks it"
    return np.asarray((alarm[:, index, run.conditions["onset"].iloc[index] :] > 0).any(axis=-1))
