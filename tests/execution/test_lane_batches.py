"""Grids in batches of lanes: which lanes they hold, that they change nothing, and how large they are made."""

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from directories import HELPERS
from quadratic import quadratic
from small_runs import SPEC, THREE_MAGNITUDES, spec_header

import jaxaudit as ja
from jaxaudit.core.batches import as_json, from_json, layout
from jaxaudit.execution import engine as engines
from jaxaudit.execution import memory
from jaxaudit.execution.engine import Engine
from jaxaudit.runs.margins.search import MarginSettings, configure_search, prepare_engine
from jaxaudit.runtime.errors import UserError
from jaxaudit.spec.document import parse

pytestmark = pytest.mark.default_compilation

LEARNER = quadratic(None, adam=False)
PERTURBATIONS = [
    ja.lr_spike(ja.sweep(1.0, 3.0, 10.0), onset=5, duration=3),
    ja.weight_noise(ja.sweep(0.0, 0.5), onset=5, duration=3),
]
NEUTRAL = (1, 4)
WIDTH_TOLERANCE = 1e-6
"""Relative. Lanes of another width are rounded differently, and this learner does not amplify that: 2e-7 was seen."""


def grid(lanes="auto", devices=1, seeds=2):
    return ja.plan(LEARNER, PERTURBATIONS, seeds=seeds, steps=12, lanes=lanes, devices=jax.devices()[:devices])


@pytest.fixture(scope="module")
def audited():
    found = {}

    def audit(lanes):
        if lanes not in found:
            devices = jax.devices()[:1]
            found[lanes] = ja.audit(LEARNER, PERTURBATIONS, seeds=2, steps=12, lanes=lanes, devices=devices).telemetry
        return found[lanes]

    return audit


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("seeds", [1, 3, 7, 20])
@pytest.mark.parametrize("lanes", [1, 2, 5, 18, 40, 1000])
def test_every_lane_is_in_one_batch_and_batches_of_a_group_are_alike(lanes, seeds, devices):
    plan = grid(lanes, devices, seeds)
    every = layout(plan)
    assert [batch.id for batch in every] == list(range(len(every)))
    for group in (None, 0):
        batches = [batch for batch in every if batch.fork == group]
        numbers = [n for batch in batches for n in batch.numbers]
        columns = [-1] if group is None else plan.forks[group].conditions
        assert numbers == list(range(seeds * len(columns)))
        share = max(len(batch.seeds) for batch in batches)
        assert len(batches) == -(-len(numbers) // share)
        assert share <= lanes
        assert {batch.width for batch in batches} == {batches[0].width}
        assert batches[0].width % devices == 0
        assert batches[0].width >= share
        cells = [(c, s) for batch in batches for c, s in zip(batch.columns, batch.seeds, strict=True)]
        assert cells == [(c, s) for c in columns for s in range(seeds)]
    again = from_json(json.loads(json.dumps(as_json(every))), plan)
    for one, other in zip(every, again, strict=True):
        assert one.conditions == other.conditions
        jax.tree.map(np.testing.assert_array_equal, one.lanes(plan), other.lanes(plan))
        assert (one.id, one.fork, one.onset, one.stop, one.first, one.width) == (
            other.id,
            other.fork,
            other.onset,
            other.stop,
            other.first,
            other.width,
        )


@pytest.mark.parametrize(("most", "workers", "counts"), [(22, 8, [8, 16]), (22, 3, [3, 15]), (200, 4, [4, 4])])
def test_batches_go_round_among_workers_evenly(most, workers, counts):
    batches = layout(grid(seeds=50), most, parts=workers)
    dealt = [[len(b.seeds) for b in batches if b.disturbed is disturbed] for disturbed in (False, True)]
    assert [len(sizes) for sizes in dealt] == counts
    assert [sum(sizes) for sizes in dealt] == [50, 300]
    assert max(map(max, dealt)) <= most


def test_lanes_that_fill_a_batch_up_are_controls():
    plan = grid(4, devices=2, seeds=3)
    batch = layout(plan)[-1]
    lanes = batch.lanes(plan)
    assert list(batch.positions) == list(lanes.seed) == [1, 2, 1, 1]
    assert (lanes.disturbance.windows.stop.any(axis=1) == [True, True, False, False]).all()


@pytest.mark.exhaustive
@pytest.mark.parametrize("lanes", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_batches_change_nothing_but_the_rounding(lanes, audited):
    for name, values in audited("auto").items():
        np.testing.assert_allclose(audited(lanes)[name], values, rtol=WIDTH_TOLERANCE, err_msg=name)
    assert audited(lanes).attrs["noise_floor"] < 1e-5


@pytest.mark.parametrize("lanes", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_identity_and_pairing_hold_across_batches(lanes, audited):
    data = audited(lanes)
    for name in ("performance", "update_norm"):
        values = data[name].values
        for condition in NEUTRAL:
            np.testing.assert_array_equal(values[:, condition], values[:, 0], err_msg=name)
        np.testing.assert_array_equal(values[:, :, :5], np.broadcast_to(values[:, :1, :5], values[:, :, :5].shape))
        assert (values[:, 3, 6:] != values[:, 0, 6:]).any()
    np.testing.assert_array_equal(data["performance"].values[:, 0, :5], data["baseline_performance"].values[:, :5])


def room_for(lanes):
    """Free memory that holds so many lanes at a time, and hardly a byte more."""
    plan = grid(lanes)
    needed = memory.needs(Engine(plan, 12), layout(plan), resident=True)
    return int(needed.total / memory.SHARE) + 1


@pytest.mark.exhaustive
def test_the_largest_batch_that_fits_is_chosen_and_is_compiled_already(monkeypatch):
    free = room_for(4)
    monkeypatch.setattr(memory, "available_memory", lambda devices: free)
    engine, batches, needed = memory.fit(grid(), 12, resident=True)
    assert max(len(batch.seeds) for batch in batches) == 4
    assert needed.total <= memory.SHARE * free
    compilations = engines._compiled.cache_info().misses
    for batch in batches:
        engine.program(batch)
    assert engines._compiled.cache_info().misses == compilations
    monkeypatch.setattr(memory, "available_memory", lambda devices: None)
    assert max(len(batch.seeds) for batch in memory.fit(grid(), 12, resident=True)[1]) == 12


@pytest.mark.exhaustive
def test_processes_beside_each_other_share_the_memory(monkeypatch):
    free = room_for(4)
    monkeypatch.setattr(memory, "available_memory", lambda devices: 3 * free)
    _, batches, needed = memory.fit(grid(), 12, resident=True, beside=3)
    assert max(len(batch.seeds) for batch in batches) == 4
    assert needed.total <= memory.SHARE * free


@pytest.mark.exhaustive
def test_pools_of_margins_share_the_memory_too(monkeypatch):
    chosen = ja.plan(LEARNER, PERTURBATIONS[:1], seeds=2, steps=12, tail=0)
    config = configure_search(chosen, PERTURBATIONS[:1], MarginSettings(lanes=1_000_000))

    def lanes(free, beside):
        monkeypatch.setattr(memory, "available_memory", lambda devices: free)
        return prepare_engine(chosen, config, 12, baseline=False, processes=beside)[2].lanes

    free = 64 << 20
    assert lanes(8 * free, 8) == lanes(free, 1) < lanes(8 * free, 1)


def test_other_hosts_devices_are_taken_to_be_as_free(monkeypatch):
    def device(free):
        return SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_limit": 100 + free, "bytes_in_use": 100})

    here = [device(30), device(50)]
    monkeypatch.setattr(memory.jax, "local_devices", lambda: here)
    assert memory.available_memory(tuple(here)) == 80
    elsewhere = [SimpleNamespace(platform="gpu") for _ in range(4)]
    assert memory.available_memory((*here, *elsewhere)) == 240


def test_what_fits_is_found_by_the_line_through_the_sizes_seen():
    sizes = {lanes: 1000 + 10 * lanes for lanes in range(1, 1001)}
    first = memory._fewer([(1000, sizes[1000])], 999, 3000, 1)
    assert first == 272
    assert memory._fewer([(1000, sizes[1000]), (first, sizes[first])], first - 1, 2000, 1) == 96
    assert memory._fewer([(1000, sizes[1000]), (96, sizes[96])], 95, 500, 4) == 4
    assert memory._fewer([(100, 1000)], 99, 300, 4) == 28


def test_too_little_memory_is_one_sentence(monkeypatch):
    free = room_for(4)
    monkeypatch.setattr(memory, "available_memory", lambda devices: free // 2)
    with pytest.raises(
        UserError, match=r"^4 lanes at a time need about [\d.]+ KiB of memory and [\d.]+ KiB are available"
    ):
        memory.fit(grid(4), 12, resident=True)
    monkeypatch.setattr(memory, "available_memory", lambda devices: 999)
    with pytest.raises(UserError, match=r"^one lane .* about [\d.]+ KiB of memory and 999 B are available$"):
        memory.fit(grid(), 12, resident=True)
    with pytest.raises(ValueError, match=r"^2 lanes, one on each device, .* about [\d.]+ KiB of memory and 999 B are"):
        ja.audit(LEARNER, PERTURBATIONS, seeds=2, steps=12)
    for lanes in (0, -1, 2.0, True, "all"):
        with pytest.raises(ValueError, match="lanes must be 'auto' or at least 1"):
            grid(lanes)


def test_a_spec_says_how_many_lanes():
    assert parse(SPEC).audit.lanes == "auto"
    assert 'lanes = "auto"' in parse(SPEC).to_toml()
    assert parse(SPEC).build().batch is None
    spec = parse(spec_header(audit="lanes = 4") + THREE_MAGNITUDES)
    assert parse(spec.to_toml()) == spec
    assert spec.build().batch == 4
    for given, sentence in (("0", "lanes must be from 1 to"), ('"all"', 'lanes must be a whole number or "auto"')):
        with pytest.raises(UserError, match=rf"\[audit\]: {sentence}"):
            parse(spec_header(audit=f"lanes = {given}") + THREE_MAGNITUDES)


def _drifting(key, value, magnitude, state):
    return value + magnitude * state, state * 1.5


def _start(value):
    return jnp.ones_like(value)


def init_keyed(key):
    x = jax.random.normal(key, (3,))
    return {"x": x, "target": x, "key": jax.random.fold_in(key, 1)}


def step_keyed(state, key, taps):
    x = taps("params", state["x"])
    own = jax.random.fold_in(state["key"], 0)
    x = 0.9 * x + 0.1 * jax.random.normal(own, (3,))
    return {"x": x, "target": x, "key": own}, {"performance": -jnp.sum(x**2)}


@pytest.mark.exhaustive
@pytest.mark.parametrize("piece", [1, 100, 2**26])
def test_states_go_through_pieces_unchanged(piece, monkeypatch):
    """Random keys, one array in two places, and the states of perturbations, on two devices."""
    monkeypatch.setattr(engines, "PIECE", piece)
    drift = ja.Kind("drift", "parametric", "params", _drifting, ja.sweep(0.1, 0.2), init=_start)
    drifts = [drift(onset=3, duration=4)]
    plan = ja.plan(ja.Learner(init_keyed, step_keyed), drifts, seeds=3, steps=8, lanes=5)
    engine, (baseline, _, phase) = Engine(plan, 8), layout(plan)
    states, _ = engine.advance(baseline, engine.initial(baseline), 0, 3)
    assert jnp.issubdtype(states.learner["key"].dtype, jax.dtypes.prng_key)
    held = engine.copies(baseline, states)
    assert [n for one in held for n in range(one.first, one.first + one.lanes)] == [0, 1, 2]
    states = engine.forked(lambda seeds: held, phase)
    np.testing.assert_array_equal(states.learner["x"][:4], held_x(held)[[2, 0, 1, 2]])
    states, _ = engine.advance(phase, states, 3, 5)
    copies = engine.copies(phase, states)
    assert (len(copies) == 1) == (piece == 2**26)
    again = engine.restored(iter(copies), phase)
    for a, b in zip(
        jax.tree.leaves(engines._keys_as_data(states)), jax.tree.leaves(engines._keys_as_data(again)), strict=True
    ):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        np.testing.assert_array_equal(a[:4], b[:4])
    assert np.ptp(jax.tree.leaves(states.perturbations)[0]) > 0
    rows = [engine.advance(phase, each, 5, 8)[1]["performance"][:, :4] for each in (states, again)]
    np.testing.assert_array_equal(*rows)


def held_x(pieces):
    return np.concatenate([piece.states.learner["x"] for piece in pieces])


ON_EIGHT = """
import json, sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
import numpy as np
import jaxaudit as ja
sys.path.insert(0, {here!r})
{learner}

def audit(devices, lanes):
    chosen = jax.devices()[:devices]
    return ja.audit(learner, perturbations, seeds=2, steps=steps, devices=chosen, lanes=lanes).telemetry

assert len(jax.devices()) == 8
expected = audit(1, "auto")
apart = {{}}
for devices, lanes in {cases}:
    found = audit(devices, lanes)
    for name, values in expected.items():
        a, b = values.values, found[name].values
        assert (np.isnan(a) == np.isnan(b)).all(), name
        difference = np.nan_to_num(np.abs(a - b) / np.maximum(np.abs(a), 1e-3))
        apart[f"{{name}}, {{lanes}} lanes on {{devices}}"] = float(difference.max())
print(json.dumps(apart))
"""

QUADRATIC = """
from quadratic import quadratic
learner, steps = quadratic(None, adam=False), 12
perturbations = [ja.lr_spike(ja.sweep(3.0, 10.0), onset=5, duration=3), ja.weight_noise(0.5, onset=5)]
"""

TINY_PPO = """
small = dict(num_envs=2, rollout_length=32, minibatch_size=32, epochs=2, hidden=(8, 8))
learner = ja.learners.ppo("InvertedPendulum-v5", **small, evaluations=1, evaluation_episodes=1)
perturbations = [ja.lr_spike(ja.sweep(3.0, 10.0), onset=3, duration=2), ja.observation_noise(0.5, onset=3)]
steps = 6
"""


def apart(learner, cases):
    """Largest relative deviation from one device with all lanes, for every channel and case."""
    script = ON_EIGHT.format(here=str(HELPERS), learner=learner, cases=cases)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.exhaustive
def test_eight_devices_and_batches_on_them():
    found = apart(QUADRATIC, [(8, "auto"), (8, 3), (8, 1)])
    assert {name: x for name, x in found.items() if x > WIDTH_TOLERANCE} == {}


@pytest.mark.slow
def test_ppo_on_eight_devices_and_in_batches():
    """To the third step after the fork: rounding (1e-4 of a loss, seen at another width) grows with training."""
    found = apart(TINY_PPO, [(1, 3), (1, 1), (8, "auto"), (8, 3), (8, 1)])
    assert {name: x for name, x in found.items() if x > 1e-3} == {}


@pytest.mark.slow
def test_a_neutral_lane_of_ppo_is_the_control_of_another_batch():
    scope = {"ja": ja}
    exec(TINY_PPO, scope)
    kinds = (ja.reward_flip(0.5), ja.lr_spike(1.0), ja.observation_noise(0.0), ja.weight_noise(0.0))
    timed = [replace(kind, when=ja.window(3, 3)) for kind in kinds]
    data = ja.audit(scope["learner"], timed, seeds=2, steps=8, lanes=2).telemetry
    for name, values in data.items():
        if name != "baseline_performance":
            for condition in (2, 3, 4):
                np.testing.assert_array_equal(values[:, condition], values[:, 0], err_msg=name)
    assert (data["params_norm"][:, 1, -1] != data["params_norm"][:, 0, -1]).all()
