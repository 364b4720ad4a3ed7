"""Tests both policy heads against scipy, float64 closed forms, and derivatives of their KL divergence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from jaxaudit.models.policy import IMPOSSIBLE, Categorical, Choice, Gaussian, Normal, head_of
from jaxaudit.tasks import make
from jaxaudit.tasks.cartpole import CartPole

GAUSSIAN = Gaussian(np.array([-1.0, -2.0], np.float32), np.array([1.0, 0.5], np.float32), log_std=-0.3)
CATEGORICAL = Categorical(5)
LEADING = (3, 4)


def random_normal(rng):
    return Normal(*(np.float32(x) for x in (rng.normal(size=(*LEADING, 2)), rng.normal(size=2))))


def random_choice(rng):
    return Choice(np.float32(2.0 * rng.normal(size=(*LEADING, 5))))


HEADS = {"gaussian": (GAUSSIAN, random_normal), "categorical": (CATEGORICAL, random_choice)}


@pytest.fixture(params=HEADS)
def case(request):
    """Returns a head and two of its distributions."""
    head, sample = HEADS[request.param]
    rng = np.random.default_rng(0)
    return head, sample(rng), sample(rng)


def probs_of(distribution):
    return special.softmax(np.float64(distribution.logits), axis=-1)


def test_log_probabilities_equal_scipys(case):
    head, distribution, _ = case
    action = jax.jit(head.sample)(jax.random.key(0), distribution)
    result = jax.jit(head.log_probability)(distribution, action)
    if head is GAUSSIAN:
        mean, log_std = distribution
        expected = stats.norm(mean, np.exp(np.float64(log_std))).logpdf(np.float64(action)).sum(-1)
    else:
        expected = np.log(np.take_along_axis(probs_of(distribution), np.asarray(action)[..., None], -1)[..., 0])
    assert result.shape == LEADING
    np.testing.assert_allclose(result, expected, rtol=1e-5)


def test_entropies_equal_scipys(case):
    head, distribution, _ = case
    result = jax.jit(head.entropy)(distribution)
    if head is GAUSSIAN:
        expected = stats.norm(0, np.exp(np.float64(distribution.log_std))).entropy().sum()
    else:
        expected = stats.entropy(probs_of(distribution), axis=-1)
    np.testing.assert_allclose(result, expected, rtol=1e-5)


def test_kl_divergences_equal_the_closed_forms(case):
    head, old, new = case
    result = jax.jit(head.kl)(old, new)
    if head is GAUSSIAN:
        (a, la), (b, lb) = (map(np.float64, d) for d in (old, new))
        va, vb = np.exp(2 * la), np.exp(2 * lb)
        expected = (0.5 * (np.log(vb / va) + (va + (a - b) ** 2) / vb - 1)).sum(-1)
    else:
        expected = stats.entropy(probs_of(old), probs_of(new), axis=-1)
    assert result.shape == LEADING
    np.testing.assert_allclose(result, expected, rtol=1e-5)
    np.testing.assert_allclose(head.kl(old, old), 0.0, atol=1e-7)


def test_the_fisher_product_is_the_hessian_of_the_mean_kl(case):
    head, distribution, tangent = case
    result = jax.jit(head.fisher)(distribution, tangent)
    mean_kl = lambda new: jnp.mean(head.kl(distribution, new))  # noqa: E731
    slope = jax.grad(mean_kl)
    _, expected = jax.jit(lambda: jax.jvp(slope, (distribution,), (tangent,)))()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), result, expected)
    jax.tree.map(lambda x: np.testing.assert_allclose(x, 0.0, atol=1e-6), slope(distribution))


def test_the_categorical_fisher_matrix_equals_the_closed_form():
    rng = np.random.default_rng(1)
    logits = np.float32(rng.normal(size=5))
    matrix = jax.vmap(lambda v: CATEGORICAL.fisher(Choice(logits), Choice(v)).logits)(jnp.eye(5))
    p = special.softmax(np.float64(logits))
    np.testing.assert_allclose(matrix, np.diag(p) - np.outer(p, p), atol=1e-7)
    hessian = jax.hessian(lambda new: CATEGORICAL.kl(Choice(logits), Choice(new)))(logits)
    np.testing.assert_allclose(matrix, hessian, atol=1e-6)


def test_categorical_samples_have_the_softmax_frequencies():
    logits = jnp.array([0.0, -1.0, 2.0, 0.5, -3.0])
    sample = jax.jit(lambda key: CATEGORICAL.sample(key, Choice(jnp.broadcast_to(logits, (20_000, 5)))))
    for seed in range(3):
        counts = np.bincount(sample(jax.random.key(seed)), minlength=5)
        assert stats.chisquare(counts, 20_000 * special.softmax(np.float64(logits))).pvalue > 0.001


def test_gaussian_samples_have_the_normal_distribution():
    distribution = Normal(jnp.broadcast_to(jnp.array([0.5, -1.0]), (20_000, 2)), jnp.array([-1.0, 0.3]))
    sample = np.asarray(jax.jit(GAUSSIAN.sample)(jax.random.key(0), distribution))
    for column, mean, log_std in zip(sample.T, (0.5, -1.0), (-1.0, 0.3), strict=True):
        assert stats.kstest(column, stats.norm(mean, np.exp(log_std)).cdf).pvalue > 0.001


def test_the_mode_has_the_largest_log_probability(case):
    head, distribution, _ = case
    best = head.log_probability(distribution, head.mode(distribution))
    for seed in range(20):
        sampled = head.log_probability(distribution, head.sample(jax.random.key(seed), distribution))
        assert (sampled <= best + 1e-6).all()


def test_to_task_clips_continuous_actions_and_keeps_discrete_ones():
    np.testing.assert_array_equal(GAUSSIAN.to_task(jnp.array([[-3.0, 3.0], [0.5, 0.0]])), [[-1.0, 0.5], [0.5, 0.0]])
    sample = CATEGORICAL.sample(jax.random.key(0), Choice(jnp.zeros((7, 5))))
    assert sample.dtype == jnp.int32
    np.testing.assert_array_equal(CATEGORICAL.to_task(sample), sample)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite_give_the_impossible_action(value):
    logits = jnp.zeros((3, 5)).at[1, 2].set(value)
    for action in (CATEGORICAL.mode(Choice(logits)), CATEGORICAL.sample(jax.random.key(0), Choice(logits))):
        np.testing.assert_array_equal(np.asarray(action) == IMPOSSIBLE, [False, True, False])
    assert np.isnan(CATEGORICAL.log_probability(Choice(logits), jnp.full(3, IMPOSSIBLE))[1])


def test_large_logits_give_finite_entropy_and_gradients():
    certain = Choice(jnp.array([1e4, 0.0, 0.0, 0.0, -1e4]))
    assert float(CATEGORICAL.entropy(certain)) == 0.0
    assert float(CATEGORICAL.log_probability(certain, 0)) == 0.0
    assert float(CATEGORICAL.log_probability(certain, 1)) == -1e4
    assert np.isfinite(jax.grad(lambda z: CATEGORICAL.entropy(Choice(z)))(certain.logits)).all()


def test_the_head_is_chosen_by_the_environments_actions():
    assert head_of(CartPole()) == Categorical(2)
    env = make("HalfCheetah-v5")
    head = head_of(env, log_std=-0.5)
    assert isinstance(head, Gaussian)
    assert head.outputs == 6
    np.testing.assert_array_equal(head.init_params()["log_std"], np.full(6, -0.5))
    np.testing.assert_array_equal([head.low, head.high], [env.action_low, env.action_high])
    assert head_of(CartPole()).init_params() == {}
