"""Draws the packages and what they import, from the import graph: `python picture.py OUT.svg`.

A package stands above all that it imports. Arrows that follow from others are left out: where a imports b and b imports
c, there is none from a to c.
"""

from __future__ import annotations

import argparse
import ast
from collections import defaultdict
from html import escape
from pathlib import Path

from census import imports, path_of, room, sources

WIDTH, HEIGHT, BOX_WIDTH, BOX_HEIGHT, GAP = 1000, 92, 148, 52, 14
STYLE = """
  text { font: 13px system-ui, 'Segoe UI', Arial, sans-serif; fill: #1f2430; text-anchor: middle }
  .small { font-size: 10px; fill: #5b6372 }
  rect { fill: #f4f1f5; stroke: #7b2d6b; stroke-width: 1.2; rx: 6 }
  path { fill: none; stroke: #8b929e; stroke-width: 1.1; marker-end: url(#head) }
"""


def graph() -> dict[str, set[str]]:
    """The packages, each with the packages that it imports at run time."""
    trees, found = sources(), defaultdict(set)
    for module, tree in trees.items():
        for other, for_types in imports(tree, trees):
            one, two = room(module), room(other)
            if "jaxaudit" not in (one, two) and one != "__main__":
                found[one] |= set() if for_types or one == two else {two}
                found[two] |= set()
    return found


def reduced(found: dict[str, set[str]]) -> dict[str, set[str]]:
    """The graph without the arrows that follow from two or more others."""

    def below(one: str) -> set[str]:
        return found[one] | {name for two in found[one] for name in below(two)}

    return {one: {two for two in twos if not any(two in below(other) for other in twos)} for one, twos in found.items()}


def rows(found: dict[str, set[str]]) -> list[list[str]]:
    """The packages by layer, the lowest first: a layer imports only layers below."""

    def height(one: str) -> int:
        return 1 + max((height(two) for two in found[one]), default=-1)

    layers = defaultdict(list)
    for one in sorted(found):
        layers[height(one)].append(one)
    return [layers[level] for level in sorted(layers)]


def summary(package: str) -> str:
    """The beginning of a package's docstring, up to its first colon or full stop."""
    text = ast.get_docstring(ast.parse(path_of(f"jaxaudit.{package}").read_text(encoding="utf-8"))) or ""
    for sign in (":", "."):
        text = text.partition(sign)[0]
    return text if len(text) <= 27 else text[:26].rsplit(" ", 1)[0] + " ..."


def arrow(one: str, two: str, layers: list[list[str]], place: dict[str, tuple[float, float]]) -> str:
    """The path of an arrow, which passes between the boxes of the layers that it crosses."""
    level = {name: number for number, names in enumerate(layers) for name in names}
    x, y = place[one][0] + BOX_WIDTH / 2, place[one][1] + BOX_HEIGHT
    end = place[two][0] + BOX_WIDTH / 2
    path = f"M{x:.0f} {y:.0f}"
    for crossed in range(level[one] - 1, level[two] - 1, -1):
        left = [place[name][0] for name in layers[crossed]]
        top = place[layers[crossed][0]][1]
        gaps = [start - GAP / 2 for start in left] + [left[-1] + BOX_WIDTH + GAP / 2]
        to = end if crossed == level[two] else min(gaps, key=lambda gap: abs(gap - x) + abs(gap - end))
        path += f"C{x:.0f} {(y + top) / 2:.0f} {to:.0f} {(y + top) / 2:.0f} {to:.0f} {top:.0f}"
        x, y = to, top + BOX_HEIGHT
        path += "" if crossed == level[two] else f"L{x:.0f} {y:.0f}"
    return path


def drawn() -> str:
    """The picture, an SVG document."""
    found = graph()
    layers, arrows = rows(found), reduced(found)
    place = {}
    for level, names in enumerate(layers):
        span = len(names) * BOX_WIDTH + (len(names) - 1) * GAP
        for number, name in enumerate(names):
            x = (WIDTH - span) / 2 + number * (BOX_WIDTH + GAP)
            place[name] = (x, 12 + (len(layers) - 1 - level) * HEIGHT)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {24 + len(layers) * HEIGHT}">']
    parts.append(f"<title>Packages of jaxaudit, each above what it imports</title><style>{STYLE}</style>")
    parts.append('<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" ')
    parts.append('orient="auto"><path d="M0 0L8 4L0 8z" style="fill:#8b929e;stroke:none;marker-end:none"/>')
    parts.append("</marker></defs>")
    for one, twos in arrows.items():
        parts += [f'<path d="{arrow(one, two, layers, place)}"/>' for two in sorted(twos)]
    for name, (x, y) in place.items():
        middle = x + BOX_WIDTH / 2
        parts.append(f'<rect x="{x:.0f}" y="{y:.0f}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}"/>')
        parts.append(f'<text x="{middle:.0f}" y="{y + 22:.0f}">{name}</text>')
        parts.append(f'<text class="small" x="{middle:.0f}" y="{y + 39:.0f}">{escape(summary(name))}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.parse_args().out.write_text(drawn(), encoding="utf-8")


if __name__ == "__main__":
    main()
