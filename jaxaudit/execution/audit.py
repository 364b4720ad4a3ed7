"""`audit(...)` trains a whole grid in one call, and returns its telemetry and metrics from memory."""

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
from jaxaudit.execution.autotune import autotune_local
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
    """Trains a learner on every seed, disturbs a copy of it for every condition, and computes metrics.

    Args:
      learner: the learner to train.
      perturbations: the perturbations, each with its magnitude or sweep of magnitudes, window and target.
      seeds: the number of seeds, or the seeds.
      steps: the length of a run.
      execution: how a device runs its lanes: "vmap", "map" (one after another), a batch size, or "auto" for the fastest
        in a measurement.
      devices: the devices over which lanes are spread evenly; all of JAX's by default.
      model_devices: the number of devices that share a lane, among which its parameters are split
        (`Learner.partition`); it divides the number of devices.
      matmul_precision: the precision of float32 products on GPUs and TPUs: "float32", or "tf32" for the learner's
        networks (physics and the monitor stay in float32). `jax.default_matmul_precision` and the environment variable
        JAX_DEFAULT_MATMUL_PRECISION take precedence.
      lanes: the largest number of lanes on the devices at a time; "auto" for as many as their memory can hold.
      settings: the windows of the metrics.
      monitor: the monitor that follows every lane and raises the alarms that interventions wait for.
      alpha: the largest rate of false alarms per clean run.

    Returns:
      Telemetry and metrics with dims (seed, condition, step); condition 0 is the undisturbed control.

    Raises:
      ValueError: the learner lacks a perturbation's site, a window is not within the run, or memory is too small.
    """
    metric_settings = settings or MetricSettings()
    planned = plan(
        learner,
        perturbations,
        seeds=seeds,
        steps=steps,
        execution=execution,
        devices=devices,
        model_devices=model_devices,
        matmul_precision=matmul_precision,
        tail=metric_settings.window,
        lanes=lanes,
        watch=None if monitor is None else partial(MonitorWatch.for_telemetry, monitor, alpha),
    )
    grid, speeds = autotune_local(planned, steps, resident=True)
    engine, batches, _ = memory.fit(grid, steps, resident=True)
    sink = MemorySink(grid)
    for batch in batches:
        run_batch(engine, batch, sink)
    arrays = sink.arrays | datasets.derived_channels(sink.arrays[PERFORMANCE], metric_settings, learner.cadence)
    data = datasets.telemetry_dataset(grid, arrays)
    data["baseline_performance"] = (("seed", "step"), sink.trained)
    data.attrs["execution"] = grid.program.execution
    if speeds:
        data.attrs["measured"] = speeds
    data.attrs["noise_floor"] = results.noise_floor(data, sink.trained, grid.forks[-1].onset)
    if gaps := results.undeclared_gap_warning(data):
        warnings.warn(gaps, stacklevel=2)
    return results.Result(data, metric_settings)
