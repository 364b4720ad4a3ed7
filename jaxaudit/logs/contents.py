"""`jaxaudit read`: what was taken for steps, runs, attempts and channels in a log, and what is left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxaudit.logs.log import Log, Series, shown


def contents(log: Log) -> dict[str, Any]:
    """What a log holds, as JSON has it: channels have first and last step, values, usual cadence, values not finite."""
    return {
        "path": str(log.path),
        "format": log.format,
        "step": log.step,
        "runs": [
            {
                "name": run.name,
                "attempts": [
                    {
                        "begins": attempt.begins,
                        "ends": int(attempt.steps[-1]),
                        "channels": {name: _measures(one) for name, one in attempt.series.items()},
                    }
                    for attempt in run.attempts
                ],
            }
            for run in log.runs
        ],
        "left_out": [{"names": list(one.names), "reason": one.reason} for one in log.left_out],
        "notes": list(log.notes),
    }


def _measures(series: Series) -> dict[str, Any]:
    apart = np.diff(series.steps)
    return {
        "first": int(series.steps[0]),
        "last": int(series.steps[-1]),
        "values": len(series.values),
        "every": int(np.sort(apart)[(len(apart) - 1) // 2]) if len(apart) else None,
        "not_finite": int((~np.isfinite(series.values)).sum()),
    }


def table(log: Log) -> Iterator[str]:
    """What `contents` says, as lines of text with a table of channels for each attempt."""
    steps = "rows are counted" if log.step is None else f"steps are '{shown(log.step)}'"
    yield f"{log.path}: {log.format}, {steps}"
    for run in log.runs:
        for number, attempt in enumerate(run.attempts, 1):
            several = f", attempt {number} of {len(run.attempts)}" if len(run.attempts) > 1 else ""
            yield f"  {run.name}{several}: from step {attempt.begins} to {attempt.steps[-1]}"
            rows: list[tuple[str, ...]] = [("channel", "first", "last", "values", "every", "not finite")]
            for name, one in attempt.series.items():
                told = _measures(one).values()
                rows.append((shown(name), *("" if value is None else str(value) for value in told)))
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            for name, *numbers in rows:
                cells = (number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True))
                yield f"    {name.ljust(widths[0])}  {'  '.join(cells)}"
    yield from (f"  {one}" for one in (*log.left_out, *log.notes))
