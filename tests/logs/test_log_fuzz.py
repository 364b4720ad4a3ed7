"""Fuzzing: reading any file gives either a well-formed log or an error of one sentence."""

import contextlib
import json
import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from log_files import json_lines, simple_scalar, tensor_scalar, write_events, write_file
from test_log_kinds import PRINTED

from jaxaudit.logs import read, structured
from jaxaudit.monitoring.alignment import NamedAttempt, common_grid, select_channels
from jaxaudit.runtime.errors import UserError

FUZZ = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


def check_reading(path: Path) -> None:
    """Reads a file, and checks that the result is a well-formed log or a UserError of one line."""
    try:
        log = read(path)
    except UserError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017
        return
    for run in log.runs:
        for attempt in run.attempts:
            for series in (*attempt.series.values(), *attempt.texts.values()):
                assert series.steps.dtype == np.int64
                assert len(series.steps) == len(series.values) > 0
                assert (np.diff(series.steps) > 0).all()
    assert all(len(str(note).splitlines()) == 1 for note in (*log.left_out, *log.notes))
    runs = [NamedAttempt(run.name, run.latest) for run in log.runs]
    with contextlib.suppress(UserError):
        channels, _ = select_channels(runs, None)
        selected = [{name: run.attempt.series[name] for name in channels} for run in runs]
        runs = [replace(run, attempt=replace(run.attempt, series=s)) for run, s in zip(runs, selected, strict=True)]
        grid = common_grid(runs, channels)
        assert all(len(grid.average(run.series(name))) == len(grid.steps) for run in runs for name in channels)


NAMES = st.sampled_from(["a.csv", "a.jsonl", "a", "a.txt", "events.out.tfevents.1"])
CELLS = st.sampled_from(
    ["0", "1", "2", "3.0", "1e30", "nan", "-inf", "", "x", '"', "true", "null", "step", "#", "\x00"]
)


def separated(*rows) -> str:
    return "".join(",".join(map(str, row)) + "\n" for row in rows)


SEPARATED = st.text(st.sampled_from('ab1.,;\t\n\r# \x00\x0b\x85"\N{LINE SEPARATOR}'), max_size=60)


@FUZZ
@given(st.one_of(SEPARATED, st.lists(st.tuples(CELLS, CELLS), min_size=2).map(lambda rows: separated(*rows))))
def test_unquoted_values_are_split_as_by_the_csv_module(text):
    path = Path("a.csv")
    try:
        rows = structured._split_unquoted(path, text)
    except UserError as error:
        with pytest.raises(UserError, match=re.escape(str(error))):
            structured._parse_csv(path, text)
        return
    if rows is not None:
        assert rows == structured._parse_csv(path, text)


def test_only_quoted_or_ragged_tables_need_the_csv_module():
    text = "# created by a trainer\n" + separated(("step", "loss"), *((i, i / 7) for i in range(100)))
    assert structured._split_unquoted(Path("a.csv"), text) == structured._parse_csv(Path("a.csv"), text) is not None
    assert structured._split_unquoted(Path("a.csv"), text.replace("0", '"0"')) is None
    for end in ("\n", "\n\n", "1\n", "1,2,3\n"):
        assert structured._split_unquoted(Path("a.csv"), text + end) is None


@FUZZ
@given(st.binary(max_size=200), NAMES)
def test_arbitrary_bytes(tmp_path, data, name):
    check_reading(write_file(tmp_path, data, name))


@FUZZ
@given(st.text(max_size=200), NAMES)
def test_arbitrary_text(tmp_path, text, name):
    check_reading(write_file(tmp_path, text.encode("utf-8", "replace"), name))


@FUZZ
@given(
    st.lists(st.lists(CELLS, min_size=1, max_size=4), max_size=8),
    st.sampled_from(",;\t"),
    st.sampled_from(["\n", "\r\n"]),
)
def test_tables_of_arbitrary_cells(tmp_path, rows, delimiter, end):
    check_reading(write_file(tmp_path, end.join(delimiter.join(row) for row in [["step", "a", "b"], *rows])))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "b", ""]), inner, max_size=2),
    max_leaves=4,
)


@FUZZ
@given(st.lists(st.dictionaries(st.sampled_from(["step", "a", "b", "c\n"]), st.integers(-3, 9) | VALUES), max_size=8))
def test_json_lines_of_arbitrary_values(tmp_path, rows):
    check_reading(write_file(tmp_path, json_lines(*rows), "a.jsonl"))


@FUZZ
@given(st.integers(0, 300), st.binary(min_size=1, max_size=9))
def test_damaged_event_files(tmp_path_factory, position, damage):
    folder = tmp_path_factory.mktemp("damaged")
    path = write_events(folder, [(k, [simple_scalar("a", k), tensor_scalar("b", np.float32(k))]) for k in range(4)])
    data = path.read_bytes()
    path.write_bytes(data[:position] + damage + data[position + len(damage) :])
    check_reading(path)


def mutated(data: bytes, random: np.random.Generator) -> bytes:
    """Returns a log with a few bytes or lines changed, removed, repeated or exchanged."""
    for _ in range(random.integers(1, 6)):
        kind, position = random.integers(6), int(random.integers(len(data) + 1))
        length = int(random.integers(1, 30))
        rows = data.split(b"\n")
        if kind == 0:
            data = data[:position] + data[position + length :]
        elif kind == 1:
            data = data[:position] + FRAGMENTS[random.integers(len(FRAGMENTS))] + data[position:]
        elif kind == 2:
            data = data[:position] + data[position : position + length] * 3 + data[position + length :]
        elif kind == 3:
            data = data[:position] + bytes([random.integers(256)]) + data[position + 1 :]
        else:
            first, second = random.integers(len(rows), size=2)
            rows[first], rows[second] = rows[second], rows[first] if kind == 4 else rows[second]
            data = b"\n".join(rows)
    return data


FRAGMENTS = [
    b"nan",
    b"inf",
    b"1e999",
    b"-",
    b"{",
    b"}",
    b"'",
    b'"',
    b",",
    b"|",
    b"\t",
    b"\r",
    b"\x1b[31m",
    b"\x00",
    b"step",
    b"[[[",
]
FRAGMENTS += [b"\xff", "\u2028".encode(), b"#", b":", b"=", b"null", b"tensor(", b"9" * 40, b"/300", b" " * 300]


def logs_of_all_formats() -> list[tuple[str, bytes]]:
    rows = [{"step": k, "loss": 1.5 * k, "seed": k % 2, "host": "a"} for k in range(6)]
    table = "step,loss,seed\n" + "".join(f"{r['step']},{r['loss']},{r['seed']}\n" for r in rows)
    tidy = "field,value,step\n" + "".join(f"{name},{k},{k}\n" for k in range(4) for name in "ab")
    wide = '"Step","r - a","r - a__MIN"\n' + "".join(f"{k},{k},{k}\n" for k in range(4))
    examples = [
        ("a.csv", table),
        ("a.csv", tidy),
        ("a.csv", wide),
        ("a.jsonl", json_lines(*rows)),
        ("a.json", json.dumps(rows)),
    ]
    examples += [("a.json", json.dumps({"log_history": rows})), ("a.json", json.dumps({"loss": [1, 2], "x": [3, 4]}))]
    examples += [("a.log", text) for text, _ in PRINTED.values()]
    return [(name, text.encode()) for name, text in examples]


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mutated_logs_of_all_formats(tmp_path, count):
    random, examples = np.random.default_rng(count), logs_of_all_formats()
    for number in range(count):
        name, data = examples[number % len(examples)]
        check_reading(write_file(tmp_path, mutated(data, random), name))


@pytest.mark.parametrize(
    "line", ["{'" * 50_000, "{" * 100_000, " " * 10**6, "a:" * 300_000, "step 1 " + "x 1 | " * 100_000, "'" * 10**6]
)
def test_long_lines_are_read_in_linear_time(tmp_path, line):
    start = time.perf_counter()
    check_reading(write_file(tmp_path, f"step 0: loss 1\n{line}\nstep 1: loss 2\n", "a.log"))
    assert time.perf_counter() - start < 10
