"""Env steps per second of an audit of PPO or TRPO on HalfCheetah-v5, compared with Stable-Baselines3.

The audit has 8 seeds x (control and lr_spike 3, 10, 30, or the factors of `--spikes`), forked at 30% of the run, as one
compiled program with full telemetry. Stable-Baselines3 runs with one environment or eight, with one PyTorch thread or
one per core, and as one process or one per core; every variant collects 2048 env steps per iteration. Neither side
evaluates its policy. For comparison, C MuJoCo alone runs as many simulations as the grid has, under random actions, by
one thread per core. This is an upper bound for everything that simulates the task with C MuJoCo.
"""

from __future__ import annotations

import functools
import sys
import threading
import time

import common
import jax
import numpy as np
from mujoco.batch import Batch

from jaxaudit.tasks import make

ENV_STEPS = 2048
ENVS = 8
AUDIT = "jaxaudit"
SIMULATOR = "C MuJoCo alone, random actions"


def main() -> None:
    """Runs the benchmark."""
    options = common.parser(__doc__.splitlines()[0], repetitions=3)
    options.add_argument("--python", default=sys.executable, help="Python with stable-baselines3 (this one)")
    options.add_argument("--no-sb3", action="store_true", help="without Stable-Baselines3")
    options.add_argument("--learner", default="ppo", choices=("ppo", "trpo"))
    options.add_argument("--seeds", type=int, default=8)
    options.add_argument("--spikes", type=float, nargs="+", default=[3.0, 10.0, 30.0], help="factors (%(default)s)")
    options.add_argument("--steps", type=int, default=20, help="iterations of the audit's run (%(default)s)")
    options.add_argument("--sb3-steps", type=int, default=10, help="iterations timed of SB3 (%(default)s)")
    arguments = options.parse_args()
    if arguments.quick:
        arguments.repetitions, arguments.seeds, arguments.steps, arguments.sb3_steps = 1, 2, 3, 1
    common.prepare_jax(arguments.devices)
    grid, audit, compile_seconds = build(arguments)
    variants = {
        f"SB3: processes {processes}, threads {threads}, environments {envs}": (processes, threads, envs)
        for processes, threads in sorted({(1, 1), (1, common.core_count()), (common.core_count(), 1)})
        for envs in (1, ENVS)
    }
    if arguments.quick or arguments.no_sb3:
        variants = {} if arguments.no_sb3 else dict(list(variants.items())[:1])
    simulations = len(grid.seeds) * len(grid.conditions) * ENVS
    candidates = {AUDIT: audit, SIMULATOR: functools.partial(simulate, simulations)} | {
        name: functools.partial(
            common.sb3, arguments.python, arguments.learner, arguments.sb3_steps * ENV_STEPS, *variant
        )
        for name, variant in variants.items()
    }
    timings = common.interleave(candidates, arguments.repetitions)

    computed = grid.lane_steps * ENV_STEPS
    without_sharing = len(grid.seeds) * len(grid.conditions) * grid.steps * ENV_STEPS
    work = {name: processes * arguments.sb3_steps * ENV_STEPS for name, (processes, *_) in variants.items()}
    work |= {AUDIT: computed, SIMULATOR: simulations * (ENV_STEPS // ENVS)}
    rates = {name: work[name] / timing.median for name, timing in timings.items()}
    rows = [(name, t.rate(work[name]), f"{rates[AUDIT] / rates[name]:.2f}") for name, t in timings.items()]
    rows.insert(1, ("jaxaudit, shared prefix counted for every lane", timings[AUDIT].rate(without_sharing), ""))
    markdown = common.table(("", "env steps/s: median (lowest - highest)", "jaxaudit is x times as fast"), rows)
    markdown += (
        f"\n\naudit: {len(grid.seeds)} seeds x {len(grid.conditions)} conditions, {grid.steps} iterations, "
        f"{computed:,} env steps computed; compiled in {compile_seconds:.0f} s, not counted above"
    )
    best = max(variants, key=rates.__getitem__, default=None)
    if best:
        fastest = max((name for name, (processes, *_) in variants.items() if processes == 1), key=rates.__getitem__)
        markdown += (
            f"\nbest of Stable-Baselines3: {best}; ratio {rates[AUDIT] / rates[best]:.2f}, "
            f"prefix counted for every lane {rates[AUDIT] / rates[best] * without_sharing / computed:.2f}"
            f"\nbest single process: {fastest}; ratio {rates[AUDIT] / rates[fastest]:.2f}, "
            f"prefix counted for every lane {rates[AUDIT] / rates[fastest] * without_sharing / computed:.2f}; "
            f"C MuJoCo alone {rates[SIMULATOR] / rates[fastest]:.2f}"
        )
    numbers = {
        "seconds": timings,
        "env_steps": work,
        "env_steps_prefix_per_lane": without_sharing,
        "env_steps_per_second": rates,
    }
    common.finish(arguments, markdown, numbers | {"compile_seconds": compile_seconds, "best_sb3": best})


def build(arguments):
    """Returns the grid, a function that trains it, and the seconds of its compilation."""
    import jaxaudit as ja
    from jaxaudit.core import grid
    from jaxaudit.core.program import compiled
    from jaxaudit.execution import grid_program

    learner = getattr(ja.learners, arguments.learner)(common.TASK, evaluations=0)
    duration = max(1, min(10, arguments.steps // 2))
    spike = ja.lr_spike(ja.sweep(*arguments.spikes), onset=0.3, duration=duration)
    # The baseline continues past the onset by the same share as 50 steps of a run of 489 (a million env steps).
    tail = round(arguments.steps * 50 / 489)
    plan = grid.plan(learner, [spike], seeds=arguments.seeds, steps=arguments.steps, tail=tail)
    data = grid_program.inputs(plan)
    start = time.perf_counter()
    program = compiled(plan.program).lower(data).compile()
    compile_seconds = time.perf_counter() - start
    placed = jax.tree.map(jax.device_put, (data,), program.input_shardings[0])

    def audit() -> None:
        jax.block_until_ready(program(*placed))

    return plan, audit, compile_seconds


def simulate(simulations: int) -> float:
    """Returns the seconds of C MuJoCo for one iteration's env steps of all simulations, distributed over the cores."""
    env = make(common.TASK, "c")
    steps = ENV_STEPS // ENVS
    shares = np.array_split(np.arange(simulations), common.core_count())
    actions = [np.random.default_rng(i).uniform(-1, 1, (steps, len(s), env.action_size)) for i, s in enumerate(shares)]
    batches = [Batch(env.model, len(share), nthread=1) for share in shares]

    def step(batch: Batch, ctrls: np.ndarray) -> None:
        for ctrl in ctrls:
            batch.ctrl = ctrl
            batch.step(nstep=env.task.frame_skip)

    threads = [threading.Thread(target=step, args=pair) for pair in zip(batches, actions, strict=True)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
