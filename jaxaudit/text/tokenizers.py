"""Tokenizers: bytes, and byte-level pairs (Sennrich et al., 2016) by Hugging Face's `tokenizers`."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxaudit import machine

END_OF_TEXT = "<|endoftext|>"
VOCABULARY_FILES = ("vocab.json", "merges.txt")


class Tokenizer(Protocol):
    """Makes documents into tokens."""

    @property
    def vocabulary(self) -> int:
        """Tokens there are."""

    @property
    def identity(self) -> str:
        """Tells it from every other tokenizer."""

    def encode(self, documents: Sequence[bytes]) -> np.ndarray:
        """The documents in a row, each ended by the end of text, uint16 `[N]`."""


@dataclass(frozen=True)
class Bytes:
    """Every byte is a token; 256 ends a document."""

    vocabulary: int = 257
    identity: str = "bytes"

    def encode(self, documents: Sequence[bytes]) -> np.ndarray:
        """The documents in a row, each ended by the end of text, uint16 `[N]`."""
        parts = [part for d in documents for part in (np.frombuffer(d, np.uint8), np.array([256], np.uint16))]
        return np.concatenate(parts, dtype=np.uint16)


@dataclass(frozen=True)
class BytePairs:
    """Byte-level pairs, as GPT-2 has them."""

    encoder: Any
    vocabulary: int
    identity: str

    def encode(self, documents: Sequence[bytes]) -> np.ndarray:
        """The documents in a row, each ended by the end of text, uint16 `[N]`; what is not UTF-8 is replaced."""
        end = np.array([self.encoder.token_to_id(END_OF_TEXT)], np.uint16)
        encoded = self.encoder.encode_batch([d.decode("utf-8", "replace") for d in documents])
        return np.concatenate([part for e in encoded for part in (np.array(e.ids, np.uint16), end)])


def trained(documents: Sequence[bytes], vocabulary: int, kept: Path) -> BytePairs:
    """As `train`, once; a folder keeps what it gave."""
    if kept.is_dir():
        return read(kept)
    pairs = train(documents, vocabulary)
    with contextlib.suppress(OSError), machine.written_whole(kept) as part:
        part.mkdir()
        pairs.encoder.save_model(str(part))
    return pairs


def train(documents: Sequence[bytes], vocabulary: int) -> BytePairs:
    """Byte pairs that are frequent in some documents. Raises ValueError for a vocabulary they cannot have."""
    from tokenizers import ByteLevelBPETokenizer

    if not 257 <= vocabulary <= 2**16:
        raise ValueError(f"a vocabulary of byte pairs has from 257 to 65536 tokens, not {vocabulary}")
    encoder = ByteLevelBPETokenizer()
    texts = (d.decode("utf-8", "replace") for d in documents)
    encoder.train_from_iterator(
        texts, vocab_size=vocabulary, min_frequency=2, special_tokens=[END_OF_TEXT], show_progress=False
    )
    return BytePairs(encoder, encoder.get_vocab_size(), f"pairs {vocabulary}")


def read(folder: Path) -> BytePairs:
    """Byte pairs from `vocab.json` and `merges.txt` in a folder. Raises ValueError where they cannot be read."""
    from tokenizers import ByteLevelBPETokenizer

    paths = [folder / name for name in VOCABULARY_FILES]
    for path in paths:
        if not path.is_file():
            raise ValueError(f"tokenizer {str(folder)!r}: there is no file {path}")
    try:
        encoder = ByteLevelBPETokenizer(*map(str, paths))
    except Exception as error:  # of the library's own kinds
        raise ValueError(f"tokenizer {str(folder)!r} cannot be read: {error}") from None
    if encoder.token_to_id(END_OF_TEXT) is None:
        raise ValueError(f"tokenizer {str(folder)!r} has no token {END_OF_TEXT!r}")
    if encoder.get_vocab_size() > 2**16:
        raise ValueError(f"tokenizer {str(folder)!r} has {encoder.get_vocab_size()} tokens; at most 65536 can be read")
    content = hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()
    return BytePairs(encoder, encoder.get_vocab_size(), f"pairs {content}")
