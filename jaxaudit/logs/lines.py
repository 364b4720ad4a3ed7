"""The text of a file, and its last line where that is still being written."""

from __future__ import annotations

from pathlib import Path

from jaxaudit.errors import UserError


def text_of(path: Path) -> tuple[str, str]:
    """The complete lines of a UTF-8 file, and what comes after the last line end, blanks apart.

    Raises:
      UserError: it is empty, or not of UTF-8.
    """
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
