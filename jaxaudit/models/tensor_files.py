"""Safetensors files, one or several shards of a model: arrays and no code, checked before an array is read."""

from __future__ import annotations

import json
import math
import operator
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxaudit.runtime.files import MOST_BYTES, read_object

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
"""Says which shard holds which tensor, where there are several."""

MOST_SHARDS = 1000

FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Types that are read, and bytes of a number."""

PICKLES = (".bin", ".pt", ".pth", ".ckpt")
"""How the names of PyTorch's own files end."""

PICKLED = (
    "is a pickle, which runs code when it is read, and is not: save the model as safetensors, as transformers' "
    "save_pretrained does"
)


class Stored(NamedTuple):
    """What a file's header says of a tensor."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


class TensorFiles(NamedTuple):
    """The tensors of a model's files.

    Attributes:
      place: the file, or the index of several.
      tensors: by name.
    """

    place: Path
    tensors: dict[str, Stored]

    def read(self, name: str, rows: int | None = None) -> np.ndarray:
        """A tensor, or its first rows, float32. Raises ValueError where it cannot be read or is not finite."""
        file = self.tensors[name].file
        try:
            with safe_open(file, framework="numpy") as opened:
                array = np.asarray(opened.get_tensor(name))[:rows].astype(np.float32)
        except (SafetensorError, TypeError, ValueError) as error:
            raise ValueError(f"{file}: tensor '{name}' cannot be read: {error}") from None
        if not np.isfinite(array).all():
            raise ValueError(f"{file}: tensor '{name}' has entries that are not finite")
        return array


def find(path: Path) -> TensorFiles:
    """The tensors of a folder, of a safetensors file, or of the shards that an index names.

    Raises:
      ValueError: in one sentence: no such file, a pickle, a damaged one.
    """
    file = path / WEIGHTS if path.is_dir() else path
    if path.is_dir() and not file.is_file() and (path / INDEX).is_file():
        file = path / INDEX
    if not file.is_file():
        raise ValueError(_missing(file))
    if file.name.endswith(".json"):
        return TensorFiles(file, _sharded(file))
    if file.suffix in PICKLES:
        raise ValueError(f"{file} {PICKLED}")
    return TensorFiles(file, header(file))


def _missing(file: Path) -> str:
    """Why there is nothing to read: a folder may have the model in another form."""
    folder = file.parent if file.name == WEIGHTS else file
    found = [p.name for p in folder.iterdir() if p.suffix in PICKLES] if folder.is_dir() else []
    if not found:
        return f"{file}: there is no such file"
    name = min(found, key=lambda name: (not name.startswith("pytorch_model"), name))
    return f"{file}: there is no such file; {name} {PICKLED}"


def _sharded(index: Path) -> dict[str, Stored]:
    """The tensors of the shards that an index names, files beside it."""
    found = read_object(index).get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(name, str) for name in found.values()):
        raise ValueError(f"{index} is damaged: it has no weight_map, which says which file each tensor is in")
    tensors: dict[str, Stored] = {}
    for file in _shards(index, found.values()):
        for name, stored in header(file).items():
            if name in tensors:
                raise ValueError(f"{file} has tensor '{name}', and {tensors[name].file} has it too")
            tensors[name] = stored
    for name, shard in found.items():
        if name not in tensors or tensors[name].file.name != shard:
            raise ValueError(f"{index} says that {shard} has tensor '{name}', which it has not")
    return tensors


def _shards(index: Path, names: Iterable[str]) -> list[Path]:
    shards = sorted(set(names))
    if len(shards) > MOST_SHARDS:
        raise ValueError(f"{index} names {len(shards)} files; at most {MOST_SHARDS} are read")
    for name in shards:
        if Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
            raise ValueError(f"{index} names {name[:100]!r}, which is no safetensors file beside it")
        if not (index.parent / name).is_file():
            raise ValueError(f"{index.parent / name}: there is no such file, and {index.name} names it")
    return [index.parent / name for name in shards]


def header(file: Path) -> dict[str, Stored]:
    """What a safetensors file says of its tensors, by name; each is whole and of numbers that can be read."""
    size = file.stat().st_size
    with open(file, "rb") as opened:
        try:
            (length,) = struct.unpack("<Q", opened.read(8))
            told = json.loads(opened.read(length) if length < min(size, MOST_BYTES) else b"")
            told.pop("__metadata__", None)
            offsets = {name: tuple(map(operator.index, one["data_offsets"])) for name, one in told.items()}
            tensors = {name: _stored(file, one) for name, one in told.items()}
            ordered = sorted((begin, end, name) for name, (begin, end) in offsets.items())
        except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ValueError(f"{file} is not a safetensors file, or its header is damaged") from None
    at = 0
    for begin, end, name in ordered:
        shape, dtype = tensors[name].shape, tensors[name].dtype
        if dtype in FLOATS and end - begin != math.prod(shape) * FLOATS[dtype]:
            told_shape = f"{dtype} {list(shape)}"
            raise ValueError(f"{file} is damaged: tensor '{name}' has {end - begin} bytes, which are not {told_shape}")
        if begin != at or end < begin:
            raise ValueError(f"{file} is damaged: tensor '{name}' begins at byte {begin}, not {at}")
        if 8 + length + end > size:
            raise ValueError(f"{file} is cut off: it ends within tensor '{name}'")
        at = end
    if 8 + length + at < size:
        raise ValueError(f"{file} is damaged: it has {size - 8 - length - at} bytes after its last tensor")
    return tensors


def _stored(file: Path, told: dict[str, Any]) -> Stored:
    return Stored(file, tuple(map(operator.index, told["shape"])), str(told["dtype"]))
