"""Charts of all channels: against closed forms in float64, and a program's against that of stored telemetry."""

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
    """Independent steps of channels that share a source of noise, `[runs, steps, D]`."""
    random = np.random.default_rng(seed)
    return random.normal(size=(runs, steps, D)) + 1.5 * random.normal(size=(runs, steps, 1)) + 7


def fitted(clean, chart):
    """The chart's statistics as a function of runs of the channels NAMES."""
    known = ChannelScaler.fit(NAMES, clean)
    reference = ChartReference.fit(*known.standardise(clean))
    return lambda runs: chart_statistics(reference, *known.standardise(runs), chart)


def test_t2_is_the_quadratic_form_of_the_covariance():
    """Of a channel's arsinh distance from the clean runs' mean at that step, shrunk towards equal variances."""
    clean, runs = correlated(200, 0), correlated(5, 1)
    quarters = np.percentile(clean.reshape(-1, D), [25, 50, 75], axis=0)
    scale = (quarters[2] - quarters[0]) / 1.349
    y, other = (np.arcsinh((x - quarters[1]) / scale) for x in (clean, runs))
    envelope = StepwiseStats.fit(y)
    z, distance = ((x - envelope.mean) / envelope.std for x in (y, other))
    covariance = np.cov(z.reshape(-1, D).T)
    covariance = (1 - SHRINKAGE) * covariance + SHRINKAGE * np.trace(covariance) / D * np.eye(D)
    wanted = np.einsum("ntd,de,nte->nt", distance, np.linalg.inv(covariance), distance)
    found = fitted(clean, T2)(runs)[..., 0]
    np.testing.assert_allclose(D * found, wanted, rtol=2e-5)
    np.testing.assert_allclose(fitted(clean, MAX)(runs)[..., 0], (distance**2).max(-1), rtol=2e-5)


@pytest.mark.parametrize("rate", [1.0, 0.4, 0.1])
def test_of_white_gaussian_values_the_statistic_is_chi_squared_at_every_step(rate):
    x = np.random.default_rng(0).normal(size=(20_000, 12, D))
    found = D * mewma_statistic(x, rate)
    for step in (0, 1, 11):
        assert stats.kstest(found[:, step], stats.chi2(D).cdf).pvalue > 0.001


def test_t2_among_estimated_means_is_f_distributed():
    """Of further runs, with mean and covariance from 30 clean ones: (n + 1) (n - 1) d / (n (n - d)) F (Hotelling)."""
    random, n = np.random.default_rng(0), 30
    found = []
    for _ in range(3000):
        clean, new = random.normal(size=(n, D)), random.normal(size=D)
        matrix = np.linalg.cholesky(np.linalg.inv(np.cov(clean.T)))
        found.append(D * mewma_statistic(((new - clean.mean(0)) @ matrix)[None, None], 1.0).item())
    scaled = np.array(found) * n * (n - D) / ((n + 1) * (n - 1) * D)
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
    """d + |shift|^2 (1 - (1 - r)^k)^2 / variance at the k-th step since: noncentral chi-squared."""
    shift, onset, steps = np.linspace(0.2, 1.2, D), 10, 30
    x = np.random.default_rng(0).normal(size=(20_000, steps, D))
    x[:, onset:] += shift
    found = D * mewma_statistic(x, rate).mean(axis=0)
    moved = 1 - (1 - rate) ** np.clip(np.arange(1, steps + 1) - onset, 0, None)
    np.testing.assert_allclose(found, D + (shift**2).sum() * moved**2 / ewma_variance(steps, rate), rtol=0.02)


def test_at_a_rate_of_one_mewma_is_t2_and_the_furthest_is_plain():
    x = np.random.default_rng(0).normal(size=(5, 20, D))
    np.testing.assert_allclose(D * mewma_statistic(x, 1.0), (x**2).sum(-1), rtol=1e-12)
    np.testing.assert_allclose(outlier_statistic(x, 1.0), np.abs(x).max(-1) ** 2, rtol=1e-12)


def test_the_order_of_channels_changes_nothing():
    clean, runs = correlated(30, 0), correlated(4, 1)
    order = np.random.default_rng(0).permutation(D)
    for chart in CHARTS:
        found = chart.fit(clean, NAMES)(runs)
        again = chart.fit(clean[..., order], [NAMES[i] for i in order])(runs[..., order])
        np.testing.assert_allclose(again, found, rtol=1e-6, atol=1e-9)


def test_the_most_unusual_of_several_statistics_counts_on_its_own_scale():
    """One channel far off sets off max |z|, all a little off T2; a chart of both has both, at about the same height."""
    clean, one, every = correlated(200, 0), correlated(50, 1), correlated(50, 2)
    one[:, 20:, 3] += 9
    every[:, 20:] += 1.3 * np.array([1, -1] * (D // 2))
    both, far, furthest = (MultichannelChart(c).fit(clean, NAMES) for c in (Chart((1.0,), (1.0,)), T2, MAX))
    for runs in (clean, one, every):
        np.testing.assert_allclose(both(runs), np.maximum(far(runs), furthest(runs)), rtol=1e-9)
    at_rest = [np.median(score(correlated(200, 9)).max(axis=1)) for score in (far, furthest)]
    assert at_rest == pytest.approx([0, 0], abs=0.5)


def test_a_value_that_is_seldom_there_counts_until_the_next():
    clean, runs = correlated(40, 0), correlated(3, 1)
    for values in (clean, runs):
        values[:, np.arange(STEPS) % 5 > 0, 2] = np.nan
    held = runs.copy()
    held[..., 2] = runs[:, np.arange(STEPS) // 5 * 5, 2]
    score = fitted(clean, ALL)
    np.testing.assert_allclose(score(runs), score(held), rtol=1e-6)


def in_program(reference, y, seen, chart):
    return np.asarray(jax.jit(jax.vmap(partial(scan_scores, chart, {}, reference)))(y, seen)[0])


def test_the_chart_of_a_program_is_that_of_stored_telemetry():
    """Step by step in float32, with values missing, against all at once in float64; also beyond the clean runs."""
    clean, runs = correlated(40, 0), correlated(8, 1, STEPS + 5)
    random = np.random.default_rng(2)
    for values in (clean, runs):
        values[random.random(values.shape) < 0.2] = np.nan
    known = ChannelScaler.fit(NAMES, clean)
    reference = ChartReference.fit(*known.standardise(clean))
    y, seen = known.standardise(runs)
    seen[seen.sum(-1) == 0, 0] = 1  # a step without any value is a gap, which stored runs have none of
    found = in_program(reference, y, seen, ALL)
    np.testing.assert_allclose(found, chart_statistics(reference, y, seen, ALL), rtol=2e-4, atol=1e-5)


def test_in_a_gap_a_run_is_what_clean_ones_are():
    clean, runs = correlated(40, 0), correlated(4, 1)
    known = ChannelScaler.fit(NAMES, clean)
    reference = ChartReference.fit(*known.standardise(clean))
    y, seen = known.standardise(runs)
    seen[:, 10:20] = 0
    found = in_program(reference, y, seen, Chart((1.0, 0.2)))
    np.testing.assert_allclose(found[:, 10:20, 0], 0, atol=1e-9)
    assert (found[:, 19, 1] < 0.2 * found[:, 9, 1]).all()


@pytest.mark.parametrize("rates", [((), ()), ((0.0,), ()), ((0.5,), (1.5,))])
def test_rates_are_between_zero_and_one(rates):
    with pytest.raises(ValueError, match=r"a chart takes rates in \(0, 1\], not"):
        Chart(*rates)


def test_a_chart_of_all_channels_finds_a_drift_that_no_channel_shows():
    """Its false alarms are as stated."""
    lanes = System().lanes(160, 40, drift=0.5)
    said = compare(lanes, CHARTS, DetectionSettings(folds=2, fitted=0.5))
    hits = (said.late_alarm >= 0).groupby([said.clean, said.detector]).mean()
    assert (hits[False][["MEWMA 0.05", "MEWMA 0.1"]] > 0.8).all()
    assert hits[False]["max |z|"] < 0.5
    assert (hits[True] <= stats.binom.ppf(0.9999, 160, 0.05) / 160 + 0.03).all()
    assert set(said.family) == {"all channels"}
