"""Zarr stores that somebody else may have written: checked first, so that reading runs no code and inflates nothing.

A store is of format 3 (https://zarr-specs.readthedocs.io/en/latest/v3/core/). Its arrays have plain types and the
codecs that jaxaudit writes them with, and no chunk inflates to more than its array's metadata says.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import numpy as np
import zarr

from jaxaudit.runtime.errors import UserError
from jaxaudit.runtime.files import read_object
from jaxaudit.runtime.machine import host_memory, readable


import math
import zipfile
from pathlib import Path
from typing import IO

import numpy as np

from jaxaudit.runtime.errors import UserError
from jaxaudit.runtime.files import check_regular


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an archive that `numpy.savez` wrote, by name.

    The archive is refused before any array is allocated if its arrays would take more memory than the file takes on
    disk: its members are not compressed, and each is as long as its header says.

    Raises:
      UserError: it is not an archive, or holds anything else.
      OSError: it cannot be read.
    """
    check_regular(path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if any(one.compress_type != zipfile.ZIP_STORED for one in members):
                raise ValueError("a member is compressed")
            if sum(one.file_size for one in members) > path.stat().st_size:
                raise ValueError("its members are longer than the file")
            found = {}
            for one in members:
                with archive.open(one) as file:
                    found[one.filename.removesuffix(".npy")] = _array(file, one.file_size)
            return found
    except (ValueError, EOFError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        # A damaged archive has zipfile speak of encryption, too (RuntimeError), or of an unknown version.
        raise UserError(f"{path} is damaged: {str(error).splitlines()[0]}") from None


def _array(file: IO[bytes], size: int) -> np.ndarray:
    """The array in an archive's member of `size` bytes. Raises ValueError."""
    version = np.lib.format.read_magic(file)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"an array has format {version}")
    shape, fortran, dtype = readers[version](file)
    if dtype.hasobject:
        raise ValueError("an array holds Python objects, which are never unpickled")
    count = math.prod(shape)
    if count * dtype.itemsize != size - file.tell():
        raise ValueError("an array is not as long as its header says")
    values = np.frombuffer(file.read(), dtype).copy() if dtype.itemsize else np.zeros(count, dtype)
    return values.reshape(shape, order="F" if fortran else "C")


if TYPE_CHECKING:
    import xarray as xr

METADATA = "zarr.json"

Labelled = tuple[tuple[str, ...], np.ndarray]
"""The names of an array's dimensions, and its values."""

FORMAT: Literal[3] = 3

TEXT = "string"
"""The type of arrays of text, whose chunks together may be as large as `MOST_TEXT`."""

MOST_TEXT = 2**26
"""Bytes of an array of text: labels and names."""

CODECS = (["bytes", "zstd"], ["vlen-utf8", "zstd"], ["bytes"], ["vlen-utf8"])

FIXED_TEXT = "fixed_length_utf32"
"""The type of NumPy's own arrays of text."""

NUMBERS = {f"{kind}{bits}" for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64)} - {"float8"} | {"bool"}

MOST_DIMENSIONS = 32


def open_dataset(path: Path) -> xr.Dataset:
    """A store that is checked already, or that this process made, as a dataset; its values are read when asked for."""
    import xarray as xr

    return xr.open_zarr(path, chunks=None, zarr_format=FORMAT, decode_times=False)


def write_arrays(path: Path, arrays: Mapping[str, Labelled]) -> None:
    """Writes a new store that `open_dataset` reads; text is in arrays of objects."""
    group = zarr.create_group(path, zarr_format=FORMAT)
    for name, (dimensions, values) in arrays.items():
        data = values.astype(str).astype(np.dtypes.StringDType()) if values.dtype == object else values
        group.create_array(name, data=data, dimension_names=dimensions)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of consolidated metadata, that they are no part of the format yet
        zarr.consolidate_metadata(path, zarr_format=FORMAT)


def open_group(path: Path, mode: Literal["r", "r+"]) -> zarr.Group:
    """A group of a store that is checked already, or that this process made."""
    return zarr.open_group(path, mode=mode, zarr_format=FORMAT)


def open_array(path: Path, mode: Literal["r", "r+"]) -> zarr.Array:
    """An array of a store that is checked already, or that this process made."""
    return zarr.open_array(path, mode=mode, zarr_format=FORMAT)


def check(path: Path) -> None:
    """Checks a store before anything is read from it.

    Raises:
      UserError: it is not of format 3, its metadata are damaged or contradict each other, an array has a type or codec
        that jaxaudit does not write or does not fit in memory, or a chunk inflates to more than its array has room for.
    """
    if not (path / METADATA).is_file():
        raise UserError(f"{path} is damaged: it is not a zarr store of format {FORMAT} (it has no {METADATA})")
    root = read_object(path / METADATA)
    arrays = {place.parent.name: read_object(place) for place in sorted(path.glob(f"*/{METADATA}"))}
    try:
        if root.get("node_type") != "group":
            raise ValueError("its root is not a group")
        consolidated = (root.get("consolidated_metadata") or {"metadata": arrays})["metadata"]
        for name, described in arrays.items():
            _check_array(name, described)
            if consolidated.get(name) != described:
                raise ValueError(f"its own metadata and those of '{name}' differ")
        if set(consolidated) != set(arrays):
            raise ValueError("its metadata name arrays that are not there")
        free = host_memory()
        for name, described in arrays.items():
            if (size := _bytes(described, "shape")) > free:
                raise ValueError(f"'{name}' takes {readable(size)} in memory, and {readable(free)} are available")
            _check_chunks(path / name, described)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise UserError(f"{path} is damaged: {_words(error)}") from None


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else f"its metadata are incomplete ({error!r})"


def _check_array(name: str, described: dict[str, Any]) -> None:
    """Raises ValueError, TypeError or KeyError for an array that is not as jaxaudit writes them."""
    if described["node_type"] != "array" or described["zarr_format"] != FORMAT:
        raise ValueError(f"'{name}' is not an array of format {FORMAT}")
    kind = described["data_type"]
    if _item(kind) is None:
        raise ValueError(f"'{name}' has values of type {str(kind)[:60]!r}, which no such array has")
    codecs = [codec["name"] for codec in described["codecs"]]
    if codecs not in CODECS or (codecs[0] == "bytes") != (kind != TEXT):
        raise ValueError(f"'{name}' is coded by {codecs}, which no such array is")
    grid = described["chunk_grid"]
    if grid["name"] != "regular" or described.get("storage_transformers"):
        raise ValueError(f"'{name}' is laid out in a way that no such array is")
    shape, chunks = described["shape"], grid["configuration"]["chunk_shape"]
    if len(shape) != len(chunks) or len(shape) > MOST_DIMENSIONS:
        raise ValueError(f"'{name}' has {len(shape)} dimensions, and its chunks have {len(chunks)}")
    if not all(type(size) is int and 0 <= size < 2**48 for size in (*shape, *chunks)):
        raise ValueError(f"'{name}' has the shape {shape}, in chunks of {chunks}")
    if any(chunk > max(size, 1) for size, chunk in zip(shape, chunks, strict=True)):
        raise ValueError(f"'{name}' has chunks {chunks} that are larger than its shape {shape}")
    if len(described.get("dimension_names") or shape) != len(shape):
        raise ValueError(f"'{name}' has {len(shape)} dimensions, and names of others")


def _bytes(described: dict[str, Any], which: Literal["shape", "chunk"]) -> int:
    """Bytes of an array's values, or of a chunk's, in memory; of a text what its reference takes."""
    shape = described["shape"] if which == "shape" else described["chunk_grid"]["configuration"]["chunk_shape"]
    return math.prod(shape) * (_item(described["data_type"]) or 0)


def _item(kind: Any) -> int | None:
    """Bytes of a value of a type, of a text what its reference takes; None for a type that no array has."""
    if kind == TEXT:
        return 8
    if isinstance(kind, dict) and kind["name"] == FIXED_TEXT:
        length = kind["configuration"]["length_bytes"]
        return length if type(length) is int and 0 <= length < 2**20 else None
    return np.dtype(kind).itemsize if kind in NUMBERS else None


def _check_chunks(path: Path, described: dict[str, Any]) -> None:
    """Raises ValueError where a chunk's file inflates to more than there is room for."""
    is_text = described["data_type"] == TEXT
    most, total = MOST_TEXT if is_text else _bytes(described, "chunk"), 0
    compressed = len(described["codecs"]) > 1
    for place in path.rglob("*"):
        if place.is_file() and place.name != METADATA and not place.name.endswith(".partial"):
            with place.open("rb") as file:
                size = _inflated(file, place.stat().st_size) if compressed else place.stat().st_size
            if size > most:
                raise ValueError(f"{place} inflates to {readable(size)}, and its chunk has {readable(most)}")
            total += size
            if is_text and total > most:
                raise ValueError(f"the chunks of {path.name} inflate to more than {readable(most)}, which no labels do")


_MAGIC = b"\x28\xb5\x2f\xfd"
_RAW, _RLE, _COMPRESSED = range(3)


def _inflated(file: IO[bytes], size: int) -> int:
    """Bytes that a file of one Zstandard frame inflates to, as its header says, which the decompressor holds it to.

    The frame is followed to its end, for a second one after it would inflate to more. See RFC 8878, section 3.1.

    Raises:
      ValueError: the file is anything else.
    """
    if file.read(4) != _MAGIC:
        raise ValueError(f"{file.name} is not compressed by Zstandard")
    descriptor = _number(file, 1)
    single, checksum = descriptor >> 5 & 1, descriptor >> 2 & 1
    file.read(0 if single else 1)
    file.read((0, 1, 2, 4)[descriptor & 3])
    width = (single, 2, 4, 8)[descriptor >> 6]
    if not width:
        raise ValueError(f"{file.name} does not say what it inflates to")
    inflated = _number(file, width) + (256 if width == 2 else 0)
    last = 0
    while not last:
        header = _number(file, 3)
        last, kind, length = header & 1, header >> 1 & 3, header >> 3
        if kind > _COMPRESSED:
            raise ValueError(f"{file.name} is not compressed by Zstandard")
        file.seek(1 if kind == _RLE else length, 1)
    if file.tell() + 4 * checksum != size:
        raise ValueError(f"{file.name} goes on after its end, or ends before")
    return inflated


def _number(file: IO[bytes], width: int) -> int:
    found = file.read(width)
    if len(found) < width:
        raise ValueError(f"{file.name} ends before its end")
    return int.from_bytes(found, "little")
