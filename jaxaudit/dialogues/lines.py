"""Prompts and answers from a file of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KEYS = ("prompt", "answer", "demonstration")


@dataclass(frozen=True)
class Line:
    """A prompt, the answer that is wanted, and a text to imitate, which is the answer where there is none of its own.

    Attributes:
      number: of the line in the file, from 1.
    """

    number: int
    prompt: str
    answer: str
    demonstration: str | None = None


def read(file: str) -> list[Line]:
    """The lines of a file, each {"prompt": ..., "answer": ...}, with or without a "demonstration".

    Raises ValueError, with the line's number, for what is none; empty lines are left out.
    """
    try:
        text = Path(file).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"file {file!r} is not UTF-8 text: byte {error.start} cannot be read") from None
    except OSError as error:
        raise ValueError(f"file {file!r} cannot be read: {error.strerror or error}") from None
    lines = list(_lines(file, text))
    if not lines:
        raise ValueError(f"file {file!r} has no lines")
    shown = [line for line in lines if line.demonstration is not None]
    if shown and len(shown) < len(lines):
        bare = next(line for line in lines if line.demonstration is None)
        raise ValueError(f"file {file!r}, line {bare.number}: has no demonstration, and line {shown[0].number} has one")
    return lines


def _lines(file: str, text: str) -> Iterator[Line]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        place = f"file {file!r}, line {number}"
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{place}: is not JSON: {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f'{place}: must be {{"prompt": ..., "answer": ...}}')
        for key in KEYS:
            if key != "demonstration" and key not in values:
                raise ValueError(f"{place}: '{key}' is missing")
            if not isinstance(values.get(key, ""), str):
                raise ValueError(f"{place}: {key} must be a string")
        try:
            yield Line(number, *(values[key].encode().decode() for key in KEYS if key in values))
        except UnicodeEncodeError:
            raise ValueError(f"{place}: has half of a surrogate pair, which is no text") from None
