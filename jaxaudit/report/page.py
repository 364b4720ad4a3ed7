"""A page: what stands on it, and the one way in which it and its figures become files."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jinja2
from markupsafe import Markup

from jaxaudit.report import style
from jaxaudit.report.panel import Figure
from jaxaudit.report.tables import Table, code, plain
from jaxaudit.runtime.errors import DrawingFailed, UserError
from jaxaudit.runtime.files import UNFINISHED, claimed, entry_names, locked, remove, write_text

if importlib.util.find_spec("vl_convert") is None:  # imported where it draws, but missed here
    raise ModuleNotFoundError("No module named 'vl_convert'", name="vl_convert")

_UNDRAWABLE = re.compile(r"(\\\\)|\\u(?:00[01][0-9a-f]|fff[ef])")
"""Escapes in JSON of characters that an SVG, being XML, may not have (and, to be kept, backslashes)."""

PROGRAM = Path(__file__).with_name("vega_process.py")


def write_figures(folder: Path, figures: Iterable[Figure]) -> None:
    """Writes every figure as `folder/*.svg` and `*.png`, and removes those of figures that there are no more.

    A figure's two files are known by their common name; other files in the folder are left alone.

    Raises:
      DrawingFailed: the process that draws has failed; the files are as they were.
    """
    folder.mkdir(exist_ok=True)
    _remove_leftovers(folder)
    place = folder.with_name(f"{UNFINISHED}{os.getpid()}-{folder.name}")
    with claimed(place):
        _draw(place, ({"file": one.file, "spec": style.static(one.spec, one.title)} for one in figures))
        drawn = set(entry_names(place))
        earlier = {path.name for path in folder.glob("*.svg") if path.with_suffix(".png").is_file()}
        for name in sorted(drawn):
            os.replace(place / name, folder / name)
    for name in earlier - drawn:
        (folder / name).unlink()
        (folder / name).with_suffix(".png").unlink()


def _remove_leftovers(folder: Path) -> None:
    """Removes the unfinished figures of killed processes. Processes that are drawing hold a lock on theirs."""
    for place in folder.parent.glob(f"{UNFINISHED}*-{folder.name}"):
        if place.is_dir():
            with suppress(UserError, OSError), locked(place, "these figures"):
                remove(place)


@functools.cache
def script() -> str:
    """Vega, Vega-Lite and Vega-Embed in one script.

    Raises:
      DrawingFailed: the process that makes it has failed.
    """
    with tempfile.TemporaryDirectory() as place:
        _draw(Path(place), [{"bundle": "vega.js"}])
        return (Path(place) / "vega.js").read_text(encoding="utf-8")


def _draw(folder: Path, asked: Iterable[Mapping[str, Any]]) -> None:
    """Has a process draw what is asked for into a folder; each is made while the one before is drawn."""
    command = [sys.executable, "-P", str(PROGRAM), str(folder)]
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        subprocess.Popen(command, stdin=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdin is not None
        try:
            for one in asked:
                process.stdin.write(_UNDRAWABLE.sub(lambda found: found[1] or r"\ufffd", json.dumps(one)) + "\n")
                process.stdin.flush()
            process.stdin.close()
            code = process.wait()
        except BrokenPipeError:
            code = process.wait()
        except BaseException:
            process.kill()
            raise
        errors.seek(0)
        said = errors.read().strip().splitlines()
    if code < 0:
        raise DrawingFailed(
            f"the process that draws figures was ended by {signal.Signals(-code).name}: is memory short?"
        )
    if code:
        raise DrawingFailed(f"the process that draws figures failed ({said[-1] if said else f'exit code {code}'})")


HANDLING = "Click a legend entry to single it out (shift-click for several). Drag to pan, ctrl + wheel to zoom, "
HANDLING += "double-click to reset."


MOST_NOTES = 4
"""Notes that stand above the verdict; of more, all but the first ones are in a list to unfold."""


@dataclass(frozen=True)
class Summary:
    """What was found in short: a sentence, those behind it, what to beware of, and the key numbers.

    Where there are more notes than MOST_NOTES, the last ones are in a list that is unfolded.
    """

    kind: ClassVar[str] = "summary"
    lead: Markup
    sentences: Sequence[Markup] = ()
    notes: Sequence[str] = ()
    keys: Sequence[tuple[str, str]] = ()

    @property
    def shown(self) -> int:
        """The number of notes that stand above the page's first section."""
        return len(self.notes) if len(self.notes) <= MOST_NOTES else MOST_NOTES - 1


@dataclass(frozen=True)
class TextBlock:
    """Lines as they are, in a fixed pitch."""

    kind: ClassVar[str] = "text"
    text: str


@dataclass(frozen=True)
class Details:
    """Blocks of the page that the reader can unfold."""

    kind: ClassVar[str] = "details"
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class ShownWord:
    """A token: its text, its CSS classes, and what is told where it is pointed at."""

    text: str
    look: str
    told: str = ""


@dataclass(frozen=True)
class ShownRow:
    """A row of tokens, and what stands at its left."""

    mark: str
    words: Sequence[ShownWord]


@dataclass(frozen=True)
class Shown:
    """Rows at one moment, with its heading."""

    heading: str
    rows: Sequence[ShownRow]


@dataclass(frozen=True)
class RowsSection:
    """Rows of tokens at several moments, side by side."""

    kind: ClassVar[str] = "rows"
    title: str
    moments: Sequence[Shown]


Block = str | Figure | Table | Summary | TextBlock | Details | RowsSection
"""What a section is made of; a string is a hint."""


@dataclass(frozen=True)
class Section:
    """A part of a page.

    Attributes:
      id: its anchor, which begins its figures' names.
      heading: above it.
      short: its name in the list of sections; "" where it has none.
      blocks: one below the other; what is None is left out.
      part: whether sections that follow belong to it.
    """

    id: str
    heading: str
    short: str
    blocks: Sequence[Block | None]
    part: bool = False

    @property
    def placed(self) -> list[tuple[Block, str]]:
        """The blocks there are, each figure with the name of its place; numbered where it has a title of its own."""
        found = [block for block in self.blocks if block is not None]
        figures = [block for block in found if isinstance(block, Figure)]
        names = {id(one): f"{self.id}-{n}" if one.title else self.id for n, one in enumerate(figures, 1)}
        return [(block, names.get(id(block), "")) for block in found]


@dataclass(frozen=True)
class Page:
    """A report.

    Attributes:
      kicker: what kind of report it is.
      heading: of what.
      about: the same in more words.
      summary: at the top.
      sections: those without blocks are left out.
      glossary: terms and what they mean.
      source: where the terms come from.
      version: of jaxaudit, that made what is reported.
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
        """Write `report.html` and its figures, `figures/*.svg|png`, into a folder; the page's path.

        The page is one self-contained file that loads nothing, put in its place at once.

        Raises:
          DrawingFailed: the process that draws has failed.
        """
        sections = [section for section in self.sections if section.placed]
        blocks = [block for section in sections for block, _ in section.placed]
        with ThreadPoolExecutor(1) as pool:
            bundle = pool.submit(script)  # by a process beside the one that draws
            write_figures(folder / "figures", [block for block in blocks if isinstance(block, Figure)])
        loader = jinja2.FileSystemLoader(Path(__file__).parent)
        environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
        text = environment.get_template("page.html").render(page=self, sections=sections, bundle=_safe(bundle.result()))
        write_text(folder / "report.html", text)
        return folder / "report.html"


def listing(title: str, values: Sequence[object] | None) -> Details | None:
    """Names to be unfolded; None where there are none."""
    return Details(f"{title} ({len(values)})", [plain([code(value)] for value in values)]) if values else None


def _safe(script: str) -> Markup:
    """A script that can stand inside a script element."""
    return Markup(script.replace("</script", "<\\/script"))
