"""`audit(...)`: a whole grid in one call, one compiled program."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from jaxaudit import results
from jaxaudit.grid import Execution, arrange, compiled, inputs, plan
from jaxaudit.learner import PERFORMANCE, Learner
from jaxaudit.metrics import MetricSettings
from jaxaudit.perturbations.core import Chain, Perturbation


def audit(
    learner: Learner,
    perturbations: Sequence[Perturbation | Chain],
    *,
    seeds: int | Sequence[int] = 8,
    steps: int,
    execution: Execution = "vmap",
    devices: Sequence[jax.Device] | None = None,
    settings: MetricSettings | None = None,
) -> results.Result:
    """Trains a learner on every seed, disturbs a copy of it for every condition, and measures.

    Args:
      learner: what is trained.
      perturbations: each with its magnitude or sweep of magnitudes, window and target.
      seeds: how many, or which.
      steps: of a run.
      execution: how a device runs its lanes: "vmap", "map" (one after another) or a batch size.
      devices: lanes are spread evenly over these; all of JAX's by default.
      settings: windows of the metrics.

    Returns:
      telemetry and metrics, dims (seed, condition, step); condition 0 is the undisturbed control.

    Raises:
      ValueError: the learner lacks a perturbation's site, a window leaves the run, ...; one sentence.
    """
    chosen = settings or MetricSettings()
    grid = plan(
        learner,
        perturbations,
        seeds=seeds,
        steps=steps,
        execution=execution,
        devices=devices,
        tail=chosen.window,
    )
    baseline, forks = compiled(grid.program)(inputs(grid))
    arrays = arrange(grid, baseline, forks)
    arrays |= results.derived(arrays[PERFORMANCE], chosen)
    data = results.telemetry(grid, arrays)
    trained = np.asarray(baseline[PERFORMANCE])[:, : len(grid.seeds)].T
    data["baseline_performance"] = (("seed", "step"), trained)
    data.attrs["noise_floor"] = results.noise_floor(data, trained, grid.forks[-1].onset)
    return results.Result(data, chosen)
