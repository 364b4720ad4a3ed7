"""The detectors that a monitor has to beat."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy.linalg import solve_toeplitz
from scipy.signal import lfilter
from scipy.special import gammaln

from jaxaudit.core.channel_names import ACTING, PERFORMANCE
from jaxaudit.monitoring.channels import Channels
from jaxaudit.monitoring.charts import Chart, ChartReference
from jaxaudit.monitoring.detector import ALL_CHANNELS, ONE_CHANNEL, Detector, Score
from jaxaudit.monitoring.envelope import StepwiseStats, forward_filled, least_spread
from jaxaudit.monitoring.scorer import ScoreNormalizer, by_other_parts
from jaxaudit.monitoring.scores import TELEMETRY


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
        """The name of the detector in tables and figures."""
        return f"{self.label} of {self.channel}"

    @property
    def family(self) -> str:
        """The family of detectors that it is listed with."""
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


FEWEST = 10
"""Values of an indicator with fewer before them have no trend."""


@dataclass(frozen=True)
class SlowingDown(OneChannel):
    """The trend of an indicator in a rolling window (Scheffer et al., 2009; Dakos et al., 2012).

    Values are standardised by the clean runs of that step, which takes out the trend that clean runs have in mean and
    variance, from the past alone. The trend is Kendall's tau of the indicator against time, standardised by the taus
    of surrogates: series of an autoregression fitted to the clean runs.

    Attributes:
      window: steps of an indicator's value.
      trend: values of the indicator that tau counts, the latest.
      surrogates: how many.
    """

    window: int = 50
    trend: int = 100
    surrogates: int = 1000

    @abstractmethod
    def indicator(self, windows: np.ndarray) -> np.ndarray:
        """Returns the indicator of windows `[..., window]`, `[...]`."""

    def fit_channel(self, clean: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        """Tau in standard deviations from the mean of surrogates as long, `[n, T]`; 0 where the run is too short."""
        envelope = StepwiseStats.of(clean)
        coefficients = autoregression(envelope.standardise(clean))
        steps = self.window + self.trend - 1
        usual = self.taus(autoregressive_series(coefficients, self.surrogates, steps))
        mean, std = usual.mean(axis=0), usual.std(axis=0)

        def scores(values: np.ndarray) -> np.ndarray:
            found = np.zeros_like(values)
            tau = self.taus(envelope.standardise(values))[:, FEWEST - 1 :]
            known = np.minimum(np.arange(FEWEST - 1, FEWEST - 1 + tau.shape[1]), self.trend - 1)
            found[:, self.window + FEWEST - 2 :] = (tau - mean[known]) / std[known]
            return found

        return scores

    def taus(self, z: np.ndarray) -> np.ndarray:
        """Tau at every value of the indicator, `[n, T - window + 1]`, of standardised values `[n, T]`."""
        if z.shape[1] < self.window:
            return np.empty((len(z), 0))
        windows = np.lib.stride_tricks.sliding_window_view(z, self.window, axis=1)
        return rolling_tau(self.indicator(windows), self.trend)


@dataclass(frozen=True)
class RollingVariance(SlowingDown):
    """The trend of the variance in a rolling window."""

    label: ClassVar[str] = "rolling variance"

    def indicator(self, windows: np.ndarray) -> np.ndarray:
        """The variance about the window's own mean."""
        return windows.var(axis=-1)


@dataclass(frozen=True)
class Autocorrelation(SlowingDown):
    """The trend of the lag-1 autocorrelation in a rolling window."""

    label: ClassVar[str] = "autocorrelation"

    def indicator(self, windows: np.ndarray) -> np.ndarray:
        """The lag-1 autocorrelation; 0 where nothing varies."""
        centred = windows - windows.mean(axis=-1, keepdims=True)
        products = (centred[..., 1:] * centred[..., :-1]).sum(axis=-1)
        squares = (centred**2).sum(axis=-1)
        return np.divide(products, squares, out=np.zeros_like(products), where=squares > 0)


def rolling_tau(values: np.ndarray, length: int) -> np.ndarray:
    """Kendall's tau against time of the latest `length` values or as many as there are, at every step `[n, T]`.

    It is tau-a: equal values count as neither. 0 for the first value.
    """
    steps = values.shape[1]
    balance = np.zeros(values.shape)
    for lag in range(1, min(length, steps)):
        signs = np.cumsum(np.sign(values[:, lag:] - values[:, :-lag]), axis=1)
        balance[:, lag:] += signs
        balance[:, length:] -= signs[:, : max(steps - length, 0)]
    count = np.minimum(np.arange(1, steps + 1), length)
    return balance / np.maximum(count * (count - 1) / 2, 1)


def autoregression(z: np.ndarray, highest: int = 10) -> np.ndarray:
    """Coefficients of the autoregression that fits runs `[n, T]` of mean zero, of the order that AIC prefers.

    They solve the Yule-Walker equations, of autocovariances averaged over the runs.
    """
    steps = z.shape[1]
    orders = range(1, min(highest, steps - 1) + 1)
    covariance = np.array([np.vdot(z[:, lag:], z[:, : steps - lag]) for lag in (0, *orders)]) / z.size
    best, least = np.zeros(1), np.inf
    if covariance[0] == 0:
        return best
    for order in orders:
        coefficients = solve_toeplitz(covariance[:order], covariance[1 : order + 1])
        unexplained = 1 - coefficients @ covariance[1 : order + 1] / covariance[0]
        criterion = z.size * np.log(max(unexplained, 1e-12)) + 2 * order
        if criterion < least:
            best, least = coefficients, criterion
    return best


def autoregressive_series(coefficients: np.ndarray, count: int, steps: int, burn_in: int = 1000) -> np.ndarray:
    """Series `[count, steps]` of a stationary Gaussian autoregression with innovations of variance 1."""
    noise = np.random.default_rng(0).normal(size=(count, burn_in + steps))
    return lfilter([1.0], np.concatenate([[1.0], -coefficients]), noise, axis=1)[:, burn_in:]


ChannelScore = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class SingleChannel(OneChannel):
    """How many standard deviations the value is from the mean of clean runs at that step (Shewhart, 1931)."""

    label: ClassVar[str] = "deviation"

    def fit_channel(self, clean: np.ndarray) -> ChannelScore:
        envelope = StepwiseStats.of(clean)
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
        envelope = StepwiseStats.of(clean)
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


BATCH = 100
"""Runs at a time: as many as the processor's cache holds."""


@dataclass(frozen=True)
class BOCPD(OneChannel):
    """The log odds that mean or variance of standardised values changed of late (Adams & MacKay, 2007).

    Between changes values are normal, of a mean and variance that are normal-inverse-gamma a priori.

    Attributes:
      hazard: probability of a change, a step.
      recent: steps a change is looked for in, the latest.
    """

    hazard: float = 1 / 100
    recent: int = 10
    label: ClassVar[str] = "BOCPD"

    def fit_channel(self, clean: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        envelope = StepwiseStats.of(clean)

        def scores(values: np.ndarray) -> np.ndarray:
            z = envelope.standardise(values)
            found = np.empty_like(z)
            for first in range(0, len(z), BATCH):
                batch = slice(first, first + BATCH)
                found[batch] = log_odds_of_change(z[batch], self.hazard, self.recent)
            return found

        return scores


def log_odds_of_change(z: np.ndarray, hazard: float, recent: int) -> np.ndarray:
    """Log odds that the segment at every step began within the last `recent` steps, that one included, `[n, T]`.

    A run's first segment is no change, whenever it began; at the first step, the odds are those a priori. A
    segment's mean is N(0, variance) and its variance inverse-gamma(1, 1). All segments are followed, none left out;
    everything is in logarithms, so that odds do not saturate.

    Args:
      z: values `[n, T]`, finite.
      hazard: probability of a change, a step.
      recent: steps.
    """
    runs, steps = z.shape
    length = np.arange(steps)[:, None]
    kappa, alpha = 1.0 + length, 1.0 + length / 2
    # Of Student's predictive distribution, the factor that depends on the segment's length alone.
    constant = gammaln(alpha + 0.5) - gammaln(alpha) + 0.5 * np.log(kappa / (kappa + 1)) - 0.5 * np.log(2 * np.pi)
    # Row s is the segment that began at step s: mass is the joint log probability with all values so far.
    mean, log_beta, mass = np.zeros((steps, runs)), np.zeros((steps, runs)), np.zeros((steps, runs))
    beta = np.ones((steps, runs))
    odds = np.full((runs, steps), np.log(hazard) - np.log1p(-hazard))
    for t in range(steps):
        # Lengths t, t - 1, ..., 0: those of the segments before the value of step t.
        k, a, c = kappa[t::-1], alpha[t::-1], constant[t::-1]
        distance = z[:, t] - mean[: t + 1]
        beta[: t + 1] += k / (2 * (k + 1)) * distance**2
        before = a * log_beta[: t + 1]
        log_beta[: t + 1] = np.log(beta[: t + 1])
        mass[: t + 1] += c + before - (a + 0.5) * log_beta[: t + 1]
        mean[: t + 1] += distance / (k + 1)
        total = old = _log_sum(mass[: max(1, t + 1 - recent)])
        if t:
            new = _log_sum(mass[max(1, t + 1 - recent) : t + 1])
            odds[:, t] = new - old
            total = np.logaddexp(new, old)
        mass[: t + 1] += np.log1p(-hazard)
        mass[t + 1 : t + 2] = total + np.log(hazard)
    return odds


def _log_sum(mass: np.ndarray) -> np.ndarray:
    top = mass.max(axis=0)
    return top + np.log(np.exp(mass - top).sum(axis=0))


def standard(channels: Sequence[str]) -> tuple[Detector, ...]:
    """The baselines for telemetry of these channels: charts of all together, each alone, and what trainers use.

    Detectors of performance, loss or gradient norm are left out where there is no such channel; that of performance
    is the one that training shows.
    """
    shown = ACTING if ACTING in channels else PERFORMANCE
    detectors: list[Detector] = [*CHARTS, *(SingleChannel(channel) for channel in channels)]
    norm = gradient_norm(channels)
    if shown in channels:
        detectors += [kind(shown) for kind in (CUSUM, RollingVariance, Autocorrelation, BOCPD)]
    if norm:
        detectors += [CUSUM(norm), BOCPD(norm)]
    if "loss" in channels:
        detectors.append(SixSigma("loss"))
    elif shown in channels:
        detectors.append(SixSigma(shown, sign=-1.0))
    if norm:
        detectors += [SixSigma(norm), ZClip(norm)]
    return tuple(detectors)


def gradient_norm(channels: Sequence[str]) -> str | None:
    """The channel of the gradient's norm: that name, else the first that starts or ends in it; not a layer's."""
    if "gradient_norm" in channels:
        return "gradient_norm"
    alike = (c for c in channels if c.startswith("gradient_norm") or c.endswith("gradient_norm"))
    return next((c for c in alike if "[" not in c), None)


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
        """The name of the detector in tables and figures."""
        return self.title or self.chart.title

    @property
    def family(self) -> str:
        """The family of detectors that it is listed with."""
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

        yardstick = ScoreNormalizer.of(by_other_parts(of_some, len(y)))

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
    """Returns the variance of a moving average of independent values of variance 1 at steps 1 to T, `[T]` (Lowry et
    al., eq. 4).
    """
    return rate / (2 - rate) * (1 - (1 - rate) ** (2 * np.arange(1, steps + 1)))


CHARTS = (
    MultichannelChart(Chart(departure=(1.0,)), "Hotelling's T2"),
    *(MultichannelChart(Chart(departure=(rate,))) for rate in (0.05, 0.1, 0.2, 0.4)),
    MultichannelChart(Chart(departure=(), outlier=(1.0,))),
    MultichannelChart(Chart(departure=(1.0,), outlier=(1.0,))),
    MultichannelChart(TELEMETRY, "the monitor's score without its model"),
)
"""The charts that every comparison has."""
