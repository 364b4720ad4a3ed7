"""The change of a policy's entropy in an iteration of GRPO on hop, compared with first-order predictions.

    python experiments/dialogues/entropy/entropy.py OUT.csv

At a slot with logits z and probabilities pi, d pi_i / d z_j = pi_i (delta_ij - pi_j), hence to first order

    change of pi       pi (dz - E_pi dz)             ("probability")
    change of entropy  -Cov_pi(log pi, dz)           ("logits")

where dz is the change of the logits by the iteration's four updates, on the rows of these updates. If dz were the
advantage times a rate (natural policy gradient on a table), the second would be -rate Cov_pi(log pi, A - coefficient
log pi), where the last term is that of an entropy bonus. From the sampled tokens a, it is estimated up to the rate by
the mean of -(log pi(a) + H) A + coefficient Var_pi(log pi) ("advantage").

There is a row for each lane and iteration: means over policy tokens of the entropy before, of its change, and of the
two predictions; the R^2 of the predicted probabilities (over policy tokens and the vocabulary); the trace of the
Jacobian, sum_i pi_i (1 - pi_i); the root mean square of dz; and the mean reward.
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


def entropy_changes(
    logits: jax.Array, after: jax.Array, mask: jax.Array, sampled: Any, coefficient: Any
) -> dict[str, jax.Array]:
    """Returns actual and predicted changes at policy tokens.

    Args:
      logits, after: logits `[N, T, V]` of the token in each slot, before and after the updates.
      mask: mask of policy tokens, bool `[N, T]`.
      sampled: the advantage and log-probability of each token, `[N, T]`.
      coefficient: coefficient of the entropy bonus.
    """
    advantage, log_prob = sampled

    def mean(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(mask, x, 0.0)) / jnp.sum(mask)

    log, log_after = jax.nn.log_softmax(logits), jax.nn.log_softmax(after)
    pi, change = jnp.exp(log), jnp.exp(log_after) - jnp.exp(log)
    entropy, entropy_after = -jnp.sum(pi * log, -1), -jnp.sum(jnp.exp(log_after) * log_after, -1)
    dz = after - logits
    centred = dz - jnp.sum(pi * dz, -1, keepdims=True)
    squared_error = jnp.sum((change - pi * centred) ** 2, -1)
    variance = jnp.sum(pi * log**2, -1) - entropy**2
    return {
        "entropy": mean(entropy),
        "change": mean(entropy_after - entropy),
        "logits": mean(-jnp.sum(pi * log * centred, -1)),
        "advantage": mean(-(log_prob + entropy) * advantage + coefficient * variance),
        "probability_r2": 1 - mean(squared_error) / mean(jnp.sum(change**2, -1)),
        "jacobian_trace": mean(jnp.sum(pi * (1 - pi), -1)),
        "dz": jnp.sqrt(mean(jnp.sum(pi * centred**2, -1))),
    }


def iteration(learner: DialogueLearner, data: Any, state: Any, inputs: Any) -> tuple[Any, dict[str, jax.Array]]:
    """Trains one iteration, as the learner's step does, and compares logits before and after."""
    number, key = inputs
    collect_key, order_key = jax.random.split(key)
    taps, numbers = Taps(number, data=data), data.numbers
    models = Models(state.policy.params, reference=state.reference)
    experience = learner.collector.collect(models, learner.dialogue.bind(data.dialogue), numbers, collect_key, taps)
    after, _ = learner.update_epochs(state, None, numbers, experience, order_key, taps)
    rows, loss_inputs = experience.batch.rows, experience.batch.loss_inputs

    def logits(params: Any) -> jax.Array:
        result = gpt2.logits(params, learner.policy.hidden(params, None, rows))[:, :-1]
        return jnp.pad(result, ((0, 0), (1, 0), (0, 0))) / experience.temperature

    sampled = loss_inputs.advantages, experience.trainer_outputs.log_prob
    coefficient = numbers.objective.entropy_coefficient
    result = entropy_changes(
        logits(state.policy.params), logits(after.policy.params), loss_inputs.loss_mask, sampled, coefficient
    )
    return after, result | {"reward": jnp.mean(experience.rollout.reward)}


def main(out: str) -> None:
    """Trains all lanes in one program, with coefficients and rates as data."""
    dialogue = Hop(rare_share=0.005)
    settings = ja.learners.grpo.settings(
        kl="none", kl_coefficient=0.0, entropy_coefficient=0.05, warm_start=150, telemetry="basic"
    )
    learner = DialogueLearner(structure_of(dialogue), settings.structure)
    data = ja.learners.grpo(dialogue, **{f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}).data

    def lane(seed: jax.Array, coefficient: jax.Array, rate: jax.Array) -> dict[str, jax.Array]:
        objective = dataclasses.replace(data.numbers.objective, entropy_coefficient=coefficient)
        lane_data = dataclasses.replace(
            data, numbers=dataclasses.replace(data.numbers, objective=objective, learning_rate=rate)
        )
        begin, train = jax.random.split(jax.random.key(seed))
        turns = jnp.arange(STEPS), jax.random.split(train, STEPS)
        return jax.lax.scan(lambda s, t: iteration(learner, lane_data, s, t), learner.init(begin, lane_data), turns)[1]

    lanes = [(seed, coefficient, rate) for coefficient, rate in LANES for seed in range(SEEDS)]
    seeds, coefficients, rates = (np.array(x) for x in zip(*lanes, strict=True))
    inputs = seeds, coefficients.astype(np.float32), rates.astype(np.float32)
    results = jax.jit(lambda inputs: jax.lax.map(lambda lane_inputs: lane(*lane_inputs), inputs))(inputs)
    frames = [
        pd.DataFrame({name: np.asarray(values)[number] for name, values in results.items()}).assign(
            coefficient=coefficient, rate=rate, seed=seed, step=range(STEPS)
        )
        for number, (seed, coefficient, rate) in enumerate(lanes)
    ]
    pd.concat(frames).to_csv(out, index=False, float_format="%.4g")


if __name__ == "__main__":
    main(*sys.argv[1:])
