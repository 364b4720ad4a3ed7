"""Tests the built-in dialogues: sampled and held-out tasks, rewards of demonstrations, changed prompts, and errors."""

import functools
from dataclasses import dataclass, replace

import dialogue_rules
import jax
import jax.numpy as jnp
import numpy as np
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
    """Returns a jitted function of keys and difficulty: the states and prompts of rows."""
    return jax.jit(jax.vmap(dialogue.reset, (0, None)))


def sampled(dialogue, difficulty=None):
    state, prompt = reset(dialogue)(KEYS, dialogue.difficulty if difficulty is None else difficulty)
    return jax.device_get((state, prompt.tokens))


def words(dialogue, prompt):
    return tuple(dialogue.words[token] for token in prompt if token >= 0)


def apply_rules(name, dialogue, state, prompts, function):
    """Returns the results of `function(rules, dialogue, state, words)` for each row, in plain Python."""
    results = []
    for n, prompt in enumerate(prompts):
        row_state = jax.tree.map(lambda leaf, n=n: leaf[n], state)
        results.append(function(dialogue_rules.RULES[name], dialogue, row_state, words(dialogue, prompt)))
    return results


def tasks(name, dialogue, difficulty=None):
    """Returns the tasks of `ROWS` rows."""
    state, prompts = sampled(dialogue, difficulty)
    return apply_rules(name, dialogue, state, prompts, lambda row_rules, *row: row_rules.task(*row))


@functools.cache
def replayed_demonstrations(name, held_out=False):
    """Returns demonstrations, right ones in even rows, and their replay by the dialogue."""
    dialogue = named(name).make()
    dialogue = dialogue.held_out() if held_out else dialogue

    def replay_one(key, right):
        row = dialogue.demonstration(key, dialogue.difficulty, right)
        return row, automaton.replay(dialogue, key, dialogue.difficulty, row)

    return dialogue, *jax.device_get(jax.jit(jax.vmap(replay_one))(KEYS, jnp.arange(ROWS) % 2 == 0))


@pytest.mark.parametrize("name", NAMES)
def test_right_demonstrations_earn_one_and_wrong_ones_less(name):
    dialogue, rows, replay = replayed_demonstrations(name)
    gold = replay.reward["gold"]
    assert replay.agrees.all()
    assert rows.shape == (ROWS, dialogue.length)
    assert rows.max() < dialogue.vocabulary
    assert (gold[::2] == 1).all()
    assert (gold[1::2] < 1).all()
    assert ((gold >= 0) & (gold <= 1)).all()
    if name != "preference":
        assert (gold[1::2] == 0).all()
        assert (replay.reward["answered"] == 1).all(), "wrong demonstrations have the right form"


def test_right_demonstrations_call_once_per_hop():
    _, _, replay = replayed_demonstrations("hop")
    calls = (replay.role == TOOL).sum(1) / 2
    # The number of hops is uniform over 1, 2, 3: mean 2, variance 2/3.
    assert abs(calls[::2].mean() - 2) < 4 * np.sqrt(2 / 3 / (ROWS // 2))
    assert (calls[1::2] == 0).all()


@pytest.mark.exhaustive
def test_demonstrations_of_hop_begin_with_the_scratch_text():
    plain, scratched = named("hop").make(), named("hop", scratch=3, length=27).make()
    assert scratched.words == (*plain.words, "hm")
    for right in (True, False):
        for key in KEYS[:5]:
            rows = [dialogue.demonstration(key, 3.0, right) for dialogue in (plain, scratched)]
            without, with_scratch = (
                dialogue.text(row).split() for dialogue, row in zip((plain, scratched), rows, strict=True)
            )
            assert with_scratch == [*without[:2], "hm", "hm", "hm", *without[2:]]
            replay = automaton.replay(scratched, key, 3.0, rows[1])
            assert bool(replay.agrees)
            assert float(replay.reward["gold"]) == float(right)


def test_wrong_demonstrations_guess_uniformly():
    dialogue, rows, _ = replayed_demonstrations("hop")
    guesses = rows[1::2, 3]
    counts = np.bincount(guesses, minlength=dialogue.entities)
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 25  # chi-squared with 5 degrees of freedom, p = 1e-4


@pytest.mark.parametrize(
    ("difficulty", "shares"),
    [(1.0, [1, 0, 0, 0]), (3.0, [1 / 3, 1 / 3, 1 / 3, 0]), (2.5, [5 / 12, 5 / 12, 1 / 6, 0]), (4.0, [1 / 4] * 4)],
)
def test_hops_are_uniform_and_mixed_between_integer_difficulties(difficulty, shares):
    dialogue = named("hop").make()
    _, prompts = sampled(dialogue, difficulty)
    result = np.bincount(prompts[:, 0] - dialogue.token["1"], minlength=4) / ROWS
    np.testing.assert_allclose(result, shares, atol=0.045)  # four standard errors
    assert (result[np.equal(shares, 0)] == 0).all()


@pytest.mark.parametrize(("name", "mean"), [("chain", 2.6), ("calculator", (0.4 * 1.5 + 0.6 * 2))])
def test_sizes_are_mixed_between_integer_difficulties(name, mean):
    state, _ = sampled(named(name).make(), 2.6)
    sizes = state.steps if name == "chain" else state.prompt_left // 2 - 1
    assert set(sizes) == ({2, 3} if name == "chain" else {1, 2, 3})
    assert abs(sizes.mean() - mean) < 0.08


def test_harder_hops_continue_the_easier_ones():
    dialogue = named("hop", rare_share=0.02).make()
    easy, easy_prompts = sampled(dialogue, 1.0)
    hard, hard_prompts = sampled(dialogue, 4.0)
    # Tables differ where one of the two was held out and sampled again; in one row in four the two tasks are the same.
    same = (easy.table == hard.table).all(1) & (easy_prompts[:, 1] == hard_prompts[:, 1])
    assert abs(same.mean() - (1 + 3 * (7 / 8) ** 2) / 4) < 0.03
    hops = hard_prompts[:, 0] - dialogue.token["1"] + 1
    for table, start, n, goal in zip(hard.table, hard_prompts[:, 1], hops, hard.goal, strict=True):
        entity = start
        for _ in range(n):
            entity = table[entity] % dialogue.entities
        assert entity == goal
    rare = hard.table >= dialogue.entities
    assert abs(rare.mean() - 0.02) < 4 * np.sqrt(0.02 * 0.98 / rare.size)
    successors = np.sort(hard.table % dialogue.entities, 1)
    np.testing.assert_array_equal(successors, np.broadcast_to(np.arange(6), (ROWS, 6)))


def test_harder_chains_begin_as_the_easier_ones():
    dialogue = named("chain").make()
    easy, easy_prompts = sampled(dialogue, 3.0)
    hard, hard_prompts = sampled(dialogue, 8.0)
    same = (easy_prompts[:, :4] == hard_prompts[:, :4]).all(1)
    assert abs(same.mean() - (7 / 8) ** 2) < 0.05
    np.testing.assert_array_equal(easy.path[same, :4], hard.path[same, :4])
    for path, prompt in zip(hard.path, hard_prompts, strict=True):
        for step in range(8):
            assert path[step + 1] == dialogue.table[prompt[1 + step] - dialogue.values][path[step]]
    assert (easy.path[:, 3:] == easy.path[:, 3:4]).all()
    assert not np.array_equal(named("chain", tables=1).make().table, dialogue.table)


def test_calculations_have_the_target_and_uniform_digits():
    dialogue = named("calculator", operators="*", digits=4, difficulty=4.0, length=64).make()
    state, prompts = sampled(dialogue)
    texts = [dialogue.text(prompt).replace(" ", "") for prompt in prompts]
    sizes = set()
    for text, target in zip(texts, state.target, strict=True):
        first, second = text.removesuffix("=").split("*")
        assert int(first) * int(second) == target
        assert len(first) == len(second)
        assert len(first) == 1 or "0" not in (first[0], second[0])
        sizes.add(len(first))
    assert sizes == {1, 2, 3, 4}


def test_topics_of_a_prompt_differ():
    dialogue = named("preference").make()
    _, prompts = sampled(dialogue, 2.0)
    assert (prompts[:, 1] != prompts[:, 2]).all()
    assert (sampled(dialogue, 1.0)[1][:, 2] == dialogue.words.index("with")).all()


@pytest.mark.parametrize(("extras", "forbidden"), [(2, 1), (0, 1), (4, 0), (0, 0)])
def test_prompts_have_the_numbers_of_extra_and_forbidden_words(extras, forbidden):
    dialogue = named("preference", extras=extras, forbidden=forbidden).make()
    topics = {word: topic for topic, belonging in dialogue_rules.TOPIC_WORDS.items() for word in belonging.split()}
    lengths = set()
    for difficulty in (1.0, 2.0):
        for prompt in sampled(dialogue, difficulty)[1]:
            text = dialogue.text(prompt)
            requested, _, avoided = text.removeprefix("about ").partition(" without ")
            topic_words, _, extra_words = requested.partition(" with ")
            other_words = extra_words.split() + avoided.split()
            assert (len(topic_words.split()), len(extra_words.split()), len(avoided.split())) == (
                difficulty,
                extras,
                forbidden,
            )
            assert len({*topic_words.split(), *other_words}) == difficulty + len(other_words)
            assert not {topics[word] for word in other_words} & set(topic_words.split())
            lengths.add(len(text.split()))
    assert (min(lengths), max(lengths)) == (dialogue.prompt_length, dialogue.reply_length)


def test_preference_has_hundreds_of_prompts():
    dialogue = named("preference").make()
    prompts = {*tasks("preference", dialogue), *tasks("preference", dialogue.held_out())}
    requested, forbidden = zip(*prompts, strict=True)
    assert {len(words) for words in requested} == {5}
    assert {len(words) for words in forbidden} == {1}
    assert 800 < len(prompts) <= 1008


def test_right_preference_answers_are_longer_with_more_markers():
    _, rows, replay = replayed_demonstrations("preference")
    lengths, markers = (rows >= 0).sum(1), replay.reward["markers"]
    assert lengths[::2].mean() > lengths[1::2].mean() + 1
    assert abs(markers[::2].mean() - 0.8) < 0.05
    assert abs(markers[1::2].mean() - 0.2) < 0.05
    slips, coverage = replay.reward["slips"], replay.reward["coverage"][1::2]
    assert (slips[::2] == 0).all()
    assert abs(slips[1::2].mean() - 0.5) < 0.07
    assert [float(q) for q in np.unique(coverage.round(3))] == pytest.approx([0, 0.2, 0.4, 0.6, 0.8], abs=1e-3)
    np.testing.assert_allclose(replay.reward["gold"][1::2], np.maximum(coverage - 0.25 * slips[1::2], 0), atol=1e-6)


@pytest.mark.parametrize("name", ["hop", "calculator"])
def test_rare_tokens_mean_the_same_as_their_common_ones(name):
    dialogue, rows, replay = replayed_demonstrations(name)
    twin = np.arange(dialogue.vocabulary)
    for common, rare in dialogue.rare:
        twin[common] = rare
    fixed = (replay.role != 0) | (rows < 0)
    with_rare = np.where(fixed, rows, twin[rows])
    replay_rows = jax.jit(jax.vmap(lambda key, row: automaton.replay(dialogue, key, dialogue.difficulty, row)))
    replay_with_rare = replay_rows(KEYS, with_rare)
    assert (with_rare != rows).any(1)[::2].all()
    assert replay_with_rare.agrees.all()
    np.testing.assert_array_equal(replay_with_rare.reward["gold"], replay.reward["gold"])


@pytest.mark.parametrize("name", NAMES)
def test_token_fields_of_dialogues_are_within_the_vocabulary(name):
    dialogue = named(name).make()
    assert len(dialogue.words) == len(set(dialogue.words)) == dialogue.vocabulary
    assert len(dialogue.result_error) <= dialogue.reply_length
    vocabulary = set(range(dialogue.vocabulary))
    assert {
        *dialogue.result_error,
        *dialogue.result_tokens,
        *dialogue.prompt_tokens,
        *sum(dialogue.rare, ()),
    } <= vocabulary
    _, prompts = sampled(dialogue, dialogue.difficulties[1])
    assert ((prompts >= 0).sum(1) >= dialogue.prompt_length).all()
    assert dialogue == named(name).make()
    assert hash(dialogue) == hash(named(name).make())
    assert dialogue != named(name, difficulty=dialogue.difficulties[1] - 0.25).make()
    assert fitting(named(name), "dialogue", "grpo").name == name


# Held-out tasks

WHOLE_DIFFICULTIES = [
    (name, float(difficulty))
    for name, most in (("hop", 4), ("calculator", 3), ("chain", 8), ("preference", 2))
    for difficulty in range(1, most + 1)
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "difficulty"), WHOLE_DIFFICULTIES)
def test_held_out_and_training_tasks_are_disjoint(name, difficulty):
    dialogue = named(name).make()
    held_out_tasks, training_tasks = (set(tasks(name, split, difficulty)) for split in (dialogue.held_out(), dialogue))
    assert held_out_tasks
    assert training_tasks
    assert not held_out_tasks & training_tasks
    if (name, difficulty) == ("chain", 1.0):  # all tasks of the smallest case are sampled
        assert (len(held_out_tasks), len(training_tasks)) == (3, 21)


@functools.cache
def first_attempts(dialogue):
    """Returns a jitted function: each row's first attempt, whether it is held out, and the numbers that are hashed."""

    def reset(key, difficulty):
        recorded = []

        def first(self, key, count, task):
            uniform = jax.random.uniform(jax.random.fold_in(key, 0), (count,), jnp.float32)
            recorded.append((drawing.is_held_out(task(uniform)), task(uniform)))
            return uniform

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(drawing.Split, "draw_task", first)
            return *dialogue.reset(key, difficulty), *recorded[0]

    return jax.jit(jax.vmap(reset, (0, None)))


@pytest.mark.parametrize(("name", "difficulty"), WHOLE_DIFFICULTIES)
def test_one_task_in_eight_is_held_out(name, difficulty):
    """The share of held-out tasks, and of held-out rows, is within four standard errors of 1/8."""
    dialogue = named(name).make()
    state, prompt, held_out, hashed = jax.device_get(first_attempts(dialogue)(KEYS, difficulty))
    task_of_row = apply_rules(name, dialogue, state, prompt.tokens, lambda row_rules, *row: row_rules.task(*row))
    by_task = dict(zip(task_of_row, held_out, strict=True))
    tasks_and_hashes = set(zip(task_of_row, map(tuple, hashed.tolist()), strict=True))
    assert len(tasks_and_hashes) == len(by_task) == len({numbers for _, numbers in tasks_and_hashes}), (
        "tasks and hashed numbers correspond one to one"
    )
    error = np.sqrt(7 / 64 / len(by_task))
    assert abs(np.mean(list(by_task.values())) - 1 / 8) < 4 * error
    assert abs(held_out.mean() - 1 / 8) < 4 * np.hypot(error, np.sqrt(7 / 64 / ROWS))


@pytest.mark.parametrize(("name", "held_out"), [(name, held_out) for name in NAMES for held_out in (True, False)])
def test_a_row_is_the_first_attempt_in_its_split(name, held_out):
    dialogue = named(name).make()
    split = dialogue.held_out() if held_out else dialogue
    first, prompt, is_held, _ = jax.device_get(first_attempts(dialogue)(KEYS, dialogue.difficulty))
    state, prompts = sampled(split)
    first_attempt_fits = is_held == held_out
    assert abs(first_attempt_fits.mean() - (1 / 8 if held_out else 7 / 8)) < 0.05
    np.testing.assert_array_equal(prompts[first_attempt_fits], prompt.tokens[first_attempt_fits])
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[first_attempt_fits], b[first_attempt_fits]), state, first)
    assert (prompts != prompt.tokens).any(1)[~first_attempt_fits].mean() > 0.5


@pytest.mark.parametrize(
    ("name", "difficulty"), [("hop", 3.0), ("hop", 4.0), ("calculator", 3.0), ("chain", 2.5), ("preference", 1.5)]
)
def test_both_splits_have_the_same_sizes(name, difficulty):
    dialogue = named(name).make()
    sizes = []
    for split in (dialogue, dialogue.held_out()):
        _, prompts = sampled(split, difficulty)
        size = prompts[:, 0] if name == "hop" else (prompts >= 0).sum(1)
        sizes.append(np.bincount(size, minlength=32) / ROWS)
    assert (sizes[0] > 0).sum() > 1
    np.testing.assert_allclose(sizes[1], sizes[0], atol=0.08)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_demonstrations_of_held_out_tasks_are_right(name):
    dialogue, rows, replay = replayed_demonstrations(name, held_out=True)
    assert replay.agrees.all()
    assert (replay.reward["gold"][::2] == 1).all()
    assert (replay.reward["gold"][1::2] < 1).all()
    state, prompts = sampled(dialogue)
    size = prompts.shape[1]
    np.testing.assert_array_equal(np.where(prompts >= 0, rows[:, :size], NO_TOKEN), prompts)
    training_dialogue, training_rows, _ = replayed_demonstrations(name)
    assert training_dialogue.held_out() == dialogue
    assert (rows != training_rows).any(1).mean() > 0.9
    if name == "hop":  # only calls show its table
        names = [token % dialogue.entities for token in state.table.T]
        for n in range(0, ROWS, 2):
            assert rows[n, 5] % dialogue.entities == names[rows[n, 3] % dialogue.entities][n]


def test_a_split_without_tasks_falls_back_to_the_other():
    @dataclass(frozen=True)
    class Same(drawing.Split):
        def reset(self, key, difficulty):
            return self.draw_task(key, 2, lambda uniform: jnp.zeros(1, jnp.int32)), None

    key = jax.random.key(5)
    first, last = (jax.random.uniform(jax.random.fold_in(key, number), (2,)) for number in (0, drawing.ATTEMPTS - 1))
    expected = {False: first, True: last} if not drawing.is_held_out(jnp.zeros(1, jnp.int32)) else {True: first}
    for held_out, numbers in expected.items():
        split = Same().held_out() if held_out else Same()
        np.testing.assert_array_equal(jax.jit(split.reset)(key, 0.0)[0], numbers)


@pytest.mark.parametrize("name", NAMES)
def test_the_held_out_split_is_another_dialogue_without_splits(name):
    dialogue = named(name).make()
    held_out = dialogue.held_out()
    assert dialogue.splits
    assert not held_out.splits
    assert held_out != dialogue
    assert {held_out, dialogue, held_out.held_out(), named(name).make().held_out()} == {held_out, dialogue}
    assert repr(held_out) != repr(dialogue)
    harder = replace(dialogue, difficulty=dialogue.difficulties[1]).held_out()
    assert structure_of(harder) == structure_of(held_out) == held_out


def test_the_hash_of_a_task_depends_on_every_bit_and_position():
    """Negative numbers are ignored; numbers count with their positions, and every bit of them does."""
    tasks = jnp.array(np.random.default_rng(0).integers(0, 2**12, (4096, 3)), jnp.int32)
    held_out = np.asarray(jax.vmap(drawing.is_held_out)(tasks))
    assert abs(held_out.mean() - 1 / 8) < 4 * np.sqrt(7 / 64 / len(held_out))
    longer = jnp.pad(tasks, ((0, 0), (0, 2)), constant_values=-1)
    np.testing.assert_array_equal(jax.vmap(drawing.is_held_out)(longer), held_out)
    for changed in (tasks[:, ::-1], tasks.at[:, 0].add(1), tasks ^ 1024):
        held_out_again = np.asarray(jax.vmap(drawing.is_held_out)(changed))
        assert abs((held_out & held_out_again).mean() - 1 / 64) < 4 * np.sqrt(1 / 64 / len(held_out)), (
            "held out independently of the original task"
        )


# Changed prompts


@functools.cache
def change_prompts(dialogue):
    return jax.jit(jax.vmap(dialogue.changed))


@functools.cache
def judge_rows(dialogue):
    """Returns a jitted function: gold rewards of rows of tokens that continue states, `NO_TOKEN` after their end."""

    def gold_of_row(state, row):
        def advance(state, token):
            after = dialogue.respond(state, token)[0]
            return jax.tree.map(lambda new, old: jnp.where(token >= 0, new, old), after, state), None

        return dialogue.reward(jax.lax.scan(advance, state, row)[0])["gold"]

    return jax.jit(jax.vmap(gold_of_row))


def gold_of_right_answers(name, dialogue, state, answered_prompts, prompts):
    """Returns gold of rows that begin with `prompts` and give the right answers to `answered_prompts`."""
    answers = apply_rules(
        name, dialogue, state, answered_prompts, lambda row_rules, *row: row_rules(*row).correct_reply()
    )
    rows = np.full((ROWS, dialogue.length), NO_TOKEN, np.int32)
    for row, prompt, answer in zip(rows, prompts, answers, strict=True):
        tokens = [*prompt[prompt >= 0], *map(dialogue.words.index, answer)]
        row[: len(tokens)] = tokens
    return np.asarray(judge_rows(dialogue)(state, rows))


@pytest.mark.parametrize(
    ("name", "difficulty"),
    [pytest.param(*case, marks=pytest.mark.exhaustive if case[1] > 1 else ()) for case in WHOLE_DIFFICULTIES],
)
def test_a_changed_prompt_differs_in_one_token_and_has_a_right_answer(name, difficulty):
    dialogue = named(name).make()
    state, prompts = sampled(dialogue, difficulty)
    changed_state, changed = jax.device_get(
        change_prompts(dialogue)(state, prompts, jax.random.split(jax.random.key(1), ROWS))
    )
    assert jax.tree.map(lambda x: (x.shape, x.dtype), changed_state) == jax.tree.map(
        lambda x: (x.shape, x.dtype), state
    )
    differs = changed != prompts
    assert (differs.sum(1) == 1).all()
    assert (changed[differs] >= 0).all()
    assert set(changed[differs]) <= set(dialogue.prompt_tokens)
    assert (gold_of_right_answers(name, dialogue, state, prompts, prompts) == 1).all()
    assert (gold_of_right_answers(name, dialogue, changed_state, changed, changed) == 1).all()
    gold_of_old_answers = gold_of_right_answers(name, dialogue, changed_state, prompts, changed)
    assert (gold_of_old_answers < 1).mean() > 0.5, "answers to the unchanged prompt are mostly wrong"
    if name in ("hop", "calculator"):
        assert (gold_of_old_answers == 0).all()
    shares = differs.sum(0) / ROWS
    if name == "hop":
        hops_changed = differs[:, 0]
        assert (changed[hops_changed, 0] < prompts[hops_changed, 0]).all()
        several_hops = prompts[:, 0] > dialogue.token["1"]
        assert (
            hops_changed[several_hops].mean() == pytest.approx(0.5, abs=0.06)
            if several_hops.any()
            else not hops_changed.any()
        )
    if name == "chain":
        steps = int(difficulty)
        np.testing.assert_allclose(shares[: steps + 1], 1 / (steps + 1), atol=0.05)
    if name == "calculator":  # the rules refuse longer numbers that begin with 0
        first = prompts[:, 0] == changed[:, 0]
        assert 0.3 < first.mean() < 0.9
    if name == "preference":
        for row in changed:
            topics = [word for word in words(dialogue, row) if word in dialogue_rules.TOPIC_WORDS]
            assert len(set(topics)) == difficulty
            row_rules = dialogue_rules.PreferenceRules(dialogue, None, words(dialogue, row))
            assert not row_rules.expected & row_rules.forbidden
        assert shares[1] == pytest.approx(1 / (difficulty + 2), abs=0.05)


@pytest.mark.parametrize(("extras", "forbidden"), [(0, 0), (4, 1), (0, 1)])
def test_prompts_with_any_number_of_words_can_be_changed(extras, forbidden):
    dialogue = named("preference", extras=extras, forbidden=forbidden).make()
    for difficulty in (1.0, 2.0):
        state, prompts = sampled(dialogue, difficulty)
        changed_state, changed = jax.device_get(
            change_prompts(dialogue)(state, prompts, jax.random.split(jax.random.key(2), ROWS))
        )
        assert ((changed != prompts).sum(1) == 1).all()
        assert (gold_of_right_answers("preference", dialogue, changed_state, changed, changed) == 1).all()


def test_a_cycle_visits_every_entity():
    successor = np.asarray(drawing.cycle(jax.random.uniform(jax.random.key(0), (9,))))
    entity, visited = 0, []
    for _ in range(9):
        entity = successor[entity]
        visited.append(entity)
    assert sorted(visited) == list(range(9))


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
def test_invalid_settings_are_refused_with_a_message(name, settings, message):
    with pytest.raises(ValueError, match=message):
        ja.dialogues.named(name, **settings)


@dataclass(frozen=True)
class Echo(Dialogue):
    """Repeat the prompt's token."""

    flaw: str = ""
    vocabulary: int = 8

    length, reply_length = 2, 1

    def reset(self, key, difficulty):
        target = jax.random.randint(key, (), 0, self.vocabulary)
        return (target, jnp.int32(-1)), self.prompt(target[None])

    def respond(self, state, token):
        target, answered = state
        reply = self.choose(answered >= 0, self.end(), self.own())
        after = (target, token.astype(jnp.float32) if self.flaw == "another dtype" else token)
        return after, None if self.flaw == "no reply" else reply

    def reward(self, state):
        right = (state[0] == state[1]).astype(jnp.float32)
        return {"right" if self.flaw == "no gold" else "gold": right}


def test_a_custom_dialogue_is_replayed_and_listed(monkeypatch):
    monkeypatch.setitem(registry.dialogues._entries, "echo", Echo)
    dialogue = named("echo").make()
    replay = jax.jit(jax.vmap(lambda key, row: automaton.replay(dialogue, key, 0.0, row)))
    keys = jax.random.split(jax.random.key(0), 16)
    first = np.asarray(jax.vmap(lambda key: dialogue.reset(key, 0.0)[1].tokens[0])(keys))
    rows = np.stack([first, np.where(np.arange(16) < 8, first, (first + 1) % 8)], 1)
    replayed = replay(keys, rows)
    assert replayed.agrees.all()
    np.testing.assert_array_equal(replayed.reward["gold"], np.arange(16) < 8)
    assert dialogue.text(rows[0]) == f"{first[0]} {first[0]}"
    with pytest.raises(NotImplementedError, match="Echo has no demonstrations"):
        dialogue.demonstration(keys[0], 0.0, True)
    assert "    echo        Repeat the prompt's token." in [f"  {line}" for line in listing.tasks()]


@dataclass(frozen=True)
class ChangingEcho(Echo):
    """Repeat the prompt's token, also in changed prompts."""

    def changed(self, state, prompt, key):
        changed_prompt = (prompt + 1) % self.vocabulary
        return (
            changed_prompt.astype(jnp.float32) if self.flaw == "another change" else changed_prompt[0],
            state[1],
        ), changed_prompt


def test_a_custom_dialogue_may_change_its_prompts(monkeypatch):
    monkeypatch.setitem(registry.dialogues._entries, "changing", ChangingEcho)
    dialogue = named("changing").make()
    state, prompt = dialogue.reset(jax.random.key(0), 0.0)
    (target, _), changed = dialogue.changed(state, prompt.tokens, jax.random.key(0))
    assert int(target) == int(changed[0]) == (int(prompt.tokens[0]) + 1) % 8
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
def test_inconsistent_custom_dialogues_are_refused_with_a_message(monkeypatch, settings, message):
    monkeypatch.setitem(registry.dialogues._entries, "echo", Echo)
    with pytest.raises(ValueError, match=f"dialogue 'echo' {message}"):
        named("echo", **settings).make()


def test_a_registered_dialogue_must_be_a_frozen_dataclass(monkeypatch):
    monkeypatch.setitem(registry.dialogues._entries, "function", lambda key: key)
    with pytest.raises(ValueError, match="dialogue 'function' must be a frozen dataclass that is derived"):
        DialogueTask.named("function")
