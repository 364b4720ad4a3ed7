"""Compares the memory that `jaxaudit run` predicts before training with the peak of the process.

    JAX_NUM_CPU_DEVICES=1 python planned_memory.py SPEC OUT             # the run of a spec, in the new folder OUT
    JAX_NUM_CPU_DEVICES=1 python planned_memory.py hop 8|32 OUT         # GRPO on hop with this number of lanes

Prints JSON with bytes. `expected`, `held` (of it in use at the time of the prediction) and `lane` are predicted. `peak`
is measured by the kernel from then on, `training` from the first chunks on, after the lanes' initial states exist, and
`before` is the peak of reading and compiling. The first ratio is that of the whole process. The others exclude `held`:
all of the rest, and the rest in training, which should be the number of lanes times `lane`.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from jaxaudit.cli.main import prepare_jax

HOP = """
[audit]
seeds = {lanes}
steps = 6
[task]
kind = "dialogue"
name = "hop"
[learner]
kind = "grpo"
warm_start = 2
"""
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
SIZE = r"([\d.]+) (\w+)"


class PeakResettingStream:
    """Standard error that resets the peak of the process at the prediction and at the first chunk."""

    def __init__(self):
        self.stderr, self.text, self.peaks, self.bars = sys.stderr, "", [], 0

    def write(self, text: str) -> None:
        """Passes text on, and resets the peak if the text is the prediction or the first progress bar."""
        self.stderr.write(text)
        self.text += text
        self.bars += bool(re.search(r"\d% *\|.*\| *[1-9]", text))
        if len(self.peaks) == (1 if self.bars else 0) and (self.bars or "expected memory" in text):
            self.peaks.append(peak())
            Path("/proc/self/clear_refs").write_text("5")

    def flush(self) -> None:
        """Flushes the underlying stream."""
        self.stderr.flush()

    def isatty(self) -> bool:
        """Returns False."""
        return False


def peak() -> int:
    """Returns the peak of the process in bytes."""
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def main() -> None:
    """Runs the spec, and prints the memory."""
    prepare_jax()
    from jaxaudit.runs import lifecycle as lifecycle
    from jaxaudit.spec.document import load, parse

    *arguments, out = sys.argv[1:]
    spec = parse(HOP.format(lanes=arguments[1])) if arguments[0] == "hop" else load(Path(arguments[0]))
    sys.stderr = stream = PeakResettingStream()
    lifecycle.run(spec, Path(out))
    sys.stderr = stream.stderr
    match = re.search(rf"expected memory: {SIZE} \({SIZE} of it in use now\), {SIZE} a lane", stream.text)
    expected, in_use, lane = (int(float(match[i]) * UNITS[match[i + 1]]) for i in (1, 3, 5))
    (before, beginning), training = stream.peaks, peak()
    highest, lanes = max(beginning, training), len(spec.build().seeds)
    numbers = {"lanes": lanes, "expected": expected, "held": in_use, "lane": lane}
    numbers |= {"peak": highest, "training": training, "before": before}
    ratios = {
        "peak / expected": highest / expected,
        "beyond held": (highest - in_use) / (expected - in_use),
        "training": (training - in_use) / (lanes * lane),
    }
    print(json.dumps(numbers | {"ratios": {name: round(ratio, 3) for name, ratio in ratios.items()}}))


if __name__ == "__main__":
    main()
