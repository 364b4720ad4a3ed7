"""Loading and saving GPT-2 in Hugging Face's format: `config.json`, and `model.safetensors` or its shards."""

from __future__ import annotations

import json
import math
import operator
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxaudit.models.gpt2 import GPT2, Params, init_params
from jaxaudit.runtime.errors import UserError
from jaxaudit.runtime.files import MAX_FILE_BYTES, read_json, read_object
from jaxaudit.runtime.machine import atomic_output
from jaxaudit.runtime.paths import places_of

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
"""The file that names the shard of each tensor, if there are several shards."""

MOST_SHARDS = 1000

FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""The dtypes that can be read, with the number of bytes of an entry."""

PICKLES = (".bin", ".pt", ".pth", ".ckpt")
"""Suffixes of PyTorch files, which are pickles and are not read."""

PICKLED = (
    "is a pickle, which can run code when it is loaded, and is therefore not read: save the model as safetensors, as "
    "transformers' save_pretrained does"
)


class Stored(NamedTuple):
    """The entry of a tensor in a file's header."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


class TensorFiles(NamedTuple):
    """The tensors in a model's files.

    Attributes:
      path: the only file, or the index of several.
      tensors: the header entries, by the tensors' names.
    """

    path: Path
    tensors: dict[str, Stored]

    def read(self, name: str, rows: int | None = None) -> np.ndarray:
        """Reads a tensor, or its first rows, as float32. Raises ValueError if it cannot be read or is not finite."""
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
    """Returns the tensors of a folder, of a safetensors file, or of the shards that an index names.

    Raises:
      ValueError: the file does not exist, is a pickle or is damaged. The message is one sentence.
    """
    file = path / WEIGHTS if path.is_dir() else path
    if path.is_dir() and not file.is_file() and (path / INDEX).is_file():
        file = path / INDEX
    if not file.is_file():
        raise ValueError(_missing_file_message(file))
    if file.name.endswith(".json"):
        return TensorFiles(file, _sharded_tensors(file))
    if file.suffix in PICKLES:
        raise ValueError(f"{file} {PICKLED}")
    return TensorFiles(file, header(file))


def _missing_file_message(file: Path) -> str:
    """Returns the message for a missing file, which mentions a pickled model in its folder if there is one."""
    folder = file.parent if file.name == WEIGHTS else file
    pickles = [p.name for p in folder.iterdir() if p.suffix in PICKLES] if folder.is_dir() else []
    if not pickles:
        return f"{file}: there is no such file"
    name = min(pickles, key=lambda name: (not name.startswith("pytorch_model"), name))
    return f"{file}: there is no such file; {name} {PICKLED}"


def _sharded_tensors(index: Path) -> dict[str, Stored]:
    shard_of = read_object(index).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of or not all(isinstance(name, str) for name in shard_of.values()):
        raise ValueError(f"{index} is damaged: it has no weight_map, which says which file each tensor is in")
    tensors: dict[str, Stored] = {}
    for file in _shards(index, shard_of.values()):
        for name, stored in header(file).items():
            if name in tensors:
                raise ValueError(f"{tensors[name].file} and {file} both have tensor '{name}'")
            tensors[name] = stored
    for name, shard in shard_of.items():
        if name not in tensors or tensors[name].file.name != shard:
            raise ValueError(f"{index} says that {shard} has tensor '{name}', but it does not")
    return tensors


def _shards(index: Path, names: Iterable[str]) -> list[Path]:
    shards = sorted(set(names))
    if len(shards) > MOST_SHARDS:
        raise ValueError(f"{index} names {len(shards)} files; at most {MOST_SHARDS} are read")
    for name in shards:
        if Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
            raise ValueError(f"{index} names {name[:100]!r}, which is not a safetensors file in the same folder")
        if not (index.parent / name).is_file():
            raise ValueError(f"{index.parent / name}: there is no such file, although {index.name} names it")
    return [index.parent / name for name in shards]


def header(file: Path) -> dict[str, Stored]:
    """Reads the header of a safetensors file, and checks that its tensors fill the file without gaps."""
    size = file.stat().st_size
    with open(file, "rb") as opened:
        try:
            (length,) = struct.unpack("<Q", opened.read(8))
            entries = json.loads(opened.read(length) if length < min(size, MAX_FILE_BYTES) else b"")
            entries.pop("__metadata__", None)
            offsets = {name: tuple(map(operator.index, entry["data_offsets"])) for name, entry in entries.items()}
            tensors = {
                name: Stored(file, tuple(map(operator.index, entry["shape"])), str(entry["dtype"]))
                for name, entry in entries.items()
            }
            ordered = sorted((begin, end, name) for name, (begin, end) in offsets.items())
        except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ValueError(f"{file} is not a safetensors file, or its header is damaged") from None
    position = 0
    for begin, end, name in ordered:
        shape, dtype = tensors[name].shape, tensors[name].dtype
        if dtype in FLOATS and end - begin != math.prod(shape) * FLOATS[dtype]:
            expected = f"{math.prod(shape) * FLOATS[dtype]} for {dtype} {list(shape)}"
            raise ValueError(f"{file} is damaged: tensor '{name}' has {end - begin} bytes, not {expected}")
        if begin != position or end < begin:
            raise ValueError(f"{file} is damaged: tensor '{name}' begins at byte {begin}, not {position}")
        if 8 + length + end > size:
            raise ValueError(f"{file} is truncated: it ends within tensor '{name}'")
        position = end
    if 8 + length + position < size:
        raise ValueError(f"{file} is damaged: it has {size - 8 - length - position} bytes after its last tensor")
    return tensors


CONFIG = "config.json"
PREFIX = "transformer."
"""The prefix of all names in files of a model with an output layer; files without one do not have it."""

MASKS = (".attn.bias", ".attn.masked_bias")
"""Suffixes of tensors in old files that are no parameters: the masks of attention."""

OUTPUT = "lm_head.weight"
"""The output layer, which must equal the embedding."""

TOKENS, POSITIONS = "wte.weight", "wpe.weight"
"""The embeddings, which may have more rows in a file than in the model. The additional rows are left out."""

MOST_PADDING = 1024
"""The largest number of rows that pad a vocabulary to a rounder number. More rows than that are tokens."""

SHAPE_HINTS = {
    TOKENS: ": it has the vocabulary of another tokenizer",
    POSITIONS: ": choose a context, or a length of rows, that its positions are enough for",
}
"""Explanations of a shape that does not fit the model."""

FIXED = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
}
"""The settings in `config.json` that describe `GPT2`, which are transformers' defaults."""

SYNONYMS = {"activation_function": ("gelu_pytorch_tanh",)}
"""Values of settings in `config.json` that mean the same as the value in FIXED."""


class Tensor(NamedTuple):
    """A tensor that the model needs from a file.

    Attributes:
      name: its name without `PREFIX`.
      shape: its shape, which is the parameter's.
      layer: its index in the `Stack`, or None outside of the layers.
    """

    name: str
    shape: tuple[int, ...]
    layer: int | None


def load(path: str | Path, model: GPT2) -> Params:
    """Loads a model's parameters, float32, from a folder, a safetensors file, or an index of several.

    Positions beyond the model's context and rows that pad a vocabulary (`MOST_PADDING`) are left out.

    Raises:
      ValueError: the file does not exist, is damaged, or holds another model. The message is one sentence and names
        the tensor.
    """
    files = find(Path(path))
    _check_config(files.path.parent / CONFIG, model)
    prefix = _prefix(files)
    shapes = jax.eval_shape(lambda key: init_params(model, key), jax.random.key(0))
    leaves, structure = jax.tree.flatten(shapes)
    parameters = list(_tensors(shapes))
    _check_tensors(files, prefix, [tensor for members in parameters for tensor in members])
    arrays = [_parameter(files, prefix, members) for members in parameters]
    _check_output(files, prefix, model.vocabulary)
    return jax.tree.unflatten(structure, [x.reshape(leaf.shape) for x, leaf in zip(arrays, leaves, strict=True)])


def positions(path: str | Path) -> int | None:
    """Returns the number of positions that a checkpoint embeds, or None without such a tensor. Raises like `load`."""
    files = find(Path(path))
    stored = files.tensors.get(_prefix(files) + POSITIONS)
    return stored.shape[0] if stored is not None and stored.shape else None


def _prefix(files: TensorFiles) -> str:
    return PREFIX if any(name.startswith(PREFIX) for name in files.tensors) else ""


def save(folder: str | Path, params: Params, model: GPT2, end_of_text: int | None = None) -> None:
    """Writes parameters as a folder that `transformers.GPT2LMHeadModel.from_pretrained` can load.

    Args:
      folder: created if it does not exist. Existing files of the same names are replaced atomically.
      params: parameters as returned by `gpt2.init_params`.
      model: the parameters' model.
      end_of_text: the token that ends a document. None means the vocabulary's last token.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(model, model.vocabulary - 1 if end_of_text is None else end_of_text)
    with atomic_output(folder / WEIGHTS) as part:
        save_file(tensors(params), part, metadata={"format": "pt"})
    with atomic_output(folder / CONFIG) as part:
        part.write_text(json.dumps(config, indent=2) + "\n")


def tensors(params: Params) -> dict[str, np.ndarray]:
    """Returns a tree like the parameters as float32 arrays, by their names in files."""
    return {
        PREFIX + member.name: np.ascontiguousarray(leaf if member.layer is None else leaf[member.layer], np.float32)
        for leaf, members in zip(jax.tree.leaves(params), _tensors(params), strict=True)
        for member in members
    }


def _config(model: GPT2, end_of_text: int) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": model.vocabulary,
        "n_positions": model.context,
        "n_embd": model.size.width,
        "n_layer": model.size.depth,
        "n_head": model.size.heads,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "tie_word_embeddings": True,
        **FIXED,
    }


def _check_config(file: Path, model: GPT2) -> None:
    """Checks the settings that the tensors' shapes do not determine. A checkpoint without a config passes."""
    if not file.is_file():
        return
    config = read_json(file)
    if not isinstance(config, dict):
        raise UserError(f"{file} is not a JSON object of settings")
    sizes = {"n_head": model.size.heads, "n_layer": model.size.depth}
    for name, value in {"model_type": "gpt2", **sizes, "tie_word_embeddings": True, **FIXED}.items():
        if (file_value := config.get(name, value)) != value and file_value not in SYNONYMS.get(name, ()):
            raise ValueError(
                f"{file} describes another model: {name} is {repr(file_value)[:50]}, but this model has {value!r}"
            )


def _check_tensors(files: TensorFiles, prefix: str, expected: list[Tensor]) -> None:
    """Raises ValueError unless the files have exactly the model's tensors, in its shapes."""
    for tensor in expected:
        name = prefix + tensor.name
        if name not in files.tensors:
            raise ValueError(f"{files.path} has no tensor '{name}', which this model has")
        stored = files.tensors[name]
        if not _fits(tensor, stored):
            shapes = f"has shape {list(stored.shape)}, but this model needs {list(tensor.shape)}"
            raise ValueError(f"{stored.file}: tensor '{name}' {shapes}{SHAPE_HINTS.get(tensor.name, '')}")
        if stored.dtype not in FLOATS:
            raise ValueError(f"{stored.file}: tensor '{name}' has dtype {stored.dtype}, not one of {', '.join(FLOATS)}")
    for name in files.tensors.keys() - {prefix + tensor.name for tensor in expected} - {OUTPUT}:
        if not name.endswith(MASKS):
            raise ValueError(f"{files.tensors[name].file} has tensor '{name}', which this model does not have")


def _fits(tensor: Tensor, stored: Stored) -> bool:
    """Returns whether a stored tensor has the model's shape, apart from rows that may be left out."""
    if tensor.name not in (TOKENS, POSITIONS) or len(stored.shape) != 2:
        return stored.shape == tensor.shape
    (rows, width), (stored_rows, stored_width) = tensor.shape, stored.shape
    most = rows + min(MOST_PADDING, rows // 4) if tensor.name == TOKENS else stored_rows
    return stored_width == width and rows <= stored_rows <= most


def _parameter(files: TensorFiles, prefix: str, members: tuple[Tensor, ...]) -> np.ndarray:
    """Reads a parameter, float32; the tensors of several layers are stacked along a first axis."""
    arrays = [files.read(prefix + tensor.name, tensor.shape[0]) for tensor in members]
    return np.stack(arrays) if members[0].layer is not None else arrays[0]


def _check_output(files: TensorFiles, prefix: str, vocabulary: int) -> None:
    """Raises ValueError if the files have an output layer that is not the embedding."""
    if OUTPUT in files.tensors and not np.array_equal(
        files.read(OUTPUT, vocabulary), files.read(prefix + TOKENS, vocabulary)
    ):
        file = files.tensors[OUTPUT].file
        raise ValueError(f"{file}: tensor '{OUTPUT}' is not the embedding, as this model's output layer is")


def _tensors(params: Params) -> Iterator[tuple[Tensor, ...]]:
    """Yields the tensors of each parameter, in the tree's order."""
    for leaf, places in zip(jax.tree.leaves(params), places_of(params), strict=True):
        stacked = bool(places[0].layer)
        shape = tuple(leaf.shape[1:] if stacked else leaf.shape)
        yield tuple(Tensor(_name(place.path), shape, i if stacked else None) for i, place in enumerate(places))


def _name(path: str) -> str:
    """Returns a parameter's name in files: "h.3.attn.c_attn.weight" for "h/3/attn/c_attn/kernel"."""
    *parents, last = path.split("/")
    return ".".join((*parents, "bias" if last == "bias" else "weight"))
