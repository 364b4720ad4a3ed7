"""Audits with a known outcome: gradient descent on a quadratic, the README's example of a custom learner."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from descent import CURVATURE, DIMENSION, LEARNER, RATE, init
from scipy import stats

import jaxaudit as ja


@pytest.fixture(scope="module")
def spiked():
    """Returns an audit with factors 1% apart around 2 / (rate x curvature) = 100, until the end of the run."""
    factors = [float(factor) for factor in np.round(100 * 1.01 ** np.arange(-6, 7) * 1.003, 3)]
    spike = ja.lr_spike(ja.sweep(1.0, 50.0, *factors, 200.0), onset=0.3, duration="end")
    return ja.audit(LEARNER, [spike], seeds=8, steps=600)


def test_collapse_occurs_exactly_beyond_the_stability_limit(spiked):
    lanes = spiked.lanes
    collapsed = np.isfinite(lanes["collapse_time"].values)
    magnitude = lanes["magnitude"].values
    assert not collapsed[:, 0].any(), "the control collapsed"
    expected = np.broadcast_to(RATE * magnitude[1:] * CURVATURE > 2, collapsed[:, 1:].shape)
    np.testing.assert_array_equal(collapsed[:, 1:], expected)


def test_the_critical_magnitude_is_within_two_percent(spiked):
    estimate = spiked.critical_magnitude("lr_spike")
    critical = 2 / (RATE * CURVATURE)
    assert abs(estimate.value / critical - 1) < 0.02
    assert estimate.low <= critical <= estimate.high


@pytest.mark.exhaustive
def test_a_neutral_magnitude_of_zero_does_not_change_the_critical_magnitude():
    def critical(*shares):
        noise = ja.weight_noise(ja.sweep(*shares), onset=0.3)
        return ja.audit(LEARNER, [noise], seeds=8, steps=300).critical_magnitude("weight_noise")

    assert critical(0.0, 0.01, 100.0) == critical(0.01, 100.0)
    assert np.isfinite(critical(0.0, 0.01, 100.0).value)


def test_recovery_after_a_spike_follows_the_closed_form():
    """Ten steps at factor f multiply x by (1 - r f c)^10, and each undisturbed step by 1 - r c."""
    factor, onset, steps = 150.0, 100, 600
    result = ja.audit(LEARNER, [ja.lr_spike(factor, onset=onset, duration=10)], seeds=8, steps=steps)
    init_seeds = jax.jit(jax.vmap(lambda seed: init(jax.random.fold_in(jax.random.key(seed), 0))))
    x0 = np.asarray(init_seeds(np.arange(8, dtype=np.uint32)), np.float64)
    undisturbed_factor, spiked_factor = 1 - RATE * CURVATURE, 1 - RATE * factor * CURVATURE
    exponents = np.arange(1, steps + 1)
    disturbed = np.clip(exponents - onset, 0, 10)
    amplitude = undisturbed_factor ** (exponents - disturbed) * spiked_factor**disturbed
    expected = -0.5 * CURVATURE * (x0**2).sum(1)[:, None] * amplitude**2
    np.testing.assert_allclose(result.telemetry["performance"].values[:, 1], expected, rtol=2e-3)


def squared_norms(result):
    """Returns |x|^2 of all lanes at every step, `[seed, condition, step]`, in float64."""
    return -2 / CURVATURE * result.telemetry["performance"].values.astype(np.float64)


def confidence_interval(values, level=0.99):
    return stats.t.interval(level, len(values) - 1, values.mean(), stats.sem(values))


STD, FLIP_SHARES, DURATION, ONSET = 0.3, (0.1, 0.5), 10, 20


@pytest.fixture(scope="module")
def noisy():
    """Returns |x|^2 `[seed, condition, step]` of the control, weight noise, and two shares of flipped signs."""
    flips = ja.gradient_sign_flip(ja.sweep(*FLIP_SHARES), onset=ONSET, duration=DURATION)
    return squared_norms(ja.audit(LEARNER, [ja.weight_noise(STD, onset=ONSET), flips], seeds=512, steps=60))


@pytest.mark.exhaustive
def test_weight_noise_adds_its_variance_to_the_squared_norm(noisy):
    difference = noisy[:, 1] - noisy[:, 0]
    assert (difference[:, :ONSET] == 0).all()
    for later in (0, 5, 30):
        expected = DIMENSION * STD**2 * (1 - RATE * CURVATURE) ** (2 * (later + 1))
        low, high = confidence_interval(difference[:, ONSET + later])
        assert low <= expected <= high, (later, low, expected, high)


@pytest.mark.parametrize(("condition", "share"), enumerate(FLIP_SHARES, 2))
def test_flipped_signs_multiply_the_squared_norm_as_expected(condition, share, noisy):
    ratio = noisy[:, condition] / noisy[:, 0]
    right_factor, wrong_factor = (1 - RATE * CURVATURE) ** 2, (1 + RATE * CURVATURE) ** 2
    for steps in (1, DURATION, 30):
        expected = ((1 - share) + share * wrong_factor / right_factor) ** min(steps, DURATION)
        low, high = confidence_interval(ratio[:, ONSET + steps - 1])
        assert low <= expected <= high, (steps, low, expected, high)


def test_an_audit_can_be_jitted_and_vmapped_over_magnitudes():
    """`run` is a pure function of `inputs`. One vmapped call over 8 spikes finds the critical factor."""
    grid = ja.plan(LEARNER, [ja.lr_spike(2.0, onset=20, duration="end")], seeds=2, steps=40, devices=jax.devices()[:1])
    data = ja.inputs(grid)

    def final(factor):
        disturbance = data.forks[0].lanes.disturbance
        magnitude = jnp.where(disturbance.magnitude != 1.0, factor, 1.0)
        lanes = data.forks[0].lanes.replace(disturbance=disturbance.replace(magnitude=magnitude))
        forks = (data.forks[0].replace(lanes=lanes),)
        return ja.run(grid.program, data.replace(forks=forks))[1][0]["performance"][0, -1]

    factors = jnp.array([10.0, 50.0, 90.0, 99.0, 101.0, 110.0, 150.0, 200.0])
    last = np.asarray(jax.jit(jax.vmap(final))(factors))
    grows = np.abs(last[:, 2:]) > np.abs(last[:, :2])
    np.testing.assert_array_equal(grows, np.broadcast_to((factors > 100)[:, None], grows.shape))
    assert (last[:, :2] == last[0, :2]).all()
