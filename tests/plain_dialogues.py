"""The rules of the built-in dialogues in plain Python, on words, and the loop over slots."""

import re

from jaxaudit.dialogues.protocol import END, NOTHING, OWN, PROMPT, TOOL

OVER = "over"


class HopRules:
    def __init__(self, dialogue, state):
        letters = dialogue.words[: dialogue.entities]
        self.next = dict(zip(letters, (dialogue.words[t] for t in state.table), strict=True))
        self.goal = dialogue.words[state.goal]
        self.mode, self.answer, self.ended = None, None, False

    def respond(self, word):
        mode, self.mode = self.mode, None
        entity = word.lower() if word.lower() in self.next else None
        if mode == "call":
            return ["result", self.next.get(entity, "error")]
        if mode == "answer" and entity:
            self.answer = entity
        if word in ("call", "answer"):
            self.mode = word
        if word == "end":
            self.ended = True
            return OVER
        return None

    def gold(self):
        return float(self.ended and self.answer == self.goal)


class CalculatorRules:
    def __init__(self, dialogue, state):
        self.names = [dialogue.words[t] for t in state.tool_digits]
        self.most, self.wanted = dialogue.digits, int(state.wanted)
        self.mode, self.text, self.right = None, "", False

    def respond(self, word):
        self.text += word.removesuffix("'")
        if self.mode == "call":
            if re.fullmatch(r"\d+([-+*]\d*)?", self.text):
                return None
            self.mode = None
            call = re.fullmatch(rf"(\d{{1,{self.most}}})([-+*])(\d{{1,{self.most}}})=", self.text)
            if not call:
                return ["<", "error", ">"]
            a, b = int(call[1]), int(call[3])
            result = str({"+": a + b, "-": a - b, "*": a * b}[call[2]])
            return ["<", *(self.names[int(sign)] if sign.isdigit() else sign for sign in result), ">"]
        if self.mode == "answer" and re.fullmatch(r"-?\d*", self.text):
            return None
        mode, self.mode = self.mode, word if word in ("call", "answer") else None
        text, self.text = self.text.removesuffix("end"), ""
        if word == "end":
            number = re.fullmatch(rf"-?\d{{1,{2 * self.most}}}", text)
            self.right = bool(mode == "answer" and number and int(text) == self.wanted)
            return OVER
        return None

    def gold(self):
        return float(self.right)


class ChainRules:
    def __init__(self, dialogue, state):
        self.path = [dialogue.words[value] for value in state.path]
        self.values = dialogue.words[: dialogue.values]
        self.mode, self.answer, self.ended = None, None, False

    def respond(self, word):
        if self.mode == "answer" and word in self.values:
            self.answer = word
        self.mode = word
        self.ended = self.ended or word == "end"
        return OVER if word == "end" else None

    def gold(self):
        return float(self.ended and self.answer == self.path[-1])


class PreferenceRules:
    def __init__(self, dialogue, state):
        words = dialogue.words[4:16]
        self.wanted = {word for word, wanted in zip(words, state.wanted, strict=True) if wanted}
        self.dislike, self.said = dialogue.dislike, []

    def respond(self, word):
        self.said.append(word)
        return OVER if word == "end" else None

    def gold(self):
        coverage = len(self.wanted & set(self.said)) / len(self.wanted)
        return max(coverage - self.dislike * max(self.said.count("splendid") - 1, 0), 0.0)


RULES = {"hop": HopRules, "calculator": CalculatorRules, "chain": ChainRules, "preference": PreferenceRules}


def row(rules, prompt, words, own, length, lost=(), spoilt=()):
    """A row, slot by slot.

    Args:
      rules: `respond(word)` gives words that are given next, "over", or None; a tuple (words,) is a fresh chunk's.
      prompt: its words.
      words: of the vocabulary.
      own: tokens that the policy writes at its slots: `own[slot]`.
      length: slots.
      lost: slots after which a tool's result is lost.
      spoilt: by slot, tokens that take a tool's result's place.

    Returns:
      For each slot (token, role, position, chunk), the token `NOTHING` after the end.
    """
    queue, role, over = [(word, PROMPT) for word in prompt], PROMPT, False
    asked, chunk, position, slots = len(prompt), 0, 0, []
    for slot in range(length):
        if over:
            slots.append((NOTHING, END, position, chunk))
            continue
        word, role = queue.pop(0) if queue else (words[own[slot]], OWN)
        slots.append((words.index(word), role, position, chunk))
        position += 1
        if slot < asked:
            continue
        said = rules.respond(word)
        if said == OVER:
            over = True
        elif isinstance(said, tuple):
            queue, chunk, position = [(word, PROMPT) for word in said[0]], slot + 1, 0
        elif said and slot not in lost:
            queue = [(words[token], TOOL) for token in spoilt[slot]] if slot in spoilt else [(w, TOOL) for w in said]
    return slots
