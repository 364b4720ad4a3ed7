"""The lines of a file as arrays of tokens, calls' results among them as the tool writes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxaudit.dialogues import tool_syntax
from jaxaudit.dialogues.patterns import Unusable
from jaxaudit.dialogues.protocol import NOTHING
from jaxaudit.text.tokenizers import Tokenizer

LONGEST_TOKEN = 32
"""Bytes of a token that are looked at; of a longer one the first ones. GPT-2's longer ones are rules and blanks."""

MOST_SHOWN = 60
"""Characters of a call that a sentence shows."""

ERROR = "error"
"""What a tool that fails says."""


@dataclass(frozen=True)
class Signs:
    """Tokens that are known by name.

    Attributes:
      pieces: the bytes of each token.
      end: of a text.
      digits: from 0 to 9; () without a tool, as are the others.
      minus: of a negative result.
      error: what a tool that fails says.
    """

    pieces: tuple[bytes, ...]
    end: int
    digits: tuple[int, ...] = ()
    minus: int = 0
    error: tuple[int, ...] = ()

    def result(self, call: bytes) -> tuple[str, list[int]]:
        """What the tool says to a call, as text and in tokens."""
        value = tool_syntax.evaluated(call)
        if value is None:
            return ERROR, list(self.error)
        return str(value), [self.minus if sign == "-" else self.digits[int(sign)] for sign in str(value)]


def signs(tokenizer: Tokenizer, tool: bool) -> Signs:
    """The tokens that are known by name. Raises ValueError where there is a tool, and a digit is not one token."""
    pieces = tuple(tokenizer.pieces())
    if not tool:
        return Signs(pieces, tokenizer.end_of_text)
    *single, error = (tokens.tolist() for tokens in encoded(tokenizer, [*"0123456789-", ERROR]))
    if any(len(sign) != 1 for sign in single):
        raise ValueError("a tool's results are written in digits, and in this tokenizer not every digit is one token")
    *digits, minus = (sign[0] for sign in single)
    return Signs(pieces, tokenizer.end_of_text, tuple(digits), minus, tuple(error))


def encoded(tokenizer: Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
    """The tokens of each text, int32, without its end."""
    tokens = tokenizer.encode([text.encode() for text in texts]).astype(np.int32)
    ends = np.flatnonzero(tokens == tokenizer.end_of_text)
    return [part[:-1] for part in np.split(tokens, ends + 1)[:-1]]


def prompts(tokenizer: Tokenizer, texts: Sequence[str], length: int) -> list[np.ndarray]:
    """The tokens of each prompt, int32. Raises Unusable for one that leaves no room in a row of so many slots."""
    found = encoded(tokenizer, texts)
    for line, prompt in enumerate(found):
        if not 0 < len(prompt) < length:
            allowed = f"from 1 to {length - 1} fit in rows of {length} slots"
            raise Unusable(line, f"the prompt has {len(prompt)} tokens; {allowed}")
    return found


def completed(tokenizer: Tokenizer, known: Signs, texts: Sequence[str]) -> list[np.ndarray]:
    """The tokens of texts and their ends, int32, where calls end with a token and results are in digits.

    Raises Unusable for a text with a call that its result does not follow.
    """
    parts = [part for line, text in enumerate(texts) for part in _parts(line, text.encode(), known)]
    tokens = encoded(tokenizer, [part.text for part in parts])
    rows: list[list[int]] = [[] for _ in texts]
    for part, text in zip(parts, tokens, strict=True):
        rows[part.line] += [*text.tolist(), *part.result]
    return [np.array([*row, known.end], np.int32) for row in rows]


@dataclass(frozen=True)
class _Part:
    """A text up to the end of a call, and the tokens of the call's result; or the text behind the last call."""

    line: int
    text: str
    result: list[int]


def _parts(line: int, text: bytes, known: Signs) -> list[_Part]:
    parts, begin = [], 0
    while known.digits and (call := tool_syntax.CALL.search(text, begin)):
        result, tokens = known.result(call[0])
        if not text.startswith(result.encode(), call.end()):
            raise Unusable(line, _unlike(call[0].decode(), result))
        parts.append(_Part(line, text[begin : call.end()].decode(), tokens))
        begin = call.end() + len(result)
    return [*parts, _Part(line, text[begin:].decode(), [])]


def _unlike(call: str, result: str) -> str:
    """Why a call whose result does not follow it cannot be imitated."""
    call = call if len(call) <= MOST_SHOWN else f"{call[:MOST_SHOWN]}..."
    if result != ERROR:
        return f"{call} must be followed by its result, {result}"
    able = "two whole numbers with + - * or / between them, whose result is whole"
    return f"{call} is not what the calculator can do, {able}, so that '{ERROR}' must follow it"


def table(pieces: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """The tokens' bytes, uint8 `[V, B]`, and how many they are, int32 `[V]`."""
    cut = [piece[:LONGEST_TOKEN] for piece in pieces]
    longest = max(map(len, cut))
    found = np.frombuffer(b"".join(piece.ljust(longest, b"\0") for piece in cut), np.uint8)
    return found.reshape(len(cut), longest), np.array([len(piece) for piece in cut], np.int32)


def rows(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Tokens of several texts, int32 `[P, longest]`, `NOTHING` after the last."""
    found = np.full((len(parts), max(map(len, parts))), NOTHING, np.int32)
    for row, part in zip(found, parts, strict=True):
        row[: len(part)] = part
    return found
