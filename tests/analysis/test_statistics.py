"""Population statistics against SciPy, closed forms, and simulated coverage."""

import numpy as np
import pytest
import scipy.optimize
import scipy.stats

from jaxaudit.analysis import statistics


@pytest.mark.parametrize("n", [1, 4, 8, 30])
@pytest.mark.parametrize("level", [0.8, 0.95])
def test_wilson_ends_where_the_score_test_rejects(n, level):
    """A share lies inside the interval if the observed share is within z standard errors, taken at that share."""
    z = scipy.stats.norm.ppf(0.5 + level / 2)
    for k in range(n + 1):
        estimate = statistics.wilson(k, n, level=level)
        assert (estimate.value, estimate.n) == (k / n, n)
        expected = np.sort(np.roots([1 + z**2 / n, -2 * k / n - z**2 / n, (k / n) ** 2]))
        np.testing.assert_allclose((estimate.low, estimate.high), expected, atol=1e-12)
        assert (estimate.low == 0, estimate.high == 1) == (k == 0, k == n)


def test_wilson_covers_on_average():
    n, share = 20, np.linspace(0.05, 0.95, 19)
    ends = [statistics.wilson(k, n) for k in range(n + 1)]
    inside = np.array([[e.low <= p <= e.high for e in ends] for p in share])
    weight = scipy.stats.binom.pmf(np.arange(n + 1), n, share[:, None])
    coverage = (inside * weight).sum(1)
    assert 0.94 < coverage.mean() < 0.97
    assert coverage.min() > 0.9


def test_wilson_without_trials_spans_zero_to_one():
    estimate = statistics.wilson(0, 0)
    assert np.isnan(estimate.value)
    assert (estimate.low, estimate.high) == (0, 1)
    assert estimate.reason


def test_divergence_counts_seeds_below_half_the_run():
    estimate = statistics.divergence([10, 49, 50, np.inf], 100)
    assert estimate == statistics.wilson(2, 4)


def test_missing_values_give_nan_unless_they_are_counted():
    times = [10, np.nan, 60, np.inf]
    for estimate in (statistics.divergence(times, 100), statistics.bootstrap([1.0, np.nan, 2.0])):
        assert np.isnan(estimate[:3]).all()
        assert estimate.n_missing == 1
        assert "no value" in estimate.reason
    counted = statistics.divergence(times, 100, missing="count")
    assert counted == statistics.wilson(1, 3)._replace(n_missing=1)
    assert statistics.bootstrap([1.0, np.nan, 2.0], missing="count")[3:5] == (2, 1)
    assert "none of the 2 seeds" in statistics.bootstrap([np.nan] * 2, missing="count").reason
    assert "none of the 0 seeds" in statistics.proportion([]).reason


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8, 11, 40])
def test_interquartile_mean_equals_scipy(n):
    x = np.random.default_rng(n).normal(size=(6, n))
    np.testing.assert_allclose(statistics.interquartile_mean(x), scipy.stats.trim_mean(x, 0.25, axis=1), rtol=1e-12)
    np.testing.assert_allclose(statistics.interquartile_mean(x.T, axis=0), statistics.interquartile_mean(x))


def test_interquartile_mean_is_nan_for_nan_and_trims_infinities():
    assert np.isnan(statistics.interquartile_mean([1.0, 2.0, np.nan, 4.0]))
    assert statistics.interquartile_mean([1.0, 2.0, 4.0, np.inf]) == 3
    assert statistics.interquartile_mean([1.0, np.inf, np.inf, np.inf]) == np.inf


@pytest.mark.parametrize("method", ["percentile", "bca"])
@pytest.mark.parametrize("statistic", [np.mean, statistics.interquartile_mean])
def test_bootstrap_equals_scipy(method, statistic):
    x = np.random.default_rng(0).exponential(size=12) ** 2  # skewed, so that BCa's acceleration matters
    estimate = statistics.bootstrap(x, statistic=statistic, method=method, resamples=40_000)
    reference = scipy.stats.bootstrap(
        (x,), statistic, n_resamples=40_000, method=method, vectorized=True, rng=np.random.default_rng(1)
    ).confidence_interval
    width = reference.high - reference.low
    np.testing.assert_allclose((estimate.low, estimate.high), reference, atol=0.05 * width)
    assert estimate.value == pytest.approx(statistic(x))


def test_expanded_interval_is_the_t_interval_for_a_normal_mean():
    rng = np.random.default_rng(2)
    ratio = []
    for _ in range(40):
        x = rng.normal(size=20)
        estimate = statistics.bootstrap(x, statistic=np.mean, resamples=4000)
        low, high = scipy.stats.t.interval(0.95, 19, x.mean(), x.std(ddof=1) / np.sqrt(20))
        ratio.append((estimate.high - estimate.low) / (high - low))
    assert np.mean(ratio) == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("n", [5, 8, 16])
@pytest.mark.parametrize("distribution", ["normal", "exponential"])
def test_bootstrap_covers_the_interquartile_mean(n, distribution):
    rng = np.random.default_rng(n)
    sample = getattr(rng, distribution)
    true_value = statistics.interquartile_mean(sample(size=(200_000, n))).mean()
    estimates = [statistics.bootstrap(sample(size=n), resamples=800, seed=i) for i in range(500)]
    least = 0.92 if n > 5 else 0.9  # the range of five values covers the median in 94% of cases
    assert least < np.mean([e.low <= true_value <= e.high for e in estimates]) <= 0.995


def test_bootstrap_is_reproducible_and_ordered():
    x = np.random.default_rng(0).normal(size=8)
    for method in ("expanded", "percentile", "bca"):
        first, second = (statistics.bootstrap(x, method=method, resamples=2000, seed=3) for _ in range(2))
        assert first == second
        assert first.low <= first.value <= first.high
    assert statistics.bootstrap(x, seed=4) != statistics.bootstrap(x, seed=3)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_too_few_values_have_no_interval(n):
    """The range of so few values covers the true value too rarely."""
    for estimate in (statistics.bootstrap(range(n)), statistics.median(range(n))):
        assert np.isnan([estimate.low, estimate.high]).all()
    assert statistics.bootstrap(range(n), level=0.5).low <= 1
    of_five = statistics.median([3.0, 1.0, 2.0, 5.0, 4.0])
    assert of_five[:3] == (3, 1, 5)


def test_the_median_is_a_sample_value_between_order_statistics():
    values = [-1.0, -1.0, 20.0, np.inf, 30.0, -1.0, np.inf, 4.0]
    estimate = statistics.median(values)
    assert estimate[:3] == (4, -1, np.inf)
    assert statistics.median([*values, np.nan], missing="count")[:5] == (4, -1, np.inf, 8, 1)
    assert np.isnan(statistics.median([*values, np.nan]).value)
    rng = np.random.default_rng(0)
    covered = [e.low <= np.log(2) <= e.high for e in (statistics.median(rng.exponential(size=9)) for _ in range(2000))]
    assert np.mean(covered) == pytest.approx(statistics.ranks(9).coverage, abs=0.015)


def test_harm_rises_with_distance_from_the_neutral_magnitude():
    assert statistics.harm_rises([1.0, 3.0], 1.0)
    assert not statistics.harm_rises([2.0, 8.0], 32.0)
    with pytest.raises(ValueError, match="both sides of 1, which disturbs nothing"):
        statistics.harm_rises([0.1, 10.0], 1.0)


def test_bootstrap_of_constant_single_and_infinite_values():
    assert statistics.bootstrap([2.0] * 5)[:3] == (2, 2, 2)
    assert statistics.bootstrap([2.0] * 5, method="bca")[:3] == (2, 2, 2)
    single = statistics.bootstrap([2.0])
    assert single.value == 2
    assert np.isnan([single.low, single.high]).all()
    with_infinity = statistics.bootstrap([5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, np.inf])
    assert with_infinity.value == 8.5
    assert with_infinity.high == np.inf
    with pytest.raises(ValueError, match="finite"):
        statistics.bootstrap([1.0, np.inf], method="bca")


def test_paired_difference_removes_shared_variation():
    rng = np.random.default_rng(0)
    shared = 100 * rng.normal(size=8)
    control, lane = shared + rng.normal(size=8), shared - 5 + rng.normal(size=8)
    estimate = statistics.paired_difference(lane, control)
    assert -7 < estimate.low < estimate.value < estimate.high < -3
    assert estimate == statistics.bootstrap(lane - control)
    assert statistics.paired_difference([np.inf, 1.0], [np.inf, 0.0]).n_missing == 1
    with pytest.raises(ValueError, match="same shape"):
        statistics.paired_difference([1.0], [1.0, 2.0])


@pytest.mark.parametrize("seed", range(5))
def test_isotonic_equals_scipy(seed):
    rng = np.random.default_rng(seed)
    y, weights = rng.normal(size=(2, 3, 9))
    weights = np.abs(weights) + 0.1
    expected = [scipy.optimize.isotonic_regression(a, weights=b).x for a, b in zip(y, weights, strict=True)]
    np.testing.assert_allclose(statistics.isotonic(y, weights), expected, atol=1e-12)


def test_isotonic_ignores_values_without_weight():
    np.testing.assert_allclose(statistics.isotonic([3.0, np.nan, 1.0, 4.0], [1, 0, 1, 2]), [2, 2, 2, 4])


GRID = np.array([1.0, 3.0, 10.0, 30.0, 100.0])


def thresholds(critical):
    return np.asarray(critical)[:, None] <= GRID


def test_deterministic_threshold_is_bracketed():
    estimate = statistics.critical_magnitude(GRID, thresholds([5.0] * 8))
    np.testing.assert_allclose(estimate[:3], (np.sqrt(30), 3, 10))
    assert estimate.n == 8
    shuffled = [3, 0, 4, 1, 2]
    assert statistics.critical_magnitude(GRID[shuffled], thresholds([5.0] * 8)[:, shuffled]) == estimate


def test_the_threshold_is_interpolated_in_log_magnitude():
    table = thresholds([2.0, 2.0, 5.0, 5.0, 5.0, 5.0, 5.0, 20.0])
    estimate = statistics.critical_magnitude(GRID, table)
    share = (0.5 - 2 / 8) / (7 / 8 - 2 / 8)
    assert estimate.value == pytest.approx(3 * (10 / 3) ** share)
    assert estimate.low <= estimate.value <= estimate.high


def test_a_plateau_at_one_half_gives_its_middle():
    estimate = statistics.critical_magnitude(GRID, thresholds([2.0] * 4 + [50.0] * 4))
    assert estimate.value == pytest.approx(np.sqrt(3 * 30))
    assert estimate.low < 3
    assert estimate.high > 30


def test_a_reversal_is_pooled():
    table = thresholds([5.0] * 8).astype(float)
    table[:3, 3] = 0
    estimate = statistics.critical_magnitude(GRID, table)
    pooled = (8 + 5) / 16
    assert estimate.value == pytest.approx(3 * (10 / 3) ** (0.5 / pooled))


@pytest.mark.parametrize("increasing", [True, False])
def test_no_crossing_gives_a_one_sided_interval_and_a_reason(increasing):
    no_collapse = statistics.critical_magnitude(GRID, np.zeros((8, 5)), increasing=increasing)
    all_collapse = statistics.critical_magnitude(GRID, np.ones((8, 5)), increasing=increasing)
    assert np.isnan([no_collapse.value, all_collapse.value]).all()
    above, below = (100.0, np.inf), (0.0, 1.0)
    np.testing.assert_allclose(no_collapse[1:3], above if increasing else below)
    np.testing.assert_allclose(all_collapse[1:3], below if increasing else above)
    assert ("above 100" if increasing else "below 1") in no_collapse.reason
    assert ("below 1" if increasing else "above 100") in all_collapse.reason


def test_harm_that_grows_downwards_gives_the_mirrored_threshold():
    table = thresholds([5.0] * 5 + [20.0] * 3)
    up = statistics.critical_magnitude(GRID, table)
    down = statistics.critical_magnitude(1 / GRID, table, increasing=False)
    np.testing.assert_allclose(down[:3], (1 / up.value, 1 / up.high, 1 / up.low))


def test_few_seeds_give_an_unbounded_interval():
    assert statistics.critical_magnitude(GRID, thresholds([5.0] * 3))[1:3] == (0, np.inf)
    assert statistics.critical_magnitude(GRID, thresholds([5.0] * 4)).high < np.inf


def test_missing_cells_propagate_or_are_counted():
    table = thresholds([5.0] * 8).astype(float)
    table[0, 1] = np.nan
    propagated = statistics.critical_magnitude(GRID, table)
    assert np.isnan(propagated.value)
    assert (propagated.n, propagated.n_missing) == (7, 1)
    estimate = statistics.critical_magnitude(GRID, table, missing="count")
    np.testing.assert_allclose(estimate[:5], (np.sqrt(30), 3, 10, 7, 1))
    table[:, 1] = np.nan
    assert "no seed" in statistics.critical_magnitude(GRID, table, missing="count").reason


@pytest.mark.parametrize("spread", [0.3, 1.0])
@pytest.mark.parametrize("seeds", [8, 24])
def test_intervals_cover_the_true_logistic_threshold(spread, seeds):
    grid, true_threshold, runs = np.geomspace(1, 100, 7), 8.0, 150
    rng = np.random.default_rng(seeds)
    estimates = []
    for i in range(runs):
        threshold = rng.logistic(np.log(true_threshold), spread, size=(seeds, 1))
        table = np.log(grid) >= threshold
        estimates.append(statistics.critical_magnitude(grid, table, resamples=600, seed=i))
    assert np.mean([e.low <= true_threshold <= e.high for e in estimates]) > 0.9
    tolerance = 4 * spread * 2 / np.sqrt(seeds * runs)
    assert np.nanmean(np.log([e.value for e in estimates])) == pytest.approx(np.log(true_threshold), abs=tolerance)


@pytest.mark.parametrize(
    ("magnitudes", "table", "message"),
    [
        ([0.0, 1.0], np.zeros((4, 2)), "positive"),
        ([1.0, 1.0], np.zeros((4, 2)), "distinct"),
        ([1.0], np.zeros((4, 1)), "at least two"),
        ([1.0, 2.0], np.zeros((4, 3)), "shape"),
        ([1.0, 2.0], np.full((4, 2), 0.5), "0, 1 or NaN"),
    ],
)
def test_critical_magnitude_refuses_malformed_grids(magnitudes, table, message):
    with pytest.raises(ValueError, match=message):
        statistics.critical_magnitude(magnitudes, table)


def test_invalid_options_are_refused():
    with pytest.raises(ValueError, match="level"):
        statistics.wilson(1, 2, level=95)
    with pytest.raises(ValueError, match="between 0 and n"):
        statistics.wilson(3, 2)
    with pytest.raises(ValueError, match="method"):
        statistics.bootstrap([1.0, 2.0], method="student")
    with pytest.raises(ValueError, match="missing"):
        statistics.bootstrap([1.0, 2.0], missing="drop")
    with pytest.raises(ValueError, match="0, 1 or NaN"):
        statistics.proportion([0.5])


def test_whitening_gives_unit_covariance():
    rng = np.random.default_rng(0)
    h = rng.normal(size=(3, 200, 4)) @ rng.normal(size=(4, 4)) + 7
    whitened = (h @ statistics.whitening(h)).reshape(-1, 4)
    np.testing.assert_allclose(np.cov(whitened, rowvar=False), np.eye(4), atol=1e-10)
    with pytest.raises(ValueError, match="singular"):
        statistics.whitening(np.concatenate([h, h[..., :1]], -1))


def test_shrinkage_moves_the_covariance_towards_its_mean_variance():
    h = np.random.default_rng(0).normal(size=(500, 3)) * (1, 5, 20)
    matrix = statistics.whitening(h, 0.1)
    covariance = np.cov(h, rowvar=False)
    shrunk = 0.9 * covariance + 0.1 * np.diag(covariance).mean() * np.eye(3)
    np.testing.assert_allclose(matrix.T @ shrunk @ matrix, np.eye(3), atol=1e-10)
    assert np.isfinite(statistics.whitening(np.repeat(h, 2, axis=1), 0.1)).all()
