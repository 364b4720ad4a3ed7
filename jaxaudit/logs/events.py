"""Reads the scalars in TensorBoard's event files, without TensorFlow."""

from __future__ import annotations

import functools
import importlib
import itertools
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxaudit.logs.log import shown
from jaxaudit.logs.records import Records
from jaxaudit.runtime.errors import UserError

_HEADER = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")

_LARGEST = 2**16
"""Bytes of a payload whose checksum is computed; larger ones are images and graphs."""


def payloads(path: Path) -> tuple[list[bytes], bool]:
    """The records of a file, and whether there is the beginning of one more.

    The package's own reader computes checksums byte by byte in Python, a minute for a million scalars, and ends at a
    damaged record in silence.

    Raises:
      UserError: the package tensorboard is not there, or a record is damaged.
    """
    data, at = path.read_bytes(), 0
    begins: list[int] = []
    ends: list[int] = []
    while at + _HEADER.size <= len(data):
        length, checksum = _HEADER.unpack_from(data, at)
        if _length_checksum(data[at : at + 8]) != checksum:
            raise UserError(f"{path}: event {len(ends) + 1} is damaged, or this is no event file of TensorBoard")
        begin = at + _HEADER.size
        if begin + length + _CHECKSUM.size > len(data):
            break
        begins.append(begin)
        ends.append(begin + length)
        at = ends[-1] + _CHECKSUM.size
    small = [number for number, (begin, end) in enumerate(zip(begins, ends, strict=True)) if end - begin <= _LARGEST]
    there = [_CHECKSUM.unpack_from(data, ends[number])[0] for number in small]
    computed = checksums(data, np.array(begins, np.int64)[small], np.array(ends, np.int64)[small])
    (damaged,) = np.nonzero(computed != np.array(there, np.uint32))
    if len(damaged):
        raise UserError(f"{path}: event {small[damaged[0]] + 1} is damaged: it does not have its checksum")
    return [data[begin:end] for begin, end in zip(begins, ends, strict=True)], at < len(data)


def checksums(data: bytes, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Masked CRC-32C of n parts of `data`, uint32 `[n]`, all at once byte by byte; where they begin and end `[n]`."""
    table = np.array(installed("compat.tensorflow_stub.pywrap_tensorflow").CRC_TABLE, np.uint32)
    octets = np.frombuffer(data, np.uint8)
    order = np.argsort(begins - ends, kind="stable")
    longest_first = (begins - ends)[order]
    place, crc = begins[order], np.full(len(order), 0xFFFFFFFF, np.uint32)
    for at in range(-int(longest_first[0]) if len(order) else 0):
        n = np.searchsorted(longest_first, -at)
        crc[:n] = table[(crc[:n] ^ octets[place[:n] + at]) & 0xFF] ^ (crc[:n] >> 8)
    crc = ~crc
    masked = np.empty_like(crc)
    masked[order] = ((crc >> 15) | (crc << 17)) + np.uint32(0xA282EAD8)
    return masked


@functools.cache
def _length_checksum(length: bytes) -> int:
    return installed("compat.tensorflow_stub.pywrap_tensorflow").masked_crc32c(length)


def installed(module: str) -> Any:
    """A module of the package tensorboard. Raises UserError if it is not installed."""
    try:
        return importlib.import_module(f"tensorboard.{module}")
    except ImportError:
        raise UserError(
            'TensorBoard\'s event files are read with the package tensorboard: pip install "jaxaudit[tensorboard]"'
        ) from None


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
