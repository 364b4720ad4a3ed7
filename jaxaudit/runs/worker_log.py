"""shards.csv: who trained what of a run, from when to when."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from jaxaudit.core.batches import Batch
from jaxaudit.runs.attempts import LOST, LaneAttempt
from jaxaudit.runs.run_folder import Folder
from jaxaudit.runtime.files import write_text

COLUMNS = (
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


def write_shards(store: Folder, batch: Batch, attempts: Sequence[LaneAttempt]) -> None:
    """Adds the attempts at a batch."""
    known: dict[tuple[str, str], dict[str, Any]] = {}
    if store.shards.exists():
        with store.shards.open(encoding="utf-8", newline="") as file:
            known = {(row["batch"], row["attempt"]): row for row in csv.DictReader(file)}
    begun = {attempt.number: attempt.begun for attempt in attempts}
    went_on = {known["from_attempt"]: known["step"] for known in begun.values() if known}
    for attempt in attempts:
        if first := begun[attempt.number]:
            row = _row(batch, attempt, first, went_on.get(attempt.number, first["step"]))
            known[str(batch.id), str(attempt.number)] = row
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(known.values())
    write_text(store.shards, text.getvalue())


def _row(batch: Batch, attempt: LaneAttempt, begun: dict[str, Any], kept: int) -> dict[str, Any]:
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
