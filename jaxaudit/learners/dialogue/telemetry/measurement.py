"""Computes the statistics of an iteration: of its rows and updates, and of held-out rows.

Held-out rows are undisturbed, and their prompts and samples are the same for all lanes and steps. The prompts are those
that the dialogue holds out; a dialogue that is not split has no such prompts, and is measured on fixed ones.
"""

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
from jaxaudit.kernels.linear_algebra import effective_rank, linear_cka, singular_values, stable_rank
from jaxaudit.learners.dialogue import advantages, demonstrations, loss_terms, policy_loss
from jaxaudit.learners.dialogue.collection import POLICY, Collector, Experience, Models, max_response_tokens
from jaxaudit.learners.dialogue.network import Network
from jaxaudit.learners.dialogue.policy_loss import Predictions
from jaxaudit.learners.dialogue.rollout import Rows
from jaxaudit.learners.dialogue.settings import DialogueSettings, Numbers
from jaxaudit.learners.dialogue.telemetry import policy, rewards, token_statistics
from jaxaudit.learners.dialogue.telemetry.token_statistics import (
    Bigrams,
    LastValues,
    Statistic,
    Statistics,
    by_stratum,
    defined,
    mean,
)
from jaxaudit.models import gpt2

HELD_OUT_SEED = 0x4E1D
"""The seed of the held-out prompts and samples."""

SHOWN_ROWS = 2
"""The number of held-out rows whose tokens are stored."""


def measure_held_out(
    collector: Collector, models: Models, dialogue: Dialogue, numbers: Numbers, experience: Experience
) -> Statistics:
    """Samples held-out rows of a policy and computes their statistics.

    In "full" telemetry further rows, half as many, are greedy. If the dialogue can change prompts, as many rows again
    have one token of their prompt replaced and are rewarded by the changed prompt. Both use the first half of the
    prompts.

    Args:
      collector: samples the rows.
      models: parameters after the last update.
      dialogue: bound to its data.
      numbers: the settings that are data.
      experience: what the iteration learned from; the critic's errors on it are compared with those on held-out rows.
    """
    settings, key, dialogue = collector.settings, jax.random.key(HELD_OUT_SEED), dialogue.held_out()
    count = settings.performance_rows
    if settings.telemetry == "basic":
        rows = collector.sample_undisturbed(models.policy, models.base, dialogue, numbers, key, count)
        return performance_statistics(rows.gold)
    half, changes = max(count // 2, 1), has_changes(dialogue)
    total = count + (2 * half if changes else half)

    def repeat_prompts(begun: AutomatonState) -> AutomatonState:
        first = jax.tree.map(lambda x: x[:half], begun)
        others = [first, change_prompts(dialogue, first, jax.random.fold_in(key, 1))] if changes else [first]
        return jax.tree.map(lambda x, *more: jnp.concatenate([x[:count], *more]), begun, *others)

    greedy = (jnp.arange(total) >= count) & (jnp.arange(total) < count + half)
    all_rows = collector.sample_undisturbed(
        models.policy, models.base, dialogue, numbers, key, total, greedy, repeat_prompts
    )
    rows = jax.tree.map(lambda x: x[:count], all_rows)
    statistics = performance_statistics(rows.gold) | {
        "greedy_success": defined(jnp.mean(all_rows.gold[count : count + half])),
        "shown_token": defined(rows.tokens[:SHOWN_ROWS]),
        "shown_role": defined(rows.role[:SHOWN_ROWS]),
        "shown_log_probability": defined(rows.log_prob[:SHOWN_ROWS]),
        "shown_reward": defined(rows.gold[:SHOWN_ROWS]),
    }
    if changes:
        statistics["changed_prompt_success"] = defined(jnp.mean(all_rows.gold[count + half :]))
    statistics |= representation_statistics(collector, models, rows)
    if collector.critic is not None:
        statistics |= held_out_critic_errors(collector, models, rows, numbers, experience)
        if has_demonstrations(dialogue):
            statistics |= held_out_critic_separation(collector, models, dialogue, numbers, half)
    return statistics


def performance_statistics(gold: jax.Array) -> Statistics:
    """Returns the mean of gold rewards `[N]`, and its standard error over rows."""
    error = jnp.std(gold, ddof=1) / jnp.sqrt(gold.size) if gold.size > 1 else jnp.zeros(())
    return {PERFORMANCE: defined(jnp.mean(gold)), PERFORMANCE_ERROR: defined(error)}


def change_prompts(dialogue: Dialogue, begun: AutomatonState, key: jax.Array) -> AutomatonState:
    """Returns N dialogues, of which nothing is written yet, each with one token of its prompt replaced."""
    keys = jax.random.split(key, begun.over.shape[0])
    state, queue = jax.vmap(dialogue.changed)(begun.state, begun.queue, keys)
    return dataclasses.replace(begun, state=state, queue=queue)


def representation_statistics(collector: Collector, models: Models, rows: Rows) -> Statistics:
    """Computes ranks of centred hidden states at selected response slots, and their distance from the initial policy's.

    Returns:
      effective_rank, stable_rank, and representation_drift (1 - linear CKA).
    """
    slots = token_statistics.select_slots(rows.response_mask, token_statistics.MAX_SELECTED_SLOTS)
    mask = slots.gather(slots.mask)
    hidden, initial_hidden = (
        slots.gather(collector.policy.hidden(params, models.base, rows)).astype(jnp.float32)
        for params in (models.policy, models.initial)
    )
    count = jnp.sum(mask)
    centre = jnp.sum(jnp.where(mask[:, None], hidden, 0.0), axis=0) / jnp.maximum(count, 1)
    spectrum = singular_values(jnp.where(mask[:, None], hidden - centre, 0.0))
    values = {
        "effective_rank": effective_rank(spectrum),
        "stable_rank": stable_rank(spectrum),
        "representation_drift": 1.0 - linear_cka(hidden, initial_hidden, mask),
    }
    return {name: Statistic(value, count > 1) for name, value in values.items()}


def held_out_critic_errors(
    collector: Collector, models: Models, rows: Rows, numbers: Numbers, experience: Experience
) -> Statistics:
    """Computes the updated critic's errors against returns, on the rows that it was trained on and on held-out ones."""
    assert collector.critic is not None, "only a critic has errors"
    batch = experience.batch
    values = collector.critic.values(models.critic, models.base, batch.rows)
    collected = values - experience.trainer_outputs.returns
    held_out = collector.critic.values(models.critic, models.base, rows) - collector.returns(models, rows, numbers)
    held_out_mask = rows.response_mask & collector.row_mask(rows)[:, None]
    return policy.critic_errors(collected, batch.loss_inputs.loss_mask, held_out, held_out_mask)


def held_out_critic_separation(
    collector: Collector, models: Models, dialogue: Dialogue, numbers: Numbers, pairs: int
) -> Statistics:
    """Compares the critic's values of a right and a wrong demonstration of each prompt.

    The values are those after the first token in which the two differ.
    """
    assert collector.critic is not None, "only a critic has values"
    keys = jax.random.split(jax.random.fold_in(jax.random.key(HELD_OUT_SEED), 2), pairs)
    is_right = jnp.arange(2 * pairs) < pairs
    rows = demonstrations.demonstrate(dialogue, jnp.concatenate([keys, keys]), numbers.difficulty, is_right)
    right, wrong = rows.tokens[:pairs], rows.tokens[pairs:]
    slot = jnp.argmax(right != wrong, axis=1)[:, None]
    values = collector.critic.head_outputs(models.critic, models.base, rows)
    after_right, after_wrong = (jnp.take_along_axis(x, slot, axis=1)[:, 0] for x in (values[:pairs], values[pairs:]))
    return policy.separation(after_right, after_wrong, jnp.any(right != wrong, axis=1))


def measure_held_out_when_due(
    collector: Collector,
    last_values: LastValues,
    models: Models,
    dialogue: Dialogue,
    numbers: Numbers,
    experience: Experience,
    taps: Taps,
) -> tuple[LastValues, dict[str, jax.Array]]:
    """Returns last values and channels of `measure_held_out` every `performance_every` steps, else the last values."""

    def measure() -> tuple[LastValues, dict[str, jax.Array]]:
        return last_values.update(measure_held_out(collector, models, dialogue, numbers, experience))

    every = collector.settings.performance_every
    if every == 1:
        return measure()
    due = (jnp.asarray(taps.step) + 1) % every == 0
    return jax.lax.cond(due, measure, lambda: (last_values, last_values.values))


LOSS_CHANNELS = ("loss", "value_loss", "correction_mean", "correction_zero", "ratio_mean", "kl_loss")
"""Metrics of the loss that are channels under the same name."""

RENAMED_LOSS_CHANNELS = {
    "approx_kl": "old_kl",
    "dual_clip_fraction": "clip_dual",
    "value_clip_fraction": "value_clipped",
    "pair_margin": "margin",
    "pair_accuracy": "preference_accuracy",
}
"""Metrics of the loss that are channels under another name: the metric's name by the channel's."""


@struct.dataclass
class TokenRecords:
    """What is recorded of a minibatch's tokens, `[n, T]`.

    Attributes:
      log_ratio: log probability ratio before clipping.
      weight: absolute weight of each token's score in the policy gradient, see `policy_loss.score_weights`; None in
        "basic" telemetry.
    """

    log_ratio: Any
    weight: Any


@struct.dataclass
class UpdateStats:
    """What is recorded of an iteration's updates, `[epochs, minibatches, ...]`.

    Attributes:
      rows: indices of each minibatch's n rows, int32 `[..., n]`.
      tokens: records of their tokens, `[..., n, T]`; None for a preference objective.
      metrics: metrics of the loss, by name.
      optimizer: statistics of the optimizers, by label.
      layers: the policy's gradient norms by layer, `[..., layers]`; None in "basic" telemetry.
      squares: squared norms of the policy's gradients by `SOURCES`, `[..., 2]`; None if they are not measured.
      coherence: `CoherenceSum` of the policy's gradients over all updates.
      summed_squares: squared norms of the gradients by `SOURCES` summed over all updates, `[2]`; None as `squares`.
    """

    rows: Any
    tokens: TokenRecords | None
    metrics: dict[str, Any]
    optimizer: dict[str, OptimizerStats]
    layers: Any
    squares: Any
    coherence: Any = None
    summed_squares: Any = None


@dataclass(frozen=True)
class Instruments:
    """Computes the statistics of an iteration's rows and updates.

    Attributes:
      dialogue: the dialogue without its arrays, which are data.
      settings: the settings' `structure`.
      policy: the policy's network.
    """

    dialogue: Dialogue
    settings: DialogueSettings
    policy: Network

    @property
    def full(self) -> bool:
        """Whether telemetry is "full" and not "basic"."""
        return self.settings.telemetry == "full"

    def masks(self, role: jax.Array, response_mask: jax.Array) -> jax.Array:
        """Returns the strata of response tokens, bool `[S, N, T]`."""
        if not self.dialogue.result_tokens:
            return token_statistics.strata_masks(response_mask)
        return token_statistics.strata_masks(response_mask, role == TOOL, self.settings.tool_window)

    def measure(
        self,
        before: Models,
        after: Models,
        scales: Mapping[str, rewards.Scale],
        results: Bigrams | None,
        experience: Experience,
        updates: UpdateStats,
    ) -> Statistics:
        """Computes all statistics of an iteration's rows and updates.

        Args:
          before, after: models before the first update and after the last.
          scales: scales of rewards, as `rewards.reward_statistics` takes them.
          results: bigrams of tools' results before the first iteration; None without tools, or in "basic" telemetry.
          experience: what the iteration learned from.
          updates: what was recorded of the updates.
        """
        base = before.base
        rows, loss_inputs, outputs = experience.batch.rows, experience.batch.loss_inputs, experience.trainer_outputs
        hidden_after = self.policy.hidden(after.policy, base, rows) if self.full else None
        statistics = self.row_statistics(scales, experience) | self.update_statistics(updates)
        statistics |= self.policy_statistics(before, after, experience, hidden_after)
        if self.settings.objective == "policy":
            params = self.policy.transformer_params(after.policy, base)
            statistics |= self.ratio_statistics(params, experience, updates, hidden_after)
        loss_mask, value = loss_inputs.loss_mask, loss_inputs.old_value
        if value is not None:
            statistics |= policy.value_statistics(value, loss_inputs.value_target, loss_mask)
            reward = advantages.terminal_reward(outputs.score, loss_mask)
            score_returns = advantages.discounted_sum(reward, loss_mask, experience.coefficients.gamma)
            statistics |= policy.score_value_statistics(value, score_returns, loss_mask)
            if self.full:
                statistics |= policy.correlation_by_distance(value, outputs.returns, loss_mask)
        if results is not None:
            statistics |= policy.unfamiliarity(loss_inputs.ref_log_prob, results.log_prob(rows), rows.role == TOOL)
        return statistics

    def row_statistics(self, scales: Mapping[str, rewards.Scale], experience: Experience) -> Statistics:
        """Computes statistics of all sampled rows, whether they are trained on or not."""
        rollout = experience.rollout
        rows, gold = rollout.rows, rollout.rows.gold
        groups = (-1, self.settings.group_size)
        all_rows = jnp.ones_like(rollout.row_mask)
        all_prompts = jnp.ones(all_rows.size // self.settings.group_size, bool)
        parts = {name: value for name, value in rows.rewards.items() if name != GOLD}
        statistics = rewards.reward_statistics(gold, rollout.reward, parts, all_rows, scales)
        statistics |= rewards.success_statistics((gold >= 1.0).reshape(groups), all_prompts)
        statistics |= rewards.group_statistics(rollout.reward.reshape(groups), all_prompts)
        statistics |= rewards.length_statistics(rows.response_mask, rows.calls, rows.truncated, all_rows)
        if self.settings.reward == "learned":
            statistics |= rewards.order(rollout.undisturbed_reward.reshape(groups), gold.reshape(groups))
        return statistics

    def policy_statistics(self, before: Models, after: Models, experience: Experience, hidden_after: Any) -> Statistics:
        """Computes statistics of the policy on the training rows, before the first update and after the last.

        `hidden_after` are the hidden states after the last update, which "full" telemetry alone reads.
        """
        rows, loss_inputs, outputs = experience.batch.rows, experience.batch.loss_inputs, experience.trainer_outputs
        masks = self.masks(rows.role, rows.response_mask)
        counts = token_statistics.counts_of(masks)
        is_sampled = self.settings.objective_config.old_log_prob_is_sampled
        entropy = rows.entropy if is_sampled else outputs.entropy
        statistics = token_statistics.token_means(masks, entropy=entropy)
        if self.dialogue.result_tokens:
            first = token_statistics.soon_after(rows.role == TOOL, rows.response_mask, 1)
            statistics["entropy_after_result"] = Statistic(mean(entropy, first), jnp.sum(first))
        statistics["own_tokens"] = Statistic(counts, jnp.ones_like(counts))
        slots = token_statistics.select_distribution_slots(rows.response_mask, self.dialogue.vocabulary)
        selected_masks = masks & slots.mask

        def log_distributions(params: Any, hidden: jax.Array) -> jax.Array:
            embedding = gpt2.embedding(self.policy.transformer_params(params, before.base))
            return token_statistics.log_distributions(hidden, embedding, experience.temperature, slots)

        if outputs.ref_hidden is None:
            return statistics
        log_probs = log_distributions(before.policy, outputs.hidden)
        ref_log_probs = log_distributions(before.reference, outputs.ref_hidden)
        exact_kl = slots.scatter(token_statistics.kl_divergence(log_probs, ref_log_probs))
        statistics["kl"] = by_stratum(mean, selected_masks, exact_kl)
        if not self.full:
            return statistics
        statistics |= policy.reference_statistics(outputs.log_prob, loss_inputs.ref_log_prob, masks)
        statistics["kl_largest"] = by_stratum(policy.largest, selected_masks, exact_kl)
        log_probs_after = log_distributions(after.policy, hidden_after)
        greedy, greedy_after = (slots.scatter(jnp.argmax(x, axis=-1)) for x in (log_probs, log_probs_after))
        collision = slots.scatter(jnp.sum(jnp.exp(2 * log_probs), axis=-1))
        saturation = policy.saturation(outputs.log_prob, collision)
        score = saturation if loss_inputs.advantages is None else saturation * loss_inputs.advantages
        statistics |= token_statistics.token_means(
            selected_masks,
            saturation=saturation,
            update_kl=slots.scatter(token_statistics.kl_divergence(log_probs, log_probs_after)),
            mass_cut=rows.mass_cut,
        )
        statistics |= policy.churn(greedy, greedy_after, selected_masks)
        statistics |= policy.score_share(outputs.entropy, score**2, selected_masks)
        if self.settings.objective == "policy" or self.settings.online:
            statistics |= policy.mismatch(loss_inputs.rollout_log_prob, outputs.log_prob, masks)
        return statistics

    def ratio_statistics(
        self, transformer_params: Any, experience: Experience, updates: UpdateStats, hidden_after: Any
    ) -> Statistics:
        """Computes statistics of the probability ratios in all minibatches and of all rows after the last update.

        `hidden_after` are the hidden states after the last update, which "full" telemetry alone reads.
        """
        rows, loss_inputs, coefficients = experience.batch.rows, experience.batch.loss_inputs, experience.coefficients
        loss_mask = loss_inputs.loss_mask
        masks = self.masks(rows.role, loss_mask)
        clip = jnp.stack([coefficients.clip_low, coefficients.clip_high])
        index = updates.rows.reshape(-1)
        assert updates.tokens is not None, "a policy objective has ratios"
        log_ratio = updates.tokens.log_ratio.reshape(-1, masks.shape[-1])
        if not self.full:
            statistics = policy.clip_fraction(log_ratio, loss_inputs.advantages[index], clip, masks[:, index])
            return {name: Statistic(x.value[:, None], x.count[:, None]) for name, x in statistics.items()}
        log_prob = self.policy.log_prob_and_entropy_from_hidden(
            hidden_after, transformer_params, rows, experience.temperature
        )[0]
        log_prob, old_log_prob = (jnp.where(loss_mask, x, 0.0) for x in (log_prob, loss_inputs.old_log_prob))
        ratio = loss_terms.RATIOS[self.settings.ratio]
        log_ratio_after = jnp.broadcast_to(ratio(log_prob, old_log_prob, loss_mask), loss_mask.shape)
        counts = loss_terms.denominators(loss_mask, max_response_tokens(self.dialogue))
        config = self.settings.objective_config
        weight_after = policy_loss.score_weights(config, coefficients, Predictions(log_prob), loss_inputs, counts)
        weight = updates.tokens.weight.reshape(log_ratio.shape)
        # Rows after the last update are repeated to the number of visited rows, so that one program serves both.
        epochs = self.settings.epochs
        log_ratio_after, weight_after = (jnp.tile(x, (epochs, 1)) for x in (log_ratio_after, weight_after))
        all_rows = jnp.tile(jnp.arange(loss_mask.shape[0]), epochs)

        def statistics_of(log_ratio: jax.Array, weight: jax.Array, index: jax.Array) -> Statistics:
            return policy.ratio_statistics(log_ratio, loss_inputs.advantages[index], weight, clip, masks[:, index])

        both = jax.vmap(statistics_of)(
            jnp.stack([log_ratio, log_ratio_after]), jnp.stack([weight, weight_after]), jnp.stack([index, all_rows])
        )
        return policy.moments_last(both)

    def update_statistics(self, updates: UpdateStats) -> Statistics:
        """Computes statistics of losses, gradients and updates; an update with a zero gradient has no direction."""
        stats, metrics = updates.optimizer[POLICY], updates.metrics
        norms, is_nonzero = stats.gradient_norm, stats.gradient_norm != 0
        count = jnp.sum(is_nonzero)
        channels = {name: name for name in LOSS_CHANNELS} | RENAMED_LOSS_CHANNELS
        statistics = {
            name: defined(jnp.mean(metrics[metric])) for name, metric in channels.items() if metric in metrics
        }
        statistics |= {
            "gradient_norm": defined(jnp.mean(norms)),
            "x_grad": Statistic(updates.coherence.mean_pairwise_cosine(), updates.coherence.nonzero > 1),
            "x_mem": Statistic(mean(stats.persistence, is_nonzero), count),
            "x_used": Statistic(mean(stats.used, is_nonzero), count),
            "learning_rate": defined(jnp.mean(stats.learning_rate)),
            "clipped_fraction": defined(jnp.mean(stats.clipped)),
        }
        for label, other in updates.optimizer.items():
            if label != POLICY:
                statistics[f"{label}_gradient_norm"] = defined(jnp.mean(other.gradient_norm))
        if self.full:
            log_norms = jnp.log(jnp.where(is_nonzero, norms, 1.0))
            spread = jnp.sqrt(mean((log_norms - mean(log_norms, is_nonzero)) ** 2, is_nonzero))
            statistics["gradient_norm_spread"] = Statistic(spread, count)
            statistics["layer_gradient_norm"] = defined(jnp.mean(updates.layers, axis=(0, 1)))
        if updates.squares is not None:
            squares = jnp.mean(updates.squares, axis=(0, 1))
            n = norms.size
            # The trace of the sample covariance, E |g|^2 - |E g|^2; rounding may leave equal gradients below 0.
            variance = jnp.maximum(squares - updates.summed_squares / n**2, 0) * n / max(n - 1, 1)
            statistics["source_gradient_norm"] = defined(jnp.mean(jnp.sqrt(updates.squares), axis=(0, 1)))
            statistics["source_gradient_variance"] = defined(variance)
        return statistics
