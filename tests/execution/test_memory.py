"""The memory of a grid: one copy of its states, and the plan's prediction."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import matmul_memory
import numpy as np
import pytest
import ring_buffer_memory

import jaxaudit as ja
from jaxaudit.core.batches import layout
from jaxaudit.execution import engine, memory
from jaxaudit.execution.engine import Engine
from jaxaudit.runtime.machine import memory_map_share

pytestmark = pytest.mark.default_compilation

MIB = 2**20


LEARNER = ring_buffer_memory.ring_buffer_learner(None, 10_000)


def plan_on(devices):
    used = jax.devices()[:devices]
    return ja.plan(LEARNER, [ja.weight_noise(0.5, onset=4, duration=2)], seeds=2, steps=8, devices=used)


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
@pytest.mark.exhaustive
def test_states_are_updated_in_place(devices):
    """This holds for every leaf. The buffer is neither copied in a step nor between a baseline and its forks."""
    plan = plan_on(devices)
    engine = Engine(plan, 4)
    stored = []
    for phase in layout(plan):
        states = engine.begin(phase, lambda onset: lambda seeds: stored)
        addresses = [pointers(x) for x in jax.tree.leaves(states)]
        states_after, _ = engine.advance(phase, states, phase.onset, phase.onset + 4)
        assert [pointers(x) for x in jax.tree.leaves(states_after)] == addresses
        assert all(x.is_deleted() for x in jax.tree.leaves(states))
        stored.extend(engine.copies(phase, states_after))
        lanes = phase.width
        assert engine.program_bytes(phase) < 1.05 * lanes * engine.lane_bytes(phase)
        assert engine.lane_bytes(phase) == 4 * (10_000 + 1) * ring_buffer_memory.WIDTH


def pointers(array):
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def test_a_dropped_piece_costs_no_copy_and_a_referenced_one_stays_unchanged():
    engine = Engine(plan_on(devices=1), 4)
    phase = layout(engine.grid)[0]
    states = engine.initial(phase)
    address = pointers(states.learner["buffer"])
    for piece in engine.pieces(phase, states):
        assert piece.states.learner["buffer"].ctypes.data == address[0]
    del piece
    states, _ = engine.advance(phase, states, 0, 2)
    assert pointers(states.learner["buffer"]) == address
    (referenced,) = engine.pieces(phase, states)
    x = referenced.states.learner["x"].copy()
    states, _ = engine.advance(phase, states, 2, 4)
    assert (referenced.states.learner["x"] == x).all()
    assert (states.learner["x"] != jnp.asarray(x)).any()


@pytest.mark.exhaustive
def test_matmuls_take_more_memory_than_the_planned_buffers():
    """The compiler plans no buffers for the packed embedding of GPT-2's output layer, and for the results within it.

    jaxlib 0.10 packs the entire embedding. From jaxlib 0.11 on, a product in bfloat16 also has float32 sums.
    """
    sizes = run_script(matmul_memory)
    threads = 2 * MIB  # what the thread pool allocates at its first use
    assert 0.7 * sizes["workspace"] < sizes["extra"] < 1.02 * sizes["workspace"] + threads
    assert sizes["extra in bfloat16"] < 1.02 * sizes["workspace in bfloat16"] + threads
    if not engine.PACKS_WHOLE:
        assert 0.7 * sizes["workspace in bfloat16"] < sizes["extra in bfloat16"]


def run_script(script, *arguments):
    command = [sys.executable, script.__file__, *map(str, arguments)]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert process.returncode == 0, process.stderr
    sizes = json.loads(process.stdout.splitlines()[-1])
    print(arguments, {name: x if isinstance(x, str) else f"{x / MIB:.1f} MiB" for name, x in sizes.items()})
    return sizes


@pytest.mark.exhaustive
def test_the_planned_memory_is_that_of_the_process():
    """Four lanes of 34 MiB on two devices. 32 MiB of the plan are an estimate of what libraries allocate."""
    sizes = run_script(ring_buffer_memory, 200_000, 2, 2, '"auto"')
    assert sizes["batches"] == "all lanes at a time"
    assert sizes["lane"] == pytest.approx(200_000 * ring_buffer_memory.WIDTH * 4, rel=0.01)
    assert abs(sizes["peak"] - sizes["expected"]) < 0.05 * sizes["expected"] + memory.LIBRARIES / 2


@pytest.mark.slow
@pytest.mark.parametrize(("seeds", "devices", "lanes"), [(2, 1, '"auto"'), (2, 2, '"auto"'), (4, 1, 4)])
def test_the_planned_memory_for_a_million_transitions_is_exact(seeds, devices, lanes):
    """Four lanes of 168 MB at a time, with HalfCheetah's replay buffer, within five percent."""
    sizes = run_script(ring_buffer_memory, 1_000_000, seeds, devices, lanes)
    assert sizes["peak"] == pytest.approx(sizes["expected"], rel=0.05)
    assert 4 * 168e6 < sizes["expected"] < 6.5 * 168e6


@pytest.mark.exhaustive
def test_earlier_programs_are_dropped_if_memory_maps_run_short(monkeypatch):
    """A process that trains many learners in turn would otherwise reach the system's limit, and fail to compile."""

    def audit_one(scale):
        def step(x, key, taps):
            return x - taps("gradient", scale * x), {"performance": -jnp.sum(x**2)}

        return ja.audit(ja.Learner(lambda key: jnp.ones(3), step), [], seeds=1, steps=4)

    audit_one(0.1)
    assert engine._compiled.cache_info().currsize > 0
    maps_before = memory_map_share()
    assert 0 < maps_before < 1 or not sys.platform.startswith("linux")
    monkeypatch.setattr(engine, "memory_map_share", lambda: 1.0)
    result = audit_one(0.2)
    assert engine._compiled.cache_info().currsize == 1
    assert memory_map_share() < maps_before or not sys.platform.startswith("linux")
    performance = result.telemetry.performance.values.ravel()
    np.testing.assert_allclose(performance, -3 * 0.8 ** (2 * np.arange(4)), rtol=1e-5)
