"""GPT-2 at smaller widths than the package's smallest, for experiments with many trainings on few cores."""

from typing import Any

import jaxaudit as ja
from jaxaudit.models import gpt2

gpt2.SIZES.update({"w24": gpt2.Size(24, 2, 2), "w48": gpt2.Size(48, 2, 2)})


def small_gpt2(size: str, **changed: Any) -> ja.Learner:
    """GPT-2 on the bytes of the Python standard library, with 128 tokens per step."""
    defaults: dict[str, Any] = {
        "context": 32,
        "batch_size": 4,
        "accumulation": 1,
        "learning_rate": 3e-3,
        "warmup": 0.05,
        "evaluations": 0,
        "validation": 8,
        "telemetry": "basic",
    }
    return ja.learners.language_model("python-stdlib", size=size, **defaults | changed)
