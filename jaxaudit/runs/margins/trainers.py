"""Who trains the lanes that a search of a finished run asks for: this process, or workers, pools side by side."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from jaxaudit.execution.driver import chunk_size
from jaxaudit.execution.engine import Engine
from jaxaudit.runs.margins.pool import Train, fit, in_turn, train_pool
from jaxaudit.runs.margins.rounds import Probe, SearchConfig
from jaxaudit.runs.margins.search import MarginSettings
from jaxaudit.runs.margins.searched import Searched, open_searched
from jaxaudit.runtime.backends.backend import Backend, Workers, called, opened, values
from jaxaudit.runtime.interrupts import interruptible, stoppable
from jaxaudit.spec.document import parse


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
    with opened(workers, jobs) as backend:
        asked = {
            "folder": str(run.store.path.absolute()),
            "spec": run.spec.to_toml(),
            "place": run.spec.source,
            "chosen": vars(replace(chosen, lanes=chosen.lanes or -(-lines.lanes // backend.workers))),
        }
        lanes = called(backend, f"{__name__}:lanes_that_fit", asked | {"beside": backend.beside})
        yield replace(lines, lanes=lanes), _handed_out(backend, asked | {"lanes": lanes})


def _handed_out(backend: Backend, asked: dict[str, Any]) -> Train:
    def train(fork: int, pools: Sequence[list[Probe]]) -> Iterator[list[Probe]]:
        call = f"{__name__}:collapse_times_of"
        calls = [
            (call, asked | {"fork": fork, "probes": [(p.ray, p.seed, p.u, p.purpose) for p in pool]}) for pool in pools
        ]
        for position, times in values(backend, calls):
            for probe, time in zip(pools[position], times, strict=True):
                probe.time = time
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
