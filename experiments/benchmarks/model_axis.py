"""A lane split over several simulated devices: bytes planned and compiled for each device, and the time of a step.

    python experiments/benchmarks/model_axis.py [--one SIZE] [--steps]

Memory is that of compiled programs with abstract shapes; nothing runs except with `--steps`. A split program's plan
is derived from that of one device: states and data exactly as they are split, the residual stream of all layers on each
device, the remaining temporary memory divided by the devices, and a copy of the arrays that are padded to be split
evenly, the embedding and its moments.
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
    """Returns an engine of one lane, and the batch of its baseline."""
    import jaxaudit as ja
    from jaxaudit.core.batches import layout
    from jaxaudit.core.grid import plan
    from jaxaudit.execution.engine import Engine
    from jaxaudit.models import gpt2

    learner, algorithm = language_model.learner_of(size, batch, length, False, **settings)
    learner = dataclasses.replace(learner, partition=gpt2.partition, indivisible=gpt2.indivisible(algorithm.model))
    device_options = {"devices": jax.devices()[:devices], "model_devices": devices}
    engine = Engine(plan(learner, [ja.lr_spike(10.0, onset=1, duration=1)], seeds=1, steps=4, **device_options), 1)
    return engine, layout(engine.grid)[0]


def memory(size: str) -> None:
    """Prints a line of JSON for each number of devices, with the bytes on each device."""
    from jaxaudit.execution.device_layout import device_bytes
    from jaxaudit.models.gpt2 import SIZES

    stream = 4 * (SIZES[size].depth + 1) * LENGTH * SIZES[size].width
    temporary = 0
    for devices in DEVICES:
        engine, batch = engine_of(size, devices, LENGTH, remat=True)
        start = time.perf_counter()
        analysis = engine.program(batch).memory_analysis()
        seconds = time.perf_counter() - start
        temporary = temporary or analysis.temp_size_in_bytes
        results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        data_bytes = sum(np.asarray(x).nbytes for x in jax.tree.leaves(engine.grid.data))
        states = device_bytes(engine.grid.program, engine.lane_shapes(batch)) + data_bytes
        row = {
            "size": size,
            "devices": devices,
            "planned": states + stream + (temporary - stream) // devices + copied_bytes(engine, batch),
            "compiled": analysis.argument_size_in_bytes + results + analysis.temp_size_in_bytes,
            "states": states,
            "compile_seconds": round(seconds, 1),
        }
        print(json.dumps(row), flush=True)


def copied_bytes(engine, batch) -> int:
    """Returns the bytes on each device of the states that are padded."""
    from jaxaudit.execution.device_layout import padded

    program, lane = engine.grid.program, engine.lane_shapes(batch)
    padded_lane = jax.eval_shape(lambda lane: padded(program, lane, 0), lane)
    pairs = zip(jax.tree.leaves(lane), jax.tree.leaves(padded_lane), strict=True)
    return sum(4 * after.size // program.model_devices for before, after in pairs if before.shape != after.shape)


def steps(size: str, repeats: int = 30) -> None:
    """Prints the seconds of a step on one device and on two that share the lane, timed in turns, and their ratios."""
    trained = {}
    for devices in (1, 2):
        engine, batch = engine_of(size, devices, 128, batch=4, vocabulary=5001)
        trained[devices] = (engine, batch, engine.initial(batch))
    seconds = {1: [], 2: []}
    for _ in range(1 + repeats):
        for devices, (engine, batch, states) in trained.items():
            start = time.perf_counter()
            states, _ = engine.advance(batch, states, 0, 1)
            jax.block_until_ready(states)
            seconds[devices].append(time.perf_counter() - start)
            trained[devices] = (engine, batch, states)
    arrays = {devices: np.array(values[1:]) for devices, values in seconds.items()}
    ratios = np.quantile(arrays[2] / arrays[1], (0.1, 0.5, 0.9)).round(2).tolist()
    median = {devices: round(float(np.median(values)), 4) for devices, values in arrays.items()}
    print(json.dumps({"size": size, "seconds": median, "ratio, 10%, median, 90%": ratios}), flush=True)


def main() -> None:
    """Measures memory, or time with `--steps`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--one", choices=SIZES, help="memory of this size only")
    parser.add_argument("--steps", action="store_true", help="time of a step instead of memory")
    arguments = parser.parse_args()
    common.prepare_jax(max(DEVICES))
    if arguments.steps:
        for size in ("micro", "nano"):
            steps(size)
        return
    for size in (arguments.one,) if arguments.one else SIZES:
        memory(size)


if __name__ == "__main__":
    main()
