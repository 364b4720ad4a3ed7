"""Documents of a corpus: text files, or what the Python installation has."""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

TEXT_FILES = (".txt",)
VALIDATION_FILE = re.compile(r"(?<![a-z])val(id(ation)?)?(?![a-z])", re.IGNORECASE)
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


def documents(name: str) -> tuple[list[bytes], list[bytes]]:
    """A corpus's documents to train on, and those to validate on, in an order that has nothing to do with their names.

    Args:
      name: a built-in corpus, a `.txt` file, or a folder with such files, each of them a document; see `files`.

    Raises:
      ValueError: there is no such corpus, or nothing in it.
    """
    found: tuple[Iterable[bytes], ...]
    if name in BUILT_IN:
        found = BUILT_IN[name](), ()
    else:
        found = tuple((path.read_bytes() for path in paths) for paths in files(name, TEXT_FILES))
    train, validation = (sorted(filter(None, part), key=lambda d: hashlib.sha256(d).digest()) for part in found)
    if not train:
        raise ValueError(f"corpus {name!r} is empty")
    return train, validation


def files(name: str, suffixes: tuple[str, ...]) -> tuple[list[Path], list[Path]]:
    """The file of that name, or all files in the folder, that end so; apart from them those to validate on.

    Those are files of a folder with "val", "valid" or "validation" as a word in their names. Raises ValueError if there
    are no files, or none to train on.
    """
    path = Path(name)
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.suffix in suffixes and p.is_file())
    else:
        found = [path] if path.is_file() and path.suffix in suffixes else []
    if not found:
        what = "has no" if path.is_dir() else "is no" if path.exists() else "is neither a built-in corpus nor a"
        raise ValueError(f"corpus {name!r} {what} {' or '.join(suffixes)} file; built-in: {', '.join(BUILT_IN)}")
    apart = [p for p in found if p != path and VALIDATION_FILE.search(p.stem)]
    if len(apart) == len(found):
        raise ValueError(f"corpus {name!r} has files to validate on alone")
    return [p for p in found if p not in apart], apart
