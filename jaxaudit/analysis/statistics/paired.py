"""Statistics of pairs: a seed's lane with its control's, or a variant's score with the plain learner's."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from jaxaudit.analysis.statistics.intervals import (
    Estimate,
    Missing,
    check_level,
    check_missing,
    collapsed,
    interval_columns,
    undefined,
    wilson,
)

MOST_ENUMERATED = 16
"""The largest number of differences whose sign flips are all enumerated; 2**16 random flips are used for more."""


class SignFlips(NamedTuple):
    """The mean of paired differences, with a permutation test and an interval.

    Fields:
      value: the mean; NaN without differences.
      low, high: the ends of the interval; NaN for too few differences (under 6 at 95%).
      coverage: the probability that the interval contains the centre of the distribution; 0 without an interval.
      p: the two-sided p-value of a mean at least as far from zero; 1 without differences.
      n: the number of differences.
      detectable: the true mean that this test, at 1 - level, detects with a probability of about 0.8 with as many
        differences of the same standard deviation; NaN where that is zero or unknown.
    """

    value: float
    low: float
    high: float
    coverage: float
    p: float
    n: int
    detectable: float


def sign_flips(differences: Any, *, level: float = 0.95, seed: int = 0) -> SignFlips:
    """Returns the mean of paired differences with an exact test and interval, by flipping their signs.

    If the members of each pair are exchangeable, every flip of signs is as probable as the one observed: Fisher's
    permutation test (1935). The interval's ends are order statistics of the means of all subsets (Hartigan's typical
    values, 1969). It is exact for differences that are symmetric about their centre, and conservative for ties.

    Args:
        differences: `[n]`, finite, such as differences of the scores of the same seeds.
        level: the confidence level.
        seed: the random seed of the flips, for more than `MOST_ENUMERATED` differences.

    Raises:
        ValueError: the differences are not finite or not one-dimensional, or the level is out of range.
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
    rounding = 1e-9 * max(np.abs(x).max(), 1e-300) * n
    p = float((flipped >= abs(x.sum()) - rounding).mean())
    sizes = subsets.sum(axis=1)
    means = np.sort(sums[sizes > 0] / sizes[sizes > 0])
    cut = math.floor((1 - level) / 2 * len(subsets))
    low = high = math.nan
    coverage = 0.0
    if cut:
        low, high = float(means[cut - 1]), float(means[-cut])
        coverage = 1 - 2 * cut / len(subsets)
    return SignFlips(float(x.mean()), low, high, coverage, p, n, _detectable(x, level))


def _subsets(n: int, seed: int) -> np.ndarray:
    """Returns subsets of n items as rows of 0.0 and 1.0, `[subsets, n]`: all of them, or random ones if n is large.

    The first row is the empty subset.
    """
    if n <= MOST_ENUMERATED:
        return ((np.arange(2**n)[:, None] >> np.arange(n)) & 1).astype(np.float64)
    subsets = np.random.default_rng(seed).integers(0, 2, (2**MOST_ENUMERATED, n)).astype(np.float64)
    subsets[0] = 0.0
    return subsets


def _detectable(x: np.ndarray, level: float) -> float:
    if x.size < 3 or not x.std():
        return math.nan
    from scipy.special import stdtrit

    quantiles = stdtrit(x.size - 1, 1 - (1 - level) / 2) + stdtrit(x.size - 1, 0.8)
    return float(quantiles * x.std(ddof=1) / math.sqrt(x.size))


def holm(p: Any) -> np.ndarray:
    """Returns p-values `[m]` adjusted for their number by Holm's method (1979), `[m]`, at most 1."""
    values = np.asarray(p, np.float64)
    order = np.argsort(values, kind="stable")
    scaled = values[order] * (values.size - np.arange(values.size))
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1.0)
    return adjusted


class Excess(NamedTuple):
    """Counts of seeds with an event, compared with the controls of the same seeds.

    Fields:
        difference: (lost - spared) / n, the excess of the event's probability over the control's, with its interval.
        lost: b, the number of seeds with the event whose control has none.
        spared: c, the number of seeds without the event whose control has it.
        standing: the number of seeds whose control does not have the event.
    """

    difference: Estimate
    lost: int
    spared: int
    standing: int


class ExcessColumns(NamedTuple):
    """Columns of a summary table, and why the probability among them is NaN ("" if it is not)."""

    values: dict[str, float | int]
    reason: str


def excess(lanes: Any, control: Any, *, level: float = 0.95, missing: Missing = "propagate") -> Excess:
    """Returns how many seeds have an event that their control does not have, and the reverse.

    Args:
        lanes: `[seeds]`, bool or 0/1 with NaN for unknown.
        control: `[seeds]`, in the same order.
        level: the confidence level of the difference's interval (`paired_proportions`).
        missing: see `jaxaudit.analysis.statistics.intervals`; a seed with NaN on either side is missing, and not
            counted.

    Raises:
        ValueError: the shapes differ, or a value is neither 0, 1 nor NaN.
    """
    check_missing(missing)
    a, b = np.asarray(lanes, np.float64), np.asarray(control, np.float64)
    if a.shape != b.shape or a.ndim != 1:
        raise ValueError(f"lanes {a.shape} and control {b.shape} must have the same shape [seeds]")
    if not all(np.isin(x[~np.isnan(x)], (0, 1)).all() for x in (a, b)):
        raise ValueError("events must be 0, 1 or NaN")
    known = ~np.isnan(a) & ~np.isnan(b)
    event, control_event = a[known] == 1, b[known] == 1
    lost, spared = int((event & ~control_event).sum()), int((~event & control_event).sum())
    neither, n = int((~event & ~control_event).sum()), int(known.sum())
    both = n - lost - spared - neither
    n_missing = a.size - n
    if n == 0:
        difference = undefined(n, n_missing, "no seed has a value")
    elif n_missing and missing == "propagate":
        difference = undefined(n, n_missing, f"{n_missing} of the {a.size} seeds have no value, here or undisturbed")
    else:
        difference = paired_proportions(both, lost, spared, neither, level=level)._replace(n_missing=n_missing)
    return Excess(difference, lost, spared, lost + neither)


def paired_proportions(both: int, first: int, second: int, neither: int, *, level: float = 0.95) -> Estimate:
    """Returns the difference of two proportions of the same n units, first minus second, with its interval.

    Newcombe's method 10 (Statistics in Medicine 17:2635-2650, 1998) combines the Wilson intervals of the two
    proportions as a root of squares, with the correlation in the 2 x 2 table, whose numerator is corrected for
    continuity.

    Args:
        both: the number of units with both events.
        first: the number of units with the first event alone.
        second: the number of units with the second event alone.
        neither: the number of units with neither event.
        level: the confidence level.

    Raises:
        ValueError: a count is negative, or all are zero.
    """
    counts = (both, first, second, neither)
    if min(counts) < 0 or sum(counts) == 0:
        raise ValueError(f"counts {counts} must not be negative, nor all be zero")
    n = sum(counts)
    wilson_first, wilson_second = (wilson(both + alone, n, level=level) for alone in (first, second))
    margins = (both + first) * (second + neither) * (both + second) * (first + neither)
    numerator: float = both * neither - first * second
    if numerator > 0:
        numerator = max(numerator - n / 2, 0)
    correlation = numerator / math.sqrt(margins) if margins else 0.0

    def combined(x: float, y: float) -> float:
        return math.sqrt(max(x * x - 2 * correlation * x * y + y * y, 0.0))

    difference = (first - second) / n
    low = difference - combined(wilson_first.value - wilson_first.low, wilson_second.high - wilson_second.value)
    high = difference + combined(wilson_first.high - wilson_first.value, wilson_second.value - wilson_second.low)
    return Estimate(difference, low, high, n)


def excess_columns(
    collapse_times: Any, control: Any, *, kind: str = "collapse", before: float = np.inf
) -> ExcessColumns:
    """Returns the excess of collapses over the control's, as columns of a summary table.

    Args:
        collapse_times: T_c of each seed in steps, `[seeds]`.
        control: T_c of the undisturbed control of the same onset, `[seeds]`.
        kind: the part of the columns' names that says what is counted.
        before: the step before which a collapse counts.

    Returns:
        `excess_KIND_probability` with `_low` and `_high`; the counts `excess_KIND_lost`, `excess_KIND_spared` and
        `excess_KIND_standing` (see `Excess`); and the reason for a probability of NaN, or "".
    """
    counts = excess(collapsed(collapse_times, before), collapsed(control, before))
    name, (value, low, high, *_, reason) = f"excess_{kind}", counts.difference
    columns = {f"{name}_lost": counts.lost, f"{name}_spared": counts.spared, f"{name}_standing": counts.standing}
    return ExcessColumns({**interval_columns(f"{name}_probability", value, low, high), **columns}, reason)
