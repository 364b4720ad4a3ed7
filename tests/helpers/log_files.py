"""Log files as other packages write them, for tests that read logs."""

import json
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.util import tensor_util

from jaxaudit import logs
from jaxaudit.logs import Attempt, Log, Series
from jaxaudit.monitoring.alignment import NamedAttempt
from jaxaudit.runtime.errors import UserError


def write_file(folder: Path, text: str | bytes, name: str = "a.csv") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def json_lines(*objects) -> str:
    return "".join(json.dumps(entry) + "\n" for entry in objects)


@dataclass(frozen=True)
class Table:
    """The latest attempt of a log's only run, as a table whose values `[T, d]` are NaN where the log has none."""

    log: Log
    channels: tuple[str, ...]
    steps: np.ndarray
    values: np.ndarray
    notes: tuple[str, ...]


def read_table(path: Path, step: str | None = None) -> Table:
    log = logs.read(path, step)
    (run,) = log.runs
    steps = run.latest.steps
    values = np.full((len(steps), len(log.channels)), np.nan)
    for column, name in enumerate(log.channels):
        if (series := run.latest.series.get(name)) is not None:
            values[np.searchsorted(steps, series.steps), column] = series.values
    return Table(log, log.channels, steps, values, (*map(str, log.left_out), *log.notes))


def read_log_text(folder: Path, text: str | bytes, name: str = "a.csv", step: str | None = None) -> Table:
    return read_table(write_file(folder, text, name), step)


def user_error(function, *arguments) -> str:
    """Asserts that a call raises a UserError with a message of one sentence, and returns this message."""
    with pytest.raises(UserError) as error:
        function(*arguments)
    sentence = str(error.value)
    assert len(sentence.splitlines()) == 1
    return sentence


def make_attempt(name: str, steps, **channels) -> NamedAttempt:
    """Returns an attempt whose channels have a value at every step."""
    steps = np.asarray(steps, np.int64)
    series = {
        name: Series(steps, np.broadcast_to(np.asarray(values, np.float64), steps.shape))
        for name, values in channels.items()
    }
    return NamedAttempt(name, Attempt(int(steps[0]), series))


def simple_scalar(tag: str, value: float) -> summary_pb2.Summary.Value:
    """Returns a scalar in the format of older TensorBoard writers and of torch."""
    return summary_pb2.Summary.Value(tag=tag, simple_value=value)


def tensor_scalar(tag: str, value: np.ndarray) -> summary_pb2.Summary.Value:
    """Returns a scalar in the format of TensorFlow 2."""
    return summary_pb2.Summary.Value(tag=tag, tensor=tensor_util.make_tensor_proto(value))


def tfrecord(payload: bytes) -> bytes:
    """Returns a record of TensorFlow's record files."""
    length = struct.pack("<Q", len(payload))
    return b"".join(
        (length, struct.pack("<I", masked_crc32c(length)), payload, struct.pack("<I", masked_crc32c(payload)))
    )


def write_events(folder: Path, steps, begin: float = 1000.0, name: str = "events.out.tfevents.1") -> Path:
    """Writes an event file of (step, values) pairs that was opened at the time `begin`."""
    events = [event_pb2.Event(wall_time=begin, file_version="brain.Event:2")]
    for step, values in steps:
        events.append(event_pb2.Event(step=step, wall_time=begin, summary=summary_pb2.Summary(value=values)))
    return write_file(folder, b"".join(tfrecord(event.SerializeToString()) for event in events), name)
