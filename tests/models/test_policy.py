"""Both heads of a policy against scipy, closed forms in float64 NumPy, and derivatives of their divergence."""

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


def normal(rng):
    return Normal(*(np.float32(x) for x in (rng.normal(size=(*LEADING, 2)), rng.normal(size=2))))


def choice(rng):
    return Choice(np.float32(2.0 * rng.normal(size=(*LEADING, 5))))


HEADS = {"gaussian": (GAUSSIAN, normal), "categorical": (CATEGORICAL, choice)}


@pytest.fixture(params=HEADS)
def case(request):
    """A head, and two distributions of it."""
    head, draw = HEADS[request.param]
    rng = np.random.default_rng(0)
    return head, draw(rng), draw(rng)


def chances(distribution):
    return special.softmax(np.float64(distribution.logits), axis=-1)


def test_log_probabilities_are_scipys(case):
    head, distribution, _ = case
    action = jax.jit(head.sample)(jax.random.key(0), distribution)
    found = jax.jit(head.log_probability)(distribution, action)
    if head is GAUSSIAN:
        mean, log_std = distribution
        expected = stats.norm(mean, np.exp(np.float64(log_std))).logpdf(np.float64(action)).sum(-1)
    else:
        expected = np.log(np.take_along_axis(chances(distribution), np.asarray(action)[..., None], -1)[..., 0])
    assert found.shape == LEADING
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_entropies_are_scipys(case):
    head, distribution, _ = case
    found = jax.jit(head.entropy)(distribution)
    if head is GAUSSIAN:
        expected = stats.norm(0, np.exp(np.float64(distribution.log_std))).entropy().sum()
    else:
        expected = stats.entropy(chances(distribution), axis=-1)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_divergences_are_the_closed_forms(case):
    head, old, new = case
    found = jax.jit(head.kl)(old, new)
    if head is GAUSSIAN:
        (a, la), (b, lb) = (map(np.float64, d) for d in (old, new))
        va, vb = np.exp(2 * la), np.exp(2 * lb)
        expected = (0.5 * (np.log(vb / va) + (va + (a - b) ** 2) / vb - 1)).sum(-1)
    else:
        expected = stats.entropy(chances(old), chances(new), axis=-1)
    assert found.shape == LEADING
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(head.kl(old, old), 0.0, atol=1e-7)


def test_the_fisher_product_is_the_hessian_of_the_mean_divergence(case):
    head, distribution, tangent = case
    found = jax.jit(head.fisher)(distribution, tangent)
    mean_kl = lambda new: jnp.mean(head.kl(distribution, new))  # noqa: E731
    slope = jax.grad(mean_kl)
    _, expected = jax.jit(lambda: jax.jvp(slope, (distribution,), (tangent,)))()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, expected)
    jax.tree.map(lambda x: np.testing.assert_allclose(x, 0.0, atol=1e-6), slope(distribution))


def test_the_fisher_matrix_of_a_choice_is_the_closed_form():
    rng = np.random.default_rng(1)
    logits = np.float32(rng.normal(size=5))
    matrix = jax.vmap(lambda v: CATEGORICAL.fisher(Choice(logits), Choice(v)).logits)(jnp.eye(5))
    p = special.softmax(np.float64(logits))
    np.testing.assert_allclose(matrix, np.diag(p) - np.outer(p, p), atol=1e-7)
    hessian = jax.hessian(lambda new: CATEGORICAL.kl(Choice(logits), Choice(new)))(logits)
    np.testing.assert_allclose(matrix, hessian, atol=1e-6)


def test_choices_are_as_frequent_as_their_chances():
    logits = jnp.array([0.0, -1.0, 2.0, 0.5, -3.0])
    drawn = jax.jit(lambda key: CATEGORICAL.sample(key, Choice(jnp.broadcast_to(logits, (20_000, 5)))))
    for seed in range(3):
        seen = np.bincount(drawn(jax.random.key(seed)), minlength=5)
        assert stats.chisquare(seen, 20_000 * special.softmax(np.float64(logits))).pvalue > 0.001


def test_gaussian_draws_are_distributed_as_told():
    distribution = Normal(jnp.broadcast_to(jnp.array([0.5, -1.0]), (20_000, 2)), jnp.array([-1.0, 0.3]))
    drawn = np.asarray(jax.jit(GAUSSIAN.sample)(jax.random.key(0), distribution))
    for column, mean, log_std in zip(drawn.T, (0.5, -1.0), (-1.0, 0.3), strict=True):
        assert stats.kstest(column, stats.norm(mean, np.exp(log_std)).cdf).pvalue > 0.001


def test_the_mode_is_the_likeliest(case):
    head, distribution, _ = case
    best = head.log_probability(distribution, head.mode(distribution))
    for seed in range(20):
        other = head.log_probability(distribution, head.sample(jax.random.key(seed), distribution))
        assert (other <= best + 1e-6).all()


def test_actions_are_the_tasks():
    np.testing.assert_array_equal(GAUSSIAN.to_task(jnp.array([[-3.0, 3.0], [0.5, 0.0]])), [[-1.0, 0.5], [0.5, 0.0]])
    drawn = CATEGORICAL.sample(jax.random.key(0), Choice(jnp.zeros((7, 5))))
    assert drawn.dtype == jnp.int32
    np.testing.assert_array_equal(CATEGORICAL.to_task(drawn), drawn)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_choose_nothing(bad):
    logits = jnp.zeros((3, 5)).at[1, 2].set(bad)
    for action in (CATEGORICAL.mode(Choice(logits)), CATEGORICAL.sample(jax.random.key(0), Choice(logits))):
        np.testing.assert_array_equal(np.asarray(action) == IMPOSSIBLE, [False, True, False])
    assert np.isnan(CATEGORICAL.log_probability(Choice(logits), jnp.full(3, IMPOSSIBLE))[1])


def test_large_logits_are_certain_and_finite():
    certain = Choice(jnp.array([1e4, 0.0, 0.0, 0.0, -1e4]))
    assert float(CATEGORICAL.entropy(certain)) == 0.0
    assert float(CATEGORICAL.log_probability(certain, 0)) == 0.0
    assert float(CATEGORICAL.log_probability(certain, 1)) == -1e4
    assert np.isfinite(jax.grad(lambda z: CATEGORICAL.entropy(Choice(z)))(certain.logits)).all()


def test_the_head_follows_the_environments_actions():
    assert head_of(CartPole()) == Categorical(2)
    env = make("HalfCheetah-v5")
    head = head_of(env, log_std=-0.5)
    assert isinstance(head, Gaussian)
    assert head.outputs == 6
    np.testing.assert_array_equal(head.init_params()["log_std"], np.full(6, -0.5))
    np.testing.assert_array_equal([head.low, head.high], [env.action_low, env.action_high])
    assert head_of(CartPole()).init_params() == {}
