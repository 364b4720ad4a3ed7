"""GPT-2's parameters in Hugging Face's files: `config.json` and `model.safetensors` or its shards: arrays, no code."""

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
            told = json.loads(opened.read(length) if length < min(size, MAX_FILE_BYTES) else b"")
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


CONFIG = "config.json"
PREFIX = "transformer."
"""Begins every name in files of the model with its output layer, and is missing in those without."""

MASKS = (".attn.bias", ".attn.masked_bias")
"""End the names of tensors that old files have and that are no parameters: which places attention sees."""

OUTPUT = "lm_head.weight"
"""The output layer, which is the embedding again."""

TOKENS, POSITIONS = "wte.weight", "wpe.weight"
"""The embeddings: a file's may have more rows than the model's, which are left out."""

MOST_PADDING = 1024
"""Rows for which there is no token, by which a vocabulary is filled up to a rounder number. Others are tokens."""

WHY = {
    TOKENS: ": its vocabulary is that of another tokenizer",
    POSITIONS: ": choose a context, or a length of rows, that its positions are enough for",
}
"""What a shape means that is not the model's."""

FIXED = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
}
"""What `GPT2` does, in the words of config.json, whose defaults they are."""

OTHER_WORDS = {"activation_function": ("gelu_pytorch_tanh",)}
"""Values of settings in `config.json` that mean the same as the one in FIXED."""


class Tensor(NamedTuple):
    """A tensor of a file, of one layer or of none.

    Attributes:
      name: without `PREFIX`.
      shape: in the file, which is that of the parameter.
      layer: its position in the `Stack`, or None.
    """

    name: str
    shape: tuple[int, ...]
    layer: int | None


def load(path: str | Path, model: GPT2) -> Params:
    """A model's parameters, float32, from a folder, or from a safetensors file or an index of several.

    Positions beyond the model's context are left out, and so are rows that fill a vocabulary up (`MOST_PADDING`).

    Raises:
      ValueError: in one sentence: no such file, a damaged one, or one of another model; names the tensor.
    """
    files = find(Path(path))
    _check_config(files.place.parent / CONFIG, model)
    prefix = _prefix(files)
    shapes = jax.eval_shape(lambda key: init_params(model, key), jax.random.key(0))
    leaves, structure = jax.tree.flatten(shapes)
    wanted = list(_tensors(shapes))
    _check_tensors(files, prefix, [tensor for members in wanted for tensor in members])
    found = [_parameter(files, prefix, members) for members in wanted]
    _check_output(files, prefix, model.vocabulary)
    return jax.tree.unflatten(structure, [x.reshape(leaf.shape) for x, leaf in zip(found, leaves, strict=True)])


def positions(path: str | Path) -> int | None:
    """How many positions a checkpoint has an embedding for; None where it has no such tensor. Raises as `load`."""
    files = find(Path(path))
    stored = files.tensors.get(_prefix(files) + POSITIONS)
    return stored.shape[0] if stored is not None and stored.shape else None


def _prefix(files: TensorFiles) -> str:
    return PREFIX if any(name.startswith(PREFIX) for name in files.tensors) else ""


def save(folder: str | Path, params: Params, model: GPT2, end_of_text: int | None = None) -> None:
    """Writes parameters as a folder that `transformers.GPT2LMHeadModel.from_pretrained` reads.

    Args:
      folder: made unless it is there; files of these names are replaced, each at once.
      params: as `gpt2.init_params` makes them.
      model: theirs.
      end_of_text: the token that ends a document; the vocabulary's last unless given.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(model, model.vocabulary - 1 if end_of_text is None else end_of_text)
    with atomic_output(folder / WEIGHTS) as part:
        save_file(tensors(params), part, metadata={"format": "pt"})
    with atomic_output(folder / CONFIG) as part:
        part.write_text(json.dumps(config, indent=2) + "\n")


def tensors(params: Params) -> dict[str, np.ndarray]:
    """A tree like the parameters, as float32 arrays by their names in the files."""
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
    """What the shapes of tensors do not tell is as the model has it. A file without a config is taken as it is."""
    if not file.is_file():
        return
    config = read_json(file)
    if not isinstance(config, dict):
        raise UserError(f"{file} is no table of settings")
    sizes = {"n_head": model.size.heads, "n_layer": model.size.depth}
    for name, value in {"model_type": "gpt2", **sizes, "tie_word_embeddings": True, **FIXED}.items():
        if (given := config.get(name, value)) != value and given not in OTHER_WORDS.get(name, ()):
            raise ValueError(f"{file} is of another model: {name} is {repr(given)[:50]}, and this one has {value!r}")


def _check_tensors(files: TensorFiles, prefix: str, wanted: list[Tensor]) -> None:
    """The files have the model's tensors, in its shapes, and no other."""
    for tensor in wanted:
        name = prefix + tensor.name
        if name not in files.tensors:
            raise ValueError(f"{files.place} has no tensor '{name}', which this model has")
        stored = files.tensors[name]
        if not _fits(tensor, stored):
            shapes = f"has shape {list(stored.shape)}, and this model's has {list(tensor.shape)}"
            raise ValueError(f"{stored.file}: tensor '{name}' {shapes}{WHY.get(tensor.name, '')}")
        if stored.dtype not in FLOATS:
            raise ValueError(f"{stored.file}: tensor '{name}' is {stored.dtype}, not one of {', '.join(FLOATS)}")
    for name in files.tensors.keys() - {prefix + tensor.name for tensor in wanted} - {OUTPUT}:
        if not name.endswith(MASKS):
            raise ValueError(f"{files.tensors[name].file} has tensor '{name}', which this model has not")


def _fits(tensor: Tensor, stored: Stored) -> bool:
    """Whether a tensor has the shape that is wanted, but for rows that may be left out."""
    if tensor.name not in (TOKENS, POSITIONS) or len(stored.shape) != 2:
        return stored.shape == tensor.shape
    (rows, width), (given, given_width) = tensor.shape, stored.shape
    most = rows + min(MOST_PADDING, rows // 4) if tensor.name == TOKENS else given
    return given_width == width and rows <= given <= most


def _parameter(files: TensorFiles, prefix: str, members: tuple[Tensor, ...]) -> np.ndarray:
    """A parameter, float32; where each layer has one, all of them stacked along a first axis."""
    arrays = [files.read(prefix + tensor.name, tensor.shape[0]) for tensor in members]
    return np.stack(arrays) if members[0].layer is not None else arrays[0]


def _check_output(files: TensorFiles, prefix: str, vocabulary: int) -> None:
    """An output layer, where the files have one, is the embedding."""
    if OUTPUT in files.tensors and not np.array_equal(
        files.read(OUTPUT, vocabulary), files.read(prefix + TOKENS, vocabulary)
    ):
        file = files.tensors[OUTPUT].file
        raise ValueError(f"{file}: tensor '{OUTPUT}' is not the embedding, as this model's output layer is")


def _tensors(params: Params) -> Iterator[tuple[Tensor, ...]]:
    """The tensors of each parameter, in the tree's order."""
    for leaf, places in zip(jax.tree.leaves(params), places_of(params), strict=True):
        stacked = bool(places[0].layer)
        shape = tuple(leaf.shape[1:] if stacked else leaf.shape)
        yield tuple(Tensor(_name(place.path), shape, i if stacked else None) for i, place in enumerate(places))


def _name(path: str) -> str:
    """What a parameter is called there: "h/3/attn/c_attn/kernel" is "h.3.attn.c_attn.weight", `[in, out]` in both."""
    *parents, last = path.split("/")
    return ".".join((*parents, "bias" if last == "bias" else "weight"))
