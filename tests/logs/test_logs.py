"""Logs of other packages: how steps are read, which files are refused, and which irregularities give only a note."""

import math
import os
from pathlib import Path

import numpy as np
import pytest
from log_files import json_lines, read_log_text, read_table, user_error, write_file

from jaxaudit.monitoring.alignment import NamedAttempt, select_channels
from jaxaudit.runtime.errors import UserError

# Steps


@pytest.mark.parametrize("name", ["step", "_step", "Global_Step", "EPOCH", "trainer/global_step"])
def test_the_step_column_is_recognised_by_its_name(tmp_path, name):
    log = read_log_text(tmp_path, f"loss,{name}\n1,0\n2,5\n")
    np.testing.assert_array_equal(log.steps, [0, 5])
    assert log.channels == ("loss",)


def test_the_step_column_is_the_requested_or_the_first_recognised(tmp_path):
    text = "epoch,global_step,loss\n0,100,1\n1,200,2\n"
    assert read_log_text(tmp_path, text).channels == ("epoch", "loss")
    assert read_log_text(tmp_path, text, step="epoch").channels == ("global_step", "loss")
    assert "has no column 'epoc' (did you mean 'epoch'?); it has: epoch, global_step, loss" in user_error(
        read_table, tmp_path / "a.csv", "epoc"
    )


def test_without_a_step_column_rows_are_counted(tmp_path):
    for text in ("loss,lr\n3,0.1\n2,0.1\n", "loss,epoch\n3,0.5\n2,1.0\n"):
        log = read_log_text(tmp_path, text)
        np.testing.assert_array_equal(log.steps, [0, 1])
        assert len(log.channels) == 2
        assert log.notes == ("there is no column of steps, so rows are counted from 0",)


def test_whole_steps_may_be_written_as_decimals(tmp_path):
    log = read_log_text(tmp_path, f"step,loss\n0.0,1\n1e3,2\n{2**60 + 1},3\n")
    assert log.steps.tolist() == [0, 1000, 2**60 + 1]


@pytest.mark.parametrize("step", ["0.5", "nan", "inf", "abc", "", str(10**30), str(-(2**63)), str(2**62)])
def test_fractional_steps_are_refused(tmp_path, step):
    sentence = user_error(read_log_text, tmp_path, f"step,loss\n0,1\n{step},2\n")
    assert sentence == f"{tmp_path / 'a.csv'}: line 3 has step '{step}', which must be a whole number"


@pytest.mark.parametrize("step", ["0.5", "NaN", "null", "[1]", '"abc"'])
def test_fractional_steps_are_refused_in_json(tmp_path, step):
    text = f'{{"step": 0, "loss": 1}}\n\n{{"step": {step}, "loss": 2}}\n'
    assert ": line 3 has step " in user_error(read_log_text, tmp_path, text, "a.jsonl")


# Refusals


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.csv", "", "{} is empty"),
        ("a.jsonl", "\n \n", "{} is empty"),
        ("a", "", "{} is empty"),
        ("a.csv", "step,loss\n", "{} has no complete line after its header"),
        ("a.csv", "step,loss", "{} has no complete line"),
        ("a.csv", "step,loss\n0,1\n1\n2,3\n", "{}: line 3 has 1 fields, but the header has 2"),
        ("a.csv", "step,loss\n0,1\n1,2,3\n", "{}: line 3 has 3 fields, but the header has 2"),
        ("a.csv", "# x\n\nstep,loss\n0,1\n1,2,3\n", "{}: line 5 has 3 fields, but the header has 2"),
        ("a.csv", 'step,loss\n0,1\n1,"2\n', "{}: line 3 is not separated values: unexpected end of data"),
        ("a.csv", "0,1\n1,2\n", "{}: line 1 must be a header with the names of the columns, but has only numbers"),
        ("a.csv", "step,loss,loss\n0,1,2\n", "{}: line 1, the header, has two columns 'loss'"),
        ("a.csv", "step,name\n0,a\n1,b\n", "{} has no numeric column besides its steps; it has: step, name"),
        ("a.csv", "step,loss\n5,1\n5,2\n5,3\n", "{}: all 3 rows have step 5, but steps must differ"),
        ("a.csv", "step,loss\n0,1\n1,\xff\n".encode("latin1"), "{}: line 3 is not UTF-8 text"),
        ("a.csv", "step,loss\n0,1\n".encode("utf-16"), "{}: line 1 is not UTF-8 text"),
        ("a.jsonl", '{"step": 0, "a": 1}\n{"step": 1,\n', "{}: line 2 is not a JSON object: '{{\"step\": 1,'"),
        ("a.jsonl", '{"step": 0, "a": 1}\n[1, 2]\n', "{}: line 2 is not a JSON object: '[1, 2]'"),
        ("a.jsonl", '{"step": 0', "{} has no complete line"),
        ("a.jsonl", '{"step": 0}\n', "{} has no numeric column besides its steps; it has: step"),
        ("a.jsonl", '{"a":' * 100_000 + "\n", "{}: line 1 is not a JSON object: '" + '{{"a":' * 12 + "..."),
    ],
)
def test_unreadable_files_are_refused_in_one_sentence(tmp_path, name, text, sentence):
    path = write_file(tmp_path, text, name)
    message = user_error(read_table, path)
    assert message.startswith(sentence.format(path)[:110])


def test_absent_files_and_other_paths_are_refused(tmp_path):
    assert user_error(read_table, tmp_path / "no.csv") == f"there is no file {tmp_path / 'no.csv'}"
    assert (
        user_error(read_table, tmp_path)
        == f"{tmp_path} is a folder without TensorBoard's event files (events.out.tfevents.*)"
    )
    assert "cannot be read" in user_error(read_table, tmp_path / ("x" * 300))
    assert user_error(read_table, Path(os.devnull)) == f"{os.devnull} is not a file"


def test_messages_keep_names_and_values_short_and_on_one_line(tmp_path):
    text = json_lines({"step": "a\nb" + "c" * 1000, "x\ny\ud800": 1})
    sentence = user_error(read_log_text, tmp_path, text, "a.jsonl")
    assert sentence.endswith("', which must be a whole number")
    assert len(sentence) < 200 + len(str(tmp_path))
    log = read_log_text(tmp_path, json_lines({"step": 0, "x\ny\ud800": 1}), "a.jsonl")
    assert r"x\ny\ud800" in user_error(select_channels, [NamedAttempt("a", log.log.runs[0].latest)], ["loss"])


# Notes


@pytest.mark.parametrize("cut", ["2", "2,", "2,0.25", '2,"0'])
def test_an_incomplete_last_line_of_separated_values_is_left_out(tmp_path, cut):
    log = read_log_text(tmp_path, f"step,loss\n0,1\n1,2\n{cut}")
    np.testing.assert_array_equal(log.steps, [0, 1])
    assert log.notes == ("the last line has no line end, as if it were still being written, and is left out",)


def test_an_incomplete_last_line_of_json_is_left_out(tmp_path):
    content = json_lines({"step": 0, "loss": 1, "é": 1}, {"step": 1, "loss": 2, "é": 2}).encode()
    content = content.replace(b"\\u00e9", "é".encode())
    first_line_end = content.index(b"\n") + 1
    for end in range(first_line_end + 1, len(content) - 1):
        log = read_log_text(tmp_path, content[:end], "a.jsonl")
        np.testing.assert_array_equal(log.steps, [0])
        assert log.notes == ("line 2 is cut off, as if it were still being written, and is left out",)
    log = read_log_text(tmp_path, content[:-1], "a.jsonl")
    np.testing.assert_array_equal(log.steps, [0, 1])
    assert log.notes == ()


def test_of_repeated_steps_the_last_value_counts(tmp_path):
    rows = [(100, 1), (110, 2), (120, 3), (120, 4), (130, 5)]
    log = read_log_text(tmp_path, "step,loss\n" + "".join(f"{step},{value}\n" for step, value in rows))
    np.testing.assert_array_equal(log.values[:, 0], [1, 2, 4, 5])
    assert log.notes == ("step 120 occurs more than once with different values; the last value is used",)
    rows = [(step, 2 * step + repetition) for step in range(120, 130) for repetition in range(2 if step < 124 else 1)]
    log = read_log_text(tmp_path, "step,loss\n" + "".join(f"{step},{value}\n" for step, value in rows))
    np.testing.assert_array_equal(log.values[:, 0], [2 * step + (step < 124) for step in range(120, 130)])
    assert log.notes == ("step 120 and 3 more occur more than once with different values; the last value is used",)


def test_a_restart_replaces_the_later_rows_of_the_first_attempt(tmp_path):
    first = [{"step": step, "loss": 1.0} for step in range(0, 130, 10)]
    first.insert(12, {"step": 110, "eval": 1.0})
    second = [{"step": step, "loss": 2.0} for step in (100, 110)]
    log = read_log_text(tmp_path, json_lines(*first, *second), "a.jsonl")
    np.testing.assert_array_equal(log.steps, range(0, 120, 10))
    np.testing.assert_array_equal(log.values[:, 0], [1.0] * 10 + [2.0] * 2)
    assert np.isnan(log.values[:, 1]).all()
    note = (
        "the log goes back {}from step 120 to 100, as after a restart from a checkpoint; "
        "each attempt is read separately"
    )
    assert log.notes == (note.format(""),)
    log = read_log_text(tmp_path, json_lines(*first, *second, {"step": 50, "loss": 3.0}, *second), "a.jsonl")
    np.testing.assert_array_equal(log.steps, [0, 10, 20, 30, 40, 50, 100, 110])
    assert log.notes[0] == note.format("2 times, first ")


def test_a_restart_may_log_additional_channels(tmp_path):
    first = [{"step": step, "loss": 1.0} for step in range(5)]
    second = [{"step": step, "loss": 2.0, "norm": 3.0} for step in range(2, 4)]
    log = read_log_text(tmp_path, json_lines(*first, *second), "a.jsonl")
    np.testing.assert_array_equal(log.values, [[1, math.nan], [1, math.nan], [2, 3], [2, 3]])


def test_channels_with_separate_steps_are_no_restart(tmp_path):
    rows = [{"step": 1000 + step, "loss": 1.0} for step in range(10)] + [{"step": k, "eval": 2.0} for k in range(5)]
    log = read_log_text(tmp_path, json_lines(*rows), "a.jsonl")
    assert len(log.steps) == 15
    assert not any("goes back" in note for note in log.notes)


def test_gaps_in_the_steps_are_noted(tmp_path):
    steps = [*range(0, 400, 10), *range(600, 700, 10)]
    log = read_log_text(tmp_path, "step,loss\n" + "".join(f"{step},1\n" for step in steps))
    np.testing.assert_array_equal(log.steps, steps)
    assert log.notes == ("there is no telemetry from step 400 to 590; those steps count as missing",)
    steps = [step for step in range(30) if step not in (3, 7, 8, 12, 20, 24, 25)]
    log = read_log_text(tmp_path, "step,loss\n" + "".join(f"{step},1\n" for step in steps))
    assert log.notes == (
        "there is no telemetry at step 3, from step 7 to 8, at step 12 and in 2 more stretches; "
        "those steps count as missing",
    )


def test_a_log_larger_than_memory_is_refused(tmp_path):
    path = tmp_path / "huge.csv"
    with path.open("wb") as file:
        file.write(b"step,loss\n0,1\n")
        file.truncate(2**42)  # a sparse file, which takes no space on the disk
    with pytest.raises(UserError, match=r"huge\.csv has 4 TiB, and .* of memory are too few to read it"):
        read_table(path)
