"""Loops over the tokens of random rows, as references for the vectorised code of the dialogue learners."""

import dataclasses

import numpy as np

from jaxaudit.learners.dialogue.factories import settings_of

EXACT = {"rtol": 1e-10, "atol": 1e-13}

ROWS, SLOTS = 6, 20

CRITIC = settings_of("ppo_lm")(
    whiten=False, gae_lambda=1.0, aggregation="constant", kl="none", kl_coefficient=0.0, value_coefficient=0.0
)


def settings_with_remedies(settings, *applied):
    """Returns the settings as remedies change them in `ja.remedied`."""
    for remedy in applied:
        settings = dataclasses.replace(settings, **remedy.kind.settings(settings, remedy.strength))
    return settings


def random_rows(seed=0, poison=False):
    """Returns a policy mask `[ROWS, SLOTS]`, advantages and log-probabilities.

    The rows have uneven lengths, and tokens of prompts and tools between those of the policy. One row has no token of
    the policy. With `poison`, the values at all other tokens are NaN.
    """
    random = np.random.default_rng(seed)
    policy_mask = random.random((ROWS, SLOTS)) < np.array([0.9, 0.7, 0.5, 0.3, 0.0, 0.6])[:, None]
    advantage = 1.0 + 1.6 * random.normal(size=policy_mask.shape)
    old_log_prob = -2.0 + 1.6 * random.normal(size=policy_mask.shape)
    if poison:
        advantage, old_log_prob = (np.where(policy_mask, x, np.nan) for x in (advantage, old_log_prob))
    return policy_mask, advantage, old_log_prob


def covariances_by_loop(policy_mask, advantage, log_prob):
    """Returns the covariances of advantages and log-probabilities at the policy's tokens, and NaN at all others."""
    positions = [(n, t) for n, t in np.ndindex(policy_mask.shape) if policy_mask[n, t]]
    mean_advantage = sum(advantage[position] for position in positions) / len(positions)
    mean_log_prob = sum(log_prob[position] for position in positions) / len(positions)
    covariances = np.full(policy_mask.shape, np.nan)
    for position in positions:
        covariances[position] = (advantage[position] - mean_advantage) * (log_prob[position] - mean_log_prob)
    return covariances


def advantages_by_loop(reward, value, policy_mask, gamma, lambdas):
    """Returns the advantages of the policy's tokens, by a loop backwards over each row, and zero at all others."""
    advantages = np.zeros(policy_mask.shape)
    for row, slots in enumerate(map(np.flatnonzero, policy_mask)):
        next_advantage = next_value = 0.0
        for slot in slots[::-1]:
            next_advantage = (
                reward[row, slot] + gamma * next_value - value[row, slot] + gamma * lambdas[row] * next_advantage
            )
            next_value, advantages[row, slot] = value[row, slot], next_advantage
    return advantages


def lambdas_by_length(policy_mask, scale):
    """Returns lambda by the length of each row, and 0 for rows without tokens of the policy."""
    return np.array([max(0.0, 1 - 1 / (scale * tokens)) if tokens else 0.0 for tokens in policy_mask.sum(1).tolist()])
