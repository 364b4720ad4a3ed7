"""Charts of all channels: against closed forms in float64, and in a program against stored telemetry."""

from functools import partial

import jax
import numpy as np
import pytest
from planted import System
from scipy import stats

from jaxaudit.monitoring.charts import Chart, ChartReference, scan_scores
from jaxaudit.monitoring.comparison import DetectionSettings, compare
from jaxaudit.monitoring.detector import (
    CHARTS,
    MultichannelChart,
    chart_statistics,
    ewma,
    ewma_variance,
    mewma_statistic,
    outlier_statistic,
)
from jaxaudit.monitoring.telemetry import SHRINKAGE, ChannelScaler, StepwiseStats

D, STEPS = 6, 40
NAMES = tuple(f"c{i}" for i in range(D))
T2, MAX = Chart(departure=(1.0,)), Chart(departure=(), outlier=(1.0,))
ALL = Chart(departure=(1.0, 0.2), outlier=(1.0, 0.05))


def correlated(runs, seed, steps=STEPS):
    """Runs `[runs, steps, D]` of independent steps, in which channels share a source of noise."""
    random = np.random.default_rng(seed)
    return random.normal(size=(runs, steps, D)) + 1.5 * random.normal(size=(runs, steps, 1)) + 7


def fitted(clean, chart):
    """Returns the chart's statistics as a function of runs."""
    scaler = ChannelScaler.fit(NAMES, clean)
    reference = ChartReference.fit(*scaler.standardise(clean))
    return lambda runs: chart_statistics(reference, *scaler.standardise(runs), chart)


def test_t2_is_the_quadratic_form_of_the_covariance():
    """Values are arsinh-transformed and standardised by step; the covariance is shrunk towards equal variances."""
    clean, runs = correlated(200, 0), correlated(5, 1)
    quarters = np.percentile(clean.reshape(-1, D), [25, 50, 75], axis=0)
    scale = (quarters[2] - quarters[0]) / 1.349
    y, transformed = (np.arcsinh((x - quarters[1]) / scale) for x in (clean, runs))
    envelope = StepwiseStats.fit(y)
    z, distance = ((x - envelope.mean) / envelope.std for x in (y, transformed))
    covariance = np.cov(z.reshape(-1, D).T)
    covariance = (1 - SHRINKAGE) * covariance + SHRINKAGE * np.trace(covariance) / D * np.eye(D)
    expected = np.einsum("ntd,de,nte->nt", distance, np.linalg.inv(covariance), distance)
    result = fitted(clean, T2)(runs)[..., 0]
    np.testing.assert_allclose(D * result, expected, rtol=2e-5)
    np.testing.assert_allclose(fitted(clean, MAX)(runs)[..., 0], (distance**2).max(-1), rtol=2e-5)


@pytest.mark.parametrize("rate", [1.0, 0.4, 0.1])
def test_the_statistic_of_gaussian_noise_is_chi_squared(rate):
    x = np.random.default_rng(0).normal(size=(20_000, 12, D))
    result = D * mewma_statistic(x, rate)
    for step in (0, 1, 11):
        assert stats.kstest(result[:, step], stats.chi2(D).cdf).pvalue > 0.001


def test_t2_with_estimated_means_is_f_distributed():
    """With mean and covariance of n clean runs, T2 is distributed as (n + 1) (n - 1) d / (n (n - d)) F (Hotelling)."""
    random, n = np.random.default_rng(0), 30
    result = []
    for _ in range(3000):
        clean, new = random.normal(size=(n, D)), random.normal(size=D)
        matrix = np.linalg.cholesky(np.linalg.inv(np.cov(clean.T)))
        result.append(D * mewma_statistic(((new - clean.mean(0)) @ matrix)[None, None], 1.0).item())
    scaled = np.array(result) * n * (n - D) / ((n + 1) * (n - 1) * D)
    assert stats.kstest(scaled, stats.f(D, n - D).cdf).pvalue > 0.001


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.2, 0.4])
def test_the_variance_of_the_moving_average_is_exact(rate):
    x = np.random.default_rng(0).normal(size=(40_000, 30, 1))
    t = np.arange(1, 31)
    np.testing.assert_allclose(ewma_variance(30, rate), rate / (2 - rate) * (1 - (1 - rate) ** (2 * t)), rtol=1e-12)
    weights = rate * (1 - rate) ** np.arange(30)
    np.testing.assert_allclose(ewma_variance(30, rate), np.cumsum(weights**2), rtol=1e-9)
    np.testing.assert_allclose(ewma(x, rate).var(axis=0)[:, 0], ewma_variance(30, rate), rtol=0.05)


@pytest.mark.parametrize("rate", [0.1, 0.4])
def test_a_shift_of_the_mean_has_its_expected_statistic(rate):
    """The mean is that of a noncentral chi-squared: d + |shift|^2 (1 - (1 - r)^k)^2 / variance after k steps."""
    shift, onset, steps = np.linspace(0.2, 1.2, D), 10, 30
    x = np.random.default_rng(0).normal(size=(20_000, steps, D))
    x[:, onset:] += shift
    result = D * mewma_statistic(x, rate).mean(axis=0)
    response = 1 - (1 - rate) ** np.clip(np.arange(1, steps + 1) - onset, 0, None)
    np.testing.assert_allclose(result, D + (shift**2).sum() * response**2 / ewma_variance(steps, rate), rtol=0.02)


def test_at_a_rate_of_one_there_is_no_averaging():
    x = np.random.default_rng(0).normal(size=(5, 20, D))
    np.testing.assert_allclose(D * mewma_statistic(x, 1.0), (x**2).sum(-1), rtol=1e-12)
    np.testing.assert_allclose(outlier_statistic(x, 1.0), np.abs(x).max(-1) ** 2, rtol=1e-12)


def test_the_order_of_channels_changes_nothing():
    clean, runs = correlated(30, 0), correlated(4, 1)
    order = np.random.default_rng(0).permutation(D)
    for chart in CHARTS:
        result = chart.fit(clean, NAMES)(runs)
        reordered = chart.fit(clean[..., order], [NAMES[i] for i in order])(runs[..., order])
        np.testing.assert_allclose(reordered, result, rtol=1e-6, atol=1e-9)


def test_the_score_is_the_largest_of_normalized_statistics():
    """max |z| detects one channel far off, T2 all channels slightly off; a chart of both has the larger score.

    Undisturbed, both scores have the same median.
    """
    clean, single_shift, common_shift = correlated(200, 0), correlated(50, 1), correlated(50, 2)
    single_shift[:, 20:, 3] += 9
    common_shift[:, 20:] += 1.3 * np.array([1, -1] * (D // 2))
    both, t2, furthest = (MultichannelChart(c).fit(clean, NAMES) for c in (Chart((1.0,), (1.0,)), T2, MAX))
    for runs in (clean, single_shift, common_shift):
        np.testing.assert_allclose(both(runs), np.maximum(t2(runs), furthest(runs)), rtol=1e-9)
    undisturbed = [np.median(score(correlated(200, 9)).max(axis=1)) for score in (t2, furthest)]
    assert undisturbed == pytest.approx([0, 0], abs=0.5)


def test_a_rare_value_is_held_until_the_next():
    clean, runs = correlated(40, 0), correlated(3, 1)
    for values in (clean, runs):
        values[:, np.arange(STEPS) % 5 > 0, 2] = np.nan
    filled = runs.copy()
    filled[..., 2] = runs[:, np.arange(STEPS) // 5 * 5, 2]
    score = fitted(clean, ALL)
    np.testing.assert_allclose(score(runs), score(filled), rtol=1e-6)


def program_scores(reference, y, observed, chart):
    return np.asarray(jax.jit(jax.vmap(partial(scan_scores, chart, {}, reference)))(y, observed)[0])


def test_a_chart_in_a_program_equals_the_chart_of_stored_runs():
    """Stepwise float32 equals float64 of whole runs, with missing values and beyond the length of clean runs."""
    clean, runs = correlated(40, 0), correlated(8, 1, STEPS + 5)
    random = np.random.default_rng(2)
    for values in (clean, runs):
        values[random.random(values.shape) < 0.2] = np.nan
    scaler = ChannelScaler.fit(NAMES, clean)
    reference = ChartReference.fit(*scaler.standardise(clean))
    y, observed = scaler.standardise(runs)
    observed[observed.sum(-1) == 0, 0] = 1  # a step without any value would be a gap, and these runs have none
    result = program_scores(reference, y, observed, ALL)
    np.testing.assert_allclose(result, chart_statistics(reference, y, observed, ALL), rtol=2e-4, atol=1e-5)


def test_in_a_gap_a_run_counts_as_undisturbed():
    clean, runs = correlated(40, 0), correlated(4, 1)
    scaler = ChannelScaler.fit(NAMES, clean)
    reference = ChartReference.fit(*scaler.standardise(clean))
    y, observed = scaler.standardise(runs)
    observed[:, 10:20] = 0
    result = program_scores(reference, y, observed, Chart((1.0, 0.2)))
    np.testing.assert_allclose(result[:, 10:20, 0], 0, atol=1e-9)
    assert (result[:, 19, 1] < 0.2 * result[:, 9, 1]).all()


@pytest.mark.parametrize("rates", [((), ()), ((0.0,), ()), ((0.5,), (1.5,))])
def test_rates_outside_zero_to_one_are_refused(rates):
    with pytest.raises(ValueError, match=r"a chart takes rates in \(0, 1\], not"):
        Chart(*rates)


def test_multichannel_charts_detect_a_small_common_drift():
    """The rate of false alarms is kept."""
    lanes = System().lanes(160, 40, drift=0.5)
    comparison = compare(lanes, CHARTS, DetectionSettings(folds=2, fitted=0.5))
    hits = (comparison.late_alarm >= 0).groupby([comparison.clean, comparison.detector]).mean()
    assert (hits[False][["MEWMA 0.05", "MEWMA 0.1"]] > 0.8).all()
    assert hits[False]["max |z|"] < 0.5
    assert (hits[True] <= stats.binom.ppf(0.9999, 160, 0.05) / 160 + 0.03).all()
    assert set(comparison.family) == {"all channels"}
