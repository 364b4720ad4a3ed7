"""Settings that change the program, on undisturbed hop: group sizes and epochs of each learner, and DPO's beta.

    python experiments/dialogues/four_learners/structure.py OUT.csv [SETTING ...]

Other settings are those of the specs in this folder. An iteration has 64 rows, except that larger groups of DPO have
the same number of pairs and thus more sampled rows. There is a row for each learner, setting, value and seed; rows that
the file already has are not trained again.
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


def train(preset: str, setting: str, value: float) -> pd.DataFrame:
    """Trains a learner, and returns the final performance and entropy of each seed."""
    options = {"warm_start": 150, "performance_rows": 128, "performance_every": 5, "telemetry": "basic", setting: value}
    if setting == "group_size" and preset != "dpo":
        options["prompts"] = ROWS // int(value)
    learner = getattr(ja.learners, preset)(Hop(rare_share=0.005), **options)
    # With a window of 2, the baseline trains no further than necessary.
    data = ja.audit(
        learner, [], seeds=SEEDS, steps=STEPS, execution="map", settings=MetricSettings(2, 20, 20)
    ).telemetry
    final = data.isel(condition=0, step=-1)
    first = data["acting_performance"].isel(condition=0, step=0)
    return pd.DataFrame(
        {
            "learner": preset,
            "setting": setting,
            "value": value,
            "seed": data["seed"].values,
            "first": first.values,
            "performance": final["performance"].values,
            "entropy": final["entropy"].sel(stratum="all").values,
        }
    )


def main(out: str, *settings: str) -> None:
    """Trains what the file lacks, for some settings or for all."""
    path = Path(out)
    tables = [pd.read_csv(path)] if path.is_file() else []
    for preset, setting, values in VARIED:
        for value in values:
            exists = any(((f.learner == preset) & (f.setting == setting) & (f.value == value)).any() for f in tables)
            if not exists and (setting in settings or not settings):
                tables.append(train(preset, setting, value))
                pd.concat(tables).round(4).to_csv(path, index=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
