"""What may import what."""

import ast
from pathlib import Path

import jaxaudit.kernels

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


LAYERS = (
    (
        "source_tree",
        "errors",
        "channel_names",
        "files",
        "text_table",
        "environment",
        "npz",
        "machine",
        "zarr_store",
        "interrupts",
        "hosts",
        "backends",
    ),
    ("moments", "registry", "sharding", "paths", "tracing", "precision", "kernels"),
    ("perturbations", "remedies", "taps", "contract", "learner", "optimizer", "sites", "metrics", "statistics"),
    ("remedied_learner",),
    ("task_kinds", "tasks", "text", "models", "dialogues", "learners"),
    ("program", "slots", "grid", "batches", "placing", "whole"),
    ("metastate", "datasets", "results", "execution", "auditing"),
    ("specification", "runner", "margins"),
    ("logs", "stored", "variants", "held_out_rows", "sample", "detection", "report", "listing", "cli", "__main__"),
)
ORDER = [name for layer in LAYERS for name in layer]
"""Modules and packages, each of which imports only what stands before it."""


def package(name):
    """The module or package, right under jaxaudit, of a dotted name; None for others, and for jaxaudit itself."""
    parts = name.split(".")
    return parts[1] if parts[0] == "jaxaudit" and len(parts) > 1 else None


def test_nothing_imports_upward():
    sources = {path: path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in SOURCE.rglob("*.py")}
    kernels = Path(jaxaudit.kernels.__file__).parent
    sources |= dict.fromkeys(kernels.glob("*.py"), "kernels")
    known = {name for name in sources.values() if name != "__init__"}
    assert known == set(ORDER), "every module has its place"
    upward = {
        f"{mine} imports {theirs}"
        for path, mine in sources.items()
        if mine != "__init__"
        for theirs in map(package, imported(path))
        if theirs in known and ORDER.index(theirs) > ORDER.index(mine)
    }
    assert not upward
