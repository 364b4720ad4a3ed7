"""The stated distributions of the random perturbations, as a learner meets them: tapped in a scan, in a real audit.

One audit records what passes at each site, in every lane, step and turn of the scan, beside an undisturbed control;
draws are then tested for their distribution and for independence over seeds, steps, turns, environments and entries.
"""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jaxaudit as ja
from jaxaudit.runtime import registry

SEEDS, STEPS, TURNS, ENVS, ENTRIES, ONSET = 8, 13, 6, 5, 7, 1
SURELY = 1e-4
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
        seen = {site: taps(site, value, valid=rows) for site in SITES[:-1]}
        return state, seen | {"optimizer_state": taps("optimizer_state", {"mu": value})["mu"]}

    state, seen = taps.scan(turn, state, jnp.arange(TURNS))
    return state, seen | {"performance": jnp.float32(0.0)}


LEARNER = ja.Learner(lambda key: jnp.zeros(()), step)


@pytest.fixture(scope="module")
def lanes():
    """What each perturbation's lanes saw and the control did: `[seeds, openings or steps, turns, envs, entries]`."""
    chosen = []
    for name in NAMES:
        when = {"duration": 1, "period": 2} if name in STUCK else {"duration": "end"}
        chosen.append(registry.perturbations[name]((GAUSSIAN | BERNOULLI | STUCK).get(name), onset=ONSET, **when))
    data = ja.audit(LEARNER, chosen, seeds=SEEDS, steps=STEPS).telemetry
    seen = {}
    for condition, name in enumerate(NAMES, 1):
        values = data[registry.perturbations[name].site].values
        opened = slice(ONSET, None, 2 if name in STUCK else 1)
        seen[name] = tuple(values[:, c, opened].astype(np.float64) for c in (condition, 0))
    return seen


def assert_independent(draws):
    """No two slices along any axis are correlated beyond chance; `draws` `[...]` of mean 0 and one variance."""
    for axis, size in enumerate(draws.shape):
        rows = np.moveaxis(draws, axis, 0).reshape(size, -1)
        found = np.corrcoef(rows)[np.triu_indices(size, 1)]
        bound = stats.norm.isf(SURELY / 2 / found.size) / np.sqrt(rows.shape[1])
        assert np.abs(found).max() < bound, f"axis {axis}: correlation {np.abs(found).max():.3f}, bound {bound:.3f}"


@pytest.mark.parametrize("name", GAUSSIAN)
def test_noise_is_gaussian_of_the_stated_width_and_independent(lanes, name):
    noise = (lanes[name][0] - lanes[name][1]) / GAUSSIAN[name]
    worst = stats.norm.isf(SURELY / 2)
    assert abs(noise.mean()) < worst / np.sqrt(noise.size)
    assert abs(noise.std() - 1) < worst / np.sqrt(2 * noise.size)
    assert stats.kstest(noise.ravel(), "norm").pvalue > SURELY
    assert_independent(noise)


def test_kinds_draw_independently_of_each_other(lanes):
    noise = {name: lanes[name][0] - lanes[name][1] for name in GAUSSIAN}
    for one, other in itertools.combinations(GAUSSIAN, 2):
        r = np.corrcoef(noise[one].ravel(), noise[other].ravel())[0, 1]
        assert abs(r) < stats.norm.isf(SURELY / 2) / np.sqrt(noise[one].size), f"{one}, {other}"


@pytest.mark.parametrize("name", BERNOULLI)
def test_drops_flips_and_masks_hit_the_stated_share_independently(lanes, name):
    seen, true = lanes[name]
    hit = seen != true
    np.testing.assert_array_equal(seen[hit], -true[hit] if "flip" in name else 0.0)
    assert stats.binomtest(int(hit.sum()), hit.size, BERNOULLI[name]).pvalue > SURELY
    assert_independent(hit - BERNOULLI[name])


def test_gradient_scale_is_one_uniform_factor_for_each_gradient(lanes):
    seen, true = lanes["gradient_scale"]
    factors = seen / true
    np.testing.assert_allclose(factors, np.broadcast_to(factors[..., :1, :1], factors.shape), rtol=1e-6)
    draws = factors[..., 0, 0]
    assert stats.kstest(draws.ravel(), "uniform", args=(0.8, 0.4)).pvalue > SURELY
    assert_independent(draws - 1.0)


@pytest.mark.parametrize("name", STUCK)
def test_the_stated_share_of_entries_sticks_drawn_anew_at_each_opening(lanes, name):
    seen, true = lanes[name]
    stuck = seen[:, :, 1:] != true[:, :, 1:]
    drawn = stuck[:, :, 0]
    np.testing.assert_array_equal(stuck, np.broadcast_to(drawn[:, :, None], stuck.shape))
    held = np.broadcast_to(true[:, :, :1], true.shape)
    np.testing.assert_array_equal(seen, np.where(np.repeat(drawn[:, :, None], TURNS, axis=2), held, true))
    assert stats.binomtest(int(drawn.sum()), drawn.size, STUCK[name]).pvalue > SURELY
    assert_independent(drawn - STUCK[name])


def test_seeds_share_no_draws(lanes):
    """A stronger form of independence over seeds, for the same draws in another order."""
    noise = lanes["observation_noise"][0] - lanes["observation_noise"][1]
    sets = [np.unique(noise[seed]) for seed in range(SEEDS)]
    for one, other in itertools.combinations(sets, 2):
        assert np.intersect1d(one, other).size < 0.01 * one.size
