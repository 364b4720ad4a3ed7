"""The monitor: calibrated scores, kept in a file that nothing is unpickled from."""

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
from jaxaudit.monitoring.monitor import DEFAULT, MODELS, Expectation, Monitor
from jaxaudit.monitoring.scoring import ScoreNormalizer, false_alarm_interval
from jaxaudit.monitoring.state_space import GRU, LRU, Kalman
from jaxaudit.monitoring.telemetry import ChannelScaler, StepwiseStats

# Runs, model and training are those of test_detection.py, which takes the same programs.
MODEL = LRU(size=4, hidden=(16,))
SHORT = Training(iterations=120)
S = len(SCORE_NAMES)
NAMES = System().lanes(1, 1, drift=1.0).channels


def runs(seed, kind="clean", size=0.0, count=20):
    """Any other count is another program."""
    values = System().runs(count, seed, kind, size)
    return xr.DataArray(values, dims=("run", "step", "channel"), coords={"channel": list(NAMES)})


def fitted(clean, **settings):
    """To 40 of 60 runs."""
    return Monitor.fit(clean, model=MODEL, training=SHORT, held_out=1 / 3, **settings)


@pytest.fixture(scope="module")
def monitor():
    return fitted(runs(0, count=60))


@pytest.fixture(scope="module")
def scored(monitor):
    """Scores and latents of clean runs that the monitor has not seen."""
    return monitor.expectation.scores_and_latents(runs(9000).values)


def test_a_score_is_of_the_steps_up_to_it(monitor, scored):
    """One step at a time is all at once, and later steps change nothing."""
    known = monitor.expectation
    y, seen = known.channels.standardise(runs(9000).values)
    scores, latents = scored

    @jax.jit
    def step(carry, y, seen):
        carry, one = known.model.score_step(known.params, known.reference, carry, y, seen)
        return carry, one, known.model.latent(known.params, carry.state)

    carry = known.model.begin(known.params, y.shape[-1])
    for t in range(40):
        carry, one, latent = step(carry, y[0, t], seen[0, t])
        np.testing.assert_allclose(one, scores[0, t], rtol=2e-4, atol=1e-5)
        np.testing.assert_allclose(latent, latents[0, t], rtol=2e-4, atol=1e-5)


def test_a_monitor_is_fitted_to_other_runs_than_it_is_calibrated_on(monitor):
    """What it was calibrated on tells itself by its scores; all that it expects is of the rest."""
    clean = runs(0, count=60)
    largest = np.concatenate([monitor.score(clean[first : first + 20]).score.max("step") for first in (0, 20, 40)])
    calibrated = np.isclose(largest[:, None], monitor.clean, rtol=1e-5).any(axis=1)
    assert calibrated.sum() == len(monitor.clean) == 20
    known, rest = monitor.expectation, ChannelScaler.fit(NAMES, clean.values[~calibrated])
    np.testing.assert_array_equal(known.channels.center, rest.center)
    np.testing.assert_array_equal(known.channels.scale, rest.scale)
    y, _ = rest.standardise(clean.values[~calibrated])
    np.testing.assert_allclose(known.reference.telemetry.mean, y.mean(axis=0), atol=1e-5)


def test_the_normalizer_is_fitted_to_scores_against_other_runs(monitor):
    """Of further clean runs about half, and not most, have a largest score beyond its middle, whatever the kind.

    Fewer here: each of the two halves knows less of clean runs than both together.
    """
    known = monitor.expectation
    largest = np.concatenate(
        [known.scores_and_latents(runs(seed).values)[0].max(axis=1) for seed in (9000, 9100, 9200, 9300)]
    )
    beyond = (np.asarray(known.normalizer.normalize(largest)) > 0).mean(axis=0)
    assert 0.15 < beyond.mean() < 0.5
    assert beyond.max() < 0.65


def test_scores_of_clean_runs_are_what_they_are_said_to_be(scored):
    """Squares of what is standardised and whitened by clean runs: about one each, of runs not fitted to too."""
    mean = dict(zip(SCORE_NAMES, scored[0][:, 20:].mean(axis=(0, 1)), strict=True))
    for name in ("surprise_1", "surprise_0.1", "departure_1", "deviation_1"):
        assert mean[name] == pytest.approx(1, abs=0.35), name
    assert mean["burst_1"] > 3  # the largest of twelve


def test_departure_and_outlier_are_distances_of_the_telemetry(monitor, scored):
    """Of all channels, whitened, and of the furthest; at lower rates, of its moving average, over its variance."""
    known = monitor.expectation
    y, _ = known.channels.standardise(runs(9000).values)
    z = np.asarray(known.reference.telemetry.standardise(y), np.float64)
    matrix = np.asarray(known.reference.chart.decorrelate, np.float64)
    for rate in TELEMETRY_CHART.departure:
        average = signal.lfilter([rate], [1, rate - 1], z, axis=1)
        variance = rate / (2 - rate) * (1 - (1 - rate) ** (2 * np.arange(1, z.shape[1] + 1)))
        for kind, wanted in (("outlier", (average**2).max(-1)), ("departure", ((average @ matrix) ** 2).mean(-1))):
            found = scored[0][..., SCORE_NAMES.index(f"{kind}_{rate:g}")]
            np.testing.assert_allclose(found, wanted / variance, rtol=1e-3, atol=1e-6)


def test_deviation_is_the_whitened_drift_corrected_msd(monitor, scored):
    """Of Table S5, with the clean runs' mean path for the twin, and each step's own spread."""
    reference, onset = monitor.expectation.reference, 30
    scores, latents = scored
    matrix = np.asarray(reference.decorrelate[1], np.float64)
    scaled = latents / reference.latents.std
    path = np.broadcast_to(reference.latents.mean / reference.latents.std, scaled.shape)
    for run in range(4):
        distance = np.linalg.norm((scaled - path)[run].astype(np.float64) @ matrix, axis=-1)
        squared = scores[run, :, SCORE_NAMES.index("deviation_1")] * latents.shape[-1]
        np.testing.assert_allclose(squared, distance**2, rtol=1e-3)
        moved = (scaled - path)[run] - (scaled - path)[run, onset]
        wanted = np.linalg.norm(moved[onset:].astype(np.float64) @ matrix, axis=-1).max()
        found = meta_state_deviation(scaled[run], onset, whitening=matrix, control=path[run])
        assert float(found) == pytest.approx(wanted, rel=1e-3)


def test_the_most_unusual_kind_is_told(monitor):
    found = monitor.score(runs(77, "drift", 8.0))
    after = found.isel(step=slice(95, 100))
    assert (after.score > monitor.threshold(0.05)).all()
    assert set(after.most.values.ravel()) <= set(SCORE_NAMES)
    normalizer = ScoreNormalizer(np.zeros(2), np.ones(2))
    assert float(normalizer.combine(np.array([1.0, np.e]))) == pytest.approx(1)


def test_a_run_that_stops_being_finite_is_an_alarm(monitor):
    broken = runs(5000)
    broken[0, 50:, 3] = np.nan
    found = monitor.score(broken).score
    assert np.isfinite(found[0, :50]).all()
    assert (found[0, 50:] == np.inf).all()
    assert np.isfinite(found[1:]).all()


def test_steps_that_were_not_recorded_are_no_alarm():
    """Where a monitor allows for gaps; in clean runs too."""
    clean = runs(0, count=60)
    clean[3, 60:] = np.nan
    clean[5, 10:20] = np.nan
    monitor = fitted(clean, gaps=True)
    assert np.isfinite(monitor.clean).all()
    new = runs(5000)
    whole = monitor.score(new).score.values
    new[:, 30:40] = np.nan
    new[0, 70, 2] = np.nan
    found = monitor.score(new).score.values
    assert np.isnan(found[:, 30:40]).all()
    assert found[0, 70] == np.inf  # the others were recorded there
    assert np.isfinite(np.delete(found[0], [*range(30, 40), 70])).all()
    early, late = ((x[1:, 40:].max(1) > monitor.threshold(0.05)).sum() for x in (whole, found))
    assert late <= early  # as if nothing had been left out
    assert np.median(np.abs(found[1:, 80] - whole[1:, 80])) < 0.2


CHARTS = [Ensemble(), Chart(), Chart(departure=(1.0,), outlier=(1.0, 0.2))]


@pytest.mark.parametrize("model", CHARTS, ids=["ensemble", "MEWMA", "T2 and the furthest"])
def test_a_monitor_may_be_a_chart(tmp_path, model):
    """Without a model it is calibrated as one with it, names its statistics, and is the same from a file."""
    monitor = Monitor.fit(runs(0, count=200), model=model)
    alarmed = monitor.score(runs(7000, count=400)).score.max("step") > monitor.threshold(0.1)
    low, high = false_alarm_interval(len(monitor.clean), 0.1, coverage=0.999)
    assert low - 0.05 < alarmed.mean() < high + 0.05
    found = monitor.score(runs(77, "drift", 4.0))
    assert (found.score.max("step") > monitor.threshold(0.1)).all()
    assert set(found.most.values.ravel()) <= set(model.score_names)
    assert found.latent.shape == (20, 200, len(NAMES))
    monitor.save(tmp_path / "monitor.npz")
    again = Monitor.load(tmp_path / "monitor.npz")
    assert again.expectation.model == model
    assert monitor.score(runs(5000)).identical(again.score(runs(5000)))
    assert again.threshold(0.1) == monitor.threshold(0.1)


@pytest.mark.parametrize("model", ["ensemble", "chart"])
def test_charts_allow_for_gaps(model):
    clean, new = runs(0, count=60), runs(5000)
    clean[3, 60:], clean[5, 10:20] = np.nan, np.nan
    monitor = Monitor.fit(clean, model=model, gaps=True)
    whole = monitor.score(new).score.values
    new[:, 30:40] = np.nan
    found = monitor.score(new).score.values
    assert np.isfinite(monitor.clean).all()
    assert np.isnan(found[:, 30:40]).all()
    assert np.isfinite(np.delete(found, range(30, 40), axis=1)).all()
    np.testing.assert_allclose(found[:, 199], whole[:, 199], atol={"chart": 1e-3, "ensemble": 0.05}[model])  # forgotten


def test_an_unknown_model_is_refused():
    with pytest.raises(ValueError, match="no model 'mewma'; there are: ensemble, chart, lru, gru, kalman"):
        Monitor.fit(runs(0), model="mewma")
    assert tuple(MODELS) == cli.MODELS
    assert cli.MODELS[0] == DEFAULT


@pytest.mark.parametrize("model", [LRU(size=2), GRU(size=3, hidden=(4,)), Kalman(size=2)], ids=["lru", "gru", "kalman"])
def test_a_saved_monitor_is_the_same(tmp_path, model):
    random = np.random.default_rng(0)
    envelopes = [StepwiseStats(*random.normal(size=(2, 9, 4)).astype(np.float32)) for _ in range(3)]
    matrices = random.normal(size=(3, 4, 4))
    reference = CleanReference(
        *envelopes[:2], tuple(matrices[:2]), ChartReference(envelopes[2], np.ones((9, 4)), matrices[2])
    )
    channels = ChannelScaler.fit(NAMES, runs(0).values)
    params = jax.jit(lambda key: model.init(key, len(NAMES)))(jax.random.key(0))
    known = Expectation(model, channels, params, reference, ScoreNormalizer(np.zeros(S), np.ones(S)))
    monitor = Monitor(known, np.arange(9.0), gaps=True)
    monitor.save(tmp_path / "monitor.npz")
    again = Monitor.load(tmp_path / "monitor.npz")
    chex.assert_trees_all_equal(arrays_of(monitor), arrays_of(again))
    assert (again.gaps, again.expectation.model, again.expectation.channels.names) == (True, model, NAMES)


def arrays_of(monitor):
    known = monitor.expectation
    channels = known.channels.center, known.channels.scale, known.channels.complete
    return monitor.clean, channels, known.params, known.reference, known.normalizer


def test_a_saved_monitor_says_the_same(tmp_path, monitor):
    monitor.save(tmp_path / "monitor.npz")
    again = Monitor.load(tmp_path / "monitor.npz")
    assert monitor.score(runs(5000)).identical(again.score(runs(5000)))
    assert again.threshold(0.2) == monitor.threshold(0.2)


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


def test_what_a_monitor_cannot_be_fitted_to_is_refused(monitor):
    with pytest.raises(ValueError, match="takes two clean runs or more"):
        Monitor.fit(runs(0, count=1), training=SHORT)
    with pytest.raises(ValueError, match=r"20 clean runs are too few for a false-alarm rate of 0\.01: it takes 99"):
        monitor.threshold(0.01)
    with pytest.raises(ValueError, match="the monitor reads channel 'performance', which is not there"):
        monitor.score(runs(0, count=1).drop_isel(channel=0))


def test_scores_are_compared_in_spreads_of_clean_runs():
    """Whose largest ones are at 0 in the median, and at 1 in the 97th percentile."""
    largest = np.random.default_rng(0).lognormal((1, 3), (0.5, 2), size=(5001, 2))
    known = ScoreNormalizer.fit(np.stack([largest, largest / 2], axis=1))
    found = known.normalize(largest, np)
    np.testing.assert_allclose(np.median(found, axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(np.percentile(found, 97, axis=0), 1, atol=1e-5)


def test_a_step_without_any_value_is_an_alarm_unless_gaps_are_allowed():
    new = runs(5000)
    new[:, 30:40] = np.nan
    found = Monitor.fit(runs(0, count=60), model="chart").score(new).score.values
    assert (found[:, 30:40] == np.inf).all()


def test_a_monitor_is_not_changed_in_place(monitor):
    for thing, name in ((monitor, "gaps"), (monitor.expectation, "model")):
        with pytest.raises(AttributeError):
            setattr(thing, name, None)
