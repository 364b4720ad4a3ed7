"""`audit(...)`: a whole grid in one call, trained by the engine and held in memory."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Literal

import jax

from jaxaudit.analysis import datasets, results
from jaxaudit.analysis.metrics import MetricSettings
from jaxaudit.core.channel_names import PERFORMANCE
from jaxaudit.core.grid import plan
from jaxaudit.core.learner import Learner
from jaxaudit.core.perturbation import Chain, Perturbation
from jaxaudit.core.program import Execution
from jaxaudit.execution import memory
from jaxaudit.execution.autotune import autotune
from jaxaudit.execution.driver import MemorySink, run_batch
from jaxaudit.monitoring.monitor import Monitor
from jaxaudit.monitoring.watch import MonitorWatch
from jaxaudit.runtime.tracing import MatmulPrecision


def audit(
    learner: Learner,
    perturbations: Sequence[Perturbation | Chain],
    *,
    seeds: int | Sequence[int] = 8,
    steps: int,
    execution: Execution = "vmap",
    devices: Sequence[jax.Device] | None = None,
    model_devices: int = 1,
    matmul_precision: MatmulPrecision = "float32",
    lanes: int | Literal["auto"] = "auto",
    settings: MetricSettings | None = None,
    monitor: Monitor | None = None,
    alpha: float = 0.05,
) -> results.Result:
    """Trains a learner on every seed, disturbs a copy of it for every condition, and measures.

    Args:
      learner: what is trained.
      perturbations: each with its magnitude or sweep of magnitudes, window and target.
      seeds: how many, or which.
      steps: of a run.
      execution: how a device runs its lanes: "vmap", "map" (one after another), a batch size, or "auto", what is
        fastest in a measurement.
      devices: lanes are spread evenly over these; all of JAX's by default.
      model_devices: how many of them share a lane, whose parameters are split among them; it divides their number. The
        learner says how (`Learner.partition`).
      matmul_precision: of float32 products on GPUs and TPUs: "float32", or "tf32" for the learner's networks (physics
        and the monitor stay in float32). What `jax.default_matmul_precision` or JAX_DEFAULT_MATMUL_PRECISION says wins.
      lanes: the most that are on the devices at a time; "auto": as many as their memory can hold.
      settings: windows of the metrics.
      monitor: follows every lane, and raises the alarms that interventions wait for.
      alpha: its false alarms per clean run, at most.

    Returns:
      telemetry and metrics, dims (seed, condition, step); condition 0 is the undisturbed control.

    Raises:
      ValueError: the learner lacks a perturbation's site, a window leaves the run, memory is too small, ...; one
        sentence.
    """
    chosen = settings or MetricSettings()
    grid = plan(
        learner,
        perturbations,
        seeds=seeds,
        steps=steps,
        execution=execution,
        devices=devices,
        model_devices=model_devices,
        matmul_precision=matmul_precision,
        tail=chosen.window,
        lanes=lanes,
        watch=None if monitor is None else partial(MonitorWatch.for_telemetry, monitor, alpha),
    )
    if grid.program.across_hosts:
        raise ValueError(
            "an audit in memory is one process's, on jax.local_devices(); several train a run in a folder: "
            "jaxaudit run --distributed"
        )
    grid, measured = autotune(grid, steps, resident=True)
    engine, batches, _ = memory.fit(grid, steps, resident=True)
    held = MemorySink(grid)
    for batch in batches:
        run_batch(engine, batch, held)
    arrays = held.arrays | datasets.derived_channels(held.arrays[PERFORMANCE], chosen, learner.cadence)
    data = datasets.telemetry_dataset(grid, arrays)
    data["baseline_performance"] = (("seed", "step"), held.trained)
    data.attrs["execution"] = grid.program.execution
    if measured:
        data.attrs["measured"] = measured
    data.attrs["noise_floor"] = results.noise_floor(data, held.trained, grid.forks[-1].onset)
    if gaps := results.undeclared_gap_warning(data):
        warnings.warn(gaps, stacklevel=2)
    return results.Result(data, chosen)
