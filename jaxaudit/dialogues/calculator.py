"""The dialogue "calculator": a policy calculates with two numbers, by itself or by calls to a tool."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from flax import struct

from jaxaudit.dialogues.protocol import NO_TOKEN, Reply
from jaxaudit.dialogues.sampling import DEMONSTRATION, Split, below, digits, joined, looked_up, up_to
from jaxaudit.runtime.registry import dialogues

IDLE, CALLING, ANSWERING = range(3)
"""The modes of a row: whether the policy writes neither a call nor an answer, a tool call, or an answer."""

OPERATORS = ("+", "-", "*")

MAX_DIGITS = 4
"""The largest number of digits of an operand, so that a product fits into int32."""

DIGITS = tuple("0123456789")
RARE = tuple(f"{digit}'" for digit in DIGITS)
WORDS = (*DIGITS, *RARE, *OPERATORS, "=", "call", "<", ">", "answer", "end", "error")
TOKEN = {word: number for number, word in enumerate(WORDS)}
FIRST_OPERATOR, AFTER_OPERATORS = TOKEN[OPERATORS[0]], TOKEN["="]


@struct.dataclass
class CalculatorState:
    """The state of a row.

    Attributes:
      target: The right answer, int32.
      tool_digits: The token that the tool writes for each digit, int32 `[10]`.
      prompt_left: The number of prompt tokens that are not yet written, int32.
      mode: `IDLE`, `CALLING` or `ANSWERING`, int32.
      first: The first operand of the current call, int32.
      operator: The operator of the current call, an index into `OPERATORS`, int32; `NO_TOKEN` until it is written.
      number: The absolute value of the number that is being written, int32.
      written: The number of its digits so far, int32.
      negative: Whether it has a minus sign, bool.
      valid: Whether the numbers of the call or answer have few enough digits, bool.
      answered: Whether the row ended with a complete answer, bool.
      right: Whether that answer is the target, bool.
      ended: Whether the policy has ended the row, bool.
    """

    target: jax.Array
    tool_digits: jax.Array
    prompt_left: jax.Array
    mode: jax.Array
    first: jax.Array
    operator: jax.Array
    number: jax.Array
    written: jax.Array
    negative: jax.Array
    valid: jax.Array
    answered: jax.Array
    right: jax.Array
    ended: jax.Array


def evaluate(first: jax.Array, operator: jax.Array, second: jax.Array) -> jax.Array:
    """Returns `first operator second`, int32, with the operator given as its index in `OPERATORS`."""
    return jnp.where(operator == 0, first + second, jnp.where(operator == 1, first - second, first * second))


@dialogues.register("calculator")
@dataclass(frozen=True)
class Calculator(Split):
    """Calculate with two numbers, in the head or by calls to a tool, whose results are of several tokens.

    An example of a row is "3 2 - 4 9 =  call 3 2 - 4 9 =  < - 1 7 >  answer - 1 7 end". The tool accepts two unsigned
    numbers of at most `digits` digits, and returns "< error >" for any other call. The answer must stand directly
    before the end. A task is a pair of numbers and an operator.

    Attributes:
      difficulty: The number of digits of both numbers is uniform over 1 to `difficulty`; a fraction mixes the two
        adjacent difficulties.
      digits: The highest difficulty, at most 4.
      operators: The operators of the prompts, some of `+-*`.
      head: The largest number of digits for which right demonstrations answer without a call.
      rare_share: The share of digits for which a row's tool writes a rare token with the same meaning.
      length: The number of slots of a row.
    """

    difficulty: float = 3.0
    digits: int = 3
    operators: str = "+-"
    head: int = 1
    rare_share: float = 0.02
    length: int = 48
    operator_indices: tuple[int, ...] = field(init=False, repr=False, compare=False)

    vocabulary = len(WORDS)
    prompt_length = 4
    result_error = (TOKEN["<"], TOKEN["error"], TOKEN[">"])
    result_tokens = tuple(range(10))
    prompt_tokens = tuple(range(10))
    rare = tuple((digit, 10 + digit) for digit in range(10))
    words = WORDS

    def __post_init__(self):
        if not 1 <= self.digits <= MAX_DIGITS:
            raise ValueError(f"digits must be from 1 to {MAX_DIGITS}, not {self.digits}")
        if not 1 <= self.difficulty <= self.digits:
            raise ValueError(f"difficulty must be from 1 to the {self.digits} digits, not {self.difficulty:g}")
        known = "".join(OPERATORS)
        if not self.operators or len(set(self.operators)) < len(self.operators) or set(self.operators) - set(known):
            raise ValueError(f"operators must be some of {known!r}, each once, not {self.operators!r}")
        if not 0 <= self.head <= self.digits:
            raise ValueError(f"head must be from 0 to the {self.digits} digits, not {self.head}")
        if not 0 <= self.rare_share <= 1:
            raise ValueError(f"rare_share must lie in [0, 1], not {self.rare_share:g}")
        if self.length < (least := 8 * self.digits + 11):
            raise ValueError(f"length must be at least {least} for {self.digits} digits, not {self.length}")
        self.derive(
            reply_length=2 * self.digits + 3,
            difficulties=(1.0, float(self.digits)),
            operator_indices=tuple(OPERATORS.index(operator) for operator in self.operators),
        )

    def reset(self, key: jax.Array, difficulty: jax.Array) -> tuple[CalculatorState, Reply]:
        """Draws two numbers with the same number of digits, and an operator."""

        def task_of(uniform: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
            size = up_to(uniform[:2], difficulty, self.digits)
            limit = looked_up(10 ** jnp.arange(self.digits + 1, dtype=jnp.int32), size)
            lowest = jnp.where(size == 1, 0, limit // 10)
            first, second = lowest + below(uniform[2:4], limit - lowest)
            allowed = jnp.asarray(self.operator_indices, jnp.int32)
            operator = looked_up(allowed, below(uniform[4], len(self.operator_indices)))
            return first, operator, second, size

        uniform = self.draw_task(key, 15, lambda uniform: jnp.stack(task_of(uniform)[:3]))
        first, operator, second, size = task_of(uniform)
        rare = uniform[5:] < self.rare_share
        zero, false = jnp.int32(0), jnp.zeros((), bool)
        state = CalculatorState(
            target=evaluate(first, operator, second),
            tool_digits=jnp.arange(10, dtype=jnp.int32) + jnp.where(rare, 10, 0).astype(jnp.int32),
            prompt_left=2 * size + 2,
            mode=jnp.int32(IDLE),
            first=zero,
            operator=jnp.int32(NO_TOKEN),
            number=zero,
            written=zero,
            negative=false,
            valid=false,
            answered=false,
            right=false,
            ended=false,
        )
        parts = [digits(first, self.digits), (FIRST_OPERATOR + operator)[None], digits(second, self.digits)]
        return state, self.prompt(joined([*parts, jnp.full((1,), TOKEN["="], jnp.int32)]))

    def changed(self, state: CalculatorState, prompt: jax.Array, key: jax.Array) -> tuple[CalculatorState, jax.Array]:
        """Replaces one digit, all with equal probability, and keeps the number of digits."""
        uniform = jax.random.uniform(key, (2,), jnp.float32)
        size = state.prompt_left // 2 - 1
        digit_index = below(uniform[0], 2 * size)
        # A number of several digits does not begin with 0.
        lowest = jnp.where((digit_index % size == 0) & (size > 1), 1, 0)
        digit, choices = looked_up(prompt, digit_index + digit_index // size), 10 - lowest
        other = lowest + (digit - lowest + 1 + below(uniform[1], choices - 1)) % choices
        slots = jnp.arange(self.reply_length)
        prompt = jnp.where(slots == digit_index + digit_index // size, other, prompt)
        powers = 10 ** jnp.arange(self.digits, dtype=jnp.int32)

        def number_ending_at(last: jax.Array) -> jax.Array:
            power = jax.vmap(looked_up, (None, 0))(powers, last - slots)
            return jnp.where(slots > last - size, prompt * power, 0).sum(dtype=jnp.int32)

        operator = looked_up(prompt, size) - FIRST_OPERATOR
        target = evaluate(number_ending_at(size - 1), operator, number_ending_at(2 * size))
        return replace(state, target=target), prompt

    def respond(self, state: CalculatorState, token: jax.Array) -> tuple[CalculatorState, Reply]:
        """Returns the reply to a token: the tool's result after a call's "=" or its first invalid token, or the end."""
        in_prompt = state.prompt_left > 0
        calling = ~in_prompt & (state.mode == CALLING)
        answering = ~in_prompt & (state.mode == ANSWERING)
        digit = token < 20
        operator = (token >= FIRST_OPERATOR) & (token < AFTER_OPERATORS)
        operator_written = calling & operator & (state.operator < 0) & (state.written > 0)
        sign_written = answering & (token == TOKEN["-"]) & (state.written == 0) & ~state.negative
        continues = operator_written | sign_written | ((calling | answering) & digit)
        closed = calling & ~continues
        opened = ~in_prompt & ~closed & ((token == TOKEN["call"]) | (token == TOKEN["answer"]))
        ended = ~in_prompt & ~calling & (token == TOKEN["end"])
        complete = state.valid & (state.written > 0)
        answer = jnp.where(state.negative, -state.number, state.number)
        answered = ended & answering & complete

        max_digits = jnp.where(calling, self.digits, 2 * self.digits)
        fits = state.written < max_digits
        number = jnp.where(fits, state.number * 10 + jnp.where(token < 10, token, token - 10), state.number)
        number_begins = opened | operator_written
        mode = jnp.where(token == TOKEN["call"], CALLING, ANSWERING)
        after = replace(
            state,
            prompt_left=jnp.maximum(state.prompt_left - 1, 0),
            mode=jnp.where(opened, mode, jnp.where(continues, state.mode, IDLE)).astype(jnp.int32),
            first=jnp.where(operator_written, state.number, state.first),
            operator=jnp.where(opened, NO_TOKEN, jnp.where(operator_written, token - FIRST_OPERATOR, state.operator)),
            number=jnp.where(number_begins, 0, jnp.where(continues & digit, number, state.number)),
            written=jnp.where(number_begins, 0, state.written + (continues & digit).astype(jnp.int32)),
            negative=~number_begins & (state.negative | sign_written),
            valid=opened | (state.valid & (fits | ~(continues & digit))),
            answered=state.answered | answered,
            right=state.right | (answered & (answer == state.target)),
            ended=state.ended | ended,
        )
        called = complete & (state.operator >= 0) & (token == TOKEN["="])
        result = self._result_tokens(evaluate(state.first, state.operator, state.number), state.tool_digits)
        reply = self.choose(called, self.result(result), self.result(jnp.asarray(self.result_error)))
        reply = self.choose(closed, reply, self.own())
        return after, self.choose(ended, self.end(), reply)

    def _result_tokens(self, value: jax.Array, digit_tokens: jax.Array) -> jax.Array:
        """Returns the tool's result for a value, `[reply_length]`, with the given tokens for the digits, `[10]`."""
        magnitude = digits(jnp.abs(value), 2 * self.digits)
        magnitude = jnp.where(magnitude >= 0, jax.vmap(looked_up, (None, 0))(digit_tokens, magnitude), NO_TOKEN)
        sign = jnp.where(value < 0, TOKEN["-"], NO_TOKEN).astype(jnp.int32)
        brackets = jnp.asarray([TOKEN["<"], TOKEN[">"]], jnp.int32)
        return joined([brackets[:1], sign[None], magnitude, brackets[1:]])[: self.reply_length]

    def reward(self, state: CalculatorState) -> dict[str, jax.Array]:
        """Returns gold, 1 for the right answer directly before the end, else 0; and whether there was an answer."""
        return {"gold": state.right.astype(jnp.float32), "answered": state.answered.astype(jnp.float32)}

    def demonstration(self, key: jax.Array, difficulty: jax.Array, right: jax.Array) -> jax.Array:
        """Right: calls the tool for long numbers and copies its result. Wrong: answers another number at once."""
        state, prompt = self.reset(key, difficulty)
        called = right & (state.prompt_left > 2 * self.head + 2)
        guessing = jax.random.uniform(jax.random.fold_in(key, DEMONSTRATION), (2,), jnp.float32)
        size = looked_up(10 ** jnp.arange(self.digits + 1, dtype=jnp.int32), state.prompt_left // 2 - 1)
        guess = state.target + jnp.where(guessing[0] < 0.5, 1, -1) * (1 + below(guessing[1], size - 1))
        result = self._result_tokens(state.target, state.tool_digits)
        copied = _without_brackets(result)
        uncalled = self._result_tokens(jnp.where(right, state.target, guess), jnp.arange(10, dtype=jnp.int32))
        uncalled = _without_brackets(uncalled)
        call = jnp.append(jnp.int32(TOKEN["call"]), prompt.tokens)
        word = {name: jnp.full((1,), TOKEN[name], jnp.int32) for name in ("answer", "end")}
        parts = [
            prompt.tokens,
            jnp.where(called, call, NO_TOKEN),
            jnp.where(called, result, NO_TOKEN),
            word["answer"],
            jnp.where(called, copied, uncalled),
            word["end"],
        ]
        row = joined(parts)
        missing = max(self.length - row.size, 0)
        return jnp.pad(row, (0, missing), constant_values=NO_TOKEN)[: self.length]


def _without_brackets(result: jax.Array) -> jax.Array:
    return jnp.where((result == TOKEN["<"]) | (result == TOKEN[">"]), NO_TOKEN, result)
