"""The dialogue "hop": a policy follows a hidden table by calls to a tool, and answers where the path ends."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from flax import struct

from jaxaudit.dialogues.protocol import NO_TOKEN, Reply
from jaxaudit.dialogues.sampling import DEMONSTRATION, Split, below, cycle, looked_up, up_to
from jaxaudit.runtime.registry import dialogues

IDLE, CALLED, ANSWERING = range(3)
"""What the next token is the argument of: nothing, a tool call, or an answer."""


@struct.dataclass
class HopState:
    """The state of a row.

    Attributes:
      table: The token that the tool writes for each entity's successor, int32 `[entities]`.
      goal: The entity at the end of the path, int32.
      prompt_left: The number of prompt tokens that are not yet written, int32.
      expects: What the next token is the argument of, int32: `IDLE`, `CALLED` or `ANSWERING`.
      answer: The latest answer, an entity, int32; `NO_TOKEN` before the first.
      ended: Whether the policy has ended the row, bool.
    """

    table: jax.Array
    goal: jax.Array
    prompt_left: jax.Array
    expects: jax.Array
    answer: jax.Array
    ended: jax.Array


@dialogues.register("hop")
@dataclass(frozen=True)
class Hop(Split):
    """Follow a hidden random table for some hops by calls to a tool, then answer where they lead.

    An example of a row is "2 c  call c  result e  call e  result a  answer a end". The prompt has the number of hops
    and the first entity. The table is one cycle through all entities, so a policy that answers without calls earns
    1 / entities, or 1 / (entities - 1) if it never answers the first entity. The latest answer counts, if the row is
    ended. A task is a table, a first entity and a number of hops.

    Attributes:
      difficulty: The number of hops is uniform over 1 to `difficulty`; a fraction mixes the two adjacent difficulties.
      entities: The number of entities in a table, more than `hops` and at most 26.
      hops: The highest difficulty.
      rare_share: The share of entities for which a row's tool writes a rare token with the same meaning.
      scratch: The number of meaningless scratch tokens, "hm", at the beginning of demonstrations.
      length: The number of slots of a row.
    """

    difficulty: float = 3.0
    entities: int = 6
    hops: int = 4
    rare_share: float = 0.002
    scratch: int = 0
    length: int = 24
    token: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        if not 1 <= self.hops <= 9:
            raise ValueError(f"hops must be from 1 to 9, not {self.hops}")
        if not self.hops < self.entities <= 26:
            raise ValueError(f"entities must be more than the {self.hops} hops and at most 26, not {self.entities}")
        if not 1 <= self.difficulty <= self.hops:
            raise ValueError(f"difficulty must be from 1 to the {self.hops} hops, not {self.difficulty:g}")
        if not 0 <= self.rare_share <= 1:
            raise ValueError(f"rare_share must lie in [0, 1], not {self.rare_share:g}")
        if self.scratch < 0:
            raise ValueError(f"scratch must not be negative, as {self.scratch} is")
        if self.length < (least := 5 + 4 * self.hops + self.scratch):
            scratch = f" and {self.scratch} tokens of scratch" if self.scratch else ""
            raise ValueError(f"length must be at least {least} for {self.hops} hops{scratch}, not {self.length}")
        n, letters = self.entities, "abcdefghijklmnopqrstuvwxyz"[: self.entities]
        digits = tuple(str(hops) for hops in range(1, self.hops + 1))
        words = (*letters, *letters.upper(), *digits, "call", "result", "answer", "end", "error")
        words += ("hm",) if self.scratch else ()
        token = {word: number for number, word in enumerate(words)}
        self.derive(
            vocabulary=len(words),
            reply_length=2,
            prompt_length=2,
            difficulties=(1.0, float(self.hops)),
            result_error=(token["result"], token["error"]),
            result_tokens=tuple(range(n)),
            prompt_tokens=(*range(n), *(token[digit] for digit in digits)),
            rare=tuple((common, n + common) for common in range(n)),
            words=words,
            token=token,
        )

    def reset(self, key: jax.Array, difficulty: jax.Array) -> tuple[HopState, Reply]:
        """Draws a table, a first entity and a number of hops."""
        n = self.entities

        def task_of(uniform: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            hops = up_to(uniform[2 * n : -1], difficulty, self.hops)
            return hops, below(uniform[-1], n), cycle(uniform[:n])

        uniform = self.draw_task(key, 2 * n + 3, lambda uniform: jnp.hstack(task_of(uniform)))
        hops, start, successor = task_of(uniform)
        rare = uniform[n : 2 * n] < self.rare_share
        state = HopState(
            table=successor + jnp.where(rare[successor], n, 0).astype(jnp.int32),
            goal=self._goal(successor, start, hops),
            prompt_left=jnp.int32(2),
            expects=jnp.int32(IDLE),
            answer=jnp.int32(NO_TOKEN),
            ended=jnp.zeros((), bool),
        )
        return state, self.prompt(jnp.stack([self.token["1"] + hops - 1, start]))

    def respond(self, state: HopState, token: jax.Array) -> tuple[HopState, Reply]:
        """Returns the reply to a token: the tool's result after the argument of a call, or the end."""
        in_prompt = state.prompt_left > 0
        called = ~in_prompt & (state.expects == CALLED)
        is_entity = token < 2 * self.entities
        entity = self.entity(token)
        ended = ~in_prompt & ~called & (token == self.token["end"])
        call, answer = self.token["call"], self.token["answer"]
        expects = jnp.where(token == call, CALLED, jnp.where(token == answer, ANSWERING, IDLE))
        after = replace(
            state,
            prompt_left=jnp.maximum(state.prompt_left - 1, 0),
            expects=jnp.where(in_prompt | called, IDLE, expects).astype(jnp.int32),
            answer=jnp.where(~in_prompt & (state.expects == ANSWERING) & is_entity, entity, state.answer),
            ended=state.ended | ended,
        )
        successor = jnp.where(is_entity, looked_up(state.table, entity), self.token["error"])
        result = self.result(jnp.stack([jnp.int32(self.token["result"]), successor]))
        reply = self.choose(called, result, self.own())
        return after, self.choose(ended, self.end(), reply)

    def changed(self, state: HopState, prompt: jax.Array, key: jax.Array) -> tuple[HopState, jax.Array]:
        """Replaces the first entity, or with probability 1/2, if there are several hops, reduces their number."""
        uniform = jax.random.uniform(key, (2,), jnp.float32)
        hops, start = prompt[0] - self.token["1"] + 1, prompt[1]
        fewer = (hops > 1) & (uniform[0] < 0.5)
        hops = jnp.where(fewer, 1 + below(uniform[1], hops - 1), hops)
        start = jnp.where(fewer, start, (start + 1 + below(uniform[1], self.entities - 1)) % self.entities)
        goal = self._goal(self.entity(state.table), start, hops)
        return replace(state, goal=goal), jnp.stack([self.token["1"] + hops - 1, start])

    def _goal(self, successor: jax.Array, start: jax.Array, hops: jax.Array) -> jax.Array:
        """Returns the entity that is `hops` hops after the start."""
        goal = start
        for hop in range(self.hops):
            goal = jnp.where(hop < hops, looked_up(successor, goal), goal)
        return goal

    def reward(self, state: HopState) -> dict[str, jax.Array]:
        """Returns gold, 1 for the right answer of an ended row, else 0; and whether there was an answer."""
        right = state.ended & (state.answer == state.goal)
        return {"gold": right.astype(jnp.float32), "answered": (state.answer >= 0).astype(jnp.float32)}

    def demonstration(self, key: jax.Array, difficulty: jax.Array, right: jax.Array) -> jax.Array:
        """Right: calls the tool for every hop and copies its results. Wrong: answers another entity without a call.

        Both begin with the scratch tokens.
        """
        state, prompt = self.reset(key, difficulty)
        hops = jnp.where(right, prompt.tokens[0] - self.token["1"] + 1, 0)
        path_tokens = [prompt.tokens[1]]
        for _ in range(self.hops):
            path_tokens.append(looked_up(state.table, self.entity(path_tokens[-1])))
        guessing = jax.random.uniform(jax.random.fold_in(key, DEMONSTRATION), (), jnp.float32)
        guess = (state.goal + 1 + below(guessing, self.entities - 1)) % self.entities
        path = jnp.stack(path_tokens)
        calls = [
            jnp.stack([jnp.int32(self.token["call"]), a, jnp.int32(self.token["result"]), b])
            for a, b in itertools.pairwise(path_tokens)
        ]
        answer = jnp.stack(
            [
                jnp.int32(self.token["answer"]),
                jnp.where(right, looked_up(path, hops), guess),
                jnp.int32(self.token["end"]),
            ]
        )
        slots = jnp.arange(self.length)
        scratch = jnp.full((self.scratch,), self.token.get("hm", NO_TOKEN), jnp.int32)
        row = jnp.concatenate([prompt.tokens, scratch, *calls, jnp.zeros((self.length,), jnp.int32)])[: self.length]
        end = 2 + self.scratch + 4 * hops
        return jax.lax.dynamic_update_slice(jnp.where(slots < end, row, NO_TOKEN), answer, (end,))

    def entity(self, token: jax.Array) -> jax.Array:
        """Returns the entity that a common or rare token stands for, int32; no entity for any other token."""
        return jnp.where(token < self.entities, token, token - self.entities).astype(jnp.int32)
