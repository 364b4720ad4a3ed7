"""A run of a learner with a ring buffer, and how its memory compares with the plan printed before; one JSON object.

    python ring.py TRANSITIONS SEEDS DEVICES LANES

Each lane holds TRANSITIONS of 42 float32 (a transition of HalfCheetah: 17 + 6 + 1 + 17 + 1).
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


def ring(task, transitions):
    """Writes a hundred transitions a step and draws a batch of 256 from all."""

    def init(key):
        return {"buffer": jnp.zeros((transitions, WIDTH)), "x": jax.random.normal(key, (WIDTH,))}

    def step(state, key, taps):
        x = taps("params", state["x"])
        at = taps.step * 100 % (transitions - 100)
        buffer = jax.lax.dynamic_update_slice(state["buffer"], jnp.tile(x, (100, 1)), (at, 0))
        batch = buffer[jax.random.randint(key, (256,), 0, transitions)]
        x = 0.9 * x + 1e-3 * batch.mean(axis=0)
        return {"buffer": buffer, "x": x}, {"performance": -jnp.sum(x**2)}

    return ja.Learner(init, step, name="ring")


ring.settings = RingSettings


def status(name):
    """Bytes, by the kernel's accounts."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[name].split()[0]) * 1024


def main():
    transitions, seeds, devices, lanes = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", int(devices))
    from jaxaudit.runs import lifecycle as durable
    from jaxaudit.runs import local_trainer as here
    from jaxaudit.spec.document import parse

    registry.learners.register("ring", ring)
    before, lines = [], []
    tell = here._print_plan

    def noting(*arguments):
        tell(*arguments)
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before.append(status("VmRSS"))

    class Lines:
        def write(self, text):
            lines.append(text)

        def flush(self):
            pass

        def isatty(self):
            return False

    here._print_plan = noting
    sys.stderr, stderr = Lines(), sys.stderr
    spec = parse(SPEC.format(seeds=seeds, lanes=lanes, transitions=transitions))
    with tempfile.TemporaryDirectory() as folder:
        durable.run(spec, Path(folder) / "run")
    peak = status("VmHWM") - before[0]  # beyond what the process had when the plan was told
    sys.stderr = stderr
    size = r"([\d.]+) (\w+)"
    told = re.search(rf"expected memory: {size} \({size} of it in use now\), {size} a lane, (.*)", "".join(lines))
    units = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    total, held, lane = (float(told[i]) * units[told[i + 1]] for i in (1, 3, 5))
    print(json.dumps({"expected": total - held, "lane": lane, "batches": told[7], "peak": peak}))


if __name__ == "__main__":
    main()
