"""Cells of a log: absent, a number, or a text; NaN and infinity are numbers that are not finite."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxaudit.runtime.errors import UserError
from jaxaudit.runtime.machine import available_host_memory, format_bytes

CELLS = 10
"""Bytes in memory for a byte of text whose cells are Python's strings, at most."""


def text_of(path: Path) -> tuple[str, str]:
    """The complete lines of a UTF-8 file, and what comes after the last line end, blanks apart.

    Raises:
      UserError: it is empty, not of UTF-8, or larger than what fits in memory.
    """
    size, free = path.stat().st_size, available_host_memory()
    if CELLS * size > free:
        raise UserError(f"{path} has {format_bytes(size)}, and {format_bytes(free)} of memory are too few to read it")
    data = path.read_bytes()
    if not data.strip():
        raise UserError(f"{path} is empty")
    end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
    try:
        text = data[:end].decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(f"{path}: line {line} is not text in UTF-8") from None
    # A character of several bytes may be cut off, too.
    return text, data[end:].decode("utf-8-sig", errors="replace").strip()


MISSING: Any = type("Missing", (), {"__repr__": lambda self: "nothing"})()
"""In the place of a cell that a row has not."""

STEP_BOUND = 2**62
"""Below it, the difference of two steps is still an int64."""

_ABSENT = frozenset(("", "none", "null", "na", "n/a", "#n/a", "<na>"))
_TRUTH = {"true": 1.0, "false": 0.0}
_WRAPPED = re.compile(r"(?:torch\.)?(?:tensor|Tensor)\(([^,()\[\]]+)(?:,[^()]*)?\)|(?:np|numpy)\.\w+\(([^,()]*)\)")
"""As PyTorch and NumPy write their scalars."""


@dataclass(frozen=True)
class LogColumn:
    """A column's cells as numbers.

    Attributes:
      values: float64 `[R]`: NaN where there is none, or a text.
      present: bool `[R]`: which rows have a cell that is not absent.
      odd: of each row with a text its number and the text.
    """

    values: np.ndarray
    present: np.ndarray
    odd: tuple[tuple[int, str], ...] = ()

    @classmethod
    def of(cls, cells: Sequence[Any]) -> LogColumn:
        """Parses cells as they come from a file: numbers, texts of numbers, None, and anything else as odd."""
        try:
            values = np.fromiter(map(float, cells), np.float64, len(cells))
            return cls(values, np.ones(len(cells), bool))
        except (TypeError, ValueError, OverflowError):
            pass
        values, present = np.full(len(cells), math.nan), np.zeros(len(cells), bool)
        odd = []
        for row, cell in enumerate(cells):
            try:
                number = number_of(cell)
            except ValueError:
                present[row] = True
                odd.append((row, cell if isinstance(cell, str) else repr(cell)))
                continue
            if number is not None:
                values[row], present[row] = number, True
        return cls(values, present, tuple(odd))

    @property
    def is_text(self) -> bool:
        """Whether at least half of the cells that are there are texts."""
        return bool(self.odd) and 2 * len(self.odd) >= int(self.present.sum())


def number_of(cell: Any) -> float | None:
    """The number that a cell or its text is; None where it is absent.

    Raises:
      ValueError: it is something else.
    """
    if isinstance(cell, float):
        return cell
    if cell is None or cell is MISSING:
        return None
    if isinstance(cell, str):
        return _number_in(cell.strip())
    if not isinstance(cell, int):
        raise ValueError("not a number")
    try:
        return float(cell)
    except OverflowError:
        return math.inf if cell > 0 else -math.inf


def _number_in(text: str) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        pass
    word = text.casefold()
    if word in _TRUTH or word in _ABSENT:
        return _TRUTH.get(word)
    if len(text) < 200 and (wrapped := _WRAPPED.fullmatch(text)):
        return float(wrapped[1] or wrapped[2])
    raise ValueError("not a number")


def is_number(cell: Any) -> bool:
    """Whether a cell or its text is a number: NaN and infinity are, and so is what is true or false."""
    try:
        return number_of(cell) is not None
    except ValueError:
        return False


def whole_number(cell: Any) -> int | None:
    """The whole number that a cell or its text is, as "5" or "5/300"; else None."""
    try:
        if isinstance(cell, str):
            text = cell.strip()
            done, of, total = text.partition("/")
            if of and done.strip().isdecimal() and total.strip().isdecimal():
                text = done.strip()
            cell = int(text) if text.lstrip("+-").isdecimal() else float(text)
        whole = int(cell)
    except (TypeError, ValueError, OverflowError):
        return None
    return whole if whole == cell and abs(whole) < STEP_BOUND else None
