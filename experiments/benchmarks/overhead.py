"""The cost of taps and telemetry: the same PPO learner with successively more of the audit in its program.

The target is that closed taps and basic telemetry take at most 1.10 times the time of the bare learner.
"""

from __future__ import annotations

import dataclasses

import common
import jax
import numpy as np

BARE = "bare: only performance, no kinds"


def main() -> None:
    """Runs the benchmark."""
    options = common.parser(__doc__.splitlines()[0])
    options.add_argument("--lanes", type=int, default=16, help="lanes, on all devices together (%(default)s)")
    options.add_argument("--steps", type=int, default=4, help="iterations of a timing (%(default)s)")
    options.add_argument("--epochs", type=int, nargs="+", default=[], help="also (a) with these numbers of epochs")
    arguments = options.parse_args()
    if arguments.quick:
        arguments.repetitions, arguments.lanes, arguments.steps = 2, 2, 1
    common.prepare_jax(arguments.devices)
    candidates = build(arguments)
    timings = common.interleave(candidates, arguments.repetitions)
    ratios = {name: common.paired_ratio(t, timings[BARE]) for name, t in timings.items()}
    rows = [(name, t, f"{ratios[name].median:.3f}") for name, t in timings.items()]
    work = f"seconds for {arguments.steps} iterations of {arguments.lanes} lanes"
    header = ("program", work, "ratio to bare")
    common.finish(arguments, common.table(header, rows), {"seconds": timings, "ratios": ratios})


def build(arguments) -> dict:
    """Returns the compiled candidates by name."""
    import jaxaudit as ja
    from jaxaudit.core import grid, sites
    from jaxaudit.core.perturbation import chain, conditions, control
    from jaxaudit.core.program import Lanes
    from jaxaudit.runtime import registry

    run = 1000
    small = {"num_envs": 2, "rollout_length": 64} if arguments.quick else {}
    basic = ja.learners.ppo(common.TASK, telemetry="basic", evaluations=0, **small)
    full = ja.learners.ppo(common.TASK, telemetry="full", evaluations=0, **small)

    def only_performance(state, key, taps):
        state, telemetry = basic.step(state, key, taps)
        return state, {"performance": telemetry["performance"]}

    bare = dataclasses.replace(basic, step=only_performance)
    tapped_sites = sites.find_sites(basic, run)
    standard = [registry.perturbations[name] for name in registry.perturbations]
    fitting = [f for f in standard if grid.site_misfit(f(), tapped_sites) is None]
    # At neutral magnitudes, open windows compute everything, and the training is not disturbed.
    all_kinds = chain(*(f(f.neutral, onset=0, duration="end") for f in fitting))
    seeds = np.arange(arguments.lanes, dtype=np.uint32)

    def planned(perturbation):
        return grid.plan(basic, [perturbation], seeds=arguments.lanes, steps=run).program

    def lanes(program, condition):
        column = grid.disturbance(condition, program, run)
        return Lanes(seeds, jax.tree.map(lambda x: np.stack([x] * len(seeds)), column))

    program, noise = planned(all_kinds), ja.observation_noise(0.0, onset=0, duration="end")
    closed_lanes, open_lanes = lanes(program, control(0)), lanes(program, conditions([all_kinds], run)[0])

    def candidate(learner, lanes, program=program):
        program = dataclasses.replace(program, learner=learner)
        advance = common.Advance(program, lanes, arguments.steps)
        print(f"compiled in {advance.compile_seconds:.0f} s", flush=True)
        return advance, timed(advance, lanes)

    def timed(advance, lanes):
        def once() -> None:
            advance(1, 1 + arguments.steps, lanes)

        return once

    tapped_program, closed = candidate(basic, closed_lanes)
    noisy = planned(noise)
    noise_program, noise_closed = candidate(basic, lanes(noisy, control(0)), noisy)
    kinds = len(program.slots)
    updating = {
        f"basic telemetry, no kinds, epochs {n}": candidate(
            ja.learners.ppo(common.TASK, telemetry="basic", evaluations=0, epochs=n, **small), Lanes(seeds, None)
        )[1]
        for n in arguments.epochs
    }
    return {
        BARE: candidate(bare, Lanes(seeds, None))[1],
        "(a) basic telemetry, no kinds": candidate(basic, Lanes(seeds, None))[1],
        f"(b) basic telemetry, {kinds} kinds, windows closed": closed,
        f"(c) basic telemetry, {kinds} kinds, all windows open": timed(tapped_program, open_lanes),
        f"(d) full telemetry, {kinds} kinds, windows closed": candidate(full, closed_lanes)[1],
        "(e) observation noise alone, closed": noise_closed,
        "(f) observation noise alone, open: copies of the environments run": timed(
            noise_program, lanes(noisy, conditions([noise], run)[0])
        ),
    } | updating


if __name__ == "__main__":
    main()
