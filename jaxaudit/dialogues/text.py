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

from jaxaudit.dialogues import jsonl as lines
from jaxaudit.dialogues import tool_syntax
from jaxaudit.dialogues.arithmetic import digits, joined
from jaxaudit.dialogues.jsonl import JsonlRecord
from jaxaudit.dialogues.patterns import Unusable
from jaxaudit.dialogues.protocol import NOTHING, Dialogue, Reply
from jaxaudit.dialogues.sampling import DEMONSTRATION, below, looked_up
from jaxaudit.dialogues.tool_syntax import left_out
from jaxaudit.dialogues.verifiers import VERIFIERS
from jaxaudit.runtime.registry import check_name, dialogues
from jaxaudit.text import tokenizers
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


def tool_signs(tokenizer: Tokenizer, tool: bool) -> Signs:
    """The tokens that are known by name. Raises ValueError where there is a tool, and a digit is not one token."""
    pieces = tuple(tokenizer.pieces())
    if not tool:
        return Signs(pieces, tokenizer.end_of_text)
    *single, error = (tokens.tolist() for tokens in encode(tokenizer, [*"0123456789-", ERROR]))
    if any(len(sign) != 1 for sign in single):
        raise ValueError("a tool's results are written in digits, and in this tokenizer not every digit is one token")
    *digits, minus = (sign[0] for sign in single)
    return Signs(pieces, tokenizer.end_of_text, tuple(digits), minus, tuple(error))


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
    """The tokens of each text, int32, without its end."""
    tokens = tokenizer.encode([text.encode() for text in texts]).astype(np.int32)
    ends = np.flatnonzero(tokens == tokenizer.end_of_text)
    return [part[:-1] for part in np.split(tokens, ends + 1)[:-1]]


def encode_prompts(tokenizer: Tokenizer, texts: Sequence[str], length: int) -> list[np.ndarray]:
    """The tokens of each prompt, int32. Raises Unusable for one that leaves no room in a row of so many slots."""
    found = encode(tokenizer, texts)
    for line, prompt in enumerate(found):
        if not 0 < len(prompt) < length:
            allowed = f"from 1 to {length - 1} fit in rows of {length} slots"
            raise Unusable(line, f"the prompt has {len(prompt)} tokens; {allowed}")
    return found


def complete_texts(tokenizer: Tokenizer, known: Signs, texts: Sequence[str]) -> list[np.ndarray]:
    """The tokens of texts and their ends, int32, where calls end with a token and results are in digits.

    Raises Unusable for a text with a call that its result does not follow.
    """
    parts = [part for line, text in enumerate(texts) for part in _parts(line, text.encode(), known)]
    tokens = encode(tokenizer, [part.text for part in parts])
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


def piece_table(pieces: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
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


MOST_DIGITS = 10
"""Of a tool's result."""

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


@dialogues.register("text")
@dataclass(frozen=True)
class TextDialogue(Dialogue):
    """Prompts and answers from a file, in the tokens of GPT-2 or of bytes, and a verifier.

    Each line of the file is {"prompt": ..., "answer": ...}, or has other names for them: GSM8K's are read by
    prompt_field = "question", answer_after = "####", verifier = "number". A row is a prompt and what is written after
    it, up to the end of text. With the tool, what is written in <<12*34>> is calculated, and the result is given in
    digits. Gold is 1 where the verifier finds the text after the prompt right, results included, whether or not it was
    ended.

    Attributes:
      file: the lines, JSON each. They may have a "demonstration" to imitate in the place of the answer. In either a
        call is followed by its result, as in "That is <<6*7>>42.". GSM8K's annotations, <<6*7=42>>, are left out; with
        the tool those that it can calculate are calls.
      tokenizer: "bytes", or a folder with a GPT-2 tokenizer's files.
      verifier: "exact", the text is the answer but for white space around it; "contains", the answer is in it;
        "number", the text's last number is the answer's last; "regex", the answer is a regular expression that the text
        has a match of.
      tool: "calculator" or "none".
      length: slots of a row.
      held_out_share: of the lines, the last, on which is measured and not trained; 0: all are for both.
      prompt_field, answer_field: what the lines call their prompt and answer.
      answer_after: what the answer that is wanted stands behind, as "####", the last one there is in the field, all of
        which is then imitated (but with verifier "exact"); "": the field is the answer.
      content: of the files, once they are read: dialogues of other contents are not equal.
      between: the first line of those that prompts are drawn from, and the first behind them, once they are read.
    """

    file: str = field(metadata={"path": True})
    tokenizer: str = field(default="bytes", metadata={"path": True, "words": ("bytes",)})
    verifier: Literal["exact", "contains", "number", "regex"] = "exact"
    tool: Literal["none", "calculator"] = "none"
    length: int = 256
    held_out_share: float = 0.05
    prompt_field: str = "prompt"
    answer_field: str = "answer"
    answer_after: str = ""
    content: str = field(default="", init=False, repr=False)
    between: tuple[int, int] = field(default=(0, 0), init=False)
    signs: Signs = field(default=Signs((), 0), init=False, repr=False, compare=False)

    def __post_init__(self):
        if callable(self.verifier):
            raise ValueError(
                "verifier must be a name, not a function: a reward in Python is that of a dialogue of one's own, "
                'registered by register("dialogue", name)'
            )
        check_name("verifier", self.verifier, VERIFIERS)
        check_name("tool", self.tool, TOOLS)
        if not self.file or not self.tokenizer:
            raise ValueError("file and tokenizer must not be empty")
        if not self.prompt_field or not self.answer_field or self.prompt_field == self.answer_field:
            raise ValueError("prompt_field and answer_field must be the names of two fields")
        if self.length < 2:
            raise ValueError(f"length must be at least 2, not {self.length}")
        if not 0 <= self.held_out_share < 1:
            raise ValueError(f"held_out_share must lie in [0, 1), not {self.held_out_share:g}")

    def make(self) -> TextDialogue:
        """The dialogue with the lines in `data`.

        Raises ValueError where a file cannot be read, or a line cannot be used: the sentence names it.
        """
        found = self._lines()
        tokenizer = tokenizers.Bytes() if self.tokenizer == "bytes" else tokenizers.read(Path(self.tokenizer))
        signs = tool_signs(tokenizer, tool=self.tool != "none")
        try:
            prompts = encode_prompts(tokenizer, [line.prompt for line in found], self.length)
            answers = VERIFIERS[self.verifier].prepared([line.answer for line in found])
            demonstrations = self._demonstrations(tokenizer, signs, found, prompts)
        except Unusable as unusable:
            raise ValueError(f"file {self.file!r}, line {found[unusable.line].number}: {unusable}") from None
        kept = round(len(found) * self.held_out_share)
        cut = min(max(len(found) - kept, 1), len(found) - 1) if self.held_out_share else len(found)
        made = copy.copy(self)
        made.derive(
            data=Lines(rows(prompts), answers, demonstrations, *piece_table(signs.pieces)),
            vocabulary=tokenizer.vocabulary,
            reply_length=max(*map(len, prompts), len(signs.error), 1 + MOST_DIGITS if signs.error else 1),
            prompt_length=min(map(len, prompts)),
            result_error=signs.error,
            result_tokens=signs.digits,
            prompt_tokens=tuple(np.unique(np.concatenate(prompts)).tolist()),
            end_of_text=signs.end,
            words=tuple(piece.decode(errors="replace") or "<end>" for piece in signs.pieces),
            content=hashlib.sha256(repr((found, tokenizer.identity)).encode()).hexdigest(),
            between=(0, max(cut, 1)),
            signs=signs,
        )
        return made

    def _lines(self) -> list[JsonlRecord]:
        """The file's lines, calculators' annotations left out of what is written."""
        form = lines.Form(self.prompt_field, self.answer_field, self.answer_after, self.verifier != "exact")
        tool = self.tool != "none"

        def read(line: JsonlRecord) -> JsonlRecord:
            answer = line.answer if self.verifier == "regex" else left_out(line.answer, tool)
            shown = None if line.demonstration is None else left_out(line.demonstration, tool)
            return replace(line, answer=answer, demonstration=shown)

        return [read(line) for line in lines.read(self.file, form)]

    def _demonstrations(
        self, tokenizer: Tokenizer, signs: Signs, found: Sequence[JsonlRecord], prompts: Sequence[np.ndarray]
    ) -> np.ndarray | None:
        """What is imitated in each line; None where answers are patterns. Raises Unusable where a row has no room."""
        if self.verifier == "regex" and found[0].demonstration is None:
            return None
        texts = [line.answer if line.demonstration is None else line.demonstration for line in found]
        shown = complete_texts(tokenizer, signs, texts)
        for line, (prompt, text) in enumerate(zip(prompts, shown, strict=True)):
            if len(prompt) + len(text) > self.length:
                parts = f"a prompt of {len(prompt)} tokens, what follows it of {len(text) - 1} and the end"
                raise Unusable(line, f"{parts} do not fit in rows of {self.length} slots")
        return rows(shown)

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
        """Draws a line of the file and returns its prompt."""
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
