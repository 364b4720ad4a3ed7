"""Time to a first result: an audit of a small user-written network, in a fresh process without a compilation cache.

The audit has 16 seeds x 11 conditions (5 kinds of perturbation and the control) x 400 steps. The targets are 9 s for
the call and 12 s from the start of the process. Most of it is compilation; `--parts` lists the programs.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import time

STARTED = "JAXAUDIT_BENCHMARK_STARTED"


def main() -> None:
    """Runs the benchmark."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--repetitions", type=int, default=3, help="processes, one after another (%(default)s)")
    options.add_argument("--parts", action="store_true", help="list what is compiled, and for how long")
    options.add_argument("--cached", action="store_true", help="with JAX's cache of compiled programs, as by default")
    options.add_argument("--quick", action="store_true", help="one process")
    options.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.child:
        print(json.dumps(answer(arguments.parts)))
        return
    results = []
    for _ in range(1 if arguments.quick else arguments.repetitions):
        command = [sys.executable, __file__, "--child", *(["--parts"] if arguments.parts else [])]
        environment = os.environ | {STARTED: repr(time.time())}
        if not arguments.cached:
            environment["JAXAUDIT_CACHE"] = "off"
        output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
        results.append(json.loads(output.splitlines()[-1]))
        print(", ".join(f"{name} {value:.2f}" for name, value in results[-1].items()))
    print(
        "median: "
        + ", ".join(f"{name} {statistics.median(result[name] for result in results):.2f} s" for name in results[0])
    )


def answer(parts: bool) -> dict[str, float]:
    """Returns the seconds of the import, of the call of `audit`, and from the start of the process."""
    if parts:
        _report_compilations()
    start = time.perf_counter()
    import jax
    import jax.numpy as jnp
    import optax
    from flax import linen as nn

    import jaxaudit as ja

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            for width in (64, 64):
                x = nn.tanh(nn.Dense(width)(x))
            return nn.Dense(1)(x)[..., 0]

    network = Network()
    optimizer = ja.Optimizer(optax.scale_by_adam(), learning_rate=1e-3, max_norm=1.0)

    def fresh(key):
        return network.init(key, jnp.zeros((8,)))["params"]

    def init(key):
        params = fresh(key)
        return params, optimizer.init(params)

    def batch(key):
        x = jax.random.normal(key, (64, 8))
        return x, jnp.sin(x[:, 0]) * x[:, 1] + x[:, 2]

    def loss(params, x, y):
        return jnp.mean((network.apply({"params": params}, x) - y) ** 2)

    def step(state, key, taps):
        params, moments = optimizer.disturb(*state, taps, fresh)
        x, y = batch(key)
        value, gradient = jax.value_and_grad(loss)(params, x, y)
        params, moments, _ = optimizer.update(params, moments, gradient, taps)
        return (params, moments), {"performance": -loss(params, x, y), "loss": value}

    perturbations = [
        ja.lr_spike(ja.sweep(10.0, 100.0), onset=0.5),
        ja.weight_noise(ja.sweep(0.03, 0.3), onset=0.5),
        ja.gradient_sign_flip(ja.sweep(0.1, 0.5), onset=0.5),
        ja.gradient_mask(ja.sweep(0.1, 0.5), onset=0.5),
        ja.momentum_noise(ja.sweep(0.1, 1.0), onset=0.5),
    ]
    imported = time.perf_counter()
    result = ja.audit(ja.Learner(init, step), perturbations, seeds=16, steps=400)
    end = time.perf_counter()
    assert result.telemetry.sizes == {"seed": 16, "condition": 11, "step": 400}
    since_start = time.time() - float(os.environ.get(STARTED, time.time() - (end - start)))
    return {"import": imported - start, "call": end - imported, "whole": since_start, "cpu": time.process_time()}


def _report_compilations() -> None:
    import jax

    jax.config.update("jax_log_compiles", True)
    logging.getLogger("jax").setLevel(logging.WARNING)


if __name__ == "__main__":
    main()
