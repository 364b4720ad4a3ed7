"""`jaxaudit detect`: detectors compared on stored runs, and what that gives, as files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import xarray as xr

from jaxaudit.detection import view
from jaxaudit.detection.baselines import standard
from jaxaudit.detection.comparison import Settings, compare
from jaxaudit.detection.lanes import Lanes, gather
from jaxaudit.detection.learned import MetaState
from jaxaudit.detection.summary import by_condition, summary
from jaxaudit.detection.trajectories import trajectories
from jaxaudit.errors import UserError, placed
from jaxaudit.metastate.channels import measured
from jaxaudit.metastate.monitor import Monitor

SHOWN = 5
"""Detectors, the monitor among them, whose shares detected are told condition by condition."""


def detect(
    folders: Sequence[Path],
    out: Path,
    detector: MetaState,
    settings: Settings,
    channels: Sequence[str] | None = None,
    say: Callable[[str], None] = print,
) -> list[Path]:
    """Compares the monitor with its baselines on the lanes of finished runs, learner by learner.

    Writes `out/LEARNER/`: lanes.csv, what each detector says of each lane; detectors.csv and conditions.csv, the
    figures; trajectories.zarr; comparison.json; and monitor.npz, fitted to half of the clean lanes. Gives these
    folders.

    Raises:
      UserError: a run is not finished, lanes are too few, a channel is not there, or `out` exists.
    """
    if out.exists():
        raise UserError(f"{out} exists; name another folder with -o")
    written = []
    for lanes in gather(folders, channels):
        with placed(lanes.learner):
            _check(lanes)
            say(f"{lanes.learner}: {lanes.table.clean.sum()} clean and {(~lanes.table.clean).sum()} disturbed lanes")
            said = compare(lanes, [detector, *standard(_read(lanes))], settings)
        written.append(out / _slug(lanes.learner))
        _write(written[-1], lanes, said, detector, settings)
    return written


def _check(lanes: Lanes) -> None:
    if lanes.table.clean.all():
        raise UserError(f"{lanes.learner}: no lane is disturbed, so there is nothing to detect")


def _read(lanes: Lanes) -> list[str]:
    """The channels that detectors read: those that differ between clean lanes."""
    differ = measured(lanes.values[lanes.table.clean.to_numpy()])
    return [name for name, there in zip(lanes.channels, differ, strict=True) if there]


def _write(folder: Path, lanes: Lanes, said: pd.DataFrame, detector: MetaState, settings: Settings) -> None:
    folder.mkdir(parents=True)
    said.drop(columns="learner").to_csv(folder / "lanes.csv", index=False)
    figures = summary(said, detector.name)
    figures.to_csv(folder / "detectors.csv", index=False)
    best = [detector.name, *figures.detector[figures.detector != detector.name][: SHOWN - 1]]
    _conditions(lanes, said, best).to_csv(folder / "conditions.csv")
    view.write(trajectories(lanes, detector, settings), folder / "trajectories.zarr")
    clean = lanes.values[lanes.table.clean.to_numpy()]
    runs_of = xr.DataArray(clean, dims=("run", "step", "channel"), coords={"channel": list(lanes.channels)})
    Monitor.fit(runs_of, model=detector.model, training=detector.training).save(folder / "monitor.npz")
    described = {
        "learner": lanes.learner,
        "monitor": detector.name,
        "clean": len(clean),
        "disturbed": len(lanes.values) - len(clean),
        "steps": lanes.values.shape[1],
        "runs": [str(run) for run in lanes.runs],
        "channels": _read(lanes),
        **asdict(settings),
    }
    (folder / "comparison.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def _conditions(lanes: Lanes, said: pd.DataFrame, detectors: Sequence[str]) -> pd.DataFrame:
    table = lanes.table.assign(condition=lanes.table.condition.where(~lanes.table.clean, "clean"))
    groups = table.groupby("condition", sort=False).collapse_time
    counts = pd.DataFrame({"lanes": groups.size(), "collapsed": groups.agg(lambda times: (times < float("inf")).sum())})
    shares = by_condition(said, detectors)
    order = ["clean", *(name for name in shares.index if name != "clean")]
    return counts.join(shares).loc[order].rename_axis("condition")


def _slug(learner: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", learner).strip("-.").lower()
