"""Tokens drawn from GPT-2: greedily, at a temperature, and from the likeliest alone."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxaudit.kernels.attention import causal_attention
from jaxaudit.models import gpt2
from jaxaudit.models.gpt2 import GPT2, Adapted, Params, by_heads, joined, partition
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
    of_tokens, of_positions = (params[name]["embedding"].astype(model.dtype) for name in ("wte", "wpe"))
    return (along(of_tokens[tokens], None, None) + along(of_positions[positions], None, None)).T


def _dense(model: GPT2, params: Params, x: jax.Array) -> jax.Array:
    own = {name: value.astype(model.dtype) for name, value in params.items()}
    y = own["kernel"] @ x + own["bias"][:, None]
    return y + own["b"] @ (own["a"] @ x) if "a" in own else y


def _norm(model: GPT2, params: Params, x: jax.Array) -> jax.Array:
    whole = x.astype(jnp.float32)
    apart = whole - jnp.mean(whole, axis=0)
    inverse = jax.lax.rsqrt(jnp.mean(apart**2, axis=0) + 1e-5)
    return (apart * inverse * params["scale"][:, None] + params["bias"][:, None]).astype(model.dtype)


NOTHING = -1
"""In the place of a token where there is none."""


def truncated(logits: jax.Array, top_k: int = 0, top_p: jax.Array | float = 1.0) -> tuple[jax.Array, jax.Array]:
    """Logits with -inf where a token is cut off, and the mass of probability that was, float32 `[...]`.

    Top-k first, then top-p (Holtzman et al., 2020) on what is left, as transformers does. A token falls to top-p where
    it and those less likely have at most 1 - top_p together; the likeliest stays. Tokens as likely as the last one that
    stays do so too; with transformers that holds of top-k, while of top-p its sort decides.

    Args:
      logits: float32 `[..., V]`, at the temperature that is sampled at.
      top_k: how many of the likeliest stay; 0 for all.
      top_p: scalar, may be traced; a Python number of 1 or more costs nothing.
    """
    kept = logits
    if 0 < top_k < logits.shape[-1]:
        kept = jnp.where(kept < jax.lax.top_k(kept, top_k)[0][..., -1:], -jnp.inf, kept)
    if not isinstance(top_p, (int, float)) or top_p < 1.0:
        ascending = jnp.sort(kept, axis=-1)
        mass = jnp.cumsum(jax.nn.softmax(ascending), axis=-1)
        least = jnp.min(jnp.where(mass > 1.0 - top_p, ascending, ascending[..., -1:]), axis=-1, keepdims=True)
        kept = jnp.where((kept < least) & (jnp.asarray(top_p) < 1.0), -jnp.inf, kept)
    lost = jnp.sum(jnp.where(kept == -jnp.inf, jax.nn.softmax(logits), 0.0), axis=-1)
    return kept, lost


def log_probability_of(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the log-probability of tokens, int `[...]`, under the softmax of logits `[..., V]`: float32 `[...]`."""
    return jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0] - jax.nn.logsumexp(logits, axis=-1)


@jax.custom_batching.custom_vmap
def all_over(over: jax.Array) -> jax.Array:
    """Whether all rows are over, bool `[N]`, so that no more tokens need be drawn: a bool scalar.

    Under `jax.vmap` it is of all lanes together and is not batched, so that a loop that ends by it stays one of slices:
    one that ended for each lane by itself would copy every lane's cache at every token.
    """
    return jnp.all(over)


@all_over.def_vmap
def _(lanes: int, batched: list[bool], over: jax.Array) -> tuple[jax.Array, bool]:
    return all_over(over.reshape(-1)), False


@struct.dataclass
class _Writing:
    """Where a row is between two slots.

    Attributes:
      hidden: `[N, width]`, from which the next token is predicted.
      over: bool `[N]`, whether the end was written.
    """

    hidden: jax.Array
    over: jax.Array
    cache: Cache


def generate(
    model: GPT2,
    params: Params | Adapted,
    prompts: Any,
    key: jax.Array,
    *,
    tokens: int,
    temperature: jax.Array | float = 1.0,
    top_k: int = 0,
    top_p: jax.Array | float = 1.0,
    greedy: bool = False,
    end: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Continues prompts, each from where it ends.

        model = GPT2(50257, 1024, gpt2.SIZES["124m"])
        params = gpt2_checkpoint.load("gpt2", model)
        written, log_probability = generate(model, params, [[464, 3290]], jax.random.key(0), tokens=20)

    Args:
      model: its sizes and dtype.
      params: its parameters, maybe with adapters.
      prompts: int `[N, P]`, each of at least one token, and `NOTHING` after its last.
      key: for the draws; a row's depend on its place among the rows and on no other row.
      tokens: the most that a row gets; no more are computed than the longest row has.
      temperature: the logits are divided by it, also where `greedy`.
      top_k, top_p: as `truncated` takes them.
      greedy: the likeliest token, instead of one drawn.
      end: the token after which a row is over, itself included; None for no such token.

    Returns:
      tokens: int32 `[N, P + tokens]`, `NOTHING` after a row's last.
      log_probability: of the tokens written, at the temperature, before truncation: float32 `[N, P + tokens]`, 0
        elsewhere.

    Raises:
      ValueError: prompts of other shapes, empty ones, unknown tokens, or more than the model's context has places for.
    """
    _check(model, prompts, tokens)
    nucleus = not isinstance(top_p, (int, float)) or top_p < 1.0
    prompts = jnp.asarray(prompts, jnp.int32)
    return _generate(model, tokens, top_k, nucleus, greedy, end, params, prompts, key, temperature, top_p)


@functools.partial(jax.jit, static_argnums=range(6))
def _generate(model, tokens, top_k, nucleus, greedy, end, params, prompts, key, temperature, top_p):
    # Each prompt is moved to end at slot P - 1, so that all rows write the same slot; what comes before it is not seen.
    rows, width = prompts.shape
    lengths = jnp.sum(prompts != NOTHING, axis=1)
    missing = width - lengths
    slots = jnp.arange(width)
    moved = jnp.take_along_axis(prompts, jnp.maximum(slots - missing[:, None], 0), axis=1)
    first = jnp.minimum(missing[:, None], slots)
    unrolled = layers_of(params, model.size.heads)
    hidden, cache = prefill(
        model, unrolled, moved, width + tokens, positions=jnp.maximum(slots - missing[:, None], 0), first=first
    )

    def write(carry):
        slot, writing, (written, own) = carry
        logits = gpt2.logits(params, writing.hidden) / temperature
        kept, _ = truncated(logits, top_k, top_p if nucleus else 1.0)
        drawn = jax.random.categorical(jax.random.fold_in(key, slot), kept)
        token = (jnp.argmax(kept, axis=-1) if greedy else drawn).astype(jnp.int32)
        number, told = slot - width, log_probability_of(logits, token)
        put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=number, axis=0)
        written = put(written, jnp.where(writing.over, NOTHING, token).astype(written.dtype))
        own = put(own, jnp.where(writing.over, 0.0, told).astype(own.dtype))
        hidden, cache = decode(model, unrolled, token, slot - missing, missing, slot, writing.cache)
        over = writing.over if end is None else writing.over | (token == end)
        return slot + 1, _Writing(hidden, over, cache), (written, own)

    begun = _Writing(hidden[:, -1], jnp.zeros(rows, bool), cache)
    nothing = jnp.full((tokens, rows), NOTHING, jnp.int32), jnp.zeros((tokens, rows))
    _, _, (written, own) = jax.lax.while_loop(
        lambda carry: (carry[0] < width + tokens) & ~all_over(carry[1].over), write, (width, begun, nothing)
    )
    # Back to where each row's prompt ends.
    places = jnp.arange(width + tokens) - lengths[:, None]
    is_own = (places >= 0) & (places < tokens)
    taken = jnp.clip(places, 0, tokens - 1)
    given = jnp.pad(prompts, ((0, 0), (0, tokens)), constant_values=NOTHING)
    return (
        jnp.where(is_own, jnp.take_along_axis(written.T, taken, axis=1), given),
        jnp.where(is_own, jnp.take_along_axis(own.T, taken, axis=1), 0.0),
    )


def _check(model: GPT2, prompts: Any, tokens: int) -> None:
    if np.ndim(prompts) != 2:
        raise ValueError(f"prompts have {np.ndim(prompts)} axes and not two, [rows, tokens]")
    if tokens < 1:
        raise ValueError(f"tokens to write are {tokens} and not 1 or more")
    places = np.shape(prompts)[1]
    if isinstance(prompts, jax.core.Tracer):
        return
    prompts = np.asarray(prompts)
    lengths = np.sum(prompts != NOTHING, axis=1)
    if ((prompts == NOTHING) != (np.arange(places) >= lengths[:, None])).any() or (lengths < 1).any():
        raise ValueError(f"prompts have at least one token, and {NOTHING} after the last one alone")
    if prompts.max() >= model.vocabulary or prompts.min() < NOTHING:
        raise ValueError(
            f"prompts have tokens from {prompts.min()} to {prompts.max()}, and the model 0 to {model.vocabulary - 1}"
        )
    if lengths.max() + tokens > model.context:
        raise ValueError(
            f"prompts of up to {lengths.max()} tokens and {tokens} more do not fit into the context of {model.context}"
        )
