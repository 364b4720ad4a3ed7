"""What may import what."""

import ast
from pathlib import Path

import jaxaudit

SOURCE = Path(jaxaudit.__file__).parent


def imported(path):
    """The modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_only_the_command_line_makes_reports():
    importers = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if any(name.startswith("jaxaudit.report") for name in imported(path))
    }
    assert "cli.py" in importers
    assert {name for name in importers if not name.startswith("report/")} == {"cli.py"}
