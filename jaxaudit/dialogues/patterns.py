"""Regular expressions as automata over bytes, which no pattern can make slow and which run inside a program.

Thompson's construction and the subset construction (Aho, Lam, Sethi and Ullman, Compilers, 3.7). Patterns are Python's,
without what an automaton cannot do: references to groups, and looking ahead or behind; "$" is the text's very end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

MOST_STATES = 2**16
"""Of all automata together."""

MOST_REPEATS = 255
MOST_NODES = 2**14
"""Of one pattern's automaton before it is made deterministic."""

ALL = frozenset(range(256))
DIGITS = frozenset(b"0123456789")
SPACES = frozenset(b" \t\n\r\f\v")
LETTERS = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_") | DIGITS
CLASSES = {"d": DIGITS, "D": ALL - DIGITS, "s": SPACES, "S": ALL - SPACES, "w": LETTERS, "W": ALL - LETTERS}
CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}

BEGIN, END, EMPTY = "begin", "end", "empty"
"""Edges that take no byte: at the text's begin, at its end, anywhere."""

Label = str | frozenset[int]


@dataclass(frozen=True)
class Automata:
    """Deterministic automata in one table.

    Attributes:
      table: the state after a state and a byte, uint16 `[S, 256]`.
      accepts: whether a text that ends in a state has matched, bool `[S]`.
      starts: where each pattern begins, int32 `[P]`.
    """

    table: np.ndarray
    accepts: np.ndarray
    starts: np.ndarray


@dataclass
class _Nodes:
    """The edges of a nondeterministic automaton, by node."""

    edges: list[list[tuple[Label, int]]] = field(default_factory=list)

    def node(self) -> int:
        if len(self.edges) >= MOST_NODES:
            raise ValueError("is too large")
        self.edges.append([])
        return len(self.edges) - 1


Part = Callable[[_Nodes, int], int]
"""Adds a part of a pattern behind a node, and gives the node behind the part."""


class Unusable(ValueError):
    """One of several that cannot be used: `line` counts them from zero, the message has it for its subject."""

    def __init__(self, line: int, message: str):
        super().__init__(message)
        self.line = line


def compiled(patterns: Sequence[str]) -> Automata:
    """Automata that search a text, its bytes in UTF-8, for the patterns; equal ones share theirs.

    Raises Unusable for one that cannot be.
    """
    tables, accepts = [np.zeros((1, 256), np.int64)], [np.ones(1, bool)]  # state 0 has matched
    starts: dict[str, int] = {}
    states = 1
    for line, pattern in enumerate(patterns):
        if pattern in starts:
            continue
        try:
            table, accepting = _determined(*_nodes(pattern), most=MOST_STATES - states)
        except ValueError as error:
            raise Unusable(line, str(error)) from None
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
    """The nodes of a pattern, the first and the last."""
    parser, nodes = _PatternParser(pattern), _Nodes()
    whole = parser.alternatives()
    if parser.rest:
        raise ValueError(f"has a {parser.rest[0]!r} that closes nothing")
    first = nodes.node()
    return nodes, first, whole(nodes, first)


def _closure(nodes: _Nodes, begun: Iterable[int], passing: set[str]) -> frozenset[int]:
    found, waiting = set(begun), list(begun)
    while waiting:
        for label, node in nodes.edges[waiting.pop()]:
            if isinstance(label, str) and label in passing and node not in found:
                found.add(node)
                waiting.append(node)
    return frozenset(found)


def _determined(nodes: _Nodes, first: int, last: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """A table `[S, 256]`, -1 where the pattern has matched for good, and whether a state accepts at the text's end."""
    labels = {label for edges in nodes.edges for label, _ in edges if isinstance(label, frozenset)}
    kinds: dict[tuple[bool, ...], list[int]] = {}
    for byte in range(256):
        kinds.setdefault(tuple(byte in label for label in labels), []).append(byte)
    again = _closure(nodes, [first], {EMPTY})
    start = _closure(nodes, [first], {EMPTY, BEGIN})
    numbers: dict[frozenset[int] | None, int] = {None: 0}  # the text's begin is a state of its own
    waiting, accepts = [start], []
    rows: list[np.ndarray] = []
    while waiting:
        here = waiting.pop(0)
        row = np.full(256, -1)
        accepts.append(last in _closure(nodes, here, {EMPTY, END} if rows else {EMPTY, BEGIN, END}))
        if last not in here:
            for bytes_ in kinds.values():
                edges = (edge for node in here for edge in nodes.edges[node])
                reached = {to for label, to in edges if not isinstance(label, str) and bytes_[0] in label}
                then = _closure(nodes, reached, {EMPTY}) | again
                if last in then:
                    continue
                if then not in numbers:
                    if len(numbers) >= most:
                        raise ValueError("is too large")
                    numbers[then] = len(numbers)
                    waiting.append(then)
                row[bytes_] = numbers[then]
        rows.append(row)
    return np.stack(rows), np.array(accepts)


class _PatternParser:
    """A pattern's parts, by recursive descent. Raises ValueError, a sentence without a subject."""

    def __init__(self, pattern: str):
        self.rest = pattern

    def take(self, expected: str = "") -> str:
        if not self.rest:
            raise ValueError(f"ends where {expected or 'something'} is missing")
        taken, self.rest = self.rest[0], self.rest[1:]
        return taken

    def taken(self, begin: str) -> bool:
        found = self.rest.startswith(begin)
        self.rest = self.rest[len(begin) :] if found else self.rest
        return found

    def alternatives(self) -> Part:
        parts = [self.sequence()]
        while self.taken("|"):
            parts.append(self.sequence())
        return _either(parts) if len(parts) > 1 else parts[0]

    def sequence(self) -> Part:
        parts = []
        while self.rest and self.rest[0] not in "|)":
            parts.append(self.repeated(self.atom()))
        return _after(parts)

    def repeated(self, part: Part) -> Part:
        times = self.times()
        if times is None:
            return part
        self.taken("?")  # where a match ends does not matter
        if self.times() is not None:
            raise ValueError("repeats a repetition")
        return _times(part, *times)

    def times(self) -> tuple[int, int | None] | None:
        for sign, times in {"*": (0, None), "+": (1, None), "?": (0, 1)}.items():
            if self.taken(sign):
                return times
        bounds, closed, rest = self.rest[1:].partition("}")
        least, comma, most = bounds.partition(",")
        if not (self.rest.startswith("{") and closed and ((least + most).isdecimal() or bounds == ",")):
            return None  # "{" stands for itself
        self.rest = rest
        low, high = int(least or 0), int(most) if most else None if comma else int(least)
        if max(low, high or 0) > MOST_REPEATS or (high is not None and high < low):
            raise ValueError(f"repeats {{{bounds}}} times; from 0 to {MOST_REPEATS} is allowed")
        return low, high

    def atom(self) -> Part:
        sign = self.take()
        if sign == "(":
            if self.rest.startswith("?") and not self.rest.startswith("?:"):
                raise ValueError(f"has a group ({self.rest[:3]}...), which an automaton cannot match; (?:...) can be")
            self.taken("?:")
            inner = self.alternatives()
            self.take("a ')'")
            return inner
        if sign in "*+?":
            raise ValueError(f"has a {sign!r} that repeats nothing")
        if sign in "^$":
            return _step(BEGIN if sign == "^" else END)
        if sign == ".":
            return _step(ALL - {ord("\n")})
        if sign == "[":
            return _step(self.set())
        if sign == "\\":
            return self.escaped()
        return _bytes(sign)

    def escaped(self) -> Part:
        sign = self.take("what is escaped")
        if sign in CLASSES:
            return _step(CLASSES[sign])
        return _bytes(_escaped(sign))

    def set(self) -> frozenset[int]:
        outside, first = self.taken("^"), True
        found: set[int] = set()
        while first or not self.rest.startswith("]"):
            first = False
            low = self.member()
            if isinstance(low, frozenset):
                found |= low
            elif self.rest.startswith("-") and not self.rest.startswith("-]"):
                self.take()
                high = self.member()
                if isinstance(high, frozenset) or high < low:
                    raise ValueError("has a range in brackets that is none")
                found |= set(range(low, high + 1))
            else:
                found.add(low)
        self.take()
        return ALL - found if outside else frozenset(found)

    def member(self) -> int | frozenset[int]:
        sign = self.take("a ']'")
        if sign == "\\":
            sign = self.take("what is escaped")
            if sign in CLASSES:
                return CLASSES[sign]
            sign = _escaped(sign)
        if not sign.isascii():
            raise ValueError(f"has {sign!r} in brackets, where only ASCII is allowed")
        return ord(sign)


def _escaped(sign: str) -> str:
    if sign.isalnum() and sign not in CONTROLS:
        raise ValueError(f"has \\{sign}, which is not allowed")
    return CONTROLS.get(sign, sign)


def _step(label: Label) -> Part:
    def add(nodes: _Nodes, begin: int) -> int:
        end = nodes.node()
        nodes.edges[begin].append((label, end))
        return end

    return add


def _bytes(sign: str) -> Part:
    return _after([_step(frozenset([byte])) for byte in sign.encode()])


def _after(parts: Sequence[Part]) -> Part:
    def add(nodes: _Nodes, begin: int) -> int:
        for part in parts:
            begin = part(nodes, begin)
        return begin

    return add


def _either(parts: Sequence[Part]) -> Part:
    def add(nodes: _Nodes, begin: int) -> int:
        end = nodes.node()
        for part in parts:
            first = nodes.node()
            nodes.edges[begin].append((EMPTY, first))
            nodes.edges[part(nodes, first)].append((EMPTY, end))
        return end

    return add


def _times(part: Part, least: int, most: int | None) -> Part:
    def add(nodes: _Nodes, begin: int) -> int:
        for _ in range(least):
            begin = part(nodes, begin)
        end = nodes.node()
        for _ in range(most - least if most is not None else 0):
            nodes.edges[begin].append((EMPTY, end))
            begin = part(nodes, begin)
        if most is None:
            first = nodes.node()
            nodes.edges[begin].append((EMPTY, first))
            nodes.edges[part(nodes, first)].append((EMPTY, first))
            begin = first
        nodes.edges[begin].append((EMPTY, end))
        return end

    return add
