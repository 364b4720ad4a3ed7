"""Whether a text is right, found byte by byte inside a program: no text is ever made of tokens again.

The text is all that follows the prompt, what a tool says included.
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
from jaxaudit.dialogues.patterns import Unusable

SPACES = b" \t\n\r\f\v"
NUMBER = re.compile(rb"(-?)(\d[\d,]*)(?:\.(\d+))?")

MOST_DIGITS = 9
"""Of a number before the point, and after it."""


class Verifier(Protocol):
    """Decides whether a text gives the answer that was wanted, reading it byte by byte."""

    def prepared(self, answers: Sequence[str]) -> Any:
        """The wanted answers of all lines, arrays in a pytree. Raises `Unusable` for one that cannot be wanted."""

    def wanted(self, answers: Any, line: jax.Array) -> Any:
        """Returns the wanted answer of one line, from what `prepared` has returned."""

    def begin(self, wanted: Any) -> Any:
        """Returns the state before the first byte."""

    def read(self, wanted: Any, state: Any, byte: jax.Array) -> Any:
        """The state after the text's next byte, int32."""

    def right(self, wanted: Any, state: Any) -> jax.Array:
        """Whether the text is right if it ends here, bool."""


@struct.dataclass
class Wanted:
    """An answer's bytes, uint8 `[L]`, at the row's begin or its end, and how many they are, int32."""

    text: Any
    size: Any


def _texts(answers: Sequence[str], at_end: bool) -> Wanted:
    stripped = [answer.encode().strip(SPACES) for answer in answers]
    for line, text in enumerate(stripped):
        if not text:
            raise Unusable(line, "the answer is empty")
    longest = max(map(len, stripped))
    filled = [text.rjust(longest, b"\0") if at_end else text.ljust(longest, b"\0") for text in stripped]
    rows = np.frombuffer(b"".join(filled), np.uint8).reshape(len(answers), longest)
    return Wanted(rows, np.array([len(text) for text in stripped], np.int32))


def _at(answers: Any, line: jax.Array) -> Any:
    return jax.tree.map(lambda rows: jnp.asarray(rows)[line], answers)


def _is_space(byte: jax.Array) -> jax.Array:
    return (byte == 32) | ((byte >= 9) & (byte <= 13))


@struct.dataclass
class _Matched:
    """Bytes of the answer that were found so far, int32; and whether there was no other, bool."""

    bytes: Any
    well: Any


class Exact:
    """The text is the answer, but for white space before and after it."""

    def prepared(self, answers: Sequence[str]) -> Wanted:
        """Returns arrays of the wanted answers, one row for each line."""
        return _texts(answers, at_end=False)

    wanted = staticmethod(_at)

    def begin(self, wanted: Wanted) -> _Matched:
        """Returns the state before the first byte."""
        return _Matched(jnp.int32(0), jnp.ones((), bool))

    def read(self, wanted: Wanted, state: _Matched, byte: jax.Array) -> _Matched:
        """The answer's next byte is found, or white space is where it may be."""
        complete = state.bytes == wanted.size
        here = ~complete & (jnp.asarray(wanted.text)[jnp.minimum(state.bytes, wanted.text.size - 1)] == byte)
        around = (complete | (state.bytes == 0)) & _is_space(byte)
        return _Matched(state.bytes + here.astype(jnp.int32), state.well & (here | around))

    def right(self, wanted: Wanted, state: _Matched) -> jax.Array:
        """The whole answer was found, and nothing else."""
        return state.well & (state.bytes == wanted.size)


@struct.dataclass
class _Window:
    """The text's last bytes, int32 `[L]`; and whether the answer was among them, bool."""

    bytes: Any
    found: Any


class Contains:
    """The answer stands somewhere in the text."""

    def prepared(self, answers: Sequence[str]) -> Wanted:
        """Returns arrays of the wanted answers, one row for each line."""
        return _texts(answers, at_end=True)

    wanted = staticmethod(_at)

    def begin(self, wanted: Wanted) -> _Window:
        """Returns the state before the first byte."""
        return _Window(jnp.full(wanted.text.shape, -1, jnp.int32), jnp.zeros((), bool))

    def read(self, wanted: Wanted, state: _Window, byte: jax.Array) -> _Window:
        """Returns the state after one more byte."""
        latest = jnp.append(state.bytes[1:], byte.astype(jnp.int32))
        before = jnp.arange(latest.size) < latest.size - wanted.size
        return _Window(latest, state.found | (before | (latest == wanted.text)).all())

    def right(self, wanted: Wanted, state: _Window) -> jax.Array:
        """Returns whether the text so far gives the wanted answer, bool."""
        return state.found


@struct.dataclass
class _Number:
    """A number: the digits before the point as int32, those after it as billionths, its sign, whether it fits."""

    whole: Any
    billionths: Any
    negative: Any
    fits: Any


@struct.dataclass
class _Reading:
    """The latest number, the place in it, digits after its point, and whether there was one."""

    number: _Number
    place: Any
    decimals: Any
    found: Any


OUTSIDE, SIGN, WHOLE, POINT, FRACTION = range(5)
"""Places in a number."""


class Number:
    """The text's last number equals the answer's last number; commas in numbers are left out, as in 1,234.5."""

    def prepared(self, answers: Sequence[str]) -> _Number:
        """Returns arrays of the wanted answers, one row for each line."""
        rows = []
        for line, answer in enumerate(answers):
            found = NUMBER.findall(answer.encode())
            if not found:
                raise Unusable(line, "the answer has no number")
            sign, whole, fraction = found[-1]
            whole, fraction = whole.replace(b",", b"").lstrip(b"0"), fraction.rstrip(b"0")
            if max(len(whole), len(fraction)) > MOST_DIGITS:
                allowed = f"{MOST_DIGITS} digits before or after its point"
                raise Unusable(line, f"the answer has a number of more than {allowed}")
            rows.append((int(whole or b"0"), int(fraction.ljust(MOST_DIGITS, b"0")), bool(sign)))
        whole_, billionths, negative = (np.array(column) for column in zip(*rows, strict=True))
        return _Number(whole_.astype(np.int32), billionths.astype(np.int32), negative, np.ones(len(rows), bool))

    wanted = staticmethod(_at)

    def begin(self, wanted: _Number) -> _Reading:
        """Returns the state before the first byte."""
        zero, no = jnp.int32(0), jnp.zeros((), bool)
        return _Reading(_Number(zero, zero, no, no), jnp.int32(OUTSIDE), zero, no)

    def read(self, wanted: _Number, state: _Reading, byte: jax.Array) -> _Reading:
        """The latest number goes on, ends, or another begins."""
        byte, last, place = byte.astype(jnp.int32), state.number, state.place
        value = byte - ord("0")
        digit = (value >= 0) & (value <= 9)
        new = digit & (place <= SIGN)
        longer = digit & (place == WHOLE)
        finer = digit & (place >= POINT)
        room = last.whole < 10 ** (MOST_DIGITS - 1)
        decimals = jnp.where(finer, state.decimals + 1, jnp.where(new, 0, state.decimals))
        powers = jnp.asarray([0, *(10 ** np.arange(MOST_DIGITS - 1, -1, -1)), 0], jnp.int32)
        share = value * jnp.where(jnp.arange(powers.size) == jnp.minimum(decimals, MOST_DIGITS + 1), powers, 0).sum()
        # A digit further behind than there is room for makes another number, unless it is zero.
        fits = ~(longer & ~room) & ~(finer & (decimals > MOST_DIGITS) & (value > 0))
        number = _Number(
            whole=jnp.where(new, value, jnp.where(longer & room, last.whole * 10 + value, last.whole)),
            billionths=jnp.where(new, 0, jnp.where(finer, last.billionths + share, last.billionths)),
            negative=jnp.where(new, place == SIGN, last.negative),
            fits=jnp.where(new, True, last.fits & fits),
        )
        within = (place == WHOLE) & (byte == ord(","))
        point = (place == WHOLE) & (byte == ord("."))
        sign = byte == ord("-")
        other = jnp.where(sign, SIGN, jnp.where(point, POINT, jnp.where(within, WHOLE, OUTSIDE)))
        goes_on = jnp.where(new | longer, WHOLE, jnp.where(finer, FRACTION, other))
        return _Reading(
            jax.tree.map(lambda new, old: new.astype(old.dtype), number, last),
            goes_on.astype(jnp.int32),
            decimals.astype(jnp.int32),
            state.found | digit,
        )

    def right(self, wanted: _Number, state: _Reading) -> jax.Array:
        """The latest number is the answer's; zero has no sign."""
        number = state.number
        same = (number.whole == wanted.whole) & (number.billionths == wanted.billionths)
        zero = (number.whole == 0) & (number.billionths == 0)
        return state.found & number.fits & same & (zero | (number.negative == wanted.negative))


class Regex:
    """The answer is a regular expression, and the text has a match of it."""

    def prepared(self, answers: Sequence[str]) -> dict[str, np.ndarray]:
        """Returns arrays of the wanted answers, one row for each line."""
        try:
            return vars(patterns.compiled(answers))
        except Unusable as error:
            raise Unusable(error.line, f"the answer {error}") from None

    def wanted(self, answers: dict[str, Any], line: jax.Array) -> dict[str, Any]:
        """The table of all, and where the line's begins."""
        return {**answers, "starts": jnp.asarray(answers["starts"])[line]}

    def begin(self, wanted: dict[str, Any]) -> jax.Array:
        """Returns the state before the first byte."""
        return wanted["starts"]

    def read(self, wanted: dict[str, Any], state: jax.Array, byte: jax.Array) -> jax.Array:
        """Returns the state after one more byte."""
        return jnp.asarray(wanted["table"])[state, byte].astype(jnp.int32)

    def right(self, wanted: dict[str, Any], state: jax.Array) -> jax.Array:
        """Returns whether the text so far gives the wanted answer, bool."""
        return jnp.asarray(wanted["accepts"])[state]


VERIFIERS: dict[str, Verifier] = {"exact": Exact(), "contains": Contains(), "number": Number(), "regex": Regex()}
"""By name."""
