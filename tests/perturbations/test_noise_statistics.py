"""Tests the distributions of random perturbations in an audit of a learner that taps in a scan.

One audit records the values at each site, in every lane, step and turn of the scan, and in an undisturbed control.
The random numbers are tested for their distribution, and for independence over seeds, steps, turns, environments and
entries.
"""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jaxaudit as ja
from jaxaudit.runtime import registry

SEEDS, STEPS, TURNS, ENVS, ENTRIES, ONSET = 8, 13, 6, 5, 7, 1
P_VALUE = 1e-4
GAUSSIAN = {
    "observation_noise": 0.1,
    "action_noise": 0.05,
    "reward_noise": 0.5,
    "weight_noise": 0.01,
    "momentum_noise": 0.1,
}
BERNOULLI = {
    "observation_dropped": 0.1,
    "action_dropped": 0.3,
    "reward_flip": 0.1,
    "gradient_sign_flip": 0.1,
    "gradient_mask": 0.5,
}
STUCK = {"observation_stuck": 0.1, "action_stuck": 0.4}
NAMES = [*GAUSSIAN, *BERNOULLI, *STUCK, "gradient_scale"]
SITES = ("observation", "action", "reward", "gradient", "params", "optimizer_state")


def step(state, key, taps):
    rows = jnp.ones(ENVS, bool)

    def turn(taps, state, index):
        clock = jnp.float32(1 + taps.step * TURNS + index)
        value = jnp.full((ENVS, ENTRIES), clock / (STEPS * TURNS))
        values = {site: taps(site, value, valid=rows) for site in SITES[:-1]}
        return state, values | {"optimizer_state": taps("optimizer_state", {"mu": value})["mu"]}

    state, values = taps.scan(turn, state, jnp.arange(TURNS))
    return state, values | {"performance": jnp.float32(0.0)}


LEARNER = ja.Learner(lambda key: jnp.zeros(()), step)


@pytest.fixture(scope="module")
def lanes():
    """Returns values by kind, disturbed and of the control: `[seeds, openings or steps, turns, envs, entries]`."""
    perturbations = []
    for name in NAMES:
        when = {"duration": 1, "period": 2} if name in STUCK else {"duration": "end"}
        perturbations.append(
            registry.perturbations[name]((GAUSSIAN | BERNOULLI | STUCK).get(name), onset=ONSET, **when)
        )
    data = ja.audit(LEARNER, perturbations, seeds=SEEDS, steps=STEPS).telemetry
    values_of_kind = {}
    for condition, name in enumerate(NAMES, 1):
        values = data[registry.perturbations[name].site].values
        open_steps = slice(ONSET, None, 2 if name in STUCK else 1)
        values_of_kind[name] = tuple(values[:, c, open_steps].astype(np.float64) for c in (condition, 0))
    return values_of_kind


def assert_independent(draws):
    """Asserts that no two slices along any axis are correlated; entries have mean 0 and equal variance."""
    for axis, size in enumerate(draws.shape):
        rows = np.moveaxis(draws, axis, 0).reshape(size, -1)
        correlations = np.corrcoef(rows)[np.triu_indices(size, 1)]
        bound = stats.norm.isf(P_VALUE / 2 / correlations.size) / np.sqrt(rows.shape[1])
        assert np.abs(correlations).max() < bound, (
            f"axis {axis}: correlation {np.abs(correlations).max():.3f}, bound {bound:.3f}"
        )


@pytest.mark.parametrize("name", GAUSSIAN)
def test_noise_is_gaussian_with_its_magnitude_and_independent(lanes, name):
    noise = (lanes[name][0] - lanes[name][1]) / GAUSSIAN[name]
    worst = stats.norm.isf(P_VALUE / 2)
    assert abs(noise.mean()) < worst / np.sqrt(noise.size)
    assert abs(noise.std() - 1) < worst / np.sqrt(2 * noise.size)
    assert stats.kstest(noise.ravel(), "norm").pvalue > P_VALUE
    assert_independent(noise)


def test_noise_of_different_kinds_is_independent(lanes):
    noise = {name: lanes[name][0] - lanes[name][1] for name in GAUSSIAN}
    for a, b in itertools.combinations(GAUSSIAN, 2):
        r = np.corrcoef(noise[a].ravel(), noise[b].ravel())[0, 1]
        assert abs(r) < stats.norm.isf(P_VALUE / 2) / np.sqrt(noise[a].size), f"{a}, {b}"


@pytest.mark.parametrize("name", BERNOULLI)
def test_drops_flips_and_masks_hit_the_given_share_independently(lanes, name):
    disturbed, control = lanes[name]
    hit = disturbed != control
    np.testing.assert_array_equal(disturbed[hit], -control[hit] if "flip" in name else 0.0)
    assert stats.binomtest(int(hit.sum()), hit.size, BERNOULLI[name]).pvalue > P_VALUE
    assert_independent(hit - BERNOULLI[name])


def test_gradient_scale_is_one_uniform_factor_per_gradient(lanes):
    disturbed, control = lanes["gradient_scale"]
    factors = disturbed / control
    np.testing.assert_allclose(factors, np.broadcast_to(factors[..., :1, :1], factors.shape), rtol=1e-6)
    draws = factors[..., 0, 0]
    assert stats.kstest(draws.ravel(), "uniform", args=(0.8, 0.4)).pvalue > P_VALUE
    assert_independent(draws - 1.0)


@pytest.mark.parametrize("name", STUCK)
def test_the_given_share_of_entries_sticks_chosen_at_each_opening(lanes, name):
    disturbed, control = lanes[name]
    stuck = disturbed[:, :, 1:] != control[:, :, 1:]
    chosen = stuck[:, :, 0]
    np.testing.assert_array_equal(stuck, np.broadcast_to(chosen[:, :, None], stuck.shape))
    value_at_opening = np.broadcast_to(control[:, :, :1], control.shape)
    np.testing.assert_array_equal(
        disturbed, np.where(np.repeat(chosen[:, :, None], TURNS, axis=2), value_at_opening, control)
    )
    assert stats.binomtest(int(chosen.sum()), chosen.size, STUCK[name]).pvalue > P_VALUE
    assert_independent(chosen - STUCK[name])


def test_seeds_share_no_random_numbers(lanes):
    """This would detect the same random numbers in a different order."""
    noise = lanes["observation_noise"][0] - lanes["observation_noise"][1]
    sets = [np.unique(noise[seed]) for seed in range(SEEDS)]
    for a, b in itertools.combinations(sets, 2):
        assert np.intersect1d(a, b).size < 0.01 * a.size
