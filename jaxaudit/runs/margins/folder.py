"""The command `jaxaudit margin`: margins of a finished run, searched from its stored onsets and stored in a folder."""

from __future__ import annotations

import csv
import functools
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxaudit.analysis.results import has_trend
from jaxaudit.core.channel_names import PERFORMANCE
from jaxaudit.core.grid import Grid
from jaxaudit.execution.driver import chunk_size
from jaxaudit.execution.engine import Engine
from jaxaudit.runs import checkpoint
from jaxaudit.runs.attempts import onset_paths
from jaxaudit.runs.disk_sink import onset_source
from jaxaudit.runs.margins import search
from jaxaudit.runs.margins.bisection import CONTROL, Probe, SearchConfig, next_round
from jaxaudit.runs.margins.search import ForkPoint, MarginSettings, TrainPools
from jaxaudit.runs.margins.table import Margins
from jaxaudit.runs.run_folder import Folder, software
from jaxaudit.runs.run_opening import open_onsets
from jaxaudit.runtime.backends import Workers, call_worker, open_backend, run_calls
from jaxaudit.runtime.errors import Interrupted, UserError, error_prefix, interruptible, stoppable
from jaxaudit.runtime.files import UNFINISHED, check_contents, entry_names, locked, read_object, write_text
from jaxaudit.runtime.machine import recorded_platform
from jaxaudit.spec.document import Spec, parse
from jaxaudit.spec.sections import PerturbationEntry

SEARCH, OUTCOMES, TABLE = "search.json", "outcomes.csv", "margins.csv"

JOBS = ".jobs"
"""The folder in which an engine of workers keeps files about the pools it trains."""


@dataclass(frozen=True)
class SearchedRun:
    """A finished run, and the grid of perturbations whose margins are searched in it.

    Attributes:
      store: the run's folder.
      spec: the spec of the search.
      grid: the grid of the search.
      run_grid: the grid of the run.
    """

    store: Folder
    spec: Spec
    grid: Grid
    run_grid: Grid

    @property
    def chunk(self) -> int:
        """The number of steps that a program advances at a time."""
        return chunk_size(self.grid.steps, self.spec.run.chunk)

    def configure(self, settings: MarginSettings) -> SearchConfig:
        """Returns the directions that are searched, and how.

        Raises UserError if there is nothing to search, or the stored states of an onset are damaged.
        """
        # The dimensions of a spec's perturbations have been expanded.
        perturbations = [
            entry.perturbation for entry in self.spec.perturbations if isinstance(entry, PerturbationEntry)
        ]
        with error_prefix(self.spec.source):
            config = search.configure_search(self.grid, perturbations, settings)
        for fork in self.grid.forks:
            try:
                for path in onset_paths(self.store, fork.onset, range(len(self.grid.seeds))):
                    checkpoint.verify(path)
            except checkpoint.Damaged as damage:
                raise UserError(f"{damage}, so nothing can be searched from step {fork.onset}") from None
        return config

    def fork_point(self, engine: Engine, fork: int) -> ForkPoint:
        """Returns the stored states of a fork group, given by its index, and the baseline's performance before it."""
        onset = self.grid.forks[fork].onset
        source = onset_source(self.store, engine, onset)
        return ForkPoint(fork, onset, source, self._performance_before(onset), self.spec.metrics)

    def onsets_in_trend(self) -> tuple[int, ...]:
        """Returns the onsets before which the performance of most seeds was itself rising or falling."""
        onsets, window = [fork.onset for fork in self.grid.forks], self.spec.metrics.window
        return tuple(onset for onset in onsets if has_trend(self._performance_before(onset), window))

    def _performance_before(self, onset: int) -> np.ndarray:
        steps = search.baseline_steps(onset, self.grid, self.spec.metrics)
        return self.store.read_channel("baseline_performance", steps)

    def trained_probes(self, config: SearchConfig) -> list[Probe]:
        """Returns the lanes of the run that belong to the search: controls, and conditions on one of its directions."""
        telemetry = self.store.read_telemetry([PERFORMANCE])
        performance = telemetry[PERFORMANCE].transpose("condition", "seed", "step").values
        onsets = {direction.onset for direction in config.directions}
        cadence = self.grid.program.learner.cadence
        probes = []
        for condition, series in zip(self.run_grid.conditions, performance, strict=True):
            if condition.onset not in onsets:
                continue
            matches = [(CONTROL, -float("inf"))]
            if condition.parts:
                located = [direction.log_scale(condition, self.grid.steps) for direction in config.directions]
                matches = [(index, scale) for index, scale in enumerate(located) if scale is not None]
            if not matches:
                continue
            times = search.collapse_times(series, condition.onset, self.spec.metrics, cadence)
            probes += [
                Probe(0, direction, condition.onset, seed, log_scale, "run", float(collapse_time))
                for direction, log_scale in matches
                for seed, collapse_time in enumerate(times)
            ]
        return probes


def open_searched_run(folder: Path, spec: Spec | None) -> SearchedRun:
    """Opens a finished run in order to search the margins of a spec's perturbations; None: of the run's own.

    Raises UserError if the run is not finished, or the spec changes more than perturbations, onsets and metrics.
    """
    store, spec, grid, run_grid = open_onsets(folder, spec)
    program = replace(grid.program, devices=run_grid.program.devices, model_devices=run_grid.program.model_devices)
    return SearchedRun(store, spec, replace(grid, program=program), run_grid)


@contextmanager
def local_trainer(run: SearchedRun, config: SearchConfig) -> Iterator[tuple[SearchConfig, TrainPools]]:
    """Trains pools in this process, with as many lanes as memory holds; Ctrl-C raises KeyboardInterrupt."""

    def advance(*arguments: Any) -> Any:
        if stopping():
            raise KeyboardInterrupt
        return interruptible(partial(engine.advance, *arguments))

    with stoppable() as stopping:
        engine, _, config = interruptible(partial(search.prepare_engine, run.grid, config, run.chunk, baseline=False))
        yield config, search.sequential_trainer(engine, config, partial(run.fork_point, engine), advance)


@contextmanager
def worker_trainer(
    run: SearchedRun, config: SearchConfig, settings: MarginSettings, workers: Workers, jobs: Path
) -> Iterator[tuple[SearchConfig, TrainPools]]:
    """Trains pools by workers, among which the lanes are divided, with as many lanes as a worker's memory holds."""
    with open_backend(workers, jobs) as backend:
        lanes = settings.lanes or -(-config.lanes // backend.workers)
        arguments: dict[str, Any] = {
            "folder": str(run.store.path.absolute()),
            "spec": run.spec.to_toml(),
            "source": run.spec.source,
            "settings": vars(replace(settings, lanes=lanes)),
        }
        arguments["lanes"] = call_worker(
            backend, f"{__name__}:lanes_that_fit", arguments | {"processes": backend.workers_per_machine}
        )

        def train(fork: int, pools: Sequence[list[Probe]]) -> Iterator[list[Probe]]:
            calls = []
            for pool in pools:
                probes = [(p.direction, p.seed, p.log_scale, p.purpose) for p in pool]
                calls.append((f"{__name__}:collapse_times_of", arguments | {"fork": fork, "probes": probes}))
            for index, times in run_calls(backend, calls):
                for probe, collapse_time in zip(pools[index], times, strict=True):
                    probe.collapse_time = collapse_time
                yield pools[index]

        yield replace(config, lanes=arguments["lanes"]), train


def lanes_that_fit(folder: str, spec: str, source: str, settings: dict[str, Any], processes: int) -> int:
    """Returns how many of the lanes side by side fit in this worker's memory, which several processes share."""
    run, config = _open_once(folder, spec, source, MarginSettings(**settings))
    return search.prepare_engine(run.grid, config, run.chunk, baseline=False, processes=processes)[2].lanes


def collapse_times_of(
    folder: str,
    spec: str,
    source: str,
    settings: dict[str, Any],
    lanes: int,
    fork: int,
    probes: Sequence[tuple[int, int, float, str]],
) -> list[float]:
    """Trains a pool of probes in this worker and returns their collapse times.

    Args:
      folder, spec, source: the run, and the spec of the search as TOML with the name of its file.
      settings: the fields of `MarginSettings`.
      lanes: the number of lanes side by side.
      fork: the index of the fork group.
      probes: direction, seed, log scale and purpose of each probe.
    """
    run, config = _open_once(folder, spec, source, MarginSettings(**settings))
    onset = run.grid.forks[fork].onset
    pool = [Probe(0, direction, onset, seed, log_scale, purpose) for direction, seed, log_scale, purpose in probes]
    engine = Engine(run.grid, run.chunk)
    search.train_pool(engine, replace(config, lanes=lanes), run.fork_point(engine, fork), pool, engine.advance)
    return [float("nan") if p.collapse_time is None else p.collapse_time for p in pool]


@functools.lru_cache(maxsize=1)  # the pools that a process trains share its compiled programs
def _open_once(folder: str, spec: str, source: str, settings: MarginSettings) -> tuple[SearchedRun, SearchConfig]:
    run = open_searched_run(Path(folder), parse(spec, source))
    return run, run.configure(settings)


def search_margins(
    folder: Path, spec: Spec | None, out: Path | None, settings: MarginSettings, workers: Workers | None = None
) -> Margins:
    """Searches the margins of a finished run's perturbations, or of a spec's, and writes them to `out`.

    Lanes that the run has trained at the spec's perturbations are used and not trained again. A search that was
    stopped, or is repeated with a finer tolerance, continues from the outcomes in `out`.

    Args:
      folder: the folder of a finished run.
      spec: the run's spec with other perturbations, onsets or metrics, as for `fork`; None: the run's own.
      out: `folder`/margins by default; gets `margins.csv`, `outcomes.csv` and `search.json`.
      settings: how margins are searched.
      workers: the processes that train pools of lanes side by side; None: this process.

    Raises:
      UserError: the run is not finished, the spec is of another run, an onset is not stored, `out` holds something
        else, or there is nothing to search; nothing is created or changed then.
      Interrupted: Ctrl-C.
    """
    run = open_searched_run(folder, spec)
    config = run.configure(settings)
    store = _SearchFolder(Folder(out or folder / "margins"), run, settings)
    store.read(config)  # raises before anything is created
    trending = run.onsets_in_trend()

    def result() -> Margins:
        return Margins(config, tuple(probes), run.grid.seeds, settings.criterion, run.grid.steps, trending)

    with store.locked():
        probes = store.read(config) or run.trained_probes(config)
        jobs = store.folder.path / JOBS
        _search(run, config, settings, probes, lambda: store.write(result()), workers, jobs)
        shutil.rmtree(jobs, ignore_errors=True)
        store.write(result())
        write_text(store.folder.path / TABLE, result().table.to_csv(index=False))
    return result()


def _search(
    run: SearchedRun,
    config: SearchConfig,
    settings: MarginSettings,
    probes: list[Probe],
    store: Callable[[], None],
    workers: Workers | None,
    jobs: Path,
) -> None:
    onsets = [fork.onset for fork in run.grid.forks]
    if not any(search.pending_probes(probes, onset) or next_round(config, onset, probes) for onset in onsets):
        return  # before anything is compiled
    if workers is None:
        trainer = local_trainer(run, config)
    else:
        trainer = worker_trainer(run, config, settings, workers, jobs)
    printed, start = 0, time.monotonic()
    try:
        with trainer as (config, train):
            for batch in search.run_rounds(run.grid, config, probes, train):
                store()
                if batch[0].round > printed:
                    printed = batch[0].round
                    _print_round(config, batch, time.monotonic() - start)
    except KeyboardInterrupt:
        raise Interrupted("stopped; the same command goes on from the lanes that are trained") from None


def _print_round(config: SearchConfig, batch: Sequence[Probe], seconds: float) -> None:
    names = dict.fromkeys("control" if p.direction == CONTROL else config.directions[p.direction].name for p in batch)
    print(f"{seconds:.0f} s: round {batch[0].round}, {len(batch)} lanes ({', '.join(names)})", file=sys.stderr)


def stored_names(folder: Path, marker: str) -> list[str]:
    """Returns the names in an output folder, without unfinished files; none if there is no folder.

    Raises UserError if the path is not a folder, or the folder has contents but not the file `marker`.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} exists and is not a folder")
    stored = [name for name in entry_names(folder) if not name.startswith(UNFINISHED)] if folder.exists() else []
    if stored:
        check_contents(folder)
        if marker not in stored:
            raise UserError(f"the folder {folder} exists and is not empty; give another with -o")
    return stored


@contextmanager
def created_and_locked(folder: Path, what: str) -> Iterator[None]:
    """Creates an output folder if there is none, and locks it until the block ends.

    Raises UserError if the folder cannot be created, or another process has locked it; `what` says what it holds.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {folder}: {error.strerror or error}") from None
    with locked(folder, f"{what} in {folder}"):
        yield


class _SearchFolder:
    """The folder in which a search is stored."""

    def __init__(self, folder: Folder, run: SearchedRun, settings: MarginSettings):
        self.folder = folder
        self._run = run
        # The run's path is not among the keys, since it may change: a spec has only one run, wherever it is stored.
        self._keys = {"criterion": settings.criterion, "reach": settings.reach, "spec": run.spec.to_toml().splitlines()}
        self._details = {"run": str(run.store.path), "tolerance": settings.tolerance, "environment": software(run.grid)}

    def read(self, config: SearchConfig) -> list[Probe]:
        """Returns the probes of an earlier search of the same kind. Raises UserError if the folder holds another."""
        path = self.folder.path
        stored = stored_names(path, SEARCH)
        if not stored:
            return []
        earlier = read_object(path / SEARCH)
        differing = [key for key, value in self._keys.items() if key != "spec" and earlier.get(key) != value]
        if _stored_spec(earlier) != self._run.spec:
            differing.append("spec")
        if differing:
            raise UserError(
                f"{path} holds a search with another {' and '.join(differing)}; give another folder with -o"
            )
        return _read_probes(path / OUTCOMES, config, self._run.grid.seeds) if OUTCOMES in stored else []

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Creates the folder with `search.json`, and locks it until the block ends."""
        with created_and_locked(self.folder.path, "the search"):
            self.folder.remove_unfinished()
            write_text(self.folder.path / SEARCH, json.dumps(self._keys | self._details, indent=2) + "\n")
            yield

    def write(self, margins: Margins) -> None:
        """Writes `outcomes.csv`, with one row for each lane that is trained or planned so far (`Margins.outcomes`)."""
        write_text(self.folder.path / OUTCOMES, margins.outcomes.to_csv(index=False))


def _stored_spec(stored: dict[str, Any]) -> Spec | None:
    """Returns the spec of a stored search; None if it cannot be read.

    Earlier versions stored physics = "auto", which is resolved by the devices that the search ran on.
    """
    try:
        spec = parse("\n".join(stored["spec"]))
        return spec.resolved(recorded_platform(stored.get("environment", {})))
    except (KeyError, TypeError, AttributeError, UserError):
        return None


def _read_probes(path: Path, config: SearchConfig, seeds: Sequence[int]) -> list[Probe]:
    indices = {direction.name: index for index, direction in enumerate(config.directions)} | {"control": CONTROL}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return [
                Probe(
                    int(row["round"]),
                    indices[row["perturbation"]],
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
