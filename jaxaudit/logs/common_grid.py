"""Several runs' logs on one grid of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr

from jaxaudit.errors import UserError
from jaxaudit.logs.log import Log, has_no, listed

_FEWEST = 10
"""Rows from which a log's own spacing is told."""

_OFF = 0.1
"""Share of a log's rows that may be off the grid and are left out, as a first step 1 before 10, 20 and so on."""

_MOST = 2**29
"""Values that are put together: 2 GiB of them."""


@dataclass(frozen=True)
class _Run:
    """A log's chosen channels: int64 steps `[T]`, values `[T, d]`, and which steps have any value, `[T]`."""

    path: str
    steps: np.ndarray
    values: np.ndarray
    seen: np.ndarray

    @classmethod
    def of(cls, log: Log, names: Sequence[str]) -> _Run:
        values = log.values[:, [log.channels.index(name) for name in names]]
        return cls(str(log.path), log.steps, values, ~np.isnan(values).all(axis=1))

    @property
    def apart(self) -> np.ndarray:
        """Differences of the steps that have values."""
        return np.diff(self.steps[self.seen])


def together(logs: Sequence[Log], channels: Sequence[str] | None = None) -> xr.DataArray:
    """Several runs' telemetry, float32 along "run", "step" and "channel"; NaN where a run has none.

    The steps go from the first of any run to the last of any, apart as most are that follow each other in the logs. A
    run's few rows at other steps are left out, with a sentence for each such run in the attribute "notes".

    Args:
      logs: of the runs.
      channels: to take; None: those in all logs.

    Raises:
      UserError: there are no logs; a channel is not in one of them, or none is in all; their steps do not match.
    """
    if not logs:
        raise UserError("there must be at least one log, and there is none")
    names = _names(logs, channels)
    runs = [_Run.of(log, names) for log in logs]
    spacing = _spacing(runs)
    phase = _most_common(np.concatenate([run.steps for run in runs]) % spacing)
    rows = [_on_grid(run, spacing, phase) for run in runs]
    first = min(int(run.steps[on][0]) for run, on in zip(runs, rows, strict=True))
    last = max(int(run.steps[on][-1]) for run, on in zip(runs, rows, strict=True))
    length = (last - first) // spacing + 1
    if len(runs) * length * len(names) > _MOST:
        raise UserError(f"steps {first} to {last}, every {spacing}, of {len(runs)} logs are too many to put together")
    values = np.full((len(runs), length, len(names)), np.nan, np.float32)
    with np.errstate(over="ignore"):
        for lane, (run, on) in enumerate(zip(runs, rows, strict=True)):
            values[lane, (run.steps[on] - first) // spacing] = run.values[on]
    coords = {
        "run": [run.path for run in runs],
        "step": first + spacing * np.arange(length, dtype=np.int64),
        "channel": names,
    }
    notes = tuple(note for run, on in zip(runs, rows, strict=True) for note in _notes(run, on, spacing))
    return xr.DataArray(values, coords, ("run", "step", "channel"), attrs={"notes": notes})


def _names(logs: Sequence[Log], channels: Sequence[str] | None) -> list[str]:
    if channels is None:
        common = [name for name in logs[0].channels if all(name in log.channels for log in logs)]
        if not common:
            each = "; ".join(f"{log.path} has {listed(log.channels)}" for log in logs)
            raise UserError(f"no channel is in all logs: {each}")
        return common
    for log in logs:
        for name in channels:
            if name not in log.channels:
                raise UserError(f"{log.path} {has_no('channel', name, log.channels)}")
    return list(dict.fromkeys(channels))


def _spacing(runs: Sequence[_Run]) -> int:
    """How far most steps of all runs are apart.

    Raises:
      UserError: one run's are mostly otherwise.
    """
    apart = np.concatenate([run.apart for run in runs])
    if not len(apart):
        apart = np.diff(np.unique(np.concatenate([run.steps for run in runs])))
    spacing = _most_common(apart) if len(apart) else 1
    for run in runs:
        own = _most_common(run.apart) if len(run.apart) >= _FEWEST else spacing
        if own != spacing:
            raise UserError(
                f"{run.path} has values every {own} steps, and the logs together every {spacing}; "
                "they must have the same spacing"
            )
    return spacing


def _most_common(numbers: np.ndarray) -> int:
    """The least of those that are there most often."""
    different, times = np.unique(numbers, return_counts=True)
    return int(different[np.argmax(times)])


def _on_grid(run: _Run, spacing: int, phase: int) -> np.ndarray:
    """Which of a run's steps are on the grid, `[T]`.

    Raises:
      UserError: too few of them.
    """
    on = run.steps % spacing == phase
    off = run.steps[run.seen & ~on]
    if not on.any() or len(off) > max(1, _OFF * run.seen.sum()):
        step = int((off if len(off) else run.steps)[0])
        before = step - (step - phase) % spacing
        raise UserError(
            f"{run.path} has a row at step {step}, and the logs together have steps {before} and {before + spacing}; "
            "they must have the same steps"
        )
    return on


def _notes(run: _Run, on: np.ndarray, spacing: int) -> list[str]:
    off = run.steps[run.seen & ~on]
    if not len(off):
        return []
    return [
        f"{run.path}: left out, as off the grid of every {spacing} steps: {len(off)} rows, the first at step {off[0]}"
    ]
