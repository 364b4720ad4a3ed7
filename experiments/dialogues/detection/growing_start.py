"""Creates the initial policy of the trainings with a growing tool share: it rarely calls, and then follows the table.

    python experiments/dialogues/detection/growing_start.py runs/growing-start

It is one long warm start on demonstrations of which 14% are correct, at the dialogue's difficulty, stored as a
checkpoint. All lanes begin with it and differ in their random numbers, as trainings of one base model do. With separate
warm starts, only some seeds would learn so rare a skill in few updates, and clean lanes would differ too much.
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
"""The number of rows that are sampled to describe the policy."""


def main(out: Path) -> None:
    """Trains the policy, prints statistics, and writes the checkpoint."""
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
    dialogue_learner = learner.step.__self__  # type: ignore[attr-defined]
    state = jax.jit(learner.init)(jax.random.key(0), learner.data)

    @jax.jit
    def statistics(data, key, difficulty):
        numbers = dataclasses.replace(data.numbers, difficulty=difficulty)
        bound = dialogue_learner.dialogue.bind(data.dialogue)
        rows = dialogue_learner.collector.sample_undisturbed(state.policy.params, None, bound, numbers, key, ROWS)
        masks, calls = dialogue_learner.instruments.masks(rows.role, rows.response_mask), rows.calls > 0
        share = jnp.sum(masks[1]) / jnp.sum(masks[0])
        return share, jnp.mean(calls), jnp.mean(rows.gold), jnp.sum(rows.gold * calls) / jnp.sum(calls)

    for difficulty in (1.0, 4.0):
        share, calls, success, success_after_calls = (
            float(x) for x in statistics(learner.data, jax.random.key(5), jnp.float32(difficulty))
        )
        print(
            f"difficulty {difficulty:g}: tool share {share:.1%}, rows that call {calls:.1%}, "
            f"success {success:.2f}, of rows that call {success_after_calls:.2f}"
        )
    assert learner.save is not None
    learner.save(out, state, learner.data)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
