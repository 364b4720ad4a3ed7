"""Dialogues by name, and the kind of task that they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxaudit.dialogues.protocol import Dialogue
from jaxaudit.registry import dialogues, summary, task_kinds, unknown


@task_kinds.register("dialogue")
@dataclass(frozen=True)
class DialogueTask:
    """Dialogues registered by name, rows of tokens of which a policy writes its own.

    Attributes:
      name: that it is registered under.
      settings: the dialogue; in a spec, its fields are keys beside `name`.
    """

    kind: ClassVar[str] = "dialogue"
    gives: ClassVar[str] = "dialogue"

    name: str
    settings: Dialogue

    def make(self) -> Dialogue:
        """The dialogue."""
        return self.settings

    @classmethod
    def named(cls, name: str) -> type:
        """The dataclass of a dialogue. Raises ValueError for an unknown name."""
        return dialogues[name]

    @classmethod
    def listing(cls) -> Sequence[tuple[str, str]]:
        """The registered dialogues."""
        return [(name, summary(dialogues[name])) for name in dialogues]


def named(name: str, **settings: Any) -> DialogueTask:
    """The task of a dialogue's name.

    Args:
      name: that it is registered under.
      **settings: fields of its dataclass.

    Raises:
      ValueError: an unknown name or setting, or a value that the dialogue refuses.
    """
    of = dialogues[name]
    known = [f.name for f in dataclasses.fields(of) if f.init]
    for key in settings:
        if key not in known:
            raise ValueError(unknown(f"setting of dialogue '{name}'", key, known))
    return DialogueTask(name, of(**settings))
