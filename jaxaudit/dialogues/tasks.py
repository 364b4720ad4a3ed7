"""Dialogues by name, and the kind of task that they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxaudit.dialogues.protocol import GOLD, Dialogue, has_changes
from jaxaudit.runtime.registry import dialogues, first_docstring_line, task_kinds, unknown_name_message


@task_kinds.register("dialogue")
@dataclass(frozen=True)
class DialogueTask:
    """Dialogues registered by name: rows of tokens, of which a policy writes its own.

    Attributes:
      name: that it is registered under.
      settings: the dialogue before it has read any file; in a spec, its fields are keys beside `name`.
    """

    kind: ClassVar[str] = "dialogue"
    gives: ClassVar[str] = "dialogue"

    name: str
    settings: Dialogue

    def make(self) -> Dialogue:
        """The dialogue. Raises ValueError where its files cannot be read, or its functions do not fit together."""
        made = self.settings.make()
        if reason := misfit(made):
            raise ValueError(f"dialogue '{self.name}' {reason}")
        return made

    @classmethod
    def named(cls, name: str) -> type[Dialogue]:
        """The dataclass of a dialogue. Raises ValueError for an unknown name, or one that is no frozen dataclass."""
        of = dialogues[name]
        frozen = getattr(getattr(of, "__dataclass_params__", None), "frozen", False)
        if not (isinstance(of, type) and issubclass(of, Dialogue) and frozen):
            raise ValueError(f"dialogue '{name}' must be a frozen dataclass that is made from Dialogue")
        return of

    @classmethod
    def listing(cls) -> Sequence[tuple[str, str]]:
        """Returns the registered dialogues with a line on each."""
        return [(name, first_docstring_line(dialogues[name])) for name in dialogues]


def named(name: str, **settings: Any) -> DialogueTask:
    """Returns the task of the registered dialogue of a name.

    Args:
      name: that it is registered under.
      **settings: fields of its dataclass.

    Raises:
      ValueError: an unknown name or setting, a missing one, or a value that the dialogue refuses.
    """
    of = DialogueTask.named(name)
    fields = [f for f in dataclasses.fields(of) if f.init]  # type: ignore[arg-type]
    for key in settings:
        if key not in (known := [f.name for f in fields]):
            raise ValueError(unknown_name_message(f"setting of dialogue '{name}'", key, known))
    for f in fields:
        if f.name not in settings and f.default is f.default_factory is dataclasses.MISSING:
            raise ValueError(f"dialogue '{name}' needs the setting '{f.name}'")
    return DialogueTask(name, of(**settings))


def misfit(dialogue: Dialogue) -> str | None:
    """Why a dialogue's functions do not fit together, a sentence without a subject; None if they do."""
    for name in ("vocabulary", "length", "reply_length", "prompt_length"):
        if not isinstance(size := getattr(dialogue, name, None), int) or size < 1:
            return f"must have a whole number of at least 1 as its {name}, not {size!r}"
    if dialogue.prompt_length > min(dialogue.reply_length, dialogue.length):
        return f"has prompts of {dialogue.prompt_length} tokens, more than its reply_length or its length"
    lowest, highest = dialogue.difficulties
    if not lowest <= dialogue.difficulty <= highest:
        return f"has difficulty {dialogue.difficulty:g}, and its difficulties are {lowest:g} to {highest:g}"

    def told(key: jax.Array, difficulty: jax.Array, token: jax.Array) -> tuple[Any, ...]:
        state, prompt = dialogue.reset(key, difficulty)
        after, reply = dialogue.respond(state, token)
        states = (jax.tree.map(jnp.asarray, state), jax.tree.map(jnp.asarray, after))
        return *states, dialogue.own(), prompt, reply, dialogue.reward(after)

    def changed(key: jax.Array, difficulty: jax.Array) -> tuple[Any, Any]:
        state, prompt = dialogue.reset(key, difficulty)
        other = dialogue.changed(state, prompt.tokens, key)
        return jax.tree.map(jnp.asarray, (state, prompt.tokens)), jax.tree.map(jnp.asarray, other)

    before, after, plain, *replies, reward = jax.eval_shape(told, jax.random.key(0), jnp.float32(0), jnp.int32(0))
    if _shapes(before) != _shapes(after):
        return "gives a state after a token that differs from its first one in structure, shape or dtype"
    if any(_shapes(reply) != _shapes(plain) for reply in replies):
        return "gives a reply that is none: own, end, prompt, result and choose make them"
    if not isinstance(reward, dict) or GOLD not in reward or any(part.shape != () for part in reward.values()):
        return f"must give its reward as scalars by name, of which one is '{GOLD}'"
    if has_changes(dialogue):
        first, other = jax.eval_shape(changed, jax.random.key(0), jnp.float32(0))
        if _shapes(first) != _shapes(other):
            return "changes a prompt to one, or to a state, that differs from the first in structure, shape or dtype"
    return None


def _shapes(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]
