"""The text of a file, and its last line where that is still being written."""

from __future__ import annotations

from pathlib import Path

from jaxaudit.runtime.errors import UserError
from jaxaudit.runtime.machine import host_memory, readable

CELLS = 10
"""Bytes in memory for a byte of text whose cells are Python's strings, at most."""


def text_of(path: Path) -> tuple[str, str]:
    """The complete lines of a UTF-8 file, and what comes after the last line end, blanks apart.

    Raises:
      UserError: it is empty, not of UTF-8, or larger than what fits in memory.
    """
    size, free = path.stat().st_size, host_memory()
    if CELLS * size > free:
        raise UserError(f"{path} has {readable(size)}, and {readable(free)} of memory are too few to read it")
    data = path.read_bytes()
    if not data.strip():
        raise UserError(f"{path} is empty")
    end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
    try:
        text = data[:end].decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(f"{path}: line {line} is not text in UTF-8") from None
    # A character of several bytes may be cut off, too.
    return text, data[end:].decode("utf-8-sig", errors="replace").strip()
