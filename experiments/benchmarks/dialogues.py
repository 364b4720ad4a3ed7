"""GRPO on `hop` with many lanes in one program, in turns with TRL's GRPOTrainer on the same cores; and costs of a lane.

    python dialogues.py --trl-python PYTHON      # a Python with torch, transformers and trl; --no-trl: without TRL
    taskset -c 0 python dialogues.py --parts operations --devices 1 --lanes 1    # time of products in an iteration

Both have the same model, rows, slots and updates. TRL has no tool: the lengths of its rows are sampled from those of
this package, which also runs the dialogue with a tool and evaluates 32 held-out rows in every iteration.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys
import tempfile
from pathlib import Path

import common
import jax
import numpy as np
from jax.profiler import ProfileData

SIZES = {"micro": (64, 2, 4), "mini": (384, 6, 6)}
PARTS = ("trl", "lanes", "overhead", "operations", "packing")


def main() -> None:
    """Runs the benchmark."""
    options = common.parser(__doc__.splitlines()[0])
    options.add_argument("--trl-python", default=sys.executable, help="a Python with trl (%(default)s)")
    options.add_argument("--no-trl", action="store_true", help="leave TRL out")
    options.add_argument("--size", choices=SIZES, default="micro", help="of the model (%(default)s)")
    options.add_argument("--lanes", type=int, default=8, help="beside TRL (%(default)s)")
    options.add_argument("--many", type=int, default=64, help="lanes to compare 8 with (%(default)s)")
    options.add_argument("--execution", nargs="+", default=["vmap", "map"], help="of the lanes, e.g. 4 (%(default)s)")
    options.add_argument("--iterations", type=int, default=20, help="that a timing takes (%(default)s)")
    options.add_argument("--warm-start", type=int, default=300, help="updates before trl, operations (%(default)s)")
    options.add_argument("--conditions", type=int, default=5, help="of a forked grid beside TRL; 0: none (%(default)s)")
    options.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:3], help="(%(default)s)")
    arguments = options.parse_args()
    if arguments.quick:
        arguments.repetitions, arguments.lanes, arguments.many, arguments.iterations = 2, 2, 4, 2
    common.prepare_jax(arguments.devices)
    parts = dict(zip(PARTS, (against_trl, against_lanes, overheads, operations, packing), strict=True))
    results = {name: parts[name](arguments) for name in arguments.parts}
    tables = "\n\n".join(markdown for markdown, _ in results.values())
    common.finish(arguments, tables, {name: data for name, (_, data) in results.items()})


def learner(arguments, **settings):
    """Returns GRPO on hop without a reference and, by default, without a warm start, so that most rows are cut off."""
    import jaxaudit as ja

    small = {"prompts": 2, "group_size": 4, "performance_rows": 2} if arguments.quick else {}
    common_settings = {
        "size": arguments.size,
        "kl": "none",
        "kl_coefficient": 0.0,
        "warm_start": 0,
        "telemetry": "basic",
    }
    return ja.learners.grpo("hop", **small | common_settings | settings)


def advancing(arguments, learner_, lanes: int, perturbations=(), execution: str | None = None):
    """Compiles lanes of a learner and trains 20 iterations; returns a function that trains them, and the program.

    By default, lanes run by the last of the executions on the command line.
    """
    from jaxaudit.core import grid
    from jaxaudit.core.grid import lanes_of
    from jaxaudit.core.perturbation import control
    from jaxaudit.core.program import Lanes

    execution_ = _execution(execution or arguments.execution[-1])
    plan = grid.plan(learner_, list(perturbations), seeds=lanes, steps=10_000, execution=execution_)
    seeds = np.arange(lanes, dtype=np.uint32)
    program = dataclasses.replace(plan.program, devices=tuple(jax.devices()))
    lane_data = lanes_of(program, seeds, [control(0)] * lanes) if perturbations else Lanes(seeds, None)
    advance = common.Advance(program, lane_data, arguments.iterations, data=learner_.data)
    advance(1, 1 + (1 if arguments.quick else 20))

    def once() -> None:
        advance(1, 1 + arguments.iterations)

    return once, advance


def forked(arguments, learner_):
    """Returns a function that trains a grid forked at 30%, and its number of iterations.

    Iterations before the fork count for every condition, since a user without forks would have trained them.
    """
    import jaxaudit as ja
    from jaxaudit.core import grid

    onset, stop = 1 + max(1, round(0.3 * arguments.iterations)), 1 + arguments.iterations
    spikes = ja.lr_spike(ja.sweep(*(1.1 + 0.1 * i for i in range(arguments.conditions))), onset=onset, duration=1)
    execution_ = _execution(arguments.execution[-1])
    plan = grid.plan(learner_, [spikes], seeds=arguments.lanes, steps=stop, execution=execution_, tail=0)
    return common.Audit(plan, begun=1), arguments.lanes * (1 + arguments.conditions) * arguments.iterations


def _execution(name: str) -> int | str:
    return int(name) if name.isdigit() else name


def against_trl(arguments):
    """Iterations per second of all lanes, and of TRL by one process on all cores and by a process on each core."""
    warm_start = 1 if arguments.quick else arguments.warm_start
    bare = {"warm_start": warm_start, "performance_every": 1_000}
    measured = learner(arguments, warm_start=warm_start)
    once, advance = advancing(arguments, measured, arguments.lanes)
    without, _ = advancing(arguments, learner(arguments, **bare), arguments.lanes)
    sparing = learner(arguments, **bare, old_log_probability="sampled")
    sparing_step, _ = advancing(arguments, sparing, arguments.lanes)
    token_counts = token_counts_of(measured, advance, arguments)
    prefix = f"{arguments.lanes} lanes, "
    candidates = {
        prefix + "held-out rows included": once,
        prefix + "without held-out rows": without,
        prefix + "without held-out rows, ratios to the sampler's log-probabilities": sparing_step,
    }
    work = dict.fromkeys(candidates, arguments.lanes * arguments.iterations)
    if arguments.conditions:
        name = f"the same of {arguments.lanes} seeds x {1 + arguments.conditions} conditions, prefix counted for all"
        candidates[name], work[name] = forked(arguments, sparing)
    if not arguments.no_trl:
        shape = (*SIZES[arguments.size], arguments.iterations, ",".join(map(str, token_counts)))

        def trl(processes: int, threads: int):
            return lambda: common.time_script(arguments.trl_python, "trl_grpo.py", (threads, *shape), processes)

        candidates |= {
            "TRL, one process": trl(1, arguments.devices),
            "TRL, a process on each core": trl(arguments.devices, 1),
        }
        work |= {
            "TRL, one process": arguments.iterations,
            "TRL, a process on each core": arguments.devices * arguments.iterations,
        }
    timings = common.interleave(candidates, arguments.repetitions)
    flops = advance.compiled.cost_analysis().get("flops", float("nan"))
    rows = [(name, timing_rate(t, work[name])) for name, t in timings.items()]
    print(f"compiled in {advance.compile_seconds:.0f} s", file=sys.stderr)
    header = (
        f"GRPO, 64 rows of {2 + np.mean(token_counts):.1f} tokens in 24 slots, 4 updates",
        "iterations/s: median (lowest - highest)",
    )
    result = {"seconds": timings, "work": work, "flops_told_by_xla": flops, "tokens_after_the_prompt": token_counts}
    return common.table(header, rows), result


def token_counts_of(learner_, advance, arguments) -> list[int]:
    """Returns the numbers of tokens after the prompt of 64 rows of each lane, in the middle of the timed iterations."""
    from jaxaudit.dialogues.protocol import END

    dialogue_learner = learner_.step.__self__
    states = advance(1, 1 + arguments.iterations // 2)[0]

    def rows(params, seed):
        dialogue = dialogue_learner.dialogue.bind(learner_.data.dialogue)
        return dialogue_learner.collector.sample_undisturbed(
            params, None, dialogue, learner_.data.numbers, jax.random.key(seed), 64
        )

    sampled = jax.vmap(rows)(states.learner.policy.params, np.arange(arguments.lanes, dtype=np.uint32))
    return (
        (np.sum(np.asarray(sampled.role) != END, axis=-1) - dialogue_learner.dialogue.prompt_length)
        .reshape(-1)
        .tolist()
    )


def timing_rate(timing: common.Timing, work: float) -> str:
    """Formats iterations per second with two decimals."""
    rates = [work / timing.median, work / max(timing.seconds), work / min(timing.seconds)]
    return "{:.2f} ({:.2f} - {:.2f})".format(*rates)


def against_lanes(arguments):
    """Throughput and memory of 8 lanes and of many, for each execution; memory is that of the compiled program."""
    candidates, work, memory = {}, {}, {}
    for lanes, execution in itertools.product((arguments.lanes, arguments.many), arguments.execution):
        name = f"{lanes} lanes, {execution}"
        candidates[name], advance = advancing(arguments, learner(arguments), lanes, execution=execution)
        work[name] = lanes * arguments.iterations
        sizes = advance.compiled.memory_analysis()
        needed = sizes.argument_size_in_bytes + sizes.output_size_in_bytes + sizes.temp_size_in_bytes
        memory[name] = needed * len(jax.devices()) / lanes / 2**20
    timings = common.interleave(candidates, arguments.repetitions)
    rows = [(name, timing_rate(t, work[name]), f"{memory[name]:.2f}") for name, t in timings.items()]
    header = ("lanes", "iterations/s: median (lowest - highest)", "MiB per lane, compiled program")
    return common.table(header, rows), {"seconds": timings, "work": work, "memory": memory}


def overheads(arguments):
    """Costs of taps with closed windows, of telemetry, and of held-out rows."""
    from jaxaudit.core import grid, sites
    from jaxaudit.runtime import registry

    basic = learner(arguments, performance_every=1_000)
    tapped_sites = sites.find_sites(basic, 10_000)
    standard = [registry.perturbations[name] for name in registry.perturbations]
    fitting = [f(onset=0.5, duration=1) for f in standard if grid.site_misfit(f(), tapped_sites) is None]

    def only_performance(state, key, taps):
        state, telemetry = basic.step(state, key, taps)
        return state, {"performance": telemetry["performance"]}

    bare = dataclasses.replace(basic, step=only_performance, channels={}, remarks=None)
    programs = {
        "bare: no telemetry, no kinds, no held-out rows": (bare, ()),
        "basic telemetry": (basic, ()),
        f"basic telemetry, {len(fitting)} kinds, windows closed": (basic, fitting),
        "basic telemetry and 32 held-out rows in every iteration": (learner(arguments), ()),
        "full telemetry, 64 held-out rows in every iteration": (learner(arguments, telemetry="full"), ()),
    }
    candidates = {
        name: advancing(arguments, candidate_learner, arguments.lanes, kinds)[0]
        for name, (candidate_learner, kinds) in programs.items()
    }
    timings = common.interleave(candidates, arguments.repetitions)
    first = next(iter(timings.values()))
    ratios = {name: common.paired_ratio(t, first) for name, t in timings.items()}
    rows = [(name, t, f"{ratios[name].median:.3f}") for name, t in timings.items()]
    work = f"seconds for {arguments.iterations} iterations of {arguments.lanes} lanes"
    return common.table(("program", work, "ratio to bare"), rows), {"seconds": timings, "ratios": ratios}


def operations(arguments):
    """Time of matrix products and of other operations in an iteration, by XLA's profiler, which slows the program."""
    warm_start = 1 if arguments.quick else arguments.warm_start
    learner_ = learner(arguments, warm_start=warm_start, performance_every=1_000)
    once, advance = advancing(arguments, learner_, arguments.lanes)
    iterations = arguments.lanes * arguments.iterations
    timing = common.interleave({"": once}, arguments.repetitions)[""]
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            once()
        [path] = Path(folder).rglob("*.xplane.pb")
        lines = [line for plane in ProfileData.from_file(str(path)).planes for line in plane.lines]
        events = [(e.name, e.duration_ns) for line in lines if line.name != "python" for e in line.events]
    multiplying = products_in(advance.compiled.as_text())
    milliseconds: dict[str, list[float]] = {"products of matrices": [], "everything else": []}
    for name, nanoseconds in events:
        if not name.startswith(("ThunkExecutor", "while", "end:")):  # these contain other operations
            milliseconds["products of matrices" if name in multiplying else "everything else"].append(nanoseconds / 1e6)
    rows = [(kind, f"{len(ms) / iterations:,.0f}", f"{sum(ms) / iterations:.1f}") for kind, ms in milliseconds.items()]
    rows.append(("a whole iteration, not watched", "", f"{1e3 * timing.median / iterations:.1f}"))
    return common.table(("operations of an iteration", "number", "ms"), rows), {"seconds": timing, "operations": rows}


def packing(arguments):
    """Milliseconds of an iteration by the length of rows and by `microbatches`: 1 packs nothing, 0 is the default."""
    rows, timings = [], {}
    biases, microbatch_counts = ((2.0,), (0,)) if arguments.quick else ((2.0, 0.7, 0.0, -4.0), (1, 8, 0))
    for bias in biases:
        candidates = {}
        for parts in microbatch_counts:
            settings = {"microbatches": parts, "performance_every": 1_000, "learning_rate": 0.0}
            candidate_learner = with_early_ends(learner(arguments, **settings), bias)
            candidates[str(parts)], advance = advancing(arguments, candidate_learner, arguments.lanes)
        tokens = 2 + np.mean(token_counts_of(candidate_learner, advance, arguments))
        timings[f"{tokens:.1f}"] = candidate_timings = common.interleave(candidates, arguments.repetitions)
        rows.append(
            (f"{tokens:.1f}", *(f"{1e3 * t.median / arguments.iterations:,.1f}" for t in candidate_timings.values()))
        )
    return common.table(("tokens in a row, on average", *map(str, microbatch_counts)), rows), {"seconds": timings}


def with_early_ends(learner_, bias: float):
    """Returns a learner whose rows end earlier, by a bias on the logit of the end token of the untrained policy."""
    end = learner_.step.__self__.dialogue.token["end"]

    def init(key, data):
        state = learner_.init(key, data)
        params = state.policy.params
        toward = params["wte"]["embedding"][end]
        final_norm = {**params["ln_f"], "bias": params["ln_f"]["bias"] + bias * toward / (toward @ toward)}
        policy = dataclasses.replace(state.policy, params={**params, "ln_f": final_norm})
        return dataclasses.replace(state, policy=policy)

    return dataclasses.replace(learner_, init=init)


def products_in(program: str) -> set[str]:
    """Returns the names of a compiled program's matrix products, and of fusions that contain one."""
    names, computation = set(), ""
    for line in program.splitlines():
        if line.endswith("{"):
            computation = line.removeprefix("ENTRY ").split()[0].removeprefix("%")
        elif " dot(" in line:
            names |= {computation, line.removeprefix("  ROOT ").split()[0].removeprefix("%")}
        elif (call := re.search(r"(\S+) = .* calls=%?([\w.-]+)", line)) and call[2] in names:
            names.add(call[1].removeprefix("%"))
    return names


if __name__ == "__main__":
    main()
