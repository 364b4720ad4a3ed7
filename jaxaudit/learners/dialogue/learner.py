"""Reinforcement learning of a language model on a dialogue: sample, reward, estimate, update; all presets are this."""

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
from jaxaudit.learners.dialogue.collection import CRITIC, POLICY, REWARD_MODEL, Collector, Models, longest
from jaxaudit.learners.dialogue.loss_terms import Denominators
from jaxaudit.learners.dialogue.network import Network
from jaxaudit.learners.dialogue.policy_loss import Predictions
from jaxaudit.learners.dialogue.rows import Experience, Rows, TrainingBatch
from jaxaudit.learners.dialogue.settings import DialogueSettings, Numbers
from jaxaudit.learners.dialogue.telemetry import iteration, token_statistics
from jaxaudit.learners.dialogue.telemetry.channels import before_the_first, channels_of
from jaxaudit.learners.dialogue.telemetry.measurement import Instruments, Tokens, UpdateStats
from jaxaudit.learners.dialogue.telemetry.rewards import Scale
from jaxaudit.learners.dialogue.telemetry.token_statistics import (
    SOURCES,
    STRATA,
    Bigrams,
    LastSeen,
    Measured,
    Statistics,
)
from jaxaudit.learners.language_model import decays
from jaxaudit.models import gpt2, gpt2_checkpoint, lora
from jaxaudit.runtime.paths import squares_by_group


@struct.dataclass
class DialogueData:
    """What all lanes read.

    Attributes:
      numbers: the settings that are data.
      dialogue: the dialogue's arrays.
      start: a checkpoint's parameters, float32; None: every lane begins with random ones.
      critic_start, reward_model_start: likewise those of checkpoints that the value or reward model begins as; None:
        they begin as the policy, or with random ones.
    """

    numbers: Numbers
    dialogue: Any = None
    start: Any = None
    critic_start: Any = None
    reward_model_start: Any = None


@struct.dataclass
class DialogueState:
    """What a lane carries.

    Attributes:
      policy, critic: what is trained; critic is None without a value model.
      reward_model: parameters; None without one.
      reference: the policy's parameters that divergence is measured from.
      initial: the policy's before its first update, which nothing disturbs; None where only data has them, those of a
        checkpoint, or nothing asks for them.
      scales: with a reward model, where its scores ("proxy") and the gold rewards ("gold") lay before the first update;
        empty without one.
      results: what tools said before the first update, counted; None without tools or with basic telemetry.
      warm_start_success: sampled success at which the policy was handed over.
      told: what the channels of rows and updates said last.
      measured: what those of held-out rows did.
    """

    policy: Trained
    critic: Trained | None
    reward_model: Any
    reference: Any
    initial: Any
    scales: dict[str, Scale]
    results: Bigrams | None
    warm_start_success: Any
    told: LastSeen
    measured: LastSeen


LOOKED_AT = 128
"""Sampled rows that tell whether a warm start is over."""

TOOL_STRATUM = STRATA.index("tool")

GPT2_POSITIONS = 1024
"""Those of GPT-2's checkpoints."""


class DialogueLearner:
    """Pure functions `init` and `step`.

    Args:
      dialogue: without its arrays, which are data.
      settings: their `structure`.
      positions: of the checkpoint, where there is one; GPT-2's unless given.
    """

    def __init__(self, dialogue: Dialogue, settings: DialogueSettings, positions: int = GPT2_POSITIONS):
        self.dialogue, self.settings, self.parts = dialogue, settings, settings.parts
        size, dtype = gpt2.SIZES[settings.size], jnp.dtype(settings.precision)
        places = positions if settings.checkpoint else dialogue.length
        model = gpt2.GPT2(dialogue.vocabulary, places, size, dtype, settings.remat)
        self.policy = Network(model, settings.lora_rank)
        self.critic = Network(model, settings.lora_rank, scalar=True) if self.parts.critic else None
        self.reward_model = Network(model, settings.lora_rank, scalar=True) if settings.reward == "learned" else None
        self.collector = Collector(dialogue, settings, self.policy, self.critic, self.reward_model)
        self.instruments = Instruments(dialogue, settings, self.policy)
        self.channels = channels_of(dialogue, settings, self.policy)
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
        """The parameters that adapters adapt; None where there are none."""
        return data.start if self.settings.lora_rank else None

    def save(self, folder: Path, state: DialogueState, data: DialogueData) -> None:
        """Writes the policy, adapters merged, as a folder that transformers reads."""
        params = self.policy.whole(state.policy.params, self.base(data))
        if isinstance(params, lora.Adapted):
            params = lora.merged(params)
        gpt2_checkpoint.save(folder, params, self.policy.model, self.dialogue.end_of_text)

    # Before the first iteration.

    def init(self, key: jax.Array, data: DialogueData) -> DialogueState:
        """A lane's first state: warmed up, or a checkpoint's policy."""
        settings, numbers = self.settings, data.numbers
        dialogue, base = self.dialogue.bind(data.dialogue), self.base(data)
        policy_key, warm_key, reward_key, pairs_key, critic_key, rows_key, look_key, scale_key, results_key = (
            jax.random.split(key, 9)
        )
        policy = data.start if data.start is not None and not base else self.policy.init(policy_key)

        def success_of(params: Any, key: jax.Array) -> jax.Array:
            return jnp.mean(self.collector.undisturbed(params, base, dialogue, numbers, key, LOOKED_AT).gold)

        if settings.warm_start and not settings.checkpoint:
            policy, success = demonstrations.warmed_up(
                self.policy,
                policy,
                dialogue,
                warm_key,
                success_of,
                updates=settings.warm_start,
                rows=settings.warm_start_rows,
                right=numbers.warm_start_right,
                rate=numbers.warm_start_learning_rate,
                enough=numbers.warm_start_success,
                difficulty=numbers.difficulty,
                temperature=numbers.temperature,
            )
        else:
            success = success_of(policy, look_key)
        reward_model, scales = None, {}
        if self.reward_model is not None:
            reward_model = demonstrations.reward_model(
                self.reward_model,
                self.initial_params(
                    self.reward_model, settings.reward_model_init, policy, data.reward_model_start, reward_key
                ),
                base,
                dialogue,
                pairs_key,
                updates=settings.reward_model_warm_start,
                pairs=settings.reward_model_pairs,
                rate=numbers.reward_model_learning_rate,
                difficulty=numbers.difficulty,
            )
            rows = self.collector.undisturbed(policy, base, dialogue, numbers, scale_key, LOOKED_AT)
            score = self.collector.scored(Models(policy, reward_model=reward_model, base=base), rows)
            scales = {"proxy": Scale.of(score), "gold": Scale.of(rows.gold)}
        results = None
        if settings.telemetry == "full" and self.dialogue.result_tokens:
            results = self.count_results(policy, base, dialogue, numbers, results_key)
        critic = None
        if self.critic is not None:
            params = self.initial_params(self.critic, settings.critic_init, policy, data.critic_start, critic_key)
            if settings.critic_warm_start:
                draws_key, order_key = jax.random.split(rows_key)
                models = Models(policy, reward_model=reward_model, reference=policy, base=base)
                params = demonstrations.value_model(
                    self.critic,
                    params,
                    base,
                    *self.sample_returns(models, dialogue, numbers, draws_key),
                    order_key,
                    updates=settings.critic_warm_start,
                    minibatch=settings.critic_warm_start_minibatch,
                    rate=numbers.critic_warm_start_learning_rate,
                )
            critic = Trained(params, self.transform.init(params))
        told, measured = before_the_first(self.channels, success)
        return DialogueState(
            policy=Trained(policy, self.transform.init(policy)),
            critic=critic,
            reward_model=reward_model,
            reference=policy,
            initial=policy if self.keeps_initial else None,
            scales=scales,
            results=results,
            warm_start_success=success,
            told=told,
            measured=measured,
        )

    def count_results(
        self, policy: Any, base: Any, dialogue: Dialogue, numbers: Numbers, key: jax.Array
    ) -> token_statistics.Bigrams:
        """What tools say to a policy, counted over rows that are sampled a part at a time."""

        def add(so_far: token_statistics.Bigrams, key: jax.Array) -> tuple[token_statistics.Bigrams, None]:
            return so_far.add(self.collector.undisturbed(policy, base, dialogue, numbers, key, LOOKED_AT)), None

        keys = jax.random.split(key, token_statistics.ROWS // LOOKED_AT)
        return jax.lax.scan(add, token_statistics.Bigrams.empty(dialogue.vocabulary), keys)[0]

    def sample_returns(
        self, models: Models, dialogue: Dialogue, numbers: Numbers, key: jax.Array
    ) -> tuple[Rows, jax.Array]:
        """Rows of the policy for value pretraining and what they return, drawn as many at once as an iteration's."""
        each = self.settings.rows

        def some(key: jax.Array) -> tuple[Rows, jax.Array]:
            rows = self.collector.undisturbed(models.policy, models.base, dialogue, numbers, key, each)
            return rows, self.collector.returns(models, rows, numbers)

        found = jax.lax.map(some, jax.random.split(key, -(-self.settings.critic_warm_start_rows // each)))
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), found)

    @property
    def keeps_initial(self) -> bool:
        """Whether a lane keeps the policy that it began with, which is in no data, for `representation_drift`."""
        return self.settings.telemetry == "full" and not (self.settings.checkpoint and not self.settings.lora_rank)

    def initial_params(self, network: Network, how: str, policy: Any, start: Any, key: jax.Array) -> Any:
        """What a value or reward model begins as: see `DialogueSettings.critic_init`.

        With adapters it begins as the checkpoint, which adapters of its own change nothing of.
        """
        if how == "random" or network.rank:
            return network.init(key)
        return network.with_head(policy if how == "policy" else start)

    # An iteration.

    def step(self, state: DialogueState, key: jax.Array, taps: Taps) -> tuple[DialogueState, dict[str, jax.Array]]:
        """One iteration: prompts, rows, rewards, advantages, epochs of minibatches, held-out rows."""
        data: DialogueData = taps.data
        collect_key, order_key = jax.random.split(key)
        numbers, base, dialogue = data.numbers, self.base(data), self.dialogue.bind(data.dialogue)
        state = self.apply_state_taps(state, numbers, taps)
        models = self.models_of(state, data)
        acting = dataclasses.replace(models, reward_model=self.scoring_model(state.reward_model, taps))
        experience = self.collector.collect(acting, dialogue, numbers, collect_key, taps)
        after, visited = self.update_epochs(state, base, numbers, experience, order_key, taps)
        trained = self.models_of(after, data)
        told, telemetry = state.told.update(self.compute_telemetry(models, trained, state, experience, visited))
        telemetry["warm_start_success"] = state.warm_start_success
        measured, held = iteration.measure_held_out_when_due(
            self.collector, state.measured, trained, dialogue, numbers, experience, taps
        )
        return dataclasses.replace(after, told=told, measured=measured), telemetry | held

    def models_of(self, state: DialogueState, data: DialogueData) -> Models:
        """The parameters that a state and the data hold, each under what it is used for."""
        critic = None if state.critic is None else state.critic.params
        initial = state.initial if self.keeps_initial else data.start
        return Models(state.policy.params, critic, state.reward_model, state.reference, initial, self.base(data))

    def scoring_model(self, reward_model: Any, taps: Taps) -> Any:
        """The reward model that scores this iteration's rows: a tapped copy, for a disturbance ends with its window."""
        if reward_model is None or not taps.disturbs(REWARD_MODEL):
            return reward_model
        return taps(REWARD_MODEL, reward_model, label=REWARD_MODEL)

    def apply_state_taps(self, state: DialogueState, numbers: Numbers, taps: Taps) -> DialogueState:
        """The state with what is trained and the reference tapped: what is changed there stays."""
        policy = Trained(
            *self.optimizer(POLICY, numbers).disturb(state.policy.params, state.policy.moments, taps, self.policy.init)
        )
        critic, reference = state.critic, state.reference
        if self.critic is not None and critic is not None:
            optimizer = self.optimizer(CRITIC, numbers)
            critic = Trained(*optimizer.disturb(critic.params, critic.moments, taps, self.critic.init))
        if self.parts.needs_reference and taps.disturbs("reference"):
            reference = taps("reference", reference, label=POLICY, policy=policy.params)
        return dataclasses.replace(state, policy=policy, critic=critic, reference=reference)

    def update_epochs(
        self, state: DialogueState, base: Any, numbers: Numbers, experience: Experience, key: jax.Array, taps: Taps
    ) -> tuple[DialogueState, UpdateStats]:
        """The state after epochs of minibatches, and what the updates tell."""
        settings = self.settings
        share = jnp.sum(experience.batch.loss_inputs.loss_mask) / settings.minibatches
        size = settings.units // settings.minibatches

        def update(taps: Taps, carry: Any, units: jax.Array) -> tuple[Any, Any]:
            trained, total, by_source = carry
            rows = self.rows_of_units(units)
            batch = experience.batch.picked(rows)
            gradient, told, tokens, of_tool = self.gradient(
                trained, state.reference, base, experience, batch, share, taps
            )
            context = {"loss": told["loss"]} | ({"approximate_kl": told["old_kl"]} if "old_kl" in told else {})
            trained, done = self.apply_updates(trained, numbers, gradient, taps, context)
            layers = jnp.sqrt(squares_by_group(gradient[POLICY])) if settings.telemetry == "full" else None
            squares = None
            if of_tool is not None:
                apart = {"tool": of_tool, "rest": jax.tree.map(jnp.subtract, gradient[POLICY], of_tool)}
                by_source = jax.tree.map(jnp.add, by_source, apart)
                squares = jnp.stack([optax.tree.norm(apart[source]) ** 2 for source in SOURCES])
            carry = trained, total.add(gradient[POLICY]), by_source
            return carry, UpdateStats(rows, tokens, told, done, layers, squares)

        def epoch(taps: Taps, carry: Any, key: jax.Array) -> tuple[Any, Any]:
            order = shuffled(key, settings.units).reshape(settings.minibatches, size)
            return taps.scan(update, carry, order)

        trained = {POLICY: state.policy} | ({} if state.critic is None else {CRITIC: state.critic})
        total = CoherenceSum.zeros(state.policy.params, raw=False)
        by_source = None
        if self.splits_gradients:
            by_source = {source: optax.tree.zeros_like(state.policy.params) for source in SOURCES}
        begun = trained, total, by_source
        (trained, total, by_source), seen = taps.scan(epoch, begun, jax.random.split(key, settings.epochs))
        trained = self.finished(trained, numbers, taps)
        after = dataclasses.replace(state, policy=trained[POLICY], critic=trained.get(CRITIC))
        summed = None
        if by_source is not None:
            summed = jnp.stack([optax.tree.norm(by_source[source]) ** 2 for source in SOURCES])
        return after, dataclasses.replace(seen, coherence=total, summed_squares=summed)

    def finished(self, trained: dict[str, Trained], numbers: Numbers, taps: Taps) -> dict[str, Trained]:
        """What was trained after the remedies that act on it."""
        fresh = {POLICY: self.policy.init} | ({} if self.critic is None else {CRITIC: self.critic.init})
        return {
            label: Trained(*self.optimizer(label, numbers).finish(one.params, one.moments, taps, fresh[label]))
            for label, one in trained.items()
        }

    @property
    def splits_gradients(self) -> bool:
        """Whether gradients are told apart by whether their tokens follow a tool's result: one more backward pass."""
        settings = self.settings
        return settings.telemetry == "full" and settings.objective == "policy" and bool(self.dialogue.result_tokens)

    def compute_telemetry(
        self,
        before: Models,
        after: Models,
        state: DialogueState,
        experience: Experience,
        visited: UpdateStats,
    ) -> Statistics:
        """What the iteration's rows and updates tell, by the scales and counts of the state."""
        found = self.instruments.read(before, after, state.scales, state.results, experience, visited)
        change = jax.tree.map(jnp.subtract, after.policy, before.policy)
        norms = {"params_norm": optax.tree.norm(after.policy), "update_norm": optax.tree.norm(change)}
        found |= {name: Measured(norm, jnp.asarray(1)) for name, norm in norms.items()}
        return {name: found[name] for name in self.channels if name in found}

    def rows_of_units(self, units: jax.Array) -> jax.Array:
        """The rows of a minibatch's units, pairs or rows."""
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
        share: Any,
        taps: Taps,
    ) -> tuple[dict[str, Any], dict[str, jax.Array], Tokens | None, Any]:
        """Returns the gradient of a minibatch's objective with respect to all that is trained.

        Beside it what the objective is made of by name, what is looked at of tokens, and, where `splits_gradients`, the
        policy's gradient of tokens soon after a tool's result alone.
        """
        own, full = batch.loss_inputs.loss_mask, self.settings.telemetry == "full"
        tool = self.instruments.masks(batch.rows.role, own)[TOOL_STRATUM] if self.splits_gradients else None
        counts = Denominators(
            tokens=jnp.sum(own), rows=jnp.sum(jnp.any(own, -1)), share=share, longest=longest(self.dialogue)
        )

        def predicted(params: dict[str, Any], piece: packing.PackedPiece) -> Predictions:
            sequences, temperature = piece.sequences, experience.temperature
            found = Predictions(
                *self.policy.predicted(params[POLICY], base, sequences, temperature),
                value=None if self.critic is None else self.critic.scalars(params[CRITIC], base, sequences),
                exact_kl=self.exact_kl(params[POLICY], reference, base, sequences, temperature),
            )
            return jax.tree.map(piece.back, found)

        def loss(now: Predictions, loss_inputs: policy_loss.LossInputs, taps: Taps) -> tuple[jax.Array, Any]:
            objective, told = policy_loss.policy_loss(self.parts, experience.coefficients, now, loss_inputs, counts)
            objective = taps("objective", objective)
            return objective, told | {"loss": objective}

        def of_piece(taps: Taps, piece: packing.PackedPiece) -> Any:
            now, pulled = jax.vjp(lambda params: predicted(params, piece), params)
            loss_inputs = dataclasses.replace(batch.loss_inputs, loss_mask=own & piece.here)
            slope, told = jax.grad(loss, has_aux=True)(now, loss_inputs, taps)
            tokens = of_tool = None
            if self.parts.objective == "policy":
                weight = None
                if full:
                    weight = policy_loss.weights(self.parts, experience.coefficients, now, loss_inputs, counts)
                tokens = Tokens(self.log_ratio(now, loss_inputs), weight)
            if tool is not None:
                (of_tool,) = pulled(jax.tree.map(lambda x: jnp.where(tool, x, 0), slope))
                of_tool = of_tool[POLICY]
            return *pulled(slope), told, tokens, of_tool

        params = {label: one.params for label, one in trained.items()}
        packed = packing.arranged(batch.rows, own, self.settings.packs)
        return packing.total(packed, self.settings.pieces_of(own.shape[0]), of_piece, taps)

    def log_ratio(self, now: Predictions, loss_inputs: policy_loss.LossInputs) -> jax.Array:
        """Returns the log ratio of each token before clipping, `[n, T]`, without a gradient."""
        new, old = (jnp.where(loss_inputs.loss_mask, x, 0.0) for x in (now.log_probability, loss_inputs.old))
        found = loss_terms.RATIOS[self.parts.ratio](new, old, loss_inputs.loss_mask)
        return jax.lax.stop_gradient(jnp.broadcast_to(found, loss_inputs.loss_mask.shape))

    def exact_kl(
        self, params: Any, reference: Any, base: Any, sequences: packing.Sequences, temperature: jax.Array
    ) -> jax.Array | None:
        """KL(policy || reference) over the whole vocabulary at each place, `[S, T]`; None where it is not asked for."""
        if self.parts.kl != "exact":
            return None

        def logs(params: Any) -> jax.Array:
            hidden = self.policy.hidden(params, base, sequences)
            logits = gpt2.logits(self.policy.whole(params, base), hidden) / temperature
            return jax.nn.log_softmax(logits)

        now, then = logs(params), jax.lax.stop_gradient(logs(reference))
        return jnp.sum(jnp.exp(now) * (now - then), axis=-1)

    def apply_updates(
        self,
        trained: dict[str, Trained],
        numbers: Numbers,
        gradient: dict[str, Any],
        taps: Taps,
        context: dict[str, Any],
    ) -> tuple[dict[str, Trained], dict[str, OptimizerStats]]:
        """One update of all that is trained; `context` is what remedies may read of the minibatch."""
        after, done = {}, {}
        for label, one in trained.items():
            params, moments, done[label] = self.optimizer(label, numbers).update(
                one.params, one.moments, gradient[label], taps, **context
            )
            after[label] = Trained(params, moments)
        return after, done
