"""Collects the rows of an iteration: samples them, rewards them, and estimates the constants of the loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxaudit.core.taps import Taps
from jaxaudit.dialogues.automaton import AutomatonState
from jaxaudit.dialogues.protocol import Dialogue
from jaxaudit.learners.dialogue import advantages, loss_terms, packing, rollout
from jaxaudit.learners.dialogue.network import Network
from jaxaudit.learners.dialogue.objective import Coefficients, ObjectiveConfig
from jaxaudit.learners.dialogue.policy_loss import LossInputs
from jaxaudit.learners.dialogue.rollout import Rows
from jaxaudit.learners.dialogue.settings import DialogueSettings, Numbers

POLICY, CRITIC, REWARD_MODEL = "policy", "critic", "reward_model"
"""Labels, which begin the paths of parameters."""

COVARIANCE_STREAM = 2
"""The number that is folded into the collection's key to select tokens by their covariance."""


@dataclass(frozen=True)
class Models:
    """The parameters of a step by their use; None where the learner has none.

    Attributes:
      policy, critic: the parameters that are trained.
      reward_model: parameters that score rows.
      reference: the policy that divergence is measured from.
      initial: the undisturbed policy before its first update.
      base: the checkpoint's parameters under adapters.
    """

    policy: Any
    critic: Any = None
    reward_model: Any = None
    reference: Any = None
    initial: Any = None
    base: Any = None


@struct.dataclass
class TrainingBatch:
    """Some rows with the constants of their loss, `[N, T]`.

    The two rows of a preference pair are adjacent, the chosen one first.

    Attributes:
      rows: tokens and what was recorded when they were sampled.
      loss_inputs: constants of the loss.
    """

    rows: Rows
    loss_inputs: LossInputs

    def take(self, index: jax.Array) -> TrainingBatch:
        """Returns the rows at the positions `index`."""
        return jax.tree.map(lambda x: x[index], self)


@struct.dataclass
class Rollout:
    """All M rows that were sampled, before dynamic sampling or the choice of pairs leaves some out.

    Attributes:
      rows: tokens and what was recorded when they were sampled.
      undisturbed_reward: the reward before perturbations, `[M]`.
      reward: the reward that the learner receives, `[M]`.
      row_mask: bool `[M]`, rows that count in the loss and the baselines.
    """

    rows: Rows
    undisturbed_reward: Any
    reward: Any
    row_mask: Any


@struct.dataclass
class TrainerOutputs:
    """What the trainer computes for the rows before the first update.

    Attributes:
      log_prob, entropy: of each token under the policy, `[N, T]`; None where nothing reads them, see
        `settings.DialogueSettings.old_log_probability`.
      hidden: the policy's hidden states, `[N, T, D]`; None where nothing reads them.
      ref_hidden: the reference's hidden states; None where nothing reads them.
      score: reward of each row, penalties for length included, `[N]`.
      returns: discounted return of each response token, the KL penalty included where it is in the reward, `[N, T]`;
        None without a critic.
    """

    log_prob: Any
    entropy: Any
    hidden: Any
    ref_hidden: Any
    score: Any
    returns: Any


@struct.dataclass
class Experience:
    """What an iteration learns from.

    Attributes:
      batch: the rows that are trained on.
      coefficients: coefficients of the objective, disturbed or not.
      temperature: temperature of the policy, disturbed or not.
      rollout: all rows that were sampled.
      trainer_outputs: what the trainer computed for the rows of `batch`.
    """

    batch: TrainingBatch
    coefficients: Coefficients
    temperature: Any
    rollout: Rollout
    trainer_outputs: TrainerOutputs


class Collector:
    """Samples and rewards rows, and estimates advantages.

    Args:
      dialogue: the dialogue without its arrays, which are data.
      settings: the settings' `structure`.
      policy, critic, reward_model: the networks; None for a network that the learner does not have.
    """

    def __init__(
        self,
        dialogue: Dialogue,
        settings: DialogueSettings,
        policy: Network,
        critic: Network | None,
        reward_model: Network | None,
    ):
        self.dialogue, self.settings, self.config = dialogue, settings, settings.objective_config
        self.policy, self.critic, self.reward_model = policy, critic, reward_model
        self.sampler = rollout.Sampler(policy.model, settings.top_k, settings.top_p < 1)

    def sample_undisturbed(
        self,
        policy: Any,
        base: Any,
        dialogue: Dialogue,
        numbers: Numbers,
        key: jax.Array,
        rows: int,
        greedy: jax.Array | None = None,
        change_begun: Callable[[AutomatonState], AutomatonState] = lambda begun: begun,
    ) -> Rows:
        """Samples one row for each of `rows` prompts of the standard difficulty, without perturbations.

        `greedy` is bool `[rows]`, as in `rollout.generate`; `change_begun` changes the dialogues after they have begun.
        """
        prompts_key, rows_key = jax.random.split(key)
        closed, params = Taps(), self.policy.transformer_params(policy, base)
        begun = rollout.begin_dialogues(dialogue, prompts_key, jnp.full(rows, numbers.difficulty), closed)
        return rollout.generate(
            self.sampler,
            params,
            dialogue,
            change_begun(begun),
            rows_key,
            numbers.temperature,
            numbers.top_p,
            closed,
            greedy,
        )

    def undisturbed_reward(self, models: Models, rows: Rows) -> jax.Array:
        """Returns the reward of each row before perturbations: gold, or the reward model's score; float32 `[N]`."""
        if self.reward_model is None:
            return rows.gold
        return self.reward_model.score(models.reward_model, models.base, rows)

    def collect(self, models: Models, dialogue: Dialogue, numbers: Numbers, key: jax.Array, taps: Taps) -> Experience:
        """Collects the experience of one iteration.

        Args:
          models: parameters after the step's taps.
          dialogue: bound to its data.
          numbers: the settings that are data.
          key: PRNG key of prompts and sampling.
          taps: taps of the step.
        """
        temperature = taps("temperature", numbers.temperature)
        coefficients = tap_coefficients(self.config, numbers.objective, taps)
        rows = self._sample_rows(models, dialogue, numbers, temperature, key, taps)
        if self.config.entropy_bonus:
            weight = taps(
                "entropy_coefficient", coefficients.entropy_coefficient, entropy=lambda: sampled_entropy(rows)
            )
            coefficients = dataclasses.replace(coefficients, entropy_coefficient=weight)
        rollout_log_prob = rows.log_prob
        if self.config.uses_rollout_log_prob and taps.disturbs("log_probability"):
            disturbed = taps("log_probability", rollout_log_prob, own=rows.response_mask)
            rollout_log_prob = jnp.where(rows.response_mask, disturbed, 0.0)
        undisturbed_reward = self.undisturbed_reward(models, rows)
        bound: dict[str, Any] = {"bound": 1.0} if self.reward_model is None else {}
        reward = taps("reward", undisturbed_reward, lengths=rows.response_token_counts, **bound)
        row_mask = self.row_mask(rows)
        score = self._add_overlong_penalty(reward, rows, coefficients)
        sampled = Rollout(rows, undisturbed_reward, reward, row_mask)
        index, row_mask = self._select_rows(reward, row_mask)
        rows, rollout_log_prob, score = jax.tree.map(lambda x: x[index], (rows, rollout_log_prob, score))
        loss_inputs, outputs = self._loss_inputs(
            models, rows, rollout_log_prob, score, row_mask, coefficients, temperature, taps
        )
        if self.config.covariance != "none":
            covariance_mask = loss_terms.select_covariance_tokens(
                self.config.covariance,
                coefficients.covariance_share,
                loss_inputs.advantages,
                loss_inputs.old_log_prob,
                loss_inputs.loss_mask,
                jax.random.fold_in(key, COVARIANCE_STREAM),
            )
            loss_inputs = dataclasses.replace(loss_inputs, covariance_mask=covariance_mask)
        return Experience(TrainingBatch(rows, loss_inputs), coefficients, temperature, sampled, outputs)

    def row_mask(self, rows: Rows) -> jax.Array:
        """Returns which rows count in the loss and the baselines, bool `[N]`: all, or all but the truncated ones."""
        return ~rows.truncated if self.settings.mask_truncated else jnp.ones_like(rows.truncated)

    def _add_overlong_penalty(self, reward: jax.Array, rows: Rows, coefficients: Coefficients) -> jax.Array:
        if not self.config.overlong_penalty:
            return reward
        max_length = self.dialogue.length - rows.prompt_lengths
        penalty = advantages.overlong_penalty(
            rows.response_lengths, max_length, coefficients.overlong_buffer * max_length
        )
        return reward + coefficients.overlong_coefficient * penalty

    def _sample_rows(
        self, models: Models, dialogue: Dialogue, numbers: Numbers, temperature: jax.Array, key: jax.Array, taps: Taps
    ) -> Rows:
        """Samples rows of the behaviour policy, `[prompts * oversampling * group_size, T]`."""
        settings = self.settings
        prompts_key, rows_key = jax.random.split(key)
        samples_reference = settings.objective == "preference" and not settings.online
        behaviour = models.reference if samples_reference else models.policy
        if taps.disturbs("behaviour"):
            behaviour = taps("behaviour", behaviour, label=POLICY)
        difficulty = jnp.full(settings.prompts * settings.oversampling, self._difficulty(dialogue, numbers, taps))
        begun = rollout.begin_dialogues(dialogue, prompts_key, difficulty, taps)
        begun = rollout.repeat_dialogues(begun, settings.group_size)
        params = self.policy.transformer_params(behaviour, models.base)
        return rollout.generate(self.sampler, params, dialogue, begun, rows_key, temperature, numbers.top_p, taps)

    def _difficulty(self, dialogue: Dialogue, numbers: Numbers, taps: Taps) -> jax.Array:
        """Returns the difficulty of this step's training prompts by the curriculum.

        Outside a run, whose number of steps is unknown, it is the final difficulty.
        """
        if not self.settings.curriculum or not taps.steps:
            return numbers.difficulty
        lowest, _ = dialogue.difficulties
        progress = jnp.minimum(jnp.asarray(taps.step, jnp.float32) / (taps.steps * self.settings.curriculum), 1.0)
        return lowest + progress * (numbers.difficulty - lowest)

    def _select_rows(self, reward: jax.Array, row_mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Selects the rows that are trained on.

        These are all rows of the first `prompts` rollout groups. With dynamic sampling, groups whose rewards differ are
        taken before those whose rewards are equal. A preference objective takes the best and the worst row of each
        group.

        Args:
          reward: the reward of each sampled row, float32 `[N]`.
          row_mask: bool `[N]`, which of them may count in the loss.

        Returns:
          index: int `[rows]`, the indices of the selected rows among the N.
          mask: bool `[rows]`, whether each counts in the loss. With dynamic sampling and with a preference objective,
            rows of groups whose rewards are equal do not.
        """
        settings = self.settings
        rewards, masks = (x.reshape(-1, settings.group_size) for x in (reward, row_mask))
        signal = advantages.has_signal(rewards, masks)
        groups = jnp.arange(settings.prompts)
        if self.config.dynamic_sampling:  # groups with a signal before those without, in the order they were sampled
            groups = jnp.argsort(jnp.where(signal, 0, 1), stable=True)[: settings.prompts]
            masks = masks & signal[:, None]
        if settings.objective == "preference":
            best = jnp.argmax(jnp.where(masks, rewards, -jnp.inf), axis=1)
            worst = jnp.argmin(jnp.where(masks, rewards, jnp.inf), axis=1)
            members = jnp.stack([best, worst], axis=1)
            masks = jnp.broadcast_to(signal[:, None], members.shape)
        else:
            members = jnp.broadcast_to(jnp.arange(settings.group_size), rewards.shape)
        index = groups[:, None] * settings.group_size + members[groups]
        return index.reshape(-1), masks[groups].reshape(-1)

    def _apply_packed(self, rows: Rows, function: Callable[[packing.Sequences], Any]) -> Any:
        """Returns `function` of the rows' packed sequences, by slot, up to each row's last response token."""
        settings = self.settings
        packed = packing.arrange(rows, rows.response_mask, settings.uses_packing)
        return packing.apply(packed, settings.piece_sizes(rows.tokens.shape[0]), function)

    def _loss_inputs(
        self,
        models: Models,
        rows: Rows,
        rollout_log_prob: jax.Array,
        score: jax.Array,
        row_mask: jax.Array,
        coefficients: Coefficients,
        temperature: jax.Array,
        taps: Taps,
    ) -> tuple[LossInputs, TrainerOutputs]:
        """Returns the loss's constants, and what the trainer computes for the rows before the first update."""

        def read(params: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
            hidden = self.policy.hidden(params, models.base, rows)
            full_params = self.policy.transformer_params(params, models.base)
            return (*self.policy.log_prob_and_entropy_from_hidden(hidden, full_params, rows, temperature), hidden)

        loss_mask = rows.response_mask & row_mask[:, None]
        log_prob = entropy = hidden = ref_log_prob = ref_hidden = value = target = token_advantages = returns = None
        if self.config.needs_reference or self.settings.telemetry == "full":
            log_prob, entropy, hidden = read(models.policy)
            ref_log_prob, _, ref_hidden = read(models.reference)
        elif not self.config.old_log_prob_is_sampled:
            log_prob, entropy = self._apply_packed(
                rows, lambda sequences: self.policy.predict(models.policy, models.base, sequences, temperature)
            )
        if (critic := self.critic) is not None:
            value = self._apply_packed(
                rows, lambda sequences: critic.head_outputs(models.critic, models.base, sequences)
            )
        if self.config.objective == "policy":
            kl_penalty = self._kl_penalty(log_prob, ref_log_prob)
            groups = (self.settings.prompts, self.settings.group_size)
            token_advantages, target = advantages.estimate_advantages(
                self.config, coefficients, score.reshape(groups), loss_mask, row_mask.reshape(groups), kl_penalty, value
            )
            token_advantages = taps("advantage", token_advantages, own=loss_mask)
            if self.config.critic:
                returns = discounted_returns(coefficients, score, loss_mask, kl_penalty)
        loss_inputs = LossInputs(
            loss_mask=loss_mask,
            old_log_prob=rollout_log_prob if self.config.old_log_prob_is_sampled else log_prob,
            advantages=token_advantages,
            rollout_log_prob=rollout_log_prob,
            ref_log_prob=ref_log_prob,
            old_value=value,
            value_target=target,
        )
        return loss_inputs, TrainerOutputs(log_prob, entropy, hidden, ref_hidden, score, returns)

    def _kl_penalty(self, log_prob: jax.Array | None, ref_log_prob: jax.Array | None) -> jax.Array | None:
        """Returns the KL estimate of each token, `[N, T]`, by which its reward is reduced.

        The estimate is not multiplied by the KL coefficient yet. None if the objective has no KL in the reward.

        Args:
          log_prob: the policy's log-probability of each token, `[N, T]`; may be None if there is no KL in the reward.
          ref_log_prob: the reference's log-probability of each token, likewise.
        """
        if not self.config.kl_in_reward:
            return None
        assert log_prob is not None, "it is computed with the reference's"
        assert ref_log_prob is not None, "a KL needs a reference"
        return loss_terms.KL_ESTIMATORS[self.config.kl](log_prob, ref_log_prob)

    def returns(self, models: Models, rows: Rows, numbers: Numbers) -> jax.Array:
        """Returns the undisturbed discounted return of each response token of the policy's rows, `[N, T]`.

        It includes the KL and length penalties, as does `TrainerOutputs.returns` for the rows that are trained on.
        `models` gives the reward model, and policy and reference of the KL penalty.
        """

        def log_prob(params: Any) -> jax.Array:
            return self.policy.log_prob_and_entropy(params, models.base, rows, numbers.temperature)[0]

        kl_penalty = None
        if self.config.kl_in_reward:
            kl_penalty = self._kl_penalty(log_prob(models.policy), log_prob(models.reference))
        score = self._add_overlong_penalty(self.undisturbed_reward(models, rows), rows, numbers.objective)
        return discounted_returns(numbers.objective, score, rows.response_mask, kl_penalty)


def discounted_returns(
    coefficients: Coefficients, score: jax.Array, response_mask: jax.Array, kl_penalty: jax.Array | None
) -> jax.Array:
    """Returns the discounted return of each response token, the KL penalty included: `[N, T]`."""
    reward = advantages.token_rewards(coefficients, score, response_mask, kl_penalty)
    return advantages.discounted_sum(reward, response_mask, coefficients.gamma)


def tap_coefficients(config: ObjectiveConfig, coefficients: Coefficients, taps: Taps) -> Coefficients:
    """Returns the coefficients with those tapped that the objective reads.

    Each is tapped at the site of its name, and both bounds of the ratio at "ratio_clip". The coefficient of the entropy
    bonus is tapped later, when the entropy of the sampled rows is known.
    """
    is_read = {
        "gae_lambda": config.critic and not config.adaptive_lambda,
        "critic_lambda": config.critic,
        "kl_coefficient": config.kl != "none",
    }
    tapped = {name: taps(name, getattr(coefficients, name)) for name, read in is_read.items() if read}
    if config.clips_ratio:
        bounds = taps("ratio_clip", jnp.stack([coefficients.clip_low, coefficients.clip_high]))
        tapped |= {"clip_low": bounds[0], "clip_high": bounds[1]}
    return dataclasses.replace(coefficients, **tapped)


def sampled_entropy(rows: Rows) -> jax.Array:
    """Estimates the entropy of the behaviour policy, in nats: the mean of -log_prob over response tokens."""
    response_mask = rows.response_mask
    return -jnp.sum(jnp.where(response_mask, rows.log_prob, 0.0)) / jnp.maximum(jnp.sum(response_mask), 1)


def max_response_tokens(dialogue: Dialogue) -> int:
    """Returns the largest number of response tokens that a row can have."""
    return dialogue.length - dialogue.prompt_length
