"""Tests perturbations that keep a state against plain simulations of sensors, actuators and delayed rewards.

The environment's observations and rewards depend on its clock and on the actions, and the actions depend on the clock
only; so the control lane has the values that the disturbances of other lanes act on.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxaudit as ja
from jaxaudit.core.batches import layout
from jaxaudit.core.grid import plan
from jaxaudit.execution.engine import Engine
from jaxaudit.execution.grid_program import blank_telemetry, place
from jaxaudit.runtime import registry
from jaxaudit.spec.document import misfits
from jaxaudit.tasks._brax import Env, State
from jaxaudit.tasks.episodes import Episodes

ENVS, TURNS, STEPS, SEEDS, ONSET = 4, 7, 12, 2, 2
TIME_LIMIT = 9
WINDOWS = {"end": {"duration": "end"}, "once": {"duration": 4}, "periodic": {"duration": 2, "period": 4}}
OPEN = {"end": range(2, 12), "once": range(2, 6), "periodic": (2, 3, 6, 7, 10, 11)}
DELAYED = {
    "observation_delayed": (1.0, 3.0, 32.0),
    "action_delayed": (1.0, 3.0, 32.0),
    "reward_delay": (2.0, 5.0, 128.0),
}
STUCK = {"observation_stuck": (0.5, 1.0), "action_stuck": (0.5, 1.0)}
CASES = [
    (name, magnitude, when)
    for name, magnitudes in (DELAYED | STUCK).items()
    for magnitude, when in itertools.product(magnitudes, WINDOWS)
]
TESTED_WITH_DIALOGUES = {"reward_model_drift", "stale_policy", "sync_interval"}
"""Kinds that test_dialogue_perturbations.py tests."""
STATEFUL = [name for name in registry.perturbations if registry.perturbations[name].keeps_state]


class Scripted(Env):
    """Episodes of 2 to 12 steps, each with a random tag; all numbers are integers, so that sums are exact."""

    cheap_reset = True
    observation_size = 5
    action_size = 2
    backend = "none"

    def reset(self, rng):
        tag = jnp.floor(jax.random.uniform(rng) * 1000)
        zero = jnp.float32(0.0)
        return self._state(State(None, zero, zero, zero, {}, {}), tag, zero, jnp.zeros(2))

    def step(self, state, action):
        return self._state(state, state.info["tag"], state.info["clock"] + 1, action)

    def _state(self, state, tag, clock, action):
        return state.replace(
            obs=jnp.concatenate([jnp.stack([tag + 1000 * clock, tag - 1000 * clock, clock]), action]),
            reward=tag + clock,
            done=(clock >= 2 + tag % 11).astype(jnp.float32),
            info={"tag": tag, "clock": clock},
        )


def step(state, key, taps):
    def turn(taps, state, index):
        clock = taps.step * TURNS + index
        action = jnp.stack([clock + 0.25 * jnp.arange(ENVS), -clock - 0.25 * jnp.arange(ENVS)], axis=1)
        after, transition = EPISODES.step(state, jax.random.fold_in(key, index), action, taps)
        return after, {
            "final": transition.final_observation,
            "next": after.observation,
            "reward": transition.reward,
            "ends": transition.terminated | transition.truncated,
        }

    state, records = taps.scan(turn, state, jnp.arange(TURNS))
    return state, records | {"performance": jnp.float32(0.0)}


EPISODES = Episodes(Scripted(), ENVS, TIME_LIMIT)
LEARNER = ja.Learner(EPISODES.init, step)


@pytest.fixture(scope="module")
def grid():
    perturbations = [registry.perturbations[name](m, onset=ONSET, **WINDOWS[when]) for name, m, when in CASES]
    return plan(LEARNER, perturbations, seeds=SEEDS, steps=STEPS)


@pytest.fixture(scope="module")
def forked(grid):
    """Returns the grid's engine, and the baseline's telemetry and states at the onset."""
    engine, first = Engine(grid, rows=STEPS), layout(grid)[0]
    states, rows = engine.advance(first, engine.initial(first), 0, ONSET)
    return engine, rows, engine.copies(first, states)


@pytest.fixture(scope="module")
def lanes(grid, forked):
    """Returns the telemetry of all lanes, trained in one call: float32 `[seed, condition, steps, turns, envs, ...]`."""
    engine, baseline, pieces = forked
    first, batch = layout(grid)
    _, rows = engine.advance(batch, engine.forked(lambda seeds: pieces, batch), ONSET, STEPS)
    arrays = blank_telemetry(grid)
    place(arrays.__getitem__, grid, first, baseline, 0, ONSET)
    place(arrays.__getitem__, grid, batch, rows, ONSET, STEPS)
    return arrays


def disturbed_and_control(lanes, name, magnitude, when):
    """Yields a disturbed lane and its control for each seed, by channel: `[steps, turns, envs, ...]`."""
    condition = 1 + CASES.index((name, magnitude, when))
    for seed in range(SEEDS):
        yield tuple({k: v[seed, c] for k, v in lanes.items()} for c in (condition, 0))


def turns_in_order(when):
    """Returns (step, turn, whether a window opens here) in the order of time, for all steps of the run."""
    open_steps = set(OPEN[when])
    return [(t, i, t in open_steps and t - 1 not in open_steps and i == 0) for t in range(STEPS) for i in range(TURNS)]


def delayed_entry(history, steps):
    return history[max(0, len(history) - 1 - int(steps))]


@pytest.mark.exhaustive
def test_scripted_episodes_terminate_and_are_truncated(lanes):
    assert 10 < lanes["ends"][0, 0].sum() < STEPS * TURNS * ENVS / 2
    lengths = lanes["final"][:, 0, ..., 2]
    assert lengths.max() == TIME_LIMIT
    ended = lengths[lanes["ends"][:, 0] == 1]
    assert np.unique(ended).size > 3


@pytest.mark.parametrize("when", WINDOWS)
@pytest.mark.parametrize("steps", DELAYED["observation_delayed"])
@pytest.mark.exhaustive
def test_observation_delayed_is_a_queue_per_episode(lanes, steps, when):
    for disturbed, control in disturbed_and_control(lanes, "observation_delayed", steps, when):
        for env in range(ENVS):
            history = []
            for t, i, opening in turns_in_order(when):
                history = [] if opening else history
                final, first, ends = control["final"][t, i, env], control["next"][t, i, env], control["ends"][t, i, env]
                history.append(final)
                expected = delayed_entry(history, steps) if t in OPEN[when] else final
                np.testing.assert_array_equal(disturbed["final"][t, i, env], expected)
                if ends:
                    history, expected = [first], first
                np.testing.assert_array_equal(disturbed["next"][t, i, env], expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("when", WINDOWS)
@pytest.mark.parametrize("steps", DELAYED["action_delayed"])
def test_action_delayed_is_a_queue_per_episode(lanes, steps, when):
    for disturbed, control in disturbed_and_control(lanes, "action_delayed", steps, when):
        for env in range(ENVS):
            history = []
            for t, i, opening in turns_in_order(when):
                history = [] if opening else history
                action = control["final"][t, i, env, 3:]
                history.append(action)
                expected = delayed_entry(history, steps) if t in OPEN[when] else action
                np.testing.assert_array_equal(disturbed["final"][t, i, env, 3:], expected)
                history = [] if control["ends"][t, i, env] else history


@pytest.mark.parametrize("when", WINDOWS)
@pytest.mark.parametrize("steps", DELAYED["reward_delay"])
def test_reward_delay_pays_late_and_the_rest_at_the_episodes_end(lanes, steps, when):
    for disturbed, control in disturbed_and_control(lanes, "reward_delay", steps, when):
        for env in range(ENVS):
            due = []
            for t, i, opening in turns_in_order(when):
                due = [] if opening else due
                reward, ends = control["reward"][t, i, env], control["ends"][t, i, env]
                due.append(reward)
                expected = due.pop(0) if len(due) > steps else 0.0
                if ends:
                    expected, due = expected + sum(due), []
                assert disturbed["reward"][t, i, env] == (expected if t in OPEN[when] else reward)


@pytest.mark.parametrize("steps", DELAYED["reward_delay"])
def test_reward_delay_keeps_each_episodes_return(lanes, steps):
    for disturbed, control in disturbed_and_control(lanes, "reward_delay", steps, "end"):
        for env in range(ENVS):
            ends = np.flatnonzero(control["ends"][ONSET:, :, env])
            paid, earned = (np.cumsum(x["reward"][ONSET:, :, env].ravel())[ends] for x in (disturbed, control))
            assert ends.size > 3
            np.testing.assert_array_equal(paid, earned)


@pytest.mark.parametrize("when", WINDOWS)
@pytest.mark.parametrize("share", STUCK["observation_stuck"])
@pytest.mark.parametrize("name", STUCK)
def test_stuck_entries_keep_their_value_at_the_opening_through_resets(lanes, name, share, when):
    """Stuck entries are chosen at random; each must keep its value at every turn until the window closes."""
    entries = slice(0, 3) if name == "observation_stuck" else slice(3, 5)
    for disturbed, control in disturbed_and_control(lanes, name, share, when):
        stuck, stuck_sets = None, []
        for t, i, opening in turns_in_order(when):
            final, clean = disturbed["final"][t, i, :, entries], control["final"][t, i, :, entries]
            if t not in OPEN[when]:
                np.testing.assert_array_equal(disturbed["final"][t, i], control["final"][t, i])
                continue
            if opening:
                value_at_opening = clean
                # No entry of the script has equal values at the turn of an opening and at a later turn of the window.
                stuck = (
                    (disturbed["final"][t, i + 1 :, :, entries] == value_at_opening).all(axis=0)
                    if share < 1
                    else value_at_opening == value_at_opening
                )
                stuck_sets.append(stuck)
            np.testing.assert_array_equal(final, np.where(stuck, value_at_opening, clean))
            if name == "observation_stuck":
                clean = control["next"][t, i, :, entries]
                np.testing.assert_array_equal(
                    disturbed["next"][t, i, :, entries], np.where(stuck, value_at_opening, clean)
                )
        if share < 1:
            assert all(0 < s.sum() < s.size for s in stuck_sets)
            assert len(stuck_sets) == 1 or not (stuck_sets[0] == stuck_sets[1]).all(), (
                "each opening chooses entries anew"
            )


def test_states_of_perturbations_are_restored_between_chunks(grid, forked, lanes):
    """Every three steps the states go through the form that checkpoints have."""
    (engine, _, pieces), phase = forked, layout(grid)[1]
    states = engine.forked(lambda seeds: pieces, phase)
    width = SEEDS * (1 + len(CASES))
    for begin in range(ONSET, STEPS, 3):
        end = min(begin + 3, STEPS)
        states, rows = engine.advance(phase, states, begin, end)
        states = engine.restored(engine.pieces(phase, states), phase)
        for name, values in rows.items():
            expected = np.moveaxis(lanes[name][:, :, begin:end], (0, 1, 2), (2, 1, 0))
            chunk = np.asarray(values)[: end - begin, :width]
            np.testing.assert_array_equal(chunk.reshape(expected.shape), expected)


def test_every_stateful_kind_is_tested():
    assert set(STATEFUL) == {*DELAYED, *STUCK, *TESTED_WITH_DIALOGUES}


@pytest.mark.parametrize("name", STATEFUL)
def test_stateful_kinds_are_refused_in_loops_that_carry_no_state(name):
    perturbation = registry.perturbations[name](onset=1)
    site = perturbation.site

    def step(x, key, taps):
        row = jnp.ones(2, bool)

        def turn(x, index):
            return taps.fold_in(index)(site, x, begins=row, valid=row, ends=row), None

        x, _ = jax.lax.scan(turn, x, jnp.arange(3))
        return x, {"performance": x.sum()}

    learner = ja.Learner(lambda key: jnp.zeros((2,)), step)
    message = f"'{name}' keeps state, and the learner taps '{site}' in a loop that does not carry it; .* taps.scan"
    with pytest.raises(ValueError, match=message):
        plan(learner, [perturbation], seeds=1, steps=5)
    assert "keeps state" in misfits(learner, [perturbation], 5)[0]
    stateless = {"reward": ja.reward_noise, "behaviour": ja.sampler_quantize}
    assert misfits(learner, [(stateless.get(site) or registry.perturbations[f"{site}_noise"])()], 5) == [None]


def test_the_state_is_kept_while_a_branch_is_not_taken():
    no, yes = jnp.zeros(1, bool), jnp.ones(1, bool)

    def step(visits, key, taps):
        def sense(taps, visits):
            return visits + 1, taps("observation", jnp.full((1, 1), 1.0 + taps.step), begins=no, valid=yes)

        visits, observation = taps.cond(taps.step % 2 == 0, sense, visits)
        return visits, {"performance": jnp.sum(observation), "visits": visits}

    learner = ja.Learner(lambda key: jnp.float32(0.0), step)
    result = ja.audit(learner, [ja.observation_delayed(1.0, onset=2)], seeds=1, steps=10)
    control, delayed = result.telemetry["performance"].values[0]
    np.testing.assert_array_equal(control, [1, 0, 3, 0, 5, 0, 7, 0, 9, 0])
    # The first value in the window has no predecessor.
    np.testing.assert_array_equal(delayed[2:], [3, 0, 3, 0, 5, 0, 7, 0])
    np.testing.assert_array_equal(result.telemetry["visits"].values[0, 1], [1, 1, 2, 2, 3, 3, 4, 4, 5, 5])


@pytest.mark.parametrize("name", [name for name in STATEFUL if "valid" in registry.perturbations[name].needs])
def test_rows_that_are_not_valid_leave_the_state_unchanged(name):
    default = registry.perturbations[name]
    value, key = jnp.arange(6.0).reshape(3, 2), jax.random.key(0)

    def state_after(value, state, valid):
        context = {"begins": jnp.array([True, False, True]), "valid": jnp.array(valid)}
        arguments = {need: context[need] for need in default.needs}
        return default.apply(key, value, default.magnitude, state, **arguments)[1]

    before = state_after(value, default.init(value), [True, True, False])
    after = state_after(value * jnp.nan, before, [False, False, False])
    jax.tree.map(np.testing.assert_array_equal, after, before)


def test_delays_out_of_range_or_not_integers_are_refused():
    for magnitude in (0.5, 33.0, -1.0):
        with pytest.raises(ValueError, match="observation_delayed"):
            ja.observation_delayed(magnitude)
    with pytest.raises(ValueError, match="outside its range 0 to 128"):
        ja.reward_delay(129.0)
