"""GPT-2's parameters in Hugging Face's files: `config.json` and `model.safetensors`, which holds arrays and no code."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxaudit.models.gpt2 import GPT2, Params, init_params
from jaxaudit.paths import places_of

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
PREFIX = "transformer."
"""Begins every name in files of the model with its output layer, and is missing in those without."""

FLOATS = ("F64", "F32", "F16", "BF16")
FIXED = {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "scale_attn_weights": True}
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
    with safe_open(file, framework="numpy") as opened:
        found = [_parameter(opened, header, prefix, members, file) for members in _tensors(shapes)]
    return jax.tree.unflatten(structure, [x.reshape(leaf.shape) for x, leaf in zip(found, leaves, strict=True)])


def save(folder: str | Path, params: Params, model: GPT2) -> None:
    """Writes parameters as a folder that `transformers.GPT2LMHeadModel.from_pretrained` reads."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors(params), folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(_config(model), indent=2) + "\n")


def tensors(params: Params) -> dict[str, np.ndarray]:
    """A tree like the parameters, as float32 arrays by their names in the files."""
    return {
        PREFIX + member.name: np.ascontiguousarray(leaf if member.layer is None else leaf[member.layer], np.float32)
        for leaf, members in zip(jax.tree.leaves(params), _tensors(params), strict=True)
        for member in members
    }


def _config(model: GPT2) -> dict[str, Any]:
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
        "bos_token_id": model.vocabulary - 1,
        "eos_token_id": model.vocabulary - 1,
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
    wanted = {"n_head": model.size.heads, "tie_word_embeddings": True, **FIXED}
    for name, value in wanted.items():
        if (given := config.get(name, value)) != value:
            raise ValueError(f"{file} is of another model: {name} is {given!r}, and this one has {value!r}")


def _header(file: Path) -> dict[str, Any]:
    """What a safetensors file says of its tensors, by name; each is whole."""
    size = file.stat().st_size
    with open(file, "rb") as opened:
        try:
            (length,) = struct.unpack("<Q", opened.read(8))
            text = opened.read(length) if length < size else b""
            header = json.loads(text)
            ends = {name: value["data_offsets"][1] for name, value in header.items() if name != "__metadata__"}
        except (struct.error, ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{file} is not a safetensors file, or its header is damaged") from None
    for name, end in sorted(ends.items(), key=lambda item: item[1]):
        if 8 + length + end > size:
            raise ValueError(f"{file} is cut off: it ends within tensor '{name}'")
    return {name: header[name] for name in ends}


def _parameter(opened: Any, header: dict, prefix: str, members: tuple[Tensor, ...], file: Path) -> np.ndarray:
    """A parameter, its layers stacked."""
    arrays = []
    for tensor in members:
        name = prefix + tensor.name
        if name not in header:
            raise ValueError(f"{file} has no tensor '{name}', which this model has")
        shape = tuple(header[name]["shape"])
        if shape != tensor.shape:
            raise ValueError(
                f"{file}: tensor '{name}' has shape {list(shape)}, and this model's has {list(tensor.shape)}"
            )
        if header[name]["dtype"] not in FLOATS:
            raise ValueError(f"{file}: tensor '{name}' is {header[name]['dtype']}, not one of {', '.join(FLOATS)}")
        try:
            array = np.asarray(opened.get_tensor(name)).astype(np.float32)
        except (SafetensorError, TypeError, ValueError) as error:
            raise ValueError(f"{file}: tensor '{name}' cannot be read: {error}") from None
        if not np.isfinite(array).all():
            raise ValueError(f"{file}: tensor '{name}' has entries that are not finite")
        arrays.append(array)
    return np.stack(arrays) if members[0].layer is not None else arrays[0]


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
