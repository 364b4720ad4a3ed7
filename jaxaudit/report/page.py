"""The blocks of a report page (text, figures, tables, details), and the writing of the page and its figure files."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import altair as alt
import jinja2
import pandas as pd
from markupsafe import Markup

from jaxaudit.report import style
from jaxaudit.runtime.errors import DrawingFailed, UserError
from jaxaudit.runtime.files import UNFINISHED, claimed, entry_names, locked, remove, write_text

if importlib.util.find_spec("vl_convert") is None:  # it is imported only by the drawing process, but needed there
    raise ModuleNotFoundError("No module named 'vl_convert'", name="vl_convert")

PROGRAM = Path(__file__).with_name("vega_process.py")
"""The script of the process that draws figures."""

NEVER = {"collapse_time", "recovery_time", "recovery_time_median"}
"""Metrics for which infinity means that the event never happened."""

MINUS = "\N{MINUS SIGN}"

INTERACTION = (
    "Click a legend entry to highlight it (shift-click for several). Drag to pan, ctrl + wheel to zoom, double-click "
    "to reset."
)

MAX_VISIBLE_NOTES = 4
"""The most notes above the summary; if there are more, the last ones are in a collapsed list."""

_UNDRAWABLE = re.compile(r"(\\\\)|\\u(?:00[01][0-9a-f]|fff[ef])")
"""JSON escapes of characters that XML, and so SVG, forbids. The first group, escaped backslashes, is left as it is."""

Formatter = Callable[[float], str]


@dataclass(frozen=True)
class Figure:
    """A figure.

    Attributes:
      file: the stem of its file names.
      title: its heading on the page; empty for none.
      chart: the Altair chart.
      caption: the text below it.
    """

    kind: ClassVar[str] = "figure"
    file: str
    title: str
    chart: alt.ConcatChart
    caption: str

    @cached_property
    def spec(self) -> dict[str, Any]:
        """The chart's Vega-Lite JSON, from which both the page's figure and the static files are drawn."""
        return style.specification(self.chart)


@dataclass(frozen=True)
class Cell:
    """A table cell.

    Attributes:
      text: the displayed text.
      interval: the confidence interval, displayed in small print.
      value: the exact value, by which the table is sorted.
      reason: why there is no value; it is displayed as a tooltip.
    """

    text: str
    interval: str = ""
    value: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
      head: the title of each column, and whether the column is numeric.
      rows: the cells of each row.
      notes: numbered footnotes.
      marked: the index of the row to highlight.
      look: its CSS classes.
    """

    kind: ClassVar[str] = "table"
    head: Sequence[tuple[str, bool]]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()
    marked: int | None = None
    look: str = "sortable"


@dataclass(frozen=True)
class Column:
    """A column: its title, the function that makes the cell of a row, and whether the column is numeric."""

    title: str
    cell: Callable[[pd.Series], Cell]
    numeric: bool = True


def table(rows: pd.DataFrame, columns: Sequence[Column], mark: Any = None, **options: Any) -> Table:
    """Returns a table that the reader can sort.

    Args:
      rows: the rows.
      columns: the columns.
      mark: whether to highlight each row; only the first marked one is.
      **options: further fields of the table.
    """
    cells = [[column.cell(row) for column in columns] for _, row in rows.iterrows()]
    marked = next((i for i, flag in enumerate([] if mark is None else mark) if flag), None)
    return Table([(column.title, column.numeric) for column in columns], cells, marked=marked, **options)


def plain_table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> Table:
    """Returns a table of texts that cannot be sorted."""
    return Table([(name, False) for name in head], [[Cell(text) for text in row] for row in rows], look="plain")


def code(text: object) -> Markup:
    """Returns the text in a monospaced font."""
    return Markup("<code>{}</code>").format(text)


def text_column(name: str, title: str = "", formatter: Callable[[Any], str] = str) -> Column:
    """Returns a column of text, whose title is the frame's column name unless another is given."""
    return Column(title or name, lambda row: Cell(formatter(row[name]), value=str(row[name])), numeric=False)


def number_column(name: str, title: str, formatter: Formatter) -> Column:
    """Returns a column of numbers with their intervals; see `estimate` for the frame's columns that it reads."""
    return Column(title, partial(estimate, name=name, formatter=formatter))


def estimate(
    row: pd.Series,
    name: str,
    formatter: Formatter,
    *,
    interval_formatter: Formatter | None = None,
    value: float | None = None,
    reason: str = "not defined here",
) -> Cell:
    """Returns the cell of an estimate, with its interval where there is one.

    Args:
      row: the row of a frame; the interval's ends are in its columns `NAME_low` and `NAME_high`.
      name: the column with the estimate.
      formatter: formats the estimate.
      interval_formatter: formats the interval's ends; by default `formatter`.
      value: the estimate, if no column of that name has it.
      reason: the tooltip of a missing estimate.
    """
    value = float(row[name]) if value is None else value
    if math.isnan(value):
        return Cell("n/a", reason=reason)
    low, high = (float(row.get(f"{name}_{end}", math.nan)) for end in ("low", "high"))
    has_interval = not (math.isnan(low) or math.isnan(high) or (math.isinf(low) and low == high))
    format_end = interval_formatter or formatter
    interval = f"{format_end(low)} to {format_end(high)}" if has_interval else ""
    return Cell(formatter(value), interval, repr(value))


def number(value: float, name: str = "", digits: int = 4) -> str:
    """Returns a number with a few significant digits, or words where a metric's value stands for an event.

    Args:
      value: the number.
      name: the metric, for values such as "never".
      digits: the number of significant digits.
    """
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


def probability(value: float) -> str:
    """Formats a probability or an AUROC with three decimals."""
    return f"{value:.3f}"


def percent(value: float) -> str:
    """Formats a share as a percentage with one decimal."""
    return f"{100 * value:.1f}%"


def signed(value: float) -> str:
    """Formats a difference of shares with its sign and three decimals."""
    if math.isinf(value):
        return f"{'+' if value > 0 else MINUS}\N{INFINITY}"
    return f"{value:+.3f}".replace("-", MINUS)


@dataclass(frozen=True)
class Summary:
    """The results in short.

    Attributes:
      lead: the main result.
      sentences: further results, as a list.
      notes: what the reader has to know before reading the results. If there are more than `MAX_VISIBLE_NOTES`, the
        last ones are in a collapsed list.
      keys: labels and values of key numbers.
    """

    kind: ClassVar[str] = "summary"
    lead: Markup
    sentences: Sequence[Markup] = ()
    notes: Sequence[str] = ()
    keys: Sequence[tuple[str, str]] = ()

    @property
    def visible_notes(self) -> int:
        """The number of notes that are displayed above the results."""
        return len(self.notes) if len(self.notes) <= MAX_VISIBLE_NOTES else MAX_VISIBLE_NOTES - 1


@dataclass(frozen=True)
class TextBlock:
    """Preformatted lines of text, which are shown in a monospaced font."""

    kind: ClassVar[str] = "text"
    text: str


@dataclass(frozen=True)
class Details:
    """Blocks that are collapsed until the reader clicks on their title."""

    kind: ClassVar[str] = "details"
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Token:
    """A token of a dialogue: its text, its CSS classes, and its tooltip."""

    text: str
    look: str
    tooltip: str = ""


@dataclass(frozen=True)
class TokenRow:
    """A row of tokens, and a label to its left, such as the reward."""

    label: str
    tokens: Sequence[Token]


@dataclass(frozen=True)
class Snapshot:
    """Rows of tokens at one training step, with a heading."""

    heading: str
    rows: Sequence[TokenRow]


@dataclass(frozen=True)
class SnapshotsBlock:
    """Snapshots at several training steps, side by side."""

    kind: ClassVar[str] = "snapshots"
    title: str
    snapshots: Sequence[Snapshot]


Block = str | Figure | Table | Summary | TextBlock | Details | SnapshotsBlock
"""A part of a section; a string is a paragraph on how to read the section."""


@dataclass(frozen=True)
class Section:
    """A section of a page.

    Attributes:
      id: its anchor, with which the ids of its figures begin.
      heading: its heading; empty for none.
      short: its name in the navigation bar; empty if it is not listed there.
      intro: one sentence below the heading that says what the section shows.
      blocks: its blocks from top to bottom; None is skipped.
      is_part: whether the heading is that of a part of the page, which the sections that follow belong to.
    """

    id: str
    heading: str
    short: str
    intro: str
    blocks: Sequence[Block | None]
    is_part: bool = False

    @property
    def blocks_with_ids(self) -> list[tuple[Block, str]]:
        """The blocks that are not None, each with an id for its figure: figures that have a title are numbered."""
        blocks = [block for block in self.blocks if block is not None]
        figures = [block for block in blocks if isinstance(block, Figure)]
        ids = {id(figure): f"{self.id}-{n}" if figure.title else self.id for n, figure in enumerate(figures, 1)}
        return [(block, ids.get(id(block), "")) for block in blocks]


@functools.cache
def _texts() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("texts.toml").read_text(encoding="utf-8"))


def section(kind: str, id: str, *blocks: Any, prefix: str = "", is_listed: bool = True) -> Section:
    """Returns a section with the heading and the introduction that `texts.toml` has for it.

    Args:
      kind: the kind of page: "audit", "comparison", "detection" or "monitoring".
      id: the section.
      *blocks: its blocks; None is skipped.
      prefix: the prefix of its anchor.
      is_listed: whether the navigation bar lists it.
    """
    text = _texts()[kind]["sections"][id]
    return Section(prefix + id, text["heading"], text["short"] if is_listed else "", text["intro"], blocks)


def glossary(kind: str, **fields: float) -> list[tuple[str, str]]:
    """Returns the terms and definitions of a kind of page, with its fields filled in."""
    return [(term, text.format(**fields)) for term, text in _texts()[kind]["glossary"].items()]


@dataclass(frozen=True)
class Page:
    """A report.

    Attributes:
      kicker: the kind of report, in small print above the heading.
      heading: the name of what is reported on.
      summary: the results in short.
      sections: the sections; those without blocks are left out.
      glossary: terms and their definitions.
      about: a subtitle.
      source: the source of the definitions.
      version: the version of jaxaudit that made what is reported on.
    """

    kicker: str
    heading: str
    summary: Summary | None
    sections: Iterable[Section]
    glossary: Sequence[tuple[str, str]]
    about: str = ""
    source: str = ""
    version: str = ""

    def write(self, folder: Path) -> Path:
        """Writes `report.html`, `figures/*.svg` and `figures/*.png` into a folder, and returns the page's path.

        The page is one self-contained file that loads nothing. It replaces an earlier one atomically.

        Raises:
          Undrawn: the process that draws figures has failed.
        """
        sections = [section for section in self.sections if section.blocks_with_ids]
        blocks = [block for section in sections for block, _ in section.blocks_with_ids]
        with ThreadPoolExecutor(1) as pool:
            bundle = pool.submit(script)  # a second process bundles the scripts while the first one draws
            write_figures(folder / "figures", [block for block in blocks if isinstance(block, Figure)])
        loader = jinja2.FileSystemLoader(Path(__file__).parent)
        environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
        safe_bundle = Markup(bundle.result().replace("</script", "<\\/script"))
        text = environment.get_template("page.html").render(page=self, sections=sections, bundle=safe_bundle)
        write_text(folder / "report.html", text)
        return folder / "report.html"


def collapsed_list(title: str, values: Sequence[object] | None) -> Details | None:
    """Returns a collapsed list of names with their number in its title, or None if there are none."""
    return Details(f"{title} ({len(values)})", [plain_table([code(value)] for value in values)]) if values else None


def write_figures(folder: Path, figures: Iterable[Figure]) -> None:
    """Writes every figure as `folder/*.svg` and `*.png`, and removes the files of figures that no longer exist.

    A pair of an SVG and a PNG file of the same name is taken for a figure; other files in the folder are kept.

    Raises:
      Undrawn: the process that draws figures has failed; the folder's files are then as they were.
    """
    folder.mkdir(exist_ok=True)
    _remove_unfinished(folder)
    unfinished = folder.with_name(f"{UNFINISHED}{os.getpid()}-{folder.name}")
    with claimed(unfinished):
        _draw(unfinished, ({"file": f.file, "spec": style.static_specification(f.spec, f.title)} for f in figures))
        new = set(entry_names(unfinished))
        old = {path.name for path in folder.glob("*.svg") if path.with_suffix(".png").is_file()}
        for name in sorted(new):
            os.replace(unfinished / name, folder / name)
    for name in old - new:
        (folder / name).unlink()
        (folder / name).with_suffix(".png").unlink()


def _remove_unfinished(folder: Path) -> None:
    """Removes figures that killed processes left unfinished; processes that are still drawing hold a lock on theirs."""
    for path in folder.parent.glob(f"{UNFINISHED}*-{folder.name}"):
        if path.is_dir():
            with suppress(UserError, OSError), locked(path, "these figures"):
                remove(path)


@functools.cache
def script() -> str:
    """Returns Vega, Vega-Lite and Vega-Embed as one JavaScript text.

    Raises:
      Undrawn: the process that bundles them has failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        _draw(Path(folder), [{"bundle": "vega.js"}])
        return (Path(folder) / "vega.js").read_text(encoding="utf-8")


def _draw(folder: Path, requests: Iterable[Mapping[str, Any]]) -> None:
    """Has a process write what is requested into a folder; a request is made while the previous one is drawn."""
    command = [sys.executable, "-P", str(PROGRAM), str(folder)]
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        subprocess.Popen(command, stdin=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdin is not None
        try:
            for request in requests:
                line = _UNDRAWABLE.sub(lambda match: match[1] or r"\ufffd", json.dumps(request))
                process.stdin.write(line + "\n")
                process.stdin.flush()
            process.stdin.close()
            code = process.wait()
        except BrokenPipeError:
            code = process.wait()
        except BaseException:
            process.kill()
            raise
        errors.seek(0)
        messages = errors.read().strip().splitlines()
    if code < 0:
        name = signal.Signals(-code).name
        raise DrawingFailed(f"the process that draws figures was ended by {name}: is the machine out of memory?")
    if code:
        reason = messages[-1] if messages else f"exit code {code}"
        raise DrawingFailed(f"the process that draws figures failed ({reason})")
