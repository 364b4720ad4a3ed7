"""Env steps per second of SAC and TD3 on HalfCheetah-v5, and of Stable-Baselines3's beside them.

Both have Table S2's settings and one update for each env step, which is nearly all they do. The lanes are those of an
audit, with full telemetry; Stable-Baselines3 runs with one environment, its default, or eight, with one PyTorch thread
or one per core, and as one process or one per core. Neither side evaluates its policy, and both learn from the first
steps on. "Products alone" trains nothing: it is as many products of hidden layers as an update has, by themselves,
which is what the machine allows. The second table is what a replay buffer costs: time, for it must be written in place,
and memory.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import common
import jax
from jax.sharding import PartitionSpec as P

LEARNERS = ("sac", "td3")
PRODUCTS = {"sac": (8, 5, 3), "td3": (12, 6, 5)}
"""Of hidden layers, in as many updates as `UPDATES` says: forward, for the inputs' gradients, for the kernels'."""
UPDATES = {"sac": 1, "td3": 2}  # TD3's actor learns at every second
SMALL = {"hidden": (8, 8), "batch_size": 8, "iteration_steps": 512}


def main() -> None:
    """Runs the benchmark."""
    options = common.parser(__doc__.splitlines()[0], repetitions=3)
    options.add_argument("--python", default=sys.executable, help="Python with stable-baselines3 (this one)")
    options.add_argument("--learners", nargs="+", default=list(LEARNERS), choices=LEARNERS)
    options.add_argument("--lanes", type=int, nargs="+", default=[4, 8])
    options.add_argument("--execution", nargs="+", default=["vmap"], help="vmap, map, batch size")
    options.add_argument("--env-steps", type=int, default=512, help="timed env steps of a lane (%(default)s)")
    options.add_argument("--sb3-steps", type=int, default=1024, help="timed env steps of SB3 (%(default)s)")
    options.add_argument("--capacities", type=int, nargs="*", default=[10_000, 1_000_000])
    arguments = options.parse_args()
    if arguments.quick:
        arguments.repetitions, arguments.lanes, arguments.learners = 1, [2], ["td3"]
        arguments.env_steps, arguments.sb3_steps, arguments.capacities = 64, 64, [1000]
    common.prepare_jax(arguments.devices)
    learners = {name: compare(arguments, name) for name in arguments.learners}
    buffers = [buffer(arguments, capacity) for capacity in arguments.capacities]
    tables = [learner["table"] for learner in learners.values()]
    header = ("capacity", "seconds of 10 iterations less seconds of 5", "MiB per lane, buffer", "MiB, work space")
    tables.append(common.table(header, [b["row"] for b in buffers]))
    common.finish(arguments, "\n\n".join(tables), {"learners": learners, "buffers": buffers})


def compare(arguments, name: str) -> dict:
    """One learner against Stable-Baselines3's."""
    candidates, work, compile_seconds = {}, {}, {}
    for execution in arguments.execution:
        for lanes in arguments.lanes:
            called = f"jaxaudit: {lanes} lanes, {execution}"
            advance = lanes_of(arguments, name, lanes, execution)
            candidates[called] = functools.partial(untimed, advance, 1, 2)
            work[called] = lanes * arguments.env_steps
            compile_seconds[called] = advance.compile_seconds
    called = f"products alone: {max(arguments.lanes)} lanes"
    candidates[called] = products(arguments, name, max(arguments.lanes))
    work[called] = max(arguments.lanes) * arguments.env_steps
    variants = [
        (processes, threads, envs)
        for processes, threads in sorted({(1, 1), (1, common.cores()), (common.cores(), 1)})
        for envs in (1, 8)
    ]
    for processes, threads, envs in variants[: 1 if arguments.quick else None]:
        called = f"SB3: processes {processes}, threads {threads}, environments {envs}"
        candidates[called] = functools.partial(
            common.sb3, arguments.python, name, arguments.sb3_steps, processes, threads, envs
        )
        work[called] = processes * arguments.sb3_steps
    timings = common.interleave(candidates, arguments.repetitions)
    rates = {called: work[called] / timing.median for called, timing in timings.items()}
    alone = [called for called in rates if called.startswith("SB3: processes 1,")]
    best = max(alone, key=rates.__getitem__)
    rows = [(called, t.rate(work[called]), f"{rates[called] / rates[best]:.2f}") for called, t in timings.items()]
    header = (name, "env steps/s: median (lowest - highest)", "x of the fastest single process")
    return {
        "table": common.table(header, rows),
        "seconds": {called: timing.seconds for called, timing in timings.items()},
        "env_steps": work,
        "env_steps_per_second": rates,
        "compile_seconds": compile_seconds,
    }


def products(arguments, name: str, lanes: int) -> Callable[[], None]:
    """The 256 x 256 x 256 products of one iteration's updates: forward, for the inputs and for the kernels."""
    forward, inputs, kernels = PRODUCTS[name]
    devices = next(n for n in range(arguments.devices, 0, -1) if lanes % n == 0)
    mesh = jax.make_mesh((devices,), ("lanes",), axis_types=(jax.sharding.AxisType.Auto,))

    def update(carry, _):
        x, kernel = carry
        out, gradient = x, kernel
        for _ in range(forward):
            out = out @ kernel
        for _ in range(inputs):
            out = out @ kernel.T
        for _ in range(kernels):
            gradient = out.T @ gradient
        return (x + 1e-9 * out, kernel + 1e-9 * gradient), None

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("lanes"), out_specs=P("lanes"))
    def run(carry):
        return jax.vmap(lambda c: jax.lax.scan(update, c, None, arguments.env_steps // UPDATES[name])[0])(carry)

    carry = tuple(jax.random.normal(jax.random.key(i), (lanes, 256, 256)) / 64 for i in range(2))
    carry = jax.device_put(carry, jax.NamedSharding(mesh, P("lanes")))
    jax.block_until_ready(run(carry))
    return functools.partial(wait_for, run, carry)


def wait_for(run: Callable, carry) -> None:
    """Runs it to its end."""
    jax.block_until_ready(run(carry))


def untimed(advance: common.Advance, start: int, stop: int) -> None:
    """Trains and gives nothing back, so that who calls takes the time."""
    advance(start, stop)


def lanes_of(arguments, name: str, lanes: int, execution: str, **settings) -> common.Advance:
    """Compiled lanes whose iteration is what is timed at once."""
    import jaxaudit as ja
    from jaxaudit import grid

    chosen = {"iteration_steps": arguments.env_steps, "learning_starts": 0, "buffer_size": 100_000, "evaluations": 0}
    learner = getattr(ja.learners, name)(common.TASK, **chosen | settings)
    how = int(execution) if execution.isdigit() else execution
    plan = grid.plan(learner, [ja.lr_spike(10.0)], seeds=lanes, steps=100, execution=how)
    return common.Advance(plan.program, grid.lanes_of(plan.program, range(lanes), None), 10)


def buffer(arguments, capacity: int) -> dict:
    """What a replay buffer of a capacity costs, beside networks so small that it would show."""
    advance = lanes_of(arguments, "sac", 2, "vmap", **SMALL | {"buffer_size": capacity})
    spans = {stop: functools.partial(untimed, advance, 1, 1 + stop) for stop in (5, 10)}
    timings = common.interleave(spans, max(3, arguments.repetitions))
    # The program copies its arguments once a call, however many iterations it runs.
    seconds = timings[10].median - timings[5].median
    sizes = advance.compiled.memory_analysis()
    each = advance(1, 1)[0].learner.buffer.nbytes / 2 / 2**20
    space = sizes.temp_size_in_bytes * arguments.devices / 2**20
    return {"capacity": capacity, "row": (f"{capacity:,}", f"{seconds:.3g}", f"{each:.2f}", f"{space:.2f}")}


if __name__ == "__main__":
    main()
