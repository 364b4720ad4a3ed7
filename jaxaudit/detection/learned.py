"""The meta-state monitor as a detector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxaudit.detection.detector import Score
from jaxaudit.metastate.lru import LRU
from jaxaudit.metastate.model import MetaStateModel
from jaxaudit.metastate.monitor import Expectation
from jaxaudit.metastate.training import Training


@dataclass(frozen=True)
class MetaState:
    """A meta-state model's scores, combined.

    Attributes:
      model: the model.
      training: how it is fitted.
      seed: of training.
    """

    model: MetaStateModel = field(default_factory=LRU)
    training: Training = field(default_factory=Training)
    seed: int = 0

    @property
    def name(self) -> str:
        """In tables."""
        return f"meta-state ({type(self.model).__name__})"

    def expect(self, clean: np.ndarray, channels: Sequence[str]) -> Expectation:
        """What the model expects, fitted to clean runs `[n, T, d]`."""
        return Expectation.of(clean, channels, self.model, self.training, self.seed)

    def fit(self, clean: np.ndarray, channels: Sequence[str]) -> Score:
        """A score from clean runs `[n, T, d]`."""
        expectation = self.expect(clean, channels)
        return lambda runs: expectation.score(expectation.channels.pick(runs, channels))
