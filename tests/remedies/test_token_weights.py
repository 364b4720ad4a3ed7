"""Tests weights and masks of tokens, row-wise lambdas and importance corrections against NumPy and plain loops."""

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
    settings_with_remedies,
)

from jaxaudit import remedies
from jaxaudit.learners.dialogue import advantages, loss_terms
from jaxaudit.learners.dialogue.advantages import estimate_advantages
from jaxaudit.learners.dialogue.factories import settings_of
from jaxaudit.learners.dialogue.loss_terms import denominators
from jaxaudit.learners.dialogue.policy_loss import LossInputs, Predictions, policy_loss

# Tokens selected by their covariance.


def selected_tokens(kind, share, response_mask, advantage, old, seed=0):
    return np.asarray(
        loss_terms.select_covariance_tokens(
            kind, share, *map(jnp.asarray, (advantage, old, response_mask)), jax.random.key(seed)
        )
    )


SHARES = (0.0, 0.01, 0.06, 0.2, 0.3, 1.0)


def token_count(share, response_mask):
    """Returns the number of tokens in a share of the response tokens."""
    return max(math.floor(share * response_mask.sum()), 1)


@pytest.mark.usefixtures("float64")
def test_token_covariance_is_a_product_of_deviations():
    response_mask, advantage, old = random_rows(poison=True)
    covariance = np.asarray(loss_terms.token_covariance(*map(jnp.asarray, (advantage, old, response_mask))))
    np.testing.assert_allclose(covariance, np.nan_to_num(covariances_by_loop(response_mask, advantage, old)), **EXACT)
    assert covariance.sum() / response_mask.sum() == pytest.approx(
        np.cov(advantage[response_mask], old[response_mask], ddof=0)[0, 1]
    )


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("seed", range(3))
def test_clip_cov_selects_a_share_among_covariances_between_1_and_5(share, seed):
    rows = random_rows(seed, poison=True)
    response_mask, values = rows[0], covariances_by_loop(*rows)
    eligible = response_mask & (values > 1) & (values < 5)
    assert response_mask.sum() * 0.1 < eligible.sum() < response_mask.sum() * 0.3, (
        "some shares exceed the eligible tokens"
    )
    assert (values[response_mask] > 5).any()
    selected = selected_tokens("clip", share, *rows, seed=seed)
    assert selected.sum() == min(token_count(share, response_mask), eligible.sum())
    assert not (selected & ~eligible).any()
    if share == 0.06:
        assert token_count(share, response_mask) < share * response_mask.sum() - 0.25, (
            "the number of tokens is rounded down"
        )


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("seed", range(3))
def test_kl_cov_selects_the_tokens_of_highest_covariance(share, seed):
    rows = random_rows(seed, poison=True)
    response_mask, values = rows[0], covariances_by_loop(*rows)
    selected = selected_tokens("kl", share, *rows, seed=seed)
    assert selected.sum() == token_count(share, response_mask)
    lowest = np.sort(values[response_mask])[::-1][token_count(share, response_mask) - 1]
    np.testing.assert_array_equal(selected, response_mask & (np.nan_to_num(values, nan=-np.inf) >= lowest))


@pytest.mark.usefixtures("float64")
def test_clip_cov_excludes_covariances_of_exactly_1_and_5():
    response_mask = np.array([[True, True, True, True, False]])
    advantage = np.array([[1.0, -1.0, 1.0, -1.0, 7.0]])
    for logs, expected in (([1.0, -1.0, 5.0, -5.0, 9.0], 0), ([1.25, -1.25, 4.75, -4.75, 9.0], 4)):
        old = np.array([logs])
        np.testing.assert_array_equal(
            np.abs(covariances_by_loop(response_mask, advantage, old)[response_mask]), np.abs(old[response_mask])
        )
        assert selected_tokens("clip", 1.0, response_mask, advantage, old).sum() == expected


@pytest.mark.usefixtures("float64")
def test_no_token_is_selected_if_none_is_eligible():
    response_mask, advantage, old = random_rows()
    assert not selected_tokens("clip", 0.5, response_mask, 0 * advantage, old).any()
    assert not selected_tokens("clip", 0.5, 0 * response_mask > 0, advantage, old).any()
    assert not selected_tokens("kl", 0.5, 0 * response_mask > 0, advantage, old).any()


@pytest.mark.usefixtures("float64")
def test_clip_cov_selects_uniformly_and_kl_cov_deterministically():
    response_mask, advantage, old = map(jnp.asarray, random_rows())
    values = covariances_by_loop(*random_rows())
    eligible = np.asarray(response_mask) & (values > 1) & (values < 5)
    share, draws = 0.05, 3000
    select_many = jax.jit(
        jax.vmap(
            lambda kind, key: loss_terms.select_covariance_tokens(kind, share, advantage, old, response_mask, key),
            in_axes=(None, 0),
        ),
        static_argnums=0,
    )
    keys = jax.random.split(jax.random.key(9), draws)
    selected = np.asarray(select_many("clip", keys))
    assert len(np.unique(selected.reshape(draws, -1), axis=0)) == math.comb(
        eligible.sum(), token_count(share, np.asarray(response_mask))
    )
    np.testing.assert_array_equal(selected, select_many("clip", keys))
    expected = draws * token_count(share, np.asarray(response_mask)) / eligible.sum()
    counts = selected.sum(0)[eligible]
    assert np.abs(counts - expected).max() < 5 * math.sqrt(expected)
    assert len(np.unique(np.asarray(select_many("kl", keys)).reshape(draws, -1), axis=0)) == 1


GROUP_SETTINGS = settings_of("grpo")(kl="none", kl_coefficient=0.0, dual_clip=1.5, clip_high=0.3)
COVARIANCE_REMEDIES = {"clip": remedies.clip_cov, "kl": remedies.kl_cov}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("aggregation", ["sequence", "token_minibatch"])
@pytest.mark.parametrize("kind", COVARIANCE_REMEDIES)
def test_loss_and_gradient_with_covariance_remedies_equal_a_loop(kind, aggregation):
    settings = settings_with_remedies(
        dataclasses.replace(GROUP_SETTINGS, aggregation=aggregation), COVARIANCE_REMEDIES[kind](0.15)
    )
    parts, coefficients = settings.objective_config, settings.coefficients
    assert (parts.covariance, coefficients.covariance_share) == (kind, 0.15)
    response_mask, advantage, old = random_rows(poison=True)
    new = np.where(response_mask, old + 0.8 * np.random.default_rng(7).normal(size=response_mask.shape), np.nan)
    selected = selected_tokens(kind, 0.15, response_mask, advantage, old)
    rows = jax.tree.map(jnp.asarray, LossInputs(response_mask, old, advantage, covariance_mask=selected))
    counts = denominators(rows.loss_mask, SLOTS)

    def loss(new):
        return policy_loss(parts, coefficients, Predictions(new), rows, counts)

    (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(new))
    losses, slope, n_clipped = np.zeros(response_mask.shape), np.zeros(response_mask.shape), 0
    lengths, n_rows = response_mask.sum(1), response_mask.any(1).sum()
    for n, t in zip(*np.nonzero(response_mask), strict=True):
        gain, log_ratio = advantage[n, t], new[n, t] - old[n, t]
        ratio = math.exp(log_ratio)
        weight = 1 / (lengths[n] * n_rows) if aggregation == "sequence" else 1 / response_mask.sum()
        if kind == "kl":
            objective, derivative = gain * ratio, gain * ratio
            if selected[n, t]:
                objective, derivative = objective - abs(log_ratio), derivative - math.copysign(1, log_ratio)
        else:
            bound = 1.3 if gain > 0 else 1.5 if ratio > 1.5 else 0.8
            is_clipped = ratio > 1.3 if gain > 0 else ratio > 1.5 or ratio < 0.8
            n_clipped += is_clipped
            objective, derivative = (gain * bound, 0.0) if is_clipped else (gain * ratio, gain * ratio)
            if selected[n, t]:
                objective, derivative = 0.0, 0.0
        losses[n, t], slope[n, t] = -weight * objective, -weight * derivative
    np.testing.assert_allclose(value, losses.sum(), **EXACT)
    np.testing.assert_allclose(gradient, slope, **EXACT)
    bounds = np.array([metrics[name] for name in ("clip_low", "clip_high", "clip_dual")])
    np.testing.assert_allclose(bounds.sum(), n_clipped / response_mask.sum(), **EXACT)
    assert (bounds > 0.02).all() if kind == "clip" else (bounds == 0).all()
    ratios = np.exp(new - old)[selected]
    assert ((ratios > 0.8) & (ratios < 1.3)).any(), "some selected tokens have ratios within the bounds"
    assert ((ratios < 0.8) | (ratios > 1.3)).any(), "some selected tokens have ratios beyond the bounds"


@pytest.mark.usefixtures("float64")
def test_kl_cov_does_not_change_the_gradient_of_the_first_update():
    settings = settings_with_remedies(GROUP_SETTINGS, remedies.kl_cov(0.15))
    response_mask, advantage, old = random_rows()
    selected = selected_tokens("kl", 0.15, response_mask, advantage, old)
    counts = denominators(jnp.asarray(response_mask), SLOTS)

    def gradient(parts, selected):
        rows = LossInputs(*map(jnp.asarray, (response_mask, old, advantage)), covariance_mask=jnp.asarray(selected))
        return jax.grad(lambda new: policy_loss(parts, settings.coefficients, Predictions(new), rows, counts)[0])(
            rows.old_log_prob
        )

    np.testing.assert_array_equal(
        gradient(settings.objective_config, selected), gradient(settings.objective_config, False & selected)
    )


# Lambdas.


def random_rewards_and_values(seed=1):
    """Returns rewards and values, NaN outside the response mask, and the mask."""
    response_mask = random_rows(seed)[0]
    reward, value = np.random.default_rng(seed).normal(size=(2, *response_mask.shape))
    return np.where(response_mask, reward, np.nan), np.where(response_mask, value, np.nan), response_mask


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("critic", [None, 0.6, "by row"])
def test_gae_with_a_lambda_per_row_equals_a_loop(critic):
    reward, value, response_mask = random_rewards_and_values()
    lam = np.random.default_rng(2).random(ROWS)
    critic_lambda = lam[::-1] if critic == "by row" else critic
    arguments = *map(jnp.asarray, (reward, value, response_mask)), 0.9, jnp.asarray(lam)
    if critic is not None:
        arguments = *arguments, jnp.asarray(critic_lambda) if critic == "by row" else critic_lambda
    advantage, target = jax.jit(advantages.gae)(*arguments)
    np.testing.assert_allclose(advantage, advantages_by_loop(reward, value, response_mask, 0.9, lam), **EXACT)
    rows = np.broadcast_to(lam if critic is None else critic_lambda, ROWS)
    expected = advantages_by_loop(reward, value, response_mask, 0.9, rows) + np.where(response_mask, value, 0)
    np.testing.assert_allclose(target, expected, **EXACT)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("critic", [None, 0.6])
def test_a_scalar_lambda_equals_equal_row_lambdas_bitwise(critic):
    reward, value, response_mask = map(jnp.asarray, random_rewards_and_values())
    critic_lambdas = None if critic is None else jnp.full(ROWS, critic)
    by_scalar = advantages.gae(reward, value, response_mask, 0.9, 0.7, critic)
    by_row = advantages.gae(reward, value, response_mask, 0.9, jnp.full(ROWS, 0.7), critic_lambdas)
    jax.tree.map(np.testing.assert_array_equal, by_scalar, by_row)
    expected = advantages_by_loop(*map(np.asarray, (reward, value, response_mask)), 0.9, np.full(ROWS, 0.7))
    np.testing.assert_allclose(by_scalar[0], expected, **EXACT)


@pytest.mark.parametrize("scale", [0.05, 0.1, 0.5, 1.0, 3.0])
def test_length_adaptive_lambda_follows_the_row_length(scale):
    lengths = [0, 1, 2, 5, 10, 19, 20, 21, 40, 400]
    response_mask = np.arange(400) < np.array(lengths)[:, None]
    lambdas = np.asarray(advantages.length_adaptive_lambda(jnp.asarray(response_mask[:, ::-1]), jnp.float32(scale)))
    np.testing.assert_allclose(lambdas, lambdas_by_length(response_mask, scale), rtol=1e-6, atol=2e-7)
    assert (lambdas >= 0).all()
    if scale == 0.05:
        np.testing.assert_allclose(lambdas, [0, 0, 0, 0, 0, 0, 0, 1 / 21, 0.5, 0.95], atol=1e-6)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("scale", [0.05, 0.3])
def test_length_adaptive_lambda_does_not_change_value_targets(scale):
    settings = settings_with_remedies(CRITIC, remedies.kl_in_reward(0.2), remedies.length_adaptive_lambda(scale))
    settings = dataclasses.replace(settings, gae_lambda=0.3, critic_lambda=0.6, gamma=0.9)
    assert settings.objective_config.adaptive_lambda
    assert not CRITIC.objective_config.adaptive_lambda
    _, value, loss_mask = random_rewards_and_values()
    row_mask = np.array([True, True, False, True, True, True])
    score, penalty = np.random.default_rng(3).normal(size=ROWS), np.random.default_rng(4).normal(size=loss_mask.shape)
    advantage, target = estimate_advantages(
        settings.objective_config,
        settings.coefficients,
        jnp.asarray(score[:, None]),
        jnp.asarray(loss_mask),
        jnp.asarray(row_mask[:, None]),
        jnp.asarray(penalty),
        jnp.asarray(value),
    )
    loss_mask = loss_mask & row_mask[:, None]
    reward = -0.2 * penalty
    for row, slots in enumerate(map(np.flatnonzero, loss_mask)):
        reward[row, slots[-1:]] += score[row]
    lambdas = lambdas_by_length(loss_mask, scale)
    assert (lambdas > 0).any() == (scale > 0.05)
    expected = advantages_by_loop(reward, value, loss_mask, 0.9, lambdas)
    np.testing.assert_allclose(advantage, expected, rtol=1e-6, atol=1e-6)  # lambdas are float32
    targets = advantages_by_loop(reward, value, loss_mask, 0.9, np.full(ROWS, 0.6)) + np.where(loss_mask, value, 0)
    np.testing.assert_allclose(target, targets, **EXACT)


# Corrections.


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "remedy", [remedies.truncated_importance(1.3), remedies.masked_importance(1.3), remedies.sequence_mask(1.3)]
)
def test_importance_corrections_weigh_gradients_as_a_loop(remedy):
    settings = settings_with_remedies(GROUP_SETTINGS, remedy)
    response_mask, advantage, old = random_rows()
    gap = 0.4 * np.random.default_rng(16).normal(size=response_mask.shape)
    rows = jax.tree.map(jnp.asarray, LossInputs(response_mask, old, advantage, rollout_log_prob=old - gap))
    counts = denominators(rows.loss_mask, SLOTS)
    gradient = jax.grad(
        lambda new: policy_loss(settings.objective_config, settings.coefficients, Predictions(new), rows, counts)[0]
    )(rows.old_log_prob)
    expected = np.zeros(response_mask.shape)
    for row, slots in enumerate(map(np.flatnonzero, response_mask)):
        row_ratio = math.exp(sum(gap[row, slots]))
        for slot in slots:
            weight = math.exp(gap[row, slot])
            if remedy.name == "truncated_importance":
                weight = min(weight, 1.3)
            elif remedy.name == "masked_importance":
                weight = weight if 1 / 1.3 <= weight <= 1.3 else 0.0
            else:
                weight = row_ratio if row_ratio <= 1.3 else 0.0
            expected[row, slot] = -weight * advantage[row, slot] / len(slots) / response_mask.any(1).sum()
    np.testing.assert_allclose(gradient, expected, **EXACT)
    if remedy.name != "truncated_importance":
        dropped = (expected == 0)[response_mask].mean()
        assert 0.1 < dropped < 0.9
    if remedy.name == "sequence_mask":
        row_ratios = np.exp(np.where(response_mask, gap, 0).sum(1))[response_mask.any(1)]
        assert (row_ratios < 0.5).any(), "some rows have small ratios, which are kept"
        assert settings.correction_level == "sequence"
