"""What an iteration's rows and updates tell: every channel of the table that is not of held-out rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxaudit.core.channel_names import PERFORMANCE, PERFORMANCE_ERROR
from jaxaudit.core.optimizer import OptimizerStats
from jaxaudit.core.taps import Taps
from jaxaudit.dialogues.automaton import AutomatonState
from jaxaudit.dialogues.protocol import GOLD, TOOL, Dialogue, has_changes, has_demonstrations
from jaxaudit.kernels.ranks import effective_rank, linear_cka, singular_values, stable_rank
from jaxaudit.learners.dialogue import advantages, demonstrations, loss_terms, policy_loss
from jaxaudit.learners.dialogue.collection import Collector, Models, longest
from jaxaudit.learners.dialogue.loss_terms import denominators
from jaxaudit.learners.dialogue.network import Network
from jaxaudit.learners.dialogue.policy_loss import Predictions
from jaxaudit.learners.dialogue.rows import Experience, Rows
from jaxaudit.learners.dialogue.settings import DialogueSettings, Numbers
from jaxaudit.learners.dialogue.telemetry import policy, rewards, token_statistics
from jaxaudit.learners.dialogue.telemetry.token_statistics import (
    Bigrams,
    LastSeen,
    Measured,
    Statistics,
    by_stratum,
    mean,
)
from jaxaudit.models import gpt2

HELD_OUT_SEED = 0x4E1D
"""Of the prompts and draws."""

SHOWN_ROWS = 2
"""Rows of a measurement that are kept to be read."""


def measure_held_out(
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
    settings, key, dialogue = collector.settings, jax.random.key(HELD_OUT_SEED), dialogue.held_out()
    count = settings.performance_rows
    if settings.telemetry == "basic":
        rows = collector.undisturbed(models.policy, models.base, dialogue, numbers, key, count)
        return performance_statistics(rows.gold)
    half, changes = max(count // 2, 1), has_changes(dialogue)
    total = count + (2 * half if changes else half)

    def altered(begun: AutomatonState) -> AutomatonState:
        first = jax.tree.map(lambda x: x[:half], begun)
        others = [first, change_prompts(dialogue, first, jax.random.fold_in(key, 1))] if changes else [first]
        return jax.tree.map(lambda x, *more: jnp.concatenate([x[:count], *more]), begun, *others)

    greedy = (jnp.arange(total) >= count) & (jnp.arange(total) < count + half)
    found = collector.undisturbed(models.policy, models.base, dialogue, numbers, key, total, greedy, altered)
    rows = jax.tree.map(lambda x: x[:count], found)
    told = performance_statistics(rows.gold) | {
        "greedy_success": _always_known(jnp.mean(found.gold[count : count + half])),
        "shown_token": _always_known(rows.tokens[:SHOWN_ROWS]),
        "shown_role": _always_known(rows.role[:SHOWN_ROWS]),
        "shown_log_probability": _always_known(rows.log_probability[:SHOWN_ROWS]),
        "shown_reward": _always_known(rows.gold[:SHOWN_ROWS]),
    }
    if changes:
        told["changed_prompt_success"] = _always_known(jnp.mean(found.gold[count + half :]))
    told |= representation_statistics(collector, models, rows)
    if collector.critic is not None:
        told |= held_out_critic_errors(collector, models, rows, numbers, experience)
        if has_demonstrations(dialogue):
            told |= held_out_critic_separation(collector, models, dialogue, numbers, half)
    return told


def performance_statistics(gold: jax.Array) -> Statistics:
    """The mean of `[N]`, and its standard error over rows."""
    error = jnp.std(gold, ddof=1) / jnp.sqrt(gold.size) if gold.size > 1 else jnp.zeros(())
    return {PERFORMANCE: _always_known(jnp.mean(gold)), PERFORMANCE_ERROR: _always_known(error)}


def change_prompts(dialogue: Dialogue, begun: AutomatonState, key: jax.Array) -> AutomatonState:
    """Dialogues `[N]` of which nothing is written yet, each with one token of its prompt changed."""
    keys = jax.random.split(key, begun.over.shape[0])
    state, queue = jax.vmap(dialogue.changed)(begun.state, begun.queue, keys)
    return dataclasses.replace(begun, state=state, queue=queue)


def representation_statistics(collector: Collector, models: Models, rows: Rows) -> Statistics:
    """Ranks of the hidden states of some own slots, less their mean, and how far they are from the initial policy's."""
    slots = token_statistics.some(rows.own, token_statistics.LOOKED_AT)
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


def held_out_critic_errors(
    collector: Collector, models: Models, rows: Rows, numbers: Numbers, experience: Experience
) -> Statistics:
    """The updated critic's errors on the rows that it was updated on, and on held-out ones: against their returns."""
    assert collector.critic is not None, "or there would be nothing to measure"
    batch = experience.batch
    collected = collector.critic.values(models.critic, models.base, batch.rows) - experience.recomputed.returns
    held = collector.critic.values(models.critic, models.base, rows) - collector.returns(models, rows, numbers)
    return policy.critic_errors(collected, batch.loss_inputs.loss_mask, held, rows.own & collector.kept(rows)[:, None])


def held_out_critic_separation(
    collector: Collector, models: Models, dialogue: Dialogue, numbers: Numbers, pairs: int
) -> Statistics:
    """The critic's values of demonstrations, a right and a wrong one of each prompt, after their first other token."""
    assert collector.critic is not None, "or there would be nothing to measure"
    keys = jax.random.split(jax.random.fold_in(jax.random.key(HELD_OUT_SEED), 2), pairs)
    right = jnp.arange(2 * pairs) < pairs
    shown = demonstrations.demonstrated(dialogue, jnp.concatenate([keys, keys]), numbers.difficulty, right)
    good, bad = shown.tokens[:pairs], shown.tokens[pairs:]
    slot = jnp.argmax(good != bad, axis=1)[:, None]
    told = collector.critic.scalars(models.critic, models.base, shown)
    after_good, after_bad = (jnp.take_along_axis(x, slot, axis=1)[:, 0] for x in (told[:pairs], told[pairs:]))
    return policy.separation(after_good, after_bad, jnp.any(good != bad, axis=1))


def measure_held_out_when_due(
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
        return latest.update(measure_held_out(collector, models, dialogue, numbers, experience))

    every = collector.settings.performance_every
    if every == 1:
        return now()
    due = (jnp.asarray(taps.step) + 1) % every == 0
    return jax.lax.cond(due, now, lambda: (latest, latest.values))


def _always_known(value: Any) -> Measured:
    return Measured(value, jnp.asarray(1))


POLICY = "policy"

ALONE = ("loss", "value_loss", "correction_mean", "correction_zero", "ratio_mean", "kl_loss")
"""Parts of the loss that are channels by their own names."""

RENAMED = {
    "approx_kl": "old_kl",
    "dual_clip_fraction": "clip_dual",
    "value_clip_fraction": "value_clipped",
    "pair_margin": "margin",
    "pair_accuracy": "preference_accuracy",
}
"""Those that are channels by other names."""


@struct.dataclass
class Tokens:
    """What is looked at of a minibatch's tokens, `[n, T]`; None where it is not.

    Attributes:
      log_ratio: before clipping.
      weight: with which a token's score enters the gradient, see `policy_loss.weights`.
    """

    log_ratio: Any
    weight: Any


@struct.dataclass
class UpdateStats:
    """What the updates of an iteration tell, `[epochs, minibatches, ...]`.

    Attributes:
      rows: int32, which rows each was of, `[..., n]`.
      tokens: of each, `[..., n, T]`; None of a preference objective.
      told: what the loss is made of, by name.
      done: what the optimizer did, by label.
      layers: the policy's gradient norms by layer, `[..., layers]`, in "full" telemetry; else None.
      squares: squared norms of the policy's gradients by SOURCES, `[..., 2]`; None where they are not told apart.
      coherence: `CoherenceSum` of the policy's gradients; None of a single update.
      summed_squares: squared norms of the sums of these gradients over all updates, `[2]`; likewise.
    """

    rows: Any
    tokens: Tokens | None
    told: dict[str, Any]
    done: dict[str, OptimizerStats]
    layers: Any
    squares: Any
    coherence: Any = None
    summed_squares: Any = None


@dataclass(frozen=True)
class Instruments:
    """Reads an iteration.

    Attributes:
      dialogue: without its arrays.
      settings: their `structure`.
      policy: its network.
    """

    dialogue: Dialogue
    settings: DialogueSettings
    policy: Network

    @property
    def full(self) -> bool:
        return self.settings.telemetry == "full"

    def masks(self, role: jax.Array, own: jax.Array) -> jax.Array:
        """The strata of own tokens, bool `[S, N, T]`."""
        if not self.dialogue.result_tokens:
            return token_statistics.strata_of(own)
        return token_statistics.strata_of(own, role == TOOL, self.settings.tool_window)

    def read(
        self,
        before: Models,
        after: Models,
        scales: Mapping[str, rewards.Scale],
        results: Bigrams | None,
        experience: Experience,
        visited: UpdateStats,
    ) -> Statistics:
        """All statistics of an iteration.

        Args:
          before, after: the models before the first update and after the last.
          scales: of rewards, as `rewards.reward_statistics` takes them.
          results: what tools said before the first iteration; None without tools, or in "basic" telemetry.
          experience: what was learned from.
          visited: what the updates told.
        """
        base = before.base
        later = self.policy.hidden(after.policy, base, experience.batch.rows) if self.full else None
        found = self.of_rows(scales, experience) | self.of_updates(visited)
        found |= self.of_tokens(before.policy, after.policy, before.reference, base, experience, later)
        if self.settings.objective == "policy":
            found |= self.of_ratios(self.policy.whole(after.policy, base), experience, visited, later)
        loss_inputs, rows = experience.batch.loss_inputs, experience.batch.rows
        if loss_inputs.value is not None:
            found |= policy.value_statistics(loss_inputs.value, loss_inputs.target, loss_inputs.loss_mask)
            reward = advantages.terminal(experience.recomputed.score, loss_inputs.loss_mask)
            scored = advantages.discounted_sum(reward, loss_inputs.loss_mask, experience.coefficients.gamma)
            found |= policy.of_scores(loss_inputs.value, scored, loss_inputs.loss_mask)
            if self.full:
                found |= policy.correlation_by_distance(
                    loss_inputs.value, experience.recomputed.returns, loss_inputs.loss_mask
                )
        if results is not None:
            found |= policy.unfamiliarity(loss_inputs.reference, results.log_probability(rows), rows.role == TOOL)
        return found

    def of_rows(self, scales: Mapping[str, rewards.Scale], experience: Experience) -> Statistics:
        """Returns statistics of all rows that were sampled, also of those that nothing is learned from."""
        drawn = experience.drawn
        rows, gold = drawn.rows, drawn.rows.gold
        groups = (-1, self.settings.group_size)
        everything = jnp.ones_like(drawn.kept)
        prompts = jnp.ones(everything.size // self.settings.group_size, bool)
        parts = {name: value for name, value in rows.rewards.items() if name != GOLD}
        found = rewards.reward_statistics(gold, drawn.reward, parts, everything, scales)
        found |= rewards.success_statistics((gold >= 1.0).reshape(groups), prompts)
        found |= rewards.group_statistics(drawn.reward.reshape(groups), prompts)
        found |= rewards.length_statistics(rows.own, rows.calls, rows.truncated, everything)
        if self.settings.reward == "learned":
            found |= rewards.order(drawn.scored.reshape(groups), gold.reshape(groups))
        return found

    def of_tokens(
        self, before: Any, after: Any, reference: Any, base: Any, experience: Experience, later_hidden: Any
    ) -> Statistics:
        """Returns statistics of the policy on the rows learned from, before the first update and, with `later_hidden`,
        after the last.
        """
        rows, loss_inputs, recomputed = experience.batch.rows, experience.batch.loss_inputs, experience.recomputed
        masks = self.masks(rows.role, rows.own)
        counts = token_statistics.counts_of(masks)
        entropy = rows.entropy if self.settings.parts.follows_sampler else recomputed.entropy
        found = token_statistics.token_means(masks, entropy=entropy)
        if self.dialogue.result_tokens:
            first = token_statistics.soon_after(rows.role == TOOL, rows.own, 1)
            found["entropy_after_result"] = Measured(mean(entropy, first), jnp.sum(first))
        found["own_tokens"] = Measured(counts, jnp.ones_like(counts))
        slots = token_statistics.slots_of(rows.own, self.dialogue.vocabulary)
        known = masks & slots.known

        def logs(params: Any, hidden: jax.Array) -> jax.Array:
            embedding = gpt2.embedding(self.policy.whole(params, base))
            return token_statistics.log_distributions(hidden, embedding, experience.temperature, slots)

        if recomputed.reference_hidden is None:
            return found
        now = logs(before, recomputed.hidden)
        exact = slots.back(token_statistics.divergence(now, logs(reference, recomputed.reference_hidden)))
        if not self.full:
            return found | {"kl": by_stratum(mean, known, exact)}
        found |= policy.reference_statistics(recomputed.log_probability, loss_inputs.reference, exact, masks)
        found |= {"kl": by_stratum(mean, known, exact), "kl_largest": by_stratum(policy.largest, known, exact)}
        later = logs(after, later_hidden)
        first, then = (slots.back(jnp.argmax(x, axis=-1)) for x in (now, later))
        collision = slots.back(jnp.sum(jnp.exp(2 * now), axis=-1))
        slope = policy.saturation(recomputed.log_probability, collision)
        weight = slope if loss_inputs.advantage is None else slope * loss_inputs.advantage
        found |= token_statistics.token_means(
            known, saturation=slope, update_kl=slots.back(token_statistics.divergence(now, later)), mass_cut=rows.cut
        )
        found |= policy.churn(first, then, known)
        found |= policy.score_share(recomputed.entropy, weight**2, known)
        if self.settings.objective == "policy" or self.settings.online:
            found |= policy.mismatch(loss_inputs.sampled, recomputed.log_probability, masks)
        return found

    def of_ratios(self, whole: Any, experience: Experience, visited: UpdateStats, later_hidden: Any) -> Statistics:
        """Returns statistics of the ratios in all minibatches and, with `later_hidden`, of all rows after the last
        update.
        """
        rows, loss_inputs, coefficients = experience.batch.rows, experience.batch.loss_inputs, experience.coefficients
        masks = self.masks(rows.role, loss_inputs.loss_mask)
        clip = jnp.stack([coefficients.clip_low, coefficients.clip_high])
        index = visited.rows.reshape(-1)
        assert visited.tokens is not None, "a policy objective has ratios"
        log_ratio = visited.tokens.log_ratio.reshape(-1, masks.shape[-1])
        if not self.full:
            low_high = policy.clip_fraction(log_ratio, loss_inputs.advantage[index], clip, masks[:, index])
            return {
                name: Measured(statistic.value[:, None], statistic.count[:, None])
                for name, statistic in low_high.items()
            }
        new = self.policy.log_prob_and_entropy(later_hidden, whole, rows, experience.temperature)[0]
        new, old = (jnp.where(loss_inputs.loss_mask, x, 0.0) for x in (new, loss_inputs.old))
        last = jnp.broadcast_to(
            loss_terms.RATIOS[self.settings.ratio](new, old, loss_inputs.loss_mask), loss_inputs.loss_mask.shape
        )
        counts = denominators(loss_inputs.loss_mask, longest(self.dialogue))
        weight = policy_loss.weights(self.settings.parts, coefficients, Predictions(new), loss_inputs, counts)
        visited_weight = visited.tokens.weight.reshape(log_ratio.shape)
        # Both moments are of one length, so that one program serves both.
        last, weight = (jnp.tile(x, (self.settings.epochs, 1)) for x in (last, weight))
        every = jnp.tile(jnp.arange(loss_inputs.loss_mask.shape[0]), self.settings.epochs)

        def one(log_ratio: jax.Array, weight: jax.Array, index: jax.Array) -> Statistics:
            return policy.ratio_statistics(log_ratio, loss_inputs.advantage[index], weight, clip, masks[:, index])

        both = jax.vmap(one)(
            jnp.stack([log_ratio, last]), jnp.stack([visited_weight, weight]), jnp.stack([index, every])
        )
        return policy.at_moments(both)

    def of_updates(self, visited: UpdateStats) -> Statistics:
        """Returns statistics of losses, gradients and updates; an update without a gradient has no direction."""
        done, told = visited.done[POLICY], visited.told
        there = jnp.asarray(1)
        norms, moved = done.gradient_norm, done.gradient_norm != 0
        count = jnp.sum(moved)
        found = {name: Measured(jnp.mean(told[name]), there) for name in ALONE if name in told}
        found |= {name: Measured(jnp.mean(told[part]), there) for name, part in RENAMED.items() if part in told}
        found |= {
            "gradient_norm": Measured(jnp.mean(norms), there),
            "x_grad": Measured(visited.coherence.mean_pairwise_cosine(), visited.coherence.nonzero > 1),
            "x_mem": Measured(mean(done.persistence, moved), count),
            "x_used": Measured(mean(done.used, moved), count),
            "learning_rate": Measured(jnp.mean(done.learning_rate), there),
            "clipped_fraction": Measured(jnp.mean(done.clipped), there),
        }
        for label, other in visited.done.items():
            if label != POLICY:
                found[f"{label}_gradient_norm"] = Measured(jnp.mean(other.gradient_norm), there)
        if self.full:
            logs = jnp.log(jnp.where(moved, norms, 1.0))
            spread = jnp.sqrt(mean((logs - mean(logs, moved)) ** 2, moved))
            found["gradient_norm_spread"] = Measured(spread, count)
            found["layer_gradient_norm"] = Measured(jnp.mean(visited.layers, axis=(0, 1)), there)
        if visited.squares is not None:
            squares = jnp.mean(visited.squares, axis=(0, 1))
            updates = norms.size
            # The trace of a sample's covariance, E |g|^2 - |E g|^2, which rounding may leave below 0 of equal ones.
            variance = jnp.maximum(squares - visited.summed_squares / updates**2, 0) * updates / max(updates - 1, 1)
            found["source_gradient_norm"] = Measured(jnp.mean(jnp.sqrt(visited.squares), axis=(0, 1)), there)
            found["source_gradient_variance"] = Measured(variance, there)
        return found
