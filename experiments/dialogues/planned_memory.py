"""A run, and its memory: what `jaxaudit run` told before it trained, and the most that the process came to hold.

    JAX_NUM_CPU_DEVICES=1 python planned_memory.py SPEC OUT             # the spec's run, in the new folder OUT
    JAX_NUM_CPU_DEVICES=1 python planned_memory.py hop 8|32 OUT         # GRPO on hop with so many lanes side by side

Prints JSON, in bytes: `expected`, of which `held` is there when it is told, and `lane`, as told; `peak` from then on,
by the kernel's accounts; `before`, the most that reading and compiling took.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from jaxaudit.cli import prepare_jax

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
    """Standard error, which from the plan on counts the process's peak anew."""

    def __init__(self):
        self.stderr, self.text, self.before = sys.stderr, "", 0

    def write(self, text: str) -> None:
        """Passes text on."""
        self.stderr.write(text)
        self.text += text
        if not self.before and "expected memory" in text:
            self.before = peak()
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
    from jaxaudit.runner import durable
    from jaxaudit.specification.document import load, parse

    *what, out = sys.argv[1:]
    spec = parse(HOP.format(lanes=what[1])) if what[0] == "hop" else load(Path(what[0]))
    sys.stderr = told = Told()
    durable.run(spec, Path(out))
    sys.stderr = told.stderr
    found = re.search(rf"expected memory: {SIZE} \({SIZE} of it in use now\), {SIZE} a lane", told.text)
    expected, held, lane = (int(float(found[i]) * UNITS[found[i + 1]]) for i in (1, 3, 5))
    numbers = {"expected": expected, "held": held, "lane": lane, "peak": peak(), "before": told.before}
    print(json.dumps(numbers | {"peak / expected": round(peak() / expected, 3)}))


if __name__ == "__main__":
    main()
