"""Trains a run whose learner has a ring buffer, and compares its memory with the plan that the run printed.

    python ring_buffer_memory.py TRANSITIONS SEEDS DEVICES LANES

Prints one JSON object. Each lane has TRANSITIONS of 42 float32 (a transition of HalfCheetah: 17 + 6 + 1 + 17 + 1).
"""

import json
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

import jaxaudit as ja
from jaxaudit.runtime import registry

WIDTH = 42
SPEC = """
audit = {{name = "ring", seeds = {seeds}, steps = 12, lanes = {lanes}}}
task = {{kind = "mujoco", name = "InvertedPendulum-v5"}}
learner = {{kind = "ring", transitions = {transitions}}}
metrics = {{window = 4, hold = 4, horizon = 4}}
run = {{chunk = 4, checkpoint_every = 1}}
perturbation = [{{kind = "weight_noise", magnitude = 0.5, onset = 4, duration = 2}}]
"""


@dataclass(frozen=True)
class RingSettings:
    transitions: int


def ring_buffer_learner(task, transitions):
    """Writes a hundred transitions a step, and samples a batch of 256 from all."""

    def init(key):
        return {"buffer": jnp.zeros((transitions, WIDTH)), "x": jax.random.normal(key, (WIDTH,))}

    def step(state, key, taps):
        x = taps("params", state["x"])
        start = taps.step * 100 % (transitions - 100)
        buffer = jax.lax.dynamic_update_slice(state["buffer"], jnp.tile(x, (100, 1)), (start, 0))
        batch = buffer[jax.random.randint(key, (256,), 0, transitions)]
        x = 0.9 * x + 1e-3 * batch.mean(axis=0)
        return {"buffer": buffer, "x": x}, {"performance": -jnp.sum(x**2)}

    return ja.Learner(init, step, name="ring")


ring_buffer_learner.settings = RingSettings


def memory_status(name):
    """Returns a field of the kernel's process status, in bytes."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[name].split()[0]) * 1024


def main():
    transitions, seeds, devices, lanes = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", int(devices))
    from jaxaudit.runs import lifecycle as durable
    from jaxaudit.runs import local_trainer as local_trainer
    from jaxaudit.spec.document import parse

    registry.learners.register("ring", ring_buffer_learner)
    resident, lines = [], []
    print_plan = local_trainer._print_plan

    def print_and_measure(*arguments):
        print_plan(*arguments)
        Path("/proc/self/clear_refs").write_text("5")  # count the peak from here
        resident.append(memory_status("VmRSS"))

    class Lines:
        def write(self, text):
            lines.append(text)

        def flush(self):
            pass

        def isatty(self):
            return False

    local_trainer._print_plan = print_and_measure
    sys.stderr, stderr = Lines(), sys.stderr
    spec = parse(SPEC.format(seeds=seeds, lanes=lanes, transitions=transitions))
    with tempfile.TemporaryDirectory() as folder:
        durable.run(spec, Path(folder) / "run")
    peak = memory_status("VmHWM") - resident[0]  # beyond what the process had when the plan was printed
    sys.stderr = stderr
    size = r"([\d.]+) (\w+)"
    printed = re.search(rf"expected memory: {size} \({size} of it in use now\), {size} a lane, (.*)", "".join(lines))
    units = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    total, in_use, lane_size = (float(printed[i]) * units[printed[i + 1]] for i in (1, 3, 5))
    print(json.dumps({"expected": total - in_use, "lane": lane_size, "batches": printed[7], "peak": peak}))


if __name__ == "__main__":
    main()
