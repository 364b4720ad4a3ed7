"""Times of the numerical kernels at the sizes of PPO, compared with plain implementations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from unittest import mock

import common
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np


def main() -> None:
    """Runs the benchmark."""
    options = common.parser(__doc__.splitlines()[0], repetitions=15)
    options.add_argument("--lanes", type=int, default=32, help="vmapped (%(default)s)")
    arguments = options.parse_args()
    if arguments.quick:
        arguments.repetitions, arguments.lanes = 2, 2
    common.prepare_jax(1)
    cases = build(arguments.lanes)
    candidates = {name: call for name, (_, call) in cases.items()}
    common.interleave(candidates, 1)
    timings = common.interleave(candidates, arguments.repetitions)
    rows = [
        (name, cases[name][0], f"{t.median * 1e3:.3g}", f"{min(t.seconds) * 1e3:.3g}") for name, t in timings.items()
    ]
    common.finish(arguments, common.table(("kernel", "size", "ms, median", "ms, lowest"), rows), {"seconds": timings})


def build(lanes: int) -> dict[str, tuple[str, Callable[[], None]]]:
    """Returns for each name a description of the size, and a function that runs the kernel once."""
    from jaxaudit.kernels.coherence import CoherenceSum, dominant_share, mean_pairwise_cosine
    from jaxaudit.kernels.gae import gae
    from jaxaudit.kernels.layers import layer_norm, product
    from jaxaudit.kernels.linear_algebra import orthogonal
    from jaxaudit.kernels.linear_scan import linear_scan
    from jaxaudit.models import gpt2

    def call(function: Callable, *arguments) -> Callable[[], None]:
        return wait(jax.jit(jax.vmap(function)), *arguments)

    def wait(function: Callable, *arguments) -> Callable[[], None]:
        def once() -> None:
            jax.block_until_ready(function(*arguments))

        return once

    random = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(random.normal(size=shape), jnp.float32)

    steps, envs = 256, 8
    rewards, values, next_values = (normal(lanes, steps, envs) for _ in range(3))
    ends = jnp.asarray(random.random((lanes, steps, envs)) < 0.01)
    layers = [(17, 64), (64,), (64, 64), (64,), (64, 6), (6,)]
    stack = {str(i): normal(lanes, 32, *shape) for i, shape in enumerate(layers)}
    parameters = sum(int(np.prod(shape)) for shape in layers)
    keys = jax.random.split(jax.random.key(0), lanes)

    def streamed(stack: dict) -> jax.Array:
        first = jax.tree.map(lambda leaf: leaf[0], stack)
        start = CoherenceSum.zeros(first, raw=False)
        return jax.lax.scan(lambda total, g: (total.add(g), None), start, stack)[0].mean_pairwise_cosine()

    def gae_of(*arguments: jax.Array) -> jax.Array:
        return gae(*arguments, 0.99, 0.95)

    def gradients_of(function: Callable, arguments: tuple[jax.Array, ...]) -> Callable[[], None]:
        return wait(jax.jit(lambda g, *of: jax.vjp(function, *of)[1](g)), *arguments)

    def transformer_gradients(product_function: Callable) -> Callable[[], None]:
        model = gpt2.GPT2(21, 24, gpt2.SIZES["micro"])
        params = gpt2.init_params(model, jax.random.key(0))
        tokens = jnp.asarray(random.integers(0, 21, (32, 24)))
        with mock.patch.object(gpt2, "product", product_function):
            gradients = jax.jit(jax.grad(lambda p: jnp.sum(gpt2.apply(model, p, tokens)[0] ** 2)))
            once = wait(gradients.lower(params).compile(), params)

        def ten_times() -> None:
            for _ in range(10):
                once()

        return ten_times

    def by_kernel(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
        return layer_norm(x, scale, bias, 1e-5, x.dtype)

    def by_flax(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
        return nn.LayerNorm(epsilon=1e-5).apply({"params": {"scale": scale, "bias": bias}}, x)  # type: ignore[return-value]

    def step_by_step(decay: jax.Array, inputs: jax.Array) -> jax.Array:
        def step(h: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
            h = decay * h + b
            return h, h

        return jax.lax.scan(step, jnp.zeros_like(decay), inputs)[1]

    def scan_gradients(scan: Callable) -> Callable[[], None]:
        def total(decay: jax.Array, inputs: jax.Array) -> jax.Array:
            return jnp.sum(jnp.abs(jax.vmap(scan)(decay, inputs)) ** 2)

        return wait(jax.jit(jax.grad(total, argnums=(0, 1))), decays, drives)

    decays = jnp.asarray(0.99 * np.exp(1j * random.random((lanes, 8))), jnp.complex64)
    drives = jnp.asarray(random.normal(size=(lanes, 500, 8)), jnp.complex64)
    norm_inputs = normal(1, 1024, 768), normal(1, 1024, 768), normal(768), normal(768)
    rollout_size = f"{lanes} x [{steps}, {envs}]"
    gradients = f"{lanes} x 32 gradients of {parameters:,}"
    associative = functools.partial(linear_scan, method="associative")
    # QR is not vmapped, since batched LAPACK calls can block one another on a CPU.
    qr = jax.jit(lambda key: jax.lax.map(lambda k: jax.nn.initializers.orthogonal()(k, (64, 64)), key))
    return {
        "gae": (rollout_size, call(gae_of, rewards, values, next_values, ends, ends)),
        "gae, NumPy loop": (rollout_size, lambda: gae_numpy(*map(np.asarray, (rewards, values, next_values, ends)))),
        "coherence.mean_pairwise_cosine": (gradients, call(mean_pairwise_cosine, stack)),
        "coherence.CoherenceSum, streamed": (gradients, call(streamed, stack)),
        "coherence.dominant_share": (gradients, call(dominant_share, stack)),
        "layer_norm, with its gradients": ("[1024, 768]", gradients_of(by_kernel, norm_inputs)),
        "flax's layer norm, with its gradients": ("[1024, 768]", gradients_of(by_flax, norm_inputs)),
        "product, in gradients of GPT-2 (micro)": ("10 x [32, 24] tokens", transformer_gradients(product)),
        "matmul, in the same": ("10 x [32, 24] tokens", transformer_gradients(jnp.matmul)),
        "linear_scan, with its gradients": (f"{lanes} x [500, 8] complex", scan_gradients(associative)),
        "lax.scan of the same": (f"{lanes} x [500, 8] complex", scan_gradients(step_by_step)),
        "orthogonal": (f"{lanes} x [64, 64]", call(lambda key: orthogonal(key, (64, 64)), keys)),
        "jax.nn orthogonal (QR, one by one)": (f"{lanes} x [64, 64]", wait(qr, keys)),
    }


def gae_numpy(rewards, values, next_values, ends) -> None:
    """Computes advantages of arrays `[lanes, T, N]` by a Python loop."""
    advantages = np.zeros_like(rewards)
    advantage = np.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        live = 1 - ends[:, t]
        delta = rewards[:, t] + 0.99 * next_values[:, t] * live - values[:, t]
        advantage = advantages[:, t] = delta + 0.99 * 0.95 * live * advantage


if __name__ == "__main__":
    main()
