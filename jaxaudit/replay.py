"""Exact replay: the stored onsets and spec, run again, compared bit for bit with the stored telemetry."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xarray as xr

from jaxaudit import checkpoint, results
from jaxaudit.grid import Grid
from jaxaudit.errors import UserError
from jaxaudit.learner import State
from jaxaudit.registry import unknown
from jaxaudit.runner import Engine, is_finished, onset_name, open_run
from jaxaudit.store import Folder, environment

DERIVED = ("x_inst", "x_gen", "baseline_performance")


@dataclass(frozen=True)
class Replay:
    """What a replay found.

    Attributes:
      lanes: how many were compared.
      steps: how many steps of each, summed over lanes.
      deviations: largest |replayed - stored| of every channel that is not bitwise equal; inf where only one is finite.
      differences: what is not as it was when the run was made: (what, then, now).
    """

    lanes: int
    steps: int
    deviations: dict[str, float]
    differences: tuple[tuple[str, str, str], ...]

    @property
    def equal(self) -> bool:
        """Whether every value is bitwise what was stored."""
        return not self.deviations

    def __str__(self) -> str:
        compared = f"{self.lanes} lanes, {self.steps} lane steps"
        changed = [f"  {what}: {then} when it was run, {now} now" for what, then, now in self.differences]
        if self.equal:
            return "\n".join([f"bitwise equal: {compared}", *changed])
        worst = max(self.deviations, key=lambda name: self.deviations[name])
        lines = [f"not equal: {compared}; largest deviation {self.deviations[worst]:g} in {worst}"]
        lines += [f"  {name}: {value:g}" for name, value in sorted(self.deviations.items())]
        why = changed or ["  software, device and lane layout are as recorded: the program is not deterministic here"]
        return "\n".join([*lines, "why:", *why])


def replay(folder: Path, seed: int | None = None, condition: str | None = None) -> Replay:
    """Runs a finished run's lanes again from its stored onsets, at their recorded width, and compares.

    The baseline is replayed from its first step when no condition is chosen. A chosen lane is compared alone, but its
    whole fork group is computed: at another width a lane is not bitwise the same.

    Args:
      folder: of a finished run.
      seed: compare only this seed's lanes.
      condition: compare only this condition: its label or its position.

    Raises:
      UserError: no run, not finished, a seed or condition it does not have, or a damaged checkpoint.
    """
    store, _, grid = open_run(folder)
    if not is_finished(store):
        raise UserError(f"the run in {folder} is not finished; end it with: jaxaudit resume {folder}")
    stored = store.read_telemetry()
    seeds = _chosen("seed", seed, [str(s) for s in grid.seeds])
    members = _chosen("condition", condition, results.labels(grid))
    engine = Engine(grid, grid.steps)
    deviations: dict[str, float] = {}
    steps = 0
    for index, fork in enumerate(grid.forks):
        mine = [c for c in fork.conditions if c in members]
        if not mine:
            continue
        states = engine.forked(_baseline(store, engine, fork.onset), index)
        _, rows = engine.advance(index, states, fork.onset, grid.steps)
        count = len(fork.conditions)
        for name, values in rows.items():
            lanes = np.asarray(values)[: grid.steps - fork.onset, : count * len(grid.seeds)]
            lanes = lanes.reshape(lanes.shape[0], count, len(grid.seeds), *lanes.shape[2:])
            new = np.moveaxis(lanes, (0, 1, 2), (2, 1, 0))[np.ix_(seeds, [c - fork.conditions[0] for c in mine])]
            _compare(name, new, stored[name].values[np.ix_(seeds, mine)][:, :, fork.onset :], deviations)
        steps += len(seeds) * len(mine) * (grid.steps - fork.onset)
    if condition is None and not store.read_environment().get("forked_from"):
        steps += _replay_baseline(engine, stored, seeds, deviations)
    return Replay(len(seeds) * len(members), steps, deviations, tuple(_differences(store, grid)))


def _replay_baseline(engine: Engine, stored: xr.Dataset, seeds: list[int], deviations: dict[str, float]) -> int:
    grid = engine.grid
    _, rows = engine.advance(None, engine.initial(), 0, grid.baseline_steps)
    last = grid.forks[-1]
    for name, values in rows.items():
        new = np.moveaxis(np.asarray(values)[: last.onset], 0, 1)[seeds]
        _compare(name, new, stored[name].values[seeds][:, last.conditions[0], : last.onset], deviations)
    return len(seeds) * last.onset


def _baseline(store: Folder, engine: Engine, onset: int) -> State:
    if onset == 0:
        return engine.initial()
    try:
        return checkpoint.load(store.checkpoints / onset_name(onset), engine.state_shapes(None))[0]
    except checkpoint.Damaged as damage:
        raise UserError(f"{damage}, so its lanes cannot be replayed") from None


def _chosen(what: str, given: int | str | None, allowed: list[str]) -> list[int]:
    """Positions of what was chosen: all, a label, or (for conditions) a position."""
    if given is None:
        return list(range(len(allowed)))
    if str(given) in allowed:
        return [allowed.index(str(given))]
    if what == "condition" and str(given).isdigit() and int(given) < len(allowed):
        return [int(given)]
    raise UserError(unknown(what, given, allowed))


def _compare(name: str, new: np.ndarray, old: np.ndarray, deviations: dict[str, float]) -> None:
    """Notes the largest deviation, unless all bits agree (any NaN equals any NaN)."""
    differ = (new != old) & ~(np.isnan(new) & np.isnan(old))
    if differ.any():
        with np.errstate(invalid="ignore"):
            apart = np.abs(new[differ].astype(np.float64) - old[differ])
        largest = float(np.where(np.isnan(apart), np.inf, apart).max())
        deviations[name] = max(largest, deviations.get(name, 0.0))


def _differences(store: Folder, grid: Grid) -> list[tuple[str, str, str]]:
    then, now = store.read_environment(), environment(grid)
    pairs = {key: (then.get(key), value) for key, value in now.items() if key != "packages"}
    pairs |= {f"package {k}": (then.get("packages", {}).get(k), v) for k, v in now["packages"].items()}
    return [(what, str(a), str(b)) for what, (a, b) in pairs.items() if a != b]
