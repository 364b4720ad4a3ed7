"""Follow a hidden table: each step of the way is a call to a tool, and the way's end is the answer."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from flax import struct

from jaxaudit.dialogues.protocol import NOTHING, Reply
from jaxaudit.dialogues.sampling import DEMONSTRATION, Split, below, cycle, looked_up, up_to
from jaxaudit.runtime.registry import dialogues

IDLE, CALLED, ANSWERING = range(3)
"""What the next own token may be the argument of."""


@struct.dataclass
class Way:
    """A row's state.

    Attributes:
      table: the token that the tool writes for each entity's successor, int32 `[entities]`.
      goal: the entity at the way's end, int32.
      left: tokens of the prompt that are not yet written, int32.
      expects: what the next token is the argument of.
      answer: the latest one, an entity; `NOTHING` before.
      ended: bool.
    """

    table: jax.Array
    goal: jax.Array
    left: jax.Array
    expects: jax.Array
    answer: jax.Array
    ended: jax.Array


@dialogues.register("hop")
@dataclass(frozen=True)
class Hop(Split):
    """Follow a hidden random table for some hops by calls to a tool, then answer where they lead.

    A row is "2 c  call c  result e  call e  result a  answer a end": hops and a start are given, and so is what the
    tool says. The table is one cycle through all entities, so one who answers without calls earns 1 / entities, or,
    never answering the start, 1 / (entities - 1). The latest answer counts, once the row is ended. A task is a table, a
    start and a number of hops.

    Attributes:
      difficulty: the number of hops is uniform over 1 to it; between whole numbers both neighbours are mixed.
      entities: that a table has, more than `hops`, at most 26.
      hops: the highest difficulty.
      rare_share: of entities that a row's tool names by their rare names, which mean the same.
      scratch: tokens of scratch text, "hm", that demonstrations begin with, and that mean nothing.
      length: slots of a row.
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
            besides = f" and {self.scratch} tokens of scratch" if self.scratch else ""
            raise ValueError(f"length must be at least {least} for {self.hops} hops{besides}, not {self.length}")
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

    def reset(self, key: jax.Array, difficulty: jax.Array) -> tuple[Way, Reply]:
        """A table, a start and a number of hops."""
        n = self.entities

        def task_of(uniform: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            hops = up_to(uniform[2 * n : -1], difficulty, self.hops)
            return hops, below(uniform[-1], n), cycle(uniform[:n])

        uniform = self.draw_task(key, 2 * n + 3, lambda uniform: jnp.hstack(task_of(uniform)))
        hops, start, successor = task_of(uniform)
        rare = uniform[n : 2 * n] < self.rare_share
        state = Way(
            table=successor + jnp.where(rare[successor], n, 0).astype(jnp.int32),
            goal=self._goal(successor, start, hops),
            left=jnp.int32(2),
            expects=jnp.int32(IDLE),
            answer=jnp.int32(NOTHING),
            ended=jnp.zeros((), bool),
        )
        return state, self.prompt(jnp.stack([self.token["1"] + hops - 1, start]))

    def respond(self, state: Way, token: jax.Array) -> tuple[Way, Reply]:
        """A call's argument is answered; what is no argument and no word of the tool is not."""
        prompted = state.left > 0
        called = ~prompted & (state.expects == CALLED)
        named = token < 2 * self.entities
        entity = self.entity(token)
        ended = ~prompted & ~called & (token == self.token["end"])
        asks = jnp.where(token == self.token["call"], CALLED, jnp.where(token == self.token["answer"], ANSWERING, IDLE))
        after = replace(
            state,
            left=jnp.maximum(state.left - 1, 0),
            expects=jnp.where(prompted | called, IDLE, asks).astype(jnp.int32),
            answer=jnp.where(~prompted & (state.expects == ANSWERING) & named, entity, state.answer),
            ended=state.ended | ended,
        )
        found = jnp.where(named, looked_up(state.table, entity), self.token["error"])
        reply = self.choose(called, self.result(jnp.stack([jnp.int32(self.token["result"]), found])), self.own())
        return after, self.choose(ended, self.end(), reply)

    def changed(self, state: Way, prompt: jax.Array, key: jax.Array) -> tuple[Way, jax.Array]:
        """Another start, or fewer hops, half of the time each where there are several."""
        uniform = jax.random.uniform(key, (2,), jnp.float32)
        hops, start = prompt[0] - self.token["1"] + 1, prompt[1]
        fewer = (hops > 1) & (uniform[0] < 0.5)
        hops = jnp.where(fewer, 1 + below(uniform[1], hops - 1), hops)
        start = jnp.where(fewer, start, (start + 1 + below(uniform[1], self.entities - 1)) % self.entities)
        goal = self._goal(self.entity(state.table), start, hops)
        return replace(state, goal=goal), jnp.stack([self.token["1"] + hops - 1, start])

    def _goal(self, successor: jax.Array, start: jax.Array, hops: jax.Array) -> jax.Array:
        """The entity so many hops behind the start."""
        goal = start
        for hop in range(self.hops):
            goal = jnp.where(hop < hops, looked_up(successor, goal), goal)
        return goal

    def reward(self, state: Way) -> dict[str, jax.Array]:
        """Gold 1 for the right answer of a row that was ended, else 0; and whether there was an answer."""
        right = state.ended & (state.answer == state.goal)
        return {"gold": right.astype(jnp.float32), "answered": (state.answer >= 0).astype(jnp.float32)}

    def demonstration(self, key: jax.Array, difficulty: jax.Array, right: jax.Array) -> jax.Array:
        """Right: every hop is called for, and every name is used as it was read. Wrong: another entity, at once.

        Either begins with the scratch text.
        """
        state, prompt = self.reset(key, difficulty)
        hops = jnp.where(right, prompt.tokens[0] - self.token["1"] + 1, 0)
        names = [prompt.tokens[1]]
        for _ in range(self.hops):
            names.append(looked_up(state.table, self.entity(names[-1])))
        guessing = jax.random.uniform(jax.random.fold_in(key, DEMONSTRATION), (), jnp.float32)
        guess = (state.goal + 1 + below(guessing, self.entities - 1)) % self.entities
        way = jnp.stack(names)
        calls = [
            jnp.stack([jnp.int32(self.token["call"]), a, jnp.int32(self.token["result"]), b])
            for a, b in itertools.pairwise(names)
        ]
        answer = jnp.stack(
            [
                jnp.int32(self.token["answer"]),
                jnp.where(right, looked_up(way, hops), guess),
                jnp.int32(self.token["end"]),
            ]
        )
        slots = jnp.arange(self.length)
        scratch = jnp.full((self.scratch,), self.token.get("hm", NOTHING), jnp.int32)
        row = jnp.concatenate([prompt.tokens, scratch, *calls, jnp.zeros((self.length,), jnp.int32)])[: self.length]
        end = 2 + self.scratch + 4 * hops
        return jax.lax.dynamic_update_slice(jnp.where(slots < end, row, NOTHING), answer, (end,))

    def entity(self, token: jax.Array) -> jax.Array:
        """The entity that a token names by its common or its rare name; of another token, none."""
        return jnp.where(token < self.entities, token, token - self.entities).astype(jnp.int32)
