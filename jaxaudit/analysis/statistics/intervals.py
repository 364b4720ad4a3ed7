"""Statistics of a value over seeds, each with its confidence interval, computed with NumPy in float64.

NaN among the seeds is a *missing* value and is never dropped silently. Every `Estimate` counts the values that were
used (`n`) and those that were missing (`n_missing`). The argument `missing` says what a missing value does:

- "propagate", the default: the estimate is NaN.
- "count": the estimate is computed from the values present. Use it where NaN is part of a metric's definition, as in
  the recovery rate of a run that collapsed completely, and report `n_missing` beside the estimate.
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
    """A point estimate with its confidence interval and sample size.

    Fields:
        value: the point estimate; NaN where it cannot be computed.
        low, high: the ends of the interval; NaN where the sample is too small for one (under 5 values at 95%).
        n: the number of values used.
        n_missing: the number of values that were NaN.
        reason: why `value` is NaN; empty otherwise.
    """

    value: float
    low: float
    high: float
    n: int
    n_missing: int = 0
    reason: str = ""


def undefined(n: int, n_missing: int, reason: str = "") -> Estimate:
    """Returns an estimate whose value and interval are NaN, with the sample's sizes and the reason."""
    return Estimate(np.nan, np.nan, np.nan, n, n_missing, reason)


def interval_columns(name: str, value: float, low: float, high: float) -> dict[str, float]:
    """Returns an estimate as columns of a table: `name`, `name_low` and `name_high`."""
    return {name: value, f"{name}_low": low, f"{name}_high": high}


def drop_missing(values: Any, missing: Missing) -> tuple[np.ndarray, int, str]:
    """Returns the values `[n]` that are not NaN, the number of NaN, and why there is no estimate ("" if there is one).

    Raises:
        ValueError: `values` is not one-dimensional, or `missing` is unknown.
    """
    check_missing(missing)
    x = np.asarray(values, np.float64)
    if x.ndim != 1:
        raise ValueError(f"values must have shape [seeds], got {x.shape}")
    present = x[~np.isnan(x)]
    n_missing = x.size - present.size
    reason = ""
    if present.size == 0:
        reason = f"none of the {x.size} seeds has a value"
    elif n_missing and missing == "propagate":
        reason = f"{n_missing} of the {x.size} seeds have no value"
    return present, n_missing, reason


def check_missing(missing: str) -> None:
    """Raises ValueError unless the treatment of missing values is "propagate" or "count"."""
    if missing not in ("propagate", "count"):
        raise ValueError(f"missing = {missing!r}: must be 'propagate' or 'count'")


def check_level(level: float) -> None:
    """Raises ValueError unless the confidence level lies between 0 and 1, both excluded."""
    if not 0 < level < 1:
        raise ValueError(f"level = {level!r}: must lie between 0 and 1")


@functools.lru_cache(maxsize=4096)
def wilson(successes: int, n: int, *, level: float = 0.95) -> Estimate:
    """Returns a proportion with its Wilson score interval (Wilson, 1927).

    Args:
        successes: the number of events, 0 to `n`.
        n: the number of trials; with 0 the value is NaN and the interval [0, 1].
        level: the confidence level.

    Raises:
        ValueError: the counts or the level are out of range.
    """
    check_level(level)
    if not 0 <= successes <= n:
        raise ValueError(f"successes = {successes} of n = {n}: must be between 0 and n")
    if n == 0:
        return Estimate(np.nan, 0.0, 1.0, 0, 0, "there are no trials")
    # Importing scipy.stats takes half a second, which a worker process should not spend.
    from scipy.stats import binomtest

    interval = binomtest(successes, n).proportion_ci(level, method="wilson")
    return Estimate(successes / n, float(interval.low), float(interval.high), n)


def proportion(events: Any, *, level: float = 0.95, missing: Missing = "propagate") -> Estimate:
    """Returns the share of seeds with an event, with its Wilson interval.

    Args:
        events: `[seeds]`, bool or 0/1, with NaN for unknown.
        level: the confidence level.
        missing: the treatment of NaN, see the module's docstring.

    Raises:
        ValueError: a value is neither 0, 1 nor NaN.
    """
    x, n_missing, reason = drop_missing(events, missing)
    if not np.isin(x, (0, 1)).all():
        raise ValueError("events must be 0, 1 or NaN")
    if reason:
        return undefined(x.size, n_missing, reason)
    return wilson(int(x.sum()), x.size, level=level)._replace(n_missing=n_missing)


def collapsed(collapse_times: Any, before: float = np.inf) -> np.ndarray:
    """Returns 1 where the collapse time T_c lies before the step `before`, 0 where not, and NaN where T_c is NaN."""
    times = np.asarray(collapse_times, np.float64)
    return np.where(np.isnan(times), np.nan, times < before)


def divergence(
    collapse_times: Any, total_steps: int, *, level: float = 0.95, missing: Missing = "propagate"
) -> Estimate:
    """Returns P_div (Table S5), the share of seeds with `T_c < total_steps / 2`, with its Wilson interval.

    Args:
        collapse_times: T_c of each seed, `[seeds]`, in steps; inf where the seed never collapses.
        total_steps: T_max, the number of steps of a run.
        level: the confidence level.
        missing: the treatment of NaN, see the module's docstring.
    """
    return proportion(collapsed(collapse_times, total_steps / 2), level=level, missing=missing)


def interquartile_mean(values: Any, axis: int = -1) -> Any:
    """Returns the mean of the values without the lowest and the highest quarter, of `floor(n / 4)` values each.

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


def tail_probabilities(level: float, n: int, method: Method) -> tuple[float, float]:
    """Returns the lower and the upper probability whose quantiles of the bootstrap distribution are the interval.

    The method "expanded" (Hesterberg, 2015) corrects the percentile interval, which is too narrow for small samples:
    it multiplies the variance by n / (n - 1) and replaces the normal distribution by Student's t.
    """
    tail = (1 - level) / 2
    if method == "expanded":
        from scipy.special import ndtr, stdtrit

        tail = float(ndtr(np.sqrt(n / (n - 1)) * stdtrit(n - 1, tail)))
    return tail, 1 - tail


def outer_quantiles(lows: np.ndarray, highs: np.ndarray, low: float, high: float) -> tuple[float, float]:
    """Returns the quantile `low` of `lows`, rounded down to a value, and the quantile `high` of `highs`, rounded up.

    Nothing is interpolated, so infinite values are allowed.
    """
    return float(np.quantile(lows, low, method="lower")), float(np.quantile(highs, high, method="higher"))


def _bca_tail_probabilities(
    x: np.ndarray, resampled: np.ndarray, statistic: Statistic, level: float
) -> tuple[float, float]:
    from scipy.special import ndtr, ndtri

    value = statistic(x, axis=-1)
    share = ((resampled < value).mean() + (resampled <= value).mean()) / 2
    bias = ndtri(np.clip(share, 0.5 / resampled.size, 1 - 0.5 / resampled.size))
    jackknife = statistic(np.array([np.delete(x, i) for i in range(x.size)]), axis=-1)
    spread = jackknife.mean() - jackknife
    scale = 6 * (spread**2).sum() ** 1.5
    acceleration = (spread**3).sum() / scale if scale > 0 else 0.0
    z = bias + ndtri(np.array([(1 - level) / 2, (1 + level) / 2]))
    low, high = ndtr(bias + z / (1 - acceleration * z))
    return float(low), float(high)


class Ranks(NamedTuple):
    """The two order statistics of a sample that bound the median of its population.

    Attributes:
      low, high: the ranks of the order statistics, counted from 1.
      coverage: the probability that the median lies between them, for any continuous distribution.
    """

    low: int
    high: int
    coverage: float


def ranks(n: int, level: float = 0.95) -> Ranks:
    """Returns the narrowest symmetric pair of ranks with a coverage of at least `level`, or else the outermost pair.

    The coverage is exact: a value lies below the median with probability one half, so the number of values below it is
    binomially distributed.
    """
    from scipy.special import bdtr

    coverages = [1 - 2 * float(bdtr(rank - 1, n, 0.5)) for rank in range(1, n // 2 + 1)]
    low = max((rank for rank, coverage in enumerate(coverages, 1) if coverage >= level), default=1)
    return Ranks(low, n + 1 - low, coverages[low - 1] if coverages else 0.0)


def seeds_for(level: float) -> int:
    """Returns the smallest number of seeds that can bound a median with coverage `level`."""
    return math.ceil(1 - math.log2(1 - level))


COVERAGE_TOLERANCE = 0.02
"""How far the coverage that a small sample allows may fall below the confidence level before no interval is given."""


def _is_too_small(n: int, level: float) -> bool:
    # Five values bound the median with probability 0.94, and no resample leaves the range of its sample.
    return ranks(n, level).coverage < level - COVERAGE_TOLERANCE


def median(values: Any, *, level: float = 0.95, missing: Missing = "propagate") -> Estimate:
    """Returns the lower median over seeds, with an interval between two order statistics (see `ranks`).

    The lower median is one of the values. Nothing is averaged, so values with a special meaning (-1, inf) keep it.

    Args:
        values: `[seeds]`; inf is allowed.
        level: the confidence level; the interval is NaN for too few seeds (under 5 at 95%).
        missing: the treatment of NaN, see the module's docstring.
    """
    check_level(level)
    x, n_missing, reason = drop_missing(values, missing)
    if reason:
        return undefined(x.size, n_missing, reason)
    x = np.sort(x)
    value = float(x[(x.size - 1) // 2])
    if _is_too_small(x.size, level):
        return Estimate(value, np.nan, np.nan, x.size, n_missing)
    low, high, _ = ranks(x.size, level)
    return Estimate(value, float(x[low - 1]), float(x[high - 1]), x.size, n_missing)


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
    """Returns a statistic over seeds with its bootstrap interval, which is the same for the same `seed`.

    The default method, "expanded", is the percentile interval corrected for the sample size: with 8 seeds, percentile
    and BCa intervals of a mean cover about 90% at a nominal 95%. The interval's ends are order statistics of the
    resampled statistics, and equal values give an interval of width zero. Under 5 values (at 95%) there is no interval:
    resamples stay within the range of the sample, and 3 values would cover 75%.

    Args:
        values: `[seeds]`; inf is allowed (not with "bca").
        statistic: called as `statistic(x, axis=-1)` on `[seeds]` and `[resamples, seeds]`.
        level: the confidence level.
        resamples: the number of bootstrap resamples.
        seed: the random seed of the resampling.
        method: "expanded" (Hesterberg, 2015), "percentile" or "bca" (Efron, 1987).
        missing: the treatment of NaN, see the module's docstring.

    Raises:
        ValueError: an argument is out of range.
    """
    check_level(level)
    if method not in ("expanded", "percentile", "bca"):
        raise ValueError(f"method = {method!r}: must be 'expanded', 'percentile' or 'bca'")
    x, n_missing, reason = drop_missing(values, missing)
    if reason:
        return undefined(x.size, n_missing, reason)
    if method == "bca" and not np.isfinite(x).all():
        raise ValueError("method = 'bca' needs finite values; use 'expanded' or 'percentile'")
    value = float(statistic(x, axis=-1))
    if _is_too_small(x.size, level):
        return Estimate(value, np.nan, np.nan, x.size, n_missing)
    resampled = statistic(x[_resample_indices(x.size, resamples, seed)], axis=-1)
    if method == "bca":
        tails = _bca_tail_probabilities(x, resampled, statistic, level)
    else:
        tails = tail_probabilities(level, x.size, method)
    low, high = outer_quantiles(resampled, resampled, *tails)
    return Estimate(value, low, high, x.size, n_missing)


@functools.lru_cache(maxsize=2)  # all conditions of a run share the indices
def _resample_indices(n: int, resamples: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(n, size=(resamples, n))


def paired_difference(lanes: Any, control: Any, **options: Any) -> Estimate:
    """Returns a statistic of the seeds' differences `lanes - control`, with its bootstrap interval.

    It is the statistic of the differences, not the difference of two statistics, so the randomness that lanes of the
    same seed share cancels. A seed is missing where either value is NaN, or both are the same infinity.

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
