"""The state machine that fills the row of a dialogue slot by slot, and replays complete rows.

The functions are of one row; learners vmap them over rows. A row is a loop over slots of

    token, role = next_token(progress)               # the policy writes the token if the role is POLICY
    progress, reply = write(dialogue, progress, token)
    progress = enqueue(progress, reply, slot)        # a perturbation may change the reply before
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxaudit.dialogues.protocol import END, NO_TOKEN, POLICY, PROMPT, TOOL, Dialogue, Reply


@struct.dataclass
class AutomatonState:
    """The state of a row between two slots.

    Attributes:
      state: The dialogue's state.
      queue: The prompt or tool tokens of the next slots, int32 `[R]`, padded with `NO_TOKEN`.
      role: The role of the queued tokens, int32.
      over: Whether the dialogue is over, bool.
      chunk: The first slot of the next slot's chunk, int32, which is the first slot that it attends to.
      position: The position of the next slot in its chunk, int32.
    """

    state: Any
    queue: Any
    role: Any
    over: Any
    chunk: Any
    position: Any


@struct.dataclass
class ReplayedRow:
    """The roles, positions and rewards of a complete row of tokens.

    Attributes:
      role: The role of each slot, int32 `[T]`.
      position: The position of each slot in its chunk, int32 `[T]`; after the end, the position that would be next.
      chunk: The first slot of each slot's chunk, int32 `[T]`.
      agrees: Whether the prompt and tool tokens are the dialogue's, the policy's tokens are in its vocabulary, and
        `NO_TOKEN` follows the end, bool.
      reward: The rewards of the row by name, float32.
    """

    role: Any
    position: Any
    chunk: Any
    agrees: Any
    reward: dict[str, Any]


def begin(dialogue: Dialogue, key: jax.Array, difficulty: jax.Array) -> AutomatonState:
    """Returns the state of a row before its first slot, with the prompt in the queue."""
    state, prompt = dialogue.reset(key, difficulty)
    zero = jnp.zeros((), jnp.int32)
    return AutomatonState(jax.tree.map(_strong, state), prompt.tokens, prompt.role, jnp.zeros((), bool), zero, zero)


def next_token(progress: AutomatonState) -> tuple[jax.Array, jax.Array]:
    """Returns the prompt or tool token of the next slot, 0 if there is none, and the slot's role."""
    queued = (progress.queue[0] >= 0) & ~progress.over
    role = jnp.where(queued, progress.role, jnp.where(progress.over, END, POLICY))
    return jnp.where(queued, progress.queue[0], 0), role.astype(jnp.int32)


def write(dialogue: Dialogue, progress: AutomatonState, token: jax.Array) -> tuple[AutomatonState, Reply]:
    """Writes a token of any role in the next slot; returns the row's state and the dialogue's reply.

    If the dialogue is over, the state is unchanged and the reply is empty.
    """
    state, reply = dialogue.respond(progress.state, token)
    queue = jnp.concatenate([progress.queue[1:], jnp.full((1,), NO_TOKEN, jnp.int32)])
    after = replace(progress, state=state, queue=queue, position=progress.position + 1)
    return jax.tree.map(
        lambda unchanged, new: jnp.where(progress.over, unchanged, new), (progress, dialogue.own()), (after, reply)
    )


def enqueue(progress: AutomatonState, reply: Reply, slot: jax.Array) -> AutomatonState:
    """Returns the row's state after the reply to the token in `slot` has replaced the queue.

    After a reply without tokens, such as a tool's result that a perturbation has removed, the policy writes next.
    """
    has_tokens = (reply.tokens[0] >= 0) & ((reply.role == PROMPT) | (reply.role == TOOL)) & ~progress.over
    fresh = has_tokens & reply.fresh
    return replace(
        progress,
        queue=jnp.where(has_tokens, reply.tokens, progress.queue),
        role=jnp.where(has_tokens, reply.role, progress.role),
        over=progress.over | (reply.role == END),
        chunk=jnp.where(fresh, slot + 1, progress.chunk).astype(jnp.int32),
        position=jnp.where(fresh, 0, progress.position),
    )


def replay(dialogue: Dialogue, key: jax.Array, difficulty: jax.Array, tokens: jax.Array) -> ReplayedRow:
    """Replays a complete row of tokens `[T]` in the dialogue that `reset(key, difficulty)` begins.

    Prompt and tool tokens that differ from the dialogue's are replayed as they are.
    """

    def advance(
        progress: AutomatonState, inputs: tuple[jax.Array, jax.Array]
    ) -> tuple[AutomatonState, tuple[jax.Array, ...]]:
        token, slot = inputs
        expected, role = next_token(progress)
        in_vocabulary = (token >= 0) & (token < dialogue.vocabulary)
        agrees = jnp.where(role == POLICY, in_vocabulary, token == jnp.where(role == END, NO_TOKEN, expected))
        outputs = role, progress.position, progress.chunk, agrees
        return enqueue(*write(dialogue, progress, jnp.where(in_vocabulary, token, 0)), slot), outputs

    slots = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    progress, (role, position, chunk, agrees) = jax.lax.scan(
        advance, begin(dialogue, key, difficulty), (tokens.astype(jnp.int32), slots)
    )
    return ReplayedRow(role, position, chunk, agrees.all(), dialogue.reward(progress.state))


def _strong(value: Any) -> jax.Array:
    # Loops carry the state, and a carried value must not change from weakly to strongly typed.
    value = jnp.asarray(value)
    return jax.lax.convert_element_type(value, value.dtype) if value.weak_type else value
