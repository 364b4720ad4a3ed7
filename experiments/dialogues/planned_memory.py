"""A run, and its memory: what `jaxaudit run` told before it trained, and the most that the process came to hold.

    JAX_NUM_CPU_DEVICES=1 python planned_memory.py SPEC OUT             # the spec's run, in the new folder OUT
    JAX_NUM_CPU_DEVICES=1 python planned_memory.py hop 8|32 OUT         # GRPO on hop with so many lanes side by side

Prints JSON, in bytes: `expected`, of which `held` is there when it is told, and `lane`, as told; `peak` from then on,
by the kernel's accounts, and `training`, that from the first chunks on, when lanes' first states (of a warm start, of
rows that are looked at) are there; `before`, the most that reading and compiling took. The first ratio is of the whole
process, the others of what is beyond `held`: all of it, and in training, which is to be lanes times `lane`.
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


class Told:
    """Standard error, which counts the process's peak anew from the plan on, and again from the first chunk on."""

    def __init__(self):
        self.stderr, self.text, self.peaks, self.bars = sys.stderr, "", [], 0

    def write(self, text: str) -> None:
        """Passes text on."""
        self.stderr.write(text)
        self.text += text
        self.bars += bool(re.search(r"\d% *\|.*\| *[1-9]", text))
        if len(self.peaks) == (1 if self.bars else 0) and (self.bars or "expected memory" in text):
            self.peaks.append(peak())
            Path("/proc/self/clear_refs").write_text("5")

    def flush(self) -> None:
        """Passes it on at once."""
        self.stderr.flush()

    def isatty(self) -> bool:
        """It is none."""
        return False


def peak() -> int:
    """Bytes."""
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def main() -> None:
    """Runs and tells."""
    prepare_jax()
    from jaxaudit.runs import lifecycle as durable
    from jaxaudit.spec.document import load, parse

    *what, out = sys.argv[1:]
    spec = parse(HOP.format(lanes=what[1])) if what[0] == "hop" else load(Path(what[0]))
    sys.stderr = told = Told()
    durable.run(spec, Path(out))
    sys.stderr = told.stderr
    found = re.search(rf"expected memory: {SIZE} \({SIZE} of it in use now\), {SIZE} a lane", told.text)
    expected, held, lane = (int(float(found[i]) * UNITS[found[i + 1]]) for i in (1, 3, 5))
    (before, beginning), training = told.peaks, peak()
    most, lanes = max(beginning, training), len(spec.build().seeds)
    numbers = {"lanes": lanes, "expected": expected, "held": held, "lane": lane}
    numbers |= {"peak": most, "training": training, "before": before}
    beyond = {
        "peak / expected": most / expected,
        "beyond held": (most - held) / (expected - held),
        "training": (training - held) / (lanes * lane),
    }
    print(json.dumps(numbers | {"ratios": {name: round(ratio, 3) for name, ratio in beyond.items()}}))


if __name__ == "__main__":
    main()
