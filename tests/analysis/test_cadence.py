"""Performance that is measured at some steps alone: metrics read those, whatever stands between."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxaudit as ja
from jaxaudit.analysis import metrics
from jaxaudit.analysis.metrics import MetricSettings

pytestmark = pytest.mark.exhaustive

EVERY, STEPS, ONSET = 5, 400, 200
SETTINGS = MetricSettings(window=50, hold=50)
DUE = np.arange(EVERY - 1, STEPS, EVERY)


def series(measured, between):
    """A lane's J: `measured` `[80]` at the due steps, and between them NaN, nonsense, or the latest value."""
    whole = np.full(STEPS, np.nan, np.float32)
    whole[DUE] = measured
    if between == "held":
        return np.asarray(metrics.held(jnp.asarray(measured), STEPS, EVERY))
    if between == "nonsense":
        whole[np.setdiff1d(np.arange(STEPS), DUE)] = -1e6
    return whole


def measured(fall=None, back=None):
    rng = np.random.default_rng(0)
    values = 10 + rng.uniform(-0.1, 0.1, len(DUE))  # never two deviations away
    if fall is not None:
        values[(fall <= DUE) & ((STEPS if back is None else back) > DUE)] = 0.0
    return values.astype(np.float32)


@pytest.mark.parametrize("between", ["nan", "nonsense", "held"])
def test_a_performance_that_stays_has_not_collapsed(between):
    found = metrics.evaluate(series(measured(), between), ONSET, settings=SETTINGS, every=EVERY)
    assert found["collapse_time"] == np.inf
    assert found["recovery_time"] == -1
    assert found["diverged"] == 0


@pytest.mark.parametrize("between", ["nan", "nonsense", "held"])
@pytest.mark.parametrize(("fall", "back"), [(204, None), (210, 270), (200, 320)])
def test_a_collapse_begins_at_its_first_measurement(fall, back, between):
    found = metrics.evaluate(series(measured(fall, back), between), ONSET, settings=SETTINGS, every=EVERY)
    first = DUE[fall <= DUE][0]
    assert found["collapse_time"] == first
    if back is not None:
        assert found["recovery_time"] == DUE[back <= DUE][0] - ONSET
        assert found["recovery_rate"] == pytest.approx(1.0, abs=0.05)


def test_a_fall_shorter_than_the_hold_is_none():
    found = metrics.evaluate(series(measured(210, 245), "nan"), ONSET, settings=SETTINGS, every=EVERY)
    assert found["collapse_time"] == np.inf


def test_what_is_not_finite_at_a_due_step_is_collapse_and_elsewhere_is_nothing():
    whole = np.array(series(measured(), "held"))
    whole[ONSET + 6] = np.nan  # between two measurements
    assert metrics.collapse_time(whole, ONSET, window=50, hold=50, every=EVERY) == np.inf
    whole[DUE[DUE >= ONSET][3]] = np.nan
    assert metrics.collapse_time(whole, ONSET, window=50, hold=50, every=EVERY) == DUE[DUE >= ONSET][3]


def test_levels_are_those_of_the_measurements():
    values = measured()
    mean, std = metrics.pre_onset_level(series(values, "nonsense"), ONSET, 50, every=EVERY)
    inside = values[(DUE >= ONSET - 50) & (DUE < ONSET)]
    np.testing.assert_allclose([mean, std], [inside.mean(), inside.std()], rtol=1e-4)
    index = np.asarray(metrics.instability_index(series(values, "nan"), window=50, every=EVERY))
    np.testing.assert_allclose(index[DUE[20]], values[11:21].var(), rtol=1e-3)
    np.testing.assert_array_equal(index[DUE[20] : DUE[21]], index[DUE[20]])


@pytest.mark.parametrize(
    ("settings", "onset", "name", "why"),
    [
        (MetricSettings(window=35, hold=50), 200, "collapse_time", "measured 7 times in the 35 steps .* needs 8"),
        (MetricSettings(window=50, hold=14), 200, "collapse_time", "2 measurements of J, and a collapse needs 3"),
    ],
)
def test_too_few_measurements_are_a_reason(settings, onset, name, why):
    whole = series(measured(210), "nan")
    assert np.isnan(metrics.evaluate(whole, onset, settings=settings, every=EVERY)[name])
    reasons = metrics.explain(whole, onset, settings=settings, every=EVERY)
    assert re.search(why, reasons[name])
    assert any("measurements of the performance" in told for told in settings.validate(400, onset, every=EVERY))


def test_every_step_is_a_cadence_of_one():
    rng = np.random.default_rng(1)
    whole = jnp.asarray(np.cumsum(rng.normal(size=STEPS)), jnp.float32)
    one = jax.jit(lambda x: metrics.evaluate(x, ONSET, settings=SETTINGS))(whole)
    other = jax.jit(lambda x: metrics.evaluate(x, ONSET, settings=SETTINGS, every=1))(whole)
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_an_audits_metrics_know_the_learners_cadence():
    """Performance is one at every fifth step, falls to zero at the onset in the disturbed lanes, and is NaN between."""

    def step(level, key, taps):
        level = taps("level", jnp.float32(1.0))
        noise = 0.01 * jax.random.normal(key)
        told = jnp.where((taps.step + 1) % EVERY == 0, level + noise, jnp.nan)
        return level, {"performance": told}

    kind = ja.Kind("drop", "signal", "level", lambda key, x, m, state: (x - m, state), 1.0)
    learner = ja.Learner(lambda key: jnp.float32(1), step, channels={"performance": ja.Channel(every=EVERY)})
    drop = kind(1.0, onset=ONSET, duration="end")
    result = ja.audit(learner, [drop], seeds=3, steps=STEPS, settings=SETTINGS)
    times = result.lanes["collapse_time"].values
    np.testing.assert_array_equal(times, [[np.inf, DUE[DUE >= ONSET][0]]] * 3)
    assert result.telemetry.attrs["performance_every"] == EVERY
    final = result.lanes["final_performance"].values
    np.testing.assert_allclose(final, [[1.0, 0.0]] * 3, atol=0.05)
    assert np.isfinite(result.telemetry["x_gen"].values[:, :, EVERY:]).all()
    found = ja.margin(learner, [drop], seeds=4, steps=STEPS, settings=SETTINGS, criterion="collapse").table.iloc[0]
    assert 0.005 < found.margin < 0.1, "two deviations of the noise"
