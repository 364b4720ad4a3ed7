"""Data that all lanes share, which each device receives once, as an argument of the program."""

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
    sampled = taps.data["numbers"][jax.random.randint(key, (), 0, ENTRIES)]
    _, first_entries = taps.scan(lambda taps, carry, _: (carry, taps.data["numbers"][0]), x, length=2)
    x = x + taps("gradient", sampled) + first_entries.sum()
    return x, {"performance": x}


def learner_with(data):
    return ja.Learner(init, step, data=data)


def numbers(seed):
    return {"numbers": np.random.default_rng(seed).normal(size=ENTRIES).astype(np.float32)}


PERTURBATIONS = [ja.gradient_scale(ja.sweep(0.0, 0.5), onset=2)]


def grid_of(learner, devices=1):
    return ja.plan(learner, PERTURBATIONS, seeds=4, steps=14, devices=jax.devices()[:devices])


def test_new_data_compile_nothing():
    first, second = learner_with(numbers(0)), learner_with(numbers(1))
    assert first == second
    plans = [grid_of(first), grid_of(second)]
    run = compiled(plans[0].program)
    results = [np.asarray(run(inputs(plan))[0]["performance"])[-1] for plan in plans]
    assert run._cache_size() == 1
    assert (results[0] != results[1]).all()


def test_data_are_no_constant_of_the_program():
    plan = grid_of(learner_with(numbers(0)))
    text = compiled(plan.program).lower(inputs(plan)).as_text()
    assert len(text) < ENTRIES


def test_data_of_other_shapes_need_another_program():
    small, large = (learner_with({"numbers": np.zeros(n, np.float32)}) for n in (10, 20))
    assert large != small


@pytest.mark.exhaustive
def test_the_engine_equals_the_audit_on_one_and_two_devices():
    learner = learner_with(numbers(0))
    baseline, forks = compiled(grid_of(learner).program)(inputs(grid_of(learner)))
    baseline_performance, fork_performance = np.asarray(baseline["performance"]), np.asarray(forks[0]["performance"])[0]
    for devices in (1, 2):
        engine = Engine(grid_of(learner, devices), 14)
        first, forked = layout(engine.grid)
        states, rows = engine.advance(first, engine.initial(first), 0, 2)
        np.testing.assert_allclose(rows["performance"][:2, :4], baseline_performance[:2], rtol=1e-5)
        pieces = engine.copies(first, states)
        _, rows = engine.advance(first, states, 2, 9)
        np.testing.assert_allclose(rows["performance"][:7, :4], baseline_performance[2:9], rtol=1e-5)
        _, rows = engine.advance(forked, engine.forked(lambda seeds, pieces=pieces: pieces, forked), 2, 14)
        np.testing.assert_allclose(rows["performance"][:12, :12], fork_performance[2:14, :12], rtol=1e-5)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.exhaustive
def test_init_may_read_the_data(devices):
    def init(key, data):
        return data["numbers"][0] + jax.random.normal(key)

    plan = grid_of(ja.Learner(init, step, data=numbers(1), init_reads_data=True), devices)
    engine = Engine(plan, 14)
    states = engine.initial(layout(engine.grid)[0])
    keys = jax.vmap(lambda seed: jax.random.fold_in(jax.random.key(seed), 0))(jnp.arange(4))
    expected = numbers(1)["numbers"][0] + jax.vmap(jax.random.normal)(keys)
    np.testing.assert_allclose(states.learner[:4], expected, rtol=1e-6)
    _, rows = engine.advance(layout(plan)[0], states, 0, 2)
    performance = compiled(plan.program)(inputs(plan))[0]["performance"]
    np.testing.assert_allclose(rows["performance"][:2, :4], performance[:2, :4], rtol=1e-5)


@pytest.mark.parametrize("devices", [1, 2])
def test_data_that_no_step_reads_are_counted_in_memory(devices):
    def init(key, data):
        return data["start"][0]

    def step(x, key, taps):
        x = x + taps("gradient", jnp.ones(()))
        return x, {"performance": x}

    learner = ja.Learner(init, step, data={"start": np.zeros(ENTRIES, np.float32)}, init_reads_data=True)
    engine = Engine(grid_of(learner, devices), 14)
    for planned in (engine.program_bytes(layout(engine.grid)[0]), engine.initial_bytes(layout(engine.grid)[0])):
        assert devices * 4 * ENTRIES <= planned < devices * 4 * ENTRIES + 100_000


def test_programs_do_not_depend_on_the_datas_provenance():
    first, second = (ja.Learner(init, step, data=numbers(0), provenance={"numbers": name}) for name in ("a", "b"))
    assert first == second
    assert [grid_of(learner).provenance for learner in (first, second)] == [{"numbers": "a"}, {"numbers": "b"}]
