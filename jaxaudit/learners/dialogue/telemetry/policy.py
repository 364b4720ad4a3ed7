"""Statistics of a policy and its critic at response tokens: entropy, divergence, probability ratios, and values.

Token arrays are `[N, T]` (or of any shape, e.g. of all minibatches as visited), and masks are bool `[S, N, T]`, one for
each stratum. Statistics by stratum have the strata as their first dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from jaxaudit.learners.dialogue import loss_terms
from jaxaudit.learners.dialogue.telemetry.token_statistics import Statistic, Statistics, by_stratum, counts_of, mean

DISTANCE_BINS = (0, 1, 2, 4, 8, 16, 32, 64)
"""Lower edges of the bins of the distance from a row's end, in response tokens; the last bin is open."""

DISTANCE_LABELS = ("0", "1", "2-3", "4-7", "8-15", "16-31", "32-63", "64+")

ROUNDING_ERRORS = 8
"""Returns count as equal if their standard deviation is at most this many rounding errors of the largest value."""


def value_statistics(values: jax.Array, returns: jax.Array, response_mask: jax.Array) -> Statistics:
    """Computes how well values predict the returns of tokens.

    Args:
      values: `[N, T]`.
      returns: targets of the values, `[N, T]`.
      response_mask: bool `[N, T]`.

    Returns:
      explained_variance, 1 - var(return - value) / var(return), which is undefined where all returns are equal but for
      rounding errors; value_bias, the mean of value minus return.
    """
    count = jnp.sum(response_mask)
    error = returns - values
    mean_error = mean(error, response_mask)
    centre = mean(returns, response_mask)
    unexplained, variance = mean((error - mean_error) ** 2, response_mask), mean((returns - centre) ** 2, response_mask)
    magnitudes = jnp.where(response_mask, jnp.maximum(jnp.abs(returns), jnp.abs(values)), 0.0)
    largest = jnp.max(magnitudes, initial=0.0)
    equal = variance <= (ROUNDING_ERRORS * jnp.finfo(variance.dtype).eps * largest) ** 2
    explained = 1.0 - unexplained / jnp.where(equal, 1.0, variance)
    return {
        "explained_variance": Statistic(explained, jnp.where(equal, 0, count)),
        "value_bias": Statistic(-mean_error, count),
    }


def score_value_statistics(values: jax.Array, returns: jax.Array, response_mask: jax.Array) -> Statistics:
    """Computes `value_statistics` for the returns of scores without a KL penalty; names begin with "score_"."""
    statistics = value_statistics(values, returns, response_mask)
    return {f"score_{name}": statistic for name, statistic in statistics.items()}


def critic_errors(
    collected: jax.Array, collected_mask: jax.Array, held_out: jax.Array, held_out_mask: jax.Array
) -> Statistics:
    """Computes the critic's mean squared error on the rows it was trained on and on held-out rows.

    A critic that memorises has a gap between the two.

    Args:
      collected: value minus return on the rows trained on, `[N, T]`, with its mask, bool `[N, T]`.
      held_out: value minus return on held-out rows, `[M, T]`, with its mask, bool `[M, T]`.

    Returns:
      critic_error `[2]`: collected, held out (or on fixed prompts, for a dialogue that is not split).
    """
    errors = jnp.stack([mean(collected**2, collected_mask), mean(held_out**2, held_out_mask)])
    counts = jnp.stack([jnp.sum(collected_mask), jnp.sum(held_out_mask)])
    return {"critic_error": Statistic(errors, counts)}


def tokens_remaining(response_mask: jax.Array) -> jax.Array:
    """Returns the number of response tokens in the row after each position: int32 `[N, T]`, 0 from the last one on."""
    from_here = jnp.cumsum(response_mask[:, ::-1], axis=1, dtype=jnp.int32)[:, ::-1]
    return from_here - response_mask


def correlation_by_distance(
    values: jax.Array, returns: jax.Array, response_mask: jax.Array, bin_starts: Sequence[int] = DISTANCE_BINS
) -> Statistics:
    """Computes Pearson's correlation of values and returns, by the distance from the row's end.

    If the reward comes at the end of a row and the critic's values carry less of it the earlier the token, the
    correlation falls with the distance.

    Args:
      values: `[N, T]`.
      returns: `[N, T]`.
      response_mask: bool `[N, T]`.
      bin_starts: lower edges of the distance bins, ascending from 0.

    Returns:
      value_correlation `[bins]`, undefined in a bin where all values or all returns are equal.
    """
    distance = tokens_remaining(response_mask)
    bin_ends = jnp.asarray([*bin_starts[1:], jnp.iinfo(jnp.int32).max])
    masks = response_mask & (distance >= jnp.asarray(bin_starts)[:, None, None]) & (distance < bin_ends[:, None, None])

    def correlation(mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = jnp.where(mask, values - mean(values, mask), 0.0)
        y = jnp.where(mask, returns - mean(returns, mask), 0.0)
        # Both are scaled to a largest entry of one, because squares of small values would underflow.
        largest_x, largest_y = jnp.max(jnp.abs(x)), jnp.max(jnp.abs(y))
        x, y = (z / jnp.where(largest == 0, 1.0, largest) for z, largest in ((x, largest_x), (y, largest_y)))
        is_defined = (largest_x != 0) & (largest_y != 0)
        length = jnp.sqrt(jnp.sum(x**2) * jnp.sum(y**2))
        return jnp.sum(x * y) / jnp.where(is_defined, length, 1.0), jnp.where(is_defined, jnp.sum(mask), 0)

    correlations, counts = jax.vmap(correlation)(masks)
    return {"value_correlation": Statistic(correlations, counts)}


def separation(right: jax.Array, wrong: jax.Array, pair_mask: jax.Array) -> Statistics:
    """Computes how well a critic separates rows that differ in one token, after which only one of them can succeed.

    Args:
      right: values after the right token, `[M]`.
      wrong: values after the wrong token, `[M]`.
      pair_mask: pairs that count, bool `[M]`.

    Returns:
      critic_separation, the mean difference in units of the reward; critic_order, the share of pairs in which the right
      token's value is higher, ties counting half: 1/2 by chance.
    """
    count = jnp.sum(pair_mask)
    order = jnp.where(right > wrong, 1.0, jnp.where(right == wrong, 0.5, jnp.where(right < wrong, 0.0, jnp.nan)))
    return {
        "critic_separation": Statistic(mean(right - wrong, pair_mask), count),
        "critic_order": Statistic(mean(order, pair_mask), count),
    }


ESTIMATORS = tuple(loss_terms.KL_ESTIMATORS)
RATIO_QUANTILES = (0.99, 0.999)
TAIL_FRACTION = 0.01
HIGH_ENTROPY_FRACTION = 0.2

MAX_EXPONENT = 60.0
"""Logarithms are capped here before they are exponentiated, so that sums of ratios stay finite in float32; e^60 is
1e26."""


def saturation(log_prob: jax.Array, collision: jax.Array) -> jax.Array:
    """Returns the norm of the gradient of a token's log-probability by the logits, ||onehot - pi||.

    By softmax' derivative pi_i (delta_ij - pi_j) the gradient of log pi_a by the logits is onehot_a - pi, whose square
    is 1 - 2 pi_a + sum pi^2: 0 where the policy is certain of the token, up to sqrt(2) where it is certain of another.
    As a softmax saturates, it falls towards 0 and with it every gradient.

    Args:
      log_prob: log-probability of the token, any shape.
      collision: sum over the vocabulary of pi^2, the same shape.
    """
    square = 1.0 - 2.0 * jnp.exp(log_prob) + collision
    return jnp.sqrt(jnp.maximum(square, 0.0))


def kl_estimators(log_prob: jax.Array, ref_log_prob: jax.Array) -> jax.Array:
    """Returns Schulman's (2020) estimators of KL(policy || reference) from the sampled tokens, `[3, ...]`.

    With d = ref_log_prob - log_prob: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d.
    """
    d = ref_log_prob - log_prob
    k3 = jnp.expm1(jnp.minimum(d, MAX_EXPONENT)) - d
    return jnp.stack([loss_terms.k1(log_prob, ref_log_prob), loss_terms.k2(log_prob, ref_log_prob), k3])


def reference_statistics(log_prob: jax.Array, ref_log_prob: jax.Array, masks: jax.Array) -> Statistics:
    """Computes how far the policy is from the reference.

    Args:
      log_prob: the policy's log-probabilities of the tokens, `[N, T]`.
      ref_log_prob: the reference's, `[N, T]`.
      masks: bool `[S, N, T]`.

    Returns:
      kl_estimate `[S, 3]`, kl_spread `[S]` (the largest of the three estimates minus the smallest), and
      reference_log_probability `[S]`, a mean.
    """
    estimates = kl_estimators(log_prob, ref_log_prob)
    means = jax.vmap(lambda estimate: by_stratum(mean, masks, estimate).value, out_axes=1)(estimates)
    counts = counts_of(masks)
    return {
        "kl_estimate": Statistic(means, counts),
        "kl_spread": Statistic(means.max(axis=1) - means.min(axis=1), counts),
        "reference_log_probability": by_stratum(mean, masks, ref_log_prob),
    }


def unfamiliarity(ref_log_prob: jax.Array, bigram_log_prob: jax.Array, tool_mask: jax.Array) -> Statistics:
    """Computes how expected a tool's tokens are: mean log-probabilities, more negative for less expected tokens.

    Args:
      ref_log_prob: the reference policy's log-probabilities of the tokens at all slots, `[N, T]`. No policy is trained
        on a tool's tokens, so these say little about what it has read.
      bigram_log_prob: log-probabilities under `token_statistics.Bigrams`, `[N, T]`.
      tool_mask: tokens that a tool wrote, bool `[N, T]`.

    Returns:
      tool_log_probability and result_log_probability, scalars.
    """
    count = jnp.sum(tool_mask)
    return {
        "tool_log_probability": Statistic(mean(ref_log_prob, tool_mask), count),
        "result_log_probability": Statistic(mean(bigram_log_prob, tool_mask), count),
    }


def ratio_statistics(
    log_ratio: jax.Array, advantages: jax.Array, weight: jax.Array, clip: jax.Array, masks: jax.Array
) -> Statistics:
    """Computes statistics of the probability ratios in an update, and of each token's weight in the gradient.

    Args:
      log_ratio: log pi - log pi_old, before any clipping.
      advantages: the same shape.
      weight: absolute weight of each token's score in the gradient, the same shape: `policy_loss.score_weights`.
      clip: float `[2]`; a ratio is clipped below 1 - clip[0] and above 1 + clip[1].
      masks: bool `[S, ...]`.

    Returns:
      ratio_max, ratio_quantile `[S, 2]`, ratio_ess, clip_fraction `[S, 2]` (low: the advantage is negative and the
      ratio below its bound; high: positive, and above: where the clipped objective has no gradient), and for the weight
      weight_cvar (mean of the top 1%), weight_q999, weight_top_share (share of the top 1%), weight_tail (Hill's
      estimate of 1 / tail index) and weight_ess; `[S]` unless stated otherwise.
    """
    ratio = jnp.exp(jnp.minimum(log_ratio, MAX_EXPONENT))
    return clip_fraction(log_ratio, advantages, clip, masks) | {
        "ratio_max": by_stratum(largest, masks, ratio),
        "ratio_quantile": by_stratum(lambda x, mask: masked_quantiles(x, mask, RATIO_QUANTILES), masks, ratio),
        "ratio_ess": by_stratum(effective_sample_size, masks, log_ratio),
        "weight_cvar": by_stratum(lambda x, mask: cvar(x, mask, TAIL_FRACTION), masks, weight),
        "weight_q999": by_stratum(lambda x, mask: masked_quantiles(x, mask, (0.999,))[0], masks, weight),
        "weight_top_share": by_stratum(lambda x, mask: top_share(x, mask, TAIL_FRACTION), masks, weight),
        "weight_tail": by_stratum(extreme_value_index, masks, weight),
        "weight_ess": by_stratum(effective_sample_size, masks, jnp.log(weight)),
    }


def clip_fraction(log_ratio: jax.Array, advantages: jax.Array, clip: jax.Array, masks: jax.Array) -> Statistics:
    """Computes the `clip_fraction` of `ratio_statistics` alone, `[S, 2]`."""
    ratio = jnp.exp(jnp.minimum(log_ratio, MAX_EXPONENT))
    low = (advantages < 0) & (ratio < 1.0 - clip[0])
    high = (advantages > 0) & (ratio > 1.0 + clip[1])

    def clipped(mask: jax.Array) -> jax.Array:
        return jnp.stack([mean(low, mask), mean(high, mask)])

    return {"clip_fraction": by_stratum(clipped, masks)}


def moments_last(statistics: Statistics) -> Statistics:
    """Returns `ratio_statistics` at both moments, `[2, S, ...]`, with the strata first, `[S, 2, ...]`."""
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), statistics)


def mismatch(rollout_log_prob: jax.Array, log_prob: jax.Array, masks: jax.Array) -> Statistics:
    """Computes how far the trainer's log-probabilities are from the sampler's, at response tokens.

    Args:
      rollout_log_prob: the sampler's log-probabilities, as stored, `[N, T]`.
      log_prob: the trainer's, before the first update, `[N, T]`.
      masks: bool `[S, N, T]`.

    Returns:
      mismatch_kl (KL of the sampler from the trainer, k3), mismatch_chi2 (E[ratio^2] - 1) and mismatch_ess, `[S]`, for
      the ratio of trainer to sampler.
    """
    log_ratio = log_prob - rollout_log_prob
    ratio = jnp.exp(jnp.minimum(log_ratio, MAX_EXPONENT / 2))
    return {
        "mismatch_kl": by_stratum(mean, masks, kl_estimators(rollout_log_prob, log_prob)[2]),
        "mismatch_chi2": by_stratum(lambda x, mask: mean(x**2 - 1.0, mask), masks, ratio),
        "mismatch_ess": by_stratum(effective_sample_size, masks, log_ratio),
    }


def score_share(entropy: jax.Array, squared_score: jax.Array, masks: jax.Array) -> Statistics:
    """Computes the share of the squared score that the fifth of the tokens with the highest entropy has.

    Tokens at the boundary count in part, so that equal entropies give a fifth of equal scores.

    Args:
      entropy: `[N, T]`.
      squared_score: squared norm of a token's gradient, e.g. (ratio x advantage x `saturation`)^2, `[N, T]`.
      masks: bool `[S, N, T]`.

    Returns:
      high_entropy_share, `[S]`.
    """

    def share(mask: jax.Array) -> jax.Array:
        count = HIGH_ENTROPY_FRACTION * jnp.sum(mask)
        threshold = order_statistics(entropy, mask, jnp.ceil(count).astype(jnp.int32)[None])[0]
        above, at_threshold = mask & (entropy > threshold), mask & (entropy == threshold)
        fraction = (count - jnp.sum(above)) / jnp.maximum(jnp.sum(at_threshold), 1)
        weights = above + fraction * at_threshold
        total = jnp.sum(jnp.where(mask, squared_score, 0.0))
        return jnp.sum(jnp.where(mask, squared_score * weights, 0.0)) / jnp.where(total == 0, 1.0, total)

    return {"high_entropy_share": by_stratum(share, masks)}


def churn(before: jax.Array, after: jax.Array, masks: jax.Array) -> Statistics:
    """Computes greedy_churn, the share of slots whose greedy token, int32 `[N, T]`, an update has changed, `[S]`."""
    return {"greedy_churn": by_stratum(mean, masks, before != after)}


def largest(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the largest unmasked value; 0 if there is none, NaN if any is NaN.

    On CPUs, `jnp.max` of thousands of entries loses a NaN.
    """
    unmasked = jnp.where(mask, x, -jnp.inf)
    maximum = jnp.where(jnp.any(jnp.isnan(unmasked)), jnp.nan, jnp.max(unmasked))
    return jnp.where(jnp.any(mask), maximum, 0.0)
