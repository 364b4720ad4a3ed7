"""Every benchmark that needs nothing but this package still runs."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "experiments" / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "dialogues.py --no-trl",
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
