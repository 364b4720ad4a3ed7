"""What has been trained of a run, brought together: telemetry, the baseline's states at the onsets, tables."""

from __future__ import annotations

import csv
import io
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxaudit.analysis import datasets, results
from jaxaudit.core.batches import Batch, Plan
from jaxaudit.core.channel_names import ACTED, ACTING, PERFORMANCE
from jaxaudit.core.grid import Grid
from jaxaudit.core.learner import Telemetry
from jaxaudit.core.program import telemetry_shapes
from jaxaudit.execution.driver import spans
from jaxaudit.runs.attempts import LOST, Attempt, BatchFolder, discard_if_onset_lost
from jaxaudit.runs.run_folder import Folder
from jaxaudit.runtime.files import write_text
from jaxaudit.spec.document import Spec

SHARD_COLUMNS = (
    "batch",
    "fork",
    "onset",
    "stop",
    "lanes",
    "attempt",
    "worker",
    "from_step",
    "to_step",
    "begun",
    "ended",
    "compile_seconds",
    "outcome",
)
"""A row for every attempt at a batch.

`fork` is empty for the baseline; `worker` is a host and a process; `to_step` is the last whose states were kept;
`begun` and `ended`, when it last kept something if nobody knows, are seconds since the epoch.
"""


def write_shards(store: Folder, batch: Batch, attempts: Sequence[Attempt]) -> None:
    """Adds the attempts at a batch to shards.csv."""
    known: dict[tuple[str, str], dict[str, Any]] = {}
    if store.shards.exists():
        with store.shards.open(encoding="utf-8", newline="") as file:
            known = {(row["batch"], row["attempt"]): row for row in csv.DictReader(file)}
    begun = {attempt.number: attempt.begun for attempt in attempts}
    went_on = {known["from_attempt"]: known["step"] for known in begun.values() if known}
    for attempt in attempts:
        if first := begun[attempt.number]:
            row = _shard_row(batch, attempt, first, went_on.get(attempt.number, first["step"]))
            known[str(batch.id), str(attempt.number)] = row
    text = io.StringIO()
    writer = csv.DictWriter(text, SHARD_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(known.values())
    write_text(store.shards, text.getvalue())


def _shard_row(batch: Batch, attempt: Attempt, begun: dict[str, Any], kept: int) -> dict[str, Any]:
    ended = attempt.ended or {"outcome": LOST, "ended": attempt.latest(), "compile_seconds": ""}
    return {
        "batch": batch.id,
        "fork": "" if batch.fork is None else batch.fork,
        "onset": batch.onset,
        "stop": batch.stop,
        "lanes": len(batch.seeds),
        "attempt": attempt.number,
        "worker": begun["worker"],
        "from_step": begun["step"],
        "to_step": batch.stop if attempt.complete else kept,
        "begun": round(begun["begun"], 3),
        "ended": round(ended["ended"], 3),
        "compile_seconds": ended["compile_seconds"] and round(ended["compile_seconds"], 1),
        "outcome": ended["outcome"],
    }


MAX_WRITE_BYTES = 2**26
"""Of telemetry that is put into its place at once: a file of it holds all lanes, and is read and written each time."""


def gather(store: Folder, grid: Grid, batch: Batch, attempt: Attempt, after: int = 0) -> int:
    """Puts what an attempt has trained from a step on into the run's telemetry; returns the step it has come to."""
    for rows, start, stop in _join_chunks(attempt.rows(after)):
        store.write_rows(grid, batch, rows, start, stop)
        after = stop
    return after


def _join_chunks(chunks: Iterable[tuple[Telemetry, int, int]]) -> Iterator[tuple[Telemetry, int, int]]:
    """Chunks of telemetry that follow each other as one, as far as `GATHERED_BYTES` allow."""
    held: list[Telemetry] = []
    begin = end = size = 0
    for rows, start, stop in chunks:
        bytes_here = sum(x.nbytes for x in rows.values())
        if held and (start != end or size + bytes_here > MAX_WRITE_BYTES):
            yield _concatenate(held), begin, end
            held, size = [], 0
        begin = begin if held else start
        held.append(rows)
        end, size = stop, size + bytes_here
    if held:
        yield _concatenate(held), begin, end


def _concatenate(parts: Sequence[Telemetry]) -> dict[str, Any]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


class GatheredBatches:
    """The batches of a run that are trained and gathered.

    Attributes:
      compile_seconds: of the processes that train.
    """

    def __init__(self, store: Folder, grid: Grid, plan: Plan, compile_seconds: Callable[[], float] | None = None):
        recorded = store.read_environment()
        self._store, self._grid = store, grid
        self._done = set(recorded.get("gathered", []))
        self._wall, self._compiling = recorded.get("wall_seconds", 0.0), recorded.get("compile_seconds", 0.0)
        self._compiled = compile_seconds
        self._elsewhere = 0.0
        self._began = time.monotonic() - (compile_seconds() if compile_seconds else 0.0)
        for batch in plan:
            if not batch.disturbed:
                folder = BatchFolder(store, batch)
                folder.publish()
                trained = batch.id in self._done or folder.accepted() is not None
                if trained and discard_if_onset_lost(store, grid, batch):
                    self._done.discard(batch.id)

    def left(self, plan: Plan) -> list[Batch]:
        """Returns the batches whose telemetry is not collected yet."""
        return [batch for batch in plan if batch.id not in self._done]

    def accept(self, batch: Batch, chunks_done: int) -> None:
        """Gathers what the first attempt at a batch that has come to its end has trained, and forgets all of them."""
        folder = BatchFolder(self._store, batch)
        attempt = folder.accepted()
        assert attempt is not None, "nobody has trained it"
        folder.publish()
        gather(self._store, self._grid, batch, attempt)
        if self._compiled is None:
            self._elsewhere += (attempt.ended or {}).get("compile_seconds", 0.0)
        write_shards(self._store, batch, folder.attempts())
        self._done.add(batch.id)
        self._store.update_environment(gathered=sorted(self._done), chunks_done=chunks_done, **self.clock())
        folder.remove()

    def clock(self) -> dict[str, float]:
        """Seconds spent so far, with those of earlier, stopped processes up to their last checkpoint.

        What was compiled before training began counts.
        """
        compiled = self._compiled() if self._compiled else self._elsewhere
        return {
            "wall_seconds": round(self._wall + time.monotonic() - self._began, 1),
            "compile_seconds": round(self._compiling + compiled, 1),
        }


def remarks(grid: Grid, lanes: dict[str, np.ndarray]) -> list[str]:
    """What the learner has to say of undisturbed lanes' first steps, channels `[lane, step, ...]`."""
    said = grid.program.learner.remarks
    return list(said(lanes)) if said else []


def _first_chunk(store: Folder, grid: Grid, rows: int, first: Batch) -> dict[str, np.ndarray]:
    """The first chunk of the first control, all seeds, as it is stored: channels `[seed, step, ...]`."""
    known = telemetry_shapes(grid.program) if grid.program.learner.remarks else ()
    stop = min(rows, next((stop for _, stop in spans(grid, first, rows)), rows))
    return {name: store.read_channel(name, slice(0, 1), slice(0, stop))[:, 0] for name in known}


def write_results(store: Folder, spec: Spec, grid: Grid, plan: Plan, rows: int) -> dict[str, Any]:
    """Writes derived channels, metrics.csv and summary.csv from the finished telemetry; returns facts of the run.

    `rows`: steps of a chunk.
    """
    known = telemetry_shapes(grid.program)
    read = [name for name in known if name in (PERFORMANCE, ACTING) or name.startswith(ACTED)]
    data = store.read_telemetry([*read, "baseline_performance"])
    when = grid.program.learner.cadence
    for name, values in datasets.derived(data[PERFORMANCE].values, spec.metrics, when).items():
        store.write_channel(name, values)
    floor = results.noise_floor(data, data["baseline_performance"].values, grid.forks[-1].onset)
    store.write_attributes(noise_floor=floor)
    lanes = results.lane_metrics(data, spec.metrics)
    write_text(store.metrics, results.lane_table(lanes).to_csv(index=False))
    write_text(store.summary, results.summary_table(lanes, grid.steps).to_csv(index=False))
    learner = grid.program.learner
    samples = sum(len(batch.seeds) * (batch.stop - batch.onset) for batch in plan) * learner.samples_per_step
    begun = remarks(grid, _first_chunk(store, grid, rows, plan[0]))
    if gaps := results.undeclared_gaps(data):
        print(f"note: {gaps}", file=sys.stderr)
        begun.append(gaps)
    return {"samples": samples, "sample": learner.sample} | ({"remarks": begun} if begun else {})
