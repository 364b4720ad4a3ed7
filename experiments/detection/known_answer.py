"""Telemetry of a known law, disturbed at a known step: how much of it the monitor and every baseline detect.

    python experiments/detection/known_answer.py -o OUT

Four disturbances (planted.py says of what): a drift of all channels together, a growing noise of one channel, one
channel on its way to a fold, and channels that forget faster while each step's distribution stays what it was. Shares
have Wilson's intervals.
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
"""Of disturbances."""


def main() -> None:
    """Compares, prints and writes the table."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("-o", dest="out", type=Path, required=True, help="folder of the results")
    options.add_argument("--clean", type=int, default=400, metavar="N", help="clean runs (%(default)s)")
    options.add_argument("--disturbed", type=int, default=100, metavar="N", help="runs of each kind (%(default)s)")
    options.add_argument("--alpha", type=float, default=0.05, metavar="X", help="false alarms per clean run")
    arguments = options.parse_args()
    prepare_jax()
    lanes = System().lanes(arguments.clean, arguments.disturbed, **{kind: SIZES[kind] for kind in KINDS})
    said = compare(
        lanes, [MonitorDetector(LRU()), *standard_baselines(lanes.channels)], DetectionSettings(alpha=arguments.alpha)
    )
    found = summarise_by_condition(said, list(said.detector.unique()))
    arguments.out.mkdir(parents=True, exist_ok=True)
    found.to_csv(arguments.out / "known_answer.csv", index=False)
    print(in_words(found).to_string())


def in_words(found: pd.DataFrame) -> pd.DataFrame:
    """A row for each detector and a column for each condition: the share detected, of clean runs with a false alarm."""
    share = "{detected:.2f} [{detected_low:.2f}, {detected_high:.2f}]"
    told = found.assign(share=[share.format(**row) for row in found.to_dict("records")])
    return told.pivot_table(index="detector", columns="condition", values="share", aggfunc="first", sort=False)


if __name__ == "__main__":
    main()
