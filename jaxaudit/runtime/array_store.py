"""Zarr stores and NumPy archives, checked before they are read, since somebody else may have written them.

Reading then runs no code and allocates no more memory than the files' metadata say. Zarr stores are of format 3
(https://zarr-specs.readthedocs.io/en/latest/v3/core/), with plain types and the codecs that jaxaudit writes.
"""

from __future__ import annotations

import math
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import numpy as np
import zarr

from jaxaudit.runtime.errors import UserError
from jaxaudit.runtime.files import check_regular, read_object
from jaxaudit.runtime.machine import available_host_memory, format_bytes

if TYPE_CHECKING:
    import xarray as xr

METADATA = "zarr.json"

LabelledArray = tuple[tuple[str, ...], np.ndarray]
"""The names of an array's dimensions, and its values."""

FORMAT: Literal[3] = 3

TEXT = "string"
"""The data type of arrays of text."""

MAX_TEXT_BYTES = 2**26
"""The most bytes that the chunks of an array of text, which holds labels and names, decompress to in total."""

CODECS = (["bytes", "zstd"], ["vlen-utf8", "zstd"], ["bytes"], ["vlen-utf8"])

FIXED_TEXT = "fixed_length_utf32"
"""The data type of NumPy's own arrays of text."""

NUMBER_TYPES = {"bool", "float16", "float32", "float64"} | {
    f"{s}int{bits}" for s in ("", "u") for bits in (8, 16, 32, 64)
}

MAX_DIMENSIONS = 32


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of an archive that `numpy.savez` wrote, by name.

    An archive is refused before any array is allocated if its arrays would take more memory than the file takes on
    disk: its members must not be compressed, and each must be as long as its header says.

    Raises:
      UserError: the file is not such an archive, or holds Python objects.
      OSError: the file cannot be read.
    """
    check_regular(path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                raise ValueError("a member is compressed")
            if sum(member.file_size for member in members) > path.stat().st_size:
                raise ValueError("its members are longer than the file")
            arrays = {}
            for member in members:
                with archive.open(member) as file:
                    arrays[member.filename.removesuffix(".npy")] = _read_npy(file, member.file_size)
            return arrays
    except (ValueError, EOFError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        # zipfile takes some damage for encryption (RuntimeError) or for an unknown version (NotImplementedError).
        raise UserError(f"{path} is damaged: {str(error).splitlines()[0]}") from None


def _read_npy(file: IO[bytes], size: int) -> np.ndarray:
    """Returns the array in an archive's member of `size` bytes; raises ValueError if the member is anything else."""
    version = np.lib.format.read_magic(file)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"an array has format {version}, and 1.0 and 2.0 are allowed")
    shape, fortran, dtype = readers[version](file)
    if dtype.hasobject:
        raise ValueError("an array holds Python objects, which are never unpickled")
    count = math.prod(shape)
    if count * dtype.itemsize != size - file.tell():
        raise ValueError("an array is not as long as its header says")
    values = np.frombuffer(file.read(), dtype).copy() if dtype.itemsize else np.zeros(count, dtype)
    return values.reshape(shape, order="F" if fortran else "C")


def open_dataset(path: Path) -> xr.Dataset:
    """Opens a store that was checked, or that this process wrote, as a dataset; values are read on access."""
    import xarray as xr

    return xr.open_zarr(path, chunks=None, zarr_format=FORMAT, decode_times=False)


def write_arrays(path: Path, arrays: Mapping[str, LabelledArray]) -> None:
    """Writes a new store for `open_dataset`; arrays of text have dtype object."""
    group = zarr.create_group(path, zarr_format=FORMAT)
    for name, (dimensions, values) in arrays.items():
        data = values.astype(str).astype(np.dtypes.StringDType()) if values.dtype == object else values
        group.create_array(name, data=data, dimension_names=dimensions)
    consolidate(path)


def consolidate(path: Path) -> None:
    """Copies the metadata of all of a store's arrays into the metadata of its root.

    A reader then learns the arrays' names, shapes and types from one file. The values stay where they are.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zarr warns that consolidated metadata are not part of the format yet
        zarr.consolidate_metadata(path, zarr_format=FORMAT)


def open_group(path: Path, mode: Literal["r", "r+"]) -> zarr.Group:
    """Opens a group of a store that was checked, or that this process wrote."""
    return zarr.open_group(path, mode=mode, zarr_format=FORMAT)


def open_array(path: Path, mode: Literal["r", "r+"]) -> zarr.Array:
    """Opens an array of a store that was checked, or that this process wrote."""
    return zarr.open_array(path, mode=mode, zarr_format=FORMAT)


def check(path: Path) -> None:
    """Checks a Zarr store before anything is read from it.

    Raises:
      UserError: the store is not of format 3, its metadata are damaged or contradict each other, an array has a type or
        codec that jaxaudit does not write or does not fit in memory, or a chunk decompresses to more bytes than its
        array's chunks have.
    """
    if not (path / METADATA).is_file():
        raise UserError(f"{path} is damaged: it is not a zarr store of format {FORMAT} (it has no {METADATA})")
    root = read_object(path / METADATA)
    arrays = {file.parent.name: read_object(file) for file in sorted(path.glob(f"*/{METADATA}"))}
    try:
        if root.get("node_type") != "group":
            raise ValueError("its root is not a group")
        consolidated = (root.get("consolidated_metadata") or {"metadata": arrays})["metadata"]
        for name, metadata in arrays.items():
            _check_array(name, metadata)
            if consolidated.get(name) != metadata:
                raise ValueError(f"its own metadata and those of '{name}' differ")
        if set(consolidated) != set(arrays):
            raise ValueError("its metadata name arrays that it does not have")
        free = available_host_memory()
        for name, metadata in arrays.items():
            if (size := _array_bytes(metadata, "shape")) > free:
                raise ValueError(
                    f"'{name}' takes {format_bytes(size)} in memory, and {format_bytes(free)} are available"
                )
            _check_chunks(path / name, metadata)
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from None
    except (TypeError, KeyError, AttributeError, OverflowError) as error:
        raise UserError(f"{path} is damaged: its metadata are incomplete ({error!r})") from None


def _check_array(name: str, metadata: dict[str, Any]) -> None:
    """Raises ValueError, TypeError or KeyError if the metadata of an array are not such as jaxaudit writes."""
    if metadata["node_type"] != "array" or metadata["zarr_format"] != FORMAT:
        raise ValueError(f"'{name}' is not an array of format {FORMAT}")
    kind = metadata["data_type"]
    if _item_bytes(kind) is None:
        raise ValueError(f"'{name}' has values of type {str(kind)[:60]!r}, which jaxaudit does not write")
    codecs = [codec["name"] for codec in metadata["codecs"]]
    if codecs not in CODECS or (codecs[0] == "bytes") != (kind != TEXT):
        raise ValueError(f"'{name}' is coded by {codecs}, which jaxaudit does not write")
    grid = metadata["chunk_grid"]
    if grid["name"] != "regular" or metadata.get("storage_transformers"):
        raise ValueError(f"'{name}' has a chunk grid or storage transformers that jaxaudit does not write")
    shape, chunks = metadata["shape"], grid["configuration"]["chunk_shape"]
    if len(shape) != len(chunks) or len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"'{name}' has {len(shape)} dimensions, and its chunks have {len(chunks)}")
    if not all(type(size) is int and 0 <= size < 2**48 for size in (*shape, *chunks)):
        raise ValueError(f"'{name}' has the shape {shape}, in chunks of {chunks}")
    if any(chunk > max(size, 1) for size, chunk in zip(shape, chunks, strict=True)):
        raise ValueError(f"'{name}' has chunks {chunks} that are larger than its shape {shape}")
    if len(metadata.get("dimension_names") or shape) != len(shape):
        raise ValueError(f"'{name}' has {len(shape)} dimensions and another number of names for them")


def _array_bytes(metadata: dict[str, Any], part: Literal["shape", "chunk"]) -> int:
    """Returns the bytes in memory of an array's values, or of one chunk's; a text counts as its reference."""
    shape = metadata["shape"] if part == "shape" else metadata["chunk_grid"]["configuration"]["chunk_shape"]
    return math.prod(shape) * (_item_bytes(metadata["data_type"]) or 0)


def _item_bytes(kind: Any) -> int | None:
    """Returns the bytes of a value of a data type, for a text those of its reference; None if no array has the type."""
    if kind == TEXT:
        return 8
    if isinstance(kind, dict) and kind["name"] == FIXED_TEXT:
        length = kind["configuration"]["length_bytes"]
        return length if type(length) is int and 0 <= length < 2**20 else None
    return np.dtype(kind).itemsize if kind in NUMBER_TYPES else None


def _check_chunks(path: Path, metadata: dict[str, Any]) -> None:
    """Raises ValueError if a file of a chunk decompresses to more bytes than the chunk may have."""
    is_text = metadata["data_type"] == TEXT
    limit, total = MAX_TEXT_BYTES if is_text else _array_bytes(metadata, "chunk"), 0
    compressed = len(metadata["codecs"]) > 1
    for chunk in path.rglob("*"):
        if chunk.is_file() and chunk.name != METADATA and not chunk.name.endswith(".partial"):
            with chunk.open("rb") as file:
                size = _decompressed_bytes(file, chunk.stat().st_size) if compressed else chunk.stat().st_size
            if size > limit:
                raise ValueError(f"{chunk} inflates to {format_bytes(size)}, and its chunk has {format_bytes(limit)}")
            total += size
            if is_text and total > limit:
                raise ValueError(
                    f"the chunks of {path.name} inflate to more than {format_bytes(limit)}, which no labels do"
                )


_MAGIC = b"\x28\xb5\x2f\xfd"
_RAW, _RLE, _COMPRESSED = range(3)


def _decompressed_bytes(file: IO[bytes], size: int) -> int:
    """Returns the bytes to which a file of one Zstandard frame decompresses, as the frame's header says.

    The decompressor enforces that number. All blocks are skipped to make sure that no second frame follows, which
    would decompress to more. See RFC 8878, section 3.1.

    Raises:
      ValueError: the file does not consist of one Zstandard frame whose header has the decompressed size.
    """
    if file.read(4) != _MAGIC:
        raise ValueError(f"{file.name} is not compressed by Zstandard")
    descriptor = _read_integer(file, 1)
    single_segment, checksum = descriptor >> 5 & 1, descriptor >> 2 & 1
    file.read(0 if single_segment else 1)
    file.read((0, 1, 2, 4)[descriptor & 3])
    width = (single_segment, 2, 4, 8)[descriptor >> 6]
    if not width:
        raise ValueError(f"{file.name} does not say what it inflates to")
    decompressed = _read_integer(file, width) + (256 if width == 2 else 0)
    last = 0
    while not last:
        header = _read_integer(file, 3)
        last, kind, length = header & 1, header >> 1 & 3, header >> 3
        if kind > _COMPRESSED:
            raise ValueError(f"{file.name} is not compressed by Zstandard")
        file.seek(1 if kind == _RLE else length, 1)
    if file.tell() + 4 * checksum != size:
        raise ValueError(f"{file.name} goes on after its end, or ends before")
    return decompressed


def _read_integer(file: IO[bytes], width: int) -> int:
    content = file.read(width)
    if len(content) < width:
        raise ValueError(f"{file.name} ends before its end")
    return int.from_bytes(content, "little")
