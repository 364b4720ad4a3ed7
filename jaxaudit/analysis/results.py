"""The results of an audit: metrics of every lane, statistics of every condition, and their tables."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np
import pandas as pd
import xarray as xr

from jaxaudit.analysis import metrics, statistics
from jaxaudit.analysis.datasets import DIMS, channel_cadence
from jaxaudit.analysis.result_table import audit_table
from jaxaudit.analysis.statistics.paired import ExcessColumns, excess_columns
from jaxaudit.core.channel_names import ACTED, ACTING, PERFORMANCE
from jaxaudit.runtime import registry

if TYPE_CHECKING:
    import altair


FEWEST_SEEDS = 5
"""The fewest seeds with which estimates other than shares have intervals."""


def lane_metrics(data: xr.Dataset, settings: metrics.MetricSettings) -> xr.Dataset:
    """Computes all metrics of each lane.

    Args:
      data: Telemetry with dims (seed, condition, step).
      settings: The windows of the metrics.

    Returns:
      A dataset with dims (seed, condition): the metrics of `metrics.evaluate`, the final and minimal performance, and
      the reasons for NaN as `reason`. Each registered metric, a pure function `(series [T], onset) -> scalar`, is a
      variable with its name. If the telemetry has the acting performance, `acting_collapse_time` is its T_c. For a
      learner with remedies, `acted_NAME` is the mean of that channel from the onset on.
    """
    series = data[PERFORMANCE].transpose(*DIMS).values
    onsets, cadence = data["onset"].values, channel_cadence(data)
    values = {name: np.asarray(x) for name, x in _evaluate_lanes(settings, cadence)(series, onsets).items()}
    for name in registry.metrics:
        each_lane = jax.vmap(jax.vmap(registry.metrics[name]), in_axes=(0, None))
        values[name] = np.asarray(jax.jit(each_lane)(series, onsets))
    if ACTING in data:
        acting_series = data[ACTING].transpose(*DIMS).values
        acting = _evaluate_lanes(settings, channel_cadence(data, ACTING))(acting_series, onsets)
        values["acting_collapse_time"] = np.asarray(acting["collapse_time"])
    for name in (str(name) for name in data.data_vars if str(name).startswith(ACTED)):
        values[name] = _mean_after(data[name].transpose(*DIMS).values, onsets)
    due = metrics.due_steps(series.shape[2], cadence.every)
    measured = series[:, :, due]
    after = (due >= onsets[:, None]) & ~(cadence.sparse & np.isnan(measured))
    values["final_performance"] = _last_value(measured, after if cadence.sparse else np.ones_like(after))
    values["performance_minimum"] = np.where(after, measured, np.inf).min(axis=2, initial=np.inf)
    values["reason"] = _reasons(series, onsets, settings, cadence, values)
    renamed = {"pre_mean": "performance_before", "pre_std": "performance_std_before"}
    coords = {name: x for name, x in data.coords.items() if set(x.dims) <= {"seed", "condition"}}
    return xr.Dataset({renamed.get(name, name): (DIMS[:2], x) for name, x in values.items()}, coords, data.attrs)


@cache
def _evaluate_lanes(settings: metrics.MetricSettings, cadence: metrics.Cadence) -> Callable[..., Any]:
    """Returns the compiled `evaluate` of lanes `[S, C, T]` with onsets `[C]`, cached so that it is compiled once."""
    evaluate = partial(metrics.evaluate, settings=settings, **cadence._asdict())
    return jax.jit(jax.vmap(jax.vmap(evaluate), in_axes=(0, None)))


def _mean_after(values: np.ndarray, onsets: np.ndarray) -> np.ndarray:
    """Returns the mean `[S, C]` of values `[S, C, T]` from the onset on, without NaN; NaN if all are NaN."""
    counted = (np.arange(values.shape[2]) >= onsets[:, None]) & ~np.isnan(values)
    total, count = np.where(counted, values, 0.0).sum(axis=2), counted.sum(axis=2)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _last_value(values: np.ndarray, where: np.ndarray) -> np.ndarray:
    """Returns the last of the values `[..., M]` where `where` is true, `[...]`; NaN if there is none."""
    if not values.shape[-1]:
        return np.full(values.shape[:-1], np.nan)
    last = values.shape[-1] - 1 - where[..., ::-1].argmax(axis=-1)
    return np.where(where.any(axis=-1), np.take_along_axis(values, last[..., None], axis=-1)[..., 0], np.nan)


def _reasons(
    series: np.ndarray,
    onsets: np.ndarray,
    settings: metrics.MetricSettings,
    cadence: metrics.Cadence,
    values: dict[str, np.ndarray],
) -> np.ndarray:
    """Returns the reasons why metrics of each lane are NaN, str `[S, C]`; empty if none is."""
    floats = [x for x in values.values() if np.issubdtype(x.dtype, np.floating)]
    reasons = np.full(series.shape[:2], "", object)
    for s, c in np.argwhere(np.any([np.isnan(x) for x in floats], axis=0)):
        lane_values = {name: x[s, c] for name, x in values.items()}
        explained = metrics.explain(
            series[s, c], int(onsets[c]), settings=settings, values=lane_values, **cadence._asdict()
        )
        reasons[s, c] = "; ".join(f"{name}: {reason}" for name, reason in explained.items())
    return reasons.astype(str)


def undeclared_gap_warning(data: xr.Dataset) -> str:
    """Returns a warning if undisturbed performance is NaN between two numbers without being declared sparse.

    NaN before the first number is no gap: no episode has ended then.

    Returns:
      One sentence on the first such seed, or an empty string.
    """
    cadence = channel_cadence(data)
    controls = np.flatnonzero(data["perturbation"].values == "control")
    if cadence.sparse or not len(controls):
        return ""
    series = data[PERFORMANCE].isel(condition=int(controls[0])).transpose("seed", "step").values
    due = metrics.due_steps(series.shape[1], cadence.every)
    missing = np.isnan(series[:, due])
    has_earlier_value = np.maximum.accumulate(~missing, axis=1)
    has_later_value = np.maximum.accumulate(~missing[:, ::-1], axis=1)[:, ::-1]
    gaps = missing & has_earlier_value & has_later_value
    seeds = np.flatnonzero(gaps.any(axis=1))
    if not len(seeds):
        return ""
    first = int(np.argmax(gaps[seeds[0]]))
    back = first + int(np.argmax(~missing[seeds[0], first:]))
    others = f", and so for {len(seeds) - 1} more seeds" if len(seeds) > 1 else ""
    return (
        f"the performance of the undisturbed seed {data['seed'].values[seeds[0]]} is NaN at step {due[first]} and a "
        f"number again at step {due[back]}{others}: NaN counts as collapse; declare a performance that is measured at "
        "some steps only by Learner(..., channels={'performance': Channel(sparse=True)})"
    )


MOST_TREND = 0.5
"""The largest share of the variance before an onset that a straight line may explain without a warning."""


def onsets_in_trend(data: xr.Dataset, window: int) -> list[int]:
    """Returns the onsets before which performance was itself rising or falling, which widens the band of a collapse.

    An onset is left out if fewer than `window` steps precede it.

    Args:
      data: Telemetry with dims (seed, condition, step).
      window: The number of steps.
    """
    onsets = data["onset"].values
    found = []
    for onset in np.unique(onsets).tolist():
        lanes = data[PERFORMANCE].isel(condition=int(np.flatnonzero(onsets == onset)[0])).transpose("seed", "step")
        if has_trend(lanes.values[:, :onset], window):
            found.append(int(onset))
    return found


def has_trend(performance: np.ndarray, window: int) -> bool:
    """Returns whether the performance of most seeds, `[S, T]`, is rising or falling in the last `window` steps.

    A straight line is fitted to each seed's performance. There is a trend if the median over seeds of R squared is
    above `MOST_TREND`; R squared is 0 for a seed whose performance is constant. There is no trend if there are fewer
    steps than `window`, or a value is not finite.
    """
    if not 0 < window <= performance.shape[1]:
        return False
    time = np.arange(window) - (window - 1) / 2
    deviation = performance[:, -window:].astype(np.float64)
    deviation = deviation - deviation.mean(axis=1, keepdims=True)
    total = (deviation**2).sum(axis=1) * (time**2).sum()
    explained = np.divide((deviation @ time) ** 2, total, where=total > 0, out=np.zeros(len(total)))
    return bool(np.isfinite(explained).all() and np.median(explained) > MOST_TREND)


def lane_table(lanes: xr.Dataset) -> pd.DataFrame:
    """Returns a table with one row for every lane: its coordinates and metrics."""
    columns = ["seed", "condition", "perturbation", "dimension", "site", "magnitude", "neutral", "onset", "duration"]
    columns += ["target"]
    table = lanes.to_dataframe().reset_index()
    first = [column for column in columns if column in table]  # runs of earlier versions lack some
    return table[first + [column for column in table.columns if column not in (*first, "reason")] + ["reason"]]


def summary_table(lanes: xr.Dataset, steps: int) -> pd.DataFrame:
    """Returns a table with one row for every condition: estimates over seeds with 95% intervals.

    The ends of intervals are columns `*_low` and `*_high`. Divergence is T_c < steps / 2 (Table S5), collapse any
    finite T_c. Differences and the columns `excess_*` are paired by seed with the control of the same onset:
    `excess_*_lost` counts seeds that collapse and whose control does not, `excess_*_spared` the reverse, and
    `excess_*_standing` those whose control does not collapse. Medians are lower medians of the lanes whose value is
    defined, and `*_undefined` counts the others. `never_left` counts lanes that stayed in their band (a recovery time
    of -1), `never_back` those that left it and did not return (inf).

    Args:
      lanes: The metrics of `lane_metrics`.
      steps: The steps of the run.
    """
    controls, onsets = lanes["perturbation"].values == "control", lanes["onset"].values
    rows = []
    for index in range(lanes.sizes["condition"]):
        control = int(np.flatnonzero(controls & (onsets == onsets[index]))[0])
        rows.append(_summary_row(lanes.isel(condition=index), lanes.isel(condition=control), steps, controls[index]))
    return pd.DataFrame(rows)


def _summary_row(lanes: xr.Dataset, control: xr.Dataset, steps: int, is_control: bool) -> dict[str, Any]:
    """Returns the row of a condition, given the metrics of its seeds and those of its control."""
    final = lanes["final_performance"].values
    collapse = lanes["collapse_time"].values
    estimates = {
        "divergence_probability": statistics.divergence(collapse, steps),
        "collapse_probability": statistics.proportion(statistics.collapsed(collapse)),
    }
    if "acting_collapse_time" in lanes:
        acting = statistics.collapsed(lanes["acting_collapse_time"].values)
        estimates["acting_collapse_probability"] = statistics.proportion(acting)
    estimates |= {
        "iqm_final_performance": statistics.bootstrap(final),
        "paired_difference_final_performance": statistics.paired_difference(final, control["final_performance"].values),
    }
    medians = ("recovery_rate", "recovery_time", "spike_intensity")
    estimates |= {f"{name}_median": statistics.median(lanes[name].values, missing="count") for name in medians}
    row: dict[str, Any] = {
        name: lanes[name].item() for name in ("condition", "perturbation", "dimension", "magnitude", "onset")
    }
    row["seeds"] = final.size
    for name, estimate in estimates.items():
        row |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
    row |= {f"{name}_undefined": estimates[f"{name}_median"].n_missing for name in medians}
    time = lanes["recovery_time"].values
    row |= {"never_left": int((time == -1).sum()), "never_back": int((time == np.inf).sum())}
    reasons = {name: estimate.reason for name, estimate in estimates.items()}
    for kind, excess in _excess(lanes, control, steps).items():
        name = f"excess_{kind}_probability"
        row |= excess.values
        if is_control:  # its difference from itself is exactly zero
            row |= {f"{name}_low": row[name], f"{name}_high": row[name]}
        reasons[name] = excess.reason
    row["reason"] = "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason)
    return row


def _excess(lanes: xr.Dataset, control: xr.Dataset, steps: int) -> dict[str, ExcessColumns]:
    """Returns the excess of a condition's collapses over those of its control, by the kind of collapse."""
    times, control_times = lanes["collapse_time"].values, control["collapse_time"].values
    columns = {
        "divergence": excess_columns(times, control_times, kind="divergence", before=steps / 2),
        "collapse": excess_columns(times, control_times),
    }
    if "acting_collapse_time" in lanes:
        acting, control_acting = (x["acting_collapse_time"].values for x in (lanes, control))
        columns["acting_collapse"] = excess_columns(acting, control_acting, kind="acting_collapse")
    return columns


def noise_floor(data: xr.Dataset, baseline: np.ndarray, last_onset: int) -> float:
    """Returns the largest |control - baseline| in performance after the last onset, the effect of rounding on a lane.

    Args:
      data: Telemetry with dims (seed, condition, step).
      baseline: The performance of the baseline, `[seed, step]`; NaN where it was not trained.
      last_onset: The last onset of the grid.

    Returns:
      NaN if the baseline was not trained after the last onset.
    """
    control = (data["perturbation"].values == "control") & (data["onset"].values == last_onset)
    difference = np.abs(data[PERFORMANCE].values[:, control][:, 0] - baseline)[:, last_onset:]
    return float(np.nanmax(difference)) if np.isfinite(difference).any() else float("nan")


@dataclass(frozen=True)
class Result:
    """The result of an audit: telemetry, metrics of each lane, and summaries.

    Attributes:
      telemetry: A dataset with dims (seed, condition, step) and the coordinates perturbation, magnitude, onset,
        dimension, site, target and others.
      settings: The windows of the metrics.
    """

    telemetry: xr.Dataset
    settings: metrics.MetricSettings

    @cached_property
    def metrics(self) -> xr.Dataset:
        """The metrics of each lane, dims (seed, condition), and the columns of `summary`, dim condition."""
        summary = self.summary.set_index("condition").drop(
            columns=["perturbation", "dimension", "magnitude", "onset", "reason"]
        )
        return self.lanes.merge(xr.Dataset.from_dataframe(summary).reindex(condition=self.lanes["condition"]))

    @cached_property
    def lanes(self) -> xr.Dataset:
        """The metrics of each lane, dims (seed, condition)."""
        return lane_metrics(self.telemetry, self.settings)

    @cached_property
    def summary(self) -> pd.DataFrame:
        """The table of `summary_table`, with one row for every condition, with intervals."""
        return summary_table(self.lanes, self.telemetry.sizes["step"])

    @cached_property
    def warnings(self) -> list[str]:
        """Sentences that qualify how the tables can be read. Most audits have none.

        They name windows that the run is too short for, a performance that has gaps or that was rising or falling
        before the onset, seeds whose collapse is unknown, seeds that collapse undisturbed, and too few seeds for
        intervals.
        """
        times, seeds = self.lanes["collapse_time"].values, self.telemetry.sizes["seed"]
        sentences = [gaps] if (gaps := undeclared_gap_warning(self.telemetry)) else []
        onsets, every = np.unique(self.lanes["onset"].values), channel_cadence(self.telemetry).every
        for onset in onsets.tolist():
            prefix = f"onset {onset}: " if len(onsets) > 1 else ""
            sentences += [prefix + x for x in self.settings.validate(self.telemetry.sizes["step"], onset, every=every)]
        window = self.settings.window
        if trending := onsets_in_trend(self.telemetry, window):
            sentences.append(
                f"in the {window} steps before step {', '.join(map(str, trending))} performance was itself "
                "rising or falling, which widens the band that a collapse has to leave; a smaller window in "
                "MetricSettings makes collapses easier to detect"
            )
        if unknown := int(np.isnan(times).sum()):
            reasons = re.findall(r"(?:^|; )collapse_time: ([^;]*)", "; ".join(np.unique(self.lanes["reason"].values)))
            sentences.append(
                f"for {unknown} of {times.size} lanes it is unknown whether they collapse: "
                + "; ".join(dict.fromkeys(reasons))
            )
        for index in np.flatnonzero(self.lanes["perturbation"].values == "control"):
            if collapsed := int(np.isfinite(times[:, index]).sum()):
                name = self.lanes["condition"].values[index]
                half = ", so there is no critical magnitude" if 2 * collapsed >= seeds else ""
                sentences.append(f"{collapsed} of {seeds} seeds collapse undisturbed ({name}){half}")
        if seeds == 1:
            sentences.append("there is one seed, so there are no intervals")
        elif seeds < FEWEST_SEEDS:
            sentences.append(f"with fewer than {FEWEST_SEEDS} seeds, only shares have intervals")
        return sentences

    def __str__(self) -> str:
        return audit_table(self.telemetry, self.summary, self.warnings).text()

    def _repr_html_(self) -> str:
        return audit_table(self.telemetry, self.summary, self.warnings).html()

    def plot(self, figure: Literal["performance", "map", "dose_response"] = "performance") -> altair.ConcatChart:
        """Draws a figure as the page of a report has it.

        Args:
          figure: "performance": performance over steps, a panel for each perturbation and onset; "map": the share of
            seeds that collapse under each condition; "dose_response": that share against the magnitude.

        Raises:
          ModuleNotFoundError: altair and vl-convert are not installed.
          ValueError: there is no such figure, or nothing in this audit to draw in it.
        """
        draw = registry.plots["audit"]
        return draw(self.telemetry, lane_table(self.lanes), self.summary, self.settings, figure)

    def critical_magnitude(
        self, perturbation: str, onset: int | None = None, target: str | None = None, *, standing: bool = False
    ) -> statistics.Estimate:
        """Estimates the magnitude at which half of the seeds collapse at any time, with its interval.

        The estimate is NaN if half of the seeds collapse undisturbed, in the control of the same onset. A magnitude of
        0 is left out if it is neutral. An end of the interval that is 0 or infinite lies beyond the magnitudes tried.

        Args:
          perturbation: The name of a perturbation.
          onset: The step of the onset; required if the perturbation has several.
          target: The path of the parameters it acts on; required if its conditions differ in that.
          standing: Whether only seeds whose control does not collapse count.

        Raises:
          ValueError: There is no such condition, there are several onsets or targets, or the magnitudes lie on both
            sides of the neutral one.
        """
        selected = self.lanes["perturbation"].values == perturbation
        for name, value in (("onset", onset), ("target", target)):
            if value is not None:
                selected &= self.lanes[name].values == value
        if not selected.any():
            raise ValueError(f"this audit has no condition of '{perturbation}' with this onset and target")
        lanes = self.lanes.isel(condition=np.flatnonzero(selected)).sortby("magnitude")
        for name in ("onset", "target"):
            if len(values := np.unique(lanes[name].values)) > 1:
                several = ", ".join(map(str, values))
                raise ValueError(f"'{perturbation}' has several {name}s, so {name} must be one of them: {several}")
        if lanes["neutral"].values[0] == 0:
            lanes = lanes.isel(condition=np.flatnonzero(lanes["magnitude"].values != 0))  # there is no logarithm of it
        magnitudes = lanes["magnitude"].values
        rising = statistics.harm_rises(magnitudes, float(lanes["neutral"].values[0]))
        collapsed = statistics.collapsed(lanes["collapse_time"].values)
        control = (self.lanes["perturbation"].values == "control") & (self.lanes["onset"] == lanes["onset"][0]).values
        undisturbed = statistics.collapsed(self.lanes["collapse_time"].values[:, control][:, 0])
        return statistics.critical_beside(magnitudes, collapsed, undisturbed, standing=standing, increasing=rising)
