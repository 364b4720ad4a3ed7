"""Dialogues: tasks of token rows in which a policy answers a prompt, with or without a tool, and is rewarded."""

from jaxaudit.dialogues.calculator import Calculator as Calculator
from jaxaudit.dialogues.chain import ChainDialogue as ChainDialogue
from jaxaudit.dialogues.hop import Hop as Hop
from jaxaudit.dialogues.preference import Preference as Preference
from jaxaudit.dialogues.protocol import Dialogue as Dialogue
from jaxaudit.dialogues.protocol import DialogueTask as DialogueTask
from jaxaudit.dialogues.protocol import Reply as Reply
from jaxaudit.dialogues.protocol import named as named
from jaxaudit.dialogues.text import TextDialogue as TextDialogue

Chain = ChainDialogue
"""The public name of `ChainDialogue`; `jaxaudit.Chain` is a chain of perturbations."""
