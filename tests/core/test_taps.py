"""Where a learner may call its taps. Loops and vmaps need taps of their own, or the tap is refused."""

import functools
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxpr_equations import equations

import jaxaudit as ja
from jaxaudit.core.grid import plan
from jaxaudit.core.program import Program, run
from jaxaudit.core.taps import NEVER, Windows
from jaxaudit.execution.grid_program import inputs

STEPS = 4


def learner_of(step):
    return ja.Learner(lambda key: jnp.zeros(3), lambda x, key, taps: (x, {"performance": step(x, taps)}))


def performance_of(step, perturbation):
    return ja.audit(learner_of(step), [perturbation], seeds=2, steps=STEPS).telemetry["performance"].values


def in_scan(x, taps):
    return jax.lax.scan(lambda c, _: (c + taps("reward", x).sum(), None), 0.0, length=3)[0]


def in_map(x, taps):
    return jax.lax.map(lambda row: taps("reward", row), x).sum()


def in_fori(x, taps):
    return jax.lax.fori_loop(0, 3, lambda _, c: c + taps("reward", x).sum(), 0.0)


def in_while(x, taps):
    return jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] + taps("reward", x).sum()), (0, 0.0))[1]


def in_vmap(x, taps):
    return jax.vmap(lambda row: taps("reward", row))(x).sum()


def in_grad_in_vmap(x, taps):
    return jax.vmap(jax.grad(lambda row: taps("reward", row) * 1.0))(x).sum()


def in_jit(x, taps):
    return jax.jit(lambda x: taps("reward", x).sum())(x)


LOOPS = {
    in_scan: "inside scan .* taps.scan",
    in_map: "inside scan .* taps.scan",
    in_fori: "inside fori_loop .* taps.scan",
    in_while: "inside while_loop .* taps.scan",
    in_vmap: "inside vmap .* taps.fold_in",
    in_grad_in_vmap: "inside vmap",
    in_jit: "inside jit .* leave out the inner jit",
}


def name_of(value):
    return value.__name__ if callable(value) else None


@pytest.mark.parametrize("stateful", [False, True], ids=["stateless", "stateful"])
@pytest.mark.parametrize(("step", "sentence"), LOOPS.items(), ids=name_of)
def test_an_outer_tap_is_refused_where_its_noise_would_repeat(step, sentence, stateful):
    with pytest.raises(ValueError, match=rf"perturbation '\w+' cannot act at 'reward', .* {sentence}"):
        performance_of(step, stateful_noise() if stateful else ja.reward_noise(1.0, onset=1))


def stateful_noise():
    """A perturbation that keeps state."""
    return ja.Kind("kept", "signal", "reward", _kept, 1.0, init=_nothing)(onset=1, duration=2)


def _nothing(value):
    return jnp.zeros(())


def _kept(key, value, magnitude, state):
    return value + state, state + magnitude


@pytest.mark.parametrize(
    "step",
    [pytest.param(step, marks=pytest.mark.exhaustive if step is not in_scan else ()) for step in LOOPS],
    ids=name_of,
)
def test_an_unperturbed_site_may_be_tapped_anywhere(step):
    def with_params(x, taps):
        return step(x, taps) + taps("params", x).sum()

    assert performance_of(with_params, ja.weight_noise(1.0, onset=1)).shape == (2, 2, STEPS)


def in_grad(x, taps):
    return jax.grad(lambda w: jnp.sum(w * taps("reward", x)))(jnp.ones(3)).sum()


def in_value_and_grad_of_remat(x, taps):
    return jax.value_and_grad(jax.checkpoint(lambda w: jnp.sum(w * taps("reward", x))))(jnp.ones(3))[1].sum()


def in_cond(x, taps):
    return jax.lax.cond(taps.step >= 0, lambda: taps("reward", x).sum(), lambda: 0.0)


ONCE = (in_grad, in_value_and_grad_of_remat, in_cond)


@pytest.mark.parametrize(
    "step",
    [pytest.param(step, marks=pytest.mark.exhaustive if step is not in_grad else ()) for step in ONCE],
    ids=name_of,
)
def test_stateless_perturbations_may_act_in_derivatives_and_branches(step):
    disturbed = performance_of(step, ja.reward_noise(1.0, onset=1))
    plain = performance_of(lambda x, taps: taps("reward", x).sum(), ja.reward_noise(1.0, onset=1))
    np.testing.assert_allclose(disturbed, plain, rtol=1e-6)
    assert np.unique(disturbed[:, 1, 1:]).size == 2 * (STEPS - 1)


@pytest.mark.parametrize("step", ONCE, ids=name_of)
def test_stateful_perturbations_are_refused_in_derivatives_and_branches(step):
    with pytest.raises(ValueError, match=r"'kept' keeps state, and the learner taps 'reward' inside (grad|remat|cond)"):
        performance_of(step, stateful_noise())


def test_inner_taps_of_scan_and_cond_are_allowed():
    def step(x, taps):
        def turn(taps, total, _):
            total, _ = taps.cond(total >= -1e9, lambda taps, c: (c + taps("reward", x).sum(), None), total)
            return total, taps("reward", x).sum()

        total, values = taps.scan(turn, jnp.float32(0), length=3)
        return total + values.sum()

    disturbed = performance_of(step, ja.reward_noise(1.0, onset=1))
    assert np.unique(disturbed[:, 1, 1:]).size == 2 * (STEPS - 1)
    learner = ja.Learner(lambda key: jnp.zeros(3), lambda x, key, taps: (x, {"performance": step(x, taps)}))
    plan(learner, [stateful_noise()], seeds=1, steps=STEPS)


def test_inner_taps_of_repeat_are_allowed():
    def step(x, taps):
        turns = jnp.where(x[0] < 0, 7, 2).astype(jnp.int32)  # known only at run time
        total = taps.repeat(lambda taps, c, number: c + taps("reward", x + 0 * number).sum(), jnp.float32(0), turns)
        return total + taps("reward", x).sum()

    disturbed = performance_of(step, ja.reward_noise(1.0, onset=1))
    assert np.unique(disturbed[:, 1, 1:]).size == 2 * (STEPS - 1)

    def differing(x, taps):
        samples = taps.repeat(
            lambda taps, c, number: c.at[number].set(taps("reward", x[0])), jnp.zeros(3), jnp.sum(x == 0)
        )
        return jnp.std(samples)

    assert (performance_of(differing, ja.reward_noise(1.0, onset=1))[:, 1, 1:] > 0).all(), "turns have equal noise"
    learner = ja.Learner(lambda key: jnp.zeros(3), lambda x, key, taps: (x, {"performance": step(x, taps)}))
    plan(learner, [stateful_noise()], seeds=1, steps=STEPS)


def test_a_loop_stops_early_unless_a_state_counts_its_turns():
    def step(x, taps):
        def turn(taps, carry, number):
            return number + 1, carry[1] + taps("reward", x).sum()

        turns, total = taps.repeat(turn, (jnp.int32(0), jnp.float32(0)), 7, until=lambda carry: carry[0] >= 3)
        return turns + 0 * total

    assert (performance_of(step, ja.reward_noise(1.0, onset=1)) == 3).all()
    with_state = performance_of(step, stateful_noise())
    assert (with_state[..., 0] == 3).all(), "the baseline has no stateful perturbation"
    assert (with_state[..., 1:] == 7).all()


@pytest.mark.parametrize("window", [(0, 0, 1, 0), (2, 5, 20, 3), (1, 12, 4, 2), (3, 12, 3, 3), (0, 12, 5, 1)], ids=str)
def test_idle_counts_the_steps_since_a_window_was_open(window):
    start, stop, period, length = window
    windows = Windows(*(jnp.int32(part) for part in window))
    last_open = None
    for step in range(15):
        if start <= step < stop and (step - start) % period < length:
            last_open = step
        expected = NEVER if last_open is None else step - last_open
        assert int(windows.idle(jnp.int32(step))) == expected
        assert bool(windows.open(jnp.int32(step))) == (expected == 0)


def in_taps_scan(x, taps):
    return taps.scan(lambda inner_taps, total, _: (total + inner_taps("reward", x).sum(), None), 0.0, length=3)[0]


def sort_values(key, value, magnitude, state):
    return jnp.sort(value), state


SORTED = ja.Kind("sorted", "signal", "reward", sort_values, 1.0)


@pytest.mark.parametrize(
    ("step", "perturbation", "selects"),
    [
        (in_taps_scan, ja.reward_noise(1.0, onset=1, duration=2), True),
        (in_taps_scan, stateful_noise(), True),
        (in_taps_scan, SORTED(onset=1, duration=2), False),
        (lambda x, taps: taps("reward", x).sum(), ja.reward_noise(1.0, onset=1, duration=2), False),
    ],
    ids=["noise", "stateful", "sorted", "outside of loops"],
)
def test_on_gpus_loops_select_elementwise_perturbations(step, perturbation, selects, monkeypatch):
    """A branch in a loop makes a GPU wait for its host in every turn."""

    def branches():
        grid = plan(learner_of(step), [perturbation], seeds=2, steps=STEPS)
        traced = jax.make_jaxpr(functools.partial(run, grid.program))(inputs(grid))
        return sum(equation.primitive.name == "cond" for equation in equations(traced.jaxpr))

    performance, before = performance_of(step, perturbation), branches()
    monkeypatch.setattr(Program, "on_gpus", True)
    np.testing.assert_array_equal(performance_of(step, perturbation), performance)
    assert branches() == before - selects


def test_a_program_recognizes_gpus_by_its_devices():
    grid = plan(learner_of(in_taps_scan), [], seeds=2, steps=STEPS)
    assert not grid.program.on_gpus
    assert replace(grid.program, devices=(SimpleNamespace(platform="gpu"),)).on_gpus


@pytest.mark.parametrize(
    ("returned", "init", "words"),
    [
        (lambda value, state: ([value["w"]], state), None, "returned a value of the structure"),
        (
            lambda value, state: ({"w": value["w"][0]}, state),
            None,
            r"a value of shape \(\) for one of \(3,\) at \['w'\]",
        ),
        (lambda value, state: value, jnp.zeros, r"keeps a state, so its function returns \(value, state\)"),
        (lambda value, state: (value, jnp.zeros(3)), jnp.zeros, r"a state of shape \(3,\) for one of \(2,\)"),
    ],
)
def test_a_perturbation_that_returns_another_tree_is_named(returned, init, words):
    def apply(key, value, magnitude, state):
        return returned(value, state)

    options = {} if init is None else {"init": lambda value: init(2)}
    kind = ja.Kind("another", "signal", "gradient", apply, **options)

    def step(x, taps):
        return taps("gradient", {"w": x})["w"].sum()

    with pytest.raises(ValueError, match=f"perturbation 'another' .*{words}"):
        performance_of(step, kind(1.0, onset=1, duration=1))
