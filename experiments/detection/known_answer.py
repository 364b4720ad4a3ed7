"""Detection of simulated disturbances at a known step, by the monitor and every baseline.

    python experiments/detection/known_answer.py -o OUT

The four disturbances (see planted.py) are a drift of all channels, growing noise in one channel, one channel that
approaches a fold bifurcation, and channels whose autocorrelation falls while the distribution at each step stays the
same. Shares have Wilson intervals.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
from planted import SIZES, System

from jaxaudit.cli.main import prepare_jax
from jaxaudit.monitoring.baselines import standard_baselines
from jaxaudit.monitoring.comparison import DetectionSettings, compare, summarise_by_condition
from jaxaudit.monitoring.detector import MonitorDetector
from jaxaudit.monitoring.state_space import LRU

KINDS = ("drift", "ramp", "fold", "tempo")
"""The kinds of disturbances."""


def main() -> None:
    """Compares the detectors, and prints and writes the table."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("-o", dest="out", type=Path, required=True, help="folder of the results")
    options.add_argument("--clean", type=int, default=400, metavar="N", help="clean runs (%(default)s)")
    options.add_argument("--disturbed", type=int, default=100, metavar="N", help="runs of each kind (%(default)s)")
    options.add_argument("--alpha", type=float, default=0.05, metavar="X", help="false alarms per clean run")
    arguments = options.parse_args()
    prepare_jax()
    lanes = System().lanes(arguments.clean, arguments.disturbed, **{kind: SIZES[kind] for kind in KINDS})
    comparison = compare(
        lanes, [MonitorDetector(LRU()), *standard_baselines(lanes.channels)], DetectionSettings(alpha=arguments.alpha)
    )
    summary = summarise_by_condition(comparison, list(comparison.detector.unique()))
    arguments.out.mkdir(parents=True, exist_ok=True)
    summary.to_csv(arguments.out / "known_answer.csv", index=False)
    print(share_table(summary).to_string())


def share_table(summary: pd.DataFrame) -> pd.DataFrame:
    """Returns a table of shares with an alarm, by detector and condition; for clean runs these are false alarms."""
    template = "{detected:.2f} [{detected_low:.2f}, {detected_high:.2f}]"
    shares = summary.assign(share=[template.format(**row) for row in summary.to_dict("records")])
    return shares.pivot_table(index="detector", columns="condition", values="share", aggfunc="first", sort=False)


if __name__ == "__main__":
    main()
