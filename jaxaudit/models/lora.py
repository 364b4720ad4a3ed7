"""Low-rank adapters of a GPT-2's dense layers (Hu et al., 2022, "LoRA"), which are trained in the place of its weights.

A layer computes `x W + bias + (alpha / rank) (x a) b`: the two small matrices stay apart from W, which several lanes
share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxaudit.runtime.paths import Stack

if TYPE_CHECKING:
    from jaxaudit.models.gpt2 import GPT2

ALPHA = 16.0
"""What an adapter's change is multiplied with, times its rank."""

LAYERS = ("attn/c_attn", "attn/c_proj", "mlp/c_fc", "mlp/c_proj")
"""The dense layers that there are, by their paths in a transformer's layer."""


@struct.dataclass
class Adapted:
    """A model's parameters and adapters of them, wherever parameters alone can stand.

    Attributes:
      base: parameters as `gpt2.init_params` makes them, which are not trained.
      adapters: as `init_adapters` makes them.
      alpha: the change is multiplied with alpha / rank.
    """

    base: Any
    adapters: Any
    alpha: float = struct.field(pytree_node=False, default=ALPHA)


def init_adapters(model: GPT2, rank: int, key: jax.Array, layers: tuple[str, ...] = LAYERS) -> dict[str, Any]:
    """Initial adapters, float32, which change nothing: a `Stack` called "h" with leaves like "attn/c_attn/a".

    Args:
      model: theirs.
      rank: of the change of each weight matrix.
      key: for `a` `[depth, in, rank]`, uniform within 1 / sqrt(in) as in the authors' code; `b` `[depth, rank, out]` is
        zero.
      layers: which of `LAYERS` have them.

    Raises:
      ValueError: a rank below 1, or no or unknown layers.
    """
    if rank < 1:
        raise ValueError(f"rank {rank} of adapters is not 1 or more")
    if not layers or any(layer not in LAYERS for layer in layers):
        raise ValueError(f"layers {layers} of adapters are not some of {', '.join(LAYERS)}")
    width, depth = model.size.width, model.size.depth
    shapes = dict(
        zip(LAYERS, ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)), strict=True)
    )
    stack: dict[str, Any] = {}
    for path in layers:
        part, name = path.split("/")
        inputs, outputs = shapes[path]
        # A stream of its own for each layer's place in `LAYERS`, so that what others there are changes nothing.
        own = jax.random.fold_in(key, LAYERS.index(path))
        bound = 1.0 / np.sqrt(inputs)
        a = jax.random.uniform(own, (depth, inputs, rank), jnp.float32, -bound, bound)
        stack.setdefault(part, {})[name] = {"a": a, "b": jnp.zeros((depth, rank, outputs))}
    return {"h": Stack(stack)}


def joined(params: Any) -> dict[str, Any]:
    """One tree of parameters, in which an adapted layer has "a" and "b", already scaled, beside "kernel" and "bias"."""
    if not isinstance(params, Adapted):
        return params
    stack = {part: dict(layers) for part, layers in params.base["h"].layers.items()}
    for part, layers in params.adapters["h"].layers.items():
        for name, own in layers.items():
            scale = params.alpha / own["a"].shape[-1]
            stack[part][name] = {**stack[part][name], "a": own["a"], "b": scale * own["b"]}
    return {**params.base, "h": Stack(stack)}


def merged(adapted: Adapted) -> dict[str, Any]:
    """Parameters of the plain model that computes the same: W + (alpha / rank) a b, in float64 on the host."""
    params = joined(jax.tree.map(np.asarray, adapted))
    stack = {part: dict(layers) for part, layers in params["h"].layers.items()}
    for part, layers in adapted.adapters["h"].layers.items():
        for name, own in layers.items():
            a, b = (np.asarray(own[each], np.float64) for each in ("a", "b"))
            kernel = np.asarray(stack[part][name]["kernel"], np.float64) + adapted.alpha / a.shape[-1] * (a @ b)
            stack[part][name] = {"kernel": kernel.astype(np.float32), "bias": stack[part][name]["bias"]}
    return {**params, "h": Stack(stack)}
