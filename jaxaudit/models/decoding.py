"""GPT-2 token by token, with a cache of keys and values: the same function of the same parameters as `gpt2.apply`.

The layers are unrolled and each has a cache of its own, which is written at one slot that all rows share: a cache that
went through a scan over layers would be copied at every token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxaudit.kernels.attention import causal_attention
from jaxaudit.kernels.layer_norm import layer_norm
from jaxaudit.models.gpt2 import GPT2, Params, adapted
from jaxaudit.models.lora import Adapted, joined


@struct.dataclass
class Cache:
    """What attention has seen so far.

    Attributes:
      keys, values: of each layer, `[N, S, heads, d]` in the model's dtype, S slots.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]


def layers_of(params: Params | Adapted) -> dict[str, Any]:
    """The parameters, "h" a tuple of the layers' own; to be called once, outside the loop over slots."""
    params = joined(params)
    stacked = params["h"].layers
    depth = jax.tree.leaves(stacked)[0].shape[0]
    return {**params, "h": tuple(jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(depth))}


def prefill(
    model: GPT2,
    params: Params | Adapted,
    tokens: jax.Array,
    slots: int,
    positions: jax.Array | None = None,
    first: jax.Array | None = None,
) -> tuple[jax.Array, Cache]:
    """What the first P slots hold, all at once: hidden states `[N, P, width]` and the cache.

    Args:
      model: its sizes and dtype.
      params: its parameters.
      tokens: int `[N, P]`.
      slots: S, how many the cache has room for.
      positions, first: as `gpt2.apply` takes them, `[N, P]`.
    """
    unrolled = layers_of(params)
    positions = jnp.arange(tokens.shape[1]) if positions is None else positions
    x = _embedded(model, unrolled, tokens, positions)
    room = [(0, 0), (0, slots - tokens.shape[1]), (0, 0), (0, 0)]
    keys, values = [], []

    def attend(query, key, value):
        keys.append(jnp.pad(key, room))
        values.append(jnp.pad(value, room))
        return causal_attention(query, key, value, first=first)

    for layer in unrolled["h"]:
        x = _layer(model, layer, x, attend)
    return _norm(model, unrolled["ln_f"], x), Cache(tuple(keys), tuple(values))


def decode(
    model: GPT2,
    unrolled: dict[str, Any],
    token: jax.Array,
    position: jax.Array,
    first: jax.Array,
    slot: jax.Array,
    cache: Cache,
) -> tuple[jax.Array, Cache]:
    """Writes one token of each row: hidden states `[N, width]`, from which the next one is predicted, and the cache.

    Args:
      model: its sizes and dtype.
      unrolled: its parameters, from `layers_of`.
      token: int `[N]`, what stands in the slot.
      position: int `[N]`, its position's embedding.
      first: int `[N]`, the first slot that it sees.
      slot: int, a scalar; under `jax.vmap` one that is not mapped, so that a write stays a slice.
      cache: of the slots before.
    """
    x = _embedded(model, unrolled, token, position)
    slots = jnp.arange(cache.keys[0].shape[1])
    visible = ((slots >= first[:, None]) & (slots <= slot))[:, None]
    keys, values = [], []
    for layer, old_keys, old_values in zip(unrolled["h"], cache.keys, cache.values, strict=True):

        def attend(query, key, value, old_keys=old_keys, old_values=old_values):
            keys.append(jax.lax.dynamic_update_slice(old_keys, key[:, None], (0, slot, 0, 0)))
            values.append(jax.lax.dynamic_update_slice(old_values, value[:, None], (0, slot, 0, 0)))
            return _read(query, keys[-1], values[-1], visible)

        x = _layer(model, layer, x, attend)
    return _norm(model, unrolled["ln_f"], x), Cache(tuple(keys), tuple(values))


def _read(query, keys, values, visible):
    scores = jnp.einsum("nhd,nshd->nhs", query, keys, preferred_element_type=jnp.float32)
    scores = jnp.where(visible, scores / np.sqrt(query.shape[-1]), -jnp.inf)
    return jnp.einsum("nhs,nshd->nhd", jax.nn.softmax(scores).astype(values.dtype), values)


Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def _layer(model: GPT2, params: Params, x: jax.Array, attend: Attend) -> jax.Array:
    """The stream `[..., width]` after a layer; `attend` gets and gives `[..., heads, d]`."""
    joint = _dense(model, params["attn"]["c_attn"], _norm(model, params["ln_1"], x))
    parts = (part.reshape(*x.shape[:-1], model.size.heads, -1) for part in jnp.split(joint, 3, axis=-1))
    x = x + _dense(model, params["attn"]["c_proj"], attend(*parts).reshape(x.shape))
    inner = _dense(model, params["mlp"]["c_fc"], _norm(model, params["ln_2"], x))
    return x + _dense(model, params["mlp"]["c_proj"], jax.nn.gelu(inner, approximate=True))


def _embedded(model: GPT2, params: Params, tokens: jax.Array, positions: jax.Array) -> jax.Array:
    tables = (params[name]["embedding"].astype(model.dtype) for name in ("wte", "wpe"))
    return sum(table[index] for table, index in zip(tables, (tokens, positions), strict=True))


def _dense(model: GPT2, params: Params, x: jax.Array) -> jax.Array:
    y = x @ params["kernel"].astype(model.dtype) + params["bias"].astype(model.dtype)
    return y + adapted(x, params["a"], params["b"]) if "a" in params else y


def _norm(model: GPT2, params: Params, x: jax.Array) -> jax.Array:
    return layer_norm(x, params["scale"], params["bias"], 1e-5, model.dtype)
