"""A dialogue slot by slot: what is given at a slot, what was written there, and what the dialogue says to it.

Everything is of one row; `vmap` makes it rows. A row's slots are a loop of

    token, role = given(progress)                    # the policy writes where the role is OWN
    progress, reply = write(dialogue, progress, token)
    progress = take(progress, reply, slot)           # the reply may be disturbed in between
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxaudit.dialogues.protocol import END, NOTHING, OWN, PROMPT, TOOL, Dialogue, Reply


@struct.dataclass
class AutomatonState:
    """A row between two slots.

    Attributes:
      state: the dialogue's.
      queue: tokens that are given at the next slots, int32 `[R]`, `NOTHING` after the last.
      role: whose they are, int32.
      over: bool, whether the dialogue is.
      chunk: the slot where the next slot's chunk began, int32: the first one it sees.
      position: of the next slot in its chunk, int32.
    """

    state: Any
    queue: Any
    role: Any
    over: Any
    chunk: Any
    position: Any


@struct.dataclass
class Prefix:
    """A row's first slots, all of them given, int32 `[K]`, and its progress after them."""

    token: Any
    role: Any
    position: Any
    chunk: Any
    progress: AutomatonState


@struct.dataclass
class Replayed:
    """A row of tokens as its dialogue sees it.

    Attributes:
      role: of each slot, int32 `[T]`.
      position: of each slot in its chunk, int32 `[T]`; after the end, the one that would be next.
      chunk: the slot where each slot's chunk began, int32 `[T]`.
      agrees: bool, whether the given tokens are those that the dialogue gives, the own ones are of its vocabulary,
        and `NOTHING` comes after the end.
      reward: what the row is worth, by name, float32.
    """

    role: Any
    position: Any
    chunk: Any
    agrees: Any
    reward: dict[str, Any]


def begin(dialogue: Dialogue, key: jax.Array, difficulty: jax.Array) -> AutomatonState:
    """A row before its first slot, its prompt in the queue."""
    state, prompt = dialogue.reset(key, difficulty)
    zero = jnp.zeros((), jnp.int32)
    return AutomatonState(jax.tree.map(_strong, state), prompt.tokens, prompt.role, jnp.zeros((), bool), zero, zero)


def given(progress: AutomatonState) -> tuple[jax.Array, jax.Array]:
    """The token that is given at the next slot, 0 where none is, and its role: PROMPT, TOOL, OWN or END."""
    waiting = (progress.queue[0] >= 0) & ~progress.over
    role = jnp.where(waiting, progress.role, jnp.where(progress.over, END, OWN))
    return jnp.where(waiting, progress.queue[0], 0), role.astype(jnp.int32)


def write(dialogue: Dialogue, progress: AutomatonState, token: jax.Array) -> tuple[AutomatonState, Reply]:
    """The row after a token, given or own, was written in its next slot, and what the dialogue says to it.

    Where the dialogue is over, nothing changes and nothing is said.
    """
    state, reply = dialogue.respond(progress.state, token)
    queue = jnp.concatenate([progress.queue[1:], jnp.full((1,), NOTHING, jnp.int32)])
    after = replace(progress, state=state, queue=queue, position=progress.position + 1)
    kept, said = jax.tree.map(
        lambda before, after: jnp.where(progress.over, before, after), (progress, dialogue.own()), (after, reply)
    )
    return kept, said


def take(progress: AutomatonState, reply: Reply, slot: jax.Array) -> AutomatonState:
    """The row when it has taken a reply to what was written in a slot.

    Tokens that wait in the queue make room for the reply's. A reply without tokens, as a tool's that was lost on its
    way, is no answer: the policy goes on.
    """
    said = (reply.tokens[0] >= 0) & ((reply.role == PROMPT) | (reply.role == TOOL)) & ~progress.over
    fresh = said & reply.fresh
    return replace(
        progress,
        queue=jnp.where(said, reply.tokens, progress.queue),
        role=jnp.where(said, reply.role, progress.role),
        over=progress.over | (reply.role == END),
        chunk=jnp.where(fresh, slot + 1, progress.chunk).astype(jnp.int32),
        position=jnp.where(fresh, 0, progress.position),
    )


def prefix(dialogue: Dialogue, progress: AutomatonState, slots: int) -> Prefix:
    """A row's first slots at once, at most `prompt_length`, where the dialogue alone writes.

    Args:
      dialogue: the row's.
      progress: as `begin` gave it; its queue may be disturbed.
      slots: K.
    """

    def advance(progress: AutomatonState, slot: jax.Array) -> tuple[AutomatonState, Prefix]:
        token, role = given(progress)
        at = Prefix(token, role, progress.position, progress.chunk, None)  # type: ignore[arg-type]
        return take(*write(dialogue, progress, token), slot), at

    progress, written = jax.lax.scan(advance, progress, jnp.arange(slots, dtype=jnp.int32))
    return replace(written, progress=progress)


def replay(dialogue: Dialogue, key: jax.Array, difficulty: jax.Array, tokens: jax.Array) -> Replayed:
    """A row `[T]` of the dialogue that `reset(key, difficulty)` begins, told to it as if it had been written just now.

    Tokens that differ from what the dialogue gives are told to it as they are.
    """

    def advance(
        progress: AutomatonState, at: tuple[jax.Array, jax.Array]
    ) -> tuple[AutomatonState, tuple[jax.Array, ...]]:
        token, slot = at
        wanted, role = given(progress)
        possible = (token >= 0) & (token < dialogue.vocabulary)
        fits = jnp.where(role == OWN, possible, token == jnp.where(role == END, NOTHING, wanted))
        seen = role, progress.position, progress.chunk, fits
        return take(*write(dialogue, progress, jnp.where(possible, token, 0)), slot), seen

    slots = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    progress, (role, position, chunk, fits) = jax.lax.scan(
        advance, begin(dialogue, key, difficulty), (tokens.astype(jnp.int32), slots)
    )
    return Replayed(role, position, chunk, fits.all(), dialogue.reward(progress.state))


def _strong(value: Any) -> jax.Array:
    """An array of a state, of no weak type, for it is carried through loops."""
    value = jnp.asarray(value)
    return jax.lax.convert_element_type(value, value.dtype) if value.weak_type else value
