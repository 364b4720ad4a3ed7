"""Corpora: every format against files written here, wrong ones, and batches."""

import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from places import DATA

from jaxaudit.learners.language_model import draw_sequences, evenly_spaced
from jaxaudit.text import Text, corpus, load, tokenizers

TOKENIZERS = DATA / "tokenizers"
"""Folders that transformers 5.17 saved, a GPT-2's with tokens added and a RoBERTa's, and texts with the tokens it makes
of them without special ones (`add_special_tokens=False, split_special_tokens=True`)."""

WORDS = "the quick brown fox jumps over the lazy dog and runs away from it "


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))


def numbers(count, most=1000, seed=0):
    return np.random.default_rng(seed).integers(0, most, count).astype(np.uint16)


def nanogpt(path, tokens):
    tokens.astype("<u2").tofile(path)
    return path


def llmc(path, tokens, magic=20240520, version=1, count=None):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())
    return path


def test_a_text_file_is_its_bytes_and_ends(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(WORDS.encode() * 40)
    found = load(str(path))
    together = np.concatenate([found.train, found.validation])
    np.testing.assert_array_equal(together, [*path.read_bytes(), 256])
    assert found.vocabulary == 257
    assert len(found.validation) == int(0.05 * len(together))


def test_a_folder_has_a_document_in_every_file(tmp_path):
    (tmp_path / "c" / "deeper").mkdir(parents=True)
    texts = [f"{i}{WORDS}".encode() for i in range(9)]
    for i, text in enumerate(texts):
        (tmp_path / "c" / ("deeper" if i % 2 else "") / f"{i}.txt").write_bytes(text)
    (tmp_path / "c" / "notes.md").write_text("not read")
    found = load(str(tmp_path / "c"))
    documents = bytes(x if x < 256 else 0 for x in np.concatenate([found.train, found.validation])).split(b"\0")
    assert sorted(documents) == sorted([*texts, b""])


@pytest.mark.parametrize("write", [nanogpt, llmc])
def test_files_of_tokens_round_trip(tmp_path, write):
    tokens = numbers(5000)
    found = load(Text(name=str(write(tmp_path / "tokens.bin", tokens)), vocabulary=1000))
    np.testing.assert_array_equal(np.concatenate([found.train, found.validation]), tokens)


@pytest.mark.parametrize("write", [nanogpt, llmc])
def test_shards_are_read_in_order_and_validation_has_files_of_its_own(tmp_path, write):
    shards = [numbers(700, seed=seed) for seed in range(3)]
    write(tmp_path / "x_val_000000.bin", shards[0])
    write(tmp_path / "x_train_000001.bin", shards[1])
    write(tmp_path / "x_train_000002.bin", shards[2])
    found = load(Text(name=str(tmp_path), vocabulary=1000))
    np.testing.assert_array_equal(found.train, np.concatenate(shards[1:]))
    np.testing.assert_array_equal(found.validation, shards[0])


def test_a_large_corpus_is_thinned_out_to_pieces_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "PIECES", 10)
    for shard in range(4):
        nanogpt(tmp_path / f"{shard}.bin", np.arange(shard * 5000, (shard + 1) * 5000, dtype=np.uint16))
    found = load(Text(name=str(tmp_path), vocabulary=2**16, most_tokens=1000))
    assert found.available == 19000
    pieces = found.train.reshape(10, 100).astype(int)
    assert (np.diff(pieces, axis=1) == 1).all()
    assert pieces[0, 0] == 0
    assert pieces[-1, -1] == 19000 - 1
    assert (np.diff(pieces[:, 0]) >= 100).all()
    np.testing.assert_array_equal(found.validation, np.arange(19000, 20000))


@pytest.mark.parametrize(
    ("write", "sentence"),
    [
        (lambda p: p.write_bytes(b""), "is empty"),
        (lambda p: p.write_bytes(b"abc"), "not a whole number"),
        (lambda p: llmc(p, numbers(900), magic=20240801), r"20240801.*32 bits"),
        (lambda p: llmc(p, numbers(900), magic=7), "begins with the number 7, not 20240520"),
        (lambda p: llmc(p, numbers(900), version=2), "version 2"),
        (lambda p: llmc(p, numbers(900), count=1000), "is cut off: it has 900 tokens, but 1000 by its header"),
        (lambda p: llmc(p, numbers(900), count=800), "is too long: it has 900 tokens, but 800 by its header"),
        (lambda p: p.write_bytes(llmc(p, numbers(900)).read_bytes()[:600]), "cut off within its header"),
        (lambda p: nanogpt(p, numbers(900, most=1100)), "has token 10[0-9]+, but its vocabulary is 0 to 999"),
    ],
)
def test_a_wrong_file_is_told_in_one_sentence(tmp_path, write, sentence):
    path = tmp_path / "tokens.bin"
    write(path)
    with pytest.raises(ValueError, match=sentence) as caught:
        load(Text(name=str(path), vocabulary=1000))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nowhere", "neither a built-in corpus nor a .txt file; built-in: python-stdlib"),
        ("empty.txt", "is empty"),
        ("folder", "has no .txt file"),
        ("other.md", "is not a .txt file"),
    ],
)
def test_a_wrong_text_is_told_in_one_sentence(tmp_path, name, sentence):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "other.md").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=sentence):
        load(str(tmp_path / name))


def test_byte_pairs_are_trained_kept_and_read_again(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(WORDS * 50)
    text = Text(name=str(path), tokenizer="bpe", vocabulary=300)
    found = load(text)
    (kept,) = (tmp_path / "caches" / "jaxaudit" / "tokenizers").iterdir()
    vocabulary = {int(i): word for word, i in json.loads((kept / "vocab.json").read_text()).items()}
    tokens = np.concatenate([found.train, found.validation])
    words = "".join(vocabulary[t] for t in tokens)
    assert words.replace("\u0120", " ") == WORDS * 50 + "<|endoftext|>"
    assert len(tokens) < len(WORDS) * 50 / 2
    assert found.vocabulary == len(vocabulary) <= 300
    assert vocabulary[found.end_of_text] == "<|endoftext|>"
    again, loaded = load(text), load(Text(name=str(path), tokenizer=str(kept)))
    assert again.sha256 == loaded.sha256 == found.sha256
    (kept / "merges.txt").unlink()
    assert load(text).sha256 == found.sha256
    assert (kept / "merges.txt").is_file()


def test_an_end_of_text_that_is_spelled_out_is_text_the_first_time_and_later(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(f"{WORDS}<|endoftext|>" * 50)
    text = Text(name=str(path), tokenizer="bpe", vocabulary=300)
    first, again = load(text), load(text)
    assert first.sha256 == again.sha256
    assert (first.train == first.end_of_text).sum() == 0
    assert first.validation[-1] == first.end_of_text


def test_a_second_corpus_has_the_tokens_of_the_first_ones_pairs(tmp_path):
    """Two corpora with one second corpus: each has it in its own tokens, the first time and later."""
    written = {"a": WORDS, "b": "colourless green ideas sleep furiously ", "c": "the quick lazy dog jumps over it "}
    for name, text in written.items():
        (tmp_path / f"{name}.txt").write_text(text * 50)
    texts = [
        Text(name=str(tmp_path / f"{name}.txt"), shift=str(tmp_path / "c.txt"), tokenizer="bpe", vocabulary=300)
        for name in "ab"
    ]
    one, other = (load(text) for text in texts)
    assert len(one.shift) != len(other.shift)
    assert [load(text).sha256 for text in texts] == [one.sha256, other.sha256]


def test_long_documents_are_encoded_in_pieces_that_end_with_lines(tmp_path, monkeypatch):
    text = "\n".join(f"{i} {WORDS}" for i in range(40)) + "\n" + "x" * 500 + "\nend"
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text(WORDS)
    pairs = tokenizers.trained([text.encode()], 300, tmp_path / "kept")
    documents = [text.encode(), WORDS.encode()]
    whole = pairs.encode(documents)
    monkeypatch.setattr(tokenizers, "PIECE", 200)
    monkeypatch.setattr(tokenizers, "BATCH", 300)
    pieces = pairs.encode(documents)
    assert all(len(piece) <= 200 for piece, _ in tokenizers._pieces(text))
    assert sum(piece.endswith("\n") for piece, _ in tokenizers._pieces(text)) > 10
    assert pairs.encoder.decode(list(pieces)) == pairs.encoder.decode(list(whole))
    assert (pieces == pairs.end_of_text).sum() == 2


def test_tokens_are_made_once_for_a_content(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    kept = tmp_path / "caches" / "jaxaudit" / "tokens"
    made = []
    encode = tokenizers.Bytes.encode
    monkeypatch.setattr(tokenizers.Bytes, "encode", lambda self, d: made.append(d) or encode(self, d))
    path.write_text(WORDS)
    first = load(str(path)).sha256
    assert load(str(path)).sha256 == first
    assert len(made) == 1
    path.write_text(WORDS + "more")
    assert load(str(path)).sha256 != first
    assert len(made) == 2
    for damaged in (b"", b"nonsense", next(kept.iterdir()).read_bytes()[:140]):
        for file in kept.iterdir():
            file.write_bytes(damaged)
        path.write_text(WORDS)
        assert load(str(path)).sha256 == first
    assert len(made) == 5
    assert load(str(path)).sha256 == first
    assert len(made) == 5


def nobodys():
    raise RuntimeError("Could not determine home directory.")


def test_without_a_place_to_keep_tokens_they_are_made_each_time(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "a.txt").write_text(WORDS)
    assert len(load(str(tmp_path / "a.txt")).train) > 0
    assert len(load(Text(name=str(tmp_path / "a.txt"), tokenizer="bpe", vocabulary=270)).train) > 0
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", nobodys)
    assert len(load(str(tmp_path / "a.txt")).train) > 0


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"name": ""}, "must not be empty"),
        ({"vocabulary": 300}, "vocabulary is for tokenizer 'bpe' and files of tokens; 'bytes' has a fixed one"),
        ({"vocabulary": 2**16 + 1, "tokenizer": "bpe"}, "from 2 to 65536"),
        ({"vocabulary": 200, "tokenizer": "bpe"}, "from 257 to 65536"),
        ({"most_tokens": 7}, "most_tokens must be at least"),
    ],
)
def test_settings_that_make_no_sense(tmp_path, settings, sentence):
    (tmp_path / "a.txt").write_text(WORDS)
    with pytest.raises(ValueError, match=sentence):
        load(Text(**{"name": str(tmp_path / "a.txt")} | settings))


def test_a_tokenizer_with_tokens_of_more_than_16_bits(tmp_path):
    (tmp_path / "a.txt").write_text(WORDS)
    load(Text(name=str(tmp_path / "a.txt"), tokenizer="bpe", vocabulary=270))
    (kept,) = (tmp_path / "caches" / "jaxaudit" / "tokenizers").iterdir()
    vocabulary = json.loads((kept / "vocab.json").read_text())
    (kept / "vocab.json").write_text(json.dumps(vocabulary | {"more": 2**16}))
    with pytest.raises(ValueError, match="has token 65536; tokens must be below 65536"):
        load(Text(name=str(tmp_path / "a.txt"), tokenizer=str(kept)))


def tokenizer_json(folder, name="chat", model=(), config=(), **changes):
    """A folder with `tokenizer.json` alone, and what is changed in it; what is None in `model` is left out."""
    folder.mkdir(exist_ok=True)
    written = json.loads((TOKENIZERS / name / "tokenizer.json").read_text()) | changes
    written["model"] |= dict(model)
    written["model"] = {key: value for key, value in written["model"].items() if value is not None}
    (folder / "tokenizer.json").write_text(json.dumps(written))
    settings = json.loads((TOKENIZERS / name / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | dict(config)))
    return folder


@pytest.mark.parametrize("merges", ["pairs", "strings"])
@pytest.mark.parametrize("name", ["chat", "roberta"])
def test_tokens_of_one_file_are_those_of_transformers(tmp_path, name, merges):
    reference = json.loads((TOKENIZERS / "reference.json").read_text())
    folder = TOKENIZERS / name
    if merges == "strings":  # as older files have them, which do not name the model's type either
        pairs = json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]
        folder = tokenizer_json(
            tmp_path / "older", name, model={"merges": [" ".join(pair) for pair in pairs], "type": None}
        )
    found, pieces = tokenizers.read(folder), tokenizers.read(folder).pieces()
    assert (found.vocabulary, found.end_of_text) == (reference[name]["vocabulary"], reference[name]["end"])
    for text, tokens in zip(reference["texts"], reference[name]["tokens"], strict=True):
        assert found.encode([text.encode()]).tolist() == [*tokens, found.end_of_text], text
        assert b"".join(pieces[token] for token in tokens) == text.encode()


def test_the_token_that_ends_a_text(tmp_path):
    chat = json.loads((TOKENIZERS / "chat" / "tokenizer.json").read_text())
    numbers = {token["content"]: token["id"] for token in chat["added_tokens"]}
    for config, wanted in (
        ({"eos_token": {"content": "<|pad|>"}}, "<|pad|>"),
        ({"eos_token": None}, "<|endoftext|>"),
        ({"eos_token": "<|nowhere|>"}, "<|endoftext|>"),
    ):
        assert tokenizers.read(tokenizer_json(tmp_path, config=config)).end_of_text == numbers[wanted]
    assert (
        tokenizers.read(tokenizer_json(tmp_path)).identity
        != tokenizers.read(tokenizer_json(tmp_path, config=config)).identity
    )
    roberta = json.loads((TOKENIZERS / "roberta" / "tokenizer.json").read_text())["model"]
    parts = tmp_path / "parts"
    parts.mkdir()
    (parts / "vocab.json").write_text(json.dumps(roberta["vocab"]))
    (parts / "merges.txt").write_text("\n".join(map(" ".join, roberta["merges"])))
    assert tokenizers.read(parts).end_of_text == roberta["vocab"]["</s>"]
    del roberta["vocab"]["</s>"]
    (parts / "vocab.json").write_text(json.dumps(roberta["vocab"]))
    with pytest.raises(ValueError, match=r"has no end-of-text token: neither '<\|endoftext\|>' nor '</s>', nor an"):
        tokenizers.read(parts)


def test_all_three_files_are_those_of_older_versions_and_keep_their_identity(tmp_path):
    texts = [(WORDS * 20).encode()]
    tokenizers.trained(texts, 280, tmp_path / "pairs")
    before = tokenizers.read(tmp_path / "pairs").identity
    assert before.startswith("pairs ")
    assert len(before) == len("pairs ") + 64
    tokenizer_json(tmp_path / "pairs", config={"eos_token": None})
    assert tokenizers.read(tmp_path / "pairs").identity == before


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
SPLIT = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
OTHER_KINDS = {
    "unigram": ({"model": {"type": "Unigram"}}, "its model has type 'Unigram', not byte pairs"),
    "no model": ({"model": {"type": None, "merges": None}}, "its model has type None, not byte pairs"),
    "sentencepiece": (
        {"model": {"byte_fallback": True}, "pre_tokenizer": None},
        "pairs are of characters .byte_fallback",
    ),
    "ends of words": ({"model": {"end_of_word_suffix": "</w>"}}, "it marks parts of words .end_of_word_suffix '</w>'"),
    "dropout": ({"model": {"dropout": 0.1}}, "it omits pairs at random .dropout 0.1"),
    "normalizer": ({"normalizer": {"type": "NFC"}}, "changes texts before they are split .normalizer 'NFC'"),
    "normalizers": (
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}},
        "normalizer 'NFC', 'Lowercase'",
    ),
    "white space": (
        {"pre_tokenizer": {"type": "Whitespace"}},
        "it splits texts differently .pre_tokenizer 'Whitespace'",
    ),
    "expression": (
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPLIT, BYTES]}},
        "splits texts differently .pre_tokenizer 'Split', 'ByteLevel'",
    ),
    "words as a whole": ({"pre_tokenizer": BYTES | {"use_regex": False}}, "it splits texts differently"),
    "space": ({"pre_tokenizer": BYTES | {"add_prefix_space": True}}, "puts a space before every text"),
    "space by the settings": ({"config": {"add_prefix_space": True}}, "puts a space before every text"),
}


@pytest.mark.parametrize("case", OTHER_KINDS)
def test_a_tokenizer_of_another_kind_is_told_in_one_sentence(tmp_path, case):
    changes, sentence = OTHER_KINDS[case]
    with pytest.raises(ValueError, match=f"is not like GPT-2's: .*{sentence}.*; give a folder with") as caught:
        tokenizers.read(tokenizer_json(tmp_path, **changes))
    assert "\n" not in str(caught.value)


DAMAGED = {
    "number": (
        {
            "added_tokens": [
                {"id": 7, "content": "new", "special": False}
                | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            ]
        },
        "token 'new' cannot have the number 7",
    ),
    "added": ({"added_tokens": ["x" * 10_000]}, "tokenizer.json cannot be read: invalid type: string"),
    "vocabulary": ({"model": {"vocab": {"a": -1}}}, "tokenizer.json cannot be read"),
    "merges": ({"model": {"merges": [["no", "where"]]}}, "tokenizer.json cannot be read"),
    "tokens": ({"model": {"vocab": {"<|endoftext|>": 2**16}, "merges": []}, "added_tokens": []}, "has token 65536"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_of_a_tokenizer_is_told_in_one_sentence(tmp_path, case):
    changes, sentence = DAMAGED[case]
    with pytest.raises(ValueError, match=sentence) as caught:
        tokenizers.read(tokenizer_json(tmp_path, **changes))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000])
def test_what_is_no_tokenizers_json(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json is damaged: it is n"):
        tokenizers.read(tmp_path)
    tokenizer_json(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is damaged: it is n"):
        tokenizers.read(tmp_path)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "spiece.model",
            "spiece.model is sentencepiece's, but only byte-level byte pairs can be read; give a folder with",
        ),
        ("vocab.txt", "vocab.txt is WordPiece's, as BERT has it, but only byte-level byte pairs can be read"),
        ("notes.txt", r"there is no file .*tokenizer\.json, and no vocab.json and merges.txt"),
    ],
)
def test_a_folder_with_files_of_another_tokenizer(tmp_path, name, sentence):
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=sentence):
        tokenizers.read(tmp_path)
    with pytest.raises(ValueError, match=r"there is no folder .*nowhere"):
        tokenizers.read(tmp_path / "nowhere")


def test_text_to_validate_on_may_have_files_of_its_own(tmp_path):
    (tmp_path / "corpus").mkdir()
    for name, text in (("train", WORDS), ("TinyStories-valid", "apart"), ("medieval_0", "old")):
        (tmp_path / "corpus" / f"{name}.txt").write_text(text)
    found = load(str(tmp_path / "corpus"))
    assert len(found.train) == len(WORDS) + 1 + len("old") + 1
    assert bytes(found.validation[:-1].astype(np.uint8)) == b"apart"
    (tmp_path / "corpus" / "train.txt").unlink()
    (tmp_path / "corpus" / "medieval_0.txt").unlink()
    with pytest.raises(ValueError, match="has only files for validation"):
        load(str(tmp_path / "corpus"))


@pytest.mark.parametrize("missing", ["vocab.json", "merges.txt"])
def test_a_tokenizer_without_one_of_its_files(tmp_path, missing):
    (tmp_path / "a.txt").write_text(WORDS)
    for name in {"vocab.json", "merges.txt"} - {missing}:
        (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match=missing):
        load(Text(name=str(tmp_path / "a.txt"), tokenizer=str(tmp_path)))


def test_the_second_corpus_has_the_first_ones_tokens(tmp_path):
    (tmp_path / "a.txt").write_text(WORDS * 20)
    (tmp_path / "b.txt").write_text("of another kind " * 20)
    found = load(Text(name=str(tmp_path / "a.txt"), shift=str(tmp_path / "b.txt")))
    assert bytes(found.shift[:15].astype(np.uint8)) == b"of another kind"
    alone = load(str(tmp_path / "a.txt"))
    np.testing.assert_array_equal(found.train, alone.train)
    assert alone.shift is None
    assert found.sha256 != alone.sha256


def test_the_python_corpora_are_on_this_machine(monkeypatch):
    code = load("python-stdlib")
    assert len(code.train) > 5_000_000
    assert code.train.max() <= 256
    few = list(itertools.islice(corpus.python_stdlib(), 50))  # all would take long to parse
    monkeypatch.setattr(corpus, "python_stdlib", lambda: few)
    prose = load("python-docstrings")
    assert 10_000 < len(prose.train) < sum(map(len, few)) / 2


@pytest.mark.slow
def test_all_docstrings_are_a_corpus():
    assert len(load("python-docstrings").train) > 500_000


def test_sequences_begin_anywhere_and_depend_on_the_key_alone():
    tokens = jnp.arange(50, dtype=jnp.uint16)
    draw = jax.jit(lambda key: draw_sequences(key, tokens, 4000, 8))
    drawn = np.asarray(draw(jax.random.key(0)))
    assert drawn.dtype == np.int32
    np.testing.assert_array_equal(drawn - drawn[:, :1], np.broadcast_to(np.arange(8), (4000, 8)))
    starts = np.bincount(drawn[:, 0], minlength=43)
    assert len(starts) == 43
    assert abs(starts - 4000 / 43).max() < 5 * np.sqrt(4000 / 43)
    np.testing.assert_array_equal(drawn, draw(jax.random.key(0)))
    assert (drawn != draw(jax.random.key(1))).any()


def test_evenly_spaced_sequences_do_not_overlap():
    tokens = np.arange(103, dtype=np.uint16)
    rows = evenly_spaced(tokens, 5, 20)
    assert rows.shape == (5, 20)
    assert len(np.unique(rows)) == 100


def test_llmc_tokens_are_mapped_not_copied(tmp_path):
    tokens = corpus.read(llmc(tmp_path / "a.bin", numbers(900)))
    assert isinstance(tokens, np.memmap)
