"""What is measured on held-out rows, which nothing disturbs: the same prompts and draws for all lanes and steps.

Their prompts are those that the dialogue holds out; of one that is not split, any.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxaudit.core.channel_names import PERFORMANCE, PERFORMANCE_ERROR
from jaxaudit.core.taps import Taps
from jaxaudit.dialogues.automaton import AutomatonState
from jaxaudit.dialogues.protocol import Dialogue, has_changes, has_demonstrations
from jaxaudit.kernels.linear_algebra import effective_rank, linear_cka, singular_values, stable_rank
from jaxaudit.learners.dialogue import demonstrations
from jaxaudit.learners.dialogue.collection import Collector, Models
from jaxaudit.learners.dialogue.rows import Experience, Rows
from jaxaudit.learners.dialogue.settings import Numbers
from jaxaudit.learners.dialogue.telemetry import policy, vocabulary
from jaxaudit.learners.dialogue.telemetry.strata import LastSeen, Measured, Statistics

KEY = 0x4E1D
"""Of the prompts and draws."""

SHOWN = 2
"""Rows of a measurement that are kept to be read."""


def measure(
    collector: Collector, models: Models, dialogue: Dialogue, numbers: Numbers, experience: Experience
) -> Statistics:
    """Samples held-out rows of a policy, and reads them.

    In "full" telemetry half as many are greedy, and of a dialogue that changes prompts half as many have one token of
    theirs changed and are rewarded for what they ask then; their prompts are the first of the others'.

    Args:
      collector: samples.
      models: after the last update.
      dialogue: bound to its data.
      numbers: the settings that are data.
      experience: the iteration's, which a critic's errors are compared with.
    """
    settings, key, dialogue = collector.settings, jax.random.key(KEY), dialogue.held_out()
    count = settings.performance_rows
    if settings.telemetry == "basic":
        rows = collector.undisturbed(models.policy, models.base, dialogue, numbers, key, count)
        return performance(rows.gold)
    half, changes = max(count // 2, 1), has_changes(dialogue)
    total = count + (2 * half if changes else half)

    def altered(begun: AutomatonState) -> AutomatonState:
        first = jax.tree.map(lambda x: x[:half], begun)
        others = [first, one_changed(dialogue, first, jax.random.fold_in(key, 1))] if changes else [first]
        return jax.tree.map(lambda x, *more: jnp.concatenate([x[:count], *more]), begun, *others)

    greedy = (jnp.arange(total) >= count) & (jnp.arange(total) < count + half)
    found = collector.undisturbed(models.policy, models.base, dialogue, numbers, key, total, greedy, altered)
    rows = jax.tree.map(lambda x: x[:count], found)
    told = performance(rows.gold) | {
        "greedy_success": _known(jnp.mean(found.gold[count : count + half])),
        "shown_token": _known(rows.tokens[:SHOWN]),
        "shown_role": _known(rows.role[:SHOWN]),
        "shown_log_probability": _known(rows.log_probability[:SHOWN]),
        "shown_reward": _known(rows.gold[:SHOWN]),
    }
    if changes:
        told["changed_prompt_success"] = _known(jnp.mean(found.gold[count + half :]))
    told |= representation(collector, models, rows)
    if collector.critic is not None:
        told |= critic(collector, models, rows, numbers, experience)
        if has_demonstrations(dialogue):
            told |= separation(collector, models, dialogue, numbers, half)
    return told


def performance(gold: jax.Array) -> Statistics:
    """The mean of `[N]`, and its standard error over rows."""
    error = jnp.std(gold, ddof=1) / jnp.sqrt(gold.size) if gold.size > 1 else jnp.zeros(())
    return {PERFORMANCE: _known(jnp.mean(gold)), PERFORMANCE_ERROR: _known(error)}


def one_changed(dialogue: Dialogue, begun: AutomatonState, key: jax.Array) -> AutomatonState:
    """Dialogues `[N]` of which nothing is written yet, each with one token of its prompt changed."""
    keys = jax.random.split(key, begun.over.shape[0])
    state, queue = jax.vmap(dialogue.changed)(begun.state, begun.queue, keys)
    return dataclasses.replace(begun, state=state, queue=queue)


def representation(collector: Collector, models: Models, rows: Rows) -> Statistics:
    """Ranks of the hidden states of some own slots, less their mean, and how far they are from the initial policy's."""
    slots = vocabulary.some(rows.own, vocabulary.LOOKED_AT)
    there = slots.of(slots.known)
    now, then = (
        slots.of(collector.policy.hidden(params, models.base, rows)).astype(jnp.float32)
        for params in (models.policy, models.initial)
    )
    count = jnp.sum(there)
    centre = jnp.sum(jnp.where(there[:, None], now, 0.0), axis=0) / jnp.maximum(count, 1)
    spectrum = singular_values(jnp.where(there[:, None], now - centre, 0.0))
    found = {
        "effective_rank": effective_rank(spectrum),
        "stable_rank": stable_rank(spectrum),
        "representation_drift": 1.0 - linear_cka(now, then, there),
    }
    return {name: Measured(value, count > 1) for name, value in found.items()}


def critic(collector: Collector, models: Models, rows: Rows, numbers: Numbers, experience: Experience) -> Statistics:
    """The updated critic's errors on the rows that it was updated on, and on held-out ones: against their returns."""
    assert collector.critic is not None, "or there would be nothing to measure"
    batch = experience.batch
    collected = collector.critic.values(models.critic, models.base, batch.rows) - experience.recomputed.returns
    held = collector.critic.values(models.critic, models.base, rows) - collector.returns(models, rows, numbers)
    return policy.critic_errors(collected, batch.loss_inputs.loss_mask, held, rows.own & collector.kept(rows)[:, None])


def separation(collector: Collector, models: Models, dialogue: Dialogue, numbers: Numbers, pairs: int) -> Statistics:
    """The critic's values of demonstrations, a right and a wrong one of each prompt, after their first other token."""
    assert collector.critic is not None, "or there would be nothing to measure"
    keys = jax.random.split(jax.random.fold_in(jax.random.key(KEY), 2), pairs)
    right = jnp.arange(2 * pairs) < pairs
    shown = demonstrations.demonstrated(dialogue, jnp.concatenate([keys, keys]), numbers.difficulty, right)
    good, bad = shown.tokens[:pairs], shown.tokens[pairs:]
    slot = jnp.argmax(good != bad, axis=1)[:, None]
    told = collector.critic.scalars(models.critic, models.base, shown)
    after_good, after_bad = (jnp.take_along_axis(x, slot, axis=1)[:, 0] for x in (told[:pairs], told[pairs:]))
    return policy.separation(after_good, after_bad, jnp.any(good != bad, axis=1))


def measure_when_due(
    collector: Collector,
    latest: LastSeen,
    models: Models,
    dialogue: Dialogue,
    numbers: Numbers,
    experience: Experience,
    taps: Taps,
) -> tuple[LastSeen, dict[str, jax.Array]]:
    """`measure` at the learner's cadence, and between the latest again."""

    def now() -> tuple[LastSeen, dict[str, jax.Array]]:
        return latest.update(measure(collector, models, dialogue, numbers, experience))

    every = collector.settings.performance_every
    if every == 1:
        return now()
    due = (jnp.asarray(taps.step) + 1) % every == 0
    return jax.lax.cond(due, now, lambda: (latest, latest.values))


def _known(value: Any) -> Measured:
    return Measured(value, jnp.asarray(1))
