"""Critical slowing down: before a transition fluctuations grow, and each is more like the last."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy.linalg import solve_toeplitz
from scipy.signal import lfilter

from jaxaudit.monitoring.envelope import Envelope
from jaxaudit.monitoring.one_channel import OneChannel

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
        """Of windows `[..., window]`, `[...]`."""

    def fit_channel(self, clean: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        """Tau in standard deviations from the mean of surrogates as long, `[n, T]`; 0 where the run is too short."""
        envelope = Envelope.of(clean)
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
