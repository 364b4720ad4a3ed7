"""`margin(...)`: how far from collapse a training process is, for every perturbation, by bisection over magnitudes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax

from jaxaudit.analysis.metrics import MetricSettings
from jaxaudit.core.grid import Grid
from jaxaudit.core.learner import Learner
from jaxaudit.core.perturbation import Chain, Perturbation
from jaxaudit.core.program import Execution
from jaxaudit.execution.autotune import tuned_grid
from jaxaudit.execution.driver import chunk_size
from jaxaudit.runs.margins.directions import directions
from jaxaudit.runs.margins.pool import baseline, fit, in_turn, rounds
from jaxaudit.runs.margins.rounds import Probe, SearchConfig
from jaxaudit.runs.margins.table import Margins
from jaxaudit.runtime.precision import MatmulPrecision

Criterion = Literal["divergence", "collapse"]
CRITERIA: tuple[Criterion, ...] = ("divergence", "collapse")

LANES_PER_CPU = 64
LANES_PER_ACCELERATOR = 256


@dataclass(frozen=True)
class MarginSettings:
    """How margins are searched.

    Attributes:
      tolerance: relative, to which the margin is found; the interval's ends, too, if they are near.
      reach: how many times beyond the magnitudes given, in either direction, is looked.
      criterion: what counts: "divergence", T_c before half of the run (P_div, Table S5), or "collapse", any T_c.
      level: coverage of the intervals.
      lanes: the most side by side; None: one for every seed and perturbation, several on an accelerator, as far as
        that makes a device faster. Less where memory holds less.

    Raises:
      ValueError: one of them is out of range.
    """

    tolerance: float = 0.02
    reach: float = 1000.0
    criterion: Criterion = "divergence"
    level: float = 0.95
    lanes: int | None = None

    def __post_init__(self) -> None:
        if not 1e-5 <= self.tolerance <= 1:
            raise ValueError(f"tolerance must be from 0.00001 to 1, not {self.tolerance!r}")
        if not 1 <= self.reach <= 1e12:
            raise ValueError(f"reach must be from 1 to 1e12, not {self.reach!r}")
        if self.criterion not in CRITERIA:
            raise ValueError(f"criterion must be {' or '.join(CRITERIA)}, not {self.criterion!r}")
        if not 0 < self.level < 1:
            raise ValueError(f"level must lie between 0 and 1, not {self.level!r}")
        if self.lanes is not None and (isinstance(self.lanes, bool) or self.lanes < 1):
            raise ValueError(f"lanes must be at least 1, not {self.lanes!r}")


def margin(
    learner: Learner,
    perturbations: Sequence[Perturbation | Chain],
    *,
    seeds: int | Sequence[int] = 8,
    steps: int,
    settings: MetricSettings | None = None,
    execution: Execution = "vmap",
    devices: Sequence[jax.Device] | None = None,
    model_devices: int = 1,
    matmul_precision: MatmulPrecision = "float32",
    **search: Any,
) -> Margins:
    """Searches the magnitude of each perturbation at which half of the seeds collapse.

    The threshold of every seed is bisected, all in the lanes of one compiled program with one baseline. Their median is
    the margin. Order statistics bound it, whatever the distribution of thresholds. `directions` says how magnitudes are
    ordered.

    Args:
      learner: what is trained.
      perturbations: what is searched; the search begins at their magnitudes.
      seeds: the number of seeds, or the seeds.
      steps: the length of a run.
      settings: windows of the metrics.
      execution: how a device runs its lanes, as in `audit`.
      devices: lanes are spread over these; all of JAX's by default.
      model_devices: the number of devices that share a lane, as in `audit`.
      matmul_precision: of float32 products on GPUs and TPUs, as in `audit`.
      **search: tolerance, reach, criterion, level, lanes; see `MarginSettings`.

    Returns:
      `Margins`: `table` has one row for every perturbation, and `outcomes` one for every lane that was trained.

    Raises:
      ValueError: as `audit`; also for a perturbation whose magnitudes are all neutral or infinite, for no perturbation,
        or for an onset before step 2, where J_pre is undefined.
    """
    chosen, windows = MarginSettings(**search), settings or MetricSettings()
    rows = chunk_size(steps)
    grid, _ = tuned_grid(
        learner, perturbations, seeds, steps, execution, devices, model_devices, matmul_precision, rows=rows, tail=0
    )
    engine, batches, lines = fit(grid, lay_out(grid, perturbations, chosen), rows, baseline=True)
    stages = baseline(engine, batches, windows)
    probes: list[Probe] = []
    for _ in rounds(grid, lines, probes, in_turn(engine, lines, stages.__getitem__)):
        pass
    return Margins(lines, tuple(probes), grid.seeds, chosen.criterion, steps)


def lay_out(grid: Grid, perturbations: Sequence[Perturbation | Chain], chosen: MarginSettings) -> SearchConfig:
    """How the margins of a grid's perturbations are searched. Raises ValueError as `margin`."""
    early = [fork.onset for fork in grid.forks if fork.onset < 2]
    if early:
        raise ValueError(f"onset {early[0]} leaves no steps to measure J_pre on, which takes 2; take a later one")
    found = directions(perturbations, grid.steps, len(grid.seeds), chosen.reach)
    if not found:
        raise ValueError("nothing is disturbed, so there is no margin to search")
    limits = {fork.onset: limit(chosen.criterion, fork.onset, grid.steps) for fork in grid.forks}
    lanes = chosen.lanes or _lanes(grid, len(found) * len(grid.seeds))
    return SearchConfig(tuple(found), limits, chosen.tolerance, chosen.level, lanes)


def limit(criterion: Criterion, onset: int, steps: int) -> float:
    """The step before which a collapse counts: half of the run, or inf.

    An onset in the run's second half leaves no step that P_div counts; any collapse counts then.
    """
    return steps / 2 if criterion == "divergence" and onset < steps / 2 else math.inf


def _lanes(grid: Grid, thresholds: int) -> int:
    """Lanes side by side: one for every threshold, or several where more cost little; no more than speed things up."""
    groups = grid.program.groups
    if grid.program.devices[0].platform == "cpu":
        return min(thresholds, groups * LANES_PER_CPU)
    return min(4 * thresholds, groups * LANES_PER_ACCELERATOR)
