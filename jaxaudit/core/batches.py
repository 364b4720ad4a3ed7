"""Batches: which lanes of a grid run side by side, and how wide. A list of them is a plan of its work.

A fork group's lanes are numbered condition after condition, the seeds of each in order; the baseline's are its seeds.
Batches are consecutive lanes, as even as can be, and those of a group have one width: one program. None needs another
but the baseline's states at its onset, so that each can run by itself.
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
      id: its number in the plan.
      fork: the fork group it is of; None: the baseline's.
      onset, stop: the steps it runs from and to.
      first: number of its first lane within its group.
      seeds: position of each lane's seed, int `[L]`.
      columns: position of each lane's condition among the grid's, int `[L]`; -1 for the baseline.
      conditions: each lane's; none for the baseline.
      width: lanes that it is filled up to, with controls of the first seed.
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
        """Whether it is of a fork group."""
        return self.fork is not None

    @property
    def numbers(self) -> np.ndarray:
        """The numbers of the batch's lanes within their fork group."""
        return np.arange(self.first, self.first + len(self.seeds))

    @property
    def positions(self) -> np.ndarray:
        """Position of each lane's seed with those that fill it up, int32 `[width]`."""
        return self.filled(self.seeds).astype(np.int32)

    def filled(self, values: np.ndarray) -> np.ndarray:
        """Values of the lanes `[L]` and, in the lanes that fill it up, the first's: `[width]`."""
        return np.r_[values, np.repeat(values[:1], self.width - len(values))]

    def lanes(self, grid: Grid) -> Lanes:
        """What the batch's lanes do, with leading axis `[width]`."""
        filling = [control(self.onset)] * (self.width - len(self.seeds))
        chosen = [*self.conditions, *filling] if self.disturbed else None
        return lanes_of(grid.program, np.array(grid.seeds)[self.positions], chosen)


Plan = Sequence[Batch]


def layout(grid: Grid, most: int | None = None, baseline: bool = True, parts: int = 1) -> list[Batch]:
    """The batches of a grid, in the order they are trained, of at most so many lanes; the grid's own, unless given.

    Each group is cut for so many workers: into a multiple of `parts` batches, or nearly so, for lanes are whole.
    """
    batches: list[Batch] = []
    for fork in [*([None] if baseline else []), *range(len(grid.forks))]:
        group = None if fork is None else grid.forks[fork]
        count = len(grid.seeds) * (1 if group is None else len(group.conditions))
        needed = -(-count // min(most or grid.batch or count, count))
        share = -(-count // min(-(-needed // parts) * parts, count))
        for first in range(0, count, share):
            columns, seeds = np.divmod(np.arange(first, min(first + share, count)), len(grid.seeds))
            columns = columns * 0 - 1 if group is None else columns + group.conditions[0]
            batches.append(
                Batch(
                    len(batches),
                    fork,
                    0 if group is None else group.onset,
                    grid.baseline_steps if group is None else grid.steps,
                    first,
                    seeds,
                    columns,
                    () if group is None else _conditions(grid, columns),
                    width_of(grid.program, share),
                )
            )
    return batches


def _conditions(grid: Grid, columns: np.ndarray) -> tuple[Condition, ...]:
    return tuple(map(grid.conditions.__getitem__, columns.tolist()))


def width_of(program: Program, lanes: int) -> int:
    """Lanes that a batch is filled up to: devices, or rows of those that share a lane, have as many each, all alike.

    A device that runs its lanes a few at a time has none left over, for their program would round otherwise.
    """
    groups, execution = program.groups, program.execution
    each = -(-lanes // groups)
    if isinstance(execution, int) and each > round_up_to_vectors(execution):
        at_a_time = round_up_to_vectors(execution)
        return -(-each // at_a_time) * at_a_time * groups
    return (each if execution == "map" else round_up_to_vectors(each)) * groups


def as_json(plan: Plan) -> list[dict[str, Any]]:
    """A plan as it is stored: each batch's lanes as pairs of positions, of the seed and of the condition."""
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
    """A stored plan of a grid.

    Raises ValueError, KeyError, IndexError or TypeError where it is none: the batches of a group, the baseline's or a
    fork's, hold its lanes once each, in order, and are not much wider than they are long.
    """
    batches: list[Batch] = []
    reached: dict[int | None, int] = {}
    for number, one in enumerate(stored):
        fork, first, width = one["fork"], reached.get(one["fork"], 0), one["width"]
        group = None if fork is None else grid.forks[fork]
        seeds, columns = np.array(one["lanes"], int).reshape(-1, 2).T
        expected, _ = np.divmod(np.arange(first, first + len(seeds)), len(grid.seeds))
        expected = expected * 0 - 1 if group is None else expected + group.conditions[0]
        span = (0, grid.baseline_steps) if group is None else (group.onset, grid.steps)
        if [one["id"], one["first"], one["onset"], one["stop"]] != [number, first, *span]:
            raise ValueError(f"batch {number} is not where it must be")
        if not len(seeds) or not np.array_equal(seeds, np.arange(first, first + len(seeds)) % len(grid.seeds)):
            raise ValueError(f"batch {number} has lanes of other seeds")
        if not np.array_equal(columns, expected):
            raise ValueError(f"batch {number} has lanes of other conditions")
        most = len(grid.seeds) * (1 if group is None else len(group.conditions)) + MOST_FILLING
        if type(width) is not int or not len(seeds) <= width <= most:
            raise ValueError(f"batch {number} is {width} lanes wide")
        conditions = () if group is None else _conditions(grid, columns)
        batches.append(Batch(number, fork, span[0], span[1], first, seeds, columns, conditions, width))
        reached[fork] = first + len(seeds)
    lanes = {None: len(grid.seeds)} | {n: len(grid.seeds) * len(f.conditions) for n, f in enumerate(grid.forks)}
    if reached.get(None, lanes[None]) != lanes[None] or any(reached.get(n) != lanes[n] for n in range(len(grid.forks))):
        raise ValueError("lanes are missing")
    return batches


MOST_FILLING = 2**16
"""Lanes by which batches are wider than their group at most: a vector's worth for each of 4,096 devices."""
