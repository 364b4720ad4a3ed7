"""Checks the documentation: its prose, and that built pages load nothing from outside.

python docs/check.py           the prose of docs/*.md and README.md
python docs/check.py HTML      and the pages in the folder HTML
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).resolve().parent
MOST_LINES = 6
"""The most lines of up to 120 characters in a paragraph."""
MEAN_WORDS = 25
"""The largest mean number of words in a page's sentences."""

LOADING = re.compile(
    r"<(?:script|img|iframe|source|video|audio|embed)\b[^>]*?\bsrc\s*=\s*[\"']?(https?:)?//"
    r"|<link\b(?=[^>]*\brel\s*=\s*[\"']?(?:stylesheet|preload|preconnect|icon|modulepreload))[^>]*?\bhref\s*=\s*[\"']?(https?:)?//"
    r"|@import\s+(?:url\()?[\"']?(?:https?:)?//"
    r"|url\(\s*[\"']?(?:https?:)?//",
    re.I,
)
"""An element or a rule of a style sheet that loads something from another host."""


def paragraphs(text: str) -> Iterator[str]:
    """Yields the paragraphs and list items of a page's prose, without code, tables, headings and directives."""
    text = re.sub(r"^---\n.*?\n---\n", "", text, flags=re.S)
    text = re.sub(r"^(`{3,}|:{3,}\{(?:list-)?table)[^\n]*\n.*?^(`{3,}|:{3,})\s*$", "\n", text, flags=re.S | re.M)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*+]|\d+\.) )", text):
        lines = [line for line in block.splitlines() if line.strip() and not line.startswith(("    ", "\t", "#", ":"))]
        if lines and not any(line.lstrip().startswith(("|", "<", "![", "(")) for line in lines):
            yield "\n".join(lines)


def sentence_lengths(paragraph: str) -> list[int]:
    """Returns the numbers of words in a paragraph's sentences; a link or a name in code counts as written."""
    plain = re.sub(r"`[^`]*`", "code", paragraph)
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", plain)
    sentences = re.split(r"(?<=[.!?:])\s+(?=[A-Z(*`\"])", " ".join(plain.split()))
    return [len(sentence.split()) for sentence in sentences if len(sentence.split()) > 2]


def prose_faults(path: Path) -> list[str]:
    """Returns a sentence for each paragraph that is too long, and for sentences that are too long on average."""
    faults, lengths = [], []
    for paragraph in paragraphs(path.read_text(encoding="utf-8")):
        lengths += sentence_lengths(paragraph)
        lines = sum(-(-len(line) // 120) for line in paragraph.splitlines())
        if lines > MOST_LINES:
            faults.append(f"{path.name}: a paragraph has {lines} lines: {paragraph[:60]!r}...")
    if lengths and statistics.mean(lengths) > MEAN_WORDS:
        faults.append(f"{path.name}: sentences have {statistics.mean(lengths):.1f} words on average")
    return faults


def outside_loads(html: Path) -> list[str]:
    """Returns a sentence for each element of a built page or style sheet that loads something from another host."""
    return [
        f"{path.relative_to(html)} loads from outside: {match[0][:120]}"
        for path in sorted(html.rglob("*"))
        if path.suffix in (".html", ".css")
        for match in LOADING.finditer(path.read_text(encoding="utf-8"))
    ]


def main() -> int:
    """Prints what is wrong; the exit status is 1 if anything is."""
    faults = [fault for path in [*sorted(DOCS.glob("*.md")), DOCS.parent / "README.md"] for fault in prose_faults(path)]
    for folder in sys.argv[1:]:
        faults += outside_loads(Path(folder))
    print("\n".join(faults) or "no faults")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
