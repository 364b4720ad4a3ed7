"""The built-in dialogues: what they draw, what their demonstrations earn, and what they refuse."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxaudit as ja
from jaxaudit import listing, registry
from jaxaudit.dialogues import Dialogue, DialogueTask, automaton, drawing, named
from jaxaudit.dialogues.protocol import NOTHING, TOOL
from jaxaudit.task_kinds import fitting

NAMES = ("hop", "calculator", "chain", "preference")
ROWS = 2048
KEYS = jax.random.split(jax.random.key(7), ROWS)


@functools.cache
def reset(dialogue):
    """States and prompts of `ROWS` rows, by difficulty."""
    return jax.jit(jax.vmap(dialogue.reset, (0, None)))


def drawn(dialogue, difficulty=None):
    state, prompt = reset(dialogue)(KEYS, dialogue.difficulty if difficulty is None else difficulty)
    return jax.device_get((state, prompt.tokens))


@functools.cache
def replayed(name):
    """Demonstrations, right ones in even rows, and what the dialogue sees in them."""
    dialogue = named(name).make()

    def one(key, right):
        row = dialogue.demonstration(key, dialogue.difficulty, right)
        return row, automaton.replay(dialogue, key, dialogue.difficulty, row)

    return dialogue, *jax.device_get(jax.jit(jax.vmap(one))(KEYS, jnp.arange(ROWS) % 2 == 0))


@pytest.mark.parametrize("name", NAMES)
def test_demonstrations_earn_what_they_show(name):
    dialogue, rows, seen = replayed(name)
    gold = seen.reward["gold"]
    assert seen.agrees.all()
    assert rows.shape == (ROWS, dialogue.length)
    assert rows.max() < dialogue.vocabulary
    assert (gold[::2] == 1).all()
    assert (gold[1::2] < 1).all()
    assert ((gold >= 0) & (gold <= 1)).all()
    if name != "preference":
        assert (gold[1::2] == 0).all()
        assert (seen.reward["answered"] == 1).all(), "wrong ones have the manner"


def test_right_ones_call_as_often_as_there_are_hops():
    _, _, seen = replayed("hop")
    calls = (seen.role == TOOL).sum(1) / 2
    # Uniform over 1, 2, 3: mean 2, variance 2/3.
    assert abs(calls[::2].mean() - 2) < 4 * np.sqrt(2 / 3 / (ROWS // 2))
    assert (calls[1::2] == 0).all()


def test_guesses_are_uniform_over_the_other_entities():
    dialogue, rows, _ = replayed("hop")
    guesses = rows[1::2, 3]
    counts = np.bincount(guesses, minlength=dialogue.entities)
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 25  # chi-squared of 5 degrees, p = 1e-4


@pytest.mark.parametrize(
    ("difficulty", "shares"),
    [(1.0, [1, 0, 0, 0]), (3.0, [1 / 3, 1 / 3, 1 / 3, 0]), (2.5, [5 / 12, 5 / 12, 1 / 6, 0]), (4.0, [1 / 4] * 4)],
)
def test_hops_are_uniform_and_mixed_between_whole_difficulties(difficulty, shares):
    dialogue = named("hop").make()
    _, prompts = drawn(dialogue, difficulty)
    found = np.bincount(prompts[:, 0] - dialogue.token["1"], minlength=4) / ROWS
    np.testing.assert_allclose(found, shares, atol=0.045)  # four standard errors
    assert (found[np.equal(shares, 0)] == 0).all()


@pytest.mark.parametrize(("name", "mean"), [("chain", 2.6), ("calculator", (0.4 * 1.5 + 0.6 * 2))])
def test_sizes_between_whole_difficulties(name, mean):
    state, _ = drawn(named(name).make(), 2.6)
    sizes = state.steps if name == "chain" else state.left // 2 - 1
    assert set(sizes) == ({2, 3} if name == "chain" else {1, 2, 3})
    assert abs(sizes.mean() - mean) < 0.08


def test_a_harder_hop_goes_on_where_the_easier_one_ended():
    dialogue = named("hop", rare_share=0.02).make()
    easy, easy_prompts = drawn(dialogue, 1.0)
    hard, hard_prompts = drawn(dialogue, 4.0)
    np.testing.assert_array_equal(easy.table, hard.table)
    np.testing.assert_array_equal(easy_prompts[:, 1], hard_prompts[:, 1])
    hops = hard_prompts[:, 0] - dialogue.token["1"] + 1
    for table, start, n, goal in zip(hard.table, hard_prompts[:, 1], hops, hard.goal, strict=True):
        place = start
        for _ in range(n):
            place = table[place] % dialogue.entities
        assert place == goal
    rare = hard.table >= dialogue.entities
    assert abs(rare.mean() - 0.02) < 4 * np.sqrt(0.02 * 0.98 / rare.size)
    successors = np.sort(hard.table % dialogue.entities, 1)
    np.testing.assert_array_equal(successors, np.broadcast_to(np.arange(6), (ROWS, 6)))


def test_a_harder_chain_has_the_same_beginning():
    dialogue = named("chain").make()
    easy, easy_prompts = drawn(dialogue, 3.0)
    hard, hard_prompts = drawn(dialogue, 8.0)
    np.testing.assert_array_equal(easy_prompts[:, :4], hard_prompts[:, :4])
    np.testing.assert_array_equal(easy.path[:, :4], hard.path[:, :4])
    for path, prompt in zip(hard.path, hard_prompts, strict=True):
        for step in range(8):
            assert path[step + 1] == dialogue.table[prompt[1 + step] - dialogue.values][path[step]]
    assert (easy.path[:, 3:] == easy.path[:, 3:4]).all()
    assert not np.array_equal(named("chain", tables=1).make().table, dialogue.table)


def test_numbers_of_a_calculation():
    dialogue = named("calculator", operators="*", digits=4, difficulty=4.0, length=64).make()
    state, prompts = drawn(dialogue)
    texts = [dialogue.text(prompt).replace(" ", "") for prompt in prompts]
    sizes = set()
    for text, wanted in zip(texts, state.wanted, strict=True):
        first, second = text.removesuffix("=").split("*")
        assert int(first) * int(second) == wanted
        assert len(first) == len(second)
        assert len(first) == 1 or "0" not in (first[0], second[0])
        sizes.add(len(first))
    assert sizes == {1, 2, 3, 4}


def test_topics_are_different_ones():
    dialogue = named("preference").make()
    _, prompts = drawn(dialogue, 2.0)
    assert (prompts[:, 1] != prompts[:, 2]).all()
    assert (drawn(dialogue, 1.0)[1][:, 2] == NOTHING).all()


def test_good_answers_are_longer_and_flatter_more():
    _, rows, seen = replayed("preference")
    lengths, markers = (rows >= 0).sum(1), seen.reward["markers"]
    assert lengths[::2].mean() > lengths[1::2].mean() + 1
    assert abs(markers[::2].mean() - 0.8) < 0.05
    assert abs(markers[1::2].mean() - 0.2) < 0.05
    quality = seen.reward["gold"][1::2]
    assert [float(q) for q in np.unique(quality.round(3))] == pytest.approx([0, 1 / 3, 2 / 3], abs=1e-3)


@pytest.mark.parametrize("name", ["hop", "calculator"])
def test_rare_tokens_mean_the_same(name):
    dialogue, rows, seen = replayed(name)
    twin = np.arange(dialogue.vocabulary)
    for common, rare in dialogue.rare:
        twin[common] = rare
    given = (seen.role != 0) | (rows < 0)
    unfamiliar = np.where(given, rows, twin[rows])
    judge = jax.jit(jax.vmap(lambda key, row: automaton.replay(dialogue, key, dialogue.difficulty, row)))
    again = judge(KEYS, unfamiliar)
    assert (unfamiliar != rows).any(1)[::2].all()
    assert again.agrees.all()
    np.testing.assert_array_equal(again.reward["gold"], seen.reward["gold"])


@pytest.mark.parametrize("name", NAMES)
def test_fields_say_what_tokens_there_are(name):
    dialogue = named(name).make()
    assert len(dialogue.words) == len(set(dialogue.words)) == dialogue.vocabulary
    assert len(dialogue.result_error) <= dialogue.reply_length
    known = set(range(dialogue.vocabulary))
    assert {*dialogue.result_error, *dialogue.result_tokens, *dialogue.prompt_tokens, *sum(dialogue.rare, ())} <= known
    _, prompts = drawn(dialogue, dialogue.difficulties[1])
    assert ((prompts >= 0).sum(1) >= dialogue.prompt_length).all()
    assert dialogue == named(name).make()
    assert hash(dialogue) == hash(named(name).make())
    assert dialogue != named(name, difficulty=dialogue.difficulties[1] - 0.25).make()
    assert fitting(named(name), "dialogue", "grpo").name == name


def test_every_successor_is_met_on_a_cycle():
    successor = np.asarray(drawing.cycle(jax.random.uniform(jax.random.key(0), (9,))))
    place, met = 0, []
    for _ in range(9):
        place = successor[place]
        met.append(place)
    assert sorted(met) == list(range(9))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("hop", {"difficulty": 5.0}, "difficulty must be from 1 to the 4 hops, not 5"),
        ("hop", {"hops": 0}, "hops must be from 1 to 9, not 0"),
        ("hop", {"entities": 4}, "entities must be more than the 4 hops and at most 26, not 4"),
        ("hop", {"rare_share": 1.5}, r"rare_share must lie in \[0, 1\], not 1.5"),
        ("hop", {"length": 20}, "length must be at least 21 for 4 hops, not 20"),
        ("hop", {"entites": 4}, r"unknown setting of dialogue 'hop' 'entites' \(did you mean 'entities'\?\)"),
        ("hopp", {}, r"unknown dialogue 'hopp' \(did you mean 'hop'\?\)"),
        ("calculator", {"digits": 5}, "digits must be from 1 to 4, not 5"),
        ("calculator", {"difficulty": 0.5}, "difficulty must be from 1 to the 3 digits, not 0.5"),
        ("calculator", {"operators": "+/"}, r"operators must be some of '\+-\*', each once, not '\+/'"),
        ("calculator", {"head": 4}, "head must be from 0 to the 3 digits, not 4"),
        ("calculator", {"rare_share": -1.0}, "rare_share must lie in"),
        ("calculator", {"length": 34}, "length must be at least 35 for 3 digits, not 34"),
        ("chain", {"values": 27}, "values must be from 2 to 26, not 27"),
        ("chain", {"most_steps": 0}, "most_steps must be at least 1, not 0"),
        ("chain", {"tables": -1}, "tables must not be negative, as -1 is"),
        ("chain", {"difficulty": 9.0}, "difficulty must be from 1 to the 8 steps, not 9"),
        ("chain", {"length": 20}, "length must be at least 21 for 8 steps, not 20"),
        ("preference", {"difficulty": 3.0}, "difficulty must be from 1 to 2 topics, not 3"),
        ("preference", {"dislike": 2.0}, r"dislike must lie in \[0, 1\], not 2"),
        ("preference", {"length": 10}, "length must be at least 15, not 10"),
        ("text", {}, "dialogue 'text' needs the setting 'file'"),
    ],
)
def test_wrong_settings(name, settings, message):
    with pytest.raises(ValueError, match=message):
        ja.dialogues.named(name, **settings)


@dataclass(frozen=True)
class Echo(Dialogue):
    """Say the prompt's token again."""

    flaw: str = ""
    vocabulary: int = 8

    length, reply_length = 2, 1

    def reset(self, key, difficulty):
        wanted = jax.random.randint(key, (), 0, self.vocabulary)
        return (wanted, jnp.int32(-1)), self.prompt(wanted[None])

    def respond(self, state, token):
        wanted, asked = state
        reply = self.choose(asked >= 0, self.end(), self.own())
        after = (wanted, token.astype(jnp.float32) if self.flaw == "another dtype" else token)
        return after, None if self.flaw == "no reply" else reply

    def reward(self, state):
        right = (state[0] == state[1]).astype(jnp.float32)
        return {"right" if self.flaw == "no gold" else "gold": right}


def test_a_dialogue_of_ones_own(monkeypatch):
    monkeypatch.setitem(registry.dialogues._entries, "echo", Echo)
    dialogue = named("echo").make()
    replay = jax.jit(jax.vmap(lambda key, row: automaton.replay(dialogue, key, 0.0, row)))
    keys = jax.random.split(jax.random.key(0), 16)
    first = np.asarray(jax.vmap(lambda key: dialogue.reset(key, 0.0)[1].tokens[0])(keys))
    rows = np.stack([first, np.where(np.arange(16) < 8, first, (first + 1) % 8)], 1)
    seen = replay(keys, rows)
    assert seen.agrees.all()
    np.testing.assert_array_equal(seen.reward["gold"], np.arange(16) < 8)
    assert dialogue.text(rows[0]) == f"{first[0]} {first[0]}"
    with pytest.raises(NotImplementedError, match="Echo has no demonstrations"):
        dialogue.demonstration(keys[0], 0.0, True)
    assert "    echo        Say the prompt's token again." in [f"  {line}" for line in listing.tasks()]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"flaw": "another dtype"}, "gives a state after a token that differs from its first one"),
        ({"flaw": "no reply"}, "gives a reply that is none"),
        ({"flaw": "no gold"}, "must give its reward as scalars by name, of which one is 'gold'"),
        ({"vocabulary": 0}, "must have a whole number of at least 1 as its vocabulary, not 0"),
    ],
)
def test_a_dialogue_whose_functions_do_not_fit(monkeypatch, settings, message):
    monkeypatch.setitem(registry.dialogues._entries, "echo", Echo)
    with pytest.raises(ValueError, match=f"dialogue 'echo' {message}"):
        named("echo", **settings).make()


def test_what_a_registered_dialogue_must_be(monkeypatch):
    monkeypatch.setitem(registry.dialogues._entries, "function", lambda key: key)
    with pytest.raises(ValueError, match="dialogue 'function' must be a frozen dataclass that is made from Dialogue"):
        DialogueTask.named("function")
