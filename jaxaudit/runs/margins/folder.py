"""Margins of a finished run, searched from the onsets it stored; killed at any instant, the search goes on."""

from __future__ import annotations

import csv
import functools
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from jaxaudit.analysis.metrics import MetricSettings
from jaxaudit.core.channel_names import PERFORMANCE
from jaxaudit.core.grid import Grid
from jaxaudit.execution.driver import chunk_size
from jaxaudit.execution.engine import Engine
from jaxaudit.runs import checkpoint
from jaxaudit.runs.attempts import onset_paths
from jaxaudit.runs.disk_sink import onset_source
from jaxaudit.runs.margins.pool import Stage, Train, before, collapse_times, fit, in_turn, pending, rounds, train_pool
from jaxaudit.runs.margins.rounds import CONTROL, Probe, SearchConfig, next_round
from jaxaudit.runs.margins.search import MarginSettings, lay_out
from jaxaudit.runs.margins.table import Margins
from jaxaudit.runs.run_folder import Folder, software
from jaxaudit.runs.run_opening import open_onsets
from jaxaudit.runtime.backends import Backend, Workers, call_worker, open_backend, run_calls
from jaxaudit.runtime.errors import Interrupted, UserError, error_prefix, interruptible, stoppable
from jaxaudit.runtime.files import UNFINISHED, check_contents, entry_names, locked, read_object, write_text
from jaxaudit.runtime.machine import recorded_platform
from jaxaudit.spec.document import Spec, parse
from jaxaudit.spec.sections import Asked


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
        """The windows of the metrics, in steps."""
        return self.spec.metrics

    def lay_out(self, chosen: MarginSettings) -> SearchConfig:
        """How it is searched. Raises UserError: there is nothing to search, or an onset's states are damaged."""
        # Dimensions have been expanded.
        perturbations = [e.perturbation for e in self.spec.perturbations if isinstance(e, Asked)]
        with error_prefix(self.spec.source):
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
        return Stage(fork, onset, onset_source(self.store, engine, onset), known, self.windows)

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


@contextmanager
def trained_here(run: Searched, lines: SearchConfig) -> Iterator[tuple[SearchConfig, Train]]:
    """As many lanes side by side as memory holds, pool after pool; Ctrl-C raises KeyboardInterrupt."""

    def advance(*arguments: Any) -> Any:
        if stopping():
            raise KeyboardInterrupt
        return interruptible(partial(engine.advance, *arguments))

    with stoppable() as stopping:
        rows = chunk_size(run.grid.steps, run.spec.run.chunk)
        engine, _, lines = interruptible(partial(fit, run.grid, lines, rows, baseline=False))
        yield lines, in_turn(engine, lines, partial(run.stage, engine), advance)


@contextmanager
def trained_by_workers(
    run: Searched, lines: SearchConfig, chosen: MarginSettings, workers: Workers, jobs: Path
) -> Iterator[tuple[SearchConfig, Train]]:
    """Pools by an engine's workers, each with a share of the lanes and as many as its memory holds."""
    with open_backend(workers, jobs) as backend:
        asked = {
            "folder": str(run.store.path.absolute()),
            "spec": run.spec.to_toml(),
            "place": run.spec.source,
            "chosen": vars(replace(chosen, lanes=chosen.lanes or -(-lines.lanes // backend.workers))),
        }
        lanes = call_worker(backend, f"{__name__}:lanes_that_fit", asked | {"beside": backend.workers_per_machine})
        yield replace(lines, lanes=lanes), _handed_out(backend, asked | {"lanes": lanes})


def _handed_out(backend: Backend, asked: dict[str, Any]) -> Train:
    def train(fork: int, pools: Sequence[list[Probe]]) -> Iterator[list[Probe]]:
        call = f"{__name__}:collapse_times_of"
        calls = [
            (call, asked | {"fork": fork, "probes": [(p.ray, p.seed, p.u, p.purpose) for p in pool]}) for pool in pools
        ]
        for position, times in run_calls(backend, calls):
            for probe, collapse_time in zip(pools[position], times, strict=True):
                probe.time = collapse_time
            yield pools[position]

    return train


def lanes_that_fit(folder: str, spec: str, place: str, chosen: dict[str, Any], beside: int) -> int:
    """What a worker says: how many lanes its memory holds, of those wanted side by side."""
    run, lines = _opened(folder, spec, place, MarginSettings(**chosen))
    rows = chunk_size(run.grid.steps, run.spec.run.chunk)
    return fit(run.grid, lines, rows, baseline=False, beside=beside)[2].lanes


def collapse_times_of(
    folder: str,
    spec: str,
    place: str,
    chosen: dict[str, Any],
    lanes: int,
    fork: int,
    probes: Sequence[tuple[int, int, float, str]],
) -> list[float]:
    """What a worker does: trains a pool of `lanes` lanes, and gives the collapse times of those asked for.

    Args:
      folder, spec, place: the run, and what is searched.
      chosen: the fields of `MarginSettings`.
      lanes: side by side.
      fork: position of the fork group.
      probes: ray, seed, u and purpose of each.
    """
    run, lines = _opened(folder, spec, place, MarginSettings(**chosen))
    onset = run.grid.forks[fork].onset
    asked = [Probe(0, ray, onset, seed, u, purpose) for ray, seed, u, purpose in probes]
    engine = Engine(run.grid, chunk_size(run.grid.steps, run.spec.run.chunk))
    train_pool(engine, replace(lines, lanes=lanes), run.stage(engine, fork), asked, engine.advance)
    return [float("nan") if p.time is None else p.time for p in asked]


@functools.lru_cache(maxsize=1)
def _opened(folder: str, spec: str, place: str, chosen: MarginSettings) -> tuple[Searched, SearchConfig]:
    """A run to be searched, the same for all pools that a process trains: they share compiled programs."""
    run = open_searched(Path(folder), parse(spec, place))
    return run, run.lay_out(chosen)


SEARCH, OUTCOMES, TABLE = "search.json", "outcomes.csv", "margins.csv"

JOBS = ".jobs"
"""Where an engine keeps what it must of the pools it has trained."""


def margin_of(
    folder: Path, spec: Spec | None, out: Path | None, chosen: MarginSettings, workers: Workers | None = None
) -> Margins:
    """Searches the margins of a finished run's perturbations, or of a spec's, and writes them to `out`.

    What the run itself trained at the spec's perturbations is used, not trained again; a search that stopped, or is
    asked for with a finer tolerance, goes on from the outcomes in `out`.

    Args:
      folder: of a finished run.
      spec: as for `fork`: the run's, with other perturbations, onsets or metrics; None: the run's.
      out: `folder`/margins by default; gets `margins.csv`, `outcomes.csv` and `search.json`.
      chosen: how.
      workers: who trains, pools of lanes side by side; None: this process.

    Raises:
      UserError: the run is not finished, the spec is not of this run, an onset is not stored, `out` is taken, or
        there is nothing to search; nothing is created or changed then.
      Interrupted: Ctrl-C.
    """
    run = open_searched(folder, spec)
    lines = run.lay_out(chosen)
    place = _Place(Folder(out or folder / "margins"), run, chosen)
    place.read(lines)  # or it is refused before anything is made

    def result() -> Margins:
        return Margins(lines, tuple(probes), run.grid.seeds, chosen.criterion, run.grid.steps)

    with place.locked():
        probes = place.read(lines) or run.known(lines)
        jobs = place.store.path / JOBS
        _search(run, lines, chosen, probes, lambda: place.write(result()), workers, jobs)
        shutil.rmtree(jobs, ignore_errors=True)
        place.write(result())
        write_text(place.store.path / TABLE, result().table.to_csv(index=False))
    return result()


def _search(
    run: Searched,
    lines: SearchConfig,
    chosen: MarginSettings,
    probes: list[Probe],
    keep: Callable[[], None],
    workers: Workers | None,
    jobs: Path,
) -> None:
    onsets = [fork.onset for fork in run.grid.forks]
    if not any(pending(probes, onset) or next_round(lines, onset, probes) for onset in onsets):
        return  # and so nothing is compiled
    trainer = trained_here(run, lines) if workers is None else trained_by_workers(run, lines, chosen, workers, jobs)
    told, begun = 0, time.monotonic()
    try:
        with trainer as (lines, train):
            for batch in rounds(run.grid, lines, probes, train):
                keep()
                if batch[0].round > told:
                    told = batch[0].round
                    _tell(lines, batch, time.monotonic() - begun)
    except KeyboardInterrupt:
        raise Interrupted("stopped; the same command goes on from the lanes that are trained") from None


def _tell(lines: SearchConfig, batch: Sequence[Probe], seconds: float) -> None:
    names = dict.fromkeys("control" if p.ray == CONTROL else lines.rays[p.ray].name for p in batch)
    print(f"{seconds:.0f} s: round {batch[0].round}, {len(batch)} lanes ({', '.join(names)})", file=sys.stderr)


class _Place:
    """The folder a search is kept in."""

    def __init__(self, store: Folder, run: Searched, chosen: MarginSettings):
        self.store = store
        self._run = run
        # Not the run's place, which may change: a spec has but one run, wherever it lies.
        self._asked = {
            "criterion": chosen.criterion,
            "reach": chosen.reach,
            "spec": run.spec.to_toml().splitlines(),
        }
        self._how = {"run": str(run.store.path), "tolerance": chosen.tolerance, "environment": software(run.grid)}

    def read(self, lines: SearchConfig) -> list[Probe]:
        """What an earlier search of the same kind left; raises UserError if something else is there."""
        path = self.store.path
        if path.exists() and not path.is_dir():
            raise UserError(f"{path} exists and is not a folder")
        found = [name for name in entry_names(path) if not name.startswith(UNFINISHED)] if path.exists() else []
        if not found:
            return []
        check_contents(path)
        if SEARCH not in found:
            raise UserError(f"the folder {path} exists and is not empty; give another with -o")
        asked = self._read_search()
        differing = [key for key, value in self._asked.items() if key != "spec" and asked.get(key) != value]
        differing += ["spec"] if _spec(asked) != self._run.spec else []
        if differing:
            raise UserError(
                f"{path} holds a search with another {' and '.join(differing)}; give another folder with -o"
            )
        return _read_probes(path / OUTCOMES, lines, self._run.grid.seeds) if OUTCOMES in found else []

    def _read_search(self) -> dict[str, Any]:
        return read_object(self.store.path / SEARCH)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Makes the folder and says in it what is searched; while inside, no other process searches here."""
        try:
            self.store.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make the folder {self.store.path}: {error.strerror or error}") from None
        with locked(self.store.path, f"the search in {self.store.path}"):
            self.store.remove_unfinished()
            write_text(self.store.path / SEARCH, json.dumps(self._asked | self._how, indent=2) + "\n")
            yield

    def write(self, margins: Margins) -> None:
        """Writes all outcomes so far."""
        write_text(self.store.path / OUTCOMES, margins.outcomes.to_csv(index=False))


def _spec(asked: dict[str, Any]) -> Spec | None:
    """What an earlier search was of; physics "auto", which earlier versions kept, are those that its devices had."""
    try:
        spec = parse("\n".join(asked["spec"]))
        return spec.resolved(recorded_platform(asked.get("environment", {})))
    except (KeyError, TypeError, AttributeError, UserError):
        return None


def _read_probes(path: Path, lines: SearchConfig, seeds: Sequence[int]) -> list[Probe]:
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
