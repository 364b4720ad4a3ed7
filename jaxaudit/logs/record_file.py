"""TensorFlow's record files: length, checksum of the length, payload, checksum of the payload; and so on."""

from __future__ import annotations

import functools
import importlib
import struct
from pathlib import Path
from typing import Any

import numpy as np

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
