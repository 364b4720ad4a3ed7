"""Tables: columns that make cells of rows, each cell with its interval, its exact value, or why it is empty."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pandas as pd
from markupsafe import Markup

NEVER = {"collapse_time", "recovery_time", "recovery_time_median"}
MINUS = "\N{MINUS SIGN}"
Show = Callable[[float], str]


@dataclass(frozen=True)
class Cell:
    """A table cell: what it shows, its interval, the exact value it sorts by, and why it is empty."""

    text: str
    interval: str = ""
    value: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Table:
    """Headings, each with whether it is of numbers, rows, numbered notes to them, the row that stands out, the look."""

    kind: ClassVar[str] = "table"
    head: Sequence[tuple[str, bool]]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()
    marked: int | None = None
    look: str = "sortable"


@dataclass(frozen=True)
class Column:
    """A heading, the cell of a row below it, and whether it is a number."""

    title: str
    cell: Callable[[pd.Series], Cell]
    numeric: bool = True


def table(rows: pd.DataFrame, columns: Sequence[Column], mark: Any = None, **how: Any) -> Table:
    """A table to be sorted by its headings; the first row that is true in `mark` stands out."""
    cells = [[column.cell(row) for column in columns] for _, row in rows.iterrows()]
    place = next((place for place, marked in enumerate([] if mark is None else mark) if marked), None)
    return Table([(column.title, column.numeric) for column in columns], cells, marked=place, **how)


def plain(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> Table:
    """A table of texts, in this order."""
    return Table([(name, False) for name in head], [[Cell(text) for text in row] for row in rows], look="plain")


def code(text: object) -> Markup:
    """Returns the text in a monospaced font."""
    return Markup("<code>{}</code>").format(text)


def word(name: str, title: str = "", show: Callable[[Any], str] = str) -> Column:
    """Returns a column of text."""
    return Column(title or name, lambda row: Cell(show(row[name]), value=str(row[name])), numeric=False)


def figures(name: str, title: str, show: Show, **how: Any) -> Column:
    """A column of figures with their intervals."""
    return Column(title, partial(estimate, name=name, show=show, **how))


def estimate(
    row: pd.Series,
    name: str,
    show: Show,
    *,
    ends: Show | None = None,
    value: float | None = None,
    reason: str = "not defined here",
) -> Cell:
    """The cell of a figure with its interval, where it has one.

    Args:
      row: what holds it.
      name: its column; the interval's ends are in `name`_low and `name`_high.
      show: the figure in words.
      ends: the interval's ends in words; None: as the figure.
      value: the figure, where it is in no column of that name.
      reason: why it is missing, if it is.
    """
    value = float(row[name]) if value is None else value
    if math.isnan(value):
        return Cell("n/a", reason=reason)
    low, high = (float(row.get(f"{name}_{end}", math.nan)) for end in ("low", "high"))
    known = not (math.isnan(low) or math.isnan(high) or (math.isinf(low) and low == high))
    said = ends or show
    return Cell(show(value), f"{said(low)} to {said(high)}" if known else "", repr(value))


def number(value: float, name: str = "", digits: int = 4) -> str:
    """A number with a few significant digits, in words where it stands for something."""
    if math.isnan(value):
        return "n/a"
    if name in NEVER and value == math.inf:
        return "never"
    if name.startswith("recovery_time") and value == -1:
        return "no delay"
    if math.isinf(value):
        return ("" if value > 0 else MINUS) + "\N{INFINITY}"
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value)}".replace("-", MINUS)
    text = f"{value:.{digits}g}"
    if abs(value) < 1e6 and "e+" in text:
        text = f"{float(text):.0f}"
    return text.replace("-", MINUS)


def share(value: float) -> str:
    """Returns a share or a probability as text."""
    return f"{value:.3f}"


def percent(value: float) -> str:
    """Returns a share as text, in percent."""
    return f"{100 * value:.1f}%"


def signed(value: float) -> str:
    """Returns a difference of shares as text, with its sign."""
    if math.isinf(value):
        return f"{'+' if value > 0 else MINUS}\N{INFINITY}"
    return f"{value:+.3f}".replace("-", MINUS)
