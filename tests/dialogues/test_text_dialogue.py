"""Tests dialogues from files: verifiers, patterns and tool calls on bytes, against plain Python on text."""

import functools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxaudit as ja
from jaxaudit.dialogues import automaton, named, patterns, tool_syntax
from jaxaudit.dialogues.protocol import NO_TOKEN, POLICY, TOOL
from jaxaudit.dialogues.verifiers import NUMBER, VERIFIERS
from jaxaudit.models import gpt2, gpt2_checkpoint
from jaxaudit.text import tokenizers

PRODUCTS = [
    {"prompt": f"What is {a}*{b}? ", "answer": f"It is <<{a}*{b}>>{a * b}."} for a in range(11, 16) for b in (-3, 7)
]
LONGEST = 24


def write_lines(path, lines):
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


@pytest.fixture
def file(tmp_path):
    return write_lines(tmp_path / "lines.jsonl", PRODUCTS)


def pad_texts(texts, longest=LONGEST):
    rows = [np.frombuffer(text.ljust(longest, b"\0"), np.uint8) for text in texts]
    return np.stack(rows).astype(np.int32), np.array([len(text) for text in texts])


@functools.cache
def judge_texts(name):
    """Returns a jitted function: whether texts `[N, LONGEST]` of these sizes are right answers to their lines."""
    verifier = VERIFIERS[name]

    def is_right(answers, line, text, size):
        target = verifier.target(answers, line)

        def read(state, inputs):
            byte, position = inputs
            after = verifier.read(target, state, byte)
            return jax.tree.map(lambda old, new: jnp.where(position < size, new, old), state, after), None

        state, _ = jax.lax.scan(read, verifier.begin(target), (text, jnp.arange(LONGEST)))
        return verifier.correct(target, state)

    return jax.jit(jax.vmap(is_right, (None, 0, 0, 0)))


def judge_answers(name, answers, texts):
    prepared = VERIFIERS[name].prepare(answers)
    return np.asarray(judge_texts(name)(prepared, np.arange(len(texts)), *pad_texts(texts)))


def random_texts(rng, characters, count, max_length=10):
    lengths = rng.integers(0, max_length, count)
    return ["".join(rng.choice(list(characters), n)) for n in lengths]


def test_exact_and_contains_equal_python():
    rng = np.random.default_rng(0)
    texts = random_texts(rng, "ab \n", 1000)
    answers = [answer if answer.strip() else "a b" for answer in random_texts(rng, "ab ", 1000, 5)]
    texts[:300] = [f" {answer}\n" for answer in answers[:300]]
    texts[300:400] = [f"{answer}b" for answer in answers[300:400]]
    encoded = [text.encode() for text in texts]
    exact = [text.strip() == answer.strip() for text, answer in zip(texts, answers, strict=True)]
    contains = [answer.strip() in text for text, answer in zip(texts, answers, strict=True)]
    assert 250 < sum(exact) < sum(contains) < 900
    np.testing.assert_array_equal(judge_answers("exact", answers, encoded), exact)
    np.testing.assert_array_equal(judge_answers("contains", answers, encoded), contains)


def number_of(text):
    numbers = NUMBER.findall(text.encode())
    if not numbers:
        return None
    sign, integer, fraction = (part.decode() for part in numbers[-1])
    digits = integer.replace(",", "").lstrip("0")
    if max(len(digits), len(fraction.rstrip("0"))) > 9:
        return None
    return float(f"{sign}{digits or 0}.{fraction or 0}")


def test_number_compares_the_last_numbers_by_value():
    rng = np.random.default_rng(1)
    texts = random_texts(rng, "0011239,.- a", 3000, 16)
    answers = [text for text in random_texts(rng, "0011239,.-", 6000, 6) if number_of(text) is not None][:3000]
    texts[:500] = [f"x{number_of(answer):.5f}, so" for answer in answers[:500]]
    examples = {
        "1,234.50": "1234.5",
        "so 0.0": "-0",
        "-3": "3",
        "3.": "3",
        "5-3": "-3",
        "0.1234567891": "0.123456789",
        "0.12345678900": "0.123456789",
        "000000000012": "12",
        "": "1",
    }
    texts += examples
    answers += examples.values()
    expected = [number_of(text) == number_of(answer) for text, answer in zip(texts, answers, strict=True)]
    assert expected[-len(examples) :] == [True, True, False, True, True, False, True, True, False]
    assert 500 <= sum(expected) < 2000
    np.testing.assert_array_equal(judge_answers("number", answers, [text.encode() for text in texts]), expected)


def automaton_matches(automata, line, text):
    state = automata.starts[line]
    for byte in text:
        state = automata.table[state, byte]
    return bool(automata.accepts[state])


atoms = st.sampled_from(
    ["a", "b", r"\d", r"\s", r"\W", ".", "[ab]", "[^a]", "[a-c1]", r"[\d-]", r"\.", "é", "^", r"\Z"]
)
expressions = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}", "{,2}", "*?"])).map(
            lambda repeated: f"({repeated[0]}){repeated[1]}"
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(expressions, st.lists(st.text("abc1 .-é\n", max_size=8), min_size=1, max_size=6))
def test_patterns_match_as_pythons_on_bytes(pattern, texts):
    automata = patterns.compile_patterns([pattern.replace(r"\Z", "$")])
    # Python's pattern is of bytes, as the automaton is.
    expected = re.compile(
        "".join(character if character.isascii() else f"(?:{character})" for character in pattern).encode()
    )
    for text in texts:
        assert automaton_matches(automata, 0, text.encode()) == bool(expected.search(text.encode())), (pattern, text)


def test_patterns_are_matched_in_a_compiled_program():
    answers = [r"answer: \d+\s*$", "^ab|c", r"answer: \d+\s*$"]
    texts = [b"the answer: 12 ", b"xab", b"answer: no"]
    assert judge_answers("regex", answers, texts).tolist() == [True, False, False]
    assert judge_answers("regex", answers, [b"answer: 3 4", b"xc", b"answer: 1"]).tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(?=a)b", r"has a group \(\?=a\.\.\.\), which an automaton cannot match"),
        (r"(a)\1", r"has \\1, which is not allowed"),
        ("a)", r"has a '\)' that closes nothing"),
        ("(a", r"ends where a '\)' is missing"),
        ("[a", r"ends where a '\]' is missing"),
        ("*a", r"has a '\*' that repeats nothing"),
        ("a**", "repeats a repetition"),
        ("a{300}", r"repeats \{300\} times; from 0 to 255 is allowed"),
        ("[é]", "has 'é' in brackets, where only ASCII is allowed"),
        ("[b-a]", "has an invalid range in brackets"),
        ("a.{20}", "is too large"),
        ("((a{200}){200})", "is too large"),
    ],
)
def test_invalid_patterns_are_refused_with_a_message(pattern, message):
    with pytest.raises(ValueError, match=message) as raised:
        patterns.compile_patterns(["a", pattern])
    assert raised.value.line == 1


def test_tool_calls_are_parsed_and_evaluated_as_by_python():
    rng = np.random.default_rng(2)
    texts = random_texts(rng, "<<>>>12 9-+*/", 3000, 20)
    pieces = ["<<", ">>", "<", "7", "12", "-", "*", "/", "+", " ", "99999", "123456789"]
    texts += ["".join(rng.choice(pieces, 6)) for _ in range(3000)]
    operands = [f"{sign}{n}" for sign in ("", "-") for n in (0, 3, 12, 46340, 46341, 999999999, 1234567890)]
    texts += [f"<<{a}{op}{b}>>" for a in operands for op in "+-*/" for b in operands]
    encoded = [text.encode()[:40] for text in texts]

    def last_call(text, size):
        def read(call, inputs):
            byte, position = inputs
            after = tool_syntax.read_byte(call, byte)
            return jax.tree.map(lambda old, new: jnp.where(position < size, new, old), call, after), None

        return jax.lax.scan(read, tool_syntax.initial_call(), (text, jnp.arange(40)))[0]

    last_calls = jax.device_get(jax.jit(jax.vmap(last_call))(*pad_texts(encoded, 40)))
    n_evaluated = 0
    for text, complete, failed, result in zip(
        encoded, last_calls.complete, last_calls.failed, last_calls.result, strict=True
    ):
        calls = tool_syntax.CALL.findall(text)
        value = tool_syntax.evaluate_call(calls[-1]) if calls else None
        assert complete == bool(calls), text
        if calls:
            assert failed == (value is None), text
            assert failed or result == value, text
            n_evaluated += value is not None
    assert n_evaluated > 300


def python_value(call):
    """Returns a call's value by Python's evaluation."""
    try:
        value = eval(call.strip("<>"), {})
    except (SyntaxError, ZeroDivisionError):
        return None
    return int(value) if value == int(value) and abs(value) < 2**31 else None


@pytest.mark.parametrize("call", ["<<3*4>>", "<<3-14>>", "<<84/-7>>", "<<7/2>>", "<<1/0>>", "<<99999*99999>>", "<<5>>"])
def test_values_of_calls_equal_pythons(call):
    assert tool_syntax.evaluate_call(call.encode()) == (python_value(call) if call != "<<5>>" else None)


@functools.cache
def programs(dialogue):
    def replay_demonstration(data, key, right):
        bound = dialogue.bind(data)
        row = bound.demonstration(key, 0.0, right)
        return row, automaton.replay(bound, key, 0.0, row)

    return jax.jit(jax.vmap(replay_demonstration, (None, 0, 0)))


@pytest.fixture
def pairs(tmp_path):
    """Returns the folder of a small tokenizer of byte pairs."""
    texts = [f"{line['prompt']}{line['answer']} é\n".encode() for line in PRODUCTS]
    tokenizers.trained(texts, 320, tmp_path / "pairs")
    return str(tmp_path / "pairs")


@pytest.mark.parametrize("verifier", ["exact", "number"])
@pytest.mark.parametrize("tokenizer", ["bytes", "pairs"])
def test_demonstrations_call_the_tool_and_are_right(file, tokenizer, verifier, pairs):
    folder = pairs if tokenizer == "pairs" else tokenizer
    task = named("text", file=file, tokenizer=folder, verifier=verifier, tool="calculator", length=48)
    dialogue = task.make()
    keys = jax.random.split(jax.random.key(0), 32)
    rows, replay = jax.device_get(programs(dialogue)(dialogue.data, keys, np.arange(32) % 2 == 0))
    assert replay.agrees.all()
    assert (replay.reward["gold"][::2] == 1).all()
    assert (replay.reward["gold"][1::2] == 0).all()
    assert (replay.reward["ended"] == 1).all()
    texts = [dialogue.text(row) for row in rows[::2]]
    assert set(texts) <= {line["prompt"] + line["answer"] for line in PRODUCTS}
    for row, role, text in zip(rows[::2], replay.role[::2], texts, strict=True):
        result = re.search(">>(-?[0-9]+)", text)[1]
        assert dialogue.text(np.where(role == TOOL, row, NO_TOKEN)) == result
        assert (role == POLICY).sum() == (row >= 0).sum() - (role == TOOL).sum() - (role == 1).sum()
    assert dialogue == task.make()
    assert hash(dialogue) == hash(task.make())
    # The lines are inputs of the program, and no constants.
    jaxpr = jax.make_jaxpr(programs(dialogue))(dialogue.data, keys, np.zeros(32, bool))
    assert max((np.size(const) for const in jaxpr.consts), default=0) < 100
    if tokenizer == "pairs":
        assert (rows >= 0).sum() < sum(map(len, (dialogue.text(row) for row in rows)))


def test_pieces_of_tokens_join_to_the_text(pairs):
    for tokenizer in (tokenizers.Bytes(), tokenizers.read(Path(pairs))):
        pieces = tokenizer.pieces()
        text = "What is é? \n\t <<3*4>> ☃".encode()
        tokens = tokenizer.encode([text])
        assert b"".join(pieces[token] for token in tokens) == text
        assert len(pieces) == tokenizer.vocabulary
        assert pieces[tokenizer.end_of_text] == b""


def test_replies_to_failed_and_nested_calls(file):
    dialogue = named("text", file=file, tool="calculator", length=48).make()

    def replies_to(text):
        state, _ = dialogue.reset(jax.random.key(0), 0.0)
        state, reply = state.__class__(**{**vars(state), "prompt_left": jnp.int32(0)}), None
        respond, replies = jax.jit(dialogue.respond), []
        for byte in text:
            state, reply = respond(state, byte)
            replies.append(dialogue.text(reply.tokens))
        return replies

    assert replies_to(b"<<3/2>>error") == [*[""] * 6, "error", *[""] * 5]
    assert replies_to(b"<<3<<4+5>>") == [*[""] * 9, "9"]
    assert replies_to(b"<<2-2>>0<<2-9>>") == [*[""] * 6, "0", *[""] * 7, "-7"]


def test_held_out_lines_are_the_last_of_the_file(tmp_path):
    lines = [{"prompt": f"{n:02d}", "answer": "x"} for n in range(20)]
    task = named("text", file=write_lines(tmp_path / "a.jsonl", lines), length=8, held_out_share=0.2)
    dialogue = task.make()
    keys = jax.random.split(jax.random.key(0), 512)

    def prompts(split):
        return {int(split.text(row)) for row in jax.vmap(lambda key: split.reset(key, 0.0)[1].tokens)(keys)}

    assert prompts(dialogue) == set(range(16))
    assert prompts(dialogue.held_out()) == set(range(16, 20))
    assert dialogue != dialogue.held_out()
    all_lines = named("text", file=task.settings.file, length=8, held_out_share=0.0).make()
    assert prompts(all_lines) == prompts(all_lines.held_out()) == set(range(20))
    changed_file = named(
        "text", file=write_lines(tmp_path / "a.jsonl", [*lines[1:], lines[0]]), length=8, held_out_share=0.2
    )
    assert changed_file == task
    assert changed_file.make() != dialogue, "the file has changed"


GSM8K = {
    "question": "Zoë has 48 “clips” and sells half — how many for the\u2028sale?",
    "answer": "She sells 48/2 = <<48/2=24>>24, or 24*.5 = <<24*.5=12>>12.\nAll: $<<24*50=1200>>1,200\n#### 1,200",
}
PLAIN = "She sells 48/2 = 24, or 24*.5 = 12.\nAll: $1,200\n#### 1,200"


@pytest.mark.parametrize(
    ("verifier", "tool", "demonstration"),
    [
        ("number", "none", PLAIN),
        ("contains", "none", PLAIN),
        ("exact", "none", "1,200"),
        ("number", "calculator", PLAIN.replace("= 24", "= <<48/2>>24")),
    ],
)
def test_lines_of_gsm8k_are_read_as_published(tmp_path, verifier, tool, demonstration):
    settings = {"verifier": verifier, "tool": tool, "prompt_field": "question", "answer_after": "####"}
    path = tmp_path / "gsm8k.jsonl"
    path.write_text(json.dumps(GSM8K, ensure_ascii=False) + "\n", encoding="utf-8")
    dialogue = named("text", file=str(path), **settings).make()
    row, replay = programs(dialogue)(dialogue.data, jax.random.split(jax.random.key(0), 1), np.ones(1, bool))
    assert dialogue.text(row[0]) == GSM8K["question"] + demonstration
    assert replay.agrees.all()
    assert replay.reward["gold"][0] == 1
    assert dialogue == named("text", file=str(path), **settings).make()


def test_annotations_are_removed_from_demonstrations_not_from_patterns(
    tmp_path,
):
    line = {"q": "p", "a": r"<<\\d=\\d>>", "demonstration": "<<1+1=2>>2 <<1+1=3>>3 <<2*2=4>>40 <<3=3=3>>3"}
    settings = {"prompt_field": "q", "answer_field": "a", "verifier": "regex"}
    for tool, expected in (("none", "p2 3 40 3"), ("calculator", "p<<1+1>>2 3 40 3")):
        dialogue = named("text", file=write_lines(tmp_path / "a.jsonl", [line]), tool=tool, **settings).make()
        row = dialogue.bind(dialogue.data).demonstration(jax.random.key(0), 0.0, True)
        assert dialogue.text(np.asarray(row)) == expected
    _, replay = programs(dialogue)(dialogue.data, jax.random.split(jax.random.key(0), 1), np.ones(1, bool))
    assert replay.reward["gold"][0] == 0, "the pattern matches an annotation, which the demonstration lost"


@pytest.mark.exhaustive
def test_a_checkpoint_with_too_few_positions_for_a_row_is_refused(file, tmp_path):
    model = gpt2.GPT2(257, 40, gpt2.SIZES["micro"])
    gpt2_checkpoint.save(tmp_path / "model", gpt2.init_params(model, jax.random.key(0)), model)
    settings = {"size": "micro", "checkpoint": str(tmp_path / "model"), "prompts": 2, "group_size": 2}
    learner = ja.learners.grpo(named("text", file=file, length=40).make(), **settings)
    assert learner.data.start["wpe"]["embedding"].shape == (40, 64)
    with pytest.raises(
        ValueError,
        match=r"has shape \[40, 64\], but this model needs \[48, 64\]: choose a context, or a length",
    ):
        ja.learners.grpo(named("text", file=file, length=48).make(), **settings)


def test_a_line_may_have_a_demonstration(tmp_path):
    lines = [{"prompt": "p", "answer": r"\d\d", "demonstration": "it is 12"}]
    file = write_lines(tmp_path / "a.jsonl", lines)
    dialogue = named("text", file=file, verifier="regex", length=16).make()
    row, replay = programs(dialogue)(dialogue.data, jax.random.split(jax.random.key(0), 1), np.ones(1, bool))
    assert dialogue.text(row[0]) == "pit is 12"
    assert replay.reward["gold"][0] == 1
    without_demonstration = named(
        "text", file=write_lines(tmp_path / "b.jsonl", [{"prompt": "p", "answer": "a"}]), verifier="regex"
    ).make()
    with pytest.raises(ValueError, match="has no demonstrations, and its answers are patterns"):
        without_demonstration.demonstration(jax.random.key(0), 0.0, True)


@pytest.mark.parametrize(
    ("lines", "settings", "message"),
    [
        (["{"], {}, "line 1: is not JSON"),
        (["[1]"], {}, 'line 1: must be {"prompt": ..., "answer": ...}, not an array: write one object in each line'),
        (["", "[", '{"prompt": "a"}]'], {}, 'line 2: must be {"prompt": ..., "answer": ...}, not an array'),
        (['"a"'], {"prompt_field": "q"}, 'line 1: must be {"q": ..., "answer": ...}'),
        (
            ['{"question": "a", "answer": "b"}'],
            {},
            "line 1: 'prompt' is missing: prompt_field can name another field; the line has 'question', 'answer'",
        ),
        (
            ['{"prompt": "a", "x\\n": "b"}'],
            {"answer_field": "y"},
            "line 1: 'y' is missing: answer_field can name another",
        ),
        (
            ['{"messages": [{"role": "user", "content": "a"}]}'],
            {},
            "line 1: 'prompt' is missing, and 'messages' must be a",
        ),
        (
            ['{"prompt": [{"role": "user", "content": "a"}], "answer": "b"}'],
            {},
            "line 1: prompt must be a string, not chat messages: write what the model reads, the chat's template",
        ),
        (['{"prompt": "a", "answer": 2.5}'], {}, 'line 1: answer must be a string, not a number: write "2.5"'),
        (['{"prompt": "a", "answer": true}'], {}, "line 1: answer must be a string, not true"),
        (['{"prompt": "a", "answer": ["b"]}'], {}, "line 1: answer must be a string, not an array"),
        (
            ['{"prompt": "a", "answer": "b"}'],
            {"answer_after": "####"},
            "line 1: answer has no '####', which answer_after",
        ),
        (
            ['{"prompt": "a", "answer": "<<7/2>>3.5"}'],
            {"tool": "calculator"},
            "line 1: <<7/2>> is not supported by the calculator, which takes two whole numbers with + - * or /",
        ),
        (['{"prompt": "a"}'], {}, "line 1: 'answer' is missing"),
        (['{"prompt": "a", "answer": 3}'], {}, "line 1: answer must be a string"),
        (['{"prompt": "a", "answer": "\\ud800"}'], {}, "line 1: has half of a surrogate pair"),
        (
            ['{"prompt": "a", "answer": "b"}', "", '{"prompt": "", "answer": "b"}'],
            {},
            "line 3: the prompt has 0 tokens",
        ),
        (
            ['{"prompt": "aaaa", "answer": "b"}'],
            {"length": 4},
            "line 1: the prompt has 4 tokens; from 1 to 3 fit in rows",
        ),
        (
            ['{"prompt": "aa", "answer": "bb"}'],
            {"length": 4},
            "line 1: a prompt of 2 tokens, its demonstration of 2 and the",
        ),
        (['{"prompt": "a", "answer": " "}'], {}, "line 1: the answer is empty"),
        (['{"prompt": "a", "answer": "b"}'], {"verifier": "number"}, "line 1: the answer has no number"),
        (
            ['{"prompt": "a", "answer": "1234567890"}'],
            {"verifier": "number"},
            "line 1: the answer has a number of more",
        ),
        (['{"prompt": "a", "answer": "("}'], {"verifier": "regex"}, "line 1: the answer ends where a ')' is missing"),
        (
            ['{"prompt": "a", "answer": "<<3*4>>13"}'],
            {"tool": "calculator"},
            "line 1: <<3*4>> must be followed by its result, 12",
        ),
        (
            ['{"prompt": "a", "answer": "b"}', '{"prompt": "a", "answer": "b", "demonstration": "c"}'],
            {},
            "line 1: has no demonstration, but line 2 has one",
        ),
        ([""], {}, "has no lines"),
        (None, {}, "cannot be read: No such file or directory"),
    ],
)
def test_invalid_files_are_refused_with_a_message(tmp_path, lines, settings, message):
    path = tmp_path / "lines.jsonl"
    if lines is not None:
        path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        named("text", file=str(path), **settings).make()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"verifier": lambda text: 1.0}, "verifier must be a name, not a function: to compute a reward in Python,"),
        ({"verifier": "exakt"}, "unknown verifier 'exakt' (did you mean 'exact'?)"),
        ({"tool": "python"}, "unknown tool 'python'"),
        ({"length": 1}, "length must be at least 2, not 1"),
        ({"held_out_share": 1.0}, "held_out_share must lie in [0, 1), not 1"),
        ({"tokenizer": ""}, "file and tokenizer must not be empty"),
        ({"prompt_field": "answer"}, "prompt_field and answer_field must be the names of two fields"),
        ({"answer_field": ""}, "prompt_field and answer_field must be the names of two fields"),
    ],
)
def test_invalid_settings_are_refused_with_a_message(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        named("text", **{"file": "lines.jsonl", **settings})
