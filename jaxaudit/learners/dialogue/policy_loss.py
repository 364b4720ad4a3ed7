"""The objective of one minibatch, composed of the parts chosen."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxaudit.learners.dialogue import loss_terms
from jaxaudit.learners.dialogue.loss_terms import Denominators, aggregate, token_minibatch
from jaxaudit.learners.dialogue.objective import Coefficients, Parts


@struct.dataclass
class Predictions:
    """What the trained parameters say of the rows' tokens, `[N, T]`; gradients go through it. None: not asked for.

    Attributes:
      log_probability: of the token written.
      entropy: of the policy there.
      value: the critic's.
      exact_kl: KL(policy || reference) over the vocabulary.
    """

    log_probability: Any
    entropy: Any = None
    value: Any = None
    exact_kl: Any = None


@struct.dataclass
class LossInputs:
    """A minibatch's constants, `[N, T]`. None: not asked for.

    Attributes:
      loss_mask: bool, tokens that the policy wrote, in rows that count.
      old: old log-probabilities.
      advantage: of each token.
      sampled: the sampler's log-probabilities, for corrections, whose numerator is `old`.
      reference: the reference's log-probabilities.
      value: the critic's values when the rows were written.
      target: what they should be.
      covarying: bool, tokens that are treated apart for their covariance.
    """

    loss_mask: Any
    old: Any = None
    advantage: Any = None
    sampled: Any = None
    reference: Any = None
    value: Any = None
    target: Any = None
    covarying: Any = None


@struct.dataclass
class TokenTerms:
    """What the policy's loss is made of, token by token.

    Attributes:
      log_ratio: logarithm of the ratio that is clipped, `[N, T]`, or `[N, 1]` of rows.
      surrogate: see `clipping.Surrogate`.
      weight: of the correction, `[N, T]`.
    """

    log_ratio: Any
    surrogate: Any
    weight: Any


def tokens(parts: Parts, coefficients: Coefficients, now: Predictions, rows: LossInputs) -> TokenTerms:
    """Ratios, the surrogate and weights of a policy objective."""
    now, rows = _masked(now, rows.loss_mask), _masked(rows, rows.loss_mask)
    log_ratio = loss_terms.RATIOS[parts.ratio](now.log_probability, rows.old, rows.loss_mask)
    bounds = coefficients.clip_low, coefficients.clip_high, coefficients.dual_clip
    if parts.covariance == "kl":
        bounds = jnp.inf, jnp.inf, jnp.inf  # in the place of clipping there is a penalty
    surrogate = loss_terms.surrogate(log_ratio, rows.advantage, *bounds)
    if parts.covariance != "none":
        objective = loss_terms.apply_covariance(parts.covariance, surrogate.objective, log_ratio, rows.covarying)
        surrogate = dataclasses.replace(surrogate, objective=objective)
    return TokenTerms(log_ratio, surrogate, _correction(parts, coefficients, rows))


def surrogate_loss(
    parts: Parts, coefficients: Coefficients, now: Predictions, rows: LossInputs, counts: Denominators
) -> tuple[jax.Array, TokenTerms]:
    """The clipped, corrected and aggregated surrogate of a policy objective, negative, and what it is made of."""
    made = tokens(parts, coefficients, now, rows)
    gain = jnp.broadcast_to(made.surrogate.objective, rows.loss_mask.shape) * made.weight
    return aggregate(parts.aggregation, -gain, rows.loss_mask, counts), made


def weights(
    parts: Parts, coefficients: Coefficients, now: Predictions, rows: LossInputs, counts: Denominators
) -> jax.Array:
    """With what absolute coefficient each token's score, the gradient of its log-probability, enters the policy's.

    That is |d surrogate_loss / d log pi|, after clipping (0 where a bound holds), aggregation and correction: float32
    `[N, T]`, 0 at given tokens. It takes no pass through the model.
    """

    def of(log_probability: jax.Array) -> jax.Array:
        return surrogate_loss(parts, coefficients, Predictions(log_probability), rows, counts)[0]

    return jnp.abs(jax.grad(of)(jax.lax.stop_gradient(now.log_probability)))


def policy_loss(
    parts: Parts, coefficients: Coefficients, now: Predictions, rows: LossInputs, counts: Denominators
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """What is minimised, scalar, and what it is made of by name: scalars, sums over the same counts as the loss's.

    The surrogate and a KL in the loss are aggregated as `parts.aggregation` says. The entropy bonus and the value loss
    are means over own tokens whichever it is, so that their coefficients mean the same with all. With several
    parts of a minibatch and the `counts` of the whole, losses and statistics add up.
    """
    now, rows = _masked(now, rows.loss_mask), _masked(rows, rows.loss_mask)
    if parts.objective == "preference":
        return _preference(coefficients, now, rows, counts)
    loss, made = surrogate_loss(parts, coefficients, now, rows, counts)

    def mean(x: jax.Array) -> jax.Array:
        return token_minibatch(
            jnp.broadcast_to(x, rows.loss_mask.shape).astype(rows.old.dtype), rows.loss_mask, counts.tokens
        )

    ratio = jax.lax.stop_gradient(jnp.exp(made.log_ratio))
    told = {
        "surrogate_loss": loss,
        "clip_low": mean(made.surrogate.low),
        "clip_high": mean(made.surrogate.high),
        "clip_dual": mean(made.surrogate.dual),
        "ratio_mean": mean(ratio),
        "old_kl": mean(loss_terms.k3(rows.old, now.log_probability)),
    }
    if parts.correction != "none":
        told["correction_mean"] = mean(made.weight)
        told["correction_zero"] = mean(made.weight == 0)
    if parts.kl_in_loss:
        estimate = _kl(parts, now, rows)
        term = aggregate(parts.aggregation, estimate, rows.loss_mask, counts)
        loss = loss + coefficients.kl_coefficient * term
        told["kl_loss"] = term
    if parts.entropy:
        bonus = mean(now.entropy)
        loss = loss - coefficients.entropy_coefficient * bonus
        told["entropy"] = bonus
    if parts.critic:
        critic, stopped = _value(parts, coefficients, now, rows)
        told |= {"value_loss": mean(critic), "value_clipped": mean(stopped)}
        loss = loss + coefficients.value_coefficient * told["value_loss"]
    return loss, {"loss": loss} | told


def _masked(arrays: Any, own: jax.Array) -> Any:
    """Arrays with zeros (or False) where a token is given: whatever was there, NaN too, enters no loss or gradient."""
    return jax.tree.map(lambda x: jnp.where(own, x, jnp.zeros((), x.dtype)), arrays)


def _correction(parts: Parts, coefficients: Coefficients, rows: LossInputs) -> jax.Array:
    if parts.correction == "none":
        return loss_terms.no_correction(rows.old)
    log_weight, level = rows.old - rows.sampled, parts.correction_level
    if parts.correction == "tis":
        return loss_terms.tis(log_weight, rows.loss_mask, coefficients.tis_cap, level)
    return loss_terms.mis(log_weight, rows.loss_mask, coefficients.mis_low, coefficients.mis_high, level)


def _kl(parts: Parts, now: Predictions, rows: LossInputs) -> jax.Array:
    """The KL's estimate in the loss, `[N, T]`."""
    if parts.kl == "exact":
        return now.exact_kl
    estimate = loss_terms.KL_ESTIMATORS[parts.kl](now.log_probability, rows.reference)
    return loss_terms.weighted_kl(
        estimate, loss_terms.token_ratio(now.log_probability, rows.old, rows.loss_mask), parts.kl_weight
    )


def _value(parts: Parts, coefficients: Coefficients, now: Predictions, rows: LossInputs) -> tuple[jax.Array, jax.Array]:
    if not parts.clip_value:
        return loss_terms.squared_value_loss(now.value, rows.target), jnp.zeros_like(rows.loss_mask)
    return loss_terms.clipped_value_loss(now.value, rows.value, rows.target, coefficients.value_clip)


def _preference(
    coefficients: Coefficients, now: Predictions, rows: LossInputs, counts: Denominators
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """DPO's loss, a mean over the pairs both of whose rows count."""
    pairs = loss_terms.pairs_of_rows(
        now.log_probability, rows.reference, rows.loss_mask, coefficients.beta, coefficients.label_smoothing
    )
    whole = jnp.all(jnp.any(rows.loss_mask, -1).reshape(-1, 2), -1)

    def mean(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(whole, x, 0)) / jnp.maximum(counts.rows / 2, 1)

    loss = mean(pairs.loss)
    return loss, {
        "loss": loss,
        "margin": mean(pairs.margin),
        "preference_accuracy": mean(pairs.accuracy),
        "chosen_reward": mean(pairs.chosen),
        "rejected_reward": mean(pairs.rejected),
    }
