"""Explained variance while `ppo_lm` trains, with and without value pretraining, undisturbed.

    python experiments/dialogues/critic/training.py OUT.csv CASE SEEDS UPDATES [STEPS]

Explained variance compares values before the updates of an iteration with the returns of its rows. OUT.csv gets a row
for each seed and iteration.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).parents[1]))

from critic_bound import CASES, WARM_START

import jaxaudit as ja
from jaxaudit.analysis.metrics import MetricSettings

CHANNELS = ("explained_variance", "value_bias", "acting_performance")


def main(out: str, case: str, seeds: str, updates: str, steps: str = "60") -> None:
    """Trains, and stores the results."""
    path = Path(out)
    learner = ja.learners.ppo_lm(
        CASES[case],
        kl="none",
        kl_coefficient=0.0,
        **WARM_START,
        critic_warm_start=int(updates),
        performance_every=20,
        telemetry="basic",
    )
    settings = MetricSettings(2, 20, 20)
    data = ja.audit(learner, [], seeds=int(seeds), steps=int(steps), execution="map", settings=settings).telemetry
    lanes = [pd.read_csv(path)] if path.is_file() else []
    for seed in data["seed"].values:
        lane_data = data.sel(seed=seed).isel(condition=0)
        frame = pd.DataFrame({name: lane_data[name].values for name in CHANNELS})
        lanes.append(frame.assign(case=case, updates=int(updates), seed=seed, step=range(len(frame))))
    pd.concat(lanes).round(4).to_csv(path, index=False)
    for lane in lanes[-int(seeds) :]:
        explained = lane.explained_variance.values
        print(
            case,
            updates,
            [round(float(explained[i : i + 10].mean()), 3) for i in range(0, len(explained), 10)],
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
