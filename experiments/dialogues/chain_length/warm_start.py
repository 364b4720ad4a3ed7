"""How many updates on demonstrations lift a policy above chance on `chain` at 2, 4 and 8 steps.

    python experiments/dialogues/chain_length/warm_start.py OUT.csv [UPDATES]

The updates of a learner's own warm start (64 demonstrations each, Adam at 1e-3), at two shares of right
demonstrations; those write every step down, the others give a wrong answer at once. One row for each share, number of
steps, seed and look: success and steps written down of 256 rows sampled at temperature 1.
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
"""Updates from one look to the next, demonstrations of each, and rows of a look."""


class WarmStart:
    """One program for all lengths and shares."""

    def __init__(self):
        self.dialogue = ChainDialogue()
        settings = settings_of("grpo")()
        self.learner = DialogueLearner(self.dialogue, settings.structure)
        self.numbers = settings.numbers(self.dialogue.difficulty)
        self.adam = optax.scale_by_adam(0.9, 0.95)

    def begun(self, seed: int) -> tuple[Any, Any]:
        """Parameters and moments."""
        params = self.learner.policy.init(jax.random.key(seed))
        return params, self.adam.init(params)

    def went_on(self, carry: tuple[Any, Any], key: jax.Array, steps: Any, right: Any) -> tuple[Any, dict[str, Any]]:
        """`BETWEEN` updates, and a look."""

        def loss(params: Any, shown: Any) -> jax.Array:
            told = self.learner.policy.log_prob_and_entropy(params, None, shown, 1.0)[0]
            return -jnp.sum(jnp.where(shown.response_mask, told, 0.0)) / jnp.maximum(jnp.sum(shown.response_mask), 1)

        def update(carry: tuple[Any, Any], key: jax.Array) -> tuple[tuple[Any, Any], None]:
            params, moments = carry
            chosen_key, prompts_key = jax.random.split(key)
            chosen = jax.random.bernoulli(chosen_key, right, (ROWS,))
            shown = demonstrate(self.dialogue, jax.random.split(prompts_key, ROWS), steps, chosen)
            direction, moments = self.adam.update(jax.grad(loss)(params, shown), moments)
            return (jax.tree.map(lambda p, d: p - 1e-3 * d, params, direction), moments), None

        update_key, look_key = jax.random.split(key)
        carry, _ = jax.lax.scan(update, carry, jax.random.split(update_key, BETWEEN))
        numbers = self.numbers.replace(difficulty=steps)
        rows = self.learner.collector.sample_undisturbed(carry[0], None, self.dialogue, numbers, look_key, SAMPLED)
        return carry, {"success": jnp.mean(rows.gold), "shown": jnp.mean(rows.rewards["shown"])}


def main(out: str, updates: str = "2000") -> None:
    """Trains, and writes after each lane."""
    start = WarmStart()
    went_on = jax.jit(start.went_on)
    found = []
    for seed in range(SEEDS):
        for steps in LENGTHS:
            for right in SHARES:
                carry = start.begun(seed)
                for look in range(int(updates) // BETWEEN):
                    key = jax.random.fold_in(jax.random.key(1000 + seed), look)
                    carry, told = went_on(carry, key, jnp.float32(steps), jnp.float32(right))
                    named = {"steps": steps, "right": right, "seed": seed, "updates": (look + 1) * BETWEEN}
                    found.append(named | {name: float(value) for name, value in told.items()})
                pd.DataFrame(found).round(4).to_csv(out, index=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
