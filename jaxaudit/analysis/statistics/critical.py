"""The critical magnitude: where the probability of collapse crosses one half, by isotonic regression."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jaxaudit.analysis.statistics.intervals import (
    Estimate,
    Missing,
    check_level,
    check_missing,
    outer_quantiles,
    tail_probabilities,
    undefined,
    wilson,
)


def isotonic(means: Any, weights: Any) -> np.ndarray:
    """Returns the non-decreasing sequence that is nearest to `means` in weighted least squares, `[..., M]`.

    It uses the min-max formula: fit_k is the maximum over i <= k of the minimum over j >= k of the mean of i..j.

    Args:
        means: `[..., M]`; ignored where the weight is zero.
        weights: `[..., M]`, not negative, at least one positive.
    """
    # SciPy's isotonic_regression takes one sequence and no zero weights. Calling it once for every bootstrap resample
    # is 3 to 10 times slower.
    w = np.asarray(weights, np.float64)
    weighted = np.where(w > 0, np.asarray(means, np.float64) * w, 0)
    zero = np.zeros((*w.shape[:-1], 1))
    sums, totals = (np.concatenate([zero, values.cumsum(-1)], -1) for values in (weighted, w))
    block_weight = totals[..., None, 1:] - totals[..., :-1, None]
    block_sum = sums[..., None, 1:] - sums[..., :-1, None]
    block_mean = np.divide(block_sum, block_weight, where=block_weight > 0, out=np.full(block_weight.shape, np.nan))
    fit = np.empty(w.shape)
    for k in range(w.shape[-1]):
        smallest = np.fmin.reduce(block_mean[..., : k + 1, k:], axis=-1)
        fit[..., k] = np.fmax.reduce(smallest, axis=-1)
    return fit


class _Crossings(NamedTuple):
    """Where fitted curves cross one half on the magnitude axis, each `[R]`: the point, and the bounds from the data."""

    point: np.ndarray
    low: np.ndarray
    high: np.ndarray


def _crossings(axis: np.ndarray, fit: np.ndarray) -> _Crossings:
    """Returns where non-decreasing fits `[R, M]` over the increasing `axis` `[M]` cross one half.

    A jump from 0 to 1 between two neighbours says only that the threshold lies between them. A fit that does not reach
    one half, or starts above it, bounds the threshold on one side and has no point.
    """
    size = axis.size
    rows = np.arange(fit.shape[0])

    def interpolated(right: np.ndarray) -> np.ndarray:
        hi = np.clip(right, 1, size - 1)
        before, after = fit[rows, hi - 1], fit[rows, hi]
        share = np.divide(0.5 - before, after - before, where=after > before, out=np.zeros(before.shape))
        return axis[hi - 1] + np.clip(share, 0, 1) * (axis[hi] - axis[hi - 1])

    n_below, n_not_above = (fit < 0.5).sum(-1), (fit <= 0.5).sum(-1)
    first = np.where(n_below == 0, axis[0], interpolated(n_below))
    last = np.where(n_not_above == size, axis[-1], interpolated(n_not_above))
    middle = (first + last) / 2
    never, always = n_below == size, n_not_above == 0
    hi = np.clip(n_below, 1, size - 1)
    jump = ~never & (n_below > 0) & (fit[rows, hi - 1] == 0) & (fit[rows, hi] == 1)
    low = np.where(never, axis[-1], np.where(always, -np.inf, np.where(jump, axis[hi - 1], middle)))
    high = np.where(never, np.inf, np.where(always, axis[0], np.where(jump, axis[hi], middle)))
    return _Crossings(np.where(never | always, np.nan, middle), low, high)


def harm_rises(magnitudes: Any, neutral: float) -> bool:
    """Returns whether collapses become more likely with the magnitude: True if none lies below the neutral one.

    Raises:
        ValueError: the magnitudes lie on both sides of the neutral one.
    """
    m = np.asarray(magnitudes, np.float64)
    if (m >= neutral).all():
        return True
    if (m <= neutral).all():
        return False
    raise ValueError(f"the magnitudes lie on both sides of {neutral:g}, which disturbs nothing")


def critical_magnitude(
    magnitudes: Any,
    collapsed: Any,
    *,
    increasing: bool = True,
    level: float = 0.95,
    resamples: int = 4_000,
    seed: int = 0,
    missing: Missing = "propagate",
) -> Estimate:
    """Returns the magnitude at which the probability of collapse crosses one half.

    The share of seeds that collapse is fitted by isotonic regression on the logarithm of the magnitude, and
    interpolated linearly at one half (the middle of the stretch where the fit equals one half). The interval resamples
    seeds, whole rows, with tails expanded as in `bootstrap`. A resample that jumps from 0 to 1 contributes the two
    magnitudes around the jump, so a deterministic threshold is estimated by their geometric mean, with these two as
    the interval. Too few seeds to tell a unanimous outcome from one half (under 4 at 95%) give [0, inf].

    Args:
        magnitudes: `[M]`, positive, distinct, in any order, at least two.
        collapsed: `[seeds, M]`, bool or 0/1 with NaN for unknown.
        increasing: whether larger magnitudes are more harmful; False for bits of precision, for example.
        level: the confidence level.
        resamples: the number of bootstrap resamples.
        seed: the random seed of the resampling.
        missing: see `jaxaudit.analysis.statistics.intervals`; `n` and `n_missing` count seeds, and a seed is missing
            where any of its entries is NaN. With "count" its known entries are still used.

    Returns:
        the estimate in units of the magnitude. Where the fit does not cross one half between the tested magnitudes,
        the value is NaN, the reason says on which side it lies, and the interval is one-sided (its other end is 0 or
        inf).

    Raises:
        ValueError: shapes, magnitudes or level are out of range.
    """
    check_level(level)
    check_missing(missing)
    m, table = _validated(magnitudes, collapsed)
    axis = np.log(m) if increasing else -np.log(m)
    order = np.argsort(axis)
    axis, table = axis[order], table[:, order]
    unknown = np.isnan(table)
    n_seeds, n_missing = table.shape[0], int(unknown.any(1).sum())
    reason = ""
    if n_missing and missing == "propagate":
        reason = f"{n_missing} of the {n_seeds} seeds have no value at some magnitude"
    if unknown.all(0).any():
        reason = "no seed has a value at some magnitude"
    if reason:
        return undefined(n_seeds - n_missing, n_missing, reason)
    estimated = _crossings(axis, _fit(table[None]))
    rows = table[~unknown.all(1)]
    ends = (-np.inf, np.inf)
    if wilson(0, len(rows), level=level).high < 0.5:
        indices = np.random.default_rng(seed).integers(len(rows), size=(resamples, len(rows)))
        resampled = _crossings(axis, _fit(rows[indices]))
        ends = outer_quantiles(resampled.low, resampled.high, *tail_probabilities(level, len(rows), "expanded"))
    value, low, high = (float(np.exp(v if increasing else -v)) for v in (estimated.point[0], *ends))
    if not increasing:
        low, high = high, low
    if np.isnan(value):
        reason = _one_sided_reason(estimated, m, increasing)
    return Estimate(value, low, high, n_seeds - n_missing, n_missing, reason)


FALLEN = "half of the seeds collapse undisturbed"
"""The reason for a critical magnitude of NaN: a share of one half is then no effect of the perturbation."""


def critical_beside(
    magnitudes: Any, collapsed: Any, control: Any, *, standing: bool = False, **options: Any
) -> Estimate:
    """Returns the critical magnitude, if fewer than half of the seeds collapse undisturbed.

    Args:
        magnitudes: `[M]`.
        collapsed: `[seeds, M]`.
        control: whether each seed's control collapses, `[seeds]`, bool or 0/1 with NaN for unknown.
        standing: whether to use only the seeds whose control is known not to collapse, however few they are.
        options: as for `critical_magnitude`.

    Returns:
        the estimate of `critical_magnitude`; NaN, with the reason, where at least half of the known controls collapse,
        or no seed is left.

    Raises:
        ValueError: as `critical_magnitude`, or the shapes differ.
    """
    m, table = _validated(magnitudes, collapsed)
    undisturbed = np.asarray(control, np.float64)
    if undisturbed.shape != table.shape[:1]:
        raise ValueError(f"control must have shape [{table.shape[0]}], got {undisturbed.shape}")
    n_collapsed, n_known = int((undisturbed == 1).sum()), int((~np.isnan(undisturbed)).sum())
    n_missing = table.shape[0] - n_known
    if standing:
        rows = table[undisturbed == 0]
        if not len(rows):
            return undefined(0, n_missing, "no seed's control is known to stand")
        return critical_magnitude(m, rows, **options)
    if n_known and 2 * n_collapsed >= n_known:
        return undefined(n_known, n_missing, FALLEN)
    return critical_magnitude(m, table, **options)


def _validated(magnitudes: Any, collapsed: Any) -> tuple[np.ndarray, np.ndarray]:
    m, table = np.asarray(magnitudes, np.float64), np.asarray(collapsed, np.float64)
    if m.ndim != 1 or m.size < 2 or not (np.isfinite(m) & (m > 0)).all() or np.unique(m).size != m.size:
        raise ValueError(f"magnitudes must be at least two distinct positive numbers, got {m.tolist()}")
    if table.ndim != 2 or table.shape[1] != m.size or table.shape[0] == 0:
        raise ValueError(f"collapsed must have shape [seeds, {m.size}], got {table.shape}")
    if not np.isin(table[~np.isnan(table)], (0, 1)).all():
        raise ValueError("collapsed must be 0, 1 or NaN")
    return m, table


def _fit(tables: np.ndarray) -> np.ndarray:
    """Returns the isotonic fits `[R, M]` to the shares of seeds that collapse in the tables `[R, seeds, M]`."""
    n_known = (~np.isnan(tables)).sum(1)
    share = np.nansum(tables, axis=1) / np.maximum(n_known, 1)
    return isotonic(share, n_known)


def _one_sided_reason(crossings: _Crossings, m: np.ndarray, increasing: bool) -> str:
    never = np.isposinf(crossings.high[0])
    bound = f"above {m.max():g}" if never == increasing else f"below {m.min():g}"
    side = "below" if never else "above"
    return f"critical magnitude {bound}: the fitted share stays {side} one half"
