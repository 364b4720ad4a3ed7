"""A corpus: a text's tokens, those to train on apart from those to validate on."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from jaxaudit import machine
from jaxaudit.text import token_files, tokenizers
from jaxaudit.text.documents import BUILT_IN, documents, files
from jaxaudit.text.tokenizers import Tokenizer

VALIDATION = 0.05
"""The share of a corpus's tokens, its last, that is not trained on."""

MOST_TOKENS = 2**28
"""Tokens that are kept of a corpus (512 MiB of memory); a larger one is thinned out to so many."""

PIECES = 4096
"""Of a corpus that is thinned out, evenly spaced."""


@dataclass(frozen=True)
class Text:
    """A text to train on, as a spec's [task] names it.

    Attributes:
      kind: "text".
      name: of the corpus: "python-stdlib" (the standard library's sources), "python-docstrings", or a file or folder of
        `.txt`, or of tokens `.bin` (nanoGPT's or llm.c's).
      tokenizer: "bytes"; "bpe", byte pairs trained on the corpus; or a folder with vocab.json and merges.txt. Tokens
        are taken as they are.
      vocabulary: tokens that "bpe" is to have; of files of tokens, those there can be.
      shift: None, or the corpus that the perturbation distribution_shift takes text from, with the same tokenizer.
    """

    kind: Literal["text"] = "text"
    name: str = "python-stdlib"
    tokenizer: str = "bytes"
    vocabulary: int = 50257
    shift: str | None = None

    def __post_init__(self):
        if not 1 < self.vocabulary <= 2**16:
            raise ValueError(f"vocabulary must be from 2 to 65536, not {self.vocabulary}")


@dataclass(frozen=True)
class Corpus:
    """Tokens, uint16.

    Attributes:
      train: `[N]`.
      validation: `[M]`, none of them in `train`.
      shift: `[S]`, tokens of another corpus, or None.
      vocabulary: every token is below it.
      sha256: of all these tokens.
    """

    train: np.ndarray
    validation: np.ndarray
    shift: np.ndarray | None
    vocabulary: int
    sha256: str


class _Row:
    """Arrays one after the other, joined only where they are looked at: shards may be larger than memory."""

    def __init__(self, parts: Sequence[np.ndarray]):
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def cut(self, begin: int, end: int) -> np.ndarray:
        """Tokens `begin` to `end`."""
        starts = self._ends - [len(part) for part in self._parts]
        pieces = [p[max(0, begin - s) : max(0, end - s)] for p, s in zip(self._parts, starts, strict=True)]
        return np.concatenate(pieces)

    def thinned(self, begin: int, end: int) -> np.ndarray:
        """Tokens `begin` to `end`, or `MOST_TOKENS` of them, in `PIECES` evenly spaced."""
        if end - begin <= MOST_TOKENS:
            return self.cut(begin, end)
        length = MOST_TOKENS // PIECES
        firsts = np.linspace(begin, end - length, PIECES).astype(np.int64)
        return np.concatenate([self.cut(first, first + length) for first in firsts])


def load(text: Text | str) -> Corpus:
    """The corpus of a text; tokenised once and kept.

    Raises:
      ValueError: in one sentence: no such corpus, an empty or damaged one, tokens beyond the vocabulary.
    """
    text = Text(name=text) if isinstance(text, str) else text
    if _has_tokens(text.name):
        if text.shift is not None and not _has_tokens(text.shift):
            raise ValueError(f"corpus {text.name!r} is of tokens, and shift {text.shift!r} is of text")
        vocabulary, read = text.vocabulary, _read_tokens
    else:
        tokenizer = _tokenizer(text)
        vocabulary, read = tokenizer.vocabulary, functools.partial(_tokenised, tokenizer)
    train, validation = _parted(*read(text.name))
    shift = None if text.shift is None else _parted(*read(text.shift))[0]
    parts = {text.name: train, f"{text.name} (validation)": validation, text.shift or "": shift}
    for name, part in parts.items():
        if part is not None and part.size and (largest := int(part.max())) >= vocabulary:
            raise ValueError(f"corpus {name!r} has token {largest}; the vocabulary's are 0 to {vocabulary - 1}")
    digests = [hashlib.sha256(np.ascontiguousarray(part).data).digest() for part in parts.values() if part is not None]
    return Corpus(train, validation, shift, vocabulary, hashlib.sha256(b"".join(digests)).hexdigest())


def _has_tokens(name: str) -> bool:
    """Whether a corpus is of tokens, not of text."""
    path = Path(name)
    return name not in BUILT_IN and (path.suffix == token_files.SUFFIX or any(path.rglob(f"*{token_files.SUFFIX}")))


def _read_tokens(name: str) -> tuple[_Row, _Row | None]:
    """The tokens of files, and those of the files that have "val" in their names, if there are any."""
    found = files(name, (token_files.SUFFIX,))
    apart = [path for path in found if "val" in path.name and len(found) > 1]
    train = [path for path in found if path not in apart]
    if not train:
        raise ValueError(f"corpus {name!r} has files to validate on alone")
    rows = [_Row([token_files.read(path) for path in paths]) for paths in (train, apart) if paths]
    return rows[0], rows[1] if apart else None


def _tokenised(tokenizer: Tokenizer, name: str) -> tuple[_Row, None]:
    """The tokens of a text, made once and kept."""
    read = documents(name)
    content = hashlib.sha256(b"".join(hashlib.sha256(d).digest() for d in read))
    content.update(tokenizer.identity.encode())
    kept = machine.caches() / "tokens" / f"{content.hexdigest()}.npy"
    if kept.is_file():
        return _Row([np.load(kept, mmap_mode="r")]), None
    tokens = tokenizer.encode(read)
    with contextlib.suppress(OSError), machine.written_whole(kept) as part:
        np.save(part, tokens)
    return _Row([tokens]), None


def _tokenizer(text: Text) -> Tokenizer:
    if text.tokenizer == "bytes":
        return tokenizers.Bytes()
    if text.tokenizer != "bpe":
        return tokenizers.read(Path(text.tokenizer))
    read = documents(text.name)
    content = hashlib.sha256(b"".join(hashlib.sha256(d).digest() for d in read)).hexdigest()
    return tokenizers.trained(read, text.vocabulary, machine.caches() / "tokenizers" / f"{content}-{text.vocabulary}")


def _parted(row: _Row, validation: _Row | None) -> tuple[np.ndarray, np.ndarray]:
    """What is trained on, and what is validated on: the row's last tokens unless there is a row for it."""
    cut = len(row) if validation else len(row) - int(VALIDATION * len(row))
    train = row.thinned(0, cut)
    return train, validation.thinned(0, len(validation)) if validation else row.thinned(cut, len(row))
