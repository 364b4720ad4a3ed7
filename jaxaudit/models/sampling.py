"""Tokens drawn from GPT-2: greedily, at a temperature, and from the likeliest alone."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxaudit.models import gpt2
from jaxaudit.models.decoding import Cache, decode, layers_of, prefill
from jaxaudit.models.gpt2 import GPT2, Params
from jaxaudit.models.lora import Adapted

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
    """Of each token int `[...]` under the softmax of logits `[..., V]`, float32 `[...]`."""
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
