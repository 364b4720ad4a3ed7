"""The benchmarks' scripts run: a smoke run of each that needs nothing but this package."""

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "experiments" / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize("script", ["fork_savings", "kernels", "lanes", "overhead"])
def test_a_script_runs(script):
    done = subprocess.run([sys.executable, f"{script}.py", "--quick"], cwd=FOLDER, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "| --- |" in done.stdout
