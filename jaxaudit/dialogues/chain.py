"""The dialogue "chain": a policy applies a sequence of memorised functions to a value, without a tool."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxaudit.dialogues.protocol import NO_TOKEN, Reply
from jaxaudit.dialogues.sampling import DEMONSTRATION, Split, below, looked_up, rounded
from jaxaudit.runtime.registry import dialogues


@struct.dataclass
class ChainState:
    """The state of a row.

    Attributes:
      path: The initial value and the value after each step, int32 `[most_steps + 1]`, constant after the last step.
      steps: The number of steps of this row, int32.
      prompt_left: The number of prompt tokens that are not yet written, int32.
      shown: The number of steps whose values were written down in order, int32.
      answering: Whether the next token is the answer, bool.
      answer: The latest answer, a value, int32; `NO_TOKEN` before the first.
      ended: Whether the policy has ended the row, bool.
    """

    path: jax.Array
    steps: jax.Array
    prompt_left: jax.Array
    shown: jax.Array
    answering: jax.Array
    answer: jax.Array
    ended: jax.Array


@dialogues.register("chain")
@dataclass(frozen=True)
class ChainDialogue(Split):
    """Compose memorised functions of a value, step by step or at once, then answer the result.

    An example of a row is "c X Z X ?  a d b  answer b end". The prompt has an initial value and functions; the value
    after each step may be written down before the answer, but need not be. The functions are permutations of the
    values, the same in every row, and so have to be memorised. The latest answer counts, if the row is ended. A task is
    an initial value and a sequence of functions.

    Attributes:
      difficulty: The number of steps; a fraction mixes the two adjacent difficulties.
      values: The number of values, at most 26.
      functions: The number of functions, at most 26.
      most_steps: The highest difficulty.
      tables: The seed of the random functions.
      length: The number of slots of a row.
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

    def reset(self, key: jax.Array, difficulty: jax.Array) -> tuple[ChainState, Reply]:
        """Draws an initial value and the functions to compose."""
        order = jnp.arange(self.most_steps + 1)

        def task_of(uniform: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            start, functions = below(uniform[-1], self.values), below(uniform[: self.most_steps], self.functions)
            steps = rounded(uniform[-2], difficulty, self.most_steps)
            return start, jnp.where(order[:-1] < steps, functions, NO_TOKEN), steps

        uniform = self.draw_task(key, self.most_steps + 2, lambda uniform: jnp.hstack(task_of(uniform)[:2]))
        start, functions, steps = task_of(uniform)
        state = ChainState(
            path=self._path(start, functions, steps),
            steps=steps,
            prompt_left=steps + 2,
            shown=jnp.int32(0),
            answering=jnp.zeros((), bool),
            answer=jnp.int32(NO_TOKEN),
            ended=jnp.zeros((), bool),
        )
        function_tokens = jnp.append(self.values + functions, NO_TOKEN)
        rest = jnp.where(order < steps, function_tokens, jnp.where(order == steps, self.token["?"], NO_TOKEN))
        return state, self.prompt(jnp.append(start, rest))

    def changed(self, state: ChainState, prompt: jax.Array, key: jax.Array) -> tuple[ChainState, jax.Array]:
        """Replaces the initial value or the function of one step, all with equal probability."""
        uniform = jax.random.uniform(key, (2,), jnp.float32)
        slot = below(uniform[0], state.steps + 1)
        first, choices = jnp.where(slot == 0, 0, self.values), jnp.where(slot == 0, self.values, self.functions)
        other = first + (looked_up(prompt, slot) - first + 1 + below(uniform[1], choices - 1)) % choices
        prompt = jnp.where(jnp.arange(self.reply_length) == slot, other, prompt)
        path = self._path(prompt[0], prompt[1:-1] - self.values, state.steps)
        return replace(state, path=path), prompt

    def _path(self, start: jax.Array, functions: jax.Array, steps: jax.Array) -> jax.Array:
        """Returns the initial value and the value after each step, of which only the first `steps` count."""
        path = [start]
        for step in range(self.most_steps):
            after = jnp.asarray(self.table)[functions[step], path[-1]]
            path.append(jnp.where(step < steps, after, path[-1]))
        return jnp.stack(path)

    def respond(self, state: ChainState, token: jax.Array) -> tuple[ChainState, Reply]:
        """Returns the reply to a token, which is empty before the end."""
        in_prompt = state.prompt_left > 0
        is_value = token < self.values
        ended = ~in_prompt & (token == self.token["end"])
        right = ~in_prompt & ~state.answering & (state.shown < state.steps)
        right &= is_value & (token == looked_up(state.path, state.shown + 1))
        after = replace(
            state,
            prompt_left=jnp.maximum(state.prompt_left - 1, 0),
            shown=state.shown + right.astype(jnp.int32),
            answering=~in_prompt & (token == self.token["answer"]),
            answer=jnp.where(~in_prompt & state.answering & is_value, token, state.answer).astype(jnp.int32),
            ended=state.ended | ended,
        )
        return after, self.choose(ended, self.end(), self.own())

    def reward(self, state: ChainState) -> dict[str, jax.Array]:
        """Returns gold, 1 for the right answer of an ended row, else 0; and the share of the steps written down."""
        right = state.ended & (state.answer == state.path[-1])
        return {
            "gold": right.astype(jnp.float32),
            "answered": (state.answer >= 0).astype(jnp.float32),
            "shown": (state.shown / state.steps).astype(jnp.float32),
        }

    def demonstration(self, key: jax.Array, difficulty: jax.Array, right: jax.Array) -> jax.Array:
        """Right: writes down every step. Wrong: answers another value without any step."""
        state, prompt = self.reset(key, difficulty)
        guessing = jax.random.uniform(jax.random.fold_in(key, DEMONSTRATION), (), jnp.float32)
        offset = jnp.where(right, 0, 1 + below(guessing, self.values - 1))
        answer = (state.path[-1] + offset) % self.values
        begin = state.prompt_left
        shown = jnp.where(right, state.steps, 0)
        row = jnp.full((self.length,), NO_TOKEN, jnp.int32).at[: self.reply_length].set(prompt.tokens)
        slot = jnp.arange(self.length)
        written = (slot >= begin) & (slot < begin + shown)
        row = jnp.where(written, state.path[jnp.clip(slot - begin + 1, 0, self.most_steps)], row)
        closing = jnp.stack([jnp.int32(self.token["answer"]), answer, jnp.int32(self.token["end"])])
        return jax.lax.dynamic_update_slice(row, closing, (begin + shown,))
