"""Operations of a learner's step that determine launch times on a GPU: loops, branches, products and bytes.

    python experiments/gpu/loops.py [--only NAME ...]

They are counted in the jaxpr of one lane's step, at the settings of the GPU measurement, with every site disturbed that
a kind of the package reaches. Lanes share turns, branches and launches; floating-point operations and bytes are per
lane.

- turns: iterations of loops of known length, where inner loops multiply. Loops that end by data are counted separately,
  each start with one turn.
- branches: `lax.cond` inside loops, in all turns.
- kernels: operations that a compiler does not fuse with neighbours: products, reductions, sorts, gathers, scatters.
- bytes: bytes that kernels read and write. Elementwise operations are assumed to be fused and free.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import jax
import numpy as np
from jax.extend.core import jaxprs_in_params
from jax.interpreters import partial_eval

TURN, BRANCH, KERNEL = 6.0, 11.3, 2.26
"""Microseconds on an H100, measured by `speed.py` (facts): a turn of a counted loop with a kernel, an additional branch
on data, and a kernel."""

ALONE = ("dot_general", "conv_general_dilated", "reduce", "arg", "sort", "top_k", "gather", "scatter", "cum")
"""Prefixes of the names of primitives that become separate kernels."""


@dataclasses.dataclass
class Counts:
    """Counts for one lane's step.

    Attributes:
      turns: turns of loops of known length.
      open_loops: starts of loops that end by data.
      branches: branches on data in loops.
      products: matrix products.
      kernels: operations that are not fused.
      flops: floating-point operations of products.
      read_and_written: bytes that kernels read and write.
    """

    turns: int = 0
    open_loops: int = 0
    branches: int = 0
    products: int = 0
    kernels: int = 0
    flops: float = 0.0
    read_and_written: float = 0.0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def __mul__(self, times: int) -> Counts:
        return Counts(*(times * a for a in dataclasses.astuple(self)))


def count_operations(jaxpr: Any, in_loop: bool = False) -> Counts:
    """Counts the operations of a jaxpr on a GPU."""
    total = Counts()
    for equation in jaxpr.eqns:
        name, inner = equation.primitive.name, list(jaxprs_in_params(equation.params))
        if name == "scan":
            length = equation.params["length"]
            total += Counts(turns=length) + count_operations(inner[0], True) * length
        elif name == "while":
            total += Counts(open_loops=1) + count_operations(equation.params["body_jaxpr"].jaxpr, True)
        elif name == "cond" and equation.params.get("branches_platforms") is not None:
            branch = _branch_of_gpus(equation.params["branches_platforms"])
            total += count_operations(equation.params["branches"][branch].jaxpr, in_loop)
        elif name == "cond":
            branches = [count_operations(branch.jaxpr, in_loop) for branch in equation.params["branches"]]
            total += Counts(branches=int(in_loop)) + max(branches, key=lambda branch: branch.kernels)
        elif inner:
            for inner_jaxpr in inner:
                total += count_operations(inner_jaxpr, in_loop)
        elif name.startswith(ALONE):
            total += _count_kernel(equation)
    return total


def _branch_of_gpus(platforms: Any) -> int:
    """Returns the branch of `jax.lax.platform_dependent` for CUDA, or the default one."""
    return next(i for i, names in enumerate(platforms) if names is None or {"cuda", "gpu"} & set(names))


def _count_kernel(equation: Any) -> Counts:
    sizes = [math.prod(x.aval.shape) * x.aval.dtype.itemsize for x in (*equation.invars, *equation.outvars)]
    counts = Counts(kernels=1, read_and_written=float(sum(sizes)))
    if equation.primitive.name == "dot_general":
        contracted = equation.params["dimension_numbers"][0][0]
        shared = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
        counts += Counts(products=1, flops=2.0 * shared * math.prod(equation.outvars[0].aval.shape))
    return counts


def learners() -> dict[str, Callable[[], tuple[Any, list[Any]]]]:
    """Returns each learner of the GPU measurement, with disturbances at the sites in its loops."""
    import language_model
    import speed

    import jaxaudit as ja
    from jaxaudit.tasks import named

    control = [ja.observation_noise(0.1), ja.reward_noise(0.1), ja.action_noise(0.1), ja.gradient_mask(0.1)]
    wide = {"num_envs": 2048, "rollout_length": 32, "minibatch_size": 8192, "epochs": 4}

    def off_policy(kind: str) -> Any:
        return getattr(ja.learners, kind)(named("HalfCheetah-v5", "mjx"), evaluations=0, telemetry="basic")

    def gpt2() -> Any:
        return language_model.learner_of("124m", 8, 1024, False, 50257, precision="bfloat16")[0]

    tokens = [ja.lr_spike(3.0), ja.gradient_mask(0.1)]
    rollouts = [ja.lr_spike(3.0), ja.tool_error(0.5), ja.gradient_mask(0.1), ja.reward_noise(0.1)]
    return {
        "PPO, HalfCheetah on MJX, 8 environments": lambda: (speed.ppo_learner(False), control),
        "PPO, 2,048 environments": lambda: (speed.ppo_learner(False, **wide), control),
        "SAC, HalfCheetah on MJX": lambda: (off_policy("sac"), control),
        "TD3, HalfCheetah on MJX": lambda: (off_policy("td3"), control),
        "TRPO, HalfCheetah on MJX": lambda: (
            ja.learners.trpo(named("HalfCheetah-v5", "mjx"), evaluations=0, telemetry="basic"),
            control[:3],
        ),
        "GPT-2 124M, 8 x 1,024 tokens": lambda: (gpt2(), tokens),
        "GRPO on hop, 0.1M": lambda: (speed.grpo_learner(False), rollouts),
        "GRPO on hop, 11M": lambda: (speed.grpo_learner(False, size="mini", warm_start=0), rollouts),
    }


def step_of(learner: Any, perturbations: list[Any], branch: bool) -> Counts:
    """Counts a disturbed step of a lane, with branches in loops as on CPUs, or without as on GPUs."""
    from jaxaudit.core.grid import disturbance, plan
    from jaxaudit.core.perturbation import control
    from jaxaudit.core.program import Lanes, Program, initial_shapes, lane_step, with_perturbations

    program = plan(learner, perturbations, seeds=1, steps=1_000).program
    if not branch:

        class OnGpus(Program):
            on_gpus = True

        program = OnGpus(**{field.name: getattr(program, field.name) for field in dataclasses.fields(program)})
    first = functools.partial(with_perturbations, program, lanes=1)
    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype),
        jax.eval_shape(
            first, jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), initial_shapes(program))
        ),
    )
    lane = Lanes(np.uint32(0), disturbance(control(0), program, program.steps))
    data = learner.shapes.tree if hasattr(learner, "shapes") else None
    idle = np.zeros(len(program.slots), np.int32)
    traced = jax.make_jaxpr(functools.partial(lane_step, program))(data, state, lane, np.int32(0), idle)
    needed, _ = partial_eval.dce_jaxpr(traced.jaxpr, [True] * len(traced.jaxpr.outvars))
    return count_operations(needed)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=None)
    selected = parser.parse_args().only
    print(
        "| learner | turns | loops that data end | branches: as on CPUs, as on GPUs | products | kernels | "
        "GFLOP a lane | MB a lane | launches, ms | branches saved, ms |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, make in learners().items():
        if selected is not None and not any(part in name for part in selected):
            continue
        learner, perturbations = make()
        cpu, gpu = (step_of(learner, perturbations, branch) for branch in (True, False))
        launches = (TURN * gpu.turns + KERNEL * gpu.kernels + BRANCH * gpu.branches) / 1e3
        saved = BRANCH * (cpu.branches - gpu.branches) / 1e3
        print(
            f"| {name} | {gpu.turns:,} | {gpu.open_loops:,} | {cpu.branches:,}, {gpu.branches:,} | "
            f"{gpu.products:,} | {gpu.kernels:,} | {gpu.flops / 1e9:.3g} | {gpu.read_and_written / 1e6:,.0f} | "
            f"{launches:,.1f} | {saved:,.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
