"""Rows of tokens, and their generation by a policy with a key-value cache in dialogue with an automaton, slot by slot.

The randomness of a slot of a row depends on the PRNG key, the row and the slot alone. It is drawn at prompt and tool
tokens, too, so that lanes whose rows have diverged still share their randomness slot by slot.
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
from jaxaudit.dialogues.protocol import END, GOLD, NO_TOKEN, POLICY, PROMPT, TOOL, Dialogue
from jaxaudit.models import gpt2, sampling


@struct.dataclass
class Rows:
    """N dialogues of T slots (token positions); arrays are `[N, T]` unless stated otherwise.

    Attributes:
      tokens: int32, 0 after a dialogue's end.
      role: int32, who wrote each token: `POLICY` (the policy), `PROMPT`, `TOOL`, or `END` after a dialogue's end.
      position: int32, position ids, which begin at 0 in each chunk.
      attention_start: int32, the first slot that each slot attends to.
      log_prob: float32, log-probability of response tokens under the behaviour policy at its temperature, before
        top-k and top-p truncation; 0 elsewhere.
      entropy: float32, entropy of the distribution that response tokens were sampled from, before truncation; 0
        elsewhere.
      mass_cut: float32, probability that top-k and top-p removed at response tokens; 0 elsewhere.
      calls: float32 `[N]`, number of tool calls, answered or not.
      truncated: bool `[N]`, whether the slots ran out before the dialogue ended.
      rewards: float32 `[N]` by name, "gold" among them.
    """

    tokens: Any
    role: Any
    position: Any
    attention_start: Any
    log_prob: Any
    entropy: Any
    mass_cut: Any
    calls: Any
    truncated: Any
    rewards: dict[str, Any]

    @property
    def response_mask(self) -> jax.Array:
        """Whether the policy wrote each token: bool `[N, T]`."""
        return self.role == POLICY

    @property
    def gold(self) -> jax.Array:
        """The reward of the dialogue's verifier: float32 `[N]`."""
        return self.rewards[GOLD]

    @property
    def response_token_counts(self) -> jax.Array:
        """The number of tokens that the policy wrote in each row: float32 `[N]`."""
        return jnp.sum(self.response_mask, axis=1, dtype=jnp.float32)

    @property
    def prompt_lengths(self) -> jax.Array:
        """The number of tokens in each row's first prompt, without the prompts of later chunks: float32 `[N]`."""
        return jnp.sum(jnp.cumprod(self.role == PROMPT, axis=1), axis=1, dtype=jnp.float32)

    @property
    def response_lengths(self) -> jax.Array:
        """The number of tokens after each row's first prompt: float32 `[N]`.

        It counts those of the policy, of tools and of later prompts, and not the slots after the dialogue's end.
        """
        return jnp.sum(self.role != END, axis=1, dtype=jnp.float32) - self.prompt_lengths

    @property
    def last_response_token(self) -> jax.Array:
        """Whether each token is the last response token of its row: bool `[N, T]`."""
        remaining = jnp.cumsum(self.response_mask[:, ::-1], axis=1)[:, ::-1]
        return self.response_mask & (remaining == 1)


@dataclass(frozen=True)
class Sampler:
    """Samples tokens from logits.

    Attributes:
      model: the policy's transformer.
      top_k: number of the likeliest tokens that are sampled from; 0 for all.
      uses_top_p: whether top-p truncation is applied.
    """

    model: gpt2.GPT2
    top_k: int = 0
    uses_top_p: bool = False

    def sample(
        self, logits: jax.Array, uniform: jax.Array, top_p: Any, greedy: jax.Array | None = None
    ) -> tuple[jax.Array, TokenStats]:
        """Samples one token for each row.

        Args:
          logits: float32 `[N, V]`, divided by the temperature.
          uniform: float32 `[N]` in [0, 1); the token is the first one whose cumulative probability exceeds it.
          top_p: probability mass that is sampled from; read only if `uses_top_p`.
          greedy: bool `[N]`, rows that take the likeliest token instead.

        Returns:
          tokens int32 `[N]`, and statistics of the distributions they were sampled from.
        """
        log_probs = jax.nn.log_softmax(logits)
        probs = jnp.exp(log_probs)
        # The condition is not `probs > 0`, so that a NaN is propagated.
        entropy = -jnp.sum(jnp.where(probs == 0, 0.0, probs * log_probs), axis=1)
        truncated, mass_cut = logits, jnp.zeros(logits.shape[0])
        if self.top_k or self.uses_top_p:
            truncated, mass_cut = sampling.truncate_logits(logits, self.top_k, top_p if self.uses_top_p else 1.0)
        cumulative = jnp.cumsum(jnp.exp(truncated - jnp.max(truncated, axis=1, keepdims=True)), axis=1)
        below = cumulative <= uniform[:, None] * cumulative[:, -1:]
        token = jnp.minimum(jnp.sum(below, axis=1, dtype=jnp.int32), logits.shape[1] - 1)
        if greedy is not None:
            token = jnp.where(greedy, jnp.argmax(truncated, axis=1).astype(jnp.int32), token)
        log_prob = jnp.take_along_axis(log_probs, token[:, None], axis=1)[:, 0]
        return token, TokenStats(log_prob, entropy, mass_cut)


@struct.dataclass
class TokenStats:
    """Statistics of sampled tokens, float32 `[N]`, or `[T, N]` of all slots; 0 at prompt and tool tokens.

    Attributes:
      log_prob: log-probability of the token, before truncation.
      entropy: entropy of the distribution, before truncation.
      mass_cut: probability that top-k and top-p removed.
    """

    log_prob: Any
    entropy: Any
    mass_cut: Any


@struct.dataclass
class LastToken:
    """The latest token of each row, int32 `[N]`, with its position id and the first slot it attends to."""

    token: Any
    position: Any
    attention_start: Any


@struct.dataclass
class TokenSlot:
    """What was written in one slot, `[N]`, or in all slots, `[T, N]`.

    Attributes:
      last: the token with its position.
      role: who wrote it, as in `Rows`.
      stats: statistics of the distribution that it was sampled from.
      called: bool, whether the token completes a tool call.
    """

    last: LastToken
    role: Any
    stats: Any
    called: Any


def begin_dialogues(dialogue: Dialogue, key: jax.Array, difficulty: jax.Array, taps: Taps) -> automaton.AutomatonState:
    """Begins P dialogues, whose prompts are queued and not written yet; taps "difficulty" and "prompt".

    Args:
      dialogue: bound to its data.
      key: PRNG key; a prompt depends on it and on the prompt's index.
      difficulty: float32 `[P]`.
      taps: taps of the step.
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


def repeat_dialogues(progress: automaton.AutomatonState, times: int) -> automaton.AutomatonState:
    """Returns each of P dialogues `times` times, `[P * times]`, as rollout groups."""
    return jax.tree.map(lambda x: jnp.repeat(x, times, axis=0), progress)


def generate(
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
    """Continues N dialogues to their end or to the last slot; taps "tool_result" and "sampled_logits".

    Args:
      sampler: samples the policy's tokens.
      params: parameters of the behaviour policy, as `gpt2.apply` takes them.
      dialogue: bound to its data.
      progress: dialogues that have begun, from `begin_dialogues`.
      key: PRNG key of the sampling.
      temperature: sampling temperature, scalar.
      top_p: probability mass that is sampled from, scalar.
      taps: taps of the step.
      greedy: bool `[N]`, rows that take the likeliest tokens.
    """
    rows, slots = progress.queue.shape[0], dialogue.length
    uniform = jax.random.uniform(key, (rows, slots)).T
    progress, prompts = _write_prompts(dialogue, progress)
    last = jax.tree.map(lambda x: x[-1], prompts.last)
    prompt_length = prompts.last.token.shape[0]
    unrolled = sampling.unstack_layers(params, sampler.model.size.heads)
    # The first turn reads the last prompt token again, and writes over what a prompt of one token left.
    prefix = jax.tree.map(lambda x: x[: max(prompt_length - 1, 1)].T, prompts.last)
    cache = sampling.prefill(sampler.model, unrolled, prefix.token, slots, prefix.position, prefix.attention_start)[1]

    def turn(taps: Taps, carry: Any, number: jax.Array) -> Any:
        progress, cache, last, written = carry
        slot = prompt_length + number
        hidden, cache = sampling.decode(
            sampler.model, unrolled, last.token, last.position, last.attention_start, slot - 1, cache
        )
        logits = gpt2.logits(params, hidden)
        if taps.disturbs("sampled_logits"):
            logits = taps("sampled_logits", logits)
        sampled, stats = sampler.sample(logits / temperature, uniform[slot], top_p, greedy)
        given, role = jax.vmap(automaton.next_token)(progress)
        is_response = role == POLICY
        token = jnp.where(is_response, sampled, given)
        progress, current = _write_tokens(dialogue, progress, token, slot, taps)
        stats = jax.tree.map(lambda x: jnp.where(is_response, x, 0.0), stats)
        current = dataclasses.replace(current, role=role, stats=stats)
        return progress, cache, current.last, jax.tree.map(partial(_write_slot, slot), written, current)

    written = jax.tree.map(lambda x: jnp.pad(x, ((0, slots - prompt_length), (0, 0))), prompts)
    written = dataclasses.replace(written, role=written.role.at[prompt_length:].set(END))
    progress, _, _, written = taps.repeat(
        turn, (progress, cache, last, written), slots - prompt_length, until=lambda c: sampling.all_finished(c[0].over)
    )
    written = _fill_after_end(jax.tree.map(jnp.transpose, written), progress)
    return Rows(
        tokens=written.last.token,
        role=written.role,
        position=written.last.position,
        attention_start=written.last.attention_start,
        log_prob=written.stats.log_prob,
        entropy=written.stats.entropy,
        mass_cut=written.stats.mass_cut,
        calls=jnp.sum(written.called, axis=1, dtype=jnp.float32),
        truncated=~progress.over,
        rewards=jax.vmap(dialogue.reward)(progress.state),
    )


def _write_slot(slot: jax.Array, slots: jax.Array, x: jax.Array) -> jax.Array:
    # A scatter would be a loop on a GPU with deterministic operations.
    return jax.lax.dynamic_update_index_in_dim(slots, x.astype(slots.dtype), slot, 0)


def _fill_after_end(written: TokenSlot, progress: automaton.AutomatonState) -> TokenSlot:
    """Gives the slots `[N, T]` after each row's end the positions of its final state.

    The generation loop may or may not have reached these slots, so they must not depend on it.
    """
    ended = written.role == END
    position = jnp.where(ended, progress.position[:, None], written.last.position)
    attention_start = jnp.where(ended, progress.chunk[:, None], written.last.attention_start)
    return dataclasses.replace(written, last=LastToken(written.last.token, position, attention_start))


def _write_prompts(
    dialogue: Dialogue, progress: automaton.AutomatonState
) -> tuple[automaton.AutomatonState, TokenSlot]:
    """Writes the first `dialogue.prompt_length` slots, which every prompt fills; fields `[prompt_length, N]`."""

    def turn(progress: automaton.AutomatonState, slot: jax.Array) -> tuple[automaton.AutomatonState, TokenSlot]:
        token, role = jax.vmap(automaton.next_token)(progress)
        progress, current = _write_tokens(dialogue, progress, token, slot, None)
        zeros = jnp.zeros(token.shape[0])
        return progress, dataclasses.replace(current, role=role, stats=TokenStats(zeros, zeros, zeros))

    return jax.lax.scan(turn, progress, jnp.arange(dialogue.prompt_length))


def _write_tokens(
    dialogue: Dialogue, progress: automaton.AutomatonState, token: jax.Array, slot: jax.Array, taps: Taps | None
) -> tuple[automaton.AutomatonState, TokenSlot]:
    """Writes each row's token in a slot, and queues the dialogue's reply; taps "tool_result"."""
    last = LastToken(token, progress.position, progress.chunk)
    progress, reply = jax.vmap(lambda p, t: automaton.write(dialogue, p, t))(progress, token)
    called = reply.role == TOOL
    if taps is not None and taps.disturbs("tool_result") and dialogue.result_tokens:
        context = _tool_context(dialogue)
        reply = dataclasses.replace(reply, tokens=taps("tool_result", reply.tokens, called=called, **context))
    progress = jax.vmap(lambda p, r: automaton.enqueue(p, r, slot))(progress, reply)
    return progress, TokenSlot(last=last, role=None, stats=None, called=called)


def _tool_context(dialogue: Dialogue) -> dict[str, Any]:
    """Returns what perturbations at "tool_result" read: the error reply, the result tokens, and their rare synonyms."""
    error = jnp.full(dialogue.reply_length, NO_TOKEN, jnp.int32)
    error = error.at[: len(dialogue.result_error)].set(jnp.array(dialogue.result_error, jnp.int32))
    synonyms = dict(dialogue.rare)
    rare = jnp.array([synonyms.get(token, token) for token in range(dialogue.vocabulary)], jnp.int32)
    return {"error": error, "tokens": jnp.array(dialogue.result_tokens, jnp.int32), "rare": rare}
