"""Logs as other packages write them, in files of a test."""

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


def written(folder: Path, text: str | bytes, name: str = "a.csv") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def lines(*objects) -> str:
    return "".join(json.dumps(entries) + "\n" for entries in objects)


@dataclass(frozen=True)
class Table:
    """The latest attempt of a log's only run, as a table: values `[T, d]`, NaN where there is none."""

    log: Log
    channels: tuple[str, ...]
    steps: np.ndarray
    values: np.ndarray
    notes: tuple[str, ...]


def read(path: Path, step: str | None = None) -> Table:
    log = logs.read(path, step)
    (run,) = log.runs
    steps = run.latest.steps
    values = np.full((len(steps), len(log.channels)), np.nan)
    for place, name in enumerate(log.channels):
        if (one := run.latest.series.get(name)) is not None:
            values[np.searchsorted(steps, one.steps), place] = one.values
    return Table(log, log.channels, steps, values, (*map(str, log.left_out), *log.notes))


def log_of(folder: Path, text: str | bytes, name: str = "a.csv", step: str | None = None) -> Table:
    return read(written(folder, text, name), step)


def refusal(act, *arguments) -> str:
    """The one sentence of a UserError."""
    with pytest.raises(UserError) as error:
        act(*arguments)
    sentence = str(error.value)
    assert len(sentence.splitlines()) == 1
    return sentence


def made(name: str, steps, **channels) -> NamedAttempt:
    """A run whose channels have a value at every step."""
    steps = np.asarray(steps, np.int64)
    series = {
        name: Series(steps, np.broadcast_to(np.asarray(values, np.float64), steps.shape))
        for name, values in channels.items()
    }
    return NamedAttempt(name, Attempt(int(steps[0]), series))


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
