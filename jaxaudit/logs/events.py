"""Reads the scalars of TensorBoard's event files, without TensorFlow."""

from __future__ import annotations

import functools
import importlib
import itertools
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxaudit.logs.log import shorten
from jaxaudit.logs.records import Records
from jaxaudit.runtime.errors import UserError

FILE_MARK = "tfevents"
"""Part of the name of every event file."""

CONTENT_MARK = b"brain.Event:"
"""Part of the first event of every event file."""

_HEADER = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")

_MAX_CHECKED = 2**16
"""Bytes of the largest payload whose checksum is verified; larger ones are images and graphs."""

_STEP = "step"


def read_events(path: Path) -> Records:
    """Reads the scalars of an event file, or of all event files in a folder in the order in which they were begun.

    Consecutive events of one step make one row, with the step as its column "step".

    Raises:
      UserError: The package tensorboard is not installed, there are no event files or no events, or one is damaged.
    """
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if FILE_MARK in file.name and file.is_file())
    if not files:
        raise UserError(f"{path} is a folder without TensorBoard's event files (events.out.{FILE_MARK}.*)")
    notes: list[str] = []
    streams = [(first, rest) for rest in (_events(file, notes) for file in files) if (first := next(rest, None))]
    if not streams:
        raise UserError(f"{path} has no complete event")
    streams.sort(key=lambda stream: stream[0].wall_time)
    events = itertools.chain.from_iterable(itertools.chain([first], rest) for first, rest in streams)
    rows: list[tuple[int, dict[str, Any]]] = []
    for number, event in enumerate(events, 1):
        for value in event.summary.value:
            if value.tag == _STEP or not value.WhichOneof("value"):
                continue
            if not rows or rows[-1][1][_STEP] != event.step or value.tag in rows[-1][1]:
                rows.append((number, {_STEP: event.step}))
            rows[-1][1][value.tag] = _scalar(value)
    return Records.from_rows("TensorBoard's event files", "event", rows, notes)


def _events(path: Path, notes: list[str]) -> Iterator[Any]:
    """Yields the events of a file, and appends a note if the last one is cut off."""
    event_pb2 = import_tensorboard("compat.proto.event_pb2")
    payloads, is_cut_off = read_payloads(path)
    for number, payload in enumerate(payloads, 1):
        try:
            event = event_pb2.Event.FromString(payload)
        except Exception as error:  # protobuf's DecodeError; tensorboard chooses which protobuf package that is
            raise UserError(f"{path}: event {number} is damaged: {shorten(str(error))}") from None
        yield event
    if is_cut_off:
        number = len(payloads) + 1
        notes.append(f"event {number} of {path.name} is cut off, as if it were still being written, and is left out")


def _scalar(value: Any) -> float | str:
    """Returns the number of a summary value (older writers) or of its scalar tensor (newer ones), or else its kind."""
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return value.simple_value
    if kind != "tensor" or value.tensor.tensor_shape.dim:
        return kind
    if len(value.tensor.float_val) == 1:
        return value.tensor.float_val[0]
    try:
        return float(import_tensorboard("util.tensor_util").make_ndarray(value.tensor))
    except (KeyError, TypeError, ValueError):
        return kind


def read_payloads(path: Path) -> tuple[list[bytes], bool]:
    """Returns the payloads of the complete records of an event file, and whether an incomplete record follows.

    The reader of the package tensorboard computes checksums byte by byte in Python, which takes a minute for a million
    scalars, and stops at a damaged record without an error.

    Raises:
      UserError: The package tensorboard is not installed, or a record is damaged.
    """
    data, offset = path.read_bytes(), 0
    begins: list[int] = []
    ends: list[int] = []
    while offset + _HEADER.size <= len(data):
        length, checksum = _HEADER.unpack_from(data, offset)
        if _length_checksum(data[offset : offset + 8]) != checksum:
            raise UserError(f"{path}: event {len(ends) + 1} is damaged, or this is not a TensorBoard event file")
        begin = offset + _HEADER.size
        if begin + length + _CHECKSUM.size > len(data):
            break
        begins.append(begin)
        ends.append(begin + length)
        offset = ends[-1] + _CHECKSUM.size
    checked = [i for i, (begin, end) in enumerate(zip(begins, ends, strict=True)) if end - begin <= _MAX_CHECKED]
    stored = [_CHECKSUM.unpack_from(data, ends[i])[0] for i in checked]
    computed = checksums(data, np.array(begins, np.int64)[checked], np.array(ends, np.int64)[checked])
    (damaged,) = np.nonzero(computed != np.array(stored, np.uint32))
    if len(damaged):
        raise UserError(f"{path}: event {checked[damaged[0]] + 1} is damaged: its checksum does not match")
    return [data[begin:end] for begin, end in zip(begins, ends, strict=True)], offset < len(data)


def checksums(data: bytes, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Computes masked CRC-32C checksums of several parts of `data` in parallel, one byte of every part at a time.

    Args:
      data: The bytes.
      begins: The offset of the first byte of each part, int64 `[n]`.
      ends: The offset after the last byte of each part, int64 `[n]`.

    Returns:
      uint32 `[n]`.
    """
    table = np.array(import_tensorboard("compat.tensorflow_stub.pywrap_tensorflow").CRC_TABLE, np.uint32)
    octets = np.frombuffer(data, np.uint8)
    order = np.argsort(begins - ends, kind="stable")
    negative_lengths = (begins - ends)[order]
    offsets, crc = begins[order], np.full(len(order), 0xFFFFFFFF, np.uint32)
    for i in range(-int(negative_lengths[0]) if len(order) else 0):
        n = np.searchsorted(negative_lengths, -i)  # the parts, longest first, that have an i-th byte
        crc[:n] = table[(crc[:n] ^ octets[offsets[:n] + i]) & 0xFF] ^ (crc[:n] >> 8)
    crc = ~crc
    masked = np.empty_like(crc)
    masked[order] = ((crc >> 15) | (crc << 17)) + np.uint32(0xA282EAD8)
    return masked


@functools.cache
def _length_checksum(length: bytes) -> int:
    return import_tensorboard("compat.tensorflow_stub.pywrap_tensorflow").masked_crc32c(length)


def import_tensorboard(module: str) -> Any:
    """Imports a module of the package tensorboard.

    Raises:
      UserError: The package is not installed.
    """
    try:
        return importlib.import_module(f"tensorboard.{module}")
    except ImportError:
        raise UserError(
            'reading TensorBoard event files needs the package tensorboard: pip install "jaxaudit[tensorboard]"'
        ) from None
