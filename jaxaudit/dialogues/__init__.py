"""Dialogues as tasks: rows of tokens, of which a policy writes its own."""

from jaxaudit.dialogues.hop import Hop as Hop
from jaxaudit.dialogues.protocol import Dialogue as Dialogue
from jaxaudit.dialogues.protocol import Reply as Reply
from jaxaudit.dialogues.tasks import DialogueTask as DialogueTask
from jaxaudit.dialogues.tasks import named as named
