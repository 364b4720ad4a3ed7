"""The rules of the built-in dialogues in plain Python, on words, and a loop over a row's slots.

The rules follow from the prompt's words. They read from the state only what the prompt does not contain: a hidden
table, and the names of the digits that a tool writes. `correct_reply` returns a correct reply without a tool call. Two
rows with equal `task` pose the same task.
"""

import re

from jaxaudit.dialogues.protocol import END, NO_TOKEN, POLICY, PROMPT, TOOL

DIALOGUE_OVER = "over"
OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
TOPIC_WORDS = {
    "sea": "fish salt wave",
    "wood": "tree moss deer",
    "town": "street shop bridge",
    "sky": "cloud bird star",
}


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
            return DIALOGUE_OVER
        return None

    def gold(self):
        return float(self.ended and self.answer == self.goal)

    def correct_reply(self):
        return ["answer", self.goal, "end"]

    @staticmethod
    def task(dialogue, state, prompt):
        return (*prompt, *(dialogue.words[token].lower() for token in state.table))


class CalculatorRules:
    def __init__(self, dialogue, state, prompt):
        self.names = [dialogue.words[t] for t in state.tool_digits]
        first, sign, second = re.fullmatch(r"(0|[1-9]\d*)([-+*])(0|[1-9]\d*)=", "".join(prompt)).groups()
        self.max_digits, self.expected = dialogue.digits, OPERATIONS[sign](int(first), int(second))
        self.mode, self.text, self.done = None, "", False

    def respond(self, word):
        self.text += word.removesuffix("'")
        if self.mode == "call":
            if re.fullmatch(r"\d+([-+*]\d*)?", self.text):
                return None
            self.mode = None
            call = re.fullmatch(rf"(\d{{1,{self.max_digits}}})([-+*])(\d{{1,{self.max_digits}}})=", self.text)
            if not call:
                return ["<", "error", ">"]
            a, b = int(call[1]), int(call[3])
            result = str(OPERATIONS[call[2]](a, b))
            return ["<", *(self.names[int(sign)] if sign.isdigit() else sign for sign in result), ">"]
        if self.mode == "answer" and re.fullmatch(r"-?\d*", self.text):
            return None
        mode, self.mode = self.mode, word if word in ("call", "answer") else None
        text, self.text = self.text.removesuffix("end"), ""
        if word == "end":
            number = re.fullmatch(rf"-?\d{{1,{2 * self.max_digits}}}", text)
            self.done = bool(mode == "answer" and number and int(text) == self.expected)
            return DIALOGUE_OVER
        return None

    def gold(self):
        return float(self.done)

    def correct_reply(self):
        return ["answer", *str(self.expected), "end"]

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
        return DIALOGUE_OVER if word == "end" else None

    def gold(self):
        return float(self.ended and self.answer == self.goal)

    def correct_reply(self):
        return ["answer", self.goal, "end"]

    @staticmethod
    def task(dialogue, state, prompt):
        return prompt


class PreferenceRules:
    def __init__(self, dialogue, state, prompt):
        required, _, without = " ".join(prompt).removeprefix("about ").partition(" without ")
        topics, _, extras = required.partition(" with ")
        self.expected = {word for topic in topics.split() for word in TOPIC_WORDS[topic].split()} | set(extras.split())
        self.forbidden = set(without.split())
        self.dislike, self.words_written = dialogue.dislike, []

    def respond(self, word):
        self.words_written.append(word)
        return DIALOGUE_OVER if word == "end" else None

    def gold(self):
        coverage = len(self.expected & set(self.words_written)) / len(self.expected)
        slips = sum(word in self.forbidden for word in self.words_written)
        return max(coverage - self.dislike * (max(self.words_written.count("splendid") - 1, 0) + slips), 0.0)

    def correct_reply(self):
        return [*sorted(self.expected), "splendid", "end"]

    @classmethod
    def task(cls, dialogue, state, prompt):
        rules = cls(dialogue, state, prompt)
        return frozenset(rules.expected), frozenset(rules.forbidden)


RULES = {"hop": HopRules, "calculator": CalculatorRules, "chain": ChainRules, "preference": PreferenceRules}


def simulate_row(rules, prompt, words, policy_tokens, length, lost=(), spoilt=()):
    """Returns the token, role, position and chunk of each slot of a row, with the token `NO_TOKEN` after the end.

    Args:
      rules: Its `respond(word)` returns the words that a tool writes next, `DIALOGUE_OVER`, None, or a tuple `(words,)`
        if the words begin a new chunk.
      prompt: The prompt's words.
      words: The words of the vocabulary.
      policy_tokens: The token that the policy writes at each slot, if it writes one there.
      length: The number of slots.
      lost: The slots whose tool call returns nothing.
      spoilt: The tokens that replace the result of a tool call, by the call's slot.
    """
    queue, role, over = [(word, PROMPT) for word in prompt], PROMPT, False
    prompt_length, chunk, position, slots = len(prompt), 0, 0, []
    for slot in range(length):
        if over:
            slots.append((NO_TOKEN, END, position, chunk))
            continue
        word, role = queue.pop(0) if queue else (words[policy_tokens[slot]], POLICY)
        slots.append((words.index(word), role, position, chunk))
        position += 1
        if slot < prompt_length:
            continue
        reply = rules.respond(word)
        if reply == DIALOGUE_OVER:
            over = True
        elif isinstance(reply, tuple):
            queue, chunk, position = [(word, PROMPT) for word in reply[0]], slot + 1, 0
        elif reply and slot not in lost:
            queue = [(words[token], TOOL) for token in spoilt[slot]] if slot in spoilt else [(w, TOOL) for w in reply]
    return slots
