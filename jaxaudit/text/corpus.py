"""Corpora: the tokens of texts, divided into training and validation, from built-in sources or files."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from jaxaudit.runtime import machine
from jaxaudit.runtime.registry import first_docstring_line, task_kinds
from jaxaudit.text import tokenizers
from jaxaudit.text.tokenizers import TOKENIZERS, Tokenizer

TEXT_FILES = (".txt",)
VALIDATION_FILE = re.compile(r"(?<![a-z])val(id(ation)?)?(?![a-z])", re.IGNORECASE)
_EXCLUDED_FOLDERS = ("site-packages", "dist-packages", "test", "tests", "__pycache__")


def python_stdlib() -> Iterator[bytes]:
    """The sources of this Python's standard library without its tests, about 12 MB of code."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if not set(path.relative_to(root).parts) & set(_EXCLUDED_FOLDERS):
            yield path.read_bytes()


def python_docstrings() -> Iterator[bytes]:
    """The docstrings of this Python's standard library, one document for each file, about 2 MB of English."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for source in python_stdlib():
        try:
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(source)
        except (SyntaxError, ValueError):  # a template, or a source for another version of Python
            continue
        docstrings = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented)]
        if any(docstrings):
            yield "\n\n".join(filter(None, docstrings)).encode()


BUILT_IN: dict[str, Callable[[], Iterator[bytes]]] = {
    "python-stdlib": python_stdlib,
    "python-docstrings": python_docstrings,
}
"""The corpora that need no download, by name."""


def documents(name: str) -> tuple[list[bytes], list[bytes]]:
    """Returns the documents of a corpus for training and for validation, in the order of their hashes.

    Args:
      name: A built-in corpus, a `.txt` file, or a folder with such files, each of them a document; see `files`.

    Raises:
      ValueError: There is no such corpus, or it is empty.
    """
    parts: tuple[Iterable[bytes], ...]
    if name in BUILT_IN:
        parts = BUILT_IN[name](), ()
    else:
        parts = tuple((path.read_bytes() for path in paths) for paths in files(name, TEXT_FILES))
    train, validation = (sorted(filter(None, part), key=lambda text: hashlib.sha256(text).digest()) for part in parts)
    if not train:
        raise ValueError(f"corpus {name!r} is empty")
    return train, validation


def files(name: str, suffixes: tuple[str, ...]) -> tuple[list[Path], list[Path]]:
    """Returns the files of a corpus for training and for validation, sorted: a file, or all files in a folder.

    Files of a folder with "val", "valid" or "validation" as a word in their names are for validation.

    Args:
      name: The path of the file or folder.
      suffixes: The suffixes of the files, such as ".txt".

    Raises:
      ValueError: There are no such files, or none for training.
    """
    path = Path(name)
    if path.is_dir():
        paths = sorted(file for file in path.rglob("*") if file.suffix in suffixes and file.is_file())
    else:
        paths = [path] if path.is_file() and path.suffix in suffixes else []
    if not paths:
        problem = "has no" if path.is_dir() else "is not a" if path.exists() else "is neither a built-in corpus nor a"
        raise ValueError(f"corpus {name!r} {problem} {' or '.join(suffixes)} file; built-in: {', '.join(BUILT_IN)}")
    validation = [file for file in paths if file != path and VALIDATION_FILE.search(file.stem)]
    if len(validation) == len(paths):
        raise ValueError(f"corpus {name!r} has only files for validation, and none for training")
    return [file for file in paths if file not in validation], validation


TOKEN_SUFFIX = ".bin"
HEADER = 256
"""The number of 32-bit integers in the header of llm.c's files: magic number, version, number of tokens, zeros."""

MAGIC, VERSION = 20240520, 1
OTHER_MAGICS = {
    20240801: "llm.c's tokens of 32 bits",
    20240326: "llm.c's parameters",
    20240522: "llm.c's evaluation data",
}


def read(path: Path) -> np.ndarray:
    """Returns the tokens of a file of nanoGPT or llm.c, uint16 `[N]`, memory-mapped.

    Raises:
      ValueError: The file is empty, truncated, or of another kind.
    """
    size = path.stat().st_size
    if not size:
        raise ValueError(f"{path} is empty")
    if size % 2:
        raise ValueError(f"{path} has {size} bytes, which is not a whole number of 16-bit tokens")
    words = np.memmap(path, np.uint16, "r")
    if not _has_header(words):
        return words
    if len(words) < 2 * HEADER:
        raise ValueError(f"{path} is cut off within its header")
    header = np.asarray(words[: 2 * HEADER]).view(np.int32)
    if header[0] != MAGIC:
        kind = OTHER_MAGICS.get(int(header[0]), "not a known file of llm.c")
        raise ValueError(f"{path} begins with the number {header[0]}, not {MAGIC}: {kind}")
    if header[1] != VERSION:
        raise ValueError(f"{path} has version {header[1]} of llm.c's format; only version {VERSION} can be read")
    tokens = words[2 * HEADER :]
    if len(tokens) != header[2]:
        problem = "cut off" if len(tokens) < header[2] else "too long"
        raise ValueError(f"{path} is {problem}: it has {len(tokens)} tokens, but {header[2]} by its header")
    return tokens


def _has_header(words: np.ndarray) -> bool:
    """Returns whether 16-bit words begin with llm.c's header: its magic number, or zeros after some numbers."""
    begin = np.asarray(words[: 2 * HEADER])
    if len(begin) < 2 * HEADER:
        return len(begin) >= 2 and int(begin[:2].view(np.int32)[0]) == MAGIC
    return int(begin[:2].view(np.int32)[0]) == MAGIC or bool(begin[:2].any() and not begin[6:].any())


VALIDATION = 0.05
"""The share of a corpus's tokens, from its end, that is for validation if it has no files for validation."""

VOCABULARY = 50257
"""The default vocabulary, which is GPT-2's."""

PIECES = 4096
"""The number of evenly spaced pieces of a corpus that is too large for memory."""

BUILT_IN_OR_PATH = {"path": True, "words": tuple(BUILT_IN)}


@task_kinds.register("text")
@dataclass(frozen=True)
class Text:
    """Texts: corpora that need no download, and files.

    Attributes:
      name: The corpus: "python-stdlib" (the standard library's sources), "python-docstrings", or a file or folder of
        `.txt`, or of tokens `.bin` (nanoGPT's or llm.c's).
      tokenizer: "bytes"; "bpe" for byte pairs trained on the corpus; or a folder with the files of a GPT-2 tokenizer.
        Files of tokens ignore it.
      vocabulary: The vocabulary that "bpe" is trained to; for files of tokens, the number of possible tokens, the last
        of which ends a text. None for 50257, which is GPT-2's.
      shift: The corpus from which the perturbation distribution_shift takes text, with the same tokenizer, or None.
      most_tokens: The largest number of training tokens that are kept in memory, of two bytes each. Of a larger
        corpus, evenly spaced pieces are kept.
    """

    kind: ClassVar[str] = "text"
    gives: ClassVar[str] = "text"

    name: str = field(default="python-stdlib", metadata=BUILT_IN_OR_PATH)
    tokenizer: str = field(default="bytes", metadata={"path": True, "words": TOKENIZERS})
    vocabulary: int | None = None
    shift: str | None = field(default=None, metadata=BUILT_IN_OR_PATH)
    most_tokens: int = 2**28

    def __post_init__(self):
        if "" in (self.name, self.tokenizer, self.shift):
            raise ValueError("name, tokenizer and shift must not be empty")
        if self.vocabulary is not None and not 1 < self.vocabulary <= tokenizers.MAX_TOKENS:
            raise ValueError(f"vocabulary must be from 2 to {tokenizers.MAX_TOKENS}, not {self.vocabulary}")
        if self.most_tokens < PIECES:
            raise ValueError(f"most_tokens must be at least {PIECES}, not {self.most_tokens}")

    def make(self) -> Corpus:
        """Returns the tokens of the corpus, as `load` reads them."""
        return load(self)

    @classmethod
    def listing(cls) -> list[tuple[str, str]]:
        """Returns the built-in corpora and the kinds of files, each a name and a description."""
        built_in = [(name, first_docstring_line(source)) for name, source in BUILT_IN.items()]
        return [*built_in, ("<path>", "a file or folder of .txt, or of tokens .bin (nanoGPT's or llm.c's)")]


@dataclass(frozen=True)
class Corpus:
    """The tokens of a corpus, uint16, for training and for validation.

    Attributes:
      train: The training tokens, `[N]`.
      validation: The validation tokens, `[M]`, none of which is in `train`.
      shift: The tokens of the second corpus, `[S]`, or None.
      vocabulary: The number of possible tokens, which are 0 to `vocabulary` - 1.
      end_of_text: The token that ends a document.
      available: The number of training tokens in the corpus, more than N if only pieces of it are kept.
      sha256: The hash of all kept tokens, as hexadecimal digits.
    """

    train: np.ndarray
    validation: np.ndarray
    shift: np.ndarray | None
    vocabulary: int
    end_of_text: int
    available: int
    sha256: str


class _TokenShards:
    """The concatenation of token arrays, of which only slices are read, because shards may be larger than memory."""

    def __init__(self, shards: Sequence[np.ndarray]):
        self._shards = shards
        self._ends = np.cumsum([len(shard) for shard in shards], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._shards else 0

    def slice(self, begin: int, end: int) -> np.ndarray:
        """Returns the tokens from `begin` to `end`."""
        parts = []
        for shard, shard_end in zip(self._shards, self._ends, strict=True):
            start = shard_end - len(shard)
            parts.append(shard[max(0, begin - start) : max(0, end - start)])
        return np.concatenate(parts)

    def subsampled(self, begin: int, end: int, max_tokens: int) -> np.ndarray:
        """Returns the tokens from `begin` to `end`, or if these exceed `max_tokens`, evenly spaced `PIECES` of them."""
        if end - begin <= max_tokens:
            return self.slice(begin, end)
        length = max_tokens // PIECES
        starts = np.linspace(begin, end - length, PIECES).astype(np.int64)
        return np.concatenate([self.slice(start, start + length) for start in starts])


def load(text: Text | str) -> Corpus:
    """Returns the tokens of a text, or of the text corpus of a name, tokenized once and cached on disk.

    Raises:
      ValueError: There is no such corpus, it is empty or damaged, or it has tokens beyond the vocabulary.
    """
    text = Text(name=text) if isinstance(text, str) else text
    names = [name for name in (text.name, text.shift) if name is not None]
    if _has_tokens(text.name):
        if text.shift is not None and not _has_tokens(text.shift):
            raise ValueError(f"corpus {text.name!r} has tokens, but shift {text.shift!r} has text")
        vocabulary = text.vocabulary or VOCABULARY
        end_of_text = vocabulary - 1
        paths = [files(name, (TOKEN_SUFFIX,)) for name in names]
        corpora = [(_read_shards(train), _read_shards(validation)) for train, validation in paths]
    else:
        texts = [documents(name) for name in names]
        tokenizer = _tokenizer(text, texts[0][0])
        vocabulary, end_of_text = tokenizer.vocabulary, tokenizer.end_of_text
        corpora = [(_tokenized(tokenizer, train), _tokenized(tokenizer, validation)) for train, validation in texts]
    train, validation, available = _split(*corpora[0], text.most_tokens)
    shift = None if text.shift is None else _split(*corpora[1], text.most_tokens)[0]
    parts = {text.name: train, f"{text.name} (validation)": validation, text.shift or "": shift}
    for name, part in parts.items():
        if part is not None and part.size and (largest := int(part.max())) >= vocabulary:
            raise ValueError(f"corpus {name!r} has token {largest}, but its vocabulary is 0 to {vocabulary - 1}")
    digests = [hashlib.sha256(np.ascontiguousarray(part).data).digest() for part in parts.values() if part is not None]
    content = hashlib.sha256(b"".join(digests)).hexdigest()
    return Corpus(train, validation, shift, vocabulary, end_of_text, available, content)


def _has_tokens(name: str) -> bool:
    path = Path(name)
    if not name or name in BUILT_IN:
        return False
    return path.suffix == TOKEN_SUFFIX or any(path.rglob(f"*{TOKEN_SUFFIX}"))


def _read_shards(paths: Sequence[Path]) -> _TokenShards:
    return _TokenShards([read(path) for path in paths])


def _tokenized(tokenizer: Tokenizer, documents: Sequence[bytes]) -> _TokenShards:
    if not documents:
        return _TokenShards([])
    content = hashlib.sha256(b"".join(hashlib.sha256(d).digest() for d in documents))
    content.update(tokenizer.identity.encode())
    cached = machine.cache_folder() / "tokens" / f"{content.hexdigest()}.npy"
    with contextlib.suppress(OSError, ValueError, EOFError):  # the file is missing or damaged
        tokens = np.load(cached, mmap_mode="r")
        if tokens.dtype == np.uint16 and tokens.ndim == 1:
            return _TokenShards([tokens])
    tokens = tokenizer.encode(documents)
    with contextlib.suppress(OSError), machine.atomic_output(cached) as part:
        np.save(part, tokens)
    return _TokenShards([tokens])


def _tokenizer(text: Text, documents: Sequence[bytes]) -> Tokenizer:
    if text.tokenizer != "bpe" and text.vocabulary is not None:
        raise ValueError(f"vocabulary is for tokenizer 'bpe' and files of tokens; {text.tokenizer!r} has a fixed one")
    if text.tokenizer == "bytes":
        return tokenizers.Bytes()
    if text.tokenizer != "bpe":
        return tokenizers.read(Path(text.tokenizer))
    content = hashlib.sha256(b"".join(hashlib.sha256(d).digest() for d in documents)).hexdigest()
    vocabulary = text.vocabulary or VOCABULARY
    return tokenizers.trained(documents, vocabulary, machine.cache_folder() / "tokenizers" / f"{content}-{vocabulary}")


def _split(train: _TokenShards, validation: _TokenShards, max_tokens: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns the training tokens, the validation tokens, and the number of training tokens that are available.

    If there are no validation tokens, they are the last tokens of `train`.
    """
    if len(validation):
        cut = len(train)
        held_out = validation.subsampled(0, len(validation), max_tokens)
    else:
        cut = len(train) - int(VALIDATION * len(train))
        held_out = train.subsampled(cut, len(train), max_tokens)
    return train.subsampled(0, cut, max_tokens), held_out, cut
