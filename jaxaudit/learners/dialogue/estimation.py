"""Advantages of one iteration's rows by the parts chosen, and the critic's targets."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxaudit.learners.dialogue import advantages, kl
from jaxaudit.learners.dialogue.coefficients import Coefficients
from jaxaudit.learners.dialogue.parts import Parts


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
        total = jnp.sum(kl.penalised(jnp.zeros_like(penalty), penalty, own, coefficients.kl_coefficient), -1)
        score = score + total.reshape(score.shape)
    if parts.advantage == "group":
        by_row = advantages.group(score, kept, coefficients.std_epsilon)
    elif parts.advantage == "group_mean":
        by_row = advantages.group_mean(score, kept)
    else:
        by_row = advantages.leave_one_out(score, kept)
    return advantages.to_tokens(by_row, own), None


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
    reward = advantages.terminal(score, own)
    return reward if penalty is None else kl.penalised(reward, penalty, own, coefficients.kl_coefficient)


def _by_critic(parts, coefficients, score, own, penalty, value):
    reward = token_rewards(coefficients, score.reshape(-1), own, penalty)
    lam = coefficients.gae_lambda
    if parts.adaptive_lambda:
        lam = advantages.length_adaptive_lambda(own, coefficients.gae_lambda_length)
    advantage, target = advantages.gae(reward, value, own, coefficients.gamma, lam, coefficients.critic_lambda)
    return (advantages.whiten(advantage, own) if parts.whiten else advantage), target


def _check(parts, penalty, value):
    wanted = parts.kl_in_reward
    if wanted != (penalty is not None):
        has = "needs" if wanted else "does not take"
        raise ValueError(f"kl = {parts.kl!r} in the {parts.kl_in} {has} a penalty of the tokens")
    if parts.critic and value is None:
        raise ValueError("advantage = 'gae' needs the critic's values, and none were given")
