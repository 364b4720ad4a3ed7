"""Generation inside a step: a dialogue's automaton and a policy with its cache, carried on slot by slot until all rows
are over.

The randomness of a row's slot depends on the key, the row and the slot alone, and is drawn where a token is given, too:
lanes whose rows have parted are still paired slot by slot.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxaudit.core.taps import Taps
from jaxaudit.dialogues import automaton
from jaxaudit.dialogues.protocol import END, NO_TOKEN, POLICY, TOOL, Dialogue
from jaxaudit.learners.dialogue.rows import Rows
from jaxaudit.models import gpt2, sampling


@dataclass(frozen=True)
class Sampler:
    """How tokens are chosen.

    Attributes:
      model: the policy's.
      top_k: the likeliest tokens that are left; 0: all.
      truncates: whether top-p is applied at all.
    """

    model: gpt2.GPT2
    top_k: int = 0
    truncates: bool = False

    def choose(
        self, logits: jax.Array, uniform: jax.Array, top_p: Any, greedy: jax.Array | None = None
    ) -> tuple[jax.Array, Draw]:
        """Tokens int32 `[N]`, and what they were drawn from.

        Args:
          logits: float32 `[N, V]`, divided by the temperature.
          uniform: float32 `[N]` in [0, 1), by which tokens are drawn: the first whose cumulative probability is above.
          top_p: share of the probability that is left; read where `truncates`.
          greedy: bool `[N]`, rows that take the likeliest token instead.
        """
        logs = jax.nn.log_softmax(logits)
        chances = jnp.exp(logs)
        # Not where it is above 0: a NaN is to come through.
        entropy = -jnp.sum(jnp.where(chances == 0, 0.0, chances * logs), axis=1)
        left, cut = logits, jnp.zeros(logits.shape[0])
        if self.top_k or self.truncates:
            left, cut = sampling.truncate_logits(logits, self.top_k, top_p if self.truncates else 1.0)
        rising = jnp.cumsum(jnp.exp(left - jnp.max(left, axis=1, keepdims=True)), axis=1)
        below = rising <= uniform[:, None] * rising[:, -1:]
        token = jnp.minimum(jnp.sum(below, axis=1, dtype=jnp.int32), logits.shape[1] - 1)
        if greedy is not None:
            token = jnp.where(greedy, jnp.argmax(left, axis=1).astype(jnp.int32), token)
        picked = jnp.take_along_axis(logs, token[:, None], axis=1)[:, 0]
        return token, Draw(picked, entropy, cut)


@struct.dataclass
class Draw:
    """What tokens were drawn from, float32 `[N]`, or `[T, N]` of every slot; 0 where a token was given.

    Attributes:
      log_probability: of the token, before truncation.
      entropy: before truncation.
      cut: the probability that truncation took.
    """

    log_probability: Any
    entropy: Any
    cut: Any


@struct.dataclass
class Latest:
    """The token written last, of each row: int32 `[N]`, with its position and the first slot it sees."""

    token: Any
    position: Any
    first: Any


@struct.dataclass
class TokenSlot:
    """What happened in one slot, `[N]`, or in every one, `[T, N]`; the names are those of `LossInputs`."""

    latest: Latest
    role: Any
    draw: Any
    called: Any


def prompted(dialogue: Dialogue, key: jax.Array, difficulty: jax.Array, taps: Taps) -> automaton.AutomatonState:
    """Dialogues `[P]` that have begun, each with its prompt to be written; tapped at "difficulty" and "prompt".

    Args:
      dialogue: bound to its data.
      key: a prompt depends on it and its number.
      difficulty: float32 `[P]`.
      taps: of the step.
    """
    lowest, highest = dialogue.difficulties
    if taps.disturbs("difficulty"):
        difficulty = taps("difficulty", difficulty, lowest=float(lowest), highest=float(highest))
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(difficulty.shape[0]))
    progress = jax.vmap(lambda key, d: automaton.begin(dialogue, key, d))(keys, difficulty)
    if taps.disturbs("prompt"):
        tokens = jnp.array(dialogue.prompt_tokens or tuple(range(dialogue.vocabulary)), jnp.int32)
        progress = dataclasses.replace(progress, queue=taps("prompt", progress.queue, tokens=tokens))
    return progress


def repeated(progress: automaton.AutomatonState, times: int) -> automaton.AutomatonState:
    """Each dialogue `times` times, `[P * times]`: rollout groups."""
    return jax.tree.map(lambda x: jnp.repeat(x, times, axis=0), progress)


def _put(slot: jax.Array, every: jax.Array, x: jax.Array) -> jax.Array:
    """Writes `x` `[N]` to a slot of `[slots, N]`: a scatter would be a loop on a GPU with deterministic operations."""
    return jax.lax.dynamic_update_index_in_dim(every, x.astype(every.dtype), slot, 0)


def carried_on(
    sampler: Sampler,
    params: Any,
    dialogue: Dialogue,
    progress: automaton.AutomatonState,
    key: jax.Array,
    temperature: jax.Array,
    top_p: Any,
    taps: Taps,
    greedy: jax.Array | None = None,
) -> Rows:
    """Dialogues `[N]` that have begun, to their end or the last slot; taps "tool_result" and "sampled_logits".

    Args:
      sampler: chooses tokens.
      params: the behaviour policy's, as `gpt2.apply` takes them.
      dialogue: bound to its data.
      progress: of each row, its prompt not written yet.
      key: decides what is drawn.
      temperature: of the policy, scalar.
      top_p: share of the probability that is sampled from, scalar.
      taps: of the step.
      greedy: bool `[N]`, rows that take the likeliest tokens.
    """
    rows, slots = progress.queue.shape[0], dialogue.length
    uniform = jax.random.uniform(key, (rows, slots)).T
    progress, written = _given(dialogue, progress)
    latest = jax.tree.map(lambda x: x[-1], written.latest)
    begun = written.latest.token.shape[0]
    unrolled = sampling.unstack_layers(params, sampler.model.size.heads)
    # The last of these is read again by the first turn, which writes over what a prompt of one token left.
    before = jax.tree.map(lambda x: x[: max(begun - 1, 1)].T, written.latest)
    cache = sampling.prefill(sampler.model, unrolled, before.token, slots, before.position, before.first)[1]

    def turn(taps: Taps, carry: Any, number: jax.Array) -> Any:
        progress, cache, latest, so_far = carry
        slot = begun + number
        hidden, cache = sampling.decode(
            sampler.model, unrolled, latest.token, latest.position, latest.first, slot - 1, cache
        )
        logits = gpt2.logits(params, hidden)
        if taps.disturbs("sampled_logits"):
            logits = taps("sampled_logits", logits)
        chosen, draw = sampler.choose(logits / temperature, uniform[slot], top_p, greedy)
        given, role = jax.vmap(automaton.next_token)(progress)
        own = role == POLICY
        token = jnp.where(own, chosen, given)
        progress, done = _written(dialogue, progress, token, slot, taps)
        done = dataclasses.replace(done, role=role, draw=jax.tree.map(lambda x: jnp.where(own, x, 0.0), draw))
        return progress, cache, done.latest, jax.tree.map(partial(_put, slot), so_far, done)

    so_far = jax.tree.map(lambda x: jnp.pad(x, ((0, slots - begun), (0, 0))), written)
    so_far = dataclasses.replace(so_far, role=so_far.role.at[begun:].set(END))
    progress, _, _, every = taps.repeat(
        turn, (progress, cache, latest, so_far), slots - begun, until=lambda carry: sampling.all_finished(carry[0].over)
    )
    every = _with_the_end(jax.tree.map(jnp.transpose, every), progress)
    return Rows(
        tokens=every.latest.token,
        role=every.role,
        position=every.latest.position,
        first=every.latest.first,
        log_probability=every.draw.log_probability,
        entropy=every.draw.entropy,
        cut=every.draw.cut,
        calls=jnp.sum(every.called, axis=1, dtype=jnp.float32),
        truncated=~progress.over,
        rewards=jax.vmap(dialogue.reward)(progress.state),
    )


def _with_the_end(every: TokenSlot, progress: automaton.AutomatonState) -> TokenSlot:
    """Fields `[N, T]` with what stands after rows' ends, written or left out: the positions of their last progress."""
    ended = every.role == END
    position = jnp.where(ended, progress.position[:, None], every.latest.position)
    first = jnp.where(ended, progress.chunk[:, None], every.latest.first)
    return dataclasses.replace(every, latest=Latest(every.latest.token, position, first))


def _given(dialogue: Dialogue, progress: automaton.AutomatonState) -> tuple[automaton.AutomatonState, TokenSlot]:
    """The first slots, which all prompts fill, without the policy; fields `[prompt_length, N]`."""

    def turn(progress: automaton.AutomatonState, slot: jax.Array) -> tuple[automaton.AutomatonState, TokenSlot]:
        token, role = jax.vmap(automaton.next_token)(progress)
        progress, done = _written(dialogue, progress, token, slot, None)
        nothing = jnp.zeros(token.shape[0])
        return progress, dataclasses.replace(done, role=role, draw=Draw(nothing, nothing, nothing))

    return jax.lax.scan(turn, progress, jnp.arange(dialogue.prompt_length))


def _written(
    dialogue: Dialogue, progress: automaton.AutomatonState, token: jax.Array, slot: jax.Array, taps: Taps | None
) -> tuple[automaton.AutomatonState, TokenSlot]:
    """Each row's token in its slot, and what the dialogue says to it, queued; a tool's result is tapped."""
    latest = Latest(token, progress.position, progress.chunk)
    progress, reply = jax.vmap(lambda p, t: automaton.write(dialogue, p, t))(progress, token)
    called = reply.role == TOOL
    if taps is not None and taps.disturbs("tool_result") and dialogue.result_tokens:
        reply = dataclasses.replace(reply, tokens=taps("tool_result", reply.tokens, called=called, **_tool(dialogue)))
    progress = jax.vmap(lambda p, r: automaton.enqueue(p, r, slot))(progress, reply)
    return progress, TokenSlot(latest=latest, role=None, draw=None, called=called)


def _tool(dialogue: Dialogue) -> dict[str, Any]:
    """What disturbances of a tool need to know of it."""
    error = jnp.full(dialogue.reply_length, NO_TOKEN, jnp.int32)
    error = error.at[: len(dialogue.result_error)].set(jnp.array(dialogue.result_error, jnp.int32))
    twins = dict(dialogue.rare)
    rare = jnp.array([twins.get(token, token) for token in range(dialogue.vocabulary)], jnp.int32)
    return {"error": error, "tokens": jnp.array(dialogue.result_tokens, jnp.int32), "rare": rare}
