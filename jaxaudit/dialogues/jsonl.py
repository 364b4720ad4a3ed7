"""Reads prompts, answers and demonstrations from a file of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEMONSTRATION = "demonstration"

MAX_SHOWN = 40
"""The largest number of characters of a value, and of fields of a line, that an error shows."""


@dataclass(frozen=True)
class JsonlRecord:
    """The texts of one line, whose repr must not change, because it is hashed into the content of a dialogue.

    Attributes:
      number: The number of the line in the file, from 1.
      prompt: The prompt.
      answer: The right answer.
      demonstration: The text to imitate; None to imitate the answer.
    """

    number: int
    prompt: str
    answer: str
    demonstration: str | None = None


@dataclass(frozen=True)
class LineFormat:
    """Where the texts of a line are.

    Attributes:
      prompt: The name of the prompt's field.
      answer: The name of the answer's field.
      answer_after: The mark that the right answer follows in its field; "" if the field is the answer.
      imitate_field: Whether the whole field is the demonstration if there is such a mark.
    """

    prompt: str = "prompt"
    answer: str = "answer"
    answer_after: str = ""
    imitate_field: bool = True


def read(file: str, line_format: LineFormat) -> list[JsonlRecord]:
    """Returns the lines of a file, each a prompt and an answer with or without a "demonstration"; skips empty lines.

    Raises:
      ValueError: The file cannot be read, or a line, whose number the message has, is malformed.
    """
    try:
        text = Path(file).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"file {file!r} is not UTF-8 text: byte {error.start} cannot be read") from None
    except OSError as error:
        raise ValueError(f"file {file!r} cannot be read: {error.strerror or error}") from None
    records = list(_records(file, text, line_format))
    if not records:
        raise ValueError(f"file {file!r} has no lines")
    demonstrated = [record.number for record in records if record.demonstration is not None]
    missing = [record.number for record in records if record.demonstration is None]
    if demonstrated and missing:
        raise ValueError(f"file {file!r}, line {missing[0]}: has no demonstration, but line {demonstrated[0]} has one")
    return records


def _records(file: str, text: str, line_format: LineFormat) -> Iterator[JsonlRecord]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield _record(number, line, line_format)
        except UnicodeEncodeError:
            raise ValueError(f"file {file!r}, line {number}: has half of a surrogate pair, which is not text") from None
        except ValueError as error:
            raise ValueError(f"file {file!r}, line {number}: {error}") from None


def _record(number: int, line: str, line_format: LineFormat) -> JsonlRecord:
    prompt, field, *demonstration = _texts(_values(line, line_format), line_format)
    if not line_format.answer_after:
        return JsonlRecord(number, prompt, field, *demonstration)
    _, mark, answer = field.rpartition(line_format.answer_after)
    if not mark:
        raise ValueError(f"{line_format.answer} has no {line_format.answer_after!r}, which answer_after names")
    if not demonstration and line_format.imitate_field:
        demonstration = [field]
    return JsonlRecord(number, prompt, answer.strip(), *demonstration)


def _values(line: str, line_format: LineFormat) -> dict[str, Any]:
    """Returns the JSON object of a line. Raises ValueError, whose message is a predicate, if there is none."""
    expected = f'{{"{line_format.prompt}": ..., "{line_format.answer}": ...}}'
    is_array = line.lstrip().startswith("[")
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        if not is_array:
            raise ValueError(f"is not JSON: {error}") from None
    if is_array:
        raise ValueError(f"must be {expected}, not an array: write one object in each line")
    if not isinstance(values, dict):
        raise ValueError(f"must be {expected}")
    return values


def _texts(values: dict[str, Any], line_format: LineFormat) -> Iterator[str]:
    """Yields the prompt, the answer, and the demonstration if there is one."""
    for setting, key in (("prompt_field", line_format.prompt), ("answer_field", line_format.answer)):
        if key not in values:
            raise ValueError(f"'{key}' is missing{_other_fields(values, setting)}")
    for key in (line_format.prompt, line_format.answer, DEMONSTRATION):
        if not isinstance(values.get(key, ""), str):
            raise ValueError(_not_a_string(key, values[key]))
        if key in values:
            yield values[key].encode().decode()  # raises UnicodeEncodeError for half of a surrogate pair


def _other_fields(values: dict[str, Any], setting: str) -> str:
    """Returns the end of the error for a missing field, which names the fields that a setting could name instead."""
    others = [key for key in values if key != DEMONSTRATION][:MAX_SHOWN]
    for key in others:
        if _is_chat(values[key]):
            return f", and {_not_a_string(repr(key[:MAX_SHOWN]), values[key])}"
    names = ", ".join(repr(key[:MAX_SHOWN]) for key in others[:5])
    return f": {setting} can name another field; the line has {names}" if others else ""


def _not_a_string(key: str, value: Any) -> str:
    if _is_chat(value):
        return f"{key} must be a string, not chat messages: write what the model reads, the chat's template applied"
    if isinstance(value, list | dict):
        return f"{key} must be a string, not {'an array' if isinstance(value, list) else 'an object'}"
    shown = json.dumps(value)[:MAX_SHOWN]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f'{key} must be a string, not a number: write "{shown}"'
    return f"{key} must be a string, not {shown}"


def _is_chat(value: Any) -> bool:
    messages = value if isinstance(value, list) else []
    return bool(messages) and all(isinstance(message, dict) and "role" in message for message in messages)
