"""Logs of other people's runs: each format, what is refused and what is only noted, and runs side by side."""

import contextlib
import json
import math
import os
import struct
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util import tensor_util

from jaxaudit.errors import UserError
from jaxaudit.logs import Log, read, together

FUZZ = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


def written(folder: Path, text: str | bytes, name: str = "a.csv") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def lines(*objects) -> str:
    return "".join(json.dumps(entries) + "\n" for entries in objects)


def log_of(folder: Path, text: str | bytes, name: str = "a.csv", step: str | None = None) -> Log:
    return read(written(folder, text, name), step)


def refusal(act, *arguments) -> str:
    """The one sentence of a UserError."""
    with pytest.raises(UserError) as error:
        act(*arguments)
    sentence = str(error.value)
    assert len(sentence.splitlines()) == 1
    return sentence


def made(name: str, steps, **channels) -> Log:
    steps = np.asarray(steps, np.int64)
    columns = [np.broadcast_to(np.asarray(values, np.float64), steps.shape) for values in channels.values()]
    return Log(Path(name), tuple(channels), steps, np.stack(columns, axis=1), ())


# Separated values


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_separated_values_are_those_that_pandas_wrote(tmp_path, delimiter, end):
    random = np.random.default_rng(0)
    table = pd.DataFrame(random.normal(size=(50, 3)) * 10.0 ** random.integers(-300, 300, (50, 3)), columns=list("abc"))
    table.loc[3, "b"] = math.nan
    table.loc[5, "c"] = -math.inf
    table.insert(0, "step", np.arange(50) * 10)
    path = tmp_path / "a.csv"
    table.to_csv(path, sep=delimiter, index=False, lineterminator=end)
    log = read(path)
    assert log.path == path
    assert log.channels == ("a", "b", "c")
    assert log.steps.dtype == np.int64
    assert log.values.dtype == np.float64
    np.testing.assert_array_equal(log.steps, table["step"])
    np.testing.assert_array_equal(log.values, table[["a", "b", "c"]])
    assert log.notes == ()


def test_a_byte_order_mark_is_no_part_of_the_first_name(tmp_path):
    log = log_of(tmp_path, b"\xef\xbb\xbfstep,loss\r\n0,1\r\n1,2\r\n")
    assert log.channels == ("loss",)
    log = log_of(tmp_path, b'\xef\xbb\xbf{"step": 0, "loss": 1}\n', "a.jsonl")
    assert log.channels == ("loss",)


def test_a_quoted_name_may_have_the_delimiter(tmp_path):
    log = log_of(tmp_path, 'step,"norm, of all","say ""loss"""\n0,1,2\n1,3,4\n')
    assert log.channels == ("norm, of all", 'say "loss"')
    log = log_of(tmp_path, "step\tf(a,b)\tloss\n0\t1\t2\n1\t3\t4\n", "a.tsv")
    assert log.channels == ("f(a,b)", "loss")


def test_words_for_numbers_and_for_none(tmp_path):
    log = log_of(tmp_path, "step,a\n0,true\n1,False\n2,NaN\n3,None\n4,\n5,-inf\n6, 1e3 \n7,n/a\n8,Infinity\n")
    steps = [0, 1, 2, 5, 6, 8]
    np.testing.assert_array_equal(log.steps, steps)
    np.testing.assert_array_equal(log.values[:, 0], [1, 0, math.nan, -math.inf, 1000, math.inf])


def test_columns_that_are_not_of_numbers_are_left_out_and_named(tmp_path):
    log = log_of(tmp_path, "step,loss,phase,host\n0,1.0,warm,a\n1,2.0,3,b\n")
    assert log.channels == ("loss",)
    assert log.notes == ("left out, as not of numbers: phase, host",)


def test_the_index_of_a_table_is_no_channel(tmp_path):
    path = tmp_path / "a.csv"
    pd.DataFrame({"step": [5, 6, 7], "loss": [1.0, 2.0, 3.0]}).to_csv(path)
    log = read(path)
    assert log.channels == ("loss",)
    assert log.notes == ("a column without a name is left out",)


def test_comments_before_the_header_are_passed_over(tmp_path):
    log = log_of(tmp_path, '#{"t_start": 1.5, "env_id":"Ant-v5"}\nr,l,t\n1.5,10,0.1\n2.5,11,0.2\n')
    assert log.channels == ("r", "l", "t")
    np.testing.assert_array_equal(log.values, [[1.5, 10, 0.1], [2.5, 11, 0.2]])


def test_rows_of_training_and_of_evaluation_at_one_step_are_merged(tmp_path):
    log = log_of(tmp_path, "step,train,val\n0,1.0,\n10,2.0,\n10,,0.5\n20,3.0,\n20,,0.25\n")
    np.testing.assert_array_equal(log.values, [[1, math.nan], [2, 0.5], [3, 0.25]])
    assert log.notes == ()


# JSON lines


def test_json_lines_are_as_json_wrote_them(tmp_path):
    random = np.random.default_rng(1)
    rows = [{"step": k, "loss": float(random.normal()), "n": 2**40 + k, "ok": k % 2 == 0} for k in range(20)]
    rows[3]["loss"], rows[4]["loss"], rows[5]["loss"] = math.nan, math.inf, -math.inf
    log = log_of(tmp_path, lines(*rows), "a.jsonl")
    assert log.channels == ("loss", "n", "ok")
    np.testing.assert_array_equal(log.values, [[r["loss"], r["n"], r["ok"]] for r in rows])


def test_objects_in_objects_are_flattened(tmp_path):
    text = lines(
        {"step": 0, "train": {"loss": 1.0, "grad": {"norm": 2.0}}, "lr": 0.1},
        {"step": 1, "train": {"loss": 3.0, "grad": {"norm": 4.0}}, "lr": 0.1},
    )
    log = log_of(tmp_path, text, "a.jsonl")
    assert log.channels == ("train/loss", "train/grad/norm", "lr")
    np.testing.assert_array_equal(log.values, [[1, 2, 0.1], [3, 4, 0.1]])


def test_lines_of_different_keys_at_one_step_are_merged(tmp_path):
    rows = [
        {"step": 0, "loss": 1.0, "time": 0.0},
        {"step": 10, "loss": 2.0, "time": 1.0},
        {"step": 10, "accuracy": 0.5, "time": 1.5},
        {"step": 20, "loss": 3.0, "time": 2.0},
        {"step": 10, "late": 7.0},
    ]
    log = log_of(tmp_path, lines(*rows), "a.jsonl")
    none = math.nan
    assert log.channels == ("loss", "time", "accuracy", "late")
    np.testing.assert_array_equal(log.values, [[1, 0, none, none], [2, 1.5, 0.5, 7], [3, 2, none, none]])
    assert log.notes == ()


def test_lists_and_texts_are_left_out_null_is_none(tmp_path):
    rows = [{"step": 0, "a": [1, 2], "b": 1.0, "c": None}, {"step": 1, "a": [3], "b": None, "c": 2, "d": "x"}]
    log = log_of(tmp_path, lines(*rows), "a.jsonl")
    assert log.channels == ("b", "c")
    np.testing.assert_array_equal(log.values, [[1, math.nan], [math.nan, 2]])
    assert log.notes == ("left out, as not of numbers: a, d",)


def test_numbers_beyond_float64_are_infinite(tmp_path):
    log = log_of(tmp_path, f'{{"step": 0, "a": 1{"0" * 400}, "b": -1{"0" * 400}}}\n', "a.jsonl")
    np.testing.assert_array_equal(log.values, [[math.inf, -math.inf]])


def test_lines_without_a_step_are_left_out(tmp_path):
    rows = [{"lr": 0.1, "seed": 3}, {"step": 0, "loss": 1.0}, {"step": 1, "loss": 2.0}, {"train_runtime": 12.0}]
    log = log_of(tmp_path, lines(*rows), "a.jsonl")
    np.testing.assert_array_equal(log.steps, [0, 1])
    assert log.notes == ("left out, as without 'step': 2 of 4 lines",)


def test_a_line_of_texts_alone_is_no_row(tmp_path):
    rows = [{"step": 0, "loss": 1.0}, {"step": 7, "event": "checkpoint saved"}, {"step": 10, "loss": 2.0}]
    log = log_of(tmp_path, lines(*rows), "a.jsonl")
    np.testing.assert_array_equal(log.steps, [0, 10])


# TensorBoard


def scalar(tag: str, value: float) -> summary_pb2.Summary.Value:
    """As older writers have it, and torch's."""
    return summary_pb2.Summary.Value(tag=tag, simple_value=value)


def tensor(tag: str, value: np.ndarray) -> summary_pb2.Summary.Value:
    """As TensorFlow 2 has it."""
    return summary_pb2.Summary.Value(tag=tag, tensor=tensor_util.make_tensor_proto(value))


def record(payload: bytes) -> bytes:
    """As TensorFlow's record files have it."""
    length = struct.pack("<Q", len(payload))
    return b"".join(
        (length, struct.pack("<I", masked_crc32c(length)), payload, struct.pack("<I", masked_crc32c(payload)))
    )


def write_events(folder: Path, steps, begin: float = 1000.0, name: str = "events.out.tfevents.1") -> Path:
    """A file of (step, values), begun at a time."""
    events = [event_pb2.Event(wall_time=begin, file_version="brain.Event:2")]
    for step, values in steps:
        events.append(event_pb2.Event(step=step, wall_time=begin, summary=summary_pb2.Summary(value=values)))
    return written(folder, b"".join(record(event.SerializeToString()) for event in events), name)


def test_scalars_of_older_and_of_newer_writers(tmp_path):
    values = np.float32(np.random.default_rng(2).normal(size=(30, 2)))
    path = write_events(
        tmp_path, [(10 * k, [scalar("loss", a), tensor("return", b)]) for k, (a, b) in enumerate(values)]
    )
    for place in (path, tmp_path):
        log = read(place)
        assert log.channels == ("loss", "return")
        np.testing.assert_array_equal(log.steps, 10 * np.arange(30))
        np.testing.assert_array_equal(log.values, values)
        assert log.notes == ()


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32, np.int64, np.bool_])
def test_tensors_of_other_types(tmp_path, dtype):
    write_events(tmp_path, [(k, [tensor("a", np.asarray(k, dtype))]) for k in range(2)])
    np.testing.assert_array_equal(read(tmp_path).values[:, 0], [0, 1])
    content = tensor_pb2.TensorProto(dtype=types_pb2.DT_DOUBLE, tensor_content=struct.pack("<d", 0.1))
    (tmp_path / "content").mkdir()
    write_events(tmp_path / "content", [(0, [summary_pb2.Summary.Value(tag="a", tensor=content)])])
    assert read(tmp_path / "content").values[0, 0] == 0.1


def test_tensors_that_make_no_sense_are_left_out(tmp_path):
    values = [scalar("loss", 1)]
    for dtype in range(24):
        for content in (b"", b"abc"):
            proto = tensor_pb2.TensorProto(dtype=dtype, tensor_content=content)
            values.append(summary_pb2.Summary.Value(tag=f"{dtype}{content!r}", tensor=proto))
    write_events(tmp_path, [(0, values)])
    assert read(tmp_path).values[0, 0] == 1


def test_events_of_the_packages_own_writer_are_those_of_its_reader(tmp_path):
    writer = EventFileWriter(str(tmp_path))
    for k in range(100):
        values = [scalar("x" * k, 1.0), scalar("loss", k / 7)] if k % 3 else [scalar("loss", k / 7)]
        writer.add_event(event_pb2.Event(step=k, summary=summary_pb2.Summary(value=values)))
    writer.close()
    (path,) = tmp_path.iterdir()
    theirs = [(e.step, v.tag, v.simple_value) for e in LegacyEventFileLoader(str(path)).Load() for v in e.summary.value]
    log = read(path)
    place = {tag: log.channels.index(tag) for tag in log.channels}
    assert len(theirs) == np.isfinite(log.values).sum()
    assert all(log.values[np.searchsorted(log.steps, step), place[tag]] == value for step, tag, value in theirs)


def test_what_is_not_a_scalar_is_left_out(tmp_path):
    histogram = summary_pb2.Summary.Value(tag="weights", histo=summary_pb2.HistogramProto(num=3))
    text = tensor("notes", np.asarray(b"hello"))
    vector = tensor("vector", np.ones(3, np.float32))
    write_events(tmp_path, [(k, [scalar("loss", k), histogram, text, vector]) for k in range(3)])
    log = read(tmp_path)
    assert log.channels == ("loss",)
    assert log.notes == ("left out, as not of numbers: weights, notes, vector",)


def test_files_of_a_folder_follow_each_other_as_they_were_begun(tmp_path):
    write_events(tmp_path, [(k, [scalar("loss", 2)]) for k in range(5, 10)], begin=2000.0, name="tfevents.1")
    write_events(tmp_path, [(k, [scalar("loss", 1)]) for k in range(8)], begin=1000.0, name="tfevents.2")
    write_events(tmp_path, [(k, [scalar("eval", 3)]) for k in range(0, 10, 5)], begin=3000.0, name="tfevents.3")
    log = read(tmp_path)
    np.testing.assert_array_equal(log.values[:, 0], [1] * 5 + [2] * 5)
    np.testing.assert_array_equal(log.steps[np.isfinite(log.values[:, 1])], [0, 5])
    (note,) = log.notes
    assert note.startswith("the log goes back from step 7 to 5, as after a restart")


def test_a_scalar_may_be_the_step(tmp_path):
    write_events(tmp_path, [(k, [scalar("frames", 4 * k), scalar("loss", k)]) for k in range(3)])
    log = read(tmp_path, "frames")
    np.testing.assert_array_equal(log.steps, [0, 4, 8])
    assert log.channels == ("step", "loss")


def test_an_event_file_that_is_being_written(tmp_path):
    path = write_events(tmp_path, [(k, [scalar("loss", k)]) for k in range(5)])
    whole = path.read_bytes()
    for cut in (1, 5, 20, 30):
        path.write_bytes(whole[:-cut])
        log = read(path)
        np.testing.assert_array_equal(log.values[:, 0], range(4))
        assert log.notes == (f"event 6 of {path.name} is cut off, as one that is being written, and is left out",)


def test_a_damaged_event_file(tmp_path):
    path = write_events(tmp_path, [(k, [scalar("loss", k)]) for k in range(3)])
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        assert "is damaged" in refusal(read, path)
    path.write_bytes(whole + record(b"\xff" * 9))
    assert "event 5 is damaged" in refusal(read, path)
    path.write_bytes(b"step,loss\n0,1\n1,2\n")
    assert "event 1 is damaged, or this is no event file" in refusal(read, path)
    path.write_bytes(b"")
    for place in (path, tmp_path):
        assert refusal(read, place) == f"{place} has no event that is complete"
    path.write_bytes(whole[:30])
    assert refusal(read, path) == f"{path} has no event that is complete"


def test_without_the_package(tmp_path, monkeypatch):
    path = write_events(tmp_path, [(0, [scalar("loss", 1)])])
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    assert 'pip install "jaxaudit[tensorboard]"' in refusal(read, path)


# Which format


@pytest.mark.parametrize("name", ["log", "metrics.txt", "a.log"])
def test_files_of_other_names_are_known_by_what_they_hold(tmp_path, name):
    for text in ("step;loss\n0;1\n1;2\n", lines({"step": 0, "loss": 1}, {"step": 1, "loss": 2})):
        np.testing.assert_array_equal(log_of(tmp_path, text, name).values[:, 0], [1, 2])
    (tmp_path / "runs").mkdir()
    events = write_events(tmp_path / "runs", [(0, [scalar("loss", 1)]), (1, [scalar("loss", 2)])])
    np.testing.assert_array_equal(log_of(tmp_path, events.read_bytes(), name).values[:, 0], [1, 2])


@pytest.mark.parametrize("data", [b"hello\nworld\n", b"\x89PNG\r\n\x1a\n\0\0,;\t", bytes(range(128, 160)) + b"\0\0"])
def test_other_formats_are_refused(tmp_path, data):
    path = written(tmp_path, data, "a.bin")
    assert (
        refusal(read, path) == f"{path} is neither CSV (.csv) nor JSON lines (.jsonl) nor an event file of TensorBoard"
    )


# Steps


@pytest.mark.parametrize("name", ["step", "_step", "Global_Step", "EPOCH", "trainer/global_step"])
def test_the_step_is_known_by_its_name(tmp_path, name):
    log = log_of(tmp_path, f"loss,{name}\n1,0\n2,5\n")
    np.testing.assert_array_equal(log.steps, [0, 5])
    assert log.channels == ("loss",)


def test_the_first_known_name_counts_and_a_given_one_before_all(tmp_path):
    text = "epoch,global_step,loss\n0,100,1\n1,200,2\n"
    assert log_of(tmp_path, text).channels == ("epoch", "loss")
    assert log_of(tmp_path, text, step="epoch").channels == ("global_step", "loss")
    assert "has no column 'epoc' (did you mean 'epoch'?); it has: epoch, global_step, loss" in refusal(
        read, tmp_path / "a.csv", "epoc"
    )


def test_without_steps_rows_are_counted(tmp_path):
    for text in ("loss,lr\n3,0.1\n2,0.1\n", "loss,epoch\n3,0.5\n2,1.0\n"):
        log = log_of(tmp_path, text)
        np.testing.assert_array_equal(log.steps, [0, 1])
        assert len(log.channels) == 2
        assert log.notes == ("there is no column of steps, so rows are counted from 0",)


def test_steps_may_be_written_as_fractions_if_they_are_whole(tmp_path):
    log = log_of(tmp_path, f"step,loss\n0.0,1\n1e3,2\n{2**60 + 1},3\n")
    assert log.steps.tolist() == [0, 1000, 2**60 + 1]


@pytest.mark.parametrize("step", ["0.5", "nan", "inf", "abc", "", str(10**30)])
def test_steps_that_are_not_whole_are_refused(tmp_path, step):
    sentence = refusal(log_of, tmp_path, f"step,loss\n0,1\n{step},2\n")
    assert sentence == f"{tmp_path / 'a.csv'}: line 3 has step '{step}', which must be a whole number"


@pytest.mark.parametrize("step", ["0.5", "NaN", "null", "[1]", '"abc"'])
def test_steps_that_are_not_whole_are_refused_in_json(tmp_path, step):
    text = f'{{"step": 0, "loss": 1}}\n\n{{"step": {step}, "loss": 2}}\n'
    assert ": line 3 has step " in refusal(log_of, tmp_path, text, "a.jsonl")


# What is refused


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.csv", "", "{} is empty"),
        ("a.jsonl", "\n \n", "{} is empty"),
        ("a", "", "{} is empty"),
        ("a.csv", "step,loss\n", "{} has no complete line after its header"),
        ("a.csv", "step,loss", "{} has no complete line"),
        ("a.csv", "step,loss\n0,1\n1\n2,3\n", "{}: line 3 has 1 fields, and the header 2"),
        ("a.csv", "step,loss\n0,1\n1,2,3\n", "{}: line 3 has 3 fields, and the header 2"),
        ("a.csv", "# x\n\nstep,loss\n0,1\n1,2,3\n", "{}: line 5 has 3 fields, and the header 2"),
        ("a.csv", 'step,loss\n0,1\n1,"2\n', "{}: line 3 is not of separated values: unexpected end of data"),
        ("a.csv", "0,1\n1,2\n", "{}: line 1 must be a header, the names of the columns, and has numbers alone"),
        ("a.csv", "step,loss,loss\n0,1,2\n", "{}: line 1, the header, has two columns 'loss'"),
        ("a.csv", "step,name\n0,a\n1,b\n", "{} has no column of numbers beside its steps; it has: step, name"),
        ("a.csv", "step,loss\n5,1\n5,2\n5,3\n", "{}: all 3 rows have step 5, where steps must differ"),
        ("a.csv", "step,loss\n0,1\n1,\xff\n".encode("latin1"), "{}: line 3 is not text in UTF-8"),
        ("a.csv", "step,loss\n0,1\n".encode("utf-16"), "{}: line 1 is not text in UTF-8"),
        ("a.jsonl", '{"step": 0, "a": 1}\n{"step": 1,\n', "{}: line 2 is not a JSON object: '{{\"step\": 1,'"),
        ("a.jsonl", '{"step": 0, "a": 1}\n[1, 2]\n', "{}: line 2 is not a JSON object: '[1, 2]'"),
        ("a.jsonl", '{"step": 0', "{} has no complete line"),
        ("a.jsonl", '{"step": 0}\n', "{} has no column of numbers beside its steps; it has: step"),
        ("a.jsonl", '{"a":' * 100_000 + "\n", "{}: line 1 is not a JSON object: '" + '{{"a":' * 12 + "..."),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_sentence(tmp_path, name, text, sentence):
    path = written(tmp_path, text, name)
    said = refusal(read, path)
    assert said.startswith(sentence.format(path)[:110])


def test_files_that_are_not_there(tmp_path):
    assert refusal(read, tmp_path / "no.csv") == f"there is no file {tmp_path / 'no.csv'}"
    assert (
        refusal(read, tmp_path) == f"{tmp_path} is a folder without TensorBoard's event files (events.out.tfevents.*)"
    )
    assert "cannot be read" in refusal(read, tmp_path / ("x" * 300))
    assert refusal(read, Path(os.devnull)) == f"{os.devnull} is not a file"


def test_names_and_values_stay_on_one_line_and_short(tmp_path):
    text = lines({"step": "a\nb" + "c" * 1000, "x\ny\ud800": 1})
    sentence = refusal(log_of, tmp_path, text, "a.jsonl")
    assert sentence.endswith("', which must be a whole number")
    assert len(sentence) < 200 + len(str(tmp_path))
    log = log_of(tmp_path, lines({"step": 0, "x\ny\ud800": 1}), "a.jsonl")
    assert r"x\ny\ud800" in refusal(together, [log], ["loss"])


# What is noted


@pytest.mark.parametrize("cut", ["2", "2,", "2,0.25", '2,"0'])
def test_a_last_line_of_separated_values_that_is_being_written(tmp_path, cut):
    log = log_of(tmp_path, f"step,loss\n0,1\n1,2\n{cut}")
    np.testing.assert_array_equal(log.steps, [0, 1])
    assert log.notes == ("the last line has no line end, as one that is being written, and is left out",)


def test_a_last_line_of_json_that_is_being_written(tmp_path):
    whole = lines({"step": 0, "loss": 1, "é": 1}, {"step": 1, "loss": 2, "é": 2}).encode()
    whole = whole.replace(b"\\u00e9", "é".encode())
    first = whole.index(b"\n") + 1
    for end in range(first + 1, len(whole) - 1):
        log = log_of(tmp_path, whole[:end], "a.jsonl")
        np.testing.assert_array_equal(log.steps, [0])
        assert log.notes == ("line 2 is cut off, as one that is being written, and is left out",)
    log = log_of(tmp_path, whole[:-1], "a.jsonl")
    np.testing.assert_array_equal(log.steps, [0, 1])
    assert log.notes == ()


def test_of_a_step_that_is_there_twice_the_last_value_counts(tmp_path):
    rows = [(100, 1), (110, 2), (120, 3), (120, 4), (130, 5)]
    log = log_of(tmp_path, "step,loss\n" + "".join(f"{s},{v}\n" for s, v in rows))
    np.testing.assert_array_equal(log.values[:, 0], [1, 2, 4, 5])
    assert log.notes == ("step 120 is there twice; the last value counts",)
    rows = [(step, 2 * step + again) for step in range(120, 130) for again in range(2 if step < 124 else 1)]
    log = log_of(tmp_path, "step,loss\n" + "".join(f"{s},{v}\n" for s, v in rows))
    np.testing.assert_array_equal(log.values[:, 0], [2 * step + (step < 124) for step in range(120, 130)])
    assert log.notes == ("step 120 and 3 more are there twice; the last value counts",)


def test_after_a_restart_the_later_rows_of_the_first_attempt_are_replaced(tmp_path):
    first = [{"step": step, "loss": 1.0} for step in range(0, 130, 10)]
    first.insert(12, {"step": 110, "eval": 1.0})
    second = [{"step": step, "loss": 2.0} for step in (100, 110)]
    log = log_of(tmp_path, lines(*first, *second), "a.jsonl")
    np.testing.assert_array_equal(log.steps, range(0, 120, 10))
    np.testing.assert_array_equal(log.values[:, 0], [1.0] * 10 + [2.0] * 2)
    assert np.isnan(log.values[:, 1]).all()
    note = (
        "the log goes back from step 120 to 100{}, as after a restart from a checkpoint; "
        "what it had of these steps is replaced"
    )
    assert log.notes == (note.format(""),)
    log = log_of(tmp_path, lines(*first, *second, {"step": 50, "loss": 3.0}, *second), "a.jsonl")
    np.testing.assert_array_equal(log.steps, [0, 10, 20, 30, 40, 50, 100, 110])
    assert log.notes[0] == note.format(" and 1 times more")


def test_a_restart_may_log_more_than_before(tmp_path):
    first = [{"step": step, "loss": 1.0} for step in range(5)]
    second = [{"step": step, "loss": 2.0, "norm": 3.0} for step in range(2, 4)]
    log = log_of(tmp_path, lines(*first, *second), "a.jsonl")
    np.testing.assert_array_equal(log.values, [[1, math.nan], [1, math.nan], [2, 3], [2, 3]])


def test_channels_of_steps_of_their_own_do_not_replace_each_other(tmp_path):
    rows = [{"step": 1000 + step, "loss": 1.0} for step in range(10)] + [{"step": k, "eval": 2.0} for k in range(5)]
    log = log_of(tmp_path, lines(*rows), "a.jsonl")
    assert len(log.steps) == 15
    assert not any("goes back" in note for note in log.notes)


def test_stretches_without_telemetry_are_noted(tmp_path):
    steps = [*range(0, 400, 10), *range(600, 700, 10)]
    log = log_of(tmp_path, "step,loss\n" + "".join(f"{s},1\n" for s in steps))
    np.testing.assert_array_equal(log.steps, steps)
    assert log.notes == ("no telemetry from step 400 to 590; those steps count as not seen",)
    steps = [step for step in range(30) if step not in (3, 7, 8, 12, 20, 24, 25)]
    log = log_of(tmp_path, "step,loss\n" + "".join(f"{s},1\n" for s in steps))
    assert log.notes == (
        "no telemetry at step 3, from step 7 to 8, at step 12 and in 2 more stretches; those steps count as not seen",
    )


# Runs side by side


def test_runs_on_one_grid(tmp_path):
    a = made("a", [0, 10, 20, 30], loss=[1, 2, 3, 4], lr=1)
    b = made("b", [10, 20, 40, 50], norm=0, loss=[5, np.nan, 1e300, 8])
    values = together([a, b])
    assert values.dims == ("run", "step", "channel")
    assert values.dtype == np.float32
    assert values.channel.values.tolist() == ["loss"]
    assert values.run.values.tolist() == ["a", "b"]
    np.testing.assert_array_equal(values.step, [0, 10, 20, 30, 40, 50])
    none = np.nan
    np.testing.assert_array_equal(values[..., 0], [[1, 2, 3, 4, none, none], [none, 5, none, none, np.inf, 8]])
    assert values.attrs["notes"] == ()


def test_channels_that_are_asked_for():
    a, b = made("a", range(5), loss=1, lr=2, norm=3), made("b", range(5), norm=4, loss=5)
    assert together([a, b]).channel.values.tolist() == ["loss", "norm"]
    np.testing.assert_array_equal(together([a, b], ["norm", "loss", "norm"])[:, 0], [[3, 1], [4, 5]])
    assert refusal(together, [a, b], ["lss"]) == (
        "a has no channel 'lss' (did you mean 'loss'?); it has: loss, lr, norm"
    )
    assert refusal(together, [a, b], ["lr"]).startswith("b has no channel 'lr'")
    assert refusal(together, [a, made("c", range(5), x=1)]) == (
        "no channel is in all logs: a has loss, lr, norm; c has x"
    )
    assert refusal(together, []) == "there must be at least one log, and there is none"


def test_rows_of_other_channels_are_not_of_the_grid():
    steps = [*range(0, 200, 10), *range(3, 200, 7)]
    order = np.argsort(steps)
    loss = np.array([1.0] * 20 + [np.nan] * (len(steps) - 20))[order]
    log = made("a", sorted(set(steps)), loss=loss[np.unique(np.sort(steps), return_index=True)[1]])
    np.testing.assert_array_equal(together([log]).step, range(0, 200, 10))


def test_a_run_that_ends_in_nan_keeps_its_end():
    loss = np.where(np.arange(30) < 12, 1.0, np.nan)
    values = together([made("a", range(30), loss=loss)])
    np.testing.assert_array_equal(values[0, :, 0], np.float32(loss))


def test_few_rows_off_the_grid_are_left_out():
    a, b = made("a", [1, *range(10, 110, 10)], loss=2), made("b", range(10, 60, 10), loss=1)
    values = together([a, b])
    np.testing.assert_array_equal(values.step, range(10, 110, 10))
    assert values.attrs["notes"] == ("a: left out, as off the grid of every 10 steps: 1 rows, the first at step 1",)
    np.testing.assert_array_equal(together([b, made("live", [1, 10, 20], loss=1)]).step, range(10, 60, 10))


def test_runs_whose_steps_do_not_match_are_refused():
    a = made("a", range(0, 300, 10), loss=1)
    assert refusal(together, [a, made("b", range(0, 300, 20), loss=1)]) == (
        "b has values every 20 steps, and the logs together every 10; they must have the same spacing"
    )
    assert refusal(together, [a, made("b", range(5, 200, 10), loss=1)]) == (
        "b has a row at step 5, and the logs together have steps 0 and 10; they must have the same steps"
    )
    irregular = np.cumsum(np.random.default_rng(0).integers(50, 900, 200))
    assert "they must have the same s" in refusal(together, [made("b", irregular, loss=1)])
    far = made("far", [*range(5), 10**15], loss=1)
    assert "too many to put together" in refusal(together, [far])


def test_short_runs_have_a_grid():
    np.testing.assert_array_equal(together([made("a", [7], loss=1)]).step, [7])
    np.testing.assert_array_equal(together([made("a", [7], loss=1), made("b", [9], loss=1)]).step, [7, 9])


def test_logs_of_different_formats_go_together(tmp_path):
    random = np.random.default_rng(3)
    values = random.normal(size=20).astype(np.float32)
    (tmp_path / "runs").mkdir()
    write_events(tmp_path / "runs", [(k, [scalar("loss", v)]) for k, v in enumerate(values)])
    rows = [{"step": k, "loss": float(v)} for k, v in enumerate(values)]
    pd.DataFrame(rows).to_csv(tmp_path / "a.csv", index=False)
    paths = [tmp_path / "runs", tmp_path / "a.csv", written(tmp_path, lines(*rows), "a.jsonl")]
    joined = together([read(path) for path in paths])
    np.testing.assert_array_equal(joined[..., 0], np.stack([values] * 3))


# Anything at all


def survives(path: Path) -> None:
    """Reading gives a log in order, or a UserError."""
    try:
        log = read(path)
    except UserError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017
        return
    assert log.steps.dtype == np.int64
    assert (np.diff(log.steps) > 0).all()
    assert log.values.shape == (len(log.steps), len(log.channels))
    assert all(len(note.splitlines()) == 1 for note in log.notes)
    with contextlib.suppress(UserError):
        together([log, log])


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
