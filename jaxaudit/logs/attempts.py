"""The rows of a run that may have been begun again from a checkpoint."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

import numpy as np

_NAMED = 3
"""Stretches without telemetry that a note names."""


class Attempts:
    """Rows by step, as the run's last attempt at each step has them.

    Attributes:
      steps: in ascending order.
      rows: of each step, the values by channel.
      twice: the steps at which a row came again.
    """

    def __init__(self):
        self.steps: list[int] = []
        self.rows: dict[int, dict[str, float]] = {}
        self._latest: dict[str, int] = {}
        self._returns: list[tuple[int, int]] = []
        self.twice: dict[int, None] = {}

    def add(self, step: int, values: dict[str, float]) -> None:
        """Takes the next row.

        A row whose channels were all logged at later steps begins a new attempt, which replaces what there is from its
        step on. Another is merged with what its step has, as training and evaluation are logged apart.
        """
        if self.steps and step < self.steps[-1]:
            earlier = [self._latest[name] for name in values if name in self._latest]
            if earlier and min(earlier) > step:
                self._return_to(step)
        row = self.rows.get(step)
        if row is None:
            insort(self.steps, step)
            self.rows[step] = dict(values)
        else:
            if values.keys() <= row.keys():
                self.twice[step] = None
            row.update(values)
        self._latest.update(dict.fromkeys(values, step))

    def _return_to(self, step: int) -> None:
        self._returns.append((self.steps[-1], step))
        first = bisect_left(self.steps, step)
        for at in self.steps[first:]:
            del self.rows[at]
            self.twice.pop(at, None)
        del self.steps[first:]
        self._latest = {name: min(at, step - 1) for name, at in self._latest.items()}

    def notes(self) -> Iterator[str]:
        """What was replaced, in sentences."""
        if self._returns:
            last, first = self._returns[0]
            more = f" and {len(self._returns) - 1} times more" if len(self._returns) > 1 else ""
            yield (
                f"the log goes back from step {last} to {first}{more}, as after a restart from a checkpoint; "
                "what it had of these steps is replaced"
            )
        if self.twice:
            more = f" and {len(self.twice) - 1} more are" if len(self.twice) > 1 else " is"
            yield f"step {next(iter(self.twice))}{more} there twice; the last value counts"


def gaps(steps: np.ndarray) -> Iterator[str]:
    """A sentence on the stretches of int64 steps `[T]` that are missing where their usual spacing goes on."""
    if len(steps) < 3:
        return
    apart = np.diff(steps)
    usual = int(np.sort(apart)[(len(apart) - 1) // 2])
    (before,) = np.nonzero(apart // usual >= 2)
    stretches = [(int(steps[at]) + usual, int(steps[at + 1]) - usual) for at in before[:_NAMED]]
    if stretches:
        named = [f"from step {first} to {last}" if first < last else f"at step {first}" for first, last in stretches]
        more = f" and in {len(before) - _NAMED} more stretches" if len(before) > _NAMED else ""
        yield f"no telemetry {', '.join(named)}{more}; those steps count as not seen"
