"""Memory of one rematerialised lane of GPT-2: bytes planned by its program, and the peak of the process in a step.

`language_model.py` calls it as `python gpt2_memory.py SIZE LENGTH`; it prints JSON.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import common
import jax
import language_model

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def main(size: str, length: int) -> None:
    """Plans and runs a step, and prints the memory."""
    common.prepare_jax(1)
    import jaxaudit as ja
    from jaxaudit.core.batches import layout
    from jaxaudit.core.grid import plan
    from jaxaudit.execution.engine import Engine
    from jaxaudit.runtime.machine import release_memory

    learner, _ = language_model.learner_of(size, 1, length, False, remat=True)
    engine = Engine(plan(learner, [ja.lr_spike(10.0, onset=1, duration=1)], seeds=1, steps=4), 1)
    lane = layout(engine.grid)[0]
    planned = engine.program_bytes(lane)
    states = jax.block_until_ready(engine.initial(lane))
    state_bytes = engine.lane_bytes(lane)
    release_memory()
    other_bytes = _bytes("VmRSS") - state_bytes
    CLEAR.write_text("5")  # resets the peak
    start = time.perf_counter()
    engine.advance(lane, states, 0, 1)
    seconds = time.perf_counter() - start
    result = {"planned": planned, "peak": _bytes("VmHWM") - other_bytes, "held_besides": other_bytes}
    print(json.dumps(result | {"compile_seconds": engine.compile_seconds, "step_seconds": seconds}))


def _bytes(field: str) -> int:
    return 1024 * int(re.search(rf"{field}:\s+(\d+) kB", STATUS.read_text())[1])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
