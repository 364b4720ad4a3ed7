"""Margins of a finished run, searched from the onsets it stored; killed at any instant, the search goes on."""

from __future__ import annotations

import csv
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxaudit.runs.margins.pool import pending, rounds
from jaxaudit.runs.margins.rounds import CONTROL, Probe, SearchConfig, next_round
from jaxaudit.runs.margins.search import MarginSettings
from jaxaudit.runs.margins.searched import Searched, open_searched
from jaxaudit.runs.margins.table import Margins
from jaxaudit.runs.margins.trainers import trained_by_workers, trained_here
from jaxaudit.runs.run_folder import Folder, software
from jaxaudit.runtime.backends.backend import Workers
from jaxaudit.runtime.errors import Interrupted, UserError
from jaxaudit.runtime.files import UNFINISHED, check_contents, locked, names, read_object, write_text
from jaxaudit.runtime.machine import platform_of
from jaxaudit.spec.document import Spec, parse

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
        found = [name for name in names(path) if not name.startswith(UNFINISHED)] if path.exists() else []
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
            self.store.sweep()
            write_text(self.store.path / SEARCH, json.dumps(self._asked | self._how, indent=2) + "\n")
            yield

    def write(self, margins: Margins) -> None:
        """Keeps all outcomes so far."""
        write_text(self.store.path / OUTCOMES, margins.outcomes.to_csv(index=False))


def _spec(asked: dict[str, Any]) -> Spec | None:
    """What an earlier search was of; physics "auto", which earlier versions kept, are those that its devices had."""
    try:
        spec = parse("\n".join(asked["spec"]))
        return spec.resolved(platform_of(asked.get("environment", {})))
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
