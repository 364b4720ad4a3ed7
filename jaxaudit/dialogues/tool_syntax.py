"""Calls to a calculator in text, such as <<12*34>>, recognised and evaluated byte by byte in compiled programs."""

from __future__ import annotations

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct

from jaxaudit.dialogues.protocol import NO_TOKEN

CALL = re.compile(rb"<<[^<>]*>>")

MAX_DIGITS = 9
"""The largest number of digits of an operand."""

MAX_RESULT = 2**31 - 1
"""The largest absolute value of a result, which is an int32."""

OUTSIDE, OPENING, OPENED, INSIDE, CLOSING = range(5)
"""Positions in a call: before it, after the first "<", after the second "<", further content, after the first ">"."""


@struct.dataclass
class Call:
    """The state of the recogniser of calls.

    Attributes:
      place: The position in a call, int32: `OUTSIDE`, `OPENING`, `OPENED`, `INSIDE` or `CLOSING`.
      first: The absolute value of the first operand, int32.
      operator: The byte of the operator, int32; `NO_TOKEN` before it is read.
      number: The absolute value of the current operand, int32.
      written: The number of its digits so far, int32.
      negative: Whether the current operand has a minus sign, bool.
      first_negative: Whether the first operand has a minus sign, bool.
      valid: Whether the call so far is well-formed, bool.
      complete: Whether a call has been completed since this field was reset, bool.
      result: The result of the latest call, int32.
      failed: Whether the latest call has no result, bool.
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


def initial_call() -> Call:
    zero, false = jnp.int32(0), jnp.zeros((), bool)
    return Call(
        place=jnp.int32(OUTSIDE),
        first=zero,
        operator=jnp.int32(NO_TOKEN),
        number=zero,
        written=zero,
        negative=false,
        first_negative=false,
        valid=false,
        complete=false,
        result=zero,
        failed=false,
    )


def read_byte(call: Call, byte: jax.Array) -> Call:
    """Returns the state after one more byte, int32.

    A call has two whole numbers of at most 9 digits, each with or without a minus sign, and one of + - * / between
    them; spaces are ignored. A call with any other content, with a result beyond 32 bits, or with a division that has a
    remainder fails.
    """
    byte = byte.astype(jnp.int32)
    is_less, is_more = byte == ord("<"), byte == ord(">")
    opened = is_less & ((call.place == OPENING) | (call.place == OPENED))
    closed = is_more & (call.place == CLOSING)
    in_call = (call.place == OPENED) | (call.place == INSIDE)
    content = in_call & ~is_less & ~is_more
    is_digit = content & (byte >= ord("0")) & (byte <= ord("9"))
    is_operator = (byte == ord("+")) | (byte == ord("-")) | (byte == ord("*")) | (byte == ord("/"))
    operator_read = content & is_operator & (call.written > 0) & (call.operator < 0)
    sign_read = content & (byte == ord("-")) & (call.written == 0) & ~call.negative
    fits = call.written < MAX_DIGITS
    well_formed = (is_digit & fits) | operator_read | sign_read | (content & (byte == ord(" ")))
    result, possible = _evaluate(call)
    valid = possible & call.valid & (call.written > 0) & (call.operator >= 0)
    number_begins = opened | operator_read
    place = jnp.where(is_less, OPENING, jnp.where(is_more & in_call, CLOSING, jnp.where(content, INSIDE, OUTSIDE)))
    place = jnp.where(opened, OPENED, place)
    return replace(
        call,
        place=place.astype(jnp.int32),
        first=jnp.where(operator_read, call.number, call.first),
        operator=jnp.where(opened, NO_TOKEN, jnp.where(operator_read, byte, call.operator)),
        number=jnp.where(number_begins, 0, jnp.where(is_digit & fits, call.number * 10 + byte - ord("0"), call.number)),
        written=jnp.where(number_begins, 0, call.written + (is_digit & fits).astype(jnp.int32)),
        negative=~number_begins & (call.negative | sign_read),
        first_negative=jnp.where(operator_read, call.negative, call.first_negative & ~opened),
        valid=opened | (call.valid & (~content | well_formed)),
        complete=call.complete | closed,
        result=jnp.where(closed, result, call.result),
        failed=jnp.where(closed, ~valid, call.failed),
    )


def _evaluate(call: Call) -> tuple[jax.Array, jax.Array]:
    """Returns the result of a well-formed call, and whether it is a whole number of 32 bits."""
    first = jnp.where(call.first_negative, -call.first, call.first)
    second = jnp.where(call.negative, -call.number, call.number)
    divisor = jnp.where(second == 0, 1, second)
    multiplies, divides = call.operator == ord("*"), call.operator == ord("/")
    # |first x second| <= MAX_RESULT, without the product.
    fits = (call.number == 0) | (call.first <= MAX_RESULT // jnp.maximum(call.number, 1))
    divisible = (second != 0) & (jax.lax.rem(first, divisor) == 0)
    sums = jnp.where(call.operator == ord("+"), first + second, first - second)
    result = jnp.where(multiplies, first * second, jnp.where(divides, jax.lax.div(first, divisor), sums))
    return result, jnp.where(multiplies, fits, jnp.where(divides, divisible, True))


def evaluate_call(call: bytes) -> int | None:
    """Returns the result of a call from "<<" to ">>", as `read_byte` computes it, in plain Python; None if it fails."""
    match = re.fullmatch(rb"<<(-?)(\d{1,9})([-+*/])(-?)(\d{1,9})>>", call.replace(b" ", b""))
    if match is None:
        return None
    first = int(match[1] + match[2])
    second = int(match[4] + match[5])
    operator = match[3]
    if operator == b"/":
        return first // second if second and first % second == 0 else None
    result = {b"+": first + second, b"-": first - second, b"*": first * second}[operator]
    return result if abs(result) <= MAX_RESULT else None


ANNOTATION = re.compile(r"<<([^<>=]*)=[^<>]*>>")
"""A calculator annotation of GSM8K, such as <<3*7=21>>."""


def strip_annotations(text: str, tool: bool) -> str:
    """Removes calculator annotations; with the tool, "3*7 = <<3*7=21>>21" becomes the call "3*7 = <<3*7>>21" instead.

    With the tool, an annotation is still removed if the tool cannot evaluate it, or if its result does not follow it.
    """
    return ANNOTATION.sub(lambda match: _call_or_nothing(match) if tool else "", text)


def _call_or_nothing(annotation: re.Match[str]) -> str:
    call = f"<<{annotation[1]}>>"
    result = evaluate_call(call.encode())
    following = annotation.string[annotation.end() :]
    return call if result is not None and re.match(rf"{result}(?!\d)", following) else ""
