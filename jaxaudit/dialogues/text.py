"""Prompts and answers from a file, in a tokenizer's tokens, checked by a verifier, with or without a tool."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxaudit.dialogues import lines, tool_syntax
from jaxaudit.dialogues.arithmetic import digits, joined
from jaxaudit.dialogues.drawing import DEMONSTRATION, below, looked_up
from jaxaudit.dialogues.lines import Line
from jaxaudit.dialogues.patterns import Unusable
from jaxaudit.dialogues.protocol import NOTHING, Dialogue, Reply
from jaxaudit.dialogues.verifiers import VERIFIERS
from jaxaudit.registry import check, dialogues
from jaxaudit.text import tokenizers
from jaxaudit.text.tokenizers import Tokenizer

LONGEST_TOKEN = 32
"""Bytes of a token that are looked at; of a longer one the first ones. GPT-2's longer ones are rules and blanks."""

MOST_DIGITS = 10
"""Of a tool's result."""

ERROR = "error"
"""What a tool that fails says."""

TOOLS = ("none", "calculator")


@struct.dataclass
class Lines:
    """The lines of a file, of which there are P, and a tokenizer's tokens.

    Attributes:
      prompts: int32 `[P, R]`, `NOTHING` after the last token.
      answers: as the verifier wants them.
      demonstrations: text to imitate, its tools' results in it, and its end, int32 `[P, D]`, `NOTHING` after that.
      pieces: the bytes of each token, uint8 `[V, B]`.
      sizes: how many they are, int32 `[V]`.
    """

    prompts: Any
    answers: Any
    demonstrations: Any
    pieces: Any
    sizes: Any


@struct.dataclass
class Read:
    """A row's state.

    Attributes:
      line: its prompt's, int32.
      left: tokens of the prompt that are not yet written, int32.
      verified: the verifier's state.
      call: the tool's.
      ended: bool.
    """

    line: jax.Array
    left: jax.Array
    verified: Any
    call: tool_syntax.Call
    ended: jax.Array


@dataclass(frozen=True)
class Signs:
    """Tokens that are known by name.

    Attributes:
      pieces: the bytes of each token.
      end: of a text.
      digits: from 0 to 9.
      minus: of a negative result.
    """

    pieces: tuple[bytes, ...]
    end: int
    digits: tuple[int, ...] = ()
    minus: int = 0


@dialogues.register("text")
@dataclass(frozen=True)
class TextDialogue(Dialogue):
    """Prompts and answers from a file, in the tokens of GPT-2 or of bytes, and a verifier.

    Each line of the file is {"prompt": ..., "answer": ...}. A row is a prompt and what is written after it, up to the
    end of text. With the tool, what is written in <<12*34>> is calculated, and the result is given in digits. Gold is 1
    where the verifier finds the text after the prompt right, results included, whether or not it was ended.

    Attributes:
      file: the lines, JSON each. They may have a "demonstration" to imitate in the place of the answer. In either a
        call is followed by its result, as in "That is <<6*7>>42.".
      tokenizer: "bytes", or a folder with vocab.json and merges.txt.
      verifier: "exact", the text is the answer but for white space around it; "contains", the answer is in it;
        "number", the text's last number is the answer's last; "regex", the answer is a regular expression that the text
        has a match of.
      tool: "calculator" or "none".
      length: slots of a row.
      held_out_share: of the lines, the last, on which is measured and not trained; 0: all are for both.
      content: of the files, once they are read: dialogues of other contents are not equal.
      between: the first line of those that prompts are drawn from, and the first behind them, once they are read.
    """

    file: str = field(metadata={"path": True})
    tokenizer: str = field(default="bytes", metadata={"path": True, "words": ("bytes",)})
    verifier: Literal["exact", "contains", "number", "regex"] = "exact"
    tool: Literal["none", "calculator"] = "none"
    length: int = 256
    held_out_share: float = 0.05
    content: str = field(default="", init=False, repr=False)
    between: tuple[int, int] = field(default=(0, 0), init=False)
    signs: Signs = field(default=Signs((), 0), init=False, repr=False, compare=False)

    def __post_init__(self):
        if callable(self.verifier):
            raise ValueError(
                "verifier must be a name, not a function: a reward in Python is that of a dialogue of one's own, "
                'registered by register("dialogue", name)'
            )
        check("verifier", self.verifier, VERIFIERS)
        check("tool", self.tool, TOOLS)
        if not self.file or not self.tokenizer:
            raise ValueError("file and tokenizer must not be empty")
        if self.length < 2:
            raise ValueError(f"length must be at least 2, not {self.length}")
        if not 0 <= self.held_out_share < 1:
            raise ValueError(f"held_out_share must lie in [0, 1), not {self.held_out_share:g}")

    def make(self) -> TextDialogue:
        """The dialogue with the lines in `data`.

        Raises ValueError where a file cannot be read, or a line cannot be used: the sentence names it.
        """
        found = lines.read(self.file)
        tokenizer = tokenizers.Bytes() if self.tokenizer == "bytes" else tokenizers.read(Path(self.tokenizer))
        signs, error = _signs(tokenizer, self.tool)
        prompts = _encoded(tokenizer, [line.prompt for line in found])
        for line, prompt in zip(found, prompts, strict=True):
            if not 0 < len(prompt) < self.length:
                allowed = f"from 1 to {self.length - 1} fit in rows of {self.length} slots"
                raise ValueError(f"{self._place(line)}: the prompt has {len(prompt)} tokens; {allowed}")
        try:
            answers = VERIFIERS[self.verifier].prepared([line.answer for line in found])
        except Unusable as unusable:
            raise ValueError(f"{self._place(found[unusable.line])}: the answer {unusable}") from None
        demonstrations = self._demonstrations(found, prompts, tokenizer, signs)
        kept = round(len(found) * self.held_out_share)
        cut = min(max(len(found) - kept, 1), len(found) - 1) if self.held_out_share else len(found)
        made = copy.copy(self)
        made.derive(
            data=Lines(_rows(prompts), answers, demonstrations, *_pieces(signs.pieces)),
            vocabulary=tokenizer.vocabulary,
            reply_length=max(*map(len, prompts), *((1 + MOST_DIGITS, len(error)) if error else (1,))),
            prompt_length=min(map(len, prompts)),
            result_error=error,
            result_tokens=signs.digits,
            prompt_tokens=tuple(np.unique(np.concatenate(prompts)).tolist()),
            content=hashlib.sha256(repr((found, tokenizer.identity)).encode()).hexdigest(),
            between=(0, max(cut, 1)),
            signs=signs,
        )
        return made

    def held_out(self) -> TextDialogue:
        """The dialogue of the lines that are held out; of all, where none are."""
        first, behind = self.between[1], len(self.data.prompts)
        other = copy.copy(self)
        other.derive(between=(first, behind) if first < behind else (0, behind))
        return other

    def bind(self, data: Lines) -> TextDialogue:
        """The dialogue with these lines, arrays of a program."""
        bound = copy.copy(self)
        bound.derive(data=data)
        return bound

    def reset(self, key: jax.Array, difficulty: jax.Array) -> tuple[Read, Reply]:
        """A line."""
        first, behind = self.between
        line = first + below(jax.random.uniform(key, (), jnp.float32), behind - first)
        verifier = VERIFIERS[self.verifier]
        prompt = jnp.asarray(self.data.prompts)[line]
        state = Read(
            line=line,
            left=(prompt >= 0).sum(dtype=jnp.int32),
            verified=verifier.begin(verifier.wanted(self.data.answers, line)),
            call=tool_syntax.begin(),
            ended=jnp.zeros((), bool),
        )
        return state, self.prompt(prompt)

    def respond(self, state: Read, token: jax.Array) -> tuple[Read, Reply]:
        """A call is answered after the token that it is closed in."""
        prompted = state.left > 0
        verifier = VERIFIERS[self.verifier]
        wanted = verifier.wanted(self.data.answers, state.line)
        piece = jnp.asarray(self.data.pieces)[token]
        size = jnp.where(prompted, 0, jnp.asarray(self.data.sizes)[token])

        def read(place: jax.Array, before: tuple[Any, tool_syntax.Call]) -> tuple[Any, tool_syntax.Call]:
            verified, call = before
            byte = piece[place].astype(jnp.int32)
            after = verifier.read(wanted, verified, byte), tool_syntax.read(call, byte) if self.result_error else call
            return jax.tree.map(lambda old, new: jnp.where(place < size, new, old), before, after)

        begun = state.verified, replace(state.call, complete=jnp.zeros((), bool))
        verified, call = jax.lax.fori_loop(0, piece.size, read, begun)
        ended = ~prompted & (token == self.signs.end)
        left = jnp.maximum(state.left - 1, 0)
        after = Read(state.line, left, verified, call, state.ended | ended)
        if not self.result_error:
            return after, self.choose(ended, self.end(), self.own())
        failed = self.result(jnp.asarray(self.result_error, jnp.int32))
        result = self.choose(call.failed, failed, self.result(self._written(call.result)))
        return after, self.choose(ended, self.end(), self.choose(call.complete, result, self.own()))

    def reward(self, state: Read) -> dict[str, jax.Array]:
        """Gold 1 for a right text, else 0; and whether it was ended."""
        verifier = VERIFIERS[self.verifier]
        right = verifier.right(verifier.wanted(self.data.answers, state.line), state.verified)
        return {"gold": right.astype(jnp.float32), "ended": state.ended.astype(jnp.float32)}

    def demonstration(self, key: jax.Array, difficulty: jax.Array, right: jax.Array) -> jax.Array:
        """Right: the line's own. Wrong: another line's, as far as there is room."""
        if self.data.demonstrations is None:
            raise ValueError(f"file {self.file!r} has no demonstrations, and its answers are patterns")
        state, prompt = self.reset(key, difficulty)
        first, behind = self.between
        guessing = jax.random.uniform(jax.random.fold_in(key, DEMONSTRATION), (), jnp.float32)
        beside = 1 + below(guessing, max(behind - first - 1, 1))
        other = first + (state.line - first + beside) % (behind - first)
        shown = jnp.asarray(self.data.demonstrations)[jnp.where(right, state.line, other)]
        row = jnp.pad(prompt.tokens, (0, self.length + shown.size), constant_values=NOTHING)
        return jax.lax.dynamic_update_slice(row, shown, (state.left,))[: self.length]

    def text(self, tokens: Any) -> str:
        """The text that tokens `[N]` are; `NOTHING` is left out."""
        return b"".join(self.signs.pieces[int(token)] for token in tokens if token >= 0).decode("utf-8", "replace")

    def _written(self, result: jax.Array) -> jax.Array:
        shown = digits(jnp.abs(result), MOST_DIGITS)
        named = jax.vmap(looked_up, (None, 0))(jnp.asarray(self.signs.digits, jnp.int32), shown)
        sign = jnp.where(result < 0, self.signs.minus, NOTHING).astype(jnp.int32)
        return joined([sign[None], jnp.where(shown >= 0, named, NOTHING)])

    def _place(self, line: Line) -> str:
        return f"file {self.file!r}, line {line.number}"

    def _demonstrations(
        self, found: Sequence[Line], prompts: Sequence[np.ndarray], tokenizer: Tokenizer, signs: Signs
    ) -> np.ndarray | None:
        """What is imitated in each line, as tokens, and the text's end; None where there is nothing to imitate."""
        if self.verifier == "regex" and found[0].demonstration is None:
            return None
        parts = []
        for number, line in enumerate(found):
            text = line.answer if line.demonstration is None else line.demonstration
            for part, result in self._parts(line, text.encode()):
                parts.append((number, part, result))
        tokens = _encoded(tokenizer, [part.decode() for _, part, _ in parts])
        rows: list[list[int]] = [[] for _ in found]
        minus_or_digit = {ord("-"): signs.minus, **dict(zip(b"0123456789", signs.digits, strict=False))}
        errors = _encoded(tokenizer, [ERROR])[0].tolist()
        for (number, _, result), part in zip(parts, tokens, strict=True):
            rows[number] += part.tolist()
            rows[number] += errors if result == ERROR.encode() else [minus_or_digit[byte] for byte in result]
        for line, prompt, row in zip(found, prompts, rows, strict=True):
            row.append(signs.end)
            if len(prompt) + len(row) > self.length:
                raise ValueError(
                    f"{self._place(line)}: a prompt of {len(prompt)} tokens, what follows it of {len(row) - 1} and the "
                    f"end do not fit in rows of {self.length} slots"
                )
        return _rows([np.array(row, np.int32) for row in rows])

    def _parts(self, line: Line, text: bytes) -> list[tuple[bytes, bytes]]:
        """A text up to the end of each of its calls, and the call's result; the rest comes last, with none."""
        parts, begin = [], 0
        while self.tool != "none" and (call := tool_syntax.CALL.search(text, begin)):
            value = tool_syntax.evaluated(call[0])
            result = (ERROR if value is None else str(value)).encode()
            if not text.startswith(result, call.end()):
                said = f"{call[0].decode()} must be followed by its result, {result.decode()}"
                raise ValueError(f"{self._place(line)}: {said}")
            parts.append((text[begin : call.end()], result))
            begin = call.end() + len(result)
        return [*parts, (text[begin:], b"")]


def _encoded(tokenizer: Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
    """The tokens of each text, int32, without its end."""
    tokens = tokenizer.encode([text.encode() for text in texts]).astype(np.int32)
    ends = np.flatnonzero(tokens == tokenizer.end_of_text)
    return [part[:-1] for part in np.split(tokens, ends + 1)[:-1]]


def _signs(tokenizer: Tokenizer, tool: str) -> tuple[Signs, tuple[int, ...]]:
    """The tokens that are known by name, and those of a tool's error. Raises ValueError where digits are no tokens."""
    pieces = tuple(tokenizer.pieces())
    if tool == "none":
        return Signs(pieces, tokenizer.end_of_text), ()
    *signs, error = (tokens.tolist() for tokens in _encoded(tokenizer, [*"0123456789-", ERROR]))
    if any(len(sign) != 1 for sign in signs):
        raise ValueError("a tool's results are written in digits, and in this tokenizer not every digit is one token")
    *digit, minus = (sign[0] for sign in signs)
    return Signs(pieces, tokenizer.end_of_text, tuple(digit), minus), tuple(error)


def _pieces(pieces: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """The tokens' bytes, uint8 `[V, B]`, and how many they are, int32 `[V]`."""
    cut = [piece[:LONGEST_TOKEN] for piece in pieces]
    longest = max(map(len, cut))
    table = np.frombuffer(b"".join(piece.ljust(longest, b"\0") for piece in cut), np.uint8)
    return table.reshape(len(cut), longest), np.array([len(piece) for piece in cut], np.int32)


def _rows(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Tokens of several texts, int32 `[P, longest]`, `NOTHING` after the last."""
    rows = np.full((len(parts), max(map(len, parts))), NOTHING, np.int32)
    for row, part in zip(rows, parts, strict=True):
        row[: len(part)] = part
    return rows
