"""Compares collapse by magnitude under the same disturbance in another trainer and in this package.

    python experiments/external/compare.py OTHER.csv RUN -o OUT.csv

OTHER.csv has columns seed, magnitude (1: undisturbed), step and performance. RUN is the folder of an audit with the
same settings, onset and magnitudes. Both are evaluated by the same metrics up to the shorter length. P_div counts
collapses in the first half of the audit's steps.
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
    """Compares, and writes the table."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("other", type=Path)
    options.add_argument("run", type=Path)
    options.add_argument("-o", dest="out", type=Path, required=True)
    arguments = options.parse_args()
    run = load(arguments.run)
    windows = MetricSettings(run.setting("window", 50), run.setting("hold", 100))
    onset = int(run.conditions["onset"].iloc[0])
    series_by_trainer = {"other": of_table(pd.read_csv(arguments.other)), "jaxaudit": of_run(run)}
    common_steps = min(series.shape[1] for lanes in series_by_trainer.values() for series in lanes.values())
    rows = []
    for name, lanes in series_by_trainer.items():
        times = {m: collapse_times(series[:, :common_steps], onset, windows, Cadence()) for m, series in lanes.items()}
        rows += collapse_rows(name, pd.DataFrame(times), run.steps)
    table = pd.DataFrame(rows)
    table.to_csv(arguments.out, index=False)
    print(table.to_string(index=False, float_format=lambda x: f"{x:.3g}"))


def of_table(table: pd.DataFrame) -> dict[float, np.ndarray]:
    """Returns performance `[seed, step]` by magnitude."""
    groups = table.groupby("magnitude")
    return {m: rows.pivot(index="seed", columns="step", values="performance").to_numpy() for m, rows in groups}


def of_run(run: Run) -> dict[float, np.ndarray]:
    """Returns the same for a stored run."""
    magnitudes = run.conditions["magnitude"].fillna(1.0)
    return {m: run.performance[:, index] for index, m in enumerate(magnitudes)}


def collapse_rows(name: str, times: pd.DataFrame, steps: int) -> list[dict]:
    """Returns a row for each magnitude with P_div and collapses at any time, and rows of critical magnitudes."""
    control = times[1.0].to_numpy()
    magnitudes = [m for m in times.columns if m != 1.0]
    rows = []
    for magnitude in times.columns:
        magnitude_times = times[magnitude].to_numpy()
        early, any_time = (
            statistics.divergence(magnitude_times, steps),
            statistics.proportion(statistics.collapsed(magnitude_times)),
        )
        excess = statistics.excess(statistics.collapsed(magnitude_times), statistics.collapsed(control))
        rows.append(
            {
                "trainer": name,
                "magnitude": f"{magnitude:g}",
                "seeds": early.n,
                **_figures("P_div", early),
                **_figures("collapse", any_time),
                "lost": excess.lost,
                "spared": excess.spared,
                "median T_c": np.median(magnitude_times),
            }
        )
    for kind, before in (("P_div", steps / 2), ("collapse", np.inf)):
        table = statistics.collapsed(times[magnitudes].to_numpy(), before)
        undisturbed = statistics.collapsed(control, before)
        critical = statistics.critical_beside(magnitudes, table, undisturbed)
        rows.append({"trainer": name, "magnitude": "critical", "seeds": critical.n, **_figures(kind, critical)})
    return rows


def _figures(kind: str, estimate: statistics.Estimate) -> dict[str, float]:
    return {kind: estimate.value, f"{kind}_low": estimate.low, f"{kind}_high": estimate.high}


if __name__ == "__main__":
    main()
