"""Parts of the measurement: the speed of jaxaudit's lanes, and the limits of the device. Each part is a function."""

from __future__ import annotations

import functools
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version

import numpy as np
from part import Part, compile_quickly, device_memory

PACKAGES = ["jaxaudit", "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "flax", "optax", "orbax-checkpoint"]
PACKAGES += ["numpy", "xarray", "mujoco", "mujoco-mjx", "brax", "torch", "transformers", "trl", "stable-baselines3"]


def _prepare(part: Part) -> None:
    if part.tiny:
        compile_quickly()


# Limits of the device.


def facts(part: Part) -> None:
    """Versions, bandwidth of the memory, rates of products, and costs of launches in loops."""
    import jax
    import jax.numpy as jnp

    part.record("versions", python=platform.python_version(), cores=os.cpu_count(), packages=dict(_versions()))
    part.record("device", devices=[str(d) for d in jax.devices()], kind=jax.devices()[0].device_kind, **device_memory())
    size, n, turns = (2**20, 256, 200) if part.tiny else (2**29, 8192, 2000)
    x = jnp.zeros(size)
    copy = _compiled(lambda x: x * 1.5 + 1, x)
    left, right = (jax.random.normal(jax.random.key(i), (n, n)) for i in (1, 2))
    exact = np.asarray(left[:64], np.float64) @ np.asarray(right, np.float64)
    products = {}
    for name, dtype, precision in (
        ("bfloat16", jnp.bfloat16, None),
        ("float32, precision highest", jnp.float32, "highest"),
        ("float32, default precision", jnp.float32, None),
    ):
        pair = left.astype(dtype), right.astype(dtype)
        products[name] = _compiled(functools.partial(jnp.matmul, precision=precision), *pair), pair
    loops = {name: (_compiled(loop, *arguments), arguments) for name, loop, arguments in _loops(turns)}
    part.wait_for_turn()
    part.record("copy", rate=8 * size / _median_seconds(copy, x), unit="bytes/s")
    for name, (product, pair) in products.items():
        error = np.linalg.norm(np.asarray(product(*pair)[:64], np.float64) - exact) / np.linalg.norm(exact)
        rate = 2 * n**3 / _median_seconds(product, *pair)
        part.record(f"product of matrices, {name}", rate=rate, unit="FLOP/s", n=n, relative_error=float(error))
    for name, (loop, arguments) in loops.items():
        seconds = _median_seconds(loop, *arguments, repetitions=5)
        part.record(f"a turn of {name}", microseconds=1e6 * seconds / turns)


def _compiled(function: Callable, *arguments) -> Callable:
    import jax

    return jax.jit(function).lower(*arguments).compile()


def _versions() -> Iterator[tuple[str, str | None]]:
    for name in PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, None


def _median_seconds(function: Callable, *arguments, repetitions: int = 10) -> float:
    import jax

    jax.block_until_ready(function(*arguments))
    seconds = []
    for _ in range(repetitions):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


def _loops(turns: int) -> Iterable[tuple[str, Callable, tuple]]:
    """Returns the kinds of loops in programs that are bound by launches."""
    import jax
    import jax.numpy as jnp

    def counted(x):
        return jax.lax.scan(lambda x, _: (jnp.sin(x), None), x, None, length=turns)[0]

    def until(x):
        def going_on(carry):
            return (carry[1] < turns) & (carry[0][0] < 2)  # depends on data on the device

        return jax.lax.while_loop(going_on, lambda carry: (jnp.sin(carry[0]), carry[1] + 1), (x, jnp.int32(0)))[0]

    def branch(x, chosen):
        def body(x, _):
            return jax.lax.cond(chosen > 0, jnp.sin, lambda x: x, x), None

        return jax.lax.scan(body, x, None, length=turns)[0]

    def ten(x):
        def body(x, _):
            for _ in range(5):  # sorts are not fused
                x = jnp.sort(jnp.sin(x))
            return x, None

        return jax.lax.scan(body, x, None, length=turns)[0]

    x = jnp.ones(64)
    return (
        ("a counted loop of one kernel", counted, (x,)),
        ("a loop that data end", until, (x,)),
        ("a loop with a branch on data", branch, (x, jnp.int32(1))),
        ("a counted loop of ten kernels", ten, (x,)),
    )


# Lanes of learners.


def measure(part: Part, lanes, work: float, name: str, unit: str, repetitions: int = 5) -> None:
    """Records the training rate of compiled lanes, where `work` is the work of one lane's step.

    Lanes that do not fit in memory are recorded as failed.
    """
    try:
        start = time.perf_counter()
        lanes.begin()
        initial_seconds_ = time.perf_counter() - start
        telemetry = lanes.train()
        seconds: list[float] = []
        while len(seconds) < repetitions and (not seconds or part.seconds_left > 3 * max(seconds)):
            start = time.perf_counter()
            telemetry = lanes.train()
            seconds.append(time.perf_counter() - start)
    except Exception as error:
        part.failed(name, error, lanes=lanes.lanes)
        return
    finally:
        lanes.free()
    part.record(
        name,
        lanes=lanes.lanes,
        rate=lanes.lanes * lanes.rows * work / float(np.median(seconds)),
        unit=unit,
        milliseconds_a_step=1e3 * float(np.median(seconds)) / lanes.rows,
        seconds=seconds,
        steps=lanes.rows,
        compile_seconds=round(lanes.compile_seconds, 1),
        initial_seconds=round(initial_seconds_, 2),
        planned_bytes=lanes.planned_bytes,
        **device_memory(),
        means={n: float(np.mean(telemetry[n])) for n in ("performance", "loss") if n in telemetry},
    )


def measure_all(part: Part, compiling: list, work: float, name: str, unit: str, repetitions: int = 5) -> None:
    """Waits for the compiler and for the turn, and then measures all lanes one after another."""
    compiled = []
    for lanes in compiling:
        try:
            lanes.wait()
            compiled.append(lanes)
        except Exception as error:
            part.failed(name, error, lanes=lanes.lanes)
    part.wait_for_turn()
    for lanes in compiled:
        measure(part, lanes, work, name, unit, repetitions)


def quadratic(part: Part) -> None:
    """Gradient descent on a quadratic, the learner of the README, which shows the overhead of the program."""
    _prepare(part)
    import common
    import jax
    import jax.numpy as jnp

    import jaxaudit as ja

    curvature, rate = 2.0, 0.01

    def init(key):
        return jax.random.normal(key, (3,))

    def step(x, key, taps):
        x = taps("params", x)
        gradient = taps("gradient", curvature * x)
        x = x - taps("learning_rate", rate) * gradient
        return x, {"performance": -0.5 * curvature * jnp.sum(x**2)}

    learner, spike = ja.Learner(init, step), [ja.lr_spike(10.0, onset=1, duration="end")]
    widths = (100, 1_000) if part.tiny else (1_000, 10_000, 100_000, 1_000_000)
    compiling = [common.Lanes(learner, width // 2, 200, spike) for width in widths]
    measure_all(part, compiling, 1, "quadratic", "lane steps/s")


def grpo_learner(tiny: bool, **settings):
    """Returns GRPO on hop after a warm start, at the shapes of `dialogues.py`, and like TRL without held-out rows."""
    import jaxaudit as ja

    small = {"prompts": 2, "group_size": 2, "performance_rows": 2, "microbatches": 1, "epochs": 1} if tiny else {}
    common_settings = {
        "size": "micro",
        "kl": "none",
        "kl_coefficient": 0.0,
        "warm_start": 0 if tiny else 150,
        "telemetry": "basic",
        "performance_every": 1_000,
        "old_log_probability": "sampled",
    }
    return ja.learners.grpo("hop", **small | common_settings | settings)


def grpo(part: Part, size: str, *widths: str) -> None:
    """GRPO by model size: micro, after a warm start, or mini, without one, so that rows fill their slots."""
    _prepare(part)
    import common

    settings = {"size": "mini", "warm_start": 0} if size == "mini" and not part.tiny else {}
    steps = 2 if part.tiny or size == "mini" else 10
    learner = grpo_learner(part.tiny, **settings)
    compiling = [common.Lanes(learner, width, steps) for width in ((2,) if part.tiny else map(int, widths))]
    name = {"micro": "GRPO on hop, 0.1M", "mini": "GRPO on hop, 11M"}[size]
    measure_all(part, compiling, 1, name, "lane iterations/s", 3)


def ppo_learner(tiny: bool, physics: str = "mjx", **settings):
    """Returns PPO on HalfCheetah-v5, by default with the settings of Table S2."""
    import jaxaudit as ja
    from jaxaudit.tasks import named

    small = {"num_envs": 2, "rollout_length": 8, "minibatch_size": 8, "epochs": 2} if tiny else {}
    task = named("InvertedPendulum-v5" if tiny else "HalfCheetah-v5", physics)
    return ja.learners.ppo(task, evaluations=0, telemetry="basic", **settings | small)


def ppo(part: Part, environments: str, *widths: str) -> None:
    """PPO on MJX with 8 environments per lane, as in Table S2, or with 2048, as usual on GPUs."""
    _prepare(part)
    import common

    wide = {"num_envs": 2048, "rollout_length": 32, "minibatch_size": 8192, "epochs": 4}
    learner = ppo_learner(part.tiny, **wide if environments == "2048" else {})
    compiling = [common.Lanes(learner, width, 1) for width in ((2,) if part.tiny else map(int, widths))]
    name = {"8": "Table S2", "2048": "2,048 environments a lane"}[environments]
    measure_all(part, compiling, learner.samples_per_step, f"PPO on HalfCheetah, MJX, {name}", "env steps/s", 2)


def gpt2(part: Part, precision: str, *widths: str) -> None:
    """GPT-2 124M on batches of 8 x 1,024 tokens: a training step for several numbers of lanes, and an audited step.

    The precision "bfloat16-cudnn" is bfloat16 with cuDNN's attention.
    """
    _prepare(part)
    import common
    import language_model

    size, batch, length, vocabulary = ("nano", 2, 16, 257) if part.tiny else ("124m", 8, 1024, 50257)
    lane_counts = (1,) if part.tiny else [int(width) for width in widths]
    attention = "cudnn" if precision.endswith("-cudnn") else "xla"
    variants = [(False, width) for width in lane_counts] + [(True, lane_counts[0])]
    rows, compiling = 2 if part.tiny else 5, []
    for audited, width in variants:
        settings = {"precision": precision.removesuffix("-cudnn"), "attention": attention}
        learner, _ = language_model.learner_of(size, batch, length, audited, vocabulary, **settings)
        compiling.append(common.Lanes(learner, width, rows, steps=100_000))
    names = {False: f"GPT-2 {size}, {precision}, training step", True: f"GPT-2 {size}, {precision}, audited step"}
    compiled = []
    for (audited, _), lanes in zip(variants, compiling, strict=True):
        try:
            lanes.wait()
            compiled.append((names[audited], lanes))
        except Exception as error:
            part.failed(names[audited], error, lanes=lanes.lanes)
    part.wait_for_turn()
    for name, lanes in compiled:
        measure(part, lanes, batch * length, name, "tokens/s")
