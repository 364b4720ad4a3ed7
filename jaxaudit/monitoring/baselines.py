"""The baselines of the monitor: detectors that read one channel, and the list of all that it is compared with."""

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
from jaxaudit.monitoring.detector import CHARTS, ONE_CHANNEL, Detector, Score, infinite_when_diverged
from jaxaudit.monitoring.telemetry import StepwiseStats, forward_fill, std_floor

ChannelScore = Callable[[np.ndarray], np.ndarray]
"""Maps a channel's values `[n, T]` to scores `[n, T]`."""


@dataclass(frozen=True)
class ChannelDetector(ABC):
    """A detector that reads one channel, at every step its latest value; a run also diverges by other channels.

    Attributes:
      channel: the name of the channel.
    """

    channel: str

    label: ClassVar[str]
    family: ClassVar[str] = ONE_CHANNEL

    @property
    def name(self) -> str:
        """The name of the detector in tables and figures."""
        return f"{self.label} of {self.channel}"

    def fit(self, clean: np.ndarray, channels: Sequence[str]) -> Score:
        """Returns the score that is fitted to clean runs `[n, T, d]`, whose d channels have these names.

        Raises:
          ValueError: the channel is not among them.
        """
        if self.channel not in channels:
            raise ValueError(f"no channel '{self.channel}'; there are: {', '.join(sorted(channels))}")
        column = list(channels).index(self.channel)
        score = self.fit_channel(forward_fill(clean[..., column]))
        return infinite_when_diverged(lambda runs: score(forward_fill(runs[..., column])), clean)

    @abstractmethod
    def fit_channel(self, clean: np.ndarray) -> ChannelScore:
        """Returns the score of the channel that is fitted to its values in clean runs, `[n, T]`.

        Values are forward-filled, and NaN before the first; scores are not NaN.
        """


MIN_TREND_VALUES = 10
"""The fewest values of an indicator that have a trend."""


@dataclass(frozen=True)
class CriticalSlowingDown(ChannelDetector):
    """The trend of an indicator in a rolling window (Scheffer et al., 2009; Dakos et al., 2012).

    Values are standardised by the clean runs at the same step, which removes the trends that clean runs have in mean
    and variance. The trend is Kendall's tau of the indicator against time, standardised by the taus of surrogates:
    series of an autoregression that is fitted to the clean runs.

    Attributes:
      window: the steps that a value of the indicator is computed from.
      trend: the number of latest values of the indicator that tau is computed from.
      surrogates: the number of surrogate series.
    """

    window: int = 50
    trend: int = 100
    surrogates: int = 1000

    @abstractmethod
    def indicator(self, windows: np.ndarray) -> np.ndarray:
        """Returns the indicator `[...]` of windows `[..., window]`."""

    def fit_channel(self, clean: np.ndarray) -> ChannelScore:
        """Returns tau in standard deviations from the mean over surrogates of the same length; 0 in too short runs."""
        stats = StepwiseStats.fit(clean)
        coefficients = fit_autoregression(stats.standardise(clean))
        steps = self.window + self.trend - 1
        surrogate_taus = self.taus(simulate_autoregression(coefficients, self.surrogates, steps))
        mean, std = surrogate_taus.mean(axis=0), surrogate_taus.std(axis=0)

        def scores(values: np.ndarray) -> np.ndarray:
            z = np.zeros_like(values)
            tau = self.taus(stats.standardise(values))[:, MIN_TREND_VALUES - 1 :]
            first = MIN_TREND_VALUES - 1
            lengths = np.minimum(np.arange(first, first + tau.shape[1]), self.trend - 1)
            z[:, self.window + MIN_TREND_VALUES - 2 :] = (tau - mean[lengths]) / std[lengths]
            return z

        return scores

    def taus(self, z: np.ndarray) -> np.ndarray:
        """Returns tau at every value of the indicator, `[n, T - window + 1]`, of standardised values `[n, T]`."""
        if z.shape[1] < self.window:
            return np.empty((len(z), 0))
        windows = np.lib.stride_tricks.sliding_window_view(z, self.window, axis=1)
        return rolling_kendall_tau(self.indicator(windows), self.trend)


@dataclass(frozen=True)
class RollingVariance(CriticalSlowingDown):
    """The trend of the variance in a rolling window."""

    label: ClassVar[str] = "rolling variance"

    def indicator(self, windows: np.ndarray) -> np.ndarray:
        return windows.var(axis=-1)


@dataclass(frozen=True)
class Autocorrelation(CriticalSlowingDown):
    """The trend of the lag-1 autocorrelation in a rolling window."""

    label: ClassVar[str] = "autocorrelation"

    def indicator(self, windows: np.ndarray) -> np.ndarray:
        """Returns the lag-1 autocorrelation, which is 0 in a window of equal values."""
        centred = windows - windows.mean(axis=-1, keepdims=True)
        products = (centred[..., 1:] * centred[..., :-1]).sum(axis=-1)
        squares = (centred**2).sum(axis=-1)
        return np.divide(products, squares, out=np.zeros_like(products), where=squares > 0)


def rolling_kendall_tau(values: np.ndarray, length: int) -> np.ndarray:
    """Returns Kendall's tau against time of the latest `length` values at every step, or of all so far: `[n, T]`.

    It is tau-a: pairs of equal values count as neither concordant nor discordant. It is 0 for the first value.
    """
    steps = values.shape[1]
    balance = np.zeros(values.shape)
    for lag in range(1, min(length, steps)):
        signs = np.cumsum(np.sign(values[:, lag:] - values[:, :-lag]), axis=1)
        balance[:, lag:] += signs
        balance[:, length:] -= signs[:, : max(steps - length, 0)]
    count = np.minimum(np.arange(1, steps + 1), length)
    return balance / np.maximum(count * (count - 1) / 2, 1)


def fit_autoregression(z: np.ndarray, max_order: int = 10) -> np.ndarray:
    """Returns the coefficients of an autoregression of runs `[n, T]` with mean zero, of the order with the best AIC.

    They solve the Yule-Walker equations with autocovariances that are averaged over the runs.
    """
    steps = z.shape[1]
    orders = range(1, min(max_order, steps - 1) + 1)
    covariance = np.array([np.vdot(z[:, lag:], z[:, : steps - lag]) for lag in (0, *orders)]) / z.size
    best, lowest_aic = np.zeros(1), np.inf
    if covariance[0] == 0:
        return best
    for order in orders:
        coefficients = solve_toeplitz(covariance[:order], covariance[1 : order + 1])
        unexplained = 1 - coefficients @ covariance[1 : order + 1] / covariance[0]
        aic = z.size * np.log(max(unexplained, 1e-12)) + 2 * order
        if aic < lowest_aic:
            best, lowest_aic = coefficients, aic
    return best


def simulate_autoregression(coefficients: np.ndarray, count: int, steps: int, burn_in: int = 1000) -> np.ndarray:
    """Returns series `[count, steps]` of a stationary Gaussian autoregression with innovations of variance 1."""
    noise = np.random.default_rng(0).normal(size=(count, burn_in + steps))
    return lfilter([1.0], np.concatenate([[1.0], -coefficients]), noise, axis=1)[:, burn_in:]


@dataclass(frozen=True)
class ChannelDeviation(ChannelDetector):
    """The distance in standard deviations from the clean runs' mean at the same step (Shewhart, 1931)."""

    label: ClassVar[str] = "deviation"

    def fit_channel(self, clean: np.ndarray) -> ChannelScore:
        stats = StepwiseStats.fit(clean)
        return lambda values: np.abs(stats.standardise(values))


@dataclass(frozen=True)
class CUSUM(ChannelDetector):
    """Two-sided tabular CUSUM of standardised values (Page, 1954; Montgomery, 2019, section 9.1).

    Attributes:
      slack: k, in standard deviations: half of the smallest lasting shift to detect.
    """

    slack: float = 0.5
    label: ClassVar[str] = "CUSUM"

    def fit_channel(self, clean: np.ndarray) -> ChannelScore:
        """Returns the larger of the sums upwards and downwards."""
        stats = StepwiseStats.fit(clean)
        return lambda values: cusum(stats.standardise(values), self.slack)


def cusum(z: np.ndarray, slack: float) -> np.ndarray:
    """Returns `max(C+, C-)` at every step of standardised values `[n, T]`.

    C+ = max(0, C+ + z - k), and C- is the same for -z, with k the slack.
    """
    up = down = np.zeros(len(z))
    scores = np.empty_like(z)
    for t, step_z in enumerate(z.T):
        up = np.maximum(0.0, up + step_z - slack)
        down = np.maximum(0.0, down - step_z - slack)
        scores[:, t] = np.maximum(up, down)
    return scores


@dataclass(frozen=True)
class SixSigma(ChannelDetector):
    """The distance in standard deviations above the mean of the steps before.

    Trainers of language models skip an update if the loss or the gradient norm is more than 6 standard deviations above
    the mean of 128 steps (OLMo-core, Levanter, MaxText). Clean runs only determine the smallest standard deviation.

    Attributes:
      history: the number of steps before that are averaged.
      sign: 1 if large values are bad, -1 if small ones are.
      min_history: the fewest steps before with values; with fewer, the score is 0.
    """

    history: int = 128
    sign: float = 1.0
    min_history: int = 16
    label: ClassVar[str] = "six-sigma rule"

    def fit_channel(self, clean: np.ndarray) -> ChannelScore:
        floor = float(std_floor(clean))
        return lambda values: self.sign * history_z(values, self.history, self.min_history, floor)


def history_z(values: np.ndarray, history: int, min_history: int, floor: float) -> np.ndarray:
    """Returns `(x_t - mean) / std`, by mean and std of the `history` values before x_t: `[n, T]`.

    Args:
      values: `[n, T]`, NaN before the first.
      history: the number of values before that are used.
      min_history: the fewest values before, at least 2; with fewer, the result is 0.
      floor: the smallest standard deviation.
    """
    scores = np.zeros_like(values)
    for t in range(min_history, values.shape[1]):
        before = values[:, max(0, t - history) : t]
        enough = np.isfinite(before).sum(axis=1) >= min_history
        before = before[enough]
        mean = np.nanmean(before, axis=1)
        std = np.maximum(np.nanstd(before, axis=1, ddof=1), floor)
        scores[enough, t] = (values[enough, t] - mean) / std
    return scores


@dataclass(frozen=True)
class ZClip(ChannelDetector):
    """The distance in standard deviations of the gradient norm above its moving average (ZClip; Kumar et al., 2025).

    As in the paper, the moving averages start from mean and variance of the first steps, and a norm beyond `limit`
    enters them clipped. Clean runs only determine the smallest standard deviation.

    Attributes:
      decay: the decay of mean and variance per step.
      limit: the z beyond which a norm is clipped.
      warmup: the number of first steps, whose score is 0.
    """

    channel: str = "gradient_norm"
    decay: float = 0.97
    limit: float = 2.5
    warmup: int = 25
    label: ClassVar[str] = "ZClip"

    def fit_channel(self, clean: np.ndarray) -> ChannelScore:
        floor = float(std_floor(clean))

        def scores(values: np.ndarray) -> np.ndarray:
            z = np.zeros_like(values)
            starts = first_observed(values)
            for first in np.unique(starts):
                rows = starts == first
                z[rows, first:] = self.moving_z(values[rows, first:], floor)
            return z

        return scores

    def moving_z(self, norms: np.ndarray, floor: float) -> np.ndarray:
        """Returns the score of norms `[n, T]` without missing values."""
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


def first_observed(values: np.ndarray) -> np.ndarray:
    """Returns the step of the first finite value of each run `[n, T]`: int `[n]`, and T if there is none."""
    observed = np.isfinite(values)
    return np.where(observed.any(axis=1), observed.argmax(axis=1), values.shape[1])


BATCH = 100
"""The number of runs that are scored at a time: as many as fit in the processor's cache."""


@dataclass(frozen=True)
class BOCPD(ChannelDetector):
    """The log odds that mean or variance of standardised values changed recently (Adams & MacKay, 2007).

    Between changes, values are normal; their mean and variance have a normal-inverse-gamma prior.

    Attributes:
      hazard: the prior probability of a change per step.
      recent: the number of latest steps in which a change counts as recent.
    """

    hazard: float = 1 / 100
    recent: int = 10
    label: ClassVar[str] = "BOCPD"

    def fit_channel(self, clean: np.ndarray) -> ChannelScore:
        stats = StepwiseStats.fit(clean)

        def scores(values: np.ndarray) -> np.ndarray:
            z = stats.standardise(values)
            odds = np.empty_like(z)
            for first in range(0, len(z), BATCH):
                batch = slice(first, first + BATCH)
                odds[batch] = log_odds_of_change(z[batch], self.hazard, self.recent)
            return odds

        return scores


def log_odds_of_change(z: np.ndarray, hazard: float, recent: int) -> np.ndarray:
    """Returns the log odds that the segment at every step began within the last `recent` steps: `[n, T]`.

    The last steps include the current one. A run's first segment never counts as a change, and the odds at the first
    step are the prior odds. The prior of a segment's mean is N(0, variance), and that of its variance
    inverse-gamma(1, 1). All segments are tracked, without pruning, and in logarithms, so that odds do not saturate.

    Args:
      z: values `[n, T]`, finite.
      hazard: the prior probability of a change per step.
      recent: the number of latest steps.
    """
    runs, steps = z.shape
    length = np.arange(steps)[:, None]
    kappa, alpha = 1.0 + length, 1.0 + length / 2
    # The factor of Student's predictive distribution that depends on the segment's length alone.
    constant = gammaln(alpha + 0.5) - gammaln(alpha) + 0.5 * np.log(kappa / (kappa + 1)) - 0.5 * np.log(2 * np.pi)
    # Row s is the segment that began at step s; mass is its joint log probability with all values so far.
    mean, log_beta, mass = np.zeros((steps, runs)), np.zeros((steps, runs)), np.zeros((steps, runs))
    beta = np.ones((steps, runs))
    odds = np.full((runs, steps), np.log(hazard) - np.log1p(-hazard))
    for t in range(steps):
        # The segments have lengths t, t - 1, ..., 0 before the value of step t.
        k, a, c = kappa[t::-1], alpha[t::-1], constant[t::-1]
        distance = z[:, t] - mean[: t + 1]
        beta[: t + 1] += k / (2 * (k + 1)) * distance**2
        before = a * log_beta[: t + 1]
        log_beta[: t + 1] = np.log(beta[: t + 1])
        mass[: t + 1] += c + before - (a + 0.5) * log_beta[: t + 1]
        mean[: t + 1] += distance / (k + 1)
        total = old = _log_sum_exp(mass[: max(1, t + 1 - recent)])
        if t:
            new = _log_sum_exp(mass[max(1, t + 1 - recent) : t + 1])
            odds[:, t] = new - old
            total = np.logaddexp(new, old)
        mass[: t + 1] += np.log1p(-hazard)
        mass[t + 1 : t + 2] = total + np.log(hazard)
    return odds


def _log_sum_exp(mass: np.ndarray) -> np.ndarray:
    top = mass.max(axis=0)
    return top + np.log(np.exp(mass - top).sum(axis=0))


def standard_baselines(channels: Sequence[str]) -> tuple[Detector, ...]:
    """Returns the baselines for these channels: charts of all together, of each alone, and rules that trainers use.

    Detectors of performance, loss or gradient norm are left out if there is no such channel. The performance is the one
    that training shows: the acting performance if it is a channel.
    """
    performance = ACTING if ACTING in channels else PERFORMANCE
    detectors: list[Detector] = [*CHARTS, *(ChannelDeviation(channel) for channel in channels)]
    norm = gradient_norm_channel(channels)
    if performance in channels:
        detectors += [detector(performance) for detector in (CUSUM, RollingVariance, Autocorrelation, BOCPD)]
    if norm:
        detectors += [CUSUM(norm), BOCPD(norm)]
    if "loss" in channels:
        detectors.append(SixSigma("loss"))
    elif performance in channels:
        detectors.append(SixSigma(performance, sign=-1.0))
    if norm:
        detectors += [SixSigma(norm), ZClip(norm)]
    return tuple(detectors)


def gradient_norm_channel(channels: Sequence[str]) -> str | None:
    """Returns "gradient_norm" if it is a channel, else the first channel that starts or ends with it; not a layer's."""
    if "gradient_norm" in channels:
        return "gradient_norm"
    similar = (c for c in channels if c.startswith("gradient_norm") or c.endswith("gradient_norm"))
    return next((c for c in similar if "[" not in c), None)
