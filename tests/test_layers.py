"""The layers of packages: a package imports only from layers below its own."""

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
"""The packages under jaxaudit, from the lowest layer to the highest. Packages of one layer do not import each other."""

LEVEL = {name: level for level, layer in enumerate(LAYERS) for name in layer}


def imported_modules(path):
    """Yields the modules that a file imports at any place."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def top_package(name):
    """Returns the top-level package of jaxaudit that a dotted name belongs to, or None."""
    parts = name.split(".")
    return parts[1] if parts[0] == "jaxaudit" and len(parts) > 1 else None


def test_packages_import_only_from_layers_below():
    sources = {path: path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in SOURCE.rglob("*.py")}
    sources |= dict.fromkeys(Path(jaxaudit.kernels.__file__).parent.glob("*.py"), "kernels")
    assert set(sources.values()) - {"__init__"} == set(LEVEL), "a package has no layer"
    wrong = {
        f"{importer} imports {dependency}"
        for path, importer in sources.items()
        if importer != "__init__"
        for dependency in map(top_package, imported_modules(path))
        if dependency in LEVEL and dependency != importer and LEVEL[dependency] >= LEVEL[importer]
    }
    assert not wrong


def test_only_the_command_line_imports_the_report():
    importers = {
        path.relative_to(SOURCE).parts[0]
        for path in SOURCE.rglob("*.py")
        if any(name.startswith("jaxaudit.report") for name in imported_modules(path))
    }
    assert importers == {"cli", "report"}
