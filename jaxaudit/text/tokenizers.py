"""Tokenizers: bytes, and byte-level pairs (Sennrich et al., 2016) by Hugging Face's `tokenizers`."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxaudit.runtime import machine
from jaxaudit.text import tokenizer_files

TOKENIZERS = ("bytes", "bpe")
"""Those that need no files."""

END_OF_TEXT = "<|endoftext|>"

MOST_TOKENS = 2**16
"""Tokens are of 16 bits."""

PIECE, BATCH = 2**20, 2**23
"""Characters of a text that are made into byte pairs as a whole, and of all texts at a time: it takes 30 times as much
memory. Longer ones are cut at ends of lines, where a token may then end that would have gone on."""


class Tokenizer(Protocol):
    """Turns documents into tokens, and tokens into text."""

    @property
    def vocabulary(self) -> int:
        """The number of tokens."""

    @property
    def end_of_text(self) -> int:
        """The token that ends a document."""

    @property
    def identity(self) -> str:
        """A text that tells this tokenizer from every other."""

    def encode(self, documents: Sequence[bytes]) -> np.ndarray:
        """The documents in a row, each ended by the end of text, uint16 `[N]`."""

    def pieces(self) -> list[bytes]:
        """The bytes that each token stands for; none for the end of text."""


@dataclass(frozen=True)
class Bytes:
    """Every byte is a token; 256 ends a document."""

    vocabulary: int = 257
    end_of_text: int = 256
    identity: str = "bytes"

    def encode(self, documents: Sequence[bytes]) -> np.ndarray:
        """The documents in a row, each ended by the end of text, uint16 `[N]`."""
        end = np.array([self.end_of_text], np.uint16)
        parts = [part for d in documents for part in (np.frombuffer(d, np.uint8), end)]
        return np.concatenate(parts, dtype=np.uint16)

    def pieces(self) -> list[bytes]:
        """The bytes that each token stands for; none for the end of text."""
        return [*(bytes([byte]) for byte in range(256)), b""]


@dataclass(frozen=True)
class BytePairs:
    """Byte-level pairs, as GPT-2 has them. An end of text that is spelled out in a document is text like all else.

    Attributes:
      encoder: of `tokenizers`.
      added: tokens that are written as they are, not in the signs of bytes.
    """

    encoder: Any
    vocabulary: int
    end_of_text: int
    identity: str
    added: frozenset[str] = frozenset()

    def encode(self, documents: Sequence[bytes]) -> np.ndarray:
        """The documents in a row, each ended by the end of text, uint16 `[N]`; what is not UTF-8 is replaced."""
        end, parts = np.array([self.end_of_text], np.uint16), []
        for batch in _batches(documents):
            encoded = self.encoder.encode_batch([text for text, _ in batch])
            for pairs, (_, ends) in zip(encoded, batch, strict=True):
                parts += [np.array(pairs.ids, np.uint16), end] if ends else [np.array(pairs.ids, np.uint16)]
        return np.concatenate(parts)

    def pieces(self) -> list[bytes]:
        """The bytes that each token stands for; none for the end of text."""
        bytes_of = _bytes_of_signs()
        found = [b""] * self.vocabulary
        for signs, token in self.encoder.get_vocab().items():
            if signs in self.added and token != self.end_of_text:
                found[token] = signs.encode()
            elif token != self.end_of_text:
                found[token] = b"".join(bytes_of.get(sign, sign.encode()) for sign in signs)
        return found


def _bytes_of_signs() -> dict[str, bytes]:
    """The byte that each sign of a vocabulary of byte-level pairs stands for: itself if it is printable (Radford et
    al., 2019: `bytes_to_unicode` of GPT-2's encoder.py), the others one after the other from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    signs = {chr(byte): bytes([byte]) for byte in printable}
    return signs | {chr(256 + number): bytes([byte]) for number, byte in enumerate(others)}


def _batches(documents: Sequence[bytes]) -> Iterator[list[tuple[str, bool]]]:
    """Pieces of documents, and whether a document ends with them, as many as are encoded at a time."""
    batch, size = [], 0
    for document in documents:
        for piece, ends in _pieces(document.decode("utf-8", "replace")):
            batch.append((piece, ends))
            size += len(piece)
            if size >= BATCH:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _pieces(text: str) -> Iterator[tuple[str, bool]]:
    """A text in pieces of at most `PIECE` characters that end with a line, and whether it is the last."""
    begin = 0
    while len(text) - begin > PIECE:
        line = text.rfind("\n", begin, begin + PIECE) + 1
        end = line if line > begin else begin + PIECE
        yield text[begin:end], False
        begin = end
    yield text[begin:], True


def trained(documents: Sequence[bytes], vocabulary: int, kept: Path) -> BytePairs:
    """Byte pairs that are frequent in some documents, trained once; a folder keeps their files.

    Raises ValueError for a vocabulary they cannot have.
    """
    with contextlib.suppress(ValueError):  # nothing is there, or it is damaged
        return read(kept)
    with tempfile.TemporaryDirectory() as place:
        _train(documents, vocabulary).save_model(place)
        with contextlib.suppress(OSError), machine.atomic_output(kept) as part:
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(place, part)
        return read(Path(place))  # as every later run will


def _train(documents: Sequence[bytes], vocabulary: int) -> Any:
    from tokenizers import ByteLevelBPETokenizer

    if not 257 <= vocabulary <= MOST_TOKENS:
        raise ValueError(f"a vocabulary of byte pairs has from 257 to {MOST_TOKENS} tokens, not {vocabulary}")
    encoder = ByteLevelBPETokenizer()
    texts = (d.decode("utf-8", "replace") for d in documents)
    encoder.train_from_iterator(
        texts, vocab_size=vocabulary, min_frequency=2, special_tokens=[END_OF_TEXT], show_progress=False
    )
    return encoder


def read(folder: Path) -> BytePairs:
    """Byte pairs from a folder's files, see `tokenizer_files`. Raises ValueError where they cannot be read."""
    found = tokenizer_files.find(folder)
    largest = max(found.encoder.get_vocab().values())
    if largest >= MOST_TOKENS:
        raise ValueError(f"tokenizer {str(folder)!r} has token {largest}; those below {MOST_TOKENS} can be read")
    content = hashlib.sha256(b"".join(file.read_bytes() for file in found.files)).hexdigest()
    end_of_text = found.encoder.token_to_id(found.end_of_text)
    ends = "" if found.end_of_text == END_OF_TEXT else f" {found.end_of_text}"
    return BytePairs(found.encoder, largest + 1, end_of_text, f"pairs {content}{ends}", found.added)
