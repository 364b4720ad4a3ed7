"""Every benchmark that needs no package besides this one still runs."""

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from directories import EXPERIMENTS

BENCHMARKS = EXPERIMENTS / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "dialogues.py --no-trl",
        "dialogues.py --parts operations --devices 1",
        "dialogues.py --parts packing --devices 1",
        "first_answer.py",
        "fork_savings.py",
        "kernels.py",
        "lanes.py",
        "many_lanes.py",
        "monitor.py",
        "off_policy.py --no-sb3",
        "overhead.py",
        "throughput.py --no-sb3",
    ],
)
def test_a_benchmark_runs(command):
    script, *options = command.split()
    subprocess.run([sys.executable, BENCHMARKS / script, "--quick", *options], check=True, capture_output=True)


def test_results_are_stored_with_their_options(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("benchmarks_common", BENCHMARKS / "common.py")
    common = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = common
    spec.loader.exec_module(common)
    file = tmp_path / "results" / "found.json"
    interpreters = {"python": sys.executable, "trl_python": sys.executable}
    options = argparse.Namespace(quick=True, before=Path("that/one"), lanes=3, json=file, **interpreters)
    common.finish(options, "| a table |", {"training": common.Timing((1.5, 2.0))})
    stored = json.loads(file.read_text())
    assert stored["options"] == {"quick": True, "before": "that/one", "lanes": 3}
    assert stored["training"] == [1.5, 2.0]
    assert set(stored) == {"options", "machine", "training"}
    assert "| a table |" in capsys.readouterr().out
