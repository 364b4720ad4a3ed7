"""`Engine`: compiles the programs of a grid, and trains batches of lanes with them on the devices."""

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
from jax.sharding import Sharding

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
from jaxaudit.execution import device_layout
from jaxaudit.execution.device_layout import named_sharding
from jaxaudit.runtime import hosts
from jaxaudit.runtime.machine import (
    CACHE_VARIABLE,
    compilation_cache_folder,
    core_count,
    memory_map_share,
    release_memory,
)
from jaxaudit.runtime.sharding import LANES, REPLICATED, ROWS, map_over_devices

COMPUTATION = re.compile(r"^%?(\S+) \(.*\) -> .* \{$")
CALL = re.compile(r'kind=kCustom, calls=%?([^\s,]+).*"kind":"__ynn_fusion"')
INSTRUCTION = re.compile(r"^  (ROOT )?%?(\S+) = (\w+)\[([\d,]*)\]\S* ([\w-]+)\((.*)$")

MOST_MEMORY_MAPS = 0.6
"""The share of the allowed memory maps above which compiled programs are dropped before another is compiled."""

VIEWS = ("parameter", "bitcast", "broadcast", "constant", "iota", "reshape")
"""Instructions that allocate no array."""

PACKS_WHOLE = jaxlib.version.__version_info__ < (0, 11)
"""Whether YNNPACK may pack a whole factor of a product at once, as it did before jaxlib 0.11."""


@functools.lru_cache(maxsize=64)
def workspace_bytes(compiled: jax.stages.Compiled) -> int:
    """Returns an upper bound on the bytes that a YNNPACK fusion of a program needs besides XLA's buffers.

    It is zero for programs without such fusions, as on a GPU. The actual need lies between nothing and this bound,
    because some factors are packed in parts and some results are not stored as a whole.
    """
    text = compiled.as_text() or ""
    fusions = set(CALL.findall(text))
    return max((_fusion_bytes(lines) for name, lines in _computations(text) if name in fusions), default=0)


def _computations(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yields the name and the lines of each computation in the text of an HLO module."""
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
    """Returns the bytes of the intermediate results of a fusion, and of the workspace of its products."""
    sizes, total = {}, 0
    for line in lines:
        if not (match := INSTRUCTION.match(line)):
            continue
        root, name, dtype, shape, kind, rest = match.groups()
        size = sizes[name] = math.prod(int(n) for n in shape.split(",") if n) * _itemsize(dtype)
        if not root and kind not in VIEWS:
            total += size
        if kind == "dot":
            operands = re.findall(r"%([\w.-]+)", rest.partition(")")[0])
            factors = [sizes.get(operand, 0) for operand in operands]
            total += _product_bytes(factors, size, _itemsize(dtype))
    return total


def _product_bytes(factors: list[int], result: int, itemsize: int) -> int:
    """Returns the bytes of the packed larger factor, or of float32 sums for a result of a narrower dtype."""
    if PACKS_WHOLE:
        return max(factors)
    return result // itemsize * 4 if itemsize < 4 else 0


def _itemsize(dtype: str) -> int:
    """Returns the bytes of a number of an HLO dtype, e.g. 4 for "f32"."""
    bits = re.search(r"\d+", dtype)
    return -(-int(bits[0]) // 8) if bits else 1


MAX_COMPILING = 4
"""The largest number of programs that compile at the same time, each on one core."""


def forget_programs() -> None:
    """Drops compiled programs from the caches of this module and of JAX; those in use stay until they are not."""
    for cache in (_compiled, _initial, _first_lanes, _blank, workspace_bytes):
        cache.cache_clear()
    jax.clear_caches()
    release_memory()


def compile_in_background(lowered: jax.stages.Lowered) -> Future[jax.stages.Compiled]:
    """Starts to compile a program, and returns its future at once.

    At most `MAX_COMPILING` programs compile at the same time, each in a thread of its own, with JAX's persistent cache
    of compilations. Ctrl-C interrupts the wait for the result, and not the compilation: the command line ends without
    it. Earlier programs are dropped first if they use most of the memory maps that the system allows the process.
    """
    if memory_map_share() > MOST_MEMORY_MAPS:
        forget_programs()
    _persistent_cache.enter()

    def compiled() -> jax.stages.Compiled:
        try:
            return lowered.compile()
        finally:  # before the result is available, so that what the caller compiles next is not cached
            _persistent_cache.leave()

    return _compile_threads().submit(compiled)


@functools.cache
def _compile_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(core_count(), MAX_COMPILING), "jaxaudit-compile")


class _PersistentCache:
    """Enables JAX's persistent compilation cache while programs compile, unless the user has configured it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compiling = 0
        self._folder: str | None = None

    def enter(self) -> None:
        with self._lock:
            self._compiling += 1
            if not self._folder and self._allowed():
                self._folder = str(compilation_cache_folder())
                self._set_folder(self._folder)

    def leave(self) -> None:
        with self._lock:
            self._compiling -= 1
            if self._folder and not self._compiling:
                config: Any = jax.config
                if config.jax_compilation_cache_dir == self._folder:  # unless the user has chosen a folder meanwhile
                    self._set_folder(None)
                self._folder = None

    def _allowed(self) -> bool:
        config: Any = jax.config
        configured = config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache
        return not configured and os.environ.get(CACHE_VARIABLE) != "off"

    def _set_folder(self, folder: str | None) -> None:
        jax.config.update("jax_compilation_cache_dir", folder)
        compilation_cache.reset_cache()


_persistent_cache = _PersistentCache()


PIECE = 2**26
"""The largest size in bytes of a piece of states that is written or read at once, unless one lane is larger."""

LARGE = 2**24
"""The size in bytes from which the memory of a piece is returned to the operating system at once."""


class ProgramPiece(NamedTuple):
    """The states of consecutive lanes on the host, without padding lanes.

    Attributes:
      first: the number of the first lane within its group (of the baseline, the position of its seed).
      lanes: the number of lanes.
      states: the states, with leading axis `lanes`; random keys are stored as their data.
    """

    first: int
    lanes: int
    states: LaneState

    @property
    def large(self) -> bool:
        """Whether the piece has at least `LARGE` bytes."""
        return sum(x.nbytes for x in jax.tree.leaves(self.states)) >= LARGE


Source = Callable[[set[int]], Iterable[ProgramPiece]]
"""A function that returns pieces with the baseline's states at an onset, of at least the seeds at given positions."""


class Engine:
    """Compiles a grid's programs, one for each width of its batches, and trains batches with them.

    States have a leading axis of lanes, padded to the batch's width, and are on the devices. They are never copied as a
    whole: `advance` donates the states that it is called with, and everything else handles them in pieces.

    Attributes:
      grid: the grid.
      rows: the largest number of steps that one call of `advance` trains.
      compile_seconds: the seconds spent waiting for compilations so far.
    """

    def __init__(self, grid: Grid, rows: int):
        self.grid = grid
        self.rows = rows
        self.compile_seconds = 0.0
        self._latest: tuple[Batch, Lanes] | None = None
        self._data: Any = None

    def compile(self, batches: Iterable[Batch]) -> None:
        """Starts to compile the programs of some batches in parallel in the background."""
        start = time.perf_counter()
        for batch in batches:
            _compiled(*self._key(batch), self.rows)
            if not batch.disturbed:
                _initial(*self._key(batch))
        self.compile_seconds += time.perf_counter() - start

    def begin(self, batch: Batch, source: Callable[[int], Source]) -> LaneState:
        """Returns a batch's first states; `source(onset)` returns the `Source` of the baseline's states."""
        return self.forked(source(batch.onset), batch) if batch.disturbed else self.initial(batch)

    def initial(self, batch: Batch) -> LaneState:
        """Returns the states of a batch's lanes at step 0."""
        return self._wait_for(_initial, *self._key(batch))(self.data, self._device_lanes(batch).seed)

    def forked(self, source: Source, batch: Batch) -> LaneState:
        """Returns the states of a fork group's batch at its onset, with leading axis `batch.width`.

        Every lane continues from the baseline's state of its seed, and perturbations that keep a state have their first
        one.

        Args:
          source: returns the baseline's states at the onset.
          batch: a batch of a fork group.
        """
        return self._assemble(batch, source(set(batch.seeds.tolist())), batch.positions)

    def restored(self, pieces: Iterable[ProgramPiece], batch: Batch) -> LaneState:
        """Returns a batch's states, assembled from its pieces; padding lanes repeat the first lane."""
        return self._assemble(batch, pieces, batch.padded(batch.numbers))

    def pieces(self, batch: Batch, states: LaneState) -> Iterator[ProgramPiece]:
        """Yields a batch's states on the host, one piece at a time; on CPUs the pieces are views, not copies.

        Release each piece before the states are trained on, or `advance` has to copy them.
        """
        program, count, states = self.grid.program, len(batch.seeds), _keys_as_data(states)
        piece_lanes, shapes = _lanes_in_piece(self.lane_bytes(batch)), _piece_shapes(program, batch.disturbed)
        group_lanes = batch.width // program.groups
        if program.across_hosts:  # each process has a part of the lanes, or of the leaves
            yield ProgramPiece(batch.first, count, _first_lanes(program, batch.disturbed, batch.width, count)(states))
            return
        if count <= piece_lanes:
            arrays = device_layout.unpadded(jax.tree.map(np.asarray, states), shapes)
            yield ProgramPiece(batch.first, count, jax.tree.map(lambda x: x[:count], arrays))
            return
        for begin in range(0, count, group_lanes):
            group = device_layout.unpadded(device_layout.group_on_host(program, states, begin // group_lanes), shapes)
            for first in range(begin, min(begin + group_lanes, count), piece_lanes):
                lanes = min(piece_lanes, begin + group_lanes - first, count - first)
                rows = slice(first - begin, first - begin + lanes)
                yield ProgramPiece(batch.first + first, lanes, jax.tree.map(lambda x: x[rows], group))  # noqa: B023

    def copies(self, batch: Batch, states: LaneState) -> list[ProgramPiece]:
        """Returns copies of a batch's states on the host, which can be kept while the states are trained on."""
        return [piece._replace(states=jax.tree.map(np.array, piece.states)) for piece in self.pieces(batch, states)]

    def lane_shapes(self, batch: Batch | None = None) -> LaneState:
        """Returns the shapes and dtypes of one lane's state in the pieces of a batch; None means the baseline."""
        return _lane_shapes(self.grid.program, batch is not None and batch.disturbed)

    def lane_bytes(self, batch: Batch | None = None) -> int:
        """Returns the size of one lane's state in bytes; None means the baseline."""
        return _bytes(self.lane_shapes(batch))

    def piece_bytes(self, batch: Batch | None = None) -> int:
        """Returns the size of a batch's largest piece on the host in bytes; None means the baseline with all seeds."""
        lane = self.lane_bytes(batch)
        return min(_lanes_in_piece(lane), len(self.grid.seeds if batch is None else batch.seeds)) * lane

    def placed_bytes(self, batch: Batch) -> int:
        """Returns the size of one lane's state in bytes, summed over the devices that share it, with padding."""
        program = self.grid.program
        return program.model_devices * device_layout.device_bytes(program, self.lane_shapes(batch))

    def advance(self, batch: Batch, states: LaneState, start: int, stop: int) -> tuple[LaneState, Telemetry]:
        """Trains a batch's lanes from step `start` to `stop`, at most `rows` steps. The `states` are donated.

        Returns the states at `stop` and the telemetry `[rows, L, ...]` by channel, in which step t is row t - `start`;
        rows from `stop` on are NaN.
        """
        program = self.program(batch)
        arguments = self.data, states, self._device_lanes(batch), np.int32(start), np.int32(stop)
        if self.grid.program.across_hosts:
            hosts.broadcast()  # waits until all processes have compiled the program
        return jax.block_until_ready(program(*arguments))

    @property
    def data(self) -> Any:
        """The learner's data as arrays on the program's devices."""
        if self._data is None:
            program, data = self.grid.program, self.grid.data
            as_is = program.model_devices == 1 and not program.across_hosts
            arrays = data if as_is else jax.tree.map(np.asarray, data)
            shardings = device_layout.data_shardings(program, data)
            self._data = jax.device_put(device_layout.padded(program, arrays, 0), shardings)
        return self._data

    def program(self, batch: Batch) -> jax.stages.Compiled:
        """Returns the compiled program of a batch, which all batches of its width share."""
        return self._wait_for(_compiled, *self._key(batch), self.rows)

    def program_bytes(self, batch: Batch) -> int:
        """Returns the bytes that all devices need in total to train a batch, with temporaries and workspaces."""
        return self._total_bytes(self.program(batch))

    def initial_bytes(self, batch: Batch) -> int:
        """Returns the bytes that all devices need to compute a batch's initial states."""
        return self._total_bytes(self._wait_for(_initial, *self._key(batch)))

    def _total_bytes(self, compiled: jax.stages.Compiled) -> int:
        sizes: Any = compiled.memory_analysis()
        results = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
        planned = sizes.argument_size_in_bytes + results + sizes.temp_size_in_bytes
        return len(self.grid.program.devices) * (planned + workspace_bytes(compiled))

    def _key(self, batch: Batch) -> tuple[Program, int, bool]:
        program = self.grid.program if batch.disturbed else baseline_program(self.grid.program)
        return program, batch.width, batch.disturbed

    def _wait_for(self, program: Any, *key: Any) -> jax.stages.Compiled:
        start = time.perf_counter()
        try:
            return program(*key).result()
        except Exception:
            program.cache_clear()  # there may be enough memory at the next attempt
            raise
        finally:
            self.compile_seconds += time.perf_counter() - start

    def _device_lanes(self, batch: Batch) -> Lanes:
        if self._latest is None or self._latest[0] is not batch:
            self._latest = batch, jax.device_put(batch.lanes(self.grid), named_sharding(self.grid.program, LANES))
        return self._latest[1]

    def _assemble(self, batch: Batch, pieces: Iterable[ProgramPiece], numbers: np.ndarray) -> LaneState:
        """Returns states whose lane i is the lane with number `numbers[i]` in the pieces."""
        program = self.grid.program
        group_lanes = len(numbers) // program.groups
        groups = device_layout.local_groups(program)
        blocks = {group: _blank(program, group_lanes, batch.disturbed, group)() for group in groups}
        for piece in pieces:
            if large := piece.large:
                release_memory()
            for group in groups:
                rows = numbers[group * group_lanes : (group + 1) * group_lanes] - piece.first
                lanes = np.flatnonzero((rows >= 0) & (rows < piece.lanes))
                if len(lanes):
                    indices = np.zeros((2, group_lanes), np.int32)
                    indices[:, : len(lanes)] = lanes, rows[lanes]
                    states = device_layout.put_group(program, piece.states, group)
                    block = _copy_lanes(blocks[group], states, indices, np.int32(len(lanes)))
                    blocks[group] = jax.block_until_ready(block)
                    del states, block
            del piece
            if large:
                release_memory()

        return device_layout.join_groups(program, len(numbers), list(blocks.values()))


@functools.lru_cache(maxsize=32)
def _first_lanes(program: Program, disturbed: bool, width: int, count: int) -> Callable[[LaneState], LaneState]:
    """Returns a function that removes padding from states `[width, ...]`; axes that divide evenly stay split."""
    shapes = _piece_shapes(program, disturbed)

    def cut(states: LaneState) -> LaneState:
        return jax.tree.map(lambda x: x[:count], device_layout.unpadded(states, shapes))

    return jax.jit(cut, out_shardings=device_layout.piece_shardings(program, shapes, width == count))


@functools.lru_cache(maxsize=32)
def _compiled(program: Program, width: int, disturbed: bool, rows: int) -> Future[jax.stages.Compiled]:
    """Compiles `(data, states, lanes, start, stop) -> (states, telemetry)`, which trains lanes in place."""
    shapes, shardings = _state_shapes(program, width, disturbed), _state_shardings(program, disturbed)

    def train(data: Any, states: LaneState, lanes: Lanes, start: Any, stop: Any) -> tuple[LaneState, Telemetry]:
        data, states = _unpad_data(program, data), device_layout.unpadded(states, shapes)
        blank = empty_telemetry(program, rows, width)
        states, telemetry = advance(program, data, states, lanes, start, stop, blank, start)
        return device_layout.padded(program, states, 1), telemetry

    lane = Lanes(np.uint32(0), disturbance(control(0), program, program.steps) if disturbed else None)
    step = _shape((), np.int32, named_sharding(program))
    arguments = (
        _data_arguments(program),
        _with_shardings(_padded_shapes(program, shapes, 1), shardings),
        jax.tree.map(
            lambda x: _shape((width, *np.shape(x)), np.asarray(x).dtype, named_sharding(program, LANES)), lane
        ),
    )
    # With several hosts, the process that writes the telemetry needs all of it.
    results = (shardings, named_sharding(program, REPLICATED if program.across_hosts else ROWS))
    # Unused data are kept as arguments, because they are on the devices and count in the memory of the program.
    jitted = jax.jit(train, donate_argnums=1, out_shardings=results, keep_unused=True)
    return compile_in_background(jitted.lower(*arguments, step, step))


@functools.lru_cache(maxsize=32)
def _initial(program: Program, width: int, disturbed: bool) -> Future[jax.stages.Compiled]:
    """Compiles `(data, seeds) -> states`, which computes the states at step 0 of lanes with seeds `[width]`."""
    initial_batch = functools.partial(_initial_batch, program, disturbed)
    sharded = map_over_devices(program.devices, initial_batch, (REPLICATED, LANES), LANES, program.model_devices)

    def with_padding(data: Any, seeds: jax.Array) -> LaneState:
        return device_layout.padded(program, sharded(_unpad_data(program, data), seeds), 1)

    seeds = _shape((width,), np.uint32, named_sharding(program, LANES))
    function = sharded if program.model_devices == 1 else with_padding
    jitted = jax.jit(function, out_shardings=_state_shardings(program, disturbed), keep_unused=True)
    return compile_in_background(jitted.lower(_data_arguments(program), seeds))


def _initial_batch(program: Program, disturbed: bool, data: Any, seeds: jax.Array) -> LaneState:
    states = initial_states(program, data, seeds)
    return split_states(program, with_perturbations(program, states, len(seeds)) if disturbed else states)


def _state_shapes(program: Program, lanes: int, disturbed: bool) -> LaneState:
    states = jax.tree.map(lambda x: jax.ShapeDtypeStruct((lanes, *x.shape), x.dtype), initial_shapes(program))
    if not disturbed:
        return states
    return jax.eval_shape(lambda states: with_perturbations(program, states, lanes), states)


def _data_arguments(program: Program) -> Any:
    """Returns the shapes of the learner's padded data with their shardings."""
    shapes = program.learner.shapes.tree
    return _with_shardings(_padded_shapes(program, shapes, 0), device_layout.data_shardings(program, shapes))


def _padded_shapes(program: Program, shapes: Any, leading: int) -> Any:
    return jax.eval_shape(functools.partial(device_layout.padded, program, leading=leading), shapes)


def _unpad_data(program: Program, data: Any) -> Any:
    return device_layout.unpadded(data, program.learner.shapes.tree, leading=0)


@functools.lru_cache(maxsize=32)
def _piece_shapes(program: Program, disturbed: bool) -> LaneState:
    """Returns the shapes of the states in a piece with one lane."""
    return jax.eval_shape(_keys_as_data, _state_shapes(program, 1, disturbed))


@functools.lru_cache(maxsize=32)
def _lane_shapes(program: Program, disturbed: bool) -> LaneState:
    shapes = _piece_shapes(program, disturbed)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), shapes)


def _lanes_in_piece(lane_bytes: int) -> int:
    return max(1, PIECE // max(1, lane_bytes))


def _bytes(shapes: LaneState) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(shapes))


@functools.lru_cache(maxsize=32)
def _blank(program: Program, lanes: int, disturbed: bool, group: int) -> Callable[[], LaneState]:
    """Returns a function that allocates states of `lanes` lanes, zero or as windows open, on a group's devices."""
    shapes = _state_shapes(program, lanes, disturbed=False)

    def make() -> LaneState:
        states = jax.tree.map(lambda x: jax.lax.full(x.shape, 0, x.dtype), shapes)
        return device_layout.padded(program, with_perturbations(program, states, lanes) if disturbed else states, 1)

    shardings = device_layout.group_shardings(program, _state_shapes(program, lanes, disturbed), group)
    return jax.jit(make, out_shardings=shardings)


@functools.partial(jax.jit, donate_argnums=0)
def _copy_lanes(block: LaneState, piece: LaneState, indices: jax.Array, count: jax.Array) -> LaneState:
    """Copies lane `indices[1, i]` of the piece to lane `indices[0, i]` of the block for all i below `count`.

    If the piece has no states of perturbations, those of the block stay.
    """
    learner = _copy_leaves(block.learner, piece.learner, indices, count)
    perturbations = block.perturbations
    if piece.perturbations:
        perturbations = _copy_leaves(perturbations, piece.perturbations, indices, count)
    return LaneState(learner, perturbations, _copy_leaves(block.watched, piece.watched, indices, count))


def _copy_leaves(block: Any, piece: Any, indices: jax.Array, count: jax.Array) -> Any:
    def copy_lane(i: jax.Array, data: Any) -> Any:
        return jax.tree.map(lambda x, y: x.at[indices[0, i]].set(y[indices[1, i]]), data, piece)

    data = jax.lax.fori_loop(0, count, copy_lane, _keys_as_data(block))
    return jax.tree.map(lambda x, y: _wrap_key(x, y) if _is_key(x) else y, block, data)


def _keys_as_data(states: Any) -> Any:
    return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, states)


def _wrap_key(like: jax.Array, data: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(like))


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _shape(shape: tuple[int, ...], dtype: Any, sharding: Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _with_shardings(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda x, sharding: _shape(x.shape, x.dtype, sharding), shapes, shardings)


def _state_shardings(program: Program, disturbed: bool) -> LaneState:
    return device_layout.lane_shardings(program, _state_shapes(program, 1, disturbed))
