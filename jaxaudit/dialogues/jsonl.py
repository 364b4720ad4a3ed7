"""Prompts and answers from a file of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEMONSTRATION = "demonstration"

MOST_SHOWN = 40
"""Characters of a value, and a line's fields, that a sentence shows."""


@dataclass(frozen=True)
class JsonlRecord:
    """A prompt, the answer that is wanted, and a text to imitate, which is the answer where there is none of its own.

    Attributes:
      number: of the line in the file, from 1.
    """

    number: int
    prompt: str
    answer: str
    demonstration: str | None = None


@dataclass(frozen=True)
class Form:
    """Where in a line its texts are.

    Attributes:
      prompt, answer: names of the fields.
      after: what the answer that is wanted stands behind in its field; "": it is all of it.
      whole: whether all of the field is imitated then.
    """

    prompt: str = "prompt"
    answer: str = "answer"
    after: str = ""
    whole: bool = True


def read(file: str, form: Form | None = None) -> list[JsonlRecord]:
    """The lines of a file, each {"prompt": ..., "answer": ...}, with or without a "demonstration".

    Raises ValueError, with the line's number, for what is none; empty lines are left out.
    """
    try:
        text = Path(file).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"file {file!r} is not UTF-8 text: byte {error.start} cannot be read") from None
    except OSError as error:
        raise ValueError(f"file {file!r} cannot be read: {error.strerror or error}") from None
    lines = list(_lines(file, text, form or Form()))
    if not lines:
        raise ValueError(f"file {file!r} has no lines")
    shown = [line for line in lines if line.demonstration is not None]
    if shown and len(shown) < len(lines):
        bare = next(line for line in lines if line.demonstration is None)
        raise ValueError(f"file {file!r}, line {bare.number}: has no demonstration, and line {shown[0].number} has one")
    return lines


def _lines(file: str, text: str, form: Form) -> Iterator[JsonlRecord]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield _line(number, line, form)
        except UnicodeEncodeError:
            raise ValueError(f"file {file!r}, line {number}: has half of a surrogate pair, which is no text") from None
        except ValueError as error:
            raise ValueError(f"file {file!r}, line {number}: {error}") from None


def _line(number: int, line: str, form: Form) -> JsonlRecord:
    prompt, answer, *others = _texts(_values(line, form), form)
    if not form.after:
        return JsonlRecord(number, prompt, answer, *others)
    _, mark, wanted = answer.rpartition(form.after)
    if not mark:
        raise ValueError(f"{form.answer} has no {form.after!r}, which answer_after names")
    return JsonlRecord(number, prompt, wanted.strip(), *(others or ([answer] if form.whole else [])))


def _values(line: str, form: Form) -> dict[str, Any]:
    """The JSON object that a line is. Raises ValueError, in words for the end of a sentence, where it is none."""
    wanted = f'{{"{form.prompt}": ..., "{form.answer}": ...}}'
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        if line.lstrip().startswith("["):
            raise ValueError(f"must be {wanted}, and not begin an array: write one object in each line") from None
        raise ValueError(f"is not JSON: {error}") from None
    if isinstance(values, list):
        raise ValueError(f"must be {wanted}, not an array: write one object in each line")
    if not isinstance(values, dict):
        raise ValueError(f"must be {wanted}")
    return values


def _texts(values: dict[str, Any], form: Form) -> Iterator[str]:
    """The prompt, the answer, and the demonstration where there is one."""
    for setting, key in (("prompt_field", form.prompt), ("answer_field", form.answer)):
        if key not in values:
            raise ValueError(f"'{key}' is missing{_instead(values, setting)}")
    for key in (form.prompt, form.answer, DEMONSTRATION):
        if not isinstance(values.get(key, ""), str):
            raise ValueError(_no_text(key, values[key]))
        if key in values:
            yield values[key].encode().decode()


def _instead(values: dict[str, Any], setting: str) -> str:
    """What a line has where a field is missing."""
    others = [key for key in values if key != DEMONSTRATION][:MOST_SHOWN]
    for key in others:
        if _is_chat(values[key]):
            return f", and {_no_text(repr(key[:MOST_SHOWN]), values[key])}"
    names = ", ".join(repr(key[:MOST_SHOWN]) for key in others[:5])
    return f": {setting} can name another field, and there are {names}" if others else ""


def _no_text(key: str, value: Any) -> str:
    if _is_chat(value):
        return f"{key} must be a string, not chat messages: write what the model reads, the chat's template applied"
    if isinstance(value, list | dict):
        return f"{key} must be a string, not {'an array' if isinstance(value, list) else 'an object'}"
    shown = json.dumps(value)[:MOST_SHOWN]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f'{key} must be a string, not a number: write "{shown}"'
    return f"{key} must be a string, not {shown}"


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) and "role" in one for one in value)
