"""Hugging Face's folders of tokenizers: byte-level pairs in `tokenizer.json`, or in `vocab.json` and `merges.txt`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxaudit.runtime.files import MAX_FILE_BYTES, read_object

WHOLE = "tokenizer.json"
PARTS = ("vocab.json", "merges.txt")
CONFIG = "tokenizer_config.json"

ENDS_OF_TEXT = ("<|endoftext|>", "</s>")
"""What ends a text where `tokenizer_config.json` has no eos_token: GPT-2's token, or RoBERTa's."""

OTHERS = {
    "spiece.model": "sentencepiece's",
    "sentencepiece.bpe.model": "sentencepiece's",
    "tokenizer.model": "sentencepiece's, or tiktoken's",
    "vocab.txt": "WordPiece's, as BERT has it",
}
"""Files of tokenizers that are of another kind."""

ALLOWED = 'give a folder with a tokenizer like GPT-2\'s, or "bytes"'


class TokenizerFiles(NamedTuple):
    """A folder's byte-level pairs.

    Attributes:
      encoder: of `tokenizers`.
      end_of_text: how the token is written that ends a text.
      added: tokens that are written as they are, not in the signs of bytes.
      files: that tell it from every other, in this order.
    """

    encoder: Any
    end_of_text: str
    added: frozenset[str]
    files: tuple[Path, ...]


def find(folder: Path) -> TokenizerFiles:
    """The byte-level pairs in a folder; those of `vocab.json` and `merges.txt` where it has all three files.

    Raises ValueError, in one sentence, where there are none, or they cannot be read.
    """
    parts, whole = tuple(folder / name for name in PARTS), folder / WHOLE
    if all(part.is_file() for part in parts):
        return _of_parts(folder, parts)
    if whole.is_file():
        return _of_whole(folder, whole)
    raise ValueError(f"tokenizer {str(folder)!r}: {_missing(folder)}")


def _missing(folder: Path) -> str:
    """Why a folder has no byte-level pairs: what is missing, or of which kind its tokenizer is."""
    if not folder.is_dir():
        return f"there is no folder {folder}"
    there = [name for name in PARTS if (folder / name).is_file()]
    if there:
        return f"there is no file {next(folder / name for name in PARTS if name not in there)}"
    for name, whose in OTHERS.items():
        if (folder / name).is_file():
            return f"{name} is {whose}, and byte-level pairs can be read; {ALLOWED}"
    return f"there is no file {folder / WHOLE}, and no {' and '.join(PARTS)}"


def _of_parts(folder: Path, parts: tuple[Path, ...]) -> TokenizerFiles:
    from tokenizers import ByteLevelBPETokenizer

    for part in parts:
        if part.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"{part} is larger than {MAX_FILE_BYTES >> 20} MiB, which no such file is")
    try:
        encoder = ByteLevelBPETokenizer(*map(str, parts))
    except Exception as error:  # of the library's own kinds
        raise ValueError(f"tokenizer {str(folder)!r} cannot be read: {_first(error)}") from None
    return TokenizerFiles(encoder, _end_of_text(folder, encoder, _config(folder)), frozenset(), parts)


def _of_whole(folder: Path, file: Path) -> TokenizerFiles:
    """What is in the file is looked at first, and only what is known is handed on to the library."""
    from tokenizers import Tokenizer

    written, config = read_object(file), _config(folder)
    for misfit in _misfits(written, config):
        raise ValueError(f"tokenizer {str(folder)!r} is none of GPT-2's kind: {misfit}; {ALLOWED}")
    added: list[dict[str, Any]] = written.get("added_tokens") or []
    model = {**written["model"], "type": "BPE"}
    known = {"version": "1.0", "added_tokens": added, "pre_tokenizer": written["pre_tokenizer"], "model": model}
    try:
        encoder = Tokenizer.from_str(json.dumps(known))
    except Exception as error:  # of the library's own kinds
        raise ValueError(f"{file} cannot be read: {_first(error)}") from None
    for token in added:
        if encoder.token_to_id(token["content"]) != token["id"]:
            raise ValueError(f"{file} is damaged: no token {token['content'][:50]!r} can have the number {token['id']}")
    encoder.encode_special_tokens = True  # one that is spelled out in a document is text like all else
    names = frozenset(token["content"] for token in added)
    return TokenizerFiles(encoder, _end_of_text(folder, encoder, config), names, (file,))


def _misfits(written: dict[str, Any], config: dict[str, Any]) -> Iterator[str]:
    """Why tokens would be others than those of byte-level pairs as GPT-2 has them."""
    model, words = _table(written.get("model")), _table(written.get("pre_tokenizer"))
    kind = model.get("type", "BPE" if "merges" in model else None)
    if kind != "BPE":
        yield f"its model is of type {_shown(kind)}, not byte-level pairs (BPE)"
    if model.get("byte_fallback"):
        yield "its pairs are of characters (byte_fallback), as sentencepiece's are, not of bytes"
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            yield f"it marks parts of words ({name} {_shown(model[name])})"
    if model.get("dropout"):
        yield f"it leaves out pairs at random (dropout {_shown(model['dropout'])})"
    if written.get("normalizer"):
        yield f"it changes texts before they are split (normalizer {_kinds(written['normalizer'], 'normalizers')})"
    if words.get("type") != "ByteLevel" or not words.get("use_regex", True):
        yield f"it splits texts otherwise (pre_tokenizer {_kinds(words, 'pretokenizers')})"
    if words.get("add_prefix_space", True) or config.get("add_prefix_space"):
        yield "it puts a space before every text (add_prefix_space)"


def _kinds(part: Any, parts: str) -> str:
    """The type of a part of a tokenizer, or of each of its own parts."""
    several = _table(part).get(parts)
    inner = several if isinstance(several, list) else [part]
    return ", ".join(_shown(_table(one).get("type")) for one in inner[:5])


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _first(error: Exception) -> str:
    """The begin of an error's words, which may have all of a file's in them."""
    return " ".join(str(error)[:200].split())


def _shown(value: Any) -> str:
    """A value in a sentence: of lists and tables, which may be deep, no more than what they are."""
    return f"a {type(value).__name__}" if isinstance(value, list | dict) else repr(value)[:50]


def _config(folder: Path) -> dict[str, Any]:
    return read_object(folder / CONFIG) if (folder / CONFIG).is_file() else {}


def _end_of_text(folder: Path, encoder: Any, config: dict[str, Any]) -> str:
    """How the token is written that ends a text. Raises ValueError where there is none."""
    named = config.get("eos_token")
    named = _table(named).get("content", named)
    for token in (named, *ENDS_OF_TEXT):
        if isinstance(token, str) and encoder.token_to_id(token) is not None:
            return token
    raise ValueError(
        f"tokenizer {str(folder)!r} has no token that ends a text: no {' or '.join(map(repr, ENDS_OF_TEXT))}, and none "
        f"that {CONFIG} names as its eos_token"
    )
