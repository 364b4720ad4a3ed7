"""What may import what: packages stand in layers, and import only from layers below their own."""

import ast
from pathlib import Path

import jaxaudit
import jaxaudit.kernels

SOURCE = Path(jaxaudit.__file__).parent

LAYERS = (
    ("runtime",),
    ("kernels", "core", "text", "logs"),
    ("models", "tasks", "perturbations", "remedies", "dialogues", "analysis"),
    ("learners", "monitoring"),
    ("spec", "execution"),
    ("runs",),
    ("report",),
    ("cli",),
    ("__main__",),
)
"""The packages under jaxaudit; those of one layer do not import each other."""

LEVEL = {name: level for level, layer in enumerate(LAYERS) for name in layer}


def imported(path):
    """The modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def package(name):
    """The package, right under jaxaudit, of a dotted name; None for others, and for jaxaudit itself."""
    parts = name.split(".")
    return parts[1] if parts[0] == "jaxaudit" and len(parts) > 1 else None


def test_packages_import_only_from_layers_below():
    sources = {path: path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in SOURCE.rglob("*.py")}
    sources |= dict.fromkeys(Path(jaxaudit.kernels.__file__).parent.glob("*.py"), "kernels")
    assert set(sources.values()) - {"__init__"} == set(LEVEL), "every package has its layer"
    wrong = {
        f"{mine} imports {theirs}"
        for path, mine in sources.items()
        if mine != "__init__"
        for theirs in map(package, imported(path))
        if theirs in LEVEL and theirs != mine and LEVEL[theirs] >= LEVEL[mine]
    }
    assert not wrong


def test_only_the_command_line_makes_reports():
    importers = {
        path.relative_to(SOURCE).parts[0]
        for path in SOURCE.rglob("*.py")
        if any(name.startswith("jaxaudit.report") for name in imported(path))
    }
    assert importers == {"cli", "report"}
