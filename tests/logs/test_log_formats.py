"""Reading of separated values, JSON lines and TensorBoard event files, and recognition of the format."""

import math
import struct
import sys

import numpy as np
import pandas as pd
import pytest
from log_files import (
    json_lines,
    read_log_text,
    read_table,
    simple_scalar,
    tensor_scalar,
    tfrecord,
    user_error,
    write_events,
    write_file,
)
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

# Separated values


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_separated_values_equal_what_pandas_wrote(tmp_path, delimiter, end):
    random = np.random.default_rng(0)
    table = pd.DataFrame(random.normal(size=(50, 3)) * 10.0 ** random.integers(-300, 300, (50, 3)), columns=list("abc"))
    table.loc[3, "b"] = math.nan
    table.loc[5, "c"] = -math.inf
    table.insert(0, "step", np.arange(50) * 10)
    path = tmp_path / "a.csv"
    table.to_csv(path, sep=delimiter, index=False, lineterminator=end)
    log = read_table(path)
    assert log.log.path == path
    assert log.channels == ("a", "b", "c")
    assert log.steps.dtype == np.int64
    assert log.values.dtype == np.float64
    np.testing.assert_array_equal(log.steps, table["step"])
    np.testing.assert_array_equal(log.values, table[["a", "b", "c"]])
    assert log.notes == ()


def test_a_byte_order_mark_is_not_part_of_the_first_name(tmp_path):
    log = read_log_text(tmp_path, b"\xef\xbb\xbfstep,loss\r\n0,1\r\n1,2\r\n")
    assert log.channels == ("loss",)
    log = read_log_text(tmp_path, b'\xef\xbb\xbf{"step": 0, "loss": 1}\n', "a.jsonl")
    assert log.channels == ("loss",)


def test_a_quoted_name_may_contain_the_delimiter(tmp_path):
    log = read_log_text(tmp_path, 'step,"norm, of all","say ""loss"""\n0,1,2\n1,3,4\n')
    assert log.channels == ("norm, of all", 'say "loss"')
    log = read_log_text(tmp_path, "step\tf(a,b)\tloss\n0\t1\t2\n1\t3\t4\n", "a.tsv")
    assert log.channels == ("f(a,b)", "loss")


def test_words_for_numbers_and_for_missing_values(tmp_path):
    log = read_log_text(tmp_path, "step,a\n0,true\n1,False\n2,NaN\n3,None\n4,\n5,-inf\n6, 1e3 \n7,n/a\n8,Infinity\n")
    steps = [0, 1, 2, 5, 6, 8]
    np.testing.assert_array_equal(log.steps, steps)
    np.testing.assert_array_equal(log.values[:, 0], [1, 0, math.nan, -math.inf, 1000, math.inf])


def test_non_numeric_columns_are_left_out_and_named(tmp_path):
    log = read_log_text(tmp_path, "step,loss,phase,host\n0,1.0,warm,a\n1,2.0,3,b\n")
    assert log.channels == ("loss",)
    assert log.notes == ("left out because they are not numeric: phase, host",)


def test_the_index_column_of_pandas_is_no_channel(tmp_path):
    path = tmp_path / "a.csv"
    pd.DataFrame({"step": [5, 6, 7], "loss": [1.0, 2.0, 3.0]}).to_csv(path)
    log = read_table(path)
    assert log.channels == ("loss",)
    assert log.notes == ("a column without a name is left out",)


def test_comments_before_the_header_are_skipped(tmp_path):
    log = read_log_text(tmp_path, '#{"t_start": 1.5, "env_id":"Ant-v5"}\nr,l,t\n1.5,10,0.1\n2.5,11,0.2\n')
    assert log.channels == ("r", "l", "t")
    np.testing.assert_array_equal(log.values, [[1.5, 10, 0.1], [2.5, 11, 0.2]])


def test_training_and_evaluation_rows_of_one_step_are_merged(tmp_path):
    log = read_log_text(tmp_path, "step,train,val\n0,1.0,\n10,2.0,\n10,,0.5\n20,3.0,\n20,,0.25\n")
    np.testing.assert_array_equal(log.values, [[1, math.nan], [2, 0.5], [3, 0.25]])
    assert log.notes == ()


# JSON lines


def test_json_lines_equal_what_json_wrote(tmp_path):
    random = np.random.default_rng(1)
    rows = [{"step": k, "loss": float(random.normal()), "n": 2**40 + k, "ok": k % 2 == 0} for k in range(20)]
    rows[3]["loss"], rows[4]["loss"], rows[5]["loss"] = math.nan, math.inf, -math.inf
    log = read_log_text(tmp_path, json_lines(*rows), "a.jsonl")
    assert log.channels == ("loss", "n", "ok")
    np.testing.assert_array_equal(log.values, [[r["loss"], r["n"], r["ok"]] for r in rows])


def test_nested_objects_are_flattened(tmp_path):
    text = json_lines(
        {"step": 0, "train": {"loss": 1.0, "grad": {"norm": 2.0}}, "lr": 0.1},
        {"step": 1, "train": {"loss": 3.0, "grad": {"norm": 4.0}}, "lr": 0.1},
    )
    log = read_log_text(tmp_path, text, "a.jsonl")
    assert log.channels == ("train/loss", "train/grad/norm", "lr")
    np.testing.assert_array_equal(log.values, [[1, 2, 0.1], [3, 4, 0.1]])


def test_lines_with_different_keys_at_one_step_are_merged(tmp_path):
    rows = [
        {"step": 0, "loss": 1.0, "time": 0.0},
        {"step": 10, "loss": 2.0, "time": 1.0},
        {"step": 10, "accuracy": 0.5, "time": 1.5},
        {"step": 20, "loss": 3.0, "time": 2.0},
        {"step": 10, "late": 7.0},
    ]
    log = read_log_text(tmp_path, json_lines(*rows), "a.jsonl")
    missing = math.nan
    assert log.channels == ("loss", "time", "accuracy", "late")
    np.testing.assert_array_equal(log.values, [[1, 0, missing, missing], [2, 1.5, 0.5, 7], [3, 2, missing, missing]])
    assert log.notes == ()


def test_lists_and_texts_are_left_out_and_null_is_missing(tmp_path):
    rows = [{"step": 0, "a": [1, 2], "b": 1.0, "c": None}, {"step": 1, "a": [3], "b": None, "c": 2, "d": "x"}]
    log = read_log_text(tmp_path, json_lines(*rows), "a.jsonl")
    assert log.channels == ("b", "c")
    np.testing.assert_array_equal(log.values, [[1, math.nan], [math.nan, 2]])
    assert log.notes == ("left out because they are not numeric: a, d",)


def test_numbers_beyond_float64_are_infinite(tmp_path):
    log = read_log_text(tmp_path, f'{{"step": 0, "a": 1{"0" * 400}, "b": -1{"0" * 400}}}\n', "a.jsonl")
    np.testing.assert_array_equal(log.values, [[math.inf, -math.inf]])


def test_lines_without_a_step_are_left_out(tmp_path):
    rows = [{"lr": 0.1, "seed": 3}, {"step": 0, "loss": 1.0}, {"step": 1, "loss": 2.0}, {"train_runtime": 12.0}]
    log = read_log_text(tmp_path, json_lines(*rows), "a.jsonl")
    np.testing.assert_array_equal(log.steps, [0, 1])
    assert log.notes == ("left out because they have no 'step': 2 of 4 lines",)


def test_a_line_without_numbers_is_no_row(tmp_path):
    rows = [{"step": 0, "loss": 1.0}, {"step": 7, "event": "checkpoint saved"}, {"step": 10, "loss": 2.0}]
    log = read_log_text(tmp_path, json_lines(*rows), "a.jsonl")
    np.testing.assert_array_equal(log.steps, [0, 10])


# TensorBoard


def test_scalars_of_older_and_newer_event_writers(tmp_path):
    values = np.float32(np.random.default_rng(2).normal(size=(30, 2)))
    path = write_events(
        tmp_path, [(10 * k, [simple_scalar("loss", a), tensor_scalar("return", b)]) for k, (a, b) in enumerate(values)]
    )
    for source in (path, tmp_path):
        log = read_table(source)
        assert log.channels == ("loss", "return")
        np.testing.assert_array_equal(log.steps, 10 * np.arange(30))
        np.testing.assert_array_equal(log.values, values)
        assert log.notes == ()


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32, np.int64, np.bool_])
def test_scalar_tensors_of_other_types(tmp_path, dtype):
    write_events(tmp_path, [(k, [tensor_scalar("a", np.asarray(k, dtype))]) for k in range(2)])
    np.testing.assert_array_equal(read_table(tmp_path).values[:, 0], [0, 1])
    content = tensor_pb2.TensorProto(dtype=types_pb2.DT_DOUBLE, tensor_content=struct.pack("<d", 0.1))
    (tmp_path / "content").mkdir()
    write_events(tmp_path / "content", [(0, [summary_pb2.Summary.Value(tag="a", tensor=content)])])
    assert read_table(tmp_path / "content").values[0, 0] == 0.1


def test_malformed_tensors_are_left_out(tmp_path):
    values = [simple_scalar("loss", 1)]
    for dtype in range(24):
        for content in (b"", b"abc"):
            proto = tensor_pb2.TensorProto(dtype=dtype, tensor_content=content)
            values.append(summary_pb2.Summary.Value(tag=f"{dtype}{content!r}", tensor=proto))
    write_events(tmp_path, [(0, values)])
    assert read_table(tmp_path).values[0, 0] == 1


def test_event_files_agree_with_tensorboards_own_loader(tmp_path):
    writer = EventFileWriter(str(tmp_path))
    for k in range(100):
        values = (
            [simple_scalar("x" * k, 1.0), simple_scalar("loss", k / 7)] if k % 3 else [simple_scalar("loss", k / 7)]
        )
        writer.add_event(event_pb2.Event(step=k, summary=summary_pb2.Summary(value=values)))
    writer.close()
    (path,) = tmp_path.iterdir()
    expected = [
        (e.step, v.tag, v.simple_value) for e in LegacyEventFileLoader(str(path)).Load() for v in e.summary.value
    ]
    log = read_table(path)
    column = {tag: log.channels.index(tag) for tag in log.channels}
    assert len(expected) == np.isfinite(log.values).sum()
    assert all(log.values[np.searchsorted(log.steps, step), column[tag]] == value for step, tag, value in expected)


def test_values_that_are_not_scalars_are_left_out(tmp_path):
    histogram = summary_pb2.Summary.Value(tag="weights", histo=summary_pb2.HistogramProto(num=3))
    text = tensor_scalar("notes", np.asarray(b"hello"))
    vector = tensor_scalar("vector", np.ones(3, np.float32))
    write_events(tmp_path, [(k, [simple_scalar("loss", k), histogram, text, vector]) for k in range(3)])
    log = read_table(tmp_path)
    assert log.channels == ("loss",)
    assert log.notes == ("left out because they are not numeric: weights, notes, vector",)


def test_event_files_of_a_folder_are_read_in_order_of_their_start(tmp_path):
    write_events(tmp_path, [(k, [simple_scalar("loss", 2)]) for k in range(5, 10)], begin=2000.0, name="tfevents.1")
    write_events(tmp_path, [(k, [simple_scalar("loss", 1)]) for k in range(8)], begin=1000.0, name="tfevents.2")
    write_events(tmp_path, [(k, [simple_scalar("eval", 3)]) for k in range(0, 10, 5)], begin=3000.0, name="tfevents.3")
    log = read_table(tmp_path)
    np.testing.assert_array_equal(log.values[:, 0], [1] * 5 + [2] * 5)
    np.testing.assert_array_equal(log.steps[np.isfinite(log.values[:, 1])], [0, 5])
    (message,) = log.notes
    assert message.startswith("the log goes back from step 7 to 5, as after a restart")


def test_a_scalar_may_be_the_step(tmp_path):
    write_events(tmp_path, [(k, [simple_scalar("frames", 4 * k), simple_scalar("loss", k)]) for k in range(3)])
    log = read_table(tmp_path, "frames")
    np.testing.assert_array_equal(log.steps, [0, 4, 8])
    assert log.channels == ("step", "loss")


def test_an_event_file_being_written_is_read_without_its_last_event(tmp_path):
    path = write_events(tmp_path, [(k, [simple_scalar("loss", k)]) for k in range(5)])
    complete = path.read_bytes()
    for cut in (1, 5, 20, 30):
        path.write_bytes(complete[:-cut])
        log = read_table(path)
        np.testing.assert_array_equal(log.values[:, 0], range(4))
        assert log.notes == (f"event 6 of {path.name} is cut off, as if it were still being written, and is left out",)


def test_damaged_and_empty_event_files_are_refused(tmp_path):
    path = write_events(tmp_path, [(k, [simple_scalar("loss", k)]) for k in range(3)])
    complete = path.read_bytes()
    for position in range(len(complete)):
        path.write_bytes(complete[:position] + bytes([complete[position] ^ 4]) + complete[position + 1 :])
        assert "is damaged" in user_error(read_table, path)
    path.write_bytes(complete + tfrecord(b"\xff" * 9))
    assert "event 5 is damaged" in user_error(read_table, path)
    path.write_bytes(b"step,loss\n0,1\n1,2\n")
    assert "event 1 is damaged, or this is not a TensorBoard event file" in user_error(read_table, path)
    path.write_bytes(b"")
    for source in (path, tmp_path):
        assert user_error(read_table, source) == f"{source} has no complete event"
    path.write_bytes(complete[:30])
    assert user_error(read_table, path) == f"{path} has no complete event"


def test_without_tensorboard_the_message_says_how_to_install_it(tmp_path, monkeypatch):
    path = write_events(tmp_path, [(0, [simple_scalar("loss", 1)])])
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    assert 'pip install "jaxaudit[tensorboard]"' in user_error(read_table, path)


# Recognition of the format


@pytest.mark.parametrize("name", ["log", "metrics.txt", "a.log"])
def test_the_format_is_recognised_by_the_content(tmp_path, name):
    for text in ("step;loss\n0;1\n1;2\n", json_lines({"step": 0, "loss": 1}, {"step": 1, "loss": 2})):
        np.testing.assert_array_equal(read_log_text(tmp_path, text, name).values[:, 0], [1, 2])
    (tmp_path / "runs").mkdir()
    events = write_events(tmp_path / "runs", [(0, [simple_scalar("loss", 1)]), (1, [simple_scalar("loss", 2)])])
    np.testing.assert_array_equal(read_log_text(tmp_path, events.read_bytes(), name).values[:, 0], [1, 2])


@pytest.mark.parametrize("data", [b"hello\nworld\n", b"\x89PNG\r\n\x1a\n\0\0,;\t", bytes(range(128, 160)) + b"\0\0"])
def test_other_formats_are_refused(tmp_path, data):
    path = write_file(tmp_path, data, "a.bin")
    assert user_error(read_table, path).startswith(
        (f"{path} is text in which no rows of metrics are recognised", f"{path} is not a log")
    )
