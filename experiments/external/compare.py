"""The same disturbance in another trainer and in this package's: collapse against magnitude, side by side.

    python experiments/external/compare.py OTHER.csv RUN -o OUT.csv

OTHER.csv has columns seed, magnitude (1: undisturbed), step and performance; RUN is the folder of the audit whose spec
has the same settings, onset and magnitudes. Both series are judged by the same metrics, as far as both go; P_div counts
collapses before half of the audit's steps.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

from jaxaudit.analysis import statistics
from jaxaudit.analysis.metrics import Cadence, MetricSettings
from jaxaudit.analysis.run_reader import Run, load
from jaxaudit.runs.margins.search import collapse_times


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
    both = {"other": of_table(pd.read_csv(given.other)), "jaxaudit": of_run(run)}
    until = min(series.shape[1] for lanes in both.values() for series in lanes.values())
    rows = []
    for name, lanes in both.items():
        times = {m: collapse_times(series[:, :until], onset, windows, Cadence()) for m, series in lanes.items()}
        rows += collapse_rows(name, pd.DataFrame(times), run.steps)
    table = pd.DataFrame(rows)
    table.to_csv(given.out, index=False)
    print(table.to_string(index=False, float_format=lambda x: f"{x:.3g}"))


def of_table(table: pd.DataFrame) -> dict[float, np.ndarray]:
    """Performance `[seed, step]` by magnitude."""
    groups = table.groupby("magnitude")
    return {m: rows.pivot(index="seed", columns="step", values="performance").to_numpy() for m, rows in groups}


def of_run(run: Run) -> dict[float, np.ndarray]:
    """The same of a stored run."""
    magnitudes = run.conditions["magnitude"].fillna(1.0)
    return {m: run.performance[:, place] for place, m in enumerate(magnitudes)}


def collapse_rows(name: str, times: pd.DataFrame, steps: int) -> list[dict]:
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
