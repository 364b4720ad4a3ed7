"""Time saved by forking: a grid whose lanes share their prefix, against the same lanes trained from step 0.

The ratio of times should be the ratio of lane-steps. The cost of a lane depends on how many lanes run in a batch, and
the baseline has fewer lanes than a fork group, so both sides run in batches of the same size, that of the baseline's
lanes on a device. "--execution vmap" shows the effect of the batch size instead.
"""

from __future__ import annotations

import math

import common


def main() -> None:
    """Runs the benchmark."""
    options = common.parser(__doc__.splitlines()[0], repetitions=3)
    options.add_argument("--seeds", type=int, default=8)
    options.add_argument("--steps", type=int, default=20, help="iterations of a run (%(default)s)")
    options.add_argument("--onsets", type=float, nargs="+", default=[0.3, 0.6])
    options.add_argument("--execution", choices=("batch", "vmap"), default="batch")
    arguments = options.parse_args()
    if arguments.quick:
        arguments.repetitions, arguments.seeds, arguments.steps = 1, 2, 5
    common.prepare_jax(arguments.devices)
    rows, numbers = [], {}
    for onset in arguments.onsets:
        grid, candidates = build(arguments, onset)
        timings = common.interleave(candidates, arguments.repetitions)
        ratio = common.paired_ratio(timings["forked"], timings["whole"])
        lanes = len(grid.seeds) * len(grid.conditions)
        expected = grid.lane_steps / (lanes * grid.steps)
        error = ratio.median / expected - 1
        rows.append((onset, timings["whole"], timings["forked"], ratio, f"{expected:.4f}", f"{error:+.1%}"))
        numbers[str(onset)] = {"seconds": timings, "ratio": ratio, "expected": expected, "error": error}
    header = ("onset", "s, from step 0", "s, forked", "time ratio", "lane-step ratio", "difference")
    common.finish(arguments, common.table(header, rows), {"onsets": numbers})


def build(arguments, onset: float):
    """Returns the grid, and functions that train it forked and from step 0, by the same compiled programs."""
    import jaxaudit as ja
    from jaxaudit.core import grid

    small = {"num_envs": 2, "rollout_length": 64} if arguments.quick else {}
    learner = ja.learners.ppo(common.TASK, evaluations=0, **small)
    spike = ja.lr_spike(ja.sweep(3.0, 10.0, 30.0), onset=onset, duration=2)
    batch = "vmap" if arguments.execution == "vmap" else math.ceil(arguments.seeds / arguments.devices)
    plan = grid.plan(learner, [spike], seeds=arguments.seeds, steps=arguments.steps, execution=batch, tail=0)
    audit = common.Audit(plan)
    audit.whole(1)
    return plan, {"whole": audit.whole, "forked": audit}


if __name__ == "__main__":
    main()
