"""`jaxaudit sample`: the held-out rows that a run stored, to be read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxaudit.analysis.datasets import find_index
from jaxaudit.analysis.run_reader import (
    CONTROL,
    HeldOutRow,
    RowToken,
    Run,
    has_held_out_rows,
    held_out_rows,
    load,
    nearest_step,
)
from jaxaudit.runtime.errors import UserError

WIDTH = 110
"""Of a line, in characters."""


def sample(folder: Path, seed: int | None = None, condition: str | None = None, step: int | None = None) -> str:
    """The rows of one lane at one step as text: own tokens apart from given ones, with their log-probabilities.

    Args:
      folder: of a run.
      seed: the lane's; None: the first.
      condition: its label or its number; None: the first control.
      step: the nearest measured one is shown; None: the last.

    Raises:
      UserError: the run stored no rows, or has no such seed, condition or step.
    """
    try:
        run = load(folder)
    except (FileNotFoundError, ValueError) as error:
        raise UserError(str(error)) from None
    if not has_held_out_rows(run.telemetry):
        raise UserError(
            f'the run in {folder} stored no held-out rows: a dialogue does, with telemetry = "full" in [audit]'
        )
    seeds = [str(value) for value in run.telemetry["seed"].values]
    labels = list(run.conditions["condition"])
    lane = 0 if seed is None else find_index("seed", seed, seeds)
    controls = [i for i, name in enumerate(run.conditions["perturbation"]) if name == CONTROL]
    column = next(iter(controls), 0) if condition is None else find_index("condition", condition, labels)
    last = int(run.computed[column]) - 1
    if last < 0:
        raise UserError(f"condition '{labels[column]}' has not been trained yet; go on with: jaxaudit resume {folder}")
    asked = last if step is None else step
    if not 0 <= asked <= last:
        raise UserError(f"step must be from 0 to {last}, the last that '{labels[column]}' was trained to, not {step}")
    try:
        place = nearest_step(run.telemetry, asked, last)
    except ValueError as error:
        raise UserError(f"{error}, the last that '{labels[column]}' was trained to") from None
    near = "" if place == asked else f" (the measured step nearest to {asked})"
    heading = f"{run.name}: seed {seeds[lane]}, {labels[column]}, step {place}{near}{_when(run, column, place)}"
    rows = held_out_rows(run.telemetry, lane, column, place)
    parts = [heading, *("\n".join(_row(row, number)) for number, row in enumerate(rows, 1))]
    return "\n\n".join(parts)


def _when(run: Run, column: int, place: int) -> str:
    """Where a step stands beside the condition's onset."""
    row = run.conditions.iloc[column]
    if row["perturbation"] == CONTROL:
        return ""
    after = place - int(row["onset"])
    return f", {-after} before the onset" if after < 0 else f", {after} after the onset"


def _row(row: HeldOutRow, number: int) -> Iterator[str]:
    """A row's lines: one for each turn, with the log-probabilities of own tokens under them."""
    own = [word.log_probability for word in row.tokens if word.is_own]
    yield f"row {number}: reward {row.reward:g}, {len(own)} own tokens of log-probability {sum(own):.2f} together"
    for role, turn in itertools.groupby(row.tokens, key=lambda word: word.role):
        yield from _turn(role, list(turn))


def _turn(role: str, words: Sequence[RowToken]) -> Iterator[str]:
    told = [f"{word.log_probability:.2f}" if word.is_own else "" for word in words]
    shown = ["".join(c if c.isprintable() else "\N{OPEN BOX}" for c in word.text) for word in words]
    widths = [max(len(a), len(b)) for a, b in zip(shown, told, strict=True)]
    begin, first = 0, f"  {role:8}"
    while begin < len(words):
        end, length = begin, len(first)
        while end < len(words) and (end == begin or length + widths[end] + 1 <= WIDTH):
            length += widths[end] + 1
            end += 1
        for start, texts in ((first, shown), (" " * len(first), told)):
            if any(texts[begin:end]):
                line = " ".join(text.ljust(w) for text, w in zip(texts[begin:end], widths[begin:end], strict=True))
                yield f"{start}{line}".rstrip()
        begin, first = end, " " * len(first)
