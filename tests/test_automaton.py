"""Rows of dialogues slot by slot, against a loop in plain Python."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import plain_dialogues
import pytest

from jaxaudit.dialogues import Dialogue, automaton, named
from jaxaudit.dialogues.protocol import END, NOTHING, OWN, PROMPT, TOOL

ROWS = 384


def written(dialogue, keys, difficulty, own, replaced=None, where=None):
    """Rows `[N, T]` of own tokens `[N, T]`: token, role, position, chunk, and the states after the last slot.

    `replaced` `[N, T, R]` takes a tool's result's place at the slots that `where` `[N, T]` names.
    """
    length = own.shape[1]
    replaced = np.zeros((*own.shape, dialogue.reply_length), np.int32) if replaced is None else replaced
    where = np.zeros(own.shape, bool) if where is None else where

    def one(key, own, replaced, where):
        def advance(progress, at):
            slot, own, replaced, where = at
            token, role = automaton.given(progress)
            token = jnp.where(role == OWN, own, token)
            after, reply = automaton.write(dialogue, progress, token)
            spoilt = where & (reply.role == TOOL)
            reply = reply.replace(tokens=jnp.where(spoilt, replaced, reply.tokens))
            seen = jnp.where(role == END, NOTHING, token), role, progress.position, progress.chunk
            return automaton.take(after, reply, slot), seen

        slots = jnp.arange(length)
        progress, seen = jax.lax.scan(
            advance, automaton.begin(dialogue, key, difficulty), (slots, own, replaced, where)
        )
        return jnp.stack(seen, -1), progress, dialogue.reward(progress.state)

    return jax.jit(jax.vmap(one))(keys, own, replaced, where)


def mixed(dialogue, keys, rng, own_share=0.75):
    """Own tokens `[N, T]`: demonstrations, right and wrong ones, with random tokens in them."""
    right = jnp.asarray(rng.random(len(keys)) < 0.7)
    shown = jax.jit(jax.vmap(dialogue.demonstration, (0, None, 0)))(keys, dialogue.difficulty, right)
    random = rng.integers(0, dialogue.vocabulary, shown.shape)
    kept = (rng.random(shown.shape) < rng.choice([own_share, 1.0], (len(keys), 1))) & (np.asarray(shown) >= 0)
    return np.where(kept, shown, random).astype(np.int32)


def plain(name, dialogue, keys, difficulty, own, lost=None, spoilt=None):
    states, prompts = jax.device_get(jax.jit(jax.vmap(dialogue.reset, (0, None)))(keys, difficulty))
    rows, golds = [], []
    for n in range(len(keys)):
        state = jax.tree.map(lambda leaf, n=n: leaf[n], states)
        rules = plain_dialogues.RULES[name](dialogue, state)
        prompt = [dialogue.words[token] for token in prompts.tokens[n] if token >= 0]
        disturbed = {"lost": lost[n], "spoilt": spoilt[n]} if lost is not None else {}
        rows.append(plain_dialogues.row(rules, prompt, dialogue.words, own[n], own.shape[1], **disturbed))
        golds.append(rules.gold())
    return np.array(rows), np.array(golds)


@pytest.mark.parametrize("name", plain_dialogues.RULES)
def test_rows_are_those_of_a_plain_loop(name):
    settings = {"rare_share": 0.3} if name in ("hop", "calculator") else {}
    if name == "calculator":
        settings["operators"] = "+-*"
    dialogue = named(name, **settings).make()
    rng = np.random.default_rng(0)
    keys = jax.random.split(jax.random.key(1), ROWS)
    own = mixed(dialogue, keys, rng)
    seen, _, reward = written(dialogue, keys, dialogue.difficulty, own)
    rows, golds = plain(name, dialogue, keys, dialogue.difficulty, own)
    np.testing.assert_array_equal(seen, rows)
    np.testing.assert_allclose(reward["gold"], golds, atol=1e-6)
    assert {OWN, PROMPT, END} <= set(rows[..., 1].ravel())
    assert 0 < (golds == 1).mean() < 1
    assert (TOOL in rows[..., 1]) == bool(dialogue.result_error)


@pytest.mark.parametrize("name", ["hop", "calculator"])
def test_results_that_are_lost_or_spoilt(name):
    dialogue = named(name).make()
    rng = np.random.default_rng(1)
    keys = jax.random.split(jax.random.key(2), ROWS)
    own = mixed(dialogue, keys, rng, own_share=0.9)
    size = (*own.shape, dialogue.reply_length)
    # A third of the results is lost, a third is an error, and a third is of tokens drawn, as many as there are.
    kind, some = rng.integers(0, 3, own.shape), rng.choice(dialogue.result_tokens, size)
    some = np.where(np.arange(size[-1]) < rng.integers(1, size[-1] + 1, own.shape)[..., None], some, NOTHING)
    error = np.pad(dialogue.result_error, (0, size[-1] - len(dialogue.result_error)), constant_values=NOTHING)
    replaced = np.where((kind == 0)[..., None], NOTHING, np.where((kind == 1)[..., None], error, some))
    seen, progress, reward = written(
        dialogue, keys, dialogue.difficulty, own, replaced.astype(np.int32), np.ones(own.shape, bool)
    )
    lost = [set(np.flatnonzero(row == 0)) for row in kind]
    spoilt = [{slot: [t for t in row[slot] if t >= 0] for slot in range(own.shape[1])} for row in replaced]
    rows, golds = plain(name, dialogue, keys, dialogue.difficulty, own, lost, spoilt)
    np.testing.assert_array_equal(seen, rows)
    np.testing.assert_array_equal(reward["gold"], golds)
    assert 0.3 < np.asarray(progress.over).mean(), "dialogues end well all the same"


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


@pytest.mark.parametrize("length", [9, 16, 20])
def test_chunks_begin_afresh_and_rows_are_cut(length):
    own = np.random.default_rng(2).integers(0, 5, (8, length)).astype(np.int32)
    seen, progress, reward = written(Chunks(), jax.random.split(jax.random.key(0), 8), 0.0, own)
    rows = [plain_dialogues.row(ChunkRules(), ["3", "4"], Chunks.words, line, length) for line in own]
    np.testing.assert_array_equal(seen, rows)
    # 2 given and 3 own, then twice 3 given and 3 own: 17 slots.
    assert np.asarray(seen)[0, :, 3].tolist() == ([0] * 5 + [5] * 6 + [11] * 9)[:length]
    assert (np.asarray(progress.over) == (length >= 17)).all()
    assert (np.asarray(reward["gold"]) == (length >= 17)).all()


def test_after_the_end_nothing_changes():
    dialogue = named("hop").make()
    keys = jax.random.split(jax.random.key(0), 64)
    rng = np.random.default_rng(3)
    own = mixed(dialogue, keys, rng, own_share=1.0)
    seen, progress, _ = written(dialogue, keys, 2.0, own)
    after = np.asarray(seen)[..., 1] == END
    other = np.where(after, rng.integers(0, dialogue.vocabulary, own.shape), own).astype(np.int32)
    assert after.any() and (other != own).any()
    again, later, _ = written(dialogue, keys, 2.0, other)
    np.testing.assert_array_equal(seen, again)
    jax.tree.map(np.testing.assert_array_equal, progress, later)


@pytest.mark.parametrize("name", plain_dialogues.RULES)
def test_replaying_is_writing_again(name):
    dialogue = named(name).make()
    keys = jax.random.split(jax.random.key(4), 64)
    own = mixed(dialogue, keys, np.random.default_rng(4))
    seen, _, reward = written(dialogue, keys, dialogue.difficulty, own)
    replay = jax.jit(jax.vmap(lambda key, row: automaton.replay(dialogue, key, dialogue.difficulty, row)))
    replayed = replay(keys, seen[..., 0])
    assert replayed.agrees.all()
    for column, there in enumerate(("role", "position", "chunk"), 1):
        np.testing.assert_array_equal(seen[..., column], getattr(replayed, there))
    jax.tree.map(np.testing.assert_array_equal, reward, replayed.reward)

    tokens, roles = np.asarray(seen[..., 0]), np.asarray(seen[..., 1])
    differing = {
        "a given token": np.where(roles == PROMPT, (tokens + 1) % dialogue.vocabulary, tokens),
        "a result": np.where(roles == TOOL, (tokens + 1) % dialogue.vocabulary, tokens),
        "an own token that there is not": np.where(roles == OWN, dialogue.vocabulary, tokens),
        "no own token": np.where(roles == OWN, NOTHING, tokens),
        "a token after the end": np.where(roles == END, 0, tokens),
    }
    for what, rows in differing.items():
        np.testing.assert_array_equal(replay(keys, rows).agrees, (rows == tokens).all(1), err_msg=what)


@pytest.mark.parametrize("name", plain_dialogues.RULES)
def test_a_prefix_is_the_first_slots(name):
    dialogue = named(name).make()
    slots = dialogue.prompt_length
    keys = jax.random.split(jax.random.key(5), 16)
    own = np.zeros((16, slots), np.int32)
    seen, progress, _ = written(dialogue, keys, dialogue.difficulty, own)

    def first(key):
        return automaton.prefix(dialogue, automaton.begin(dialogue, key, dialogue.difficulty), slots)

    prefix = jax.jit(jax.vmap(first))(keys)
    assert (prefix.role == PROMPT).all()
    for column, there in enumerate(("token", "role", "position", "chunk")):
        np.testing.assert_array_equal(seen[..., column], getattr(prefix, there))
    jax.tree.map(np.testing.assert_array_equal, progress, prefix.progress)


def test_a_disturbed_prompt_is_what_is_given():
    dialogue = named("hop").make()
    progress = automaton.begin(dialogue, jax.random.key(0), 3.0)
    disturbed = progress.replace(queue=jnp.array([dialogue.token["2"], dialogue.token["f"]], jnp.int32))
    assert dialogue.text(automaton.prefix(dialogue, disturbed, 2).token) == "2 f"
