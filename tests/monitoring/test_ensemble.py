"""The ensemble of control charts: against published formulas, and on changes of a known kind."""

import warnings
from functools import partial

import jax
import numpy as np
import pandas as pd
import pytest
from directories import DATA
from planted import ONSET, SIZES, System

from jaxaudit.monitoring import ensemble
from jaxaudit.monitoring.charts import Chart, scan_scores
from jaxaudit.monitoring.ensemble import Ensemble, Location, fit_vector_autoregression
from jaxaudit.monitoring.monitor import Monitor, single_precision
from jaxaudit.monitoring.page_arrays import QUANTILES, lane_quantiles
from jaxaudit.monitoring.scoring import cross_validated_scores
from jaxaudit.monitoring.telemetry import MIN_STD_OF_AVERAGE, ChannelScaler, StepwiseStats

NAMES = [f"c{i}" for i in range(12)]
STORED = DATA / "monitors"


def standardised(runs, clean):
    scaler = ChannelScaler.fit(NAMES[: clean.shape[-1]], clean)
    return scaler.standardise(runs)


def scores_of(runs, clean, charts=None):
    """Returns scores of runs `[n, T]` against clean ones by name, and the reference."""
    charts = charts or Ensemble()
    reference = charts.fit_reference({}, *standardised(clean, clean))
    scores, _ = charts.score_runs({}, reference, *standardised(runs, clean))
    return dict(zip(charts.score_names, np.moveaxis(scores, -1, 0), strict=True)), reference


@pytest.fixture(scope="module")
def clean():
    return System().runs(60, 1)


def test_scores_of_whole_runs_equal_stepwise_scores_of_a_program(clean):
    charts = Ensemble()
    runs = System().runs(6, 2, "fold", 0.05)
    runs[1, 50:60] = np.nan
    runs[2, ::2, 3] = np.nan
    runs[3, :20, 5] = np.nan
    runs[4, 100:, 0] = 1e30
    y, observed = standardised(runs, clean)
    reference = charts.fit_reference({}, *standardised(clean, clean))
    scores, states = charts.score_runs({}, reference, y, observed)
    steps, latents = jax.jit(jax.vmap(partial(scan_scores, charts, {}, single_precision(reference))))(y, observed)
    assert np.isfinite(scores).all()
    # Squares are bounded by 1e-4 before their logarithm is taken, so that rounding can move a score at that bound.
    np.testing.assert_allclose(np.asarray(steps), scores, rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(np.asarray(latents), states, rtol=1e-6)


def test_scores_do_not_depend_on_other_runs(clean):
    runs = System().runs(4, 3)
    runs[0, 50:60] = np.nan
    together, reference = scores_of(runs, clean)
    alone = Ensemble().score_runs({}, reference, *standardised(runs[:1], clean))[0]
    np.testing.assert_array_equal(np.stack([scores[0] for scores in together.values()], -1), alone[0])


def moving_average(values, rate, start):
    """Computes an exponential moving average of runs `[n, T, d]` by pandas."""
    first = np.full((1, values.shape[2]), start)
    return np.stack([pd.DataFrame(np.vstack([first, x])).ewm(alpha=rate, adjust=False).mean()[1:] for x in values])


def test_every_statistic_equals_its_formula_in_pandas(clean):
    """Rates are given out of order, and a run has an outlier, which is clipped except at a rate of 1."""
    charts = Ensemble(departure=(0.03, 1.0, 0.1), outlier=(0.2, 1.0), surprise=(0.05,), dynamics=(0.03, 0.2))
    runs = System().runs(2, 4)
    runs[1, 90, 3] = 60.0
    scores_by_name, reference = scores_of(runs, clean, charts)
    z = reference.telemetry.standardise(standardised(runs, clean)[0])
    assert np.abs(z).max() > 4
    before = np.concatenate([np.zeros_like(z[:, :1]), z[:, :-1]], 1)
    e = reference.innovations.standardise(z - before @ reference.transition)
    h = e @ reference.adjust
    clipped_z, clipped_e, clipped_h, clipped_before = (np.clip(x, -4, 4) for x in (z, e, h, before))
    square = np.minimum(((e @ reference.decorrelate_innovations) ** 2).mean(-1, keepdims=True), 16)
    steps = np.arange(1, z.shape[1] + 1)
    expected = {}
    for rate in (0.03, 1.0, 0.1, 0.2):
        variance = rate / (2 - rate) * (1 - (1 - rate) ** (2 * steps))
        level = moving_average(z if rate == 1 else clipped_z, rate, 0.0) / np.sqrt(variance)[:, None]
        index = charts.levels.index(rate)
        expected[f"departure_{rate:g}"] = ((level @ reference.decorrelate[index]) ** 2).mean(-1)
        expected[f"outlier_{rate:g}"] = ((level / reference.scale[index]) ** 2).max(-1)
    expected["burst_1"] = (h**2).max(-1)

    def largest_squared_z(values, location, index):
        return (((values - location.mean[index]) / location.std[index]) ** 2).max(-1)

    expected["surprise_0.05"] = largest_squared_z(np.log(moving_average(square, 0.05, 1.0)), reference.surprise, 0)
    for index, (name, values, rate) in enumerate(
        [("z", clipped_z, 0.1), ("z", clipped_z, 0.03), ("e", clipped_e, 0.1), ("h", clipped_h, 0.03)]
    ):
        logarithm = np.log(np.maximum(moving_average(values**2, rate, 1.0), 1e-4))
        expected[f"spread_{name}_{rate:g}"] = largest_squared_z(logarithm, reference.squares, index)
    for index, rate in enumerate((0.03, 0.2)):
        expected[f"dynamics_{rate:g}"] = largest_squared_z(
            moving_average(clipped_h * clipped_before, rate, 0.0), reference.products, index
        )
    for kind, values in scores_by_name.items():
        np.testing.assert_allclose(values, expected[kind], rtol=1e-8, err_msg=kind)


def test_the_reference_ignores_repeated_values(clean):
    """Where a channel repeats its value for lack of a new one, it adds no innovation and no product."""
    sparse = clean.copy()
    sparse[:, 1::2, 0] = np.nan
    reference = Ensemble().fit_reference({}, *standardised(sparse, sparse))
    assert np.isnan(reference.innovations.mean[1::2, 0]).all()
    assert np.isfinite(reference.innovations.mean[:, 1:]).all()
    z = reference.telemetry.standardise(standardised(sparse, sparse)[0])[:, ::2, 0]
    averages = moving_average(np.clip(z, -4, 4)[..., None] ** 2, 0.1, 1.0)
    expected = np.log(averages).mean()
    assert np.isclose(reference.squares.mean[0, 0], expected, atol=1e-6)


def test_adjusted_innovations_are_residuals_of_regressions(clean, monkeypatch):
    """The inverse covariance and least squares for each channel give the same residuals (Hawkins, 1991)."""
    monkeypatch.setattr(ensemble, "SHRINKAGE", 0.0)
    scores, reference = scores_of(clean, clean)
    z = reference.telemetry.standardise(standardised(clean, clean)[0])
    before = np.concatenate([np.zeros_like(z[:, :1]), z[:, :-1]], 1)
    e = reference.innovations.standardise(z - before @ reference.transition).reshape(-1, 12)
    e = e - e.mean(0)
    residuals = np.empty_like(e)
    for i in range(12):
        others = np.delete(e, i, 1)
        residuals[:, i] = e[:, i] - others @ np.linalg.lstsq(others, e[:, i])[0]
    residuals /= np.sqrt((residuals**2).mean(0))
    np.testing.assert_allclose(scores["burst_1"].ravel(), (residuals**2).max(1), rtol=0.02)


def test_the_autoregression_is_a_ridge_regression():
    random = np.random.default_rng(0)
    before, z = random.normal(size=(2, 5, 40, 3))
    result = fit_vector_autoregression(before, z, np.ones(z.shape, bool))
    weight = np.sqrt(200 * (ensemble.RIDGE + 3 / 200))
    rows = np.vstack([before.reshape(-1, 3), weight * np.eye(3)])
    expected = np.linalg.lstsq(rows, np.vstack([z.reshape(-1, 3), np.zeros((3, 3))]))[0]
    np.testing.assert_allclose(result, expected, rtol=1e-9)


def test_averages_advance_only_on_measured_values(clean):
    """Repeated values between two measurements would move a channel's averages and make its spread look small."""
    charts = Ensemble(departure=(1.0,), outlier=(0.1,), surprise=(), spread_e=(), spread_h=(), dynamics=())
    single = clean[..., :1]
    sparse = single.copy()
    sparse[:, 1::2] = np.nan
    sparse = np.concatenate([sparse, clean[..., 1:2]], -1)
    scores, reference = scores_of(sparse, sparse, charts)
    z = reference.telemetry.standardise(standardised(sparse, sparse)[0])[:, ::2, 0]
    squares = np.ones(len(z))
    for t in range(z.shape[1]):
        squares += 0.03 * (np.clip(z[:, t], -4, 4) ** 2 - squares)
    expected = (np.log(squares) - reference.squares.mean[1, 0]) / reference.squares.std[1, 0]
    score = scores["spread_z_0.03"][:, -2]
    assert (score >= expected**2 * (1 - 1e-9)).all()
    assert np.isclose(score, expected**2).mean() > 0.2  # where this channel has the larger score of the two


@pytest.fixture(scope="module")
def monitors():
    runs = System().runs(100, 11)
    return {
        model: Monitor.fitted(runs[:50], runs[50:], NAMES, model=model) for model in ("ensemble", Chart((0.05,), ()))
    }


def detected_share(monitor, runs):
    return float((monitor.score_runs(runs).score.max(1) > monitor.threshold(0.05)).mean())


@pytest.mark.parametrize("kind", SIZES)
def test_every_kind_of_change_is_detected(monitors, kind):
    """At least 0.9 is detected on average over sets of clean runs (experiments/detection); one set may detect less."""
    runs = System().runs(100, 21, kind, SIZES[kind])
    assert detected_share(monitors["ensemble"], runs) >= 0.8
    detected = detected_share(monitors[Chart((0.05,), ())], runs)
    assert detected >= 0.7 if kind in ("drift", "fold") else detected <= 0.3  # a single chart cannot detect the others


def test_clean_runs_have_few_alarms(monitors):
    """The rate is 5% on average; with one calibration set of 50 runs it exceeds 12% once in 100."""
    assert detected_share(monitors["ensemble"], System().runs(400, 31)) <= 0.12


def test_alarms_follow_the_onset_of_a_change(monitors):
    monitor = monitors["ensemble"]
    runs = System().runs(100, 21, "tempo", 0.1)
    above = monitor.score_runs(runs).score > monitor.threshold(0.05)
    assert above[:, :ONSET].any(1).mean() <= 0.1
    assert np.median(above.argmax(1)[above.any(1)]) <= ONSET + 30


def test_rates_above_one_are_refused():
    with pytest.raises(ValueError, match=r"rates in \(0, 1\]"):
        Ensemble(departure=(2.0,))


@pytest.mark.parametrize("name", ["chart", "lru", "kalman"])
def test_monitors_of_version_2_load_and_score_as_before(name):
    """The stored monitors and scores were written by the release before the ensemble."""
    monitor = Monitor.load(STORED / f"{name}.npz")
    with np.load(STORED / f"{name}_scores.npz") as stored:
        stored_values = dict(stored)
    scores = monitor.score_runs(stored_values["runs"]).score
    np.testing.assert_allclose(scores, stored_values["score"], rtol=1e-4, atol=1e-4)
    assert np.isclose(monitor.threshold(0.05), stored_values["threshold"])


def test_an_ensemble_is_saved_and_loaded(monitors, tmp_path):
    monitor = monitors["ensemble"]
    monitor.save(tmp_path / "m.npz")
    loaded = Monitor.load(tmp_path / "m.npz")
    runs = System().runs(3, 41, "ramp", 1.5)
    np.testing.assert_array_equal(loaded.score_runs(runs).score, monitor.score_runs(runs).score)
    assert loaded.expectation.model == monitor.expectation.model


def test_steps_at_which_all_runs_agree_have_a_minimal_spread():
    """A clipped fraction that is 0 in ten runs at a step may have any usual value in the eleventh."""
    runs = np.random.default_rng(0).normal(size=(10, 60, 1))
    runs[:, 20:40] = 0
    spread = StepwiseStats.fit(runs).std[:, 0]
    assert np.isclose(spread[30], MIN_STD_OF_AVERAGE * spread[spread > spread[30]].mean(), rtol=0.01)
    assert spread[50] > 5 * spread[30]


def test_moves_of_channels_constant_in_clean_runs_are_not_scored():
    """A parameter that underflows in one clean run of 50 must not hide a collapse that its level shows."""
    runs = System().runs(100, 51)
    runs[:, 10:, 0] = 0
    runs[:, :10, 0] *= 3
    runs[70, 60, 0] = 0.2
    monitor = Monitor.fitted(runs[:50], runs[50:], NAMES)
    others = np.delete(monitor.clean, 20)
    assert monitor.clean[20] < others.max() + 1
    fresh = System().runs(2, 52)
    fresh[..., 0] = runs[:2, :, 0]
    fresh[1, 60:, 0] = 3
    unchanged, shifted = monitor.score_runs(fresh).score.max(1)
    assert unchanged < monitor.threshold(0.05) < shifted
    reference = monitor.expectation.reference
    assert np.isinf(reference.innovations.std[30:, 0]).all()
    assert np.isfinite(reference.innovations.std[:, 1:]).all()
    scores = monitor.expectation.scores_and_latents(fresh)[0]
    y, observed = monitor.expectation.channels.standardise(fresh)
    steps, _ = jax.jit(jax.vmap(partial(scan_scores, Ensemble(), {}, reference)))(y, observed)
    np.testing.assert_allclose(np.asarray(steps), scores, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("runs", "others"), [(3, 2), (4, 3), (12, 9), (50, 40)])
def test_cross_validated_scores_use_only_the_other_runs(runs, others):
    indices = []

    def score(scored, referred):
        assert not (scored & referred).any()
        assert referred.sum() >= others
        indices.extend(np.flatnonzero(scored))
        return np.zeros((scored.sum(), 1, 1))

    assert cross_validated_scores(score, runs).shape == (runs, 1, 1)
    assert sorted(indices) == list(range(runs))


def test_a_nearly_constant_statistic_has_a_minimal_spread():
    values = np.zeros((5, 40, 1, 2))
    values[..., 1] = np.random.default_rng(0).normal(size=(5, 40, 1))
    location = Location.fit(values, np.array([[0.3]]))
    np.testing.assert_allclose(location.std[0, 0], 0.15)
    np.testing.assert_allclose(location.std[0, 1], values[..., 1].std())
    assert np.isclose(location.max_squared_z(np.array([[0.3, 0.0]]), np)[0], 4.0)


def test_quantiles_over_lanes_equal_numpy():
    values = np.random.default_rng(0).normal(size=(7, 30, 3))
    values[2, 5:9], values[:4, 12], values[:, 20] = np.nan, np.nan, np.nan
    values[0, 25], values[0, 26] = np.inf, -np.inf
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = np.moveaxis(np.nanquantile(values, QUANTILES, axis=0), 0, -1)
    quantiles = lane_quantiles(values)
    finite = np.isfinite(expected)
    np.testing.assert_allclose(quantiles[finite], expected[finite], rtol=1e-6)
    assert np.isnan(quantiles[20]).all()
    assert np.isneginf(quantiles[26]).any(axis=-1).all()
    assert not np.isnan(np.delete(quantiles, 20, 0)).any()
