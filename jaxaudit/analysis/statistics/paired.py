"""Collapses paired by seed with the undisturbed control's: who falls only when disturbed, and who only when not."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from jaxaudit.analysis.statistics.intervals import Estimate, Missing, check_level, check_missing, wilson

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


class Excess(NamedTuple):
    """Events of seeds beside those of their controls.

    Fields:
        difference: (lost - spared) / n, the excess of the events' probability, with its interval.
        lost: b, the seeds with an event whose control has none.
        spared: c, the seeds without an event whose control has one.
        standing: the seeds whose control has no event.
    """

    difference: Estimate
    lost: int
    spared: int
    standing: int


class Columns(NamedTuple):
    """Columns of a summary and why figures among them are NaN, or ""."""

    values: dict[str, float | int]
    reason: str


def excess(lanes: Any, control: Any, *, level: float = 0.95, missing: Missing = "propagate") -> Excess:
    """How many seeds have an event that their controls do not have, and the reverse.

    Args:
        lanes: `[seeds]`, bool or 0/1 with NaN for unknown.
        control: `[seeds]`, in the same order.
        level: coverage of the interval of the difference (`paired_proportions`).
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
    both, lost, spared, neither = (
        int(cells.sum())
        for cells in (event & control_event, event & ~control_event, ~event & control_event, ~event & ~control_event)
    )
    n, absent = int(known.sum()), int((~known).sum())
    if n == 0 or (absent and missing == "propagate"):
        reason = f"{absent} of the {a.size} seeds have no value, here or undisturbed" if n else "no seed has a value"
        difference = Estimate(np.nan, np.nan, np.nan, n, absent, reason)
    else:
        difference = paired_proportions(both, lost, spared, neither, level=level)._replace(n_missing=absent)
    return Excess(difference, lost, spared, lost + neither)


def paired_proportions(both: int, first: int, second: int, neither: int, *, level: float = 0.95) -> Estimate:
    """The difference of two proportions of the same n units, first minus second, with its interval.

    Newcombe's method 10 (Statistics in Medicine 17:2635-2650, 1998): the Wilson intervals of the two proportions,
    added in squares, with the correlation of the two as in the table, its numerator corrected for continuity.

    Args:
        both: units with both events.
        first: units with the first event alone.
        second: units with the second alone.
        neither: units with none.
        level: coverage.

    Raises:
        ValueError: a count is negative, or all are zero.
    """
    counts = (both, first, second, neither)
    if min(counts) < 0 or sum(counts) == 0:
        raise ValueError(f"counts {counts} must not be negative, nor all be zero")
    n = sum(counts)
    one, other = (wilson(both + alone, n, level=level) for alone in (first, second))
    margins = (both + first) * (second + neither) * (both + second) * (first + neither)
    numerator: float = both * neither - first * second
    if numerator > 0:
        numerator = max(numerator - n / 2, 0)
    correlation = numerator / math.sqrt(margins) if margins else 0.0

    def added(x: float, y: float) -> float:
        return math.sqrt(max(x * x - 2 * correlation * x * y + y * y, 0.0))

    difference = (first - second) / n
    low = difference - added(one.value - one.low, other.high - other.value)
    high = difference + added(one.high - one.value, other.value - other.low)
    return Estimate(difference, low, high, n)


def collapsed(collapse_times: Any, before: float = np.inf) -> np.ndarray:
    """1 where T_c lies before a step (by default: at any), 0 where it does not, NaN where it is not known."""
    times = np.asarray(collapse_times, np.float64)
    return np.where(np.isnan(times), np.nan, times < before)


def excess_columns(collapse_times: Any, control: Any, *, kind: str = "collapse", before: float = np.inf) -> Columns:
    """The excess of collapses over the control's, as columns of a summary.

    Args:
        collapse_times: T_c, steps, `[seeds]`.
        control: T_c of the undisturbed control of the same onset, `[seeds]`.
        kind: what the columns are called.
        before: the step before which a collapse counts.

    Returns:
        `excess_KIND_probability` with `_low` and `_high`; the counts `excess_KIND_lost`, `excess_KIND_spared` and
        `excess_KIND_standing` (see `Excess`); and why the first is NaN, or "".
    """
    found = excess(collapsed(collapse_times, before), collapsed(control, before))
    value, low, high, *_, reason = found.difference
    name = f"excess_{kind}"
    columns = {f"{name}_probability": value, f"{name}_probability_low": low, f"{name}_probability_high": high}
    counts = {f"{name}_lost": found.lost, f"{name}_spared": found.spared, f"{name}_standing": found.standing}
    return Columns({**columns, **counts}, reason)
