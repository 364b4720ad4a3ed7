"""The number of updates on demonstrations that lift a policy above chance on `chain` with 2, 4 and 8 steps.

    python experiments/dialogues/chain_length/warm_start.py OUT.csv [UPDATES]

The updates are those of a learner's warm start (64 demonstrations each, Adam at 1e-3), at two shares of correct
demonstrations. Correct ones write down every step, and the others give a wrong answer at once. There is a row for each
share, number of steps, seed and evaluation: success and written steps of 256 rows sampled at temperature 1.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pandas as pd

from jaxaudit.dialogues.chain import ChainDialogue
from jaxaudit.learners.dialogue.demonstrations import demonstrate
from jaxaudit.learners.dialogue.factories import settings_of
from jaxaudit.learners.dialogue.learner import DialogueLearner

LENGTHS, SHARES, SEEDS = (2, 4, 8), (0.5, 0.9), 1
BETWEEN, ROWS, SAMPLED = 100, 64, 256
"""Updates between two evaluations, demonstrations of an update, and rows of an evaluation."""


class WarmStart:
    """A warm start as one program for all lengths and shares."""

    def __init__(self):
        self.dialogue = ChainDialogue()
        settings = settings_of("grpo")()
        self.learner = DialogueLearner(self.dialogue, settings.structure)
        self.numbers = settings.numbers(self.dialogue.difficulty)
        self.adam = optax.scale_by_adam(0.9, 0.95)

    def initial(self, seed: int) -> tuple[Any, Any]:
        """Returns initial parameters and moments."""
        params = self.learner.policy.init(jax.random.key(seed))
        return params, self.adam.init(params)

    def train_and_evaluate(
        self, carry: tuple[Any, Any], key: jax.Array, steps: Any, right: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Trains `BETWEEN` updates and evaluates."""

        def loss(params: Any, rows_: Any) -> jax.Array:
            log_probs = self.learner.policy.log_prob_and_entropy(params, None, rows_, 1.0)[0]
            return -jnp.sum(jnp.where(rows_.response_mask, log_probs, 0.0)) / jnp.maximum(
                jnp.sum(rows_.response_mask), 1
            )

        def update(carry: tuple[Any, Any], key: jax.Array) -> tuple[tuple[Any, Any], None]:
            params, moments = carry
            right_key, prompts_key = jax.random.split(key)
            is_right = jax.random.bernoulli(right_key, right, (ROWS,))
            rows_ = demonstrate(self.dialogue, jax.random.split(prompts_key, ROWS), steps, is_right)
            direction, moments = self.adam.update(jax.grad(loss)(params, rows_), moments)
            return (jax.tree.map(lambda p, d: p - 1e-3 * d, params, direction), moments), None

        update_key, evaluation_key = jax.random.split(key)
        carry, _ = jax.lax.scan(update, carry, jax.random.split(update_key, BETWEEN))
        numbers = self.numbers.replace(difficulty=steps)
        rows = self.learner.collector.sample_undisturbed(
            carry[0], None, self.dialogue, numbers, evaluation_key, SAMPLED
        )
        return carry, {"success": jnp.mean(rows.gold), "shown": jnp.mean(rows.rewards["shown"])}


def main(out: str, updates: str = "2000") -> None:
    """Trains, and stores the results after each lane."""
    start = WarmStart()
    train_and_evaluate = jax.jit(start.train_and_evaluate)
    results = []
    for seed in range(SEEDS):
        for steps in LENGTHS:
            for right in SHARES:
                carry = start.initial(seed)
                for evaluation in range(int(updates) // BETWEEN):
                    key = jax.random.fold_in(jax.random.key(1000 + seed), evaluation)
                    carry, values = train_and_evaluate(carry, key, jnp.float32(steps), jnp.float32(right))
                    keys = {"steps": steps, "right": right, "seed": seed, "updates": (evaluation + 1) * BETWEEN}
                    results.append(keys | {name: float(value) for name, value in values.items()})
                pd.DataFrame(results).round(4).to_csv(out, index=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
