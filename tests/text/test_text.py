"""Tests corpora: files of every format, invalid files, tokenizers, and the sampling of sequences."""

import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from directories import DATA

from jaxaudit.learners.language_model import draw_sequences, evenly_spaced
from jaxaudit.text import Text, corpus, load, tokenizers

TOKENIZERS = DATA / "tokenizers"
"""Folders that transformers 5.17 saved: a GPT-2 tokenizer with added tokens, and a RoBERTa tokenizer; and texts with
the tokens it gives them without special ones (`add_special_tokens=False, split_special_tokens=True`)."""

WORDS = "the quick brown fox jumps over the lazy dog and runs away from it "


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))


def random_tokens(count, bound=1000, seed=0):
    return np.random.default_rng(seed).integers(0, bound, count).astype(np.uint16)


def write_nanogpt(path, tokens):
    tokens.astype("<u2").tofile(path)
    return path


def write_llmc(path, tokens, magic=20240520, version=1, count=None):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())
    return path


def test_tokens_of_a_text_file_are_its_bytes_and_an_end(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(WORDS.encode() * 40)
    loaded = load(str(path))
    tokens = np.concatenate([loaded.train, loaded.validation])
    np.testing.assert_array_equal(tokens, [*path.read_bytes(), 256])
    assert loaded.vocabulary == 257
    assert len(loaded.validation) == int(0.05 * len(tokens))


def test_every_text_file_of_a_folder_is_a_document(tmp_path):
    (tmp_path / "c" / "deeper").mkdir(parents=True)
    texts = [f"{i}{WORDS}".encode() for i in range(9)]
    for i, text in enumerate(texts):
        (tmp_path / "c" / ("deeper" if i % 2 else "") / f"{i}.txt").write_bytes(text)
    (tmp_path / "c" / "notes.md").write_text("not read")
    loaded = load(str(tmp_path / "c"))
    documents = bytes(x if x < 256 else 0 for x in np.concatenate([loaded.train, loaded.validation])).split(b"\0")
    assert sorted(documents) == sorted([*texts, b""])


@pytest.mark.parametrize("write", [write_nanogpt, write_llmc])
def test_token_files_are_read_as_written(tmp_path, write):
    tokens = random_tokens(5000)
    loaded = load(Text(name=str(write(tmp_path / "tokens.bin", tokens)), vocabulary=1000))
    np.testing.assert_array_equal(np.concatenate([loaded.train, loaded.validation]), tokens)


@pytest.mark.parametrize("write", [write_nanogpt, write_llmc])
def test_training_shards_are_read_in_order_and_validation_shards_apart(tmp_path, write):
    shards = [random_tokens(700, seed=seed) for seed in range(3)]
    write(tmp_path / "x_val_000000.bin", shards[0])
    write(tmp_path / "x_train_000001.bin", shards[1])
    write(tmp_path / "x_train_000002.bin", shards[2])
    loaded = load(Text(name=str(tmp_path), vocabulary=1000))
    np.testing.assert_array_equal(loaded.train, np.concatenate(shards[1:]))
    np.testing.assert_array_equal(loaded.validation, shards[0])


def test_most_tokens_keeps_evenly_spaced_pieces_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "PIECES", 10)
    for shard in range(4):
        write_nanogpt(tmp_path / f"{shard}.bin", np.arange(shard * 5000, (shard + 1) * 5000, dtype=np.uint16))
    loaded = load(Text(name=str(tmp_path), vocabulary=2**16, most_tokens=1000))
    assert loaded.available == 19000
    pieces = loaded.train.reshape(10, 100).astype(int)
    assert (np.diff(pieces, axis=1) == 1).all()
    assert pieces[0, 0] == 0
    assert pieces[-1, -1] == 19000 - 1
    assert (np.diff(pieces[:, 0]) >= 100).all()
    np.testing.assert_array_equal(loaded.validation, np.arange(19000, 20000))


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda p: p.write_bytes(b""), "is empty"),
        (lambda p: p.write_bytes(b"abc"), "not a whole number"),
        (lambda p: write_llmc(p, random_tokens(900), magic=20240801), r"20240801.*32 bits"),
        (lambda p: write_llmc(p, random_tokens(900), magic=7), "begins with the number 7, not 20240520"),
        (lambda p: write_llmc(p, random_tokens(900), version=2), "version 2"),
        (
            lambda p: write_llmc(p, random_tokens(900), count=1000),
            "is cut off: it has 900 tokens, but 1000 by its header",
        ),
        (
            lambda p: write_llmc(p, random_tokens(900), count=800),
            "is too long: it has 900 tokens, but 800 by its header",
        ),
        (lambda p: p.write_bytes(write_llmc(p, random_tokens(900)).read_bytes()[:600]), "cut off within its header"),
        (
            lambda p: write_nanogpt(p, random_tokens(900, bound=1100)),
            "has token 10[0-9]+, but its vocabulary is 0 to 999",
        ),
    ],
)
def test_an_invalid_token_file_is_refused_with_a_one_line_message(tmp_path, write, message):
    path = tmp_path / "tokens.bin"
    write(path)
    with pytest.raises(ValueError, match=message) as error:
        load(Text(name=str(path), vocabulary=1000))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "neither a built-in corpus nor a .txt file; built-in: python-stdlib"),
        ("empty.txt", "is empty"),
        ("folder", "has no .txt file"),
        ("other.md", "is not a .txt file"),
    ],
)
def test_an_invalid_text_path_is_refused_with_a_message(tmp_path, name, message):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "other.md").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=message):
        load(str(tmp_path / name))


def test_byte_pair_tokenizers_are_trained_once_and_cached(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(WORDS * 50)
    text = Text(name=str(path), tokenizer="bpe", vocabulary=300)
    first = load(text)
    (cached,) = (tmp_path / "caches" / "jaxaudit" / "tokenizers").iterdir()
    vocabulary = {int(i): word for word, i in json.loads((cached / "vocab.json").read_text()).items()}
    tokens = np.concatenate([first.train, first.validation])
    words = "".join(vocabulary[t] for t in tokens)
    assert words.replace("\u0120", " ") == WORDS * 50 + "<|endoftext|>"
    assert len(tokens) < len(WORDS) * 50 / 2
    assert first.vocabulary == len(vocabulary) <= 300
    assert vocabulary[first.end_of_text] == "<|endoftext|>"
    second, from_folder = load(text), load(Text(name=str(path), tokenizer=str(cached)))
    assert second.sha256 == from_folder.sha256 == first.sha256
    (cached / "merges.txt").unlink()
    assert load(text).sha256 == first.sha256
    assert (cached / "merges.txt").is_file()


def test_a_spelled_out_end_of_text_is_ordinary_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(f"{WORDS}<|endoftext|>" * 50)
    text = Text(name=str(path), tokenizer="bpe", vocabulary=300)
    first, second = load(text), load(text)
    assert first.sha256 == second.sha256
    assert (first.train == first.end_of_text).sum() == 0
    assert first.validation[-1] == first.end_of_text


def test_a_second_corpus_is_encoded_by_the_firsts_byte_pairs(tmp_path):
    """Two corpora share a second corpus: each encodes it by its byte pairs, also when the tokens are cached."""
    contents = {"a": WORDS, "b": "colourless green ideas sleep furiously ", "c": "the quick lazy dog jumps over it "}
    for name, text in contents.items():
        (tmp_path / f"{name}.txt").write_text(text * 50)
    texts = [
        Text(name=str(tmp_path / f"{name}.txt"), shift=str(tmp_path / "c.txt"), tokenizer="bpe", vocabulary=300)
        for name in "ab"
    ]
    a, b = (load(text) for text in texts)
    assert len(a.shift) != len(b.shift)
    assert [load(text).sha256 for text in texts] == [a.sha256, b.sha256]


def test_long_documents_are_encoded_in_pieces_that_end_at_lines(tmp_path, monkeypatch):
    text = "\n".join(f"{i} {WORDS}" for i in range(40)) + "\n" + "x" * 500 + "\nend"
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text(WORDS)
    pairs = tokenizers.trained([text.encode()], 300, tmp_path / "kept")
    documents = [text.encode(), WORDS.encode()]
    at_once = pairs.encode(documents)
    monkeypatch.setattr(tokenizers, "PIECE", 200)
    monkeypatch.setattr(tokenizers, "BATCH", 300)
    pieces = pairs.encode(documents)
    assert all(len(piece) <= 200 for piece, _ in tokenizers._pieces(text))
    assert sum(piece.endswith("\n") for piece, _ in tokenizers._pieces(text)) > 10
    assert pairs.encoder.decode(list(pieces)) == pairs.encoder.decode(list(at_once))
    assert (pieces == pairs.end_of_text).sum() == 2


def test_tokens_are_cached_by_content_and_made_again_if_damaged(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    cache = tmp_path / "caches" / "jaxaudit" / "tokens"
    encoded = []
    encode = tokenizers.Bytes.encode
    monkeypatch.setattr(tokenizers.Bytes, "encode", lambda self, d: encoded.append(d) or encode(self, d))
    path.write_text(WORDS)
    first = load(str(path)).sha256
    assert load(str(path)).sha256 == first
    assert len(encoded) == 1
    path.write_text(WORDS + "more")
    assert load(str(path)).sha256 != first
    assert len(encoded) == 2
    for damaged in (b"", b"nonsense", next(cache.iterdir()).read_bytes()[:140]):
        for file in cache.iterdir():
            file.write_bytes(damaged)
        path.write_text(WORDS)
        assert load(str(path)).sha256 == first
    assert len(encoded) == 5
    assert load(str(path)).sha256 == first
    assert len(encoded) == 5


def no_home():
    raise RuntimeError("Could not determine home directory.")


def test_texts_are_loaded_without_a_cache_folder(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "a.txt").write_text(WORDS)
    assert len(load(str(tmp_path / "a.txt")).train) > 0
    assert len(load(Text(name=str(tmp_path / "a.txt"), tokenizer="bpe", vocabulary=270)).train) > 0
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert len(load(str(tmp_path / "a.txt")).train) > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": ""}, "must not be empty"),
        ({"vocabulary": 300}, "vocabulary is for tokenizer 'bpe' and files of tokens; 'bytes' has a fixed one"),
        ({"vocabulary": 2**16 + 1, "tokenizer": "bpe"}, "from 2 to 65536"),
        ({"vocabulary": 200, "tokenizer": "bpe"}, "from 257 to 65536"),
        ({"most_tokens": 7}, "most_tokens must be at least"),
    ],
)
def test_invalid_settings_are_refused_with_a_message(tmp_path, settings, message):
    (tmp_path / "a.txt").write_text(WORDS)
    with pytest.raises(ValueError, match=message):
        load(Text(**{"name": str(tmp_path / "a.txt")} | settings))


def test_a_tokenizer_with_tokens_beyond_16_bits_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text(WORDS)
    load(Text(name=str(tmp_path / "a.txt"), tokenizer="bpe", vocabulary=270))
    (cached,) = (tmp_path / "caches" / "jaxaudit" / "tokenizers").iterdir()
    vocabulary = json.loads((cached / "vocab.json").read_text())
    (cached / "vocab.json").write_text(json.dumps(vocabulary | {"more": 2**16}))
    with pytest.raises(ValueError, match="has token 65536; tokens must be below 65536"):
        load(Text(name=str(tmp_path / "a.txt"), tokenizer=str(cached)))


def write_tokenizer_json(folder, name="chat", model=(), config=(), **changes):
    """Writes a folder with only `tokenizer.json` and its config, changed; None in `model` removes a key."""
    folder.mkdir(exist_ok=True)
    contents = json.loads((TOKENIZERS / name / "tokenizer.json").read_text()) | changes
    contents["model"] |= dict(model)
    contents["model"] = {key: value for key, value in contents["model"].items() if value is not None}
    (folder / "tokenizer.json").write_text(json.dumps(contents))
    settings = json.loads((TOKENIZERS / name / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | dict(config)))
    return folder


@pytest.mark.parametrize("merges", ["pairs", "strings"])
@pytest.mark.parametrize("name", ["chat", "roberta"])
def test_tokens_of_tokenizer_json_equal_those_of_transformers(tmp_path, name, merges):
    reference = json.loads((TOKENIZERS / "reference.json").read_text())
    folder = TOKENIZERS / name
    if merges == "strings":  # the format of older files, which have no model type
        pairs = json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]
        folder = write_tokenizer_json(
            tmp_path / "older", name, model={"merges": [" ".join(pair) for pair in pairs], "type": None}
        )
    tokenizer, pieces = tokenizers.read(folder), tokenizers.read(folder).pieces()
    assert (tokenizer.vocabulary, tokenizer.end_of_text) == (reference[name]["vocabulary"], reference[name]["end"])
    for text, tokens in zip(reference["texts"], reference[name]["tokens"], strict=True):
        assert tokenizer.encode([text.encode()]).tolist() == [*tokens, tokenizer.end_of_text], text
        assert b"".join(pieces[token] for token in tokens) == text.encode()


def test_the_end_of_text_token_is_the_configs_or_a_default(tmp_path):
    chat = json.loads((TOKENIZERS / "chat" / "tokenizer.json").read_text())
    token_ids = {token["content"]: token["id"] for token in chat["added_tokens"]}
    for config, end_token in (
        ({"eos_token": {"content": "<|pad|>"}}, "<|pad|>"),
        ({"eos_token": None}, "<|endoftext|>"),
        ({"eos_token": "<|nowhere|>"}, "<|endoftext|>"),
    ):
        assert tokenizers.read(write_tokenizer_json(tmp_path, config=config)).end_of_text == token_ids[end_token]
    assert (
        tokenizers.read(write_tokenizer_json(tmp_path)).identity
        != tokenizers.read(write_tokenizer_json(tmp_path, config=config)).identity
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


def test_vocab_and_merges_win_over_tokenizer_json_in_the_identity(tmp_path):
    texts = [(WORDS * 20).encode()]
    tokenizers.trained(texts, 280, tmp_path / "pairs")
    before = tokenizers.read(tmp_path / "pairs").identity
    assert before.startswith("pairs ")
    assert len(before) == len("pairs ") + 64
    write_tokenizer_json(tmp_path / "pairs", config={"eos_token": None})
    assert tokenizers.read(tmp_path / "pairs").identity == before


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
SPLIT = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
UNSUPPORTED = {
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


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_an_unsupported_tokenizer_is_refused_with_a_one_line_message(tmp_path, case):
    changes, message = UNSUPPORTED[case]
    with pytest.raises(ValueError, match=f"is not like GPT-2's: .*{message}.*; give a folder with") as error:
        tokenizers.read(write_tokenizer_json(tmp_path, **changes))
    assert "\n" not in str(error.value)


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
def test_a_damaged_tokenizer_is_refused_with_a_short_message(tmp_path, case):
    changes, message = DAMAGED[case]
    with pytest.raises(ValueError, match=message) as error:
        tokenizers.read(write_tokenizer_json(tmp_path, **changes))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000])
def test_tokenizer_files_that_are_no_json_objects_are_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json is damaged: it is n"):
        tokenizers.read(tmp_path)
    write_tokenizer_json(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is damaged: it is n"):
        tokenizers.read(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "spiece.model",
            "spiece.model is sentencepiece's, but only byte-level byte pairs can be read; give a folder with",
        ),
        ("vocab.txt", "vocab.txt is WordPiece's, as BERT has it, but only byte-level byte pairs can be read"),
        ("notes.txt", r"there is no file .*tokenizer\.json, and no vocab.json and merges.txt"),
    ],
)
def test_a_folder_without_a_supported_tokenizer_is_refused(tmp_path, name, message):
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=message):
        tokenizers.read(tmp_path)
    with pytest.raises(ValueError, match=r"there is no folder .*nowhere"):
        tokenizers.read(tmp_path / "nowhere")


def test_files_named_valid_are_the_validation_text(tmp_path):
    (tmp_path / "corpus").mkdir()
    for name, text in (("train", WORDS), ("TinyStories-valid", "apart"), ("medieval_0", "old")):
        (tmp_path / "corpus" / f"{name}.txt").write_text(text)
    loaded = load(str(tmp_path / "corpus"))
    assert len(loaded.train) == len(WORDS) + 1 + len("old") + 1
    assert bytes(loaded.validation[:-1].astype(np.uint8)) == b"apart"
    (tmp_path / "corpus" / "train.txt").unlink()
    (tmp_path / "corpus" / "medieval_0.txt").unlink()
    with pytest.raises(ValueError, match="has only files for validation"):
        load(str(tmp_path / "corpus"))


@pytest.mark.parametrize("missing", ["vocab.json", "merges.txt"])
def test_a_tokenizer_with_a_missing_file_is_refused(tmp_path, missing):
    (tmp_path / "a.txt").write_text(WORDS)
    for name in {"vocab.json", "merges.txt"} - {missing}:
        (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match=missing):
        load(Text(name=str(tmp_path / "a.txt"), tokenizer=str(tmp_path)))


def test_a_second_corpus_does_not_change_the_first(tmp_path):
    (tmp_path / "a.txt").write_text(WORDS * 20)
    (tmp_path / "b.txt").write_text("of another kind " * 20)
    with_shift = load(Text(name=str(tmp_path / "a.txt"), shift=str(tmp_path / "b.txt")))
    assert bytes(with_shift.shift[:15].astype(np.uint8)) == b"of another kind"
    alone = load(str(tmp_path / "a.txt"))
    np.testing.assert_array_equal(with_shift.train, alone.train)
    assert alone.shift is None
    assert with_shift.sha256 != alone.sha256


def test_the_python_corpora_are_made_from_the_standard_library(monkeypatch):
    code = load("python-stdlib")
    assert len(code.train) > 5_000_000
    assert code.train.max() <= 256
    few = list(itertools.islice(corpus.python_stdlib(), 50))  # parsing all files takes long
    monkeypatch.setattr(corpus, "python_stdlib", lambda: few)
    prose = load("python-docstrings")
    assert 10_000 < len(prose.train) < sum(map(len, few)) / 2


@pytest.mark.slow
def test_the_docstring_corpus_has_half_a_million_tokens():
    assert len(load("python-docstrings").train) > 500_000


def test_sampled_sequences_begin_uniformly_and_depend_on_the_key_only():
    tokens = jnp.arange(50, dtype=jnp.uint16)
    sample = jax.jit(lambda key: draw_sequences(key, tokens, 4000, 8))
    sampled = np.asarray(sample(jax.random.key(0)))
    assert sampled.dtype == np.int32
    np.testing.assert_array_equal(sampled - sampled[:, :1], np.broadcast_to(np.arange(8), (4000, 8)))
    starts = np.bincount(sampled[:, 0], minlength=43)
    assert len(starts) == 43
    assert abs(starts - 4000 / 43).max() < 5 * np.sqrt(4000 / 43)
    np.testing.assert_array_equal(sampled, sample(jax.random.key(0)))
    assert (sampled != sample(jax.random.key(1))).any()


def test_evenly_spaced_sequences_do_not_overlap():
    tokens = np.arange(103, dtype=np.uint16)
    rows = evenly_spaced(tokens, 5, 20)
    assert rows.shape == (5, 20)
    assert len(np.unique(rows)) == 100


def test_llmc_tokens_are_memory_mapped(tmp_path):
    tokens = corpus.read(write_llmc(tmp_path / "a.bin", random_tokens(900)))
    assert isinstance(tokens, np.memmap)
