"""Draws the import graph of the packages: `python picture.py OUT.svg`.

A package is drawn above all that it imports. Transitive arrows are left out: if a imports b and b imports c, no arrow
leads from a to c.
"""

from __future__ import annotations

import argparse
import ast
from collections import defaultdict
from html import escape
from pathlib import Path

from census import imports, package_of, path_of, sources

WIDTH, HEIGHT, BOX_WIDTH, BOX_HEIGHT, GAP = 1000, 92, 148, 52, 14
STYLE = """
  text { font: 13px system-ui, 'Segoe UI', Arial, sans-serif; fill: #1f2430; text-anchor: middle }
  .small { font-size: 10px; fill: #5b6372 }
  rect { fill: #f4f1f5; stroke: #7b2d6b; stroke-width: 1.2; rx: 6 }
  path { fill: none; stroke: #8b929e; stroke-width: 1.1; marker-end: url(#head) }
"""


def graph() -> dict[str, set[str]]:
    """Returns the packages, each with the packages that it imports at run time."""
    trees, packages = sources(), defaultdict(set)
    for module, tree in trees.items():
        for other, for_types in imports(tree, trees):
            importer, imported = package_of(module), package_of(other)
            if "jaxaudit" not in (importer, imported) and importer != "__main__":
                packages[importer] |= set() if for_types or importer == imported else {imported}
                packages[imported] |= set()
    return packages


def reduced(packages: dict[str, set[str]]) -> dict[str, set[str]]:
    """Returns the graph without transitive arrows."""

    def below(name: str) -> set[str]:
        return packages[name] | {lower for imported in packages[name] for lower in below(imported)}

    return {
        name: {imported for imported in imports_of if not any(imported in below(sibling) for sibling in imports_of)}
        for name, imports_of in packages.items()
    }


def rows(packages: dict[str, set[str]]) -> list[list[str]]:
    """Returns the packages by layer, the lowest first; a layer imports only lower layers."""

    def height(name: str) -> int:
        return 1 + max((height(imported) for imported in packages[name]), default=-1)

    layers = defaultdict(list)
    for name in sorted(packages):
        layers[height(name)].append(name)
    return [layers[level] for level in sorted(layers)]


def summary(package: str) -> str:
    """Returns the beginning of a package's docstring, up to the first colon or full stop."""
    text = ast.get_docstring(ast.parse(path_of(f"jaxaudit.{package}").read_text(encoding="utf-8"))) or ""
    for sign in (":", "."):
        text = text.partition(sign)[0]
    return text if len(text) <= 27 else text[:26].rsplit(" ", 1)[0] + " ..."


def arrow(start_name: str, end_name: str, layers: list[list[str]], positions: dict[str, tuple[float, float]]) -> str:
    """Returns the path of an arrow, which passes between the boxes of the layers that it crosses."""
    level = {name: number for number, names in enumerate(layers) for name in names}
    x, y = positions[start_name][0] + BOX_WIDTH / 2, positions[start_name][1] + BOX_HEIGHT
    end = positions[end_name][0] + BOX_WIDTH / 2
    path = f"M{x:.0f} {y:.0f}"
    for crossed in range(level[start_name] - 1, level[end_name] - 1, -1):
        left = [positions[name][0] for name in layers[crossed]]
        top = positions[layers[crossed][0]][1]
        gaps = [start - GAP / 2 for start in left] + [left[-1] + BOX_WIDTH + GAP / 2]
        target = end if crossed == level[end_name] else min(gaps, key=lambda gap: abs(gap - x) + abs(gap - end))
        path += f"C{x:.0f} {(y + top) / 2:.0f} {target:.0f} {(y + top) / 2:.0f} {target:.0f} {top:.0f}"
        x, y = target, top + BOX_HEIGHT
        path += "" if crossed == level[end_name] else f"L{x:.0f} {y:.0f}"
    return path


def picture_svg() -> str:
    """Returns the picture as an SVG document."""
    packages = graph()
    layers, arrows = rows(packages), reduced(packages)
    positions = {}
    for level, names in enumerate(layers):
        span = len(names) * BOX_WIDTH + (len(names) - 1) * GAP
        for number, name in enumerate(names):
            x = (WIDTH - span) / 2 + number * (BOX_WIDTH + GAP)
            positions[name] = (x, 12 + (len(layers) - 1 - level) * HEIGHT)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {24 + len(layers) * HEIGHT}">']
    parts.append(f"<title>Packages of jaxaudit, each above what it imports</title><style>{STYLE}</style>")
    parts.append('<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" ')
    parts.append('orient="auto"><path d="M0 0L8 4L0 8z" style="fill:#8b929e;stroke:none;marker-end:none"/>')
    parts.append("</marker></defs>")
    for name_, imports_of in arrows.items():
        parts += [f'<path d="{arrow(name_, imported, layers, positions)}"/>' for imported in sorted(imports_of)]
    for name, (x, y) in positions.items():
        middle = x + BOX_WIDTH / 2
        parts.append(f'<rect x="{x:.0f}" y="{y:.0f}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}"/>')
        parts.append(f'<text x="{middle:.0f}" y="{y + 22:.0f}">{name}</text>')
        parts.append(f'<text class="small" x="{middle:.0f}" y="{y + 39:.0f}">{escape(summary(name))}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.parse_args().out.write_text(picture_svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
