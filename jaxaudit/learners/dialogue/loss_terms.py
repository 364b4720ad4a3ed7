"""Terms of the losses of dialogue learners, as pure functions of arrays `[N, T]`: N rows of T tokens.

The terms are probability ratios, clipping, importance weights that correct for a sampler that differs from the trainer,
KL penalties, covariance masks, value losses, preference losses, and the aggregation of token terms to a scalar.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import ArrayLike


@struct.dataclass
class Denominators:
    """The scalars that a minibatch's sums are divided by.

    Attributes:
      tokens: number of unmasked tokens in the minibatch.
      rows: number of rows in the minibatch with at least one unmasked token.
      tokens_per_minibatch: number of unmasked tokens in the iteration, divided by its number of minibatches.
      max_response_tokens: L_max, the largest number of response tokens that a row can have.
    """

    tokens: Any
    rows: Any
    tokens_per_minibatch: Any
    max_response_tokens: Any


def denominators(
    loss_mask: jax.Array, max_response_tokens: ArrayLike, tokens_per_minibatch: ArrayLike | None = None
) -> Denominators:
    """Counts the denominators of a minibatch from its `loss_mask`, bool `[N, T]`.

    `tokens_per_minibatch` defaults to the minibatch's own number of unmasked tokens.
    """
    tokens = jnp.sum(loss_mask)
    rows = jnp.sum(jnp.any(loss_mask, -1))
    return Denominators(
        tokens, rows, tokens if tokens_per_minibatch is None else tokens_per_minibatch, max_response_tokens
    )


def aggregate(aggregation: str, loss: jax.Array, loss_mask: jax.Array, denominators: Denominators) -> jax.Array:
    """Returns the scalar that token terms `[N, T]` are reduced to.

    Args:
      aggregation: "token_minibatch", the mean over the minibatch's unmasked tokens; "token_iteration", their sum
        divided by the mean number of tokens of the iteration's minibatches, so that all tokens of an iteration have
        the same weight (DAPO); "sequence", the mean over rows of each row's mean over its unmasked tokens (GRPO);
        "constant", the sum divided by rows times L_max, so that no row's length enters (Dr. GRPO).
      loss: the terms.
      loss_mask: bool `[N, T]`.
      denominators: the minibatch's denominators.
    """
    if aggregation == "sequence":
        means = jnp.sum(jnp.where(loss_mask, loss, 0), -1) / jnp.maximum(jnp.sum(loss_mask, -1, dtype=loss.dtype), 1)
        return jnp.sum(means) / jnp.maximum(denominators.rows, 1)
    total = jnp.sum(jnp.where(loss_mask, loss, 0))
    if aggregation == "token_minibatch":
        return total / jnp.maximum(denominators.tokens, 1)
    if aggregation == "token_iteration":
        return total / jnp.maximum(denominators.tokens_per_minibatch, 1)
    return total / (jnp.maximum(denominators.rows, 1) * denominators.max_response_tokens)


def dpo(
    log_prob: jax.Array, ref_log_prob: jax.Array, loss_mask: jax.Array, beta: ArrayLike, label_smoothing: ArrayLike
) -> dict[str, jax.Array]:
    """Computes the DPO loss of each pair (Rafailov et al., 2023).

    The loss is `-(1 - label_smoothing) log sigmoid(margin) - label_smoothing log sigmoid(-margin)`.

    Args:
      log_prob, ref_log_prob: log-probabilities of the tokens under policy and reference, `[2 P, T]`. Rows alternate: a
        chosen row, then its rejected row.
      loss_mask: bool `[2 P, T]`.
      beta: scale of the implicit reward.
      label_smoothing: probability that a pair's label is wrong (conservative DPO: Mitchell, 2023).

    Returns:
      loss, margin (the chosen row's implicit reward minus the rejected row's), preference_accuracy (1 where the margin
      is positive, else 0), chosen_reward and rejected_reward (`beta` times the log-ratio of policy to reference), each
      `[P]`.
    """
    chosen, rejected = jnp.sum(jnp.where(loss_mask, log_prob, 0), -1).reshape(-1, 2).T
    ref_chosen, ref_rejected = jnp.sum(jnp.where(loss_mask, ref_log_prob, 0), -1).reshape(-1, 2).T
    chosen_reward = beta * (chosen - ref_chosen)
    rejected_reward = beta * (rejected - ref_rejected)
    margin = chosen_reward - rejected_reward
    loss = -(1 - label_smoothing) * jax.nn.log_sigmoid(margin) - label_smoothing * jax.nn.log_sigmoid(-margin)
    return {
        "loss": loss,
        "margin": margin,
        "preference_accuracy": (margin > 0).astype(margin.dtype),
        "chosen_reward": chosen_reward,
        "rejected_reward": rejected_reward,
    }


def squared_value_loss(value: jax.Array, target: jax.Array) -> jax.Array:
    """Returns half the squared error of each token's value, `[N, T]`."""
    return 0.5 * (value - target) ** 2


def clipped_value_loss(
    value: jax.Array, old_value: jax.Array, target: jax.Array, clip: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """Computes the clipped value loss of PPO.

    Returns:
      loss: `[N, T]`, half the larger of two squared errors: of the value, and of the value clipped to at most `clip`
        away from the old value.
      clipped: bool `[N, T]`, where the clipped value has the larger error, so that the gradient is zero.
    """
    unclipped_loss = squared_value_loss(value, target)
    clipped_loss = squared_value_loss(jnp.clip(value, old_value - clip, old_value + clip), target)
    return jnp.maximum(unclipped_loss, clipped_loss), clipped_loss > unclipped_loss


def k1(log_prob: jax.Array, ref_log_prob: jax.Array) -> jax.Array:
    """Returns Schulman's k1 estimate of the KL, the log-ratio: unbiased, of either sign; the one for rewards."""
    return log_prob - ref_log_prob


def k2(log_prob: jax.Array, ref_log_prob: jax.Array) -> jax.Array:
    """Returns Schulman's k2 estimate of the KL, half the squared log-ratio.

    Its value is biased; its gradient by a token's log-probability is the KL's.
    """
    return 0.5 * (log_prob - ref_log_prob) ** 2


def k3(log_prob: jax.Array, ref_log_prob: jax.Array) -> jax.Array:
    """Returns Schulman's k3 estimate of KL(policy || reference): `exp(d) - 1 - d` with `d = ref_log_prob - log_prob`.

    Both arguments are log-probabilities of the same tokens, `[N, T]`, as is the result. It is never negative, and it is
    unbiased for tokens that were sampled from the policy.
    """
    return jnp.expm1(ref_log_prob - log_prob) - (ref_log_prob - log_prob)


KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


def weighted_kl(estimate: jax.Array, log_ratio: jax.Array, kl_weight: str) -> jax.Array:
    """Returns a KL estimate in the loss, `[N, T]`, times the factor that `kl_weight` names."""
    if kl_weight == "none":
        return estimate
    return estimate * jnp.exp(jax.lax.stop_gradient(log_ratio) if kl_weight == "stopped_ratio" else log_ratio)


def subtract_kl_penalty(
    reward: jax.Array, kl_estimate: jax.Array, loss_mask: jax.Array, coefficient: ArrayLike
) -> jax.Array:
    """Returns token rewards minus `coefficient` times the KL estimate at unmasked tokens, `[N, T]`.

    The estimate is a constant: no gradient flows through it.
    """
    return reward - coefficient * jax.lax.stop_gradient(jnp.where(loss_mask, kl_estimate, 0))


CLIP_COV_LOW, CLIP_COV_HIGH = 1.0, 5.0
"""Clip-Cov selects its tokens among those whose covariance lies between these bounds."""


def token_covariance(advantages: jax.Array, log_prob: jax.Array, loss_mask: jax.Array) -> jax.Array:
    """Returns (A - mean A)(log pi - mean log pi) of each unmasked token, `[N, T]`, and 0 at masked tokens.

    The means are over unmasked tokens.
    """
    count = jnp.maximum(jnp.sum(loss_mask), 1)

    def centred(x: jax.Array) -> jax.Array:
        x = jnp.where(loss_mask, x, 0.0)
        return jnp.where(loss_mask, x - jnp.sum(x) / count, 0.0)

    return centred(advantages) * centred(log_prob)


def select_covariance_tokens(
    treatment: str,
    fraction: ArrayLike,
    advantages: jax.Array,
    log_prob: jax.Array,
    loss_mask: jax.Array,
    key: jax.Array,
) -> jax.Array:
    """Selects the tokens that Clip-Cov or KL-Cov treats differently, bool `[N, T]`.

    The number of selected tokens is `fraction` of the unmasked ones, rounded down, and at least one.

    Args:
      treatment: "clip" selects random tokens among those whose covariance lies between `CLIP_COV_LOW` and
        `CLIP_COV_HIGH`; "kl" selects the tokens with the highest covariance.
      fraction: scalar in [0, 1].
      advantages, log_prob: constants, `[N, T]`.
      loss_mask: bool `[N, T]`.
      key: PRNG key of the random selection.
    """
    covariance = token_covariance(advantages, log_prob, loss_mask)
    if treatment == "clip":
        eligible = loss_mask & (covariance > CLIP_COV_LOW) & (covariance < CLIP_COV_HIGH)
        priority = jax.random.uniform(key, loss_mask.shape)
    else:
        eligible, priority = loss_mask, covariance
    order = jnp.argsort(jnp.where(eligible, -priority, jnp.inf), axis=None)
    rank = jnp.zeros(loss_mask.size, jnp.int32).at[order].set(jnp.arange(loss_mask.size, dtype=jnp.int32))
    rank = rank.reshape(loss_mask.shape)
    count = jnp.maximum(jnp.floor(fraction * jnp.sum(loss_mask)), 1)
    return eligible & (rank < count)


def apply_covariance(
    treatment: str, objective: jax.Array, log_ratio: jax.Array, covariance_mask: jax.Array
) -> jax.Array:
    """Returns the surrogate objective `[N, T]` after the treatment of the tokens in `covariance_mask`.

    "clip" sets their objective to 0; "kl" subtracts |log ratio|.
    """
    if treatment == "clip":
        return jnp.where(covariance_mask, 0.0, objective)
    # Its slope at zero is zero, as PyTorch's; that of `jnp.abs` is one.
    absolute = jax.lax.stop_gradient(jnp.sign(log_ratio)) * log_ratio
    return objective - jnp.where(covariance_mask, absolute, 0.0)


def truncated_importance_weight(
    log_weight: jax.Array, loss_mask: jax.Array, cap: ArrayLike, level: str = "token"
) -> jax.Array:
    """Returns the weights of truncated importance sampling (TIS), `min(weight, cap)`, `[N, T]` (Yao et al., 2025)."""
    return jnp.where(loss_mask, jnp.minimum(_importance_weight(log_weight, loss_mask, level), cap), 0)


def masked_importance_weight(
    log_weight: jax.Array, loss_mask: jax.Array, low: ArrayLike, high: ArrayLike, level: str = "token"
) -> jax.Array:
    """Returns the weights of masked importance sampling (MIS), zero where they are outside [low, high], `[N, T]`."""
    weight = _importance_weight(log_weight, loss_mask, "token" if level == "geometric" else level)
    criterion = jnp.exp(_row_mean(log_weight, loss_mask)) if level == "geometric" else weight
    return jnp.where(loss_mask & (criterion >= low) & (criterion <= high), weight, 0)


def _importance_weight(log_weight: jax.Array, loss_mask: jax.Array, level: str) -> jax.Array:
    masked = jax.lax.stop_gradient(jnp.where(loss_mask, log_weight, 0))
    return jnp.exp(jnp.sum(masked, -1, keepdims=True) if level == "sequence" else masked)


def _row_mean(log_weight: jax.Array, loss_mask: jax.Array) -> jax.Array:
    masked = jax.lax.stop_gradient(jnp.where(loss_mask, log_weight, 0))
    count = jnp.sum(loss_mask, -1, keepdims=True, dtype=log_weight.dtype)
    return jnp.sum(masked, -1, keepdims=True) / jnp.maximum(count, 1)


@struct.dataclass
class Surrogate:
    """The clipped surrogate; all fields are `[N, T]`, or `[N, 1]` where ratio and advantage are.

    Attributes:
      objective: `min(ratio A, clip(ratio, 1 - low, 1 + high) A)`, and not below `dual A` where A < 0; it is maximised.
      low, high, dual: bool, where each bound clips the ratio, so that the gradient is zero.
    """

    objective: Any
    low: Any
    high: Any
    dual: Any


def surrogate(
    log_ratio: jax.Array, advantages: jax.Array, low: ArrayLike, high: ArrayLike, dual: ArrayLike | None = None
) -> Surrogate:
    """Computes the clipped surrogate of tokens.

    The gradient flows where the ratio equals a bound. The ratio does not enter where it is clipped or where the
    advantage is zero, even if it is infinite.

    Args:
      log_ratio: `[N, T]`, or `[N, 1]` for ratios of rows.
      advantages: constants, `[N, T]`.
      low, high: how far below and above 1 the ratio may move before it is clipped; scalars.
      dual: the largest ratio that counts where A < 0, above 1 (Ye et al., 2020); None or infinity for no bound.
    """
    dual = jnp.inf if dual is None else dual
    advantages = jax.lax.stop_gradient(advantages)
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio))
    negative = advantages < 0
    is_low = negative & (ratio < 1 - low)
    is_high = (advantages > 0) & (ratio > 1 + high)
    is_dual = negative & (ratio > dual)
    bound = jnp.where(is_dual, dual, jnp.where(is_low, 1 - low, 1 + high))
    clipped = is_low | is_high | is_dual
    unclipped_ratio = jnp.exp(jnp.where(clipped | (advantages == 0), 0, log_ratio))
    # The bound is finite where it clips; elsewhere it may be the infinite one.
    objective = advantages * jnp.where(clipped, bound, unclipped_ratio)
    return Surrogate(objective, is_low, is_high, is_dual)


def token_ratio(log_prob: jax.Array, old_log_prob: jax.Array, loss_mask: jax.Array) -> jax.Array:
    """Returns the log-ratio of each token, `[N, T]`, and zero at masked tokens."""
    return jnp.where(loss_mask, log_prob - old_log_prob, 0)


def sequence_mean_ratio(log_prob: jax.Array, old_log_prob: jax.Array, loss_mask: jax.Array) -> jax.Array:
    """Returns each row's mean log-ratio at each of its tokens, `[N, T]`, differentiated by the token's log-probability.

    This is GSPO's ratio `sg(exp(mean log ratio)) pi / sg(pi)` (Zheng et al., 2025). Where all tokens of a row share one
    advantage, the gradient equals that of the mean itself.
    """
    log_ratio = token_ratio(log_prob, old_log_prob, loss_mask)
    total = jnp.sum(log_ratio, -1, keepdims=True)
    mean = total / jnp.maximum(jnp.sum(loss_mask, -1, keepdims=True, dtype=log_prob.dtype), 1)
    # The difference is exactly zero: GSPO's clip ranges are so narrow that rounding must not add to the mean.
    return jnp.where(loss_mask, jax.lax.stop_gradient(mean) + (log_ratio - jax.lax.stop_gradient(log_ratio)), 0)


def sequence_sum_ratio(log_prob: jax.Array, old_log_prob: jax.Array, loss_mask: jax.Array) -> jax.Array:
    """Returns the log-ratio of each row, the sum over its tokens, `[N, 1]` (RLOO: Ahmadian et al., 2024)."""
    return jnp.sum(token_ratio(log_prob, old_log_prob, loss_mask), -1, keepdims=True)


RATIOS = {"token": token_ratio, "sequence_mean": sequence_mean_ratio, "sequence_sum": sequence_sum_ratio}
