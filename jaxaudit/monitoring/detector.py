"""What a detector is: fitted to clean runs, it says at every step of a run how unusual the run has been so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from jaxaudit.monitoring.monitor import DEFAULT, Expectation, scorer
from jaxaudit.monitoring.scorer import Scorer
from jaxaudit.monitoring.training import Training

Score = Callable[[np.ndarray], np.ndarray]
"""From runs `[n, T, d]` to scores `[n, T]`, higher the more unusual, no NaN; a score sees its step and those before."""

MONITOR, ONE_CHANNEL, ALL_CHANNELS = "monitor", "one channel", "all channels"
"""Families: the monitor compared, and of the detectors that have no model those of one and those of all channels."""


class Detector(Protocol):
    """A way to notice trouble.

    Telemetry is float `[n, T, d]`, a value not finite where there was none. Runs to be scored may be longer or shorter
    than those fitted to.

    Attributes:
      name: in tables.
      family: MONITOR, ONE_CHANNEL or ALL_CHANNELS.
    """

    @property
    def name(self) -> str:
        """The name of the detector in tables and figures."""

    @property
    def family(self) -> str:
        """The family of detectors that it is listed with."""

    def fit(self, clean: np.ndarray, channels: Sequence[str]) -> Score:
        """The score, fitted to clean runs `[n, T, d]` whose d channels have these names."""


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
        """The name of the detector in tables and figures."""
        return self.model.title

    @property
    def family(self) -> str:
        """The family of detectors that it is listed with."""
        return MONITOR

    def expect(self, clean: np.ndarray, channels: Sequence[str]) -> Expectation:
        """What is expected after clean runs `[n, T, d]`."""
        return Expectation.of(clean, channels, self.model, self.training, self.seed)

    def fit(self, clean: np.ndarray, channels: Sequence[str]) -> Score:
        """A score from clean runs `[n, T, d]`."""
        expectation = self.expect(clean, channels)
        return lambda runs: expectation.score(expectation.channels.pick(runs, channels))
