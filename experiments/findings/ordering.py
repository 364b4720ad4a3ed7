"""Finding III: does the deviation of the meta-state precede the collapse?

    python experiments/findings/ordering.py OUT PPO=runs/detect/ppo-on-... GPT-2=runs/detect/language_model-on-...

The inputs are folders written by `jaxaudit detect`. For every lane that collapsed, the first alarm after the onset is
compared with the collapse, for the monitor, the best channels alone, and detectors of performance. "By chance" is the
share of clean lanes whose first alarm falls into the same steps, and "without collapse" that of disturbed lanes that
never collapse; alarms that are as frequent there do not predict collapses. Writes `ordering.csv` and `ordering.png`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import altair as alt
import numpy as np
import pandas as pd
from basics import format_estimate, markdown, over_seeds, parse_arguments, save

from jaxaudit.analysis.statistics import wilson
from jaxaudit.monitoring.comparison import NEVER
from jaxaudit.report import style

SLOW = 5
"""Collapses at least this many steps after the onset count as slow."""

SINGLE = 2
"""The number of best channels alone that are shown, selected by AUROC over all lanes of the comparison."""

OF_PERFORMANCE = (
    "deviation of performance",
    "CUSUM of performance",
    "BOCPD of performance",
    "rolling variance of performance",
)
WHEN = ("before", "at", "after", "never")


def selected_detectors(folder: Path) -> list[str]:
    """Returns the names of the monitor, the best channels alone, and detectors of performance."""
    ranked = pd.read_csv(folder / "detectors.csv").sort_values("auroc", ascending=False)["detector"]
    monitor = [name for name in ranked if name.startswith("meta-state")]
    single = [name for name in ranked if name.startswith("deviation of") and name not in OF_PERFORMANCE]
    return [*monitor, *single[:SINGLE], *(name for name in OF_PERFORMANCE if name in set(ranked))]


def lead(rows: pd.DataFrame) -> np.ndarray:
    """Returns the steps from the first alarm after the onset to the collapse, or minus infinity without an alarm."""
    return np.where(rows.late_alarm == NEVER, -np.inf, rows.collapse_time - rows.late_alarm)


def when(leads: np.ndarray) -> np.ndarray:
    """Classifies each lead as one of WHEN."""
    return np.select([leads > 0, leads == 0, np.isfinite(leads)], WHEN[:3], WHEN[3])


def share_in_window(others: pd.DataFrame, first: np.ndarray, collapsed: pd.DataFrame) -> float:
    """Returns the share of other lanes' alarms that fall between the onset and the collapse of collapsed lanes.

    Args:
      others: lanes that did not collapse, with their fold.
      first: the first relevant alarm of each, step or NEVER.
      collapsed: lanes that collapsed, each compared with the other lanes of its fold.

    Returns:
      the mean over the collapsed lanes, or NaN without any.
    """
    shares = []
    for lane in collapsed.itertuples():
        first_of_fold = first[(others.fold == lane.fold).to_numpy()]
        if len(first_of_fold):
            shares.append(float(((first_of_fold >= lane.onset) & (first_of_fold < lane.collapse_time)).mean()))
    return float(np.mean(shares)) if shares else np.nan


def weighted_median(leads: np.ndarray, counts: np.ndarray) -> float:
    """Returns the lower weighted median of leads."""
    order = np.argsort(leads)
    cumulative = counts[order].cumsum()
    return float(leads[order][(cumulative >= cumulative[-1] / 2).argmax()]) if cumulative[-1] else np.nan


def lead_rows(name: str, lanes: pd.DataFrame, detectors: Sequence[str]) -> list[dict]:
    """Returns a row for each detector and kind of collapse."""
    rows = []
    for detector in detectors:
        table = lanes[lanes.detector == detector]
        clean, disturbed = table[table.clean], table[~table.clean]
        collapsed = disturbed[np.isfinite(disturbed.collapse_time)]
        spared = disturbed[np.isinf(disturbed.collapse_time)]
        alarms = int((clean.alarm != NEVER).sum())
        delay = collapsed.collapse_time - collapsed.onset
        for kind, group in (("abrupt", collapsed[delay < SLOW]), ("slow", collapsed[delay >= SLOW])):
            if not len(group):
                continue
            leads = lead(group)
            seeds = list(group.seed.unique())
            seed_index = group.seed.map({seed: i for i, seed in enumerate(seeds)}).to_numpy()
            median_lead = over_seeds(
                lambda counts, leads=leads, seed_index=seed_index: weighted_median(leads, counts[seed_index]), seeds
            )
            shares = pd.Series(when(leads)).value_counts()
            rows.append(
                {
                    "learner": name,
                    "collapses": kind,
                    "lanes": len(group),
                    "detector": detector,
                    **{name_: int(shares.get(name_, 0)) for name_ in WHEN},
                    "median lead": median_lead.value,
                    "low": median_lead.low,
                    "high": median_lead.high,
                    "before, by chance": share_in_window(clean, clean.alarm.to_numpy(), group),
                    "before, without collapse": share_in_window(spared, spared.late_alarm.to_numpy(), group),
                    "false alarms": format_estimate(wilson(alarms, len(clean)), ".1%"),
                }
            )
    return rows


def draw(table: pd.DataFrame, path: Path) -> None:
    """Draws for each detector the shares of collapses with the first alarm before, at or after, or without one."""
    long = table.melt(["learner", "collapses", "detector", "lanes"], list(WHEN), "when", "count")
    long["share"] = long["count"] / long["lanes"]
    long["rank"] = long["when"].map({name: i for i, name in enumerate(WHEN)})
    scale = alt.Scale(domain=list(WHEN), range=[style.RAMP[3], style.RAMP[1], style.RAMP[0], "#e3e5ea"])
    panels = []
    for (learner, kind), rows in long.groupby(["learner", "collapses"], sort=False):
        bars = (
            alt.Chart(rows)
            .mark_bar()
            .encode(
                x=alt.X("sum(share):Q", title="share of collapsed lanes", axis=alt.Axis(format=".0%")),
                y=alt.Y("detector:N", sort=list(rows.detector.unique()), title=None, axis=alt.Axis(labelLimit=260)),
                color=alt.Color("when:N", title="first alarm", scale=scale, sort=list(WHEN)),
                order="rank:Q",
            )
        )
        title = f"{learner}: {rows.lanes.iloc[0]} {kind} collapses"
        panels.append(bars.properties(title=title, width=260, height=20 * rows.detector.nunique()))
    save(alt.concat(*panels, columns=2).resolve_scale(color="shared", y="independent"), path)


def main() -> None:
    """Writes the table and draws the figure."""
    out, folders_by_name = parse_arguments(__doc__, "folder of a learner, written by `jaxaudit detect`")
    rows = []
    for name, (folder, *_) in folders_by_name.items():
        rows += lead_rows(name, pd.read_csv(folder / "lanes.csv"), selected_detectors(folder))
    table = pd.DataFrame(rows)
    table.to_csv(out / "ordering.csv", index=False, float_format="%.4g")
    print(markdown(table))
    draw(table, out / "ordering.png")


if __name__ == "__main__":
    main()
