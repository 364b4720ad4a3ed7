"""Thousands of lanes: what is done once for each of them in Python, or stored for each, would be felt."""

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


def planned(grid):
    """A plan there and back through its file, and what every lane does."""
    plan = from_json(json.loads(json.dumps(as_json(layout(grid)))), grid)
    return [batch.lanes(grid) for batch in plan]


@pytest.mark.parametrize(
    ("seeds", "magnitudes", "onsets"),
    [(20, 8, (100, 200, 300, 350)), (200, 1, (100, 200, 300)), (1, 83, range(40, 360, 40)), (1000, 1, (100,))],
)
def test_two_thousand_lanes_are_planned_in_seconds(seeds, magnitudes, onsets):
    begun = time.perf_counter()
    grid = parse(spec_of(seeds, magnitudes, onsets)).expanded().build()
    lanes = planned(grid)
    assert time.perf_counter() - begun < 5
    assert sum(len(one.seed) for one in lanes[1:]) >= len(grid.conditions) * seeds >= 2000


def calls(function, *arguments):
    """How many functions written in Python a call takes."""
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


def test_ten_times_as_many_lanes_take_no_more_python(monkeypatch):
    few, many = (parse(spec_of(seeds, 3, (100, 200))).build() for seeds in (20, 200))
    for grid in (few, many):
        planned(grid)  # what is kept from the first time on
    assert calls(planned, many) <= calls(planned, few)
    seen = Counter()
    one = grids.disturbance
    monkeypatch.setattr(grids, "disturbance", lambda c, *rest: seen.update([id(c)]) or one(c, *rest))
    planned(many)
    assert set(seen.values()) == {1}
    assert len(many.conditions) <= len(seen) <= len(many.conditions) + len(many.forks)


@pytest.mark.parametrize("lanes", [7, 4, 1000])
def test_lanes_do_what_their_conditions_say(lanes):
    grid = parse(spec_of(3, 2, (100, 200), audit=f"lanes = {lanes}")).build()
    disturbed = [batch for batch in layout(grid) if batch.disturbed]
    trained = sorted(
        (column, seed) for batch in disturbed for column, seed in zip(batch.columns, batch.seeds, strict=True)
    )
    assert trained == [(column, seed) for fork in grid.forks for column in fork.conditions for seed in range(3)]
    for batch in layout(grid):
        if batch.disturbed:
            stacked = batch.lanes(grid).disturbance
            for place, condition in enumerate(batch.conditions):
                alone = grids.disturbance(condition, grid.program, grid.steps)
                jax.tree.map(lambda x, y, i=place: np.testing.assert_array_equal(x[i], y), stacked, alone)


@pytest.mark.parametrize("lanes", [2, 1000])
@pytest.mark.parametrize("onsets", [(5, 11, 12), (0, 9)])
@pytest.mark.parametrize("edges", [(0, 4, 8, 12, 20), (0, 20), tuple(range(21))])
def test_every_value_is_where_it_belongs(lanes, onsets, edges):
    grid = parse(spec_of(3, 1, onsets, steps=20, audit=f"lanes = {lanes}")).build()
    draw = np.random.default_rng(0)
    arrays = blank_telemetry(grid)
    lane = {PERFORMANCE: np.full((3, len(grid.conditions), 20), np.nan, np.float32)}
    for batch in layout(grid):
        rows = draw.normal(size=(batch.stop - batch.onset, batch.width)).astype(np.float32)
        for number, (seed, column) in enumerate(zip(batch.seeds, batch.columns, strict=True)):
            columns = range(len(grid.conditions)) if column < 0 else [column]
            for c in columns:
                stop = grid.conditions[c].onset if column < 0 else 20
                lane[PERFORMANCE][seed, c, batch.onset : stop] = rows[: stop - batch.onset, number]
        cut = sorted({batch.onset, batch.stop, *(e for e in edges if batch.onset < e < batch.stop)})
        for start, stop in itertools.pairwise(cut):
            part = {PERFORMANCE: rows[start - batch.onset : stop - batch.onset]}
            place(arrays.__getitem__, grid, batch, part, start, stop)
    np.testing.assert_array_equal(arrays[PERFORMANCE], lane[PERFORMANCE])


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A run of 2,000 lanes, and how often each of its channels was written to."""
    folder = tmp_path_factory.mktemp("many") / "run"
    written = Counter()
    put = zarr.Array.__setitem__

    def counted(array, where, values):
        written[array.name.strip("/")] += 1
        put(array, where, values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zarr.Array, "__setitem__", counted)
        durable.run(parse(spec_of(20, 8, (20, 30, 41, 50), steps=60)), folder)
    return folder, written


@pytest.mark.exhaustive
def test_a_group_is_put_into_its_place_in_one_go(many):
    folder, written = many
    told = {path.name for path in (folder / "telemetry.zarr").iterdir()} & {"performance", "update_norm"}
    assert len(told) == 2
    groups = prefixes = 4
    derived = baseline = 1
    assert written[""] == 2 * (groups + prefixes + derived) + baseline  # arrays opened one by one have no name


def test_a_prefix_takes_the_room_of_one(many):
    folder, _ = many
    array = zarr.open_array(folder / "telemetry.zarr" / "performance", mode="r")
    values = np.asarray(array)
    seeds, conditions = array.shape[:2]
    assert seeds * conditions == 2000
    chunk = array.chunks[2]
    assert array.chunks[:2] == (seeds, conditions)
    for number in range(20 // chunk):
        file = folder / "telemetry.zarr" / "performance" / "c" / "0" / "0" / str(number)
        part = values[:, :, number * chunk : (number + 1) * chunk]
        np.testing.assert_array_equal(part, np.broadcast_to(part[:, :1], part.shape))
        once = len(Zstd().encode(np.ascontiguousarray(part[:, 0])))
        assert file.stat().st_size <= 1.5 * once + 400, f"{once} bytes once"


def test_a_prefix_of_large_values_is_in_the_compressors_sight():
    assert store._steps_per_file(10, 4) == 10
    assert store._steps_per_file(10, 300_000) == 2
    assert store._steps_per_file(10, 2**22) == 1
    assert store._steps_per_file(7, 2**18) == 1
    lane = np.random.default_rng(0).normal(size=store.COMPRESSION_WINDOW_BYTES // 4).astype(np.float32)
    once, often = (len(Zstd(level=0).encode(np.tile(lane, count))) for count in (1, 6))
    assert often < 1.05 * once


def test_chunks_are_joined_as_far_as_memory_allows(monkeypatch):
    chunks = [({"a": np.full((stop - start, 2), start, np.float32)}, start, stop) for start, stop in SPANS]
    monkeypatch.setattr(gathering, "MAX_WRITE_BYTES", 8 * 10)
    joined = list(gathering._join_chunks(chunks))
    assert [(start, stop) for _, start, stop in joined] == [(0, 10), (10, 14), (20, 32), (32, 33)]
    whole = np.concatenate([rows["a"] for rows, _, _ in joined])
    np.testing.assert_array_equal(whole, np.concatenate([rows["a"] for rows, _, _ in chunks]))
    assert list(gathering._join_chunks([])) == []


SPANS = [(0, 4), (4, 10), (10, 14), (20, 32), (32, 33)]
"""Of 8 bytes a step; there is a gap, and one that is larger than what is joined."""


@pytest.mark.exhaustive
def test_states_at_an_onset_are_read_for_their_digest_once(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "TIMESTAMP_RESOLUTION_NS", -1)
    checkpoint._file_digest.cache_clear()
    read = Counter()
    digest = checkpoint.hashlib.file_digest
    monkeypatch.setattr(
        checkpoint.hashlib, "file_digest", lambda file, name: read.update([file.name]) or digest(file, name)
    )
    folder = tmp_path / "run"
    durable.run(parse(SHORT_SPEC.replace("steps = 20", "steps = 20\nlanes = 2")), folder)
    onsets = [path for path in read if Path(path).is_relative_to(folder / "checkpoints")]
    assert onsets, "six batches have read them"
    assert {read[path] for path in onsets} == {1}


def saved(path, value):
    state = {"x": np.full((2, 3), value, np.float32)}
    checkpoint.save(path, [checkpoint.ProgramPiece(0, 2, state)], {"step": 1})
    return max((p for p in path.rglob("*") if p.is_file() and p.name != checkpoint.DIGEST), key=os.path.getsize)


def damaged(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 0xFF
    file.write_bytes(content)


def test_damage_is_found_after_the_states_were_once_sound(tmp_path):
    file = saved(tmp_path / "states", 1.0)
    past = time.time_ns() - 10**12
    for p in (tmp_path / "states").rglob("*"):
        os.utime(p, ns=(past, past))
    before = checkpoint._file_digest.cache_info().hits
    for _ in range(2):
        checkpoint.verify(tmp_path / "states")
    assert checkpoint._file_digest.cache_info().hits > before, "or this tests nothing"
    damaged(file)
    os.utime(file, ns=(past + 10**9, past + 10**9))
    with pytest.raises(checkpoint.Damaged):
        checkpoint.verify(tmp_path / "states")


def test_damage_is_found_in_what_has_only_just_been_written(tmp_path):
    file = saved(tmp_path / "states", 1.0)
    now = time.time_ns()
    os.utime(file, ns=(now, now))
    checkpoint.verify(tmp_path / "states")
    damaged(file)
    os.utime(file, ns=(now, now))  # as where a file system counts time in steps
    with pytest.raises(checkpoint.Damaged):
        checkpoint.verify(tmp_path / "states")


def test_only_lanes_with_something_to_explain_are_looked_at(many, monkeypatch):
    folder, _ = many
    data = store.Folder(folder).read_telemetry(["performance"])
    asked = Counter()
    explain = metrics.explain
    monkeypatch.setattr(metrics, "explain", lambda *a, **k: asked.update(["lane"]) or explain(*a, **k))
    lanes = results.lane_metrics(data, parse((folder / "spec.toml").read_text()).metrics)
    floats = [x.values for x in lanes.data_vars.values() if np.issubdtype(x.dtype, np.floating)]
    undefined = np.any([np.isnan(x) for x in floats], axis=0)
    assert asked["lane"] == undefined.sum()
    np.testing.assert_array_equal(lanes["reason"].values != "", undefined)


def test_seeds_too_few_for_an_interval_are_not_resampled(monkeypatch):
    monkeypatch.setattr(np.random, "default_rng", None)
    magnitudes = np.arange(1, 200)
    found = critical_magnitude(magnitudes, np.tile(magnitudes > 50, (3, 1)))
    assert (found.low, found.high) == (0, np.inf)
    assert 50 < found.value < 51


@pytest.mark.slow
@pytest.mark.parametrize("grid", ["20x100", "200x10", "8x250"])
def test_two_thousand_lanes_of_four_hundred_steps(grid):
    path = os.pathsep.join(str(p) for p in (BENCHMARK.parents[2], BENCHMARK.parents[2] / "tests"))
    command = [sys.executable, BENCHMARK, "--one", grid]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, check=True)
    seconds = json.loads(done.stdout.splitlines()[-1])["seconds"]
    assert seconds["planning"] < 5
    assert seconds["storing"] < 3


def test_the_largest_magnitude_is_found_among_thousands():
    kind = next(iter(parse(spec_of(1, 1, (100,))).build().program.slots)).kind
    sized = dataclasses.replace(kind, sized=True, init=lambda value, most: ())
    parts = [grids.Condition((sized(float(m), onset=3),), 3, "sized", "data") for m in (2, 5, 3)]
    assert [slot.max_magnitude for slot in grids.slots_of(parts)] == [5.0]
