"""Calculate: short numbers in the head, long ones by calls to a tool whose results are of several tokens."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from flax import struct

from jaxaudit.dialogues.arithmetic import MOST_DIGITS, OPERATORS, digits, evaluate, joined
from jaxaudit.dialogues.protocol import NOTHING, Reply
from jaxaudit.dialogues.sampling import DEMONSTRATION, Split, below, looked_up, up_to
from jaxaudit.runtime.registry import dialogues

IDLE, CALLING, ANSWERING = range(3)
"""What the tokens that are being written belong to."""

DIGITS = tuple("0123456789")
RARE = tuple(f"{digit}'" for digit in DIGITS)
WORDS = (*DIGITS, *RARE, *OPERATORS, "=", "call", "<", ">", "answer", "end", "error")
TOKEN = {word: number for number, word in enumerate(WORDS)}
FIRST_OPERATOR, AFTER_OPERATORS = TOKEN[OPERATORS[0]], TOKEN["="]


@struct.dataclass
class Calculation:
    """A row's state.

    Attributes:
      wanted: the right answer, int32.
      tool_digits: the token that the tool writes for each digit, int32 `[10]`.
      left: tokens of the prompt that are not yet written, int32.
      mode: whether a call, an answer or neither is being written, int32.
      first, operator: of the call, int32; the operator is `NOTHING` before it is written.
      number, written: what is being written, and how many digits of it are, int32.
      negative: bool, whether a sign stands before it.
      valid: bool, whether it has not too many digits.
      answered, right, ended: bool, of the row's end.
    """

    wanted: jax.Array
    tool_digits: jax.Array
    left: jax.Array
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


@dialogues.register("calculator")
@dataclass(frozen=True)
class Calculator(Split):
    """Calculate with two numbers, in the head or by calls to a tool, whose results are of several tokens.

    A row is "3 2 - 4 9 =  call 3 2 - 4 9 =  < - 1 7 >  answer - 1 7 end". The tool reads any two numbers, without
    signs, of at most `digits` digits; to all else it says "< error >". The answer stands right before the end. A task
    is two numbers and an operator.

    Attributes:
      difficulty: digits of both numbers are uniform over 1 to it; between whole numbers both neighbours are mixed.
      digits: the highest difficulty, at most 4.
      operators: of the prompts, some of "+-*".
      head: numbers of so many digits are calculated in the head by right demonstrations.
      rare_share: of digits that a row's tool writes by their rare names, which mean the same.
      length: slots of a row.
    """

    difficulty: float = 3.0
    digits: int = 3
    operators: str = "+-"
    head: int = 1
    rare_share: float = 0.02
    length: int = 48
    asked: tuple[int, ...] = field(init=False, repr=False, compare=False)

    vocabulary = len(WORDS)
    prompt_length = 4
    result_error = (TOKEN["<"], TOKEN["error"], TOKEN[">"])
    result_tokens = tuple(range(10))
    prompt_tokens = tuple(range(10))
    rare = tuple((digit, 10 + digit) for digit in range(10))
    words = WORDS

    def __post_init__(self):
        if not 1 <= self.digits <= MOST_DIGITS:
            raise ValueError(f"digits must be from 1 to {MOST_DIGITS}, not {self.digits}")
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
            asked=tuple(OPERATORS.index(operator) for operator in self.operators),
        )

    def reset(self, key: jax.Array, difficulty: jax.Array) -> tuple[Calculation, Reply]:
        """Two numbers with equally many digits, and an operator."""

        def task_of(uniform: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
            size = up_to(uniform[:2], difficulty, self.digits)
            above = looked_up(10 ** jnp.arange(self.digits + 1, dtype=jnp.int32), size)
            least = jnp.where(size == 1, 0, above // 10)
            first, second = least + below(uniform[2:4], above - least)
            operator = looked_up(jnp.asarray(self.asked, jnp.int32), below(uniform[4], len(self.asked)))
            return first, operator, second, size

        uniform = self.draw_task(key, 15, lambda uniform: jnp.stack(task_of(uniform)[:3]))
        first, operator, second, size = task_of(uniform)
        rare = uniform[5:] < self.rare_share
        zero, no = jnp.int32(0), jnp.zeros((), bool)
        state = Calculation(
            wanted=evaluate(first, operator, second),
            tool_digits=jnp.arange(10, dtype=jnp.int32) + jnp.where(rare, 10, 0).astype(jnp.int32),
            left=2 * size + 2,
            mode=jnp.int32(IDLE),
            first=zero,
            operator=jnp.int32(NOTHING),
            number=zero,
            written=zero,
            negative=no,
            valid=no,
            answered=no,
            right=no,
            ended=no,
        )
        parts = [digits(first, self.digits), (FIRST_OPERATOR + operator)[None], digits(second, self.digits)]
        return state, self.prompt(joined([*parts, jnp.full((1,), TOKEN["="], jnp.int32)]))

    def changed(self, state: Calculation, prompt: jax.Array, key: jax.Array) -> tuple[Calculation, jax.Array]:
        """Another digit in one's place, all equally likely; numbers stay as long as they are."""
        uniform = jax.random.uniform(key, (2,), jnp.float32)
        size = state.left // 2 - 1
        number = below(uniform[0], 2 * size)
        first = jnp.where((number % size == 0) & (size > 1), 1, 0)  # a long number does not begin with 0
        digit, many = looked_up(prompt, number + number // size), 10 - first
        other = first + (digit - first + 1 + below(uniform[1], many - 1)) % many
        places = jnp.arange(self.reply_length)
        prompt = jnp.where(places == number + number // size, other, prompt)
        powers = 10 ** jnp.arange(self.digits, dtype=jnp.int32)

        def read(last: jax.Array) -> jax.Array:
            """The number whose last digit stands there."""
            power = jax.vmap(looked_up, (None, 0))(powers, last - places)
            return jnp.where(places > last - size, prompt * power, 0).sum(dtype=jnp.int32)

        operator = looked_up(prompt, size) - FIRST_OPERATOR
        return replace(state, wanted=evaluate(read(size - 1), operator, read(2 * size))), prompt

    def respond(self, state: Calculation, token: jax.Array) -> tuple[Calculation, Reply]:
        """A call is answered where it cannot go on: after its "=", or in the place of a token that it cannot have."""
        prompted = state.left > 0
        calling = ~prompted & (state.mode == CALLING)
        answering = ~prompted & (state.mode == ANSWERING)
        digit = token < 20
        operator = (token >= FIRST_OPERATOR) & (token < AFTER_OPERATORS)
        middle = calling & operator & (state.operator < 0) & (state.written > 0)
        signed = answering & (token == TOKEN["-"]) & (state.written == 0) & ~state.negative
        goes_on = middle | signed | ((calling | answering) & digit)
        closes = calling & ~goes_on
        opens = ~prompted & ~closes & ((token == TOKEN["call"]) | (token == TOKEN["answer"]))
        ended = ~prompted & ~calling & (token == TOKEN["end"])
        complete = state.valid & (state.written > 0)
        answer = jnp.where(state.negative, -state.number, state.number)
        answered = ended & answering & complete

        most = jnp.where(calling, self.digits, 2 * self.digits)
        fits = state.written < most
        number = jnp.where(fits, state.number * 10 + jnp.where(token < 10, token, token - 10), state.number)
        begins = opens | middle
        mode = jnp.where(token == TOKEN["call"], CALLING, ANSWERING)
        after = replace(
            state,
            left=jnp.maximum(state.left - 1, 0),
            mode=jnp.where(opens, mode, jnp.where(goes_on, state.mode, IDLE)).astype(jnp.int32),
            first=jnp.where(middle, state.number, state.first),
            operator=jnp.where(opens, NOTHING, jnp.where(middle, token - FIRST_OPERATOR, state.operator)),
            number=jnp.where(begins, 0, jnp.where(goes_on & digit, number, state.number)),
            written=jnp.where(begins, 0, state.written + (goes_on & digit).astype(jnp.int32)),
            negative=~begins & (state.negative | signed),
            valid=opens | (state.valid & (fits | ~(goes_on & digit))),
            answered=state.answered | answered,
            right=state.right | (answered & (answer == state.wanted)),
            ended=state.ended | ended,
        )
        called = complete & (state.operator >= 0) & (token == TOKEN["="])
        result = self._written(evaluate(state.first, state.operator, state.number), state.tool_digits)
        reply = self.choose(called, self.result(result), self.result(jnp.asarray(self.result_error)))
        reply = self.choose(closes, reply, self.own())
        return after, self.choose(ended, self.end(), reply)

    def _written(self, value: jax.Array, names: jax.Array) -> jax.Array:
        """A result as the tool writes it, `[reply_length]`."""
        shown = digits(jnp.abs(value), 2 * self.digits)
        shown = jnp.where(shown >= 0, jax.vmap(looked_up, (None, 0))(names, shown), NOTHING)
        sign = jnp.where(value < 0, TOKEN["-"], NOTHING).astype(jnp.int32)
        ends = jnp.asarray([TOKEN["<"], TOKEN[">"]], jnp.int32)
        return joined([ends[:1], sign[None], shown, ends[1:]])[: self.reply_length]

    def reward(self, state: Calculation) -> dict[str, jax.Array]:
        """Gold 1 for the right answer right before the end, else 0; and whether there was an answer."""
        return {"gold": state.right.astype(jnp.float32), "answered": state.answered.astype(jnp.float32)}

    def demonstration(self, key: jax.Array, difficulty: jax.Array, right: jax.Array) -> jax.Array:
        """Right: long numbers are called for, and the result is used as it was read. Wrong: another number, at once."""
        state, prompt = self.reset(key, difficulty)
        called = right & (state.left > 2 * self.head + 2)
        guessing = jax.random.uniform(jax.random.fold_in(key, DEMONSTRATION), (2,), jnp.float32)
        size = looked_up(10 ** jnp.arange(self.digits + 1, dtype=jnp.int32), state.left // 2 - 1)
        guess = state.wanted + jnp.where(guessing[0] < 0.5, 1, -1) * (1 + below(guessing[1], size - 1))
        result = self._written(state.wanted, state.tool_digits)
        read = jnp.where((result == TOKEN["<"]) | (result == TOKEN[">"]), NOTHING, result)
        plain = self._written(jnp.where(right, state.wanted, guess), jnp.arange(10, dtype=jnp.int32))
        plain = jnp.where((plain == TOKEN["<"]) | (plain == TOKEN[">"]), NOTHING, plain)
        call = jnp.append(jnp.int32(TOKEN["call"]), prompt.tokens)
        word = {name: jnp.full((1,), TOKEN[name], jnp.int32) for name in ("answer", "end")}
        parts = [
            prompt.tokens,
            jnp.where(called, call, NOTHING),
            jnp.where(called, result, NOTHING),
            word["answer"],
            jnp.where(called, read, plain),
            word["end"],
        ]
        row = joined(parts)
        missing = max(self.length - row.size, 0)
        return jnp.pad(row, (0, missing), constant_values=NOTHING)[: self.length]
