"""A page: what stands on it, and the one way in which it and its figures become files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import jinja2
from markupsafe import Markup

from jaxaudit.report.drawing import script, write_figures
from jaxaudit.report.panel import Figure
from jaxaudit.report.tables import Table, code, plain
from jaxaudit.runtime.files import write_text

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
        """How many notes stand above all."""
        return len(self.notes) if len(self.notes) <= MOST_NOTES else MOST_NOTES - 1


@dataclass(frozen=True)
class TextBlock:
    """Lines as they are, in a fixed pitch."""

    kind: ClassVar[str] = "text"
    text: str


@dataclass(frozen=True)
class Details:
    """Blocks to be unfolded."""

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
          Undrawn: the process that draws has failed.
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
