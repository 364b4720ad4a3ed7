"""Calls to a calculator in text, <<12*34>>, found byte by byte inside a program."""

from __future__ import annotations

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct

from jaxaudit.dialogues.protocol import NOTHING

CALL = re.compile(rb"<<[^<>]*>>")
OPERATORS = b"+-*/"

MOST_DIGITS = 9
"""Of an operand."""

LARGEST = 2**31 - 1
"""A result."""

OUTSIDE, OPENING, OPENED, INSIDE, CLOSING = range(5)
"""Places in a call: before it, after its first "<", after its second, further within it, after its first ">"."""


@struct.dataclass
class Call:
    """A call that may be under way.

    Attributes:
      place: in it, int32.
      first, operator: int32; the operator is a byte, `NOTHING` before it is written.
      number, written: the operand that is being written, and how many digits of it are, int32.
      negative, first_negative: bool, whether a sign stands before the operands.
      valid: bool, whether all that was written so far can be calculated.
      complete: bool, whether a call was completed by what was read since this was reset.
      result: of the latest call, int32.
      failed: bool, whether it has none.
    """

    place: jax.Array
    first: jax.Array
    operator: jax.Array
    number: jax.Array
    written: jax.Array
    negative: jax.Array
    first_negative: jax.Array
    valid: jax.Array
    complete: jax.Array
    result: jax.Array
    failed: jax.Array


def begin() -> Call:
    zero, no = jnp.int32(0), jnp.zeros((), bool)
    return Call(
        place=jnp.int32(OUTSIDE),
        first=zero,
        operator=jnp.int32(NOTHING),
        number=zero,
        written=zero,
        negative=no,
        first_negative=no,
        valid=no,
        complete=no,
        result=zero,
        failed=no,
    )


def read(call: Call, byte: jax.Array) -> Call:
    """The call after one more byte, int32.

    Between "<<" and ">>" there may be two whole numbers of at most 9 digits, with signs or without, and + - * or /
    between them; spaces do not matter. Anything else, a result beyond 32 bits, and a division that leaves something
    make a call that fails.
    """
    byte = byte.astype(jnp.int32)
    less, more = byte == ord("<"), byte == ord(">")
    opens = less & ((call.place == OPENING) | (call.place == OPENED))
    closes = more & (call.place == CLOSING)
    within = (call.place == OPENED) | (call.place == INSIDE)
    inside = within & ~less & ~more
    digit = inside & (byte >= ord("0")) & (byte <= ord("9"))
    is_operator = (byte == ord("+")) | (byte == ord("-")) | (byte == ord("*")) | (byte == ord("/"))
    middle = inside & is_operator & (call.written > 0) & (call.operator < 0)
    signed = inside & (byte == ord("-")) & (call.written == 0) & ~call.negative
    fits = call.written < MOST_DIGITS
    understood = (digit & fits) | middle | signed | (inside & (byte == ord(" ")))
    result, possible = _evaluated(call)
    valid = possible & call.valid & (call.written > 0) & (call.operator >= 0)
    begins = opens | middle
    place = jnp.where(less, OPENING, jnp.where(more & within, CLOSING, jnp.where(inside, INSIDE, OUTSIDE)))
    place = jnp.where(opens, OPENED, place)
    return replace(
        call,
        place=place.astype(jnp.int32),
        first=jnp.where(middle, call.number, call.first),
        operator=jnp.where(opens, NOTHING, jnp.where(middle, byte, call.operator)),
        number=jnp.where(begins, 0, jnp.where(digit & fits, call.number * 10 + byte - ord("0"), call.number)),
        written=jnp.where(begins, 0, call.written + (digit & fits).astype(jnp.int32)),
        negative=~begins & (call.negative | signed),
        first_negative=jnp.where(middle, call.negative, call.first_negative & ~opens),
        valid=opens | (call.valid & (~inside | understood)),
        complete=call.complete | closes,
        result=jnp.where(closes, result, call.result),
        failed=jnp.where(closes, ~valid, call.failed),
    )


def _evaluated(call: Call) -> tuple[jax.Array, jax.Array]:
    """The result, and whether there is one."""
    first = jnp.where(call.first_negative, -call.first, call.first)
    second = jnp.where(call.negative, -call.number, call.number)
    divisor = jnp.where(second == 0, 1, second)
    times, over = call.operator == ord("*"), call.operator == ord("/")
    # |first x second| <= LARGEST, without the product.
    small = (call.number == 0) | (call.first <= LARGEST // jnp.maximum(call.number, 1))
    even = (second != 0) & (jax.lax.rem(first, divisor) == 0)
    sums = jnp.where(call.operator == ord("+"), first + second, first - second)
    result = jnp.where(times, first * second, jnp.where(over, jax.lax.div(first, divisor), sums))
    return result, jnp.where(times, small, jnp.where(over, even, True))


def evaluated(call: bytes) -> int | None:
    """The result of a call from "<<" to ">>"; None if it fails. What `read` finds, outside of programs."""
    found = re.fullmatch(rb"<<(-?)(\d{1,9})([-+*/])(-?)(\d{1,9})>>", call.replace(b" ", b""))
    if found is None:
        return None
    first = int(found[1] + found[2])
    second = int(found[4] + found[5])
    sign = found[3]
    if sign == b"/":
        return first // second if second and first % second == 0 else None
    result = {b"+": first + second, b"-": first - second, b"*": first * second}[sign]
    return result if abs(result) <= LARGEST else None


ANNOTATION = re.compile(r"<<([^<>=]*)=[^<>]*>>")


def left_out(text: str, tool: bool) -> str:
    """A text without its annotations; with the tool, those that it calculates are calls: "3*7 = <<3*7>>21".

    One that the tool cannot calculate, or whose result is not what follows, is left out there too.
    """
    return ANNOTATION.sub(lambda found: _call(found) if tool else "", text)


def _call(found: re.Match[str]) -> str:
    """The call that an annotation is, or nothing."""
    call = f"<<{found[1]}>>"
    result, behind = evaluated(call.encode()), found.string[found.end() :]
    follows = result is not None and re.match(rf"{result}(?!\d)", behind) is not None
    return call if follows else ""
