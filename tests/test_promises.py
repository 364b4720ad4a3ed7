"""The promises, each over all standard perturbations at once: one compiled PPO grid, fed different data.

The grid has every perturbation as one condition, forked at step 3, its window open from step 5 to step 7; the chain
with an lr_spike of factor one at step 3 is what opens the fork before the window.
"""

import dataclasses

import jax
import numpy as np
import pytest

import jaxaudit as ja
from jaxaudit import registry
from jaxaudit.grid import arrange, compiled, inputs, plan

FORK, OPEN, CLOSE, STEPS = 3, 5, 7, 10
NAMES = [name for name in registry.perturbations if name not in ("lr_spike",)]
# Some standard magnitudes do little within a window of two short steps; these are felt at once.
STRONG = {
    "quantize": 2.0,
    "clip_failure": 0.01,
    "reward_flip": 0.5,
    "lr_schedule_error": 0.4,
    "observation_stuck": 0.7,
    "action_stuck": 1.0,
}
STATEFUL = [name for name in NAMES if registry.perturbations[name].default.memory is not None]
CONDITIONS = ["control", "lr_spike", *NAMES]


def chained(name, magnitude=None, rate=1.0, **changes):
    factory = registry.perturbations[name]
    return ja.chain(
        ja.lr_spike(rate, onset=FORK, duration=1),
        factory(magnitude or STRONG.get(name), onset=OPEN, duration=CLOSE - OPEN, **changes),
    )


def perturbations(magnitudes=None, onset=OPEN):
    """All of them, at the magnitudes given by name or else at strong ones."""
    given = magnitudes or {}
    first = ja.lr_spike(given.get("lr_spike", 10.0), onset=FORK, duration=CLOSE - FORK)
    return [first, *(chained(name, given.get(name)) for name in NAMES)]


def ppo(**settings):
    return ja.learners.ppo(
        "InvertedPendulum-v5",
        num_envs=2,
        rollout_length=32,
        minibatch_size=32,
        epochs=2,
        hidden=(8, 8),
        max_grad_norm=0.05,
        **settings,
    )


@pytest.fixture(scope="module")
def learner():
    return ppo(evaluations=1, evaluation_episodes=1)


@pytest.fixture(scope="module")
def train(learner):
    """Trains the whole grid with the perturbations given; all calls share one compiled program."""
    return lambda chosen: telemetry(plan(learner, chosen, seeds=2, steps=STEPS))


def telemetry(grid):
    baseline, forks = compiled(grid.program)(inputs(grid))
    return arrange(grid, baseline, forks), {k: np.asarray(v)[:, : len(grid.seeds)] for k, v in baseline.items()}


@pytest.fixture(scope="module")
def strong(train):
    return train(perturbations())


def neutral_magnitudes():
    return {name: registry.perturbations[name].default.neutral or 1e-30 for name in registry.perturbations}


def same(a, b):
    return np.array_equal(a, b, equal_nan=True)


def lane_same(arrays, other, condition, start=0, stop=STEPS):
    return all(same(arrays[k][:, condition, start:stop], other[k][:, condition, start:stop]) for k in arrays)


def test_every_standard_perturbation_is_in_the_grid():
    assert len(CONDITIONS) == 1 + len(list(registry.perturbations)) == 29


def test_identity_a_neutral_lane_is_bitwise_the_control(learner, train):
    chosen = []
    for perturbation in perturbations():
        parts = [dataclasses.replace(p, magnitude=p.neutral) for p in perturbation.parts]
        chosen.append(ja.chain(*parts))
    arrays, _ = train(chosen)
    for condition, name in enumerate(CONDITIONS):
        for channel, values in arrays.items():
            assert same(values[:, condition], values[:, 0]), f"{name} changed {channel}"


def test_pairing_before_the_fork_a_lane_is_the_baseline(strong):
    arrays, baseline = strong
    for channel, values in arrays.items():
        for condition in range(len(CONDITIONS)):
            assert same(values[:, condition, :FORK], np.moveaxis(baseline[channel], 0, 1)[:, :FORK]), channel


@pytest.mark.parametrize("condition", range(2, len(CONDITIONS)), ids=CONDITIONS[2:])
def test_pairing_a_closed_window_is_bitwise_the_control_and_an_open_one_is_felt(strong, condition):
    arrays, _ = strong
    for channel, values in arrays.items():
        assert same(values[:, condition, :OPEN], values[:, 0, :OPEN]), channel
    later = [not same(values[s, condition, OPEN:], values[s, 0, OPEN:]) for values in arrays.values() for s in (0, 1)]
    assert any(later), "the perturbation changed nothing"


def test_isolation_a_lane_driven_to_nan_changes_no_other(learner, train, strong):
    """Three sites drive lanes to NaN at once, and a broken learning rate fills the memory of stateful ones with it."""
    poisoned = {"reward_scale": float("inf"), "weight_noise": float("inf"), "lr_spike": float("inf")}
    remembering = STATEFUL[::2]
    chosen = perturbations(poisoned)
    for name in remembering:
        chosen[CONDITIONS.index(name) - 1] = chained(name, rate=float("inf"))
    arrays, _ = train(chosen)
    destroyed = [*poisoned, *remembering]
    for name in destroyed:
        after = arrays["params_norm"][:, CONDITIONS.index(name), CLOSE:]
        assert not np.isfinite(after).any(), f"{name} should have destroyed its lane"
    for condition, name in enumerate(CONDITIONS):
        if name not in destroyed:
            assert lane_same(arrays, strong[0], condition), f"{name} was touched by another lane's NaN"


def test_one_program_new_magnitudes_windows_and_targets_compile_nothing(learner, train, strong):
    compilations = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compilations.append(event) if "backend_compile" in event else None
    )
    rng = np.random.default_rng(0)
    other = {n: float(m) for n, m in zip(NAMES, rng.uniform(0.05, 0.95, len(NAMES)), strict=True)} | {"quantize": 4.0}
    other |= {name: 3.0 for name in NAMES if registry.perturbations[name].default.whole}
    train([*perturbations(other)])
    retimed = [ja.chain(*(dataclasses.replace(p, when=ja.window(FORK, 2)) for p in x.parts)) for x in perturbations()]
    train(retimed)
    aimed = [
        ja.chain(
            *(dataclasses.replace(p, target="actor" if p.site in ("params", "gradient") else None) for p in x.parts)
        )
        for x in perturbations()
    ]
    arrays, _ = train(aimed)
    assert not compilations
    jax.jit(lambda x: x * 3.25 + 1)(np.ones(7))
    assert compilations, "the listener hears compilations"
    condition = CONDITIONS.index("weight_noise")
    assert not lane_same(arrays, strong[0], condition), "the target was ignored"


def test_exact_replay_the_same_program_gives_the_same_bits(train, strong):
    arrays, baseline = train(perturbations())
    for condition in range(len(CONDITIONS)):
        assert lane_same(arrays, strong[0], condition)
    assert all(same(baseline[k], strong[1][k]) for k in baseline)


def test_common_randomness_adding_a_condition_leaves_the_others_equal_but_for_rounding(strong):
    """A grid of four of the conditions, at another width, follows the same path in the first steps after the fork."""
    few = ["reward_noise", "weight_noise", "gradient_sign_flip", "observation_stuck"]
    # What is measured besides does not change the training, and takes time to compile.
    learner = ppo(evaluations=0, telemetry="basic")
    smaller, _ = telemetry(plan(learner, [chained(name) for name in few], seeds=2, steps=STEPS))
    for position, name in enumerate(["control", *few]):
        for channel in ("performance", "policy_loss", "value_loss", "entropy", "params_norm", "update_norm"):
            mine = smaller[channel][:, position, FORK : OPEN + 1]
            theirs = strong[0][channel][:, CONDITIONS.index(name), FORK : OPEN + 1]
            np.testing.assert_allclose(mine, theirs, rtol=2e-3, atol=2e-4, err_msg=f"{name}: {channel}")


def test_lanes_of_a_seed_share_the_learners_randomness_and_seeds_do_not(strong):
    arrays, _ = strong
    observation = arrays["performance"][:, :, FORK]
    assert same(observation[:, 2:], np.repeat(observation[:, :1], len(NAMES), axis=1))
    assert not same(arrays["params_norm"][0, 0], arrays["params_norm"][1, 0])
