"""The monitor as a detector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from jaxaudit.monitoring.detector import MONITOR, Score
from jaxaudit.monitoring.monitor import DEFAULT, Expectation, scorer
from jaxaudit.monitoring.scorer import Scorer
from jaxaudit.monitoring.training import Training


@dataclass(frozen=True)
class MetaState:
    """The scores of a chart or of a meta-state model, combined.

    Attributes:
      model: which.
      training: how a model is fitted.
      seed: of training.
    """

    model: Scorer = field(default_factory=partial(scorer, DEFAULT))
    training: Training = field(default_factory=Training)
    seed: int = 0

    @property
    def name(self) -> str:
        """In tables."""
        return self.model.title

    @property
    def family(self) -> str:
        """In tables."""
        return MONITOR

    def expect(self, clean: np.ndarray, channels: Sequence[str]) -> Expectation:
        """What is expected after clean runs `[n, T, d]`."""
        return Expectation.of(clean, channels, self.model, self.training, self.seed)

    def fit(self, clean: np.ndarray, channels: Sequence[str]) -> Score:
        """A score from clean runs `[n, T, d]`."""
        expectation = self.expect(clean, channels)
        return lambda runs: expectation.score(expectation.channels.pick(runs, channels))
