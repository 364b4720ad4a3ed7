"""A corpus: a text's tokens, those to train on apart from those to validate on."""

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
_NO_SOURCES = ("site-packages", "dist-packages", "test", "tests", "__pycache__")


def python_stdlib() -> Iterator[bytes]:
    """The sources of this Python's standard library, without its tests: some 12 MB of code."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if not set(path.relative_to(root).parts) & set(_NO_SOURCES):
            yield path.read_bytes()


def python_docstrings() -> Iterator[bytes]:
    """The docstrings of these sources, those of a file in a row: some 2 MB of English."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for source in python_stdlib():
        try:
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(source)
        except (SyntaxError, ValueError):  # a template, or of another Python
            continue
        found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented)]
        if any(found):
            yield "\n\n".join(filter(None, found)).encode()


BUILT_IN: dict[str, Callable[[], Iterator[bytes]]] = {
    "python-stdlib": python_stdlib,
    "python-docstrings": python_docstrings,
}
"""Corpora that need no download, by name."""


def documents(name: str) -> tuple[list[bytes], list[bytes]]:
    """A corpus's documents to train on, and those to validate on, in an order that has nothing to do with their names.

    Args:
      name: a built-in corpus, a `.txt` file, or a folder with such files, each of them a document; see `files`.

    Raises:
      ValueError: there is no such corpus, or nothing in it.
    """
    found: tuple[Iterable[bytes], ...]
    if name in BUILT_IN:
        found = BUILT_IN[name](), ()
    else:
        found = tuple((path.read_bytes() for path in paths) for paths in files(name, TEXT_FILES))
    train, validation = (sorted(filter(None, part), key=lambda d: hashlib.sha256(d).digest()) for part in found)
    if not train:
        raise ValueError(f"corpus {name!r} is empty")
    return train, validation


def files(name: str, suffixes: tuple[str, ...]) -> tuple[list[Path], list[Path]]:
    """The file of that name, or all files in the folder, that end so; apart from them those to validate on.

    Those are files of a folder with "val", "valid" or "validation" as a word in their names. Raises ValueError if there
    are no files, or none to train on.
    """
    path = Path(name)
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.suffix in suffixes and p.is_file())
    else:
        found = [path] if path.is_file() and path.suffix in suffixes else []
    if not found:
        what = "has no" if path.is_dir() else "is no" if path.exists() else "is neither a built-in corpus nor a"
        raise ValueError(f"corpus {name!r} {what} {' or '.join(suffixes)} file; built-in: {', '.join(BUILT_IN)}")
    apart = [p for p in found if p != path and VALIDATION_FILE.search(p.stem)]
    if len(apart) == len(found):
        raise ValueError(f"corpus {name!r} has files to validate on alone")
    return [p for p in found if p not in apart], apart


SUFFIX = ".bin"
HEADER = 256
"""32-bit numbers in llm.c's header: magic, version, tokens, zeros."""

MAGIC, VERSION = 20240520, 1
OTHER_MAGICS = {
    20240801: "llm.c's tokens of 32 bits",
    20240326: "llm.c's parameters",
    20240522: "llm.c's evaluation data",
}


def read(path: Path) -> np.ndarray:
    """A file's tokens, uint16 `[N]`, mapped and not copied.

    Raises:
      ValueError: in one sentence: empty, cut off, or another kind of file.
    """
    size = path.stat().st_size
    if not size:
        raise ValueError(f"{path} is empty")
    if size % 2:
        raise ValueError(f"{path} has {size} bytes, which is no whole number of 16-bit tokens")
    words = np.memmap(path, np.uint16, "r")
    if not _has_header(words):
        return words
    if len(words) < 2 * HEADER:
        raise ValueError(f"{path} is cut off within its header")
    header = np.asarray(words[: 2 * HEADER]).view(np.int32)
    if header[0] != MAGIC:
        what = OTHER_MAGICS.get(int(header[0]), "no data of llm.c's that is known")
        raise ValueError(f"{path} begins with the number {header[0]}, not {MAGIC}: {what}")
    if header[1] != VERSION:
        raise ValueError(f"{path} has version {header[1]} of llm.c's format; {VERSION} can be read")
    tokens = words[2 * HEADER :]
    if len(tokens) != header[2]:
        what = "cut off" if len(tokens) < header[2] else "longer than that"
        raise ValueError(f"{path} should hold {header[2]} tokens by its header and is {what}: it holds {len(tokens)}")
    return tokens


def _has_header(words: np.ndarray) -> bool:
    """Whether a file begins as llm.c's do; a text's tokens have no thousand zero bytes so near their beginning."""
    begin = np.asarray(words[: 2 * HEADER])
    if len(begin) < 2 * HEADER:
        return len(begin) >= 2 and int(begin[:2].view(np.int32)[0]) == MAGIC
    return int(begin[:2].view(np.int32)[0]) == MAGIC or bool(begin[:2].any() and not begin[6:].any())


VALIDATION = 0.05
"""The share of a corpus's tokens, its last, that is not trained on."""

VOCABULARY = 50257
"""GPT-2's."""

PIECES = 4096
"""Of a corpus that is thinned out, evenly spaced."""


BUILT_IN_OR_PATH = {"path": True, "words": tuple(BUILT_IN)}


@task_kinds.register("text")
@dataclass(frozen=True)
class Text:
    """Texts: corpora that need no download, and files.

    Attributes:
      name: of the corpus: "python-stdlib" (the standard library's sources), "python-docstrings", or a file or folder of
        `.txt`, or of tokens `.bin` (nanoGPT's or llm.c's).
      tokenizer: "bytes"; "bpe", byte pairs trained on the corpus; or a folder with a GPT-2 tokenizer's files. Tokens
        are taken as they are.
      vocabulary: tokens that "bpe" is to have; of files of tokens those there can be, the last of which ends a text;
        None: 50257, as GPT-2's.
      shift: None, or the corpus that the perturbation distribution_shift takes text from, with the same tokenizer.
      most_tokens: to train on that are kept in memory, two bytes each; a larger corpus is thinned out to so many.
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
        if self.vocabulary is not None and not 1 < self.vocabulary <= tokenizers.MOST_TOKENS:
            raise ValueError(f"vocabulary must be from 2 to {tokenizers.MOST_TOKENS}, not {self.vocabulary}")
        if self.most_tokens < PIECES:
            raise ValueError(f"most_tokens must be at least {PIECES}, not {self.most_tokens}")

    def make(self) -> Corpus:
        """Returns the corpus; see `load`."""
        return load(self)

    @classmethod
    def listing(cls) -> list[tuple[str, str]]:
        """The corpora that need no download, and what others are."""
        built_in = [(name, first_docstring_line(read)) for name, read in BUILT_IN.items()]
        return [*built_in, ("<path>", "a file or folder of .txt, or of tokens .bin (nanoGPT's or llm.c's)")]


@dataclass(frozen=True)
class Corpus:
    """The tokens of a corpus, uint16, for training and for validation.

    Attributes:
      train: `[N]`.
      validation: `[M]`, none of them in `train`.
      shift: `[S]`, tokens of another corpus, or None.
      vocabulary: every token is below it.
      end_of_text: the token that ends a document.
      available: tokens to train on that there are; more than N where the corpus was thinned out.
      sha256: of all these tokens.
    """

    train: np.ndarray
    validation: np.ndarray
    shift: np.ndarray | None
    vocabulary: int
    end_of_text: int
    available: int
    sha256: str


class _Row:
    """Arrays one after the other, joined only where they are looked at: shards may be larger than memory."""

    def __init__(self, parts: Sequence[np.ndarray]):
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._parts else 0

    def cut(self, begin: int, end: int) -> np.ndarray:
        """Returns the tokens from `begin` to `end`."""
        starts = self._ends - [len(part) for part in self._parts]
        pieces = [p[max(0, begin - s) : max(0, end - s)] for p, s in zip(self._parts, starts, strict=True)]
        return np.concatenate(pieces)

    def thinned(self, begin: int, end: int, most: int) -> np.ndarray:
        """Tokens `begin` to `end`, or `most` of them, in `PIECES` evenly spaced."""
        if end - begin <= most:
            return self.cut(begin, end)
        length = most // PIECES
        firsts = np.linspace(begin, end - length, PIECES).astype(np.int64)
        return np.concatenate([self.cut(first, first + length) for first in firsts])


def load(text: Text | str) -> Corpus:
    """The corpus of a text; tokenised once and kept.

    Raises:
      ValueError: in one sentence: no such corpus, an empty or damaged one, tokens beyond the vocabulary.
    """
    text = Text(name=text) if isinstance(text, str) else text
    names = [name for name in (text.name, text.shift) if name is not None]
    if _has_tokens(text.name):
        if text.shift is not None and not _has_tokens(text.shift):
            raise ValueError(f"corpus {text.name!r} is of tokens, and shift {text.shift!r} is of text")
        vocabulary = text.vocabulary or VOCABULARY
        end_of_text = vocabulary - 1
        found = [files(name, (SUFFIX,)) for name in names]
        rows = [(_read(train), _read(apart)) for train, apart in found]
    else:
        read = [documents(name) for name in names]
        tokenizer = _tokenizer(text, read[0][0])
        vocabulary, end_of_text = tokenizer.vocabulary, tokenizer.end_of_text
        rows = [(_tokenised(tokenizer, train), _tokenised(tokenizer, apart)) for train, apart in read]
    train, validation, available = _parted(*rows[0], text.most_tokens)
    shift = None if text.shift is None else _parted(*rows[1], text.most_tokens)[0]
    parts = {text.name: train, f"{text.name} (validation)": validation, text.shift or "": shift}
    for name, part in parts.items():
        if part is not None and part.size and (largest := int(part.max())) >= vocabulary:
            raise ValueError(f"corpus {name!r} has token {largest}; the vocabulary's are 0 to {vocabulary - 1}")
    digests = [hashlib.sha256(np.ascontiguousarray(part).data).digest() for part in parts.values() if part is not None]
    content = hashlib.sha256(b"".join(digests)).hexdigest()
    return Corpus(train, validation, shift, vocabulary, end_of_text, available, content)


def _has_tokens(name: str) -> bool:
    """Whether a corpus is of tokens, not of text."""
    path = Path(name)
    if not name or name in BUILT_IN:
        return False
    return path.suffix == SUFFIX or any(path.rglob(f"*{SUFFIX}"))


def _read(paths: Sequence[Path]) -> _Row:
    return _Row([read(path) for path in paths])


def _tokenised(tokenizer: Tokenizer, documents: Sequence[bytes]) -> _Row:
    """The tokens of documents, made once and kept."""
    if not documents:
        return _Row([])
    content = hashlib.sha256(b"".join(hashlib.sha256(d).digest() for d in documents))
    content.update(tokenizer.identity.encode())
    kept = machine.cache_folder() / "tokens" / f"{content.hexdigest()}.npy"
    with contextlib.suppress(OSError, ValueError, EOFError):  # nothing is there, or it is damaged
        tokens = np.load(kept, mmap_mode="r")
        if tokens.dtype == np.uint16 and tokens.ndim == 1:
            return _Row([tokens])
    tokens = tokenizer.encode(documents)
    with contextlib.suppress(OSError), machine.atomic_output(kept) as part:
        np.save(part, tokens)
    return _Row([tokens])


def _tokenizer(text: Text, documents: Sequence[bytes]) -> Tokenizer:
    if text.tokenizer != "bpe" and text.vocabulary is not None:
        raise ValueError(f"vocabulary is for tokenizer 'bpe' and for files of tokens; {text.tokenizer!r} has its own")
    if text.tokenizer == "bytes":
        return tokenizers.Bytes()
    if text.tokenizer != "bpe":
        return tokenizers.read(Path(text.tokenizer))
    content = hashlib.sha256(b"".join(hashlib.sha256(d).digest() for d in documents)).hexdigest()
    vocabulary = text.vocabulary or VOCABULARY
    return tokenizers.trained(documents, vocabulary, machine.cache_folder() / "tokenizers" / f"{content}-{vocabulary}")


def _parted(row: _Row, validation: _Row, most: int) -> tuple[np.ndarray, np.ndarray, int]:
    """What is trained on, what is validated on (the last tokens unless there is a row for it), and what there is."""
    cut = len(row) if len(validation) else len(row) - int(VALIDATION * len(row))
    train = row.thinned(0, cut, most)
    apart = validation.thinned(0, len(validation), most) if len(validation) else row.thinned(cut, len(row), most)
    return train, apart, cut
