"""Performance that is measured in some steps only: metrics of what was measured, in NumPy and from end to end."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parameters import some_of

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
    found = metrics.evaluate(np.asarray(series, np.float64), onset, settings=SETTINGS, sparse=sparse)
    return {name: float(value) for name, value in found.items()}


def by_hand(series, onset):
    """The metrics, from a list of the steps at which J was measured."""
    series = np.asarray(series, float)
    measured = [(t, v) for t, v in enumerate(series) if not np.isnan(v)]
    near = [v for t, v in measured if onset - WINDOW <= t < onset]
    found = dict.fromkeys(("pre_mean", "pre_std", "collapse_time", "recovery_rate", "recovery_time"), np.nan)
    bad = next((t for t, v in measured if t >= onset and np.isinf(v)), None)
    if len(near) < FEWEST or not np.isfinite(near).all():
        return found | ({} if bad is None else {"collapse_time": float(bad)})
    mean, std = np.mean(near), np.std(near)
    after = [(t, v, v < mean - 2 * std or (bad is not None and t >= bad)) for t, v in measured if t >= onset]
    collapse = np.inf
    for start, (t, _, below) in enumerate(after):
        if not below or collapse < np.inf:
            continue
        end = next((i for i in range(start, len(after)) if not after[i][2]), len(after))
        long = end == len(after) or after[end][0] - t >= HOLD
        dead = bad is not None and end == len(after)
        if long and (end - start >= FEWEST_HELD or dead):
            collapse = float(t)
    found |= {"pre_mean": mean, "pre_std": std, "collapse_time": collapse}
    if not after:
        return found
    left = next((i for i, (_, _, below) in enumerate(after) if below), None)
    back = None if left is None else next((t for t, _, below in after[left:] if not below), None)
    if left is None:
        found["recovery_time"] = -1.0
    elif bad is not None:
        found["recovery_time"] = np.inf
    elif back is not None:
        found["recovery_time"] = float(back - onset)
    elif len(after) - left - 1 >= FEWEST_HELD:
        found["recovery_time"] = np.inf
    lowest, last = min(v for _, v, _ in after), after[-1][1]
    fully = collapse < np.inf and last - lowest <= 2 * std
    if bad is None and not fully and mean > lowest:
        found["recovery_rate"] = (last - lowest) / (mean - lowest)
    return found


@pytest.mark.parametrize("number", some_of(15, of=60))
def test_metrics_are_those_of_the_measured_steps(number):
    rng = np.random.default_rng(number)
    onset = int(rng.integers(20, 60))
    series = rng.normal(10, 1, 100)
    fall = onset + int(rng.integers(0, 20))
    series[fall : fall + int(rng.integers(1, 60))] -= rng.choice([0, 3, 8])
    series[rng.uniform(size=100) < rng.choice([0.2, 0.5, 0.8])] = np.nan
    if number % 10 == 0:
        series[int(rng.integers(onset, 100))] = -np.inf
    found, wanted = evaluated(series, onset), by_hand(series, onset)
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=1e-4, nan_ok=True), name


@pytest.mark.parametrize("number", some_of(5, of=20))
def test_what_is_measured_at_every_step_is_as_if_not_sparse(number):
    rng = np.random.default_rng(number)
    series = rng.normal(10, 1, 100)
    series[50 : 50 + 4 * number] -= 5
    series[-3:] = series[-4]  # a fall in the last two steps takes a third
    assert evaluated(series, 40) == pytest.approx(evaluated(series, 40, sparse=False), nan_ok=True)
    whole = metrics.instability_index(series, window=WINDOW)
    np.testing.assert_allclose(metrics.instability_index(series, window=WINDOW, sparse=True), whole, rtol=1e-5)


def test_instability_is_the_variance_of_what_was_measured():
    rng = np.random.default_rng(0)
    series = 1000 + rng.normal(size=80)
    series[rng.uniform(size=80) < 0.6] = np.nan
    series[40:64] = np.nan
    found = np.asarray(metrics.instability_index(series, window=WINDOW, sparse=True))
    for t in range(80):
        window = series[max(0, t - WINDOW + 1) : t + 1]
        window = window[~np.isnan(window)]
        wanted = np.nan if t < WINDOW - 1 or len(window) < 2 else window.var()
        assert found[t] == pytest.approx(wanted, rel=1e-3, nan_ok=True)


def steady(rng=None):
    return (rng or np.random.default_rng(0)).normal(10, 0.1, 100)


def test_episodes_that_never_end_are_no_collapse():
    series = steady()
    series[40:] = np.nan
    found = evaluated(series, 40)
    assert found["collapse_time"] == np.inf
    assert found["diverged"] == 0
    assert np.isnan([found["recovery_time"], found["recovery_rate"]]).all()
    # Of the windows that end in the 20 steps from the onset those with two measurements, all from before it, count.
    variances = [np.var(series[t - 19 : 40]) for t in range(40, 58)]
    assert found["spike_intensity"] == pytest.approx(max(variances) / np.var(series[20:40]), rel=1e-3)
    said = metrics.explain(series, 40, settings=SETTINGS, sparse=True)
    assert said["recovery_time"] == said["recovery_rate"] == "J was not measured after the onset"
    assert evaluated(series, 40, sparse=False)["collapse_time"] == 40


@pytest.mark.parametrize(("falls", "time"), [(1, np.inf), (2, np.inf), (3, 45), (6, 45)])
def test_a_collapse_takes_three_measurements(falls, time):
    series = steady()
    series[45:] = np.nan
    series[45 : 45 + 2 * falls : 2] = 0
    found = evaluated(series, 40)
    assert found["collapse_time"] == time
    if falls < 3:
        said = metrics.explain(series, 40, settings=SETTINGS, sparse=True)
        assert said["recovery_time"] == "J was measured fewer than 3 times after it left the band"


@pytest.mark.parametrize(("later", "time"), [(2, np.nan), (3, np.inf)])
def test_never_coming_back_takes_three_measurements_after_leaving(later, time):
    series = steady()
    series[45:] = np.nan
    series[45 : 46 + later] = 0
    assert evaluated(series, 40)["recovery_time"] == pytest.approx(time, nan_ok=True)


def test_infinity_is_collapse_and_few_measurements_before_the_onset_are_said():
    series = steady()
    series[45:] = np.nan
    series[60] = -np.inf
    assert evaluated(series, 40)["collapse_time"] == 60
    series[20:34] = np.nan
    said = metrics.explain(series, 40, settings=SETTINGS, sparse=True)
    assert said["pre_mean"].endswith("J was measured 6 times in the 20 steps before the onset, and J_pre needs 8")


def test_what_is_sparse_has_no_other_cadence():
    with pytest.raises(ValueError, match="every must be 1"):
        metrics.collapse_time(steady(), 40, every=2, sparse=True)
    for channel in ({"every": 2}, {"dtype": "int32"}, {"dims": (("layer", ("a",)),)}):
        with pytest.raises(ValueError, match="a sparse channel is a scalar of floats"):
            ja.Channel(sparse=True, **channel)


# What reads the performance besides


def test_smoothed_performance_moves_where_it_is_measured():
    series = np.array([[np.nan, 1.0, np.nan, 3.0, np.nan]])
    found = datasets.derived_channels(series, MetricSettings(window=3, hold=2), Cadence(1, True))["x_gen"][0]
    np.testing.assert_allclose(found, [np.nan, 1, 1, 2, 2])


def test_a_search_and_the_progress_read_what_was_measured():
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
    """A learner whose return is known where an episode ends, in two steps of three; a spike ruins it for good."""

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


def test_a_declared_channel_is_read_where_it_was_measured():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = audit(episodic(SPARSE))
    times = found.metrics["collapse_time"].values
    assert (times[:, 0] == np.inf).all()
    series = found.telemetry["performance"].values
    for seed in range(6):
        assert times[seed, 1] == 60 + np.argmax(~np.isnan(series[seed, 1, 60:]))
        for condition in range(2):
            own = series[seed, condition, 60:]
            assert found.metrics["final_performance"].values[seed, condition] == own[~np.isnan(own)][-1]
            assert found.metrics["performance_minimum"].values[seed, condition] == np.nanmin(own)
    assert np.isfinite(found.telemetry["x_gen"].values[:, :, 10:]).all()
    assert found.telemetry["performance"].attrs["sparse"] == 1


def test_a_lane_that_is_not_measured_again_does_not_collapse():
    found = audit(episodic(SPARSE, ends_when_broken=False)).metrics
    assert (found["collapse_time"].values == np.inf).all()
    assert np.isnan(found["final_performance"].values[:, 1]).all()
    assert (found["excess_collapse_lost"].values == 0).all()


def test_gaps_that_are_not_declared_give_one_warning_that_names_a_seed():
    with pytest.warns(UserWarning, match=r"undisturbed seed \d is NaN at step \d+ and a number again at step") as said:
        found = audit(episodic())
    assert len(said) == 1
    text = str(said[0].message)
    assert "and so for 5 more seeds" in text
    assert "Channel(sparse=True)" in text
    series = found.telemetry["performance"].values[0, 0]
    first = int(np.argmax(np.isnan(series)))
    back = first + int(np.argmax(~np.isnan(series[first:])))
    assert f"is NaN at step {first} and a number again at step {back}," in text
    missing = np.isnan(found.telemetry["performance"].values[:, 0, 60:])
    np.testing.assert_array_equal(found.metrics["collapse_time"].values[:, 0], 60 + missing.argmax(-1))


def test_performance_that_turns_nan_for_good_is_no_gap():
    def step(state, key, taps):
        taps("learning_rate", 1.0)
        return state + 1, {"performance": jnp.where(state < 80, jax.random.normal(key), jnp.nan)}

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        audit(ja.Learner(lambda key: jnp.int32(0), step))


def test_a_stored_run_draws_what_was_measured_until_it_is_again():
    telemetry = audit(episodic(SPARSE)).telemetry
    run = Run(None, {}, "", {}, telemetry, None, None)
    raw, held = telemetry["performance"].values, run.performance
    known = ~np.isnan(raw)
    np.testing.assert_array_equal(held[known], raw[known])
    first = known.argmax(-1)
    assert all(np.isfinite(held[s, c, first[s, c] :]).all() for s in range(6) for c in range(2))
    assert all(held[s, c, t] == held[s, c, t - 1] for s, c, t in np.argwhere(~known) if t > first[s, c])
    unmeasured = telemetry.assign(performance=telemetry["performance"].where(telemetry["step"] < 117))
    for status, steps in (("finished", [120, 120]), ("interrupted", [120, 120])):
        ended = Run(None, {}, "", {"status": status}, unmeasured, None, None)
        assert list(ended.computed) == steps
        assert ended.finished == (status == "finished")
    half = telemetry.where(telemetry["step"] < 80)
    assert list(Run(None, {}, "", {"status": "interrupted"}, half, None, None).computed) == [80, 80]
    alone = Run(None, {}, "", {"status": "finished"}, unmeasured[["performance"]], None, None)
    assert alone.finished, "no episode ended in its last steps"
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
def test_a_stored_run_knows_what_was_declared(tmp_path, capsys, monkeypatch, declared):
    monkeypatch.setitem(
        registry.learners._entries, "episodic_test_learner", lambda: episodic(SPARSE if declared else None)
    )
    monkeypatch.setattr("jaxaudit.report.page.write_figures", lambda *_: None)
    (tmp_path / "spec.toml").write_text(SPEC)
    assert main(["run", str(tmp_path / "spec.toml"), "-o", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().err
    run = load(tmp_path / "run")
    assert run.is_sparse("performance") == declared
    times = run.collapse_times
    assert ("is NaN at step" in said) != declared
    assert ("is NaN at step" in (tmp_path / "run" / "report.html").read_text()) != declared
    if declared:
        assert np.isinf(times[["control", "lr_spike 2"]]).all(axis=None)
        assert np.isfinite(times["lr_spike 10"]).all()
    else:
        assert np.isfinite(times).all(axis=None)
