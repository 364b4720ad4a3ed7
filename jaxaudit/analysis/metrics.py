"""Stability metrics of one lane (Table S5; section 5.4 adds SIP, Table 1 adds RT).

Every function takes one lane's performance `J` as `[T]` (higher is better; one entry per step) and the `onset`, the
step at which a perturbation's window opens. Both may be traced, so every function is ready for `jit` and `vmap`.
Windows are static ints.

All metrics follow these rules:

- A learner may measure J only at every `every`-th step, the steps t with (t + 1) % every == 0. Only those entries are
  read, whatever the series contains between them, and every step that a metric returns is a measured one.
- With `sparse`, NaN is not a value, but marks a step at which J was not measured, such as one in which no episode
  ended. Only the other steps are read. Infinity is still a non-finite value.
- J_pre and sigma_pre are the mean and population standard deviation over the `window` steps before the onset, or over
  all `onset` steps if they are fewer. They are NaN if J was measured there fewer than 2 times (`FEWEST` times if it is
  sparse or not measured at every step), or if any of these values is non-finite.
- The *band* is one-sided: J is out of it where `J < J_pre - 2 sigma_pre`, strictly. Rising above it is an improvement.
- A non-finite J at a measured step at or after the onset is a collapse, from the first such step to the end of the run.
- A metric that cannot be computed is NaN, and `explain` returns the reason. All metrics are NaN if the onset is outside
  `[0, T)`.

The arithmetic is float32 (float64 for float64 series) on deviations from the value just before the onset, so a J of
1e4 that fluctuates by 1e-2 is handled as well as one around zero.
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
"""The width of the band below J_pre, in units of sigma_pre."""

FEWEST = 8
"""The fewest measurements before the onset for J_pre, if J is not measured at every step."""

FEWEST_HELD = 3
"""The fewest measurements in the `hold` steps of a collapse, if J is not measured at every step.

For a sparse J, these are measurements below the band in a row.
"""


@dataclasses.dataclass(frozen=True)
class MetricSettings:
    """The windows of the metrics, in steps (Table S5).

    Attributes:
        window: W, the steps before the onset that J_pre is taken over, and those of the instability index.
        hold: Delta, the steps that J stays below the band in a collapse.
        horizon: T, the steps after the onset of the meta-state deviation.

    Raises:
        ValueError: A setting is not an int, `window < 2`, `hold < 1` or `horizon < 1`.
    """

    window: int = 50
    hold: int = 100
    horizon: int = 500

    def __post_init__(self) -> None:
        for name, lowest in (("window", 2), ("hold", 1), ("horizon", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                raise ValueError(f"{name} must be an integer of at least {lowest}, not {value!r}")

    def validate(self, steps: int, onset: int, *, latents: bool = False, every: int = 1) -> list[str]:
        """Returns one sentence for each window that a run of `steps` with this `onset` is too short for.

        Args:
            steps: The steps of the run.
            onset: The step at which the perturbation's window opens.
            latents: Whether there are latents to measure a meta-state deviation on; otherwise `horizon` is ignored.
            every: The steps from one measurement of J to the next.
        """
        if not 0 <= onset < steps:
            return [f"the onset {onset} lies outside the run's {steps} steps (allowed: 0 to {steps - 1})"]
        left = steps - onset
        messages = [
            f"{name} = {length} steps contain {length // every} measurements of the performance, which is measured "
            f"every {every} steps: {metric} needs at least {fewest}"
            for name, length, fewest, metric in (
                ("window", min(self.window, onset), FEWEST, "J_pre"),
                ("hold", self.hold, FEWEST_HELD, "collapse_time"),
            )
            if every > 1 and length // every < fewest
        ]
        if onset < 2:
            messages.append(f"only {onset} steps precede the onset: J_pre needs at least 2, so every metric is NaN")
        elif onset < self.window:
            messages.append(
                f"only {onset} of window = {self.window} steps precede the onset: "
                f"J_pre is taken over {onset} steps and spike_intensity is NaN"
            )
        if left < self.window:
            messages.append(
                f"only {left} of window = {self.window} steps follow the onset: spike_intensity is cut short"
            )
        if left < self.hold:
            messages.append(f"only {left} of hold = {self.hold} steps follow the onset: every collapse is censored")
        if latents and left <= self.horizon:
            messages.append(
                f"only {left - 1} of horizon = {self.horizon} steps follow the onset: meta_state_deviation is cut short"
            )
        return messages


class _PreOnsetLevel(NamedTuple):
    """The level of J before the onset.

    Attributes:
        reference: The last value before the onset; `mean` is relative to it.
        mean: J_pre - reference, NaN if undefined.
        std: sigma_pre, NaN if undefined.
        is_defined: Whether J_pre is defined.
    """

    reference: jax.Array
    mean: jax.Array
    std: jax.Array
    is_defined: jax.Array


class _Measurements(NamedTuple):
    """The measurements of one lane's J.

    Attributes:
        values: `[M]`.
        steps: The step of each measurement, int `[M]`.
        total: T, the steps of the run.
        cadence: When J is measured.
        is_measured: bool `[M]`; False where a sparse J was not measured.
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
        """Returns the last value that was measured where `where` is true, a bool `[M]` or scalar.

        If nothing was measured there, it returns `values[0]`, which may be NaN.
        """
        indices = jnp.where(self.is_measured & where, jnp.arange(self.values.shape[0]), 0)
        return self.values[indices.max()]


def _measurements(series: ArrayLike, every: int, sparse: bool) -> _Measurements:
    values = jnp.asarray(series)
    if values.ndim != 1:
        raise ValueError(f"series must be one lane's J of shape [T], not {values.shape}; use jax.vmap for lanes")
    if every < 1:
        raise ValueError(f"every must be at least 1, not {every}")
    if sparse and every != 1:
        raise ValueError(f"every must be 1 for a sparse series, not {every}")
    values = values.astype(jnp.promote_types(values.dtype, jnp.float32))
    due = values[every - 1 :: every]
    is_measured = ~jnp.isnan(due) if sparse else jnp.ones(due.shape, bool)
    return _Measurements(due, due_steps(values.shape[0], every), values.shape[0], Cadence(every, sparse), is_measured)


def due_steps(total: int, every: int = 1) -> np.ndarray:
    """Returns the steps of a run of `total` steps at which J is measured, if at every `every`-th step: int `[M]`."""
    return np.arange(every - 1, total, every)


def _power_of_two(value: jax.Array) -> jax.Array:
    """Returns a power of two near `value`, so that scaling by it is exact, or 1 for zero."""
    _, exponent = jnp.frexp(value)
    return jnp.where(value > 0, jnp.ldexp(jnp.ones_like(value), jnp.maximum(exponent - 1, -100)), 1)


def _level(x: _Measurements, onset: ArrayLike, window: int) -> _PreOnsetLevel:
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
    is_defined = enough & (onset <= x.total) & jnp.isfinite(jnp.where(inside, x.values, 0)).all()
    mean, std = (jnp.where(is_defined, scale * moment, jnp.nan) for moment in (mean, jnp.sqrt(variance)))
    return _PreOnsetLevel(reference, mean, std, is_defined)


def _first_non_finite(x: _Measurements, onset: ArrayLike) -> jax.Array:
    """Returns the first measured step at or after the onset with a non-finite value, or T if there is none."""
    non_finite = x.is_measured & (x.steps >= jnp.asarray(onset)) & ~jnp.isfinite(x.values)
    return jnp.where(non_finite, x.steps, x.total).min(initial=x.total)


def _below_band(x: _Measurements, onset: ArrayLike, level: _PreOnsetLevel) -> jax.Array:
    """Returns where J is out of the band at or after the onset, or past its first non-finite value: bool `[M]`."""
    is_out = x.is_measured & (x.values - level.reference < level.mean - BAND * level.std)
    steps = jnp.asarray(x.steps)
    return (steps >= jnp.asarray(onset)) & (is_out | (steps >= _first_non_finite(x, onset)))


def _is_inside(total: int, onset: ArrayLike) -> jax.Array:
    return (jnp.asarray(onset) >= 0) & (jnp.asarray(onset) < total)


def _masked_max(values: jax.Array, where: jax.Array) -> jax.Array:
    """Returns the maximum of `values` where `where`; NaN if one is NaN, which XLA's maximum can lose on CPUs."""
    has_nan = (where & jnp.isnan(values)).any()
    return jnp.where(has_nan, jnp.nan, jnp.where(where, values, -jnp.inf).max(initial=-jnp.inf))


def pre_onset_level(
    series: ArrayLike, onset: ArrayLike, window: int = 50, *, every: int = 1, sparse: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Returns J_pre and sigma_pre, the mean and population std of J over the `window` steps before the onset.

    [open] in Table S5 is the length of the window. Here, the available steps are used if `2 <= onset < window`, and
    both are NaN if `onset < 2` or one of the values is non-finite.

    Args:
        series: J, `[T]`.
        onset: step, scalar int.
        window: steps.
        every: steps from one measurement of J to the next.
        sparse: whether NaN is a step at which J was not measured.

    Returns:
        Two scalars, in units of J.
    """
    level = _level(_measurements(series, every, sparse), onset, window)
    return level.reference + level.mean, level.std


def _collapse(x: _Measurements, onset: ArrayLike, window: int, hold: int) -> tuple[jax.Array, jax.Array]:
    """Returns the collapse time (scalar float), and whether it is censored (scalar bool)."""
    total = x.total
    level = _level(x, onset, window)
    non_finite = _first_non_finite(x, onset)
    below = _below_band(x, onset, level)
    next_above = jax.lax.cummin(jnp.where(below | ~x.is_measured, total, x.steps), reverse=True)
    is_collapse = below & ((next_above - x.steps >= hold) | (next_above == total))
    if x.cadence.sparse:
        remaining = jnp.append(jnp.cumsum(below[::-1])[::-1], 0)  # measurements below the band from each step on
        enough = remaining[:-1] - remaining[next_above] >= FEWEST_HELD
        is_collapse &= enough | (x.steps >= non_finite)
    measured_enough = x.cadence.every == 1 or hold // x.cadence.every >= FEWEST_HELD
    known = level.is_defined & measured_enough
    first = jnp.where(known, jnp.where(is_collapse, x.steps, total).min(initial=total), non_finite)
    defined = _is_inside(total, onset) & (known | (non_finite < total))
    time = jnp.where(first < total, first.astype(jnp.float32), jnp.inf)
    censored = defined & (first < total) & (total - first < hold) & (non_finite == total)
    return jnp.where(defined, time, jnp.nan), censored


def collapse_time(
    series: ArrayLike, onset: ArrayLike, *, window: int = 50, hold: int = 100, every: int = 1, sparse: bool = False
) -> jax.Array:
    """Returns T_c (Table S5), the first step `t >= onset` where J falls below the band for at least `hold` steps.

    J(t) is below the band if `J(t) < J_pre - 2 sigma_pre`; the `hold` steps include t. [open]: A crossing with fewer
    than `hold` steps left counts only if it lasts to the end (`collapse_censored`). A run that turns non-finite has
    collapsed by that step: at the beginning of the stretch below the band that leads into it, or at the first
    non-finite step itself if J_pre is undefined.

    Args:
        series: J, `[T]`.
        onset: step, scalar int.
        window: steps J_pre is taken over.
        hold: Delta, steps. If they contain fewer than `FEWEST_HELD` measurements of a J that is not measured at every
            step, the result is NaN.
        every: steps from one measurement of J to the next.
        sparse: whether NaN is a step at which J was not measured.

    Returns:
        Scalar float32, a step counted from the start of the run; inf for never; NaN if J_pre is undefined and J stays
        finite.
    """
    return _collapse(_measurements(series, every, sparse), onset, window, hold)[0]


def collapse_censored(
    series: ArrayLike, onset: ArrayLike, *, window: int = 50, hold: int = 100, every: int = 1, sparse: bool = False
) -> jax.Array:
    """Returns whether the run ended before the collapse of `collapse_time` had lasted `hold` steps: scalar bool.

    [open] in Table S5. A run that turned non-finite is never censored, because no further step could undo that. The
    arguments are those of `collapse_time`; the result is False if that is inf or NaN.
    """
    return _collapse(_measurements(series, every, sparse), onset, window, hold)[1]


def instability_index(series: ArrayLike, *, window: int = 50, every: int = 1, sparse: bool = False) -> jax.Array:
    """Returns I_inst(t) (Table S5), the population variance of J over the `window` steps up to and including t.

    It is computed in two passes per window, on deviations from J(t).

    Args:
        series: J, `[T]`.
        window: W, steps.
        every: steps from one measurement of J to the next; the variance is of the `window // every` measurements.
        sparse: whether NaN is a step at which J was not measured; the variance is of the measurements in the window.

    Returns:
        `[T]`, in units of J squared, held from one measurement to the next; NaN for the first `window - 1` steps
        and where the window contains a non-finite J or fewer than 2 measurements.
    """
    x = _measurements(series, every, sparse)
    count, total = window // every, x.values.shape[0]
    if not 2 <= count <= total:
        return jnp.full(x.total, jnp.nan, x.values.dtype)
    if sparse:
        indices = jax.lax.cummax(jnp.where(x.is_measured, jnp.arange(total), 0))
        latest = x.values[indices]
        padded = jnp.concatenate([jnp.full(count - 1, jnp.nan, x.values.dtype), x.values])
    else:
        latest = x.values
        padded = jnp.concatenate([jnp.zeros(count - 1, x.values.dtype), x.values])
    zeros = jnp.zeros_like(x.values)

    def deviation(lag: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice(padded, (lag,), (total,)) - latest

    def sum_over_window(term: Callable[[jax.Array], jax.Array]) -> jax.Array:
        return jax.lax.fori_loop(0, count, lambda lag, s: s + term(lag), zeros)

    if not sparse:
        mean = sum_over_window(deviation) / count
        variance = sum_over_window(lambda lag: (deviation(lag) - mean) ** 2) / count
        return held(jnp.where(jnp.arange(total) >= count - 1, variance, jnp.nan), x.total, every)

    def is_measured(lag: jax.Array) -> jax.Array:
        return ~jnp.isnan(jax.lax.dynamic_slice(padded, (lag,), (total,)))

    measured_count = sum_over_window(lambda lag: is_measured(lag).astype(zeros.dtype))
    mean = sum_over_window(lambda lag: jnp.where(is_measured(lag), deviation(lag), 0)) / jnp.maximum(measured_count, 1)
    squares = sum_over_window(lambda lag: jnp.where(is_measured(lag), (deviation(lag) - mean) ** 2, 0))
    known = (jnp.arange(total) >= count - 1) & (measured_count >= 2)
    return held(jnp.where(known, squares / jnp.maximum(measured_count, 1), jnp.nan), x.total, every)


def held(values: jax.Array, total: int, every: int) -> jax.Array:
    """Returns measurements `[M]` as a series `[total]` in which each is held until the next; NaN before the first."""
    latest = (np.arange(total) + 1) // every - 1
    return values if every == 1 else jnp.where(latest >= 0, values[np.maximum(latest, 0)], jnp.nan)


def divergence_probability(collapse_times: ArrayLike, total_steps: ArrayLike) -> jax.Array:
    """Returns P_div (Table S5), the fraction of seeds with `T_c < total_steps / 2`.

    [open]: T_max is the run's total number of steps. An onset in the second half of a run therefore gives 0.
    `jaxaudit.analysis.statistics.divergence` returns the same with its confidence interval.

    Args:
        collapse_times: T_c of each seed, `[seeds]`.
        total_steps: T_max, steps.

    Returns:
        Scalar in [0, 1]; NaN if any T_c is NaN or there are no seeds.
    """
    return _diverged(jnp.asarray(collapse_times), total_steps).mean()


def _diverged(time: jax.Array, total_steps: ArrayLike) -> jax.Array:
    early = (time < jnp.asarray(total_steps) / 2).astype(jnp.float32)
    return jnp.where(jnp.isnan(time), jnp.nan, early)


def recovery_rate(
    series: ArrayLike, onset: ArrayLike, *, window: int = 50, hold: int = 100, every: int = 1, sparse: bool = False
) -> jax.Array:
    """Returns R_rec (Table S5), `(J(t_end) - J(t_min)) / (J_pre - J(t_min))`, with t_min the minimum after the onset.

    [open]: A run has *fully collapsed* if J turned non-finite, or if it has a collapse time and ends within
    2 sigma_pre of its minimum, so that nothing measurable was regained. A run that collapsed and regained a part keeps
    its rate, because the rate is meant to measure partial failure.

    Args:
        series: J, `[T]`.
        onset: step, scalar int.
        window: steps J_pre is taken over.
        hold: Delta of the collapse time, steps.
        every: steps from one measurement of J to the next.
        sparse: whether NaN is a step at which J was not measured.

    Returns:
        Scalar, 1 if J_pre was regained (more if exceeded); NaN if the run fully collapsed, J never fell below J_pre,
        or J_pre is undefined.
    """
    x = _measurements(series, every, sparse)
    level = _level(x, onset, window)
    time, _ = _collapse(x, onset, window, hold)
    lowest = jnp.where(x.is_measured & (x.steps >= jnp.asarray(onset)), x.values, jnp.inf).min(initial=jnp.inf)
    regained = x.last_value() - lowest if len(x.steps) else jnp.nan
    lost = level.mean - (lowest - level.reference)
    non_finite = _first_non_finite(x, onset) < x.total
    collapsed = non_finite | (jnp.isfinite(time) & (regained <= BAND * level.std))
    defined = _is_inside(x.total, onset) & ~jnp.isnan(time) & ~collapsed & (lost > 0) & jnp.isfinite(lowest)
    return jnp.where(defined, regained / jnp.where(lost > 0, lost, 1), jnp.nan)


def recovery_time(
    series: ArrayLike, onset: ArrayLike, *, window: int = 50, every: int = 1, sparse: bool = False
) -> jax.Array:
    """Returns RT (Table 1), the steps from the onset until J is back in the pre-onset band after it left the band.

    [open]: The band is `J >= J_pre - 2 sigma_pre` (rising above J_pre + 2 sigma_pre is an improvement, not a
    departure). The first step back after the first step out counts, however long J stays in the band
    (`collapse_time` is the metric of lasting departures).

    Args:
        series: J, `[T]`.
        onset: step, scalar int.
        window: steps J_pre is taken over.
        every: steps from one measurement of J to the next.
        sparse: whether NaN is a step at which J was not measured.

    Returns:
        Scalar float32, steps; -1 if J never left the band (Table 1's "no recovery delay"); inf if it left and never
        came back, or turned non-finite at any step from the onset on; NaN if J_pre is undefined. For a sparse J, it is
        also NaN if J was not measured after the onset, or if it left, did not come back, and was measured fewer than
        `FEWEST_HELD` times after it left.
    """
    x = _measurements(series, every, sparse)
    total = x.total
    level = _level(x, onset, window)
    below = _below_band(x, onset, level)
    left = jnp.where(below, x.steps, total).min(initial=total)
    back = jnp.where((x.steps > left) & x.is_measured & ~below, x.steps, total).min(initial=total)
    non_finite = _first_non_finite(x, onset) < total
    lost = (back == total) | non_finite
    elapsed = jnp.where(lost, jnp.inf, (back - onset).astype(jnp.float32))
    time = jnp.where(left == total, -1.0, elapsed)
    known = level.is_defined
    if x.cadence.sparse:
        is_after_onset, has_left = x.steps >= jnp.asarray(onset), x.steps > left
        after_onset, after_leaving = ((x.is_measured & where).sum() for where in (is_after_onset, has_left))
        known &= (after_onset > 0) & (~lost | non_finite | (left == total) | (after_leaving >= FEWEST_HELD))
    return jnp.where(_is_inside(total, onset) & known, time, jnp.nan)


def spike_intensity(
    series: ArrayLike, onset: ArrayLike, *, window: int = 50, every: int = 1, sparse: bool = False
) -> jax.Array:
    """Returns SIP (section 5.4, Table 1), the ratio of the peak of I_inst after the onset to its level before.

    [open]: The peak is over steps `[onset, onset + window)` (to the end of the run if that comes first). The level is
    I_inst at `onset - 1`, which covers exactly the `window` steps before the onset and equals sigma_pre squared.

    Args:
        series: J, `[T]`.
        onset: step, scalar int.
        window: W, steps.
        every: steps from one measurement of J to the next.
        sparse: whether NaN is a step at which J was not measured.

    Returns:
        Scalar, a ratio; NaN if fewer than `window` steps precede the onset, J was constant over them (zero level), or
        J is non-finite in either window.
    """
    x = _measurements(series, every, sparse)
    steps = jnp.arange(x.total)
    index = instability_index(series, window=window, every=every, sparse=sparse)
    after = (steps >= onset) & (steps < onset + window)
    if sparse:  # windows with fewer than two measurements are skipped; a non-finite one still makes the peak NaN
        after &= ~jnp.isnan(index) | (steps >= _first_non_finite(x, onset))
    peak = _masked_max(index, after)
    level = index[jnp.clip(jnp.asarray(onset) - 1, 0, x.total - 1)]
    defined = _is_inside(x.total, onset) & (jnp.asarray(onset) >= window) & (level > 0)
    return jnp.where(defined, peak / jnp.where(level > 0, level, 1), jnp.nan)


def meta_state_deviation(
    latents: ArrayLike,
    onset: ArrayLike,
    *,
    horizon: int = 500,
    control: ArrayLike | None = None,
    whitening: ArrayLike | None = None,
) -> jax.Array:
    """Returns MSD (Table S5), the maximum over `[onset, onset + horizon]` of `||h_t - h_onset||_2`.

    If the run ends before `onset + horizon`, the maximum is over the steps up to its end.

    Args:
        latents: h, `[T, d]`.
        onset: step, scalar int.
        horizon: steps.
        control: the undisturbed lane's latents, `[T, d]`; its drift `c_t - c_onset` is subtracted.
        whitening: `[d, d]`, applied as `deviation @ whitening` (`jaxaudit.analysis.statistics.whitening`).

    Returns:
        Scalar, in units of h, or of the clean runs' standard deviations if whitened; NaN if a latent of the horizon
        is NaN or infinite at the onset, or the onset lies outside the run.
    """
    deviation = _drift(latents, onset)
    if control is not None:
        deviation = deviation - _drift(control, onset)
    if whitening is not None:
        deviation = jnp.matmul(deviation, whitening, precision=jax.lax.Precision.HIGHEST)
    steps = jnp.arange(deviation.shape[0])
    after = (steps >= onset) & (steps <= onset + horizon)
    distance = _masked_max(jnp.linalg.norm(deviation, axis=-1), after)
    return jnp.where(_is_inside(deviation.shape[0], onset), distance, jnp.nan)


def _drift(latents: ArrayLike, onset: ArrayLike) -> jax.Array:
    h = jnp.asarray(latents)
    if h.ndim != 2:
        raise ValueError(f"latents must be one lane's of shape [T, d], not {h.shape}; use jax.vmap for lanes")
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
    """Returns all scalar metrics of one lane by name.

    Args:
        series: J, `[T]`.
        onset: step, scalar int.
        total_steps: T_max of `diverged`, steps; the series' length by default.
        settings: the windows; Table S5's by default.
        latents: `[T, d]`; adds `meta_state_deviation`.
        every: steps from one measurement of J to the next.
        sparse: whether NaN is a step at which J was not measured.

    Returns:
        Scalars named `pre_mean`, `pre_std`, `collapse_time`, `collapse_censored` (bool), `diverged` (1 if
        `collapse_time < total_steps / 2`, else 0; NaN if `collapse_time` is NaN), `recovery_rate`, `recovery_time`,
        `spike_intensity` and, with latents, `meta_state_deviation`.
    """
    x = _measurements(series, every, sparse)
    settings = settings or MetricSettings()
    window, hold = settings.window, settings.hold
    cadence: dict[str, Any] = {"every": every, "sparse": sparse}
    mean, std = pre_onset_level(series, onset, window, **cadence)
    time, censored = _collapse(x, onset, window, hold)
    values = {
        "pre_mean": mean,
        "pre_std": std,
        "collapse_time": time,
        "collapse_censored": censored,
        "diverged": _diverged(time, x.total if total_steps is None else total_steps),
        "recovery_rate": recovery_rate(series, onset, window=window, hold=hold, **cadence),
        "recovery_time": recovery_time(series, onset, window=window, **cadence),
        "spike_intensity": spike_intensity(series, onset, window=window, **cadence),
    }
    if latents is not None:
        values["meta_state_deviation"] = meta_state_deviation(latents, onset, horizon=settings.horizon)
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
    """Returns the reason for each metric of one lane that is NaN, one sentence each; runs on the host, not in `jit`.

    Args:
        series: J, `[T]`.
        onset: step.
        settings: the windows; Table S5's by default.
        latents: `[T, d]`, if they were evaluated.
        values: the result of `evaluate` for this lane; computed here by default.
        every: steps from one measurement of J to the next.
        sparse: whether NaN is a step at which J was not measured.

    Returns:
        The reason for each NaN metric by name; empty if all are defined.
    """
    settings = settings or MetricSettings()
    x = np.asarray(series, np.float64)
    if values is None:
        values = _evaluate(series, onset, settings=settings, latents=latents, every=every, sparse=sparse)
    missing = [name for name, value in values.items() if np.isnan(float(value))]
    return {name: _reason(name, x, int(onset), settings, Cadence(every, sparse)) for name in missing}


_BUILTIN = ("pre_mean", "pre_std", "collapse_time", "diverged", "recovery_rate", "recovery_time", "spike_intensity")


def _reason(name: str, x: np.ndarray, onset: int, settings: MetricSettings, cadence: Cadence) -> str:
    every = cadence.every
    total, window, hold = x.shape[0], settings.window, settings.hold
    if not 0 <= onset < total:
        return f"the onset {onset} lies outside the run's {total} steps"
    if name == "meta_state_deviation":
        return f"a latent is non-finite in the {settings.horizon} steps from the onset"
    if onset < 2:
        return f"J_pre needs at least 2 steps before the onset, which is step {onset}"
    measured = due_steps(total, every)
    measured = measured[~np.isnan(x[measured])] if cadence.sparse else measured
    before = measured[(measured >= onset - window) & (measured < onset)]
    if cadence != Cadence() and len(before) < FEWEST:
        return f"J was measured {len(before)} times in the {window} steps before the onset, and J_pre needs {FEWEST}"
    non_finite_before = before[~np.isfinite(x[before])]
    if non_finite_before.size:
        return f"J is non-finite before the onset, at step {non_finite_before[0]}, so J_pre is undefined"
    if name == "spike_intensity" and onset < window:
        return f"only {onset} of window = {window} steps precede the onset"
    after = measured[measured >= onset]
    non_finite_after = after[~np.isfinite(x[after])]
    if non_finite_after.size:
        return f"J turned non-finite at step {non_finite_after[0]}"
    if every > 1 and hold // every < FEWEST_HELD and name in ("collapse_time", "diverged", "recovery_rate"):
        return f"hold = {hold} steps contain {hold // every} measurements of J, and a collapse needs {FEWEST_HELD}"
    if name == "spike_intensity":
        return f"J did not vary over the {window} steps before the onset, so there is no level to compare with"
    if name in ("recovery_rate", "recovery_time") and not after.size:
        return "J was not measured after the onset"
    if name == "recovery_time":
        return f"J was measured fewer than {FEWEST_HELD} times after it left the band"
    values_before = x[before]
    last = values_before[-1]
    if name == "recovery_rate" and x[after].min() - last >= (values_before - last).mean():
        return "J never fell below J_pre after the onset, so there was nothing to recover"
    if name == "recovery_rate":
        return "the run fully collapsed: it ended within 2 sigma_pre of its minimum"
    return "the arithmetic overflowed" if name in _BUILTIN else "the metric itself returned NaN"
