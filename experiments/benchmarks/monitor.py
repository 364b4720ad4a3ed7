"""The cost of a monitor, inside PPO's training loop and when it is fitted.

Targets are at most 1.05 times the time of a PPO step with full telemetry, and 60 seconds to fit a monitor to 100
trainings of 500 steps and 12 channels, including compilation.
"""

from __future__ import annotations

import dataclasses
import time

import common
import jax
import numpy as np
import xarray as xr

from jaxaudit.analysis import statistics

WITHOUT = "full telemetry"
WITH = {model: f"full telemetry, read by a monitor ({model})" for model in ("ensemble", "chart", "lru")}


def main() -> None:
    """Runs the benchmark."""
    options = common.parser(__doc__.splitlines()[0], repetitions=60)
    options.add_argument("--lanes", type=int, default=8, help="lanes, on all devices together (%(default)s)")
    arguments = options.parse_args()
    if arguments.quick:
        arguments.repetitions, arguments.lanes = 2, 2
    common.prepare_jax(arguments.devices)
    fitting = {model: fit(model, arguments.quick) for model in ("ensemble", "chart", "lru", "gru")}
    timings = common.interleave(inside(arguments), arguments.repetitions)
    ratios = {model: common.paired_ratio(timings[name], timings[WITHOUT]) for model, name in WITH.items()}
    rows = [(WITHOUT, timings[WITHOUT], "")]
    for model, ratio in ratios.items():
        typical = statistics.bootstrap(ratio.seconds, statistic=np.median)
        rows.append((WITH[model], timings[WITH[model]], f"{typical.value:.3f} [{typical.low:.3f}, {typical.high:.3f}]"))
    work = f"seconds for an iteration of {arguments.lanes} lanes"
    print(common.table(("program", work, "ratio, paired: median [95%]"), rows), end="\n\n")
    markdown = common.table(("model", "seconds to fit"), [(name, f"{s:.1f}") for name, s in fitting.items()])
    common.finish(arguments, markdown, {"seconds": timings, "ratio": ratios, "fitting": fitting})


def inside(arguments) -> dict:
    """Returns functions that run a compiled PPO step with and without a monitor."""
    import jaxaudit as ja
    from jaxaudit.core import grid
    from jaxaudit.core.grid import disturbance
    from jaxaudit.core.perturbation import control
    from jaxaudit.core.program import Lanes

    small = {"num_envs": 2, "rollout_length": 64} if arguments.quick else {}
    learner = ja.learners.ppo(common.TASK, telemetry="full", evaluations=0, **small)
    program = grid.plan(learner, [ja.lr_spike(10.0)], seeds=arguments.lanes, steps=1000).program
    column = disturbance(control(0), program, 1000)
    lanes = Lanes(
        np.arange(arguments.lanes, dtype=np.uint32), jax.tree.map(lambda x: np.stack([x] * arguments.lanes), column)
    )
    monitored = {name: dataclasses.replace(program, watch=watch_of(program, model)) for model, name in WITH.items()}
    programs = {WITHOUT: program, **monitored}

    def candidate(program):
        advance = common.Advance(program, lanes, 1)

        def once() -> None:
            advance(1, 2, lanes)

        return once

    return {name: candidate(program) for name, program in programs.items()}


def watch_of(program, model):
    """Returns a monitor of all channels of a program's telemetry, fitted to noise, which does not affect its cost."""
    from jaxaudit.core.program import telemetry_shapes
    from jaxaudit.monitoring.meta_state import Training
    from jaxaudit.monitoring.monitor import Monitor
    from jaxaudit.monitoring.watch import MonitorWatch, channel_names

    shapes, channels = telemetry_shapes(program), program.learner.channels
    names = [channel for name, shape in shapes.items() for channel in channel_names(name, shape, channels)]
    noise = np.random.default_rng(0).normal(size=(40, 60, len(names)))
    monitor = Monitor.fit(labelled(noise, names), model=model, training=Training(iterations=1))
    return MonitorWatch.for_telemetry(monitor, 0.05, shapes, channels)


def fit(model: str, quick: bool) -> float:
    """Returns the seconds to fit a monitor to 100 trainings, nearly all of which are used for its parameters."""
    from jaxaudit.monitoring.meta_state import Training
    from jaxaudit.monitoring.monitor import Monitor

    runs, steps, channels = (8, 20, 3) if quick else (100, 500, 12)
    values = np.random.default_rng(0).normal(size=(runs, steps, channels))
    for step in range(1, steps):
        values[:, step] += 0.9 * values[:, step - 1]
    clean = labelled(values, [f"channel {number}" for number in range(channels)])
    training = Training(iterations=2) if quick else Training()
    start = time.perf_counter()
    Monitor.fit(clean, model=model, training=training, held_out=0.02)
    return time.perf_counter() - start


def labelled(values: np.ndarray, channels: list[str]) -> xr.DataArray:
    """Returns runs `[n, T, d]` as a labelled array."""
    return xr.DataArray(values, dims=("run", "step", "channel"), coords={"channel": channels})


if __name__ == "__main__":
    main()
