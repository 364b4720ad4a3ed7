"""Per-lane stability metrics (Table S5; section 5.4 adds SIP, Table 1 adds RT).

Every function takes one lane's performance `J` as `[T]` (higher is better; one entry per step) and the
`onset`, the step a perturbation's window opens; both may be traced, so each is ready for `jit` and `vmap`.
Windows are static ints.

What holds for all of them:

- A learner may measure J at every `every`-th step alone, the steps t with (t + 1) % every == 0. Only those are
  read, whatever the series holds between, and the *first step* of anything is a measured one.
- With `sparse`, NaN is no value but a step at which J was not measured, such as one in which no episode ended; only
  the other steps are read. Infinity is non-finite still.
- J_pre and sigma_pre are the mean and population standard deviation over the `window` steps before the onset,
  or over the `onset` steps there are, if J was measured there at least 2 times (`FEWEST` times where it is sparse or
  not measured at every step); else they are NaN. A non-finite value among them makes them NaN.
- The *band* is one-sided: J is out of it where `J < J_pre - 2 sigma_pre`, strictly. Rising above it is
  improvement.
- Non-finite J at a measured step at or after the onset is collapse, from its first such step to the end of the run.
- What cannot be computed is NaN; `explain` says why. An onset outside `[0, T)` makes every metric NaN.

The arithmetic is float32 (float64 if given) on deviations from the value just before the onset, so a J of 1e4
that fluctuates by 1e-2 is handled as well as one around zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxaudit.core.channel_names import Cadence

BAND = 2.0

FEWEST = 8
"""Measurements before the onset that J_pre takes, where J is not measured at every step."""

FEWEST_HELD = 3
"""Measurements in the `hold` of a collapse, where J is not measured at every step; of a sparse J, in a collapse."""


@dataclasses.dataclass(frozen=True)
class MetricSettings:
    """Windows of the metrics, in steps (Table S5): `window` W, `hold` Delta, `horizon` T of the MSD.

    Raises:
        ValueError: a setting is not an int, `window < 2`, `hold < 1` or `horizon < 1`.
    """

    window: int = 50
    hold: int = 100
    horizon: int = 500

    def __post_init__(self) -> None:
        for name, least in (("window", 2), ("hold", 1), ("horizon", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"[metrics] {name} = {value!r}: must be an integer of at least {least}")

    def validate(self, steps: int, onset: int, *, latents: bool = False, every: int = 1) -> list[str]:
        """One sentence for each way in which `steps` with this `onset` are too few for the windows.

        `horizon` counts only where there are `latents` to measure a meta-state deviation on; J is measured at every
        `every`-th step.
        """
        if not 0 <= onset < steps:
            return [f"the onset {onset} lies outside the run's {steps} steps (allowed: 0 to {steps - 1})"]
        left = steps - onset
        found = [
            f"{name} = {length} steps hold {length // every} measurements of the performance, one in {every} steps: "
            f"{without} needs {fewest}"
            for name, length, fewest, without in (
                ("window", min(self.window, onset), FEWEST, "J_pre"),
                ("hold", self.hold, FEWEST_HELD, "collapse_time"),
            )
            if every > 1 and length // every < fewest
        ]
        if onset < 2:
            found.append(f"only {onset} steps precede the onset: J_pre needs at least 2, so every metric is NaN")
        elif onset < self.window:
            found.append(
                f"only {onset} of window = {self.window} steps precede the onset: "
                f"J_pre is taken over {onset} steps and spike_intensity is NaN"
            )
        if left < self.window:
            found.append(f"only {left} of window = {self.window} steps follow the onset: spike_intensity is cut short")
        if left < self.hold:
            found.append(f"only {left} of hold = {self.hold} steps follow the onset: every collapse is censored")
        if latents and left <= self.horizon:
            found.append(
                f"only {left - 1} of horizon = {self.horizon} steps follow the onset: meta_state_deviation is cut short"
            )
        return found


class _Level(NamedTuple):
    """J before the onset, as `reference + mean` and `std`; `known` is False where it is undefined."""

    reference: jax.Array
    mean: jax.Array
    std: jax.Array
    known: jax.Array


class _Measured(NamedTuple):
    """One lane's J where it was measured.

    Attributes:
        values: `[M]`.
        steps: the steps of the measurements, int `[M]`.
        total: steps of the run, T.
        cadence: when J is measured.
        is_measured: which were measured, bool `[M]`; with a sparse J some were not.
    """

    values: jax.Array
    steps: np.ndarray
    total: int
    cadence: Cadence
    is_measured: jax.Array

    @property
    def has_gaps(self) -> bool:
        """Whether there may be fewer measurements than steps."""
        return self.cadence != Cadence()

    def last_value(self, where: ArrayLike = True) -> jax.Array:
        """The last value measured where `where` `[M]` is true; the first of all, measured or not, if there is none."""
        places = jnp.where(self.is_measured & where, jnp.arange(self.values.shape[0]), 0)
        return self.values[places.max()]


def _measured(series: ArrayLike, every: int, sparse: bool) -> _Measured:
    values = jnp.asarray(series)
    if values.ndim != 1:
        raise ValueError(f"a metric takes one lane's series of shape [T], got {values.shape}; use jax.vmap for lanes")
    if every < 1:
        raise ValueError(f"every must be at least 1, not {every}")
    if sparse and every != 1:
        raise ValueError("what is sparse has no cadence besides: every must be 1")
    values = values.astype(jnp.promote_types(values.dtype, jnp.float32))
    due = values[every - 1 :: every]
    seen = ~jnp.isnan(due) if sparse else jnp.ones(due.shape, bool)
    return _Measured(due, due_steps(values.shape[0], every), values.shape[0], Cadence(every, sparse), seen)


def due_steps(total: int, every: int = 1) -> np.ndarray:
    """The steps, of `total`, after which a learner that does so at every `every`-th step measures J: int `[M]`."""
    return np.arange(every - 1, total, every)


def _power_of_two(value: jax.Array) -> jax.Array:
    """A power of two near `value`, by which scaling is exact; 1 for zero."""
    _, exponent = jnp.frexp(value)
    return jnp.where(value > 0, jnp.ldexp(jnp.ones_like(value), jnp.maximum(exponent - 1, -100)), 1)


def _level(x: _Measured, onset: ArrayLike, window: int) -> _Level:
    onset = jnp.asarray(onset)
    inside = x.is_measured & (x.steps >= onset - window) & (x.steps < onset)
    count = inside.sum()
    reference = x.last_value(x.steps < onset)
    deviation = jnp.where(inside, x.values - reference, 0)
    scale = _power_of_two(jnp.abs(deviation).max())
    scaled = deviation / scale
    mean = scaled.sum() / jnp.maximum(count, 1)
    variance = jnp.where(inside, (scaled - mean) ** 2, 0).sum() / jnp.maximum(count, 1)
    enough = count >= (FEWEST if x.has_gaps else 2)
    known = enough & (onset <= x.total) & jnp.isfinite(jnp.where(inside, x.values, 0)).all()
    mean, std = (jnp.where(known, scale * part, jnp.nan) for part in (mean, jnp.sqrt(variance)))
    return _Level(reference, mean, std, known)


def _non_finite_from(x: _Measured, onset: ArrayLike) -> jax.Array:
    """First measured step at or after the onset with a non-finite value; T if there is none."""
    bad = x.is_measured & (x.steps >= jnp.asarray(onset)) & ~jnp.isfinite(x.values)
    return jnp.where(bad, x.steps, x.total).min(initial=x.total)


def _below_band(x: _Measured, onset: ArrayLike, level: _Level) -> jax.Array:
    """`[M]` bool: at or after the onset and measured out of the band, or past the first non-finite step."""
    out = x.is_measured & (x.values - level.reference < level.mean - BAND * level.std)
    steps = jnp.asarray(x.steps)
    return (steps >= jnp.asarray(onset)) & (out | (steps >= _non_finite_from(x, onset)))


def _inside(total: int, onset: ArrayLike) -> jax.Array:
    return (jnp.asarray(onset) >= 0) & (jnp.asarray(onset) < total)


def _peak(values: jax.Array, where: jax.Array) -> jax.Array:
    """Maximum of `values` where `where`; NaN if any of them is NaN, which XLA's maximum can lose on CPU."""
    unknown = (where & jnp.isnan(values)).any()
    return jnp.where(unknown, jnp.nan, jnp.where(where, values, -jnp.inf).max(initial=-jnp.inf))


def pre_onset_level(
    series: ArrayLike, onset: ArrayLike, window: int = 50, *, every: int = 1, sparse: bool = False
) -> tuple[jax.Array, jax.Array]:
    """J_pre and sigma_pre: mean and population std of J over the `window` steps before the onset.

    [open] in Table S5: how long; here the steps available are used where `2 <= onset < window`, and both are
    NaN for `onset < 2` or a non-finite value among them.

    Args:
        series: J, `[T]`.
        onset: step, scalar int.
        window: steps.
        every: steps from one measurement of J to the next.
        sparse: whether NaN is a step at which J was not measured.

    Returns:
        two scalars, in units of J.
    """
    level = _level(_measured(series, every, sparse), onset, window)
    return level.reference + level.mean, level.std


def _collapse(x: _Measured, onset: ArrayLike, window: int, hold: int) -> tuple[jax.Array, jax.Array]:
    """Collapse time (scalar float) and whether it is censored (scalar bool)."""
    total = x.total
    level = _level(x, onset, window)
    non_finite = _non_finite_from(x, onset)
    below = _below_band(x, onset, level)
    next_above = jax.lax.cummin(jnp.where(below | ~x.is_measured, total, x.steps), reverse=True)
    counted = below & ((next_above - x.steps >= hold) | (next_above == total))
    if x.cadence.sparse:
        left = jnp.append(jnp.cumsum(below[::-1])[::-1], 0)  # of each step on
        enough = left[:-1] - left[next_above] >= FEWEST_HELD
        counted &= enough | (x.steps >= non_finite)
    held = x.cadence.every == 1 or hold // x.cadence.every >= FEWEST_HELD
    known = level.known & held
    first = jnp.where(known, jnp.where(counted, x.steps, total).min(initial=total), non_finite)
    defined = _inside(total, onset) & (known | (non_finite < total))
    time = jnp.where(first < total, first.astype(jnp.float32), jnp.inf)
    censored = defined & (first < total) & (total - first < hold) & (non_finite == total)
    return jnp.where(defined, time, jnp.nan), censored


def collapse_time(
    series: ArrayLike, onset: ArrayLike, *, window: int = 50, hold: int = 100, every: int = 1, sparse: bool = False
) -> jax.Array:
    """T_c (Table S5): first measured step `t >= onset` where J falls below the band and stays there for `hold` steps.

    Below is `J(t) < J_pre - 2 sigma_pre`; the `hold` steps include t. [open]: a crossing with fewer than
    `hold` steps left counts only if it lasts to the end (`collapse_censored`). A run that turns non-finite
    has collapsed by that step: at the start of the stretch below the band that leads into it, or, where J_pre
    is undefined, at the first non-finite step itself.

    Args:
        series: J, `[T]`.
        onset: step, scalar int.
        window: steps J_pre is taken over.
        hold: Delta, steps; at least `FEWEST_HELD` measurements where J is not measured at every step, else NaN.
        every: steps from one measurement of J to the next.
        sparse: whether NaN is a step at which J was not measured.

    Returns:
        scalar float32, the step index counted from the start of the run; inf for never; NaN where J_pre is
        undefined and J stays finite.
    """
    return _collapse(_measured(series, every, sparse), onset, window, hold)[0]


def collapse_censored(
    series: ArrayLike, onset: ArrayLike, *, window: int = 50, hold: int = 100, every: int = 1, sparse: bool = False
) -> jax.Array:
    """Whether the run ended before the counted collapse had lasted `hold` steps: scalar bool.

    [open] in Table S5. A run that turned non-finite is never censored, as no further step undoes
    that. Arguments as in `collapse_time`; False where that is inf or NaN.
    """
    return _collapse(_measured(series, every, sparse), onset, window, hold)[1]


def instability_index(series: ArrayLike, *, window: int = 50, every: int = 1, sparse: bool = False) -> jax.Array:
    """I_inst(t) (Table S5): population variance of J over the last `window` steps, t among them.

    Two passes per window, on deviations from J(t).

    Args:
        series: J, `[T]`.
        window: W, steps.
        every: steps from one measurement of J to the next; the variance is of the `window // every` measurements.
        sparse: whether NaN is a step at which J was not measured; the variance is of the measurements in the window.

    Returns:
        `[T]`, in units of J squared, held from one measurement to the next; NaN for the first `window - 1` steps
        and where the window holds a non-finite J, or fewer than 2 measurements.
    """
    x = _measured(series, every, sparse)
    count, total = window // every, x.values.shape[0]
    if not 2 <= count <= total:
        return jnp.full(x.total, jnp.nan, x.values.dtype)
    if sparse:
        places = jax.lax.cummax(jnp.where(x.is_measured, jnp.arange(total), 0))
        latest = x.values[places]
        padded = jnp.concatenate([jnp.full(count - 1, jnp.nan, x.values.dtype), x.values])
    else:
        latest = x.values
        padded = jnp.concatenate([jnp.zeros(count - 1, x.values.dtype), x.values])
    zeros = jnp.zeros_like(x.values)

    def deviation(lag: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice(padded, (lag,), (total,)) - latest

    def summed(term: Callable[[jax.Array], jax.Array]) -> jax.Array:
        return jax.lax.fori_loop(0, count, lambda lag, s: s + term(lag), zeros)

    if not sparse:
        mean = summed(deviation) / count
        variance = summed(lambda lag: (deviation(lag) - mean) ** 2) / count
        return held(jnp.where(jnp.arange(total) >= count - 1, variance, jnp.nan), x.total, every)

    def is_there(lag: jax.Array) -> jax.Array:
        return ~jnp.isnan(jax.lax.dynamic_slice(padded, (lag,), (total,)))

    measured = summed(lambda lag: is_there(lag).astype(zeros.dtype))
    mean = summed(lambda lag: jnp.where(is_there(lag), deviation(lag), 0)) / jnp.maximum(measured, 1)
    squares = summed(lambda lag: jnp.where(is_there(lag), (deviation(lag) - mean) ** 2, 0))
    known = (jnp.arange(total) >= count - 1) & (measured >= 2)
    return held(jnp.where(known, squares / jnp.maximum(measured, 1), jnp.nan), x.total, every)


def held(values: jax.Array, total: int, every: int) -> jax.Array:
    """Measurements `[M]` as a series `[total]`: each held until the next, NaN before the first."""
    latest = (np.arange(total) + 1) // every - 1
    return values if every == 1 else jnp.where(latest >= 0, values[np.maximum(latest, 0)], jnp.nan)


def divergence_probability(collapse_times: ArrayLike, total_steps: ArrayLike) -> jax.Array:
    """P_div (Table S5): the fraction of seeds with `T_c < total_steps / 2`.

    [open]: T_max is the run's total number of steps. An onset in the second half of a run therefore gives 0.
    `jaxaudit.analysis.statistics.divergence` gives it with its interval.

    Args:
        collapse_times: T_c of each seed, `[seeds]`.
        total_steps: T_max, steps.

    Returns:
        scalar in [0, 1]; NaN where any T_c is NaN or there are no seeds.
    """
    return _diverged(jnp.asarray(collapse_times), total_steps).mean()


def _diverged(time: jax.Array, total_steps: ArrayLike) -> jax.Array:
    early = (time < jnp.asarray(total_steps) / 2).astype(jnp.float32)
    return jnp.where(jnp.isnan(time), jnp.nan, early)


def recovery_rate(
    series: ArrayLike, onset: ArrayLike, *, window: int = 50, hold: int = 100, every: int = 1, sparse: bool = False
) -> jax.Array:
    """R_rec (Table S5): `(J(t_end) - J(t_min)) / (J_pre - J(t_min))`, t_min the minimum from the onset on.

    [open]: a run has *fully collapsed* where J turned non-finite, or where it has a collapse time and ends
    within 2 sigma_pre of its minimum, so that nothing measurable was regained. A run that collapsed and came
    part of the way back keeps its rate: partial failure is what the rate is for.

    Args:
        series: J, `[T]`.
        onset: step, scalar int.
        window: steps J_pre is taken over.
        hold: Delta of the collapse time, steps.
        every: steps from one measurement of J to the next.
        sparse: whether NaN is a step at which J was not measured.

    Returns:
        scalar, 1 for J_pre regained (more if exceeded); NaN where the run fully collapsed, where J never fell
        below J_pre, and where J_pre is undefined.
    """
    x = _measured(series, every, sparse)
    level = _level(x, onset, window)
    time, _ = _collapse(x, onset, window, hold)
    lowest = jnp.where(x.is_measured & (x.steps >= jnp.asarray(onset)), x.values, jnp.inf).min(initial=jnp.inf)
    regained = x.last_value() - lowest if len(x.steps) else jnp.nan
    lost = level.mean - (lowest - level.reference)
    non_finite = _non_finite_from(x, onset) < x.total
    collapsed = non_finite | (jnp.isfinite(time) & (regained <= BAND * level.std))
    defined = _inside(x.total, onset) & ~jnp.isnan(time) & ~collapsed & (lost > 0) & jnp.isfinite(lowest)
    return jnp.where(defined, regained / jnp.where(lost > 0, lost, 1), jnp.nan)


def recovery_time(
    series: ArrayLike, onset: ArrayLike, *, window: int = 50, every: int = 1, sparse: bool = False
) -> jax.Array:
    """RT (Table 1): steps from the onset until J, having left the pre-onset band, is back in it.

    [open]: the band is `J >= J_pre - 2 sigma_pre` (rising above J_pre + 2 sigma_pre is improvement, not a
    departure); the first step back after the first step out counts, however long it lasts (`collapse_time` is
    the metric of lasting departures).

    Args:
        series: J, `[T]`.
        onset: step, scalar int.
        window: steps J_pre is taken over.
        every: steps from one measurement of J to the next.
        sparse: whether NaN is a step at which J was not measured.

    Returns:
        scalar float32, steps; -1 where J never left the band (Table 1's "no recovery delay"); inf where it
        left and never came back, or turned non-finite at any step from the onset; NaN where J_pre is
        undefined, and of a sparse J that was not measured since the onset, or after it left not `FEWEST_HELD` times.
    """
    x = _measured(series, every, sparse)
    total = x.total
    level = _level(x, onset, window)
    below = _below_band(x, onset, level)
    left = jnp.where(below, x.steps, total).min(initial=total)
    back = jnp.where((x.steps > left) & x.is_measured & ~below, x.steps, total).min(initial=total)
    non_finite = _non_finite_from(x, onset) < total
    lost = (back == total) | non_finite
    elapsed = jnp.where(lost, jnp.inf, (back - onset).astype(jnp.float32))
    time = jnp.where(left == total, -1.0, elapsed)
    known = level.known
    if x.cadence.sparse:
        since, later = ((x.is_measured & where).sum() for where in (x.steps >= jnp.asarray(onset), x.steps > left))
        known &= (since > 0) & (~lost | non_finite | (left == total) | (later >= FEWEST_HELD))
    return jnp.where(_inside(total, onset) & known, time, jnp.nan)


def spike_intensity(
    series: ArrayLike, onset: ArrayLike, *, window: int = 50, every: int = 1, sparse: bool = False
) -> jax.Array:
    """SIP (section 5.4, Table 1): peak of I_inst in the `window` steps from the onset, over its prior level.

    [open]: the peak is over steps `[onset, onset + window)` (to the end of the run if that comes first); the
    level is I_inst at `onset - 1`, which covers exactly the `window` steps before the onset and equals
    sigma_pre squared.

    Args:
        series: J, `[T]`.
        onset: step, scalar int.
        window: W, steps.
        every: steps from one measurement of J to the next.
        sparse: whether NaN is a step at which J was not measured.

    Returns:
        scalar, a ratio; NaN where fewer than `window` steps precede the onset, where J was constant over them
        (zero level), and where J is non-finite in either window.
    """
    x = _measured(series, every, sparse)
    steps = jnp.arange(x.total)
    index = instability_index(series, window=window, every=every, sparse=sparse)
    after = (steps >= onset) & (steps < onset + window)
    if sparse:  # a window with fewer than two measurements tells nothing, and one with a non-finite one is NaN
        after &= ~jnp.isnan(index) | (steps >= _non_finite_from(x, onset))
    peak = _peak(index, after)
    level = index[jnp.clip(jnp.asarray(onset) - 1, 0, x.total - 1)]
    defined = _inside(x.total, onset) & (jnp.asarray(onset) >= window) & (level > 0)
    return jnp.where(defined, peak / jnp.where(level > 0, level, 1), jnp.nan)


def meta_state_deviation(
    latents: ArrayLike,
    onset: ArrayLike,
    *,
    horizon: int = 500,
    control: ArrayLike | None = None,
    whitening: ArrayLike | None = None,
) -> jax.Array:
    """MSD (Table S5): the maximum over `[onset, onset + horizon]` of `||h_t - h_onset||_2`.

    The maximum is over the steps there are where the run ends before `onset + horizon`.

    Args:
        latents: h, `[T, d]`.
        onset: step, scalar int.
        horizon: steps.
        control: the undisturbed lane's latents, `[T, d]`; its drift `c_t - c_onset` is subtracted.
        whitening: `[d, d]`, applied as `deviation @ whitening` (`jaxaudit.analysis.statistics.whitening`).

    Returns:
        scalar, in units of h, or of the clean runs' standard deviations when whitened; NaN where a latent of
        the horizon is NaN, infinite at the onset, or the onset lies outside the run.
    """
    moved = _drift(latents, onset)
    if control is not None:
        moved = moved - _drift(control, onset)
    if whitening is not None:
        moved = jnp.matmul(moved, whitening, precision=jax.lax.Precision.HIGHEST)
    steps = jnp.arange(moved.shape[0])
    after = (steps >= onset) & (steps <= onset + horizon)
    distance = _peak(jnp.linalg.norm(moved, axis=-1), after)
    return jnp.where(_inside(moved.shape[0], onset), distance, jnp.nan)


def _drift(latents: ArrayLike, onset: ArrayLike) -> jax.Array:
    h = jnp.asarray(latents)
    if h.ndim != 2:
        raise ValueError(f"latents must be one lane's [T, d], got {h.shape}; use jax.vmap for lanes")
    h = h.astype(jnp.promote_types(h.dtype, jnp.float32))
    return h - h[jnp.clip(jnp.asarray(onset), 0, h.shape[0] - 1)]


def evaluate(
    series: ArrayLike,
    onset: ArrayLike,
    total_steps: ArrayLike | None = None,
    *,
    settings: MetricSettings | None = None,
    latents: ArrayLike | None = None,
    every: int = 1,
    sparse: bool = False,
) -> dict[str, jax.Array]:
    """Returns every scalar metric of one lane by name.

    Args:
        series: J, `[T]`.
        onset: step, scalar int.
        total_steps: T_max of `diverged`, steps; the series' length by default.
        settings: the windows; Table S5's by default.
        latents: `[T, d]`; adds `meta_state_deviation`.
        every: steps from one measurement of J to the next.
        sparse: whether NaN is a step at which J was not measured.

    Returns:
        scalars named `pre_mean`, `pre_std`, `collapse_time`, `collapse_censored` (bool), `diverged` (1 where
        `collapse_time < total_steps / 2`, else 0, NaN where that is NaN), `recovery_rate`, `recovery_time`,
        `spike_intensity` and, given latents, `meta_state_deviation`.
    """
    x = _measured(series, every, sparse)
    chosen = settings or MetricSettings()
    window, hold = chosen.window, chosen.hold
    when: dict[str, Any] = {"every": every, "sparse": sparse}
    mean, std = pre_onset_level(series, onset, window, **when)
    time, censored = _collapse(x, onset, window, hold)
    values = {
        "pre_mean": mean,
        "pre_std": std,
        "collapse_time": time,
        "collapse_censored": censored,
        "diverged": _diverged(time, x.total if total_steps is None else total_steps),
        "recovery_rate": recovery_rate(series, onset, window=window, hold=hold, **when),
        "recovery_time": recovery_time(series, onset, window=window, **when),
        "spike_intensity": spike_intensity(series, onset, window=window, **when),
    }
    if latents is not None:
        values["meta_state_deviation"] = meta_state_deviation(latents, onset, horizon=chosen.horizon)
    return values


_evaluate = jax.jit(evaluate, static_argnames=("settings", "every", "sparse"))


def explain(
    series: Any,
    onset: int,
    *,
    settings: MetricSettings | None = None,
    latents: Any = None,
    values: Mapping[str, Any] | None = None,
    every: int = 1,
    sparse: bool = False,
) -> dict[str, str]:
    """Why each metric of one lane that is NaN is so, one sentence each; host-side, not for `jit`.

    Args:
        series: J, `[T]`.
        onset: step.
        settings: the windows; Table S5's by default.
        latents: `[T, d]`, if they were evaluated.
        values: what `evaluate` returned for this lane; computed here when None.
        every: steps from one measurement of J to the next.
        sparse: whether NaN is a step at which J was not measured.

    Returns:
        the name of each NaN metric and its reason; empty where all are defined.
    """
    chosen = settings or MetricSettings()
    x = np.asarray(series, np.float64)
    if values is None:
        values = _evaluate(series, onset, settings=chosen, latents=latents, every=every, sparse=sparse)
    missing = [name for name, value in values.items() if np.isnan(float(value))]
    return {name: _reason(name, x, int(onset), chosen, Cadence(every, sparse)) for name in missing}


_OWN = ("pre_mean", "pre_std", "collapse_time", "diverged", "recovery_rate", "recovery_time", "spike_intensity")


def _reason(name: str, x: np.ndarray, onset: int, settings: MetricSettings, cadence: Cadence) -> str:
    every = cadence.every
    total, window, hold = x.shape[0], settings.window, settings.hold
    if not 0 <= onset < total:
        return f"the onset {onset} lies outside the run's {total} steps"
    if name == "meta_state_deviation":
        return f"a latent is non-finite in the {settings.horizon} steps from the onset"
    if onset < 2:
        return f"J_pre needs at least 2 steps before the onset, which is step {onset}"
    due = due_steps(total, every)
    due = due[~np.isnan(x[due])] if cadence.sparse else due
    near = due[(due >= onset - window) & (due < onset)]
    if cadence != Cadence() and len(near) < FEWEST:
        return f"J was measured {len(near)} times in the {window} steps before the onset, and J_pre needs {FEWEST}"
    bad = near[~np.isfinite(x[near])]
    if bad.size:
        return f"J is non-finite before the onset, at step {bad[0]}, so J_pre is undefined"
    if name == "spike_intensity" and onset < window:
        return f"only {onset} of window = {window} steps precede the onset"
    later = due[due >= onset]
    after = later[~np.isfinite(x[later])]
    if after.size:
        return f"J turned non-finite at step {after[0]}"
    if every > 1 and hold // every < FEWEST_HELD and name in ("collapse_time", "diverged", "recovery_rate"):
        return f"hold = {hold} steps hold {hold // every} measurements of J, and a collapse needs {FEWEST_HELD}"
    if name == "spike_intensity":
        return f"J did not vary over the {window} steps before the onset, so there is no level to compare with"
    before = x[near]
    if name in ("recovery_rate", "recovery_time") and not later.size:
        return "J was not measured after the onset"
    if name == "recovery_time":
        return f"J was measured fewer than {FEWEST_HELD} times after it left the band"
    if name == "recovery_rate" and x[later].min() - before[-1] >= (before - before[-1]).mean():
        return "J never fell below J_pre after the onset, so there was nothing to recover"
    if name == "recovery_rate":
        return "the run fully collapsed: it ended within 2 sigma_pre of its minimum"
    return "the arithmetic overflowed" if name in _OWN else "the metric itself gave NaN"
