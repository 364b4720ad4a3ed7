"""The loss of one minibatch, composed of the terms that an `ObjectiveConfig` chooses."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxaudit.learners.dialogue import loss_terms
from jaxaudit.learners.dialogue.loss_terms import Denominators, aggregate
from jaxaudit.learners.dialogue.objective import Coefficients, ObjectiveConfig


@struct.dataclass
class Predictions:
    """What the trained parameters predict at the rows' tokens, `[N, T]`; gradients flow through these arrays.

    Attributes:
      log_prob: log-probability of the token that was written.
      entropy: entropy of the policy's distribution of this token.
      value: the critic's value; None without a critic.
      exact_kl: KL(policy || reference) over the whole vocabulary; None unless the loss has it.
    """

    log_prob: Any
    entropy: Any = None
    value: Any = None
    exact_kl: Any = None


@struct.dataclass
class LossInputs:
    """A minibatch's constants, `[N, T]`; None where the loss does not read them.

    Attributes:
      loss_mask: bool, response tokens (written by the policy) of the rows that count.
      old_log_prob: log-probabilities that ratios are relative to.
      advantages: advantage of each token.
      rollout_log_prob: the sampler's log-probabilities; importance weights are exp(old_log_prob - rollout_log_prob).
      ref_log_prob: the reference policy's log-probabilities.
      old_value: the critic's values before the first update.
      value_target: targets of the critic.
      covariance_mask: bool, tokens that Clip-Cov or KL-Cov selected.
    """

    loss_mask: Any
    old_log_prob: Any = None
    advantages: Any = None
    rollout_log_prob: Any = None
    ref_log_prob: Any = None
    old_value: Any = None
    value_target: Any = None
    covariance_mask: Any = None


@struct.dataclass
class TokenTerms:
    """The terms of each token in the policy's loss.

    Attributes:
      log_ratio: logarithm of the ratio that is clipped, `[N, T]`, or `[N, 1]` for ratios of rows.
      surrogate: the clipped surrogate, see `loss_terms.Surrogate`.
      correction_weight: importance weight that corrects for the sampler, `[N, T]`.
    """

    log_ratio: Any
    surrogate: Any
    correction_weight: Any


def token_terms(
    config: ObjectiveConfig, coefficients: Coefficients, predictions: Predictions, inputs: LossInputs
) -> TokenTerms:
    """Computes ratios, surrogate and importance weights of a policy objective."""
    predictions, inputs = _zero_masked(predictions, inputs.loss_mask), _zero_masked(inputs, inputs.loss_mask)
    log_ratio = loss_terms.RATIOS[config.ratio](predictions.log_prob, inputs.old_log_prob, inputs.loss_mask)
    bounds = coefficients.clip_low, coefficients.clip_high, coefficients.dual_clip
    if config.covariance == "kl":
        bounds = jnp.inf, jnp.inf, jnp.inf  # KL-Cov has a penalty in the place of clipping
    surrogate = loss_terms.surrogate(log_ratio, inputs.advantages, *bounds)
    if config.covariance != "none":
        objective = loss_terms.apply_covariance(
            config.covariance, surrogate.objective, log_ratio, inputs.covariance_mask
        )
        surrogate = dataclasses.replace(surrogate, objective=objective)
    return TokenTerms(log_ratio, surrogate, _correction_weight(config, coefficients, inputs))


def unclipped_log_ratio(config: ObjectiveConfig, predictions: Predictions, inputs: LossInputs) -> jax.Array:
    """Returns the log-ratio of each token before clipping, `[N, T]`, without a gradient."""
    log_prob, old_log_prob = (jnp.where(inputs.loss_mask, x, 0.0) for x in (predictions.log_prob, inputs.old_log_prob))
    log_ratio = loss_terms.RATIOS[config.ratio](log_prob, old_log_prob, inputs.loss_mask)
    return jax.lax.stop_gradient(jnp.broadcast_to(log_ratio, inputs.loss_mask.shape))


def surrogate_loss(
    config: ObjectiveConfig,
    coefficients: Coefficients,
    predictions: Predictions,
    inputs: LossInputs,
    denominators: Denominators,
) -> tuple[jax.Array, TokenTerms]:
    """Returns the negative surrogate, clipped, importance-weighted and aggregated, and its token terms."""
    terms = token_terms(config, coefficients, predictions, inputs)
    gain = jnp.broadcast_to(terms.surrogate.objective, inputs.loss_mask.shape) * terms.correction_weight
    return aggregate(config.aggregation, -gain, inputs.loss_mask, denominators), terms


def score_weights(
    config: ObjectiveConfig,
    coefficients: Coefficients,
    predictions: Predictions,
    inputs: LossInputs,
    denominators: Denominators,
) -> jax.Array:
    """Returns the absolute weight of each token's score (gradient of its log-probability) in the policy gradient.

    That is |d surrogate_loss / d log pi|, after clipping (0 where the ratio is clipped), aggregation and correction:
    float32 `[N, T]`, 0 at masked tokens. It needs no pass through the model.
    """

    def loss(log_prob: jax.Array) -> jax.Array:
        return surrogate_loss(config, coefficients, Predictions(log_prob), inputs, denominators)[0]

    return jnp.abs(jax.grad(loss)(jax.lax.stop_gradient(predictions.log_prob)))


def policy_loss(
    config: ObjectiveConfig,
    coefficients: Coefficients,
    predictions: Predictions,
    inputs: LossInputs,
    denominators: Denominators,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the scalar loss that is minimised, and scalar metrics by name.

    The surrogate and a KL in the loss are aggregated by `config.aggregation`. Entropy bonus, value loss and metrics are
    always means over tokens, so that their coefficients mean the same under every aggregation. Losses and metrics of
    the pieces of a minibatch add up if each is computed with the `denominators` of the whole minibatch.
    """
    predictions, inputs = _zero_masked(predictions, inputs.loss_mask), _zero_masked(inputs, inputs.loss_mask)
    if config.objective == "preference":
        return _preference_loss(coefficients, predictions, inputs, denominators)
    loss, terms = surrogate_loss(config, coefficients, predictions, inputs, denominators)

    def mean(x: jax.Array) -> jax.Array:
        x = jnp.broadcast_to(x, inputs.loss_mask.shape).astype(inputs.old_log_prob.dtype)
        return aggregate("token_minibatch", x, inputs.loss_mask, denominators)

    ratio = jax.lax.stop_gradient(jnp.exp(terms.log_ratio))
    metrics = {
        "surrogate_loss": loss,
        "clip_low": mean(terms.surrogate.low),
        "clip_high": mean(terms.surrogate.high),
        "clip_dual": mean(terms.surrogate.dual),
        "ratio_mean": mean(ratio),
        "old_kl": mean(loss_terms.k3(inputs.old_log_prob, predictions.log_prob)),
    }
    if config.correction != "none":
        metrics["correction_mean"] = mean(terms.correction_weight)
        metrics["correction_zero"] = mean(terms.correction_weight == 0)
    if config.kl_in_loss:
        kl = aggregate(config.aggregation, _kl(config, predictions, inputs), inputs.loss_mask, denominators)
        loss = loss + coefficients.kl_coefficient * kl
        metrics["kl_loss"] = kl
    if config.entropy_bonus:
        entropy = mean(predictions.entropy)
        loss = loss - coefficients.entropy_coefficient * entropy
        metrics["entropy"] = entropy
    if config.critic:
        value_loss, clipped = _value_loss(config, coefficients, predictions, inputs)
        metrics |= {"value_loss": mean(value_loss), "value_clipped": mean(clipped)}
        loss = loss + coefficients.value_coefficient * metrics["value_loss"]
    return loss, {"loss": loss} | metrics


def _zero_masked(arrays: Any, loss_mask: jax.Array) -> Any:
    """Returns arrays with zero (or False) at masked tokens, so that no value there, NaN included, enters a gradient."""
    return jax.tree.map(lambda x: jnp.where(loss_mask, x, jnp.zeros((), x.dtype)), arrays)


def _correction_weight(config: ObjectiveConfig, coefficients: Coefficients, inputs: LossInputs) -> jax.Array:
    if config.correction == "none":
        return jnp.ones_like(inputs.old_log_prob)
    log_weight, level = inputs.old_log_prob - inputs.rollout_log_prob, config.correction_level
    if config.correction == "tis":
        return loss_terms.truncated_importance_weight(log_weight, inputs.loss_mask, coefficients.tis_cap, level)
    bounds = coefficients.mis_low, coefficients.mis_high
    return loss_terms.masked_importance_weight(log_weight, inputs.loss_mask, *bounds, level)


def _kl(config: ObjectiveConfig, predictions: Predictions, inputs: LossInputs) -> jax.Array:
    if config.kl == "exact":
        return predictions.exact_kl
    estimate = loss_terms.KL_ESTIMATORS[config.kl](predictions.log_prob, inputs.ref_log_prob)
    log_ratio = loss_terms.token_ratio(predictions.log_prob, inputs.old_log_prob, inputs.loss_mask)
    return loss_terms.weighted_kl(estimate, log_ratio, config.kl_weight)


def _value_loss(
    config: ObjectiveConfig, coefficients: Coefficients, predictions: Predictions, inputs: LossInputs
) -> tuple[jax.Array, jax.Array]:
    if not config.clip_value:
        loss = loss_terms.squared_value_loss(predictions.value, inputs.value_target)
        return loss, jnp.zeros_like(inputs.loss_mask)
    return loss_terms.clipped_value_loss(
        predictions.value, inputs.old_value, inputs.value_target, coefficients.value_clip
    )


def _preference_loss(
    coefficients: Coefficients, predictions: Predictions, inputs: LossInputs, denominators: Denominators
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns DPO's loss, a mean over the pairs both of whose rows count, and its metrics."""
    pairs = loss_terms.dpo(
        predictions.log_prob, inputs.ref_log_prob, inputs.loss_mask, coefficients.beta, coefficients.label_smoothing
    )
    both_count = jnp.all(jnp.any(inputs.loss_mask, -1).reshape(-1, 2), -1)

    def mean(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(both_count, x, 0)) / jnp.maximum(denominators.rows / 2, 1)

    metrics = {name: mean(x) for name, x in pairs.items()}
    return metrics["loss"], metrics
