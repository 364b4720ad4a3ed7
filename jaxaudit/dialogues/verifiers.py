"""Verifiers of text answers, which read the bytes of tokens inside compiled programs, without decoding to strings.

The text that is verified is everything after the prompt, including tool results.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxaudit.dialogues import patterns
from jaxaudit.dialogues.patterns import UnusableLine

SPACES = b" \t\n\r\f\v"
NUMBER = re.compile(rb"(-?)(\d[\d,]*)(?:\.(\d+))?")

MAX_DIGITS = 9
"""The largest number of digits of a number before the decimal point, and after it."""


class Verifier(Protocol):
    """Decides whether a text gives the right answer, by reading it byte by byte."""

    def prepare(self, answers: Sequence[str]) -> Any:
        """Returns the answers of all lines as a pytree of arrays with a leading axis of lines.

        Raises:
          UnusableLine: The verifier cannot use an answer.
        """

    def target(self, answers: Any, line: jax.Array) -> Any:
        """Returns the answer of one line from what `prepare` returned."""

    def begin(self, target: Any) -> Any:
        """Returns the state before the first byte."""

    def read(self, target: Any, state: Any, byte: jax.Array) -> Any:
        """Returns the state after one more byte of the text, int32."""

    def correct(self, target: Any, state: Any) -> jax.Array:
        """Returns whether the text is right if it ends here, bool."""


@struct.dataclass
class AnswerBytes:
    """An answer.

    Attributes:
      text: The bytes, uint8 `[L]`, padded at the end, or at the beginning if `Contains` compares them.
      size: The number of bytes, int32.
    """

    text: Any
    size: Any


def _answer_bytes(answers: Sequence[str], pad_left: bool) -> AnswerBytes:
    stripped = [answer.encode().strip(SPACES) for answer in answers]
    for line, text in enumerate(stripped):
        if not text:
            raise UnusableLine(line, "the answer is empty")
    longest = max(map(len, stripped))
    padded = [text.rjust(longest, b"\0") if pad_left else text.ljust(longest, b"\0") for text in stripped]
    rows = np.frombuffer(b"".join(padded), np.uint8).reshape(len(answers), longest)
    return AnswerBytes(rows, np.array([len(text) for text in stripped], np.int32))


def _row(answers: Any, line: jax.Array) -> Any:
    return jax.tree.map(lambda rows: jnp.asarray(rows)[line], answers)


def _is_space(byte: jax.Array) -> jax.Array:
    return (byte == 32) | ((byte >= 9) & (byte <= 13))


@struct.dataclass
class _Matched:
    """The progress of `Exact`.

    Attributes:
      count: The number of bytes of the answer that the text has so far, int32.
      matches: Whether the text so far is a beginning of the answer, bool.
    """

    count: Any
    matches: Any


class Exact:
    """The text equals the answer, except for white space before and after it."""

    def prepare(self, answers: Sequence[str]) -> AnswerBytes:
        """Returns the answers as arrays, one row for each line."""
        return _answer_bytes(answers, pad_left=False)

    target = staticmethod(_row)

    def begin(self, target: AnswerBytes) -> _Matched:
        """Returns the state before the first byte."""
        return _Matched(jnp.int32(0), jnp.ones((), bool))

    def read(self, target: AnswerBytes, state: _Matched, byte: jax.Array) -> _Matched:
        """Returns the state after one more byte: the answer's next byte, white space around it, or a mismatch."""
        complete = state.count == target.size
        is_next = ~complete & (jnp.asarray(target.text)[jnp.minimum(state.count, target.text.size - 1)] == byte)
        around = (complete | (state.count == 0)) & _is_space(byte)
        return _Matched(state.count + is_next.astype(jnp.int32), state.matches & (is_next | around))

    def correct(self, target: AnswerBytes, state: _Matched) -> jax.Array:
        """Returns whether the text is the whole answer and nothing else, bool."""
        return state.matches & (state.count == target.size)


@struct.dataclass
class _Window:
    """The progress of `Contains`.

    Attributes:
      bytes: The last bytes of the text, int32 `[L]`, -1 before its beginning.
      found: Whether the answer has occurred, bool.
    """

    bytes: Any
    found: Any


class Contains:
    """Accepts a text that contains the answer."""

    def prepare(self, answers: Sequence[str]) -> AnswerBytes:
        """Returns the answers as arrays, one row for each line."""
        return _answer_bytes(answers, pad_left=True)

    target = staticmethod(_row)

    def begin(self, target: AnswerBytes) -> _Window:
        """Returns the state before the first byte."""
        return _Window(jnp.full(target.text.shape, -1, jnp.int32), jnp.zeros((), bool))

    def read(self, target: AnswerBytes, state: _Window, byte: jax.Array) -> _Window:
        """Returns the state after one more byte."""
        latest = jnp.append(state.bytes[1:], byte.astype(jnp.int32))
        padding = jnp.arange(latest.size) < latest.size - target.size
        return _Window(latest, state.found | (padding | (latest == target.text)).all())

    def correct(self, target: AnswerBytes, state: _Window) -> jax.Array:
        """Returns whether the text so far is right, bool."""
        return state.found


@struct.dataclass
class _Number:
    """A decimal number.

    Attributes:
      whole: The digits before the point, int32.
      billionths: The digits after the point, in billionths, int32.
      negative: Whether it has a minus sign, bool.
      fits: Whether it has at most `MAX_DIGITS` digits before and after the point, bool.
    """

    whole: Any
    billionths: Any
    negative: Any
    fits: Any


@struct.dataclass
class _Reading:
    """The progress of `Number`.

    Attributes:
      number: The latest number.
      place: The position in that number, int32: `OUTSIDE`, `SIGN`, `WHOLE`, `POINT` or `FRACTION`.
      decimals: How many digits after its point have been read, int32.
      found: Whether the text has a number, bool.
    """

    number: _Number
    place: Any
    decimals: Any
    found: Any


OUTSIDE, SIGN, WHOLE, POINT, FRACTION = range(5)
"""Positions in a number: outside of it, after its sign, before its point, after its point, after a decimal."""


class Number:
    """The last number of the text equals the last number of the answer; commas are ignored, as in 1,234.5."""

    def prepare(self, answers: Sequence[str]) -> _Number:
        """Returns the answers as arrays, one row for each line."""
        rows = []
        for line, answer in enumerate(answers):
            matches = NUMBER.findall(answer.encode())
            if not matches:
                raise UnusableLine(line, "the answer has no number")
            sign, whole, fraction = matches[-1]
            whole, fraction = whole.replace(b",", b"").lstrip(b"0"), fraction.rstrip(b"0")
            if max(len(whole), len(fraction)) > MAX_DIGITS:
                limit = f"{MAX_DIGITS} digits before or after its point"
                raise UnusableLine(line, f"the answer has a number of more than {limit}")
            rows.append((int(whole or b"0"), int(fraction.ljust(MAX_DIGITS, b"0")), bool(sign)))
        wholes, billionths, negative = (np.array(column) for column in zip(*rows, strict=True))
        return _Number(wholes.astype(np.int32), billionths.astype(np.int32), negative, np.ones(len(rows), bool))

    target = staticmethod(_row)

    def begin(self, target: _Number) -> _Reading:
        """Returns the state before the first byte."""
        zero, false = jnp.int32(0), jnp.zeros((), bool)
        return _Reading(_Number(zero, zero, false, false), jnp.int32(OUTSIDE), zero, false)

    def read(self, target: _Number, state: _Reading, byte: jax.Array) -> _Reading:
        """Returns the state after one more byte, which may continue or end the latest number, or begin another."""
        byte, last, place = byte.astype(jnp.int32), state.number, state.place
        value = byte - ord("0")
        digit = (value >= 0) & (value <= 9)
        begins = digit & (place <= SIGN)
        extends_whole = digit & (place == WHOLE)
        extends_fraction = digit & (place >= POINT)
        has_room = last.whole < 10 ** (MAX_DIGITS - 1)
        decimals = jnp.where(extends_fraction, state.decimals + 1, jnp.where(begins, 0, state.decimals))
        powers = jnp.asarray([0, *(10 ** np.arange(MAX_DIGITS - 1, -1, -1)), 0], jnp.int32)
        index = jnp.arange(powers.size)
        billionths = value * jnp.where(index == jnp.minimum(decimals, MAX_DIGITS + 1), powers, 0).sum()
        # A nonzero digit after the last billionth makes the number one that does not fit.
        fits = ~(extends_whole & ~has_room) & ~(extends_fraction & (decimals > MAX_DIGITS) & (value > 0))
        number = _Number(
            whole=jnp.where(begins, value, jnp.where(extends_whole & has_room, last.whole * 10 + value, last.whole)),
            billionths=jnp.where(begins, 0, jnp.where(extends_fraction, last.billionths + billionths, last.billionths)),
            negative=jnp.where(begins, place == SIGN, last.negative),
            fits=jnp.where(begins, True, last.fits & fits),
        )
        comma = (place == WHOLE) & (byte == ord(","))
        is_point = (place == WHOLE) & (byte == ord("."))
        is_sign = byte == ord("-")
        other_place = jnp.where(is_sign, SIGN, jnp.where(is_point, POINT, jnp.where(comma, WHOLE, OUTSIDE)))
        next_place = jnp.where(begins | extends_whole, WHOLE, jnp.where(extends_fraction, FRACTION, other_place))
        return _Reading(
            jax.tree.map(lambda new, old: new.astype(old.dtype), number, last),
            next_place.astype(jnp.int32),
            decimals.astype(jnp.int32),
            state.found | digit,
        )

    def correct(self, target: _Number, state: _Reading) -> jax.Array:
        """Returns whether the latest number equals the answer, bool; -0 equals 0."""
        number = state.number
        same = (number.whole == target.whole) & (number.billionths == target.billionths)
        zero = (number.whole == 0) & (number.billionths == 0)
        return state.found & number.fits & same & (zero | (number.negative == target.negative))


class Regex:
    """The text has a match of the answer, a regular expression."""

    def prepare(self, answers: Sequence[str]) -> dict[str, np.ndarray]:
        """Returns the answers as arrays, one row for each line."""
        try:
            return vars(patterns.compile_patterns(answers))
        except UnusableLine as error:
            raise UnusableLine(error.line, f"the answer {error}") from None

    def target(self, answers: dict[str, Any], line: jax.Array) -> dict[str, Any]:
        """Returns the table of all patterns with the initial state of the line's pattern."""
        return {**answers, "starts": jnp.asarray(answers["starts"])[line]}

    def begin(self, target: dict[str, Any]) -> jax.Array:
        """Returns the state before the first byte: int32 scalar, a row of `target["table"]`."""
        return target["starts"]

    def read(self, target: dict[str, Any], state: jax.Array, byte: jax.Array) -> jax.Array:
        """Returns the state after one more byte."""
        return jnp.asarray(target["table"])[state, byte].astype(jnp.int32)

    def correct(self, target: dict[str, Any], state: jax.Array) -> jax.Array:
        """Returns whether the text so far is right, bool."""
        return jnp.asarray(target["accepts"])[state]


VERIFIERS: dict[str, Verifier] = {"exact": Exact(), "contains": Contains(), "number": Number(), "regex": Regex()}
"""The verifiers by the names that specs use."""
