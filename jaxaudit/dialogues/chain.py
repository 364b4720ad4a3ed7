"""Compose known functions in the head: nothing is rewarded before the end."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxaudit.dialogues.protocol import NOTHING, Reply
from jaxaudit.dialogues.sampling import DEMONSTRATION, Split, below, looked_up, rounded
from jaxaudit.runtime.registry import dialogues


@struct.dataclass
class Composed:
    """A row's state.

    Attributes:
      path: the start and the value after each step, int32 `[most steps + 1]`; after the last step it stays.
      steps: of this row, int32.
      left: tokens of the prompt that are not yet written, int32.
      shown: steps whose values were written, in their order, int32.
      answering: bool, whether the next token is the answer.
      answer: the latest one, a value; `NOTHING` before.
      ended: bool.
    """

    path: jax.Array
    steps: jax.Array
    left: jax.Array
    shown: jax.Array
    answering: jax.Array
    answer: jax.Array
    ended: jax.Array


@dialogues.register("chain")
@dataclass(frozen=True)
class ChainDialogue(Split):
    """Compose known functions of a value, in the head or written down, then answer what comes out.

    A row is "c X Z X ?  a d b  answer b end": a start and functions are given; the values after each step may be
    written down before the answer, and need not be. The functions are permutations of the values, the same in every
    row, which have to be known by heart. The latest answer counts, once the row is ended. A task is a start and
    functions.

    Attributes:
      difficulty: steps; between whole numbers both neighbours are mixed.
      values: that there are, at most 26.
      functions: that there are, at most 26.
      most_steps: the highest difficulty.
      tables: draws the functions.
      length: slots of a row.
    """

    difficulty: float = 4.0
    values: int = 6
    functions: int = 4
    most_steps: int = 8
    tables: int = 0
    length: int = 24
    token: dict[str, int] = field(init=False, repr=False, compare=False)
    table: np.ndarray = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        for name in ("values", "functions"):
            if not 2 <= getattr(self, name) <= 26:
                raise ValueError(f"{name} must be from 2 to 26, not {getattr(self, name)}")
        if self.most_steps < 1:
            raise ValueError(f"most_steps must be at least 1, not {self.most_steps}")
        if self.tables < 0:
            raise ValueError(f"tables must not be negative, as {self.tables} is")
        if not 1 <= self.difficulty <= self.most_steps:
            raise ValueError(f"difficulty must be from 1 to the {self.most_steps} steps, not {self.difficulty:g}")
        if self.length < (least := 5 + 2 * self.most_steps):
            raise ValueError(f"length must be at least {least} for {self.most_steps} steps, not {self.length}")
        letters = "abcdefghijklmnopqrstuvwxyz"
        words = (*letters[: self.values], *letters[-self.functions :].upper(), "?", "answer", "end")
        rng = np.random.default_rng(self.tables)
        self.derive(
            vocabulary=len(words),
            reply_length=2 + self.most_steps,
            prompt_length=3,
            difficulties=(1.0, float(self.most_steps)),
            prompt_tokens=tuple(range(self.values + self.functions)),
            words=words,
            token={word: number for number, word in enumerate(words)},
            table=np.stack([rng.permutation(self.values) for _ in range(self.functions)]).astype(np.int32),
        )

    def reset(self, key: jax.Array, difficulty: jax.Array) -> tuple[Composed, Reply]:
        """Draws a start and the functions to compose."""
        order = jnp.arange(self.most_steps + 1)

        def task_of(uniform: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            start, functions = below(uniform[-1], self.values), below(uniform[: self.most_steps], self.functions)
            steps = rounded(uniform[-2], difficulty, self.most_steps)
            return start, jnp.where(order[:-1] < steps, functions, NOTHING), steps

        uniform = self.draw_task(key, self.most_steps + 2, lambda uniform: jnp.hstack(task_of(uniform)[:2]))
        start, functions, steps = task_of(uniform)
        state = Composed(
            path=self._path(start, functions, steps),
            steps=steps,
            left=steps + 2,
            shown=jnp.int32(0),
            answering=jnp.zeros((), bool),
            answer=jnp.int32(NOTHING),
            ended=jnp.zeros((), bool),
        )
        after = jnp.append(self.values + functions, NOTHING)
        shown = jnp.where(order < steps, after, jnp.where(order == steps, self.token["?"], NOTHING))
        return state, self.prompt(jnp.append(start, shown))

    def changed(self, state: Composed, prompt: jax.Array, key: jax.Array) -> tuple[Composed, jax.Array]:
        """Another start, or another function in one step's place, all equally likely."""
        uniform = jax.random.uniform(key, (2,), jnp.float32)
        place = below(uniform[0], state.steps + 1)
        first, many = jnp.where(place == 0, 0, self.values), jnp.where(place == 0, self.values, self.functions)
        other = first + (looked_up(prompt, place) - first + 1 + below(uniform[1], many - 1)) % many
        prompt = jnp.where(jnp.arange(self.reply_length) == place, other, prompt)
        path = self._path(prompt[0], prompt[1:-1] - self.values, state.steps)
        return replace(state, path=path), prompt

    def _path(self, start: jax.Array, functions: jax.Array, steps: jax.Array) -> jax.Array:
        """The start and the value after each step; functions `[most_steps]` behind the last step do not matter."""
        path = [start]
        for step in range(self.most_steps):
            after = jnp.asarray(self.table)[functions[step], path[-1]]
            path.append(jnp.where(step < steps, after, path[-1]))
        return jnp.stack(path)

    def respond(self, state: Composed, token: jax.Array) -> tuple[Composed, Reply]:
        """Returns the reply to a token: none before the end."""
        prompted = state.left > 0
        value = token < self.values
        ended = ~prompted & (token == self.token["end"])
        right = ~prompted & ~state.answering & (state.shown < state.steps)
        right &= value & (token == looked_up(state.path, state.shown + 1))
        after = replace(
            state,
            left=jnp.maximum(state.left - 1, 0),
            shown=state.shown + right.astype(jnp.int32),
            answering=~prompted & (token == self.token["answer"]),
            answer=jnp.where(~prompted & state.answering & value, token, state.answer).astype(jnp.int32),
            ended=state.ended | ended,
        )
        return after, self.choose(ended, self.end(), self.own())

    def reward(self, state: Composed) -> dict[str, jax.Array]:
        """Gold 1 for the right answer of a row that was ended, else 0; and the share of the steps written down."""
        right = state.ended & (state.answer == state.path[-1])
        return {
            "gold": right.astype(jnp.float32),
            "answered": (state.answer >= 0).astype(jnp.float32),
            "shown": (state.shown / state.steps).astype(jnp.float32),
        }

    def demonstration(self, key: jax.Array, difficulty: jax.Array, right: jax.Array) -> jax.Array:
        """Right: every step is written down. Wrong: another value, at once."""
        state, prompt = self.reset(key, difficulty)
        guessing = jax.random.uniform(jax.random.fold_in(key, DEMONSTRATION), (), jnp.float32)
        beside = jnp.where(right, 0, 1 + below(guessing, self.values - 1))
        answer = (state.path[-1] + beside) % self.values
        begin = state.left
        shown = jnp.where(right, state.steps, 0)
        row = jnp.full((self.length,), NOTHING, jnp.int32).at[: self.reply_length].set(prompt.tokens)
        slot = jnp.arange(self.length)
        written = (slot >= begin) & (slot < begin + shown)
        row = jnp.where(written, state.path[jnp.clip(slot - begin + 1, 0, self.most_steps)], row)
        closing = jnp.stack([jnp.int32(self.token["answer"]), answer, jnp.int32(self.token["end"])])
        return jax.lax.dynamic_update_slice(row, closing, (begin + shown,))
