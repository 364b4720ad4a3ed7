"""Gradients of KL terms in the reward, in the loss and in both, against enumeration of all sequences."""

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
    with_remedies,
)

from jaxaudit import remedies
from jaxaudit.learners.dialogue import loss_terms
from jaxaudit.learners.dialogue.advantages import estimate_advantages
from jaxaudit.learners.dialogue.factories import settings_of
from jaxaudit.learners.dialogue.loss_terms import Denominators
from jaxaudit.learners.dialogue.policy_loss import LossInputs, Predictions, policy_loss

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
    return with_remedies(base, getattr(remedies, name)(BETA))


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
