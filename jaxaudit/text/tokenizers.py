"""Tokenizers: bytes, and byte-level byte-pair encoding (Sennrich et al., 2016) by Hugging Face's `tokenizers`.

A folder of a byte-pair tokenizer has `tokenizer.json`, or `vocab.json` and `merges.txt`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxaudit.runtime import machine
from jaxaudit.runtime.files import MAX_FILE_BYTES, read_object

TOKENIZERS = ("bytes", "bpe")
"""The names of the tokenizers that are part of the package; another name is a folder with tokenizer files."""

END_OF_TEXT = "<|endoftext|>"

MAX_TOKENS = 2**16
"""The largest vocabulary, since tokens are stored as 16 bits."""

PIECE, BATCH = 2**20, 2**23
"""The largest number of characters that are encoded as one text, and as one batch of texts.

Encoding takes about 30 times the memory of a text. Longer documents are split at ends of lines, where a token may end
that would otherwise have continued.
"""

TOKENIZER_FILE = "tokenizer.json"
VOCABULARY_FILES = ("vocab.json", "merges.txt")
CONFIG_FILE = "tokenizer_config.json"

DEFAULT_ENDS = (END_OF_TEXT, "</s>")
"""The end-of-text tokens of GPT-2 and RoBERTa, for a folder whose `tokenizer_config.json` has no eos_token."""

UNSUPPORTED_FILES = {
    "spiece.model": "sentencepiece's",
    "sentencepiece.bpe.model": "sentencepiece's",
    "tokenizer.model": "sentencepiece's, or tiktoken's",
    "vocab.txt": "WordPiece's, as BERT has it",
}
"""Files of tokenizers that are not byte-level, and whose format each is."""

ALLOWED = 'give a folder with a tokenizer like GPT-2\'s, or "bytes"'


class Tokenizer(Protocol):
    """Turns documents into tokens, and tokens into text."""

    @property
    def vocabulary(self) -> int:
        """The number of tokens, which are 0 to `vocabulary` - 1."""

    @property
    def end_of_text(self) -> int:
        """The token that follows the last token of a document."""

    @property
    def identity(self) -> str:
        """A text that differs between tokenizers that encode differently."""

    def encode(self, documents: Sequence[bytes]) -> np.ndarray:
        """Returns the tokens of all documents, each followed by the end of text, uint16 `[N]`."""

    def pieces(self) -> list[bytes]:
        """Returns the bytes of each token; none for the end of text."""


@dataclass(frozen=True)
class Bytes:
    """The tokenizer of which every byte is a token, and 256 ends a document."""

    vocabulary: int = 257
    end_of_text: int = 256
    identity: str = "bytes"

    def encode(self, documents: Sequence[bytes]) -> np.ndarray:
        """Returns the bytes of all documents, each followed by the end of text, uint16 `[N]`."""
        end = np.array([self.end_of_text], np.uint16)
        parts = [part for document in documents for part in (np.frombuffer(document, np.uint8), end)]
        return np.concatenate(parts, dtype=np.uint16)

    def pieces(self) -> list[bytes]:
        """Returns the bytes of each token; none for the end of text."""
        return [*(bytes([byte]) for byte in range(256)), b""]


@dataclass(frozen=True)
class BytePairs:
    """Byte-level byte-pair encoding like GPT-2's. An end of text that is spelled out in a document is encoded as text.

    Attributes:
      encoder: The tokenizer of the package `tokenizers`.
      vocabulary: The number of tokens.
      end_of_text: The token that ends a document.
      identity: A text with the hash of the tokenizer's files.
      added: The added tokens, which the vocabulary spells as text and not in GPT-2's characters for bytes.
    """

    encoder: Any
    vocabulary: int
    end_of_text: int
    identity: str
    added: frozenset[str] = frozenset()

    def encode(self, documents: Sequence[bytes]) -> np.ndarray:
        """Returns the tokens of all documents, each followed by the end of text, uint16 `[N]`.

        Bytes that are not UTF-8 are replaced.
        """
        end, parts = np.array([self.end_of_text], np.uint16), []
        for batch in _batches(documents):
            encodings = self.encoder.encode_batch([text for text, _ in batch])
            for encoding, (_, ends_document) in zip(encodings, batch, strict=True):
                parts.append(np.array(encoding.ids, np.uint16))
                if ends_document:
                    parts.append(end)
        return np.concatenate(parts)

    def pieces(self) -> list[bytes]:
        """Returns the bytes of each token; none for the end of text."""
        byte_of = _bytes_of_characters()
        pieces = [b""] * self.vocabulary
        for spelling, token in self.encoder.get_vocab().items():
            if spelling in self.added and token != self.end_of_text:
                pieces[token] = spelling.encode()
            elif token != self.end_of_text:
                pieces[token] = b"".join(byte_of.get(character, character.encode()) for character in spelling)
        return pieces


def _bytes_of_characters() -> dict[str, bytes]:
    """Returns the byte of each character in a byte-level vocabulary.

    A printable byte is the character of the same number, and the others are characters from 256 on (Radford et al.,
    2019: `bytes_to_unicode` of GPT-2's encoder.py).
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): bytes([byte]) for byte in printable}
    return characters | {chr(256 + number): bytes([byte]) for number, byte in enumerate(others)}


def _batches(documents: Sequence[bytes]) -> Iterator[list[tuple[str, bool]]]:
    """Yields batches of at least `BATCH` characters: pieces of documents, and whether each ends its document."""
    batch, size = [], 0
    for document in documents:
        for piece, ends_document in _pieces(document.decode("utf-8", "replace")):
            batch.append((piece, ends_document))
            size += len(piece)
            if size >= BATCH:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _pieces(text: str) -> Iterator[tuple[str, bool]]:
    """Yields pieces of at most `PIECE` characters, which end with a line if possible, and whether each is the last."""
    begin = 0
    while len(text) - begin > PIECE:
        line_end = text.rfind("\n", begin, begin + PIECE) + 1
        end = line_end if line_end > begin else begin + PIECE
        yield text[begin:end], False
        begin = end
    yield text[begin:], True


def trained(documents: Sequence[bytes], vocabulary: int, folder: Path) -> BytePairs:
    """Returns byte pairs trained on documents, which are read from a folder if it has them and else stored there.

    Raises:
      ValueError: `vocabulary` is too small or too large.
    """
    with contextlib.suppress(ValueError):  # the folder is missing or damaged
        return read(folder)
    with tempfile.TemporaryDirectory() as temporary:
        _train(documents, vocabulary).save_model(temporary)
        with contextlib.suppress(OSError), machine.atomic_output(folder) as part:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(temporary, part)
        return read(Path(temporary))  # from files, as every later run


def _train(documents: Sequence[bytes], vocabulary: int) -> Any:
    from tokenizers import ByteLevelBPETokenizer

    if not 257 <= vocabulary <= MAX_TOKENS:
        raise ValueError(f"vocabulary of tokenizer 'bpe' must be from 257 to {MAX_TOKENS}, not {vocabulary}")
    encoder = ByteLevelBPETokenizer()
    texts = (document.decode("utf-8", "replace") for document in documents)
    encoder.train_from_iterator(
        texts, vocab_size=vocabulary, min_frequency=2, special_tokens=[END_OF_TEXT], show_progress=False
    )
    return encoder


def read(folder: Path) -> BytePairs:
    """Reads the byte-pair tokenizer of a folder, from `vocab.json` and `merges.txt` if it has all three files.

    Raises:
      ValueError: The folder has no byte-level byte-pair tokenizer, or its files cannot be read.
    """
    vocabulary_paths, path = tuple(folder / name for name in VOCABULARY_FILES), folder / TOKENIZER_FILE
    if all(part.is_file() for part in vocabulary_paths):
        return _read_vocabulary_files(folder, vocabulary_paths)
    if path.is_file():
        return _read_tokenizer_file(folder, path)
    raise ValueError(f"tokenizer {str(folder)!r}: {_why_missing(folder)}")


def _why_missing(folder: Path) -> str:
    if not folder.is_dir():
        return f"there is no folder {folder}"
    present = [name for name in VOCABULARY_FILES if (folder / name).is_file()]
    if present:
        return f"there is no file {next(folder / name for name in VOCABULARY_FILES if name not in present)}"
    for name, owner in UNSUPPORTED_FILES.items():
        if (folder / name).is_file():
            return f"{name} is {owner}, but only byte-level byte pairs can be read; {ALLOWED}"
    return f"there is no file {folder / TOKENIZER_FILE}, and no {' and '.join(VOCABULARY_FILES)}"


def _read_vocabulary_files(folder: Path, paths: tuple[Path, ...]) -> BytePairs:
    from tokenizers import ByteLevelBPETokenizer

    for path in paths:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB")
    try:
        encoder = ByteLevelBPETokenizer(*map(str, paths))
    except Exception as error:  # the library's own exceptions
        raise ValueError(f"tokenizer {str(folder)!r} cannot be read: {_shortened(error)}") from None
    return _byte_pairs(folder, encoder, _config(folder), paths)


def _read_tokenizer_file(folder: Path, path: Path) -> BytePairs:
    """Reads `tokenizer.json`, of which only the parts that have been checked are handed to the library."""
    from tokenizers import Tokenizer as HuggingFaceTokenizer

    content, config = read_object(path), _config(folder)
    for reason in _unsupported_parts(content, config):
        raise ValueError(f"tokenizer {str(folder)!r} is not like GPT-2's: {reason}; {ALLOWED}")
    added: list[dict[str, Any]] = content.get("added_tokens") or []
    model = {**content["model"], "type": "BPE"}
    checked = {"version": "1.0", "added_tokens": added, "pre_tokenizer": content["pre_tokenizer"], "model": model}
    try:
        encoder = HuggingFaceTokenizer.from_str(json.dumps(checked))
    except Exception as error:  # the library's own exceptions
        raise ValueError(f"{path} cannot be read: {_shortened(error)}") from None
    for token in added:
        if encoder.token_to_id(token["content"]) != token["id"]:
            raise ValueError(f"{path} is damaged: token {token['content'][:50]!r} cannot have the number {token['id']}")
    encoder.encode_special_tokens = True  # a special token that is spelled out in a document is encoded as text
    spellings = frozenset(token["content"] for token in added)
    return _byte_pairs(folder, encoder, config, (path,), spellings)


def _byte_pairs(
    folder: Path, encoder: Any, config: dict[str, Any], paths: Sequence[Path], added: frozenset[str] = frozenset()
) -> BytePairs:
    """Returns a tokenizer that is identified by the hash of its files `paths`, in this order."""
    end_of_text = _end_of_text(folder, encoder, config)
    largest = max(encoder.get_vocab().values())
    if largest >= MAX_TOKENS:
        raise ValueError(f"tokenizer {str(folder)!r} has token {largest}; tokens must be below {MAX_TOKENS}")
    content = hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()
    suffix = "" if end_of_text == END_OF_TEXT else f" {end_of_text}"
    return BytePairs(encoder, largest + 1, encoder.token_to_id(end_of_text), f"pairs {content}{suffix}", added)


def _unsupported_parts(content: dict[str, Any], config: dict[str, Any]) -> Iterator[str]:
    """Yields the reasons why a tokenizer does not encode by byte pairs like GPT-2's.

    Args:
      content: the parsed tokenizer.json.
      config: the parsed tokenizer_config.json.
    """
    model, pre_tokenizer = _table(content.get("model")), _table(content.get("pre_tokenizer"))
    kind = model.get("type", "BPE" if "merges" in model else None)
    if kind != "BPE":
        yield f"its model has type {_shown(kind)}, not byte pairs (BPE)"
    if model.get("byte_fallback"):
        yield "its pairs are of characters (byte_fallback), as sentencepiece's are, not of bytes"
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            yield f"it marks parts of words ({name} {_shown(model[name])})"
    if model.get("dropout"):
        yield f"it omits pairs at random (dropout {_shown(model['dropout'])})"
    if content.get("normalizer"):
        yield f"it changes texts before they are split (normalizer {_types(content['normalizer'], 'normalizers')})"
    if pre_tokenizer.get("type") != "ByteLevel" or not pre_tokenizer.get("use_regex", True):
        yield f"it splits texts differently (pre_tokenizer {_types(pre_tokenizer, 'pretokenizers')})"
    if pre_tokenizer.get("add_prefix_space", True) or config.get("add_prefix_space"):
        yield "it puts a space before every text (add_prefix_space)"


def _types(component: Any, key: str) -> str:
    """Returns the type of a component of a tokenizer, or the types of the components that it lists under a key."""
    several = _table(component).get(key)
    components = several if isinstance(several, list) else [component]
    return ", ".join(_shown(_table(inner).get("type")) for inner in components[:5])


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _shortened(error: Exception) -> str:
    # The library's messages may repeat a whole file.
    return " ".join(str(error)[:200].split())


def _shown(value: Any) -> str:
    # Lists and tables of a file may be large and deeply nested.
    return f"a {type(value).__name__}" if isinstance(value, list | dict) else repr(value)[:50]


def _config(folder: Path) -> dict[str, Any]:
    return read_object(folder / CONFIG_FILE) if (folder / CONFIG_FILE).is_file() else {}


def _end_of_text(folder: Path, encoder: Any, config: dict[str, Any]) -> str:
    """Returns the spelling of the end-of-text token. Raises ValueError if the tokenizer has none."""
    eos_token = config.get("eos_token")
    eos_token = _table(eos_token).get("content", eos_token)
    for token in (eos_token, *DEFAULT_ENDS):
        if isinstance(token, str) and encoder.token_to_id(token) is not None:
            return token
    raise ValueError(
        f"tokenizer {str(folder)!r} has no end-of-text token: neither {' nor '.join(map(repr, DEFAULT_ENDS))}, nor an "
        f"eos_token that {CONFIG_FILE} names"
    )
