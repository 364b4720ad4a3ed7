"""Loops over tokens of random rows, to compare the vectorised code of learners on dialogues with."""

import dataclasses

import numpy as np

from jaxaudit.learners.dialogue.factories import settings_of

EXACT = {"rtol": 1e-10, "atol": 1e-13}

ROWS, SLOTS = 6, 20

CRITIC = settings_of("ppo_lm")(
    whiten=False, gae_lambda=1.0, aggregation="constant", kl="none", kl_coefficient=0.0, value_coefficient=0.0
)


def with_remedies(settings, *chosen):
    """Settings with remedies that change them, as `ja.remedied` makes them."""
    for one in chosen:
        settings = dataclasses.replace(settings, **one.kind.settings(settings, one.strength))
    return settings


def random_rows(seed=0, poison=False):
    """Own tokens of uneven rows with given ones between them, a row of given ones alone, advantages, log-probabilities;
    with `poison` what is at given tokens is NaN."""
    random = np.random.default_rng(seed)
    own = random.random((ROWS, SLOTS)) < np.array([0.9, 0.7, 0.5, 0.3, 0.0, 0.6])[:, None]
    advantage = 1.0 + 1.6 * random.normal(size=own.shape)
    old = -2.0 + 1.6 * random.normal(size=own.shape)
    if poison:
        advantage, old = (np.where(own, x, np.nan) for x in (advantage, old))
    return own, advantage, old


def covariances_by_loop(own, advantage, old):
    """By a loop over own tokens; NaN at given ones."""
    places = [(n, t) for n, t in np.ndindex(own.shape) if own[n, t]]
    mean_advantage = sum(advantage[place] for place in places) / len(places)
    mean_old = sum(old[place] for place in places) / len(places)
    found = np.full(own.shape, np.nan)
    for place in places:
        found[place] = (advantage[place] - mean_advantage) * (old[place] - mean_old)
    return found


def advantages_by_loop(reward, value, own, gamma, lambdas):
    """Advantages of own tokens, row by row from the last one back; zero at given ones."""
    found = np.zeros(own.shape)
    for row, slots in enumerate(map(np.flatnonzero, own)):
        after = ahead = 0.0
        for slot in slots[::-1]:
            after = reward[row, slot] + gamma * ahead - value[row, slot] + gamma * lambdas[row] * after
            ahead, found[row, slot] = value[row, slot], after
    return found


def lambdas_by_length(own, scale):
    """By the length of each row; 0 of one without own tokens."""
    return np.array([max(0.0, 1 - 1 / (scale * tokens)) if tokens else 0.0 for tokens in own.sum(1).tolist()])
