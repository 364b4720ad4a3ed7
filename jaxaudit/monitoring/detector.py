"""What a detector is: fitted to clean runs, it says at every step of a run how unusual the run has been so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

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
        """In tables."""

    @property
    def family(self) -> str:
        """In tables."""

    def fit(self, clean: np.ndarray, channels: Sequence[str]) -> Score:
        """The score, fitted to clean runs `[n, T, d]` whose d channels have these names."""
