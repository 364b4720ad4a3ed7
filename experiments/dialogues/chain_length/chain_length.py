"""PPO's value signals and its gradients' noise over the length of a chain, on `chain` at 2, 4 and 8 steps; and GRPO.

    python experiments/dialogues/chain_length/chain_length.py FOLDER [LEARNER ...]

An iteration is one pass over 64 rows in 8 minibatches, so that their gradients are all of nearly the same parameters.
Disturbances act from the first iteration: bias of the critic once, lambda times a factor to the end. FOLDER gets
`lanes.csv`, one row for each learner, number of steps, condition and seed, and `steps.csv`, channels of undisturbed
lanes.
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
"""Long enough at every length (`warm_start.py`), and stopped where half of the rows may still become right."""
DISTURBED = {
    "ppo_lm": [
        ja.value_bias(3.0, onset=0),
        ja.signal_decay(0.0, onset=0, duration="end"),
    ],
    "grpo": [],
}
CHANNELS = ("acting_performance", "row_tokens", "x_grad", "gradient_norm", "gradient_norm_spread", "no_signal")
OF_CRITIC = ("explained_variance", "value_bias", "value_loss")


def trained(preset: str, steps: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Of all lanes, and of the undisturbed ones in every iteration."""
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
    lanes, every = [], []
    for condition in data["condition"].values:
        for seed in data["seed"].values:
            one = data.sel(condition=condition, seed=seed)
            named = {"learner": preset, "steps": steps, "condition": condition, "seed": seed}
            lanes.append(
                named
                | {
                    "warm_start": one["warm_start_success"].values[0],
                    "performance": one["performance"].values[-1],
                    "least": one["acting_performance"].values.min(),
                    "entropy": one["entropy"].sel(stratum="all").values[-1],
                    "acting": one["acting_performance"].values[-10:].mean(),
                }
            )
            if preset == "ppo_lm":
                lanes[-1] |= {
                    "explained_variance": one["explained_variance"].values[-10:].mean(),
                    "value_bias": one["value_bias"].values[-10:].mean(),
                    "value_bias_first": one["value_bias"].values[0],
                }
                correlation = one["value_correlation"].values[-10:].mean(axis=0)
                lanes[-1] |= {
                    f"correlation {d}": c for d, c in zip(data["distance"].values[:5], correlation, strict=False)
                }
            if condition.startswith("control"):
                read = [c for c in (*CHANNELS, *(OF_CRITIC if preset == "ppo_lm" else ())) if c in data]
                frame = pd.DataFrame({name: one[name].values for name in read})
                every.append(frame.assign(**named, step=range(len(frame))))
    return pd.DataFrame(lanes), pd.concat(every)


def main(out: str, *presets: str) -> None:
    """Trains and writes, learner by learner and length by length; the tables keep what they have of other learners."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    lanes, every = (
        [pd.read_csv(folder / name)] if (folder / name).is_file() else [] for name in ("lanes.csv", "steps.csv")
    )
    for preset in presets or DISTURBED:
        for found in (lanes, every):
            found[:] = [frame[frame.learner != preset] for frame in found]
        for steps in LENGTHS:
            for found, one in zip((lanes, every), trained(preset, steps), strict=True):
                found.append(one)
            pd.concat(lanes).round(4).to_csv(folder / "lanes.csv", index=False)
            pd.concat(every).round(4).to_csv(folder / "steps.csv", index=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
