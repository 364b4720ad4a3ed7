"""Finding III: does the meta-state's deviation come before the collapse?

    python experiments/findings/ordering.py OUT PPO=runs/detect/ppo-on-... GPT-2=runs/detect/language_model-on-...

From the folders that `jaxaudit detect` writes: of every lane that collapsed, when a detector's first alarm since the
onset came, for the monitor, the best channels alone, and those that watch performance. "By chance" is the share of
clean lanes whose first alarm falls into the same steps, "without collapse" that of disturbed lanes that never collapse:
an alarm that they have as often does not tell of a collapse. Writes `ordering.csv` and draws `ordering.png`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import altair as alt
import numpy as np
import pandas as pd
from basics import asked, markdown, over_seeds, said, save

from jaxaudit.analysis.statistics import wilson
from jaxaudit.monitoring.comparison import NEVER
from jaxaudit.report import style

SLOW = 5
"""Steps from the onset from which on a collapse counts as slow."""

SINGLE = 2
"""The best channels alone that are shown, by AUROC over all lanes of the comparison: they are picked afterwards."""

OF_PERFORMANCE = (
    "deviation of performance",
    "CUSUM of performance",
    "BOCPD of performance",
    "rolling variance of performance",
)
WHEN = ("before", "at", "after", "never")


def shown(folder: Path) -> list[str]:
    """The monitor, the best channels alone, and what watches performance."""
    ranked = pd.read_csv(folder / "detectors.csv").sort_values("auroc", ascending=False)["detector"]
    monitor = [name for name in ranked if name.startswith("meta-state")]
    single = [name for name in ranked if name.startswith("deviation of") and name not in OF_PERFORMANCE]
    return [*monitor, *single[:SINGLE], *(name for name in OF_PERFORMANCE if name in set(ranked))]


def lead(rows: pd.DataFrame) -> np.ndarray:
    """Steps from the first alarm since the onset to the collapse; minus infinity where none was given."""
    return np.where(rows.late_alarm == NEVER, -np.inf, rows.collapse_time - rows.late_alarm)


def when(leads: np.ndarray) -> np.ndarray:
    """Which of WHEN each lead is."""
    return np.select([leads > 0, leads == 0, np.isfinite(leads)], WHEN[:3], WHEN[3])


def elsewhere(others: pd.DataFrame, first: np.ndarray, collapsed: pd.DataFrame) -> float:
    """The share of other lanes' alarms that fall between a collapsed lane's onset and its collapse.

    Args:
      others: lanes that did not collapse, with their fold.
      first: the alarm of each that counts, step or NEVER.
      collapsed: lanes that did, each compared with the others of its fold.

    Returns:
      the mean over the collapsed lanes; NaN without any.
    """
    shares = []
    for lane in collapsed.itertuples():
        same = first[(others.fold == lane.fold).to_numpy()]
        if len(same):
            shares.append(float(((same >= lane.onset) & (same < lane.collapse_time)).mean()))
    return float(np.mean(shares)) if shares else np.nan


def middle(leads: np.ndarray, counts: np.ndarray) -> float:
    """The lower median of leads, each taken so many times."""
    order = np.argsort(leads)
    total = counts[order].cumsum()
    return float(leads[order][(total >= total[-1] / 2).argmax()]) if total[-1] else np.nan


def tell(name: str, said_of: pd.DataFrame, detectors: Sequence[str]) -> list[dict]:
    """A row for each detector and kind of collapse."""
    rows = []
    for detector in detectors:
        table = said_of[said_of.detector == detector]
        clean, disturbed = table[table.clean], table[~table.clean]
        collapsed = disturbed[np.isfinite(disturbed.collapse_time)]
        spared = disturbed[np.isinf(disturbed.collapse_time)]
        alarms = int((clean.alarm != NEVER).sum())
        delay = collapsed.collapse_time - collapsed.onset
        for kind, chosen in (("abrupt", collapsed[delay < SLOW]), ("slow", collapsed[delay >= SLOW])):
            if not len(chosen):
                continue
            leads = lead(chosen)
            seeds = list(chosen.seed.unique())
            of = chosen.seed.map({seed: i for i, seed in enumerate(seeds)}).to_numpy()
            found = over_seeds(lambda counts, leads=leads, of=of: middle(leads, counts[of]), seeds)
            shares = pd.Series(when(leads)).value_counts()
            rows.append(
                {
                    "learner": name,
                    "collapses": kind,
                    "lanes": len(chosen),
                    "detector": detector,
                    **{what: int(shares.get(what, 0)) for what in WHEN},
                    "median lead": found.value,
                    "low": found.low,
                    "high": found.high,
                    "before, by chance": elsewhere(clean, clean.alarm.to_numpy(), chosen),
                    "before, without collapse": elsewhere(spared, spared.late_alarm.to_numpy(), chosen),
                    "false alarms": said(wilson(alarms, len(clean)), ".1%"),
                }
            )
    return rows


def draw(table: pd.DataFrame, path: Path) -> None:
    """Of each detector the shares of collapses it came before, at, after, or never told of."""
    long = table.melt(["learner", "collapses", "detector", "lanes"], list(WHEN), "when", "count")
    long["share"] = long["count"] / long["lanes"]
    long["rank"] = long["when"].map({what: i for i, what in enumerate(WHEN)})
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
    """Tells and draws."""
    out, named = asked(__doc__, "of a learner in what `jaxaudit detect` wrote")
    rows = []
    for name, (folder, *_) in named.items():
        rows += tell(name, pd.read_csv(folder / "lanes.csv"), shown(folder))
    table = pd.DataFrame(rows)
    table.to_csv(out / "ordering.csv", index=False, float_format="%.4g")
    print(markdown(table))
    draw(table, out / "ordering.png")


if __name__ == "__main__":
    main()
