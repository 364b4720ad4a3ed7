"""Corpora: every format against files written here, wrong ones, and batches."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaudit.text import Text, batches, corpus, load, token_files

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
    monkeypatch.setattr(corpus, "MOST_TOKENS", 1000)
    monkeypatch.setattr(corpus, "PIECES", 10)
    for shard in range(4):
        nanogpt(tmp_path / f"{shard}.bin", np.arange(shard * 5000, (shard + 1) * 5000, dtype=np.uint16))
    found = load(Text(name=str(tmp_path), vocabulary=2**16))
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
        (lambda p: p.write_bytes(b"abc"), "no whole number"),
        (lambda p: llmc(p, numbers(900), magic=20240801), r"20240801.*32 bits"),
        (lambda p: llmc(p, numbers(900), magic=7), "begins with the number 7, not 20240520"),
        (lambda p: llmc(p, numbers(900), version=2), "version 2"),
        (lambda p: llmc(p, numbers(900), count=1000), "should hold 1000 tokens by its header and holds 900"),
        (lambda p: p.write_bytes(llmc(p, numbers(900)).read_bytes()[:600]), "cut off within its header"),
        (lambda p: nanogpt(p, numbers(900, most=1100)), "has token 10[0-9]+; the vocabulary's are 0 to 999"),
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
        ("other.md", "is no .txt file"),
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
    again, loaded = load(text), load(Text(name=str(path), tokenizer=str(kept)))
    assert again.sha256 == loaded.sha256 == found.sha256


def test_tokens_are_kept_by_content(tmp_path):
    path = tmp_path / "a.txt"
    kept = tmp_path / "caches" / "jaxaudit" / "tokens"
    path.write_text(WORDS)
    first = load(str(path)).sha256
    assert len(list(kept.iterdir())) == 1
    assert load(str(path)).sha256 == first
    path.write_text(WORDS + "more")
    assert load(str(path)).sha256 != first
    assert len(list(kept.iterdir())) == 2


def test_without_a_place_to_keep_tokens_they_are_made_each_time(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "a.txt").write_text(WORDS)
    assert len(load(str(tmp_path / "a.txt")).train) > 0
    assert len(load(Text(name=str(tmp_path / "a.txt"), tokenizer="bpe", vocabulary=270)).train) > 0


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


def test_the_python_corpora_are_on_this_machine():
    code, prose = load("python-stdlib"), load("python-docstrings")
    assert len(code.train) > 5_000_000
    assert len(prose.train) > 500_000
    assert code.train.max() <= 256


def test_sequences_begin_anywhere_and_depend_on_the_key_alone():
    tokens = jnp.arange(50, dtype=jnp.uint16)
    drawn = batches.draw(jax.random.key(0), tokens, 4000, 8)
    assert drawn.dtype == jnp.int32
    np.testing.assert_array_equal(drawn - drawn[:, :1], np.broadcast_to(np.arange(8), (4000, 8)))
    starts = np.bincount(drawn[:, 0], minlength=43)
    assert len(starts) == 43
    assert abs(starts - 4000 / 43).max() < 5 * np.sqrt(4000 / 43)
    np.testing.assert_array_equal(drawn, batches.draw(jax.random.key(0), tokens, 4000, 8))
    assert (drawn != batches.draw(jax.random.key(1), tokens, 4000, 8)).any()


def test_evenly_spaced_sequences_do_not_overlap():
    tokens = np.arange(103, dtype=np.uint16)
    rows = batches.evenly_spaced(tokens, 5, 20)
    assert rows.shape == (5, 20)
    assert len(np.unique(rows)) == 100
    assert batches.evenly_spaced(tokens, 99, 20).shape == (5, 20)
    with pytest.raises(ValueError, match="103 tokens to validate on, and a sequence has 104"):
        batches.evenly_spaced(tokens, 1, 104)


def test_llmc_tokens_are_mapped_not_copied(tmp_path):
    tokens = token_files.read(llmc(tmp_path / "a.bin", numbers(900)))
    assert isinstance(tokens, np.memmap)
