"""Logs in the formats of common trainers: printed text, JSON, tidy and wide tables, several runs, non-finite values."""

import json
import math
import time

import numpy as np
import pytest
from log_files import json_lines, user_error, write_file

from jaxaudit import logs
from jaxaudit.cli.main import main
from jaxaudit.logs.printed import find_dict


def series(folder, text, name="a.log", step=None):
    """Returns, for each run's latest attempt, the steps and values by channel."""
    log = logs.read(write_file(folder, text, name), step)
    return [
        {name: (channel.steps.tolist(), channel.values.tolist()) for name, channel in run.latest.series.items()}
        for run in log.runs
    ]


def joined(rows):
    return "\n".join(rows) + "\n"


PRINTED = {
    "transformers": (
        joined(f"{{'loss': {3 - k}, 'grad_norm': {'nan' if k else 1.5}, 'step': {10 * k}}}" for k in range(2)),
        {"loss": ([0, 10], [3, 2]), "grad_norm": ([0, 10], [1.5, math.nan])},
    ),
    "transformers with a bar": (
        joined(f"  {k}%|█ | {k}/9 [00:01<00:09]\r{{'loss': {k}.5, 'step': {k}}}\r {k}%|█ " for k in range(3)),
        {"loss": ([0, 1, 2], [0.5, 1.5, 2.5])},
    ),
    "transformers 5": (
        joined(f"{{'loss': '3.{k}97', 'grad_norm': '{'nan' if k else 1.5}', 'epoch': '0.0{k}'}}" for k in range(1, 3)),
        {
            "loss": ([0, 1], [3.197, 3.297]),
            "grad_norm": ([0, 1], [math.nan, math.nan]),
            "epoch": ([0, 1], [0.01, 0.02]),
        },
    ),
    "Keras": (
        "Model of 5 layers\n"
        + joined(
            f"Epoch {k}/30\n6/6 - 0s - 19ms/step - acc: 0.{k} - loss: {'nan' if k > 2 else 4 - k} - val_loss: 1.{k}e-02"
            for k in range(1, 4)
        )
        + "Restoring model weights.\n",
        {
            "acc": ([1, 2, 3], [0.1, 0.2, 0.3]),
            "loss": ([1, 2, 3], [3, 2, math.nan]),
            "val_loss": ([1, 2, 3], [0.011, 0.012, 0.013]),
        },
    ),
    "Keras with bars": (
        joined(
            f"Epoch {k}/30\n\r\x1b[1m1/6\x1b[0m \x1b[32m━━\x1b[0m \x1b[1m3s\x1b[0m 7ms/step - loss: 9.5\x08\x08\r"
            f"\x1b[1m6/6\x1b[0m \x1b[32m━━━━\x1b[0m \x1b[1m0s\x1b[0m 19ms/step - loss: 2.{k} - val_loss: 3.{k}"
            for k in range(2)
        )
        + "Epoch 2/30\n\r 1/6 ━━ 3s 7ms/step - loss: 9.5\x08\x08\r\n",
        {"loss": ([0, 1], [2, 2.1]), "val_loss": ([0, 1], [3, 3.1])},
    ),
    "CleanRL": (
        joined(
            f"global_step={40 * k}, episodic_return={f'[{k}.]' if k % 2 else f'{k}.5'}\nSPS: 3000" for k in range(3)
        ),
        {"episodic_return": ([0, 40, 80], [0.5, 1, 2.5])},
    ),
    "slime's rollouts": (
        joined(
            f"[2026-01-01] metrics.py:135 - rollout {k}: {{'rollout/reward': 0.{k}}}\n"
            f"[2026-01-01] model.py:918 - step {2 * k}: {{'train/loss': {k}.5}}\nRank 7: {{'memory': 3}}"
            for k in range(2)
        ),
        {"rollout/reward": ([0, 1], [0, 0.1]), "train/loss": ([0, 2], [0.5, 1.5])},
    ),
    "slime": (
        joined(f"(Actor pid=3) step {k}: {{'train/loss': {k}.5, 'extra': 'x'}}" for k in range(3)),
        {"train/loss": ([0, 1, 2], [0.5, 1.5, 2.5])},
    ),
    "scalars of torch and numpy": (
        joined(f"{{'step': {k}, 'loss': tensor({k}.5, device='cuda:0'), 'kl': np.float64(nan)}}" for k in range(2)),
        {"loss": ([0, 1], [0.5, 1.5]), "kl": ([0, 1], [math.nan, math.nan])},
    ),
    "nanoGPT": (
        "number of parameters: 123.59M\nstep 0: train loss 10.9, val loss 10.8\n"
        + joined(
            f"iter {10 * k}: loss {4 - k}.25, time 1100.12ms, mfu {'-100.00' if k else '15.34'}%" for k in range(2)
        ),
        {
            "train loss": ([0], [10.9]),
            "val loss": ([0], [10.8]),
            "loss": ([0, 10], [4.25, 3.25]),
            "time": ([0, 10], [1100.12, 1100.12]),
            "mfu": ([0, 10], [15.34, -100]),
        },
    ),
    "modded-nanogpt": (
        joined(f"step:{k}/1480 val_loss:10.{k} train_time:{k}ms step_avg:nanms" for k in range(2)),
        {
            "val_loss": ([0, 1], [10, 10.1]),
            "train_time": ([0, 1], [0, 1]),
            "step_avg": ([0, 1], [math.nan, math.nan]),
        },
    ),
    "llm.c": (
        "s:0 tel:11.5\n" + joined(f"s:{k} trl:{4 - k}.5" for k in range(2)),
        {"tel": ([0], [11.5]), "trl": ([0, 1], [4.5, 3.5])},
    ),
    "nanochat": (
        joined(f"step {k:05d}/21400 (0.0{k}%) | loss: 4.{k} | lrm: 1.00 | tok/sec: 1,000,00{k}" for k in range(2)),
        {"loss": ([0, 1], [4, 4.1]), "lrm": ([0, 1], [1, 1]), "tok/sec": ([0, 1], [1000000, 1000001])},
    ),
    "OLMo": (
        "2025-01-01 11:05:02.009\thost:0\tolmo:97\tINFO\tConfiguration:\n"
        + joined(
            f"2025-01-01 11:05:02.009\thost:0\tolmo:979\tINFO\t[step={k}/15000,epoch=0]\n"
            f"    train/CrossEntropyLoss=2.{k}\n    throughput/total_tokens=2,097,152"
            for k in range(1, 3)
        ),
        {
            "epoch": ([1, 2], [0, 0]),
            "train/CrossEntropyLoss": ([1, 2], [2.1, 2.2]),
            "throughput/total_tokens": ([1, 2], [2097152, 2097152]),
        },
    ),
    "Megatron": (
        joined(
            f" iteration {k:8d}/  250000 | consumed samples: {8 * k:12d} | lm loss: 3.9{k}E+00 | grad norm: inf |"
            for k in range(1, 3)
        ),
        {
            "consumed samples": ([1, 2], [8, 16]),
            "lm loss": ([1, 2], [3.91, 3.92]),
            "grad norm": ([1, 2], [math.inf, math.inf]),
        },
    ),
    "Dreamer": (
        joined(f"[{1000 * k}] model_loss {5 - k}.0 / fps 9.3\nTrain episode with return {k}." for k in range(2)),
        {"model_loss": ([0, 1000], [5, 4]), "fps": ([0, 1000], [9.3, 9.3])},
    ),
    "key=value": (
        joined(f"INFO step={k} loss={k}.5 lr=1e-4" for k in range(2)),
        {"loss": ([0, 1], [0.5, 1.5]), "lr": ([0, 1], [1e-4, 1e-4])},
    ),
    "Stable-Baselines3": (
        joined(
            f"-----\n| rollout/ | |\n|    ep_rew_mean | {k} |\n| time/ | |\n|    total_timesteps | {2048 * k} |\n-----"
            for k in range(1, 3)
        ),
        {"rollout/ep_rew_mean": ([2048, 4096], [1, 2])},
    ),
    "a notebook's table": (
        "Step | Training Loss | kl\n-- | -- | --\n1 | -0.25 | nan\n2 | -0.5 | 0.5\n",
        {"Training Loss": ([1, 2], [-0.25, -0.5]), "kl": ([1, 2], [math.nan, 0.5])},
    ),
}


@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize("name", PRINTED)
def test_printed_logs_of_common_trainers(tmp_path, name, colour):
    text, expected = PRINTED[name]
    if colour:
        text = "".join(f"\x1b[1;36m{line}\x1b[0m\n" for line in text.split("\n"))
    (result,) = series(tmp_path, text)
    np.testing.assert_equal(result, expected)


@pytest.mark.parametrize(
    "text",
    [
        "# A title\n\nStep 3 of the plan is to wait.\nStep 4 of 5: go, then stop.\n",
        "a b c\n1 2\n",
        "[INFO] started, on, 3, machines\n[INFO] done, in, 7\n",
        "{'loss': __import__('os').system('touch x')}\n" * 3,
        "{'a': " * 20 + "1" + "}" * 20 + "\n",
    ],
)
def test_text_without_metrics_is_refused(tmp_path, text):
    assert "no rows of metrics are recognised" in user_error(logs.read, write_file(tmp_path, text, "a.log"))
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("line", ["step 1: loss: {}..", "step 1: loss=[{}x", "Epoch 1\nloss: {}.."])
def test_long_digit_sequences_are_read_in_linear_time(tmp_path, line):
    start = time.perf_counter()
    assert "recognised" in user_error(logs.read, write_file(tmp_path, line.format("1" * 20000) + "\n", "a.log"))
    assert time.perf_counter() - start < 10


def test_printed_dicts_are_parsed_without_eval():
    text = """ 5%| {"a": [1, -2.5e3, (True, None)], 'it\\'s': {'b': -inf}, 'c': tensor([1.0, 2.0]), } rest"""
    value, begin, end = find_dict(text)
    assert value == {"a": [1, -2500.0, [True, None]], "it's": {"b": -math.inf}, "c": [1.0, 2.0]}
    assert (text[begin], text[end:]) == ("{", " rest")
    for wrong in ("{", "{'a'}", "{'a': }", "{'a': b}", "{'a': 1 2}", "{1: [}", "{}"):
        assert find_dict(wrong) is None


# Documents and folders


def test_training_histories_in_json(tmp_path):
    lists = {"loss": [1.0, 0.5], "val_loss": [2.0, 1.5]}
    sacred = {"loss": {"steps": [0, 10], "timestamps": ["x", "y"], "values": [1.0, 0.5]}}
    rows = {"config": {"lr": 0.1}, "training_history": [{"step": 0, "loss": 1.0}, {"step": 10, "loss": 0.5}]}
    assert series(tmp_path, json.dumps(lists), "a.json") == [
        {"loss": ([0, 1], [1, 0.5]), "val_loss": ([0, 1], [2, 1.5])}
    ]
    for document in (sacred, rows):
        for indent in (None, 1):
            result = series(tmp_path, json.dumps(document, indent=indent), "a.json")
            assert result == [{"loss": ([0, 10], [1, 0.5])}]
    assert "lists of different lengths" in user_error(series, tmp_path, json.dumps({"a": [1], "b": [1, 2]}), "a.json")
    deep = {"env": {"task": {"ippo": {"seed_0": {"step_count": 0}}}}}
    assert "is one JSON object" in user_error(series, tmp_path, json.dumps(deep), "a.json")


def test_a_metrics_folder_of_mlflow(tmp_path):
    metrics = tmp_path / "run" / "metrics"
    (metrics / "val").mkdir(parents=True)
    (metrics / "loss").write_text("1700 3.5 0\n1701 nan 1\n")
    (metrics / "val" / "loss").write_text("1700 2.5 1\n")
    (metrics / "link").symlink_to(write_file(tmp_path, "1 2 3\n", "elsewhere"))
    for source in (tmp_path / "run", metrics):
        (run,) = logs.read(source).runs
        assert {name: channel.steps.tolist() for name, channel in run.latest.series.items()} == {
            "loss": [0, 1],
            "val/loss": [1],
        }
    (metrics / "loss").write_text("3.5 0\n")
    assert "is not a time, a value and a step" in user_error(logs.read, metrics)


def test_null_means_nan_only_in_files_of_verl(tmp_path):
    verl = json_lines({"step": 1, "data": {"a": 1.0, "b": None}}, {"step": 2, "data": {"a": None, "b": 2.0}})
    np.testing.assert_equal(
        series(tmp_path, verl, "a.jsonl"), [{"a": ([1, 2], [1, math.nan]), "b": ([1, 2], [math.nan, 2])}]
    )
    other = json_lines({"step": 1, "a": 1.0, "b": None}, {"step": 2, "a": None, "b": 2.0})
    assert series(tmp_path, other, "a.jsonl") == [{"a": ([1], [1]), "b": ([2], [2])}]


def test_a_header_may_be_a_comment_and_may_be_repeated(tmp_path):
    log = logs.read(write_file(tmp_path, "# step,loss\n0,1\n1,2\n# step,loss\n2,3\n"))
    assert log.runs[0].latest.series["loss"].values.tolist() == [1, 2, 3]
    assert log.notes == ("line 4 repeats the header, as after a run was resumed",)


@pytest.mark.parametrize(
    "name",
    ["current_steps", "training_iteration", "timesteps_total", "total timesteps", "rollout/step", "train/global_step"],
)
def test_step_columns_of_other_frameworks(tmp_path, name):
    log = logs.read(write_file(tmp_path, json_lines({name: 5, "x": 1}, {name: 10, "x": 2}), "a.jsonl"))
    assert (log.step, log.runs[0].latest.steps.tolist()) == (name, [5, 10])


def test_other_step_columns_take_precedence_over_epochs(tmp_path):
    # The first as Lightning logs to W&B, the second as fairseq prints JSON.
    for rows in (
        [{"epoch": k // 4, "trainer/global_step": 10 * k, "loss": k} for k in range(8)],
        [{"epoch": 1, "update": k / 10, "loss": f"{k}.5", "num_updates": f"{10 * k}"} for k in range(8)],
    ):
        log = logs.read(write_file(tmp_path, json_lines(*rows), "a.jsonl"))
        assert log.runs[0].latest.series["loss"].steps.tolist() == [10 * k for k in range(8)]


def test_rows_without_the_requested_step_are_left_out(tmp_path):
    # As in histories of W&B, where the rows of a trainer and those of its rollouts have separate steps.
    table = "_step,train/step,train/loss,reward\n0,,,1\n1,0,0.5,\n2,,,2\n3,1,1.5,\n"
    null = json_lines(*({"_step": k, "train/step": k // 2 if k % 2 else None, "train/loss": k / 2} for k in range(4)))
    for text, name in ((table, "a.csv"), (null, "a.jsonl")):
        log = logs.read(write_file(tmp_path, text, name), "train/step")
        assert log.runs[0].latest.series["train/loss"].steps.tolist() == [0, 1]
        assert str(log.left_out[0]).startswith("left out because they have no 'train/step': 2 of 4")


def test_repeated_values_are_noted_only_if_they_differ(tmp_path):
    # The event files of Lightning and transformers repeat the epoch with each of two groups of metrics.
    rows = [{"step": k, **row} for k in range(5) for row in ({"val": k, "epoch": 0}, {"epoch": 0}, {"epoch": 0})]
    assert logs.read(write_file(tmp_path, json_lines(*rows), "a.jsonl")).notes == ()
    rows[-1]["epoch"] = 1
    assert logs.read(write_file(tmp_path, json_lines(*rows), "a.jsonl")).notes == (
        "step 4 occurs more than once with different values; the last value is used",
    )


def test_missing_steps_are_noted_only_if_the_spacing_is_regular(tmp_path):
    notes = {
        (0, 10, 20, 50, 60): ("there is no telemetry from step 30 to 40; those steps count as missing",),
        (3, 40, 52, 111, 130, 131, 190): (),
    }
    for steps, expected in notes.items():
        assert (
            logs.read(write_file(tmp_path, json_lines(*({"step": k, "ret": 1} for k in steps)), "a.jsonl")).notes
            == expected
        )


def test_steps_may_be_given_with_their_maximum(tmp_path):
    log = logs.read(
        write_file(tmp_path, json_lines(*({"global_step/max_steps": f"{k}/300", "x": 1} for k in (5, 10))), "a.jsonl")
    )
    assert log.runs[0].latest.steps.tolist() == [5, 10]


# Non-finite values are not missing values


WORDS = ["nan", "NaN", "inf", "-Infinity", "tensor(nan)", "np.float32(inf)", "OVERFLOW", "1,234.5", "No Log"]


@pytest.mark.parametrize("word", WORDS)
def test_words_in_a_numeric_column_are_non_finite_values(tmp_path, word):
    quoted = f'"{word}"'
    texts = {
        "a.csv": f"step,loss,x\n0,1,1\n1,2,1\n2,{quoted},1\n3,3,1\n",
        "a.jsonl": json_lines(*({"step": k, "loss": word if k == 2 else k, "x": 1} for k in range(4))),
        "a.json": json.dumps([{"step": k, "loss": word if k == 2 else k, "x": 1} for k in range(4)]),
    }
    for name, text in texts.items():
        log = logs.read(write_file(tmp_path, text, name))
        loss = log.runs[0].latest.series["loss"]
        assert (loss.steps.tolist(), np.isfinite(loss.values).tolist()) == ([0, 1, 2, 3], [True, True, False, True])
        unrecognised = word in ("OVERFLOW", "1,234.5", "No Log")
        assert any(f"'{word}', which is not a number" in note for note in log.notes) == unrecognised


@pytest.mark.parametrize("cell", ["", " ", "None", "null", "n/a"])
def test_blank_cells_are_missing_values(tmp_path, cell):
    log = logs.read(write_file(tmp_path, f"step,loss,x\n0,1,1\n1,{cell},1\n2,3,1\n"))
    assert log.runs[0].latest.series["loss"].steps.tolist() == [0, 2]


# Several runs in one file


def test_runs_in_one_file_are_separated_by_a_column(tmp_path):
    rows = [{"step": k, "seed": seed, "reward": 10 * seed + k} for seed in (1, 2) for k in range(3)]
    table = "step,seed,reward\n" + joined(f"{r['step']},{r['seed']},{r['reward']}" for r in rows)
    shuffled = [rows[i] for i in (0, 3, 1, 4, 2, 5)]
    for text, name in ((table, "a.csv"), (json_lines(*rows), "a.jsonl"), (json_lines(*shuffled), "b.jsonl")):
        log = logs.read(write_file(tmp_path, text, name))
        assert [run.name for run in log.runs] == [f"{tmp_path / name} (seed {seed})" for seed in (1, 2)]
        assert [run.latest.series["reward"].values.tolist() for run in log.runs] == [[10, 11, 12], [20, 21, 22]]
    named = "exp_name,seed,global_step,ret\n" + joined(
        f"{n},{s},{k},{k}" for n in "ab" for s in (1, 2) for k in range(3)
    )
    assert len(logs.read(write_file(tmp_path, named)).runs) == 4


def test_a_column_that_differs_in_each_row_separates_no_runs(tmp_path):
    log = logs.read(write_file(tmp_path, "step,seed,loss\n" + joined(f"{k},{k + 7},{k}" for k in range(6))))
    assert len(log.runs) == 1


def test_steps_from_the_start_are_runs_and_steps_back_are_attempts(tmp_path):
    restarting = [{"step": k, "loss": run} for run in range(3) for k in range(5)]
    log = logs.read(write_file(tmp_path, json_lines(*restarting), "a.jsonl"))
    assert [run.name for run in log.runs] == [f"{tmp_path / 'a.jsonl'} (run {n} of 3)" for n in (1, 2, 3)]
    assert [run.latest.series["loss"].values.tolist() for run in log.runs] == [[n] * 5 for n in range(3)]
    returning = [{"step": k, "loss": 0} for k in range(6)] + [{"step": k, "loss": 1} for k in range(3, 8)]
    (run,) = logs.read(write_file(tmp_path, json_lines(*returning), "a.jsonl")).runs
    first, second = run.attempts
    assert (first.begins, first.series["loss"].values.tolist()) == (0, [0] * 6)
    assert (second.begins, second.series["loss"].steps.tolist()) == (3, list(range(8)))
    assert second.series["loss"].values.tolist() == [0] * 3 + [1] * 5


def test_tidy_tables_with_a_line_for_each_metric(tmp_path):
    rows = [(name, k * (1 if name == "a" else -1), 10 * k) for k in range(3) for name in "ab"]
    expected = [{"a": ([0, 10, 20], [0, 1, 2]), "b": ([0, 10, 20], [0, -1, -2])}]
    for field, value in (("field", "value"), ("metric", "value"), ("Tag", "Value")):
        text = f"{field},{value},step\n" + joined(f"{n},{v},{s}" for n, v, s in rows)
        assert series(tmp_path, text, "a.csv") == expected
    assert series(tmp_path, json_lines(*({"key": n, "value": v, "step": s} for n, v, s in rows)), "a.jsonl") == expected
    seeds = "seed,field,value,step\n" + joined(f"{seed},{n},{v + seed},{s}" for seed in (1, 2) for n, v, s in rows)
    assert [run["a"][1] for run in series(tmp_path, seeds, "a.csv")] == [[1, 2, 3], [2, 3, 4]]


def test_wide_tables_exported_by_wandb(tmp_path):
    names = ["Step", *(f"run-{r} - loss{end}" for r in (1, 2) for end in ("", "__MIN", "__MAX"))]
    rows = ["0,1.0,0.9,1.1,,,", "1,0.5,0.4,0.6,2.0,2.0,2.0"]
    log = logs.read(write_file(tmp_path, joined([",".join(f'"{n}"' for n in names), *rows])))
    assert [run.name.rpartition(" (")[2] for run in log.runs] == ["run-1)", "run-2)"]
    assert [run.latest.series["loss"].steps.tolist() for run in log.runs] == [[0, 1], [1]]
    assert "__MIN" in str(log.left_out[0])


# The command


def test_the_read_command_summarizes_a_log(tmp_path, capsys):
    path = write_file(tmp_path, "step,loss,host\n0,1,a\n1,nan,a\n0,2,b\n1,3,b\n2,oops,b\n")
    assert main(["read", str(path)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"{path}: separated values, steps are 'step'"
    assert [line.split() for line in printed if line.strip().startswith("loss")] == [
        ["loss", "0", "1", "2", "1", "1"],
        ["loss", "0", "2", "3", "1", "1"],
    ]
    assert any("left out because they are not numeric: host" in line for line in printed)
    assert main(["read", "--json", str(path), str(path)]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == second
    assert [len(run["attempts"]) for run in first["runs"]] == [1, 1]
    channel_summary = first["runs"][1]["attempts"][0]["channels"]["loss"]
    assert channel_summary == {"first": 0, "last": 2, "values": 3, "every": 1, "not_finite": 1}
    assert main(["read", str(tmp_path / "no.csv")]) == 2
