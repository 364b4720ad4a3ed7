"""Env steps per second of SAC and TD3 on HalfCheetah-v5, compared with Stable-Baselines3.

Both have the settings of Table S2, with one update for each env step, which takes nearly all of the time. Lanes run as
in an audit, with full telemetry. Stable-Baselines3 runs with one environment, its default, or eight, with one PyTorch
thread or one per core, and as one process or one per core. Neither side evaluates its policy, and both learn from the
first steps on. "Audit" is a grid of 2 seeds x 15 conditions, as in experiments/four_learners, forked at 30%; its env
steps count the full training of all 30 lanes, as it would be without forks; its iterations are half as long as
--env-steps. "Updates alone" repeats the lanes' updates on one minibatch with optax only, without environment, replay
buffer, taps and telemetry. The second table is the cost of a replay buffer: the time of writing to it in place, and
memory.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import common
import jax
import optax
from jax.sharding import PartitionSpec as P

LEARNERS = ("sac", "td3")
SMALL = {"hidden": (8, 8), "batch_size": 8, "iteration_steps": 512}


def main() -> None:
    """Runs the benchmark."""
    options = common.parser(__doc__.splitlines()[0], repetitions=3)
    options.add_argument("--python", default=sys.executable, help="Python with stable-baselines3 (this one)")
    options.add_argument("--no-sb3", action="store_true", help="without Stable-Baselines3")
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
    if buffers:
        header = ("capacity", "seconds of 10 iterations less seconds of 5", "MiB per lane, buffer", "MiB, work space")
        tables.append(common.table(header, [b["row"] for b in buffers]))
    common.finish(arguments, "\n\n".join(tables), {"learners": learners, "buffers": buffers})


def compare(arguments, name: str) -> dict:
    """Compares one learner with that of Stable-Baselines3."""
    candidates, work, compile_seconds = {}, {}, {}
    for execution in arguments.execution:
        for lanes in arguments.lanes:
            name_ = f"jaxaudit: {lanes} lanes, {execution}"
            advance = lanes_of(arguments, name, lanes, execution)
            candidates[name_] = functools.partial(untimed, advance, 1, 2)
            work[name_] = lanes * arguments.env_steps
            compile_seconds[name_] = advance.compile_seconds
        name_ = f"jaxaudit: audit, {execution}, shared prefix counted for every lane"
        candidates[name_], work[name_] = audit_of(arguments, name, execution)
    name_ = f"updates alone: {max(arguments.lanes)} lanes"
    candidates[name_] = updates_alone(arguments, name, max(arguments.lanes))
    work[name_] = max(arguments.lanes) * arguments.env_steps
    variants = [
        (processes, threads, envs)
        for processes, threads in sorted({(1, 1), (1, common.core_count()), (common.core_count(), 1)})
        for envs in (1, 8)
    ]
    for processes, threads, envs in [] if arguments.no_sb3 else variants[: 1 if arguments.quick else None]:
        name_ = f"SB3: processes {processes}, threads {threads}, environments {envs}"
        candidates[name_] = functools.partial(
            common.sb3, arguments.python, name, arguments.sb3_steps, processes, threads, envs
        )
        work[name_] = processes * arguments.sb3_steps
    timings = common.interleave(candidates, arguments.repetitions)
    rates = {name_: work[name_] / timing.median for name_, timing in timings.items()}
    best = max((rate for name_, rate in rates.items() if name_.startswith("SB3: processes 1,")), default=float("nan"))
    rows = [(name_, t.rate(work[name_]), f"{rates[name_] / best:.2f}") for name_, t in timings.items()]
    header = (name, "env steps/s: median (lowest - highest)", "x of the fastest single process")
    return {
        "table": common.table(header, rows),
        "seconds": {name_: timing.seconds for name_, timing in timings.items()},
        "env_steps": work,
        "env_steps_per_second": rates,
        "compile_seconds": compile_seconds,
    }


def audit_of(arguments, name: str, execution: str) -> tuple[common.Audit, int]:
    """Returns a compiled grid, and the env steps of all lanes if each were trained from the start."""
    import jaxaudit as ja
    from jaxaudit.core import grid

    settings = {"iteration_steps": max(64, arguments.env_steps // 2), "learning_starts": 0, "buffer_size": 100_000}
    learner = getattr(ja.learners, name)(common.TASK, evaluations=0, **settings)
    magnitudes = [float(1 + m) for m in range(1 if arguments.quick else 14)]
    spikes = ja.lr_spike(ja.sweep(*magnitudes), onset=0.3, duration=2)
    plan = grid.plan(learner, [spikes], seeds=2, steps=10, execution=as_execution(execution), tail=0)
    return common.Audit(plan), len(plan.seeds) * len(plan.conditions) * plan.steps * settings["iteration_steps"]


def as_execution(option: str) -> str | int:
    """Converts an option of the command line to an execution: a batch size, "vmap" or "map"."""
    return int(option) if option.isdigit() else option


def updates_alone(arguments, name: str, lanes: int) -> Callable[[], None]:
    """Returns a function that runs the network updates of an iteration: gradients, Adam and target networks."""
    from jaxaudit.learners.rl.off_policy import Networks
    from jaxaudit.learners.rl.replay_buffer import Transitions
    from jaxaudit.learners.rl.sac import SAC, SACSettings
    from jaxaudit.learners.rl.td3 import TD3, TD3Settings
    from jaxaudit.tasks import make

    algorithm, settings = {"sac": (SAC, SACSettings()), "td3": (TD3, TD3Settings())}[name]
    env = make(common.TASK)
    learner = algorithm(env, env.max_episode_steps, settings)
    adam = optax.adam(settings.learning_rate)
    losses = [("critic", learner.critic_loss)] * settings.actor_delay + [("actor", learner.actor_loss)]

    def begin(key):
        params = learner.init_params(key)
        optimizer = {part: adam.init(params[part]) for part in params}
        widths = {"observation": (env.observation_size,), "next_observation": (env.observation_size,)}
        shapes = {field: widths.get(field, ()) for field in Transitions._fields} | {"action": (env.action_size,)}
        batch = {field: jax.random.uniform(key, (settings.batch_size, *shape)) for field, shape in shapes.items()}
        return Networks(params, {part: params[part] for part in learner.targets}, optimizer), Transitions(**batch)

    def update(networks, key, batch):
        params, optimizer = networks.params, networks.optimizer
        for part, loss in losses:
            current = Networks(params, networks.target, optimizer)
            gradient, _ = jax.grad(loss, has_aux=True)(params[part], current, batch, key, learner.coefficients(params))
            change, state = adam.update(gradient, optimizer[part])
            params = params | {part: optax.apply_updates(params[part], change)}
            optimizer = optimizer | {part: state}
        online = {part: params[part] for part in learner.targets}
        return Networks(params, optax.incremental_update(online, networks.target, settings.tau), optimizer), None

    def train(networks, batch, key):
        keys = jax.random.split(key, arguments.env_steps // settings.actor_delay)
        return jax.lax.scan(functools.partial(update, batch=batch), networks, keys)[0]

    devices = next(n for n in range(arguments.devices, 0, -1) if lanes % n == 0)
    mesh = jax.make_mesh((devices,), ("lanes",), axis_types=(jax.sharding.AxisType.Auto,))
    run = jax.jit(jax.shard_map(jax.vmap(train), mesh=mesh, in_specs=P("lanes"), out_specs=P("lanes")))
    keys = jax.random.split(jax.random.key(0), lanes)
    inputs = jax.device_put((*jax.vmap(begin)(keys), keys), jax.NamedSharding(mesh, P("lanes")))
    jax.block_until_ready(run(*inputs))
    return functools.partial(wait_for, run, *inputs)


def wait_for(run: Callable, *arguments) -> None:
    """Runs a function and waits for its results."""
    jax.block_until_ready(run(*arguments))


def untimed(advance: common.Advance, start: int, stop: int) -> None:
    """Trains and returns None, so that the caller measures the time."""
    advance(start, stop)


def lanes_of(arguments, name: str, lanes: int, execution: str, **settings) -> common.Advance:
    """Returns compiled lanes, of which one iteration is timed."""
    import jaxaudit as ja
    from jaxaudit.core import grid

    defaults = {"iteration_steps": arguments.env_steps, "learning_starts": 0, "buffer_size": 100_000, "evaluations": 0}
    learner = getattr(ja.learners, name)(common.TASK, **defaults | settings)
    plan = grid.plan(learner, [ja.lr_spike(10.0)], seeds=lanes, steps=100, execution=as_execution(execution))
    return common.Advance(plan.program, grid.lanes_of(plan.program, range(lanes), None), 10)


def buffer(arguments, capacity: int) -> dict:
    """Measures the cost of a replay buffer of some capacity, with networks so small that it would be visible."""
    advance = lanes_of(arguments, "sac", 2, "vmap", **SMALL | {"buffer_size": capacity})
    spans = {stop: functools.partial(untimed, advance, 1, 1 + stop) for stop in (5, 10)}
    timings = common.interleave(spans, max(3, arguments.repetitions))
    # The program copies its arguments once in each call, independent of the number of iterations.
    seconds = timings[10].median - timings[5].median
    sizes = advance.compiled.memory_analysis()
    buffer_mebibytes = advance(1, 1)[0].learner.buffer.value.nbytes / 2 / 2**20
    space = sizes.temp_size_in_bytes * arguments.devices / 2**20
    return {"capacity": capacity, "row": (f"{capacity:,}", f"{seconds:.3g}", f"{buffer_mebibytes:.2f}", f"{space:.2f}")}


if __name__ == "__main__":
    main()
