"""What all lanes read: given to the program as an argument, once a device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxaudit as ja
from jaxaudit.core.batches import layout
from jaxaudit.core.program import compiled
from jaxaudit.execution.engine import Engine
from jaxaudit.execution.grid_program import inputs

ENTRIES = 500_000


def init(key):
    return jnp.float32(0.0)


def step(x, key, taps):
    drawn = taps.data["numbers"][jax.random.randint(key, (), 0, ENTRIES)]
    _, again = taps.scan(lambda taps, carry, _: (carry, taps.data["numbers"][0]), x, length=2)
    x = x + taps("gradient", drawn) + again.sum()
    return x, {"performance": x}


def learner(data):
    return ja.Learner(init, step, data=data)


def numbers(seed):
    return {"numbers": np.random.default_rng(seed).normal(size=ENTRIES).astype(np.float32)}


PERTURBATIONS = [ja.gradient_scale(ja.sweep(0.0, 0.5), onset=2)]


def grid(given, devices=1):
    return ja.plan(given, PERTURBATIONS, seeds=4, steps=14, devices=jax.devices()[:devices])


def test_a_step_reads_it_and_new_data_compile_nothing():
    first, second = learner(numbers(0)), learner(numbers(1))
    assert first == second
    plans = [grid(first), grid(second)]
    run = compiled(plans[0].program)
    results = [np.asarray(run(inputs(plan))[0]["performance"])[-1] for plan in plans]
    assert run._cache_size() == 1
    assert (results[0] != results[1]).all()


def test_it_is_no_constant_of_the_program():
    plan = grid(learner(numbers(0)))
    text = compiled(plan.program).lower(inputs(plan)).as_text()
    assert len(text) < ENTRIES


def test_other_shapes_are_another_program():
    small, large = (learner({"numbers": np.zeros(n, np.float32)}) for n in (10, 20))
    assert large != small


@pytest.mark.exhaustive
def test_the_engine_gives_what_the_audit_gives_on_one_device_and_on_two():
    given = learner(numbers(0))
    baseline, forks = compiled(grid(given).program)(inputs(grid(given)))
    whole, suffixes = np.asarray(baseline["performance"]), np.asarray(forks[0]["performance"])[0]
    for devices in (1, 2):
        engine = Engine(grid(given, devices), 14)
        first, forked = layout(engine.grid)
        states, rows = engine.advance(first, engine.initial(first), 0, 2)
        np.testing.assert_allclose(rows["performance"][:2, :4], whole[:2], rtol=1e-5)
        pieces = engine.copies(first, states)
        _, rows = engine.advance(first, states, 2, 9)
        np.testing.assert_allclose(rows["performance"][:7, :4], whole[2:9], rtol=1e-5)
        _, rows = engine.advance(forked, engine.forked(lambda seeds, pieces=pieces: pieces, forked), 2, 14)
        np.testing.assert_allclose(rows["performance"][:12, :12], suffixes[2:14, :12], rtol=1e-5)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_lane_may_begin_with_it(devices):
    def init(key, data):
        return data["numbers"][0] + jax.random.normal(key)

    plan = grid(ja.Learner(init, step, data=numbers(1), init_reads_data=True), devices)
    engine = Engine(plan, 14)
    states = engine.initial(layout(engine.grid)[0])
    keys = jax.vmap(lambda seed: jax.random.fold_in(jax.random.key(seed), 0))(jnp.arange(4))
    expected = numbers(1)["numbers"][0] + jax.vmap(jax.random.normal)(keys)
    np.testing.assert_allclose(states.learner[:4], expected, rtol=1e-6)
    _, rows = engine.advance(layout(plan)[0], states, 0, 2)
    whole = compiled(plan.program)(inputs(plan))[0]["performance"]
    np.testing.assert_allclose(rows["performance"][:2, :4], whole[:2, :4], rtol=1e-5)


@pytest.mark.parametrize("devices", [1, 2])
def test_what_no_step_reads_lies_there_and_is_counted(devices):
    def init(key, data):
        return data["start"][0]

    def step(x, key, taps):
        x = x + taps("gradient", jnp.ones(()))
        return x, {"performance": x}

    large = ja.Learner(init, step, data={"start": np.zeros(ENTRIES, np.float32)}, init_reads_data=True)
    engine = Engine(grid(large, devices), 14)
    for needed in (engine.program_bytes(layout(engine.grid)[0]), engine.initial_bytes(layout(engine.grid)[0])):
        assert devices * 4 * ENTRIES <= needed < devices * 4 * ENTRIES + 100_000


def test_programs_do_not_depend_on_where_data_came_from():
    one, other = (ja.Learner(init, step, data=numbers(0), provenance={"numbers": name}) for name in ("a", "b"))
    assert one == other
    assert [grid(given).provenance for given in (one, other)] == [{"numbers": "a"}, {"numbers": "b"}]
