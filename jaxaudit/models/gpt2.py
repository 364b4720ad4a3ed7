"""GPT-2 (Radford et al., 2019), a decoder-only transformer with pre-layer norms and a tied output, and its adapters.

The adapters are low-rank changes of the dense layers (Hu et al., 2022, "LoRA"), which are trained in the place of the
weights. A layer computes `x W + bias + (alpha / rank) (x a) b`. The matrices a and b are kept apart from W, which
several lanes can share.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxaudit.kernels.attention import attention_entropy, causal_attention
from jaxaudit.kernels.layers import layer_norm, lookup, product
from jaxaudit.runtime.paths import Stack
from jaxaudit.runtime.sharding import MODEL_AXIS, constrain, constrain_tree, is_split

Params = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """The size of a transformer.

    Attributes:
      width: width of the residual stream, divisible by `heads`.
      depth: number of layers.
      heads: number of attention heads in each layer.
    """

    width: int
    depth: int
    heads: int


SIZES = {
    "micro": Size(64, 2, 4),
    "nano": Size(96, 4, 4),
    "mini": Size(384, 6, 6),
    "124m": Size(768, 12, 12),
    "355m": Size(1024, 24, 16),
    "774m": Size(1280, 36, 20),
}
"""The sizes of the paper's models, named by their parameters with GPT-2's vocabulary, and three sizes for CPUs."""

UNROLLED = 4
"""Up to this number, layers are unrolled, which spares the copies of a loop; more would take long to compile."""


SPLIT = {
    "wte/embedding": -2,
    "wpe/embedding": -1,
    "attn/c_attn/kernel": -2,
    "attn/c_proj/kernel": -2,
    "mlp/c_fc/kernel": -1,
    "mlp/c_fc/bias": -1,
    "mlp/c_proj/kernel": -2,
    "attn/c_proj/a": -2,
    "mlp/c_fc/b": -1,
    "mlp/c_proj/a": -2,
}
"""The axis along which a parameter is split, counted from the last, by the end of its path; all others are replicated.

Heads and inner units are distributed over devices. The kernel of queries, keys and values is split by its inputs
instead, because an even part of its joined outputs is not a number of heads; a layer redistributes it by heads when it
is computed.
"""


def partition(path: str, shape: tuple[int, ...]) -> tuple[str | None, ...]:
    """Returns how a parameter is split where several devices share a lane.

    It applies as well to arrays whose paths end like parameters' paths, for example moments and gradients.
    """
    for end, axis in SPLIT.items():
        if path.endswith(end) and len(shape) >= -axis:
            return tuple(MODEL_AXIS if i == len(shape) + axis else None for i in range(len(shape)))
    return ()


def indivisible(model: GPT2) -> dict[str, int]:
    """Returns the numbers of parts that are not split across devices, by name: the attention heads."""
    return {"attention heads": model.size.heads}


class GPT2(nn.Module):
    """The transformer without its output layer: tokens `[B, T]` to the final hidden states `[B, T, width]`.

    The logits are `hidden @ embedding.T`, where the embedding is `params["wte"]["embedding"]`.

    Attributes:
      vocabulary: number of tokens in the vocabulary.
      context: the largest number of tokens in a sequence.
      size: width, depth and heads.
      dtype: dtype of activations and products. Parameters, norms, softmax and losses are float32.
      remat: whether the backward pass computes layers again, so that it holds the activations of one layer at a time.
      observe: whether the entropy of attention is measured.
      attention: "xla" for `causal_attention`, or "cudnn" for cuDNN's fused attention, in bfloat16 on NVIDIA's GPUs,
        where every token attends to all tokens before it.
    """

    vocabulary: int
    context: int
    size: Size
    dtype: Any = jnp.float32
    remat: bool = False
    observe: bool = False
    attention: str = "xla"

    @nn.compact
    def __call__(
        self, tokens: jax.Array, positions: jax.Array | None = None, first: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns hidden states in `dtype`, and each layer's mean entropy of attention, `[depth]`, in nats.

        The entropies are zero unless `observe` is true.

        Args:
          tokens: int `[B, T]`.
          positions: int `[B, T]`, the positional embedding of each token; 0 to T - 1 by default.
          first: int `[B, T]`, the index of the first token that each token attends to, at most its own; 0 by default.
        """
        depth = self.size.depth
        x = constrain(self._embedding("wte", self.vocabulary)(tokens), None, None, None)
        position_embedding = self._embedding("wpe", self.context)
        if positions is None:
            x += constrain(position_embedding.first(x.shape), None, None, None)
        else:
            x += constrain(position_embedding(positions), None, None, None)
        layer = nn.remat(Layer, prevent_cse=False) if self.remat else Layer
        layers = nn.scan(
            layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=depth,
            unroll=1 if self.remat or depth > UNROLLED else depth,
        )
        x, entropies = layers(self.size, self.dtype, self.observe, self.attention, name="h")(x, first)
        return Norm(self.dtype, name="ln_f")(x), entropies

    def _embedding(self, name: str, entries: int) -> Embedding:
        return Embedding(
            entries, self.size.width, dtype=self.dtype, embedding_init=nn.initializers.normal(0.02), name=name
        )


class Embedding(nn.Embed):
    """An embedding whose gradient is accumulated in the dtype of the parameters."""

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns the rows of entries, int `[...]` to `[..., width]`."""
        return lookup(self.embedding, inputs, self.dtype)

    def first(self, shape: tuple[int, ...]) -> jax.Array:
        """Returns the rows of entries 0 to T - 1 for `[..., T, width]`, a slice whose gradient needs no scatter."""
        return broadcast_rows(self.embedding[: shape[-2]], shape, self.dtype)


class Layer(nn.Module):
    """A transformer layer: attention and a multi-layer perceptron, each added to the residual stream.

    The initial weights that lead back to the stream are smaller the more of them there are. The attributes are those of
    `GPT2`.
    """

    size: Size
    dtype: Any
    observe: bool
    attention: str

    @nn.compact
    def __call__(self, x: jax.Array, first: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Returns the stream `[B, T, width]` after this layer, and the attention's entropy; see `GPT2.__call__`."""
        std = 0.02 / np.sqrt(2 * self.size.depth)
        attention = Attention(self.size.heads, std, self.dtype, self.observe, self.attention, name="attn")
        change, entropy = attention(Norm(self.dtype, name="ln_1")(x), first)
        x = x + change
        return x + Perceptron(std, self.dtype, name="mlp")(Norm(self.dtype, name="ln_2")(x)), entropy


class Attention(nn.Module):
    """Causal self-attention with several heads.

    Attributes:
      heads, dtype, observe, attention: as in `GPT2`.
      output_std: standard deviation of the output projection's initial weights.
    """

    heads: int
    output_std: float
    dtype: Any
    observe: bool
    attention: str

    @nn.compact
    def __call__(self, x: jax.Array, first: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Maps `[B, T, width]` to `[B, T, width]` and the mean entropy of attention; see `GPT2.__call__`."""
        width = x.shape[-1]
        query, key, value = dense(3 * width, 0.02, self.dtype, "c_attn", heads=self.heads)(x)
        if self.attention == "cudnn" and first is None:
            mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")
        else:
            mixed = causal_attention(query, key, value, first=first)
        mixed = constrain(mixed, None, None, MODEL_AXIS, None).reshape(x.shape)
        change = constrain(dense(width, self.output_std, self.dtype, "c_proj")(mixed), None, None, None)
        return change, attention_entropy(query, key, first) if self.observe else jnp.zeros(())


class Perceptron(nn.Module):
    """Two dense layers, of which the inner one is four times as wide; the attributes are those of `Attention`."""

    output_std: float
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        inner = _gelu(constrain(dense(4 * x.shape[-1], 0.02, self.dtype, "c_fc")(x), None, None, MODEL_AXIS))
        return constrain(dense(x.shape[-1], self.output_std, self.dtype, "c_proj")(inner), None, None, None)


# The backward pass computes this again: storing its intermediate values for every layer takes longer.
@functools.partial(jax.checkpoint, prevent_cse=False)
def _gelu(x: jax.Array) -> jax.Array:
    return nn.gelu(x, approximate=True)


class Norm(nn.Module):
    """Layer normalisation, computed in float32, with a result in `dtype`."""

    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
        bias = self.param("bias", nn.initializers.zeros, x.shape[-1:])
        return layer_norm(x, scale, bias, 1e-5, self.dtype)


class Dense(nn.Dense):
    """A dense layer, with an adapter if its parameters have the entries "a" and "b" (see `joined`).

    The bias' gradient is summed over all rows in float32.
    """

    use_bias: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = super().__call__(x)
        y += broadcast_rows(self.param("bias", nn.initializers.zeros, (self.features,)), y.shape, self.dtype)
        if not self.has_variable("params", "a"):
            return y
        a: jax.Array = self.get_variable("params", "a").astype(self.dtype)
        b: jax.Array = self.get_variable("params", "b").astype(self.dtype)
        return y + x.astype(self.dtype) @ a @ b


class Projections(Dense):
    """Queries, keys and values of all heads as one dense layer.

    Attributes:
      heads: number of attention heads.
    """

    heads: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, ...]:  # type: ignore[override]
        """Maps `[..., width]` to queries, keys and values, `[..., heads, d]` each."""
        if not is_split() or self.is_initializing():
            joint = super().__call__(x)
            return tuple(part.reshape(*x.shape[:-1], self.heads, -1) for part in jnp.split(joint, 3, axis=-1))
        params = {name: value.astype(self.dtype) for name, value in self.variables["params"].items()}
        x = x.astype(self.dtype)
        y = _project(x, by_heads(params["kernel"], self.heads))
        y += broadcast_rows(by_heads(self.variables["params"]["bias"], self.heads), y.shape, self.dtype)
        if "a" in params:
            y += _project(x @ params["a"], by_heads(params["b"], self.heads))
        return tuple(jnp.moveaxis(y, -3, 0))


def broadcast_rows(rows: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Broadcasts rows `[..., width]` to a shape and converts them to a dtype.

    The rows' gradient is summed in float32, before it is rounded to the dtype.
    """
    return jnp.broadcast_to(rows, shape).astype(dtype)


def by_heads(weights: jax.Array, heads: int) -> jax.Array:
    """Reshapes weights `[..., 3 width]` of queries, keys and values to `[..., 3, heads, d]`, split by heads."""
    reshaped = weights.reshape(*weights.shape[:-1], 3, heads, -1)
    return constrain(reshaped, *(None,) * (reshaped.ndim - 2), MODEL_AXIS, None)


def _project(x: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.einsum("...i,ikhd->...khd", x, weights)


def dense(features: int, std: float, dtype: Any, name: str, heads: int = 0) -> Dense:
    """Returns a dense layer with normal initial weights, or with `heads` the layer of queries, keys and values."""
    kind = functools.partial(Projections, heads=heads) if heads else Dense
    return kind(features, dtype=dtype, kernel_init=nn.initializers.normal(std), dot_general=_dot_general, name=name)


def _dot_general(x: jax.Array, weights: jax.Array, *_: Any, **__: Any) -> jax.Array:
    return product(x, weights)


def init_params(model: GPT2, key: jax.Array) -> Params:
    """Returns initial parameters, float32, in which the layers are a `Stack` under the name "h"."""
    params = model.init(key, jnp.zeros((1, 1), jnp.int32))["params"]
    return {**params, "h": Stack(params["h"])}


LORA_ALPHA = 16.0
"""The default factor of an adapter's change, which is multiplied with alpha / rank."""

LORA_LAYERS = ("attn/c_attn", "attn/c_proj", "mlp/c_fc", "mlp/c_proj")
"""The dense layers that can have adapters, by their paths in a transformer's layer."""


@struct.dataclass
class Adapted:
    """A model's parameters with adapters, which can take the place of plain parameters everywhere.

    Attributes:
      base: parameters as returned by `init_params`, which are not trained.
      adapters: adapters as returned by `init_adapters`.
      alpha: the adapters' change is multiplied with alpha / rank.
    """

    base: Any
    adapters: Any
    alpha: float = struct.field(pytree_node=False, default=LORA_ALPHA)


def init_adapters(model: GPT2, rank: int, key: jax.Array) -> dict[str, Any]:
    """Returns initial adapters, float32, which do not change the model yet because each `b` is zero.

    An adapter adds a multiple of `a @ b` to the weight matrix of each of `LORA_LAYERS`. The result has one entry "h", a
    `Stack` of the model's layers with leaves such as "attn/c_attn/a".

    Args:
      model: the model to adapt.
      rank: the rank of the change of each weight matrix.
      key: PRNG key of the `a` `[depth, in, rank]`, which are uniform between -1 / sqrt(in) and 1 / sqrt(in), as in the
        code of LoRA's authors. The `b` are `[depth, rank, out]`.
    """
    width, depth = model.size.width, model.size.depth
    shapes = (width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)
    stack: dict[str, Any] = {}
    for index, (path, (inputs, outputs)) in enumerate(zip(LORA_LAYERS, shapes, strict=True)):
        part, name = path.split("/")
        layer_key = jax.random.fold_in(key, index)
        bound = 1.0 / np.sqrt(inputs)
        a = jax.random.uniform(layer_key, (depth, inputs, rank), jnp.float32, -bound, bound)
        stack.setdefault(part, {})[name] = {"a": a, "b": jnp.zeros((depth, rank, outputs))}
    return {"h": Stack(stack)}


def joined(params: Any) -> dict[str, Any]:
    """Returns one tree of parameters, in which adapted layers have the entries "a" and "b", the latter scaled."""
    if not isinstance(params, Adapted):
        return params
    stack = {part: dict(layers) for part, layers in params.base["h"].layers.items()}
    for part, layers in params.adapters["h"].layers.items():
        for name, adapter in layers.items():
            scale = params.alpha / adapter["a"].shape[-1]
            stack[part][name] = {**stack[part][name], "a": adapter["a"], "b": scale * adapter["b"]}
    return {**params.base, "h": Stack(stack)}


def merged(adapted: Adapted) -> dict[str, Any]:
    """Returns equivalent parameters without adapters, W + (alpha / rank) a b, computed in float64 on the host."""
    params = jax.tree.map(np.asarray, adapted.base)
    stack = params["h"].layers
    for part, layers in adapted.adapters["h"].layers.items():
        for name, adapter in layers.items():
            a, b = (np.asarray(adapter[matrix], np.float64) for matrix in ("a", "b"))
            kernel = stack[part][name]["kernel"].astype(np.float64) + adapted.alpha / a.shape[-1] * (a @ b)
            stack[part][name]["kernel"] = kernel.astype(np.float32)
    return params


def apply(
    model: GPT2,
    params: Params | Adapted,
    tokens: jax.Array,
    positions: jax.Array | None = None,
    first: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns hidden states and attention entropies, as `GPT2.__call__` does, for parameters of `init_params`."""
    tree: Params = constrain_tree(joined(params), partition)
    return model.apply({"params": {**tree, "h": tree["h"].layers}}, tokens, positions, first)  # type: ignore[return-value]


def embedding(params: Params | Adapted) -> jax.Array:
    """Returns the tokens' embedding, float32 `[V, width]`, which is the weight of the output layer too."""
    return constrain_tree(joined(params), partition)["wte"]["embedding"]


def logits(params: Params | Adapted, hidden: jax.Array) -> jax.Array:
    """Returns the next token's logits, float32 `[..., V]`, by products in the dtype of `hidden`."""
    weights = embedding(params).astype(hidden.dtype)
    return jnp.einsum("...d,vd->...v", hidden, weights, preferred_element_type=jnp.float32)
