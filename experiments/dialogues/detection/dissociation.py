"""Finding I on dialogues: is GRPO's final success apart from its stability? As `experiments/findings/dissociation.py`.

    python experiments/dialogues/detection/dissociation.py train OUT.csv --paradigm GRPO
    python experiments/dialogues/detection/dissociation.py tell OUT.csv FOLDER

Configurations of GRPO on hop differ in learning rate, clip range, clipping threshold and temperature.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "findings"))

import dissociation

import jaxaudit as ja
from jaxaudit.dialogues.hop import Hop
from jaxaudit.metrics import MetricSettings


def grpo() -> ja.Learner:
    """GRPO on hop, rows as in the other experiments here."""
    return ja.learners.grpo(Hop(rare_share=0.005), warm_start=150, kl="none", kl_coefficient=0.0, telemetry="basic")


dissociation.PARADIGMS["GRPO"] = dissociation.Paradigm(
    {"hop": grpo},
    {"learning_rate": (0.3, 5.0), "ratio_clip": (0.3, 3.0), "clip_norm": (0.1, 10.0), "temperature": (0.7, 1.4)},
    noise=0.03,
    spike=10.0,
    steps=60,
    settings=MetricSettings(window=20, hold=15),
    execution="vmap",
)
dissociation.VARY["ratio_clip"] = lambda factor: ja.ratio_clip_failure(factor, **dissociation.WHOLE_RUN)
dissociation.VARY["temperature"] = lambda factor: ja.temperature_spike(factor, **dissociation.WHOLE_RUN)

if __name__ == "__main__":
    dissociation.main()
