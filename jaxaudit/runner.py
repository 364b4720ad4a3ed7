"""Durable execution: a grid advanced in chunks of steps, with checkpoints between, that can stop anywhere and go on.

The work is a fixed list of chunks: the baseline's, then each fork group's. A checkpoint says how many chunks are done
and holds the states of the phase it stands in; the baseline's states at the onsets are kept for good, for the forks.
"""

from __future__ import annotations

import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxaudit import checkpoint, memory, results
from jaxaudit.grid import Fork, Grid, Lanes, advance, initial, telemetry_rows
from jaxaudit.errors import UserError
from jaxaudit.learner import PERFORMANCE, State, Telemetry
from jaxaudit.progress import Progress
from jaxaudit.spec import Spec, load
from jaxaudit.store import Folder, environment

CHUNKS_PER_RUN = 40
KEPT_CHECKPOINTS = 2


class Interrupted(Exception):
    """A run stopped at the user's wish; the message says how to go on."""


@dataclass(frozen=True)
class Chunk:
    """Steps `start` to `stop` of the baseline (fork None) or of a fork group."""

    fork: int | None
    start: int
    stop: int


class Engine:
    """The compiled program of a grid, one for each width of lanes: `initial`, `forked` and `advance` on real arrays."""

    def __init__(self, grid: Grid, rows: int):
        self.grid = grid
        self.rows = rows
        self.compile_seconds = 0.0
        self._programs: dict[int, Any] = {}
        self._row_shapes: dict[int | None, Telemetry] = {}
        self._lanes: dict[int | None, tuple[Lanes, np.ndarray]] = {}

    def lanes(self, fork: int | None) -> tuple[Lanes, np.ndarray]:
        """The lanes of a phase, and each one's seed position."""
        if fork not in self._lanes:
            self._lanes[fork] = self.grid.lanes(None if fork is None else self.grid.forks[fork])
        return self._lanes[fork]

    def initial(self) -> State:
        """The baseline's first states."""
        return jax.jit(lambda seeds: initial(self.grid.program, seeds))(self.lanes(None)[0].seed)

    def forked(self, baseline: State, fork: int) -> State:
        """A fork group's states at its onset, from the baseline's."""
        positions = self.lanes(fork)[1]
        return jax.tree.map(lambda x: x[positions], baseline)

    def state_shapes(self, fork: int | None) -> State:
        """Shapes and dtypes of a phase's states."""
        seeds = jax.ShapeDtypeStruct(self.lanes(fork)[0].seed.shape, np.uint32)
        return jax.eval_shape(lambda seeds: initial(self.grid.program, seeds), seeds)

    def row_shapes(self, fork: int | None) -> Telemetry:
        """Shapes of a phase's chunk of telemetry, `[rows, L, ...]`."""
        if fork not in self._row_shapes:
            lanes = self.lanes(fork)[0]
            self._row_shapes[fork] = jax.eval_shape(
                lambda states: telemetry_rows(self.grid.program, states, lanes, self.rows), self.state_shapes(fork)
            )
        return self._row_shapes[fork]

    def advance(self, fork: int | None, states: State, start: int, stop: int) -> tuple[State, Telemetry]:
        """Trains a phase's lanes from `start` to `stop`, at most `rows` steps; row t - start of the telemetry is step t."""
        lanes = self.lanes(fork)[0]
        rows = jax.tree.map(lambda s: jnp.full(s.shape, jnp.nan, s.dtype), self.row_shapes(fork))
        arguments = (states, lanes, jnp.int32(start), jnp.int32(stop), rows)
        width = lanes.seed.shape[0]
        if width not in self._programs:
            begun = time.perf_counter()

            def program(states, lanes, start, stop, rows):
                return advance(self.grid.program, states, lanes, start, stop, rows, start)

            self._programs[width] = jax.jit(program).lower(*arguments).compile()
            self.compile_seconds += time.perf_counter() - begun
        return jax.block_until_ready(self._programs[width](*self._placed(width, arguments)))

    def _placed(self, width: int, arguments: tuple) -> tuple:
        """The arguments where the compiled program wants them."""
        shardings = self._programs[width].input_shardings[0]
        return jax.tree.map(jax.device_put, arguments, shardings)


def schedule(grid: Grid, size: int, baseline: bool = True) -> list[Chunk]:
    """The work in order: chunks end at multiples of `size`, and the baseline's at onsets too."""
    chunks: list[Chunk] = []
    if baseline:
        onsets = {fork.onset for fork in grid.forks}
        chunks += [Chunk(None, *span) for span in _spans(0, grid.baseline_steps, size, onsets)]
    for index, fork in enumerate(grid.forks):
        chunks += [Chunk(index, *span) for span in _spans(fork.onset, grid.steps, size, set())]
    return chunks


def _spans(start: int, stop: int, size: int, also: set[int]) -> list[tuple[int, int]]:
    edges = {start, stop} | {e for e in range(start, stop) if e % size == 0} | {e for e in also if start < e < stop}
    ordered = sorted(edges)
    return list(zip(ordered[:-1], ordered[1:], strict=True))


def run(spec: Spec, folder: Path) -> None:
    """Runs a spec in a new folder. Raises UserError if the folder is taken or the grid cannot fit; see `Interrupted`."""
    spec = spec.expanded()
    _start(spec, spec.build(), folder, source=None)


def resume(folder: Path) -> None:
    """Goes on with a run that stopped, from its latest undamaged checkpoint. Raises UserError if `folder` is no run."""
    store, spec, grid = open_run(folder)
    if is_finished(store):
        raise UserError(f"the run in {folder} is already finished")
    _execute(store, spec, grid)


def fork(folder: Path, spec: Spec, out: Path) -> None:
    """Runs new conditions from the onsets a finished run stored, in a new folder: only their suffixes are computed."""
    source, old, old_grid = open_run(folder)
    if not is_finished(source):
        raise UserError(f"the run in {folder} is not finished; end it with: jaxaudit resume {folder}")
    differing = [t for t in ("task", "learner") if getattr(old, t) != getattr(spec, t)]
    differing += [k for k in ("seeds", "steps", "telemetry") if getattr(old.audit, k) != getattr(spec.audit, k)]
    if differing:
        raise UserError(f"the spec to fork must keep the run's {' and '.join(differing)}")
    spec = spec.expanded()
    grid = replace(spec.build(), tail=0)
    stored = sorted({f.onset for f in old_grid.forks})
    missing = sorted({f.onset for f in grid.forks} - set(stored))
    if missing:
        raise UserError(f"no stored onset at step {missing[0]}; the run in {folder} has {', '.join(map(str, stored))}")
    _start(spec, grid, out, source=source)


def open_run(folder: Path) -> tuple[Folder, Spec, Grid]:
    """The run in a folder. Raises UserError if there is none."""
    store = Folder(Path(folder))
    if not store.spec.is_file():
        raise UserError(f"{folder} is not a run's folder: it has no spec.toml")
    spec = load(store.spec)
    grid = spec.build()
    if store.read_environment().get("forked_from"):
        grid = replace(grid, tail=0)
    return store, spec, grid


def is_finished(store: Folder) -> bool:
    """Whether a run got to its end."""
    return store.read_environment().get("status") == "finished"


def _start(spec: Spec, grid: Grid, folder: Path, source: Folder | None) -> None:
    folder = Path(folder)
    _check_free(folder)
    engine = Engine(grid, chunk_size(spec, grid))
    memory.check(grid, engine.row_shapes(None), folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot create the folder {folder}: {error.strerror or error}") from None
    store = Folder(folder)
    store.checkpoints.mkdir(exist_ok=True)
    if source is not None:
        for f in grid.forks:
            checkpoint.verify(source.checkpoints / onset_name(f.onset))
            shutil.copytree(source.checkpoints / onset_name(f.onset), store.checkpoints / onset_name(f.onset))
    origin = {"forked_from": str(source.path)} if source else {}
    store.update_environment(**environment(grid), **origin, status="started")
    store.write(store.spec, spec.to_toml())
    _execute(store, spec, grid)


def _check_free(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} exists and is not a folder")
    if folder.is_dir() and any(folder.iterdir()):
        hint = f"; to go on with it: jaxaudit resume {folder}" if (folder / "spec.toml").exists() else ""
        raise UserError(f"the folder {folder} exists and is not empty{hint}")


def chunk_size(spec: Spec, grid: Grid) -> int:
    """Steps in a chunk: the spec's, or a fortieth of the run."""
    return min(spec.run.chunk or -(-grid.steps // CHUNKS_PER_RUN), grid.steps)


def onset_name(onset: int) -> str:
    """Name of the checkpoint of the baseline at an onset."""
    return f"onset-{onset:08d}"


def chunk_name(done: int) -> str:
    """Name of the checkpoint after `done` chunks."""
    return f"chunk-{done:06d}"


def _execute(store: Folder, spec: Spec, grid: Grid) -> None:
    """Does what is left of a run, from its latest undamaged checkpoint to its tables."""
    engine = Engine(grid, chunk_size(spec, grid))
    origin = store.read_environment().get("forked_from")
    chunks = schedule(grid, engine.rows, baseline=not origin)
    _sweep(store)
    if not store.telemetry.exists():
        shapes = {name: s.shape[2:] for name, s in engine.row_shapes(None).items()}
        store.create_telemetry(grid, shapes, engine.rows)
        if origin:
            _copy_prefix(Folder(Path(origin)), store, grid)
    done, states = restore(store, engine, chunks)
    _tell(spec, grid, engine, done, chunks)
    began = time.monotonic()
    samples = grid.program.learner.samples_per_step
    with _stoppable() as stopping, Progress(grid, chunks, done, samples) as progress:
        level: tuple[np.ndarray, np.ndarray] | None = None
        for index in range(done, len(chunks)):
            chunk = chunks[index]
            if states is None or (index and chunks[index - 1].fork != chunk.fork):
                states = _phase_start(store, engine, chunk)
                level = None
            states, rows = engine.advance(chunk.fork, states, chunk.start, chunk.stop)
            _write_rows(store, grid, chunk, rows)
            if chunk.fork is not None:
                level = _level(store, grid, grid.forks[chunk.fork], spec.metrics.window) if level is None else level
            progress.advance(chunk, _collapsed(grid, chunk, rows, level))
            last = index + 1 == len(chunks)
            if stopping() or last or (index + 1) % spec.run.checkpoint_every == 0 or _is_onset(grid, chunk):
                _save(store, grid, chunk, states, index + 1)
            if stopping() and not last:
                seconds = _seconds(store, began)
                store.update_environment(status="interrupted", wall_seconds=seconds)
                raise Interrupted(f"stopped after {index + 1} of {len(chunks)} chunks; go on with: jaxaudit resume {store.path}")
    _finish(store, spec, grid)
    store.update_environment(
        status="finished",
        wall_seconds=_seconds(store, began),
        compile_seconds=round(engine.compile_seconds, 1),
        env_steps=grid.lane_steps * samples,
    )


def _seconds(store: Folder, began: float) -> float:
    return round(store.read_environment().get("wall_seconds", 0.0) + time.monotonic() - began, 1)


def _tell(spec: Spec, grid: Grid, engine: Engine, done: int, chunks: list[Chunk]) -> None:
    """What is about to run, on stderr."""
    lanes = len(grid.seeds) * len(grid.conditions)
    print(
        f"{spec.audit.name}: {len(grid.seeds)} seeds x {len(grid.conditions)} conditions = {lanes} lanes, "
        f"{grid.steps} steps of {grid.program.learner.step_unit}, on {len(grid.program.devices)} "
        f"{grid.program.devices[0].platform} device(s); expected memory "
        f"{memory.readable(memory.estimate(grid, engine.row_shapes(None)).total)}",
        file=sys.stderr,
    )
    for onset in sorted({f.onset for f in grid.forks}):
        for sentence in spec.metrics.validate(grid.steps, onset):
            print(f"note: {sentence}", file=sys.stderr)
    if done:
        print(f"going on after {done} of {len(chunks)} chunks", file=sys.stderr)


def _sweep(store: Folder) -> None:
    """Removes what a killed process left half written."""
    for path in [*store.path.glob(".unfinished-*"), *store.checkpoints.glob(".unfinished-*")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in store.telemetry.rglob("*.partial"):
        path.unlink()


def restore(store: Folder, engine: Engine, chunks: list[Chunk]) -> tuple[int, State | None]:
    """How many chunks are done, and the states there (None: begin the next chunk's phase anew).

    A damaged checkpoint is passed over for the one before it, with a word on stderr.
    """
    limit = _before_damaged_onset(store, chunks)
    names = sorted((p.name for p in store.checkpoints.glob("chunk-*")), reverse=True)
    for name in names:
        done = int(name.removeprefix("chunk-"))
        if done <= limit:
            with _passing_over():
                fork = chunks[done - 1].fork
                return done, checkpoint.load(store.checkpoints / name, engine.state_shapes(fork))[0]
    for done in range(min(limit, len(chunks)), 0, -1):
        chunk = chunks[done - 1]
        path = store.checkpoints / onset_name(chunk.stop)
        if chunk.fork is None and path.exists():
            with _passing_over():
                return done, checkpoint.load(path, engine.state_shapes(None))[0]
    return 0, None


def _before_damaged_onset(store: Folder, chunks: list[Chunk]) -> int:
    """The most chunks that may count as done: what follows a damaged onset is trained again."""
    limit = len(chunks)
    for index, chunk in enumerate(chunks):
        path = store.checkpoints / onset_name(chunk.stop)
        if chunk.fork is None and path.exists():
            try:
                checkpoint.verify(path)
            except checkpoint.Damaged as damage:
                print(f"note: {damage}; training it again", file=sys.stderr)
                shutil.rmtree(path)
                limit = min(limit, index)
    return limit


@contextmanager
def _passing_over() -> Iterator[None]:
    try:
        yield
    except checkpoint.Damaged as damage:
        print(f"note: {damage}; going back to the one before it", file=sys.stderr)


def _phase_start(store: Folder, engine: Engine, chunk: Chunk) -> State:
    if chunk.fork is None:
        return engine.initial()
    onset = engine.grid.forks[chunk.fork].onset
    if onset == 0:
        return engine.forked(engine.initial(), chunk.fork)
    try:
        baseline, _ = checkpoint.load(store.checkpoints / onset_name(onset), engine.state_shapes(None))
    except checkpoint.Damaged as damage:
        raise UserError(f"{damage}; run again from the start") from None
    return engine.forked(baseline, chunk.fork)


def _write_rows(store: Folder, grid: Grid, chunk: Chunk, rows: Telemetry) -> None:
    if chunk.fork is None:
        store.write_baseline(grid, rows, chunk.start, chunk.stop)
    else:
        store.write_fork(grid, grid.forks[chunk.fork], rows, chunk.start, chunk.stop)


def _is_onset(grid: Grid, chunk: Chunk) -> bool:
    return chunk.fork is None and chunk.stop in {f.onset for f in grid.forks}


def _save(store: Folder, grid: Grid, chunk: Chunk, states: State, done: int) -> None:
    note = {"chunks_done": done, "step": chunk.stop, "fork": chunk.fork}
    if _is_onset(grid, chunk):
        checkpoint.save(store.checkpoints / onset_name(chunk.stop), states, note)
    checkpoint.save(store.checkpoints / chunk_name(done), states, note)
    for path in sorted(store.checkpoints.glob("chunk-*"))[:-KEPT_CHECKPOINTS]:
        shutil.rmtree(path)


def _copy_prefix(source: Folder, store: Folder, grid: Grid) -> None:
    """The baseline's telemetry before each onset, from the run that was forked."""
    old = source.read_telemetry()
    new = store.read_telemetry()
    trained = old["baseline_performance"].values
    store.write_channel("baseline_performance", trained)
    for f in grid.forks:
        first = int(np.flatnonzero(old["onset"].values == f.onset)[0])
        rows = {
            name: np.moveaxis(old[name].values[:, first, : f.onset], 0, 1)[:, None]
            for name in new.data_vars
            if name not in ("baseline_performance", "x_inst", "x_gen") and name in old
        }
        if f.onset:
            store.write_prefix(grid, f, rows)


def _level(store: Folder, grid: Grid, fork: Fork, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each seed's performance in the window before an onset."""
    data = store.read_channel("baseline_performance")[:, max(0, fork.onset - window) : fork.onset]
    if data.shape[1] < 2:
        return np.full(len(grid.seeds), np.nan), np.full(len(grid.seeds), np.nan)
    return data.mean(axis=1), data.std(axis=1)


def _collapsed(
    grid: Grid, chunk: Chunk, rows: Telemetry, level: tuple[np.ndarray, np.ndarray] | None
) -> int | None:
    """Lanes of the current fork group that stand below their band, or at a non-finite value, now."""
    if chunk.fork is None or level is None:
        return None
    count, seeds = len(grid.forks[chunk.fork].conditions), len(grid.seeds)
    now = np.asarray(rows[PERFORMANCE])[chunk.stop - chunk.start - 1, : count * seeds].reshape(count, seeds)
    mean, std = level
    return int(((now < mean - 2 * std) | ~np.isfinite(now)).sum())


def _finish(store: Folder, spec: Spec, grid: Grid) -> None:
    """Derived channels, metrics.csv and summary.csv from the finished telemetry."""
    data = store.read_telemetry()
    for name, values in results.derived(data[PERFORMANCE].values, spec.metrics).items():
        store.write_channel(name, values)
    floor = results.noise_floor(data, data["baseline_performance"].values, grid.forks[-1].onset)
    store.write_attributes(noise_floor=floor)
    lanes = results.lane_metrics(data, spec.metrics)
    store.write(store.metrics, results.lane_table(lanes).to_csv(index=False))
    store.write(store.summary, results.summary_table(lanes, grid.steps).to_csv(index=False))


@contextmanager
def _stoppable() -> Iterator[Callable[[], bool]]:
    """While inside, Ctrl-C asks to stop after the current chunk; a second one stops at once."""
    asked = []

    def ask(signum: int, frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(signum)
        print("\nstopping after this chunk (Ctrl-C again: at once, from the last checkpoint)", file=sys.stderr)

    try:
        previous = signal.signal(signal.SIGINT, ask)
    except ValueError:  # not in the main thread: nobody's Ctrl-C to catch
        yield lambda: False
        return
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, previous)


