"""Thresholds for a false-alarm rate, from clean runs a monitor was not trained on."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike


def threshold(scores: ArrayLike, alpha: float) -> float:
    """The value that a further clean run's score is above with a probability of at most alpha.

    A run's score is its largest of all steps: steps of a run depend on one another, runs do not. The threshold is
    the ceil((n + 1) (1 - alpha))-th smallest (split conformal prediction; Vovk et al., 2005): if the n runs and the
    further one are exchangeable, nothing else needs to hold, of the model or of the scores.

    That probability is an average over sets of n runs to calibrate on. With one such set the false-alarm rate is
    Beta(n + 1 - k, k) distributed, k being that rank, where scores have no ties (Vovk, 2012): for alpha = 0.05 and 19,
    100 or 500 runs it has a mean of 0.05, 0.05 and 0.05, and in one set of ten it is above 0.11, 0.08 and 0.06.
    `rate_interval` gives its spread.

    Args:
      scores: of n clean runs that the monitor was not trained on; infinite for a run that went out of bounds.
      alpha: false alarms per clean run, in (0, 1).

    Raises:
      ValueError: for NaN among the scores, alpha outside (0, 1), or too few runs for alpha: n >= 1 / alpha - 1.
    """
    ordered = np.sort(np.asarray(scores, np.float64).ravel())
    if np.isnan(ordered).any():
        raise ValueError("a clean run's score is NaN: it cannot be ordered")
    return float(ordered[rank(len(ordered), alpha) - 1])


def rank(runs: int, alpha: float) -> int:
    """Which of the scores of n clean runs is the threshold, counted from 1. Raises ValueError as `threshold` does."""
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must lie in (0, 1), not {alpha}")
    place = math.ceil((runs + 1) * (1 - alpha) - 1e-9)
    if place > runs:
        raise ValueError(
            f"{runs} clean runs are too few for a false-alarm rate of {alpha:g}: "
            f"it takes {fewest_runs(alpha)}, or an alpha of {1 / (runs + 1):.3g} and above"
        )
    return max(place, 1)


def rate_interval(runs: int, alpha: float, coverage: float = 0.9) -> tuple[float, float]:
    """Between which false-alarm rates the one of a set of n clean runs to calibrate on lies, with this probability.

    Equal tails of Beta(n + 1 - k, k), k the threshold's rank: the law of the share of further runs above it, of scores
    without ties (Vovk, 2012, "Conditional validity of inductive conformal predictors"). Raises ValueError as
    `threshold` does.
    """
    from scipy.special import betaincinv

    place = rank(runs, alpha)
    low, high = betaincinv(runs + 1 - place, place, [(1 - coverage) / 2, (1 + coverage) / 2])
    return float(low), float(high)


def fewest_runs(alpha: float) -> int:
    """The fewest clean runs from which a threshold for alpha can be had: n >= 1 / alpha - 1."""
    return math.ceil(1 / alpha - 1 - 1e-9)
