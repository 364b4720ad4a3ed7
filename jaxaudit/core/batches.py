"""Batches: which lanes of a grid run side by side. A list of batches is the plan of a grid's work.

The lanes of a fork group are numbered condition by condition, with the seeds of each condition in order. The lanes of
the baseline are its seeds. Batches consist of consecutive lanes and are as equal in size as possible. The batches of a
group have one width, and so one program. A batch needs nothing from other batches except the baseline's states at its
onset, so each can run on its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxaudit.core.grid import Grid, lanes_of
from jaxaudit.core.perturbation import Condition, control
from jaxaudit.core.program import Lanes, Program, round_up_to_vectors


@dataclass(frozen=True, eq=False)
class Batch:
    """Lanes that run side by side from one step to another.

    Attributes:
      id: the batch's number in the plan.
      fork: the index of its fork group; None for a batch of the baseline.
      onset, stop: the first step, and the step after the last.
      first: the number of its first lane within the group.
      seeds: the position of each lane's seed among the grid's, int `[L]`.
      columns: the position of each lane's condition among the grid's, int `[L]`; -1 for the baseline.
      conditions: the condition of each lane; empty for the baseline.
      width: the number of lanes including padding. Padding lanes are controls of the first seed.
    """

    id: int
    fork: int | None
    onset: int
    stop: int
    first: int
    seeds: np.ndarray
    columns: np.ndarray
    conditions: tuple[Condition, ...]
    width: int

    @property
    def disturbed(self) -> bool:
        """Whether the batch belongs to a fork group instead of the baseline."""
        return self.fork is not None

    @property
    def numbers(self) -> np.ndarray:
        """The numbers of the batch's lanes within their fork group, int `[L]`."""
        return np.arange(self.first, self.first + len(self.seeds))

    @property
    def positions(self) -> np.ndarray:
        """The position of each lane's seed, including padding lanes, int32 `[width]`."""
        return self.padded(self.seeds).astype(np.int32)

    def padded(self, values: np.ndarray) -> np.ndarray:
        """Returns values of the lanes `[L]`, padded to `[width]` with the value of the first lane."""
        return np.r_[values, np.repeat(values[:1], self.width - len(values))]

    def lanes(self, grid: Grid) -> Lanes:
        """Returns the data of the batch's lanes, with leading axis `[width]`."""
        padding = [control(self.onset)] * (self.width - len(self.seeds))
        conditions = [*self.conditions, *padding] if self.disturbed else None
        return lanes_of(grid.program, np.array(grid.seeds)[self.positions], conditions)


Plan = Sequence[Batch]


def layout(grid: Grid, max_lanes: int | None = None, baseline: bool = True, parts: int = 1) -> list[Batch]:
    """Returns the batches of a grid, in the order in which they are trained.

    Args:
      grid: the grid.
      max_lanes: the largest number of lanes in a batch; `Grid.batch` by default.
      baseline: whether the baseline's batches are included.
      parts: the number of workers. Each group is divided into a multiple of this number of batches, or nearly so, since
        lanes cannot be divided.
    """
    batches: list[Batch] = []
    for fork in [*([None] if baseline else []), *range(len(grid.forks))]:
        count = _group_size(grid, fork)
        needed = -(-count // min(max_lanes or grid.batch or count, count))
        size = -(-count // min(-(-needed // parts) * parts, count))
        width = padded_width(grid.program, size)
        for first in range(0, count, size):
            batches.append(_batch(grid, len(batches), fork, first, min(size, count - first), width))
    return batches


def _group_size(grid: Grid, fork: int | None) -> int:
    return len(grid.seeds) * (1 if fork is None else len(grid.forks[fork].conditions))


def _batch(grid: Grid, number: int, fork: int | None, first: int, lanes: int, width: int) -> Batch:
    columns, seeds = np.divmod(np.arange(first, first + lanes), len(grid.seeds))
    if fork is None:
        return Batch(number, fork, 0, grid.baseline_steps, first, seeds, np.full_like(columns, -1), (), width)
    group = grid.forks[fork]
    columns += group.conditions[0]
    conditions = tuple(map(grid.conditions.__getitem__, columns.tolist()))  # fast for many lanes
    return Batch(number, fork, group.onset, grid.steps, first, seeds, columns, conditions, width)


def padded_width(program: Program, lanes: int) -> int:
    """Returns the number of lanes, including padding, that a batch of `lanes` lanes runs with.

    All devices, or rows of devices that share a lane, have equally many lanes. A device that runs its lanes a few at a
    time has a multiple of that number, because the program of a remainder would round differently.
    """
    groups, execution = program.groups, program.execution
    each = -(-lanes // groups)
    if isinstance(execution, int) and each > round_up_to_vectors(execution):
        at_a_time = round_up_to_vectors(execution)
        return -(-each // at_a_time) * at_a_time * groups
    return (each if execution == "map" else round_up_to_vectors(each)) * groups


def as_json(plan: Plan) -> list[dict[str, Any]]:
    """Returns a plan in the form in which it is stored, with the seed and condition positions of each lane as pairs."""
    return [
        {
            "id": b.id,
            "onset": b.onset,
            "stop": b.stop,
            "fork": b.fork,
            "first": b.first,
            "width": b.width,
            "lanes": np.stack([b.seeds, b.columns], axis=1).tolist(),
        }
        for b in plan
    ]


def from_json(stored: Sequence[dict[str, Any]], grid: Grid) -> list[Batch]:
    """Returns the batches of a stored plan of a grid.

    Raises:
      ValueError, KeyError, IndexError, TypeError: it is not a plan of the grid: the batches of the baseline and of each
        fork group must contain the group's lanes once each, in order, and must not be much wider than the group.
    """
    batches: list[Batch] = []
    covered: dict[int | None, int] = {}
    for number, entry in enumerate(stored):
        fork, width = entry["fork"], entry["width"]
        first = covered.get(fork, 0)
        seeds, columns = np.array(entry["lanes"], int).reshape(-1, 2).T
        batch = _batch(grid, number, fork, first, len(seeds), width)
        if [entry["id"], entry["first"], entry["onset"], entry["stop"]] != [number, first, batch.onset, batch.stop]:
            raise ValueError(f"batch {number} has another id, first lane, onset or stop than the grid's plan")
        if not len(seeds) or not np.array_equal(seeds, batch.seeds):
            raise ValueError(f"batch {number} has lanes of other seeds than the grid's plan")
        if not np.array_equal(columns, batch.columns):
            raise ValueError(f"batch {number} has lanes of other conditions than the grid's plan")
        if type(width) is not int or not len(seeds) <= width <= _group_size(grid, fork) + MAX_PADDING:
            raise ValueError(f"batch {number} is {width} lanes wide, and has {len(seeds)} lanes")
        batches.append(batch)
        covered[fork] = first + len(seeds)
    if covered.get(None, len(grid.seeds)) != len(grid.seeds) or any(
        covered.get(fork) != _group_size(grid, fork) for fork in range(len(grid.forks))
    ):
        raise ValueError("the plan lacks lanes of the grid")
    return batches


MAX_PADDING = 2**16
"""The largest number of padding lanes in a batch: one vector of lanes for each of several thousand devices."""
