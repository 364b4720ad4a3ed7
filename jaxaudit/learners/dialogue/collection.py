"""Rows for learning and rows for measuring: sampled, rewarded, and compared with what the trainer makes of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxaudit.core.taps import Taps
from jaxaudit.dialogues.automaton import AutomatonState
from jaxaudit.dialogues.protocol import Dialogue
from jaxaudit.learners.dialogue import advantages, loss_terms, packing, policy_loss, rollout
from jaxaudit.learners.dialogue.advantages import estimate, token_rewards
from jaxaudit.learners.dialogue.network import Network
from jaxaudit.learners.dialogue.objective import Coefficients, Parts
from jaxaudit.learners.dialogue.rows import Experience, Recomputed, Rollout, Rows, TrainingBatch
from jaxaudit.learners.dialogue.settings import DialogueSettings, Numbers

POLICY, CRITIC, REWARD_MODEL = "policy", "critic", "reward_model"
"""Labels, which begin the paths of parameters."""

COVARIANCE = 2
"""The random stream that chooses tokens by their covariance, beside those of prompts and draws."""


@dataclass(frozen=True)
class Models:
    """Parameters by use, as a step finds them; what is not there is None.

    Attributes:
      policy, critic: what is trained.
      reward_model: scores rows.
      reference: the policy that divergence is measured from.
      initial: the policy before its first update, undisturbed.
      base: of adapters.
    """

    policy: Any
    critic: Any = None
    reward_model: Any = None
    reference: Any = None
    initial: Any = None
    base: Any = None


class Collector:
    """Samples, rewards and estimates.

    Args:
      dialogue: without its arrays.
      settings: their `structure`.
      policy, critic, reward_model: the networks; what is not there is None.
    """

    def __init__(
        self,
        dialogue: Dialogue,
        settings: DialogueSettings,
        policy: Network,
        critic: Network | None,
        reward_model: Network | None,
    ):
        self.dialogue, self.settings, self.parts = dialogue, settings, settings.parts
        self.policy, self.critic, self.reward_model = policy, critic, reward_model
        self.sampler = rollout.Sampler(policy.model, settings.top_k, settings.top_p < 1)

    def undisturbed(
        self,
        policy: Any,
        base: Any,
        dialogue: Dialogue,
        numbers: Numbers,
        key: jax.Array,
        rows: int,
        greedy: jax.Array | None = None,
        altered: Callable[[AutomatonState], AutomatonState] = lambda begun: begun,
    ) -> Rows:
        """Rows of a policy on as many prompts of the standard difficulty.

        `greedy` is as in `rollout.carried_on`; `altered` changes the dialogues that have begun.
        """
        prompts_key, rows_key = jax.random.split(key)
        closed, whole = Taps(), self.policy.whole(policy, base)
        begun = rollout.prompted(dialogue, prompts_key, jnp.full(rows, numbers.difficulty), closed)
        return rollout.carried_on(
            self.sampler, whole, dialogue, altered(begun), rows_key, numbers.temperature, numbers.top_p, closed, greedy
        )

    def scored(self, models: Models, rows: Rows) -> jax.Array:
        """What the learner sees of each row's worth, before it is disturbed: float32 `[N]`."""
        if self.reward_model is None:
            return rows.gold
        return self.reward_model.score(models.reward_model, models.base, rows)

    def collect(self, models: Models, dialogue: Dialogue, numbers: Numbers, key: jax.Array, taps: Taps) -> Experience:
        """An iteration's experience.

        Args:
          models: as the step's taps have left them.
          dialogue: bound to its data.
          numbers: the settings that are data.
          key: decides prompts and draws.
          taps: of the step.
        """
        temperature = taps("temperature", numbers.temperature)
        coefficients = tapped(self.parts, numbers.objective, taps)
        rows = self._sampled(models, dialogue, numbers, temperature, key, taps)
        if self.parts.entropy:
            weight = taps(
                "entropy_coefficient", coefficients.entropy_coefficient, entropy=lambda: sampled_entropy(rows)
            )
            coefficients = dataclasses.replace(coefficients, entropy_coefficient=weight)
        sampled = rows.log_probability
        if self.parts.reads_sampled and taps.disturbs("log_probability"):
            sampled = jnp.where(rows.own, taps("log_probability", sampled, own=rows.own), 0.0)
        scored = self.scored(models, rows)
        bound: dict[str, Any] = {"bound": 1.0} if self.reward_model is None else {}
        reward = taps("reward", scored, lengths=rows.lengths, **bound)
        kept = self.kept(rows)
        score = self._with_overlong_penalty(reward, rows, coefficients)
        drawn = Rollout(rows, scored, reward, kept)
        index, kept = self._chosen(reward, kept)
        rows, sampled, score = jax.tree.map(lambda x: x[index], (rows, sampled, score))
        loss_inputs, recomputed = self._loss_inputs(models, rows, sampled, score, kept, coefficients, temperature, taps)
        if self.parts.covariance != "none":
            share, choice = coefficients.covariance_share, jax.random.fold_in(key, COVARIANCE)
            apart = loss_terms.select_tokens(
                self.parts.covariance, share, loss_inputs.advantage, loss_inputs.old, loss_inputs.loss_mask, choice
            )
            loss_inputs = dataclasses.replace(loss_inputs, covarying=apart)
        return Experience(TrainingBatch(rows, loss_inputs), coefficients, temperature, drawn, recomputed)

    def kept(self, rows: Rows) -> jax.Array:
        """Whether rows count in the loss and the baselines, as truncated ones may not: bool `[N]`."""
        return ~rows.truncated if self.settings.mask_truncated else jnp.ones_like(rows.truncated)

    def _with_overlong_penalty(self, reward: jax.Array, rows: Rows, coefficients: Coefficients) -> jax.Array:
        """Rewards `[N]` less the penalty on responses that come near the longest, where there is one."""
        if not self.parts.overlong:
            return reward
        most = self.dialogue.length - rows.prompt_lengths
        penalty = advantages.penalty(rows.response_lengths, most, coefficients.overlong_buffer * most)
        return reward + coefficients.overlong_coefficient * penalty

    def _sampled(
        self, models: Models, dialogue: Dialogue, numbers: Numbers, temperature: jax.Array, key: jax.Array, taps: Taps
    ) -> Rows:
        """Rows of the behaviour policy, `[prompts * oversampling * group_size, T]`."""
        settings = self.settings
        prompts_key, rows_key = jax.random.split(key)
        follows_reference = settings.objective == "preference" and not settings.online
        author = models.reference if follows_reference else models.policy
        if taps.disturbs("behaviour"):
            author = taps("behaviour", author, label=POLICY)
        difficulty = jnp.full(settings.prompts * settings.oversampling, self._difficulty(dialogue, numbers, taps))
        begun = rollout.repeated(rollout.prompted(dialogue, prompts_key, difficulty, taps), settings.group_size)
        whole = self.policy.whole(author, models.base)
        return rollout.carried_on(self.sampler, whole, dialogue, begun, rows_key, temperature, numbers.top_p, taps)

    def _difficulty(self, dialogue: Dialogue, numbers: Numbers, taps: Taps) -> jax.Array:
        """Of the prompts that are trained on in this step; outside a run, whose length is not known, the last one."""
        if not self.settings.curriculum or not taps.steps:
            return numbers.difficulty
        lowest, _ = dialogue.difficulties
        passed = jnp.minimum(jnp.asarray(taps.step, jnp.float32) / (taps.steps * self.settings.curriculum), 1.0)
        return lowest + passed * (numbers.difficulty - lowest)

    def _chosen(self, reward: jax.Array, kept: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The rows that are learned from, and whether each counts: int and bool `[rows]`."""
        settings = self.settings
        rewards, each = (x.reshape(-1, settings.group_size) for x in (reward, kept))
        signal = advantages.differ(rewards, each)
        first = jnp.arange(settings.prompts)
        if self.parts.dynamic:  # groups with a signal before those without, in the order they were drawn
            first = jnp.argsort(jnp.where(signal, 0, 1), stable=True)[: settings.prompts]
            each = each & signal[:, None]
        if settings.objective == "preference":
            best = jnp.argmax(jnp.where(each, rewards, -jnp.inf), axis=1)
            worst = jnp.argmin(jnp.where(each, rewards, jnp.inf), axis=1)
            members = jnp.stack([best, worst], axis=1)
            each = jnp.broadcast_to(signal[:, None], members.shape)
        else:
            members = jnp.broadcast_to(jnp.arange(settings.group_size), rewards.shape)
        index = first[:, None] * settings.group_size + members[first]
        return index.reshape(-1), each[first].reshape(-1)

    def _packed(self, rows: Rows, what: Callable[[packing.Sequences], Any]) -> Any:
        """What a network finds at the rows' slots, up to the last own one of each."""
        settings = self.settings
        packed = packing.arranged(rows, rows.own, settings.packs)
        return packing.read(packed, settings.pieces_of(rows.tokens.shape[0]), what)

    def _loss_inputs(
        self,
        models: Models,
        rows: Rows,
        sampled: jax.Array,
        score: jax.Array,
        kept: jax.Array,
        coefficients: Coefficients,
        temperature: jax.Array,
        taps: Taps,
    ) -> tuple[policy_loss.LossInputs, Recomputed]:
        """What the objective needs to know of rows, and what the trainer makes of them before the first update."""

        def read(params: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
            hidden = self.policy.hidden(params, models.base, rows)
            return (
                *self.policy.log_prob_and_entropy(hidden, self.policy.whole(params, models.base), rows, temperature),
                hidden,
            )

        own = rows.own & kept[:, None]
        recomputed = entropy = hidden = reference = reference_hidden = value = target = advantage = returns = None
        if self.parts.needs_reference or self.settings.telemetry == "full":
            recomputed, entropy, hidden = read(models.policy)
            reference, _, reference_hidden = read(models.reference)
        elif not self.parts.follows_sampler:
            recomputed, entropy = self._packed(
                rows, lambda found: self.policy.predicted(models.policy, models.base, found, temperature)
            )
        if (critic := self.critic) is not None:
            value = self._packed(rows, lambda found: critic.scalars(models.critic, models.base, found))
        if self.parts.objective == "policy":
            penalty = self._penalty(recomputed, reference)
            groups = (self.settings.prompts, self.settings.group_size)
            advantage, target = estimate(
                self.parts, coefficients, score.reshape(groups), own, kept.reshape(groups), penalty, value
            )
            advantage = taps("advantage", advantage, own=own)
            if self.parts.critic:
                returns = discounted_returns(coefficients, score, own, penalty)
        old = sampled if self.parts.follows_sampler else recomputed
        loss_inputs = policy_loss.LossInputs(
            loss_mask=own,
            old=old,
            advantage=advantage,
            sampled=sampled,
            reference=reference,
            value=value,
            target=target,
        )
        return loss_inputs, Recomputed(recomputed, entropy, hidden, reference_hidden, score, returns)

    def _penalty(self, log_probability: jax.Array | None, reference: jax.Array | None) -> jax.Array | None:
        """The KL estimate of each token that is in the reward, `[N, T]`; None where none is."""
        if not self.parts.kl_in_reward:
            return None
        assert log_probability is not None, "it is read with the reference"
        assert reference is not None, "a divergence is from one"
        return loss_terms.KL_ESTIMATORS[self.parts.kl](log_probability, reference)

    def returns(self, models: Models, rows: Rows, numbers: Numbers) -> jax.Array:
        """What the policy's rows return from each own token on if nothing is disturbed: `[N, T]`.

        As `Recomputed.returns` has it of the rows that are learned from, the penalties of KL and of length included;
        `models` score rows and give the KL penalty.
        """

        def logs(params: Any) -> jax.Array:
            return self.policy.log_probabilities(params, models.base, rows, numbers.temperature)[0]

        reads = self.parts.kl_in_reward
        penalty = self._penalty(logs(models.policy), logs(models.reference)) if reads else None
        score = self._with_overlong_penalty(self.scored(models, rows), rows, numbers.objective)
        return discounted_returns(numbers.objective, score, rows.own, penalty)


def discounted_returns(
    coefficients: Coefficients, score: jax.Array, own: jax.Array, penalty: jax.Array | None
) -> jax.Array:
    """What rows return from each own token on, the KL penalty included: `[N, T]` of `token_rewards`."""
    return advantages.discounted_sum(token_rewards(coefficients, score, own, penalty), own, coefficients.gamma)


def tapped(parts: Parts, coefficients: Coefficients, taps: Taps) -> Coefficients:
    """The objective's numbers, those that the parts read tapped: each at the site of its name, both bounds of the ratio
    at "ratio_clip". The coefficient of the entropy bonus is tapped when rows tell what the entropy is."""
    read = {
        "gae_lambda": parts.critic and not parts.adaptive_lambda,
        "critic_lambda": parts.critic,
        "kl_coefficient": parts.kl != "none",
    }
    found = {name: taps(name, getattr(coefficients, name)) for name, there in read.items() if there}
    if parts.clips_ratio:
        bounds = taps("ratio_clip", jnp.stack([coefficients.clip_low, coefficients.clip_high]))
        found |= {"clip_low": bounds[0], "clip_high": bounds[1]}
    return dataclasses.replace(coefficients, **found)


def sampled_entropy(rows: Rows) -> jax.Array:
    """The entropy of the policy that has written rows, in nats, at their own tokens: mean of -log_probability."""
    own = rows.own
    return -jnp.sum(jnp.where(own, rows.log_probability, 0.0)) / jnp.maximum(jnp.sum(own), 1)


def longest(dialogue: Dialogue) -> int:
    """The most own tokens that a row can have."""
    return dialogue.length - dialogue.prompt_length
