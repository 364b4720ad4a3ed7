"""Rows of dialogues slot by slot, against a loop in plain Python."""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import plain_dialogues
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
    """The first slots of a row, which the prompt fills, int32 `[K]`, and the row's state after them."""

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
    """A dialogue's functions of rows, each compiled once; keys are `[ROWS]`."""

    def __init__(self, dialogue):
        def begun(key, right):
            shown = dialogue.demonstration(key, dialogue.difficulty, right)
            return automaton.begin(dialogue, key, dialogue.difficulty), shown

        def written(progress, own, replaced, where):
            def advance(progress, at):
                slot, own, replaced, where = at
                token, role = automaton.next_token(progress)
                token = jnp.where(role == POLICY, own, token)
                after, reply = automaton.write(dialogue, progress, token)
                reply = reply.replace(tokens=jnp.where(where & (reply.role == TOOL), replaced, reply.tokens))
                seen = jnp.where(role == END, NO_TOKEN, token), role, progress.position, progress.chunk
                return automaton.enqueue(after, reply, slot), jnp.stack(seen)

            progress, seen = jax.lax.scan(advance, progress, (jnp.arange(own.shape[0]), own, replaced, where))
            return seen, progress, dialogue.reward(progress.state)

        self.dialogue = dialogue
        self.begun = jax.jit(jax.vmap(begun))
        self._written = jax.jit(jax.vmap(written))
        self.prefix = jax.jit(jax.vmap(functools.partial(first_slots, dialogue)))
        self.replay = jax.jit(jax.vmap(lambda key, row: automaton.replay(dialogue, key, dialogue.difficulty, row)))

    def written(self, progress, own, replaced=None):
        """Rows of own tokens `[N, T]`: their slots `[N, T, 4]`, the progress behind them, the reward.

        `replaced` `[N, T, R]` takes the place of tools' results.
        """
        disturbed = np.full(own.shape, replaced is not None)
        replaced = np.zeros((*own.shape, self.dialogue.reply_length), np.int32) if replaced is None else replaced
        return self._written(progress, own, replaced.astype(np.int32), disturbed)

    def mixed(self, shown, rng, share=0.75):
        """Own tokens `[N, T]`: demonstrations, in half of which only a share is left and the rest is random."""
        random = rng.integers(0, self.dialogue.vocabulary, shown.shape)
        kept = (rng.random(shown.shape) < rng.choice([share, 1.0], (len(shown), 1))) & (np.asarray(shown) >= 0)
        return np.where(kept, shown, random).astype(np.int32)

    def plain(self, name, progress, own, lost=(), spoilt=()):
        """The same rows of the plain loop, and their gold."""
        states, queues, dialogue = *jax.device_get((progress.state, progress.queue)), self.dialogue
        rows, golds = [], []
        for n in range(len(own)):
            prompt = [dialogue.words[token] for token in queues[n] if token >= 0]
            rules = plain_dialogues.RULES[name](dialogue, jax.tree.map(lambda leaf, n=n: leaf[n], states), prompt)
            disturbed = {"lost": lost[n], "spoilt": spoilt[n]} if lost else {}
            rows.append(plain_dialogues.row(rules, prompt, dialogue.words, own[n], own.shape[1], **disturbed))
            golds.append(rules.gold())
        return np.array(rows), np.array(golds)


@functools.cache
def programs(name):
    return Programs(named(name, **SETTINGS[name]).make())


def begun(name, seed):
    """Keys, rows before their first slot, own tokens for them, and what draws more."""
    rng, keys = np.random.default_rng(seed), jax.random.split(jax.random.key(seed), ROWS)
    progress, shown = programs(name).begun(keys, rng.random(ROWS) < 0.7)
    return keys, progress, shown, rng


@pytest.mark.parametrize("name", plain_dialogues.RULES)
def test_rows_are_those_of_a_plain_loop(name):
    made = programs(name)
    _, progress, shown, rng = begun(name, 0)
    own = made.mixed(shown, rng)
    seen, _, reward = made.written(progress, own)
    rows, golds = made.plain(name, progress, own)
    np.testing.assert_array_equal(seen, rows)
    np.testing.assert_allclose(reward["gold"], golds, atol=1e-6)
    assert {POLICY, PROMPT, END} <= set(rows[..., 1].ravel())
    assert 0 < (golds == 1).mean() < 1
    assert (TOOL in rows[..., 1]) == bool(made.dialogue.result_error)


@pytest.mark.parametrize("name", ["hop", "calculator"])
def test_results_that_are_lost_or_spoilt(name):
    made = programs(name)
    _, progress, shown, rng = begun(name, 1)
    own, dialogue = made.mixed(shown, rng, share=0.9), made.dialogue
    size = (*own.shape, dialogue.reply_length)
    # A third of the results is lost, a third is an error, and a third is of tokens drawn, however many.
    kind, some = rng.integers(0, 3, own.shape), rng.choice(dialogue.result_tokens, size)
    some = np.where(np.arange(size[-1]) < rng.integers(1, size[-1] + 1, own.shape)[..., None], some, NO_TOKEN)
    error = np.pad(dialogue.result_error, (0, size[-1] - len(dialogue.result_error)), constant_values=NO_TOKEN)
    replaced = np.where((kind == 0)[..., None], NO_TOKEN, np.where((kind == 1)[..., None], error, some))
    seen, after, reward = made.written(progress, own, replaced)
    lost = [set(np.flatnonzero(row == 0)) for row in kind]
    spoilt = [{slot: [t for t in line if t >= 0] for slot, line in enumerate(row)} for row in replaced]
    rows, golds = made.plain(name, progress, own, lost, spoilt)
    np.testing.assert_array_equal(seen, rows)
    np.testing.assert_array_equal(reward["gold"], golds)
    assert np.asarray(after.over).mean() > 0.3, "dialogues end well all the same"


@dataclass(frozen=True)
class Chunks(Dialogue):
    """Three tokens of one's own in each of three chunks, begun by the tokens 3 4 and the last own one."""

    vocabulary, length, reply_length, prompt_length, words = 5, 16, 3, 2, tuple("01234")

    def reset(self, key, difficulty):
        zero = jnp.int32(0)
        return (zero, zero + 2, zero), self.prompt(jnp.array([3, 4]))

    def respond(self, state, token):
        own, left, chunk = state
        prompted = left > 0
        full = ~prompted & (own == 2)
        last = full & (chunk == 2)
        following = self.prompt(jnp.stack([jnp.int32(3), jnp.int32(4), token]), fresh=True)
        after = jnp.where(prompted | full, 0, own + 1)
        left = jnp.where(full, 3, jnp.maximum(left - 1, 0))
        reply = self.choose(full, following, self.own())
        return (after, left, chunk + full.astype(jnp.int32)), self.choose(last, self.end(), reply)

    def reward(self, state):
        return {"gold": (state[2] == 3).astype(jnp.float32)}


class ChunkRules:
    def __init__(self):
        self.own, self.left, self.chunk = 0, 0, 0

    def respond(self, word):
        if self.left:
            self.left -= 1
            return None
        self.own += 1
        if self.own < 3:
            return None
        self.own, self.left, self.chunk = 0, 3, self.chunk + 1
        return plain_dialogues.OVER if self.chunk == 3 else (["3", "4", word],)


@functools.cache
def chunks():
    return Programs(Chunks())


@pytest.mark.parametrize("length", [9, 20])
def test_chunks_begin_afresh_and_rows_are_cut(length):
    own = np.random.default_rng(2).integers(0, 5, (8, length)).astype(np.int32)
    begin = jax.vmap(lambda key: automaton.begin(Chunks(), key, 0.0))
    seen, progress, reward = chunks().written(begin(jax.random.split(jax.random.key(0), 8)), own)
    rows = [plain_dialogues.row(ChunkRules(), ["3", "4"], Chunks.words, line, length) for line in own]
    np.testing.assert_array_equal(seen, rows)
    # 2 given and 3 own, then twice 3 given and 3 own: 17 slots.
    assert np.asarray(seen)[0, :, 3].tolist() == ([0] * 5 + [5] * 6 + [11] * 6 + [11] * 3)[:length]
    assert (np.asarray(progress.over) == (length >= 17)).all()
    assert (np.asarray(reward["gold"]) == (length >= 17)).all()


def test_after_the_end_nothing_changes():
    made = programs("hop")
    _, progress, shown, rng = begun("hop", 3)
    own = made.mixed(shown, rng, share=1.0)
    seen, after, _ = made.written(progress, own)
    other = np.where(seen[..., 1] == END, rng.integers(0, made.dialogue.vocabulary, own.shape), own).astype(np.int32)
    assert (other != own).any()
    again, later, _ = made.written(progress, other)
    np.testing.assert_array_equal(seen, again)
    jax.tree.map(np.testing.assert_array_equal, after, later)


@pytest.mark.parametrize("name", plain_dialogues.RULES)
def test_replaying_is_writing_again(name):
    made = programs(name)
    keys, progress, shown, rng = begun(name, 4)
    assert made.replay(keys, shown).agrees.all(), "demonstrations are rows that the dialogue knows"
    seen, _, reward = made.written(progress, made.mixed(shown, rng))
    replayed = made.replay(keys, seen[..., 0])
    assert replayed.agrees.all()
    for column, there in enumerate(("role", "position", "chunk"), 1):
        np.testing.assert_array_equal(seen[..., column], getattr(replayed, there))
    jax.tree.map(np.testing.assert_array_equal, reward, replayed.reward)

    tokens, roles, vocabulary = np.asarray(seen[..., 0]), np.asarray(seen[..., 1]), made.dialogue.vocabulary
    differing = {
        "a given token": np.where(roles == PROMPT, (tokens + 1) % vocabulary, tokens),
        "a result": np.where(roles == TOOL, (tokens + 1) % vocabulary, tokens),
        "an own token that there is not": np.where(roles == POLICY, vocabulary, tokens),
        "no own token": np.where(roles == POLICY, NO_TOKEN, tokens),
        "a token after the end": np.where(roles == END, 0, tokens),
    }
    for what, rows in differing.items():
        np.testing.assert_array_equal(made.replay(keys, rows).agrees, (rows == tokens).all(1), err_msg=what)


@pytest.mark.parametrize("name", plain_dialogues.RULES)
def test_a_prefix_is_the_first_slots(name):
    made = programs(name)
    _, progress, shown, rng = begun(name, 5)
    seen, _, _ = made.written(progress, made.mixed(shown, rng))
    prefix = made.prefix(progress)
    slots = made.dialogue.prompt_length
    assert (prefix.role == PROMPT).all()
    for column, there in enumerate(("token", "role", "position", "chunk")):
        np.testing.assert_array_equal(seen[:, :slots, column], getattr(prefix, there))
    # And a row goes on behind it as if it had been written slot by slot: one prompt token is left, or none is.
    waiting = np.asarray(progress.queue >= 0).sum(1) - slots
    np.testing.assert_array_equal(np.asarray(prefix.progress.queue >= 0).sum(1), waiting)
    np.testing.assert_array_equal(prefix.progress.state.prompt_left, waiting)


def test_a_disturbed_prompt_is_what_is_given():
    made = programs("hop")
    _, progress, _, _ = begun("hop", 6)
    disturbed = jnp.full((ROWS, 1), 0) + jnp.array([made.dialogue.token["2"], made.dialogue.token["f"]], jnp.int32)
    prefix = made.prefix(progress.replace(queue=disturbed))
    assert made.dialogue.text(prefix.token[7]) == "2 f"
    jax.tree.map(np.testing.assert_array_equal, prefix.progress.state.table, progress.state.table)
