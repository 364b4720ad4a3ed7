"""GPT-2 compared with PyTorch in tokens per second; its lanes, blockwise cross entropy, and memory.

Both train in float32 on random tokens, without dropout, with AdamW and clipping, on the same threads. A "training step"
does the same as PyTorch; an "audited step" also measures a held-out sequence, norms, and coherence of two microbatches.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import common
import jax
import jax.numpy as jnp
import numpy as np

VOCABULARY = 50257


def main() -> None:
    """Runs the benchmark."""
    options = common.parser(__doc__.splitlines()[0], repetitions=3)
    options.add_argument("--python", default=sys.executable, help="Python with torch and transformers (this one)")
    options.add_argument("--parts", nargs="+", default=list(PARTS)[:-1], choices=PARTS, help="lanes must be run alone")
    options.add_argument("--size", default="124m")
    options.add_argument("--length", type=int, default=1024, help="tokens of a sequence (%(default)s)")
    options.add_argument("--batch", type=int, default=2, help="sequences of a step (%(default)s)")
    options.add_argument("--steps", type=int, default=2, help="timed at once (%(default)s)")
    options.add_argument("--sizes", nargs="*", default=["124m", "355m", "774m"], help="whose memory is planned")
    arguments = options.parse_args()
    if arguments.quick:
        arguments.size, arguments.sizes, arguments.length, arguments.steps = "nano", ["nano"], 16, 1
        arguments.repetitions = 1
    common.prepare_jax(arguments.devices if arguments.parts == ["lanes"] else 1)
    results = [PARTS[part](arguments) for part in arguments.parts]
    common.finish(
        arguments, "\n\n".join(table for table, _ in results), {k: v for _, data in results for k, v in data.items()}
    )


def training(arguments) -> tuple[str, dict]:
    """Tokens per second of training steps."""
    from jaxaudit.models import gpt2

    size, tokens = gpt2.SIZES[arguments.size], arguments.batch * arguments.length
    shape = (arguments.batch, arguments.length, arguments.steps, size.width, size.depth, size.heads, VOCABULARY)
    candidates: dict[str, Callable[[], float | None]] = {
        "jaxaudit, training step": trainer(arguments, False),
        "jaxaudit, audited step": trainer(arguments, True),
        "PyTorch and transformers": functools.partial(
            common.time_script, arguments.python, "../language_models/torch_gpt2.py", (common.core_count(), *shape)
        ),
    }
    timings = common.interleave(candidates, arguments.repetitions)
    work = tokens * arguments.steps
    below = timings["PyTorch and transformers"]
    rows = [
        (name, timing.rate(work), str(common.paired_ratio(below, timing)), sizes_of(candidates[name]))
        for name, timing in timings.items()
    ]
    header = (f"{arguments.size}, {arguments.batch} x {arguments.length}", "tokens/s", "x of PyTorch", "step memory")
    return common.table(header, rows), {"training": timings}


class trainer:
    """A compiled function that trains some steps from the latest state."""

    def __init__(self, arguments, audited: bool):
        from jaxaudit import Taps
        from jaxaudit.learners.language_model import LanguageModelState

        self.learner, algorithm = learner_of(arguments.size, arguments.batch, arguments.length, audited)

        def step(index, state, data):
            taps, key = Taps(index, 100, data=data), jax.random.fold_in(jax.random.key(0), index)
            if audited:
                state, telemetry = self.learner.step(state, key, taps)
                return state, telemetry["loss"]
            gradient, telemetry = algorithm.gradient(state.params, algorithm.read(key, taps), taps)
            params, optimizer, _ = algorithm.optimizer.update(state.params, state.optimizer, gradient, taps)
            return LanguageModelState(params, optimizer), telemetry["loss"]

        def train(state, data, first):
            def body(index, carry):
                return step(index, carry[0], data)

            return jax.lax.fori_loop(first, first + arguments.steps, body, (state, jnp.float32(0)))

        self.state = jax.jit(self.learner.begin)(jax.random.key(0), self.learner.data)
        self.compiled = jax.jit(train, donate_argnums=0).lower(self.state, self.learner.data, jnp.int32(1)).compile()
        self()

    def __call__(self) -> None:
        """Trains some steps in one program, as an audit does."""
        self.state, loss = self.compiled(self.state, self.learner.data, jnp.int32(1))
        jax.block_until_ready(loss)


def sizes_of(candidate) -> str:
    """Returns the memory of a compiled step as text, or "" for other candidates."""
    if not isinstance(candidate, trainer):
        return ""
    sizes = candidate.compiled.memory_analysis()
    needed = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return f"{(needed + sizes.temp_size_in_bytes) / 2**30:.2f} GiB"


def learner_of(size: str, batch: int, length: int, audited: bool, vocabulary: int = VOCABULARY, **settings):
    """Returns a learner on random tokens, and its algorithm."""
    from jaxaudit.core.learner import Learner
    from jaxaudit.learners.language_model import Data, LanguageModel, LanguageModelSettings

    defaults = {"accumulation": 2 if audited and batch > 1 else 1, "telemetry": "full" if audited else "basic"}
    model_settings = LanguageModelSettings(
        size=size, context=length, batch_size=batch, held_out=1, validation=1, evaluations=0, **defaults | settings
    )
    tokens = np.random.default_rng(0).integers(0, vocabulary, 50 * length).astype(np.uint16)
    held_out = tokens[None, : length + 1]
    algorithm = LanguageModel(vocabulary, model_settings)
    data = Data(tokens, held_out, held_out, None)
    return Learner(algorithm.init, algorithm.step, data=data, init_reads_data=True), algorithm


def losses(arguments) -> tuple[str, dict]:
    """Times gradients of the cross entropy over a vocabulary, blockwise and plain."""
    from jaxaudit.kernels.output_layer import cross_entropy

    batch, width = (8, 768) if not arguments.quick else (1, 16)
    count = batch * arguments.length
    random = np.random.default_rng(0)
    hidden = jnp.asarray(random.normal(size=(count, width)), jnp.float32)
    embedding = jnp.asarray(0.02 * random.normal(size=(VOCABULARY, width)), jnp.float32)
    labels = jnp.asarray(random.integers(0, VOCABULARY, count), jnp.int32)
    weights = jnp.full(count, 1.0 / count)

    def plain(hidden, embedding):
        logits = jax.nn.log_softmax(hidden @ embedding.T)
        return -jnp.take_along_axis(logits, labels[:, None], axis=1).mean()

    def blockwise(hidden, embedding):
        return cross_entropy(hidden, embedding, labels, weights).loss

    compiled = {
        name: jax.jit(jax.grad(loss, argnums=(0, 1))).lower(hidden, embedding).compile()
        for name, loss in (("blockwise", blockwise), ("plain", plain))
    }
    calls = {name: lambda f=f: jax.block_until_ready(f(hidden, embedding)) and None for name, f in compiled.items()}
    common.interleave(calls, 1)
    timings = common.interleave(calls, arguments.repetitions)
    rows = [
        (
            name,
            str(timing),
            str(common.paired_ratio(timing, timings["plain"])),
            f"{compiled[name].memory_analysis().temp_size_in_bytes / 2**20:,.0f} MiB",
        )
        for name, timing in timings.items()
    ]
    header = (f"cross entropy, {batch} x {arguments.length} x {VOCABULARY}", "seconds", "x of plain", "temporaries")
    return common.table(header, rows), {"losses": timings}


def memory(arguments) -> tuple[str, dict]:
    """Compares the planned memory of a rematerialised lane with the peak of the process."""
    rows, data = [], {}
    for size in arguments.sizes:
        command = [sys.executable, str(Path(__file__).with_name("gpt2_memory.py")), size, str(arguments.length)]
        result = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
        data[size] = result
        rows.append(
            (
                size,
                f"{result['planned'] / 2**30:.2f} GiB",
                f"{result['peak'] / 2**30:.2f} GiB",
                f"{result['peak'] / result['planned'] - 1:+.1%}",
                f"{result['compile_seconds']:.1f}",
                f"{result['step_seconds']:.1f}",
            )
        )
    header = ("one lane, rematerialised", "planned", "peak while it ran", "difference", "compile, s", "step, s")
    return common.table(header, rows), {"memory": data}


def lanes(arguments) -> tuple[str, dict]:
    """Times lanes of a model of 11M parameters for every execution, and reports the choice of "auto"."""
    import jaxaudit as ja
    from jaxaudit.core.batches import layout
    from jaxaudit.core.grid import plan
    from jaxaudit.execution import autotune as choice
    from jaxaudit.execution.engine import Engine

    size, length, steps = ("nano", 16, 2) if arguments.quick else ("mini", 128, 5)
    learner, _ = learner_of(size, 8, length, True, vocabulary=2048)
    grid = plan(learner, [ja.lr_spike(10.0, onset=1)], seeds=2, steps=100, execution="auto")
    _, measured = choice.autotune(grid, steps)

    def trainer_of(grid):
        engine, batch = Engine(grid, steps), layout(grid)[1]
        states = engine.initial(batch)

        def once() -> None:
            nonlocal states
            states, _ = engine.advance(batch, states, 0, steps)

        once()
        return once

    candidates = {name: trainer_of(candidate) for name, candidate in choice.candidates(grid).items()}
    timings = common.interleave(candidates, arguments.repetitions)
    count = len(layout(grid)[1].seeds)
    best = min(timings.values(), key=lambda timing: timing.median)
    chosen = max(measured, key=measured.__getitem__)
    work = count * steps * 8 * length
    rows = [
        (name + (" (taken)" if name == chosen else ""), timing.rate(work), str(common.paired_ratio(best, timing)))
        for name, timing in timings.items()
    ]
    header = (f"{count} lanes of {size}, 8 x {length}", "tokens/s", "x of the fastest")
    return common.table(header, rows), {"lanes": timings, "taken": chosen, "measured": measured}


PARTS = {"training": training, "losses": losses, "memory": memory, "lanes": lanes}


if __name__ == "__main__":
    main()
