"""Dicts as Python prints them, read by a grammar of dicts, lists, numbers and strings: nothing is evaluated."""

from __future__ import annotations

import re
from typing import Any

DEPTH = 8
"""Of dicts and lists in each other."""

TRIED = 16
"""Braces of a text that are tried as the beginning of a dict."""

_TOKEN = re.compile(
    r"""\s*(?:
    (?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
    |(?P<number>[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+](?:inf|nan)\b)
    |(?P<word>[A-Za-z_][\w.]*)
    |(?P<sign>[{}\[\](),:=])
    )""",
    re.VERBOSE,
)
_WORDS = {"True": True, "False": False, "None": None, "nan": float("nan"), "inf": float("inf"), "NaN": float("nan")}
_WORDS |= {"true": True, "false": False, "null": None, "Infinity": float("inf")}
_ESCAPED = re.compile(r"\\(.)")


class NoLiteral(ValueError):
    """A text that the grammar has not."""


def dict_in(text: str) -> tuple[dict[str, Any], int, int] | None:
    """The first dict of a text, with where it begins and ends; None if it has none that is whole."""
    begin = -1
    for _ in range(TRIED):
        begin = text.find("{", begin + 1)
        if begin < 0:
            break
        try:
            value, end = _Reader(text).value(begin, 0)
        except NoLiteral:
            continue
        return (value, begin, end) if value else None
    return None


class _Reader:
    def __init__(self, text: str):
        self._text = text

    def _token(self, at: int) -> tuple[str, str, int]:
        found = _TOKEN.match(self._text, at)
        if found is None:
            raise NoLiteral
        return str(found.lastgroup), found[str(found.lastgroup)], found.end()

    def value(self, at: int, depth: int) -> tuple[Any, int]:
        """The value that begins at a place, and where it ends."""
        if depth > DEPTH:
            raise NoLiteral
        kind, token, end = self._token(at)
        if kind == "string":
            return _ESCAPED.sub(r"\1", token[1:-1]), end
        if kind == "number":
            return _number(token), end
        if kind == "word":
            return self._word(token, end, depth)
        if token == "{":
            return self._dict(end, depth)
        if token in "[(":
            return self._items(end, "]" if token == "[" else ")", depth)
        raise NoLiteral

    def _dict(self, at: int, depth: int) -> tuple[dict[str, Any], int]:
        found: dict[str, Any] = {}
        while True:
            kind, token, end = self._token(at)
            if token == "}" and kind == "sign":
                return found, end
            if kind not in ("string", "number"):
                raise NoLiteral
            name = _ESCAPED.sub(r"\1", token[1:-1]) if kind == "string" else token
            _, colon, end = self._token(end)
            if colon != ":":
                raise NoLiteral
            found[name], end = self.value(end, depth + 1)
            _, token, after = self._token(end)
            if token == ",":
                at = after
            elif token == "}":
                return found, after
            else:
                raise NoLiteral

    def _items(self, at: int, closing: str, depth: int) -> tuple[list[Any], int]:
        found: list[Any] = []
        while True:
            kind, token, end = self._token(at)
            if token == closing and kind == "sign":
                return found, end
            if kind == "word" and self._text[end : end + 1] == "=":  # as in tensor(0.5, device='cuda:0')
                _, end = self.value(end + 1, depth + 1)
            else:
                item, end = self.value(at, depth + 1)
                found.append(item)
            _, token, after = self._token(end)
            if token == ",":
                at = after
            elif token == closing:
                return found, after
            else:
                raise NoLiteral

    def _word(self, word: str, end: int, depth: int) -> tuple[Any, int]:
        """A constant, or a call as of `tensor(0.5)`, which is its first argument."""
        if word in _WORDS:
            return _WORDS[word], end
        if self._text[end : end + 1] != "(":
            raise NoLiteral
        arguments, end = self._items(end + 1, ")", depth + 1)
        return (arguments[0] if arguments else f"{word}()"), end


def _number(token: str) -> int | float:
    try:
        return int(token) if len(token) < 300 else float(token)
    except ValueError:
        return float(token.replace("_", ""))
