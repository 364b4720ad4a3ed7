"""Control charts: how far a channel is from what it should be, by a single value or a running statistic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jaxaudit.monitoring.envelope import Envelope, least_spread
from jaxaudit.monitoring.one_channel import OneChannel

ChannelScore = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class SingleChannel(OneChannel):
    """How many standard deviations the value is from the mean of clean runs at that step (Shewhart, 1931)."""

    label: ClassVar[str] = "deviation"

    def fit_channel(self, clean: np.ndarray) -> ChannelScore:
        """Deviations `[n, T]`, of either sign."""
        envelope = Envelope.of(clean)
        return lambda values: np.abs(envelope.standardise(values))


@dataclass(frozen=True)
class CUSUM(OneChannel):
    """Two-sided tabular CUSUM of standardised values (Page, 1954; Montgomery, 2019, section 9.1).

    Attributes:
      slack: k, in standard deviations: half the smallest lasting shift worth noticing.
    """

    slack: float = 0.5
    label: ClassVar[str] = "CUSUM"

    def fit_channel(self, clean: np.ndarray) -> ChannelScore:
        """The larger one of the sums upwards and downwards, `[n, T]`."""
        envelope = Envelope.of(clean)
        return lambda values: cusum(envelope.standardise(values), self.slack)


def cusum(z: np.ndarray, slack: float) -> np.ndarray:
    """`max(C+, C-)` at every step of standardised values `[n, T]`; C+ = max(0, C+ + z - k), C- likewise of -z."""
    up = down = np.zeros(len(z))
    scores = np.empty_like(z)
    for t, now in enumerate(z.T):
        up = np.maximum(0.0, up + now - slack)
        down = np.maximum(0.0, down - now - slack)
        scores[:, t] = np.maximum(up, down)
    return scores


@dataclass(frozen=True)
class SixSigma(OneChannel):
    """How many standard deviations the value is above the mean of the steps before.

    Trainers of language models skip an update where the loss or the gradient norm is more than 6 above that of 128
    steps (OLMo-core, Levanter, MaxText). Clean runs only give the least standard deviation.

    Attributes:
      history: steps before that count.
      sign: 1 where large values are bad, -1 where small ones are.
      shortest: steps before, at least, for a score that is not 0.
    """

    history: int = 128
    sign: float = 1.0
    shortest: int = 16
    label: ClassVar[str] = "six-sigma rule"

    def fit_channel(self, clean: np.ndarray) -> ChannelScore:
        """Standard deviations from the mean of the steps before, `[n, T]`."""
        floor = float(least_spread(clean))
        return lambda values: self.sign * above_history(values, self.history, self.shortest, floor)


def above_history(values: np.ndarray, history: int, shortest: int, floor: float) -> np.ndarray:
    """`(x_t - mean) / std` by the `history` values before x_t, `[n, T]`; 0 where there are fewer than `shortest`.

    Args:
      values: `[n, T]`, NaN before the first.
      history: the values that count.
      shortest: at least 2.
      floor: the least standard deviation.
    """
    scores = np.zeros_like(values)
    for t in range(shortest, values.shape[1]):
        before = values[:, max(0, t - history) : t]
        count = np.isfinite(before).sum(axis=1)
        there = count >= shortest
        before = before[there]
        mean = np.nanmean(before, axis=1)
        std = np.maximum(np.nanstd(before, axis=1, ddof=1), floor)
        scores[there, t] = (values[there, t] - mean) / std
    return scores


@dataclass(frozen=True)
class ZClip(OneChannel):
    """How many standard deviations the gradient norm is above its moving average (ZClip; Kumar et al., 2025).

    As there, the first steps' mean and variance start the averages, and a norm beyond `limit` enters them clipped.
    Clean runs only give the least standard deviation.

    Attributes:
      decay: of mean and variance, a step.
      limit: z beyond which a norm is clipped.
      warmup: the first steps, of score 0.
    """

    channel: str = "gradient_norm"
    decay: float = 0.97
    limit: float = 2.5
    warmup: int = 25
    label: ClassVar[str] = "ZClip"

    def fit_channel(self, clean: np.ndarray) -> ChannelScore:
        """Standard deviations above the moving average, `[n, T]`."""
        floor = float(least_spread(clean))

        def scores(values: np.ndarray) -> np.ndarray:
            found = np.zeros_like(values)
            for first in np.unique(starts := first_seen(values)):
                among = starts == first
                found[among, first:] = self.above_average(values[among, first:], floor)
            return found

        return scores

    def above_average(self, norms: np.ndarray, floor: float) -> np.ndarray:
        """The score of norms `[n, T]` that are all there."""
        scores = np.zeros_like(norms)
        if norms.shape[1] <= self.warmup:
            return scores
        mean, variance = norms[:, : self.warmup].mean(axis=1), norms[:, : self.warmup].var(axis=1)
        for t in range(self.warmup, norms.shape[1]):
            std = np.maximum(np.sqrt(variance), floor)
            z = scores[:, t] = (norms[:, t] - mean) / std
            clipped = mean + std * self.limit**2 / np.maximum(z, self.limit)
            norm = np.where(z > self.limit, clipped, norms[:, t])
            mean = self.decay * mean + (1 - self.decay) * norm
            variance = self.decay * variance + (1 - self.decay) * (norm - mean) ** 2
        return scores


def first_seen(values: np.ndarray) -> np.ndarray:
    """The step of the first value of each run `[n, T]`, int `[n]`; T where there is none."""
    seen = np.isfinite(values)
    return np.where(seen.any(axis=1), seen.argmax(axis=1), values.shape[1])
