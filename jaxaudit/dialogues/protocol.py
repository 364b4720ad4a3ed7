"""What a dialogue is: a task whose episode is one row of tokens, some given and the others the policy's own.

A dialogue is pure functions of one row; who trains on it vmaps them. A user's own is a frozen dataclass:

    @ja.register("dialogue", "echo")
    @dataclass(frozen=True)
    class Echo(ja.Dialogue):
        \"\"\"Say the prompt's token again.\"\"\"

        vocabulary, length, reply_length = 8, 2, 1

        def reset(self, key, difficulty):
            wanted = jax.random.randint(key, (), 0, self.vocabulary)
            return (wanted, jnp.int32(-1)), self.prompt(wanted[None])

        def respond(self, state, token):
            wanted, asked = state
            answer = asked >= 0  # the first token is the prompt's
            return (wanted, token), self.choose(answer, self.end(), self.own())

        def reward(self, state):
            return {"gold": (state[0] == state[1]).astype(jnp.float32)}
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

OWN, PROMPT, TOOL, END = range(4)
"""Who writes a slot's token: the policy, the prompt, a tool's result; or nobody, for the dialogue is over."""

ROLES = ("own", "prompt", "tool", "end")
"""The same in words."""

GOLD = "gold"
"""The reward that says what a row is worth, from 0 to 1."""

NOTHING = -1
"""In the place of a token where there is none."""


@struct.dataclass
class Reply:
    """What a dialogue says when it has been told a token.

    Attributes:
      tokens: given tokens that are to be written next, int32 `[R]`, `NOTHING` after the last.
      role: whose they are, `PROMPT` or `TOOL`, int32; `OWN` where there are none and the policy goes on; `END` where
        the dialogue is over.
      fresh: bool, whether they begin a new chunk, which sees nothing before it and whose positions begin at zero.
    """

    tokens: Any
    role: Any
    fresh: Any


class Dialogue:
    """A dialogue's functions, of one row, and what they are about; equal ones are to be equal and hash alike.

    Attributes:
      vocabulary: tokens there are, 0 to vocabulary - 1.
      length: slots a row has, the most tokens it can be.
      reply_length: R, the most tokens of a prompt or result.
      prompt_length: the fewest tokens a prompt has; so many slots are computed at once.
      difficulty: of the prompts trained on unless said otherwise.
      difficulties: the lowest and the highest that mean something.
      result_error: what a tool that fails says; () where there is no tool.
      result_tokens: the tokens that results are written in.
      prompt_tokens: the tokens that prompts are written in; () for all.
      rare: pairs of a token and a rare one of the same meaning, for results in words that were hardly seen.
      end_of_text: the token that ends a text, as a saved policy's config tells it; None: the vocabulary's last.
      words: a legible name for each token, for printing; () for numbers.
      data: arrays that the functions read, a pytree kept once a device; see `bind`.
    """

    vocabulary: int
    length: int
    reply_length: int
    prompt_length: int = 1
    difficulty: float = 0.0
    difficulties: tuple[float, float] = (0.0, 0.0)
    result_error: tuple[int, ...] = ()
    result_tokens: tuple[int, ...] = ()
    prompt_tokens: tuple[int, ...] = ()
    rare: tuple[tuple[int, int], ...] = ()
    end_of_text: int | None = None
    words: tuple[str, ...] = ()
    data: Any = None

    def reset(self, key: jax.Array, difficulty: jax.Array) -> tuple[Any, Reply]:
        """A dialogue's first state, any pytree of arrays, and its prompt, of at least `prompt_length` tokens."""
        raise NotImplementedError

    def respond(self, state: Any, token: jax.Array) -> tuple[Any, Reply]:
        """The state after a token was written, given or own, and what the dialogue says to it.

        Given tokens may be others than those it gave: a disturbed tool. So any token may come at any time.
        """
        raise NotImplementedError

    def reward(self, state: Any) -> dict[str, jax.Array]:
        """What a row that ended in this state is worth: "gold", in [0, 1], and its parts by name; float32 scalars."""
        raise NotImplementedError

    def demonstration(self, key: jax.Array, difficulty: jax.Array, right: jax.Array) -> jax.Array:
        """A whole row, int32 `[length]`, `NOTHING` after its end, that begins with `reset(key, difficulty)`'s prompt.

        `right` (bool) says whether it earns its reward or shows no more than the manner. Its given tokens are those
        that the dialogue gives to its own ones.
        """
        raise NotImplementedError(f"{type(self).__name__} has no demonstrations, so nothing to warm up with")

    def make(self) -> Dialogue:
        """The dialogue, with what its files hold if it has any. Raises ValueError where they cannot be read."""
        return self

    def held_out(self) -> Dialogue:
        """The dialogue with the prompts that are kept for measuring, none of which this one has.

        A dialogue that gives itself is not split: it is measured on fixed prompts, any of which may be trained on, and
        channels call them so.
        """
        return self

    @property
    def splits(self) -> bool:
        """Whether some of its prompts are kept for measuring and never trained on."""
        return self.held_out() != self

    def changed(self, state: Any, prompt: jax.Array, key: jax.Array) -> tuple[Any, jax.Array]:
        """A dialogue of which nothing is written yet, with one token of its prompt replaced by another.

        A dialogue need not have it; one without has no channel "changed_prompt_success". The changed prompt is no
        harder, and may be one that is trained on.

        Args:
          state: the first one, as `reset` gave it.
          prompt: `reset`'s tokens, int32 `[R]`.
          key: decides what is changed.

        Returns:
          the state of a dialogue that asks what the changed prompt asks, and rewards that; the changed prompt.
        """
        raise NotImplementedError(f"{type(self).__name__} does not change its prompts")

    def bind(self, data: Any) -> Dialogue:
        """The dialogue with `data` of its own structure, as it is in a program, in the place of its arrays."""
        return self

    def text(self, tokens: Any) -> str:
        """Tokens `[N]` in legible form; `NOTHING` is left out."""
        shown = [int(t) for t in tokens if t >= 0]
        return " ".join(self.words[t] if self.words else str(t) for t in shown)

    def derive(self, **values: Any) -> None:
        """Sets attributes that follow from the fields of a frozen dataclass; for its `__post_init__`."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    # What `reset` and `respond` give back.

    def own(self) -> Reply:
        """Returns the empty reply: the policy goes on, or what is given is not all written yet."""
        return self._reply(jnp.zeros((0,), jnp.int32), OWN, False)

    def end(self) -> Reply:
        """Returns the reply that ends the dialogue."""
        return self._reply(jnp.zeros((0,), jnp.int32), END, False)

    def prompt(self, tokens: Any, fresh: bool = False) -> Reply:
        """Tokens, at most `reply_length`, of a prompt, or with `fresh` of the next chunk's."""
        return self._reply(tokens, PROMPT, fresh)

    def result(self, tokens: Any) -> Reply:
        """Tokens, at most `reply_length`, of a tool's result."""
        return self._reply(tokens, TOOL, False)

    def _reply(self, tokens: Any, role: int, fresh: bool) -> Reply:
        tokens = jnp.asarray(tokens, jnp.int32)
        missing = self.reply_length - tokens.shape[0]
        if missing < 0:
            raise ValueError(f"a reply has {tokens.shape[0]} tokens, and reply_length is {self.reply_length}")
        padded = jnp.pad(tokens, (0, missing), constant_values=NOTHING)
        return Reply(padded, jnp.int32(role), jnp.asarray(fresh, bool))

    def choose(self, condition: jax.Array, then: Reply, otherwise: Reply) -> Reply:
        """Returns one reply where a condition holds, and the other elsewhere."""
        return jax.tree.map(lambda a, b: jnp.where(condition, a, b), then, otherwise)


def has_demonstrations(dialogue: Dialogue) -> bool:
    """Whether it shows how it is done."""
    return type(dialogue).demonstration is not Dialogue.demonstration


def has_changes(dialogue: Dialogue) -> bool:
    """Whether a dialogue can change one token of its prompts, which "changed_prompt_success" needs."""
    return type(dialogue).changed is not Dialogue.changed
