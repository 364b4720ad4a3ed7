"""GPT-2 (Radford et al., 2019): a decoder-only transformer with layer norms before its parts and a tied output."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxaudit.kernels.attention import causal_attention
from jaxaudit.kernels.layers import layer_norm, lookup, product
from jaxaudit.runtime.paths import Stack
from jaxaudit.runtime.sharding import MODEL, along, is_split, split

if TYPE_CHECKING:
    pass  # merged

LORA_ALPHA = 16.0
"""What an adapter's change is multiplied with, times its rank."""

LORA_LAYERS = ("attn/c_attn", "attn/c_proj", "mlp/c_fc", "mlp/c_proj")
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
    alpha: float = struct.field(pytree_node=False, default=LORA_ALPHA)


def init_adapters(model: GPT2, rank: int, key: jax.Array, layers: tuple[str, ...] = LORA_LAYERS) -> dict[str, Any]:
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
    if not layers or any(layer not in LORA_LAYERS for layer in layers):
        raise ValueError(f"layers {layers} of adapters are not some of {', '.join(LORA_LAYERS)}")
    width, depth = model.size.width, model.size.depth
    shapes = dict(
        zip(LORA_LAYERS, ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)), strict=True)
    )
    stack: dict[str, Any] = {}
    for path in layers:
        part, name = path.split("/")
        inputs, outputs = shapes[path]
        # A stream of its own for each layer's place in `LAYERS`, so that what others there are changes nothing.
        own = jax.random.fold_in(key, LORA_LAYERS.index(path))
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


Params = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """How large a transformer is.

    Attributes:
      width: of the residual stream; divisible by `heads`.
      depth: layers.
      heads: of attention, in each layer.
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
"""The sizes of the paper's models (their millions of parameters, at GPT-2's vocabulary), and three for CPUs."""

UNROLLED = 4
"""Up to so many layers are written out one by one, which spares what a loop copies; more would take long to compile."""


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
"""Which axis of a parameter is split, counted from its last, by the end of its path; others are whole on each device.

Heads and inner units are dealt out. Queries, keys and values lie joined, head after head, so that an even part of them
is not some heads': that kernel lies split by its inputs, and a layer that is computed deals it out by heads.
"""


def partition(path: str, shape: tuple[int, ...]) -> tuple[str | None, ...]:
    """How parameters, and what has their paths and axes, e.g. moments, are split where several devices share a lane."""
    for end, axis in SPLIT.items():
        if path.endswith(end) and len(shape) >= -axis:
            return tuple(MODEL if i == len(shape) + axis else None for i in range(len(shape)))
    return ()


def indivisible(model: GPT2) -> dict[str, int]:
    """How many there are of what no device can have a part of."""
    return {"attention heads": model.size.heads}


class GPT2(nn.Module):
    """The transformer without its output layer: tokens `[B, T]` to the final hidden states `[B, T, width]`.

    The logits are `hidden @ embedding.T` with the embedding of the tokens, `params["wte"]["embedding"]`.

    Attributes:
      vocabulary: tokens there are.
      context: the most tokens a sequence has.
      size: width, depth, heads.
      dtype: of activations and products; parameters are float32, as are norms, softmax and losses.
      remat: layers are computed again in the backward pass, which then keeps one layer's activations at a time.
      observe: measure the entropy of attention.
      attention: "xla", `causal_attention`; or "cudnn", cuDNN's fused attention, in bfloat16 on NVIDIA's GPUs, where
        every token sees all before it.
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
        """Hidden states, in `dtype`, and each layer's mean entropy of attention `[depth]`, in nats; else zeros.

        Args:
          tokens: int `[B, T]`.
          positions: int `[B, T]`, which embedding each token's place has; 0 to T - 1 unless given.
          first: int `[B, T]`, the first place that each one sees, at most itself; 0 unless given.
        """
        depth = self.size.depth
        x = along(self._embedding("wte", self.vocabulary)(tokens), None, None, None)
        of_positions = self._embedding("wpe", self.context)
        if positions is None:
            x += along(of_positions.first(x.shape), None, None, None)
        else:
            x += along(of_positions(positions), None, None, None)
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
    """A row for each of its entries, whose gradient is summed in the type of the parameters."""

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """The rows of entries, int `[...]` to `[..., width]`."""
        return lookup(self.embedding, inputs, self.dtype)

    def first(self, shape: tuple[int, ...]) -> jax.Array:
        """The rows of entries from 0 on for `[..., T, width]`: a slice, whose gradient needs no scatter."""
        return over_rows(self.embedding[: shape[-2]], shape, self.dtype)


class Layer(nn.Module):
    """Attention and a multi-layer perceptron, each added to the residual stream.

    The weights that lead back to it begin smaller the more of them there are. The attributes are `GPT2`'s.
    """

    size: Size
    dtype: Any
    observe: bool
    attention: str

    @nn.compact
    def __call__(self, x: jax.Array, first: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """The stream `[B, T, width]` after this layer, and the attention's entropy; `first` is `GPT2.__call__`'s."""
        std = 0.02 / np.sqrt(2 * self.size.depth)
        attention = Attention(self.size.heads, std, self.dtype, self.observe, self.attention, name="attn")
        change, entropy = attention(Norm(self.dtype, name="ln_1")(x), first)
        x = x + change
        return x + Perceptron(std, self.dtype, name="mlp")(Norm(self.dtype, name="ln_2")(x)), entropy


class Attention(nn.Module):
    """Causal self-attention with several heads.

    Attributes:
      heads, dtype, observe, attention: as in `GPT2`.
      output_std: of the output's initial weights.
    """

    heads: int
    output_std: float
    dtype: Any
    observe: bool
    attention: str

    @nn.compact
    def __call__(self, x: jax.Array, first: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """`[B, T, width]` to the same, and the mean entropy over heads and places; `first` is `GPT2.__call__`'s."""
        width = x.shape[-1]
        query, key, value = dense(3 * width, 0.02, self.dtype, "c_attn", heads=self.heads)(x)
        if self.attention == "cudnn" and first is None:
            mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")
        else:
            mixed = causal_attention(query, key, value, first=first)
        mixed = along(mixed, None, None, MODEL, None).reshape(x.shape)
        change = along(dense(width, self.output_std, self.dtype, "c_proj")(mixed), None, None, None)
        return change, attention_entropy(query, key, first) if self.observe else jnp.zeros(())


class Perceptron(nn.Module):
    """Two dense layers, the inner one four times as wide; the attributes are `Attention`'s."""

    output_std: float
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        inner = _gelu(along(dense(4 * x.shape[-1], 0.02, self.dtype, "c_fc")(x), None, None, MODEL))
        return along(dense(x.shape[-1], self.output_std, self.dtype, "c_proj")(inner), None, None, None)


@functools.partial(jax.checkpoint, prevent_cse=False)
def _gelu(x: jax.Array) -> jax.Array:
    """Computed again in the backward pass: to keep its parts for every layer takes longer."""
    return nn.gelu(x, approximate=True)


class Norm(nn.Module):
    """Layer normalisation, computed in float32; `dtype` is the result's."""

    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
        bias = self.param("bias", nn.initializers.zeros, x.shape[-1:])
        return layer_norm(x, scale, bias, 1e-5, self.dtype)


class Dense(nn.Dense):
    """A dense layer, with an adapter where its parameters have one (`lora.joined`).

    The bias' gradient is summed over all rows in float32.
    """

    use_bias: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = super().__call__(x)
        y += over_rows(self.param("bias", nn.initializers.zeros, (self.features,)), y.shape, self.dtype)
        if not self.has_variable("params", "a"):
            return y
        a: jax.Array = self.get_variable("params", "a").astype(self.dtype)
        b: jax.Array = self.get_variable("params", "b").astype(self.dtype)
        return y + x.astype(self.dtype) @ a @ b


class Projections(Dense):
    """Queries, keys and values of all heads as one dense layer.

    Attributes:
      heads: of attention.
    """

    heads: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, ...]:  # type: ignore[override]
        """`[..., width]` to three of `[..., heads, d]`."""
        if not is_split() or self.is_initializing():
            joint = super().__call__(x)
            return tuple(part.reshape(*x.shape[:-1], self.heads, -1) for part in jnp.split(joint, 3, axis=-1))
        own = {name: value.astype(self.dtype) for name, value in self.variables["params"].items()}
        x = x.astype(self.dtype)
        y = _times(x, by_heads(own["kernel"], self.heads))
        y += over_rows(by_heads(self.variables["params"]["bias"], self.heads), y.shape, self.dtype)
        if "a" in own:
            y += _times(x @ own["a"], by_heads(own["b"], self.heads))
        return tuple(jnp.moveaxis(y, -3, 0))


def over_rows(rows: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Rows `[..., width]` for all of a shape, in a type; their gradient is summed before it could be rounded to it."""
    return jnp.broadcast_to(rows, shape).astype(dtype)


def by_heads(weights: jax.Array, heads: int) -> jax.Array:
    """Weights `[..., 3 width]` of queries, keys and values as `[..., 3, heads, d]`, dealt out by heads."""
    apart = weights.reshape(*weights.shape[:-1], 3, heads, -1)
    return along(apart, *(None,) * (apart.ndim - 2), MODEL, None)


def _times(x: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.einsum("...i,ikhd->...khd", x, weights)


def dense(features: int, std: float, dtype: Any, name: str, heads: int = 0) -> Dense:
    """A dense layer with normal initial weights; with `heads`, that of attention's queries, keys and values."""
    kind = functools.partial(Projections, heads=heads) if heads else Dense
    return kind(features, dtype=dtype, kernel_init=nn.initializers.normal(std), dot_general=_multiplied, name=name)


def _multiplied(x: jax.Array, weights: jax.Array, *_: Any, **__: Any) -> jax.Array:
    return product(x, weights)


def attention_entropy(query: jax.Array, key: jax.Array, first: jax.Array | None = None) -> jax.Array:
    """Mean entropy, in nats, of causal attention `[B, T, heads, d]`, over sequences, places and heads; float32."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32) / np.sqrt(query.shape[-1])
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    if first is not None:
        causal &= jnp.arange(key.shape[1]) >= first[:, None, :, None]
    logits = jax.nn.log_softmax(jnp.where(causal, scores, -jnp.inf))
    return -jnp.mean(jnp.sum(jnp.where(causal, jnp.exp(logits) * logits, 0.0), axis=-1))


def init_params(model: GPT2, key: jax.Array) -> Params:
    """Initial parameters, float32; the layers are a `Stack` called "h"."""
    params = model.init(key, jnp.zeros((1, 1), jnp.int32))["params"]
    return {**params, "h": Stack(params["h"])}


def apply(
    model: GPT2,
    params: Params | Adapted,
    tokens: jax.Array,
    positions: jax.Array | None = None,
    first: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Hidden states and attention entropies, as `GPT2.__call__`, of parameters as `init_params` makes them."""
    whole: Params = split(joined(params), partition)
    return model.apply({"params": {**whole, "h": whole["h"].layers}}, tokens, positions, first)  # type: ignore[return-value]


def embedding(params: Params | Adapted) -> jax.Array:
    """The tokens' embedding, float32 `[V, width]`, which is the output layer's weights too."""
    return split(joined(params), partition)["wte"]["embedding"]


def logits(params: Params | Adapted, hidden: jax.Array) -> jax.Array:
    """Returns the logits of the next token, float32 `[..., V]`, for hidden states `[..., width]`, multiplied in their
    dtype.
    """
    weights = embedding(params).astype(hidden.dtype)
    return jnp.einsum("...d,vd->...v", hidden, weights, preferred_element_type=jnp.float32)


def count(params: Any) -> int:
    """Parameters there are, by arrays or shapes."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params))
