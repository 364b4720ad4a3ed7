"""Runs trainings of another package in several processes, and writes their performance as rows of one CSV file."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

COLUMNS = ("seed", "magnitude", "step", "performance")


def write_trainings(out: Path, train: Callable, jobs: Sequence[tuple], processes: int) -> None:
    """Writes the rows that `train(job)` returns for each job, with COLUMNS, as soon as they are available."""
    with out.open("w", newline="") as file, ProcessPoolExecutor(processes) as pool:
        table = csv.writer(file)
        table.writerow(COLUMNS)
        for number, rows in enumerate(pool.map(train, jobs), 1):
            table.writerows(rows)
            file.flush()
            print(f"{number} of {len(jobs)} trainings", flush=True)
