"""Value signals and gradient noise of PPO by the length of a chain, on `chain` with 2, 4 and 8 steps; and of GRPO.

    python experiments/dialogues/chain_length/chain_length.py FOLDER [LEARNER ...]

An iteration is one pass over 64 rows in 8 minibatches, so that all gradients are taken at nearly the same parameters.
Disturbances act from the first iteration on: a bias of the critic once, a factor on lambda until the end. The results
in FOLDER are `lanes.csv`, with a row for each learner, number of steps, condition and seed, and `steps.csv`, with
channels of undisturbed lanes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

import jaxaudit as ja
from jaxaudit.analysis.metrics import MetricSettings
from jaxaudit.dialogues.chain import ChainDialogue

SEEDS, STEPS = 4, 30
LENGTHS = (2, 4, 8)
WARM_START = {"warm_start": 600, "warm_start_success": 0.35}
"""Long enough for every length (`warm_start.py`), and stopped early enough to leave room for improvement."""
DISTURBED = {
    "ppo_lm": [
        ja.value_bias(3.0, onset=0),
        ja.signal_decay(0.0, onset=0, duration="end"),
    ],
    "grpo": [],
}
CHANNELS = ("acting_performance", "row_tokens", "x_grad", "gradient_norm", "gradient_norm_spread", "no_signal")
OF_CRITIC = ("explained_variance", "value_bias", "value_loss")


def train(preset: str, steps: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Trains a learner; returns a table of all lanes, and one of undisturbed lanes in every iteration."""
    learner = getattr(ja.learners, preset)(
        ChainDialogue(difficulty=steps),
        kl="none",
        kl_coefficient=0.0,
        epochs=1,
        minibatches=8,
        **WARM_START,
        performance_rows=64,
        performance_every=5,
    )
    data = ja.audit(
        learner, DISTURBED[preset], seeds=SEEDS, steps=STEPS, execution="map", settings=MetricSettings(2, 20, 20)
    ).telemetry
    lanes, step_tables = [], []
    for condition in data["condition"].values:
        for seed in data["seed"].values:
            lane = data.sel(condition=condition, seed=seed)
            keys = {"learner": preset, "steps": steps, "condition": condition, "seed": seed}
            lanes.append(
                keys
                | {
                    "warm_start": lane["warm_start_success"].values[0],
                    "performance": lane["performance"].values[-1],
                    "least": lane["acting_performance"].values.min(),
                    "entropy": lane["entropy"].sel(stratum="all").values[-1],
                    "acting": lane["acting_performance"].values[-10:].mean(),
                }
            )
            if preset == "ppo_lm":
                lanes[-1] |= {
                    "explained_variance": lane["explained_variance"].values[-10:].mean(),
                    "value_bias": lane["value_bias"].values[-10:].mean(),
                    "value_bias_first": lane["value_bias"].values[0],
                }
                correlation = lane["value_correlation"].values[-10:].mean(axis=0)
                lanes[-1] |= {
                    f"correlation {d}": c for d, c in zip(data["distance"].values[:5], correlation, strict=False)
                }
            if condition.startswith("control"):
                channels = [c for c in (*CHANNELS, *(OF_CRITIC if preset == "ppo_lm" else ())) if c in data]
                frame = pd.DataFrame({name: lane[name].values for name in channels})
                step_tables.append(frame.assign(**keys, step=range(len(frame))))
    return pd.DataFrame(lanes), pd.concat(step_tables)


def main(out: str, *presets: str) -> None:
    """Trains and stores results for each learner and length; the tables keep their rows of other learners."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    lanes, step_tables = (
        [pd.read_csv(folder / name)] if (folder / name).is_file() else [] for name in ("lanes.csv", "steps.csv")
    )
    for preset in presets or DISTURBED:
        for tables in (lanes, step_tables):
            tables[:] = [frame[frame.learner != preset] for frame in tables]
        for steps in LENGTHS:
            for tables, table in zip((lanes, step_tables), train(preset, steps), strict=True):
                tables.append(table)
            pd.concat(lanes).round(4).to_csv(folder / "lanes.csv", index=False)
            pd.concat(step_tables).round(4).to_csv(folder / "steps.csv", index=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
