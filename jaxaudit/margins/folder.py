"""Margins of a finished run, searched from the onsets it stored; killed at any instant, the search goes on."""

from __future__ import annotations

import csv
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from jaxaudit.errors import Interrupted, UserError, placed
from jaxaudit.execution.driver import chunk_size
from jaxaudit.execution.engine import Engine
from jaxaudit.grid import Grid
from jaxaudit.interrupts import interruptible, stoppable
from jaxaudit.learner import PERFORMANCE
from jaxaudit.margins.pool import Stage, before, collapse_times, fit, pending, rounds
from jaxaudit.margins.rounds import CONTROL, Plan, Probe, next_round
from jaxaudit.margins.search import Settings, lay_out
from jaxaudit.margins.table import Margins
from jaxaudit.metrics import MetricSettings
from jaxaudit.runner import checkpoint
from jaxaudit.runner.attempts import onset_paths
from jaxaudit.runner.checkpoint import UNFINISHED
from jaxaudit.runner.opening import check_monitor, open_finished
from jaxaudit.runner.store import Folder, software
from jaxaudit.runner.trained import at_onset
from jaxaudit.specification.document import Spec, parse
from jaxaudit.specification.entries import Asked

SEARCH, OUTCOMES, TABLE = "search.json", "outcomes.csv", "margins.csv"


def margin_of(folder: Path, spec: Spec | None, out: Path | None, chosen: Settings) -> Margins:
    """Searches the margins of a finished run's perturbations, or of a spec's, and writes them to `out`.

    What the run itself trained at the spec's perturbations is used, not trained again; a search that stopped, or is
    asked for with a finer tolerance, goes on from the outcomes in `out`.

    Args:
      folder: of a finished run.
      spec: as for `fork`: the run's, with other perturbations, onsets or metrics; None: the run's.
      out: `folder`/margins by default; gets `margins.csv`, `outcomes.csv` and `search.json`.
      chosen: how.

    Raises:
      UserError: the run is not finished, the spec is not of this run, an onset is not stored, `out` is taken, or
        there is nothing to search; nothing is created or changed then.
      Interrupted: Ctrl-C.
    """
    run = _open(folder, spec)
    lines = run.lay_out(chosen)
    place = _Place(Folder(out or folder / "margins"), run, chosen)
    place.read(lines)  # or it is refused before anything is made

    def result() -> Margins:
        return Margins(lines, tuple(probes), run.grid.seeds, chosen.criterion, run.grid.steps)

    with place.held():
        probes = place.read(lines) or run.known(lines)
        _search(run, lines, probes, lambda: place.write(result()))
        place.write(result())
        place.store.write(place.store.path / TABLE, result().table.to_csv(index=False))
    return result()


def _search(run: _Run, lines: Plan, probes: list[Probe], keep: Callable[[], None]) -> None:
    onsets = [fork.onset for fork in run.grid.forks]
    if not any(pending(probes, onset) or next_round(lines, onset, probes) for onset in onsets):
        return  # and so nothing is compiled

    def advance(*arguments: Any) -> Any:
        if stopping():
            raise KeyboardInterrupt
        return interruptible(partial(engine.advance, *arguments))

    told, begun = 0, time.monotonic()
    with stoppable() as stopping:
        try:
            rows = chunk_size(run.grid.steps, run.spec.run.chunk)
            engine, _, lines = interruptible(partial(fit, run.grid, lines, rows, baseline=False))
            for batch in rounds(engine, lines, partial(run.stage, engine), probes, advance):
                keep()
                if batch[0].round > told:
                    told = batch[0].round
                    _tell(lines, batch, time.monotonic() - begun)
        except KeyboardInterrupt:
            raise Interrupted("stopped; the same command goes on from the lanes that are trained") from None


def _tell(lines: Plan, batch: Sequence[Probe], seconds: float) -> None:
    names = dict.fromkeys("control" if p.ray == CONTROL else lines.rays[p.ray].name for p in batch)
    print(f"{seconds:.0f} s: round {batch[0].round}, {len(batch)} lanes ({', '.join(names)})", file=sys.stderr)


@dataclass(frozen=True)
class _Run:
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
        return self.spec.metrics

    def lay_out(self, chosen: Settings) -> Plan:
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

    def known(self, lines: Plan) -> list[Probe]:
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
            times = collapse_times(series, condition.onset, self.windows, self.grid.program.learner.performance_every)
            probes += [
                Probe(0, n, condition.onset, seed, u, "run", float(time))
                for n, u in places
                for seed, time in enumerate(times)
            ]
        return probes


def _open(folder: Path, spec: Spec | None) -> _Run:
    store, old, ran = open_finished(folder)
    if spec is None:
        return _Run(store, replace(old, source=str(store.spec)), replace(ran, tail=0), ran)
    differing = [t for t in ("task", "learner") if getattr(old, t) != getattr(spec, t)]
    differing += [k for k in ("seeds", "steps", "telemetry") if getattr(old.audit, k) != getattr(spec.audit, k)]
    if differing:
        raise UserError(f"the spec must keep the run's {' and '.join(differing)}")
    spec = spec.expanded()
    grid = spec.build()
    check_monitor(folder, ran, grid)
    stored = [fork.onset for fork in ran.forks]
    for onset in (fork.onset for fork in grid.forks):
        if onset not in stored:
            has = ", ".join(map(str, stored))
            raise UserError(f"no stored onset at step {onset}; the run in {folder} has {has}")
    program = replace(grid.program, devices=ran.program.devices, model_devices=ran.program.model_devices)
    return _Run(store, spec, replace(grid, tail=0, program=program), ran)


class _Place:
    """The folder a search is kept in."""

    def __init__(self, store: Folder, run: _Run, chosen: Settings):
        self.store = store
        self._run = run
        # Not the run's place, which may change: a spec has but one run, wherever it lies.
        self._asked = {
            "criterion": chosen.criterion,
            "reach": chosen.reach,
            "spec": run.spec.to_toml().splitlines(),
        }
        self._how = {"run": str(run.store.path), "tolerance": chosen.tolerance, "environment": software(run.grid)}

    def read(self, lines: Plan) -> list[Probe]:
        """What an earlier search of the same kind left; raises UserError if something else is there."""
        path = self.store.path
        if path.exists() and not path.is_dir():
            raise UserError(f"{path} exists and is not a folder")
        names = [p.name for p in path.iterdir() if not p.name.startswith(UNFINISHED)] if path.exists() else []
        if not names:
            return []
        if SEARCH not in names:
            raise UserError(f"the folder {path} exists and is not empty; give another with -o")
        asked = self._read_search()
        differing = [key for key, value in self._asked.items() if key != "spec" and asked.get(key) != value]
        differing += ["spec"] if _spec(asked) != self._run.spec else []
        if differing:
            raise UserError(
                f"{path} holds a search with another {' and '.join(differing)}; give another folder with -o"
            )
        return _read_probes(path / OUTCOMES, lines, self._run.grid.seeds) if OUTCOMES in names else []

    def _read_search(self) -> dict[str, Any]:
        try:
            found = json.loads((self.store.path / SEARCH).read_text(encoding="utf-8"))
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise UserError(f"{self.store.path / SEARCH} is damaged: it is no longer a JSON object")
        return found

    @contextmanager
    def held(self) -> Iterator[None]:
        """Makes the folder and says in it what is searched; while inside, no other process searches here."""
        try:
            self.store.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make the folder {self.store.path}: {error.strerror or error}") from None
        with self.store.held():
            self.store.sweep()
            self.store.write(self.store.path / SEARCH, json.dumps(self._asked | self._how, indent=2) + "\n")
            yield

    def write(self, margins: Margins) -> None:
        """Keeps all outcomes so far."""
        self.store.write(self.store.path / OUTCOMES, margins.outcomes.to_csv(index=False))


def _spec(asked: dict[str, Any]) -> Spec | None:
    try:
        return parse("\n".join(asked["spec"]))
    except (KeyError, TypeError, UserError):
        return None


def _read_probes(path: Path, lines: Plan, seeds: Sequence[int]) -> list[Probe]:
    names = {ray.name: number for number, ray in enumerate(lines.rays)} | {"control": CONTROL}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return [
                Probe(
                    int(row["round"]),
                    names[row["perturbation"]],
                    int(row["onset"]),
                    seeds.index(int(row["seed"])),
                    float(row["u"]),
                    row["purpose"],
                    float(row["collapse_time"] or "nan") if int(row["trained"]) else None,
                )
                for row in csv.DictReader(file)
            ]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged, so the search cannot go on ({error!r}); remove its folder") from None
