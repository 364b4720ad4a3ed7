"""Reads the rows of metrics that trainers print, among whatever else a process prints."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxaudit.logs.cells import flatten, is_number, read_complete_lines
from jaxaudit.logs.records import Records
from jaxaudit.runtime.errors import UserError

MAX_DEPTH = 8
"""The deepest nesting of dicts and lists that is read."""

MAX_TRIED_BRACES = 16
"""Braces of a text at which a dict is looked for."""

_TOKEN = re.compile(
    r"""\s*(?:
    (?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
    |(?P<number>[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+](?:inf|nan)\b)
    |(?P<word>[A-Za-z_][\w.]*)
    |(?P<sign>[{}\[\](),:=])
    )""",
    re.VERBOSE,
)
_CONSTANTS = {"True": True, "False": False, "None": None, "nan": float("nan"), "inf": float("inf"), "NaN": float("nan")}
_CONSTANTS |= {"true": True, "false": False, "null": None, "Infinity": float("inf")}
_ESCAPE = re.compile(r"\\(.)")


class NotLiteral(ValueError):
    """A text is not a Python or JSON literal."""


def find_dict(text: str) -> tuple[dict[str, Any], int, int] | None:
    """Returns the first complete dict in a text, with the offsets of its beginning and end, or None."""
    begin = -1
    for _ in range(MAX_TRIED_BRACES):
        begin = text.find("{", begin + 1)
        if begin < 0:
            break
        try:
            value, end = _LiteralParser(text).value(begin, 0)
        except NotLiteral:
            continue
        return (value, begin, end) if value else None
    return None


class _LiteralParser:
    """Parses literals at an offset of a text; every method returns what it parsed and the offset after it."""

    def __init__(self, text: str):
        self._text = text

    def value(self, offset: int, depth: int) -> tuple[Any, int]:
        """Parses the value at an offset, nested in `depth` others. Raises NotLiteral if there is none."""
        if depth > MAX_DEPTH:
            raise NotLiteral
        kind, token, end = self._token(offset)
        if kind == "string":
            return _unescape(token), end
        if kind == "number":
            return _number(token), end
        if kind == "word":
            return self._constant_or_call(token, end, depth)
        if token == "{":
            return self._dict(end, depth)
        if token in "[(":
            return self._items(end, "]" if token == "[" else ")", depth)
        raise NotLiteral

    def _token(self, offset: int) -> tuple[str, str, int]:
        match = _TOKEN.match(self._text, offset)
        if match is None:
            raise NotLiteral
        return str(match.lastgroup), match[str(match.lastgroup)], match.end()

    def _dict(self, offset: int, depth: int) -> tuple[dict[str, Any], int]:
        entries: dict[str, Any] = {}
        while True:
            kind, token, end = self._token(offset)
            if token == "}" and kind == "sign":
                return entries, end
            if kind not in ("string", "number"):
                raise NotLiteral
            name = _unescape(token) if kind == "string" else token
            _, colon, end = self._token(end)
            if colon != ":":
                raise NotLiteral
            entries[name], end = self.value(end, depth + 1)
            _, token, after = self._token(end)
            if token == "}":
                return entries, after
            if token != ",":
                raise NotLiteral
            offset = after

    def _items(self, offset: int, closing: str, depth: int) -> tuple[list[Any], int]:
        items: list[Any] = []
        while True:
            kind, token, end = self._token(offset)
            if token == closing and kind == "sign":
                return items, end
            if kind == "word" and self._text[end : end + 1] == "=":  # a keyword, as in tensor(0.5, device='cuda:0')
                _, end = self.value(end + 1, depth + 1)
            else:
                item, end = self.value(offset, depth + 1)
                items.append(item)
            _, token, after = self._token(end)
            if token == closing:
                return items, after
            if token != ",":
                raise NotLiteral
            offset = after

    def _constant_or_call(self, word: str, end: int, depth: int) -> tuple[Any, int]:
        """Parses a constant, or a call such as `tensor(0.5)`, whose value is its first argument."""
        if word in _CONSTANTS:
            return _CONSTANTS[word], end
        if self._text[end : end + 1] != "(":
            raise NotLiteral
        arguments, end = self._items(end + 1, ")", depth + 1)
        return (arguments[0] if arguments else f"{word}()"), end


def _unescape(token: str) -> str:
    return _ESCAPE.sub(r"\1", token[1:-1])


def _number(token: str) -> int | float:
    try:
        return int(token) if len(token) < 300 else float(token)
    except ValueError:
        return float(token.replace("_", ""))


MAX_LINE = 2**20
"""Characters of the longest line that is read."""

Line = tuple[int, str]
Row = tuple[int, dict[str, Any]]

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_BLANKS = re.compile(r"[ \t]{2,}|\t")
_NUMBER = r"(?>[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf|NaN|Inf|NAN|INF))"
"""Matches atomically, so that a long number is not tried with fewer digits."""
_VERL_LINE = re.compile(r"(?<![\w/])step:(\d+) - (.+)")
_VERL_METRIC = re.compile(rf"\S+?:\s*{_NUMBER}")
_NUMPY_SCALAR = re.compile(r"np\.\w+\((.*)\)")
_STEP = re.compile(
    r"(?:^|[\s\[|(,])(?:global[ _]?step|train[ _]?step|step|iteration|iter|update|epoch|episode|it|s)"
    r"(?:\s*[:=#]\s*|\s+)(\d[\d,]{0,18})(?:\s*/\s*[\d,]+)?(?![\w.])",
    re.IGNORECASE,
)
_ROLLOUT = re.compile(r"(?:^|\s)(?:rollout|train|eval|perf)\s+(\d{1,18}):\s*$")
"""Matches the counter that slime prints before the dict of a rollout."""
_BRACKETED_STEP = re.compile(r"^\s*\[(\d{1,18})\]\s")
_SEGMENTS = re.compile(r"\s*\|\s*|\s+/\s+|,\s+|,(?=[A-Za-z_])|;\s*|\s+-\s+|(?<![:=\s])\s{2,}")
_COMPACT_METRIC = re.compile(rf"([A-Za-z_][\w./@-]*)[:=]({_NUMBER})(?![\d.])")
_NAMED_METRIC = re.compile(
    rf"([A-Za-z_][^:=]{{0,79}}?)\s*[:=]\s*({_NUMBER})\s*(?:%|[A-Za-z/%]{{0,12}})(?:\s*\(.{{0,40}}\))?$"
)
_SPACED_METRIC = re.compile(
    rf"([A-Za-z_][\w ./@()-]{{0,79}}?)\s+({_NUMBER})(?:%|[A-Za-z/%]{{0,12}})(?:\s*\(.{{0,40}}\))?$"
)
_INDENTED_METRIC = re.compile(rf"\s+([\w./@-]+)\s*[=:]\s*({_NUMBER})\s*$")
_ONE_NUMBER_ARRAY = re.compile(rf"=\[\s*({_NUMBER})\s*\]")
"""Matches an array of one number, as CleanRL prints returns."""
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_PROGRESS_BAR = re.compile(r"^\s*(\d{1,18})/(\d{1,18})(?=\s)")
_TABLE_RULE = re.compile(r"^[\s|:+-]*-{2,}[\s|:+-]*$")

STEP_SEARCH_LENGTH = 200
"""Characters at the beginning of a line in which its step is looked for."""

FORMATS = (
    "CSV, JSON lines, dicts as trainers print them, lines of 'step 10: loss 2.3' or 'step=10 loss=2.3', "
    "tables with '|', TensorBoard's event files, and MLflow's folder of metrics"
)
"""The formats of logs, for messages."""


def read_printed(path: Path) -> Records | None:
    """Reads the rows of a text in the first printed format that matches, or returns None if none does.

    Raises:
      UserError: The text is empty or not UTF-8, has a line of more than MAX_LINE characters, or has nothing but the
        beginning of a row.
    """
    lines, last = _read_lines(path)
    for format, parse, starts_row in _PRINTED_FORMATS:
        rows = list(parse(lines))
        min_rows = 1 if parse is _parse_verl else 2
        if len(rows) >= min_rows and _repeats_metrics(rows):
            notes = []
            if starts_row(last):
                notes.append("the last line has no line end, as if it were still being written, and is left out")
            return Records.from_rows(format, "line", rows, notes)
    if any(starts_row(last) for _, _, starts_row in _PRINTED_FORMATS):
        raise UserError(f"{path} has no complete line")
    return None


def _read_lines(path: Path) -> tuple[list[Line], str]:
    """Returns the numbered lines of a text, split at carriage returns, and its last line if that is unfinished.

    Escape sequences are removed, and runs of blanks are shortened so that regular expressions match in linear time.
    """
    text, last = read_complete_lines(path)
    lines: list[Line] = []
    for number, line in enumerate(text.split("\n"), 1):
        if len(line) > MAX_LINE:
            raise UserError(f"{path}: line {number} has {len(line)} characters, but at most {MAX_LINE} are allowed")
        plain = _BLANKS.sub("  ", _ANSI.sub("", line))
        lines += [(number, part) for part in plain.split("\r") if part.strip()]
    return lines, _ANSI.sub("", last)


def _repeats_metrics(rows: list[Row]) -> bool:
    """Whether any metric is in more than one row, or there is only one row."""
    counts = Counter(name for _, row in rows for name in row if name != "step")
    return len(rows) == 1 or max(counts.values(), default=0) > 1


def _parse_verl(lines: Iterable[Line]) -> Iterator[Row]:
    """Parses `step:3 - actor/loss:0.25 - critic/score/mean:0.5`; names may contain colons, values do not."""
    for number, line in lines:
        if match := _VERL_LINE.search(line):
            row: dict[str, Any] = {"step": int(match[1])}
            *metrics, last = match[2].split(" - ")
            last_metric = _VERL_METRIC.match(last.strip())  # a progress bar may follow it
            for metric in (*metrics, last_metric[0] if last_metric else last):
                name, colon, value = metric.strip().rpartition(":")
                if colon and name:
                    wrapped = _NUMPY_SCALAR.fullmatch(value.strip())
                    row[name] = wrapped[1] if wrapped else value
            yield number, row


def _parse_dicts(lines: Iterable[Line]) -> Iterator[Row]:
    """Parses `{'loss': 1.5, 'epoch': 0.1}`, alone, after a progress bar, or after `step 3:` or `rollout 3:`."""
    for number, line in lines:
        if "{" not in line or ":" not in line or (match := find_dict(line)) is None:
            continue
        entries, begin, _ = match
        row = dict(flatten(entries))
        if "step" not in row and (marked := _find_step(line[:begin])) is not None:
            row = {"step": marked[0], **row}
        elif "step" not in row and (rollout := _ROLLOUT.search(line[:begin])):
            row = {"step": int(rollout[1]), **row}
        if any(map(is_number, row.values())):  # some trainers print numbers as text, as in {'loss': '3.097'}
            yield number, row


def _parse_pairs(lines: Iterable[Line]) -> Iterator[Row]:
    """Parses `iter 10: loss 2.3, time 9ms`, `step=3 | loss: 2.3 |`, or a step followed by indented `loss=2.3` lines."""
    row: dict[str, Any] = {}
    begun, previous = 0, 0
    for number, line in lines:
        if (marked := _find_step(line)) is not None:
            if len(row) > 1:
                yield begun, row
            step, end = marked
            row = {"step": step} | dict(_find_metrics(line[end:], _NAMED_METRIC, _SPACED_METRIC))
            begun = previous = number
        elif row and number == previous + 1 and (metric := _INDENTED_METRIC.match(line)):
            row[metric[1]], previous = _without_commas(metric[2]), number
    if len(row) > 1:
        yield begun, row


def _parse_headed_lines(lines: Iterable[Line]) -> Iterator[Row]:
    """Parses `Epoch 3/30` alone on a line, followed by lines such as `6/6 - 0s - accuracy: 0.61 - loss: 0.69` (Keras).

    A progress bar that is not full, such as `2/6`, is ignored, because its metrics are means over part of the epoch.
    """
    row: dict[str, Any] = {}
    begun = 0
    for number, line in lines:
        if (marked := _find_step(line)) is not None and not line[marked[1] :].strip(" :-=])"):
            if len(row) > 1:
                yield begun, row
            row, begun = {"step": marked[0]}, number
        elif row and not ((bar := _PROGRESS_BAR.match(line)) and int(bar[1]) < int(bar[2])):
            row |= _find_metrics(line, _NAMED_METRIC)
    if len(row) > 1:
        yield begun, row


def _find_step(line: str) -> tuple[int, int] | None:
    """Returns the step that a line names, and the offset after it, or None."""
    match = _BRACKETED_STEP.match(line) or _STEP.search(line[:STEP_SEARCH_LENGTH])
    return (int(match[1].replace(",", "")), match.end()) if match else None


def _find_metrics(text: str, *patterns: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """Yields the names and values of a text, each written as `name=1` or matching one of the patterns."""
    for segment in _SEGMENTS.split(_ONE_NUMBER_ARRAY.sub(r"=\1", text)):
        segment = segment.strip(" :|,;[]()")
        compact = _COMPACT_METRIC.findall(segment)
        if len(compact) > 1 or (compact and " " not in segment):
            yield from ((name, _without_commas(value)) for name, value in compact)
        elif match := next(filter(None, (pattern.match(segment) for pattern in patterns)), None):
            yield match[1].strip(), _without_commas(match[2])


def _without_commas(number: str) -> str:
    return number.replace(",", "") if _THOUSANDS.fullmatch(number) else number


def _parse_boxes(lines: Iterable[Line]) -> Iterator[Row]:
    """Parses one table of names and values for each row, as Stable-Baselines3 prints them."""
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


def _parse_text_table(lines: Iterable[Line]) -> Iterator[Row]:
    """Parses one table with a header, a rule and a line for each row, as in notebooks and Markdown."""
    header: list[str] = []
    previous = ""
    for number, line in lines:
        cells = _table_cells(line)
        if not header and "|" in line and _TABLE_RULE.match(line) and previous.count("|") == line.count("|"):
            header = _table_cells(previous)
        elif header and len(cells) == len(header):
            yield number, dict(zip(header, cells, strict=True))
        previous = line


def _table_cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _never(last: str) -> bool:
    return False


_PRINTED_FORMATS: tuple[tuple[str, Callable[[Iterable[Line]], Iterable[Row]], Callable[[str], object]], ...] = (
    ("lines as verl prints them", _parse_verl, _VERL_LINE.search),
    ("dicts as trainers print them", _parse_dicts, lambda last: "{" in last),
    ("tables as Stable-Baselines3 prints them", _parse_boxes, _never),
    ("a table in text", _parse_text_table, _never),
    ("lines of a step and metrics", _parse_pairs, _find_step),
    ("lines of a step, and of its metrics after it", _parse_headed_lines, _never),
)
"""The name and parser of each format in order of preference, and whether an unfinished line begins a row of it."""
