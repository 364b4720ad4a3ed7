"""Finding I on dialogues: is GRPO's final success independent of its stability?

The method is that of `experiments/findings/dissociation.py`.

    python experiments/dialogues/dissociation/dissociation.py train OUT.csv --paradigm GRPO --seeds 3
    python experiments/dialogues/dissociation/dissociation.py tell OUT.csv FOLDER

Configurations of GRPO on hop differ in learning rate, KL weight, clip range, entropy bonus and clipping threshold,
which are data of the program, and in epochs and group size, which need a separate program for each value.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "findings"))

import dissociation

import jaxaudit as ja
from jaxaudit.analysis.metrics import MetricSettings
from jaxaudit.dialogues.hop import Hop


def grpo(**changed: Any) -> ja.Learner:
    """GRPO on hop with 64 rows per iteration, as in the other experiments on dialogues, and a small entropy bonus."""
    defaults = {"warm_start": 150, "entropy_coefficient": 0.005, "telemetry": "basic"}
    return ja.learners.grpo(Hop(rare_share=0.005), **defaults | changed)


dissociation.PARADIGMS["GRPO"] = dissociation.Paradigm(
    {
        "2 epochs, groups of 8": grpo,
        "4 epochs, groups of 8": partial(grpo, epochs=4),
        "2 epochs, groups of 16": partial(grpo, prompts=4, group_size=16),
    },
    {
        "learning_rate": (0.3, 8.0),
        "kl_coefficient": (0.1, 10.0),
        "ratio_clip": (0.25, 4.0),
        "entropy_coefficient": (0.1, 10.0),
        "clip_norm": (0.1, 10.0),
    },
    noise=0.03,
    spike=10.0,
    steps=32,
    settings=MetricSettings(window=8, hold=8, horizon=16),
    execution="map",
    besides={"verifier_flip": lambda onset: ja.verifier_flip(1.0, onset=onset, duration=10)},
    draws=10,
)
dissociation.VARY |= {
    "kl_coefficient": lambda factor: ja.kl_failure(factor, **dissociation.WHOLE_RUN),
    "ratio_clip": lambda factor: ja.ratio_clip_failure(factor, **dissociation.WHOLE_RUN),
}

if __name__ == "__main__":
    dissociation.main()
