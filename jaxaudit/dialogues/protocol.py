"""The `Dialogue` base class, whose episode is one row of prompt, policy and tool tokens, and the task kind "dialogue".

A dialogue is a set of pure functions of one row; learners vmap them over rows. A user's is a frozen dataclass:

    @ja.register("dialogue", "echo")
    @dataclass(frozen=True)
    class Echo(ja.Dialogue):
        \"\"\"Say the prompt's token again.\"\"\"

        vocabulary, length, reply_length = 8, 2, 1

        def reset(self, key, difficulty):
            target = jax.random.randint(key, (), 0, self.vocabulary)
            return (target, jnp.int32(-1)), self.prompt(target[None])

        def respond(self, state, token):
            target, previous = state
            answered = previous >= 0  # the first token is the prompt's
            return (target, token), self.choose(answered, self.end(), self.own())

        def reward(self, state):
            return {"gold": (state[0] == state[1]).astype(jnp.float32)}
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import struct

from jaxaudit.runtime.registry import check_name, dialogues, first_docstring_line, task_kinds

POLICY, PROMPT, TOOL, END = range(4)
"""The roles of a slot: its token is written by the policy, the prompt or a tool, or the dialogue is over."""

ROLES = ("own", "prompt", "tool", "end")
"""The names of the roles `POLICY`, `PROMPT`, `TOOL` and `END` in stored telemetry."""

GOLD = "gold"
"""The name of the verifiable reward, from 0 to 1, by which a row is judged."""

NO_TOKEN = -1
"""The padding in place of a missing token."""


@struct.dataclass
class Reply:
    """What a dialogue returns after a token.

    Attributes:
      tokens: The tokens that the dialogue writes next, int32 `[R]`, padded with `NO_TOKEN`.
      role: The role of these tokens, int32: `PROMPT` or `TOOL`; `POLICY` if there are none and the policy writes next;
        `END` if the dialogue is over.
      fresh: Whether the tokens begin a new chunk, bool. A chunk attends to nothing before it, and its positions begin
        at zero.
    """

    tokens: Any
    role: Any
    fresh: Any


class Dialogue:
    """The functions and constants of a dialogue, for one row. Equal dialogues must compare equal and hash alike.

    Attributes:
      vocabulary: The number of tokens, which are 0 to `vocabulary` - 1.
      length: The number of slots of a row, and so the largest number of tokens.
      reply_length: R, the largest number of tokens of a prompt or of a tool's result.
      prompt_length: The smallest number of tokens of a prompt. This many slots are filled at once.
      difficulty: The default difficulty of prompts.
      difficulties: The lowest and the highest difficulty.
      result_error: The tokens of a failed tool call's result; () if there is no tool.
      result_tokens: The tokens that may occur in tool results.
      prompt_tokens: The tokens that may occur in prompts; () for all.
      rare: Pairs of a token and a rare token with the same meaning, with which perturbations shift tool results.
      end_of_text: The end-of-text token, which a checkpoint's config names; None for the last token.
      words: A legible text for each token, for printing; () to print token numbers.
      data: Arrays that the functions read, a pytree that is stored once a device; see `bind`.
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
        """Returns the initial state, a pytree of arrays, and the prompt, which has at least `prompt_length` tokens."""
        raise NotImplementedError

    def respond(self, state: Any, token: jax.Array) -> tuple[Any, Reply]:
        """Returns the state after a token of any role was written, and the dialogue's reply to it.

        A perturbation of the tool may replace the dialogue's tokens by others, so any token may come at any time.
        """
        raise NotImplementedError

    def reward(self, state: Any) -> dict[str, jax.Array]:
        """Returns the rewards of a row that ended in `state`, float32 scalars by name, with "gold" in [0, 1]."""
        raise NotImplementedError

    def demonstration(self, key: jax.Array, difficulty: jax.Array, right: jax.Array) -> jax.Array:
        """Returns a complete row, int32 `[length]`, padded with `NO_TOKEN`, that begins with the prompt of `reset`.

        Its prompt and tool tokens are those that the dialogue writes in reply to the row's policy tokens.

        Args:
          key: The key that is also given to `reset`.
          difficulty: The difficulty that is also given to `reset`.
          right: Whether the row earns the gold reward, bool; otherwise it only has the format of an answer.
        """
        raise NotImplementedError(f"{type(self).__name__} has no demonstrations, so a policy cannot be warmed up on it")

    def make(self) -> Dialogue:
        """Returns the dialogue with the content of its files, if it has any.

        Raises:
          ValueError: A file cannot be read.
        """
        return self

    def held_out(self) -> Dialogue:
        """Returns the dialogue of the prompts for evaluation, which are disjoint from the prompts for training.

        A dialogue that returns itself has no split: it is evaluated on fixed prompts, any of which may be trained on,
        and the names of its channels say so.
        """
        return self

    @property
    def splits(self) -> bool:
        """Whether some prompts are held out for evaluation and never trained on."""
        return self.held_out() != self

    def changed(self, state: Any, prompt: jax.Array, key: jax.Array) -> tuple[Any, jax.Array]:
        """Returns the initial state and the prompt of a dialogue whose prompt differs in one token.

        This function is optional; a dialogue without it has no channel "changed_prompt_success". The changed prompt is
        no harder than the original, and may be one that is trained on.

        Args:
          state: The initial state that `reset` returned.
          prompt: The tokens that `reset` returned, int32 `[R]`.
          key: Decides the change.

        Returns:
          The state of a dialogue that rewards answers to the changed prompt, and the changed prompt.
        """
        raise NotImplementedError(f"{type(self).__name__} does not change its prompts")

    def bind(self, data: Any) -> Dialogue:
        """Returns the dialogue with `data`, a pytree of the same structure as its own, such as a program's tracers."""
        return self

    def text(self, tokens: Any) -> str:
        """Returns tokens `[N]` as legible text, without `NO_TOKEN`."""
        present = [int(token) for token in tokens if token >= 0]
        return " ".join(self.words[token] if self.words else str(token) for token in present)

    def derive(self, **values: Any) -> None:
        """Sets attributes of a frozen dataclass that follow from its fields; for use in `__post_init__`."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def copy_with(self, **values: Any) -> Self:
        """Returns a copy with other values of attributes that are not arguments of the dataclass."""
        other = copy.copy(self)
        other.derive(**values)
        return other

    # The replies that `reset` and `respond` return.

    def own(self) -> Reply:
        """Returns the reply without tokens: the policy writes next, or queued tokens of an earlier reply follow."""
        return self._reply(jnp.zeros((0,), jnp.int32), POLICY, False)

    def end(self) -> Reply:
        """Returns the reply that ends the dialogue."""
        return self._reply(jnp.zeros((0,), jnp.int32), END, False)

    def prompt(self, tokens: Any, fresh: bool = False) -> Reply:
        """Returns a prompt of at most `reply_length` tokens, which begins a new chunk if `fresh`."""
        return self._reply(tokens, PROMPT, fresh)

    def result(self, tokens: Any) -> Reply:
        """Returns a tool's result of at most `reply_length` tokens."""
        return self._reply(tokens, TOOL, False)

    def _reply(self, tokens: Any, role: int, fresh: bool) -> Reply:
        tokens = jnp.asarray(tokens, jnp.int32)
        missing = self.reply_length - tokens.shape[0]
        if missing < 0:
            raise ValueError(f"a reply has {tokens.shape[0]} tokens, more than the reply_length {self.reply_length}")
        padded = jnp.pad(tokens, (0, missing), constant_values=NO_TOKEN)
        return Reply(padded, jnp.int32(role), jnp.asarray(fresh, bool))

    def choose(self, condition: jax.Array, then: Reply, otherwise: Reply) -> Reply:
        """Returns the reply `then` if the condition holds, and `otherwise` if not."""
        return jax.tree.map(lambda a, b: jnp.where(condition, a, b), then, otherwise)


def has_demonstrations(dialogue: Dialogue) -> bool:
    """Returns whether a dialogue implements `demonstration`, which warm starts need."""
    return type(dialogue).demonstration is not Dialogue.demonstration


def has_changes(dialogue: Dialogue) -> bool:
    """Returns whether a dialogue implements `changed`, which the channel "changed_prompt_success" needs."""
    return type(dialogue).changed is not Dialogue.changed


@task_kinds.register("dialogue")
@dataclass(frozen=True)
class DialogueTask:
    """Registered dialogues: token rows in which a policy answers prompts, with or without a tool.

    Attributes:
      name: The name that the dialogue is registered under.
      settings: The dialogue before it has read any file. In a spec, its fields are keys beside `name`.
    """

    kind: ClassVar[str] = "dialogue"
    gives: ClassVar[str] = "dialogue"

    name: str
    settings: Dialogue

    def make(self) -> Dialogue:
        """Returns the dialogue with the content of its files.

        Raises:
          ValueError: A file cannot be read, or the dialogue's functions are inconsistent.
        """
        dialogue = self.settings.make()
        if reason := misfit(dialogue):
            raise ValueError(f"dialogue '{self.name}' {reason}")
        return dialogue

    @classmethod
    def named(cls, name: str) -> type[Dialogue]:
        """Returns the dataclass that is registered under a name.

        Raises:
          ValueError: The name is unknown, or what is registered is not a frozen dataclass derived from `Dialogue`.
        """
        registered = dialogues[name]
        frozen = getattr(getattr(registered, "__dataclass_params__", None), "frozen", False)
        if not (isinstance(registered, type) and issubclass(registered, Dialogue) and frozen):
            raise ValueError(f"dialogue '{name}' must be a frozen dataclass that is derived from Dialogue")
        return registered

    @classmethod
    def listing(cls) -> Sequence[tuple[str, str]]:
        """Returns the names of the registered dialogues, each with the first line of its docstring."""
        return [(name, first_docstring_line(dialogues[name])) for name in dialogues]


def named(name: str, **settings: Any) -> DialogueTask:
    """Returns the task of the dialogue that is registered under a name.

    Args:
      name: The name that the dialogue is registered under.
      **settings: Fields of the dialogue's dataclass.

    Raises:
      ValueError: The name or a setting is unknown, a required setting is missing, or the dialogue refuses a value.
    """
    registered = DialogueTask.named(name)
    fields = [field for field in dataclasses.fields(registered) if field.init]  # type: ignore[arg-type]
    allowed = [field.name for field in fields]
    for key in settings:
        check_name(f"setting of dialogue '{name}'", key, allowed)
    for field in fields:
        if field.name not in settings and field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"dialogue '{name}' needs the setting '{field.name}'")
    return DialogueTask(name, registered(**settings))


def misfit(dialogue: Dialogue) -> str | None:
    """Returns why a dialogue's functions or constants are inconsistent, as a predicate; None if they are not."""
    for name in ("vocabulary", "length", "reply_length", "prompt_length"):
        if not isinstance(size := getattr(dialogue, name, None), int) or size < 1:
            return f"must have a whole number of at least 1 as its {name}, not {size!r}"
    if dialogue.prompt_length > min(dialogue.reply_length, dialogue.length):
        return f"has a prompt_length of {dialogue.prompt_length}, more than its reply_length or its length"
    lowest, highest = dialogue.difficulties
    if not lowest <= dialogue.difficulty <= highest:
        return f"has difficulty {dialogue.difficulty:g}, outside its difficulties, {lowest:g} to {highest:g}"

    def first_token(key: jax.Array, difficulty: jax.Array, token: jax.Array) -> tuple[Any, ...]:
        state, prompt = dialogue.reset(key, difficulty)
        after, reply = dialogue.respond(state, token)
        states = (jax.tree.map(jnp.asarray, state), jax.tree.map(jnp.asarray, after))
        return *states, dialogue.own(), prompt, reply, dialogue.reward(after)

    def prompt_change(key: jax.Array, difficulty: jax.Array) -> tuple[Any, Any]:
        state, prompt = dialogue.reset(key, difficulty)
        changed = dialogue.changed(state, prompt.tokens, key)
        return jax.tree.map(jnp.asarray, (state, prompt.tokens)), jax.tree.map(jnp.asarray, changed)

    key, difficulty = jax.random.key(0), jnp.float32(0)
    before, after, empty, *replies, reward = jax.eval_shape(first_token, key, difficulty, jnp.int32(0))
    if _shapes(before) != _shapes(after):
        return "returns a state from respond that differs from the state of reset in structure, shape or dtype"
    if any(_shapes(reply) != _shapes(empty) for reply in replies):
        return "returns something other than a Reply; own, end, prompt, result and choose make replies"
    if not isinstance(reward, dict) or GOLD not in reward or any(part.shape != () for part in reward.values()):
        return f"must return its rewards as a dict of scalars with the key '{GOLD}'"
    if has_changes(dialogue):
        original, changed = jax.eval_shape(prompt_change, key, difficulty)
        if _shapes(original) != _shapes(changed):
            return "changes a prompt or a state to one that differs from the original in structure, shape or dtype"
    return None


def _shapes(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]
