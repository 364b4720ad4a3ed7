"""What is structure, on hop undisturbed: group sizes and epochs of each learner; and DPO's beta.

    python experiments/dialogues/four_learners/structure.py OUT.csv [SETTING ...]

The settings of the specs beside it; 64 rows an iteration, but that DPO's larger groups are of as many pairs and so of
more rows sampled. One row for each learner, setting, value and seed; what the file has already is not trained again.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

import jaxaudit as ja
from jaxaudit.analysis.metrics import MetricSettings
from jaxaudit.dialogues.hop import Hop

SEEDS, STEPS, ROWS = 4, 60, 64
VARIED = (
    ("grpo", "group_size", (4, 16)),
    ("dpo", "beta", (0.03, 0.3)),
    ("grpo", "epochs", (1, 4)),
    ("ppo_lm", "epochs", (1, 4)),
    ("dpo", "epochs", (4,)),
    ("dpo", "group_size", (4,)),
    ("dapo", "epochs", (1, 4)),
    ("dapo", "group_size", (4, 16)),
)


def trained(preset: str, setting: str, value: float) -> pd.DataFrame:
    """Final performance and entropy of each seed."""
    given = {"warm_start": 150, "performance_rows": 128, "performance_every": 5, "telemetry": "basic", setting: value}
    if setting == "group_size" and preset != "dpo":
        given["prompts"] = ROWS // int(value)
    learner = getattr(ja.learners, preset)(Hop(rare_share=0.005), **given)
    # A window of 2: the baseline goes no further than it must beside its control.
    data = ja.audit(
        learner, [], seeds=SEEDS, steps=STEPS, execution="map", settings=MetricSettings(2, 20, 20)
    ).telemetry
    last = data.isel(condition=0, step=-1)
    first = data["acting_performance"].isel(condition=0, step=0)
    return pd.DataFrame(
        {
            "learner": preset,
            "setting": setting,
            "value": value,
            "seed": data["seed"].values,
            "first": first.values,
            "performance": last["performance"].values,
            "entropy": last["entropy"].sel(stratum="all").values,
        }
    )


def main(out: str, *settings: str) -> None:
    """Trains what the file lacks, of these settings, or of all."""
    path = Path(out)
    found = [pd.read_csv(path)] if path.is_file() else []
    for preset, setting, values in VARIED:
        for value in values:
            there = any(((f.learner == preset) & (f.setting == setting) & (f.value == value)).any() for f in found)
            if not there and (setting in settings or not settings):
                found.append(trained(preset, setting, value))
                pd.concat(found).round(4).to_csv(path, index=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
