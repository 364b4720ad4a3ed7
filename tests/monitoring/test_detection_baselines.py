"""Baseline detectors, each against an independent implementation, and all against requirements that they share."""

from itertools import pairwise, product

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from statsmodels.regression.linear_model import yule_walker
from statsmodels.tsa.arima_process import ArmaProcess
from statsmodels.tsa.stattools import acf

from jaxaudit.monitoring.baselines import (
    BATCH,
    BOCPD,
    CUSUM,
    Autocorrelation,
    ChannelDeviation,
    RollingVariance,
    SixSigma,
    ZClip,
    cusum,
    fit_autoregression,
    gradient_norm_channel,
    log_odds_of_change,
    rolling_kendall_tau,
    simulate_autoregression,
    standard_baselines,
)
from jaxaudit.monitoring.detector import CHARTS, infinite_when_diverged
from jaxaudit.monitoring.scoring import threshold
from jaxaudit.monitoring.telemetry import HALF_WIDTH, StepwiseStats, forward_fill, std_floor

CHANNELS = ("performance", "loss", "gradient_norm", "rate", "seldom", "never", "layer_gradient_norm[h/0]")


def telemetry(runs, steps, seed):
    """`[runs, steps, d]`: performance that begins late, a constant channel, a rare one, an empty one, and others."""
    random, step = np.random.default_rng(seed), np.arange(steps)
    performance = np.cumsum(random.normal(size=(runs, steps)), axis=1) + step
    performance[:, :3] = np.nan
    loss = 5 * np.exp(-step / 50) + random.lognormal(sigma=0.3, size=(runs, steps))
    rare = np.where(step % 10 == 9, random.normal(size=(runs, steps)), np.nan)
    rate, empty = np.full((runs, steps), 3e-4), np.full((runs, steps), np.nan)
    norm, layer = random.lognormal(size=(2, runs, steps))
    return np.stack([performance, loss, norm, rate, rare, empty, layer], axis=-1).astype(np.float32)


CLEAN = telemetry(20, 160, 0)
DETECTORS = standard_baselines(CHANNELS)
SCORES = {detector.name: detector.fit(CLEAN, CHANNELS) for detector in DETECTORS}
for_each_detector = pytest.mark.parametrize("score", SCORES.values(), ids=SCORES.keys())


def one_channel(detector, clean, values):
    """Scores `[n, T]` of a channel by a detector that is fitted to clean runs of this channel only."""
    return detector.fit(clean[..., None], [detector.channel])(values[..., None])


def autoregressive(coefficient, runs, seed):
    """Autoregressive series `[runs, T]` with the coefficient of each step `[T]` and innovations of variance 1."""
    noise = np.random.default_rng(seed).normal(size=(runs, len(coefficient)))
    for t in range(1, len(coefficient)):
        noise[:, t] += coefficient[t] * noise[:, t - 1]
    return noise


def test_standard_baselines_depend_on_the_channels():
    assert list(SCORES) == [
        "Hotelling's T2",
        *(f"MEWMA {rate}" for rate in (0.05, 0.1, 0.2, 0.4)),
        "max |z|",
        "T2 + max |z|",
        "the monitor's score without its model",
        *(f"deviation of {channel}" for channel in CHANNELS),
        "CUSUM of performance",
        "rolling variance of performance",
        "autocorrelation of performance",
        "BOCPD of performance",
        "CUSUM of gradient_norm",
        "BOCPD of gradient_norm",
        "six-sigma rule of loss",
        "six-sigma rule of gradient_norm",
        "ZClip of gradient_norm",
    ]
    assert SixSigma("performance", sign=-1.0) in standard_baselines(["performance"])
    assert standard_baselines(["entropy"]) == (*CHARTS, ChannelDeviation("entropy"))


@pytest.mark.parametrize(
    ("channels", "expected"),
    [
        (["critic_gradient_norm", "gradient_norm"], "gradient_norm"),
        (["layer_gradient_norm[h/0]", "critic_gradient_norm"], "critic_gradient_norm"),
        (["gradient_norm[h/0]", "loss"], None),
    ],
)
def test_the_gradient_norm_is_found_by_name(channels, expected):
    assert gradient_norm_channel(channels) == expected


@for_each_detector
@pytest.mark.parametrize("steps", [1, 5, 40, 160, 230])
def test_every_step_has_a_finite_score(score, steps):
    result = score(telemetry(7, steps, 1))
    assert result.shape == (7, steps)
    assert np.isfinite(result).all()


@for_each_detector
def test_a_score_does_not_depend_on_later_steps(score):
    runs = telemetry(5, 200, 2)
    changed = runs.copy()
    changed[:, 130:] = 7 * changed[:, 130:] + 3
    changed[0, 150:] = np.nan
    np.testing.assert_allclose(score(changed)[:, :130], score(runs)[:, :130], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(score(runs[:, :90]), score(runs)[:, :90], rtol=1e-9, atol=1e-9)


@for_each_detector
def test_a_score_does_not_depend_on_other_runs(score):
    runs = telemetry(6, 160, 3)
    np.testing.assert_allclose(score(runs[4:5]), score(runs)[4:5], rtol=1e-9, atol=1e-9)


@for_each_detector
@pytest.mark.parametrize("channel", ["loss", "rate", "layer_gradient_norm[h/0]"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_values_of_any_channel_score_infinity(score, channel, value):
    runs = telemetry(3, 160, 4)
    runs[1, 60, CHANNELS.index(channel)] = value
    assert np.isfinite(score(runs)[[0, 2]]).all()
    assert np.isfinite(score(runs)[1, :60]).all()
    assert (score(runs)[1, 60:] == np.inf).all()


@for_each_detector
@pytest.mark.parametrize("value", [3e38, -1e300, 0.0])
def test_extreme_values_have_finite_scores(score, value):
    runs = telemetry(3, 160, 5).astype(np.float64)
    runs[1, 100:] = value
    runs[2, 100] = value
    with np.errstate(all="raise", under="ignore"):
        assert np.isfinite(score(runs)).all()


def test_clean_runs_may_have_diverged():
    clean = CLEAN.copy()
    clean[3, 80:, :4] = np.inf
    for detector in DETECTORS:
        assert np.isfinite(detector.fit(clean, CHANNELS)(telemetry(4, 160, 6))).all(), detector.name


def test_an_absent_channel_is_refused():
    with pytest.raises(ValueError, match="no channel 'lost'; there are: loss, norm"):
        CUSUM("lost").fit(np.zeros((2, 3, 2)), ["norm", "loss"])


def test_only_channels_complete_in_clean_runs_indicate_divergence():
    clean = np.zeros((4, 6, 2))
    clean[2, 3, 1] = np.nan
    runs = np.zeros((2, 9, 2))
    runs[0, 2, 1] = np.nan
    runs[1, 7, 0] = np.inf
    expected = np.zeros((2, 9))
    expected[1, 7:] = np.inf
    score = infinite_when_diverged(lambda runs: np.zeros(runs.shape[:2]), clean)
    np.testing.assert_array_equal(score(runs), expected)


def test_missing_values_are_carried_forward_as_by_pandas():
    values = np.random.default_rng(0).normal(size=(8, 30))
    values[np.random.default_rng(1).random(values.shape) < 0.6] = np.nan
    values[0], values[1, :5] = np.nan, np.nan
    np.testing.assert_array_equal(forward_fill(values), pd.DataFrame(values).ffill(axis=1).to_numpy())
    with_infinity = np.where(np.isnan(values), -np.inf, values)
    np.testing.assert_array_equal(forward_fill(with_infinity), forward_fill(values))


def test_stepwise_statistics_pool_the_spread_of_neighbouring_steps():
    clean = np.random.default_rng(0).normal(size=(9, 40)) * np.linspace(1, 5, 40)
    clean[:, :4] = np.nan
    clean[2, :11] = np.nan
    envelope = StepwiseStats.fit(clean)
    mean = np.array([np.nanmean(clean[:, t]) if t >= 4 else np.nan for t in range(40)])
    np.testing.assert_allclose(envelope.mean, mean)
    for t in range(4, 40):
        window = slice(max(4, t - HALF_WIDTH), t + HALF_WIDTH + 1)
        degrees = sum(np.isfinite(column).sum() - 1 for column in clean.T[window])
        std = np.sqrt(np.nansum((clean[:, window] - mean[window]) ** 2) / degrees)
        np.testing.assert_allclose(envelope.std[t], std)
    assert np.isnan(envelope.std[:4]).all()
    z = envelope.standardise(np.full((1, 45), 2.0))
    np.testing.assert_allclose(z[0, 4:40], (2 - envelope.mean[4:]) / envelope.std[4:])
    assert (z[0, :4] == 0).all()
    assert (z[0, 40:] == z[0, 39]).all()


def test_standardised_clean_runs_have_unit_variance_along_a_steep_trend():
    trend = 100 * np.exp(-np.arange(200) / 5)
    random = np.random.default_rng(0)
    envelope = StepwiseStats.fit(trend + random.normal(size=(20, 200)))
    z = envelope.standardise(trend + random.normal(size=(2000, 200)))
    np.testing.assert_allclose(z.std(axis=0), 1, atol=0.2)
    np.testing.assert_allclose(z.mean(axis=0), 0, atol=4 / np.sqrt(20))


def test_the_standard_deviation_has_a_floor():
    assert std_floor(np.array([[0.0, 10.0], [0.0, 10.0]])) == pytest.approx(0.05)
    assert std_floor(np.full((3, 4), 3e-4)) == pytest.approx(3e-10)
    assert std_floor(np.zeros((3, 4))) > 0
    assert std_floor(np.full((3, 4), np.nan)) == 1
    schedule = np.linspace(1, 2, 50)[None]
    deviation = one_channel(ChannelDeviation("rate"), np.repeat(schedule, 5, axis=0), schedule * [[1.0], [1.01]])
    assert (deviation[0] < 1e-3).all()
    assert (deviation[1] > 3).all()


def test_deviations_of_either_sign_count():
    clean = np.random.default_rng(0).normal(size=(500, 30))
    deviation = one_channel(ChannelDeviation("x"), clean, np.array([[5.0] * 30, [-5.0] * 30]))
    np.testing.assert_allclose(deviation, 5, atol=0.7)


def test_cusum_equals_the_tabular_cusum():
    z = np.random.default_rng(0).normal(size=(4, 60)) + np.linspace(-1, 1, 4)[:, None]
    expected = np.zeros_like(z)
    for run, row in enumerate(z):
        up = down = 0.0
        for t, value in enumerate(row):
            up, down = max(0.0, value - 0.5 + up), max(0.0, -0.5 - value + down)
            expected[run, t] = max(up, down)
    np.testing.assert_allclose(cusum(z, 0.5), expected, rtol=1e-12)
    envelope = StepwiseStats.fit(z)
    np.testing.assert_array_equal(one_channel(CUSUM("x", slack=0.3), z, z), cusum(envelope.standardise(z), 0.3))


def test_cusum_has_the_run_length_of_published_tables():
    """The in-control average run length with k = 0.5 and h = 4 is 168 (Montgomery, table 9.3)."""
    above = cusum(np.random.default_rng(0).normal(size=(2000, 2000)), 0.5) > 4
    lengths = 1 + above.argmax(axis=1)
    assert above.any(axis=1).all()
    assert np.mean(lengths) == pytest.approx(168, abs=4 * 168 / np.sqrt(2000))


def test_six_sigma_standardises_by_the_recent_history():
    random = np.random.default_rng(0)
    values = random.lognormal(size=(3, 220))
    values[0, :30] = np.nan
    expected = np.zeros_like(values)
    for run, row in enumerate(values):
        for t in range(220):
            before = [x for x in row[max(0, t - 100) : t] if np.isfinite(x)]
            if len(before) >= 16:
                expected[run, t] = (row[t] - np.mean(before)) / np.std(before, ddof=1)
    np.testing.assert_allclose(one_channel(SixSigma("x", history=100), values, values), expected, rtol=1e-9)
    lower = one_channel(SixSigma("x", history=100, sign=-1.0), values, values)
    np.testing.assert_allclose(lower, -expected, rtol=1e-9)
    flat = np.r_[np.ones(50), 2.0][None]
    assert one_channel(SixSigma("x"), values, flat)[0, -1] == pytest.approx(1 / std_floor(values[:, 30:]), rel=0.2)


def test_zclip_equals_the_algorithm_of_its_paper():
    values = np.random.default_rng(0).lognormal(size=(3, 120))
    values[1, 60] = 80.0
    values[2, :7] = np.nan
    expected = np.zeros_like(values)
    for run, row in enumerate(values):
        start = int(np.isfinite(row).argmax()) + 25
        mean, variance = np.mean(row[start - 25 : start]), np.var(row[start - 25 : start])
        for t in range(start, 120):
            std = variance**0.5
            expected[run, t] = z = (row[t] - mean) / std
            norm = row[t] if z <= 2.5 else mean + 2.5 * std / (z / 2.5)
            mean = 0.97 * mean + 0.03 * norm
            variance = 0.97 * variance + 0.03 * (norm - mean) ** 2
    assert expected.max() > 10
    np.testing.assert_allclose(one_channel(ZClip(), values, values), expected, rtol=1e-9)


@pytest.mark.parametrize("length", [2, 12, 40, 60])
def test_rolling_kendall_tau_equals_scipy(length):
    values = np.random.default_rng(0).normal(size=(3, 40)).cumsum(axis=1)
    result = rolling_kendall_tau(values, length)
    assert (result[:, 0] == 0).all()
    for run, t in product(range(3), range(1, 40)):
        window = values[run, max(0, t + 1 - length) : t + 1]
        assert result[run, t] == pytest.approx(stats.kendalltau(np.arange(len(window)), window).statistic)


def test_ties_count_as_neither_rising_nor_falling():
    assert rolling_kendall_tau(np.array([[1.0, 1.0, 2.0]]), 3)[0, 2] == pytest.approx(2 / 3)
    assert (rolling_kendall_tau(np.ones((2, 9)), 5) == 0).all()


def test_early_warning_indicators_equal_statsmodels_and_numpy():
    windows = np.random.default_rng(0).normal(size=(5, 30)).cumsum(axis=1)
    result = Autocorrelation("x").indicator(windows)
    np.testing.assert_allclose(result, [acf(row, nlags=1)[1] for row in windows])
    np.testing.assert_allclose(RollingVariance("x").indicator(windows), [np.var(row) for row in windows])
    assert (Autocorrelation("x").indicator(np.ones((2, 30))) == 0).all()


@pytest.mark.filterwarnings("ignore:yule_walker currently")
@pytest.mark.parametrize("coefficients", [[0.9], [0.5, 0.3], [1.2, -0.4]])
def test_the_autoregression_is_recovered_as_by_yule_walker(coefficients):
    series = simulate_autoregression(np.array(coefficients), 40, 500)
    result = fit_autoregression(series)
    assert len(coefficients) <= len(result) < 10
    np.testing.assert_allclose(np.r_[result, np.zeros(10)][:2], np.r_[coefficients, 0.0][:2], atol=0.03)
    from_one_series = fit_autoregression(series[:1])
    expected, _ = yule_walker(series[0], order=len(from_one_series), method="mle", demean=False)
    np.testing.assert_allclose(from_one_series, expected, rtol=1e-9)


def test_simulated_series_have_the_theoretical_autocovariance():
    coefficients = np.array([1.2, -0.4])
    series = simulate_autoregression(coefficients, 4000, 30)
    process = ArmaProcess(ar=np.r_[1, -coefficients])
    result = [np.mean(series[:, : 30 - lag] * series[:, lag:]) for lag in range(5)]
    np.testing.assert_allclose(result, process.acovf(5), rtol=0.05)
    np.testing.assert_allclose(series[:, 0].var(), process.acovf(1)[0], rtol=0.1)


@pytest.mark.parametrize("kind", [RollingVariance, Autocorrelation])
def test_trend_scores_have_the_same_distribution_at_every_step(kind):
    """In clean runs, the mean and the variance of the score are the same at every step."""
    clean, runs = (autoregressive(np.full(260, 0.8), count, seed)[:, 60:] for count, seed in ((1000, 1), (1000, 2)))
    scores = one_channel(kind("x", window=30, trend=60), clean, runs)
    assert (scores[:, :38] == 0).all()
    np.testing.assert_allclose(scores[:, 38:].mean(axis=0), 0, atol=0.2)
    np.testing.assert_allclose(scores[:, 38:].std(axis=0), 1, atol=0.1)


def marginal(values):
    """Log-density of a segment with mean and variance integrated out, a multivariate Student t."""
    size = len(values)
    return stats.multivariate_t(shape=np.eye(size) + np.ones((size, size)), df=2).logpdf(values)


def test_bocpd_equals_the_sum_over_all_segmentations():
    """Enumerates every way to cut each prefix of a run into segments."""
    hazard, recent = 0.07, 3
    z = np.random.default_rng(0).normal(size=(2, 9))
    z[1, 5:] += 4
    result = log_odds_of_change(z, hazard, recent)
    np.testing.assert_allclose(result[:, 0], np.log(hazard / (1 - hazard)))
    for run, t in product(range(2), range(1, 9)):
        with_change, without_change = [], []
        for cut in product([False, True], repeat=t):
            edges = [0, *(1 + np.flatnonzero(cut)), t + 1]
            prior = sum(cut) * np.log(hazard) + (t - sum(cut)) * np.log1p(-hazard)
            joint = prior + sum(marginal(z[run, a:b]) for a, b in pairwise(edges))
            (with_change if edges[-2] > max(0, t - recent) else without_change).append(joint)
        assert result[run, t] == pytest.approx(
            np.logaddexp.reduce(with_change) - np.logaddexp.reduce(without_change), abs=1e-8
        )


def test_bocpd_does_not_saturate():
    z = np.random.default_rng(0).normal(size=(6, 80))
    z[:, 60:] += 10.0 ** np.arange(1, 7)[:, None]
    odds = log_odds_of_change(z, 0.01, 10).max(axis=1)
    assert (np.diff(odds) > 5).all()
    assert odds[-1] > 100


def test_bocpd_scores_do_not_depend_on_batches():
    clean = np.random.default_rng(0).normal(size=(2 * BATCH + 10, 30))
    scores = one_channel(BOCPD("x"), clean, clean)
    np.testing.assert_allclose(scores[-10:], one_channel(BOCPD("x"), clean, clean[-10:]), rtol=1e-9)
    assert one_channel(BOCPD("x"), clean, clean[:0]).shape == (0, 30)


STEPS = np.arange(300)
COEFFICIENTS = np.full(300, 0.3)
PLANTED = {
    "deviation of performance": (ChannelDeviation("performance"), lambda x: x + 8 * (STEPS == 180)),
    "CUSUM of performance": (CUSUM("performance"), lambda x: x + 1.5 * (STEPS >= 150)),
    "BOCPD of performance": (BOCPD("performance"), lambda x: x + 6 * (STEPS >= 150)),
    "six sigma of performance": (SixSigma("performance", sign=-1.0), lambda x: x - 8 * (STEPS == 180)),
    "ZClip": (ZClip(), lambda x: x + 8 * (STEPS == 180)),
    "rolling variance": (
        RollingVariance("performance"),
        lambda x: x * (1 + 2 * np.clip((STEPS - 150) / 100, 0, 1)),
    ),
}


def alarms(detector, changed, seed=0):
    """Shares of clean and of changed runs with an alarm at a rate of 5%; steps `[n, T]` of changed runs with alarms."""
    clean, held_out, fresh = (autoregressive(COEFFICIENTS, runs, seed + i) for i, runs in enumerate((30, 199, 400)))
    score = detector.fit(clean[..., None], [detector.channel])
    limit = threshold(score(held_out[..., None]).max(axis=1), 0.05)
    above = [score(runs[..., None]) > limit for runs in (fresh, changed)]
    return *(hits.any(axis=1).mean() for hits in above), above[1]


@pytest.mark.parametrize(("detector", "change"), PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_change_is_detected(detector, change):
    false_alarms, detected, above = alarms(detector, change(autoregressive(COEFFICIENTS, 200, 9)))
    assert false_alarms < 0.1
    assert detected > 0.8
    assert above[:, :150].any(axis=1).mean() < 0.1


def test_critical_slowing_down_is_detected():
    """The coefficient rises to 1, as before a fold bifurcation, while the innovations stay the same."""
    rising = np.where(STEPS < 100, 0.3, np.minimum(0.3 + 0.67 * (STEPS - 100) / 150, 0.97))
    false_alarms, detected, above = alarms(Autocorrelation("performance"), autoregressive(rising, 200, 9))
    assert false_alarms < 0.1
    assert detected > 0.4
    assert above[:, :100].any(axis=1).mean() < 0.1


def test_a_rise_of_variance_does_not_raise_autocorrelation_alarms():
    changed = autoregressive(COEFFICIENTS, 200, 9) * np.where(STEPS < 150, 1, 4)
    assert alarms(Autocorrelation("performance"), changed)[1] < 0.15


def test_one_sided_rules_ignore_improvements():
    """One-sided rules raise no alarm for improvements."""
    up = autoregressive(COEFFICIENTS, 200, 9) + 8 * (STEPS == 180)
    for detector in (SixSigma("performance", sign=-1.0), SixSigma("performance")):
        assert (alarms(detector, up)[1] > 0.5) == (detector.sign > 0)
