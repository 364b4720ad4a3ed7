"""The benchmarks' scripts run: a smoke run of each that needs nothing but this package."""

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "experiments" / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["fork_savings"],
        ["kernels"],
        ["lanes"],
        ["monitor"],
        ["off_policy", "--no-sb3"],
        ["overhead"],
        ["language_model", "--parts", "losses", "memory"],
        ["language_model", "--parts", "lanes"],
    ],
    ids="-".join,
)
def test_a_script_runs(command):
    script, *options = command
    command = [sys.executable, f"{script}.py", "--quick", *options]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "| --- |" in done.stdout
