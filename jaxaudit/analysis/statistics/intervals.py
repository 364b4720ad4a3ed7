"""Population statistics over seeds, each figure with its interval; host-side NumPy in float64.

NaN among the seeds is a *missing* value, never dropped in silence: every `Estimate` says how many were used
(`n`) and how many were missing, and by default (`missing="propagate"`) a missing value makes the figure NaN.
`missing="count"` takes the figure over the values present; use it where NaN is part of a metric's definition
(the recovery rate of a run that fully collapsed) and report `n_missing` beside it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

Missing = Literal["propagate", "count"]
Method = Literal["expanded", "percentile", "bca"]
Statistic = Callable[..., Any]


class Estimate(NamedTuple):
    """A figure, its interval, and the values it stands on.

    Fields:
        value: the figure; NaN where it cannot be computed.
        low, high: ends of the interval; NaN where the values are too few for one (under 5 at 95%).
        n: values used.
        n_missing: values that were NaN.
        reason: why `value` is NaN, else empty.
    """

    value: float
    low: float
    high: float
    n: int
    n_missing: int = 0
    reason: str = ""


def present(values: Any, missing: Missing) -> tuple[np.ndarray, int, str]:
    """The values that are not NaN, how many were, and why no figure can be given ("" if one can)."""
    check_missing(missing)
    x = np.asarray(values, np.float64)
    if x.ndim != 1:
        raise ValueError(f"values must have shape [seeds], got {x.shape}")
    present = x[~np.isnan(x)]
    absent = x.size - present.size
    if present.size == 0:
        return present, absent, f"none of the {x.size} seeds has a value"
    if absent and missing == "propagate":
        return present, absent, f"{absent} of the {x.size} seeds have no value"
    return present, absent, ""


def check_missing(missing: str) -> None:
    """Raises ValueError for a way to treat missing values that there is not."""
    if missing not in ("propagate", "count"):
        raise ValueError(f"missing = {missing!r}: must be 'propagate' or 'count'")


def check_level(level: float) -> None:
    """Raises ValueError for a coverage outside (0, 1)."""
    if not 0 < level < 1:
        raise ValueError(f"level = {level!r}: must lie between 0 and 1")


@functools.lru_cache(maxsize=4096)
def wilson(successes: int, n: int, *, level: float = 0.95) -> Estimate:
    """A proportion with its Wilson score interval (Wilson, 1927).

    Args:
        successes: events counted, 0 to `n`.
        n: trials; 0 gives a NaN figure with the interval [0, 1].
        level: coverage.

    Raises:
        ValueError: counts or level out of range.
    """
    check_level(level)
    if not 0 <= successes <= n:
        raise ValueError(f"successes = {successes} of n = {n}: must be between 0 and n")
    if n == 0:
        return Estimate(np.nan, 0.0, 1.0, 0, 0, "there are no trials")
    from scipy.stats import binomtest  # half a second, which a worker need not spend

    ends = binomtest(successes, n).proportion_ci(level, method="wilson")
    return Estimate(successes / n, float(ends.low), float(ends.high), n)


def proportion(events: Any, *, level: float = 0.95, missing: Missing = "propagate") -> Estimate:
    """The share of seeds with an event, with its Wilson interval.

    Args:
        events: `[seeds]`, bool or 0/1 with NaN for unknown.
        level: coverage.
        missing: see the module.

    Raises:
        ValueError: a value is neither 0, 1 nor NaN.
    """
    x, absent, reason = present(events, missing)
    if not np.isin(x, (0, 1)).all():
        raise ValueError("events must be 0, 1 or NaN")
    if reason:
        return Estimate(np.nan, np.nan, np.nan, x.size, absent, reason)
    return wilson(int(x.sum()), x.size, level=level)._replace(n_missing=absent)


def divergence(
    collapse_times: Any, total_steps: int, *, level: float = 0.95, missing: Missing = "propagate"
) -> Estimate:
    """P_div (Table S5): the share of seeds with `T_c < total_steps / 2`, with its Wilson interval.

    Args:
        collapse_times: `[seeds]`, steps; inf for never.
        total_steps: T_max, steps.
        level: coverage.
        missing: see the module.
    """
    times = np.asarray(collapse_times, np.float64)
    early = np.where(np.isnan(times), np.nan, times < total_steps / 2)
    return proportion(early, level=level, missing=missing)


def interquartile_mean(values: Any, axis: int = -1) -> Any:
    """Mean of the values left when the lowest and highest quarter, `floor(n / 4)` each, are taken away.

    Args:
        values: floats; inf is allowed.
        axis: the axis of the seeds.

    Returns:
        the values' shape without `axis`; NaN where any value is NaN.
    """
    x = np.sort(np.moveaxis(np.asarray(values, np.float64), axis, -1), axis=-1)
    cut = x.shape[-1] // 4
    middle = x[..., cut : x.shape[-1] - cut].mean(-1)
    return np.where(np.isnan(x).any(-1), np.nan, middle)[()]


def tails(level: float, n: int, method: Method) -> tuple[float, float]:
    """Probabilities at which the bootstrap distribution is read.

    "expanded" (Hesterberg, 2015) widens the percentile interval by what it lacks in small samples: the factor
    n / (n - 1) of the variance, and Student's t for the normal.
    """
    tail = (1 - level) / 2
    if method == "expanded":
        from scipy.special import ndtr, stdtrit

        tail = float(ndtr(np.sqrt(n / (n - 1)) * stdtrit(n - 1, tail)))
    return tail, 1 - tail


def read_tails(lows: np.ndarray, highs: np.ndarray, low: float, high: float) -> tuple[float, float]:
    """Outer order statistics at two probabilities; nothing is interpolated, so infinities are kept."""
    return float(np.quantile(lows, low, method="lower")), float(np.quantile(highs, high, method="higher"))


def _bca_tails(x: np.ndarray, draws: np.ndarray, statistic: Statistic, level: float) -> tuple[float, float]:
    value = statistic(x, axis=-1)
    share = ((draws < value).mean() + (draws <= value).mean()) / 2
    from scipy.special import ndtr, ndtri

    bias = ndtri(np.clip(share, 0.5 / draws.size, 1 - 0.5 / draws.size))
    left_out = statistic(np.array([np.delete(x, i) for i in range(x.size)]), axis=-1)
    spread = left_out.mean() - left_out
    scale = 6 * (spread**2).sum() ** 1.5
    acceleration = (spread**3).sum() / scale if scale > 0 else 0.0
    z = bias + ndtri(np.array([(1 - level) / 2, (1 + level) / 2]))
    low, high = ndtr(bias + z / (1 - acceleration * z))
    return float(low), float(high)


class Ranks(NamedTuple):
    """Which order statistics of n values bound their population's median.

    Attributes:
      low, high: from 1 to n.
      coverage: the probability that they do, whatever the distribution.
    """

    low: int
    high: int
    coverage: float


def ranks(n: int, level: float = 0.95) -> Ranks:
    """The narrowest symmetric pair with at least coverage `level`, or the outermost pair if none has it.

    Exact: a value lies below the median with probability one half, so their number is binomial.
    """
    from scipy.special import bdtr

    covers = [1 - 2 * float(bdtr(r - 1, n, 0.5)) for r in range(1, n // 2 + 1)]
    best = max((r for r, cover in enumerate(covers, 1) if cover >= level), default=1)
    return Ranks(best, n + 1 - best, covers[best - 1] if covers else 0.0)


def seeds_for(level: float) -> int:
    """The fewest seeds that can bound a median with coverage `level`."""
    return math.ceil(1 - math.log2(1 - level))


SHORTFALL = 0.02
"""By how much the coverage that few seeds allow may miss the one asked for; else there is no interval."""


def _too_few(n: int, level: float) -> bool:
    """Whether n values cannot bound a figure: a median lies between the least and the greatest of five with
    probability 0.94, and resampling does not get beyond them.
    """
    return ranks(n, level).coverage < level - SHORTFALL


def median(values: Any, *, level: float = 0.95, missing: Missing = "propagate") -> Estimate:
    """The lower median over seeds, a value that occurred, between two order statistics (see `ranks`).

    Nothing is averaged, so values that stand for something (-1, inf) keep their meaning.

    Args:
        values: `[seeds]`; inf is allowed.
        level: coverage; the interval is NaN where the seeds are too few for it (under 5 at 95%).
        missing: see the module.
    """
    check_level(level)
    x, absent, reason = present(values, missing)
    if reason:
        return Estimate(np.nan, np.nan, np.nan, x.size, absent, reason)
    x = np.sort(x)
    value = float(x[(x.size - 1) // 2])
    if _too_few(x.size, level):
        return Estimate(value, np.nan, np.nan, x.size, absent)
    low, high, _ = ranks(x.size, level)
    return Estimate(value, float(x[low - 1]), float(x[high - 1]), x.size, absent)


def bootstrap(
    values: Any,
    *,
    statistic: Statistic = interquartile_mean,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
    method: Method = "expanded",
    missing: Missing = "propagate",
) -> Estimate:
    """A statistic over seeds with its bootstrap interval, the same for the same `seed`.

    The default, "expanded", is the percentile interval corrected for the number of seeds: with 8 of them
    plain percentile and BCa intervals for a mean cover about 90% where 95% is asked for. Interval ends are
    order statistics of the resampled values; equal values give an interval of no width. Under 5 values (at
    95%) there is none: resampling does not get beyond them, and with 3 would cover 75%.

    Args:
        values: `[seeds]`; inf is allowed (not with "bca").
        statistic: called as `statistic(x, axis=-1)` on `[seeds]` and `[resamples, seeds]`.
        level: coverage.
        resamples: bootstrap resamples.
        seed: of the resampling.
        method: "expanded" (Hesterberg, 2015), "percentile" or "bca" (Efron, 1987).
        missing: see the module.

    Raises:
        ValueError: an argument is out of range.
    """
    check_level(level)
    if method not in ("expanded", "percentile", "bca"):
        raise ValueError(f"method = {method!r}: must be 'expanded', 'percentile' or 'bca'")
    x, absent, reason = present(values, missing)
    if reason:
        return Estimate(np.nan, np.nan, np.nan, x.size, absent, reason)
    if method == "bca" and not np.isfinite(x).all():
        raise ValueError("method = 'bca' needs finite values; use 'expanded' or 'percentile'")
    value = float(statistic(x, axis=-1))
    if _too_few(x.size, level):
        return Estimate(value, np.nan, np.nan, x.size, absent)
    draws = statistic(x[_drawn(x.size, resamples, seed)], axis=-1)
    chosen = _bca_tails(x, draws, statistic, level) if method == "bca" else tails(level, x.size, method)
    low, high = read_tails(draws, draws, *chosen)
    return Estimate(value, low, high, x.size, absent)


@functools.lru_cache(maxsize=2)
def _drawn(n: int, resamples: int, seed: int) -> np.ndarray:
    """Which of n values each resample holds, `[resamples, n]`; the same for all conditions of a run."""
    return np.random.default_rng(seed).integers(n, size=(resamples, n))


def paired_difference(lanes: Any, control: Any, **options: Any) -> Estimate:
    """A statistic of `lanes - control`, differences taken seed by seed, with its bootstrap interval.

    It is the statistic of the differences, not the difference of two statistics: the randomness that lanes of
    one seed share cancels. A seed with NaN on either side, or inf on both, is missing.

    Args:
        lanes: `[seeds]`.
        control: `[seeds]`, in the same order.
        options: as for `bootstrap`.

    Raises:
        ValueError: the shapes differ.
    """
    a, b = np.asarray(lanes, np.float64), np.asarray(control, np.float64)
    if a.shape != b.shape:
        raise ValueError(f"lanes {a.shape} and control {b.shape} must have the same shape [seeds]")
    with np.errstate(invalid="ignore"):
        difference = a - b
    return bootstrap(difference, **options)
