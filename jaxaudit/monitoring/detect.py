"""The command `jaxaudit detect`: compares detectors on stored runs, and writes the results to a folder."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr

from jaxaudit.core.channel_names import PERFORMANCE
from jaxaudit.monitoring.baselines import standard_baselines
from jaxaudit.monitoring.comparison import (
    CLEAN,
    DetectionSettings,
    best_chart,
    compare,
    fold_thresholds,
    lane_alarms,
    split_lanes,
    summarise,
    summarise_by_condition,
)
from jaxaudit.monitoring.detector import MonitorDetector, MultichannelChart
from jaxaudit.monitoring.labelled_lanes import LabelledLanes, load_lanes
from jaxaudit.monitoring.monitor import Expectation, Monitor
from jaxaudit.monitoring.page_arrays import QUANTILES, lane_quantiles, projection_plane
from jaxaudit.monitoring.scoring import threshold
from jaxaudit.monitoring.telemetry import varying_channels
from jaxaudit.monitoring.transfer import transfer
from jaxaudit.runtime.array_store import FORMAT
from jaxaudit.runtime.backends import Workers, open_backend, run_calls
from jaxaudit.runtime.errors import UserError, error_prefix
from jaxaudit.runtime.files import UNFINISHED, claimed
from jaxaudit.runtime.machine import atomic_output

SAMPLES = 4
"""The number of lanes of each condition whose latents are stored."""

TABULATED = 5
"""The number of detectors, including the monitor, whose figures are stored by condition."""


def trajectories(lanes: LabelledLanes, expectation: Expectation, settings: DetectionSettings) -> xr.Dataset:
    """Summarises the lanes that the first fold's monitor was not fitted to, by condition; the clean ones come first.

    Args:
      lanes: the lanes.
      expectation: the scorer of the first fold's monitor.
      settings: the settings of the comparison.

    Returns:
      latent_samples (condition, sample, step, component), for up to SAMPLES lanes, and latent (condition, step,
      component, quantile), in the plane in which whitened latents vary most; deviation, performance and score
      (condition, step, quantile), where deviation is the whitened, drift-corrected distance of Table S5's MSD with the
      clean runs' mean in place of the undisturbed twin. Also the coordinate onset and the attribute threshold.
    """
    split = split_lanes(lanes, settings)[0]
    scores, latents = expectation.scores_and_latents(expectation.channels.select_columns(lanes.values, lanes.channels))
    score = np.asarray(expectation.normalizer.combine(scores))
    latent = expectation.reference.whiten(latents)
    series = {
        "deviation": np.linalg.norm(latent, axis=-1),
        "performance": lanes.values[..., lanes.channels.index(PERFORMANCE)],
        "score": np.where(np.isfinite(score), score, np.nan),
    }
    projected = latent @ projection_plane(latent[split.calibrate], latent[~lanes.table.clean.to_numpy()])
    data: dict[str, list] = {"latent": [], "latent_samples": [], **{name: [] for name in series}}
    conditions = _lanes_by_condition(lanes, split.fit)
    for indices in conditions.values():
        data["latent"].append(lane_quantiles(projected[indices]))
        samples = np.resize(indices, SAMPLES) if len(indices) else np.zeros(SAMPLES, int)
        data["latent_samples"].append(projected[samples])
        for name, lane_series in series.items():
            data[name].append(lane_quantiles(lane_series[indices]))
    dims = {
        "latent": ("condition", "step", "component", "quantile"),
        "latent_samples": ("condition", "sample", "step", "component"),
        **dict.fromkeys(series, ("condition", "step", "quantile")),
    }
    onsets = lanes.table[~lanes.table.clean].groupby("condition").onset.first()
    return xr.Dataset(
        {name: (dims[name], np.stack(rows).astype(np.float32)) for name, rows in data.items()},
        {
            "condition": list(conditions),
            "onset": ("condition", [0, *onsets[list(conditions)[1:]]]),
            "quantile": list(QUANTILES),
            "step": np.arange(latent.shape[1]),
        },
        {"threshold": threshold(score[split.calibrate].max(axis=1), settings.alpha)},
    )


def _lanes_by_condition(lanes: LabelledLanes, fitted: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the indices of each condition's lanes, and under CLEAN those of clean lanes that are not in `fitted`."""
    table = lanes.table
    clean = np.setdiff1d(np.flatnonzero(table.clean), fitted)
    disturbed = table[~table.clean].groupby("condition", sort=False)
    return {CLEAN: clean} | {str(name): rows.index.to_numpy() for name, rows in disturbed}


def _write_zarr(data: xr.Dataset, path: Path) -> None:
    text = {name: values.astype(object) for name, values in data.coords.items() if values.dtype.kind == "U"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zarr warns that its format of strings may change.
        data.assign_coords(text).to_zarr(path, zarr_format=FORMAT)


def detect(
    folders: Sequence[Path],
    out: Path,
    detector: MonitorDetector,
    settings: DetectionSettings,
    channels: Sequence[str] | None = None,
    workers: Workers | None = None,
    say: Callable[[str], None] = print,
) -> list[Path]:
    """Compares the monitor with its baselines on the lanes of finished runs, for each learner.

    Returns the folders that `write_comparisons` writes. If there are workers, each compares one learner at a time.

    Raises:
      UserError: a run is not finished, there are too few lanes, a channel is missing, or `out` exists.
    """
    with claimed(out, hint="; name another with -o") as claim:
        learners = load_lanes(folders, channels)
        if workers is None:
            written = write_comparisons(learners, out, detector, settings, say)
        else:
            written = _write_by_workers(learners, folders, channels, out, detector, settings, workers, say)
        claim.keep()
    return written


def _write_by_workers(
    learners: Sequence[LabelledLanes],
    folders: Sequence[Path],
    channels: Sequence[str] | None,
    out: Path,
    detector: MonitorDetector,
    settings: DetectionSettings,
    workers: Workers,
    say: Callable[[str], None],
) -> list[Path]:
    for lanes in learners:
        _check(lanes, settings)
    arguments = {
        "runs": [str(folder) for folder in folders],
        "channels": channels,
        "out": str(out.absolute()),
        "detector": detector,
        "settings": settings,
    }
    with open_backend(workers, jobs := out / f"{UNFINISHED}jobs") as backend:
        calls = [(COMPARE, arguments | {"number": number}) for number in range(len(learners))]
        for _, message in run_calls(backend, calls):
            say(message)
    shutil.rmtree(jobs, ignore_errors=True)
    _write_transfer(out, learners, detector, settings, say)
    return [out / _folder_name(lanes.learner) for lanes in learners]


def compare_learner(
    runs: Sequence[str],
    channels: Sequence[str] | None,
    out: str,
    detector: MonitorDetector,
    settings: DetectionSettings,
    number: int,
) -> str:
    """Compares detectors on one learner's lanes, in a worker; `number` is its index in `load_lanes`.

    Returns a line for the user: the learner and its numbers of lanes.
    """
    lanes = load_lanes([Path(run) for run in runs], channels)[number]
    _write_learner(Path(out) / _folder_name(lanes.learner), lanes, detector, settings)
    return _lane_counts(lanes)


COMPARE = f"{__name__}:{compare_learner.__name__}"


def write_comparisons(
    learners: Sequence[LabelledLanes],
    out: Path,
    detector: MonitorDetector,
    settings: DetectionSettings,
    say: Callable[[str], None] = print,
) -> list[Path]:
    """Compares the monitor with its baselines on each learner's lanes, and returns the learners' folders.

    Each folder `out/LEARNER/` has lanes.csv, each detector's score and alarm for each lane; detectors.csv and
    conditions.csv, the figures; trajectories.zarr; comparison.json, with the monitor's gain over the best other chart
    of all channels; and monitor.npz, the first fold's monitor, calibrated on all clean lanes that it was not fitted to.
    For several learners there is also `out/transfer.csv`: monitors of some tested on another.

    Raises:
      UserError: there are too few lanes, or no lane is disturbed.
    """
    for lanes in learners:
        _check(lanes, settings)
    written = []
    for lanes in learners:
        say(_lane_counts(lanes))
        written.append(out / _folder_name(lanes.learner))
        _write_learner(written[-1], lanes, detector, settings)
    _write_transfer(out, learners, detector, settings, say)
    return written


def _lane_counts(lanes: LabelledLanes) -> str:
    text = f"{lanes.learner}: {lanes.table.clean.sum()} clean and {(~lanes.table.clean).sum()} disturbed lanes"
    if not lanes.collapsing:
        return text
    if lanes.collapsing == 1:
        return f"{text}; 1 control collapses undisturbed and counts as neither"
    return f"{text}; {lanes.collapsing} controls collapse undisturbed and count as neither"


def _check(lanes: LabelledLanes, settings: DetectionSettings) -> None:
    if lanes.table.clean.all():
        raise UserError(f"{lanes.learner}: no lane is disturbed, so there is nothing to detect")
    with error_prefix("jaxaudit detect"):
        split_lanes(lanes, settings)


def _write_transfer(
    out: Path,
    learners: Sequence[LabelledLanes],
    detector: MonitorDetector,
    settings: DetectionSettings,
    say: Callable[[str], None],
) -> None:
    if len(learners) == 1:
        return
    rows = transfer(learners, detector, settings, say)
    if rows.empty:
        say("the learners have no channel in common, so no monitor of one is tested on another")
    else:
        rows.to_csv(out / "transfer.csv", index=False)


def _write_learner(folder: Path, lanes: LabelledLanes, detector: MonitorDetector, settings: DetectionSettings) -> None:
    """Writes the comparison on one learner's lanes; if two workers do, the folder of the first one stays."""
    with error_prefix(lanes.learner), atomic_output(folder) as unfinished:
        unfinished.mkdir()
        folds = split_lanes(lanes, settings)
        fitted = [detector.fit_expectation(lanes.values[fold.fit], lanes.channels) for fold in folds]
        scores = [expectation.score(lanes.values, lanes.channels) for expectation in fitted]
        limits = fold_thresholds(scores, folds, settings.alpha)
        monitor_alarms = lane_alarms(detector.name, lanes, scores, folds, limits).assign(family=detector.family)
        baselines = [
            baseline
            for baseline in standard_baselines(_varying_names(lanes))
            if not (isinstance(baseline, MultichannelChart) and baseline.chart == detector.model)
        ]
        alarms = pd.concat([monitor_alarms, compare(lanes, baselines, settings)], ignore_index=True)
        _write_tables(unfinished, lanes, alarms, detector, settings)
        _write_zarr(trajectories(lanes, fitted[0], settings), unfinished / "trajectories.zarr")
        calibration = np.setdiff1d(np.flatnonzero(lanes.table.clean), folds[0].fit)
        Monitor(fitted[0], scores[0][calibration].max(axis=1)).save(unfinished / "monitor.npz")


def _varying_names(lanes: LabelledLanes) -> list[str]:
    """Returns the channels that differ between clean lanes, which detectors read."""
    varying = varying_channels(lanes.values[lanes.table.clean.to_numpy()])
    return [name for name, varies in zip(lanes.channels, varying, strict=True) if varies]


def _write_tables(
    folder: Path, lanes: LabelledLanes, alarms: pd.DataFrame, detector: MonitorDetector, settings: DetectionSettings
) -> None:
    alarms.drop(columns="learner").to_csv(folder / "lanes.csv", index=False)
    figures = summarise(alarms, detector.name)
    figures.to_csv(folder / "detectors.csv", index=False)
    best = [detector.name, *figures.detector[figures.detector != detector.name][: TABULATED - 1]]
    _condition_table(lanes, alarms, best).to_csv(folder / "conditions.csv")
    contents = {
        "learner": lanes.learner,
        "monitor": detector.name,
        "clean": int(lanes.table.clean.sum()),
        "disturbed": int((~lanes.table.clean).sum()),
        "collapsing_controls": lanes.collapsing,
        "steps": lanes.values.shape[1],
        "runs": [str(run) for run in lanes.runs],
        "channels": _varying_names(lanes),
        "best_chart": _gain_over_best_chart(figures, detector.name),
        **asdict(settings),
    }
    (folder / "comparison.json").write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")


def _gain_over_best_chart(figures: pd.DataFrame, monitor: str) -> dict[str, str | float] | None:
    """Returns the name of the best chart of all channels and the monitor's paired gains over it; None without one."""
    best = best_chart(figures, monitor)
    if best is None:
        return None
    gains = [f"gain_{figure}{end}" for figure in ("auroc", "detected") for end in ("", "_low", "_high")]
    return {"detector": best.detector, **{name: None if np.isnan(best[name]) else float(best[name]) for name in gains}}


def _condition_table(lanes: LabelledLanes, alarms: pd.DataFrame, detectors: Sequence[str]) -> pd.DataFrame:
    """Returns a row per condition: its perturbation, its lanes, and the figures of `summarise_by_condition`.

    A detector's share of detected lanes is in the column of its name, and its other figures are in columns that begin
    with its name.
    """
    table = lanes.table.assign(condition=lanes.table.condition.where(~lanes.table.clean, CLEAN))
    groups = table.groupby("condition", sort=False)
    collapsed = groups.collapse_time.agg(lambda times: (times < float("inf")).sum())
    rows = groups[["perturbation", "magnitude"]].first().assign(lanes=groups.size(), collapsed=collapsed)
    figures = summarise_by_condition(alarms, detectors)
    for name in detectors:
        of_detector = figures[figures.detector == name].set_index("condition").drop(columns="detector")
        rows = rows.join(of_detector.rename(columns=lambda column, name=name: f"{name} {column}"))
        rows = rows.rename(columns={f"{name} detected": name})
    order = [CLEAN, *(condition for condition in rows.index if condition != CLEAN)]
    return rows.loc[order].rename_axis("condition")


def _folder_name(learner: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", learner).strip("-.").lower()
