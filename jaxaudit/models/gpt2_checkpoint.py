"""GPT-2's parameters in Hugging Face's files: `config.json` and `model.safetensors` or its shards: arrays, no code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from safetensors.numpy import save_file

from jaxaudit.models import tensor_files
from jaxaudit.models.gpt2 import GPT2, Params, init_params
from jaxaudit.models.tensor_files import FLOATS, WEIGHTS, Stored, TensorFiles
from jaxaudit.runtime.errors import UserError
from jaxaudit.runtime.files import read_json
from jaxaudit.runtime.machine import written_whole
from jaxaudit.runtime.paths import places_of

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
    files = tensor_files.find(Path(path))
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
    files = tensor_files.find(Path(path))
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
