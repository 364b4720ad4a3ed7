"""What trainers print: rows of text, among whatever else a process prints."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxaudit.logs.cells import is_number, text_of
from jaxaudit.logs.records import Records
from jaxaudit.runtime.errors import UserError

DEPTH = 8
"""Of dicts and lists in each other."""

TRIED = 16
"""Braces of a text that are tried as the beginning of a dict."""

_TOKEN = re.compile(
    r"""\s*(?:
    (?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
    |(?P<number>[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+](?:inf|nan)\b)
    |(?P<word>[A-Za-z_][\w.]*)
    |(?P<sign>[{}\[\](),:=])
    )""",
    re.VERBOSE,
)
_WORDS = {"True": True, "False": False, "None": None, "nan": float("nan"), "inf": float("inf"), "NaN": float("nan")}
_WORDS |= {"true": True, "false": False, "null": None, "Infinity": float("inf")}
_ESCAPED = re.compile(r"\\(.)")


class NoLiteral(ValueError):
    """A text that the grammar has not."""


def dict_in(text: str) -> tuple[dict[str, Any], int, int] | None:
    """The first dict of a text, with where it begins and ends; None if it has none that is whole."""
    begin = -1
    for _ in range(TRIED):
        begin = text.find("{", begin + 1)
        if begin < 0:
            break
        try:
            value, end = _Reader(text).value(begin, 0)
        except NoLiteral:
            continue
        return (value, begin, end) if value else None
    return None


class _Reader:
    def __init__(self, text: str):
        self._text = text

    def _token(self, at: int) -> tuple[str, str, int]:
        found = _TOKEN.match(self._text, at)
        if found is None:
            raise NoLiteral
        return str(found.lastgroup), found[str(found.lastgroup)], found.end()

    def value(self, at: int, depth: int) -> tuple[Any, int]:
        """The value that begins at a place, and where it ends."""
        if depth > DEPTH:
            raise NoLiteral
        kind, token, end = self._token(at)
        if kind == "string":
            return _ESCAPED.sub(r"\1", token[1:-1]), end
        if kind == "number":
            return _number(token), end
        if kind == "word":
            return self._word(token, end, depth)
        if token == "{":
            return self._dict(end, depth)
        if token in "[(":
            return self._items(end, "]" if token == "[" else ")", depth)
        raise NoLiteral

    def _dict(self, at: int, depth: int) -> tuple[dict[str, Any], int]:
        found: dict[str, Any] = {}
        while True:
            kind, token, end = self._token(at)
            if token == "}" and kind == "sign":
                return found, end
            if kind not in ("string", "number"):
                raise NoLiteral
            name = _ESCAPED.sub(r"\1", token[1:-1]) if kind == "string" else token
            _, colon, end = self._token(end)
            if colon != ":":
                raise NoLiteral
            found[name], end = self.value(end, depth + 1)
            _, token, after = self._token(end)
            if token == ",":
                at = after
            elif token == "}":
                return found, after
            else:
                raise NoLiteral

    def _items(self, at: int, closing: str, depth: int) -> tuple[list[Any], int]:
        found: list[Any] = []
        while True:
            kind, token, end = self._token(at)
            if token == closing and kind == "sign":
                return found, end
            if kind == "word" and self._text[end : end + 1] == "=":  # as in tensor(0.5, device='cuda:0')
                _, end = self.value(end + 1, depth + 1)
            else:
                item, end = self.value(at, depth + 1)
                found.append(item)
            _, token, after = self._token(end)
            if token == ",":
                at = after
            elif token == closing:
                return found, after
            else:
                raise NoLiteral

    def _word(self, word: str, end: int, depth: int) -> tuple[Any, int]:
        """A constant, or a call as of `tensor(0.5)`, which is its first argument."""
        if word in _WORDS:
            return _WORDS[word], end
        if self._text[end : end + 1] != "(":
            raise NoLiteral
        arguments, end = self._items(end + 1, ")", depth + 1)
        return (arguments[0] if arguments else f"{word}()"), end


def _number(token: str) -> int | float:
    try:
        return int(token) if len(token) < 300 else float(token)
    except ValueError:
        return float(token.replace("_", ""))


LONGEST_LINE = 2**20

Line = tuple[int, str]
Row = tuple[int, dict[str, Any]]

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_BLANKS = re.compile(r"[ \t]{2,}|\t")
_NUMBER = r"(?>[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf|NaN|Inf|NAN|INF))"
"""Taken whole or not at all, so that no digits of a long one are tried in many ways."""
_VERL = re.compile(r"(?<![\w/])step:(\d+) - (.+)")
_VERL_VALUE = re.compile(rf"(\S+?):\s*({_NUMBER})")
_NUMPY = re.compile(r"np\.\w+\((.*)\)")
_MARK = re.compile(
    r"(?:^|[\s\[|(,])(?:global[ _]?step|train[ _]?step|step|iteration|iter|update|epoch|episode|it|s)"
    r"(?:\s*[:=#]\s*|\s+)(\d[\d,]{0,18})(?:\s*/\s*[\d,]+)?(?![\w.])",
    re.IGNORECASE,
)
_COUNTED = re.compile(r"(?:^|\s)(?:rollout|train|eval|perf)\s+(\d{1,18}):\s*$")
"""Before a dict, as slime prints those of its rollouts."""
_BRACKETED = re.compile(r"^\s*\[(\d{1,18})\]\s")
_SEGMENTS = re.compile(r"\s*\|\s*|\s+/\s+|,\s+|,(?=[A-Za-z_])|;\s*|\s+-\s+|(?<![:=\s])\s{2,}")
_COMPACT = re.compile(rf"([A-Za-z_][\w./@-]*)[:=]({_NUMBER})(?![\d.])")
_NAMED = re.compile(rf"([A-Za-z_][^:=]{{0,79}}?)\s*[:=]\s*({_NUMBER})\s*(?:%|[A-Za-z/%]{{0,12}})(?:\s*\(.{{0,40}}\))?$")
_SPACED = re.compile(rf"([A-Za-z_][\w ./@()-]{{0,79}}?)\s+({_NUMBER})(?:%|[A-Za-z/%]{{0,12}})(?:\s*\(.{{0,40}}\))?$")
_ALONE = re.compile(rf"\s+([\w./@-]+)\s*[=:]\s*({_NUMBER})\s*$")
_ARRAY = re.compile(rf"=\[\s*({_NUMBER})\s*\]")
"""An array of one number, as CleanRL prints returns."""
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_BAR = re.compile(r"^\s*(\d{1,18})/(\d{1,18})(?=\s)")
_RULE = re.compile(r"^[\s|:+-]*-{2,}[\s|:+-]*$")

MARKED = 200
"""Characters in which a line says which step it is of."""


def lines_of(path: Path) -> tuple[list[Line], str]:
    """The numbered lines of a file without escape sequences, carriage returns apart; and its last, if unfinished.

    Raises:
      UserError: it is empty or not of UTF-8, or has a line of more than a mebibyte.
    """
    text, last = text_of(path)
    found: list[Line] = []
    for number, line in enumerate(text.split("\n"), 1):
        if len(line) > LONGEST_LINE:
            raise UserError(f"{path}: line {number} is longer than {LONGEST_LINE} characters")
        plain = _BLANKS.sub("  ", _ANSI.sub("", line))  # so that no expression tries many of them in many ways
        found += [(number, part) for part in plain.split("\r") if part.strip()]
    return found, _ANSI.sub("", last)


def records(path: Path) -> Records:
    """The rows of what a trainer printed.

    Raises:
      UserError: nothing in it is recognised.
    """
    found = recognised(path)
    if found is None:
        raise UserError(f"{path} is text in which no rows of metrics are recognised; {ADVICE}")
    return found


ADVICE = (
    "what is: CSV, JSON lines, dicts as trainers print them, lines of 'step 10: loss 2.3' or 'step=10 loss=2.3', "
    "tables with '|', TensorBoard's event files, MLflow's folder of metrics"
)


def recognised(path: Path) -> Records | None:
    """The rows of a text by the first of the ways to print them that it has; None if it has none."""
    lines, last = lines_of(path)
    for format, rows_of, is_last in _WAYS:
        rows = list(rows_of(lines))
        if len(rows) >= FEWEST[format] and _repeats(rows):
            notes = []
            if is_last(last):
                notes.append("the last line has no line end, as one that is being written, and is left out")
            return Records.of_rows(format, "line", rows, notes)
    if any(is_last(last) for _, _, is_last in _WAYS):
        raise UserError(f"{path} has no complete line")
    return None


def _repeats(rows: list[Row]) -> bool:
    """Whether any metric is there in more than one row, or there is but one row."""
    counts = Counter(name for _, row in rows for name in row if name != "step")
    return len(rows) == 1 or max(counts.values(), default=0) > 1


def _verl(lines: Iterable[Line]) -> Iterator[Row]:
    """`step:3 - actor/loss:0.25 - critic/score/mean:0.5`; a name may have colons, a value has none."""
    for number, line in lines:
        if found := _VERL.search(line):
            row: dict[str, Any] = {"step": int(found[1])}
            parts = found[2].split(" - ")
            for place, part in enumerate(parts):
                name, colon, value = part.strip().rpartition(":")
                if place == len(parts) - 1 and (begins := _VERL_VALUE.match(part.strip())):
                    name, colon, value = begins[1], ":", begins[2]  # a progress bar may follow
                if colon and name:
                    inner = _NUMPY.fullmatch(value.strip())
                    row[name] = inner[1] if inner else value
            yield number, row


def _dicts(lines: Iterable[Line]) -> Iterator[Row]:
    """`{'loss': 1.5, 'epoch': 0.1}`, alone, after a progress bar, or after `step 3:` or `rollout 3:`."""
    for number, line in lines:
        if "{" not in line or ":" not in line or (found := dict_in(line)) is None:
            continue
        entries, begin, _ = found
        row = dict(_flat(entries))
        if "step" not in row and (mark := _mark(line[:begin])) is not None:
            row = {"step": mark[0], **row}
        elif "step" not in row and (counted := _COUNTED.search(line[:begin])):
            row = {"step": int(counted[1]), **row}
        if any(map(is_number, row.values())):  # which some trainers print as text, as {'loss': '3.097'}
            yield number, row


def _flat(entries: dict[str, Any], label: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in entries.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{label}{name}/")
        else:
            yield label + name, value


def _pairs(lines: Iterable[Line]) -> Iterator[Row]:
    """`iter 10: loss 2.3, time 9ms`, `step=3 | loss: 2.3 |`, or a line with the step and lines `loss=2.3` after it."""
    row: dict[str, Any] = {}
    begun, after = 0, 0
    for number, line in lines:
        if (mark := _mark(line)) is not None:
            if len(row) > 1:
                yield begun, row
            row, begun, after = {"step": mark[0]} | dict(_metrics(line[mark[1] :], _NAMED, _SPACED)), number, number
        elif row and number == after + 1 and (alone := _ALONE.match(line)):
            row[alone[1]], after = _plain(alone[2]), number
    if len(row) > 1:
        yield begun, row


def _headed(lines: Iterable[Line]) -> Iterator[Row]:
    """`Epoch 3/30` alone, and lines such as `6/6 - 0s - accuracy: 0.61 - loss: 0.69` after it, as Keras prints them.

    A bar that is not full, as `2/6`, has means of a part of the epoch, and says nothing.
    """
    row: dict[str, Any] = {}
    begun = 0
    for number, line in lines:
        if (mark := _mark(line)) is not None and not line[mark[1] :].strip(" :-=])"):
            if len(row) > 1:
                yield begun, row
            row, begun = {"step": mark[0]}, number
        elif row and not ((bar := _BAR.match(line)) and int(bar[1]) < int(bar[2])):
            row |= _metrics(line, _NAMED)
    if len(row) > 1:
        yield begun, row


def _mark(line: str) -> tuple[int, int] | None:
    """The step that a line says it is of, and where that ends."""
    found = _BRACKETED.match(line) or _MARK.search(line[:MARKED])
    return (int(found[1].replace(",", "")), found.end()) if found else None


def _metrics(text: str, *forms: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """Names and values of a line, each as `name=1` or in one of the forms."""
    for segment in _SEGMENTS.split(_ARRAY.sub(r"=\1", text)):
        segment = segment.strip(" :|,;[]()")
        compact = _COMPACT.findall(segment)
        if len(compact) > 1 or (compact and " " not in segment):
            yield from ((name, _plain(value)) for name, value in compact)
        elif found := next(filter(None, (form.match(segment) for form in forms)), None):
            yield found[1].strip(), _plain(found[2])


def _plain(number: str) -> str:
    return number.replace(",", "") if _THOUSANDS.fullmatch(number) else number


def _tables(lines: Iterable[Line]) -> Iterator[Row]:
    """Tables of names and values, one for each row, as Stable-Baselines3 prints them."""
    row: dict[str, Any] = {}
    begun, group = 0, ""
    for number, line in lines:
        text = line.strip()
        if text.startswith("|") and text.endswith("|") and len(cells := text.strip("|").split("|")) == 2:
            name, value = (cell.strip() for cell in cells)
            if not row:
                begun = number
            if name.endswith("/") and not value:
                group = name
            elif name and value:
                row[group + name] = value
        elif row:
            yield begun, row
            row, group = {}, ""
    if row:
        yield begun, row


def _columns(lines: Iterable[Line]) -> Iterator[Row]:
    """One table with a header, a rule and a line for each row, as notebooks and Markdown have it."""
    header: list[str] = []
    before = ""
    for number, line in lines:
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not header and "|" in line and _RULE.match(line) and before.count("|") == line.count("|"):
            header = [cell.strip() for cell in before.strip().strip("|").split("|")]
        elif header and len(cells) == len(header):
            yield number, dict(zip(header, cells, strict=True))
        before = line


def _never(last: str) -> bool:
    return False


_WAYS: tuple[tuple[str, Callable[[Iterable[Line]], Iterable[Row]], Callable[[str], object]], ...] = (
    ("lines as verl prints them", _verl, _VERL.search),
    ("dicts as trainers print them", _dicts, lambda last: "{" in last),
    ("tables as Stable-Baselines3 prints them", _tables, _never),
    ("a table in text", _columns, _never),
    ("lines of a step and metrics", _pairs, _mark),
    ("lines of a step, and of its metrics after it", _headed, _never),
)
FEWEST = {way[0]: 1 if way[1] is _verl else 2 for way in _WAYS}
"""Rows by which a way to print them is recognised."""
