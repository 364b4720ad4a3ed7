"""The dialogue "text": prompts and answers from a file, tokenized, with a verifier and optionally a calculator."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxaudit.dialogues import jsonl, tool_syntax
from jaxaudit.dialogues.jsonl import JsonlRecord
from jaxaudit.dialogues.patterns import UnusableLine
from jaxaudit.dialogues.protocol import NO_TOKEN, Dialogue, Reply
from jaxaudit.dialogues.sampling import DEMONSTRATION, below, digits, joined, looked_up
from jaxaudit.dialogues.tool_syntax import strip_annotations
from jaxaudit.dialogues.verifiers import VERIFIERS
from jaxaudit.runtime.registry import check_name, dialogues
from jaxaudit.text import tokenizers
from jaxaudit.text.tokenizers import Tokenizer

MAX_TOKEN_BYTES = 32
"""The number of bytes of a token that are verified; longer tokens of GPT-2 are only rules and blanks."""

MAX_SHOWN = 60
"""The largest number of characters of a call that an error shows."""

MAX_RESULT_DIGITS = 10
"""The largest number of digits of a tool's result, which is an int32."""

ERROR = "error"
"""The result of a failed tool call."""

TOOLS = ("none", "calculator")


@dataclass(frozen=True)
class KnownTokens:
    """The tokens of a tokenizer that a dialogue reads or writes by their meaning.

    Attributes:
      pieces: The bytes of each token.
      end: The end-of-text token.
      digits: The tokens of the digits 0 to 9; () without a tool.
      minus: The token of the minus sign of a result.
      error: The tokens of the result of a failed tool call; () without a tool.
    """

    pieces: tuple[bytes, ...]
    end: int
    digits: tuple[int, ...] = ()
    minus: int = 0
    error: tuple[int, ...] = ()

    def result(self, call: bytes) -> tuple[str, list[int]]:
        """Returns the tool's result of a call as a text and as tokens."""
        value = tool_syntax.evaluate_call(call)
        if value is None:
            return ERROR, list(self.error)
        tokens = [self.minus if character == "-" else self.digits[int(character)] for character in str(value)]
        return str(value), tokens


def known_tokens(tokenizer: Tokenizer, tool: bool) -> KnownTokens:
    """Returns the known tokens of a tokenizer.

    Raises:
      ValueError: There is a tool, and the tokenizer does not encode every digit and the minus sign as one token.
    """
    pieces = tuple(tokenizer.pieces())
    if not tool:
        return KnownTokens(pieces, tokenizer.end_of_text)
    *single, error = (tokens.tolist() for tokens in encode(tokenizer, [*"0123456789-", ERROR]))
    if any(len(tokens) != 1 for tokens in single):
        raise ValueError("a tool writes results in digits, but this tokenizer has not one token for each digit")
    *digits, minus = (tokens[0] for tokens in single)
    return KnownTokens(pieces, tokenizer.end_of_text, tuple(digits), minus, tuple(error))


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
    """Returns the tokens of each text, int32, without the end-of-text token."""
    tokens = tokenizer.encode([text.encode() for text in texts]).astype(np.int32)
    ends = np.flatnonzero(tokens == tokenizer.end_of_text)
    return [part[:-1] for part in np.split(tokens, ends + 1)[:-1]]


def encode_prompts(tokenizer: Tokenizer, texts: Sequence[str], length: int) -> list[np.ndarray]:
    """Returns the tokens of each prompt, int32.

    Raises:
      UnusableLine: A prompt is empty, or leaves no slot for an answer in a row of `length` slots.
    """
    prompts = encode(tokenizer, texts)
    for line, prompt in enumerate(prompts):
        if not 0 < len(prompt) < length:
            allowed = f"from 1 to {length - 1} fit in rows of {length} slots"
            raise UnusableLine(line, f"the prompt has {len(prompt)} tokens; {allowed}")
    return prompts


def encode_demonstrations(tokenizer: Tokenizer, known: KnownTokens, texts: Sequence[str]) -> list[np.ndarray]:
    """Returns the tokens of texts with the end-of-text token, int32, with tool results as the tool writes them.

    Raises:
      UnusableLine: A call in a text is not followed by its result.
    """
    segments = [segment for line, text in enumerate(texts) for segment in _segments(line, text.encode(), known)]
    tokens = encode(tokenizer, [segment.text for segment in segments])
    rows: list[list[int]] = [[] for _ in texts]
    for segment, text in zip(segments, tokens, strict=True):
        rows[segment.line] += [*text.tolist(), *segment.result]
    return [np.array([*row, known.end], np.int32) for row in rows]


@dataclass(frozen=True)
class _Segment:
    """A text up to the end of a call with the tokens of the call's result, or the text after the last call."""

    line: int
    text: str
    result: list[int]


def _segments(line: int, text: bytes, known: KnownTokens) -> list[_Segment]:
    segments, begin = [], 0
    while known.digits and (call := tool_syntax.CALL.search(text, begin)):
        result, tokens = known.result(call[0])
        if not text.startswith(result.encode(), call.end()):
            raise UnusableLine(line, _wrong_result(call[0].decode(), result))
        segments.append(_Segment(line, text[begin : call.end()].decode(), tokens))
        begin = call.end() + len(result)
    return [*segments, _Segment(line, text[begin:].decode(), [])]


def _wrong_result(call: str, result: str) -> str:
    call = call if len(call) <= MAX_SHOWN else f"{call[:MAX_SHOWN]}..."
    if result != ERROR:
        return f"{call} must be followed by its result, {result}"
    supported = "two whole numbers with + - * or / between them, whose result is whole"
    return f"{call} is not supported by the calculator, which takes {supported}; so it must be followed by '{ERROR}'"


def piece_table(pieces: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bytes of each token, uint8 `[V, B]`, and their number, int32 `[V]`."""
    cut = [piece[:MAX_TOKEN_BYTES] for piece in pieces]
    longest = max(map(len, cut))
    table = np.frombuffer(b"".join(piece.ljust(longest, b"\0") for piece in cut), np.uint8)
    return table.reshape(len(cut), longest), np.array([len(piece) for piece in cut], np.int32)


def pad_rows(texts: Sequence[np.ndarray]) -> np.ndarray:
    """Stacks the tokens of several texts, int32 `[P, longest]`, padded with `NO_TOKEN`."""
    padded = np.full((len(texts), max(map(len, texts))), NO_TOKEN, np.int32)
    for row, text in zip(padded, texts, strict=True):
        row[: len(text)] = text
    return padded


@struct.dataclass
class TextData:
    """The arrays of a file of P lines and of a tokenizer of V tokens.

    Attributes:
      prompts: The tokens of the prompts, int32 `[P, R]`, padded with `NO_TOKEN`.
      answers: The answers as the verifier has prepared them.
      demonstrations: The tokens to imitate after the prompts, with tool results and the end-of-text token, int32
        `[P, D]`, padded with `NO_TOKEN`; None if there are none.
      pieces: The bytes of each token, uint8 `[V, B]`.
      sizes: The number of bytes of each token, int32 `[V]`.
    """

    prompts: Any
    answers: Any
    demonstrations: Any
    pieces: Any
    sizes: Any


@struct.dataclass
class TextState:
    """The state of a row.

    Attributes:
      line: The index of the prompt's line, int32.
      prompt_left: The number of prompt tokens that are not yet written, int32.
      verifier: The verifier's state.
      call: The state of the recogniser of tool calls.
      ended: Whether the policy has ended the row, bool.
    """

    line: jax.Array
    prompt_left: jax.Array
    verifier: Any
    call: tool_syntax.Call
    ended: jax.Array


@dialogues.register("text")
@dataclass(frozen=True)
class TextDialogue(Dialogue):
    """Prompts and answers from a file, in the tokens of GPT-2 or of bytes, and a verifier.

    Each line of the file is {"prompt": ..., "answer": ...}, or has other field names: GSM8K is read with
    prompt_field = "question", answer_after = "####", verifier = "number". A row is a prompt and the text that the
    policy writes after it, up to the end of text. With the tool, a call such as <<12*34>> is evaluated, and its result
    is written in digits. Gold is 1 if the verifier accepts the text after the prompt, which includes tool results and
    need not be ended.

    Attributes:
      file: The file of JSON lines. A line may have a "demonstration", which is imitated instead of the answer. A call
        in a demonstration or answer must be followed by its result, as in "That is <<6*7>>42.". Annotations of GSM8K,
        <<6*7=42>>, are removed; with the tool, those that it can evaluate become calls.
      tokenizer: "bytes", or a folder with the files of a GPT-2 tokenizer.
      verifier: "exact": the text equals the answer, except for white space around it; "contains": the text contains
        the answer; "number": the last number of the text equals the last number of the answer; "regex": the text has a
        match of the answer, a regular expression.
      tool: "calculator" or "none".
      length: The number of slots of a row.
      held_out_share: The share of the lines, from the end of the file, that are held out for evaluation; with 0, all
        lines are for both training and evaluation.
      prompt_field: The name of the prompt's field in the lines.
      answer_field: The name of the answer's field in the lines.
      answer_after: A mark such as "####", after whose last occurrence in the field the answer stands; the whole field
        is then imitated, except with verifier "exact". "" if the field is the answer.
      content: A hash of the files, once they are read, so that dialogues of different contents are not equal.
      between: The first line that prompts are drawn from, and the first line after those, once the file is read.
      known: The known tokens of the tokenizer, once it is read.
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
    known: KnownTokens = field(default=KnownTokens((), 0), init=False, repr=False, compare=False)

    def __post_init__(self):
        if callable(self.verifier):
            raise ValueError(
                "verifier must be a name, not a function: to compute a reward in Python, register a dialogue with "
                'register("dialogue", name)'
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
        """Returns the dialogue with the content of its files.

        Raises:
          ValueError: A file cannot be read, or a line, whose number the message has, cannot be used.
        """
        records = self._records()
        tokenizer = tokenizers.Bytes() if self.tokenizer == "bytes" else tokenizers.read(Path(self.tokenizer))
        known = known_tokens(tokenizer, tool=self.tool != "none")
        try:
            prompts = encode_prompts(tokenizer, [record.prompt for record in records], self.length)
            answers = VERIFIERS[self.verifier].prepare([record.answer for record in records])
            demonstrations = self._demonstrations(tokenizer, known, records, prompts)
        except UnusableLine as unusable:
            raise ValueError(f"file {self.file!r}, line {records[unusable.line].number}: {unusable}") from None
        held_out = round(len(records) * self.held_out_share)
        cut = min(max(len(records) - held_out, 1), len(records) - 1) if self.held_out_share else len(records)
        return self.copy_with(
            data=TextData(pad_rows(prompts), answers, demonstrations, *piece_table(known.pieces)),
            vocabulary=tokenizer.vocabulary,
            reply_length=max(*map(len, prompts), len(known.error), 1 + MAX_RESULT_DIGITS if known.error else 1),
            prompt_length=min(map(len, prompts)),
            result_error=known.error,
            result_tokens=known.digits,
            prompt_tokens=tuple(np.unique(np.concatenate(prompts)).tolist()),
            end_of_text=known.end,
            words=tuple(piece.decode(errors="replace") or "<end>" for piece in known.pieces),
            content=hashlib.sha256(repr((records, tokenizer.identity)).encode()).hexdigest(),
            between=(0, max(cut, 1)),
            known=known,
        )

    def _records(self) -> list[JsonlRecord]:
        """Returns the lines of the file, without calculator annotations in answers and demonstrations."""
        imitate_field = self.verifier != "exact"
        line_format = jsonl.LineFormat(self.prompt_field, self.answer_field, self.answer_after, imitate_field)
        tool = self.tool != "none"

        def without_annotations(record: JsonlRecord) -> JsonlRecord:
            answer = record.answer if self.verifier == "regex" else strip_annotations(record.answer, tool)
            text = record.demonstration
            return replace(record, answer=answer, demonstration=None if text is None else strip_annotations(text, tool))

        return [without_annotations(record) for record in jsonl.read(self.file, line_format)]

    def _demonstrations(
        self, tokenizer: Tokenizer, known: KnownTokens, records: Sequence[JsonlRecord], prompts: Sequence[np.ndarray]
    ) -> np.ndarray | None:
        """Returns the tokens to imitate in each line; None if there are only patterns.

        Raises:
          UnusableLine: A prompt and its demonstration do not fit in a row, or a call is not followed by its result.
        """
        if self.verifier == "regex" and records[0].demonstration is None:
            return None
        texts = [record.answer if record.demonstration is None else record.demonstration for record in records]
        demonstrations = encode_demonstrations(tokenizer, known, texts)
        for line, (prompt, text) in enumerate(zip(prompts, demonstrations, strict=True)):
            if len(prompt) + len(text) > self.length:
                parts = f"a prompt of {len(prompt)} tokens, its demonstration of {len(text) - 1} and the end of text"
                raise UnusableLine(line, f"{parts} do not fit in rows of {self.length} slots")
        return pad_rows(demonstrations)

    def held_out(self) -> TextDialogue:
        """Returns the dialogue of the held-out lines; of all lines if none are held out."""
        first, end = self.between[1], len(self.data.prompts)
        return self.copy_with(between=(first, end) if first < end else (0, end))

    def bind(self, data: TextData) -> TextDialogue:
        """Returns the dialogue with these arrays, such as a program's tracers, in place of its own."""
        return self.copy_with(data=data)

    def reset(self, key: jax.Array, difficulty: jax.Array) -> tuple[TextState, Reply]:
        """Draws a line of the file and returns its prompt."""
        first, end = self.between
        line = first + below(jax.random.uniform(key, (), jnp.float32), end - first)
        verifier = VERIFIERS[self.verifier]
        prompt = jnp.asarray(self.data.prompts)[line]
        state = TextState(
            line=line,
            prompt_left=(prompt >= 0).sum(dtype=jnp.int32),
            verifier=verifier.begin(verifier.target(self.data.answers, line)),
            call=tool_syntax.initial_call(),
            ended=jnp.zeros((), bool),
        )
        return state, self.prompt(prompt)

    def respond(self, state: TextState, token: jax.Array) -> tuple[TextState, Reply]:
        """Returns the reply to a token: the tool's result after the token that closes a call, or the end."""
        in_prompt = state.prompt_left > 0
        verifier = VERIFIERS[self.verifier]
        target = verifier.target(self.data.answers, state.line)
        piece = jnp.asarray(self.data.pieces)[token]
        size = jnp.where(in_prompt, 0, jnp.asarray(self.data.sizes)[token])

        def read_byte(index: jax.Array, before: tuple[Any, tool_syntax.Call]) -> tuple[Any, tool_syntax.Call]:
            verifier_state, call = before
            byte = piece[index].astype(jnp.int32)
            after = verifier.read(target, verifier_state, byte)
            call_after = tool_syntax.read_byte(call, byte) if self.result_error else call
            return jax.tree.map(lambda old, new: jnp.where(index < size, new, old), before, (after, call_after))

        initial = state.verifier, replace(state.call, complete=jnp.zeros((), bool))
        verifier_state, call = jax.lax.fori_loop(0, piece.size, read_byte, initial)
        ended = ~in_prompt & (token == self.known.end)
        prompt_left = jnp.maximum(state.prompt_left - 1, 0)
        after = TextState(state.line, prompt_left, verifier_state, call, state.ended | ended)
        if not self.result_error:
            return after, self.choose(ended, self.end(), self.own())
        failed = self.result(jnp.asarray(self.result_error, jnp.int32))
        result = self.choose(call.failed, failed, self.result(self._result_tokens(call.result)))
        return after, self.choose(ended, self.end(), self.choose(call.complete, result, self.own()))

    def reward(self, state: TextState) -> dict[str, jax.Array]:
        """Returns gold, 1 for a right text, else 0; and whether the policy has ended it."""
        verifier = VERIFIERS[self.verifier]
        correct = verifier.correct(verifier.target(self.data.answers, state.line), state.verifier)
        return {"gold": correct.astype(jnp.float32), "ended": state.ended.astype(jnp.float32)}

    def demonstration(self, key: jax.Array, difficulty: jax.Array, right: jax.Array) -> jax.Array:
        """Right: the demonstration of the prompt's line. Wrong: that of another line, cut off at the end of the row."""
        if self.data.demonstrations is None:
            raise ValueError(f"file {self.file!r} has no demonstrations, and its answers are patterns")
        state, prompt = self.reset(key, difficulty)
        first, end = self.between
        guessing = jax.random.uniform(jax.random.fold_in(key, DEMONSTRATION), (), jnp.float32)
        offset = 1 + below(guessing, max(end - first - 1, 1))
        other = first + (state.line - first + offset) % (end - first)
        demonstration = jnp.asarray(self.data.demonstrations)[jnp.where(right, state.line, other)]
        row = jnp.pad(prompt.tokens, (0, self.length + demonstration.size), constant_values=NO_TOKEN)
        return jax.lax.dynamic_update_slice(row, demonstration, (state.prompt_left,))[: self.length]

    def text(self, tokens: Any) -> str:
        """Returns the text of tokens `[N]`, without `NO_TOKEN`."""
        return b"".join(self.known.pieces[int(token)] for token in tokens if token >= 0).decode("utf-8", "replace")

    def _result_tokens(self, result: jax.Array) -> jax.Array:
        magnitude = digits(jnp.abs(result), MAX_RESULT_DIGITS)
        tokens = jax.vmap(looked_up, (None, 0))(jnp.asarray(self.known.digits, jnp.int32), magnitude)
        sign = jnp.where(result < 0, self.known.minus, NO_TOKEN).astype(jnp.int32)
        return joined([sign[None], jnp.where(magnitude >= 0, tokens, NO_TOKEN)])
