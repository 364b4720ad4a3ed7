"""Tests gradients of KL terms in the reward, in the loss and in both against enumeration of all sequences."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from token_loops import (
    CRITIC,
    EXACT,
    settings_with_remedies,
)

from jaxaudit import remedies
from jaxaudit.learners.dialogue import loss_terms
from jaxaudit.learners.dialogue.advantages import estimate_advantages
from jaxaudit.learners.dialogue.factories import settings_of
from jaxaudit.learners.dialogue.loss_terms import Denominators
from jaxaudit.learners.dialogue.policy_loss import LossInputs, Predictions, policy_loss

# All sequences of three tokens from a vocabulary of three; policies are tables of logits by prefix.

VOCABULARY, LENGTH, BETA = 3, 3, 0.07
SEQUENCES = np.array(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))
PREFIXES = [prefix for length in range(LENGTH) for prefix in itertools.product(range(VOCABULARY), repeat=length)]
PREFIX_INDEX = np.array([[PREFIXES.index(tuple(row[:slot])) for slot in range(LENGTH)] for row in SEQUENCES.tolist()])
"""The index of the prefix before each token, `[27, 3]`."""

POLICY, REFERENCE, BEHAVIOUR = np.random.default_rng(5).normal(size=(3, len(PREFIXES), VOCABULARY))


def log_softmax(table):
    return table - np.log(np.exp(table).sum(-1, keepdims=True))


def token_log_probs(table):
    """Returns log-probabilities of the tokens of all sequences, `[27, 3]`."""
    return log_softmax(table)[PREFIX_INDEX, SEQUENCES]


def sequence_probs(table):
    """Returns the probability of each sequence, `[27]`."""
    return np.exp(token_log_probs(table).sum(-1))


def token_scores(table):
    """Returns the gradient of each token's log-probability by the table, `[27, 3, 13, 3]`."""
    gradients = np.zeros((*SEQUENCES.shape, *table.shape))
    for row, slot in np.ndindex(SEQUENCES.shape):
        prefix, token = PREFIX_INDEX[row, slot], SEQUENCES[row, slot]
        gradients[row, slot, prefix] = (np.arange(VOCABULARY) == token) - np.exp(log_softmax(table)[prefix])
    return gradients


def exact_kl_and_gradient():
    """Returns KL(policy || reference) of sequences and its gradient, by recursion from the last token to the first."""
    logs, gap = log_softmax(POLICY), log_softmax(POLICY) - log_softmax(REFERENCE)
    gradient = np.zeros(POLICY.shape)

    def remaining_kl(prefix, prob):
        if len(prefix) == LENGTH:
            return 0.0
        index = PREFIXES.index(prefix)
        probs = np.exp(logs[index])
        value = gap[index] + [remaining_kl((*prefix, token), prob * probs[token]) for token in range(VOCABULARY)]
        gradient[index] = prob * probs * (value - probs @ value)
        return probs @ value

    return remaining_kl((), 1.0), gradient


def token_kl_gradient(table):
    """Returns the gradient of the tokens' KL(policy || reference), with prefixes from a fixed other policy."""
    gradient = np.zeros(POLICY.shape)
    logs, prefix_log_probs = log_softmax(POLICY), log_softmax(table)
    gap = logs - log_softmax(REFERENCE)
    for index, prefix in enumerate(PREFIXES):
        steps = [(PREFIXES.index(prefix[:slot]), token) for slot, token in enumerate(prefix)]
        prob = math.exp(sum(prefix_log_probs[position] for position in steps))
        probs = np.exp(logs[index])
        gradient[index] = prob * probs * (gap[index] - probs @ gap[index])
    return gradient


def relative_error(gradient, expected):
    return np.linalg.norm(gradient - expected) / np.linalg.norm(expected)


# There is a critic with value zero, so that advantages are returns; a row's loss is the sum of its tokens' losses.


def sequence_gradients(settings, behaviour=None):
    """Returns the library's gradient of each sequence's loss at `POLICY`, `[27, 13, 3]`, with equal rewards.

    Rows are on policy, or, for terms in the loss only, come from `behaviour`.
    """
    parts, coefficients = settings.objective_config, settings.coefficients
    loss_mask, zeros = jnp.ones(SEQUENCES.shape, bool), jnp.zeros(SEQUENCES.shape)
    old = jnp.asarray(token_log_probs(POLICY if behaviour is None else behaviour))
    reference, anchor = jnp.asarray(token_log_probs(REFERENCE)), log_softmax(REFERENCE)
    penalty = loss_terms.KL_ESTIMATORS[parts.kl](old, reference) if parts.kl_in_reward else None
    assert behaviour is None or penalty is None
    score = jnp.zeros((len(SEQUENCES), 1))
    advantage, target = estimate_advantages(parts, coefficients, score, loss_mask, kl_penalty=penalty, value=zeros)
    rows = LossInputs(loss_mask, old, advantage, ref_log_prob=reference, old_value=zeros, value_target=target)
    counts = Denominators(tokens=1, rows=1, tokens_per_minibatch=1, max_response_tokens=1)

    def losses(table):
        log_probs = jax.nn.log_softmax(table)
        divergence = jnp.sum(jnp.exp(log_probs) * (log_probs - anchor), -1)
        predictions = Predictions(log_probs[PREFIX_INDEX, SEQUENCES], value=zeros, exact_kl=divergence[PREFIX_INDEX])

        def loss(predictions, rows):
            add_axis = lambda x: x[None]  # noqa: E731
            return policy_loss(
                parts, coefficients, jax.tree.map(add_axis, predictions), jax.tree.map(add_axis, rows), counts
            )[0]

        return jax.vmap(loss)(predictions, rows)

    return np.asarray(jax.jacobian(losses)(jnp.asarray(POLICY)))


SLOPES = {"k1": lambda gap: 1.0 + 0 * gap, "k2": lambda gap: gap, "k3": lambda gap: 1 - np.exp(-gap)}
VALUES = {"k1": lambda gap: gap, "k2": lambda gap: gap**2 / 2, "k3": lambda gap: np.exp(-gap) - 1 + gap}


def expected_sequence_gradients(settings, behaviour=None):
    """Returns the same from the estimators' values and slopes, in NumPy."""
    gap = token_log_probs(POLICY) - token_log_probs(REFERENCE)
    ratio = np.exp(token_log_probs(POLICY) - token_log_probs(POLICY if behaviour is None else behaviour))
    value, slope = VALUES[settings.kl](gap), SLOPES[settings.kl](gap)
    weight = np.zeros(gap.shape)
    if settings.kl_in in ("loss", "both"):
        weight += {"none": slope, "stopped_ratio": ratio * slope, "ratio": ratio * (slope + value)}[settings.kl_weight]
    if settings.kl_in in ("reward", "both"):
        weight += np.flip(np.cumsum(np.flip(value, -1), -1), -1)  # sum from this token on
    return settings.kl_coefficient * np.einsum("nt,ntpv->npv", weight, token_scores(POLICY))


def kl_settings(estimator, kl_in, weight="none"):
    return dataclasses.replace(CRITIC, kl=estimator, kl_in=kl_in, kl_weight=weight, kl_coefficient=BETA)


REMEDIES = ("kl_in_reward", "kl_in_both", "kl_off_policy")


def with_remedy(name, base=CRITIC):
    return settings_with_remedies(base, getattr(remedies, name)(BETA))


ON_POLICY = {
    "kl_in_reward": (with_remedy("kl_in_reward"), 0.0),
    "kl_in_both": (with_remedy("kl_in_both"), 0.0),
    "k3 in both": (kl_settings("k3", "both"), 0.0),
    "k1 in the loss": (kl_settings("k1", "loss"), 1.0),
    "k2 in the reward": (kl_settings("k2", "reward"), None),
    "k2 in the loss": (kl_settings("k2", "loss"), None),
    "k2 in both": (kl_settings("k2", "both"), None),
    "k3 in the reward": (kl_settings("k3", "reward"), None),
    "k3 in the loss": (kl_settings("k3", "loss"), None),
    "k3 in the loss by the ratio": (kl_settings("k3", "loss", "ratio"), None),
    "kl_off_policy": (with_remedy("kl_off_policy"), None),
}
"""Placements, and their relative error of the gradient of the sequence KL in expectation: None if they are biased."""


def test_the_exact_gradient_equals_finite_differences_of_the_kl():
    """Tests the reference implementation itself, against the definition of the KL and its finite differences."""

    def divergence(table):
        return np.sum(sequence_probs(table) * np.sum(token_log_probs(table) - token_log_probs(REFERENCE), -1))

    value, gradient = exact_kl_and_gradient()
    assert value == pytest.approx(divergence(POLICY), rel=1e-12)
    step = 1e-5
    for position in np.ndindex(POLICY.shape):
        moved = np.zeros(POLICY.shape)
        moved[position] = step
        slope = (divergence(POLICY + moved) - divergence(POLICY - moved)) / (2 * step)
        assert gradient[position] == pytest.approx(slope, abs=1e-9)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ON_POLICY)
def test_the_bias_of_an_on_policy_kl_gradient_depends_on_its_placement(name):
    """Each sequence has the gradient that the estimators give, and the expectation is exact or not."""
    settings, expected = ON_POLICY[name]
    gradients = sequence_gradients(settings)
    np.testing.assert_allclose(gradients, expected_sequence_gradients(settings), **EXACT)
    mean = np.einsum("n,npv->pv", sequence_probs(POLICY), gradients)
    deviation = relative_error(mean / BETA, exact_kl_and_gradient()[1])
    if expected is None:
        assert deviation > 0.1
    else:
        assert deviation == pytest.approx(expected, abs=1e-12)
    if name == "k1 in the loss":
        assert np.abs(gradients).max() > 0.1 * BETA
        np.testing.assert_allclose(mean, 0.0, atol=1e-15)


@pytest.mark.usefixtures("float64")
def test_k1_in_both_adds_the_sequence_score_to_k1_in_the_reward():
    both, reward = (sequence_gradients(with_remedy(name)) for name in ("kl_in_both", "kl_in_reward"))
    np.testing.assert_allclose(both - reward, BETA * token_scores(POLICY).sum(1), **EXACT)


@pytest.mark.usefixtures("float64")
def test_kl_off_policy_leaves_out_the_effect_of_tokens_on_later_ones():
    tokens = token_kl_gradient(POLICY)
    for settings in (
        with_remedy("kl_off_policy"),
        kl_settings("k2", "loss"),
        dataclasses.replace(CRITIC, kl="exact", kl_in="loss", kl_coefficient=BETA),
    ):
        mean = np.einsum("n,npv->pv", sequence_probs(POLICY), sequence_gradients(settings))
        assert relative_error(mean / BETA, tokens) < 1e-12
    assert relative_error(tokens, exact_kl_and_gradient()[1]) > 0.1
    last_prefixes = [index for index, prefix in enumerate(PREFIXES) if len(prefix) == LENGTH - 1]
    np.testing.assert_allclose(tokens[last_prefixes], exact_kl_and_gradient()[1][last_prefixes], **EXACT)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("settings", "exact"),
    [
        (with_remedy("kl_off_policy"), True),
        (kl_settings("k1", "loss", "ratio"), True),
        (kl_settings("k2", "loss", "stopped_ratio"), True),
        (kl_settings("k2", "loss"), False),
        (kl_settings("k3", "loss"), False),
        (kl_settings("k2", "loss", "ratio"), False),
        (kl_settings("k3", "loss", "stopped_ratio"), False),
    ],
    ids=lambda value: " ".join((value.kl, value.kl_weight)) if hasattr(value, "kl") else "",
)
def test_off_policy_kl_gradients_are_of_the_behaviours_prefixes(settings, exact):
    gradients = sequence_gradients(settings, BEHAVIOUR)
    np.testing.assert_allclose(gradients, expected_sequence_gradients(settings, BEHAVIOUR), **EXACT)
    mean = np.einsum("n,npv->pv", sequence_probs(BEHAVIOUR), gradients) / BETA
    deviation = relative_error(mean, token_kl_gradient(BEHAVIOUR))
    assert deviation < 1e-12 if exact else deviation > 0.1
    if exact:
        assert relative_error(mean, token_kl_gradient(POLICY)) > 0.1, (
            "prefixes of the policy would give another gradient"
        )


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("preset", "name", "share"),
    [("rloo", "kl_in_reward", 1.0), ("rloo", "kl_in_both", 1.0), ("dr_grpo", "kl_in_reward", 0.5)],
)
def test_group_baselines_keep_the_kl_gradient_or_halve_it(preset, name, share):
    """Over all pairs of sequences, a leave-one-out baseline is exact, and the mean of two rows halves the gradient."""
    settings = with_remedy(name, dataclasses.replace(settings_of(preset)(), group_size=2))
    parts, coefficients = settings.objective_config, settings.coefficients
    pairs = np.array(list(itertools.product(range(len(SEQUENCES)), repeat=2)))
    index = pairs.reshape(-1)
    loss_mask = jnp.ones((len(index), LENGTH), bool)
    old, reference = (jnp.asarray(token_log_probs(table)[index]) for table in (POLICY, REFERENCE))
    penalty = loss_terms.KL_ESTIMATORS[parts.kl](old, reference)
    advantage, _ = estimate_advantages(parts, coefficients, jnp.zeros(pairs.shape), loss_mask, kl_penalty=penalty)
    rows = LossInputs(loss_mask, old, advantage, ref_log_prob=reference)
    pair_probs = jnp.asarray(np.prod(sequence_probs(POLICY)[pairs], -1))
    counts = Denominators(tokens=2 * LENGTH, rows=2, tokens_per_minibatch=2 * LENGTH, max_response_tokens=1)

    def expectation(table):
        new = jax.nn.log_softmax(table)[PREFIX_INDEX, SEQUENCES][index]
        to_pairs = lambda x: x.reshape(-1, 2, LENGTH)  # noqa: E731

        def loss(predictions, rows):
            return policy_loss(parts, coefficients, predictions, rows, counts)[0]

        return jnp.sum(
            pair_probs * jax.vmap(loss)(jax.tree.map(to_pairs, Predictions(new)), jax.tree.map(to_pairs, rows))
        )

    gradient = np.asarray(jax.grad(expectation)(jnp.asarray(POLICY)))
    assert relative_error(gradient / BETA, share * exact_kl_and_gradient()[1]) < 1e-12
