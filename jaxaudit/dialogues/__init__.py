"""Dialogues as tasks: rows of tokens, of which a policy writes its own."""

from jaxaudit.dialogues.protocol import Dialogue as Dialogue
from jaxaudit.dialogues.protocol import Reply as Reply
