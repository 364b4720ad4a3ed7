"""GPT-2 token by token, with a cache of keys and values: the same function of the same parameters as `gpt2.apply`.

The layers are unrolled and each has a cache of its own, written at one slot that all rows share: a cache that went
through a scan over layers would be copied at every token. Rows are the last axis of everything here, `[features, N]`:
attention of one token is sums of products too small for matrix products, and XLA's CPU backend vectorises them over
rows where they are written out.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxaudit.kernels.attention import causal_attention
from jaxaudit.models.gpt2 import GPT2, Params, by_heads, partition
from jaxaudit.models.lora import Adapted, joined
from jaxaudit.runtime.sharding import MODEL, along, is_split, split

BLOCK = 32
"""Slots whose attention is written out as one sum; more are read so many at a time, as far as they are written."""

UNSEEN = -1e30
"""The score of a slot that is not seen; finite, so that a block without any that is leaves no NaN."""


@struct.dataclass
class Cache:
    """What attention has seen so far.

    Attributes:
      keys, values: of each layer, `[S, heads, d, N]` in the model's dtype: S slots, above `BLOCK` a multiple of it.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]


def layers_of(params: Params | Adapted, heads: int = 0) -> Params:
    """The parameters, "h" a tuple of the layers' own; to be called once, outside the loop over slots.

    Matrices of dense layers are `[outputs, inputs]`: XLA's CPU backend multiplies these faster with rows that lie in
    columns. Where several devices share a lane, queries, keys and values are dealt out by `heads`:
    `[3, heads, d, inputs]`.
    """
    whole: Params = split(joined(params), partition)
    stacked = whole["h"].layers
    # All layers' at once: turned one by one they would be there twice.
    stacked = _inputs_last(_by_heads(stacked, heads) if is_split() else stacked)
    depth = jax.tree.leaves(stacked)[0].shape[0]
    return {**whole, "h": tuple(jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(depth))}


def _by_heads(layers: Params, heads: int) -> Params:
    own = {name: x if name == "a" else by_heads(x, heads) for name, x in layers["attn"]["c_attn"].items()}
    return {**layers, "attn": {**layers["attn"], "c_attn": own}}


def _inputs_last(layers: Params) -> Params:
    """With the dense layers' matrices `[depth, inputs, ...]` as `[depth, ..., inputs]`."""
    matrices = ("kernel", "a", "b")
    return {
        name: _inputs_last(x) if isinstance(x, dict) else jnp.moveaxis(x, 1, -1) if name in matrices else x
        for name, x in layers.items()
    }


def prefill(
    model: GPT2,
    unrolled: Params,
    tokens: jax.Array,
    slots: int,
    positions: jax.Array | None = None,
    first: jax.Array | None = None,
) -> tuple[jax.Array, Cache]:
    """Writes the first P slots, all at once: hidden states `[N, P, width]` and the cache.

    Args:
      model: its sizes and dtype.
      unrolled: its parameters, from `layers_of`.
      tokens: int `[N, P]`.
      slots: how many the cache is to have room for.
      positions, first: int `[N, P]`, as `gpt2.apply` takes them.
    """
    rows, places = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(places), tokens.shape) if positions is None else positions
    room = slots if slots <= BLOCK else -(-slots // BLOCK) * BLOCK
    keys: list[jax.Array] = []
    values: list[jax.Array] = []

    def attend(*parts):
        apart = [part.reshape(*part.shape[:2], rows, places) for part in parts]  # [heads, d, N, P]
        for kept, part in zip((keys, values), apart[1:], strict=True):
            kept.append(jnp.pad(jnp.transpose(part, (3, 0, 1, 2)), ((0, room - places), (0, 0), (0, 0), (0, 0))))
        query, key, value = (jnp.transpose(part, (2, 3, 0, 1)) for part in apart)
        mixed = causal_attention(query, key, value, first=first)
        return jnp.transpose(mixed, (2, 3, 0, 1)).reshape(parts[0].shape)

    x = _embedded(model, unrolled, tokens.reshape(-1), positions.reshape(-1))
    for layer in unrolled["h"]:
        x = _layer(model, layer, x, attend)
    hidden = _norm(model, unrolled["ln_f"], x).T.reshape(rows, places, -1)
    return hidden, Cache(tuple(keys), tuple(values))


def decode(
    model: GPT2,
    unrolled: Params,
    token: jax.Array,
    position: jax.Array,
    first: jax.Array,
    slot: jax.Array | int,
    cache: Cache,
) -> tuple[jax.Array, Cache]:
    """Writes one token of each row: hidden states `[N, width]`, from which the next one is predicted, and the cache.

    Args:
      model: its sizes and dtype.
      unrolled: its parameters, from `layers_of`.
      token: int `[N]`, what is written.
      position: int `[N]`, its position's embedding.
      first: int `[N]`, the first slot that it sees, at most `slot`.
      slot: int, where; under `jax.vmap` a scalar that is not mapped, so that a write stays a slice.
      cache: of the slots before.
    """
    x = _embedded(model, unrolled, token, position)
    keys, values = [], []
    for layer, old_keys, old_values in zip(unrolled["h"], cache.keys, cache.values, strict=True):

        def attend(query, key, value, old_keys=old_keys, old_values=old_values):
            keys.append(jax.lax.dynamic_update_slice(old_keys, key[None], (slot, 0, 0, 0)))
            values.append(jax.lax.dynamic_update_slice(old_values, value[None], (slot, 0, 0, 0)))
            return _read(query, keys[-1], values[-1], first, slot)

        x = _layer(model, layer, x, attend)
    return _norm(model, unrolled["ln_f"], x).T, Cache(tuple(keys), tuple(values))


@struct.dataclass
class _CacheReading:
    """Softmax and weighted sum over the blocks so far (Dao et al., 2022, "FlashAttention"); float32.

    Attributes:
      largest: score, `[heads, N]`.
      total: of exp(score - largest), `[heads, N]`.
      mixed: sum of the values with these weights, `[heads, d, N]`.
    """

    largest: jax.Array
    total: jax.Array
    mixed: jax.Array


def _read(query: jax.Array, keys: jax.Array, values: jax.Array, first: jax.Array, slot: jax.Array | int) -> jax.Array:
    """What a query `[heads, d, N]` reads in the slots from `first` to `slot`, in the values' dtype."""
    query = query.astype(jnp.float32) / np.sqrt(query.shape[1])

    def block(start, size):
        """The block's own reading."""
        seen = start + jnp.arange(size)[:, None]
        seen = ((seen >= first) & (seen <= slot))[:, None]
        key, value = (jax.lax.dynamic_slice_in_dim(x, start, size).astype(jnp.float32) for x in (keys, values))
        scores = jnp.where(seen, _sum_of(query[:, i] * key[:, :, i] for i in range(query.shape[1])), UNSEEN)
        largest = jnp.max(scores, axis=0)
        weights = jnp.exp(scores - largest)
        return _CacheReading(largest, jnp.sum(weights, 0), _sum_of(weights[i, :, None] * value[i] for i in range(size)))

    def further(number, so_far):
        here = block(number * BLOCK, BLOCK)
        largest = jnp.maximum(so_far.largest, here.largest)
        old, new = jnp.exp(so_far.largest - largest), jnp.exp(here.largest - largest)
        mixed = old[:, None] * so_far.mixed + new[:, None] * here.mixed
        return _CacheReading(largest, old * so_far.total + new * here.total, mixed)

    found = block(0, min(len(keys), BLOCK))
    if len(keys) > BLOCK:
        found = jax.lax.fori_loop(1, slot // BLOCK + 1, further, found)
    return (found.mixed / found.total[:, None]).astype(values.dtype)


def _sum_of(terms: Iterable[jax.Array]) -> jax.Array:
    """Of arrays, one by one: XLA's CPU backend does a reduction of them entry by entry."""
    return functools.reduce(operator.add, terms)


Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def _layer(model: GPT2, params: Params, x: jax.Array, attend: Attend) -> jax.Array:
    """The stream `[width, M]` after a layer; `attend`: query, key and value `[heads, d, M]` to what is read."""
    parts = _projections(model, params["attn"]["c_attn"], _norm(model, params["ln_1"], x))
    x = x + _dense(model, params["attn"]["c_proj"], attend(*parts).reshape(x.shape))
    inner = _dense(model, params["mlp"]["c_fc"], _norm(model, params["ln_2"], x))
    return x + _dense(model, params["mlp"]["c_proj"], jax.nn.gelu(inner, approximate=True))


def _projections(model: GPT2, params: Params, x: jax.Array) -> jax.Array:
    """`[width, M]` to queries, keys and values, `[3, heads, d, M]`."""
    if not is_split():
        return _dense(model, params, x).reshape(3, model.size.heads, -1, x.shape[1])
    own = {name: value.astype(model.dtype) for name, value in params.items()}
    y = jnp.einsum("khdi,im->khdm", own["kernel"], x) + own["bias"][..., None]
    if "a" in own:
        y += jnp.einsum("khdi,im->khdm", own["b"], own["a"] @ x)
    return along(y, None, MODEL, None, None)


def _embedded(model: GPT2, params: Params, tokens: jax.Array, positions: jax.Array) -> jax.Array:
    """Int `[M]` each to `[width, M]`."""
    of_tokens, of_positions = (params[name]["embedding"].astype(model.dtype) for name in ("wte", "wpe"))
    return (along(of_tokens[tokens], None, None) + along(of_positions[positions], None, None)).T


def _dense(model: GPT2, params: Params, x: jax.Array) -> jax.Array:
    """`[inputs, M]` to `[outputs, M]`."""
    own = {name: value.astype(model.dtype) for name, value in params.items()}
    y = own["kernel"] @ x + own["bias"][:, None]
    return y + own["b"] @ (own["a"] @ x) if "a" in own else y


def _norm(model: GPT2, params: Params, x: jax.Array) -> jax.Array:
    """As `gpt2.Norm`, over the first axis."""
    whole = x.astype(jnp.float32)
    apart = whole - jnp.mean(whole, axis=0)
    inverse = jax.lax.rsqrt(jnp.mean(apart**2, axis=0) + 1e-5)
    return (apart * inverse * params["scale"][:, None] + params["bias"][:, None]).astype(model.dtype)
