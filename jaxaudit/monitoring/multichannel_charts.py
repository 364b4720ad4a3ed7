"""Control charts of all channels together, without a model: what a monitor that has one must beat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.signal import lfilter

from jaxaudit.monitoring.channels import Channels
from jaxaudit.monitoring.charts import Chart, ChartReference
from jaxaudit.monitoring.detector import ALL_CHANNELS, Score
from jaxaudit.monitoring.envelope import forward_filled
from jaxaudit.monitoring.one_channel import infinite_when_diverged
from jaxaudit.monitoring.scorer import Yardstick, by_other_parts
from jaxaudit.monitoring.scores import TELEMETRY


@dataclass(frozen=True)
class MultichannelChart:
    """A chart of telemetry that is standardised, compared and whitened as the monitor's is, in float64.

    Of several statistics the most unusual one counts, each on the scale of the clean runs fitted to.

    Attributes:
      chart: its statistics.
      title: in tables; "": the chart's own.
    """

    chart: Chart
    title: str = ""

    @property
    def name(self) -> str:
        """In tables."""
        return self.title or self.chart.title

    @property
    def family(self) -> str:
        """In tables."""
        return ALL_CHANNELS

    def fit(self, clean: np.ndarray, channels: Sequence[str]) -> Score:
        """The score, fitted to clean runs `[n, T, d]` whose d channels have these names.

        Raises:
          ValueError: no channel differs between the clean runs.
        """
        known = Channels.of(channels, clean)
        y, seen = known.standardise(known.pick(clean, channels))
        reference = ChartReference.of(y, seen)

        def of_some(scored: np.ndarray, referred: np.ndarray) -> np.ndarray:
            return statistics(ChartReference.of(y[referred], seen[referred]), y[scored], seen[scored], self.chart)

        yardstick = Yardstick.of(by_other_parts(of_some, len(y)))

        def score(runs: np.ndarray) -> np.ndarray:
            found = statistics(reference, *known.standardise(known.pick(runs, channels)), self.chart)
            return yardstick.combine(found, np)

        return infinite_when_diverged(score, clean)


def statistics(reference: ChartReference, y: np.ndarray, seen: np.ndarray, chart: Chart) -> np.ndarray:
    """A chart's scores `[n, T, S]` of runs `[n, T, d]`, whose telemetry is standardised."""
    z = reference.telemetry.standardise(forward_filled(np.where(seen > 0, y, np.nan)))
    far = [mean_square(z @ reference.decorrelate, rate) for rate in chart.departure]
    return np.stack(far + [largest_square(z, rate) for rate in chart.outlier], axis=-1)


def mean_square(x: np.ndarray, rate: float) -> np.ndarray:
    """T2 of the moving average of whitened values `[n, T, d]`, over d: `[n, T]` (MEWMA; Lowry et al., 1992)."""
    return (moving_average(x, rate) ** 2).mean(axis=-1) / variance(x.shape[1], rate)


def largest_square(z: np.ndarray, rate: float) -> np.ndarray:
    """The largest square of the channels' moving averages, `[n, T, d]` to `[n, T]`, over their variance."""
    return (moving_average(z, rate) ** 2).max(axis=-1) / variance(z.shape[1], rate)


def moving_average(x: np.ndarray, rate: float) -> np.ndarray:
    """`m_t = (1 - r) m_{t-1} + r x_t` along the steps of `[n, T, d]`, from zero."""
    return lfilter([rate], [1.0, rate - 1.0], x, axis=1)


def variance(steps: int, rate: float) -> np.ndarray:
    """That of a moving average of independent values of variance 1 at steps t = 1 to T: `[T]` (Lowry et al., eq. 4)."""
    return rate / (2 - rate) * (1 - (1 - rate) ** (2 * np.arange(1, steps + 1)))


CHARTS = (
    MultichannelChart(Chart(departure=(1.0,)), "Hotelling's T2"),
    *(MultichannelChart(Chart(departure=(rate,))) for rate in (0.05, 0.1, 0.2, 0.4)),
    MultichannelChart(Chart(departure=(), outlier=(1.0,))),
    MultichannelChart(Chart(departure=(1.0,), outlier=(1.0,))),
    MultichannelChart(TELEMETRY, "the monitor's score without its model"),
)
"""The charts that every comparison has."""
