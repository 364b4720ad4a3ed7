"""TensorBoard's event files."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxaudit.logs.log import shown
from jaxaudit.logs.record_file import installed, payloads
from jaxaudit.logs.records import Records
from jaxaudit.runtime.errors import UserError

NAME = "tfevents"
"""In the name of every event file."""

MARK = b"brain.Event:"
"""In the first event of every file."""

_STEP = "step"


def records(path: Path) -> Records:
    """The scalars of an event file, or of those in a folder in the order in which these were begun.

    Events of one step in a row make one record, whose "step" is theirs.

    Raises:
      UserError: the package tensorboard is not there; there are no event files or no events; one is damaged.
    """
    files = sorted(file for file in path.iterdir() if NAME in file.name and file.is_file()) if path.is_dir() else [path]
    if not files:
        raise UserError(f"{path} is a folder without TensorBoard's event files (events.out.{NAME}.*)")
    notes: list[str] = []
    begun = [(first, rest) for rest in (_events(file, notes) for file in files) if (first := next(rest, None))]
    if not begun:
        raise UserError(f"{path} has no event that is complete")
    begun.sort(key=lambda file: file[0].wall_time)
    every = itertools.chain.from_iterable(itertools.chain([first], rest) for first, rest in begun)
    rows: list[tuple[int, dict[str, Any]]] = []
    for number, event in enumerate(every, 1):
        for value in event.summary.value:
            if value.tag == _STEP or not value.WhichOneof("value"):
                continue
            if not rows or rows[-1][1][_STEP] != event.step or value.tag in rows[-1][1]:
                rows.append((number, {_STEP: event.step}))
            rows[-1][1][value.tag] = _scalar(value)
    return Records.of_rows("TensorBoard's event files", "event", rows, notes)


def _events(path: Path, notes: list[str]) -> Iterator[Any]:
    """The events of a file; adds a note if the last is cut off."""
    event_pb2 = installed("compat.proto.event_pb2")
    complete, cut_off = payloads(path)
    for number, payload in enumerate(complete, 1):
        try:
            event = event_pb2.Event.FromString(payload)
        except Exception as error:  # DecodeError of protobuf, which is a package of tensorboard's choice
            raise UserError(f"{path}: event {number} is damaged: {shown(str(error))}") from None
        yield event
    if cut_off:
        number = len(complete) + 1
        notes.append(f"event {number} of {path.name} is cut off, as one that is being written, and is left out")


def _scalar(value: Any) -> float | str:
    """A summary's number, as older writers have it or in a tensor without dimensions, as newer; else its kind."""
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return value.simple_value
    if kind != "tensor" or value.tensor.tensor_shape.dim:
        return kind
    if len(value.tensor.float_val) == 1:
        return value.tensor.float_val[0]
    try:
        return float(installed("util.tensor_util").make_ndarray(value.tensor))
    except (KeyError, TypeError, ValueError):
        return kind
