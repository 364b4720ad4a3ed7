"""Reinforcement learning of a language model on a dialogue: sample, reward, estimate advantages, update.

Every preset (PPO, GRPO, DPO and so on) is this learner with other settings.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxaudit.core.optimizer import Adam, Optimizer, OptimizerStats, warmup_decay
from jaxaudit.core.remedy import Trained
from jaxaudit.core.taps import Taps
from jaxaudit.dialogues.protocol import Dialogue
from jaxaudit.kernels.coherence import CoherenceSum
from jaxaudit.kernels.shuffle import shuffled
from jaxaudit.learners.dialogue import demonstrations, loss_terms, packing, policy_loss
from jaxaudit.learners.dialogue.collection import (
    CRITIC,
    POLICY,
    REWARD_MODEL,
    Collector,
    Experience,
    Models,
    TrainingBatch,
    max_response_tokens,
)
from jaxaudit.learners.dialogue.network import Network
from jaxaudit.learners.dialogue.policy_loss import LossInputs, Predictions
from jaxaudit.learners.dialogue.rollout import Rows
from jaxaudit.learners.dialogue.settings import DialogueSettings, Numbers
from jaxaudit.learners.dialogue.telemetry import measurement
from jaxaudit.learners.dialogue.telemetry.channels import initial_values, run_channels
from jaxaudit.learners.dialogue.telemetry.measurement import Instruments, TokenRecords, UpdateStats
from jaxaudit.learners.dialogue.telemetry.rewards import Scale
from jaxaudit.learners.dialogue.telemetry.token_statistics import (
    BIGRAM_ROWS,
    SOURCES,
    STRATA,
    Bigrams,
    LastValues,
    Statistics,
    defined,
)
from jaxaudit.learners.language_model import decays
from jaxaudit.models import gpt2, gpt2_checkpoint
from jaxaudit.runtime.paths import squares_by_group


@struct.dataclass
class DialogueData:
    """The arrays that all lanes share.

    Attributes:
      numbers: the settings that are data.
      dialogue: the dialogue's arrays.
      start: a checkpoint's parameters, float32; None if every lane begins with random ones.
      critic_start, reward_model_start: parameters of the checkpoints that the value or reward model begins with; None
        if it begins with the policy's parameters or with random ones.
    """

    numbers: Numbers
    dialogue: Any = None
    start: Any = None
    critic_start: Any = None
    reward_model_start: Any = None


@struct.dataclass
class DialogueState:
    """The state of one lane; its field names are paths in checkpoints.

    Attributes:
      policy, critic: trained parameters with the optimizer's moments; critic is None without a value model.
      reward_model: parameters; None without one.
      reference: parameters of the reference policy.
      initial: parameters of the undisturbed policy before its first update; None if the data has them (a checkpoint's),
        or if nothing reads them.
      scales: with a reward model, the scales of its scores ("proxy") and of gold rewards ("gold") before the first
        update; empty without one.
      results: bigram counts of tools' results before the first update; None without tools or with basic telemetry.
      warm_start_success: success of sampled rows at the end of the warm start.
      told: last values of the channels of rows and updates.
      measured: last values of the channels of held-out rows.
    """

    policy: Trained
    critic: Trained | None
    reward_model: Any
    reference: Any
    initial: Any
    scales: dict[str, Scale]
    results: Bigrams | None
    warm_start_success: Any
    told: LastValues
    measured: LastValues


INITIAL_ROWS = 128
"""Number of rows that are sampled at once to measure success, reward scales and tool results before training."""

TOOL_STRATUM = STRATA.index("tool")

GPT2_POSITIONS = 1024
"""Number of position embeddings in GPT-2's checkpoints."""


class DialogueLearner:
    """The learner as pure functions `init` and `step`.

    Args:
      dialogue: the dialogue without its arrays, which are data.
      settings: the settings' `structure`.
      positions: number of position embeddings of the checkpoint, if there is one; defaults to GPT-2's.
    """

    def __init__(self, dialogue: Dialogue, settings: DialogueSettings, positions: int = GPT2_POSITIONS):
        self.dialogue, self.settings, self.config = dialogue, settings, settings.objective_config
        size, dtype = gpt2.SIZES[settings.size], jnp.dtype(settings.precision)
        num_positions = positions if settings.checkpoint else dialogue.length
        model = gpt2.GPT2(dialogue.vocabulary, num_positions, size, dtype, settings.remat)
        self.policy = Network(model, settings.lora_rank)
        self.critic = Network(model, settings.lora_rank, scalar=True) if self.config.critic else None
        self.reward_model = Network(model, settings.lora_rank, scalar=True) if settings.reward == "learned" else None
        self.collector = Collector(dialogue, settings, self.policy, self.critic, self.reward_model)
        self.instruments = Instruments(dialogue, settings, self.policy)
        self.channels = run_channels(dialogue, settings, self.policy)
        decay = (optax.add_decayed_weights(settings.weight_decay, decays),) if settings.weight_decay else ()
        self.transform = Adam((settings.beta1, settings.beta2), settings.epsilon, decay)

    def optimizer(self, label: str, numbers: Numbers) -> Optimizer:
        """Returns the optimizer of a label, with the rate in `numbers` and the schedule in the settings."""
        settings = self.settings
        rate = numbers.learning_rate if label == POLICY else numbers.critic_learning_rate
        if settings.scheduled:
            shape = settings.learning_rate_warmup, settings.learning_rate_decay, settings.learning_rate_final
            rate = warmup_decay(rate, *shape)
        return Optimizer(self.transform, rate, numbers.max_grad_norm, label, outside=settings.learning_rate_warmup)

    def base(self, data: DialogueData) -> Any:
        """Returns the parameters under the adapters; None without adapters."""
        return data.start if self.settings.lora_rank else None

    def save(self, folder: Path, state: DialogueState, data: DialogueData) -> None:
        """Writes the policy, with its adapters merged, as a folder that transformers can read."""
        params = self.policy.transformer_params(state.policy.params, self.base(data))
        if isinstance(params, gpt2.Adapted):
            params = gpt2.merged(params)
        gpt2_checkpoint.save(folder, params, self.policy.model, self.dialogue.end_of_text)

    # Before the first iteration.

    def init(self, key: jax.Array, data: DialogueData) -> DialogueState:
        """Returns a lane's initial state, after the warm start of the policy and the training of the reward model."""
        settings, numbers = self.settings, data.numbers
        dialogue, base = self.dialogue.bind(data.dialogue), self.base(data)
        policy_key, warm_key, reward_key, pairs_key, critic_key, rows_key, success_key, scale_key, results_key = (
            jax.random.split(key, 9)
        )
        policy = data.start if data.start is not None and not base else self.policy.init(policy_key)

        def success_of(params: Any, key: jax.Array) -> jax.Array:
            rows = self.collector.sample_undisturbed(params, base, dialogue, numbers, key, INITIAL_ROWS)
            return jnp.mean(rows.gold)

        if settings.warm_start and not settings.checkpoint:
            policy, success = demonstrations.warm_start_policy(
                self.policy, policy, dialogue, warm_key, success_of, settings, numbers
            )
        else:
            success = success_of(policy, success_key)
        reward_model, scales = None, {}
        if self.reward_model is not None:
            params = self.initial_params(
                self.reward_model, settings.reward_model_init, policy, data.reward_model_start, reward_key
            )
            reward_model = demonstrations.train_reward_model(
                self.reward_model, params, base, dialogue, pairs_key, settings, numbers
            )
            rows = self.collector.sample_undisturbed(policy, base, dialogue, numbers, scale_key, INITIAL_ROWS)
            score = self.collector.undisturbed_reward(Models(policy, reward_model=reward_model, base=base), rows)
            scales = {"proxy": Scale.of(score), "gold": Scale.of(rows.gold)}
        results = None
        if settings.telemetry == "full" and self.dialogue.result_tokens:
            results = self.count_results(policy, base, dialogue, numbers, results_key)
        critic = None
        if self.critic is not None:
            params = self.initial_params(self.critic, settings.critic_init, policy, data.critic_start, critic_key)
            if settings.critic_warm_start:
                sampling_key, order_key = jax.random.split(rows_key)
                models = Models(policy, reward_model=reward_model, reference=policy, base=base)
                params = demonstrations.pretrain_value_model(
                    self.critic,
                    params,
                    base,
                    *self.sample_returns(models, dialogue, numbers, sampling_key),
                    order_key,
                    updates=settings.critic_warm_start,
                    minibatch=settings.critic_warm_start_minibatch,
                    rate=numbers.critic_warm_start_learning_rate,
                )
            critic = Trained(params, self.transform.init(params))
        last_values, last_held_out = initial_values(self.channels, success)
        return DialogueState(
            policy=Trained(policy, self.transform.init(policy)),
            critic=critic,
            reward_model=reward_model,
            reference=policy,
            initial=policy if self.keeps_initial else None,
            scales=scales,
            results=results,
            warm_start_success=success,
            told=last_values,
            measured=last_held_out,
        )

    def count_results(self, policy: Any, base: Any, dialogue: Dialogue, numbers: Numbers, key: jax.Array) -> Bigrams:
        """Counts the bigrams of tools' results in `BIGRAM_ROWS` rows of a policy, `INITIAL_ROWS` at a time."""

        def add(counts: Bigrams, key: jax.Array) -> tuple[Bigrams, None]:
            rows = self.collector.sample_undisturbed(policy, base, dialogue, numbers, key, INITIAL_ROWS)
            return counts.add(rows), None

        keys = jax.random.split(key, BIGRAM_ROWS // INITIAL_ROWS)
        return jax.lax.scan(add, Bigrams.empty(dialogue.vocabulary), keys)[0]

    def sample_returns(
        self, models: Models, dialogue: Dialogue, numbers: Numbers, key: jax.Array
    ) -> tuple[Rows, jax.Array]:
        """Samples rows of the policy for value pretraining, as many at once as in an iteration, and their returns."""
        size = self.settings.rows

        def sample(key: jax.Array) -> tuple[Rows, jax.Array]:
            rows = self.collector.sample_undisturbed(models.policy, models.base, dialogue, numbers, key, size)
            return rows, self.collector.returns(models, rows, numbers)

        batches = jax.lax.map(sample, jax.random.split(key, -(-self.settings.critic_warm_start_rows // size)))
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batches)

    @property
    def keeps_initial(self) -> bool:
        """Whether the state keeps the initial policy for `representation_drift`, because no data has it."""
        return self.settings.telemetry == "full" and not (self.settings.checkpoint and not self.settings.lora_rank)

    def initial_params(self, network: Network, init: str, policy: Any, start: Any, key: jax.Array) -> Any:
        """Returns the initial parameters of a value or reward model; for `init` see `DialogueSettings.critic_init`.

        With adapters, it begins as the checkpoint, with new adapters that change nothing.
        """
        if init == "random" or network.rank:
            return network.init(key)
        return network.with_head(policy if init == "policy" else start)

    # An iteration.

    def step(self, state: DialogueState, key: jax.Array, taps: Taps) -> tuple[DialogueState, dict[str, jax.Array]]:
        """Performs one iteration: sampling, rewards, advantages, epochs of minibatches, held-out rows."""
        data: DialogueData = taps.data
        collect_key, order_key = jax.random.split(key)
        numbers, base, dialogue = data.numbers, self.base(data), self.dialogue.bind(data.dialogue)
        state = self.apply_state_taps(state, numbers, taps)
        before = self.models_of(state, data)
        acting = dataclasses.replace(before, reward_model=self.tap_reward_model(state.reward_model, taps))
        experience = self.collector.collect(acting, dialogue, numbers, collect_key, taps)
        new_state, updates = self.update_epochs(state, base, numbers, experience, order_key, taps)
        after = self.models_of(new_state, data)
        statistics = self.compute_telemetry(before, after, state, experience, updates)
        last_values, telemetry = state.told.update(statistics)
        telemetry["warm_start_success"] = state.warm_start_success
        last_held_out, held_out_telemetry = measurement.measure_held_out_when_due(
            self.collector, state.measured, after, dialogue, numbers, experience, taps
        )
        new_state = dataclasses.replace(new_state, told=last_values, measured=last_held_out)
        return new_state, telemetry | held_out_telemetry

    def models_of(self, state: DialogueState, data: DialogueData) -> Models:
        """Returns the parameters in the state and the data by their use."""
        critic = None if state.critic is None else state.critic.params
        initial = state.initial if self.keeps_initial else data.start
        return Models(state.policy.params, critic, state.reward_model, state.reference, initial, self.base(data))

    def tap_reward_model(self, reward_model: Any, taps: Taps) -> Any:
        """Returns a tapped copy of the reward model for this iteration, so that a perturbation ends with its window."""
        if reward_model is None or not taps.disturbs(REWARD_MODEL):
            return reward_model
        return taps(REWARD_MODEL, reward_model, label=REWARD_MODEL)

    def apply_state_taps(self, state: DialogueState, numbers: Numbers, taps: Taps) -> DialogueState:
        """Returns the state with trained parameters, moments and reference tapped; perturbations of these persist."""
        policy = Trained(
            *self.optimizer(POLICY, numbers).disturb(state.policy.params, state.policy.moments, taps, self.policy.init)
        )
        critic, reference = state.critic, state.reference
        if self.critic is not None and critic is not None:
            optimizer = self.optimizer(CRITIC, numbers)
            critic = Trained(*optimizer.disturb(critic.params, critic.moments, taps, self.critic.init))
        if self.config.needs_reference and taps.disturbs("reference"):
            reference = taps("reference", reference, label=POLICY, policy=policy.params)
        return dataclasses.replace(state, policy=policy, critic=critic, reference=reference)

    def update_epochs(
        self, state: DialogueState, base: Any, numbers: Numbers, experience: Experience, key: jax.Array, taps: Taps
    ) -> tuple[DialogueState, UpdateStats]:
        """Returns the state after all epochs of minibatches, and what was recorded of the updates."""
        settings = self.settings
        tokens_per_minibatch = jnp.sum(experience.batch.loss_inputs.loss_mask) / settings.minibatches
        size = settings.units // settings.minibatches

        def update(taps: Taps, carry: Any, units: jax.Array) -> tuple[Any, Any]:
            trained, coherence, source_sums = carry
            rows = self.rows_of_units(units)
            batch = experience.batch.take(rows)
            gradient, metrics, tokens, tool_gradient = self.gradient(
                trained, state.reference, base, experience, batch, tokens_per_minibatch, taps
            )
            context = {"loss": metrics["loss"]}
            if "old_kl" in metrics:
                context["approximate_kl"] = metrics["old_kl"]
            trained, optimizer_stats = self.apply_updates(trained, numbers, gradient, taps, context)
            layers = jnp.sqrt(squares_by_group(gradient[POLICY])) if settings.telemetry == "full" else None
            squares = None
            if tool_gradient is not None:
                rest = jax.tree.map(jnp.subtract, gradient[POLICY], tool_gradient)
                by_source = {"tool": tool_gradient, "rest": rest}
                source_sums = jax.tree.map(jnp.add, source_sums, by_source)
                squares = squared_norms(by_source)
            carry = trained, coherence.add(gradient[POLICY]), source_sums
            return carry, UpdateStats(rows, tokens, metrics, optimizer_stats, layers, squares)

        def epoch(taps: Taps, carry: Any, key: jax.Array) -> tuple[Any, Any]:
            order = shuffled(key, settings.units).reshape(settings.minibatches, size)
            return taps.scan(update, carry, order)

        trained = {POLICY: state.policy} | ({} if state.critic is None else {CRITIC: state.critic})
        coherence = CoherenceSum.zeros(state.policy.params, raw=False)
        source_sums = None
        if self.splits_gradients:
            source_sums = {source: optax.tree.zeros_like(state.policy.params) for source in SOURCES}
        carry = trained, coherence, source_sums
        (trained, coherence, source_sums), updates = taps.scan(epoch, carry, jax.random.split(key, settings.epochs))
        trained = self.finish_updates(trained, numbers, taps)
        after = dataclasses.replace(state, policy=trained[POLICY], critic=trained.get(CRITIC))
        summed_squares = None if source_sums is None else squared_norms(source_sums)
        return after, dataclasses.replace(updates, coherence=coherence, summed_squares=summed_squares)

    def finish_updates(self, trained: dict[str, Trained], numbers: Numbers, taps: Taps) -> dict[str, Trained]:
        """Returns the trained parameters and moments after the remedies that act on them once an iteration."""
        init = {POLICY: self.policy.init} | ({} if self.critic is None else {CRITIC: self.critic.init})
        return {
            label: Trained(*self.optimizer(label, numbers).finish(x.params, x.moments, taps, init[label]))
            for label, x in trained.items()
        }

    @property
    def splits_gradients(self) -> bool:
        """Whether gradients of tokens after a tool's result are computed separately, by one more backward pass."""
        settings = self.settings
        return settings.telemetry == "full" and settings.objective == "policy" and bool(self.dialogue.result_tokens)

    def compute_telemetry(
        self,
        before: Models,
        after: Models,
        state: DialogueState,
        experience: Experience,
        updates: UpdateStats,
    ) -> Statistics:
        """Computes the statistics of the iteration's rows and updates that are channels of this run."""
        statistics = self.instruments.measure(before, after, state.scales, state.results, experience, updates)
        change = jax.tree.map(jnp.subtract, after.policy, before.policy)
        norms = {"params_norm": optax.tree.norm(after.policy), "update_norm": optax.tree.norm(change)}
        statistics |= {name: defined(norm) for name, norm in norms.items()}
        return {name: statistics[name] for name in self.channels if name in statistics}

    def rows_of_units(self, units: jax.Array) -> jax.Array:
        """Returns the row indices of a minibatch's units, which are pairs for a preference objective, else rows."""
        if self.settings.objective == "preference":
            return (2 * units[:, None] + jnp.arange(2)).reshape(-1)
        return units

    def gradient(
        self,
        trained: dict[str, Trained],
        reference: Any,
        base: Any,
        experience: Experience,
        batch: TrainingBatch,
        tokens_per_minibatch: Any,
        taps: Taps,
    ) -> tuple[dict[str, Any], dict[str, jax.Array], TokenRecords | None, Any]:
        """Computes the gradient of a minibatch's loss with respect to all trained parameters.

        Returns:
          the gradient by label, the metrics of the loss by name, records of tokens (None for a preference objective),
          and, if `splits_gradients`, the policy's gradient of the tokens soon after a tool's result (otherwise None).
        """
        loss_mask, full = batch.loss_inputs.loss_mask, self.settings.telemetry == "full"
        tool_mask = self.instruments.masks(batch.rows.role, loss_mask)[TOOL_STRATUM] if self.splits_gradients else None
        denominators = loss_terms.denominators(loss_mask, max_response_tokens(self.dialogue), tokens_per_minibatch)
        coefficients, temperature = experience.coefficients, experience.temperature

        def predict(params: dict[str, Any], piece: packing.PackedPiece) -> Predictions:
            sequences = piece.sequences
            log_prob, entropy = self.policy.predict(params[POLICY], base, sequences, temperature)
            value = exact_kl = None
            if self.critic is not None:
                value = self.critic.head_outputs(params[CRITIC], base, sequences)
            if self.config.kl == "exact":
                exact_kl = self.policy.exact_kl(params[POLICY], reference, base, sequences, temperature)
            return jax.tree.map(piece.unpack, Predictions(log_prob, entropy, value, exact_kl))

        def loss(predictions: Predictions, inputs: LossInputs, taps: Taps) -> tuple[jax.Array, Any]:
            objective, metrics = policy_loss.policy_loss(self.config, coefficients, predictions, inputs, denominators)
            objective = taps("objective", objective)
            return objective, metrics | {"loss": objective}

        def piece_gradient(taps: Taps, piece: packing.PackedPiece) -> Any:
            predictions, pull_back = jax.vjp(lambda params: predict(params, piece), params)
            inputs = dataclasses.replace(batch.loss_inputs, loss_mask=loss_mask & piece.slot_mask)
            cotangent, metrics = jax.grad(loss, has_aux=True)(predictions, inputs, taps)
            tokens = tool_gradient = None
            if self.config.objective == "policy":
                weight = None
                if full:
                    weight = policy_loss.score_weights(self.config, coefficients, predictions, inputs, denominators)
                tokens = TokenRecords(policy_loss.unclipped_log_ratio(self.config, predictions, inputs), weight)
            if tool_mask is not None:
                (tool_gradient,) = pull_back(jax.tree.map(lambda x: jnp.where(tool_mask, x, 0), cotangent))
                tool_gradient = tool_gradient[POLICY]
            return *pull_back(cotangent), metrics, tokens, tool_gradient

        params = {label: x.params for label, x in trained.items()}
        packed = packing.arrange(batch.rows, loss_mask, self.settings.uses_packing)
        sizes = self.settings.piece_sizes(loss_mask.shape[0])
        return packing.sum_over_pieces(packed, sizes, piece_gradient, taps)

    def apply_updates(
        self,
        trained: dict[str, Trained],
        numbers: Numbers,
        gradient: dict[str, Any],
        taps: Taps,
        context: dict[str, Any],
    ) -> tuple[dict[str, Trained], dict[str, OptimizerStats]]:
        """Applies one update to all trained parameters; remedies may read `context`, scalars of the minibatch."""
        after, stats = {}, {}
        for label, x in trained.items():
            params, moments, stats[label] = self.optimizer(label, numbers).update(
                x.params, x.moments, gradient[label], taps, **context
            )
            after[label] = Trained(params, moments)
        return after, stats


def squared_norms(by_source: dict[str, Any]) -> jax.Array:
    """Returns the squared norms of gradients by `SOURCES`, `[2]`."""
    return jnp.stack([optax.tree.norm(by_source[source]) ** 2 for source in SOURCES])
