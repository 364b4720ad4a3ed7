"""Bayesian online change-point detection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy.special import gammaln

from jaxaudit.monitoring.envelope import Envelope
from jaxaudit.monitoring.one_channel import OneChannel

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
        """Log odds `[n, T]`."""
        envelope = Envelope.of(clean)

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
