"""Which channels of a run left what its undisturbed lanes do, and how long before the performance collapsed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

from jaxaudit.analysis.run_reader import CONTROL, Run
from jaxaudit.monitoring.channels import measured, repeated, series
from jaxaudit.monitoring.envelope import Envelope, forward_filled

FEWEST_SEEDS = 3
"""That a spread among undisturbed lanes takes, when one of them is held against the others."""


def first_signals(run: Run) -> pd.DataFrame:
    """How each channel warned of each condition's collapses.

    A channel's score is how many standard deviations of the control's other seeds it is from their mean at that step
    (Shewhart, 1931), and its limit the largest score from the onset on of any control, each held against the others:
    of n seeds, about one undisturbed run in n + 1 goes beyond. A channel that is no measurement (the same in all
    controls), or says what another does, is not read.

    Returns:
      one row for each condition that collapses in some seed and each channel that ever goes beyond its limit there:
      condition, channel, collapsed (seeds), warned (of them, those in which the channel goes beyond its limit no later
      than the collapse), after_onset and lead (medians over the seeds in which it goes beyond, in steps: from the onset
      to the first time, and from then to the collapse), score (median over those seeds, in limits, the first time);
      empty where there are too few seeds or no collapses.
    """
    columns = ["condition", "channel", "collapsed", "warned", "after_onset", "lead", "score"]
    if run.metrics is None or run.seeds < FEWEST_SEEDS:
        return pd.DataFrame(columns=columns)
    times = run.metrics.set_index(["seed", "condition"])["collapse_time"]
    values = series(run.telemetry.load()).transpose("seed", "condition", "step", "channel")
    names = [str(name) for name in values.channel.values]
    found: list[dict] = []
    for onset, group in run.conditions.groupby("onset"):
        controls = group.index[group["perturbation"] == CONTROL]
        if not len(controls):
            continue
        clean = values.values[:, controls[0]].astype(np.float64)
        kept = measured(clean) & ~repeated(clean, names)
        read = [name for name, wanted in zip(names, kept, strict=True) if wanted]
        limit, judged = _judge(clean[..., kept], int(onset))
        for index in group.index.difference(controls):
            label = group["condition"][index]
            when = np.array([times.get((seed, label), np.nan) for seed in run.telemetry["seed"].values], float)
            if np.isfinite(when).any():
                scores = judged(values.values[:, index][..., kept])
                found += _rows(label, read, scores / limit, when, int(onset))
    return pd.DataFrame(found, columns=columns)


def _judge(clean: np.ndarray, onset: int) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """Limits `[d]` of controls `[n, T, d]`, and what gives scores `[n, T - onset, d]` of lanes of the same seeds."""
    filled = forward_filled(clean)
    others = [Envelope.of(np.delete(filled, seed, axis=0)) for seed in range(len(filled))]

    def scores(lanes: np.ndarray) -> np.ndarray:
        whole = forward_filled(lanes)
        z = np.concatenate([np.abs(e.standardise(x[None])) for e, x in zip(others, whole, strict=True)])
        lost = ~np.isfinite(lanes) & np.isfinite(clean)
        return np.where(np.logical_or.accumulate(lost, axis=1), np.inf, z)[:, onset:]

    limit = scores(clean).max(axis=(0, 1))
    return np.where(limit > 0, limit, 1.0), scores


def _rows(label: str, names: list[str], scores: np.ndarray, times: np.ndarray, onset: int) -> list[dict]:
    """Of one condition: scores `[n, T - onset, d]` in limits, and the seeds' collapse times `[n]`."""
    beyond = scores > 1
    first = np.where(beyond.any(axis=1), beyond.argmax(axis=1).astype(float), np.nan)  # [n, d]
    collapsed = np.isfinite(times)
    rows = []
    for column, name in enumerate(names):
        mine = collapsed & np.isfinite(first[:, column])
        if not mine.any():
            continue
        after = first[mine, column]
        lead = times[mine] - onset - after
        rows.append(
            {
                "condition": label,
                "channel": name,
                "collapsed": int(collapsed.sum()),
                "warned": int((lead >= 0).sum()),
                "after_onset": float(np.median(after)),
                "lead": float(np.median(lead)),
                "score": float(np.median(scores[mine, after.astype(int), column])),
            }
        )
    return rows


def earliest(signals: pd.DataFrame, most: int) -> pd.DataFrame:
    """The first channels of each condition, at most `most`: those that warn in most seeds, of these the earliest.

    Of a vector's entries the first alone.
    """
    order = signals.sort_values(["warned", "after_onset", "score"], ascending=[False, True, False], kind="stable")
    order = order[~order.assign(vector=order["channel"].str.partition("[")[0]).duplicated(["condition", "vector"])]
    first = order.groupby("condition", sort=False).head(most)
    place = {condition: number for number, condition in enumerate(signals["condition"].unique())}
    return first.sort_values("condition", key=lambda names: names.map(place), kind="stable")
