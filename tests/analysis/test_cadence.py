"""Performance that is measured only at every n-th step: the metrics use these steps and ignore the values between."""

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
MEASURED_STEPS = np.arange(EVERY - 1, STEPS, EVERY)


def series(measurements, between):
    """A lane's J: `measurements` `[80]` at the measured steps; between them NaN, nonsense, or the latest value."""
    values = np.full(STEPS, np.nan, np.float32)
    values[MEASURED_STEPS] = measurements
    if between == "held":
        return np.asarray(metrics.held(jnp.asarray(measurements), STEPS, EVERY))
    if between == "nonsense":
        values[np.setdiff1d(np.arange(STEPS), MEASURED_STEPS)] = -1e6
    return values


def measured(fall_step=None, return_step=None):
    rng = np.random.default_rng(0)
    measurements = 10 + rng.uniform(-0.1, 0.1, len(MEASURED_STEPS))  # within two standard deviations
    if fall_step is not None:
        measurements[
            (fall_step <= MEASURED_STEPS) & ((STEPS if return_step is None else return_step) > MEASURED_STEPS)
        ] = 0.0
    return measurements.astype(np.float32)


@pytest.mark.parametrize("between", ["nan", "nonsense", "held"])
def test_steady_performance_does_not_collapse(between):
    result = metrics.evaluate(series(measured(), between), ONSET, settings=SETTINGS, every=EVERY)
    assert result["collapse_time"] == np.inf
    assert result["recovery_time"] == -1
    assert result["diverged"] == 0


@pytest.mark.parametrize("between", ["nan", "nonsense", "held"])
@pytest.mark.parametrize(("fall_step", "return_step"), [(204, None), (210, 270), (200, 320)])
def test_a_collapse_begins_at_its_first_measurement(fall_step, return_step, between):
    result = metrics.evaluate(series(measured(fall_step, return_step), between), ONSET, settings=SETTINGS, every=EVERY)
    first = MEASURED_STEPS[fall_step <= MEASURED_STEPS][0]
    assert result["collapse_time"] == first
    if return_step is not None:
        assert result["recovery_time"] == MEASURED_STEPS[return_step <= MEASURED_STEPS][0] - ONSET
        assert result["recovery_rate"] == pytest.approx(1.0, abs=0.05)


def test_a_fall_shorter_than_the_hold_is_no_collapse():
    result = metrics.evaluate(series(measured(210, 245), "nan"), ONSET, settings=SETTINGS, every=EVERY)
    assert result["collapse_time"] == np.inf


def test_non_finite_values_count_as_collapse_at_measured_steps_only():
    values = np.array(series(measured(), "held"))
    values[ONSET + 6] = np.nan  # between two measurements
    assert metrics.collapse_time(values, ONSET, window=50, hold=50, every=EVERY) == np.inf
    values[MEASURED_STEPS[MEASURED_STEPS >= ONSET][3]] = np.nan
    assert (
        metrics.collapse_time(values, ONSET, window=50, hold=50, every=EVERY)
        == MEASURED_STEPS[MEASURED_STEPS >= ONSET][3]
    )


def test_levels_are_computed_from_the_measured_steps():
    measurements = measured()
    mean, std = metrics.pre_onset_level(series(measurements, "nonsense"), ONSET, 50, every=EVERY)
    inside = measurements[(MEASURED_STEPS >= ONSET - 50) & (MEASURED_STEPS < ONSET)]
    np.testing.assert_allclose([mean, std], [inside.mean(), inside.std()], rtol=1e-4)
    index = np.asarray(metrics.instability_index(series(measurements, "nan"), window=50, every=EVERY))
    np.testing.assert_allclose(index[MEASURED_STEPS[20]], measurements[11:21].var(), rtol=1e-3)
    np.testing.assert_array_equal(index[MEASURED_STEPS[20] : MEASURED_STEPS[21]], index[MEASURED_STEPS[20]])


@pytest.mark.parametrize(
    ("settings", "onset", "name", "reason"),
    [
        (MetricSettings(window=35, hold=50), 200, "collapse_time", "measured 7 times in the 35 steps .* needs 8"),
        (MetricSettings(window=50, hold=14), 200, "collapse_time", "2 measurements of J, and a collapse needs 3"),
    ],
)
def test_too_few_measurements_give_nan_and_a_reason(settings, onset, name, reason):
    values = series(measured(210), "nan")
    assert np.isnan(metrics.evaluate(values, onset, settings=settings, every=EVERY)[name])
    reasons = metrics.explain(values, onset, settings=settings, every=EVERY)
    assert re.search(reason, reasons[name])
    assert any("measurements of the performance" in message for message in settings.validate(400, onset, every=EVERY))


def test_a_cadence_of_one_equals_the_default():
    rng = np.random.default_rng(1)
    values = jnp.asarray(np.cumsum(rng.normal(size=STEPS)), jnp.float32)
    default = jax.jit(lambda x: metrics.evaluate(x, ONSET, settings=SETTINGS))(values)
    explicit = jax.jit(lambda x: metrics.evaluate(x, ONSET, settings=SETTINGS, every=1))(values)
    jax.tree.map(np.testing.assert_array_equal, default, explicit)


def test_an_audit_uses_the_cadence_declared_by_the_learner():
    """Performance is measured at every fifth step, where it is one, or zero in disturbed lanes after the onset."""

    def step(level, key, taps):
        level = taps("level", jnp.float32(1.0))
        noise = 0.01 * jax.random.normal(key)
        performance = jnp.where((taps.step + 1) % EVERY == 0, level + noise, jnp.nan)
        return level, {"performance": performance}

    kind = ja.Kind("drop", "signal", "level", lambda key, x, m, state: (x - m, state), 1.0)
    learner = ja.Learner(lambda key: jnp.float32(1), step, channels={"performance": ja.Channel(every=EVERY)})
    drop = kind(1.0, onset=ONSET, duration="end")
    result = ja.audit(learner, [drop], seeds=3, steps=STEPS, settings=SETTINGS)
    times = result.lanes["collapse_time"].values
    np.testing.assert_array_equal(times, [[np.inf, MEASURED_STEPS[MEASURED_STEPS >= ONSET][0]]] * 3)
    assert result.telemetry.attrs["performance_every"] == EVERY
    final = result.lanes["final_performance"].values
    np.testing.assert_allclose(final, [[1.0, 0.0]] * 3, atol=0.05)
    assert np.isfinite(result.telemetry["x_gen"].values[:, :, EVERY:]).all()
    margin_row = ja.margin(learner, [drop], seeds=4, steps=STEPS, settings=SETTINGS, criterion="collapse").table.iloc[0]
    assert 0.005 < margin_row.margin < 0.1, "the margin is about two standard deviations of the noise"
