"""`jaxaudit detect`: detectors compared on stored runs, and what that gives, as files."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import xarray as xr

from jaxaudit.core.channel_names import PERFORMANCE
from jaxaudit.monitoring.baselines import MultichannelChart, standard
from jaxaudit.monitoring.calibration import threshold
from jaxaudit.monitoring.channels import measured
from jaxaudit.monitoring.comparison import (
    CLEAN,
    DetectionSettings,
    best_chart,
    by_condition,
    compare,
    judged,
    splits,
    summary,
    thresholds,
)
from jaxaudit.monitoring.detector import Detector, MetaState
from jaxaudit.monitoring.lanes import LabelledLanes, gather
from jaxaudit.monitoring.monitor import Expectation, Monitor
from jaxaudit.monitoring.transfer import transfer
from jaxaudit.monitoring.view import QUANTILES, over_lanes, plane, write
from jaxaudit.runtime.backends import Workers, open_backend, run_calls
from jaxaudit.runtime.errors import UserError, error_prefix
from jaxaudit.runtime.files import UNFINISHED, claimed
from jaxaudit.runtime.machine import atomic_output

if TYPE_CHECKING:
    import xarray as xr


SAMPLES = 4


def trajectories(lanes: LabelledLanes, known: Expectation, settings: DetectionSettings) -> xr.Dataset:
    """The lanes that the first fold's monitor was not fitted to, by condition; the clean ones first.

    Args:
      lanes: the lanes.
      known: what that monitor expects.
      settings: of the comparison.

    Returns:
      latent_samples (condition, sample, step, component), up to SAMPLES lanes, and latent, its quantiles (condition,
      step, component, quantile): the plane of whitened latents in which lanes vary most; deviation, performance and
      score (condition, step, quantile), deviation being the whitened, drift-corrected distance of Table S5's MSD, with
      the clean runs' mean in the place of the undisturbed twin; coordinate onset; attribute threshold.
    """
    split = splits(lanes, settings)[0]
    scores, latents = known.scores(known.channels.pick(lanes.values, lanes.channels))
    score = np.asarray(known.yardstick.combine(scores))
    latent = known.reference.whitened(latents)
    distance = np.linalg.norm(latent, axis=-1)
    series = {
        "deviation": distance,
        "performance": lanes.values[..., lanes.channels.index(PERFORMANCE)],
        "score": np.where(np.isfinite(score), score, np.nan),
    }
    seen = latent @ plane(latent[split.calibrate], latent[~lanes.table.clean.to_numpy()])
    data: dict[str, list] = {"latent": [], "latent_samples": [], **{name: [] for name in series}}
    groups = _groups(lanes, split.fit)
    for numbers in groups.values():
        data["latent"].append(over_lanes(seen[numbers]))
        drawn = np.resize(numbers, SAMPLES) if len(numbers) else np.zeros(SAMPLES, int)
        data["latent_samples"].append(seen[drawn])
        for name, scores in series.items():
            data[name].append(over_lanes(scores[numbers]))
    step, quantile = ("condition", "step"), ("quantile",)
    dims = {
        "latent": (*step, "component", *quantile),
        "latent_samples": ("condition", "sample", "step", "component"),
        **dict.fromkeys(series, (*step, *quantile)),
    }
    onsets = lanes.table[~lanes.table.clean].groupby("condition").onset.first()
    return xr.Dataset(
        {name: (dims[name], np.stack(rows).astype(np.float32)) for name, rows in data.items()},
        {
            "condition": list(groups),
            "onset": ("condition", [0, *onsets[list(groups)[1:]]]),
            "quantile": list(QUANTILES),
            "step": np.arange(latent.shape[1]),
        },
        {"threshold": threshold(score[split.calibrate].max(axis=1), settings.alpha)},
    )


def _groups(lanes: LabelledLanes, fitted: np.ndarray) -> dict[str, np.ndarray]:
    """The lanes of every condition, and the clean ones that nothing was fitted to, by number."""
    table = lanes.table
    clean = np.setdiff1d(np.flatnonzero(table.clean), fitted)
    disturbed = table[~table.clean]
    return {CLEAN: clean} | {
        str(name): rows.index.to_numpy() for name, rows in disturbed.groupby("condition", sort=False)
    }


SHOWN = 5
"""Detectors, the monitor among them, whose figures are told condition by condition."""


def detect(
    folders: Sequence[Path],
    out: Path,
    detector: MetaState,
    settings: DetectionSettings,
    channels: Sequence[str] | None = None,
    workers: Workers | None = None,
    say: Callable[[str], None] = print,
) -> list[Path]:
    """Compares the monitor with its baselines on the lanes of finished runs, learner by learner.

    Gives the folders that `write_comparisons` writes. Workers, where there are any, take a learner each.

    Raises:
      UserError: a run is not finished, lanes are too few, a channel is not there, or `out` exists.
    """
    with claimed(out, hint="; name another with -o") as claim:
        written = _detect(folders, out, detector, settings, channels, workers, say)
        claim.keep()
    return written


def _detect(
    folders: Sequence[Path],
    out: Path,
    detector: MetaState,
    settings: DetectionSettings,
    channels: Sequence[str] | None,
    workers: Workers | None,
    say: Callable[[str], None],
) -> list[Path]:
    learners = gather(folders, channels)
    if workers is None:
        return write_comparisons(learners, out, detector, settings, say)
    for lanes in learners:
        _check(lanes, settings)
    asked = {
        "runs": [str(folder) for folder in folders],
        "channels": channels,
        "out": str(out.absolute()),
        "detector": detector,
        "settings": settings,
    }
    with open_backend(workers, jobs := out / f"{UNFINISHED}jobs") as backend:
        for _, said in run_calls(backend, [(COMPARE, asked | {"number": n}) for n in range(len(learners))]):
            say(said)
    shutil.rmtree(jobs, ignore_errors=True)
    _transfer(out, learners, detector, settings, say)
    return [out / _slug(lanes.learner) for lanes in learners]


def compare_learner(
    runs: Sequence[str],
    channels: Sequence[str] | None,
    out: str,
    detector: MetaState,
    settings: DetectionSettings,
    number: int,
) -> str:
    """What a worker does: compares on one learner's lanes, by its number among those of the runs, and says whose."""
    lanes = gather([Path(run) for run in runs], channels)[number]
    _compare(Path(out) / _slug(lanes.learner), lanes, detector, settings)
    return _told(lanes)


COMPARE = f"{__name__}:{compare_learner.__name__}"


def write_comparisons(
    learners: Sequence[LabelledLanes],
    out: Path,
    detector: MetaState,
    settings: DetectionSettings,
    say: Callable[[str], None] = print,
) -> list[Path]:
    """Compares the monitor with its baselines on each learner's lanes.

    Writes `out/LEARNER/`: lanes.csv, what each detector says of each lane; detectors.csv and conditions.csv, the
    figures; trajectories.zarr; comparison.json, with the monitor's gain over the best other chart of all channels; and
    monitor.npz, the first fold's, calibrated on all clean lanes that
    it was not fitted to. Of several learners also `out/transfer.csv`: monitors of some tested on another. Gives the
    learners' folders.

    Raises:
      UserError: lanes are too few, or none is disturbed.
    """
    for lanes in learners:
        _check(lanes, settings)
    written = []
    for lanes in learners:
        say(_told(lanes))
        written.append(out / _slug(lanes.learner))
        _compare(written[-1], lanes, detector, settings)
    _transfer(out, learners, detector, settings, say)
    return written


def _told(lanes: LabelledLanes) -> str:
    text = f"{lanes.learner}: {lanes.table.clean.sum()} clean and {(~lanes.table.clean).sum()} disturbed lanes"
    if not lanes.collapsing:
        return text
    many = "1 control collapses" if lanes.collapsing == 1 else f"{lanes.collapsing} controls collapse"
    return f"{text}; {many} undisturbed, counted as neither"


def _check(lanes: LabelledLanes, settings: DetectionSettings) -> None:
    if lanes.table.clean.all():
        raise UserError(f"{lanes.learner}: no lane is disturbed, so there is nothing to detect")
    with error_prefix("jaxaudit detect"):
        splits(lanes, settings)


def _transfer(
    out: Path,
    learners: Sequence[LabelledLanes],
    detector: MetaState,
    settings: DetectionSettings,
    say: Callable[[str], None],
) -> None:
    """Monitors of some learners tested on another, where there are several."""
    if len(learners) == 1:
        return
    rows = transfer(learners, detector, settings, say)
    if rows.empty:
        say("the learners have no channel in common, so no monitor of one is tested on another")
    else:
        rows.to_csv(out / "transfer.csv", index=False)


def _compare(folder: Path, lanes: LabelledLanes, detector: MetaState, settings: DetectionSettings) -> None:
    """Compares on one learner's lanes; the first worker to have done so is the one whose folder stays."""
    with error_prefix(lanes.learner), atomic_output(folder) as place:
        place.mkdir()
        _write_comparison(place, lanes, detector, settings)


def _write_comparison(folder: Path, lanes: LabelledLanes, detector: MetaState, settings: DetectionSettings) -> None:
    parts = splits(lanes, settings)
    known = [detector.expect(lanes.values[part.fit], lanes.channels) for part in parts]
    scores = [one.score(one.channels.pick(lanes.values, lanes.channels)) for one in known]
    mine = judged(detector.name, lanes, scores, parts, thresholds(scores, parts, settings.alpha))
    others = compare(lanes, _others(standard(_read(lanes)), detector), settings)
    said = pd.concat([mine.assign(family=detector.family), others], ignore_index=True)
    _write(folder, lanes, said, detector, settings)
    write(trajectories(lanes, known[0], settings), folder / "trajectories.zarr")
    further = np.setdiff1d(np.flatnonzero(lanes.table.clean), parts[0].fit)
    Monitor(known[0], scores[0][further].max(axis=1)).save(folder / "monitor.npz")


def _others(baselines: Sequence[Detector], detector: MetaState) -> list[Detector]:
    """The baselines but the chart that the monitor itself is."""
    return [one for one in baselines if not (isinstance(one, MultichannelChart) and one.chart == detector.model)]


def _read(lanes: LabelledLanes) -> list[str]:
    """The channels that detectors read: those that differ between clean lanes."""
    differ = measured(lanes.values[lanes.table.clean.to_numpy()])
    return [name for name, there in zip(lanes.channels, differ, strict=True) if there]


def _write(
    folder: Path, lanes: LabelledLanes, said: pd.DataFrame, detector: MetaState, settings: DetectionSettings
) -> None:
    said.drop(columns="learner").to_csv(folder / "lanes.csv", index=False)
    figures = summary(said, detector.name)
    figures.to_csv(folder / "detectors.csv", index=False)
    best = [detector.name, *figures.detector[figures.detector != detector.name][: SHOWN - 1]]
    _conditions(lanes, said, best).to_csv(folder / "conditions.csv")
    described = {
        "learner": lanes.learner,
        "monitor": detector.name,
        "clean": int(lanes.table.clean.sum()),
        "disturbed": int((~lanes.table.clean).sum()),
        "collapsing_controls": lanes.collapsing,
        "steps": lanes.values.shape[1],
        "runs": [str(run) for run in lanes.runs],
        "channels": _read(lanes),
        "best_chart": _over_best_chart(figures, detector.name),
        **asdict(settings),
    }
    (folder / "comparison.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def _over_best_chart(figures: pd.DataFrame, mine: str) -> dict[str, str | float] | None:
    """The name of the best chart of all channels, and what the monitor gains over it, paired; None if there is none."""
    best = best_chart(figures, mine)
    if best is None:
        return None
    gains = [f"gain_{figure}{end}" for figure in ("auroc", "detected") for end in ("", "_low", "_high")]
    return {"detector": best.detector, **{name: None if np.isnan(best[name]) else float(best[name]) for name in gains}}


def _conditions(lanes: LabelledLanes, said: pd.DataFrame, detectors: Sequence[str]) -> pd.DataFrame:
    """A row for each condition: what it is, and for each detector the share detected and AUROC, with intervals.

    A detector's share is in the column of its name, the rest in columns that begin with it.
    """
    table = lanes.table.assign(condition=lanes.table.condition.where(~lanes.table.clean, CLEAN))
    groups = table.groupby("condition", sort=False)
    counts = (
        groups[["perturbation", "magnitude"]]
        .first()
        .assign(lanes=groups.size(), collapsed=groups.collapse_time.agg(lambda times: (times < float("inf")).sum()))
    )
    figures = by_condition(said, detectors)
    for name in detectors:
        found = figures[figures.detector == name].set_index("condition").drop(columns="detector")
        counts = counts.join(found.rename(columns=lambda column, name=name: f"{name} {column}"))
        counts = counts.rename(columns={f"{name} detected": name})
    order = [CLEAN, *(condition for condition in counts.index if condition != CLEAN)]
    return counts.loc[order].rename_axis("condition")


def _slug(learner: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", learner).strip("-.").lower()
