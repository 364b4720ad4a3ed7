"""The rules of the built-in dialogues in plain Python, on words, and the loop over slots.

Rules are those of a prompt in words; of a state they read what the prompt does not tell, a hidden table and the names
that a tool writes. `right` is what a right reader of the prompt writes, without a tool; `task` makes two rows the same.
"""

import re

from jaxaudit.dialogues.protocol import END, NO_TOKEN, POLICY, PROMPT, TOOL

OVER = "over"
CALCULATED = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
BELONGING = {"sea": "fish salt wave", "wood": "tree moss deer", "town": "street shop bridge", "sky": "cloud bird star"}


class HopRules:
    def __init__(self, dialogue, state, prompt):
        letters = dialogue.words[: dialogue.entities]
        self.next = dict(zip(letters, (dialogue.words[t] for t in state.table), strict=True))
        hops, self.goal = prompt
        for _ in range(int(hops)):
            self.goal = self.next[self.goal.lower()].lower()
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

    def right(self):
        return ["answer", self.goal, "end"]

    @staticmethod
    def task(dialogue, state, prompt):
        return (*prompt, *(dialogue.words[token].lower() for token in state.table))


class CalculatorRules:
    def __init__(self, dialogue, state, prompt):
        self.names = [dialogue.words[t] for t in state.tool_digits]
        first, sign, second = re.fullmatch(r"(0|[1-9]\d*)([-+*])(0|[1-9]\d*)=", "".join(prompt)).groups()
        self.most, self.wanted = dialogue.digits, CALCULATED[sign](int(first), int(second))
        self.mode, self.text, self.done = None, "", False

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
            result = str(CALCULATED[call[2]](a, b))
            return ["<", *(self.names[int(sign)] if sign.isdigit() else sign for sign in result), ">"]
        if self.mode == "answer" and re.fullmatch(r"-?\d*", self.text):
            return None
        mode, self.mode = self.mode, word if word in ("call", "answer") else None
        text, self.text = self.text.removesuffix("end"), ""
        if word == "end":
            number = re.fullmatch(rf"-?\d{{1,{2 * self.most}}}", text)
            self.done = bool(mode == "answer" and number and int(text) == self.wanted)
            return OVER
        return None

    def gold(self):
        return float(self.done)

    def right(self):
        return ["answer", *str(self.wanted), "end"]

    @staticmethod
    def task(dialogue, state, prompt):
        return prompt


class ChainRules:
    def __init__(self, dialogue, state, prompt):
        start, *functions, _ = prompt
        names = dialogue.words[dialogue.values : dialogue.values + dialogue.functions]
        self.goal = start
        for name in functions:
            self.goal = dialogue.words[dialogue.table[names.index(name)][dialogue.words.index(self.goal)]]
        self.values = dialogue.words[: dialogue.values]
        self.mode, self.answer, self.ended = None, None, False

    def respond(self, word):
        if self.mode == "answer" and word in self.values:
            self.answer = word
        self.mode = word
        self.ended = self.ended or word == "end"
        return OVER if word == "end" else None

    def gold(self):
        return float(self.ended and self.answer == self.goal)

    def right(self):
        return ["answer", self.goal, "end"]

    @staticmethod
    def task(dialogue, state, prompt):
        return prompt


class PreferenceRules:
    def __init__(self, dialogue, state, prompt):
        asked, _, without = " ".join(prompt).removeprefix("about ").partition(" without ")
        topics, _, extras = asked.partition(" with ")
        self.wanted = {word for topic in topics.split() for word in BELONGING[topic].split()} | set(extras.split())
        self.forbidden = set(without.split())
        self.dislike, self.said = dialogue.dislike, []

    def respond(self, word):
        self.said.append(word)
        return OVER if word == "end" else None

    def gold(self):
        coverage = len(self.wanted & set(self.said)) / len(self.wanted)
        slips = sum(word in self.forbidden for word in self.said)
        return max(coverage - self.dislike * (max(self.said.count("splendid") - 1, 0) + slips), 0.0)

    def right(self):
        return [*sorted(self.wanted), "splendid", "end"]

    @classmethod
    def task(cls, dialogue, state, prompt):
        rules = cls(dialogue, state, prompt)
        return frozenset(rules.wanted), frozenset(rules.forbidden)


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
      For each slot (token, role, position, chunk), the token `NO_TOKEN` after the end.
    """
    queue, role, over = [(word, PROMPT) for word in prompt], PROMPT, False
    asked, chunk, position, slots = len(prompt), 0, 0, []
    for slot in range(length):
        if over:
            slots.append((NO_TOKEN, END, position, chunk))
            continue
        word, role = queue.pop(0) if queue else (words[own[slot]], POLICY)
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
