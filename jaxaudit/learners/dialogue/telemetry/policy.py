"""What is measured of a policy's tokens: how sure it is, how far from where it was, and who weighs how much.

Values are `[N, T]` (or of any shape, e.g. of all minibatches as visited) and masks bool `[S, N, T]`, of own tokens by
stratum. Every statistic begins with the dimension of the strata.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxaudit.kernels.tails import (
    cvar,
    effective_sample_size,
    extreme_value_index,
    masked_quantiles,
    order_statistics,
    top_share,
)
from jaxaudit.learners.dialogue import clipping, kl
from jaxaudit.learners.dialogue.telemetry.strata import Statistic, Statistics, by_stratum, mean

RATIO_QUANTILES = (0.99, 0.999)
TAIL = 0.01
HIGH_ENTROPY = 0.2

LARGEST_EXPONENT = 60.0
"""Logarithms are cut here before they are raised, so that sums of ratios stay finite in float32; e^60 is 1e26."""


def saturation(log_probability: jax.Array, collision: jax.Array) -> jax.Array:
    """How much a token's log-probability still moves with the logits: the norm of its gradient, ||onehot - pi||.

    By softmax' derivative pi_i (delta_ij - pi_j) the gradient of log pi_a by the logits is onehot_a - pi, whose square
    is 1 - 2 pi_a + sum pi^2: 0 where the policy is sure of the token, up to sqrt(2) where it is sure of another. As a
    softmax saturates, it falls towards 0 and with it every gradient.

    Args:
      log_probability: of the token, any shape.
      collision: sum over the vocabulary of pi^2, the same shape.
    """
    square = 1.0 - 2.0 * jnp.exp(log_probability) + collision
    return jnp.sqrt(jnp.maximum(square, 0.0))


def kl_estimates(log_probability: jax.Array, reference: jax.Array) -> jax.Array:
    """The estimates `kl.ESTIMATORS` of KL(policy || reference) from the tokens written alone: `[3, ...]`."""
    d = jnp.minimum(reference - log_probability, LARGEST_EXPONENT)
    return jnp.stack([estimate(jnp.zeros_like(d), d) for estimate in kl.ESTIMATORS.values()])


def reference_statistics(
    log_probability: jax.Array, reference: jax.Array, exact: jax.Array, masks: jax.Array
) -> Statistics:
    """How far the policy is from the reference.

    Args:
      log_probability: the policy's, of the tokens written, `[N, T]`.
      reference: the reference's, `[N, T]`.
      exact: KL(policy || reference) over the whole vocabulary, `[N, T]`.
      masks: bool `[S, N, T]`.

    Returns:
      exact_kl and exact_kl_max, of tokens, `[S]`; kl_estimate `[S, 3]`, and kl_spread, the largest of the three less
      the smallest; reference_log_probability, a mean, `[S]`.
    """
    estimates = kl_estimates(log_probability, reference)
    means = jax.vmap(lambda one: by_stratum(mean, masks, one).value, out_axes=1)(estimates)
    known = by_stratum(mean, masks, exact)
    return {
        "exact_kl": known,
        "kl_estimate": Statistic(means, known.count),
        "kl_spread": Statistic(means.max(axis=1) - means.min(axis=1), known.count),
        "exact_kl_max": by_stratum(_largest, masks, exact),
        "reference_log_probability": by_stratum(mean, masks, reference),
    }


def unfamiliarity(reference: jax.Array, given: jax.Array) -> Statistics:
    """The mean log-probability that the reference gives to a tool's tokens, the more negative the less expected.

    Args:
      reference: log-probabilities of the tokens at every slot, own or not, `[N, T]`.
      given: which of them a tool wrote, bool `[N, T]`.

    Returns:
      tool_log_probability, a scalar.
    """
    return {"tool_log_probability": Statistic(mean(reference, given), jnp.sum(given))}


def ratio_statistics(
    log_ratio: jax.Array, advantage: jax.Array, low: jax.Array, high: jax.Array, dual: jax.Array, masks: jax.Array
) -> Statistics:
    """Of the ratios of an update, and of what a token weighs in it, |ratio x advantage|.

    Args:
      log_ratio: log pi - log pi_old, `[N, T]` or `[N, 1]`, not clipped.
      advantage: `[N, T]`.
      low, high, dual: bounds, as `clipping.surrogate` has them.
      masks: bool `[S, N, T]`.

    Returns:
      ratio_max, ratio_quantile `[S, 2]`, ratio_ess, clip_fraction `[S, 3]` (low, high, dual), and of the weight
      token_weight_cvar (of the top 1%), token_weight_q999, token_weight_top_share (of the top 1%) and
      token_weight_tail (Hill's estimate of 1 / tail index), `[S]`.
    """
    log_ratio, advantage = (jnp.broadcast_to(x, masks.shape[1:]) for x in (log_ratio, advantage))
    surrogate = clipping.surrogate(log_ratio, advantage, low, high, dual)
    ratio = jnp.exp(jnp.minimum(log_ratio, LARGEST_EXPONENT))
    weight = ratio * jnp.abs(advantage)

    def clipped(mask: jax.Array) -> jax.Array:
        return jnp.stack([mean(x, mask) for x in (surrogate.low, surrogate.high, surrogate.dual)])

    return {
        "ratio_max": by_stratum(_largest, masks, ratio),
        "ratio_quantile": by_stratum(lambda x, mask: masked_quantiles(x, mask, RATIO_QUANTILES), masks, ratio),
        "ratio_ess": by_stratum(effective_sample_size, masks, log_ratio),
        "clip_fraction": by_stratum(clipped, masks),
        "token_weight_cvar": by_stratum(lambda x, mask: cvar(x, mask, TAIL), masks, weight),
        "token_weight_q999": by_stratum(lambda x, mask: masked_quantiles(x, mask, (0.999,))[0], masks, weight),
        "token_weight_top_share": by_stratum(lambda x, mask: top_share(x, mask, TAIL), masks, weight),
        "token_weight_tail": by_stratum(extreme_value_index, masks, weight),
    }


def at_moments(visited: Statistics, after: Statistics) -> Statistics:
    """`ratio_statistics` over all minibatches as visited and after the last one, as one: `[S, 2, ...]`."""
    return {
        name: Statistic(
            jnp.stack([statistic.value, after[name].value], axis=1),
            jnp.stack([statistic.count, after[name].count], axis=1),
        )
        for name, statistic in visited.items()
    }


def mismatch(sampled: jax.Array, recomputed: jax.Array, masks: jax.Array) -> Statistics:
    """How far the trainer's log-probabilities are from the sampler's, of the tokens the sampler wrote.

    Args:
      sampled: the sampler's, as stored, `[N, T]`.
      recomputed: the trainer's, before the first update, `[N, T]`.
      masks: bool `[S, N, T]`.

    Returns:
      mismatch_kl, of the sampler from the trainer (k3), mismatch_chi2 (E[rho^2] - 1), mismatch_ess, `[S]`, rho being
      recomputed / sampled.
    """
    log_ratio = recomputed - sampled
    ratio = jnp.exp(jnp.minimum(log_ratio, LARGEST_EXPONENT / 2))
    return {
        "mismatch_kl": by_stratum(mean, masks, kl_estimates(sampled, recomputed)[2]),
        "mismatch_chi2": by_stratum(lambda x, mask: mean(x**2 - 1.0, mask), masks, ratio),
        "mismatch_ess": by_stratum(effective_sample_size, masks, log_ratio),
    }


def score_share(entropy: jax.Array, squared_score: jax.Array, masks: jax.Array) -> Statistics:
    """What part of the squared score is on the fifth of the tokens whose entropy is the highest.

    Tokens at the boundary count in part, so that equal entropies give a fifth of equal scores.

    Args:
      entropy: `[N, T]`.
      squared_score: of a token's gradient, e.g. (ratio x advantage x `saturation`)^2, `[N, T]`.
      masks: bool `[S, N, T]`.

    Returns:
      high_entropy_share, `[S]`.
    """

    def share(mask: jax.Array) -> jax.Array:
        counted = HIGH_ENTROPY * jnp.sum(mask)
        threshold = order_statistics(entropy, mask, jnp.ceil(counted).astype(jnp.int32)[None])[0]
        above, level = mask & (entropy > threshold), mask & (entropy == threshold)
        part = (counted - jnp.sum(above)) / jnp.maximum(jnp.sum(level), 1)
        weights = above + part * level
        total = jnp.sum(jnp.where(mask, squared_score, 0.0))
        return jnp.sum(jnp.where(mask, squared_score * weights, 0.0)) / jnp.where(total == 0, 1.0, total)

    return {"high_entropy_share": by_stratum(share, masks)}


def churn(before: jax.Array, after: jax.Array, masks: jax.Array) -> Statistics:
    """The share of slots whose greedy token, int32 `[N, T]`, an update has changed: greedy_churn, `[S]`."""
    return {"greedy_churn": by_stratum(mean, masks, before != after)}


def _largest(x: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.where(jnp.any(mask), jnp.max(jnp.where(mask, x, -jnp.inf)), 0.0)
