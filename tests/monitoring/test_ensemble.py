"""The ensemble of control charts: against other people's formulas, and on changes of a known kind."""

import warnings
from functools import partial

import jax
import numpy as np
import pandas as pd
import pytest
from places import DATA
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
    known = ChannelScaler.fit(NAMES[: clean.shape[-1]], clean)
    return known.standardise(runs)


def scores_of(runs, clean, charts=None):
    """Scores `[n, T, S]` of runs against clean ones, by name."""
    charts = charts or Ensemble()
    reference = charts.fit_reference({}, *standardised(clean, clean))
    found, _ = charts.score_runs({}, reference, *standardised(runs, clean))
    return dict(zip(charts.score_names, np.moveaxis(found, -1, 0), strict=True)), reference


@pytest.fixture(scope="module")
def clean():
    return System().runs(60, 1)


def test_whole_runs_score_as_steps_in_a_program_do(clean):
    charts = Ensemble()
    runs = System().runs(6, 2, "fold", 0.05)
    runs[1, 50:60] = np.nan
    runs[2, ::2, 3] = np.nan
    runs[3, :20, 5] = np.nan
    runs[4, 100:, 0] = 1e30
    y, seen = standardised(runs, clean)
    reference = charts.fit_reference({}, *standardised(clean, clean))
    whole, states = charts.score_runs({}, reference, y, seen)
    steps, latents = jax.jit(jax.vmap(partial(scan_scores, charts, {}, single_precision(reference))))(y, seen)
    assert np.isfinite(whole).all()
    # A square is at least 1e-4 where its logarithm is taken, and that may be a millionth above or below its mean.
    np.testing.assert_allclose(np.asarray(steps), whole, rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(np.asarray(latents), states, rtol=1e-6)


def test_a_run_scores_the_same_beside_others(clean):
    runs = System().runs(4, 3)
    runs[0, 50:60] = np.nan
    together, reference = scores_of(runs, clean)
    alone = Ensemble().score_runs({}, reference, *standardised(runs[:1], clean))[0]
    np.testing.assert_array_equal(np.stack([found[0] for found in together.values()], -1), alone[0])


def moving(values, rate, start):
    """A moving average of runs `[n, T, d]` by pandas."""
    first = np.full((1, values.shape[2]), start)
    return np.stack([pd.DataFrame(np.vstack([first, x])).ewm(alpha=rate, adjust=False).mean()[1:] for x in values])


def test_every_chart_is_what_pandas_makes_of_it(clean):
    """With rates in no order, and a run with an outlier, which counts whole at a rate of 1 alone."""
    charts = Ensemble(departure=(0.03, 1.0, 0.1), outlier=(0.2, 1.0), surprise=(0.05,), dynamics=(0.03, 0.2))
    runs = System().runs(2, 4)
    runs[1, 90, 3] = 60.0
    found, reference = scores_of(runs, clean, charts)
    z = reference.telemetry.standardise(standardised(runs, clean)[0])
    assert np.abs(z).max() > 4
    before = np.concatenate([np.zeros_like(z[:, :1]), z[:, :-1]], 1)
    e = reference.innovations.standardise(z - before @ reference.transition)
    h = e @ reference.adjust
    near_z, near_e, near_h, near = (np.clip(x, -4, 4) for x in (z, e, h, before))
    square = np.minimum(((e @ reference.decorrelate_innovations) ** 2).mean(-1, keepdims=True), 16)
    steps = np.arange(1, z.shape[1] + 1)
    expected = {}
    for rate in (0.03, 1.0, 0.1, 0.2):
        variance = rate / (2 - rate) * (1 - (1 - rate) ** (2 * steps))
        level = moving(z if rate == 1 else near_z, rate, 0.0) / np.sqrt(variance)[:, None]
        place = charts.levels.index(rate)
        expected[f"departure_{rate:g}"] = ((level @ reference.decorrelate[place]) ** 2).mean(-1)
        expected[f"outlier_{rate:g}"] = ((level / reference.scale[place]) ** 2).max(-1)
    expected["burst_1"] = (h**2).max(-1)

    def apart(values, known, place):
        return (((values - known.mean[place]) / known.std[place]) ** 2).max(-1)

    expected["surprise_0.05"] = apart(np.log(moving(square, 0.05, 1.0)), reference.surprise, 0)
    for place, (name, values, rate) in enumerate(
        [("z", near_z, 0.1), ("z", near_z, 0.03), ("e", near_e, 0.1), ("h", near_h, 0.03)]
    ):
        logarithm = np.log(np.maximum(moving(values**2, rate, 1.0), 1e-4))
        expected[f"spread_{name}_{rate:g}"] = apart(logarithm, reference.squares, place)
    for place, rate in enumerate((0.03, 0.2)):
        expected[f"dynamics_{rate:g}"] = apart(moving(near_h * near, rate, 0.0), reference.products, place)
    for kind, scores in found.items():
        np.testing.assert_allclose(scores, expected[kind], rtol=1e-8, err_msg=kind)


def test_a_reference_is_of_values_that_channels_have_of_their_own(clean):
    """What a channel repeats where it has no value is no innovation, and its zeros no products."""
    seldom = clean.copy()
    seldom[:, 1::2, 0] = np.nan
    reference = Ensemble().fit_reference({}, *standardised(seldom, seldom))
    assert np.isnan(reference.innovations.mean[1::2, 0]).all()
    assert np.isfinite(reference.innovations.mean[:, 1:]).all()
    z = reference.telemetry.standardise(standardised(seldom, seldom)[0])[:, ::2, 0]
    averages = moving(np.clip(z, -4, 4)[..., None] ** 2, 0.1, 1.0)
    expected = np.log(averages).mean()
    assert np.isclose(reference.squares.mean[0, 0], expected, atol=1e-6)


def test_an_adjusted_innovation_is_the_residual_of_a_regression_on_the_other_channels(clean, monkeypatch):
    """Hawkins, 1991: by the inverse covariance at once, or by least squares channel by channel."""
    monkeypatch.setattr(ensemble, "SHRINKAGE", 0.0)
    found, reference = scores_of(clean, clean)
    z = reference.telemetry.standardise(standardised(clean, clean)[0])
    before = np.concatenate([np.zeros_like(z[:, :1]), z[:, :-1]], 1)
    e = reference.innovations.standardise(z - before @ reference.transition).reshape(-1, 12)
    e = e - e.mean(0)
    residuals = np.empty_like(e)
    for i in range(12):
        others = np.delete(e, i, 1)
        residuals[:, i] = e[:, i] - others @ np.linalg.lstsq(others, e[:, i])[0]
    residuals /= np.sqrt((residuals**2).mean(0))
    np.testing.assert_allclose(found["burst_1"].ravel(), (residuals**2).max(1), rtol=0.02)


def test_the_autoregression_is_least_squares_with_added_rows():
    random = np.random.default_rng(0)
    before, z = random.normal(size=(2, 5, 40, 3))
    found = fit_vector_autoregression(before, z, np.ones(z.shape, bool))
    weight = np.sqrt(200 * (ensemble.RIDGE + 3 / 200))
    rows = np.vstack([before.reshape(-1, 3), weight * np.eye(3)])
    expected = np.linalg.lstsq(rows, np.vstack([z.reshape(-1, 3), np.zeros((3, 3))]))[0]
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_averages_advance_on_values_of_their_own(clean):
    """What is repeated between two values of a channel would make its averages move, and its spread look small."""
    charts = Ensemble(departure=(1.0,), outlier=(0.1,), surprise=(), spread_e=(), spread_h=(), dynamics=())
    one = clean[..., :1]
    seldom = one.copy()
    seldom[:, 1::2] = np.nan
    seldom = np.concatenate([seldom, clean[..., 1:2]], -1)
    found, reference = scores_of(seldom, seldom, charts)
    z = reference.telemetry.standardise(standardised(seldom, seldom)[0])[:, ::2, 0]
    squares = np.ones(len(z))
    for t in range(z.shape[1]):
        squares += 0.03 * (np.clip(z[:, t], -4, 4) ** 2 - squares)
    apart = (np.log(squares) - reference.squares.mean[1, 0]) / reference.squares.std[1, 0]
    other = found["spread_z_0.03"][:, -2]
    assert (other >= apart**2 * (1 - 1e-9)).all()
    assert np.isclose(other, apart**2).mean() > 0.2  # where it is the further one of the two channels


@pytest.fixture(scope="module")
def monitors():
    runs = System().runs(100, 11)
    return {
        model: Monitor.fitted(runs[:50], runs[50:], NAMES, model=model) for model in ("ensemble", Chart((0.05,), ()))
    }


def share(monitor, runs):
    return float((monitor.score_runs(runs).score.max(1) > monitor.threshold(0.05)).mean())


@pytest.mark.parametrize("kind", SIZES)
def test_no_kind_of_change_is_missed(monitors, kind):
    """At least 0.9 on average over sets of clean runs (experiments/detection); with one set a little less."""
    runs = System().runs(100, 21, kind, SIZES[kind])
    assert share(monitors["ensemble"], runs) >= 0.8
    seen = share(monitors[Chart((0.05,), ())], runs)
    assert seen >= 0.7 if kind in ("drift", "fold") else seen <= 0.3  # what one chart is blind to


def test_clean_runs_are_not_alarmed(monitors):
    """5% on average; with one set of 50 to calibrate on above 12% once in 100."""
    assert share(monitors["ensemble"], System().runs(400, 31)) <= 0.12


def test_a_change_is_not_seen_before_it_comes(monitors):
    monitor = monitors["ensemble"]
    runs = System().runs(100, 21, "tempo", 0.1)
    above = monitor.score_runs(runs).score > monitor.threshold(0.05)
    assert above[:, :ONSET].any(1).mean() <= 0.1
    assert np.median(above.argmax(1)[above.any(1)]) <= ONSET + 30


def test_what_is_missed_is_said():
    with pytest.raises(ValueError, match=r"rates in \(0, 1\]"):
        Ensemble(departure=(2.0,))


@pytest.mark.parametrize("name", ["chart", "lru", "kalman"])
def test_monitors_of_version_2_load_and_score_as_before(name):
    """Written, as their scores were, by the release that had no ensemble."""
    monitor = Monitor.load(STORED / f"{name}.npz")
    with np.load(STORED / f"{name}_scores.npz") as stored:
        before = dict(stored)
    found = monitor.score_runs(before["runs"]).score
    np.testing.assert_allclose(found, before["score"], rtol=1e-4, atol=1e-4)
    assert np.isclose(monitor.threshold(0.05), before["threshold"])


def test_an_ensemble_is_saved_and_loaded(monitors, tmp_path):
    monitor = monitors["ensemble"]
    monitor.save(tmp_path / "m.npz")
    again = Monitor.load(tmp_path / "m.npz")
    runs = System().runs(3, 41, "ramp", 1.5)
    np.testing.assert_array_equal(again.score_runs(runs).score, monitor.score_runs(runs).score)
    assert again.expectation.model == monitor.expectation.model


def test_a_step_at_which_all_runs_are_alike_by_chance_has_a_spread():
    """A share of clipped ratios that is 0 in ten runs at a step may be anything usual in the eleventh."""
    runs = np.random.default_rng(0).normal(size=(10, 60, 1))
    runs[:, 20:40] = 0
    spread = StepwiseStats.fit(runs).std[:, 0]
    assert np.isclose(spread[30], MIN_STD_OF_AVERAGE * spread[spread > spread[30]].mean(), rtol=0.01)
    assert spread[50] > 5 * spread[30]


def test_how_far_a_channel_moves_is_not_judged_where_no_clean_run_moves_it():
    """One parameter that underflows in one clean run of 50 must not hide a collapse: its level tells of more."""
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
    usual, moved = monitor.score_runs(fresh).score.max(1)
    assert usual < monitor.threshold(0.05) < moved
    reference = monitor.expectation.reference
    assert np.isinf(reference.innovations.std[30:, 0]).all()
    assert np.isfinite(reference.innovations.std[:, 1:]).all()
    whole = monitor.expectation.scores_and_latents(fresh)[0]
    y, seen = monitor.expectation.channels.standardise(fresh)
    steps, _ = jax.jit(jax.vmap(partial(scan_scores, Ensemble(), {}, reference)))(y, seen)
    np.testing.assert_allclose(np.asarray(steps), whole, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("runs", "others"), [(3, 2), (4, 3), (12, 9), (50, 40)])
def test_clean_runs_are_scaled_by_scores_against_the_others(runs, others):
    seen = []

    def score(scored, referred):
        assert not (scored & referred).any()
        assert referred.sum() >= others
        seen.extend(np.flatnonzero(scored))
        return np.zeros((scored.sum(), 1, 1))

    assert cross_validated_scores(score, runs).shape == (runs, 1, 1)
    assert sorted(seen) == list(range(runs))


def test_a_statistic_that_clean_runs_hardly_move_is_held_to_what_noise_would_do():
    still = np.zeros((5, 40, 1, 2))
    still[..., 1] = np.random.default_rng(0).normal(size=(5, 40, 1))
    found = Location.fit(still, np.array([[0.3]]))
    np.testing.assert_allclose(found.std[0, 0], 0.15)
    np.testing.assert_allclose(found.std[0, 1], still[..., 1].std())
    assert np.isclose(found.max_squared_z(np.array([[0.3, 0.0]]), np)[0], 4.0)


def test_quantiles_over_lanes_are_numpys():
    values = np.random.default_rng(0).normal(size=(7, 30, 3))
    values[2, 5:9], values[:4, 12], values[:, 20] = np.nan, np.nan, np.nan
    values[0, 25] = np.inf
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = np.moveaxis(np.nanquantile(values, QUANTILES, axis=0), 0, -1)
    found = lane_quantiles(values)
    finite = np.isfinite(expected)
    np.testing.assert_allclose(found[finite], expected[finite], rtol=1e-6)
    assert np.isnan(found[20]).all()
    assert not np.isnan(np.delete(found, 20, 0)).any()
