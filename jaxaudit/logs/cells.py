"""Parses the cells of a log: absent values, numbers (NaN and infinity included) and other texts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxaudit.runtime.errors import UserError
from jaxaudit.runtime.machine import available_host_memory, format_bytes

MEMORY_PER_BYTE = 10
"""An upper bound on the bytes of memory per byte of a file whose cells become Python strings."""

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "nothing"})()
"""Stands for a cell in a row that does not have this column at all."""

STEP_BOUND = 2**62
"""Steps are smaller in magnitude, so that the difference of two steps fits into an int64."""

_ABSENT = frozenset(("", "none", "null", "na", "n/a", "#n/a", "<na>"))
_BOOLEANS = {"true": 1.0, "false": 0.0}
_WRAPPED_SCALAR = re.compile(
    r"(?:torch\.)?(?:tensor|Tensor)\(([^,()\[\]]+)(?:,[^()]*)?\)|(?:np|numpy)\.\w+\(([^,()]*)\)"
)
"""Matches scalars as PyTorch and NumPy print them, for example `tensor(0.5)`."""


def read_complete_lines(path: Path) -> tuple[str, str]:
    """Returns the complete lines of a UTF-8 file, and the stripped text after the last line end.

    Raises:
      UserError: The file is empty, is not UTF-8 text, or does not fit in memory.
    """
    size, free = path.stat().st_size, available_host_memory()
    if MEMORY_PER_BYTE * size > free:
        raise UserError(f"{path} has {format_bytes(size)}, and {format_bytes(free)} of memory are too few to read it")
    data = path.read_bytes()
    if not data.strip():
        raise UserError(f"{path} is empty")
    end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
    try:
        text = data[:end].decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(f"{path}: line {line} is not UTF-8 text") from None
    # The last line may end in the middle of a character of several bytes.
    return text, data[end:].decode("utf-8-sig", errors="replace").strip()


@dataclass(frozen=True)
class LogColumn:
    """The cells of a column as numbers.

    Attributes:
      values: float64 `[R]`; NaN where a cell is absent or a text.
      present: bool `[R]`; whether the row has a cell in this column that is not absent.
      texts: The row number and the text of each cell that is not a number.
    """

    values: np.ndarray
    present: np.ndarray
    texts: tuple[tuple[int, str], ...] = ()

    @classmethod
    def parse(cls, cells: Sequence[Any]) -> LogColumn:
        """Parses cells as a file has them: numbers, texts of numbers, None or MISSING, and any other value as text."""
        try:
            values = np.fromiter(map(float, cells), np.float64, len(cells))
            return cls(values, np.ones(len(cells), bool))
        except (TypeError, ValueError, OverflowError):
            pass
        values, present = np.full(len(cells), math.nan), np.zeros(len(cells), bool)
        texts = []
        for row, cell in enumerate(cells):
            try:
                number = parse_number(cell)
            except ValueError:
                present[row] = True
                texts.append((row, cell if isinstance(cell, str) else repr(cell)))
                continue
            if number is not None:
                values[row], present[row] = number, True
        return cls(values, present, tuple(texts))

    @property
    def is_text(self) -> bool:
        """Whether at least half of the present cells are texts."""
        return bool(self.texts) and 2 * len(self.texts) >= int(self.present.sum())

    def take(self, rows: np.ndarray) -> LogColumn:
        """Returns the column that consists of the given rows, in the given order; its texts lose their row numbers."""
        selected = set(rows.tolist()) if self.texts else set()
        texts = tuple((0, text) for row, text in self.texts if row in selected)
        return LogColumn(self.values[rows], self.present[rows], texts)


def parse_number(cell: Any) -> float | None:
    """Returns the number in a cell or its text, or None if the cell is absent.

    Raises:
      ValueError: The cell is present, and not a number.
    """
    if isinstance(cell, float):
        return cell
    if cell is None or cell is MISSING:
        return None
    if isinstance(cell, str):
        return _parse_text(cell.strip())
    if not isinstance(cell, int):
        raise ValueError("not a number")
    try:
        return float(cell)
    except OverflowError:
        return math.inf if cell > 0 else -math.inf


def _parse_text(text: str) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        pass
    word = text.casefold()
    if word in _BOOLEANS or word in _ABSENT:
        return _BOOLEANS.get(word)
    if len(text) < 200 and (wrapped := _WRAPPED_SCALAR.fullmatch(text)):
        return float(wrapped[1] or wrapped[2])
    raise ValueError("not a number")


def is_number(cell: Any) -> bool:
    """Whether a cell or its text is a number; NaN, infinity, true and false count as numbers."""
    try:
        return parse_number(cell) is not None
    except ValueError:
        return False


def parse_whole_number(cell: Any) -> int | None:
    """Returns the whole number in a cell or its text, such as "5", "5.0" or "5/300", or None if there is none."""
    try:
        if isinstance(cell, str):
            text = cell.strip()
            done, slash, total = text.partition("/")
            if slash and done.strip().isdecimal() and total.strip().isdecimal():
                text = done.strip()
            cell = int(text) if text.lstrip("+-").isdecimal() else float(text)
        number = int(cell)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if number == cell and abs(number) < STEP_BOUND else None


def flatten(entries: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the names and values of nested mappings, with the names joined by "/"."""
    for name, value in entries.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}/")
        else:
            yield prefix + name, value
