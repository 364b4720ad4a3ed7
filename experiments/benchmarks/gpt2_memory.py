"""One lane of GPT-2, rematerialised: bytes its program plans, and bytes the process came to hold while it took a step.

Called by `language_model.py`: `python gpt2_memory.py SIZE LENGTH`, prints JSON.
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
    """Plans, runs, measures."""
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
    held = _bytes("VmRSS") - state_bytes
    CLEAR.write_text("5")  # the peak counts from here
    begun = time.perf_counter()
    engine.advance(lane, states, 0, 1)
    seconds = time.perf_counter() - begun
    found = {"planned": planned, "peak": _bytes("VmHWM") - held, "held_besides": held}
    print(json.dumps(found | {"compile_seconds": engine.compile_seconds, "step_seconds": seconds}))


def _bytes(what: str) -> int:
    return 1024 * int(re.search(rf"{what}:\s+(\d+) kB", STATUS.read_text())[1])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
