"""A finished run whose margins are searched."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from jaxaudit.analysis.metrics import MetricSettings
from jaxaudit.core.channel_names import PERFORMANCE
from jaxaudit.core.grid import Grid
from jaxaudit.execution.engine import Engine
from jaxaudit.runs import checkpoint
from jaxaudit.runs.attempts import onset_paths
from jaxaudit.runs.disk_sink import at_onset
from jaxaudit.runs.margins.pool import Stage, before, collapse_times
from jaxaudit.runs.margins.rounds import CONTROL, Probe, SearchConfig
from jaxaudit.runs.margins.search import MarginSettings, lay_out
from jaxaudit.runs.run_folder import Folder
from jaxaudit.runs.run_opening import open_onsets
from jaxaudit.runtime.errors import UserError, placed
from jaxaudit.spec.document import Spec
from jaxaudit.spec.entries import Asked


@dataclass(frozen=True)
class Searched:
    """A finished run, and what is to be searched in it.

    Attributes:
      store: its folder.
      spec, grid: what is searched.
      ran: the grid of the run itself.
    """

    store: Folder
    spec: Spec
    grid: Grid
    ran: Grid

    @property
    def windows(self) -> MetricSettings:
        """Of the metrics."""
        return self.spec.metrics

    def lay_out(self, chosen: MarginSettings) -> SearchConfig:
        """How it is searched. Raises UserError: there is nothing to search, or an onset's states are damaged."""
        # Dimensions have been expanded.
        perturbations = [e.perturbation for e in self.spec.perturbations if isinstance(e, Asked)]
        with placed(self.spec.source):
            lines = lay_out(self.grid, perturbations, chosen)
        for fork in self.grid.forks:
            try:
                for path in onset_paths(self.store, fork.onset, range(len(self.grid.seeds))):
                    checkpoint.verify(path)
            except checkpoint.Damaged as damage:
                raise UserError(f"{damage}, so nothing can be searched from step {fork.onset}") from None
        return lines

    def stage(self, engine: Engine, fork: int) -> Stage:
        """Where the lanes of a fork group begin."""
        onset = self.grid.forks[fork].onset
        known = self.store.read_channel("baseline_performance", before(onset, self.grid, self.windows))
        return Stage(fork, onset, at_onset(self.store, engine, onset), known, self.windows)

    def known(self, lines: SearchConfig) -> list[Probe]:
        """What the run trained already: its controls, and the conditions that lie on a ray."""
        telemetry = self.store.read_telemetry([PERFORMANCE])
        performance = telemetry[PERFORMANCE].transpose("condition", "seed", "step").values
        onsets = {ray.onset for ray in lines.rays}
        probes = []
        for condition, series in zip(self.ran.conditions, performance, strict=True):
            if condition.onset not in onsets:
                continue
            where = [(n, ray.position(condition, self.grid.steps)) for n, ray in enumerate(lines.rays)]
            places = [(n, u) for n, u in where if u is not None] if condition.parts else [(CONTROL, -math.inf)]
            if not places:
                continue
            times = collapse_times(series, condition.onset, self.windows, self.grid.program.learner.cadence)
            probes += [
                Probe(0, n, condition.onset, seed, u, "run", float(time))
                for n, u in places
                for seed, time in enumerate(times)
            ]
        return probes


def open_searched(folder: Path, spec: Spec | None) -> Searched:
    """A finished run, to be searched at a spec's perturbations; None: its own.

    Raises UserError: it is not finished, or the spec is not of this run.
    """
    store, spec, grid, ran = open_onsets(folder, spec)
    program = replace(grid.program, devices=ran.program.devices, model_devices=ran.program.model_devices)
    return Searched(store, spec, replace(grid, program=program), ran)
