"""Tests rows of dialogues, slot by slot, against a loop in plain Python."""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import dialogue_rules
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaudit.dialogues import Dialogue, automaton, named
from jaxaudit.dialogues.protocol import END, NO_TOKEN, POLICY, PROMPT, TOOL

ROWS = 256
SETTINGS = {
    "hop": {"rare_share": 0.3},
    "calculator": {"rare_share": 0.3, "operators": "+-*"},
    "chain": {},
    "preference": {},
}


class FirstSlots(NamedTuple):
    """The slots that the prompt fills, int32 `[K]`, and the row's state after them."""

    token: Any
    role: Any
    position: Any
    chunk: Any
    progress: Any


def first_slots(dialogue, progress):
    def advance(progress, slot):
        token, role = automaton.next_token(progress)
        after = automaton.enqueue(*automaton.write(dialogue, progress, token), slot)
        return after, (token, role, progress.position, progress.chunk)

    progress, slots = jax.lax.scan(advance, progress, jnp.arange(dialogue.prompt_length, dtype=jnp.int32))
    return FirstSlots(*slots, progress)


class Programs:
    """A dialogue's compiled functions of rows; keys are `[ROWS]`."""

    def __init__(self, dialogue):
        def begin(key, right):
            demonstrations = dialogue.demonstration(key, dialogue.difficulty, right)
            return automaton.begin(dialogue, key, dialogue.difficulty), demonstrations

        def write(progress, responses, replaced_results, replace):
            def advance(progress, inputs):
                slot, responses, replaced_results, replace = inputs
                token, role = automaton.next_token(progress)
                token = jnp.where(role == POLICY, responses, token)
                after, reply = automaton.write(dialogue, progress, token)
                reply = reply.replace(tokens=jnp.where(replace & (reply.role == TOOL), replaced_results, reply.tokens))
                slots = jnp.where(role == END, NO_TOKEN, token), role, progress.position, progress.chunk
                return automaton.enqueue(after, reply, slot), jnp.stack(slots)

            progress, slots = jax.lax.scan(
                advance, progress, (jnp.arange(responses.shape[0]), responses, replaced_results, replace)
            )
            return slots, progress, dialogue.reward(progress.state)

        self.dialogue = dialogue
        self.begin = jax.jit(jax.vmap(begin))
        self._write = jax.jit(jax.vmap(write))
        self.prefix = jax.jit(jax.vmap(functools.partial(first_slots, dialogue)))
        self.replay = jax.jit(jax.vmap(lambda key, row: automaton.replay(dialogue, key, dialogue.difficulty, row)))

    def write(self, progress, responses, replaced_results=None):
        """Returns the slots `[N, T, 4]` of rows with response tokens `[N, T]`, the progress after them, and the reward.

        If `replaced_results` `[N, T, R]` is given, it replaces the results of tools.
        """
        disturbed = np.full(responses.shape, replaced_results is not None)
        replaced_results = (
            np.zeros((*responses.shape, self.dialogue.reply_length), np.int32)
            if replaced_results is None
            else replaced_results
        )
        return self._write(progress, responses, replaced_results.astype(np.int32), disturbed)

    def random_responses(self, demonstrations, rng, share=0.75):
        """Returns response tokens `[N, T]`: demonstrations, in half of which only a share of tokens is not random."""
        random = rng.integers(0, self.dialogue.vocabulary, demonstrations.shape)
        keep = (rng.random(demonstrations.shape) < rng.choice([share, 1.0], (len(demonstrations), 1))) & (
            np.asarray(demonstrations) >= 0
        )
        return np.where(keep, demonstrations, random).astype(np.int32)

    def write_plainly(self, name, progress, responses, lost_results=(), replaced_by_slot=()):
        """Returns the same rows by the plain loop, and their gold rewards."""
        states, queues, dialogue = *jax.device_get((progress.state, progress.queue)), self.dialogue
        rows, golds = [], []
        for n in range(len(responses)):
            prompt = [dialogue.words[token] for token in queues[n] if token >= 0]
            rules = dialogue_rules.RULES[name](dialogue, jax.tree.map(lambda leaf, n=n: leaf[n], states), prompt)
            disturbed = {"lost": lost_results[n], "spoilt": replaced_by_slot[n]} if lost_results else {}
            rows.append(
                dialogue_rules.simulate_row(
                    rules, prompt, dialogue.words, responses[n], responses.shape[1], **disturbed
                )
            )
            golds.append(rules.gold())
        return np.array(rows), np.array(golds)


@functools.cache
def programs(name):
    return Programs(named(name, **SETTINGS[name]).make())


def begin_rows(name, seed):
    """Returns keys, rows before their first slot, demonstrations for them, and a random generator."""
    rng, keys = np.random.default_rng(seed), jax.random.split(jax.random.key(seed), ROWS)
    progress, demonstrations = programs(name).begin(keys, rng.random(ROWS) < 0.7)
    return keys, progress, demonstrations, rng


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive if name != "hop" else ()) for name in dialogue_rules.RULES]
)
def test_rows_equal_those_of_a_plain_loop(name):
    program = programs(name)
    _, progress, demonstrations, rng = begin_rows(name, 0)
    responses = program.random_responses(demonstrations, rng)
    slots, _, reward = program.write(progress, responses)
    rows, golds = program.write_plainly(name, progress, responses)
    np.testing.assert_array_equal(slots, rows)
    np.testing.assert_allclose(reward["gold"], golds, atol=1e-6)
    assert {POLICY, PROMPT, END} <= set(rows[..., 1].ravel())
    assert 0 < (golds == 1).mean() < 1
    assert (TOOL in rows[..., 1]) == bool(program.dialogue.result_error)


@pytest.mark.parametrize("name", ["hop", "calculator"])
def test_rows_with_lost_or_replaced_results_equal_a_plain_loop(name):
    program = programs(name)
    _, progress, demonstrations, rng = begin_rows(name, 1)
    responses, dialogue = program.random_responses(demonstrations, rng, share=0.9), program.dialogue
    size = (*responses.shape, dialogue.reply_length)
    # A third of the results is lost, a third is an error, and a third has random tokens, of random number.
    kind, random_result = rng.integers(0, 3, responses.shape), rng.choice(dialogue.result_tokens, size)
    random_result = np.where(
        np.arange(size[-1]) < rng.integers(1, size[-1] + 1, responses.shape)[..., None], random_result, NO_TOKEN
    )
    error = np.pad(dialogue.result_error, (0, size[-1] - len(dialogue.result_error)), constant_values=NO_TOKEN)
    replaced = np.where((kind == 0)[..., None], NO_TOKEN, np.where((kind == 1)[..., None], error, random_result))
    slots, progress_after, reward = program.write(progress, responses, replaced)
    lost_results = [set(np.flatnonzero(row == 0)) for row in kind]
    replaced_by_slot = [{slot: [t for t in line if t >= 0] for slot, line in enumerate(row)} for row in replaced]
    rows, golds = program.write_plainly(name, progress, responses, lost_results, replaced_by_slot)
    np.testing.assert_array_equal(slots, rows)
    np.testing.assert_array_equal(reward["gold"], golds)
    assert np.asarray(progress_after.over).mean() > 0.3, "many dialogues still end"


@dataclass(frozen=True)
class Chunks(Dialogue):
    """Three response tokens in each of three chunks; a chunk begins with the tokens 3 4 and the last response token."""

    vocabulary, length, reply_length, prompt_length, words = 5, 16, 3, 2, tuple("01234")

    def reset(self, key, difficulty):
        zero = jnp.int32(0)
        return (zero, zero + 2, zero), self.prompt(jnp.array([3, 4]))

    def respond(self, state, token):
        written, prompt_left, chunk = state
        prompted = prompt_left > 0
        full = ~prompted & (written == 2)
        last = full & (chunk == 2)
        following = self.prompt(jnp.stack([jnp.int32(3), jnp.int32(4), token]), fresh=True)
        after = jnp.where(prompted | full, 0, written + 1)
        prompt_left = jnp.where(full, 3, jnp.maximum(prompt_left - 1, 0))
        reply = self.choose(full, following, self.own())
        return (after, prompt_left, chunk + full.astype(jnp.int32)), self.choose(last, self.end(), reply)

    def reward(self, state):
        return {"gold": (state[2] == 3).astype(jnp.float32)}


class ChunkRules:
    def __init__(self):
        self.written, self.prompt_left, self.chunk = 0, 0, 0

    def respond(self, word):
        if self.prompt_left:
            self.prompt_left -= 1
            return None
        self.written += 1
        if self.written < 3:
            return None
        self.written, self.prompt_left, self.chunk = 0, 3, self.chunk + 1
        return dialogue_rules.DIALOGUE_OVER if self.chunk == 3 else (["3", "4", word],)


@functools.cache
def chunks():
    return Programs(Chunks())


@pytest.mark.parametrize("length", [9, 20])
def test_chunks_restart_positions_and_rows_are_truncated(length):
    responses = np.random.default_rng(2).integers(0, 5, (8, length)).astype(np.int32)
    begin_all = jax.vmap(lambda key: automaton.begin(Chunks(), key, 0.0))
    slots, progress, reward = chunks().write(begin_all(jax.random.split(jax.random.key(0), 8)), responses)
    rows = [dialogue_rules.simulate_row(ChunkRules(), ["3", "4"], Chunks.words, line, length) for line in responses]
    np.testing.assert_array_equal(slots, rows)
    # Two prompt and three response tokens, then twice three prompt and three response tokens: 17 slots.
    assert np.asarray(slots)[0, :, 3].tolist() == ([0] * 5 + [5] * 6 + [11] * 6 + [11] * 3)[:length]
    assert (np.asarray(progress.over) == (length >= 17)).all()
    assert (np.asarray(reward["gold"]) == (length >= 17)).all()


def test_tokens_after_the_end_change_nothing():
    program = programs("hop")
    _, progress, demonstrations, rng = begin_rows("hop", 3)
    responses = program.random_responses(demonstrations, rng, share=1.0)
    slots, after, _ = program.write(progress, responses)
    changed = np.where(
        slots[..., 1] == END, rng.integers(0, program.dialogue.vocabulary, responses.shape), responses
    ).astype(np.int32)
    assert (changed != responses).any()
    slots_again, after_again, _ = program.write(progress, changed)
    np.testing.assert_array_equal(slots, slots_again)
    jax.tree.map(np.testing.assert_array_equal, after, after_again)


@pytest.mark.parametrize("name", dialogue_rules.RULES)
def test_replay_accepts_exactly_the_rows_that_were_written(name):
    program = programs(name)
    keys, progress, demonstrations, rng = begin_rows(name, 4)
    assert program.replay(keys, demonstrations).agrees.all(), "demonstrations are valid rows"
    slots, _, reward = program.write(progress, program.random_responses(demonstrations, rng))
    replayed = program.replay(keys, slots[..., 0])
    assert replayed.agrees.all()
    for column, field in enumerate(("role", "position", "chunk"), 1):
        np.testing.assert_array_equal(slots[..., column], getattr(replayed, field))
    jax.tree.map(np.testing.assert_array_equal, reward, replayed.reward)

    tokens, roles, vocabulary = np.asarray(slots[..., 0]), np.asarray(slots[..., 1]), program.dialogue.vocabulary
    differing = {
        "a prompt token": np.where(roles == PROMPT, (tokens + 1) % vocabulary, tokens),
        "a result": np.where(roles == TOOL, (tokens + 1) % vocabulary, tokens),
        "a response token beyond the vocabulary": np.where(roles == POLICY, vocabulary, tokens),
        "a missing response token": np.where(roles == POLICY, NO_TOKEN, tokens),
        "a token after the end": np.where(roles == END, 0, tokens),
    }
    for case, rows in differing.items():
        np.testing.assert_array_equal(program.replay(keys, rows).agrees, (rows == tokens).all(1), err_msg=case)


@pytest.mark.parametrize("name", dialogue_rules.RULES)
def test_the_prefix_equals_the_first_slots_of_rows(name):
    program = programs(name)
    _, progress, demonstrations, rng = begin_rows(name, 5)
    row_slots, _, _ = program.write(progress, program.random_responses(demonstrations, rng))
    prefix = program.prefix(progress)
    slots = program.dialogue.prompt_length
    assert (prefix.role == PROMPT).all()
    for column, field in enumerate(("token", "role", "position", "chunk")):
        np.testing.assert_array_equal(row_slots[:, :slots, column], getattr(prefix, field))
    # A row continues after the prefix as if written slot by slot: at most one prompt token is left.
    prompt_left = np.asarray(progress.queue >= 0).sum(1) - slots
    np.testing.assert_array_equal(np.asarray(prefix.progress.queue >= 0).sum(1), prompt_left)
    np.testing.assert_array_equal(prefix.progress.state.prompt_left, prompt_left)


def test_a_disturbed_prompt_appears_in_the_row():
    program = programs("hop")
    _, progress, _, _ = begin_rows("hop", 6)
    disturbed = jnp.full((ROWS, 1), 0) + jnp.array(
        [program.dialogue.token["2"], program.dialogue.token["f"]], jnp.int32
    )
    prefix = program.prefix(progress.replace(queue=disturbed))
    assert program.dialogue.text(prefix.token[7]) == "2 f"
    jax.tree.map(np.testing.assert_array_equal, prefix.progress.state.table, progress.state.table)
