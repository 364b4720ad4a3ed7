"""Documents of a corpus: text files, or what the Python installation has."""

from __future__ import annotations

import ast
import hashlib
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

TEXT_FILES = (".txt",)
_NO_SOURCES = ("site-packages", "dist-packages", "test", "tests", "__pycache__")


def python_stdlib() -> Iterator[bytes]:
    """The sources of this Python's standard library, without its tests: some 12 MB of code."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if not set(path.relative_to(root).parts) & set(_NO_SOURCES):
            yield path.read_bytes()


def python_docstrings() -> Iterator[bytes]:
    """The docstrings of these sources, those of a file in a row: some 2 MB of English."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for source in python_stdlib():
        try:
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(source)
        except (SyntaxError, ValueError):  # a template, or of another Python
            continue
        found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented)]
        if any(found):
            yield "\n\n".join(filter(None, found)).encode()


BUILT_IN: dict[str, Callable[[], Iterator[bytes]]] = {
    "python-stdlib": python_stdlib,
    "python-docstrings": python_docstrings,
}
"""Corpora that need no download, by name."""


def documents(name: str) -> list[bytes]:
    """A corpus's documents, in an order that has nothing to do with their names.

    Args:
      name: a built-in corpus, a `.txt` file, or a folder with such files, each of them a document.

    Raises:
      ValueError: there is no such corpus, or nothing in it.
    """
    found = BUILT_IN[name]() if name in BUILT_IN else (path.read_bytes() for path in files(name, TEXT_FILES))
    ordered = sorted((document for document in found if document), key=lambda d: hashlib.sha256(d).digest())
    if not ordered:
        raise ValueError(f"corpus {name!r} is empty")
    return ordered


def files(name: str, suffixes: tuple[str, ...]) -> list[Path]:
    """The file of that name, or all files in the folder, that end so. Raises ValueError if there are none."""
    path = Path(name)
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.suffix in suffixes and p.is_file())
    else:
        found = [path] if path.is_file() and path.suffix in suffixes else []
    if not found:
        what = "has no" if path.is_dir() else "is no" if path.exists() else "is neither a built-in corpus nor a"
        raise ValueError(f"corpus {name!r} {what} {' or '.join(suffixes)} file; built-in: {', '.join(BUILT_IN)}")
    return found
