"""Any file gives a log in order or one sentence."""

import contextlib
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from log_files import lines, scalar, tensor, write_events, written

from jaxaudit.detection.alignment import Named, channels_of, grid_of
from jaxaudit.errors import UserError
from jaxaudit.logs import read

FUZZ = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


def survives(path: Path) -> None:
    """Reading gives a log in order, or a UserError."""
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
    runs = [Named(run.name, run.latest) for run in log.runs]
    with contextlib.suppress(UserError):
        channels, _ = channels_of(runs, None)
        grid = grid_of(runs, channels)
        assert all(len(grid.of(run.series(name))) == len(grid.steps) for run in runs for name in channels)


NAMES = st.sampled_from(["a.csv", "a.jsonl", "a", "a.txt", "events.out.tfevents.1"])
CELLS = st.sampled_from(
    ["0", "1", "2", "3.0", "1e30", "nan", "-inf", "", "x", '"', "true", "null", "step", "#", "\x00"]
)


@FUZZ
@given(st.binary(max_size=200), NAMES)
def test_bytes(tmp_path, data, name):
    survives(written(tmp_path, data, name))


@FUZZ
@given(st.text(max_size=200), NAMES)
def test_text(tmp_path, text, name):
    survives(written(tmp_path, text.encode("utf-8", "replace"), name))


@FUZZ
@given(
    st.lists(st.lists(CELLS, min_size=1, max_size=4), max_size=8),
    st.sampled_from(",;\t"),
    st.sampled_from(["\n", "\r\n"]),
)
def test_cells(tmp_path, rows, delimiter, end):
    survives(written(tmp_path, end.join(delimiter.join(row) for row in [["step", "a", "b"], *rows])))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "b", ""]), inner, max_size=2),
    max_leaves=4,
)


@FUZZ
@given(st.lists(st.dictionaries(st.sampled_from(["step", "a", "b", "c\n"]), st.integers(-3, 9) | VALUES), max_size=8))
def test_objects(tmp_path, rows):
    survives(written(tmp_path, lines(*rows), "a.jsonl"))


@FUZZ
@given(st.integers(0, 300), st.binary(min_size=1, max_size=9))
def test_damaged_events(tmp_path_factory, at, damage):
    folder = tmp_path_factory.mktemp("damaged")
    path = write_events(folder, [(k, [scalar("a", k), tensor("b", np.float32(k))]) for k in range(4)])
    data = path.read_bytes()
    path.write_bytes(data[:at] + damage + data[at + len(damage) :])
    survives(path)
