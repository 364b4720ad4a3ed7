"""Sampling of tokens from GPT-2: a cache of keys and values, truncation of logits, and `generate`."""

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
from jaxaudit.runtime.sharding import MODEL_AXIS, constrain, constrain_tree, is_split

BLOCK = 32
"""Number of cache slots whose attention is unrolled into one sum. A longer cache is read in blocks up to the slot."""

MASKED_SCORE = -1e30
"""The attention score of a masked slot. It is finite, so that a block of masked slots does not result in NaN."""

PADDING = -1
"""The value of entries of token arrays that hold no token."""


@struct.dataclass
class Cache:
    """The keys and values of the tokens so far.

    Attributes:
      keys, values: one array per layer, `[S, heads, d, N]` in the model's dtype, with S slots. If S is greater than
        `BLOCK` it is a multiple of `BLOCK`.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]


def unstack_layers(params: Params | Adapted, heads: int = 0) -> Params:
    """Returns the parameters with a tuple of layers under "h", as `prefill` and `decode` take them.

    It is meant to be called once, outside of the loop over slots. The matrices of dense layers are transposed to
    `[outputs, inputs]`, because XLA's CPU backend multiplies these faster with rows that are stored as columns. Where
    several devices share a lane, queries, keys and values are split by `heads`, `[3, heads, d, inputs]`.
    """
    tree: Params = constrain_tree(joined(params), partition)
    stacked = tree["h"].layers
    # All layers are transposed at once: one by one, they would need twice the memory.
    stacked = _inputs_last(_split_by_heads(stacked, heads) if is_split() else stacked)
    depth = jax.tree.leaves(stacked)[0].shape[0]
    return {**tree, "h": tuple(jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(depth))}


def _split_by_heads(layers: Params, heads: int) -> Params:
    projections = {name: x if name == "a" else by_heads(x, heads) for name, x in layers["attn"]["c_attn"].items()}
    return {**layers, "attn": {**layers["attn"], "c_attn": projections}}


def _inputs_last(layers: Params) -> Params:
    """Moves the inputs' axis of dense layers' matrices `[depth, inputs, ...]` to the end, `[depth, ..., inputs]`."""
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
    """Processes the first P tokens at once, and returns hidden states `[N, P, width]` and the cache.

    Args:
      model: the model, of which sizes and dtype are used.
      unrolled: its parameters, from `unstack_layers`.
      tokens: int `[N, P]`.
      slots: number of slots that the cache must have.
      positions, first: int `[N, P]`, as in `gpt2.apply`.
    """
    rows, width = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(width), tokens.shape) if positions is None else positions
    capacity = slots if slots <= BLOCK else -(-slots // BLOCK) * BLOCK
    keys: list[jax.Array] = []
    values: list[jax.Array] = []

    def attend(*projections):
        unflattened = [x.reshape(*x.shape[:2], rows, width) for x in projections]  # [heads, d, N, P]
        for cached, x in zip((keys, values), unflattened[1:], strict=True):
            cached.append(jnp.pad(jnp.transpose(x, (3, 0, 1, 2)), ((0, capacity - width), (0, 0), (0, 0), (0, 0))))
        query, key, value = (jnp.transpose(x, (2, 3, 0, 1)) for x in unflattened)
        mixed = causal_attention(query, key, value, first=first)
        return jnp.transpose(mixed, (2, 3, 0, 1)).reshape(projections[0].shape)

    x = _embed(model, unrolled, tokens.reshape(-1), positions.reshape(-1))
    for layer in unrolled["h"]:
        x = _layer(model, layer, x, attend)
    hidden = _norm(model, unrolled["ln_f"], x).T.reshape(rows, width, -1)
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
    """Processes one token of each row, and returns hidden states `[N, width]` for the next token and the cache.

    Args:
      model: the model, of which sizes and dtype are used.
      unrolled: its parameters, from `unstack_layers`.
      token: int `[N]`, the tokens.
      position: int `[N]`, their positional embeddings.
      first: int `[N]`, the first slot that each token attends to, at most `slot`.
      slot: int, the slot to write. Under `jax.vmap` it must be a scalar that is not mapped, so that a write remains a
        slice.
      cache: the cache of the slots before.
    """
    x = _embed(model, unrolled, token, position)
    keys, values = [], []
    for layer, old_keys, old_values in zip(unrolled["h"], cache.keys, cache.values, strict=True):

        def attend(query, key, value, old_keys=old_keys, old_values=old_values):
            keys.append(jax.lax.dynamic_update_slice(old_keys, key[None], (slot, 0, 0, 0)))
            values.append(jax.lax.dynamic_update_slice(old_values, value[None], (slot, 0, 0, 0)))
            return _read_cache(query, keys[-1], values[-1], first, slot)

        x = _layer(model, layer, x, attend)
    return _norm(model, unrolled["ln_f"], x).T, Cache(tuple(keys), tuple(values))


@struct.dataclass
class _PartialSoftmax:
    """Softmax and weighted sum over the blocks so far (Dao et al., 2022, "FlashAttention"); float32.

    Attributes:
      largest: the largest score, `[heads, N]`.
      total: sum of exp(score - largest), `[heads, N]`.
      mixed: sum of the values with these weights, `[heads, d, N]`.
    """

    largest: jax.Array
    total: jax.Array
    mixed: jax.Array


def _read_cache(
    query: jax.Array, keys: jax.Array, values: jax.Array, first: jax.Array, slot: jax.Array | int
) -> jax.Array:
    """Returns the attention of a query `[heads, d, N]` to the slots `first` to `slot`, in the values' dtype."""
    query = query.astype(jnp.float32) / np.sqrt(query.shape[1])

    def block(start, size):
        slots = start + jnp.arange(size)[:, None]
        mask = ((slots >= first) & (slots <= slot))[:, None]
        key, value = (jax.lax.dynamic_slice_in_dim(x, start, size).astype(jnp.float32) for x in (keys, values))
        scores = jnp.where(mask, _sum(query[:, i] * key[:, :, i] for i in range(query.shape[1])), MASKED_SCORE)
        largest = jnp.max(scores, axis=0)
        weights = jnp.exp(scores - largest)
        total = jnp.sum(weights, 0)
        return _PartialSoftmax(largest, total, _sum(weights[i, :, None] * value[i] for i in range(size)))

    def add_block(number, so_far):
        added = block(number * BLOCK, BLOCK)
        largest = jnp.maximum(so_far.largest, added.largest)
        old, new = jnp.exp(so_far.largest - largest), jnp.exp(added.largest - largest)
        mixed = old[:, None] * so_far.mixed + new[:, None] * added.mixed
        return _PartialSoftmax(largest, old * so_far.total + new * added.total, mixed)

    softmax = block(0, min(len(keys), BLOCK))
    if len(keys) > BLOCK:
        softmax = jax.lax.fori_loop(1, slot // BLOCK + 1, add_block, softmax)
    return (softmax.mixed / softmax.total[:, None]).astype(values.dtype)


# XLA's CPU backend vectorises sums of arrays, but not a reduction over an axis.
def _sum(terms: Iterable[jax.Array]) -> jax.Array:
    return functools.reduce(operator.add, terms)


Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def _layer(model: GPT2, params: Params, x: jax.Array, attend: Attend) -> jax.Array:
    """Returns the stream `[width, M]` after a layer, where `attend` takes query, key, value `[heads, d, M]`."""
    projections = _projections(model, params["attn"]["c_attn"], _norm(model, params["ln_1"], x))
    x = x + _dense(model, params["attn"]["c_proj"], attend(*projections).reshape(x.shape))
    inner = _dense(model, params["mlp"]["c_fc"], _norm(model, params["ln_2"], x))
    return x + _dense(model, params["mlp"]["c_proj"], jax.nn.gelu(inner, approximate=True))


def _projections(model: GPT2, params: Params, x: jax.Array) -> jax.Array:
    """Maps `[width, M]` to queries, keys and values, `[3, heads, d, M]`."""
    if not is_split():
        return _dense(model, params, x).reshape(3, model.size.heads, -1, x.shape[1])
    cast = {name: value.astype(model.dtype) for name, value in params.items()}
    y = jnp.einsum("khdi,im->khdm", cast["kernel"], x) + cast["bias"][..., None]
    if "a" in cast:
        y += jnp.einsum("khdi,im->khdm", cast["b"], cast["a"] @ x)
    return constrain(y, None, MODEL_AXIS, None, None)


def _embed(model: GPT2, params: Params, tokens: jax.Array, positions: jax.Array) -> jax.Array:
    token_table, position_table = (params[name]["embedding"].astype(model.dtype) for name in ("wte", "wpe"))
    return (constrain(token_table[tokens], None, None) + constrain(position_table[positions], None, None)).T


def _dense(model: GPT2, params: Params, x: jax.Array) -> jax.Array:
    cast = {name: value.astype(model.dtype) for name, value in params.items()}
    y = cast["kernel"] @ x + cast["bias"][:, None]
    return y + cast["b"] @ (cast["a"] @ x) if "a" in cast else y


def _norm(model: GPT2, params: Params, x: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    centred = x - jnp.mean(x, axis=0)
    inverse = jax.lax.rsqrt(jnp.mean(centred**2, axis=0) + 1e-5)
    return (centred * inverse * params["scale"][:, None] + params["bias"][:, None]).astype(model.dtype)


def truncate_logits(logits: jax.Array, top_k: int = 0, top_p: jax.Array | float = 1.0) -> tuple[jax.Array, jax.Array]:
    """Returns logits in which truncated tokens have -inf, and the probability mass of these tokens, float32 `[...]`.

    Top-k comes first, then top-p (Holtzman et al., 2020) on the remaining tokens, as in transformers. Top-p removes a
    token if it and all less likely tokens together have at most the probability 1 - top_p; the likeliest token always
    remains. Tokens as likely as the last remaining one remain too. In transformers this is so for top-k, while for
    top-p the order of its sort decides.

    Args:
      logits: float32 `[..., V]`, divided by the sampling temperature.
      top_k: number of the likeliest tokens that remain; 0 means all.
      top_p: scalar, which may be traced. A Python number of 1 or more adds no computation.
    """
    remaining = logits
    if 0 < top_k < logits.shape[-1]:
        remaining = jnp.where(remaining < jax.lax.top_k(remaining, top_k)[0][..., -1:], -jnp.inf, remaining)
    if _truncates(top_p):
        ascending = jnp.sort(remaining, axis=-1)
        mass = jnp.cumsum(jax.nn.softmax(ascending), axis=-1)
        least = jnp.min(jnp.where(mass > 1.0 - top_p, ascending, ascending[..., -1:]), axis=-1, keepdims=True)
        remaining = jnp.where((remaining < least) & (jnp.asarray(top_p) < 1.0), -jnp.inf, remaining)
    removed_mass = jnp.sum(jnp.where(remaining == -jnp.inf, jax.nn.softmax(logits), 0.0), axis=-1)
    return remaining, removed_mass


def _truncates(top_p: jax.Array | float) -> bool:
    return not isinstance(top_p, (int, float)) or top_p < 1.0


def log_probability_of(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the log-probability of tokens, int `[...]`, under the softmax of logits `[..., V]`: float32 `[...]`."""
    return jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0] - jax.nn.logsumexp(logits, axis=-1)


@jax.custom_batching.custom_vmap
def all_finished(finished: jax.Array) -> jax.Array:
    """Returns whether all rows are finished, bool `[N]`, so that no more tokens need to be sampled: a bool scalar.

    Under `jax.vmap` the result is that of all lanes together and is not batched. A loop that ends by it therefore
    keeps its slices; one that ended for each lane by itself would copy every lane's cache at every token.
    """
    return jnp.all(finished)


@all_finished.def_vmap
def _(lanes: int, batched: list[bool], finished: jax.Array) -> tuple[jax.Array, bool]:
    return all_finished(finished.reshape(-1)), False


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
    """Continues prompts, each from its own end, by sampling or greedy decoding::

        model = GPT2(50257, 1024, gpt2.SIZES["124m"])
        params = gpt2_checkpoint.load("gpt2", model)
        sequences, log_probability = generate(model, params, [[464, 3290]], jax.random.key(0), tokens=20)

    Args:
      model: the model, of which sizes and dtype are used.
      params: its parameters, with or without adapters.
      prompts: int `[N, P]`, each of at least one token, followed by `PADDING`.
      key: PRNG key. A row's samples depend on its index and on no other row.
      tokens: the largest number of tokens that a row gets. Sampling stops early when all rows are finished.
      temperature: the logits are divided by it. With `greedy` this changes only the log-probabilities.
      top_k, top_p: as in `truncate_logits`.
      greedy: whether to take the likeliest token instead of sampling.
      end: the token after which a row is finished, which is part of the row. None means that there is none.

    Returns:
      The tokens, int32 `[N, P + tokens]`, with `PADDING` after a row's last token; and the log-probability of the
      sampled tokens at the temperature, before truncation, float32 `[N, P + tokens]`, 0 elsewhere.

    Raises:
      ValueError: `tokens` is below 1, or prompts have another shape, are empty, have unknown tokens, or do not fit into
        the model's context.
    """
    _check(model, prompts, tokens)
    prompts = jnp.asarray(prompts, jnp.int32)
    return _generate(model, tokens, top_k, _truncates(top_p), greedy, end, params, prompts, key, temperature, top_p)


@functools.partial(jax.jit, static_argnums=range(6))
def _generate(model, tokens, top_k, nucleus, greedy, end, params, prompts, key, temperature, top_p):
    # Each prompt is shifted to end at slot P - 1, so that all rows write the same slot; the slots before are masked.
    rows, width = prompts.shape
    lengths = jnp.sum(prompts != PADDING, axis=1)
    missing = width - lengths
    slots = jnp.arange(width)
    positions = jnp.maximum(slots - missing[:, None], 0)
    shifted = jnp.take_along_axis(prompts, positions, axis=1)
    first = jnp.minimum(missing[:, None], slots)
    unrolled = unstack_layers(params, model.size.heads)
    hidden, cache = prefill(model, unrolled, shifted, width + tokens, positions=positions, first=first)

    def write_slot(carry):
        slot, hidden, finished, cache, sampled, log_probs = carry
        logits = gpt2.logits(params, hidden) / temperature
        remaining, _ = truncate_logits(logits, top_k, top_p if nucleus else 1.0)
        sample = jax.random.categorical(jax.random.fold_in(key, slot), remaining)
        token = (jnp.argmax(remaining, axis=-1) if greedy else sample).astype(jnp.int32)
        log_prob = log_probability_of(logits, token)
        put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=slot - width, axis=0)
        sampled = put(sampled, jnp.where(finished, PADDING, token).astype(sampled.dtype))
        log_probs = put(log_probs, jnp.where(finished, 0.0, log_prob).astype(log_probs.dtype))
        hidden, cache = decode(model, unrolled, token, slot - missing, missing, slot, cache)
        finished = finished if end is None else finished | (token == end)
        return slot + 1, hidden, finished, cache, sampled, log_probs

    empty = jnp.full((tokens, rows), PADDING, jnp.int32), jnp.zeros((tokens, rows))
    *_, sampled, log_probs = jax.lax.while_loop(
        lambda carry: (carry[0] < width + tokens) & ~all_finished(carry[2]),
        write_slot,
        (width, hidden[:, -1], jnp.zeros(rows, bool), cache, *empty),
    )
    # The sampled tokens are shifted back to the end of each row's prompt.
    offsets = jnp.arange(width + tokens) - lengths[:, None]
    is_sampled = (offsets >= 0) & (offsets < tokens)
    indices = jnp.clip(offsets, 0, tokens - 1)
    padded_prompts = jnp.pad(prompts, ((0, 0), (0, tokens)), constant_values=PADDING)
    return (
        jnp.where(is_sampled, jnp.take_along_axis(sampled.T, indices, axis=1), padded_prompts),
        jnp.where(is_sampled, jnp.take_along_axis(log_probs.T, indices, axis=1), 0.0),
    )


def _check(model: GPT2, prompts: Any, tokens: int) -> None:
    if np.ndim(prompts) != 2:
        raise ValueError(f"prompts must have two axes, [rows, tokens], not {np.ndim(prompts)}")
    if tokens < 1:
        raise ValueError(f"tokens must be at least 1, not {tokens}")
    if isinstance(prompts, jax.core.Tracer):
        return
    prompts = np.asarray(prompts)
    lengths = np.sum(prompts != PADDING, axis=1)
    after_end = np.arange(prompts.shape[1]) >= lengths[:, None]
    if ((prompts == PADDING) != after_end).any() or (lengths < 1).any():
        raise ValueError(f"each prompt must have at least one token, and {PADDING} only after its last token")
    if prompts.max() >= model.vocabulary or prompts.min() < PADDING:
        raise ValueError(
            f"prompts must have tokens from 0 to {model.vocabulary - 1}, not from {prompts.min()} to {prompts.max()}"
        )
    if lengths.max() + tokens > model.context:
        raise ValueError(
            f"prompts of up to {lengths.max()} tokens and {tokens} more do not fit into the context of {model.context}"
        )
