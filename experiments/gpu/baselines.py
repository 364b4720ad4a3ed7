"""Parts of the measurement: other packages on the same machine, by the scripts of `experiments/benchmarks`."""

from __future__ import annotations

import os
import sys

from part import Part, compile_quickly

CPU_ONLY = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

HOP_LENGTHS = "6,8,9,10,11,11,12,13,14,20"
"""Lengths after the prompt of rows of `hop` after a warm start of 150 updates, from which TRL's lengths are sampled."""


def torch_gpt2(part: Part) -> None:
    """PyTorch's GPT-2 with its own attention (sdpa)."""
    import common

    sizes = (2, 16, 2, 96, 4, 4, 257) if part.tiny else (8, 1024, 10, 768, 12, 12, 50257)
    precisions = ("bfloat16", "float32") if part.tiny else ("bfloat16", "float32", "tf32", "bfloat16-compiled")
    script = "../language_models/torch_gpt2.py"
    with common.WarmProcesses(sys.executable, script, (_threads(), *sizes, *precisions), errors=None) as torch:
        torch.wait_until_ready()
        part.wait_for_turn()
        for index, precision in enumerate(precisions):
            if index:
                torch.wait_until_ready()
            seconds = torch.seconds()
            rate = sizes[0] * sizes[1] * sizes[2] / seconds
            part.record(f"PyTorch GPT-2, sdpa, {precision}", rate=rate, unit="tokens/s", seconds=[seconds])


def trl(part: Part) -> None:
    """TRL's GRPOTrainer at the shapes of GRPO on hop."""
    import common

    iterations = 1 if part.tiny else 20
    arguments = (_threads(), 64, 2, 4, iterations, HOP_LENGTHS)
    with common.WarmProcesses(sys.executable, "trl_grpo.py", arguments, errors=None) as trainer:
        trainer.wait_until_ready()
        part.wait_for_turn()
        seconds = trainer.seconds()
    part.record("TRL GRPO, 0.1M", rate=iterations / seconds, unit="iterations/s", seconds=[seconds])


def sb3(part: Part) -> None:
    """PPO of Stable-Baselines3 on the cores, eight environments per process: one process per core, and one alone."""
    import common

    part.wait_for_turn()
    cores = common.core_count()
    for processes in (1,) if part.tiny else (cores, 1):
        steps = 2048 if part.tiny else 8192
        with common.WarmProcesses(sys.executable, "sb3.py", ("ppo", 1, 8, steps), processes, CPU_ONLY, None) as agents:
            agents.wait_until_ready()
            seconds = agents.seconds()
        name = f"Stable-Baselines3 PPO on HalfCheetah, processes: {processes}"
        part.record(name, rate=processes * steps / seconds, unit="env steps/s", seconds=[seconds])


def cpu_ppo(part: Part) -> None:
    """jaxaudit's PPO with C MuJoCo on the machine's cores, the baseline of the device."""
    import common
    import speed

    _on_cores(part)
    learner = speed.ppo_learner(part.tiny, "c")
    lanes = common.Lanes(
        learner, 2 * common.core_count() if part.tiny else 4 * common.core_count(), 1 if part.tiny else 3
    )
    what = "PPO on HalfCheetah, C MuJoCo on the cores, Table S2"
    speed.measure_all(part, [lanes], learner.samples_per_step, what, "env steps/s", 3)


def cpu_grpo(part: Part) -> None:
    """jaxaudit's GRPO on the machine's cores."""
    import common
    import speed

    _on_cores(part)
    width = 2 * common.core_count() if part.tiny else 8 * common.core_count()
    lanes = common.Lanes(speed.grpo_learner(part.tiny), width, 2 if part.tiny else 10, execution="map")
    speed.measure_all(part, [lanes], 1, "GRPO on hop, 0.1M, on the cores", "lane iterations/s", 3)


def _on_cores(part: Part) -> None:
    """Configures a CPU device for each core; the schedule starts these parts with JAX on CPUs only."""
    if part.tiny:
        compile_quickly()
    import common
    import jax

    jax.config.update("jax_num_cpu_devices", common.core_count())


def _threads() -> int:
    import torch

    return 4 if torch.cuda.is_available() else len(os.sched_getaffinity(0))
