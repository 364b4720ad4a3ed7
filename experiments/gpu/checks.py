"""Parts of the measurement that check results on the device and need no turn. README.md uses these numbers.

1 the same bits twice; 2 and in another process; 3 a neutral lane equals its control; 4 a NaN stays in its lane; 5 the
same without deterministic operations; 6 parity of CPU and device; 7 parity with transformers; 8 physics compared with
Gymnasium; 9 a run's folder: replayed, killed, resumed; 10 a run started on a CPU and resumed on the device; 11 arrays
that attention stores.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from part import ROOT, Part, compile_quickly

FAMILIES = ("grpo", "ppo-mjx", "ppo-cartpole", "gpt2")


ROUNDING = ("mismatch_chi2",)
"""Channels that are zero up to rounding, which differs between devices."""


def learner_of(family: str, **settings):
    """Returns a small learner of a family; `settings` are for GRPO."""
    import language_model

    import jaxaudit as ja
    from jaxaudit.tasks import named

    small = {"num_envs": 2, "rollout_length": 16, "minibatch_size": 8, "epochs": 2, "evaluations": 0}
    if family == "ppo-cartpole":
        return ja.learners.ppo("CartPole-v1", **small)
    if family == "ppo-mjx":
        return ja.learners.ppo(named("InvertedPendulum-v5", "mjx"), **small)
    if family == "gpt2-cudnn":
        cudnn = {"precision": "bfloat16", "attention": "cudnn"}
        return language_model.learner_of("mini", 4, 128, True, vocabulary=257, **cudnn)[0]
    if family == "gpt2":
        return language_model.learner_of("nano", 4, 32, True, vocabulary=257)[0]
    return ja.learners.grpo("hop", prompts=2, group_size=4, performance_rows=2, **{"warm_start": 2} | settings)


def telemetry(learner, magnitudes: tuple[float, ...], **options) -> dict[str, np.ndarray]:
    """Returns channels `[seed, condition, step, ...]` of an audit of 4 seeds x (control, a spike of each magnitude)."""
    import jaxaudit as ja

    spike = ja.lr_spike(ja.sweep(*magnitudes), onset=2, duration="end")
    data = ja.audit(learner, [spike], seeds=4, steps=6, **options).telemetry
    return {n: data[n].values for n in data.data_vars if data[n].dims[:2] == ("seed", "condition")}


def bits(part: Part, *families: str) -> None:
    """Checks 1 to 5: bitwise equality within a grid, between two runs, and between grids."""
    if part.tiny:
        compile_quickly()
    for family in families or (("ppo-cartpole",) if part.tiny else FAMILIES):
        try:
            learner = learner_of(family)
            first = telemetry(learner, (1.0, 10.0, 1e38))
            second = telemetry(learner, (1.0, 10.0, 1e38))
            tame = telemetry(learner, (1.0, 10.0, 2.0))
            part.record(
                f"bits, {family}",
                twice_equal=equal(first, second),
                neutral_is_control=equal(conditions(first, slice(1, 2)), conditions(first, slice(0, 1))),
                nan_stays_in_its_lane=equal(conditions(first, slice(0, 3)), conditions(tame, slice(0, 3))),
                last_lane_is_nan=bool(np.isnan(first["performance"][:, 3, -1]).any()),
                digest=digest(first),
                channels=len(first),
            )
        except Exception as error:
            part.failed(f"bits, {family}", error)


def conditions(channels: Mapping[str, np.ndarray], chosen: slice) -> dict[str, np.ndarray]:
    """Selects conditions of an audit's channels."""
    return {name: values[:, chosen] for name, values in channels.items()}


def equal(left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> bool:
    """Returns whether all channels have the same bits, where all NaNs are equal."""
    return all(np.array_equal(as_bits(left[name]), as_bits(right[name])) for name in left)


def as_bits(values: np.ndarray) -> np.ndarray:
    """Returns float32 values as integers, with one representation of NaN."""
    values = np.ascontiguousarray(values, np.float32)
    return np.where(np.isnan(values), np.uint32(0x7FC00000), values.view(np.uint32))


def digest(channels: Mapping[str, np.ndarray]) -> str:
    """Returns a digest of the bits of all channels, to compare processes."""
    hash_ = hashlib.sha256()
    for name in sorted(channels):
        hash_.update(name.encode() + as_bits(channels[name]).tobytes())
    return hash_.hexdigest()[:16]


def parity(part: Part, *families: str) -> None:
    """Check 6: compares the first two steps on this machine's CPU and on the device, from the same seeds."""
    if part.tiny:
        compile_quickly()
    import jax

    # GRPO samples tokens, and Adam turns rounding errors of gradients near zero into full steps, hence a large epsilon.
    # Without a warm start no row has a reward, hence an entropy bonus, so that there is a gradient.
    smooth = {"warm_start": 0, "epsilon": 1.0, "learning_rate": 0.1, "entropy_coefficient": 0.1}
    for family in families or (("ppo-cartpole",) if part.tiny else FAMILIES):
        try:
            learner = learner_of(family, **smooth)
            cpu, device = (telemetry(learner, (10.0,), devices=jax.devices(p)[:1]) for p in ("cpu", None))
            errors = dict(sorted(relative_errors(cpu, device, steps=2).items(), key=lambda pair: -pair[1]))
            part.record(
                f"parity of CPU and device, {family}",
                precision=str(jax.config.jax_default_matmul_precision),
                largest_errors=dict(list(errors.items())[:4]),
                largest_error=next(iter(errors.values())),
                median_error=float(np.median(list(errors.values()))),
            )
        except Exception as error:
            part.failed(f"parity of CPU and device, {family}", error)


def relative_errors(left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray], steps: int) -> dict[str, float]:
    """Returns each channel's largest difference in the control's first steps, relative to its largest value there."""
    errors = {}
    for name in left.keys() - set(ROUNDING):
        a, b = (channels[name][:, 0, :steps].astype(np.float64) for channels in (left, right))
        if not np.array_equal(np.isfinite(a), np.isfinite(b)):
            errors[name] = float("inf")
            continue
        finite = np.isfinite(a)
        scale = max(np.abs(a[finite]).max(initial=0.0), 1e-6)
        errors[name] = float(np.abs(a[finite] - b[finite]).max(initial=0.0) / scale)
    return errors


def physics(part: Part, *tasks: str) -> None:
    """Check 8: compares MJX on the device with Gymnasium, by a step from each of its states."""
    sys.path.append(str(ROOT / "experiments" / "tasks"))
    import jax
    import parity as comparison

    steps, width = (20, 10) if part.tiny else (1000, 1000)
    for name in tasks[-1:] if part.tiny else tasks:
        try:
            env = comparison.build(name, "mjx")
            errors = comparison.errors(env, comparison.reference(env, steps), width)
            part.record(
                f"MJX beside Gymnasium, {name}",
                precision=str(jax.config.jax_default_matmul_precision),
                error_99th_percentile=float(np.quantile(errors.observation, 0.99)),
                largest_error=float(errors.observation.max()),
                other_terminations=int(errors.termination.sum()),
                rate=errors.rate,
                unit="env steps/s",
            )
        except Exception as error:
            part.failed(f"MJX beside Gymnasium, {name}", error)


def attention(part: Part) -> None:
    """Check 11: counts arrays of attention scores in GPT-2's lowered step in bfloat16; cuDNN's attention has none.

    XLA's attention computes scores in blocks of queries, the last of which has all T keys: [QUERIES, T]. A rehearsal
    checks only XLA's, since JAX traces cuDNN's attention only where cuDNN is installed.
    """
    import jax
    import language_model

    from jaxaudit.core.taps import Taps
    from jaxaudit.kernels.attention import QUERIES

    size, batch, length = ("nano", 1, 256) if part.tiny else ("124m", 1, 1024)
    for kind in ("xla",) if part.tiny else ("xla", "cudnn"):
        try:
            settings = {"precision": "bfloat16", "attention": kind}
            learner, _ = language_model.learner_of(size, batch, length, False, vocabulary=257, **settings)

            def step(state, key, data, learner=learner):
                return learner.step(state, key, Taps(0, 10, data=data))

            arguments = learner.state_shapes, jax.random.key(0), learner.shapes.tree
            text = jax.jit(step).lower(*arguments).as_text()
            part.record(f"arrays of scores, {kind}", count=text.count(f"x{QUERIES}x{length}x"), places=length)
        except Exception as error:
            part.failed(f"arrays of scores, {kind}", error)


def transformers(part: Part) -> None:
    """Check 7: compares logits, loss and gradients of GPT-2 with transformers on the same device, in float32."""
    import jax
    import jax.numpy as jnp
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from jaxaudit.kernels.output_layer import cross_entropy
    from jaxaudit.models import gpt2, gpt2_checkpoint

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name, vocabulary, context = ("nano", 257, 64) if part.tiny else ("124m", 50257, 1024)
    size = gpt2.SIZES[name]
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    reference = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocabulary,
            n_positions=context,
            n_embd=size.width,
            n_layer=size.depth,
            n_head=size.heads,
            **dropout,
        )
    )
    model = gpt2.GPT2(vocabulary, context, size)
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        params = jax.tree.map(jnp.asarray, gpt2_checkpoint.load(folder, model))
    reference = reference.to(device)
    tokens = np.random.default_rng(0).integers(0, vocabulary, (2, 65))
    tokens_on_device = torch.tensor(tokens, device=device)
    logits = reference(tokens_on_device[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, vocabulary), tokens_on_device[:, 1:].reshape(-1))
    loss.backward()

    def loss_and_logits(params):
        hidden, _ = gpt2.apply(model, params, jnp.asarray(tokens[:, :-1]))
        rows = hidden.reshape(-1, size.width)
        weights, labels = jnp.full(len(rows), 1 / len(rows)), jnp.asarray(tokens[:, 1:]).reshape(-1)
        return cross_entropy(rows, gpt2.embedding(params), labels, weights).loss, gpt2.logits(params, hidden)

    (our_loss, our_logits), gradient = jax.jit(jax.value_and_grad(loss_and_logits, has_aux=True))(params)
    gradients = gpt2_checkpoint.tensors(gradient)
    expected = {n.removeprefix("transformer."): p.grad for n, p in reference.named_parameters()}
    errors = {n: frobenius(gradients[n], expected[n.removeprefix("transformer.")]) for n in gradients}
    part.record(
        f"GPT-2 {name} beside transformers",
        precision=str(jax.config.jax_default_matmul_precision),
        loss=[float(our_loss), float(loss)],
        logits_error=frobenius(our_logits, logits),
        largest_gradient_error=max(errors.values()),
        gradient=max(errors, key=errors.__getitem__),
    )


def frobenius(values, reference) -> float:
    """Returns the norm of the difference relative to the norm of the reference."""
    a, b = np.asarray(values, np.float64), reference.detach().cpu().double().numpy()
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


CARTPOLE = """
[audit]
name = "folder"
seeds = 4
steps = {steps}
[task]
kind = "registered"
name = "CartPole-v1"
[learner]
kind = "ppo"
num_envs = 4
rollout_length = 32
evaluations = 0
[run]
chunk = 4
checkpoint_every = 1
[metrics]
window = 4
hold = 4
horizon = 4
[[perturbation]]
kind = "lr_spike"
magnitude = [10, 100]
onset = 0.4
duration = 2
"""

PENDULUM = """
[audit]
name = "physics"
seeds = 2
steps = 12
[task]
kind = "mujoco"
name = "InvertedPendulum-v5"
[learner]
kind = "ppo"
num_envs = 2
rollout_length = 32
evaluations = 0
[run]
chunk = 2
checkpoint_every = 1
[metrics]
window = 3
hold = 3
horizon = 3
[[perturbation]]
kind = "lr_spike"
magnitude = 10
onset = 0.5
duration = 2
"""


def folder(part: Part) -> None:
    """Checks 9 and 10 by the command line: run, replay, kill -9 and resume, and resuming a CPU's run on the device."""
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        (root / "cartpole.toml").write_text(CARTPOLE.format(steps=24 if part.tiny else 40))
        (root / "pendulum.toml").write_text(PENDULUM)
        finished, killed = root / "whole", root / "killed"
        _report(part, "run", _command("run", root / "cartpole.toml", "-o", finished))
        _report(part, "replay", _command("replay", finished))
        was_killed = _start_and_kill(root / "cartpole.toml", killed)
        _report(part, f"resume after kill -9 (killed: {was_killed})", _command("resume", killed))
        different = _different_channels(finished, killed)
        part.record("folder: the resumed run's telemetry", equal=not different, different=different)
        cpu_runs = {"cartpole.toml": root / "cpu", "pendulum.toml": root / "cpu-physics"}
        if part.tiny:  # on a CPU, compiling MJX takes a minute and shows nothing new
            del cpu_runs["pendulum.toml"]
        for spec, cpu_run in cpu_runs.items():
            # One CPU device, like the GPU, so that the layout of lanes is the same.
            was_killed = _start_and_kill(root / spec, cpu_run, JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="1")
            process = _command("resume", cpu_run)
            _report(part, f"resume of a CPU's run, {spec} (killed: {was_killed})", process)


def _command(*words: object, **variables: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "jaxaudit", *map(str, words)]
    options = {"cwd": tempfile.gettempdir(), "env": _environment(variables)}
    return subprocess.run(command, capture_output=True, text=True, timeout=200, **options)


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns environment variables for the command line, which chooses XLA's flags itself."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAXAUDIT_CACHE")}
    return {"XDG_CACHE_HOME": str(Path(tempfile.gettempdir()) / "jaxaudit-cache")} | inherited | dict(variables)


def _report(part: Part, step: str, process: subprocess.CompletedProcess) -> None:
    lines = [*process.stdout.splitlines(), *process.stderr.splitlines()]
    messages = [line[:250] for line in lines if line.startswith(("note", "bitwise", "largest", "jaxaudit:"))]
    if not messages or process.returncode:
        messages += [line[:250] for line in process.stderr.splitlines()[-3:]]
    part.record(f"folder: {step}", exit_code=process.returncode, said=messages)
    print(process.stdout, process.stderr, file=sys.stderr, flush=True)


def _start_and_kill(spec: Path, out: Path, **variables: str) -> bool:
    """Starts a run and kills it when its first rows are written; returns whether it was still running.

    Raises RuntimeError with the end of its output if it failed before.
    """
    command = [sys.executable, "-m", "jaxaudit", "run", str(spec), "-o", str(out)]
    options = {"cwd": tempfile.gettempdir(), "env": _environment(variables)}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, start_new_session=True, stdout=output, stderr=output, **options)
        deadline = time.monotonic() + 150
        while (
            time.monotonic() < deadline
            and process.poll() is None
            and not list(out.glob("batches/*/attempt-*/rows-*.npz"))
        ):
            time.sleep(0.01)
        running = process.poll() is None
        if running:
            os.killpg(process.pid, signal.SIGKILL)
        elif process.returncode:
            output.seek(0)
            raise RuntimeError(f"{spec.name} does not run: {output.read()[-300:]}")
        process.wait()
    return running


def _different_channels(left: Path, right: Path) -> list[str]:
    """Returns the channels of two runs that are not bitwise equal."""
    import xarray

    a, b = (xarray.open_zarr(run / "telemetry.zarr").load() for run in (left, right))
    same = {name: np.array_equal(a[name], b[name], equal_nan=a[name].dtype.kind == "f") for name in a.data_vars}
    return [name for name, is_same in same.items() if not is_same]
