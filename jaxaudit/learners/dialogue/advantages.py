"""What a token is worth beyond expectation: generalised advantage estimation, and baselines from a rollout group.

Scores of rollout groups are `[P, G]`, tokens `[N, T]` with N = P * G rows, row-major by prompt. `kept` leaves rows out
of every mean, standard deviation and count: those of dynamic sampling, or truncated ones.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxaudit.learners.dialogue import loss_terms
from jaxaudit.learners.dialogue.objective import Coefficients, Parts


def penalty(length: ArrayLike, longest: ArrayLike, buffer: ArrayLike) -> jax.Array:
    """0 up to a length of `longest - buffer`, then linearly down to -1 at `longest`, where it stays.

    Lengths are those of responses: all slots after a row's own prompt, whether the policy or a tool wrote them. These
    are what runs out when a row is cut off, and what verl's DAPO reward manager counts by the attention mask.

    Args:
        length: slots of each row's response, `[N]`.
        longest: the most slots that a response can have, scalar or `[N]`.
        buffer: slots before that in which the penalty grows, scalar or `[N]`; 0: none up to `longest`.
    """
    length = jnp.asarray(length, jnp.result_type(float))
    excess = length - (longest - jnp.asarray(buffer, length.dtype))
    return -jnp.clip(excess / jnp.maximum(buffer, jnp.finfo(length.dtype).tiny), 0, 1)


def terminal(score: jax.Array, own: jax.Array) -> jax.Array:
    """Each row's score at its last own slot, zero elsewhere: `[N]` and bool `[N, T]` to `[N, T]`."""
    after = jnp.flip(jnp.cumsum(jnp.flip(own, -1), -1), -1)  # own slots from here on
    return jnp.where(own & (after == 1), score[:, None], 0)


def gae(
    reward: jax.Array,
    value: jax.Array,
    own: jax.Array,
    gamma: ArrayLike,
    lam: ArrayLike,
    critic_lam: ArrayLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Advantages of own tokens as if the given ones between them were not there (Schulman et al., 2016).

    The next value of an own token is the next own token's, over however many given ones: `gamma` and `lam` count own
    tokens, not slots. After a row's last own token there is nothing. Rewards and values of given tokens do not enter.

    Args:
        reward: of writing this token, `[N, T]`; a row's score belongs at its last own slot (`terminal`).
        value: what is to come before this token is written, `[N, T]`.
        own: bool `[N, T]`.
        gamma: discount, scalar.
        lam: lambda of the advantages, scalar, or `[N]`.
        critic_lam: lambda of the critic's targets (1 in VC-PPO: Yuan et al., 2025); `lam` unless given.

    Returns:
        advantages `[N, T]` and the critic's targets `[N, T]`, zero where a token is given.
    """
    reward, value = jnp.where(own, reward, 0), jnp.where(own, value, 0)
    lambdas: list[ArrayLike] = [lam, lam if critic_lam is None else critic_lam]
    if jnp.ndim(lam):
        lambdas = [*jnp.broadcast_arrays(*map(jnp.asarray, lambdas))]
    decay = jnp.stack([jnp.asarray(gamma * one, value.dtype) for one in lambdas])
    gamma = jnp.asarray(gamma, value.dtype)

    def backward(carry: tuple[jax.Array, jax.Array], slot: tuple[jax.Array, ...]):
        next_value, later = carry  # [N], [2, N]
        r, v, mine = slot
        advantage = r + gamma * next_value - v + (decay if decay.ndim == 2 else decay[:, None]) * later
        carry = jnp.where(mine, v, next_value), jnp.where(mine, advantage, later)
        return carry, jnp.where(mine, advantage, 0)

    nothing = jnp.zeros_like(value[:, 0])
    _, both = jax.lax.scan(backward, (nothing, jnp.stack([nothing] * 2)), (reward.T, value.T, own.T), reverse=True)
    return both[:, 0].T, jnp.where(own, both[:, 1].T + value, 0)


def length_adaptive_lambda(own: jax.Array, scale: ArrayLike) -> jax.Array:
    """max(0, 1 - 1 / (scale * own tokens)) of each row (VAPO: Yue et al., 2025), `[N]`; 0 for a row without any."""
    tokens = jnp.sum(own, -1, dtype=jnp.float32)
    return jnp.maximum(0.0, 1.0 - 1.0 / jnp.maximum(scale * tokens, 1e-6))


def discounted_sum(reward: jax.Array, own: jax.Array, gamma: ArrayLike) -> jax.Array:
    """What comes from each own token on, discounted by `gamma` for each own token in between: the return, `[N, T]`.

    Args:
        reward: of writing each token, `[N, T]`; those of given tokens do not enter.
        own: bool `[N, T]`.
        gamma: discount, scalar.
    """
    return gae(reward, jnp.zeros_like(reward), own, gamma, 1.0)[1]


def differ(score: jax.Array, kept: jax.Array | None = None) -> jax.Array:
    """Which rollout groups carry a signal, their kept scores not all the same: `[P, G]` to bool `[P]`."""
    kept = jnp.ones_like(score, bool) if kept is None else kept
    highest = jnp.max(jnp.where(kept, score, -jnp.inf), -1)
    return highest > jnp.min(jnp.where(kept, score, jnp.inf), -1)


def group_mean(score: jax.Array, kept: jax.Array | None = None) -> jax.Array:
    """Score less the group's mean (Dr. GRPO: Liu et al., 2025), `[P, G]`; zero where not kept."""
    kept = _with_signal(score, kept)
    return jnp.where(kept, score - _mean(score, kept), 0)


def group(score: jax.Array, kept: jax.Array | None = None, eps: ArrayLike = 1e-4) -> jax.Array:
    """Score less the group's mean, over its standard deviation (ddof 1) + `eps` (GRPO: Shao et al., 2024), `[P, G]`.

    Exactly zero in a group without signal: its scores are all the same, or fewer than two are kept.
    """
    kept = _with_signal(score, kept)
    centred = group_mean(score, kept)
    squares = jnp.sum(centred**2, -1, keepdims=True)
    std = jnp.sqrt(squares / jnp.maximum(_count(kept, score) - 1, 1))
    return centred / (std + eps)


def leave_one_out(score: jax.Array, kept: jax.Array | None = None) -> jax.Array:
    """Score less the mean of the group's others (RLOO: Ahmadian et al., 2024), `[P, G]`; zero where not kept."""
    kept = _with_signal(score, kept)
    count = _count(kept, score)
    others = jnp.sum(jnp.where(kept, score, 0), -1, keepdims=True) - score
    return jnp.where(kept, score - others / jnp.maximum(count - 1, 1), 0)


def to_tokens(advantage: jax.Array, own: jax.Array) -> jax.Array:
    """Every own token of a row gets the row's advantage: `[P, G]` and bool `[N, T]` to `[N, T]`."""
    return jnp.where(own, advantage.reshape(-1, 1), 0)


def whiten(advantage: jax.Array, own: jax.Array) -> jax.Array:
    """Advantages of mean 0 and variance 1 (ddof 1) over the own tokens, as PPO on language takes them, `[N, T]`."""
    count = jnp.sum(own, dtype=advantage.dtype)
    mean = jnp.sum(jnp.where(own, advantage, 0)) / jnp.maximum(count, 1)
    centred = jnp.where(own, advantage - mean, 0)
    return centred * jax.lax.rsqrt(jnp.sum(centred**2) / jnp.maximum(count - 1, 1) + 1e-8)


def _with_signal(score: jax.Array, kept: jax.Array | None) -> jax.Array:
    kept = jnp.ones_like(score, bool) if kept is None else kept
    return kept & differ(score, kept)[:, None]


def _count(kept: jax.Array, score: jax.Array) -> jax.Array:
    return jnp.sum(kept, -1, keepdims=True, dtype=score.dtype)


def _mean(score: jax.Array, kept: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(kept, score, 0), -1, keepdims=True) / jnp.maximum(_count(kept, score), 1)


def estimate(
    parts: Parts,
    coefficients: Coefficients,
    score: jax.Array,
    own: jax.Array,
    kept: jax.Array | None = None,
    penalty: jax.Array | None = None,
    value: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Advantages `[N, T]` and, with a critic, its targets `[N, T]`; zero at given tokens and in rows not kept.

    Args:
        parts, coefficients: what to estimate by; of a policy objective.
        score: the reward of each row, `[P, G]`, N = P * G rows, row-major.
        own: bool `[N, T]`.
        kept: bool `[P, G]`, rows that count; all unless given.
        penalty: the KL estimate of each token, `[N, T]`, where `parts.kl_in_reward`; a constant.
        value: of each token, `[N, T]`, with a critic.
    """
    kept = jnp.ones_like(score, bool) if kept is None else kept
    own = own & kept.reshape(-1, 1)
    _check(parts, penalty, value)
    if parts.advantage == "gae":
        return _by_critic(parts, coefficients, score, own, penalty, value)
    if penalty is not None:
        total = jnp.sum(loss_terms.penalised(jnp.zeros_like(penalty), penalty, own, coefficients.kl_coefficient), -1)
        score = score + total.reshape(score.shape)
    if parts.advantage == "group":
        by_row = group(score, kept, coefficients.std_epsilon)
    elif parts.advantage == "group_mean":
        by_row = group_mean(score, kept)
    else:
        by_row = leave_one_out(score, kept)
    return to_tokens(by_row, own), None


def token_rewards(
    coefficients: Coefficients, score: jax.Array, own: jax.Array, penalty: jax.Array | None = None
) -> jax.Array:
    """What writing each token earns a critic's policy: the row's score at its last own token, less the KL penalty.

    Args:
        coefficients: whose `kl_coefficient` weighs the penalty.
        score: of each row, `[N]`.
        own: bool `[N, T]`.
        penalty: the KL estimate of each token, `[N, T]`, a constant; None without a KL in the reward.

    Returns:
        float32 `[N, T]`, zero at given tokens.
    """
    reward = terminal(score, own)
    return reward if penalty is None else loss_terms.penalised(reward, penalty, own, coefficients.kl_coefficient)


def _by_critic(parts, coefficients, score, own, penalty, value):
    reward = token_rewards(coefficients, score.reshape(-1), own, penalty)
    lam = coefficients.gae_lambda
    if parts.adaptive_lambda:
        lam = length_adaptive_lambda(own, coefficients.gae_lambda_length)
    advantage, target = gae(reward, value, own, coefficients.gamma, lam, coefficients.critic_lambda)
    return (whiten(advantage, own) if parts.whiten else advantage), target


def _check(parts, penalty, value):
    wanted = parts.kl_in_reward
    if wanted != (penalty is not None):
        has = "needs" if wanted else "does not take"
        raise ValueError(f"kl = {parts.kl!r} in the {parts.kl_in} {has} a penalty of the tokens")
    if parts.critic and value is None:
        raise ValueError("advantage = 'gae' needs the critic's values, and none were given")
