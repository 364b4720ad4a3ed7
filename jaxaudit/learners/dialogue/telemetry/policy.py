"""What is measured of a policy's tokens: how sure it is, how far from where it was, and who weighs how much.

Values are `[N, T]` (or of any shape, e.g. of all minibatches as visited) and masks bool `[S, N, T]`, of own tokens by
stratum. Every statistic begins with the dimension of the strata.
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
from jaxaudit.learners.dialogue.telemetry.token_statistics import Measured, Statistics, by_stratum, mean

DISTANCES = (0, 1, 2, 4, 8, 16, 32, 64)
"""Where bins of the distance from a row's end begin, in own tokens; the last has no end."""

DISTANCE_LABELS = ("0", "1", "2-3", "4-7", "8-15", "16-31", "32-63", "64+")


ROUNDING = 8
"""Returns whose standard deviation is at most so many roundings of the largest value are taken for equal."""


def value_statistics(values: jax.Array, returns: jax.Array, own: jax.Array) -> Statistics:
    """How well values predict what tokens return.

    Args:
      values: `[N, T]`.
      returns: what they should be, `[N, T]`.
      own: bool `[N, T]`.

    Returns:
      explained_variance, 1 - var(return - value) / var(return), with nothing to say where returns are all equal, but
      for the rounding of sums of values; value_bias, the mean of value less return.
    """
    count = jnp.sum(own)
    error = returns - values
    bias = mean(error, own)
    centre = mean(returns, own)
    unexplained, variance = mean((error - bias) ** 2, own), mean((returns - centre) ** 2, own)
    largest = jnp.max(jnp.where(own, jnp.maximum(jnp.abs(returns), jnp.abs(values)), 0.0), initial=0.0)
    equal = variance <= (ROUNDING * jnp.finfo(variance.dtype).eps * largest) ** 2
    explained = 1.0 - unexplained / jnp.where(equal, 1.0, variance)
    return {
        "explained_variance": Measured(explained, jnp.where(equal, 0, count)),
        "value_bias": Measured(-bias, count),
    }


def of_scores(values: jax.Array, returns: jax.Array, own: jax.Array) -> Statistics:
    """`value_statistics` against what the rows' scores alone return, without a KL penalty, by names of their own."""
    return {f"score_{name}": one for name, one in value_statistics(values, returns, own).items()}


def critic_errors(collected: jax.Array, own: jax.Array, held_out: jax.Array, held_out_own: jax.Array) -> Statistics:
    """The mean squared error on rows trained on and on others: a critic that memorises has a gap between them.

    Args:
      collected: value less return on the rows trained on, `[N, T]`, and `own`, bool `[N, T]`.
      held_out: that on held-out rows, `[M, T]`, and `held_out_own`.

    Returns:
      critic_error `[2]`: collected, held out (or of fixed prompts, of a dialogue that is not split).
    """
    errors = jnp.stack([mean(collected**2, own), mean(held_out**2, held_out_own)])
    return {"critic_error": Measured(errors, jnp.stack([jnp.sum(own), jnp.sum(held_out_own)]))}


def distances(own: jax.Array) -> jax.Array:
    """How many own tokens of its row come after every slot: int32 `[N, T]`, 0 at the last own token."""
    after = jnp.cumsum(own[:, ::-1], axis=1, dtype=jnp.int32)[:, ::-1]
    return after - own


def correlation_by_distance(
    values: jax.Array, returns: jax.Array, own: jax.Array, begins: Sequence[int] = DISTANCES
) -> Statistics:
    """Pearson's correlation of values and returns, by the distance from the row's end.

    Where the reward comes at the end, a value signal that decays over a row shows as a correlation that falls with the
    distance.

    Args:
      values: `[N, T]`.
      returns: `[N, T]`.
      own: bool `[N, T]`.
      begins: where bins begin, rising from 0.

    Returns:
      value_correlation `[bins]`; a bin where values or returns are all equal has nothing to say.
    """
    far = distances(own)
    ends = jnp.asarray([*begins[1:], jnp.iinfo(jnp.int32).max])
    bins = own & (far >= jnp.asarray(begins)[:, None, None]) & (far < ends[:, None, None])

    def correlation(mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = jnp.where(mask, values - mean(values, mask), 0.0)
        y = jnp.where(mask, returns - mean(returns, mask), 0.0)
        # Each brought to a largest entry of one, or squares of small values would vanish.
        largest_x, largest_y = jnp.max(jnp.abs(x)), jnp.max(jnp.abs(y))
        x, y = (z / jnp.where(largest == 0, 1.0, largest) for z, largest in ((x, largest_x), (y, largest_y)))
        there = (largest_x != 0) & (largest_y != 0)
        length = jnp.sqrt(jnp.sum(x**2) * jnp.sum(y**2))
        return jnp.sum(x * y) / jnp.where(there, length, 1.0), jnp.where(there, jnp.sum(mask), 0)

    found, count = jax.vmap(correlation)(bins)
    return {"value_correlation": Measured(found, count)}


def separation(right: jax.Array, wrong: jax.Array, there: jax.Array) -> Statistics:
    """Whether a critic tells rows apart that differ in one token, after which one can succeed and the other cannot.

    Args:
      right: values after the right token, `[M]`.
      wrong: values after the wrong one, `[M]`.
      there: the pairs that count, bool `[M]`.

    Returns:
      critic_separation, the mean difference in reward units; critic_order, the share of pairs in which the right one's
      value is higher, equal ones counting half: 1/2 by chance.
    """
    count = jnp.sum(there)
    order = jnp.where(right > wrong, 1.0, jnp.where(right == wrong, 0.5, jnp.where(right < wrong, 0.0, jnp.nan)))
    return {
        "critic_separation": Measured(mean(right - wrong, there), count),
        "critic_order": Measured(mean(order, there), count),
    }


ESTIMATORS = tuple(loss_terms.KL_ESTIMATORS)
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


def kl_estimators(log_probability: jax.Array, reference: jax.Array) -> jax.Array:
    """Schulman's (2020) estimators of KL(policy || reference) from the sampled tokens alone: `[3, ...]`.

    With d = log ref - log pi: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d.
    """
    d = reference - log_probability
    k3 = jnp.expm1(jnp.minimum(d, LARGEST_EXPONENT)) - d
    return jnp.stack([loss_terms.k1(log_probability, reference), loss_terms.k2(log_probability, reference), k3])


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
      kl (exact), kl_estimate `[S, 3]`, kl_spread (the largest of the three less the smallest), kl_largest (of tokens,
      exact) and reference_log_probability, a mean, `[S]`.
    """
    estimates = kl_estimators(log_probability, reference)
    means = jax.vmap(lambda one: by_stratum(mean, masks, one).value, out_axes=1)(estimates)
    known = by_stratum(mean, masks, exact)
    return {
        "kl": known,
        "kl_estimate": Measured(means, known.count),
        "kl_spread": Measured(means.max(axis=1) - means.min(axis=1), known.count),
        "kl_largest": by_stratum(largest, masks, exact),
        "reference_log_probability": by_stratum(mean, masks, reference),
    }


def unfamiliarity(reference: jax.Array, bigrams: jax.Array, given: jax.Array) -> Statistics:
    """How expected a tool's tokens are: mean log-probabilities, the more negative the less expected.

    Args:
      reference: the reference policy's log-probabilities of the tokens at every slot, own or not, `[N, T]`. No policy
        is trained on given tokens, so they say little of what it has read.
      bigrams: their log-probabilities under `bigrams.Bigrams`, `[N, T]`.
      given: which of them a tool wrote, bool `[N, T]`.

    Returns:
      tool_log_probability and result_log_probability, scalars.
    """
    count = jnp.sum(given)
    return {
        "tool_log_probability": Measured(mean(reference, given), count),
        "result_log_probability": Measured(mean(bigrams, given), count),
    }


def ratio_statistics(
    log_ratio: jax.Array, advantage: jax.Array, weight: jax.Array, clip: jax.Array, masks: jax.Array
) -> Statistics:
    """Returns statistics of the ratios in an update, and of the weight that a token has in it.

    Args:
      log_ratio: log pi - log pi_old, before any clipping.
      advantage: the same shape.
      weight: the absolute coefficient with which a token's score enters the gradient, the same shape:
        `policy_loss.weights`.
      clip: float `[2]`: a ratio is clipped below 1 - clip[0] and above 1 + clip[1].
      masks: bool `[S, ...]`.

    Returns:
      ratio_max, ratio_quantile `[S, 2]`, ratio_ess, clip_fraction `[S, 2]` (low: the advantage is negative, and the
      ratio below; high: positive, and above: where the clipped objective has no gradient), and of the weight
      weight_cvar (of the top 1%), weight_q999, weight_top_share (of the top 1%), weight_tail (Hill's estimate of
      1 / tail index) and weight_ess, `[S]`.
    """
    ratio = jnp.exp(jnp.minimum(log_ratio, LARGEST_EXPONENT))
    return clip_fraction(log_ratio, advantage, clip, masks) | {
        "ratio_max": by_stratum(largest, masks, ratio),
        "ratio_quantile": by_stratum(lambda x, mask: masked_quantiles(x, mask, RATIO_QUANTILES), masks, ratio),
        "ratio_ess": by_stratum(effective_sample_size, masks, log_ratio),
        "weight_cvar": by_stratum(lambda x, mask: cvar(x, mask, TAIL), masks, weight),
        "weight_q999": by_stratum(lambda x, mask: masked_quantiles(x, mask, (0.999,))[0], masks, weight),
        "weight_top_share": by_stratum(lambda x, mask: top_share(x, mask, TAIL), masks, weight),
        "weight_tail": by_stratum(extreme_value_index, masks, weight),
        "weight_ess": by_stratum(effective_sample_size, masks, jnp.log(weight)),
    }


def clip_fraction(log_ratio: jax.Array, advantage: jax.Array, clip: jax.Array, masks: jax.Array) -> Statistics:
    """Returns the `clip_fraction` of `ratio_statistics` alone, `[S, 2]`."""
    ratio = jnp.exp(jnp.minimum(log_ratio, LARGEST_EXPONENT))
    low = (advantage < 0) & (ratio < 1.0 - clip[0])
    high = (advantage > 0) & (ratio > 1.0 + clip[1])

    def clipped(mask: jax.Array) -> jax.Array:
        return jnp.stack([mean(low, mask), mean(high, mask)])

    return {"clip_fraction": by_stratum(clipped, masks)}


def at_moments(both: Statistics) -> Statistics:
    """`ratio_statistics` over all minibatches as visited and after the last one, `[2, S, ...]`, as `[S, 2, ...]`."""
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), both)


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
        "mismatch_kl": by_stratum(mean, masks, kl_estimators(sampled, recomputed)[2]),
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


def largest(x: jax.Array, mask: jax.Array) -> jax.Array:
    """The largest value under a mask; 0 where that is empty, NaN where one is.

    `jnp.max` of thousands of entries loses a NaN on a CPU.
    """
    kept = jnp.where(mask, x, -jnp.inf)
    most = jnp.where(jnp.any(jnp.isnan(kept)), jnp.nan, jnp.max(kept))
    return jnp.where(jnp.any(mask), most, 0.0)
