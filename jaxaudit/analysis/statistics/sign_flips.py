"""The mean of paired differences, tested and bounded exactly by flipping their signs."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from jaxaudit.analysis.statistics.intervals import check_level

MOST_ENUMERATED = 16
"""Differences up to which all flips of signs are gone through; of more, as many as of these are drawn."""


class SignFlips(NamedTuple):
    """A mean of paired differences.

    Fields:
      value: the mean; NaN without differences.
      low, high: ends of its interval; NaN where the differences are too few for one (under 6 at 95%).
      coverage: the probability that the interval holds the centre; 0 without one.
      p: two-sided, of differences at least as far from zero by flips of signs alone; 1 without differences.
      n: differences.
      detectable: the true mean that such a test, at 1 - level, finds with a probability of about 0.8 at this many
        differences of this spread; NaN where the spread is zero, or cannot be told.
    """

    value: float
    low: float
    high: float
    coverage: float
    p: float
    n: int
    detectable: float


def sign_flips(differences: Any, *, level: float = 0.95, seed: int = 0) -> SignFlips:
    """The mean of differences `[n]` of pairs, finite, with an exact test and interval.

    Where a pair's two members could as well be exchanged, every flip of signs is as probable as the one seen: Fisher's
    test (1935). The interval's ends are order statistics of the means of all subsets (Hartigan's typical values, 1969);
    it is exact for differences that are symmetric about their centre, and conservative where they are tied.

    Args:
        differences: `[n]`, e.g. of scores of the same seeds.
        level: coverage.
        seed: of the flips that are drawn, for more than `MOST_ENUMERATED` differences.

    Raises:
        ValueError: they are not finite, or the level is out of range.
    """
    check_level(level)
    x = np.asarray(differences, np.float64)
    if x.ndim != 1 or not np.isfinite(x).all():
        raise ValueError(f"differences must be finite, of shape [n], not of shape {x.shape}")
    n = x.size
    if not n:
        return SignFlips(math.nan, math.nan, math.nan, 0.0, 1.0, 0, math.nan)
    subsets = _subsets(n, seed)
    sums = subsets @ x
    flipped = np.abs(2.0 * sums - x.sum())
    near = 1e-9 * max(np.abs(x).max(), 1e-300) * n
    p = float((flipped >= abs(x.sum()) - near).mean())
    sizes = subsets.sum(axis=1)
    means = np.sort(sums[sizes > 0] / sizes[sizes > 0])
    cut = math.floor((1 - level) / 2 * len(subsets))
    low = high = math.nan
    if cut:
        low, high = float(means[cut - 1]), float(means[-cut])
    coverage = 1 - 2 * cut / len(subsets) if cut else 0.0
    return SignFlips(float(x.mean()), low, high, coverage, p, n, _detectable(x, level))


def _subsets(n: int, seed: int) -> np.ndarray:
    """Rows of 0 and 1, float `[subsets, n]`: all there are, or as many drawn, the first one empty."""
    if n <= MOST_ENUMERATED:
        return ((np.arange(2**n)[:, None] >> np.arange(n)) & 1).astype(np.float64)
    drawn = np.random.default_rng(seed).integers(0, 2, (2**MOST_ENUMERATED, n)).astype(np.float64)
    drawn[0] = 0.0
    return drawn


def _detectable(x: np.ndarray, level: float) -> float:
    if x.size < 3 or not x.std():
        return math.nan
    from scipy.special import stdtrit

    both = stdtrit(x.size - 1, 1 - (1 - level) / 2) + stdtrit(x.size - 1, 0.8)
    return float(both * x.std(ddof=1) / math.sqrt(x.size))


def holm(p: Any) -> np.ndarray:
    """P-values `[m]` adjusted for their number (Holm, 1979): `[m]`, at most 1."""
    values = np.asarray(p, np.float64)
    order = np.argsort(values, kind="stable")
    steps = values[order] * (values.size - np.arange(values.size))
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return adjusted
