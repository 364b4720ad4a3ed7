"""`jaxaudit monitor`: someone's own training runs, scored by a monitor of their earlier ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr

from jaxaudit.detection import view
from jaxaudit.detection.view import QUANTILES, over_lanes, plane
from jaxaudit.errors import UserError, placed
from jaxaudit.files import claimed
from jaxaudit.logs import Log, read, together
from jaxaudit.metastate.calibration import rank
from jaxaudit.metastate.channels import measured
from jaxaudit.metastate.envelope import forward_filled
from jaxaudit.metastate.monitor import DEFAULT, Monitor, calibrated_on
from jaxaudit.metastate.training import Training

ALPHA = 0.05
"""False alarms per clean run, where nothing else is asked for and there are runs enough."""

MOST_STEPS = 1000
"""Of a run; of longer ones, neighbouring steps are averaged."""

FURTHEST = 3
"""Channels that are named at an alarm."""


@dataclass(frozen=True)
class Options:
    """What a user can choose.

    Attributes:
      channels: what is read; None: all that the runs have in common, but clocks.
      step: the column that counts steps; None: the first with a usual name.
      alpha: false alarms per clean run; None: ALPHA, or what so few runs allow.
      model: by which runs are scored, one of `monitor.MODELS`.
      training: how a state-space model is fitted.
    """

    channels: tuple[str, ...] | None = None
    step: str | None = None
    alpha: float | None = None
    model: str = DEFAULT
    training: Training = field(default_factory=Training)


def monitor(
    files: Sequence[Path],
    clean: Sequence[Path],
    out: Path,
    options: Options | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Scores runs against a monitor fitted to one half of the clean ones and calibrated on the other.

    Writes monitored.json, monitored.zarr, alarms.csv and monitor.npz to the folder `out`.

    Raises:
      UserError: a file cannot be read, runs have no channel or no grid of steps in common, or there are too few.
    """
    with claimed(out, hint="; name another with -o") as claim:
        _monitor(files, clean, out, options or Options(), say)
        claim.keep()


def _monitor(
    files: Sequence[Path], clean: Sequence[Path], out: Path, options: Options, say: Callable[[str], None]
) -> None:
    if len(clean) < 2:
        raise UserError(f"a monitor learns from two earlier runs or more, not {len(clean)}")
    logs = [read(path, options.step) for path in (*clean, *files)]
    notes = [note for log in logs for note in log.notes]
    runs = _averaged(together(logs, options.channels or _but_clocks(logs, notes)), notes)
    notes += list(runs.attrs.get("notes", ()))
    earlier, new = runs.isel(run=slice(len(clean))), runs.isel(run=slice(len(clean), None))
    if not measured(earlier.values).any():
        raise UserError("no channel differs between the earlier runs, so there is nothing to learn from them")
    alpha = _alpha(options.alpha, calibrated_on(len(clean)), notes)
    fitted = Monitor.fit(earlier, model=options.model, training=options.training, gaps=True)
    limit = fitted.threshold(alpha)
    for note in notes:
        say(f"note: {note}")
    _write(out, fitted, earlier, new, alpha, limit, notes, say)


def _but_clocks(logs: Sequence[Log], notes: list[str]) -> list[str]:
    """The channels that all logs have, but those that only ever rise in each of them: times and counts of steps."""
    common = [name for name in logs[0].channels if all(name in log.channels for log in logs)]
    clocks = [name for name in common if all(_rises(log, name) for log in logs)]
    if clocks and len(clocks) < len(common):
        notes.append(f"left out for rising at every step, as clocks do: {', '.join(clocks)}; --channels can name them")
        return [name for name in common if name not in clocks]
    return common


def _rises(log: Log, name: str) -> bool:
    values = log.values[:, log.channels.index(name)]
    values = values[np.isfinite(values)]
    return len(values) > 2 and bool((np.diff(values) > 0).all())


def _averaged(runs: xr.DataArray, notes: list[str]) -> xr.DataArray:
    """The runs in at most MOST_STEPS steps."""
    width = -(-runs.sizes["step"] // MOST_STEPS)
    if width == 1:
        return runs
    notes.append(f"{runs.sizes['step']} steps are averaged {width} by {width}")
    pooled = runs.coarsen(step=width, boundary="pad").mean()
    last = runs.step.values[np.minimum(np.arange(1, pooled.sizes["step"] + 1) * width, runs.sizes["step"]) - 1]
    return pooled.assign_coords(step=last).assign_attrs(runs.attrs)


def _alpha(asked: float | None, runs: int, notes: list[str]) -> float:
    if asked is not None:
        with placed("jaxaudit monitor"):
            rank(runs, asked)
        return asked
    allowed = 1 / (runs + 1)
    if allowed > ALPHA:
        notes.append(
            f"{runs} earlier runs to calibrate on allow {allowed:.1%} false alarms per clean run, not {ALPHA:.0%}"
        )
    return max(ALPHA, allowed)


def _write(
    out: Path,
    fitted: Monitor,
    earlier: xr.DataArray,
    new: xr.DataArray,
    alpha: float,
    limit: float,
    notes: Sequence[str],
    say: Callable[[str], None],
) -> None:
    channels = fitted.expectation.channels
    clean, scored = (_seen(fitted, runs) for runs in (earlier, new))
    directions = plane(clean.latent.values, scored.latent.values)
    alarms = _alarms(scored, limit)
    quantiles = ("step", "component", "quantile"), ("step", "channel", "quantile")
    found = xr.Dataset(
        {
            "score": scored.score,
            "latent": (("run", "step", "component"), scored.latent.values @ directions),
            "distance": scored.distance,
            "values": scored["values"],
            "clean_latent": (quantiles[0], over_lanes(clean.latent.values @ directions)),
            "clean_values": (quantiles[1], over_lanes(clean["values"].values)),
        },
        {"quantile": list(QUANTILES)},
    )
    view.write(found, out / "monitored.zarr")
    alarms.to_csv(out / "alarms.csv", index=False)
    fitted.save(out / "monitor.npz")
    described = {
        "runs": [str(run) for run in new.run.values],
        "clean_runs": earlier.sizes["run"],
        "calibrated_on": len(fitted.clean),
        "alpha": alpha,
        "threshold": limit,
        "channels": list(channels.names),
        "notes": list(notes),
    }
    (out / "monitored.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    for run in new.run.values:
        found = alarms[alarms.run == run]
        text = "no alarm" if found.empty else f"alarm at step {found.step.iloc[0]}, furthest: {found.channels.iloc[0]}"
        say(f"{run}: {text}")


def _seen(fitted: Monitor, runs: xr.DataArray) -> xr.Dataset:
    """Scores, latents, and each channel's distance from the clean runs, of runs; missing where a run has no row."""
    known = fitted.expectation
    said = fitted.score(runs)
    values = runs.sel(channel=list(known.channels.names)).transpose("run", "step", "channel")
    y, seen = known.channels.standardise(values.values)
    filled = forward_filled(np.where(seen > 0, y, np.nan))
    distance = np.where(np.isfinite(filled), known.reference.telemetry.standardise(filled), np.nan)
    return said.assign(
        distance=(("run", "step", "channel"), distance.astype(np.float32)),
        values=values.drop_vars("run").assign_coords(run=runs.run),
    )


def _alarms(scored: xr.Dataset, limit: float) -> pd.DataFrame:
    """The first alarm of each run that has one."""
    rows = []
    for run in range(scored.sizes["run"]):
        one = scored.isel(run=run)
        above = np.flatnonzero(np.nan_to_num(one.score.values, nan=-np.inf, posinf=np.inf) > limit)
        if len(above):
            at = one.isel(step=above[0])
            order = np.argsort(-np.abs(np.nan_to_num(at.distance.values)))[:FURTHEST]
            furthest = ", ".join(f"{at.channel.values[i]} {at.distance.values[i]:.1f}" for i in order)
            rows.append(
                {
                    "run": str(scored.run.values[run]),
                    "step": int(at.step),
                    "score": float(at.score),
                    "kind": str(at.most.values),
                    "channels": furthest,
                }
            )
    return pd.DataFrame(rows, columns=["run", "step", "score", "kind", "channels"])
