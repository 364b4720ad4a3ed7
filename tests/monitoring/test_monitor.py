"""The monitor: calibrated scores, and storage in a file that is read without unpickling."""

import io

import chex
import jax
import numpy as np
import pytest
import xarray as xr
from planted import System
from scipy import signal

from jaxaudit.analysis.metrics import meta_state_deviation
from jaxaudit.cli import main as cli
from jaxaudit.monitoring.charts import Chart, ChartReference
from jaxaudit.monitoring.ensemble import Ensemble
from jaxaudit.monitoring.meta_state import SCORE_NAMES, TELEMETRY_CHART, CleanReference, Training
from jaxaudit.monitoring.monitor import DEFAULT, MODELS, Expectation, Monitor, calibration_count
from jaxaudit.monitoring.scoring import ScoreNormalizer, false_alarm_interval
from jaxaudit.monitoring.state_space import GRU, LRU, Kalman
from jaxaudit.monitoring.telemetry import ChannelScaler, StepwiseStats

# The runs, the model and the training are those of test_detection.py, so that compiled programs are shared.
MODEL = LRU(size=4, hidden=(16,))
SHORT = Training(iterations=120)
S = len(SCORE_NAMES)
NAMES = System().lanes(1, 1, drift=1.0).channels


def runs(seed, kind="clean", size=0.0, count=20):
    """Simulated runs as an array with names of channels; another count needs another compiled program."""
    values = System().runs(count, seed, kind, size)
    return xr.DataArray(values, dims=("run", "step", "channel"), coords={"channel": list(NAMES)})


def fitted_monitor(clean, **settings):
    """A monitor that is fitted to two thirds of the clean runs."""
    return Monitor.fit(clean, model=MODEL, training=SHORT, held_out=1 / 3, **settings)


@pytest.fixture(scope="module")
def monitor():
    return fitted_monitor(runs(0, count=60))


@pytest.fixture(scope="module")
def clean_scores(monitor):
    """Scores and latents of further clean runs, which the monitor was not fitted to."""
    return monitor.expectation.scores_and_latents(runs(9000).values)


def test_a_score_depends_only_on_the_steps_up_to_it(monitor, clean_scores):
    """Stepwise evaluation equals evaluation of the whole run, so that later steps change nothing."""
    expectation = monitor.expectation
    y, observed = expectation.channels.standardise(runs(9000).values)
    scores, latents = clean_scores

    @jax.jit
    def step(carry, y, observed):
        carry, step_scores = expectation.model.score_step(expectation.params, expectation.reference, carry, y, observed)
        return carry, step_scores, expectation.model.latent(expectation.params, carry.state)

    carry = expectation.model.begin(expectation.params, y.shape[-1])
    for t in range(40):
        carry, step_scores, latent = step(carry, y[0, t], observed[0, t])
        np.testing.assert_allclose(step_scores, scores[0, t], rtol=2e-4, atol=1e-5)
        np.testing.assert_allclose(latent, latents[0, t], rtol=2e-4, atol=1e-5)


def test_fitting_and_calibration_use_different_runs(monitor):
    """The calibration runs are identified by their scores; the reference is that of the remaining runs."""
    clean = runs(0, count=60)
    largest = np.concatenate([monitor.score(clean[first : first + 20]).score.max("step") for first in (0, 20, 40)])
    calibrated = np.isclose(largest[:, None], monitor.clean, rtol=1e-5).any(axis=1)
    assert calibrated.sum() == len(monitor.clean) == 20
    expectation, scaler = monitor.expectation, ChannelScaler.fit(NAMES, clean.values[~calibrated])
    np.testing.assert_array_equal(expectation.channels.center, scaler.center)
    np.testing.assert_array_equal(expectation.channels.scale, scaler.scale)
    y, _ = scaler.standardise(clean.values[~calibrated])
    np.testing.assert_allclose(expectation.reference.telemetry.mean, y.mean(axis=0), atol=1e-5)


def test_the_normalizer_is_fitted_to_scores_of_unfitted_runs(monitor):
    """About half of further clean runs should have a largest score above the normalizer's median, for every kind.

    The share is somewhat lower, because the normalizer is fitted to scores by halves of the clean runs.
    """
    expectation = monitor.expectation
    largest = np.concatenate(
        [expectation.scores_and_latents(runs(seed).values)[0].max(axis=1) for seed in (9000, 9100, 9200, 9300)]
    )
    beyond = (np.asarray(expectation.normalizer.normalize(largest)) > 0).mean(axis=0)
    assert 0.15 < beyond.mean() < 0.5
    assert beyond.max() < 0.65


def test_squared_scores_of_clean_runs_are_about_one(clean_scores):
    """Squares of values that are standardised and whitened by clean runs are about one for further clean runs."""
    mean = dict(zip(SCORE_NAMES, clean_scores[0][:, 20:].mean(axis=(0, 1)), strict=True))
    for name in ("surprise_1", "surprise_0.1", "departure_1", "deviation_1"):
        assert mean[name] == pytest.approx(1, abs=0.35), name
    assert mean["burst_1"] > 3  # it is the largest of twelve


def test_departure_and_outlier_are_distances_of_the_telemetry(monitor, clean_scores):
    """Departure is the whitened distance of all channels, outlier that of the furthest channel.

    At lower rates, both are those of a moving average, divided by its variance.
    """
    expectation = monitor.expectation
    y, _ = expectation.channels.standardise(runs(9000).values)
    z = np.asarray(expectation.reference.telemetry.standardise(y), np.float64)
    matrix = np.asarray(expectation.reference.chart.decorrelate, np.float64)
    for rate in TELEMETRY_CHART.departure:
        average = signal.lfilter([rate], [1, rate - 1], z, axis=1)
        variance = rate / (2 - rate) * (1 - (1 - rate) ** (2 * np.arange(1, z.shape[1] + 1)))
        for kind, expected in (("outlier", (average**2).max(-1)), ("departure", ((average @ matrix) ** 2).mean(-1))):
            result = clean_scores[0][..., SCORE_NAMES.index(f"{kind}_{rate:g}")]
            np.testing.assert_allclose(result, expected / variance, rtol=1e-3, atol=1e-6)


def test_deviation_is_the_whitened_and_corrected_state_distance(monitor, clean_scores):
    """The deviation is that of Table S5, with the mean path of the clean runs as the control."""
    reference, onset = monitor.expectation.reference, 30
    scores, latents = clean_scores
    matrix = np.asarray(reference.decorrelate[1], np.float64)
    scaled = latents / reference.latents.std
    path = np.broadcast_to(reference.latents.mean / reference.latents.std, scaled.shape)
    for run in range(4):
        distance = np.linalg.norm((scaled - path)[run].astype(np.float64) @ matrix, axis=-1)
        squared = scores[run, :, SCORE_NAMES.index("deviation_1")] * latents.shape[-1]
        np.testing.assert_allclose(squared, distance**2, rtol=1e-3)
        displacement = (scaled - path)[run] - (scaled - path)[run, onset]
        expected = np.linalg.norm(displacement[onset:].astype(np.float64) @ matrix, axis=-1).max()
        result = meta_state_deviation(scaled[run], onset, whitening=matrix, control=path[run])
        assert float(result) == pytest.approx(expected, rel=1e-3)


def test_the_most_unusual_statistic_is_named(monitor):
    result = monitor.score(runs(77, "drift", 8.0))
    after = result.isel(step=slice(95, 100))
    assert (after.score > monitor.threshold(0.05)).all()
    assert set(after.most.values.ravel()) <= set(SCORE_NAMES)
    normalizer = ScoreNormalizer(np.zeros(2), np.ones(2))
    assert float(normalizer.combine(np.array([1.0, np.e]))) == pytest.approx(1)


def test_a_run_that_becomes_non_finite_is_an_alarm(monitor):
    broken = runs(5000)
    broken[0, 50:, 3] = np.nan
    result = monitor.score(broken).score
    assert np.isfinite(result[0, :50]).all()
    assert (result[0, 50:] == np.inf).all()
    assert np.isfinite(result[1:]).all()


def test_allowed_gaps_raise_no_alarm():
    """A monitor that allows gaps accepts them in clean runs and in new ones."""
    clean = runs(0, count=60)
    clean[3, 60:] = np.nan
    clean[5, 10:20] = np.nan
    monitor = fitted_monitor(clean, gaps=True)
    assert np.isfinite(monitor.clean).all()
    new = runs(5000)
    complete = monitor.score(new).score.values
    new[:, 30:40] = np.nan
    new[0, 70, 2] = np.nan
    result = monitor.score(new).score.values
    assert np.isnan(result[:, 30:40]).all()
    assert result[0, 70] == np.inf  # the other channels were recorded at that step
    assert np.isfinite(np.delete(result[0], [*range(30, 40), 70])).all()
    complete_alarms, gap_alarms = ((x[1:, 40:].max(1) > monitor.threshold(0.05)).sum() for x in (complete, result))
    assert gap_alarms <= complete_alarms  # the gap adds no alarms
    assert np.median(np.abs(result[1:, 80] - complete[1:, 80])) < 0.2


CHARTS = [Ensemble(), Chart(), Chart(departure=(1.0,), outlier=(1.0, 0.2))]


@pytest.mark.parametrize("model", CHARTS, ids=["ensemble", "MEWMA", "T2 and the furthest"])
def test_a_monitor_may_be_a_chart(tmp_path, model):
    """A chart is calibrated like a model, names its statistics, and is stored and loaded."""
    monitor = Monitor.fit(runs(0, count=200), model=model)
    alarmed = monitor.score(runs(7000, count=400)).score.max("step") > monitor.threshold(0.1)
    low, high = false_alarm_interval(len(monitor.clean), 0.1, coverage=0.999)
    assert low - 0.05 < alarmed.mean() < high + 0.05
    result = monitor.score(runs(77, "drift", 4.0))
    assert (result.score.max("step") > monitor.threshold(0.1)).all()
    assert set(result.most.values.ravel()) <= set(model.score_names)
    assert result.latent.shape == (20, 200, len(NAMES))
    monitor.save(tmp_path / "monitor.npz")
    loaded = Monitor.load(tmp_path / "monitor.npz")
    assert loaded.expectation.model == model
    assert monitor.score(runs(5000)).identical(loaded.score(runs(5000)))
    assert loaded.threshold(0.1) == monitor.threshold(0.1)


@pytest.mark.parametrize("model", ["ensemble", "chart"])
def test_charts_may_allow_gaps(model):
    clean, new = runs(0, count=60), runs(5000)
    clean[3, 60:], clean[5, 10:20] = np.nan, np.nan
    monitor = Monitor.fit(clean, model=model, gaps=True)
    complete = monitor.score(new).score.values
    new[:, 30:40] = np.nan
    result = monitor.score(new).score.values
    assert np.isfinite(monitor.clean).all()
    assert np.isnan(result[:, 30:40]).all()
    assert np.isfinite(np.delete(result, range(30, 40), axis=1)).all()
    np.testing.assert_allclose(result[:, 199], complete[:, 199], atol={"chart": 1e-3, "ensemble": 0.05}[model])


def test_an_unknown_model_is_refused():
    with pytest.raises(ValueError, match="no model 'mewma'; there are: ensemble, chart, lru, gru, kalman"):
        Monitor.fit(runs(0), model="mewma")
    assert tuple(MODELS) == cli.MODELS
    assert cli.MODELS[0] == DEFAULT


@pytest.mark.parametrize("model", [LRU(size=2), GRU(size=3, hidden=(4,)), Kalman(size=2)], ids=["lru", "gru", "kalman"])
def test_a_loaded_monitor_equals_the_saved_one(tmp_path, model):
    random = np.random.default_rng(0)
    envelopes = [StepwiseStats(*random.normal(size=(2, 9, 4)).astype(np.float32)) for _ in range(3)]
    matrices = random.normal(size=(3, 4, 4))
    reference = CleanReference(
        *envelopes[:2], tuple(matrices[:2]), ChartReference(envelopes[2], np.ones((9, 4)), matrices[2])
    )
    channels = ChannelScaler.fit(NAMES, runs(0).values)
    params = jax.jit(lambda key: model.init(key, len(NAMES)))(jax.random.key(0))
    expectation = Expectation(model, channels, params, reference, ScoreNormalizer(np.zeros(S), np.ones(S)))
    monitor = Monitor(expectation, np.arange(9.0), gaps=True)
    monitor.save(tmp_path / "monitor.npz")
    loaded = Monitor.load(tmp_path / "monitor.npz")
    chex.assert_trees_all_equal(arrays_of(monitor), arrays_of(loaded))
    assert (loaded.gaps, loaded.expectation.model, loaded.expectation.channels.names) == (True, model, NAMES)


def arrays_of(monitor):
    expectation = monitor.expectation
    channels = expectation.channels.center, expectation.channels.scale, expectation.channels.complete
    return monitor.clean, channels, expectation.params, expectation.reference, expectation.normalizer


def test_a_loaded_monitor_gives_the_same_scores(tmp_path, monitor):
    monitor.save(tmp_path / "monitor.npz")
    loaded = Monitor.load(tmp_path / "monitor.npz")
    assert monitor.score(runs(5000)).identical(loaded.score(runs(5000)))
    assert loaded.threshold(0.2) == monitor.threshold(0.2)


def test_a_file_that_is_no_monitor_is_refused(tmp_path, monitor):
    path = tmp_path / "x.npz"
    path.write_bytes(b"no")
    with pytest.raises(ValueError, match=r"x\.npz is not a monitor's file"):
        Monitor.load(path)
    buffer = io.BytesIO()
    np.savez(buffer, description=np.array([{"pickled": 1}], dtype=object))
    path.write_bytes(buffer.getvalue())
    with pytest.raises(ValueError, match=r"x\.npz is not a monitor's file"):
        Monitor.load(path)
    monitor.save(path)
    with np.load(path) as file:
        arrays = dict(file)
    arrays["description"] = np.array(str(arrays["description"]).replace('"version": 3', '"version": 99'))
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match="holds a monitor of version 99, and this package reads 2 and 3"):
        Monitor.load(path)


def test_a_monitor_prints_its_channels_and_its_calibration(monitor):
    names = ", ".join(monitor.expectation.channels.names)
    assert names in repr(monitor)
    assert repr(monitor).endswith("calibrated on 20 clean runs")
    assert len(repr(monitor)) < 200


def test_a_dataset_without_steps_is_refused():
    lanes = xr.Dataset({"collapse_time": ("seed", np.zeros(4))})
    with pytest.raises(ValueError, match="no channel along 'step' to monitor; its variables: collapse_time"):
        Monitor.fit(lanes)


@pytest.mark.parametrize("model", ["chart", "ensemble", pytest.param("kalman", marks=pytest.mark.exhaustive)])
def test_three_clean_runs_are_enough(model):
    fitted = Monitor.fit(runs(0, count=3), model=model, training=SHORT)
    assert len(fitted.clean) == 1
    scores = fitted.score(runs(1, count=2)).score
    assert scores.shape == (2, runs(1, count=2).sizes["step"])
    assert np.isfinite(scores).all()


@pytest.mark.parametrize(
    ("n_runs", "held_out", "count"), [(3, 0.5, 1), (4, 0.5, 2), (40, 0.5, 20), (10, 0.01, 1), (10, 0.99, 8)]
)
def test_both_parts_of_the_clean_runs_are_large_enough(n_runs, held_out, count):
    assert calibration_count(n_runs, held_out) == count


def test_too_few_runs_and_absent_channels_are_refused(monitor):
    with pytest.raises(ValueError, match=r"takes three clean runs or more, .*, not run 2, step"):
        Monitor.fit(runs(0, count=2), training=SHORT)
    with pytest.raises(ValueError, match=r"20 clean runs are too few for a false-alarm rate of 0\.01: it takes 99"):
        monitor.threshold(0.01)
    with pytest.raises(ValueError, match="the monitor reads channel 'performance', which is not there"):
        monitor.score(runs(0, count=1).drop_isel(channel=0))


def test_the_normalizer_scales_by_the_largest_scores_of_clean_runs():
    """Normalized, the largest scores of clean runs have a median of 0 and a 97th percentile of 1."""
    largest = np.random.default_rng(0).lognormal((1, 3), (0.5, 2), size=(5001, 2))
    normalizer = ScoreNormalizer.fit(np.stack([largest, largest / 2], axis=1))
    result = normalizer.normalize(largest, np)
    np.testing.assert_allclose(np.median(result, axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(np.percentile(result, 97, axis=0), 1, atol=1e-5)


def test_steps_without_values_are_alarms_unless_gaps_are_allowed():
    new = runs(5000)
    new[:, 30:40] = np.nan
    result = Monitor.fit(runs(0, count=60), model="chart").score(new).score.values
    assert (result[:, 30:40] == np.inf).all()


def test_a_monitor_is_immutable(monitor):
    for object_, name in ((monitor, "gaps"), (monitor.expectation, "model")):
        with pytest.raises(AttributeError):
            setattr(object_, name, None)


def test_runs_are_read_along_a_dimension_of_either_name():
    random = np.random.default_rng(0)
    values = {name: (("seed", "step"), random.normal(size=(8, 30))) for name in ("loss", "norm")}
    by_seed = xr.Dataset(values)
    by_run = by_seed.rename(seed="run")
    first, second = (Monitor.fit(runs, model="chart") for runs in (by_seed, by_run))
    scores = second.score(by_run)["score"]
    assert scores.dims == ("run", "step")
    np.testing.assert_array_equal(scores.values, first.score(by_seed)["score"].values)
