"""Terms of the losses of learners on dialogues: probability ratios, clipping, corrections for a sampler that differs
from the trainer, penalties on the divergence from the reference, covariances, losses of values and preferences, and
how terms of tokens are aggregated. Pure functions of arrays `[N, T]`: N rows of T tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import ArrayLike

AGGREGATIONS = ("token_minibatch", "token_iteration", "sequence", "constant")


@struct.dataclass
class Denominators:
    """What a minibatch's sums are divided by; scalars.

    Attributes:
      tokens: own tokens of the minibatch.
      rows: its rows that have own tokens.
      share: own tokens of the whole iteration over its number of minibatches.
      longest: L_max, the most own tokens a row could have.
    """

    tokens: Any
    rows: Any
    share: Any
    longest: Any


def denominators(own: jax.Array, longest: ArrayLike, share: ArrayLike | None = None) -> Denominators:
    """Counted in `own`, bool `[N, T]`; `share` is the minibatch's own tokens unless given."""
    tokens = jnp.sum(own)
    return Denominators(tokens, jnp.sum(jnp.any(own, -1)), tokens if share is None else share, longest)


def token_minibatch(loss: jax.Array, own: jax.Array, tokens: ArrayLike | None = None) -> jax.Array:
    """Returns the mean over the minibatch's tokens that the policy wrote."""
    return _sum(loss, own) / jnp.maximum(jnp.sum(own) if tokens is None else tokens, 1)


def token_iteration(loss: jax.Array, own: jax.Array, share: ArrayLike) -> jax.Array:
    """Sum over `share`, own tokens per minibatch of the iteration: its tokens all weigh the same (DAPO)."""
    return _sum(loss, own) / jnp.maximum(share, 1)


def sequence(loss: jax.Array, own: jax.Array, rows: ArrayLike | None = None) -> jax.Array:
    """Mean over rows of the mean over a row's own tokens (GRPO)."""
    means = jnp.sum(jnp.where(own, loss, 0), -1) / jnp.maximum(jnp.sum(own, -1, dtype=loss.dtype), 1)
    return jnp.sum(means) / jnp.maximum(jnp.sum(jnp.any(own, -1)) if rows is None else rows, 1)


def constant(loss: jax.Array, own: jax.Array, longest: ArrayLike, rows: ArrayLike | None = None) -> jax.Array:
    """Sum over rows times L_max, whatever the rows' lengths (Dr. GRPO)."""
    rows = jnp.sum(jnp.any(own, -1)) if rows is None else rows
    return _sum(loss, own) / (jnp.maximum(rows, 1) * longest)


def aggregate(how: str, loss: jax.Array, own: jax.Array, counts: Denominators) -> jax.Array:
    """Returns a scalar of tokens' terms `[N, T]`, by the aggregation of that name in `AGGREGATIONS`."""
    if how == "token_minibatch":
        return token_minibatch(loss, own, counts.tokens)
    if how == "token_iteration":
        return token_iteration(loss, own, counts.share)
    if how == "sequence":
        return sequence(loss, own, counts.rows)
    return constant(loss, own, counts.longest, counts.rows)


def _sum(loss: jax.Array, own: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(own, loss, 0))


@struct.dataclass
class PreferencePair:
    """Of each pair, `[P]`.

    Attributes:
      loss: cross entropy of the preference.
      margin: implicit reward of the chosen row less the rejected one's, `beta` times the difference of log-ratios.
      accuracy: 1 where the margin is positive, else 0.
      chosen, rejected: implicit rewards.
    """

    loss: Any
    margin: Any
    accuracy: Any
    chosen: Any
    rejected: Any


def dpo(
    chosen: jax.Array,
    rejected: jax.Array,
    reference_chosen: jax.Array,
    reference_rejected: jax.Array,
    beta: ArrayLike,
    smoothing: ArrayLike = 0.0,
) -> PreferencePair:
    """`-(1 - smoothing) log sigmoid(margin) - smoothing log sigmoid(-margin)` of each pair.

    Args:
        chosen, rejected: log-probabilities of rows, summed over own tokens, `[P]`.
        reference_chosen, reference_rejected: the reference's, `[P]`.
        beta: scale of the implicit reward.
        smoothing: the probability that a pair is the wrong way round (conservative DPO: Mitchell, 2023).
    """
    good = beta * (chosen - reference_chosen)
    bad = beta * (rejected - reference_rejected)
    margin = good - bad
    loss = -(1 - smoothing) * jax.nn.log_sigmoid(margin) - smoothing * jax.nn.log_sigmoid(-margin)
    return PreferencePair(loss, margin, (margin > 0).astype(margin.dtype), good, bad)


def pairs_of_rows(
    new: jax.Array, reference: jax.Array, own: jax.Array, beta: ArrayLike, smoothing: ArrayLike = 0.0
) -> PreferencePair:
    """`dpo` of `[N, T]` log-probabilities, whose rows are pairs: the chosen, then the rejected one, `[P = N / 2]`."""
    chosen, rejected = jnp.sum(jnp.where(own, new, 0), -1).reshape(-1, 2).T
    reference_chosen, reference_rejected = jnp.sum(jnp.where(own, reference, 0), -1).reshape(-1, 2).T
    return dpo(chosen, rejected, reference_chosen, reference_rejected, beta, smoothing)


def squared_value_loss(value: jax.Array, target: jax.Array) -> jax.Array:
    """Returns half the squared error of the value of each token, `[N, T]`."""
    return 0.5 * (value - target) ** 2


def clipped_value_loss(
    value: jax.Array, old: jax.Array, target: jax.Array, clip: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """Half the larger squared error of the value and of one that moves at most `clip` from the old one, `[N, T]`.

    Returns beside it, bool `[N, T]`, where the clipped one is larger, so that the gradient is zero.
    """
    free = squared_value_loss(value, target)
    near = squared_value_loss(jnp.clip(value, old - clip, old + clip), target)
    return jnp.maximum(free, near), near > free


def k1(new: jax.Array, reference: jax.Array) -> jax.Array:
    """Log-ratio: unbiased, of either sign; the one for the reward."""
    return new - reference


def k2(new: jax.Array, reference: jax.Array) -> jax.Array:
    """Half the squared log-ratio: biased as a value, right as a token's gradient."""
    return 0.5 * (new - reference) ** 2


def k3(new: jax.Array, reference: jax.Array) -> jax.Array:
    """Unbiased, never negative: `exp(d) - 1 - d`."""
    return jnp.expm1(reference - new) - (reference - new)


KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}

KL_WEIGHTS = ("none", "ratio", "stopped_ratio")
"""What multiplies an estimate in the loss: nothing, the differentiable ratio (for k3), the ratio as a constant (k2)."""


def weighted_kl(estimate: jax.Array, log_ratio: jax.Array, how: str) -> jax.Array:
    """An estimate in the loss, `[N, T]`, times the token's ratio as `how` of `WEIGHTS` says."""
    if how == "none":
        return estimate
    return estimate * jnp.exp(jax.lax.stop_gradient(log_ratio) if how == "stopped_ratio" else log_ratio)


def penalised(reward: jax.Array, estimate: jax.Array, own: jax.Array, weight: ArrayLike) -> jax.Array:
    """Token rewards less `weight` times an estimate at own slots, `[N, T]`, a constant; its sum is a row's score."""
    return reward - weight * jax.lax.stop_gradient(jnp.where(own, estimate, 0))


COVARIANCE_TREATMENTS = ("none", "clip", "kl")

LOWEST, HIGHEST = 1.0, 5.0
"""Between these covariances Clip-Cov chooses its tokens."""


def token_covariance(advantage: jax.Array, log_probability: jax.Array, own: jax.Array) -> jax.Array:
    """Each own token's (A - mean A)(log pi - mean log pi), `[N, T]`, means over own tokens; 0 at given ones."""
    count = jnp.maximum(jnp.sum(own), 1)

    def centred(x: jax.Array) -> jax.Array:
        x = jnp.where(own, x, 0.0)
        return jnp.where(own, x - jnp.sum(x) / count, 0.0)

    return centred(advantage) * centred(log_probability)


def select_tokens(
    how: str, share: ArrayLike, advantage: jax.Array, log_probability: jax.Array, own: jax.Array, key: jax.Array
) -> jax.Array:
    """The tokens that are treated apart, bool `[N, T]`: a share of the own ones, rounded down, but at least one.

    Args:
        how: "clip": random ones among those whose covariance lies in (1, 5); "kl": those of highest covariance.
        share: scalar in [0, 1].
        advantage, log_probability: constants, `[N, T]`.
        own: bool `[N, T]`.
        key: for the random ones.
    """
    found = token_covariance(advantage, log_probability, own)
    if how == "clip":
        eligible = own & (found > LOWEST) & (found < HIGHEST)
        turn = jax.random.uniform(key, own.shape)
    else:
        eligible, turn = own, found
    order = jnp.argsort(jnp.where(eligible, -turn, jnp.inf), axis=None)
    rank = jnp.zeros(own.size, jnp.int32).at[order].set(jnp.arange(own.size, dtype=jnp.int32)).reshape(own.shape)
    most = jnp.maximum(jnp.floor(share * jnp.sum(own)), 1)
    return eligible & (rank < most)


def apply_covariance(how: str, objective: jax.Array, log_ratio: jax.Array, apart: jax.Array) -> jax.Array:
    """The surrogate of tokens, `[N, T]`, with 0 ("clip") or less |log ratio| ("kl") at those that are treated apart."""
    if how == "clip":
        return jnp.where(apart, 0.0, objective)
    # Its slope at zero is zero, as PyTorch's; JAX' own is one.
    absolute = jax.lax.stop_gradient(jnp.sign(log_ratio)) * log_ratio
    return objective - jnp.where(apart, absolute, 0.0)


CORRECTION_LEVELS = ("token", "sequence", "geometric")
"""What a weight is of: a token; a row, the product over its own tokens; or (masking alone) a token of a row whose
geometric mean is within the bounds, which does not reject rows for being long."""


def no_correction(log_weight: jax.Array) -> jax.Array:
    """Returns weights of 1 for all tokens, `[N, T]`."""
    return jnp.ones_like(log_weight)


def tis(log_weight: jax.Array, own: jax.Array, cap: ArrayLike, level: str = "token") -> jax.Array:
    """Truncated importance sampling: `min(weight, cap)`, `[N, T]` (Yao et al., 2025)."""
    return jnp.where(own, jnp.minimum(_importance(log_weight, own, level), cap), 0)


def mis(log_weight: jax.Array, own: jax.Array, low: ArrayLike, high: ArrayLike, level: str = "token") -> jax.Array:
    """Masked importance sampling: the weight, or zero where it is outside [low, high], `[N, T]`."""
    weight = _importance(log_weight, own, "token" if level == "geometric" else level)
    judged = jnp.exp(_row_mean(log_weight, own)) if level == "geometric" else weight
    return jnp.where(own & (judged >= low) & (judged <= high), weight, 0)


def _importance(log_weight: jax.Array, own: jax.Array, level: str) -> jax.Array:
    masked = jax.lax.stop_gradient(jnp.where(own, log_weight, 0))
    return jnp.exp(jnp.sum(masked, -1, keepdims=True) if level == "sequence" else masked)


def _row_mean(log_weight: jax.Array, own: jax.Array) -> jax.Array:
    masked = jax.lax.stop_gradient(jnp.where(own, log_weight, 0))
    count = jnp.sum(own, -1, keepdims=True, dtype=log_weight.dtype)
    return jnp.sum(masked, -1, keepdims=True) / jnp.maximum(count, 1)


@struct.dataclass
class Surrogate:
    """What is maximised, and where it is flat; all `[N, T]`, or `[N, 1]` where ratio and advantage are.

    Attributes:
      objective: `min(rho A, clip(rho, 1 - low, 1 + high) A)`, and not below `dual A` where A < 0.
      low, high, dual: bool, where a bound holds, so that the gradient is zero.
    """

    objective: Any
    low: Any
    high: Any
    dual: Any


def surrogate(
    log_ratio: jax.Array, advantage: jax.Array, low: ArrayLike, high: ArrayLike, dual: ArrayLike | None = None
) -> Surrogate:
    """The surrogate of tokens whose log-ratios are `log_ratio`.

    On a bound the gradient goes through. Where a bound holds, and where the advantage is zero, the ratio does not enter
    even if it is infinite.

    Args:
        log_ratio: `[N, T]`, or `[N, 1]` of rows.
        advantage: a constant, `[N, T]`.
        low, high: how far below and above 1 the ratio may gain; scalars.
        dual: the largest ratio that counts where A < 0, above 1 (Ye et al., 2020); None or infinity: no such bound.
    """
    dual = jnp.inf if dual is None else dual
    advantage = jax.lax.stop_gradient(advantage)
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio))
    losing = advantage < 0
    is_low = losing & (ratio < 1 - low)
    is_high = (advantage > 0) & (ratio > 1 + high)
    is_dual = losing & (ratio > dual)
    bound = jnp.where(is_dual, dual, jnp.where(is_low, 1 - low, 1 + high))
    flat = is_low | is_high | is_dual
    free = jnp.exp(jnp.where(flat | (advantage == 0), 0, log_ratio))
    # The bound is finite where it holds; elsewhere it may be the infinite one.
    objective = advantage * jnp.where(flat, bound, free)
    return Surrogate(objective, is_low, is_high, is_dual)


def token_ratio(new: jax.Array, old: jax.Array, own: jax.Array) -> jax.Array:
    """Returns the log ratio of each token, `[N, T]`; zero for tokens that the policy did not write."""
    return jnp.where(own, new - old, 0)


def sequence_mean_ratio(new: jax.Array, old: jax.Array, own: jax.Array) -> jax.Array:
    """A row's mean over its own tokens, whose gradient goes to each token's own probability, `[N, T]`.

    GSPO's ratio `sg(exp(mean log rho)) pi / sg(pi)` (Zheng et al., 2025). Where a row's tokens share one advantage, the
    gradient is that of the mean itself.
    """
    log_ratio = token_ratio(new, old, own)
    mean = jnp.sum(log_ratio, -1, keepdims=True) / jnp.maximum(jnp.sum(own, -1, keepdims=True, dtype=new.dtype), 1)
    # The difference is exactly zero: GSPO's clip ranges are so narrow that rounding must not add to the mean.
    return jnp.where(own, jax.lax.stop_gradient(mean) + (log_ratio - jax.lax.stop_gradient(log_ratio)), 0)


def sequence_sum_ratio(new: jax.Array, old: jax.Array, own: jax.Array) -> jax.Array:
    """Returns the log ratio of each row, the sum over its own tokens, `[N, 1]` (RLOO: Ahmadian et al., 2024)."""
    return jnp.sum(token_ratio(new, old, own), -1, keepdims=True)


RATIOS = {"token": token_ratio, "sequence_mean": sequence_mean_ratio, "sequence_sum": sequence_sum_ratio}
