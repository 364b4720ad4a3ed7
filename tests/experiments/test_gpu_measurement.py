"""The measurement on a GPU (`experiments/gpu`): its schedule, its table, and a rehearsal of all of it on CPUs."""

import argparse
import json
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from directories import EXPERIMENTS

GPU = EXPERIMENTS / "gpu"
sys.path.append(str(GPU))

import audits  # noqa: E402
import checks  # noqa: E402
import measure_gpu  # noqa: E402
import table  # noqa: E402


def part(kind: str, state: str) -> SimpleNamespace:
    planned = measure_gpu.Planned("name", "script function", kind, 1)
    return SimpleNamespace(planned=planned, compiles=state == "compiles", measures=state == "measures")


@pytest.mark.parametrize(
    ("kind", "others", "allowed"),
    [
        ("device", [], True),
        ("device", [("device", "compiles")], True),
        ("device", [("device", "measures")], False),
        ("device", [("cores", "measures")], False),
        ("device", [("audit", "measures")], False),
        ("cores", [("device", "compiles")], False),
        ("cores", [("device", "measures")], False),
        ("cores", [("check", "waits")], True),
        ("audit", [("audit", "measures")], True),
        ("audit", [("device", "measures")], False),
    ],
)
def test_only_one_part_at_a_time_measures_on_the_device(kind, others, allowed):
    candidate = part(kind, "waits")
    assert measure_gpu.may_begin(candidate, [candidate, *(part(*other) for other in others)]) is allowed


def selected(**options) -> list[measure_gpu.Planned]:
    return measure_gpu.select_parts(
        argparse.Namespace(**{"only": None, "tiny": False, "waves": [1, 2, 3, 4], **options})
    )


def test_parts_are_ordered_by_wave():
    assert {planned.name for planned in selected()} == {planned.name for planned in measure_gpu.PARTS}
    assert [planned.wave for planned in selected()] == sorted(planned.wave for planned in measure_gpu.PARTS)
    assert {planned.wave for planned in selected(waves=[2, 3])} == {2, 3}
    assert [planned.name for planned in selected(only=["bits", "facts"])] == ["facts", "bits"]


def test_a_rehearsal_runs_every_function_of_the_measurement():
    def functions(parts):
        return {tuple(planned.call.split()[:2]) for planned in parts}

    assert functions(selected(tiny=True)) == functions(selected())


def test_a_part_is_late_if_it_is_not_ready_or_its_turn_is_over():
    running = object.__new__(measure_gpu.Running)
    running.planned = measure_gpu.Planned("name", "script function", "device", ready=10, turn=5)
    running.begun, running.ready, running.turn_ends = 0.0, False, None
    assert running.late(9) == ""
    assert running.late(11) == "not ready in time"
    running.ready = True
    assert running.late(11) == ""
    running.turn_ends = 20.0
    assert running.late(19) == ""
    assert running.late(21) == "its turn was over"


FIGURES = [
    {
        "what": "GRPO on hop, 0.1M",
        "part": "grpo",
        "second": 1.0,
        "lanes": 1024,
        "rate": 6000.0,
        "unit": "lane iterations/s",
    },
    {
        "what": "TRL GRPO, 0.1M",
        "part": "trl",
        "second": 2.0,
        "rate": 15.0,
        "unit": "iterations/s",
        "beside": ["a", "b"],
    },
    {"what": "bits, grpo", "part": "bits", "second": 3.0, "digest": "12"},
    {"what": "bits, gpt2", "part": "bits", "second": 4.0, "digest": "34"},
    {"what": "bits, grpo", "part": "bits_again", "second": 5.0, "digest": "12"},
    {"what": "bits, gpt2", "part": "bits_again", "second": 6.0, "digest": "56"},
    {"what": "stopped", "part": "ppo", "second": 7.0, "failed": "not ready | in time"},
    {"what": "done", "part": "grpo", "second": 8.0},
]


def test_the_table_has_targets_ratios_and_failures():
    markdown = table.markdown(FIGURES)
    assert "| 1.0 | grpo | GRPO on hop, 0.1M | 1024 | 6,000 lane iterations/s | 5000 |" in markdown
    assert "grpo: GRPO on hop, 0.1M, 1024 lanes / TRL GRPO, 0.1M: 400; target 300" in markdown
    assert "beside 2 others" in markdown
    assert "bits, grpo: another process has the same bits" in markdown
    assert "bits, gpt2: another process has OTHER bits" in markdown
    assert "failed not ready / in time" in markdown
    assert "done" not in markdown


def test_rehearsal_changes_match_the_specs_exactly_once():
    for name, changes in audits.TINY.items():
        text = (GPU / "audits" / f"{name}.toml").read_text()
        assert all(text.count(before) == 1 for before, _ in changes)


def test_a_failing_or_late_part_does_not_stop_the_others(tmp_path, monkeypatch):
    """One wave has three parts: one raises an exception, one is late, and one is measured."""
    (tmp_path / "quick.py").write_text(
        "import time\n"
        "def fails(part): raise ValueError('no such thing')\n"
        "def sleeps(part): time.sleep(60)\n"
        "def measures(part, number):\n"
        "    part.wait_for_turn()\n"
        "    print('for the log')\n"
        "    part.record('a rate', rate=float(number), unit='steps/s', left=part.seconds_left)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    parts = [
        measure_gpu.Planned("broken", "quick fails", "device", 30, 30),
        measure_gpu.Planned("slow", "quick sleeps", "check", 1.5),
        measure_gpu.Planned("good", "quick measures 7", "device", 30, 30),
    ]
    monkeypatch.setattr(measure_gpu, "PARTS", parts)
    arguments = argparse.Namespace(only=None, tiny=False, waves=[1], side_by_side=3, seconds=40)
    assert measure_gpu.run(arguments, tmp_path, time.monotonic()) == []
    figures = [json.loads(line) for line in (tmp_path / "figures.jsonl").read_text().splitlines()]
    by_part = {(figure["part"], figure["what"]): figure for figure in figures}
    assert "no such thing" in by_part["broken", "part"]["failed"]
    assert by_part["slow", "stopped"]["failed"] == "took too long"
    assert by_part["good", "a rate"]["rate"] == 7.0
    assert 0 < by_part["good", "a rate"]["left"] <= 30
    assert "for the log" in (tmp_path / "log.txt").read_text()


def test_equality_is_bitwise_except_for_nan_payloads():
    nan = np.array([0x7FC00001], np.uint32).view(np.float32)
    assert checks.equal({"a": nan}, {"a": np.float32([np.nan])})
    assert not checks.equal({"a": np.float32([0.0])}, {"a": np.float32([-0.0])})
    assert not checks.equal({"a": np.float32([1.0])}, {"a": np.nextafter(np.float32([1.0]), np.float32(2))})
    assert checks.digest({"a": nan}) == checks.digest({"a": np.float32([np.nan])})
    assert checks.digest({"a": np.float32([0.0])}) != checks.digest({"b": np.float32([0.0])})


def test_errors_are_relative_to_the_largest_value_in_the_first_steps():
    left = np.float32([[[4.0, -8.0, 0.0], [9.0, 9.0, 9.0]]])  # [seed, condition, step]
    right = np.float32([[[4.0, -8.4, 5.0], [0.0, 0.0, 0.0]]])
    assert checks.relative_errors({"a": left}, {"a": right}, steps=2)["a"] == pytest.approx(0.05)
    right[0, 0, 0] = np.nan
    assert checks.relative_errors({"a": left}, {"a": right}, steps=2)["a"] == np.inf


@pytest.mark.slow
def test_a_rehearsal_completes_every_part(tmp_path):
    parts = ["facts", "quadratic", "grpo", "gpt2", "ppo", "bits", "physics", "folder", "halfcheetah"]
    command = [
        sys.executable,
        str(GPU / "measure_gpu.py"),
        str(tmp_path),
        "--tiny",
        "--seconds",
        "900",
        "--only",
        *parts,
    ]
    process = subprocess.run(command, capture_output=True, text=True, timeout=1000, check=True)
    figures = [json.loads(line) for line in (tmp_path / "figures.jsonl").read_text().splitlines()]
    assert [figure for figure in figures if "failed" in figure] == []
    assert {figure["part"] for figure in figures if figure["what"] == "done"} == set(parts)
    [bits] = [figure for figure in figures if figure["part"] == "bits" and "digest" in figure]
    assert all(bits[name] for name in ("twice_equal", "neutral_is_control", "nan_stays_in_its_lane"))
    [resumed] = [figure for figure in figures if "equal" in figure]
    assert resumed["equal"]
    assert {figure["exit_code"] for figure in figures if "exit_code" in figure} == {0}
    assert (tmp_path / "audit-halfcheetah.tar.gz").exists()
    assert "quadratic" in process.stdout
