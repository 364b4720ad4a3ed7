"""Compiles regular expressions to deterministic automata over bytes, which run inside compiled programs.

The automata come from Thompson's construction and the subset construction (Aho, Lam, Sethi and Ullman, Compilers, 3.7),
and take constant time for each byte. The syntax is Python's, without back-references, look-ahead and look-behind; "$"
matches only at the very end of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

MAX_STATES = 2**16
"""The largest number of states of all automata of a file together."""

MAX_REPEATS = 255
"""The largest number in a repetition such as `a{3,255}`, which bounds the size of the automaton."""

MAX_NODES = 2**14
"""The largest number of nodes of one pattern's nondeterministic automaton."""

ALL_BYTES = frozenset(range(256))
DIGITS = frozenset(b"0123456789")
SPACES = frozenset(b" \t\n\r\f\v")
LETTERS = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_") | DIGITS
CLASSES = {
    "d": DIGITS,
    "D": ALL_BYTES - DIGITS,
    "s": SPACES,
    "S": ALL_BYTES - SPACES,
    "w": LETTERS,
    "W": ALL_BYTES - LETTERS,
}
CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}

BEGIN, END, EMPTY = "begin", "end", "empty"
"""Labels of edges that consume no byte: at the beginning of the text, at its end, and anywhere."""

Label = str | frozenset[int]
"""The label of an edge: `BEGIN`, `END`, `EMPTY`, or the bytes that it consumes."""


@dataclass(frozen=True)
class Automata:
    """The deterministic automata of several patterns in one table.

    Attributes:
      table: The next state for each state and byte, uint16 `[S, 256]`.
      accepts: Whether a text that ends in each state has a match, bool `[S]`.
      starts: The initial state of each pattern, int32 `[P]`.
    """

    table: np.ndarray
    accepts: np.ndarray
    starts: np.ndarray


@dataclass
class _Nodes:
    """A nondeterministic automaton: the labels and targets of the edges of each node."""

    edges: list[list[tuple[Label, int]]] = field(default_factory=list)

    def add_node(self) -> int:
        if len(self.edges) >= MAX_NODES:
            raise ValueError("is too large")
        self.edges.append([])
        return len(self.edges) - 1


Fragment = Callable[[_Nodes, int], int]
"""Adds the nodes of a part of a pattern after a node, and returns the last node of the part."""


class UnusableLine(ValueError):
    """A line of a file that cannot be used. `line` is its index from zero; the message is a predicate of the line."""

    def __init__(self, line: int, message: str):
        super().__init__(message)
        self.line = line


def compile_patterns(patterns: Sequence[str]) -> Automata:
    """Returns automata that search the UTF-8 bytes of a text for each pattern; equal patterns share an automaton.

    Raises:
      UnusableLine: A pattern has a syntax error or an unsupported construct, or the automata are too large.
    """
    tables, accepts = (
        [np.zeros((1, 256), np.int64)],
        [np.ones(1, bool)],
    )  # state 0 is reached once a pattern has matched
    starts: dict[str, int] = {}
    states = 1
    for line, pattern in enumerate(patterns):
        if pattern in starts:
            continue
        try:
            table, accepting = _determinize(*_nodes(pattern), max_states=MAX_STATES - states)
        except ValueError as error:
            raise UnusableLine(line, str(error)) from None
        starts[pattern] = states
        tables.append(np.where(table < 0, 0, table + states))
        accepts.append(accepting)
        states += len(table)
    return Automata(
        np.concatenate(tables).astype(np.uint16),
        np.concatenate(accepts),
        np.array([starts[pattern] for pattern in patterns], np.int32),
    )


def _nodes(pattern: str) -> tuple[_Nodes, int, int]:
    """Returns the nondeterministic automaton of a pattern, with its first and its last node."""
    parser, nodes = _PatternParser(pattern), _Nodes()
    fragment = parser.alternatives()
    if parser.rest:
        raise ValueError(f"has a {parser.rest[0]!r} that closes nothing")
    first = nodes.add_node()
    return nodes, first, fragment(nodes, first)


def _closure(nodes: _Nodes, initial: Iterable[int], labels: set[str]) -> frozenset[int]:
    """Returns the nodes that are reachable from the initial nodes by edges with the given labels."""
    reached, unexplored = set(initial), list(initial)
    while unexplored:
        for label, node in nodes.edges[unexplored.pop()]:
            if isinstance(label, str) and label in labels and node not in reached:
                reached.add(node)
                unexplored.append(node)
    return frozenset(reached)


def _determinize(nodes: _Nodes, first: int, last: int, max_states: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the transitions `[S, 256]`, -1 after a match, and whether each state accepts at the end of the text."""
    labels = {label for edges in nodes.edges for label, _ in edges if isinstance(label, frozenset)}
    byte_classes: dict[tuple[bool, ...], list[int]] = {}
    for byte in range(256):
        byte_classes.setdefault(tuple(byte in label for label in labels), []).append(byte)
    restart = _closure(nodes, [first], {EMPTY})  # a search may begin at any byte
    start = _closure(nodes, [first], {EMPTY, BEGIN})
    numbers: dict[frozenset[int] | None, int] = {None: 0}  # the beginning of the text is a state of its own
    unexplored, accepts = [start], []
    rows: list[np.ndarray] = []
    while unexplored:
        state = unexplored.pop(0)
        row = np.full(256, -1)
        accepts.append(last in _closure(nodes, state, {EMPTY, END} if rows else {EMPTY, BEGIN, END}))
        if last not in state:
            for bytes_ in byte_classes.values():
                edges = (edge for node in state for edge in nodes.edges[node])
                reached = {to for label, to in edges if not isinstance(label, str) and bytes_[0] in label}
                successor = _closure(nodes, reached, {EMPTY}) | restart
                if last in successor:
                    continue
                if successor not in numbers:
                    if len(numbers) >= max_states:
                        raise ValueError("is too large")
                    numbers[successor] = len(numbers)
                    unexplored.append(successor)
                row[bytes_] = numbers[successor]
        rows.append(row)
    return np.stack(rows), np.array(accepts)


class _PatternParser:
    """A recursive-descent parser of a pattern. Raises ValueError, whose message is a predicate of the pattern."""

    def __init__(self, pattern: str):
        self.rest = pattern

    def take(self, expected: str = "a character") -> str:
        """Returns the pattern's next character and removes it."""
        if not self.rest:
            raise ValueError(f"ends where {expected} is missing")
        character, self.rest = self.rest[0], self.rest[1:]
        return character

    def accept(self, prefix: str) -> bool:
        """Removes a prefix, and returns whether there was one."""
        accepted = self.rest.startswith(prefix)
        self.rest = self.rest.removeprefix(prefix)
        return accepted

    def alternatives(self) -> Fragment:
        branches = [self.sequence()]
        while self.accept("|"):
            branches.append(self.sequence())
        return _alternation(branches) if len(branches) > 1 else branches[0]

    def sequence(self) -> Fragment:
        parts = []
        while self.rest and self.rest[0] not in "|)":
            parts.append(self.repeated(self.atom()))
        return _concatenation(parts)

    def repeated(self, part: Fragment) -> Fragment:
        quantifier = self.quantifier()
        if quantifier is None:
            return part
        self.accept("?")  # a lazy quantifier only changes where a match ends
        if self.quantifier() is not None:
            raise ValueError("repeats a repetition")
        return _repetition(part, *quantifier)

    def quantifier(self) -> tuple[int, int | None] | None:
        """Removes a quantifier; returns its bounds, the upper one None if unbounded, or None if there is none."""
        for symbol, quantifier in {"*": (0, None), "+": (1, None), "?": (0, 1)}.items():
            if self.accept(symbol):
                return quantifier
        bounds, closed, rest = self.rest[1:].partition("}")
        least, comma, most = bounds.partition(",")
        if not (self.rest.startswith("{") and closed and ((least + most).isdecimal() or bounds == ",")):
            return None  # a "{" without bounds is literal
        self.rest = rest
        low, high = int(least or 0), int(most) if most else None if comma else int(least)
        if max(low, high or 0) > MAX_REPEATS or (high is not None and high < low):
            raise ValueError(f"repeats {{{bounds}}} times; from 0 to {MAX_REPEATS} is allowed")
        return low, high

    def atom(self) -> Fragment:
        character = self.take()
        if character == "(":
            if self.rest.startswith("?") and not self.rest.startswith("?:"):
                group = f"({self.rest[:3]}...)"
                raise ValueError(f"has a group {group}, which an automaton cannot match; use (...) or (?:...)")
            self.accept("?:")
            inner = self.alternatives()
            self.take("a ')'")
            return inner
        if character in "*+?":
            raise ValueError(f"has a {character!r} that repeats nothing")
        if character in "^$":
            return _edge(BEGIN if character == "^" else END)
        if character == ".":
            return _edge(ALL_BYTES - {ord("\n")})
        if character == "[":
            return _edge(self.bracket_set())
        if character == "\\":
            return self.escaped()
        return _bytes(character)

    def escaped(self) -> Fragment:
        character = self.take("an escaped character")
        if character in CLASSES:
            return _edge(CLASSES[character])
        return _bytes(_escaped(character))

    def bracket_set(self) -> frozenset[int]:
        negated, first = self.accept("^"), True
        members: set[int] = set()
        while first or not self.rest.startswith("]"):
            first = False
            low = self.member()
            if isinstance(low, frozenset):
                members |= low
            elif self.rest.startswith("-") and not self.rest.startswith("-]"):
                self.take()
                high = self.member()
                if isinstance(high, frozenset) or high < low:
                    raise ValueError("has an invalid range in brackets")
                members |= set(range(low, high + 1))
            else:
                members.add(low)
        self.take()
        return ALL_BYTES - members if negated else frozenset(members)

    def member(self) -> int | frozenset[int]:
        character = self.take("a ']'")
        if character == "\\":
            character = self.take("an escaped character")
            if character in CLASSES:
                return CLASSES[character]
            character = _escaped(character)
        if not character.isascii():
            raise ValueError(f"has {character!r} in brackets, where only ASCII is allowed")
        return ord(character)


def _escaped(character: str) -> str:
    if character.isalnum() and character not in CONTROLS:
        raise ValueError(f"has \\{character}, which is not allowed")
    return CONTROLS.get(character, character)


def _edge(label: Label) -> Fragment:
    def add(nodes: _Nodes, begin: int) -> int:
        end = nodes.add_node()
        nodes.edges[begin].append((label, end))
        return end

    return add


def _bytes(character: str) -> Fragment:
    return _concatenation([_edge(frozenset([byte])) for byte in character.encode()])


def _concatenation(parts: Sequence[Fragment]) -> Fragment:
    def add(nodes: _Nodes, begin: int) -> int:
        for part in parts:
            begin = part(nodes, begin)
        return begin

    return add


def _alternation(parts: Sequence[Fragment]) -> Fragment:
    def add(nodes: _Nodes, begin: int) -> int:
        end = nodes.add_node()
        for part in parts:
            first = nodes.add_node()
            nodes.edges[begin].append((EMPTY, first))
            nodes.edges[part(nodes, first)].append((EMPTY, end))
        return end

    return add


def _repetition(part: Fragment, least: int, most: int | None) -> Fragment:
    def add(nodes: _Nodes, begin: int) -> int:
        for _ in range(least):
            begin = part(nodes, begin)
        end = nodes.add_node()
        for _ in range(most - least if most is not None else 0):
            nodes.edges[begin].append((EMPTY, end))
            begin = part(nodes, begin)
        if most is None:
            first = nodes.add_node()
            nodes.edges[begin].append((EMPTY, first))
            nodes.edges[part(nodes, first)].append((EMPTY, first))
            begin = first
        nodes.edges[begin].append((EMPTY, end))
        return end

    return add
