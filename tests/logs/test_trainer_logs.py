"""Logs of language model trainers: stored logs of small GRPO runs of TRL, and lines in the formats of verl.

The runs of TRL were trained by experiments/dialogues/trl_logs.py (TRL 1.16, transformers 5.23, torch 2.13). Seven are
clean. In the eighth, the learning rate is 100 times the logged one from update 16 on. verl is not installed, so its
lines are written as in its code: `FileLogger` in verl/utils/tracking.py and `concat_dict_to_str` in
verl/utils/logger/aggregate_logger.py, with names from verl/trainer/ppo/metric_utils.py.
"""

import contextlib
import io
import json
import math
import numbers
import pprint
import tarfile

import numpy as np
import pandas as pd
import pytest
from directories import DATA
from log_files import json_lines, read_log_text, read_table, user_error, write_file

from jaxaudit.cli.main import main

STORED = DATA / "trl-1.16.tar.gz"
LEARNED = ("loss", "grad_norm", "reward", "reward_std", "kl", "entropy", "completions/mean_length", "step_time")


@pytest.fixture(scope="module")
def trl(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trl")
    with tarfile.open(STORED) as archive:
        archive.extractall(folder)
    return folder


# TRL


def test_the_state_stored_with_a_checkpoint_equals_the_log(trl):
    checkpoint, logged = (read_table(trl / "clean-0" / name) for name in ("trainer_state.json", "log.jsonl"))
    np.testing.assert_array_equal(checkpoint.steps, np.arange(1, 31))
    assert set(checkpoint.channels) >= {*LEARNED, "learning_rate", "num_tokens", "epoch", "rewards/says_yes/mean"}
    assert checkpoint.notes == logged.notes == (), (
        "the last entry, a summary of the run, has the last step and other names"
    )
    history = json.loads((trl / "clean-0" / "trainer_state.json").read_text())["log_history"]
    for name in LEARNED:
        np.testing.assert_array_equal(
            checkpoint.values[:, checkpoint.channels.index(name)], [e[name] for e in history[:-1]]
        )
    assert set(checkpoint.channels) == set(logged.channels)
    order = [checkpoint.channels.index(name) for name in logged.channels]
    np.testing.assert_array_equal(checkpoint.values[:, order], logged.values)
    runtime = checkpoint.values[:, checkpoint.channels.index("train_runtime")]
    assert np.isnan(runtime[:-1]).all()
    assert runtime[-1] == history[-1]["train_runtime"]


def test_a_wrong_learning_rate_raises_an_alarm(trl, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxaudit.report.page.write_figures", lambda *_: None)
    clean = [str(trl / f"clean-{seed}" / "trainer_state.json") for seed in range(6)]
    monitored = [str(trl / run / "trainer_state.json") for run in ("disturbed", "clean-6")]
    out = tmp_path / "out"
    with contextlib.redirect_stdout(io.StringIO()) as console_output:
        assert main(["monitor", *monitored, "--clean", *clean, "-o", str(out)]) == 0
    alarms = pd.read_csv(out / "alarms.csv")
    assert list(alarms.run) == monitored[:1]
    assert 16 <= alarms.step[0] <= 22
    assert {name.split()[0] for name in alarms.channels[0].split(", ")} >= {"kl", "entropy"}
    document = json.loads((out / "monitored.json").read_text())
    assert set(document["channels"]) >= {*LEARNED} - {"step_time"}, "step_time depends on the machine"
    assert "learning_rate" not in document["channels"], "the logged learning rate is the same in all runs"
    assert "left out, rising at every step like a clock or counter: epoch, num_tokens" in console_output.getvalue()


@pytest.mark.parametrize("indent", [None, 2])
def test_json_documents_are_read_with_any_indentation(tmp_path, indent):
    rows = [{"step": k, "loss": 0.5 * k, "nested": {"a": k}} for k in range(4)]
    rows[2]["loss"] = math.nan
    for name, document in (("trainer_state.json", {"epoch": 1.0, "log_history": rows}), ("rows.json", rows)):
        log = read_log_text(tmp_path, json.dumps(document, indent=indent), name)
        assert log.channels == ("loss", "nested/a")
        np.testing.assert_array_equal(log.values, [[0, 0], [0.5, 1], [math.nan, 2], [1.5, 3]])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            '{\n"a": 1\n}',
            "{} is one JSON object without a list 'log_history' or exactly one other list of objects; "
            "otherwise, each line must be an object",
        ),
        (
            '{"log_history": 3}',
            "{} is one JSON object whose 'log_history' is not a list of objects",
        ),
        ('{"log_history": []}', "{} has no entries"),
        ('{"log_history": [{"step": 1}, 2]}', "{}: entry 2 is not a JSON object: '2'"),
        ('{"log_history": [{"step": 1.5, "a": 1}]}', "{}: entry 1 has step '1.5', which must be a whole number"),
        ('{\n"log_history": [{"step": 1}, ', "{}: line 1 is not a JSON object: '{{'"),
    ],
)
def test_documents_without_metrics_are_refused_in_one_sentence(tmp_path, text, sentence):
    path = write_file(tmp_path, text, "trainer_state.json")
    assert user_error(read_table, path) == sentence.format(path)


# verl


def metrics(step):
    """Returns metrics of one step: floats as of torch's `item`, NumPy floats as of `reduce_metrics`, and counts."""
    random = np.random.default_rng(step)
    values = {
        "actor/entropy": float(random.random()),
        "actor/pg_loss": np.float64(random.normal() * 1e-7),
        "actor/pg_clipfrac": np.float64(random.random()),
        "actor/ppo_kl": np.float64(-random.random()),
        "actor/grad_norm": np.float64(math.nan if step == 3 else random.random()),
        "actor/lr": np.float64(1e-06),
        "training/global_step": step,
        "critic/score/max": 1.0,
        "critic/score/mean": float(random.random()),
        "response_length/mean": 100 * float(random.random()),
        "num_turns/max": np.int64(random.integers(2, 9)),
        "timing_s/step": random.random() * 30,
    }
    if step % 2 == 0:
        values["val-core/openai/gsm8k/reward/mean@1"] = np.float64(random.random())
    return values


STEPS = range(1, 9)


def file_line(data, step):
    """Returns `orjson.dumps({"step": step, "data": data}, option=orjson.OPT_SERIALIZE_NUMPY)`, with NaN as null."""
    plain = {name: None if value != value else np.asarray(value).item() for name, value in data.items()}
    return json.dumps({"step": step, "data": plain}, separators=(",", ":")) + "\n"


def console_line(data, step):
    """Returns a line in the format of `concat_dict_to_str`."""
    output = [f"step:{step}"]
    output += [f"{k}:{pprint.pformat(v)}" for k, v in data.items() if isinstance(v, numbers.Number)]
    return " - ".join(output) + "\n"


NOISE = "\x1b[36m(TaskRunner pid=7)\x1b[0m "


def console_output(with_noise):
    """Returns a process's output, optionally with Ray's prefixes, progress bars and other lines around the metrics."""
    text = "".join(console_line(metrics(step), step) for step in STEPS)
    if not with_noise:
        return text
    noisy = "".join(
        f"Training Progress:  {step}%|█  | {step}/8 [00:10<01:30,  9.1s/it]{NOISE}{line}\n"
        f"{NOISE}{{'a': 1, 'step': 2}}\n"
        for step, line in enumerate(text.splitlines())
    )
    return (
        "2026-01-29 11:20:04,321 INFO worker.py:1852 -- Started, a, b; c\n" * 200
        + f"{NOISE}global_step:7 - x:1\n"
        + noisy
    )


def assert_metrics(log):
    np.testing.assert_array_equal(log.steps, STEPS)
    assert log.notes == ()
    assert set(log.channels) == {name for step in STEPS for name in metrics(step)}
    for name in metrics(2):
        values = log.values[:, log.channels.index(name)]
        np.testing.assert_array_equal(values, [metrics(step).get(name, math.nan) for step in STEPS], err_msg=name)


def test_the_log_file_of_verl(tmp_path):
    text = "".join(file_line(metrics(step), step) for step in STEPS)
    assert_metrics(read_log_text(tmp_path, text, "experiment.jsonl"))


@pytest.mark.parametrize("name", ["run.log", "stdout.txt", "nohup"])
@pytest.mark.parametrize("with_noise", [False, True])
def test_the_console_output_of_verl(tmp_path, name, with_noise):
    text = console_output(with_noise)
    assert ":np.float64(" in text
    assert_metrics(read_log_text(tmp_path, text, name))


def test_incomplete_console_output_of_verl(tmp_path):
    complete = console_output(True)
    cut = complete[: complete.rindex("val-core")]  # the last step's line, without its last value
    log = read_log_text(tmp_path, cut[: cut.rindex(":")], "run.log")
    np.testing.assert_array_equal(log.steps, STEPS[:-1])
    assert log.notes == ("the last line has no line end, as if it were still being written, and is left out",)
    path = write_file(tmp_path, "step:1 - actor/lr:0.1 - actor/ent", "begun.log")
    assert user_error(read_table, path) == f"{path} has no complete line"


def test_step_in_a_header_or_text_does_not_change_the_format(tmp_path):
    log = read_log_text(tmp_path, "step,loss,step:1 of\n0,1,2\n1,2,3\n", "a.txt")
    assert log.channels == ("loss", "step:1 of")
    assert read_log_text(tmp_path, json_lines({"step": 1, "note": "step:3 - a:1", "loss": 2}), "b").channels == (
        "loss",
    )
