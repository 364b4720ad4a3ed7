"""The magnitude at which half of the seeds collapse, from the outcomes at several."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jaxaudit.analysis.statistics.intervals import (
    Estimate,
    Missing,
    check_level,
    check_missing,
    read_tails,
    tails,
    wilson,
)


def isotonic(means: Any, weights: Any) -> np.ndarray:
    """The non-decreasing sequence nearest to `means` in weighted least squares.

    By the min-max formula: fit_k is the maximum over i <= k of the minimum over j >= k of the mean of i..j.

    Args:
        means: `[..., M]`; ignored where the weight is zero.
        weights: `[..., M]`, not negative, at least one positive.

    Returns:
        `[..., M]`.
    """
    # SciPy's isotonic_regression takes one sequence and no zero weights; over a bootstrap's it is 3 to 10 times slower.
    w = np.asarray(weights, np.float64)
    total = np.where(w > 0, np.asarray(means, np.float64) * w, 0)
    zero = np.zeros((*w.shape[:-1], 1))
    sums, counts = (np.concatenate([zero, part.cumsum(-1)], -1) for part in (total, w))
    count = counts[..., None, 1:] - counts[..., :-1, None]
    block = np.divide(
        sums[..., None, 1:] - sums[..., :-1, None], count, where=count > 0, out=np.full(count.shape, np.nan)
    )
    size = w.shape[-1]
    fit = np.empty(w.shape)
    for k in range(size):
        lowest = np.fmin.reduce(block[..., : k + 1, k:], axis=-1)
        fit[..., k] = np.fmax.reduce(lowest, axis=-1)
    return fit


class _Crossings(NamedTuple):
    """Where fits pass one half on the magnitude axis, `[R]`: the point and the bounds the data put on it."""

    point: np.ndarray
    low: np.ndarray
    high: np.ndarray


def _crossings(axis: np.ndarray, fit: np.ndarray) -> _Crossings:
    """Crossings of one half by non-decreasing fits `[R, M]` over the increasing `axis` `[M]`.

    A jump from 0 to 1 between two neighbours says only that the threshold lies between them; a fit that does
    not reach one half, or starts above it, bounds the threshold from one side and has no point.
    """
    size = axis.size
    rows = np.arange(fit.shape[0])

    def where_it_passes(right: np.ndarray) -> np.ndarray:
        hi = np.clip(right, 1, size - 1)
        before, after = fit[rows, hi - 1], fit[rows, hi]
        share = np.divide(0.5 - before, after - before, where=after > before, out=np.zeros(before.shape))
        return axis[hi - 1] + np.clip(share, 0, 1) * (axis[hi] - axis[hi - 1])

    reached, passed = (fit < 0.5).sum(-1), (fit <= 0.5).sum(-1)
    first = np.where(reached == 0, axis[0], where_it_passes(reached))
    last = np.where(passed == size, axis[-1], where_it_passes(passed))
    never, already = reached == size, passed == 0
    hi = np.clip(reached, 1, size - 1)
    jump = ~never & (reached > 0) & (fit[rows, hi - 1] == 0) & (fit[rows, hi] == 1)
    low = np.where(never, axis[-1], np.where(already, -np.inf, np.where(jump, axis[hi - 1], (first + last) / 2)))
    high = np.where(never, np.inf, np.where(already, axis[0], np.where(jump, axis[hi], (first + last) / 2)))
    return _Crossings(np.where(never | already, np.nan, (first + last) / 2), low, high)


def harm_rises(magnitudes: Any, neutral: float) -> bool:
    """Whether magnitudes do more harm the greater they are: all lie above the neutral one, or none does.

    Raises:
        ValueError: they lie on both sides of it.
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
    """The magnitude at which the probability of collapse crosses one half.

    Isotonic regression of the collapsed share on the logarithm of the magnitude, interpolated linearly at one
    half (the middle of the stretch where the fit equals one half); the interval resamples seeds, whole rows,
    with tails expanded as in `bootstrap`. A resample that jumps from 0 to 1 contributes the two magnitudes
    around the jump, so a deterministic threshold gives their geometric mean with the two of them as the
    interval. Seeds too few to tell a unanimous outcome from one half (under 4 at 95%) give [0, inf].

    Args:
        magnitudes: `[M]`, positive, distinct, in any order, at least two.
        collapsed: `[seeds, M]`, bool or 0/1 with NaN for unknown.
        increasing: whether harm grows with the magnitude; False for bits of precision and the like.
        level: coverage.
        resamples: bootstrap resamples.
        seed: of the resampling.
        missing: see `jaxaudit.analysis.statistics.intervals`; `n` and `n_missing` count seeds, a seed being missing
            where any of its entries is NaN. With "count" its known entries still take part.

    Returns:
        estimate in units of the magnitude. Where one half is not crossed on the tested magnitudes the value
        is NaN, the reason says which side it lies on, and the interval is one-sided (its other end 0 or inf).

    Raises:
        ValueError: shapes, magnitudes or level out of range.
    """
    check_level(level)
    check_missing(missing)
    m, table = _checked_grid(magnitudes, collapsed)
    axis = np.log(m) if increasing else -np.log(m)
    order = np.argsort(axis)
    axis, table = axis[order], table[:, order]
    absent, seeds = int(np.isnan(table).any(1).sum()), table.shape[0]
    reason = ""
    if absent and missing == "propagate":
        reason = f"{absent} of the {seeds} seeds have no value at some magnitude"
    if np.isnan(table).all(0).any():
        reason = "no seed has a value at some magnitude"
    if reason:
        return Estimate(np.nan, np.nan, np.nan, seeds - absent, absent, reason)
    point = _crossings(axis, _fit(table[None]))
    rows = table[~np.isnan(table).all(1)]
    ends = (-np.inf, np.inf)
    if wilson(0, len(rows), level=level).high < 0.5:
        picks = np.random.default_rng(seed).integers(len(rows), size=(resamples, len(rows)))
        drawn = _crossings(axis, _fit(rows[picks]))
        ends = read_tails(drawn.low, drawn.high, *tails(level, len(rows), "expanded"))
    value, low, high = (float(np.exp(v if increasing else -v)) for v in (point.point[0], *ends))
    if not increasing:
        low, high = high, low
    side = "" if not np.isnan(value) else _side(point, m, increasing)
    return Estimate(value, low, high, seeds - absent, absent, side)


FALLEN = "half of the seeds collapse undisturbed"
"""Why there is no critical magnitude: a share of one half then says nothing of the perturbation."""


def critical_beside(
    magnitudes: Any, collapsed: Any, control: Any, *, standing: bool = False, **options: Any
) -> Estimate:
    """The critical magnitude, where fewer than half of the seeds collapse undisturbed.

    Args:
        magnitudes: `[M]`.
        collapsed: `[seeds, M]`.
        control: whether each seed's control collapses, `[seeds]`, bool or 0/1 with NaN for unknown.
        standing: whether only seeds count whose control is known not to collapse; then any share of others may.
        options: as for `critical_magnitude`.

    Returns:
        as `critical_magnitude`; NaN with the reason where at least half of the controls that are known collapse, or
        none is left.

    Raises:
        ValueError: as `critical_magnitude`, or the shapes differ.
    """
    m, table = _checked_grid(magnitudes, collapsed)
    undisturbed = np.asarray(control, np.float64)
    if undisturbed.shape != table.shape[:1]:
        raise ValueError(f"control must have shape [{table.shape[0]}], got {undisturbed.shape}")
    fallen, known = int((undisturbed == 1).sum()), int((~np.isnan(undisturbed)).sum())
    nothing = Estimate(np.nan, np.nan, np.nan, known, table.shape[0] - known)
    if standing:
        rows = table[undisturbed == 0]
        if not len(rows):
            return nothing._replace(n=0, reason="no seed's control is known to stand")
        return critical_magnitude(m, rows, **options)
    if known and 2 * fallen >= known:
        return nothing._replace(reason=FALLEN)
    return critical_magnitude(m, table, **options)


def _checked_grid(magnitudes: Any, collapsed: Any) -> tuple[np.ndarray, np.ndarray]:
    m, table = np.asarray(magnitudes, np.float64), np.asarray(collapsed, np.float64)
    if m.ndim != 1 or m.size < 2 or not (np.isfinite(m) & (m > 0)).all() or np.unique(m).size != m.size:
        raise ValueError(f"magnitudes must be at least two distinct positive numbers, got {m.tolist()}")
    if table.ndim != 2 or table.shape[1] != m.size or table.shape[0] == 0:
        raise ValueError(f"collapsed must have shape [seeds, {m.size}], got {table.shape}")
    if not np.isin(table[~np.isnan(table)], (0, 1)).all():
        raise ValueError("collapsed must be 0, 1 or NaN")
    return m, table


def _fit(tables: np.ndarray) -> np.ndarray:
    """Isotonic collapse shares `[R, M]` of tables `[R, seeds, M]`."""
    known = (~np.isnan(tables)).sum(1)
    share = np.nansum(tables, axis=1) / np.maximum(known, 1)
    return isotonic(share, known)


def _side(point: _Crossings, m: np.ndarray, increasing: bool) -> str:
    never = np.isposinf(point.high[0])
    above = never == increasing
    bound = f"above {m.max():g}" if above else f"below {m.min():g}"
    side = "below" if never else "above"
    return f"critical magnitude {bound}: the fitted share stays {side} one half"
