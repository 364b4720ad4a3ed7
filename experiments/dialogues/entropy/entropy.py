"""How the entropy of a policy changes in an iteration of GRPO on hop, and what first-order theory says that it would.

    python experiments/dialogues/entropy/entropy.py OUT.csv

At a slot with logits z and probabilities pi, d pi_i / d z_j = pi_i (delta_ij - pi_j), hence to first order

    change of pi       pi (dz - E_pi dz)             ("probability")
    change of entropy  -Cov_pi(log pi, dz)           ("logits")

with the dz that the iteration's four updates made, on the rows that they were made of. Were dz the advantage times a
rate (natural policy gradient on a table), the second would be -rate Cov_pi(log pi, A - coefficient log pi), where the
last term is an entropy bonus's; from the sampled tokens a it is estimated, up to the rate, by the mean of
-(log pi(a) + H) A + coefficient Var_pi(log pi) ("advantage").

One row for each lane and iteration: the mean over own slots of the entropy before, of its change and of the two
predictions; the R^2 of the probabilities' prediction (over all own slots and tokens of the vocabulary); the trace of
the Jacobian, sum_i pi_i (1 - pi_i); the root mean square of dz; the mean reward.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

import jaxaudit as ja
from jaxaudit.core.taps import Taps
from jaxaudit.dialogues.hop import Hop
from jaxaudit.learners.dialogue.collection import Models
from jaxaudit.learners.dialogue.factories import structure_of
from jaxaudit.learners.dialogue.learner import DialogueLearner
from jaxaudit.models import gpt2

SEEDS, STEPS = 4, 60
LANES = ((0.0, 3e-4), (0.05, 3e-4), (0.0, 1e-3))
"""Entropy coefficient and learning rate."""


def told(logits: jax.Array, after: jax.Array, own: jax.Array, sampled: Any, coefficient: Any) -> dict[str, jax.Array]:
    """What happened at own slots, and what should have.

    Args:
      logits, after: before and after the updates, `[N, T, V]`, of the token that each slot holds.
      own: bool `[N, T]`.
      sampled: each token's advantage and log-probability, `[N, T]`.
      coefficient: of the entropy bonus.
    """
    advantage, written = sampled

    def mean(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(own, x, 0.0)) / jnp.sum(own)

    log, log_after = jax.nn.log_softmax(logits), jax.nn.log_softmax(after)
    pi, moved = jnp.exp(log), jnp.exp(log_after) - jnp.exp(log)
    entropy, entropy_after = -jnp.sum(pi * log, -1), -jnp.sum(jnp.exp(log_after) * log_after, -1)
    dz = after - logits
    centred = dz - jnp.sum(pi * dz, -1, keepdims=True)
    wrong = jnp.sum((moved - pi * centred) ** 2, -1)
    variance = jnp.sum(pi * log**2, -1) - entropy**2
    return {
        "entropy": mean(entropy),
        "change": mean(entropy_after - entropy),
        "logits": mean(-jnp.sum(pi * log * centred, -1)),
        "advantage": mean(-(written + entropy) * advantage + coefficient * variance),
        "probability_r2": 1 - mean(wrong) / mean(jnp.sum(moved**2, -1)),
        "jacobian_trace": mean(jnp.sum(pi * (1 - pi), -1)),
        "dz": jnp.sqrt(mean(jnp.sum(pi * centred**2, -1))),
    }


def iteration(made: DialogueLearner, data: Any, state: Any, turn: Any) -> tuple[Any, dict[str, jax.Array]]:
    """One, as the learner's step has it."""
    number, key = turn
    collect_key, order_key = jax.random.split(key)
    taps, numbers = Taps(number, data=data), data.numbers
    models = Models(state.policy.params, reference=state.reference)
    experience = made.collector.collect(models, made.dialogue.bind(data.dialogue), numbers, collect_key, taps)
    after, _ = made.update_epochs(state, None, numbers, experience, order_key, taps)
    rows, loss_inputs = experience.batch.rows, experience.batch.loss_inputs

    def logits(params: Any) -> jax.Array:
        found = gpt2.logits(params, made.policy.hidden(params, None, rows))[:, :-1]
        return jnp.pad(found, ((0, 0), (1, 0), (0, 0))) / experience.temperature

    sampled = loss_inputs.advantages, experience.trainer_outputs.log_prob
    coefficient = numbers.objective.entropy_coefficient
    found = told(logits(state.policy.params), logits(after.policy.params), loss_inputs.loss_mask, sampled, coefficient)
    return after, found | {"reward": jnp.mean(experience.rollout.reward)}


def main(out: str) -> None:
    """Trains all lanes in one program, the coefficients and rates being data."""
    dialogue = Hop(rare_share=0.005)
    settings = ja.learners.grpo.settings(
        kl="none", kl_coefficient=0.0, entropy_coefficient=0.05, warm_start=150, telemetry="basic"
    )
    made = DialogueLearner(structure_of(dialogue), settings.structure)
    data = ja.learners.grpo(dialogue, **{f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}).data

    def lane(seed: jax.Array, coefficient: jax.Array, rate: jax.Array) -> dict[str, jax.Array]:
        objective = dataclasses.replace(data.numbers.objective, entropy_coefficient=coefficient)
        own = dataclasses.replace(
            data, numbers=dataclasses.replace(data.numbers, objective=objective, learning_rate=rate)
        )
        begin, train = jax.random.split(jax.random.key(seed))
        turns = jnp.arange(STEPS), jax.random.split(train, STEPS)
        return jax.lax.scan(lambda s, t: iteration(made, own, s, t), made.init(begin, own), turns)[1]

    lanes = [(seed, coefficient, rate) for coefficient, rate in LANES for seed in range(SEEDS)]
    seeds, coefficients, rates = (np.array(x) for x in zip(*lanes, strict=True))
    given = seeds, coefficients.astype(np.float32), rates.astype(np.float32)
    found = jax.jit(lambda given: jax.lax.map(lambda one: lane(*one), given))(given)
    frames = [
        pd.DataFrame({name: np.asarray(values)[number] for name, values in found.items()}).assign(
            coefficient=coefficient, rate=rate, seed=seed, step=range(STEPS)
        )
        for number, (seed, coefficient, rate) in enumerate(lanes)
    ]
    pd.concat(frames).to_csv(out, index=False, float_format="%.4g")


if __name__ == "__main__":
    main(*sys.argv[1:])
