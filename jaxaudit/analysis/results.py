"""What an audit found: metrics of every lane, statistics of every condition, and their tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import jax
import numpy as np
import pandas as pd
import xarray as xr

from jaxaudit.analysis import metrics, statistics
from jaxaudit.analysis.datasets import DIMS, cadence
from jaxaudit.analysis.statistics.paired import ExcessColumns, excess_columns
from jaxaudit.core.channel_names import ACTED, ACTING, PERFORMANCE
from jaxaudit.runtime import registry


def lane_metrics(data: xr.Dataset, settings: metrics.MetricSettings) -> xr.Dataset:
    """Every metric of Table S5 and its kin for each lane: dims (seed, condition).

    Where telemetry has the acting performance, `acting_collapse_time` is T_c on it. Of a learner with remedies,
    `acted_NAME` is the mean of that channel from the onset on. A registered metric is a pure function
    `(series [T], onset) -> scalar`, and becomes a variable of its name.
    """
    series = data[PERFORMANCE].transpose(*DIMS).values
    onsets, when = data["onset"].values, cadence(data)
    evaluate = _evaluation(settings, when)
    values = {name: np.asarray(x) for name, x in evaluate(series, onsets).items()}
    for name in registry.metrics:
        each_lane = jax.vmap(jax.vmap(registry.metrics[name]), in_axes=(0, None))
        values[name] = np.asarray(jax.jit(each_lane)(series, onsets))
    if ACTING in data:
        evaluate = _evaluation(settings, cadence(data, ACTING))
        acting = evaluate(data[ACTING].transpose(*DIMS).values, onsets)
        values["acting_collapse_time"] = np.asarray(acting["collapse_time"])
    for name in (str(name) for name in data.data_vars if str(name).startswith(ACTED)):
        values[name] = _mean_from(data[name].transpose(*DIMS).values, onsets)
    due = metrics.due_steps(series.shape[2], when.every)
    after = (due >= onsets[:, None]) & ~(when.sparse & np.isnan(series[:, :, due]))
    values["final_performance"] = _last(series[:, :, due], after if when.sparse else np.ones_like(after))
    values["performance_minimum"] = np.where(after, series[:, :, due], np.inf).min(axis=2, initial=np.inf)
    values["reason"] = _reasons(series, onsets, settings, when, values)
    renamed = {"pre_mean": "performance_before", "pre_std": "performance_std_before"}
    coords = {k: v for k, v in data.coords.items() if set(v.dims) <= {"seed", "condition"}}
    return xr.Dataset({renamed.get(k, k): (DIMS[:2], v) for k, v in values.items()}, coords, data.attrs)


def _mean_from(values: np.ndarray, onsets: np.ndarray) -> np.ndarray:
    """The mean over steps from each condition's onset on, `[S, C]`, of values `[S, C, T]`; NaN where all are NaN."""
    counts = (np.arange(values.shape[2]) >= onsets[:, None]) & ~np.isnan(values)
    total, number = np.where(counts, values, 0.0).sum(axis=2), counts.sum(axis=2)
    return np.where(number > 0, total / np.maximum(number, 1), np.nan)


def _last(values: np.ndarray, there: np.ndarray) -> np.ndarray:
    """The last of values `[..., M]` that is there, `[...]`; NaN where none is."""
    if not values.shape[-1]:
        return np.full(values.shape[:-1], np.nan)
    last = values.shape[-1] - 1 - there[..., ::-1].argmax(axis=-1)
    return np.where(there.any(axis=-1), np.take_along_axis(values, last[..., None], axis=-1)[..., 0], np.nan)


@cache
def _evaluation(settings: metrics.MetricSettings, when: metrics.Cadence) -> Callable[..., Any]:
    """`evaluate` of lanes `[S, C, T]`, whose conditions have onsets `[C]`; kept, too."""
    return jax.jit(
        jax.vmap(jax.vmap(partial(metrics.evaluate, settings=settings, **when._asdict())), in_axes=(0, None))
    )


def _reasons(
    series: np.ndarray,
    onsets: np.ndarray,
    settings: metrics.MetricSettings,
    when: metrics.Cadence,
    values: dict[str, np.ndarray],
) -> np.ndarray:
    """Why metrics `[S, C]` that are NaN are so, in words; empty where all are defined, and looked at nowhere else."""
    floats = {name: x for name, x in values.items() if np.issubdtype(x.dtype, np.floating)}
    reasons = np.full(series.shape[:2], "", object)
    for s, c in np.argwhere(np.any([np.isnan(x) for x in floats.values()], axis=0)):
        own = {name: x[s, c] for name, x in values.items()}
        found = metrics.explain(series[s, c], int(onsets[c]), settings=settings, values=own, **when._asdict())
        reasons[s, c] = "; ".join(f"{name}: {why}" for name, why in found.items())
    return reasons.astype(str)


def undeclared_gaps(data: xr.Dataset) -> str:
    """A warning where undisturbed performance is NaN and then a number again, undeclared; else ""."""
    when = cadence(data)
    controls = np.flatnonzero(data["perturbation"].values == "control")
    if when.sparse or not len(controls):
        return ""
    series = data[PERFORMANCE].isel(condition=int(controls[0])).transpose("seed", "step").values
    due = metrics.due_steps(series.shape[1], when.every)
    missing = np.isnan(series[:, due])
    later = np.maximum.accumulate(~missing[:, ::-1], axis=1)[:, ::-1]
    seeds = np.flatnonzero((missing & later).any(axis=1))
    if not len(seeds):
        return ""
    first = int(np.argmax(missing[seeds[0]]))
    back = first + int(np.argmax(~missing[seeds[0], first:]))
    others = f", and so for {len(seeds) - 1} more seeds" if len(seeds) > 1 else ""
    return (
        f"the performance of the undisturbed seed {data['seed'].values[seeds[0]]} is NaN at step {due[first]} and a "
        f"number again at step {due[back]}{others}: NaN counts as collapse; of a performance that is measured in some "
        "steps only, say so by Learner(..., channels={'performance': Channel(sparse=True)})"
    )


def lane_table(lanes: xr.Dataset) -> pd.DataFrame:
    """Returns a table with one row for every lane: its coordinates and metrics."""
    columns = ["seed", "condition", "perturbation", "dimension", "site", "magnitude", "neutral", "onset", "duration"]
    columns += ["target"]
    table = lanes.to_dataframe().reset_index()
    first = [c for c in columns if c in table]  # runs of earlier versions lack some
    return table[first + [c for c in table.columns if c not in (*first, "reason")] + ["reason"]]


def summary_table(lanes: xr.Dataset, steps: int) -> pd.DataFrame:
    """One row for every condition: estimates over seeds with 95% intervals (columns *_low, *_high).

    Divergence is T_c < steps / 2 (Table S5), collapse any finite T_c; differences and the columns excess_* are paired
    by seed with the control of the same onset: excess_*_lost counts seeds that collapse and whose control does not,
    excess_*_spared the reverse, excess_*_standing those whose control does not collapse. Medians are lower medians of
    the lanes whose value is defined, *_undefined counts the others; `never_left` counts lanes that stayed in their band
    (a recovery time of -1), `never_back` those that left it for good (inf).
    """
    rows = []
    for position in range(lanes.sizes["condition"]):
        one = lanes.isel(condition=position)
        onset, control = lanes["onset"].values, lanes["perturbation"].values == "control"
        paired = lanes.isel(condition=int(np.flatnonzero(control & (onset == onset[position]))[0]))
        final = one["final_performance"].values
        collapse = one["collapse_time"].values
        estimates = {
            "divergence_probability": statistics.divergence(collapse, steps),
            "collapse_probability": statistics.proportion(statistics.collapsed(collapse)),
            **_acting(one),
            "iqm_final_performance": statistics.bootstrap(final),
            "paired_difference_final_performance": statistics.paired_difference(
                final, paired["final_performance"].values
            ),
        }
        medians = ("recovery_rate", "recovery_time", "spike_intensity")
        estimates |= {f"{m}_median": statistics.median(one[m].values, missing="count") for m in medians}
        row: dict[str, Any] = {
            name: one[name].item() for name in ("condition", "perturbation", "dimension", "magnitude", "onset")
        }
        row["seeds"] = final.size
        for name, estimate in estimates.items():
            row |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
        row |= {f"{m}_undefined": estimates[f"{m}_median"].n_missing for m in medians}
        time = one["recovery_time"].values
        row |= {"never_left": int((time == -1).sum()), "never_back": int((time == np.inf).sum())}
        reasons = {k: e.reason for k, e in estimates.items()}
        for kind, excess in _excess(one, paired, steps).items():
            name = f"excess_{kind}_probability"
            row |= excess.values
            if control[position]:  # is its own pair
                row |= {f"{name}_{end}": row[name] for end in ("low", "high")}
            reasons[name] = excess.reason
        row["reason"] = "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason)
        rows.append(row)
    return pd.DataFrame(rows)


def _acting(lanes: xr.Dataset) -> dict[str, statistics.Estimate]:
    """The share of a condition's lanes whose acting collapses, disturbed or not, where that was told."""
    if "acting_collapse_time" not in lanes:
        return {}
    collapsed = statistics.collapsed(lanes["acting_collapse_time"].values)
    return {"acting_collapse_probability": statistics.proportion(collapsed)}


def _excess(lanes: xr.Dataset, control: xr.Dataset, steps: int) -> dict[str, ExcessColumns]:
    """What a condition's collapses exceed its control's by."""
    times, undisturbed = (one["collapse_time"].values for one in (lanes, control))
    found = {
        "divergence": excess_columns(times, undisturbed, kind="divergence", before=steps / 2),
        "collapse": excess_columns(times, undisturbed),
    }
    if "acting_collapse_time" in lanes:
        acting = (one["acting_collapse_time"].values for one in (lanes, control))
        found["acting_collapse"] = excess_columns(*acting, kind="acting_collapse")
    return found


def noise_floor(data: xr.Dataset, baseline: np.ndarray, last_onset: int) -> float:
    """Largest |control - baseline| in performance after the last onset: what rounding alone does to a lane.

    `baseline` is `[seed, step]`, NaN where it was not trained; NaN if it never ran beside a control.
    """
    control = (data["perturbation"].values == "control") & (data["onset"].values == last_onset)
    apart = np.abs(data[PERFORMANCE].values[:, control][:, 0] - baseline)[:, last_onset:]
    return float(np.nanmax(apart)) if np.isfinite(apart).any() else float("nan")


@dataclass(frozen=True)
class Result:
    """The result of an audit: telemetry, metrics of each lane, and summaries.

    Attributes:
      telemetry: dims (seed, condition, step), coordinates perturbation, magnitude, onset, dimension, ...
      settings: the metrics' windows.
    """

    telemetry: xr.Dataset
    settings: metrics.MetricSettings

    @cached_property
    def metrics(self) -> xr.Dataset:
        """Per lane, dims (seed, condition), and per condition: the variables of `summary`, dim condition."""
        summary = self.summary.set_index("condition").drop(
            columns=["perturbation", "dimension", "magnitude", "onset", "reason"]
        )
        return self.lanes.merge(xr.Dataset.from_dataframe(summary).reindex(condition=self.lanes["condition"]))

    @cached_property
    def lanes(self) -> xr.Dataset:
        """The metrics of each lane, with dimensions (seed, condition)."""
        return lane_metrics(self.telemetry, self.settings)

    @cached_property
    def summary(self) -> pd.DataFrame:
        """One row for every condition, with intervals."""
        return summary_table(self.lanes, self.telemetry.sizes["step"])

    def critical_magnitude(
        self, perturbation: str, onset: int | None = None, target: str | None = None, *, standing: bool = False
    ) -> statistics.Estimate:
        """The magnitude at which half of the seeds collapse, with its interval.

        It is NaN where half of the seeds collapse undisturbed, by the control of the same onset.

        Args:
          perturbation: a name.
          onset: step, where it was tried at several.
          target: where it was aimed at several.
          standing: whether only seeds whose control does not collapse count.

        Raises:
          ValueError: no such condition, several onsets or targets, or magnitudes on both sides of the neutral one.
        """
        chosen = self.lanes["perturbation"].values == perturbation
        for name, wanted in (("onset", onset), ("target", target)):
            if wanted is not None:
                chosen &= self.lanes[name].values == wanted
        if not chosen.any():
            raise ValueError(f"no condition of '{perturbation}' in this audit")
        lanes = self.lanes.isel(condition=np.flatnonzero(chosen)).sortby("magnitude")
        for name in ("onset", "target"):
            if len(found := np.unique(lanes[name].values)) > 1:
                several = ", ".join(map(str, found))
                raise ValueError(f"'{perturbation}' was tried at several {name}s, give one of them: {several}")
        magnitudes = lanes["magnitude"].values
        rising = statistics.harm_rises(magnitudes, float(lanes["neutral"].values[0]))
        table = statistics.collapsed(lanes["collapse_time"].values)
        control = (self.lanes["perturbation"].values == "control") & (self.lanes["onset"] == lanes["onset"][0]).values
        undisturbed = statistics.collapsed(self.lanes["collapse_time"].values[:, control][:, 0])
        return statistics.critical_beside(magnitudes, table, undisturbed, standing=standing, increasing=rising)
