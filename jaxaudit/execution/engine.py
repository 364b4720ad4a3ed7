"""The compiled program of a grid, on real arrays."""

from __future__ import annotations

import functools
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jaxlib
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxaudit.core.batches import Batch
from jaxaudit.core.grid import Grid, disturbance
from jaxaudit.core.learner import Telemetry
from jaxaudit.core.perturbation import control
from jaxaudit.core.program import (
    Lanes,
    LaneState,
    Program,
    advance,
    baseline_program,
    empty_telemetry,
    initial_shapes,
    initial_states,
    split_states,
    with_perturbations,
)
from jaxaudit.execution import device_layout as shards
from jaxaudit.runtime import hosts
from jaxaudit.runtime.machine import CACHE, cores, give_back, program_cache
from jaxaudit.runtime.sharding import EVERYWHERE, LANES, ROWS, laid, on_devices

COMPUTATION = re.compile(r"^%?(\S+) \(.*\) -> .* \{$")
CALL = re.compile(r'kind=kCustom, calls=%?([^\s,]+).*"kind":"__ynn_fusion"')
INSTRUCTION = re.compile(r"^  (ROOT )?%?(\S+) = (\w+)\[([\d,]*)\]\S* ([\w-]+)\((.*)$")

VIEWS = ("parameter", "bitcast", "broadcast", "constant", "iota", "reshape")
"""Instructions that make no array of their own."""

PACKS_WHOLE = jaxlib.version.__version_info__ < (0, 11)
"""Whether YNNPACK may pack all of a factor at a time, as it did before jaxlib 0.11."""


@functools.lru_cache(maxsize=64)
def workspace_bytes(compiled: jax.stages.Compiled) -> int:
    """The most bytes that a fusion can need; zero where there is none, as on a GPU.

    Seen to be needed of it are from nothing to all: some factors are packed in parts, some results not held whole.
    """
    text = compiled.as_text() or ""
    called = set(CALL.findall(text))
    return max((_fusion_bytes(lines) for name, lines in _computations(text) if name in called), default=0)


def _computations(text: str) -> Iterator[tuple[str, list[str]]]:
    """The computations of a module, by name, as lines."""
    name = ""
    lines: list[str] = []
    for line in text.splitlines():
        if head := COMPUTATION.match(line):
            name, lines = head[1], []
        elif line == "}":
            yield name, lines
        else:
            lines.append(line)


def _fusion_bytes(lines: list[str]) -> int:
    """Of results within a fusion, and of what each product takes besides."""
    sizes, total = {}, 0
    for line in lines:
        if not (found := INSTRUCTION.match(line)):
            continue
        root, name, dtype, shape, kind, rest = found.groups()
        size = sizes[name] = math.prod(int(n) for n in shape.split(",") if n) * _width(dtype)
        if not root and kind not in VIEWS:
            total += size
        if kind == "dot":
            operands = re.findall(r"%([\w.-]+)", rest.partition(")")[0])
            factors = [sizes.get(operand, 0) for operand in operands]
            total += _product_bytes(factors, size, _width(dtype))
    return total


def _product_bytes(factors: list[int], result: int, width: int) -> int:
    """Of the larger factor, packed; or else of the sums in float32 of a result that is narrower."""
    if PACKS_WHOLE:
        return max(factors)
    return result // width * 4 if width < 4 else 0


def _width(dtype: str) -> int:
    """Bytes of a number: of "f32", 4."""
    bits = re.search(r"\d+", dtype)
    return -(-int(bits[0]) // 8) if bits else 1


SIDE_BY_SIDE = 4
"""The most programs that compile at a time, on as many cores."""


def compiling(lowered: jax.stages.Lowered) -> Future[jax.stages.Compiled]:
    """Compiles a program in a thread of its own; Ctrl-C does not wait for it."""
    _kept.enter()

    def compiled() -> jax.stages.Compiled:
        try:
            return lowered.compile()
        finally:  # before anyone has the program: what the caller compiles next is not kept
            _kept.leave()

    return _threads().submit(compiled)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(cores(), SIDE_BY_SIDE), "jaxaudit-compile")


class _Kept:
    """While programs compile, JAX's cache of compiled programs, unless the caller has a say in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._ours: str | None = None

    def enter(self) -> None:
        with self._lock:
            self._inside += 1
            if not self._ours and self._free():
                self._ours = str(program_cache())
                self._switch(self._ours)

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._ours and not self._inside:
                config: Any = jax.config
                if config.jax_compilation_cache_dir == self._ours:  # or the caller has chosen one meanwhile
                    self._switch(None)
                self._ours = None

    def _free(self) -> bool:
        config: Any = jax.config
        chosen = config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache
        return not chosen and os.environ.get(CACHE) != "off"

    def _switch(self, place: str | None) -> None:
        jax.config.update("jax_compilation_cache_dir", place)
        compilation_cache.reset_cache()


_kept = _Kept()


PIECE = 2**26
"""Bytes of the states that go to and from a checkpoint at once; more where one lane has more."""

LARGE = 2**24
"""Bytes of a piece whose memory is worth some time to have back at once."""


class ProgramPiece(NamedTuple):
    """The states of some lanes that follow each other, without those that fill a batch up.

    Attributes:
      first: the number of the first within its group; of the baseline: its seed's position.
      lanes: how many.
      states: leading axis `lanes`; random keys as their data.
    """

    first: int
    lanes: int
    states: LaneState

    @property
    def large(self) -> bool:
        """Whether its memory is worth some time to have it back at once when it has been used."""
        return sum(x.nbytes for x in jax.tree.leaves(self.states)) >= LARGE


Source = Callable[[set[int]], Iterable[ProgramPiece]]
"""Gives the baseline's states at an onset: the pieces that hold the seeds at some positions, and maybe more."""


class Engine:
    """The program of a grid, compiled once for each width of lanes, and the states it trains.

    States have a leading axis of lanes, filled up to the batch's width, and lie on the devices. They are never
    copied as a whole: `advance` uses up what it is given, and other places hold them in pieces.
    """

    def __init__(self, grid: Grid, rows: int):
        self.grid = grid
        self.rows = rows
        self.compile_seconds = 0.0
        self._latest: tuple[Batch, Lanes] | None = None
        self._data: Any = None

    def compile(self, batches: Iterable[Batch]) -> None:
        """Has the programs of some batches compiled side by side, in the background."""
        begun = time.perf_counter()
        for batch in batches:
            _compiled(*self._key(batch), self.rows)
            if not batch.disturbed:
                _initial(*self._key(batch))
        self.compile_seconds += time.perf_counter() - begun

    def begin(self, batch: Batch, source: Callable[[int], Source]) -> LaneState:
        """A batch's first states; `source(onset)` gives the baseline's there."""
        return self.forked(source(batch.onset), batch) if batch.disturbed else self.initial(batch)

    def initial(self, batch: Batch) -> LaneState:
        """Returns the states of a batch's lanes at step 0."""
        return self._timed(_initial, *self._key(batch))(self.data, self._placed(batch).seed)

    def forked(self, source: Source, batch: Batch) -> LaneState:
        """A fork group's states at its onset, from the baseline's."""
        return self._assembled(batch, source(set(batch.seeds.tolist())), batch.positions)

    def restored(self, pieces: Iterable[ProgramPiece], batch: Batch) -> LaneState:
        """A batch's states from its own pieces; the lanes that fill it up repeat the first."""
        return self._assembled(batch, pieces, batch.filled(batch.numbers))

    def pieces(self, batch: Batch, states: LaneState) -> Iterator[ProgramPiece]:
        """A batch's states on the host, a piece at a time; on CPUs they are the states, not copies.

        A piece must be let go before the states are trained on, or they are copied there.
        """
        program, count, states = self.grid.program, len(batch.seeds), _as_data(states)
        most, shapes = self._piece_lanes(batch), _piece_shapes(program, batch.disturbed)
        each = batch.width // program.groups
        if program.across_hosts:  # each has a part of every lane's, or of every leaf's
            yield ProgramPiece(batch.first, count, _first_lanes(program, batch.disturbed, batch.width, count)(states))
            return
        if count <= most:
            whole = shards.cut(jax.tree.map(np.asarray, states), shapes)
            yield ProgramPiece(batch.first, count, jax.tree.map(lambda x: x[:count], whole))
            return
        for begin in range(0, count, each):
            shard = shards.cut(shards.on_host(program, states, begin // each), shapes)
            for first in range(begin, min(begin + each, count), most):
                lanes = min(most, begin + each - first, count - first)
                cut = slice(first - begin, first - begin + lanes)
                yield ProgramPiece(batch.first + first, lanes, jax.tree.map(lambda x: x[cut], shard))  # noqa: B023

    def copies(self, batch: Batch, states: LaneState) -> list[ProgramPiece]:
        """A batch's states on the host, to be kept while they are trained on."""
        return [piece._replace(states=jax.tree.map(np.array, piece.states)) for piece in self.pieces(batch, states)]

    def lane_shapes(self, batch: Batch) -> LaneState:
        """Shapes and dtypes of one lane's state in the pieces of a batch."""
        return _lane_shapes(self.grid.program, batch.disturbed)

    def lane_bytes(self, batch: Batch) -> int:
        """The size of one lane's state, in bytes."""
        return _bytes(self.lane_shapes(batch))

    def piece_bytes(self, batch: Batch) -> int:
        """The size of a batch's largest piece on the host, in bytes."""
        return min(self._piece_lanes(batch), len(batch.seeds)) * self.lane_bytes(batch)

    def placed_bytes(self, batch: Batch) -> int:
        """Bytes of one lane's state on its devices, all together."""
        program = self.grid.program
        return program.model_devices * shards.device_bytes(program, self.lane_shapes(batch))

    def onset_shapes(self) -> LaneState:
        """Shapes and dtypes of one lane's state of the baseline, in pieces."""
        return _lane_shapes(self.grid.program, False)

    def onset_lane_bytes(self) -> int:
        """Bytes of one lane's state of the baseline."""
        return _bytes(self.onset_shapes())

    def onset_piece_bytes(self) -> int:
        """Bytes of the largest piece that the baseline's states may come in."""
        lane = self.onset_lane_bytes()
        return min(max(1, PIECE // max(1, lane)), len(self.grid.seeds)) * lane

    def _piece_lanes(self, batch: Batch) -> int:
        return max(1, PIECE // max(1, self.lane_bytes(batch)))

    def advance(self, batch: Batch, states: LaneState, start: int, stop: int) -> tuple[LaneState, Telemetry]:
        """Trains a batch's lanes from `start` to `stop`, at most `rows` steps; the `states` given are used up.

        Row t - start of the telemetry is step t; rows past the last are NaN.
        """
        program = self.program(batch)
        arguments = self.data, states, self._placed(batch), np.int32(start), np.int32(stop)
        if self.grid.program.across_hosts:
            hosts.broadcast()  # all have compiled it
        return jax.block_until_ready(program(*arguments))

    @property
    def data(self) -> Any:
        """The learner's data, on every device."""
        if self._data is None:
            program, data = self.grid.program, self.grid.data
            whole = program.model_devices == 1 and not program.across_hosts
            placed = data if whole else jax.tree.map(np.asarray, data)
            self._data = jax.device_put(shards.filled(program, placed, 0), shards.of_data(program, data))
        return self._data

    def program(self, batch: Batch) -> jax.stages.Compiled:
        """The compiled program of a batch; batches and fork groups of one width share it."""
        return self._timed(_compiled, *self._key(batch), self.rows)

    def program_bytes(self, batch: Batch) -> int:
        """Bytes that all devices need for a batch's program: states, telemetry, temporaries, libraries' workspace."""
        return self._needed(self.program(batch))

    def initial_bytes(self, batch: Batch) -> int:
        """Bytes that all devices need for a batch's initial states."""
        return self._needed(self._timed(_initial, *self._key(batch)))

    def _needed(self, compiled: jax.stages.Compiled) -> int:
        sizes: Any = compiled.memory_analysis()
        results = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
        planned = sizes.argument_size_in_bytes + results + sizes.temp_size_in_bytes
        return len(self.grid.program.devices) * (planned + workspace_bytes(compiled))

    def _key(self, batch: Batch) -> tuple[Program, int, bool]:
        program = self.grid.program if batch.disturbed else baseline_program(self.grid.program)
        return program, batch.width, batch.disturbed

    def _timed(self, program: Any, *key: Any) -> jax.stages.Compiled:
        begun = time.perf_counter()
        try:
            return program(*key).result()
        except Exception:
            program.cache_clear()  # another time there may be memory for it
            raise
        finally:
            self.compile_seconds += time.perf_counter() - begun

    def _placed(self, batch: Batch) -> Lanes:
        if self._latest is None or self._latest[0] is not batch:
            self._latest = batch, jax.device_put(batch.lanes(self.grid), _by_lane(self.grid.program))
        return self._latest[1]

    def _assembled(self, batch: Batch, pieces: Iterable[ProgramPiece], wanted: np.ndarray) -> LaneState:
        """States whose lane i is the one that has the number `wanted[i]` in the pieces, written into their place."""
        program = self.grid.program
        each = len(wanted) // program.groups
        here = shards.groups_here(program)
        blocks = {group: _blank(program, each, batch.disturbed, group)() for group in here}
        for piece in pieces:
            if large := piece.large:
                give_back()
            for index in here:
                rows = wanted[index * each : (index + 1) * each] - piece.first
                lanes = np.flatnonzero((rows >= 0) & (rows < piece.lanes))
                if len(lanes):
                    places = np.zeros((2, each), np.int32)
                    places[:, : len(lanes)] = lanes, rows[lanes]
                    states = shards.put(program, piece.states, index)
                    blocks[index] = jax.block_until_ready(_put(blocks[index], states, places, np.int32(len(lanes))))
                    del states
            del piece
            if large:
                give_back()

        return shards.joined(program, len(wanted), list(blocks.values()))


@functools.lru_cache(maxsize=32)
def _first_lanes(program: Program, disturbed: bool, width: int, count: int) -> Callable[[LaneState], LaneState]:
    """Cuts states `[width, ...]` to the first lanes and what fills arrays up; they stay split where that is even."""
    shapes = _piece_shapes(program, disturbed)

    def cut(states: LaneState) -> LaneState:
        return jax.tree.map(lambda x: x[:count], shards.cut(states, shapes))

    return jax.jit(cut, out_shardings=shards.of_pieces(program, shapes, width == count))


@functools.lru_cache(maxsize=32)
def _compiled(program: Program, width: int, disturbed: bool, rows: int) -> Future[jax.stages.Compiled]:
    """Trains lanes in place: `(data, states, lanes, start, stop) -> (states, telemetry)`."""
    shapes, laid_out = _first_shapes(program, width, disturbed), _by_lane_each(program, disturbed)

    def train(data: Any, states: LaneState, lanes: Lanes, start: Any, stop: Any) -> tuple[LaneState, Telemetry]:
        data, states = _whole(program, data), shards.cut(states, shapes)
        blank = empty_telemetry(program, rows, width)
        states, telemetry = advance(program, data, states, lanes, start, stop, blank, start)
        return shards.filled(program, states, 1), telemetry

    data = disturbance(control(0), program, program.steps) if disturbed else None
    lane = Lanes(np.uint32(0), data)
    step = _shape((), np.int32, _sharding(program))
    arguments = (
        _data(program),
        jax.tree.map(lambda x, s: _shape(x.shape, x.dtype, s), shards.filled_shapes(program, shapes, 1), laid_out),
        jax.tree.map(lambda x: _shape((width, *np.shape(x)), np.asarray(x).dtype, _by_lane(program)), lane),
    )
    rows_lie = EVERYWHERE if program.across_hosts else ROWS  # whoever writes them has all
    results = (laid_out, _sharding(program, rows_lie))
    # Data that no step reads lie on the devices as well, and count in what the program needs.
    jitted = jax.jit(train, donate_argnums=1, out_shardings=results, keep_unused=True)
    return compiling(jitted.lower(*arguments, step, step))


@functools.lru_cache(maxsize=32)
def _initial(program: Program, width: int, disturbed: bool) -> Future[jax.stages.Compiled]:
    """The states at step 0 of lanes with some seeds `[width]`."""
    first = functools.partial(_first, program, disturbed)
    dealt = on_devices(program.devices, first, (EVERYWHERE, LANES), LANES, program.model_devices)

    def begin(data: Any, seeds: jax.Array) -> LaneState:
        return shards.filled(program, dealt(_whole(program, data), seeds), 1)

    seeds = _shape((width,), np.uint32, _by_lane(program))
    chosen = dealt if program.model_devices == 1 else begin
    jitted = jax.jit(chosen, out_shardings=_by_lane_each(program, disturbed), keep_unused=True)
    return compiling(jitted.lower(_data(program), seeds))


def _first(program: Program, disturbed: bool, data: Any, seeds: jax.Array) -> LaneState:
    states = initial_states(program, data, seeds)
    return split_states(program, with_perturbations(program, states, len(seeds)) if disturbed else states)


def _first_shapes(program: Program, lanes: int, disturbed: bool) -> LaneState:
    states = jax.tree.map(lambda x: jax.ShapeDtypeStruct((lanes, *x.shape), x.dtype), initial_shapes(program))
    if not disturbed:
        return states
    return jax.eval_shape(lambda states: with_perturbations(program, states, lanes), states)


def _data(program: Program) -> Any:
    """Shapes of the learner's data, on the devices."""
    shapes = program.learner.shapes.tree
    laid_out = shards.of_data(program, shapes)
    return jax.tree.map(lambda x, s: _shape(x.shape, x.dtype, s), shards.filled_shapes(program, shapes, 0), laid_out)


def _whole(program: Program, data: Any) -> Any:
    """The learner's data without what fills them up on the devices."""
    return shards.cut(data, program.learner.shapes.tree, leading=0)


@functools.lru_cache(maxsize=32)
def _piece_shapes(program: Program, disturbed: bool) -> LaneState:
    """Shapes of a piece of one lane."""
    return jax.eval_shape(_as_data, _first_shapes(program, 1, disturbed))


@functools.lru_cache(maxsize=32)
def _lane_shapes(program: Program, disturbed: bool) -> LaneState:
    shapes = _piece_shapes(program, disturbed)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), shapes)


def _bytes(shapes: LaneState) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(shapes))


@functools.lru_cache(maxsize=32)
def _blank(program: Program, lanes: int, disturbed: bool, group: int) -> Callable[[], LaneState]:
    """Makes room for some lanes' states on a device, or on the devices that share them."""
    shapes = _first_shapes(program, lanes, disturbed=False)

    def make() -> LaneState:
        states = jax.tree.map(lambda x: jax.lax.full(x.shape, 0, x.dtype), shapes)
        return shards.filled(program, with_perturbations(program, states, lanes) if disturbed else states, 1)

    whole = _first_shapes(program, lanes, disturbed)
    return jax.jit(make, out_shardings=shards.of_group(program, whole, group))


@functools.partial(jax.jit, donate_argnums=0)
def _put(block: LaneState, piece: LaneState, places: jax.Array, count: jax.Array) -> LaneState:
    """Lane `places[0, i]` of the block becomes the piece's `places[1, i]`, for i below `count`.

    A piece without states of perturbations leaves the block's.
    """
    learner = _filled(block.learner, piece.learner, places, count)
    perturbations = block.perturbations
    if piece.perturbations:
        perturbations = _filled(perturbations, piece.perturbations, places, count)
    return LaneState(learner, perturbations, _filled(block.watched, piece.watched, places, count))


def _filled(block: Any, piece: Any, places: jax.Array, count: jax.Array) -> Any:
    def one(i: jax.Array, data: Any) -> Any:
        return jax.tree.map(lambda x, y: x.at[places[0, i]].set(y[places[1, i]]), data, piece)

    data = jax.lax.fori_loop(0, count, one, _as_data(block))
    return jax.tree.map(lambda x, y: _key_of(x, y) if _is_key(x) else y, block, data)


def _as_data(states: Any) -> Any:
    return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, states)


def _key_of(like: jax.Array, data: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(like))


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _shape(shape: tuple[int, ...], dtype: Any, sharding: Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _sharding(program: Program, spec: PartitionSpec = EVERYWHERE) -> NamedSharding:
    return laid(program.devices, spec, program.model_devices)


def _by_lane(program: Program) -> NamedSharding:
    return _sharding(program, LANES)


def _by_lane_each(program: Program, disturbed: bool) -> LaneState:
    """Where each array of the states lies."""
    return shards.of_lanes(program, _first_shapes(program, 1, disturbed))
