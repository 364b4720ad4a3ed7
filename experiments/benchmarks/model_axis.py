"""A lane over several simulated devices: bytes planned and compiled for each, and what a step costs on two of them.

    python experiments/benchmarks/model_axis.py [--one SIZE] [--steps]

Memory is of compiled programs and abstract shapes: nothing runs but with `--steps`. The plan of a split program, from
that of one device: states and data exactly as they are split, the residual stream of all layers whole on each device,
the rest of the temporary memory divided by the devices, and a copy of what is filled up to be split evenly: the
embedding and its moments.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time

import common
import jax
import language_model
import numpy as np

SIZES = ("124m", "355m", "774m")
DEVICES = (1, 2, 4)
LENGTH = 1024


def engine_of(size: str, devices: int, length: int, batch: int = 1, **settings):
    """An engine of one lane and its baseline's batch."""
    import jaxaudit as ja
    from jaxaudit.core.batches import layout
    from jaxaudit.core.grid import plan
    from jaxaudit.execution.engine import Engine
    from jaxaudit.models import gpt2

    learner, made = language_model.learner_of(size, batch, length, False, **settings)
    learner = dataclasses.replace(learner, partition=gpt2.partition, indivisible=gpt2.indivisible(made.model))
    chosen = {"devices": jax.devices()[:devices], "model_devices": devices}
    engine = Engine(plan(learner, [ja.lr_spike(10.0, onset=1, duration=1)], seeds=1, steps=4, **chosen), 1)
    return engine, layout(engine.grid)[0]


def memory(size: str) -> None:
    """Prints a line of JSON for each number of devices: bytes on each."""
    from jaxaudit.execution.device_layout import device_bytes
    from jaxaudit.models.gpt2 import SIZES

    stream = 4 * (SIZES[size].depth + 1) * LENGTH * SIZES[size].width
    temporary = 0
    for devices in DEVICES:
        engine, batch = engine_of(size, devices, LENGTH, remat=True)
        begun = time.perf_counter()
        found = engine.program(batch).memory_analysis()
        seconds = time.perf_counter() - begun
        temporary = temporary or found.temp_size_in_bytes
        results = found.output_size_in_bytes - found.alias_size_in_bytes
        besides = sum(np.asarray(x).nbytes for x in jax.tree.leaves(engine.grid.data))
        states = device_bytes(engine.grid.program, engine.lane_shapes(batch)) + besides
        row = {
            "size": size,
            "devices": devices,
            "planned": states + stream + (temporary - stream) // devices + copied_bytes(engine, batch),
            "compiled": found.argument_size_in_bytes + results + found.temp_size_in_bytes,
            "states": states,
            "compile_seconds": round(seconds, 1),
        }
        print(json.dumps(row), flush=True)


def copied_bytes(engine, batch) -> int:
    """Bytes, on each device, of the states that are filled up."""
    from jaxaudit.execution.device_layout import padded_shapes

    program, lane = engine.grid.program, engine.lane_shapes(batch)
    pairs = zip(jax.tree.leaves(lane), jax.tree.leaves(padded_shapes(program, lane, 0)), strict=True)
    return sum(4 * more.size // program.model_devices for x, more in pairs if x.shape != more.shape)


def steps(size: str, repeats: int = 30) -> None:
    """Prints the seconds of a step on one device and on two that share the lane, in turns, and the pairs' ratios."""
    trained = {}
    for devices in (1, 2):
        engine, batch = engine_of(size, devices, 128, batch=4, vocabulary=5001)
        trained[devices] = (engine, batch, engine.initial(batch))
    seconds = {1: [], 2: []}
    for _ in range(1 + repeats):
        for devices, (engine, batch, states) in trained.items():
            begun = time.perf_counter()
            states, _ = engine.advance(batch, states, 0, 1)
            jax.block_until_ready(states)
            seconds[devices].append(time.perf_counter() - begun)
            trained[devices] = (engine, batch, states)
    found = {devices: np.array(every[1:]) for devices, every in seconds.items()}
    ratios = np.quantile(found[2] / found[1], (0.1, 0.5, 0.9)).round(2).tolist()
    median = {devices: round(float(np.median(every)), 4) for devices, every in found.items()}
    print(json.dumps({"size": size, "seconds": median, "ratio, 10%, median, 90%": ratios}), flush=True)


def main() -> None:
    """Both, or what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--one", choices=SIZES, help="memory of this size alone")
    parser.add_argument("--steps", action="store_true", help="seconds of a step, in the place of memory")
    chosen = parser.parse_args()
    common.prepare_jax(max(DEVICES))
    if chosen.steps:
        for size in ("micro", "nano"):
            steps(size)
        return
    for size in (chosen.one,) if chosen.one else SIZES:
        memory(size)


if __name__ == "__main__":
    main()
