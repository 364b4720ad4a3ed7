"""Tail statistics by selection, against sorting in float64 NumPy and closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaudit.kernels import tails

QS = (0.0, 0.1, 0.5, 0.9, 0.99, 0.999, 1.0)


@jax.jit
@jax.vmap
def all_statistics(x, mask):
    """Returns all statistics of rows `[4, n]`. All tests share one program for each n."""
    return {
        "ess": tails.effective_sample_size(x, mask),
        "cvar": tails.cvar(x, mask, 0.01),
        "cvar_tenth": tails.cvar(x, mask, 0.1),
        "top": tails.top_share(jnp.abs(x), mask),
        "index": tails.extreme_value_index(x, mask),
        "hill": tails.hill(x, mask),
        "hill_5": tails.hill(x, mask, 5),
        "quantiles": tails.masked_quantiles(x, mask, QS),
        "order": tails.order_statistics(x, mask, jnp.array([1, 2, 7, 10**6])),
    }


def sorted_sum(x, share):
    """Returns the sum of the largest share * n values, of which the last counts partly."""
    ordered, counted = np.sort(x)[::-1], share * len(x)
    weights = np.clip(counted - np.arange(len(x)), 0, 1)
    return weights @ ordered


def mean_excess(x, k=None):
    x = np.sort(x[x > 0])[::-1]
    k = int(np.clip(int(np.sqrt(len(x))) if k is None else k, 1, len(x) - 1))
    return np.mean(np.log(x[:k]) - np.log(x[k]))


def expected_statistics(x, mask):
    x = x[mask].astype(np.float64)
    weights = np.exp(x - x.max())
    ordered = np.sort(x)[::-1]
    return {
        "ess": weights.sum() ** 2 / (len(x) * (weights**2).sum()),
        "cvar": sorted_sum(x, 0.01) / (0.01 * len(x)),
        "cvar_tenth": sorted_sum(x, 0.1) / (0.1 * len(x)),
        "top": sorted_sum(np.abs(x), 0.01) / np.abs(x).sum(),
        "index": mean_excess(x),
        "hill": 1 / max(mean_excess(x), 1 / tails.LARGEST_INDEX),
        "hill_5": 1 / max(mean_excess(x, 5), 1 / tails.LARGEST_INDEX),
        "quantiles": np.quantile(x, QS, method="inverted_cdf"),
        "order": [ordered[0], ordered[1], ordered[6], ordered[-1]],
    }


def sample(n, kind):
    rng = np.random.default_rng(n)
    x = {
        "normal": lambda: rng.normal(size=(4, n)),
        "heavy": lambda: rng.standard_cauchy(size=(4, n)),
        "small": lambda: 1e-30 * rng.lognormal(size=(4, n)),
        "ties": lambda: rng.integers(-3, 9, size=(4, n)) + rng.integers(0, 2, size=(4, n)) / 8,
    }[kind]()
    return x.astype(np.float32), rng.random((4, n)) < np.array([[1.1], [0.5], [0.3], [0.7]])


@pytest.mark.parametrize("kind", ["normal", "heavy", "small", "ties"])
@pytest.mark.parametrize("n", [100, 1536])
def test_statistics_equal_those_by_sorting(n, kind):
    x, mask = sample(n, kind)
    statistics = all_statistics(x, mask)
    for lane in range(4):
        for name, expected in expected_statistics(x[lane], mask[lane]).items():
            actual = np.asarray(statistics[name][lane])
            if name in ("quantiles", "order"):
                np.testing.assert_array_equal(actual, np.asarray(expected, np.float32), err_msg=name)
            elif name.startswith("hill"):
                np.testing.assert_allclose(actual, expected, rtol=1e-4, err_msg=name)
            else:
                np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=1e-6, err_msg=name)


def test_masked_values_have_no_influence():
    x, mask = sample(100, "normal")
    hidden = np.where(mask, x, np.array([[np.nan], [np.inf], [-np.inf], [1e30]], np.float32))
    jax.tree.map(np.testing.assert_array_equal, all_statistics(x, mask), all_statistics(hidden, mask))


def test_an_empty_mask_gives_zeros():
    x, mask = sample(100, "normal")
    x[0] = np.nan
    for name, value in all_statistics(x, np.zeros_like(mask)).items():
        np.testing.assert_array_equal(value, 0.0, err_msg=name)


def test_one_value_has_defined_statistics():
    x, _ = sample(100, "normal")
    mask = np.zeros((4, 100), bool)
    mask[:, 3] = True
    x[:, 3] = [2.0, -1.0, 0.0, 5.0]
    statistics = all_statistics(x, mask)
    np.testing.assert_array_equal(statistics["ess"], 1.0)
    np.testing.assert_allclose(statistics["cvar"], x[:, 3], rtol=1e-6)
    np.testing.assert_array_equal(statistics["hill"], 0.0)
    assert all(np.isfinite(value).all() for value in statistics.values())


def test_equal_values_have_defined_statistics():
    x, mask = sample(100, "normal")
    statistics = all_statistics(np.full_like(x, 2.5), mask)
    np.testing.assert_allclose(statistics["ess"], 1.0, rtol=1e-6)
    np.testing.assert_allclose(statistics["cvar"], 2.5, rtol=1e-6)
    np.testing.assert_allclose(statistics["top"], 0.01, rtol=1e-5)
    np.testing.assert_array_equal(statistics["index"], 0.0)
    np.testing.assert_allclose(statistics["hill"], tails.LARGEST_INDEX)


def test_an_unmasked_nan_is_propagated():
    x, mask = sample(100, "normal")
    index = int(np.flatnonzero(mask[2])[0])
    x[2, index] = np.nan
    for name, value in all_statistics(x, mask).items():
        assert np.isnan(value[2]).all(), name
        assert np.isfinite(np.delete(value, 2, axis=0)).all(), name


def test_the_effective_sample_size_of_lognormal_weights_is_known():
    """It is exp(-s^2), within three standard errors of 64 samples.

    A constant added to the log-weights has no influence.
    """
    samples = 0.5 * jax.random.normal(jax.random.key(0), (64, 4096)) + 300.0
    share = np.asarray(jax.jit(jax.vmap(tails.effective_sample_size))(samples, jnp.ones_like(samples, bool)))
    assert abs(share.mean() - np.exp(-0.25)) < 3 * share.std(ddof=1) / 8
    assert share.std(ddof=1) / 8 < 0.01


def test_the_tail_index_of_a_pareto_distribution_is_known():
    """For P(X > x) = x^-2 it is 2, within three standard errors of a / sqrt(k).

    A bounded distribution's is much larger.
    """
    samples = jax.random.pareto(jax.random.key(1), 2.0, (64, 4096))
    index = jax.jit(jax.vmap(tails.extreme_value_index))
    inverse = np.asarray(index(samples, jnp.ones_like(samples, bool)))
    error = 0.5 / np.sqrt(64)  # k = 64 of 4096
    assert abs(inverse.mean() - 0.5) < 3 * error / 8
    np.testing.assert_allclose(inverse.std(ddof=1), error, rtol=0.3)
    single = float(tails.hill(samples[0], jnp.ones(4096, bool)))
    assert abs(single - 2.0) < 3 * 2.0 / np.sqrt(64)
    bounded = jax.random.uniform(jax.random.key(2), (64, 4096))
    assert np.asarray(index(bounded, jnp.ones_like(samples, bool))).max() < 0.05
