"""The policy that the trainings with a growing tool share begin with: it seldom calls, and then follows the table.

    python experiments/dialogues/detection/growing_start.py runs/growing-start

One long warm start on demonstrations of which 14% are right, at the dialogue's difficulty, written as a checkpoint. All
lanes begin with it and differ in what they sample, as trainings of one base model do: few updates teach so rare a skill
to some seeds and not to others, and this makes clean lanes unlike each other.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

import jaxaudit as ja
from jaxaudit.dialogues.hop import Hop

ROWS = 512
"""Sampled rows, of which is told what the policy does."""


def main(out: Path) -> None:
    """Trains, tells, and writes."""
    hop = Hop(difficulty=4, scratch=2, length=24, rare_share=0.005)
    learner = ja.learners.grpo(
        hop,
        warm_start=900,
        warm_start_right=0.14,
        warm_start_learning_rate=4e-3,
        warm_start_success=0.9,
        kl="none",
        kl_coefficient=0.0,
        telemetry="basic",
    )
    made = learner.step.__self__  # type: ignore[attr-defined]
    state = jax.jit(learner.init)(jax.random.key(0), learner.data)

    @jax.jit
    def told(data, key, difficulty):
        numbers = dataclasses.replace(data.numbers, difficulty=difficulty)
        bound = made.dialogue.bind(data.dialogue)
        rows = made.collector.sample_undisturbed(state.policy.params, None, bound, numbers, key, ROWS)
        masks, called = made.instruments.masks(rows.role, rows.response_mask), rows.calls > 0
        share = jnp.sum(masks[1]) / jnp.sum(masks[0])
        return share, jnp.mean(called), jnp.mean(rows.gold), jnp.sum(rows.gold * called) / jnp.sum(called)

    for difficulty in (1.0, 4.0):
        share, called, success, after = (
            float(x) for x in told(learner.data, jax.random.key(5), jnp.float32(difficulty))
        )
        print(
            f"difficulty {difficulty:g}: tool share {share:.1%}, rows that call {called:.1%}, "
            f"success {success:.2f}, of rows that call {after:.2f}"
        )
    assert learner.save is not None
    learner.save(out, state, learner.data)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
