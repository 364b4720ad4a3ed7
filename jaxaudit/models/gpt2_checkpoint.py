"""GPT-2's parameters in Hugging Face's files: `config.json` and `model.safetensors`, which holds arrays and no code."""

from __future__ import annotations

import json
import math
import operator
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxaudit.machine import written_whole
from jaxaudit.models.gpt2 import GPT2, Params, init_params
from jaxaudit.paths import places_of

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
PREFIX = "transformer."
"""Begins every name in files of the model with its output layer, and is missing in those without."""

FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Types that are read, and bytes of a number."""

MASKS = (".attn.bias", ".attn.masked_bias")
"""End the names of tensors that old files have and that are no parameters: which places attention sees."""

OUTPUT = "lm_head.weight"
"""The output layer, which is the embedding again."""

FIXED = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
}
"""What `GPT2` does, in the words of config.json, whose defaults they are."""


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
    """A model's parameters, float32, from a folder or a safetensors file.

    Raises:
      ValueError: in one sentence: no such file, a damaged one, or one of another model; names the tensor.
    """
    folder = Path(path)
    file = folder / WEIGHTS if folder.is_dir() else folder
    if not file.is_file():
        raise ValueError(f"{file}: there is no such file")
    _check_config(file.parent / CONFIG, model)
    header = _header(file)
    prefix = PREFIX if any(name.startswith(PREFIX) for name in header) else ""
    shapes = jax.eval_shape(lambda key: init_params(model, key), jax.random.key(0))
    leaves, structure = jax.tree.flatten(shapes)
    wanted = list(_tensors(shapes))
    _check_tensors(file, header, prefix, [tensor for members in wanted for tensor in members])
    try:
        with safe_open(file, framework="numpy") as opened:
            found = [_parameter(opened, prefix, members, file) for members in wanted]
            _check_output(opened, header, prefix, file)
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged: {error}") from None
    return jax.tree.unflatten(structure, [x.reshape(leaf.shape) for x, leaf in zip(found, leaves, strict=True)])


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
    with written_whole(folder / WEIGHTS) as part:
        save_file(tensors(params), part, metadata={"format": "pt"})
    with written_whole(folder / CONFIG) as part:
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
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} is no table of settings")
    wanted = {"n_head": model.size.heads, "n_layer": model.size.depth, "tie_word_embeddings": True, **FIXED}
    for name, value in wanted.items():
        if (given := config.get(name, value)) != value:
            raise ValueError(f"{file} is of another model: {name} is {given!r}, and this one has {value!r}")


def _header(file: Path) -> dict[str, Any]:
    """What a safetensors file says of its tensors, by name; each is whole and of numbers that can be read."""
    size = file.stat().st_size
    with open(file, "rb") as opened:
        try:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(length) if length < size else b"")
            header.pop("__metadata__", None)
            offsets = {name: tuple(map(operator.index, told["data_offsets"])) for name, told in header.items()}
            shapes = {name: tuple(map(operator.index, told["shape"])) for name, told in header.items()}
            types = {name: str(told["dtype"]) for name, told in header.items()}
            ordered = sorted((begin, end, name) for name, (begin, end) in offsets.items())
        except (struct.error, ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{file} is not a safetensors file, or its header is damaged") from None
    at = 0
    for begin, end, name in ordered:
        if types[name] in FLOATS and end - begin != math.prod(shapes[name]) * FLOATS[types[name]]:
            shape = f"{types[name]} {list(shapes[name])}"
            raise ValueError(f"{file} is damaged: tensor '{name}' has {end - begin} bytes, which are not {shape}")
        if begin != at or end < begin:
            raise ValueError(f"{file} is damaged: tensor '{name}' begins at byte {begin}, not {at}")
        if 8 + length + end > size:
            raise ValueError(f"{file} is cut off: it ends within tensor '{name}'")
        at = end
    if 8 + length + at < size:
        raise ValueError(f"{file} is damaged: it has {size - 8 - length - at} bytes after its last tensor")
    return header


def _check_tensors(file: Path, header: dict[str, Any], prefix: str, wanted: list[Tensor]) -> None:
    """The file has the model's tensors, in its shapes, and no other."""
    names = {prefix + tensor.name: tensor.shape for tensor in wanted}
    for name, shape in names.items():
        if name not in header:
            raise ValueError(f"{file} has no tensor '{name}', which this model has")
        if (given := tuple(header[name]["shape"])) != shape:
            raise ValueError(f"{file}: tensor '{name}' has shape {list(given)}, and this model's has {list(shape)}")
        if header[name]["dtype"] not in FLOATS:
            raise ValueError(f"{file}: tensor '{name}' is {header[name]['dtype']}, not one of {', '.join(FLOATS)}")
    for name in header.keys() - names.keys() - {OUTPUT}:
        if not name.endswith(MASKS):
            raise ValueError(f"{file} has tensor '{name}', which this model has not")


def _parameter(opened: Any, prefix: str, members: tuple[Tensor, ...], file: Path) -> np.ndarray:
    """A parameter, its layers stacked."""
    arrays = [_array(opened, prefix + tensor.name, file) for tensor in members]
    return np.stack(arrays) if members[0].layer is not None else arrays[0]


def _array(opened: Any, name: str, file: Path) -> np.ndarray:
    try:
        array = np.asarray(opened.get_tensor(name)).astype(np.float32)
    except (SafetensorError, TypeError, ValueError) as error:
        raise ValueError(f"{file}: tensor '{name}' cannot be read: {error}") from None
    if not np.isfinite(array).all():
        raise ValueError(f"{file}: tensor '{name}' has entries that are not finite")
    return array


def _check_output(opened: Any, header: dict[str, Any], prefix: str, file: Path) -> None:
    """An output layer, where the file has one, is the embedding."""
    if OUTPUT in header and not np.array_equal(
        _array(opened, OUTPUT, file), _array(opened, f"{prefix}wte.weight", file)
    ):
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
