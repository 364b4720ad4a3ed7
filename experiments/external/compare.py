"""The same disturbance in another trainer and in this package's: collapse against magnitude, side by side.

    python experiments/external/compare.py OTHER.csv RUN -o OUT.csv

OTHER.csv has columns seed, magnitude (1: undisturbed), step and performance; RUN is the folder of the audit whose spec
has the same settings, onset and magnitudes. Both series are judged by the same metrics.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

from jaxaudit import statistics
from jaxaudit.margins.pool import collapse_times
from jaxaudit.metrics import Cadence, MetricSettings
from jaxaudit.stored import Run, load


def main() -> None:
    """Compares."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("other", type=Path)
    options.add_argument("run", type=Path)
    options.add_argument("-o", dest="out", type=Path, required=True)
    given = options.parse_args()
    run = load(given.run)
    windows = MetricSettings(run.setting("window", 50), run.setting("hold", 100))
    onset = int(run.conditions["onset"].iloc[0])
    both = {"other": of_table(pd.read_csv(given.other), onset, windows), "jaxaudit": of_run(run)}
    rows = [row for name, times in both.items() for row in judged(name, times, run.steps)]
    table = pd.DataFrame(rows)
    table.to_csv(given.out, index=False)
    print(table.to_string(index=False, float_format=lambda x: f"{x:.3g}"))


def of_table(table: pd.DataFrame, onset: int, windows: MetricSettings) -> pd.DataFrame:
    """T_c, a row for each seed and a column for each magnitude."""
    found = {}
    for magnitude, rows in table.groupby("magnitude"):
        series = rows.pivot(index="seed", columns="step", values="performance")
        found[magnitude] = pd.Series(collapse_times(series.to_numpy(), onset, windows, Cadence()), series.index)
    return pd.DataFrame(found)


def of_run(run: Run) -> pd.DataFrame:
    """The same of a stored run."""
    names = run.conditions.assign(magnitude=run.conditions["magnitude"].fillna(1.0))
    return run.collapse_times[list(names["condition"])].set_axis(list(names["magnitude"]), axis=1)


def judged(name: str, times: pd.DataFrame, steps: int) -> list[dict]:
    """A row for each magnitude: P_div and collapse at any time, with intervals; and the critical magnitudes."""
    control = times[1.0].to_numpy()
    magnitudes = [m for m in times.columns if m != 1.0]
    rows = []
    for magnitude in times.columns:
        mine = times[magnitude].to_numpy()
        early, ever = statistics.divergence(mine, steps), statistics.proportion(statistics.collapsed(mine))
        beside = statistics.excess(statistics.collapsed(mine), statistics.collapsed(control))
        rows.append(
            {
                "trainer": name,
                "magnitude": f"{magnitude:g}",
                "seeds": early.n,
                **_figures("P_div", early),
                **_figures("collapse", ever),
                "lost": beside.lost,
                "spared": beside.spared,
                "median T_c": np.median(mine),
            }
        )
    for kind, before in (("P_div", steps / 2), ("collapse", np.inf)):
        table = statistics.collapsed(times[magnitudes].to_numpy(), before)
        undisturbed = statistics.collapsed(control, before)
        found = statistics.critical_beside(magnitudes, table, undisturbed)
        rows.append({"trainer": name, "magnitude": "critical", "seeds": found.n, **_figures(kind, found)})
    return rows


def _figures(kind: str, found: statistics.Estimate) -> dict[str, float]:
    return {kind: found.value, f"{kind}_low": found.low, f"{kind}_high": found.high}


if __name__ == "__main__":
    main()
