"""Detectors that watch one channel, and what all detectors notice alike: that a run has diverged."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jaxaudit.monitoring.detector import ONE_CHANNEL, Score
from jaxaudit.monitoring.envelope import forward_filled


def infinite_when_diverged(score: Score, clean: np.ndarray) -> Score:
    """The score, infinite from the step on at which a value is not finite that no clean run `[n, T, d]` ever lacks."""
    complete = np.isfinite(clean).all(axis=(0, 1))

    def scores(runs: np.ndarray) -> np.ndarray:
        lost = ~np.isfinite(runs[..., complete]).all(axis=-1)
        return np.where(np.logical_or.accumulate(lost, axis=1), np.inf, score(runs))

    return scores


@dataclass(frozen=True)
class OneChannel(ABC):
    """A detector that reads one channel, at every step its latest value, and of the others only whether they diverged.

    Attributes:
      channel: its name.
    """

    channel: str
    label: ClassVar[str]

    @property
    def name(self) -> str:
        """In tables."""
        return f"{self.label} of {self.channel}"

    @property
    def family(self) -> str:
        """In tables."""
        return ONE_CHANNEL

    def fit(self, clean: np.ndarray, channels: Sequence[str]) -> Score:
        """The score, fitted to clean runs `[n, T, d]` whose d channels have these names.

        Raises:
          ValueError: the channel is not among them.
        """
        if self.channel not in channels:
            raise ValueError(f"no channel '{self.channel}'; there are: {', '.join(sorted(channels))}")
        column = list(channels).index(self.channel)
        score = self.fit_channel(forward_filled(clean[..., column]))
        return infinite_when_diverged(lambda runs: score(forward_filled(runs[..., column])), clean)

    @abstractmethod
    def fit_channel(self, clean: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        """From the channel's clean values `[n, T]`, what gives scores `[n, T']` of values `[n, T']`.

        Both are forward-filled, and NaN before the first value; scores are not NaN.
        """
