"""Performance that is measured at irregular steps: metrics of the measured steps, against NumPy and from end to end."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parameters import partly_exhaustive

import jaxaudit as ja
from jaxaudit.analysis import datasets, metrics, results
from jaxaudit.analysis.metrics import FEWEST, FEWEST_HELD, Cadence, MetricSettings
from jaxaudit.analysis.run_reader import Run, load
from jaxaudit.cli.main import main
from jaxaudit.runs.margins.search import collapse_times
from jaxaudit.runs.progress import performance_level
from jaxaudit.runtime import registry

pytestmark = pytest.mark.exhaustive

WINDOW, HOLD = 20, 12
SETTINGS = MetricSettings(window=WINDOW, hold=HOLD)


def evaluated(series, onset, sparse=True):
    result = metrics.evaluate(np.asarray(series, np.float64), onset, settings=SETTINGS, sparse=sparse)
    return {name: float(value) for name, value in result.items()}


def naive_metrics(series, onset):
    """Computes the metrics from the list of measured steps."""
    series = np.asarray(series, float)
    measured = [(t, v) for t, v in enumerate(series) if not np.isnan(v)]
    before = [v for t, v in measured if onset - WINDOW <= t < onset]
    result = dict.fromkeys(("pre_mean", "pre_std", "collapse_time", "recovery_rate", "recovery_time"), np.nan)
    broken_step = next((t for t, v in measured if t >= onset and np.isinf(v)), None)
    if len(before) < FEWEST or not np.isfinite(before).all():
        return result | ({} if broken_step is None else {"collapse_time": float(broken_step)})
    mean, std = np.mean(before), np.std(before)
    after = [
        (t, v, v < mean - 2 * std or (broken_step is not None and t >= broken_step)) for t, v in measured if t >= onset
    ]
    collapse = np.inf
    for start, (t, _, below) in enumerate(after):
        if not below or collapse < np.inf:
            continue
        end = next((i for i in range(start, len(after)) if not after[i][2]), len(after))
        lasts = end == len(after) or after[end][0] - t >= HOLD
        stays_non_finite = broken_step is not None and end == len(after)
        if lasts and (end - start >= FEWEST_HELD or stays_non_finite):
            collapse = float(t)
    result |= {"pre_mean": mean, "pre_std": std, "collapse_time": collapse}
    if not after:
        return result
    first_below = next((i for i, (_, _, below) in enumerate(after) if below), None)
    return_step = None if first_below is None else next((t for t, _, below in after[first_below:] if not below), None)
    if first_below is None:
        result["recovery_time"] = -1.0
    elif broken_step is not None:
        result["recovery_time"] = np.inf
    elif return_step is not None:
        result["recovery_time"] = float(return_step - onset)
    elif len(after) - first_below - 1 >= FEWEST_HELD:
        result["recovery_time"] = np.inf
    lowest, last = min(v for _, v, _ in after), after[-1][1]
    still_collapsed = collapse < np.inf and last - lowest <= 2 * std
    if broken_step is None and not still_collapsed and mean > lowest:
        result["recovery_rate"] = (last - lowest) / (mean - lowest)
    return result


@pytest.mark.parametrize("number", partly_exhaustive(15, total=60))
def test_metrics_are_computed_from_the_measured_steps(number):
    rng = np.random.default_rng(number)
    onset = int(rng.integers(20, 60))
    series = rng.normal(10, 1, 100)
    fall = onset + int(rng.integers(0, 20))
    series[fall : fall + int(rng.integers(1, 60))] -= rng.choice([0, 3, 8])
    series[rng.uniform(size=100) < rng.choice([0.2, 0.5, 0.8])] = np.nan
    if number % 10 == 0:
        series[int(rng.integers(onset, 100))] = -np.inf
    result, expected = evaluated(series, onset), naive_metrics(series, onset)
    for name, value in expected.items():
        assert result[name] == pytest.approx(value, rel=1e-4, nan_ok=True), name


@pytest.mark.parametrize("number", partly_exhaustive(5, total=20))
def test_a_sparse_channel_measured_at_every_step_equals_a_dense_one(number):
    rng = np.random.default_rng(number)
    series = rng.normal(10, 1, 100)
    series[50 : 50 + 4 * number] -= 5
    series[-3:] = series[-4]  # a fall within the last two steps has fewer than the three measurements of a collapse
    assert evaluated(series, 40) == pytest.approx(evaluated(series, 40, sparse=False), nan_ok=True)
    index = metrics.instability_index(series, window=WINDOW)
    np.testing.assert_allclose(metrics.instability_index(series, window=WINDOW, sparse=True), index, rtol=1e-5)


def test_instability_is_the_variance_of_the_measurements():
    rng = np.random.default_rng(0)
    series = 1000 + rng.normal(size=80)
    series[rng.uniform(size=80) < 0.6] = np.nan
    series[40:64] = np.nan
    result = np.asarray(metrics.instability_index(series, window=WINDOW, sparse=True))
    for t in range(80):
        window = series[max(0, t - WINDOW + 1) : t + 1]
        window = window[~np.isnan(window)]
        expected = np.nan if t < WINDOW - 1 or len(window) < 2 else window.var()
        assert result[t] == pytest.approx(expected, rel=1e-3, nan_ok=True)


def steady(rng=None):
    return (rng or np.random.default_rng(0)).normal(10, 0.1, 100)


def test_episodes_that_never_end_are_no_collapse():
    series = steady()
    series[40:] = np.nan
    result = evaluated(series, 40)
    assert result["collapse_time"] == np.inf
    assert result["diverged"] == 0
    assert np.isnan([result["recovery_time"], result["recovery_rate"]]).all()
    # Windows that end within the 20 steps after the onset count if they have two measurements, all from before it.
    variances = [np.var(series[t - 19 : 40]) for t in range(40, 58)]
    assert result["spike_intensity"] == pytest.approx(max(variances) / np.var(series[20:40]), rel=1e-3)
    reasons = metrics.explain(series, 40, settings=SETTINGS, sparse=True)
    assert reasons["recovery_time"] == reasons["recovery_rate"] == "J was not measured after the onset"
    assert evaluated(series, 40, sparse=False)["collapse_time"] == 40


@pytest.mark.parametrize(("falls", "time"), [(1, np.inf), (2, np.inf), (3, 45), (6, 45)])
def test_a_collapse_needs_three_measurements(falls, time):
    series = steady()
    series[45:] = np.nan
    series[45 : 45 + 2 * falls : 2] = 0
    result = evaluated(series, 40)
    assert result["collapse_time"] == time
    if falls < 3:
        reasons = metrics.explain(series, 40, settings=SETTINGS, sparse=True)
        assert reasons["recovery_time"] == "J was measured fewer than 3 times after it left the band"


@pytest.mark.parametrize(("measurements", "time"), [(2, np.nan), (3, np.inf)])
def test_no_recovery_needs_three_measurements_after_the_fall(measurements, time):
    series = steady()
    series[45:] = np.nan
    series[45 : 46 + measurements] = 0
    assert evaluated(series, 40)["recovery_time"] == pytest.approx(time, nan_ok=True)


def test_infinity_is_a_collapse_and_too_few_measurements_are_explained():
    series = steady()
    series[45:] = np.nan
    series[60] = -np.inf
    assert evaluated(series, 40)["collapse_time"] == 60
    series[20:34] = np.nan
    reasons = metrics.explain(series, 40, settings=SETTINGS, sparse=True)
    assert reasons["pre_mean"].endswith("J was measured 6 times in the 20 steps before the onset, and J_pre needs 8")


def test_sparse_channels_refuse_a_cadence_other_types_and_dimensions():
    with pytest.raises(ValueError, match="every must be 1"):
        metrics.collapse_time(steady(), 40, every=2, sparse=True)
    for channel in ({"every": 2}, {"dtype": "int32"}, {"dims": (("layer", ("a",)),)}):
        with pytest.raises(ValueError, match="a sparse channel is a scalar of floats"):
            ja.Channel(sparse=True, **channel)


# Other code that uses the performance


def test_smoothed_performance_moves_where_it_is_measured():
    series = np.array([[np.nan, 1.0, np.nan, 3.0, np.nan]])
    result = datasets.derived_channels(series, MetricSettings(window=3, hold=2), Cadence(1, True))["x_gen"][0]
    np.testing.assert_allclose(result, [np.nan, 1, 1, 2, 2])


def test_margin_search_and_progress_use_the_measured_steps():
    rng = np.random.default_rng(0)
    series = np.stack([steady(rng), steady(rng), steady(rng)])
    series[0, 50:] = 0
    series[:, 1::2] = np.nan
    series[2, 50:] = np.nan
    np.testing.assert_array_equal(collapse_times(series, 40, SETTINGS, Cadence(1, True)), [50, np.inf, np.inf])
    mean, std = performance_level(series[:, :40], WINDOW, Cadence(1, True))
    np.testing.assert_allclose(mean, np.nanmean(series[:, 20:40], axis=1))
    np.testing.assert_allclose(std, np.nanstd(series[:, 20:40], axis=1))


# From end to end


def episodic(channels=None, ends_when_broken=True):
    """A learner that reports a return only where an episode ends, in two of three steps; a spike breaks it for good."""

    def init(key):
        return jnp.bool_(False)

    def step(broken, key, taps):
        broken = broken | (taps("learning_rate", 1.0) > 5)
        ended, noise = jax.random.split(key)
        ends = (jax.random.uniform(ended) < 2 / 3) & (ends_when_broken | ~broken)
        value = jnp.where(broken, 0.0, 10.0) + 0.1 * jax.random.normal(noise)
        return broken, {"performance": jnp.where(ends, value, jnp.nan), "loss": jax.random.normal(noise)}

    return ja.Learner(init, step, channels=channels or {})


SPARSE = {"performance": ja.Channel(sparse=True)}


def audit(learner):
    return ja.audit(learner, [ja.lr_spike(10.0, onset=0.5)], seeds=6, steps=120, settings=SETTINGS)


def test_an_audit_uses_the_measured_steps_of_a_sparse_channel():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = audit(episodic(SPARSE))
    times = result.metrics["collapse_time"].values
    assert (times[:, 0] == np.inf).all()
    series = result.telemetry["performance"].values
    for seed in range(6):
        assert times[seed, 1] == 60 + np.argmax(~np.isnan(series[seed, 1, 60:]))
        for condition in range(2):
            after_onset = series[seed, condition, 60:]
            assert (
                result.metrics["final_performance"].values[seed, condition] == after_onset[~np.isnan(after_onset)][-1]
            )
            assert result.metrics["performance_minimum"].values[seed, condition] == np.nanmin(after_onset)
    assert np.isfinite(result.telemetry["x_gen"].values[:, :, 10:]).all()
    assert result.telemetry["performance"].attrs["sparse"] == 1


def test_a_lane_without_measurements_after_the_onset_does_not_collapse():
    result = audit(episodic(SPARSE, ends_when_broken=False)).metrics
    assert (result["collapse_time"].values == np.inf).all()
    assert np.isnan(result["final_performance"].values[:, 1]).all()
    assert (result["excess_collapse_lost"].values == 0).all()


def test_undeclared_gaps_give_one_warning_that_names_a_seed():
    with pytest.warns(
        UserWarning, match=r"undisturbed seed \d is NaN at step \d+ and a number again at step"
    ) as warned:
        result = audit(episodic())
    assert len(warned) == 1
    message = str(warned[0].message)
    assert "and so for 5 more seeds" in message
    assert "Channel(sparse=True)" in message
    series = result.telemetry["performance"].values[0, 0]
    first = int(np.argmax(np.isnan(series)))
    return_step = first + int(np.argmax(~np.isnan(series[first:])))
    assert f"is NaN at step {first} and a number again at step {return_step}," in message
    missing = np.isnan(result.telemetry["performance"].values[:, 0, 60:])
    np.testing.assert_array_equal(result.metrics["collapse_time"].values[:, 0], 60 + missing.argmax(-1))


@pytest.mark.parametrize("measured", [lambda step: step < 80, lambda step: step >= 3])
def test_performance_that_is_nan_before_or_after_all_measurements_gives_no_gap_warning(measured):
    def step(state, key, taps):
        taps("learning_rate", 1.0)
        return state + 1, {"performance": jnp.where(measured(state), jax.random.normal(key), jnp.nan)}

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        audit(ja.Learner(lambda key: jnp.int32(0), step))


def test_a_stored_run_fills_gaps_with_the_latest_measurement():
    telemetry = audit(episodic(SPARSE)).telemetry
    run = Run(None, {}, "", {}, telemetry, None, None)
    raw, filled = telemetry["performance"].values, run.performance
    measured = ~np.isnan(raw)
    np.testing.assert_array_equal(filled[measured], raw[measured])
    first = measured.argmax(-1)
    assert all(np.isfinite(filled[s, c, first[s, c] :]).all() for s in range(6) for c in range(2))
    assert all(filled[s, c, t] == filled[s, c, t - 1] for s, c, t in np.argwhere(~measured) if t > first[s, c])
    unmeasured = telemetry.assign(performance=telemetry["performance"].where(telemetry["step"] < 117))
    for status, steps in (("finished", [120, 120]), ("interrupted", [120, 120])):
        ended = Run(None, {}, "", {"status": status}, unmeasured, None, None)
        assert list(ended.computed) == steps
        assert ended.finished == (status == "finished")
    half = telemetry.where(telemetry["step"] < 80)
    assert list(Run(None, {}, "", {"status": "interrupted"}, half, None, None).computed) == [80, 80]
    alone = Run(None, {}, "", {"status": "finished"}, unmeasured[["performance"]], None, None)
    assert alone.finished, "a run is finished although no episode ended in its last steps"
    assert results.undeclared_gap_warning(telemetry) == ""


SPEC = """
[audit]
name = "episodic"
seeds = 4
steps = 120
[learner]
kind = "episodic_test_learner"
[[perturbation]]
kind = "lr_spike"
magnitude = [2.0, 10.0]
onset = 0.5
[metrics]
window = 20
hold = 12
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("declared", [True, False])
def test_a_stored_run_remembers_whether_a_channel_is_sparse(tmp_path, capsys, monkeypatch, declared):
    monkeypatch.setitem(
        registry.learners._entries, "episodic_test_learner", lambda: episodic(SPARSE if declared else None)
    )
    monkeypatch.setattr("jaxaudit.report.page.write_figures", lambda *_: None)
    (tmp_path / "spec.toml").write_text(SPEC)
    assert main(["run", str(tmp_path / "spec.toml"), "-o", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().err
    run = load(tmp_path / "run")
    assert run.is_sparse("performance") == declared
    times = run.collapse_times
    assert ("is NaN at step" in printed) != declared
    assert ("is NaN at step" in (tmp_path / "run" / "report.html").read_text()) != declared
    if declared:
        assert np.isinf(times[["control", "lr_spike 2"]]).all(axis=None)
        assert np.isfinite(times["lr_spike 10"]).all()
    else:
        assert np.isfinite(times).all(axis=None)
