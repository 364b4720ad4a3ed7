"""Weights and masks of tokens, lambdas by row and importance corrections, against NumPy and plain loops."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from token_loops import (
    CRITIC,
    EXACT,
    ROWS,
    SLOTS,
    advantages_by_loop,
    covariances_by_loop,
    lambdas_by_length,
    random_rows,
    with_remedies,
)

from jaxaudit import remedies
from jaxaudit.learners.dialogue import advantages, loss_terms
from jaxaudit.learners.dialogue.advantages import estimate_advantages
from jaxaudit.learners.dialogue.factories import settings_of
from jaxaudit.learners.dialogue.loss_terms import denominators
from jaxaudit.learners.dialogue.policy_loss import LossInputs, Predictions, policy_loss

# Tokens that are treated apart for their covariance.


def selected_tokens(how, share, own, advantage, old, seed=0):
    return np.asarray(
        loss_terms.select_covariance_tokens(how, share, *map(jnp.asarray, (advantage, old, own)), jax.random.key(seed))
    )


SHARES = (0.0, 0.01, 0.06, 0.2, 0.3, 1.0)


def token_count(share, own):
    """The number of tokens that a share of the policy's tokens amounts to."""
    return max(math.floor(share * own.sum()), 1)


@pytest.mark.usefixtures("float64")
def test_the_covariance_is_a_product_of_deviations_over_own_tokens():
    own, advantage, old = random_rows(poison=True)
    found = np.asarray(loss_terms.token_covariance(*map(jnp.asarray, (advantage, old, own))))
    np.testing.assert_allclose(found, np.nan_to_num(covariances_by_loop(own, advantage, old)), **EXACT)
    assert found.sum() / own.sum() == pytest.approx(np.cov(advantage[own], old[own], ddof=0)[0, 1])


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("seed", range(3))
def test_clip_cov_takes_a_share_of_own_tokens_among_those_of_covariance_between_one_and_five(share, seed):
    given = random_rows(seed, poison=True)
    own, values = given[0], covariances_by_loop(*given)
    eligible = own & (values > 1) & (values < 5)
    assert own.sum() * 0.1 < eligible.sum() < own.sum() * 0.3, "so that there may be too few"
    assert (values[own] > 5).any()
    found = selected_tokens("clip", share, *given, seed=seed)
    assert found.sum() == min(token_count(share, own), eligible.sum())
    assert not (found & ~eligible).any()
    if share == 0.06:
        assert token_count(share, own) < share * own.sum() - 0.25, "rounded down"


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("seed", range(3))
def test_kl_cov_takes_the_own_tokens_of_highest_covariance(share, seed):
    given = random_rows(seed, poison=True)
    own, values = given[0], covariances_by_loop(*given)
    found = selected_tokens("kl", share, *given, seed=seed)
    assert found.sum() == token_count(share, own)
    lowest = np.sort(values[own])[::-1][token_count(share, own) - 1]
    np.testing.assert_array_equal(found, own & (np.nan_to_num(values, nan=-np.inf) >= lowest))


@pytest.mark.usefixtures("float64")
def test_a_covariance_of_exactly_one_or_five_is_not_between_them():
    own = np.array([[True, True, True, True, False]])
    advantage = np.array([[1.0, -1.0, 1.0, -1.0, 7.0]])
    for logs, expected in (([1.0, -1.0, 5.0, -5.0, 9.0], 0), ([1.25, -1.25, 4.75, -4.75, 9.0], 4)):
        old = np.array([logs])
        np.testing.assert_array_equal(np.abs(covariances_by_loop(own, advantage, old)[own]), np.abs(old[own]))
        assert selected_tokens("clip", 1.0, own, advantage, old).sum() == expected


@pytest.mark.usefixtures("float64")
def test_where_no_token_is_eligible_clip_cov_takes_none():
    own, advantage, old = random_rows()
    assert not selected_tokens("clip", 0.5, own, 0 * advantage, old).any()
    assert not selected_tokens("clip", 0.5, 0 * own > 0, advantage, old).any()
    assert not selected_tokens("kl", 0.5, 0 * own > 0, advantage, old).any()


@pytest.mark.usefixtures("float64")
def test_clip_cov_takes_any_of_the_eligible_tokens_as_often_as_another_and_kl_cov_draws_nothing():
    own, advantage, old = map(jnp.asarray, random_rows())
    values = covariances_by_loop(*random_rows())
    eligible = np.asarray(own) & (values > 1) & (values < 5)
    share, draws = 0.05, 3000
    many = jax.jit(
        jax.vmap(
            lambda how, key: loss_terms.select_covariance_tokens(how, share, advantage, old, own, key),
            in_axes=(None, 0),
        ),
        static_argnums=0,
    )
    keys = jax.random.split(jax.random.key(9), draws)
    found = np.asarray(many("clip", keys))
    assert len(np.unique(found.reshape(draws, -1), axis=0)) == math.comb(
        eligible.sum(), token_count(share, np.asarray(own))
    )
    np.testing.assert_array_equal(found, many("clip", keys))
    expected = draws * token_count(share, np.asarray(own)) / eligible.sum()
    often = found.sum(0)[eligible]
    assert np.abs(often - expected).max() < 5 * math.sqrt(expected)
    assert len(np.unique(np.asarray(many("kl", keys)).reshape(draws, -1), axis=0)) == 1


GROUPS = settings_of("grpo")(kl="none", kl_coefficient=0.0, dual_clip=1.5, clip_high=0.3)
TREATMENTS = {"clip": remedies.clip_cov, "kl": remedies.kl_cov}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("aggregation", ["sequence", "token_minibatch"])
@pytest.mark.parametrize("how", TREATMENTS)
def test_tokens_treated_apart_have_no_gradient_or_that_of_their_log_ratio_and_no_clipping_anywhere(how, aggregation):
    settings = with_remedies(dataclasses.replace(GROUPS, aggregation=aggregation), TREATMENTS[how](0.15))
    parts, coefficients = settings.objective_config, settings.coefficients
    assert (parts.covariance, coefficients.covariance_share) == (how, 0.15)
    own, advantage, old = random_rows(poison=True)
    new = np.where(own, old + 0.8 * np.random.default_rng(7).normal(size=own.shape), np.nan)
    apart = selected_tokens(how, 0.15, own, advantage, old)
    rows = jax.tree.map(jnp.asarray, LossInputs(own, old, advantage, covariance_mask=apart))
    counts = denominators(rows.loss_mask, SLOTS)

    def loss(new):
        return policy_loss(parts, coefficients, Predictions(new), rows, counts)

    (value, told), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(new))
    each, slope, flat = np.zeros(own.shape), np.zeros(own.shape), 0
    lengths, written = own.sum(1), own.any(1).sum()
    for n, t in zip(*np.nonzero(own), strict=True):
        gain, log_ratio = advantage[n, t], new[n, t] - old[n, t]
        ratio = math.exp(log_ratio)
        weight = 1 / (lengths[n] * written) if aggregation == "sequence" else 1 / own.sum()
        if how == "kl":
            objective, along = gain * ratio, gain * ratio
            if apart[n, t]:
                objective, along = objective - abs(log_ratio), along - math.copysign(1, log_ratio)
        else:
            bound = 1.3 if gain > 0 else 1.5 if ratio > 1.5 else 0.8
            holds = ratio > 1.3 if gain > 0 else ratio > 1.5 or ratio < 0.8
            flat += holds
            objective, along = (gain * bound, 0.0) if holds else (gain * ratio, gain * ratio)
            if apart[n, t]:
                objective, along = 0.0, 0.0
        each[n, t], slope[n, t] = -weight * objective, -weight * along
    np.testing.assert_allclose(value, each.sum(), **EXACT)
    np.testing.assert_allclose(gradient, slope, **EXACT)
    bounds = np.array([told[name] for name in ("clip_low", "clip_high", "clip_dual")])
    np.testing.assert_allclose(bounds.sum(), flat / own.sum(), **EXACT)
    assert (bounds > 0.02).all() if how == "clip" else (bounds == 0).all()
    ratios = np.exp(new - old)[apart]
    assert ((ratios > 0.8) & (ratios < 1.3)).any(), "some would have had a gradient"
    assert ((ratios < 0.8) | (ratios > 1.3)).any(), "and some none"


@pytest.mark.usefixtures("float64")
def test_the_log_ratio_of_the_highest_covariances_has_no_gradient_before_the_first_update():
    settings = with_remedies(GROUPS, remedies.kl_cov(0.15))
    own, advantage, old = random_rows()
    apart = selected_tokens("kl", 0.15, own, advantage, old)
    counts = denominators(jnp.asarray(own), SLOTS)

    def gradient(parts, apart):
        rows = LossInputs(*map(jnp.asarray, (own, old, advantage)), covariance_mask=jnp.asarray(apart))
        return jax.grad(lambda new: policy_loss(parts, settings.coefficients, Predictions(new), rows, counts)[0])(
            rows.old_log_prob
        )

    np.testing.assert_array_equal(
        gradient(settings.objective_config, apart), gradient(settings.objective_config, False & apart)
    )


# Lambdas.


def earned(seed=1):
    """Rewards, values and own tokens; NaN at given ones."""
    own = random_rows(seed)[0]
    reward, value = np.random.default_rng(seed).normal(size=(2, *own.shape))
    return np.where(own, reward, np.nan), np.where(own, value, np.nan), own


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("critic", [None, 0.6, "by row"])
def test_advantages_by_a_lambda_for_each_row_are_those_of_a_loop(critic):
    reward, value, own = earned()
    lam = np.random.default_rng(2).random(ROWS)
    of_critic = lam[::-1] if critic == "by row" else critic
    given = *map(jnp.asarray, (reward, value, own)), 0.9, jnp.asarray(lam)
    if critic is not None:
        given = *given, jnp.asarray(of_critic) if critic == "by row" else of_critic
    advantage, target = jax.jit(advantages.gae)(*given)
    np.testing.assert_allclose(advantage, advantages_by_loop(reward, value, own, 0.9, lam), **EXACT)
    rows = np.broadcast_to(lam if critic is None else of_critic, ROWS)
    expected = advantages_by_loop(reward, value, own, 0.9, rows) + np.where(own, value, 0)
    np.testing.assert_allclose(target, expected, **EXACT)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("critic", [None, 0.6])
def test_one_lambda_is_the_same_for_each_row_bit_for_bit(critic):
    reward, value, own = map(jnp.asarray, earned())
    of_rows = None if critic is None else jnp.full(ROWS, critic)
    one = advantages.gae(reward, value, own, 0.9, 0.7, critic)
    each = advantages.gae(reward, value, own, 0.9, jnp.full(ROWS, 0.7), of_rows)
    jax.tree.map(np.testing.assert_array_equal, one, each)
    expected = advantages_by_loop(*map(np.asarray, (reward, value, own)), 0.9, np.full(ROWS, 0.7))
    np.testing.assert_allclose(one[0], expected, **EXACT)


@pytest.mark.parametrize("scale", [0.05, 0.1, 0.5, 1.0, 3.0])
def test_the_lambda_of_a_row_follows_its_length(scale):
    lengths = [0, 1, 2, 5, 10, 19, 20, 21, 40, 400]
    own = np.arange(400) < np.array(lengths)[:, None]
    found = np.asarray(advantages.length_adaptive_lambda(jnp.asarray(own[:, ::-1]), jnp.float32(scale)))
    np.testing.assert_allclose(found, lambdas_by_length(own, scale), rtol=1e-6, atol=2e-7)
    assert (found >= 0).all()
    if scale == 0.05:
        np.testing.assert_allclose(found, [0, 0, 0, 0, 0, 0, 0, 1 / 21, 0.5, 0.95], atol=1e-6)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("scale", [0.05, 0.3])
def test_length_adaptive_lambda_is_of_the_advantages_and_leaves_the_critic_s_targets_alone(scale):
    settings = with_remedies(CRITIC, remedies.kl_in_reward(0.2), remedies.length_adaptive_lambda(scale))
    settings = dataclasses.replace(settings, gae_lambda=0.3, critic_lambda=0.6, gamma=0.9)
    assert settings.objective_config.adaptive_lambda
    assert not CRITIC.objective_config.adaptive_lambda
    _, value, own = earned()
    kept = np.array([True, True, False, True, True, True])
    score, penalty = np.random.default_rng(3).normal(size=ROWS), np.random.default_rng(4).normal(size=own.shape)
    advantage, target = estimate_advantages(
        settings.objective_config,
        settings.coefficients,
        jnp.asarray(score[:, None]),
        jnp.asarray(own),
        jnp.asarray(kept[:, None]),
        jnp.asarray(penalty),
        jnp.asarray(value),
    )
    own = own & kept[:, None]
    reward = -0.2 * penalty
    for row, slots in enumerate(map(np.flatnonzero, own)):
        reward[row, slots[-1:]] += score[row]
    lambdas = lambdas_by_length(own, scale)
    assert (lambdas > 0).any() == (scale > 0.05)
    expected = advantages_by_loop(reward, value, own, 0.9, lambdas)
    np.testing.assert_allclose(advantage, expected, rtol=1e-6, atol=1e-6)  # the lambdas are of float32
    targets = advantages_by_loop(reward, value, own, 0.9, np.full(ROWS, 0.6)) + np.where(own, value, 0)
    np.testing.assert_allclose(target, targets, **EXACT)


# Corrections.


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "one", [remedies.truncated_importance(1.3), remedies.masked_importance(1.3), remedies.sequence_mask(1.3)]
)
def test_corrections_weigh_the_gradient_of_each_token_as_a_loop_does(one):
    settings = with_remedies(GROUPS, one)
    own, advantage, old = random_rows()
    gap = 0.4 * np.random.default_rng(16).normal(size=own.shape)
    rows = jax.tree.map(jnp.asarray, LossInputs(own, old, advantage, rollout_log_prob=old - gap))
    counts = denominators(rows.loss_mask, SLOTS)
    gradient = jax.grad(
        lambda new: policy_loss(settings.objective_config, settings.coefficients, Predictions(new), rows, counts)[0]
    )(rows.old_log_prob)
    expected = np.zeros(own.shape)
    for row, slots in enumerate(map(np.flatnonzero, own)):
        of_row = math.exp(sum(gap[row, slots]))
        for slot in slots:
            weight = math.exp(gap[row, slot])
            if one.name == "truncated_importance":
                weight = min(weight, 1.3)
            elif one.name == "masked_importance":
                weight = weight if 1 / 1.3 <= weight <= 1.3 else 0.0
            else:
                weight = of_row if of_row <= 1.3 else 0.0
            expected[row, slot] = -weight * advantage[row, slot] / len(slots) / own.any(1).sum()
    np.testing.assert_allclose(gradient, expected, **EXACT)
    if one.name != "truncated_importance":
        dropped = (expected == 0)[own].mean()
        assert 0.1 < dropped < 0.9
    if one.name == "sequence_mask":
        of_rows = np.exp(np.where(own, gap, 0).sum(1))[own.any(1)]
        assert (of_rows < 0.5).any(), "rows below are not left out"
        assert loss_terms.CORRECTION_LEVELS.index(settings.correction_level) == 1
