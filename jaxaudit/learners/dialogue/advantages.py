"""Advantage estimation: generalised advantage estimation, and baselines from rollout groups.

Scores of P rollout groups of G rows are `[P, G]`; token arrays are `[N, T]` with N = P * G rows, row-major by prompt.
`row_mask` excludes rows from every mean, standard deviation and count: the ones that dynamic sampling rejected, or that
were truncated.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxaudit.learners.dialogue import loss_terms
from jaxaudit.learners.dialogue.objective import Coefficients, ObjectiveConfig


def overlong_penalty(length: ArrayLike, max_length: ArrayLike, buffer: ArrayLike) -> jax.Array:
    """Returns DAPO's penalty on long responses, `[N]`.

    It is 0 up to a length of `max_length - buffer`, falls linearly to -1 at `max_length`, and stays there. The length
    counts all slots after the row's first prompt, whether the policy or a tool wrote them. These are the slots that run
    out when a row is truncated, and the ones that verl's DAPO reward manager counts by the attention mask.

    Args:
      length: number of slots of each row's response, `[N]`.
      max_length: the largest number of slots that a response can have, scalar or `[N]`.
      buffer: number of slots before `max_length` over which the penalty grows, scalar or `[N]`; 0 for no penalty below
        `max_length`.
    """
    length = jnp.asarray(length, jnp.result_type(float))
    excess = length - (max_length - jnp.asarray(buffer, length.dtype))
    return -jnp.clip(excess / jnp.maximum(buffer, jnp.finfo(length.dtype).tiny), 0, 1)


def terminal_reward(score: jax.Array, response_mask: jax.Array) -> jax.Array:
    """Returns each row's score `[N]` at its last response token and zero elsewhere, `[N, T]`."""
    remaining = jnp.flip(jnp.cumsum(jnp.flip(response_mask, -1), -1), -1)  # response tokens from this slot on
    return jnp.where(response_mask & (remaining == 1), score[:, None], 0)


def gae(
    reward: jax.Array,
    value: jax.Array,
    response_mask: jax.Array,
    gamma: ArrayLike,
    lam: ArrayLike,
    critic_lam: ArrayLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes generalised advantage estimates over response tokens (Schulman et al., 2016).

    Prompt and tool tokens are skipped: the next value of a response token is the next response token's, so `gamma` and
    `lam` count response tokens, not slots. The value after a row's last response token is zero. Rewards and values of
    other tokens are ignored.

    Args:
      reward: reward for writing this token, `[N, T]`; a row's score is at its last response token (`terminal_reward`).
      value: value before this token is written, `[N, T]`.
      response_mask: bool `[N, T]`.
      gamma: discount, scalar.
      lam: lambda of the advantages, scalar or `[N]`.
      critic_lam: lambda of the critic's targets (1 in VC-PPO: Yuan et al., 2025); defaults to `lam`.

    Returns:
      advantages and targets of the critic, both `[N, T]` and zero at tokens outside `response_mask`.
    """
    reward, value = jnp.where(response_mask, reward, 0), jnp.where(response_mask, value, 0)
    lambdas: list[ArrayLike] = [lam, lam if critic_lam is None else critic_lam]
    if jnp.ndim(lam):
        lambdas = [*jnp.broadcast_arrays(*map(jnp.asarray, lambdas))]
    decay = jnp.stack([jnp.asarray(gamma * each, value.dtype) for each in lambdas])
    gamma = jnp.asarray(gamma, value.dtype)

    def backward(carry: tuple[jax.Array, jax.Array], slot: tuple[jax.Array, ...]):
        next_value, next_advantage = carry  # [N], [2, N]
        r, v, is_response = slot
        advantage = r + gamma * next_value - v + (decay if decay.ndim == 2 else decay[:, None]) * next_advantage
        carry = jnp.where(is_response, v, next_value), jnp.where(is_response, advantage, next_advantage)
        return carry, jnp.where(is_response, advantage, 0)

    zeros = jnp.zeros_like(value[:, 0])
    carry = zeros, jnp.stack([zeros] * 2)
    _, advantages = jax.lax.scan(backward, carry, (reward.T, value.T, response_mask.T), reverse=True)
    return advantages[:, 0].T, jnp.where(response_mask, advantages[:, 1].T + value, 0)


def length_adaptive_lambda(response_mask: jax.Array, scale: ArrayLike) -> jax.Array:
    """Returns max(0, 1 - 1 / (scale * response tokens)) of each row (VAPO: Yue et al., 2025), `[N]`.

    A row without response tokens has 0.
    """
    tokens = jnp.sum(response_mask, -1, dtype=jnp.float32)
    return jnp.maximum(0.0, 1.0 - 1.0 / jnp.maximum(scale * tokens, 1e-6))


def discounted_sum(reward: jax.Array, response_mask: jax.Array, gamma: ArrayLike) -> jax.Array:
    """Returns the return of each response token, `[N, T]`: the sum of rewards from there on.

    Rewards are discounted by `gamma` once for each response token in between.

    Args:
      reward: reward for writing each token, `[N, T]`; ignored outside `response_mask`.
      response_mask: bool `[N, T]`.
      gamma: discount, scalar.
    """
    return gae(reward, jnp.zeros_like(reward), response_mask, gamma, 1.0)[1]


def has_signal(score: jax.Array, row_mask: jax.Array | None = None) -> jax.Array:
    """Returns which rollout groups carry a signal, their unmasked scores not all equal: `[P, G]` to bool `[P]`."""
    row_mask = jnp.ones_like(score, bool) if row_mask is None else row_mask
    highest = jnp.max(jnp.where(row_mask, score, -jnp.inf), -1)
    return highest > jnp.min(jnp.where(row_mask, score, jnp.inf), -1)


def group_mean(score: jax.Array, row_mask: jax.Array | None = None) -> jax.Array:
    """Returns the score minus its group's mean (Dr. GRPO: Liu et al., 2025), `[P, G]`; zero for masked rows."""
    row_mask = _mask_with_signal(score, row_mask)
    mean = jnp.sum(jnp.where(row_mask, score, 0), -1, keepdims=True) / jnp.maximum(_count(row_mask, score), 1)
    return jnp.where(row_mask, score - mean, 0)


def group(score: jax.Array, row_mask: jax.Array | None = None, eps: ArrayLike = 1e-4) -> jax.Array:
    """Returns the score minus its group's mean, over the group's standard deviation + `eps`, `[P, G]`.

    The standard deviation has ddof 1 (GRPO: Shao et al., 2024). The advantage is exactly zero in a group without
    signal: its scores are all equal, or fewer than two rows are unmasked.
    """
    row_mask = _mask_with_signal(score, row_mask)
    centred = group_mean(score, row_mask)
    squares = jnp.sum(centred**2, -1, keepdims=True)
    std = jnp.sqrt(squares / jnp.maximum(_count(row_mask, score) - 1, 1))
    return centred / (std + eps)


def leave_one_out(score: jax.Array, row_mask: jax.Array | None = None) -> jax.Array:
    """Returns the score minus the mean of the group's other rows (RLOO: Ahmadian et al., 2024), `[P, G]`.

    It is zero for masked rows.
    """
    row_mask = _mask_with_signal(score, row_mask)
    count = _count(row_mask, score)
    others = jnp.sum(jnp.where(row_mask, score, 0), -1, keepdims=True) - score
    return jnp.where(row_mask, score - others / jnp.maximum(count - 1, 1), 0)


def broadcast_to_tokens(advantages: jax.Array, loss_mask: jax.Array) -> jax.Array:
    """Returns each row's advantage at all its unmasked tokens: `[P, G]` and bool `[N, T]` to `[N, T]`."""
    return jnp.where(loss_mask, advantages.reshape(-1, 1), 0)


def whiten(advantages: jax.Array, loss_mask: jax.Array) -> jax.Array:
    """Returns advantages `[N, T]` scaled to mean 0 and variance 1 (ddof 1) over unmasked tokens; zero elsewhere."""
    count = jnp.sum(loss_mask, dtype=advantages.dtype)
    mean = jnp.sum(jnp.where(loss_mask, advantages, 0)) / jnp.maximum(count, 1)
    centred = jnp.where(loss_mask, advantages - mean, 0)
    return centred * jax.lax.rsqrt(jnp.sum(centred**2) / jnp.maximum(count - 1, 1) + 1e-8)


def _mask_with_signal(score: jax.Array, row_mask: jax.Array | None) -> jax.Array:
    row_mask = jnp.ones_like(score, bool) if row_mask is None else row_mask
    return row_mask & has_signal(score, row_mask)[:, None]


def _count(row_mask: jax.Array, score: jax.Array) -> jax.Array:
    return jnp.sum(row_mask, -1, keepdims=True, dtype=score.dtype)


def estimate_advantages(
    config: ObjectiveConfig,
    coefficients: Coefficients,
    score: jax.Array,
    response_mask: jax.Array,
    row_mask: jax.Array | None = None,
    kl_penalty: jax.Array | None = None,
    value: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Estimates the advantages of a policy objective.

    Args:
      config: chooses the estimator.
      coefficients: numbers of the estimator.
      score: reward of each row, `[P, G]`, with N = P * G rows in row-major order.
      response_mask: bool `[N, T]`.
      row_mask: bool `[P, G]`, rows that count; defaults to all.
      kl_penalty: KL estimate of each token, `[N, T]`, a constant; given if and only if `config.kl_in_reward`.
      value: the critic's value of each token, `[N, T]`; needed with a critic.

    Returns:
      advantages `[N, T]` and, with a critic, its targets `[N, T]` (otherwise None); zero outside `response_mask` and in
      masked rows.

    Raises:
      ValueError: `kl_penalty` or `value` does not fit `config`.
    """
    row_mask = jnp.ones_like(score, bool) if row_mask is None else row_mask
    loss_mask = response_mask & row_mask.reshape(-1, 1)
    if config.kl_in_reward != (kl_penalty is not None):
        verb = "needs" if config.kl_in_reward else "does not take"
        raise ValueError(f"kl = {config.kl!r} with kl_in = {config.kl_in!r} {verb} a KL penalty of the tokens")
    if config.advantage == "gae":
        if value is None:
            raise ValueError("advantage = 'gae' needs the critic's values, and value is None")
        reward = token_rewards(coefficients, score.reshape(-1), loss_mask, kl_penalty)
        lam = coefficients.gae_lambda
        if config.adaptive_lambda:
            lam = length_adaptive_lambda(loss_mask, coefficients.gae_lambda_length)
        advantages, target = gae(reward, value, loss_mask, coefficients.gamma, lam, coefficients.critic_lambda)
        return (whiten(advantages, loss_mask) if config.whiten else advantages), target
    if kl_penalty is not None:
        penalty = loss_terms.subtract_kl_penalty(
            jnp.zeros_like(kl_penalty), kl_penalty, loss_mask, coefficients.kl_coefficient
        )
        score = score + jnp.sum(penalty, -1).reshape(score.shape)
    if config.advantage == "group":
        row_advantages = group(score, row_mask, coefficients.std_epsilon)
    elif config.advantage == "group_mean":
        row_advantages = group_mean(score, row_mask)
    else:
        row_advantages = leave_one_out(score, row_mask)
    return broadcast_to_tokens(row_advantages, loss_mask), None


def token_rewards(
    coefficients: Coefficients, score: jax.Array, loss_mask: jax.Array, kl_penalty: jax.Array | None = None
) -> jax.Array:
    """Returns the reward of each token: the row's score at its last response token, minus the KL penalty.

    Args:
      coefficients: its `kl_coefficient` multiplies the penalty.
      score: reward of each row, `[N]`.
      loss_mask: bool `[N, T]`, response tokens of rows that count.
      kl_penalty: KL estimate of each token, `[N, T]`, a constant; None without a KL in the reward.

    Returns:
      float32 `[N, T]`, zero at masked tokens.
    """
    reward = terminal_reward(score, loss_mask)
    if kl_penalty is None:
        return reward
    return loss_terms.subtract_kl_penalty(reward, kl_penalty, loss_mask, coefficients.kl_coefficient)
