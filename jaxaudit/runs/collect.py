"""Gathers what attempts have trained into the run: telemetry, the baseline's states at the onsets, and tables."""

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
from jaxaudit.runs.attempts import LOST, BatchAttempt, BatchFolder, discard_if_onset_lost
from jaxaudit.runs.run_folder import Folder
from jaxaudit.runtime.files import write_text
from jaxaudit.spec.document import Spec

MAX_WRITE_BYTES = 2**26
"""The bytes of telemetry that are written at once; each write reads and rewrites files with the rows of all lanes."""


def write_shards(store: Folder, batch: Batch, attempts: Sequence[BatchAttempt]) -> None:
    """Adds the attempts at a batch, of which at least one has ended, to shards.csv."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    if store.shards.exists():
        with store.shards.open(encoding="utf-8", newline="") as file:
            rows = {(row["batch"], row["attempt"]): row for row in csv.DictReader(file)}
    beginnings = {attempt.number: attempt.beginning for attempt in attempts}
    continued_from = {record["from_attempt"]: record["step"] for record in beginnings.values() if record}
    new_rows = {}
    for attempt in attempts:
        if beginning := beginnings[attempt.number]:
            to_step = continued_from.get(attempt.number, beginning["step"])
            new_rows[str(batch.id), str(attempt.number)] = _shard_row(batch, attempt, beginning, to_step)
    rows |= new_rows
    text = io.StringIO()
    writer = csv.DictWriter(text, next(iter(new_rows.values())), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows.values())
    write_text(store.shards, text.getvalue())


def _shard_row(batch: Batch, attempt: BatchAttempt, beginning: dict[str, Any], to_step: int) -> dict[str, Any]:
    """Returns the row of an attempt in shards.csv.

    `fork` is empty for the baseline. `worker` is a host and a process. `to_step` is the last step whose states were
    stored. `begun` and `ended` are seconds since the epoch; an attempt whose end is unknown ended when it last stored
    telemetry.
    """
    ending = attempt.ending or {"outcome": LOST, "ended": attempt.latest_write(), "compile_seconds": ""}
    return {
        "batch": batch.id,
        "fork": "" if batch.fork is None else batch.fork,
        "onset": batch.onset,
        "stop": batch.stop,
        "lanes": len(batch.seeds),
        "attempt": attempt.number,
        "worker": beginning["worker"],
        "from_step": beginning["step"],
        "to_step": batch.stop if attempt.complete else to_step,
        "begun": round(beginning["begun"], 3),
        "ended": round(ending["ended"], 3),
        "compile_seconds": ending["compile_seconds"] and round(ending["compile_seconds"], 1),
        "outcome": ending["outcome"],
    }


def gather(store: Folder, grid: Grid, batch: Batch, attempt: BatchAttempt, after: int = 0) -> int:
    """Copies an attempt's telemetry from the step `after` on to the run, and returns the step after the last row."""
    for rows, start, stop in _join_chunks(attempt.read_rows(after)):
        store.write_rows(grid, batch, rows, start, stop)
        after = stop
    return after


def _join_chunks(chunks: Iterable[tuple[Telemetry, int, int]]) -> Iterator[tuple[Telemetry, int, int]]:
    """Joins consecutive chunks of telemetry, (rows, start, stop), to larger ones of at most `MAX_WRITE_BYTES`."""
    parts: list[Telemetry] = []
    joined_start = joined_stop = joined_bytes = 0
    for rows, start, stop in chunks:
        chunk_bytes = sum(x.nbytes for x in rows.values())
        if parts and (start != joined_stop or joined_bytes + chunk_bytes > MAX_WRITE_BYTES):
            yield _concatenate(parts), joined_start, joined_stop
            parts, joined_bytes = [], 0
        joined_start = joined_start if parts else start
        parts.append(rows)
        joined_stop, joined_bytes = stop, joined_bytes + chunk_bytes
    if parts:
        yield _concatenate(parts), joined_start, joined_stop


def _concatenate(parts: Sequence[Telemetry]) -> dict[str, Any]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


class GatheredBatches:
    """The batches of a run whose telemetry is gathered, and the time that the run has taken.

    Args:
      store: the run.
      grid: the run's grid.
      plan: the run's batches. Those of the baseline that have lost their states at an onset are trained again.
      compile_seconds: returns the seconds that this process has spent on compilation, if it trains; None if workers do.
    """

    def __init__(self, store: Folder, grid: Grid, plan: Plan, compile_seconds: Callable[[], float] | None = None):
        recorded = store.read_environment()
        self._store, self._grid = store, grid
        self._gathered = set(recorded.get("gathered", []))
        self._earlier_wall = recorded.get("wall_seconds", 0.0)
        self._earlier_compilation = recorded.get("compile_seconds", 0.0)
        self._compile_seconds = compile_seconds
        self._workers_compilation = 0.0
        self._start = time.monotonic() - (compile_seconds() if compile_seconds else 0.0)
        for batch in plan:
            if not batch.disturbed:
                folder = BatchFolder(store, batch)
                folder.publish_onsets()
                trained = batch.id in self._gathered or folder.accepted() is not None
                if trained and discard_if_onset_lost(store, grid, batch):
                    self._gathered.discard(batch.id)

    def remaining(self, plan: Plan) -> list[Batch]:
        """Returns the batches of a plan that are not gathered yet."""
        return [batch for batch in plan if batch.id not in self._gathered]

    def accept(self, batch: Batch, chunks_done: int) -> None:
        """Gathers the first attempt that reached the end of a batch, and removes the files of all its attempts."""
        folder = BatchFolder(self._store, batch)
        attempt = folder.accepted()
        assert attempt is not None, "no attempt has trained the batch to its end"
        folder.publish_onsets()
        gather(self._store, self._grid, batch, attempt)
        if self._compile_seconds is None:
            self._workers_compilation += (attempt.ending or {}).get("compile_seconds", 0.0)
        write_shards(self._store, batch, folder.attempts())
        self._gathered.add(batch.id)
        self._store.update_environment(gathered=sorted(self._gathered), chunks_done=chunks_done, **self.elapsed())
        folder.remove()

    def elapsed(self) -> dict[str, float]:
        """Returns the seconds that the run has taken and spent on compilation, by their keys in environment.json.

        They include those of earlier processes up to their last checkpoint, and the compilation before training.
        """
        compilation = self._compile_seconds() if self._compile_seconds else self._workers_compilation
        return {
            "wall_seconds": round(self._earlier_wall + time.monotonic() - self._start, 1),
            "compile_seconds": round(self._earlier_compilation + compilation, 1),
        }


def remarks(grid: Grid, lanes: dict[str, np.ndarray]) -> list[str]:
    """Returns the learner's remarks on the first steps of undisturbed lanes, channels `[lane, step, ...]`."""
    learner_remarks = grid.program.learner.remarks
    return list(learner_remarks(lanes)) if learner_remarks else []


def _first_chunk(store: Folder, grid: Grid, chunk: int, first: Batch) -> dict[str, np.ndarray]:
    """Returns the stored first chunk of the first control, all seeds: channels `[seed, step, ...]`.

    The dictionary is empty if the learner has no remarks.
    """
    channels = telemetry_shapes(grid.program) if grid.program.learner.remarks else ()
    stop = min(chunk, next((stop for _, stop in spans(grid, first, chunk)), chunk))
    return {name: store.read_channel(name, slice(0, 1), slice(0, stop))[:, 0] for name in channels}


def write_results(store: Folder, spec: Spec, grid: Grid, plan: Plan, chunk: int) -> dict[str, Any]:
    """Writes derived channels, metrics.csv and summary.csv from the complete telemetry.

    Args:
      store: the run.
      spec: the run's spec.
      grid: the run's grid.
      plan: the run's batches.
      chunk: the steps of a chunk.

    Returns:
      Entries for environment.json: the number of samples, their unit, and remarks.
    """
    learner = grid.program.learner
    shapes = telemetry_shapes(grid.program)
    channels = [name for name in shapes if name in (PERFORMANCE, ACTING) or name.startswith(ACTED)]
    data = store.read_telemetry([*channels, "baseline_performance"])
    for name, values in datasets.derived_channels(data[PERFORMANCE].values, spec.metrics, learner.cadence).items():
        store.write_channel(name, values)
    floor = results.noise_floor(data, data["baseline_performance"].values, grid.forks[-1].onset)
    store.write_attributes(noise_floor=floor)
    lanes = results.lane_metrics(data, spec.metrics)
    write_text(store.metrics, results.lane_table(lanes).to_csv(index=False))
    write_text(store.summary, results.summary_table(lanes, grid.steps).to_csv(index=False))
    samples = sum(len(batch.seeds) * (batch.stop - batch.onset) for batch in plan) * learner.samples_per_step
    sentences = remarks(grid, _first_chunk(store, grid, chunk, plan[0]))
    if gaps := results.undeclared_gap_warning(data):
        print(f"note: {gaps}", file=sys.stderr)
        sentences.append(gaps)
    return {"samples": samples, "sample": learner.sample} | ({"remarks": sentences} if sentences else {})
