"""Thousands of lanes: Python's work and the stored bytes do not grow with every lane."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest
import quadratic  # noqa: F401  registers the learner
import zarr
from directories import EXPERIMENTS
from numcodecs import Zstd
from small_runs import SHORT_SPEC, spec_header

from jaxaudit.analysis import metrics, results
from jaxaudit.analysis.statistics import critical_magnitude
from jaxaudit.core import grid as grids
from jaxaudit.core.batches import as_json, from_json, layout
from jaxaudit.core.channel_names import PERFORMANCE
from jaxaudit.execution.grid_program import blank_telemetry, place
from jaxaudit.runs import checkpoint
from jaxaudit.runs import collect as gathering
from jaxaudit.runs import lifecycle as durable
from jaxaudit.runs import run_folder as store
from jaxaudit.spec.document import parse

BENCHMARK = EXPERIMENTS / "benchmarks" / "many_lanes.py"

KINDS = ("lr_spike", "weight_noise", "gradient_scale")


def spec_of(seeds, magnitudes, onsets, steps=400, audit=""):
    swept = [round(0.1 + 0.01 * i, 4) for i in range(magnitudes)]
    entries = [
        f'[[perturbation]]\nkind = "{k}"\nmagnitude = {swept}\nonset = {list(onsets)}\nduration = 5\n' for k in KINDS
    ]
    return spec_header(seeds=seeds, steps=steps, audit=audit) + "".join(entries)


def plan_lanes(grid):
    """Returns every batch's lanes, from a plan that was written to JSON and read again."""
    plan = from_json(json.loads(json.dumps(as_json(layout(grid)))), grid)
    return [batch.lanes(grid) for batch in plan]


@pytest.mark.parametrize(
    ("seeds", "magnitudes", "onsets"),
    [(20, 8, (100, 200, 300, 350)), (200, 1, (100, 200, 300)), (1, 83, range(40, 360, 40)), (1000, 1, (100,))],
)
def test_two_thousand_lanes_are_planned_in_seconds(seeds, magnitudes, onsets):
    start = time.perf_counter()
    grid = parse(spec_of(seeds, magnitudes, onsets)).expanded().build()
    lanes = plan_lanes(grid)
    assert time.perf_counter() - start < 5
    assert sum(len(batch_lanes.seed) for batch_lanes in lanes[1:]) >= len(grid.conditions) * seeds >= 2000


def count_python_calls(function, *arguments):
    """Returns the number of calls of Python functions in a call of `function`."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    return count


def test_planning_calls_as_many_functions_for_ten_times_the_lanes(monkeypatch):
    small_grid, large_grid = (parse(spec_of(seeds, 3, (100, 200))).build() for seeds in (20, 200))
    for grid in (small_grid, large_grid):
        plan_lanes(grid)  # fills caches
    assert count_python_calls(plan_lanes, large_grid) <= count_python_calls(plan_lanes, small_grid)
    disturbances = Counter()
    original = grids.disturbance
    monkeypatch.setattr(grids, "disturbance", lambda c, *rest: disturbances.update([id(c)]) or original(c, *rest))
    plan_lanes(large_grid)
    assert set(disturbances.values()) == {1}
    assert len(large_grid.conditions) <= len(disturbances) <= len(large_grid.conditions) + len(large_grid.forks)


@pytest.mark.parametrize("lanes", [7, 4, 1000])
def test_lanes_have_the_disturbances_of_their_conditions(lanes):
    grid = parse(spec_of(3, 2, (100, 200), audit=f"lanes = {lanes}")).build()
    disturbed = [batch for batch in layout(grid) if batch.disturbed]
    trained = sorted(
        (column, seed) for batch in disturbed for column, seed in zip(batch.columns, batch.seeds, strict=True)
    )
    assert trained == [(column, seed) for fork in grid.forks for column in fork.conditions for seed in range(3)]
    for batch in layout(grid):
        if batch.disturbed:
            stacked = batch.lanes(grid).disturbance
            for position, condition in enumerate(batch.conditions):
                expected = grids.disturbance(condition, grid.program, grid.steps)
                jax.tree.map(lambda x, y, i=position: np.testing.assert_array_equal(x[i], y), stacked, expected)


@pytest.mark.parametrize("lanes", [2, 1000])
@pytest.mark.parametrize("onsets", [(5, 11, 12), (0, 9)])
@pytest.mark.parametrize("edges", [(0, 4, 8, 12, 20), (0, 20), tuple(range(21))])
def test_every_telemetry_value_is_placed_in_its_lane_and_step(lanes, onsets, edges):
    grid = parse(spec_of(3, 1, onsets, steps=20, audit=f"lanes = {lanes}")).build()
    rng = np.random.default_rng(0)
    placed = blank_telemetry(grid)
    expected = {PERFORMANCE: np.full((3, len(grid.conditions), 20), np.nan, np.float32)}
    for batch in layout(grid):
        rows = rng.normal(size=(batch.stop - batch.onset, batch.width)).astype(np.float32)
        for number, (seed, column) in enumerate(zip(batch.seeds, batch.columns, strict=True)):
            columns = range(len(grid.conditions)) if column < 0 else [column]
            for c in columns:
                stop = grid.conditions[c].onset if column < 0 else 20
                expected[PERFORMANCE][seed, c, batch.onset : stop] = rows[: stop - batch.onset, number]
        edges_inside = sorted({batch.onset, batch.stop, *(e for e in edges if batch.onset < e < batch.stop)})
        for start, stop in itertools.pairwise(edges_inside):
            rows_between = {PERFORMANCE: rows[start - batch.onset : stop - batch.onset]}
            place(placed.__getitem__, grid, batch, rows_between, start, stop)
    np.testing.assert_array_equal(placed[PERFORMANCE], expected[PERFORMANCE])


@pytest.fixture(scope="module")
def run_of_2000_lanes(tmp_path_factory):
    """Returns the folder of a run of 2,000 lanes, and the number of writes to each of its channels."""
    folder = tmp_path_factory.mktemp("many") / "run"
    write_counts = Counter()
    set_item = zarr.Array.__setitem__

    def counting_set_item(array, where, values):
        write_counts[array.name.strip("/")] += 1
        set_item(array, where, values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zarr.Array, "__setitem__", counting_set_item)
        durable.run(parse(spec_of(20, 8, (20, 30, 41, 50), steps=60)), folder)
    return folder, write_counts


@pytest.mark.exhaustive
def test_a_fork_group_is_written_in_one_write(run_of_2000_lanes):
    folder, write_counts = run_of_2000_lanes
    channels = {path.name for path in (folder / "telemetry.zarr").iterdir()} & {"performance", "update_norm"}
    assert len(channels) == 2
    groups = prefixes = 4
    derived = baseline = 1
    assert write_counts[""] == 2 * (groups + prefixes + derived) + baseline  # singly opened arrays have no name


@pytest.mark.exhaustive
def test_a_prefix_is_stored_in_the_size_of_one_lane(run_of_2000_lanes):
    folder, _ = run_of_2000_lanes
    array = zarr.open_array(folder / "telemetry.zarr" / "performance", mode="r")
    values = np.asarray(array)
    seeds, conditions = array.shape[:2]
    assert seeds * conditions == 2000
    chunk = array.chunks[2]
    assert array.chunks[:2] == (seeds, conditions)
    for number in range(20 // chunk):
        file = folder / "telemetry.zarr" / "performance" / "c" / "0" / "0" / str(number)
        chunk_values = values[:, :, number * chunk : (number + 1) * chunk]
        np.testing.assert_array_equal(chunk_values, np.broadcast_to(chunk_values[:, :1], chunk_values.shape))
        size_of_one = len(Zstd().encode(np.ascontiguousarray(chunk_values[:, 0])))
        assert file.stat().st_size <= 1.5 * size_of_one + 400, f"one lane takes {size_of_one} bytes"


def test_repeated_large_values_are_within_the_compressors_window():
    assert store._steps_per_file(10, 4) == 10
    assert store._steps_per_file(10, 300_000) == 2
    assert store._steps_per_file(10, 2**22) == 1
    assert store._steps_per_file(7, 2**18) == 1
    lane = np.random.default_rng(0).normal(size=store.COMPRESSION_WINDOW_BYTES // 4).astype(np.float32)
    size_of_one, size_of_six = (len(Zstd(level=0).encode(np.tile(lane, count))) for count in (1, 6))
    assert size_of_six < 1.05 * size_of_one


def test_chunks_are_joined_up_to_the_memory_limit(monkeypatch):
    chunks = [({"a": np.full((stop - start, 2), start, np.float32)}, start, stop) for start, stop in SPANS]
    monkeypatch.setattr(gathering, "MAX_WRITE_BYTES", 8 * 10)
    joined = list(gathering._join_chunks(chunks))
    assert [(start, stop) for _, start, stop in joined] == [(0, 10), (10, 14), (20, 32), (32, 33)]
    values = np.concatenate([rows["a"] for rows, _, _ in joined])
    np.testing.assert_array_equal(values, np.concatenate([rows["a"] for rows, _, _ in chunks]))
    assert list(gathering._join_chunks([])) == []


SPANS = [(0, 4), (4, 10), (10, 14), (20, 32), (32, 33)]
"""Spans with 8 bytes a step. There is a gap, and one span is larger than the limit of joined chunks."""


@pytest.mark.exhaustive
def test_digests_of_onset_states_are_computed_once(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "TIMESTAMP_RESOLUTION_NS", -1)
    checkpoint._file_digest.cache_clear()
    digest_counts = Counter()
    digest = checkpoint.hashlib.file_digest
    monkeypatch.setattr(
        checkpoint.hashlib, "file_digest", lambda file, name: digest_counts.update([file.name]) or digest(file, name)
    )
    folder = tmp_path / "run"
    durable.run(parse(SHORT_SPEC.replace("steps = 20", "steps = 20\nlanes = 2")), folder)
    onsets = [path for path in digest_counts if Path(path).is_relative_to(folder / "checkpoints")]
    assert onsets, "no onset states were read"
    assert {digest_counts[path] for path in onsets} == {1}


def save_states(path, value):
    state = {"x": np.full((2, 3), value, np.float32)}
    checkpoint.save(path, [checkpoint.ProgramPiece(0, 2, state)], {"step": 1})
    return max((p for p in path.rglob("*") if p.is_file() and p.name != checkpoint.DIGEST), key=os.path.getsize)


def flip_last_byte(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 0xFF
    file.write_bytes(content)


def test_damage_to_states_that_were_once_sound_is_detected(tmp_path):
    file = save_states(tmp_path / "states", 1.0)
    past = time.time_ns() - 10**12
    for p in (tmp_path / "states").rglob("*"):
        os.utime(p, ns=(past, past))
    before = checkpoint._file_digest.cache_info().hits
    for _ in range(2):
        checkpoint.verify(tmp_path / "states")
    assert checkpoint._file_digest.cache_info().hits > before, "the cache of digests was not used"
    flip_last_byte(file)
    os.utime(file, ns=(past + 10**9, past + 10**9))
    with pytest.raises(checkpoint.Damaged):
        checkpoint.verify(tmp_path / "states")


def test_damage_to_states_that_were_just_written_is_detected(tmp_path):
    file = save_states(tmp_path / "states", 1.0)
    now = time.time_ns()
    os.utime(file, ns=(now, now))
    checkpoint.verify(tmp_path / "states")
    flip_last_byte(file)
    os.utime(file, ns=(now, now))  # as in a file system with coarse timestamps
    with pytest.raises(checkpoint.Damaged):
        checkpoint.verify(tmp_path / "states")


def test_only_lanes_with_undefined_metrics_are_explained(run_of_2000_lanes, monkeypatch):
    folder, _ = run_of_2000_lanes
    data = store.Folder(folder).read_telemetry(["performance"])
    explained = Counter()
    explain = metrics.explain
    monkeypatch.setattr(metrics, "explain", lambda *a, **k: explained.update(["lane"]) or explain(*a, **k))
    lanes = results.lane_metrics(data, parse((folder / "spec.toml").read_text()).metrics)
    floats = [x.values for x in lanes.data_vars.values() if np.issubdtype(x.dtype, np.floating)]
    undefined = np.any([np.isnan(x) for x in floats], axis=0)
    assert explained["lane"] == undefined.sum()
    np.testing.assert_array_equal(lanes["reason"].values != "", undefined)


def test_too_few_seeds_for_an_interval_are_not_resampled(monkeypatch):
    monkeypatch.setattr(np.random, "default_rng", None)
    magnitudes = np.arange(1, 200)
    estimate = critical_magnitude(magnitudes, np.tile(magnitudes > 50, (3, 1)))
    assert (estimate.low, estimate.high) == (0, np.inf)
    assert 50 < estimate.value < 51


@pytest.mark.slow
@pytest.mark.parametrize("grid", ["20x100", "200x10", "8x250"])
def test_two_thousand_lanes_of_400_steps_are_planned_and_stored_fast(grid):
    path = os.pathsep.join(str(p) for p in (BENCHMARK.parents[2], BENCHMARK.parents[2] / "tests"))
    command = [sys.executable, BENCHMARK, "--one", grid]
    process = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, check=True)
    seconds = json.loads(process.stdout.splitlines()[-1])["seconds"]
    assert seconds["planning"] < 5
    assert seconds["storing"] < 3


def test_the_largest_magnitude_is_the_maximum_over_parts():
    kind = next(iter(parse(spec_of(1, 1, (100,))).build().program.slots)).kind
    sized = dataclasses.replace(kind, sized=True, init=lambda value, max_magnitude: ())
    parts = [grids.Condition((sized(float(m), onset=3),), 3, "sized", "data") for m in (2, 5, 3)]
    assert [slot.max_magnitude for slot in grids.slots_of(parts)] == [5.0]
