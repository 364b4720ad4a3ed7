"""A monitor inside the training program, and the interventions it sets off."""

import jax
import numpy as np
import pytest
from noisy import noisy_descent

import jaxaudit as ja
from jaxaudit.metastate.lru import LRU
from jaxaudit.metastate.training import Training
from jaxaudit.taps import Kind, Taps

STEPS, ONSET, ALPHA = 80, 40, 0.05
SMALL = LRU(size=2, hidden=(8,))


@pytest.fixture(scope="module")
def monitor():
    """Fitted to clean runs, seeds 100 and above."""
    clean = ja.audit(noisy_descent(), [], seeds=range(100, 160), steps=STEPS).telemetry
    return ja.Monitor.fit(clean.isel(condition=0), model=SMALL, training=Training(iterations=150))


def watched(monitor, perturbations, **settings):
    return ja.audit(noisy_descent(), perturbations, steps=STEPS, monitor=monitor, alpha=ALPHA, **settings).telemetry


def spike(magnitude):
    return ja.lr_spike(magnitude, onset=ONSET, duration="end")


@pytest.fixture(scope="module")
def rescued(monitor):
    """A mild and a destructive spike, each alone and with an intervention."""
    return watched(
        monitor,
        [
            spike(1.2),
            ja.chain(spike(1.2), ja.lower_learning_rate(0.02, onset=ONSET)),
            spike(60.0),
            ja.chain(spike(60.0), ja.lower_learning_rate(0.02, onset=ONSET)),
            ja.lower_learning_rate(0.02, onset=ONSET),
        ],
        seeds=12,
    )


def test_the_score_inside_is_the_score_of_the_telemetry(monitor, rescued):
    """Online, in the program, against offline, from what was stored."""
    outside = monitor.score(rescued).score.transpose("seed", "condition", "step").values
    inside = rescued.monitor_score.values + monitor.threshold(ALPHA)
    finite = np.isfinite(inside)
    np.testing.assert_array_equal(finite, np.isfinite(outside))
    assert finite.mean() > 0.8
    np.testing.assert_allclose(inside[finite], outside[finite], rtol=2e-3, atol=2e-3)
    raised = rescued.monitor_score.values[..., :-1] > 0
    np.testing.assert_array_equal(rescued.alarm.values[..., 1:] > 0, raised)


def pairs(telemetry, alone, helped):
    """Where the two conditions' lanes were ever alarmed since the onset, and where all their telemetry is equal."""
    one, other = (telemetry.isel(condition=i) for i in (alone, helped))
    alarmed = (other.alarm.isel(step=slice(ONSET, None)) > 0).any("step").values
    own = [name for name in telemetry.data_vars if name != "baseline_performance"]
    equal = [
        all(np.array_equal(one[n].isel(seed=i), other[n].isel(seed=i), equal_nan=True) for n in own)
        for i in range(telemetry.sizes["seed"])
    ]
    return alarmed, np.array(equal)


@pytest.mark.parametrize(("alone", "helped"), [(1, 2), (0, 5)], ids=["disturbed", "control"])
def test_a_lane_without_an_alarm_is_bitwise_as_without_interventions(rescued, alone, helped):
    alarmed, equal = pairs(rescued, alone, helped)
    assert (~alarmed).sum() >= 8
    assert equal[~alarmed].all()


def test_lanes_that_would_diverge_are_rescued(rescued):
    alarmed, equal = pairs(rescued, 3, 4)
    assert alarmed.all()
    assert not equal.any()
    final = rescued.performance.isel(step=-1)
    assert (final.isel(condition=3).values < -1e3).all() or np.isnan(final.isel(condition=3)).any()
    assert (final.isel(condition=4).values > -100).all()


@pytest.mark.parametrize("name", ["tighten_clip", "reset_moments", "roll_back", "lower_learning_rate"])
def test_every_intervention_acts_on_alarm_alone(monitor, name):
    act = getattr(ja, name)(onset=ONSET)
    found = watched(monitor, [spike(60.0), ja.chain(spike(60.0), act), act], seeds=6)
    alarmed, equal = pairs(found, 1, 2)
    assert alarmed.all()
    assert not equal.any()
    alarmed, equal = pairs(found, 0, 3)
    assert equal[~alarmed].all()
    assert (~alarmed).any()


def test_roll_back_goes_to_the_state_of_so_many_steps_ago():
    """Called step by step, with a state that tells its step."""
    kind: Kind = ja.roll_back(4).kind()
    memory = kind.memory({"t": jax.numpy.float32(0)})
    apply = jax.jit(lambda value, memory, alarm: kind.apply(None, value, jax.numpy.float32(4), memory, alarm=alarm))
    t, path = 0.0, []
    for step in range(40):
        value, memory = apply({"t": jax.numpy.float32(t)}, memory, step >= 20)
        path.append(float(value["t"]))
        t = path[-1] + 1
    assert path[:20] == list(range(20))
    assert 4 <= 20 - path[20] <= 6
    restored = [step for step in range(1, 40) if path[step] != path[step - 1] + 1]
    assert restored == [20, 24, 28, 32, 36]
    assert {path[step] for step in restored} == {path[20]}


def test_an_intervention_without_a_monitor_is_refused():
    with pytest.raises(ValueError, match="'lower_learning_rate' waits for a monitor's alarm, and there is no monitor"):
        ja.audit(noisy_descent(), [ja.lower_learning_rate()], steps=STEPS, seeds=1)


def test_a_monitor_of_other_channels_is_refused(monitor):
    from quadratic import quadratic

    with pytest.raises(ValueError, match=r"the monitor reads channel '.*', which the learner's step does not give"):
        ja.audit(quadratic(None), [spike(2.0)], steps=STEPS, seeds=1, monitor=monitor)


def test_outside_an_audit_there_is_no_alarm():
    assert Taps()("learning_rate", 0.1) == 0.1
