"""Remedies of learners on dialogues: what they make of an objective, against enumeration, NumPy and plain loops."""

import dataclasses
import functools
import itertools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errand import Errand, random_params

import jaxaudit as ja
from jaxaudit import remedies
from jaxaudit.core.taps import ROOT, Taps
from jaxaudit.learners.dialogue import advantages, loss_terms
from jaxaudit.learners.dialogue.advantages import estimate_advantages
from jaxaudit.learners.dialogue.collection import Models, sampled_entropy, tap_coefficients
from jaxaudit.learners.dialogue.factories import settings_of
from jaxaudit.learners.dialogue.loss_terms import Denominators, denominators
from jaxaudit.learners.dialogue.objective import ObjectiveConfig
from jaxaudit.learners.dialogue.policy_loss import LossInputs, Predictions, policy_loss
from jaxaudit.models import gpt2

EXACT = {"rtol": 1e-10, "atol": 1e-13}


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


def changed(settings, *chosen):
    """Settings with remedies that change them, as `ja.remedied` makes them."""
    for one in chosen:
        settings = dataclasses.replace(settings, **one.kind.settings(settings, one.strength))
    return settings


# The divergence from a reference: all sequences of three tokens out of three, by policies that are tables of logits.

WORDS, LENGTH, BETA = 3, 3, 0.07
EVERY = np.array(list(itertools.product(range(WORDS), repeat=LENGTH)))
PREFIXES = [prefix for length in range(LENGTH) for prefix in itertools.product(range(WORDS), repeat=length)]
BEFORE = np.array([[PREFIXES.index(tuple(row[:slot])) for slot in range(LENGTH)] for row in EVERY.tolist()])
"""The number of the prefix before each token, `[27, 3]`."""

POLICY, REFERENCE, BEHAVIOUR = np.random.default_rng(5).normal(size=(3, len(PREFIXES), WORDS))


def log_softmax(table):
    return table - np.log(np.exp(table).sum(-1, keepdims=True))


def of_tokens(table):
    """Log-probabilities of the tokens of all sequences, `[27, 3]`."""
    return log_softmax(table)[BEFORE, EVERY]


def probability(table):
    """Of each sequence, `[27]`."""
    return np.exp(of_tokens(table).sum(-1))


def scores(table):
    """The gradient of each token's log-probability by the table, `[27, 3, 13, 3]`."""
    found = np.zeros((*EVERY.shape, *table.shape))
    for row, slot in np.ndindex(EVERY.shape):
        prefix, token = BEFORE[row, slot], EVERY[row, slot]
        found[row, slot, prefix] = (np.arange(WORDS) == token) - np.exp(log_softmax(table)[prefix])
    return found


def exact_gradient():
    """That of KL(policy || reference) of whole sequences, by recursion from the last token to the first."""
    logs, gap = log_softmax(POLICY), log_softmax(POLICY) - log_softmax(REFERENCE)
    gradient = np.zeros(POLICY.shape)

    def ahead(prefix, chance):
        if len(prefix) == LENGTH:
            return 0.0
        number = PREFIXES.index(prefix)
        each = np.exp(logs[number])
        value = gap[number] + [ahead((*prefix, token), chance * each[token]) for token in range(WORDS)]
        gradient[number] = chance * each * (value - each @ value)
        return each @ value

    return ahead((), 1.0), gradient


def gradient_of_prefixes(table):
    """That of the tokens' KL(policy || reference) where the prefixes are those of another policy, and stay."""
    gradient = np.zeros(POLICY.shape)
    logs, other = log_softmax(POLICY), log_softmax(table)
    gap = logs - log_softmax(REFERENCE)
    for number, prefix in enumerate(PREFIXES):
        steps = [(PREFIXES.index(prefix[:slot]), token) for slot, token in enumerate(prefix)]
        chance = math.exp(sum(other[place] for place in steps))
        each = np.exp(logs[number])
        gradient[number] = chance * each * (gap[number] - each @ gap[number])
    return gradient


def error(gradient, expected):
    """Relative to what is expected."""
    return np.linalg.norm(gradient - expected) / np.linalg.norm(expected)


CRITIC = settings_of("ppo_lm")(
    whiten=False, gae_lambda=1.0, aggregation="constant", kl="none", kl_coefficient=0.0, value_coefficient=0.0
)
"""A critic that knows nothing, and so a return from each token on; a row's loss is the sum of its tokens'."""


def of_sequences(settings, behaviour=None):
    """What the library makes the gradient of each sequence's loss at `POLICY`, `[27, 13, 3]`, where no row earns more
    than another; on policy, or of a loss alone on what another policy has written.
    """
    parts, coefficients = settings.objective_config, settings.coefficients
    own, zeros = jnp.ones(EVERY.shape, bool), jnp.zeros(EVERY.shape)
    old = jnp.asarray(of_tokens(POLICY if behaviour is None else behaviour))
    reference, anchor = jnp.asarray(of_tokens(REFERENCE)), log_softmax(REFERENCE)
    penalty = loss_terms.KL_ESTIMATORS[parts.kl](old, reference) if parts.kl_in_reward else None
    assert behaviour is None or penalty is None
    score = jnp.zeros((len(EVERY), 1))
    advantage, target = estimate_advantages(parts, coefficients, score, own, kl_penalty=penalty, value=zeros)
    rows = LossInputs(own, old, advantage, ref_log_prob=reference, old_value=zeros, value_target=target)
    counts = Denominators(tokens=1, rows=1, tokens_per_minibatch=1, max_response_tokens=1)

    def losses(table):
        every = jax.nn.log_softmax(table)
        divergence = jnp.sum(jnp.exp(every) * (every - anchor), -1)
        now = Predictions(every[BEFORE, EVERY], value=zeros, exact_kl=divergence[BEFORE])

        def loss(now, rows):
            alone = lambda x: x[None]  # noqa: E731
            return policy_loss(parts, coefficients, jax.tree.map(alone, now), jax.tree.map(alone, rows), counts)[0]

        return jax.vmap(loss)(now, rows)

    return np.asarray(jax.jacobian(losses)(jnp.asarray(POLICY)))


SLOPES = {"k1": lambda gap: 1.0 + 0 * gap, "k2": lambda gap: gap, "k3": lambda gap: 1 - np.exp(-gap)}
VALUES = {"k1": lambda gap: gap, "k2": lambda gap: gap**2 / 2, "k3": lambda gap: np.exp(-gap) - 1 + gap}


def by_hand(settings, behaviour=None):
    """The same from the estimators' values and slopes, in NumPy."""
    gap = of_tokens(POLICY) - of_tokens(REFERENCE)
    ratio = np.exp(of_tokens(POLICY) - of_tokens(POLICY if behaviour is None else behaviour))
    value, slope = VALUES[settings.kl](gap), SLOPES[settings.kl](gap)
    weight = np.zeros(gap.shape)
    if settings.kl_in in ("loss", "both"):
        weight += {"none": slope, "stopped_ratio": ratio * slope, "ratio": ratio * (slope + value)}[settings.kl_weight]
    if settings.kl_in in ("reward", "both"):
        weight += np.flip(np.cumsum(np.flip(value, -1), -1), -1)  # from this token on
    return settings.kl_coefficient * np.einsum("nt,ntpv->npv", weight, scores(POLICY))


def placed(estimator, where, weight="none"):
    return dataclasses.replace(CRITIC, kl=estimator, kl_in=where, kl_weight=weight, kl_coefficient=BETA)


REMEDIES = ("kl_in_reward", "kl_in_both", "kl_off_policy")


def with_remedy(name, base=CRITIC):
    return changed(base, getattr(remedies, name)(BETA))


ON_POLICY = {
    "kl_in_reward": (with_remedy("kl_in_reward"), 0.0),
    "kl_in_both": (with_remedy("kl_in_both"), 0.0),
    "k3 in both": (placed("k3", "both"), 0.0),
    "k1 in the loss": (placed("k1", "loss"), 1.0),
    "k2 in the reward": (placed("k2", "reward"), None),
    "k2 in the loss": (placed("k2", "loss"), None),
    "k2 in both": (placed("k2", "both"), None),
    "k3 in the reward": (placed("k3", "reward"), None),
    "k3 in the loss": (placed("k3", "loss"), None),
    "k3 in the loss by the ratio": (placed("k3", "loss", "ratio"), None),
    "kl_off_policy": (with_remedy("kl_off_policy"), None),
}
"""Placements, and their error relative to the gradient of the sequence's divergence: None where they have a bias."""


def test_the_exact_gradient_is_that_of_the_divergence():
    """Of the reference itself: against the definition, and differences of it."""

    def divergence(table):
        return np.sum(probability(table) * np.sum(of_tokens(table) - of_tokens(REFERENCE), -1))

    value, gradient = exact_gradient()
    assert value == pytest.approx(divergence(POLICY), rel=1e-12)
    step = 1e-5
    for place in np.ndindex(POLICY.shape):
        moved = np.zeros(POLICY.shape)
        moved[place] = step
        slope = (divergence(POLICY + moved) - divergence(POLICY - moved)) / (2 * step)
        assert gradient[place] == pytest.approx(slope, abs=1e-9)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ON_POLICY)
def test_on_policy_the_gradient_of_a_divergence_is_as_biased_as_where_it_stands(name):
    """Of every sequence what its estimators say, and in expectation the true one or not."""
    settings, expected = ON_POLICY[name]
    found = of_sequences(settings)
    np.testing.assert_allclose(found, by_hand(settings), **EXACT)
    mean = np.einsum("n,npv->pv", probability(POLICY), found)
    off = error(mean / BETA, exact_gradient()[1])
    if expected is None:
        assert off > 0.1
    else:
        assert off == pytest.approx(expected, abs=1e-12)
    if name == "k1 in the loss":
        assert np.abs(found).max() > 0.1 * BETA
        np.testing.assert_allclose(mean, 0.0, atol=1e-15)


@pytest.mark.usefixtures("float64")
def test_k1_in_both_is_more_than_k1_in_the_reward_of_each_sequence_though_not_in_expectation():
    both, reward = (of_sequences(with_remedy(name)) for name in ("kl_in_both", "kl_in_reward"))
    np.testing.assert_allclose(both - reward, BETA * scores(POLICY).sum(1), **EXACT)


@pytest.mark.usefixtures("float64")
def test_what_k3_times_the_ratio_leaves_out_on_policy_is_what_a_token_does_to_the_prefixes_after_it():
    tokens = gradient_of_prefixes(POLICY)
    for settings in (
        with_remedy("kl_off_policy"),
        placed("k2", "loss"),
        dataclasses.replace(CRITIC, kl="exact", kl_in="loss", kl_coefficient=BETA),
    ):
        mean = np.einsum("n,npv->pv", probability(POLICY), of_sequences(settings))
        assert error(mean / BETA, tokens) < 1e-12
    assert error(tokens, exact_gradient()[1]) > 0.1
    of_last_tokens = [number for number, prefix in enumerate(PREFIXES) if len(prefix) == LENGTH - 1]
    np.testing.assert_allclose(tokens[of_last_tokens], exact_gradient()[1][of_last_tokens], **EXACT)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("settings", "right"),
    [
        (with_remedy("kl_off_policy"), True),
        (placed("k1", "loss", "ratio"), True),
        (placed("k2", "loss", "stopped_ratio"), True),
        (placed("k2", "loss"), False),
        (placed("k3", "loss"), False),
        (placed("k2", "loss", "ratio"), False),
        (placed("k3", "loss", "stopped_ratio"), False),
    ],
    ids=lambda given: " ".join((given.kl, given.kl_weight)) if hasattr(given, "kl") else "",
)
def test_off_policy_the_gradient_is_that_of_tokens_on_the_behaviour_s_prefixes(settings, right):
    found = of_sequences(settings, BEHAVIOUR)
    np.testing.assert_allclose(found, by_hand(settings, BEHAVIOUR), **EXACT)
    mean = np.einsum("n,npv->pv", probability(BEHAVIOUR), found) / BETA
    off = error(mean, gradient_of_prefixes(BEHAVIOUR))
    assert off < 1e-12 if right else off > 0.1
    if right:
        assert error(mean, gradient_of_prefixes(POLICY)) > 0.1, "of other prefixes than the policy's"


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("preset", "name", "share"),
    [("rloo", "kl_in_reward", 1.0), ("rloo", "kl_in_both", 1.0), ("dr_grpo", "kl_in_reward", 0.5)],
)
def test_compared_with_another_row_the_gradient_is_still_the_divergence_s(preset, name, share):
    """All pairs of sequences: leaving a row out of its baseline is right, and the mean of two rows takes half of it."""
    settings = with_remedy(name, dataclasses.replace(settings_of(preset)(), group_size=2))
    parts, coefficients = settings.objective_config, settings.coefficients
    pairs = np.array(list(itertools.product(range(len(EVERY)), repeat=2)))
    index = pairs.reshape(-1)
    own = jnp.ones((len(index), LENGTH), bool)
    old, reference = (jnp.asarray(of_tokens(table)[index]) for table in (POLICY, REFERENCE))
    penalty = loss_terms.KL_ESTIMATORS[parts.kl](old, reference)
    advantage, _ = estimate_advantages(parts, coefficients, jnp.zeros(pairs.shape), own, kl_penalty=penalty)
    rows = LossInputs(own, old, advantage, ref_log_prob=reference)
    chance = jnp.asarray(np.prod(probability(POLICY)[pairs], -1))
    counts = Denominators(tokens=2 * LENGTH, rows=2, tokens_per_minibatch=2 * LENGTH, max_response_tokens=1)

    def expectation(table):
        new = jax.nn.log_softmax(table)[BEFORE, EVERY][index]
        two = lambda x: x.reshape(-1, 2, LENGTH)  # noqa: E731

        def loss(now, rows):
            return policy_loss(parts, coefficients, now, rows, counts)[0]

        return jnp.sum(chance * jax.vmap(loss)(jax.tree.map(two, Predictions(new)), jax.tree.map(two, rows)))

    gradient = np.asarray(jax.grad(expectation)(jnp.asarray(POLICY)))
    assert error(gradient / BETA, share * exact_gradient()[1]) < 1e-12


# Tokens that are treated apart for their covariance.

ROWS, SLOTS = 6, 20


def batch(seed=0, poison=False):
    """Own tokens of uneven rows with given ones between them, a row of given ones alone, advantages, log-probabilities;
    with `poison` what is at given tokens is NaN."""
    random = np.random.default_rng(seed)
    own = random.random((ROWS, SLOTS)) < np.array([0.9, 0.7, 0.5, 0.3, 0.0, 0.6])[:, None]
    advantage = 1.0 + 1.6 * random.normal(size=own.shape)
    old = -2.0 + 1.6 * random.normal(size=own.shape)
    if poison:
        advantage, old = (np.where(own, x, np.nan) for x in (advantage, old))
    return own, advantage, old


def covariances(own, advantage, old):
    """By a loop over own tokens; NaN at given ones."""
    places = [(n, t) for n, t in np.ndindex(own.shape) if own[n, t]]
    mean_advantage = sum(advantage[place] for place in places) / len(places)
    mean_old = sum(old[place] for place in places) / len(places)
    found = np.full(own.shape, np.nan)
    for place in places:
        found[place] = (advantage[place] - mean_advantage) * (old[place] - mean_old)
    return found


def chosen(how, share, own, advantage, old, seed=0):
    return np.asarray(
        loss_terms.select_covariance_tokens(how, share, *map(jnp.asarray, (advantage, old, own)), jax.random.key(seed))
    )


SHARES = (0.0, 0.01, 0.06, 0.2, 0.3, 1.0)


def asked(share, own):
    """How many tokens a share of the own ones is."""
    return max(math.floor(share * own.sum()), 1)


@pytest.mark.usefixtures("float64")
def test_the_covariance_is_a_product_of_deviations_over_own_tokens():
    own, advantage, old = batch(poison=True)
    found = np.asarray(loss_terms.token_covariance(*map(jnp.asarray, (advantage, old, own))))
    np.testing.assert_allclose(found, np.nan_to_num(covariances(own, advantage, old)), **EXACT)
    assert found.sum() / own.sum() == pytest.approx(np.cov(advantage[own], old[own], ddof=0)[0, 1])


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("seed", range(3))
def test_clip_cov_takes_a_share_of_own_tokens_among_those_of_covariance_between_one_and_five(share, seed):
    given = batch(seed, poison=True)
    own, values = given[0], covariances(*given)
    eligible = own & (values > 1) & (values < 5)
    assert own.sum() * 0.1 < eligible.sum() < own.sum() * 0.3, "so that there may be too few"
    assert (values[own] > 5).any()
    found = chosen("clip", share, *given, seed=seed)
    assert found.sum() == min(asked(share, own), eligible.sum())
    assert not (found & ~eligible).any()
    if share == 0.06:
        assert asked(share, own) < share * own.sum() - 0.25, "rounded down"


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("seed", range(3))
def test_kl_cov_takes_the_own_tokens_of_highest_covariance(share, seed):
    given = batch(seed, poison=True)
    own, values = given[0], covariances(*given)
    found = chosen("kl", share, *given, seed=seed)
    assert found.sum() == asked(share, own)
    lowest = np.sort(values[own])[::-1][asked(share, own) - 1]
    np.testing.assert_array_equal(found, own & (np.nan_to_num(values, nan=-np.inf) >= lowest))


@pytest.mark.usefixtures("float64")
def test_a_covariance_of_exactly_one_or_five_is_not_between_them():
    own = np.array([[True, True, True, True, False]])
    advantage = np.array([[1.0, -1.0, 1.0, -1.0, 7.0]])
    for logs, expected in (([1.0, -1.0, 5.0, -5.0, 9.0], 0), ([1.25, -1.25, 4.75, -4.75, 9.0], 4)):
        old = np.array([logs])
        np.testing.assert_array_equal(np.abs(covariances(own, advantage, old)[own]), np.abs(old[own]))
        assert chosen("clip", 1.0, own, advantage, old).sum() == expected


@pytest.mark.usefixtures("float64")
def test_where_no_token_is_eligible_clip_cov_takes_none():
    own, advantage, old = batch()
    assert not chosen("clip", 0.5, own, 0 * advantage, old).any()
    assert not chosen("clip", 0.5, 0 * own > 0, advantage, old).any()
    assert not chosen("kl", 0.5, 0 * own > 0, advantage, old).any()


@pytest.mark.usefixtures("float64")
def test_clip_cov_takes_any_of_the_eligible_tokens_as_often_as_another_and_kl_cov_draws_nothing():
    own, advantage, old = map(jnp.asarray, batch())
    values = covariances(*batch())
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
    assert len(np.unique(found.reshape(draws, -1), axis=0)) == math.comb(eligible.sum(), asked(share, np.asarray(own)))
    np.testing.assert_array_equal(found, many("clip", keys))
    expected = draws * asked(share, np.asarray(own)) / eligible.sum()
    often = found.sum(0)[eligible]
    assert np.abs(often - expected).max() < 5 * math.sqrt(expected)
    assert len(np.unique(np.asarray(many("kl", keys)).reshape(draws, -1), axis=0)) == 1


GROUPS = settings_of("grpo")(kl="none", kl_coefficient=0.0, dual_clip=1.5, clip_high=0.3)
TREATMENTS = {"clip": remedies.clip_cov, "kl": remedies.kl_cov}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("aggregation", ["sequence", "token_minibatch"])
@pytest.mark.parametrize("how", TREATMENTS)
def test_tokens_treated_apart_have_no_gradient_or_that_of_their_log_ratio_and_no_clipping_anywhere(how, aggregation):
    settings = changed(dataclasses.replace(GROUPS, aggregation=aggregation), TREATMENTS[how](0.15))
    parts, coefficients = settings.objective_config, settings.coefficients
    assert (parts.covariance, coefficients.covariance_share) == (how, 0.15)
    own, advantage, old = batch(poison=True)
    new = np.where(own, old + 0.8 * np.random.default_rng(7).normal(size=own.shape), np.nan)
    apart = chosen(how, 0.15, own, advantage, old)
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
    settings = changed(GROUPS, remedies.kl_cov(0.15))
    own, advantage, old = batch()
    apart = chosen("kl", 0.15, own, advantage, old)
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


def by_loop(reward, value, own, gamma, lambdas):
    """Advantages of own tokens, row by row from the last one back; zero at given ones."""
    found = np.zeros(own.shape)
    for row, slots in enumerate(map(np.flatnonzero, own)):
        after = ahead = 0.0
        for slot in slots[::-1]:
            after = reward[row, slot] + gamma * ahead - value[row, slot] + gamma * lambdas[row] * after
            ahead, found[row, slot] = value[row, slot], after
    return found


def lambdas_of(own, scale):
    """By the length of each row; 0 of one without own tokens."""
    return np.array([max(0.0, 1 - 1 / (scale * tokens)) if tokens else 0.0 for tokens in own.sum(1).tolist()])


def earned(seed=1):
    """Rewards, values and own tokens; NaN at given ones."""
    own = batch(seed)[0]
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
    np.testing.assert_allclose(advantage, by_loop(reward, value, own, 0.9, lam), **EXACT)
    rows = np.broadcast_to(lam if critic is None else of_critic, ROWS)
    expected = by_loop(reward, value, own, 0.9, rows) + np.where(own, value, 0)
    np.testing.assert_allclose(target, expected, **EXACT)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("critic", [None, 0.6])
def test_one_lambda_is_the_same_for_each_row_bit_for_bit(critic):
    reward, value, own = map(jnp.asarray, earned())
    of_rows = None if critic is None else jnp.full(ROWS, critic)
    one = advantages.gae(reward, value, own, 0.9, 0.7, critic)
    each = advantages.gae(reward, value, own, 0.9, jnp.full(ROWS, 0.7), of_rows)
    jax.tree.map(np.testing.assert_array_equal, one, each)
    expected = by_loop(*map(np.asarray, (reward, value, own)), 0.9, np.full(ROWS, 0.7))
    np.testing.assert_allclose(one[0], expected, **EXACT)


@pytest.mark.parametrize("scale", [0.05, 0.1, 0.5, 1.0, 3.0])
def test_the_lambda_of_a_row_follows_its_length(scale):
    lengths = [0, 1, 2, 5, 10, 19, 20, 21, 40, 400]
    own = np.arange(400) < np.array(lengths)[:, None]
    found = np.asarray(advantages.length_adaptive_lambda(jnp.asarray(own[:, ::-1]), jnp.float32(scale)))
    np.testing.assert_allclose(found, lambdas_of(own, scale), rtol=1e-6, atol=2e-7)
    assert (found >= 0).all()
    if scale == 0.05:
        np.testing.assert_allclose(found, [0, 0, 0, 0, 0, 0, 0, 1 / 21, 0.5, 0.95], atol=1e-6)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("scale", [0.05, 0.3])
def test_length_adaptive_lambda_is_of_the_advantages_and_leaves_the_critic_s_targets_alone(scale):
    settings = changed(CRITIC, remedies.kl_in_reward(0.2), remedies.length_adaptive_lambda(scale))
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
    lambdas = lambdas_of(own, scale)
    assert (lambdas > 0).any() == (scale > 0.05)
    expected = by_loop(reward, value, own, 0.9, lambdas)
    np.testing.assert_allclose(advantage, expected, rtol=1e-6, atol=1e-6)  # the lambdas are of float32
    targets = by_loop(reward, value, own, 0.9, np.full(ROWS, 0.6)) + np.where(own, value, 0)
    np.testing.assert_allclose(target, targets, **EXACT)


# Corrections.


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "one", [remedies.truncated_importance(1.3), remedies.masked_importance(1.3), remedies.sequence_mask(1.3)]
)
def test_corrections_weigh_the_gradient_of_each_token_as_a_loop_does(one):
    settings = changed(GROUPS, one)
    own, advantage, old = batch()
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


# Learners with remedies.

FEW = {"size": "tiny", "prompts": 4, "group_size": 4, "epochs": 1, "minibatches": 1, "microbatches": 1}
FEW |= {"performance_rows": 2, "warm_start": 0, "telemetry": "basic"}


@pytest.fixture(autouse=True, scope="module")
def tiny():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(gpt2.SIZES, "tiny", gpt2.Size(16, 1, 2))
        yield


@functools.cache
def learner(preset, **settings):
    few = FEW | ({"group_size": 2} if preset == "dpo" else {})
    return getattr(ja.learners, preset)(Errand(), **few | settings)


def inside(one):
    """The learner on a dialogue within one that remedies may act in."""
    made = one.step.__self__
    return getattr(made, "learner", one).step.__self__


TIS = {"correction": "tis", "correction_level": "token"}
MIS = {"correction": "mis", "correction_level": "token"}
OF_SEQUENCES = {"correction": "mis", "correction_level": "sequence"}
IN_REWARD = {"kl": "k1", "kl_in": "reward", "kl_weight": "none"}
IN_LOSS = {"kl": "k3", "kl_in": "loss", "kl_weight": "ratio"}
SETTINGS = [
    ("grpo", "dual_clip", 4.0, {}, {"dual_clip": 4.0}),
    ("ppo_lm", "dual_clip", None, {}, {"dual_clip": 3.0}),
    ("grpo", "truncated_importance", None, TIS, {"tis_cap": 2.0}),
    ("ppo_lm", "truncated_importance", 1.5, TIS, {"tis_cap": 1.5}),
    ("grpo", "masked_importance", None, MIS, {"mis_low": 0.5, "mis_high": 2.0}),
    ("grpo", "masked_importance", 4.0, MIS, {"mis_low": 0.25, "mis_high": 4.0}),
    ("grpo", "sequence_mask", None, OF_SEQUENCES, {"mis_low": 0.0, "mis_high": 3.0}),
    ("ppo_lm", "sequence_mask", 1.5, OF_SEQUENCES, {"mis_low": 0.0, "mis_high": 1.5}),
    ("grpo", "clip_cov", None, {"covariance": "clip"}, {"covariance_share": 0.01}),
    ("ppo_lm", "kl_cov", 0.02, {"covariance": "kl"}, {"covariance_share": 0.02}),
    ("grpo", "kl_in_reward", None, IN_REWARD, {"kl_coefficient": 0.05}),
    ("grpo", "kl_in_both", None, IN_REWARD | {"kl_in": "both"}, {"kl_coefficient": 0.05}),
    ("ppo_lm", "kl_off_policy", 0.1, IN_LOSS, {"kl_coefficient": 0.1}),
    ("ppo_lm", "length_adaptive_lambda", None, {"adaptive_lambda": True}, {"gae_lambda_length": 0.05}),
    ("ppo_lm", "value_pretraining", 7, {}, {}),
    ("grpo", "adaptive_entropy", None, {"entropy": True}, {"entropy_coefficient": 1e-30}),
]
SLOW_TO_TRACE = ("adaptive_entropy",)


@pytest.mark.parametrize(("preset", "name", "strength", "parts", "coefficients"), SETTINGS)
def test_a_learner_with_a_remedy_has_its_parts_and_coefficients_and_no_others(
    preset, name, strength, parts, coefficients
):
    base = learner(preset)
    one = ja.remedied(base, getattr(remedies, name)(strength))
    before, after = inside(base), inside(one)
    assert after.config == dataclasses.replace(before.config, **parts)
    data = one.data.learner if name in SLOW_TO_TRACE else one.data
    expected = dataclasses.replace(base.data.numbers.objective, **coefficients)
    expected = dataclasses.replace(base.data.numbers, objective=jax.tree.map(np.float32, expected))
    for found, wanted in zip(jax.tree.leaves(data.numbers), jax.tree.leaves(expected), strict=True):
        assert (found, found.dtype) == (wanted, np.float32)
    assert after.settings.critic_warm_start == (7 if name == "value_pretraining" else 0)


def test_a_pretrained_critic_is_trained_for_2000_updates_unless_told_otherwise():
    one = ja.remedied(learner("ppo_lm"), remedies.value_pretraining())
    assert inside(one).settings.critic_warm_start == 2000
    assert inside(one).config == inside(learner("ppo_lm")).config


NUMBERS = [(preset, name) for preset, name, *_ in SETTINGS if name not in ("value_pretraining", *SLOW_TO_TRACE)]


@pytest.mark.parametrize(("preset", "name"), sorted(set(NUMBERS)))
def test_strengths_that_are_numbers_share_a_program(preset, name):
    kind = getattr(remedies, name)
    low, high = (0.3, 0.6) if kind.limits[1] <= 1 or name.startswith(("kl_", "length")) else (2.0, 3.0)
    one, other = (ja.remedied(learner(preset), kind(strength)) for strength in (low, high))
    assert one.step == other.step
    assert one.init == other.init
    assert one.without_data == other.without_data
    leaves = zip(jax.tree.leaves(one.data), jax.tree.leaves(other.data), strict=True)
    assert sum(bool(a != b) for a, b in leaves) >= 1
    if name != "dual_clip":
        assert one.step != learner(preset).step


def test_strengths_that_are_structure_do_not():
    one, other, again = (ja.remedied(learner("ppo_lm"), remedies.value_pretraining(n)) for n in (3, 4, 3))
    assert one.step != other.step
    assert one.step == again.step


def test_remedies_of_settings_add_up():
    one = ja.remedied(learner("ppo_lm"), remedies.kl_in_both(), remedies.length_adaptive_lambda(), remedies.kl_cov())
    nested = ja.remedied(ja.remedied(learner("ppo_lm"), remedies.kl_in_both()), remedies.length_adaptive_lambda())
    nested = ja.remedied(nested, remedies.kl_cov())
    assert one.without_data == nested.without_data
    assert isinstance(inside(one).config, ObjectiveConfig)
    found = inside(one).config
    assert (found.kl_in, found.adaptive_lambda, found.covariance) == ("both", True, "kl")


@pytest.mark.parametrize(
    ("preset", "remedy", "number", "strengths"),
    [
        ("grpo", remedies.clip_higher, "clip_high", {0.28: 0.28, 0.0: 0.15, 2.0: 2.0}),
        ("ppo_lm", remedies.decoupled_lambda, "critic_lambda", {1.0: 1.0, 0.0: 0.7, 0.3: 0.3}),
    ],
)
def test_a_remedy_of_a_coefficient_changes_that_one_alone(preset, remedy, number, strengths):
    """The neutral strength, 0, leaves it."""
    settings = settings_of(preset)(clip_low=0.1, clip_high=0.15, gae_lambda=0.8, critic_lambda=0.7)
    coefficients = jax.tree.map(jnp.float32, settings.coefficients)
    for strength, expected in strengths.items():
        taps = Taps().with_remedies(((remedy, jnp.float32(strength)),), {}, None)
        found = tap_coefficients(settings.objective_config, coefficients, taps)
        changes = dataclasses.replace(coefficients, **{number: jnp.float32(expected)})
        jax.tree.map(np.testing.assert_array_equal, found, changes)
    assert remedies.clip_higher().strength == 0.28


# The entropy bonus that adapts.


@pytest.mark.parametrize("target", [0.2, 1.0, 30.0])
def test_the_coefficient_of_entropy_rises_below_the_target_and_falls_above_it_within_its_bounds(target):
    random = np.random.default_rng(3)
    entropies = np.float32(target + np.where(np.arange(900) < 450, -0.01, 0.012) * (random.random(900) - 0.1))
    entropies[[5, 6, 700]] = np.float32(target)  # exactly there it falls, and still acts
    kind = remedies.adaptive_entropy

    def step(state, entropy):
        value, state = kind.apply(jnp.float32(0.3), jnp.float32(target), state, entropy=lambda: entropy)
        return state, (value, state)

    used, kept = jax.lax.scan(step, kind.init(jnp.zeros(())), jnp.asarray(entropies))[1]
    state, expected = 0.0, []
    for entropy in entropies:
        state = min(max(state + (0.005 if entropy < np.float32(target) else -0.005), 0.0), 1.0)
        expected.append((state if entropy <= np.float32(target) else 0.0, state))
    np.testing.assert_allclose(np.stack([used, kept], 1), expected, atol=1e-4)
    assert max(state for _, state in expected) == 1.0
    assert min(state for _, state in expected[450:]) == 0.0
    found = np.asarray(used)
    assert ((found > 0) == (np.array(expected)[:, 0] > 2e-4)).mean() > 0.99
    assert (found[entropies > np.float32(target)] == 0).all()


def test_the_entropy_that_is_read_is_the_mean_of_what_own_tokens_were_sampled_with():
    own, _, logs = batch()
    rows = SimpleNamespace(response_mask=jnp.asarray(own), log_prob=jnp.asarray(np.where(own, logs, np.nan)))
    assert float(sampled_entropy(rows)) == pytest.approx(-logs[own].mean(), rel=1e-6)
    nothing = SimpleNamespace(response_mask=jnp.zeros(own.shape, bool), log_prob=rows.log_prob)
    assert float(sampled_entropy(nothing)) == 0


@pytest.mark.parametrize("weight", [0.0, 0.02])
def test_a_learner_gets_a_bonus_that_weighs_nothing_unless_it_has_one(weight):
    settings = settings_of("grpo")(entropy_coefficient=weight)
    after = changed(settings, remedies.adaptive_entropy())
    assert after.objective_config.entropy_bonus
    assert after.coefficients.entropy_coefficient == (weight or 1e-30)
    assert changed(after, remedies.adaptive_entropy()) == after


STEPS = 3


def trained(one, steps=STEPS):
    """`trained(data)`: telemetry of one lane, `[steps, ...]`, and its last state; compiled once."""
    begin = jax.jit(one.begin)
    step = jax.jit(lambda state, key, t, data: one.step(state, key, Taps(t, steps, data=data)))

    def run(data):
        state, told = begin(jax.random.key(3), data), []
        for t in range(steps):
            state, now = step(state, jax.random.fold_in(jax.random.key(4), t), jnp.int32(t), data)
            told.append(now)
        return jax.tree.map(lambda *x: np.stack(x), *told), state

    return run


@functools.cache
def with_adaptive_entropy():
    """Lanes of one key, with and without the remedy, by its target."""
    one = ja.remedied(learner("grpo", learning_rate=5e-3), remedies.adaptive_entropy())
    run = trained(one)
    targets = {"neutral": 0.0, "above": 50.0, "below": 1e-3}
    strengths = {name: {"adaptive_entropy": np.float32(target)} for name, target in targets.items()}
    return {name: run(dataclasses.replace(one.data, strengths=each)) for name, each in strengths.items()}


@pytest.mark.exhaustive
def test_a_policy_of_less_entropy_than_it_should_have_is_paid_for_it_more_with_every_step():
    lanes = with_adaptive_entropy()
    kept = {name: float(state.remedies["adaptive_entropy"][ROOT]) for name, (_, state) in lanes.items()}
    assert kept == pytest.approx({"neutral": 0.0, "above": 0.005 * STEPS, "below": 0.0})
    neutral, above, below = (told for told, _ in lanes.values())
    entropy = neutral["entropy"][0, 0]
    assert entropy > 1
    np.testing.assert_array_equal(above["entropy"][0], neutral["entropy"][0])
    # In the first step lanes have the same rows and parameters.
    np.testing.assert_allclose(above["loss"][0] - neutral["loss"][0], -0.005 * entropy, rtol=1e-4)
    assert (above["params_norm"] != neutral["params_norm"]).all()
    acted = {name: list(told.pop("acted_adaptive_entropy")) for name, (told, _) in lanes.items()}
    assert acted == {"neutral": STEPS * [0.0], "above": STEPS * [1.0], "below": STEPS * [1.0]}
    for name, x in neutral.items():
        np.testing.assert_array_equal(below[name], x, err_msg=f"{name}: there is no bonus above the target")


@pytest.mark.exhaustive
def test_without_strength_the_adaptive_bonus_is_none():
    """To rounding: it is another program."""
    told, state = with_adaptive_entropy()["neutral"]
    plain = learner("grpo", learning_rate=5e-3)
    expected, before = trained(plain)(plain.data)
    assert set(told) - set(expected) <= {"acted_adaptive_entropy"}
    for name, x in expected.items():
        np.testing.assert_allclose(told[name], x, rtol=1e-6, atol=1e-7, err_msg=name)
    pairs = (jax.tree.leaves(one.policy.params) for one in (state.learner, before))
    for found, wanted in zip(*pairs, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-6)


# What a learner collects with remedies.


@pytest.fixture(scope="module")
def collected():
    """`collected(target, of_critic, bound)`: an iteration of a critic's learner with remedies of its objective, from
    parameters that differ from each other; a coefficient of entropy of 0.3 so far."""
    base = learner("ppo_lm", whiten=False, gamma=0.9, gae_lambda=0.3, critic_lambda=0.6, mask_truncated=True, prompts=8)
    settings = (remedies.kl_in_both(0.3), remedies.length_adaptive_lambda(0.5), remedies.kl_cov(0.2))
    one = ja.remedied(base, *settings)
    one = one.changed(lambda settings: remedies.adaptive_entropy.settings(settings, 0.2))
    made, random = inside(one), np.random.default_rng(6)
    policy = random_params(made.policy, random)
    reference, critic = random_params(made.policy, random, policy, 0.5), random_params(made.critic, random)
    params = jax.tree.map(jnp.asarray, {"policy": policy, "critic": critic, "reference": reference})
    kinds = (remedies.adaptive_entropy, remedies.decoupled_lambda, remedies.clip_higher)

    @jax.jit
    def run(strengths, data):
        states = {"adaptive_entropy": {ROOT: jnp.float32(0.3)}}
        taps = Taps(0, 3, data=data).with_remedies(tuple(zip(kinds, strengths, strict=True)), states, data)
        dialogue = made.dialogue.bind(data.dialogue)
        found = made.collector.collect(Models(**params), dialogue, data.numbers, jax.random.key(1), taps)
        return found, taps.remedy_states["adaptive_entropy"][ROOT]

    def collected(*strengths):
        return jax.tree.map(np.asarray, run(jnp.float32(strengths), one.data))

    return collected


def test_an_iteration_s_advantages_targets_and_tokens_apart_are_those_of_loops(collected):
    experience, _ = collected(0.0, 0.85, 0.28)
    loss_inputs = experience.batch.loss_inputs
    own, value = loss_inputs.loss_mask, np.float64(loss_inputs.old_value)
    assert 0 < own.any(1).mean() < 1, "rows that do not count"
    penalty = np.where(own, np.float64(loss_inputs.old_log_prob) - loss_inputs.ref_log_prob, 0)
    reward = -0.3 * penalty
    for row, slots in enumerate(map(np.flatnonzero, own)):
        reward[row, slots[-1:]] += experience.trainer_outputs.score[row]
    lambdas = lambdas_of(own, 0.5)
    assert len(np.unique(lambdas)) > 3
    close = {"rtol": 1e-4, "atol": 1e-5}
    advantage = by_loop(reward, value, own, 0.9, lambdas)
    np.testing.assert_allclose(loss_inputs.advantages, advantage, **close)
    target = by_loop(reward, value, own, 0.9, np.full(len(own), 0.85)) + np.where(own, value, 0)
    np.testing.assert_allclose(loss_inputs.value_target, target, **close)
    returned = by_loop(reward, 0 * value, own, 0.9, np.ones(len(own)))
    np.testing.assert_allclose(experience.trainer_outputs.returns, returned, **close)
    values = covariances(own, advantage, np.float64(loss_inputs.old_log_prob))
    most = math.floor(0.2 * own.sum())
    assert 1 < most < 0.2 * own.sum() - 0.25, "rounded down"
    ordered = np.sort(values[own])[::-1]
    assert ordered[most - 1] - ordered[most] > 1e-4, "no decision hangs on rounding"
    np.testing.assert_array_equal(
        loss_inputs.covariance_mask, own & (np.nan_to_num(values, nan=-np.inf) >= ordered[most - 1])
    )


def test_an_iteration_s_coefficients_are_what_remedies_at_their_sites_make_of_them(collected):
    experience, state = collected(0.0, 0.0, 0.0)
    rows = experience.rollout.rows
    before = dataclasses.asdict(experience.coefficients)
    own = rows.role == 0
    entropy = -np.float64(rows.log_prob[own]).mean()
    assert state == pytest.approx(0.295), "it is not read"
    assert before["entropy_coefficient"] == np.float32(1e-30)
    for target, bonus, kept in ((entropy * 1.001, 0.305, 0.305), (entropy * 0.999, 0.0, 0.295)):
        experience, state = collected(target, 0.85, 0.28)
        after = dataclasses.asdict(experience.coefficients)
        assert after["entropy_coefficient"] == pytest.approx(bonus)
        assert state == pytest.approx(kept)
        other = {name: float(x) for name, x in after.items() if x != before[name] and name != "entropy_coefficient"}
        assert other == {"critic_lambda": pytest.approx(0.85)}, "KL-Cov does not clip the ratio"


@pytest.mark.parametrize(
    ("preset", "first", "second", "sentence"),
    [
        (
            "grpo",
            remedies.kl_cov(),
            remedies.clip_higher(),
            "'clip_higher' .* 'ratio_clip', .* does not clip the ratio",
        ),
        ("grpo", remedies.clip_cov(), remedies.kl_cov(), "'kl_cov': it changes the setting 'covariance', and so does"),
        ("ppo_lm", remedies.kl_in_reward(), remedies.kl_in_both(), "'kl_in_both': it changes the setting 'kl', and so"),
    ],
)
def test_remedies_of_which_one_would_undo_or_disable_the_other_are_refused(preset, first, second, sentence):
    for chosen in ((first, second), (second, first)) if "does not clip" in sentence else ((first, second),):
        with pytest.raises(ValueError, match=sentence):
            ja.remedied(learner(preset), *chosen)


def test_a_lambda_of_each_row_s_own_is_no_site():
    one = ja.remedied(learner("ppo_lm"), remedies.length_adaptive_lambda())
    with pytest.raises(ValueError, match=r"'gae_lambda', .* each row's lambda depends on its length"):
        ja.plan(one, [ja.signal_decay(onset=0)], seeds=1, steps=3)


# What a learner cannot have.

REFUSED = [
    ("grpo", "length_adaptive_lambda", "'length_adaptive_lambda': .* advantage must be 'gae', not 'group'"),
    ("dpo", "length_adaptive_lambda", "'length_adaptive_lambda': .* advantage must be 'gae'"),
    ("grpo", "critic_layer_norm", "it changes the setting 'critic_layer_norm', which learner 'grpo' does not have"),
    ("dpo", "kl_cov", "'kl_cov': .* objective must be 'policy'"),
    ("gspo", "clip_cov", "'clip_cov': .* ratio 'token'"),
    ("rloo", "kl_cov", "'kl_cov': .* ratio 'token'"),
    ("dpo", "kl_in_reward", "'kl_in_reward': a preference objective contains its own KL"),
    ("dpo", "kl_in_both", "'kl_in_both': a preference objective contains its own KL"),
    ("dpo", "kl_off_policy", "'kl_off_policy': a preference objective contains its own KL"),
    ("dpo", "truncated_importance", "'truncated_importance': a preference objective has no probability ratio"),
    ("dpo", "adaptive_entropy", "'adaptive_entropy': a preference objective has no .* entropy bonus"),
    ("grpo", "decoupled_lambda", "'decoupled_lambda' acts at site 'critic_lambda', which the learner does not tap"),
    ("dpo", "target_kl_stop", "'target_kl_stop' needs approximate_kl at 'guard'"),
    ("dpo", "clip_higher", "'clip_higher' acts at site 'ratio_clip', .*, for a preference objective has none"),
    ("grpo", "value_pretraining", "critic"),
    ("dpo", "value_pretraining", "critic"),
    ("dpo", "dual_clip", "ratio"),
]


def refused(one, remedy, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        ja.remedied(one, remedy)
    said = str(error.value)
    assert said.startswith("remedy '")
    assert "\n" not in said
    assert ". " not in said
    assert not said.endswith(".")


@pytest.mark.parametrize(("preset", "name", "sentence"), REFUSED)
def test_what_a_learner_on_dialogues_cannot_have_is_refused_in_a_sentence(preset, name, sentence):
    refused(learner(preset), getattr(remedies, name)(), sentence)


@pytest.mark.parametrize("name", ["truncated_importance", "masked_importance", "sequence_mask"])
def test_there_is_no_correction_where_ratios_are_the_sampler_s(name):
    one = learner("grpo", old_log_probability="sampled")
    refused(one, getattr(remedies, name)(), "old_log_probability must be 'recomputed', not 'sampled'")


@pytest.mark.parametrize(
    ("preset", "name", "strength"),
    [
        ("grpo", "clip_cov", 1.5),
        ("grpo", "dual_clip", 0.5),
        ("grpo", "masked_importance", 0.5),
        ("ppo_lm", "decoupled_lambda", 1.5),
        ("ppo_lm", "value_pretraining", 2.5),
        ("grpo", "kl_in_both", -0.1),
        ("grpo", "clip_higher", math.nan),
    ],
)
def test_a_strength_that_means_nothing_is_refused_before_there_is_a_learner(preset, name, strength):
    with pytest.raises(ValueError, match=f"'{name}'"):
        getattr(remedies, name)(strength)


# All at once.


@pytest.mark.exhaustive
def test_many_remedies_at_once_are_finite_and_a_neutral_disturbance_is_none_bit_for_bit():
    chosen = [
        remedies.target_kl_stop(1e-4),
        remedies.nonfinite_skip(),
        remedies.l2_init(0.1),
        remedies.decoupled_lambda(),
        remedies.kl_in_reward(),
        remedies.length_adaptive_lambda(0.5),
    ]
    base = learner("ppo_lm", prompts=2, minibatches=2, learning_rate=5e-3)
    assert inside(base).config.kl_in == "reward"
    one = ja.remedied(base, *chosen)
    settings = ja.metrics.MetricSettings(window=2, hold=1, horizon=1)
    spikes = [ja.lr_spike(ja.sweep(1.0, 30.0), onset=1, duration=1)]
    told = ja.audit(one, spikes, seeds=2, steps=3, settings=settings).telemetry
    names = [name for name in told.data_vars if told[name].dims[:3] == ("seed", "condition", "step")]
    assert {"performance", "loss", "critic_gradient_norm", "value_loss", "params_norm"} <= set(names)
    for name in ("performance", "loss", "params_norm", "update_norm", "gradient_norm", "critic_gradient_norm"):
        assert np.isfinite(told[name].values).all(), name
    for name in names:
        values = told[name].values
        np.testing.assert_array_equal(values[:, 0], values[:, 1], err_msg=name)
    moved = told["params_norm"].values
    assert (moved[:, 0, 1:] != moved[:, 2, 1:]).any()
    np.testing.assert_array_equal(moved[:, 0, 0], moved[:, 2, 0])
