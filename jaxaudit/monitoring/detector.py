"""Detectors: the interface, the monitor as a detector, and multivariate control charts as detectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Protocol

import numpy as np
from scipy.signal import lfilter

from jaxaudit.monitoring.charts import Chart, ChartReference
from jaxaudit.monitoring.meta_state import TELEMETRY_CHART, Training
from jaxaudit.monitoring.monitor import DEFAULT, Expectation, scorer
from jaxaudit.monitoring.scoring import ScoreNormalizer, Scorer, cross_validated_scores
from jaxaudit.monitoring.telemetry import ChannelScaler, forward_fill

Score = Callable[[np.ndarray], np.ndarray]
"""Maps runs `[n, T, d]` to scores `[n, T]` without NaN, higher is more unusual; a score depends on no later step."""

MONITOR, ONE_CHANNEL, ALL_CHANNELS = "monitor", "one channel", "all channels"
"""The families of detectors: the monitor, and detectors without a model that read one channel or all of them."""


class Detector(Protocol):
    """A method that detects unusual runs, fitted to clean runs.

    Telemetry is float `[n, T, d]`, and not finite where there is no value. Scored runs may be longer or shorter than
    the clean runs.

    Attributes:
      name: the name of the detector in tables and figures.
      family: MONITOR, ONE_CHANNEL or ALL_CHANNELS.
    """

    @property
    def name(self) -> str:
        """The name of the detector in tables and figures."""

    @property
    def family(self) -> str:
        """The family of detectors that it is listed with."""

    def fit(self, clean: np.ndarray, channels: Sequence[str]) -> Score:
        """Returns the score that is fitted to clean runs `[n, T, d]`, whose d channels have these names."""


@dataclass(frozen=True)
class MonitorDetector:
    """The combined score of a monitor as a detector.

    Attributes:
      model: what scores runs: charts or a meta-state model.
      training: the settings of the model's training.
      seed: the seed of training.
    """

    model: Scorer = field(default_factory=partial(scorer, DEFAULT))
    training: Training = field(default_factory=Training)
    seed: int = 0

    family: ClassVar[str] = MONITOR

    @property
    def name(self) -> str:
        """The name of the detector in tables and figures."""
        return self.model.title

    def fit_expectation(self, clean: np.ndarray, channels: Sequence[str]) -> Expectation:
        """Returns the scorer fitted to clean runs `[n, T, d]`, whose d channels have these names."""
        return Expectation.fit(clean, channels, self.model, self.training, self.seed)

    def fit(self, clean: np.ndarray, channels: Sequence[str]) -> Score:
        """Returns the score that is fitted to clean runs `[n, T, d]`, whose d channels have these names."""
        expectation = self.fit_expectation(clean, channels)
        return lambda runs: expectation.score(runs, channels)


@dataclass(frozen=True)
class MultichannelChart:
    """A control chart of telemetry that is standardised and whitened as a monitor's, computed in float64.

    Of several statistics the most unusual one is the score, each normalised by the clean runs.

    Attributes:
      chart: the rates of its statistics.
      title: the name in tables; "" takes the chart's own.
    """

    chart: Chart
    title: str = ""

    family: ClassVar[str] = ALL_CHANNELS

    @property
    def name(self) -> str:
        """The name of the detector in tables and figures."""
        return self.title or self.chart.title

    def fit(self, clean: np.ndarray, channels: Sequence[str]) -> Score:
        """Returns the score that is fitted to clean runs `[n, T, d]`, whose d channels have these names.

        Raises:
          ValueError: no channel differs between the clean runs.
        """
        scaler = ChannelScaler.fit(channels, clean)
        y, observed = scaler.standardise(scaler.select_columns(clean, channels))
        reference = ChartReference.fit(y, observed)

        def score_part(scored: np.ndarray, referred: np.ndarray) -> np.ndarray:
            others = ChartReference.fit(y[referred], observed[referred])
            return chart_statistics(others, y[scored], observed[scored], self.chart)

        normalizer = ScoreNormalizer.fit(cross_validated_scores(score_part, len(y)))

        def score(runs: np.ndarray) -> np.ndarray:
            standardised = scaler.standardise(scaler.select_columns(runs, channels))
            return normalizer.combine(chart_statistics(reference, *standardised, self.chart), np)

        return infinite_when_diverged(score, clean)


CHARTS = (
    MultichannelChart(Chart(departure=(1.0,)), "Hotelling's T2"),
    *(MultichannelChart(Chart(departure=(rate,))) for rate in (0.05, 0.1, 0.2, 0.4)),
    MultichannelChart(Chart(departure=(), outlier=(1.0,))),
    MultichannelChart(Chart(departure=(1.0,), outlier=(1.0,))),
    MultichannelChart(TELEMETRY_CHART, "the monitor's score without its model"),
)
"""The charts of all channels that every comparison has."""


def infinite_when_diverged(score: Score, clean: np.ndarray) -> Score:
    """Returns the score, made infinite from the step on at which a run has diverged.

    A run has diverged when it lacks a value of a channel that has finite values at all steps of all clean runs
    `[n, T, d]`.
    """
    complete = np.isfinite(clean).all(axis=(0, 1))

    def scores(runs: np.ndarray) -> np.ndarray:
        lost = ~np.isfinite(runs[..., complete]).all(axis=-1)
        return np.where(np.logical_or.accumulate(lost, axis=1), np.inf, score(runs))

    return scores


def chart_statistics(reference: ChartReference, y: np.ndarray, observed: np.ndarray, chart: Chart) -> np.ndarray:
    """Returns the scores of `Chart.score_step` for runs of standardised telemetry, `[n, T, d]` to `[n, T, S]`."""
    z = reference.telemetry.standardise(forward_fill(np.where(observed > 0, y, np.nan)))
    departures = [mewma_statistic(z @ reference.decorrelate, rate) for rate in chart.departure]
    return np.stack(departures + [outlier_statistic(z, rate) for rate in chart.outlier], axis=-1)


def mewma_statistic(x: np.ndarray, rate: float) -> np.ndarray:
    """Returns T2 of the moving average of whitened values `[n, T, d]`, over d: `[n, T]` (Lowry et al., 1992)."""
    return (ewma(x, rate) ** 2).mean(axis=-1) / ewma_variance(x.shape[1], rate)


def outlier_statistic(z: np.ndarray, rate: float) -> np.ndarray:
    """Returns the largest square of the channels' moving averages over its variance, `[n, T, d]` to `[n, T]`."""
    return (ewma(z, rate) ** 2).max(axis=-1) / ewma_variance(z.shape[1], rate)


def ewma(x: np.ndarray, rate: float) -> np.ndarray:
    """Returns `m_t = (1 - r) m_{t-1} + r x_t` along the steps of `[n, T, d]`, from zero."""
    return lfilter([rate], [1.0, rate - 1.0], x, axis=1)


def ewma_variance(steps: int, rate: float) -> np.ndarray:
    """Returns the variance of `ewma` at steps 1 to T for independent values of variance 1, `[T]`.

    Source: Lowry et al. (1992), equation 4.
    """
    return rate / (2 - rate) * (1 - (1 - rate) ** (2 * np.arange(1, steps + 1)))
