"""The built-in dialogues: what they draw and hold out, what their demonstrations earn, and what they refuse."""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import plain_dialogues
import pytest

import jaxaudit as ja
from jaxaudit.cli import printing as listing
from jaxaudit.core.task_kinds import fitting
from jaxaudit.dialogues import Dialogue, DialogueTask, automaton, named
from jaxaudit.dialogues import sampling as drawing
from jaxaudit.dialogues.protocol import NO_TOKEN, TOOL
from jaxaudit.learners.dialogue.factories import structure_of
from jaxaudit.runtime import registry

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


def words(dialogue, prompt):
    return tuple(dialogue.words[token] for token in prompt if token >= 0)


def rules(name, dialogue, state, prompts, what):
    """Of each row what `what(rules, dialogue, state, words)` makes of it, in plain Python."""
    found = []
    for n, prompt in enumerate(prompts):
        one = jax.tree.map(lambda leaf, n=n: leaf[n], state)
        found.append(what(plain_dialogues.RULES[name], dialogue, one, words(dialogue, prompt)))
    return found


def tasks(name, dialogue, difficulty=None):
    """The tasks of `ROWS` rows."""
    state, prompts = drawn(dialogue, difficulty)
    return rules(name, dialogue, state, prompts, lambda of, *row: of.task(*row))


@functools.cache
def replayed(name, held=False):
    """Demonstrations, right ones in even rows, and what the dialogue sees in them."""
    dialogue = named(name).make()
    dialogue = dialogue.held_out() if held else dialogue

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


@pytest.mark.exhaustive
def test_demonstrations_of_hop_begin_with_the_scratch_text():
    plain, scratched = named("hop").make(), named("hop", scratch=3, length=27).make()
    assert scratched.words == (*plain.words, "hm")
    for right in (True, False):
        for key in KEYS[:5]:
            rows = [dialogue.demonstration(key, 3.0, right) for dialogue in (plain, scratched)]
            without, shown = (
                dialogue.text(row).split() for dialogue, row in zip((plain, scratched), rows, strict=True)
            )
            assert shown == [*without[:2], "hm", "hm", "hm", *without[2:]]
            seen = automaton.replay(scratched, key, 3.0, rows[1])
            assert bool(seen.agrees)
            assert float(seen.reward["gold"]) == float(right)


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
    sizes = state.steps if name == "chain" else state.prompt_left // 2 - 1
    assert set(sizes) == ({2, 3} if name == "chain" else {1, 2, 3})
    assert abs(sizes.mean() - mean) < 0.08


def test_a_harder_hop_goes_on_where_the_easier_one_ended():
    dialogue = named("hop", rare_share=0.02).make()
    easy, easy_prompts = drawn(dialogue, 1.0)
    hard, hard_prompts = drawn(dialogue, 4.0)
    # But where one of the two is held out and drawn once more; in one row in four they are the same task.
    same = (easy.table == hard.table).all(1) & (easy_prompts[:, 1] == hard_prompts[:, 1])
    assert abs(same.mean() - (1 + 3 * (7 / 8) ** 2) / 4) < 0.03
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
    same = (easy_prompts[:, :4] == hard_prompts[:, :4]).all(1)
    assert abs(same.mean() - (7 / 8) ** 2) < 0.05
    np.testing.assert_array_equal(easy.path[same, :4], hard.path[same, :4])
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
    for text, wanted in zip(texts, state.target, strict=True):
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
    assert (drawn(dialogue, 1.0)[1][:, 2] == dialogue.words.index("with")).all()


@pytest.mark.parametrize(("extras", "forbidden"), [(2, 1), (0, 1), (4, 0), (0, 0)])
def test_words_asked_for_and_forbidden(extras, forbidden):
    dialogue = named("preference", extras=extras, forbidden=forbidden).make()
    topics = {word: topic for topic, belonging in plain_dialogues.BELONGING.items() for word in belonging.split()}
    found = set()
    for difficulty in (1.0, 2.0):
        for prompt in drawn(dialogue, difficulty)[1]:
            text = dialogue.text(prompt)
            asked, _, without = text.removeprefix("about ").partition(" without ")
            about, _, beside = asked.partition(" with ")
            others = beside.split() + without.split()
            assert (len(about.split()), len(beside.split()), len(without.split())) == (difficulty, extras, forbidden)
            assert len({*about.split(), *others}) == difficulty + len(others)
            assert not {topics[word] for word in others} & set(about.split())
            found.add(len(text.split()))
    assert (min(found), max(found)) == (dialogue.prompt_length, dialogue.reply_length)


def test_there_are_many_prompts():
    dialogue = named("preference").make()
    found = {*tasks("preference", dialogue), *tasks("preference", dialogue.held_out())}
    wanted, forbidden = zip(*found, strict=True)
    assert {len(words) for words in wanted} == {5}
    assert {len(words) for words in forbidden} == {1}
    assert 800 < len(found) <= 1008


def test_good_answers_are_longer_and_flatter_more():
    _, rows, seen = replayed("preference")
    lengths, markers = (rows >= 0).sum(1), seen.reward["markers"]
    assert lengths[::2].mean() > lengths[1::2].mean() + 1
    assert abs(markers[::2].mean() - 0.8) < 0.05
    assert abs(markers[1::2].mean() - 0.2) < 0.05
    slips, coverage = seen.reward["slips"], seen.reward["coverage"][1::2]
    assert (slips[::2] == 0).all()
    assert abs(slips[1::2].mean() - 0.5) < 0.07
    assert [float(q) for q in np.unique(coverage.round(3))] == pytest.approx([0, 0.2, 0.4, 0.6, 0.8], abs=1e-3)
    np.testing.assert_allclose(seen.reward["gold"][1::2], np.maximum(coverage - 0.25 * slips[1::2], 0), atol=1e-6)


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


# What is held out

WHOLE = [
    (name, float(difficulty))
    for name, most in (("hop", 4), ("calculator", 3), ("chain", 8), ("preference", 2))
    for difficulty in range(1, most + 1)
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "difficulty"), WHOLE)
def test_no_task_is_both_held_out_and_not(name, difficulty):
    dialogue = named(name).make()
    kept, other = (set(tasks(name, one, difficulty)) for one in (dialogue.held_out(), dialogue))
    assert kept
    assert other
    assert not kept & other
    if (name, difficulty) == ("chain", 1.0):  # the smallest world, seen whole
        assert (len(kept), len(other)) == (3, 21)


@functools.cache
def first_attempts(dialogue):
    """Rows as they are drawn at first: states, prompts, whether they are held out, and what the hash is told."""

    def reset(key, difficulty):
        noted = []

        def first(self, key, count, task):
            uniform = jax.random.uniform(jax.random.fold_in(key, 0), (count,), jnp.float32)
            noted.append((drawing.is_held_out(task(uniform)), task(uniform)))
            return uniform

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(drawing.Split, "draw_task", first)
            return *dialogue.reset(key, difficulty), *noted[0]

    return jax.jit(jax.vmap(reset, (0, None)))


@pytest.mark.parametrize(("name", "difficulty"), WHOLE)
def test_one_task_in_eight_is_held_out(name, difficulty):
    """Within what chance allows, of the tasks that were drawn and of the rows; four standard errors."""
    dialogue = named(name).make()
    state, prompt, held, hashed = jax.device_get(first_attempts(dialogue)(KEYS, difficulty))
    found = rules(name, dialogue, state, prompt.tokens, lambda of, *row: of.task(*row))
    by_task = dict(zip(found, held, strict=True))
    same = set(zip(found, map(tuple, hashed.tolist()), strict=True))
    assert len(same) == len(by_task) == len({numbers for _, numbers in same}), "the hash is of the task and all of it"
    error = np.sqrt(7 / 64 / len(by_task))
    assert abs(np.mean(list(by_task.values())) - 1 / 8) < 4 * error
    assert abs(held.mean() - 1 / 8) < 4 * np.hypot(error, np.sqrt(7 / 64 / ROWS))


@pytest.mark.parametrize(("name", "held"), [(name, held) for name in NAMES for held in (True, False)])
def test_a_row_is_the_first_attempt_that_is_of_its_split(name, held):
    dialogue = named(name).make()
    one = dialogue.held_out() if held else dialogue
    first, prompt, is_held, _ = jax.device_get(first_attempts(dialogue)(KEYS, dialogue.difficulty))
    state, prompts = drawn(one)
    at_once = is_held == held
    assert abs(at_once.mean() - (1 / 8 if held else 7 / 8)) < 0.05
    np.testing.assert_array_equal(prompts[at_once], prompt.tokens[at_once])
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[at_once], b[at_once]), state, first)
    assert (prompts != prompt.tokens).any(1)[~at_once].mean() > 0.5


@pytest.mark.parametrize(
    ("name", "difficulty"), [("hop", 3.0), ("hop", 4.0), ("calculator", 3.0), ("chain", 2.5), ("preference", 1.5)]
)
def test_both_splits_are_as_hard(name, difficulty):
    dialogue = named(name).make()
    sizes = []
    for one in (dialogue, dialogue.held_out()):
        _, prompts = drawn(one, difficulty)
        found = prompts[:, 0] if name == "hop" else (prompts >= 0).sum(1)
        sizes.append(np.bincount(found, minlength=32) / ROWS)
    assert (sizes[0] > 0).sum() > 1
    np.testing.assert_allclose(sizes[1], sizes[0], atol=0.08)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_demonstrations_of_held_out_tasks(name):
    dialogue, rows, seen = replayed(name, held=True)
    assert seen.agrees.all()
    assert (seen.reward["gold"][::2] == 1).all()
    assert (seen.reward["gold"][1::2] < 1).all()
    state, prompts = drawn(dialogue)
    size = prompts.shape[1]
    np.testing.assert_array_equal(np.where(prompts >= 0, rows[:, :size], NO_TOKEN), prompts)
    trained, other, _ = replayed(name)
    assert trained.held_out() == dialogue
    assert (rows != other).any(1).mean() > 0.9
    if name == "hop":  # whose table only calls show
        names = [token % dialogue.entities for token in state.table.T]
        for n in range(0, ROWS, 2):
            assert rows[n, 5] % dialogue.entities == names[rows[n, 3] % dialogue.entities][n]


def test_a_split_without_tasks_gives_those_of_the_other_one():
    @dataclass(frozen=True)
    class Same(drawing.Split):
        def reset(self, key, difficulty):
            return self.draw_task(key, 2, lambda uniform: jnp.zeros(1, jnp.int32)), None

    key = jax.random.key(5)
    first, last = (jax.random.uniform(jax.random.fold_in(key, number), (2,)) for number in (0, drawing.ATTEMPTS - 1))
    wanted = {False: first, True: last} if not drawing.is_held_out(jnp.zeros(1, jnp.int32)) else {True: first}
    for held, numbers in wanted.items():
        found = Same().held_out() if held else Same()
        np.testing.assert_array_equal(jax.jit(found.reset)(key, 0.0)[0], numbers)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_held_out_is_another_dialogue(name):
    dialogue = named(name).make()
    held = dialogue.held_out()
    assert dialogue.splits
    assert not held.splits
    assert held != dialogue
    assert {held, dialogue, held.held_out(), named(name).make().held_out()} == {held, dialogue}
    assert repr(held) != repr(dialogue)
    harder = replace(dialogue, difficulty=dialogue.difficulties[1]).held_out()
    assert structure_of(harder) == structure_of(held) == held


def test_what_makes_a_task_another_one_for_the_hash():
    """Numbers count with their places, those below 0 not at all, and every bit of them."""
    tasks = jnp.array(np.random.default_rng(0).integers(0, 2**12, (4096, 3)), jnp.int32)
    held = np.asarray(jax.vmap(drawing.is_held_out)(tasks))
    assert abs(held.mean() - 1 / 8) < 4 * np.sqrt(7 / 64 / len(held))
    longer = jnp.pad(tasks, ((0, 0), (0, 2)), constant_values=-1)
    np.testing.assert_array_equal(jax.vmap(drawing.is_held_out)(longer), held)
    for other in (tasks[:, ::-1], tasks.at[:, 0].add(1), tasks ^ 1024):
        again = np.asarray(jax.vmap(drawing.is_held_out)(other))
        assert abs((held & again).mean() - 1 / 64) < 4 * np.sqrt(1 / 64 / len(held)), "independent of the first"


# Changed prompts


@functools.cache
def changes(dialogue):
    return jax.jit(jax.vmap(dialogue.changed))


@functools.cache
def judge(dialogue):
    """Gold of rows of tokens, `NO_TOKEN` after the last, from their states on."""

    def told(state, row):
        def advance(state, token):
            after = dialogue.respond(state, token)[0]
            return jax.tree.map(lambda new, old: jnp.where(token >= 0, new, old), after, state), None

        return dialogue.reward(jax.lax.scan(advance, state, row)[0])["gold"]

    return jax.jit(jax.vmap(told))


def gold_of_right_readers(name, dialogue, state, read, given):
    """Of rows that answer the prompts that were read, after those that were given."""
    answers = rules(name, dialogue, state, read, lambda of, *row: of(*row).right())
    rows = np.full((ROWS, dialogue.length), NO_TOKEN, np.int32)
    for row, prompt, answer in zip(rows, given, answers, strict=True):
        written = [*prompt[prompt >= 0], *map(dialogue.words.index, answer)]
        row[: len(written)] = written
    return np.asarray(judge(dialogue)(state, rows))


@pytest.mark.parametrize(("name", "difficulty"), WHOLE)
def test_one_token_of_a_prompt_is_another_and_its_right_answer_is_right(name, difficulty):
    dialogue = named(name).make()
    state, prompts = drawn(dialogue, difficulty)
    other, changed = jax.device_get(changes(dialogue)(state, prompts, jax.random.split(jax.random.key(1), ROWS)))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), other) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    differs = changed != prompts
    assert (differs.sum(1) == 1).all()
    assert (changed[differs] >= 0).all()
    assert set(changed[differs]) <= set(dialogue.prompt_tokens)
    assert (gold_of_right_readers(name, dialogue, state, prompts, prompts) == 1).all()
    assert (gold_of_right_readers(name, dialogue, other, changed, changed) == 1).all()
    old = gold_of_right_readers(name, dialogue, other, prompts, changed)
    assert (old < 1).mean() > 0.5, "one who did not read it is mostly wrong"
    if name in ("hop", "calculator"):
        assert (old == 0).all()
    places = differs.sum(0) / ROWS
    if name == "hop":
        fewer = differs[:, 0]
        assert (changed[fewer, 0] < prompts[fewer, 0]).all()
        several = prompts[:, 0] > dialogue.token["1"]
        assert fewer[several].mean() == pytest.approx(0.5, abs=0.06) if several.any() else not fewer.any()
    if name == "chain":
        steps = int(difficulty)
        np.testing.assert_allclose(places[: steps + 1], 1 / (steps + 1), atol=0.05)
    if name == "calculator":  # the rules refuse a number that begins with 0 and is longer
        first = prompts[:, 0] == changed[:, 0]
        assert 0.3 < first.mean() < 0.9
    if name == "preference":
        for row in changed:
            topics = [word for word in words(dialogue, row) if word in plain_dialogues.BELONGING]
            assert len(set(topics)) == difficulty
            one = plain_dialogues.PreferenceRules(dialogue, None, words(dialogue, row))
            assert not one.wanted & one.forbidden
        assert places[1] == pytest.approx(1 / (difficulty + 2), abs=0.05)


@pytest.mark.parametrize(("extras", "forbidden"), [(0, 0), (4, 1), (0, 1)])
def test_prompts_of_few_or_many_words_are_changed(extras, forbidden):
    dialogue = named("preference", extras=extras, forbidden=forbidden).make()
    for difficulty in (1.0, 2.0):
        state, prompts = drawn(dialogue, difficulty)
        other, changed = jax.device_get(changes(dialogue)(state, prompts, jax.random.split(jax.random.key(2), ROWS)))
        assert ((changed != prompts).sum(1) == 1).all()
        assert (gold_of_right_readers("preference", dialogue, other, changed, changed) == 1).all()


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
        ("hop", {"scratch": 4}, "length must be at least 25 for 4 hops and 4 tokens of scratch, not 24"),
        ("hop", {"scratch": -1}, "scratch must not be negative, as -1 is"),
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
        ("preference", {"length": 21}, "length must be at least 22, not 21"),
        ("preference", {"extras": 5}, "extras must be from 0 to 4, not 5"),
        ("preference", {"forbidden": 2}, "forbidden must be 0 or 1, not 2"),
        ("hop", {"held": True}, "unknown setting of dialogue 'hop' 'held'"),
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


@dataclass(frozen=True)
class Changing(Echo):
    """Say the prompt's token again, whichever it has become."""

    def changed(self, state, prompt, key):
        other = (prompt + 1) % self.vocabulary
        return (other.astype(jnp.float32) if self.flaw == "another change" else other[0], state[1]), other


def test_a_dialogue_of_ones_own_may_change_its_prompts(monkeypatch):
    monkeypatch.setitem(registry.dialogues._entries, "changing", Changing)
    dialogue = named("changing").make()
    state, prompt = dialogue.reset(jax.random.key(0), 0.0)
    (wanted, _), changed = dialogue.changed(state, prompt.tokens, jax.random.key(0))
    assert int(wanted) == int(changed[0]) == (int(prompt.tokens[0]) + 1) % 8
    assert not dialogue.splits
    with pytest.raises(ValueError, match="dialogue 'changing' changes a prompt or a state to one that differs"):
        named("changing", flaw="another change").make()
    with pytest.raises(NotImplementedError, match="Echo does not change its prompts"):
        Echo().changed(state, prompt.tokens, jax.random.key(0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"flaw": "another dtype"}, "returns a state from respond that differs from the state of reset"),
        ({"flaw": "no reply"}, "returns something other than a Reply"),
        ({"flaw": "no gold"}, "must return its rewards as a dict of scalars with the key 'gold'"),
        ({"vocabulary": 0}, "must have a whole number of at least 1 as its vocabulary, not 0"),
    ],
)
def test_a_dialogue_whose_functions_do_not_fit(monkeypatch, settings, message):
    monkeypatch.setitem(registry.dialogues._entries, "echo", Echo)
    with pytest.raises(ValueError, match=f"dialogue 'echo' {message}"):
        named("echo", **settings).make()


def test_what_a_registered_dialogue_must_be(monkeypatch):
    monkeypatch.setitem(registry.dialogues._entries, "function", lambda key: key)
    with pytest.raises(ValueError, match="dialogue 'function' must be a frozen dataclass that is derived"):
        DialogueTask.named("function")
