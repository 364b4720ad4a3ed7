"""`jaxaudit monitor`: someone's own training runs, scored by a monitor of their earlier ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr

from jaxaudit.detection import alignment, view
from jaxaudit.detection.alignment import Named, in_files
from jaxaudit.detection.view import QUANTILES, over_lanes, plane
from jaxaudit.errors import UserError, placed
from jaxaudit.files import claimed
from jaxaudit.logs import Log, read
from jaxaudit.logs.log import listed
from jaxaudit.metastate.calibration import rank, threshold
from jaxaudit.metastate.channels import measured
from jaxaudit.metastate.envelope import forward_filled
from jaxaudit.metastate.monitor import DEFAULT, Monitor, calibrated_on
from jaxaudit.metastate.training import Training

ALPHA = 0.05
"""False alarms per clean run, where nothing else is asked for and there are runs enough."""

FEWEST = 4
"""Clean runs from which there is something to learn; with fewer, only what is certain is told."""

LEAST_CALIBRATED = 19
"""Clean runs that are calibrated on at least, where there are `CALIBRATED_FROM` or more: as many as ALPHA takes."""

CALIBRATED_FROM = 27

ATTEMPT = ", attempt "
"""In the names of what follows a restart from a checkpoint, or comes before it."""

NOT_FINITE, SILENT = "not finite", "silent"
"""Kinds of alarms that need no score: a value that is not finite, and a channel that is silent."""


@dataclass(frozen=True)
class Alarm:
    """The first alarm of an attempt, a row of alarms.csv.

    Attributes:
      run: the attempt's name.
      step: at which it comes.
      score: there; infinite where it needs none.
      kind: NOT_FINITE, SILENT, or the kind of score that was the most unusual.
      channels: that are not finite or silent, or those that are furthest from the clean runs.
    """

    run: str
    step: int
    score: float
    kind: str
    channels: str

    def __str__(self) -> str:
        certain = self.kind in (NOT_FINITE, SILENT)
        return f"alarm at step {self.step}{': ' if certain else ', furthest: '}{self.channels}"


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
    training: Training | None = None


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
      UserError: a file cannot be read, clean runs have no channel in common, a clean run that is calibrated on is
        broken, or there are fewer than two.
    """
    with claimed(out, hint="; name another with -o") as claim:
        _monitor(files, clean, out, options or Options(), say)
        claim.keep()


def _monitor(
    files: Sequence[Path], clean: Sequence[Path], out: Path, options: Options, say: Callable[[str], None]
) -> None:
    notes: list[str] = []
    logs = {path: read(path, options.step) for path in dict.fromkeys((*clean, *files))}
    notes += _said(logs.values())
    earlier = _runs([logs[path] for path in clean], latest=True)
    new = _runs([logs[path] for path in files])
    if len(earlier) < 2:
        raise UserError(f"a monitor learns from two earlier runs or more, not {len(earlier)}")
    earlier, short = alignment.long_enough(earlier)
    channels, left_out = alignment.channels_of(earlier, options.channels)
    notes += [*short, *left_out, *alignment.moved(new, earlier)]
    fitted, calibrated = _split(len(earlier))
    known = alignment.excepted([earlier[i] for i in fitted], channels)
    notes += [
        f"values that are not finite ({', '.join(sorted(kinds))}) of {name} say nothing, as clean runs have them"
        for name, kinds in known.items()
    ]
    silences = alignment.longest_silences(earlier, channels)
    certain = {run.name: _certain(run, silences, channels, known) for run in new}
    if len(earlier) < FEWEST:
        notes.append(
            f"{len(earlier)} clean runs are too few to learn from, which takes {FEWEST}: told is only what is certain, "
            "values that are not finite and channels that fall silent"
        )
        _say(notes, say)
        _write(out, [], new, certain, channels, len(earlier), 0, None, notes, say)
        return
    for i in calibrated:
        if (broken := alignment.first_not_finite(earlier[i], channels, known)) is not None:
            step, kinds = broken
            notes.append(f"{earlier[i].name}: {_not_finite(kinds)} at step {step}, so it counts as a run with an alarm")
    alpha = _alpha(options.alpha, len(calibrated), notes)
    groups = _groups(new, earlier, channels, notes)
    scored = []
    for group in groups:
        one = _Scored.of(group, earlier, (fitted, calibrated), known, options, alpha)
        if one is not None:
            scored.append(one)
    if not scored and not any(certain.values()):
        raise UserError("no channel of a new run differs between the earlier runs: there is nothing to learn from them")
    _say(notes, say)
    _write(out, scored, new, certain, channels, len(earlier), len(calibrated), alpha, notes, say)


def _say(notes: Sequence[str], say: Callable[[str], None]) -> None:
    for note in notes:
        say(f"note: {note}")


def _said(logs: Iterable[Log]) -> list[str]:
    """What logs say of what is left out, replaced or missing in them: a note for all files of which it is the same."""
    said: dict[str, list[str]] = {}
    for log in logs:
        for note in (*map(str, log.left_out), *log.notes):
            said.setdefault(note, []).append(str(log.path))
    return [f"{in_files(paths)}: {note}" for note, paths in said.items()]


def _runs(logs: Sequence[Log], latest: bool = False) -> list[Named]:
    """Every attempt of every run of some logs, or each run's latest."""
    found = []
    for log in logs:
        for run in log.runs:
            for number, attempt in enumerate(run.attempts, 1):
                several = f"{ATTEMPT}{number} of {len(run.attempts)}" if len(run.attempts) > 1 and not latest else ""
                if not latest or number == len(run.attempts):
                    found.append(Named(f"{run.name}{several}", attempt))
    return found


def _split(runs: int) -> tuple[list[int], list[int]]:
    """Which clean runs a monitor is fitted to, and on which it is calibrated."""
    held = calibrated_on(runs)
    if runs >= CALIBRATED_FROM:
        held = max(held, LEAST_CALIBRATED)
    order = np.random.default_rng(0).permutation(runs)
    return sorted(order[held:].tolist()), sorted(order[:held].tolist())


def _certain(
    run: Named, silences: Mapping[str, int], channels: Sequence[str], known: Mapping[str, frozenset[str]]
) -> Alarm | None:
    """The first alarm of an attempt that needs no score; None if there is none."""
    there = [name for name in channels if run.series(name) is not None]
    broken = alignment.first_not_finite(run, there, known)
    silent = alignment.first_silent(run, silences, there)
    if broken is None and silent is None:
        return None
    if silent is None or (broken is not None and broken[0] <= silent[0]):
        assert broken is not None
        return Alarm(run.name, broken[0], np.inf, NOT_FINITE, _not_finite(broken[1]))
    are = "is" if len(silent[1]) == 1 else "are"
    return Alarm(run.name, silent[0], np.inf, SILENT, f"{listed(silent[1])} {are} silent")


def _not_finite(kinds: Mapping[str, str]) -> str:
    """Channels and what they are, as "loss, grad_norm are NaN"."""
    found = []
    for kind in dict.fromkeys(kinds.values()):
        names = [name for name, one in kinds.items() if one == kind]
        found.append(f"{listed(names)} {'is' if len(names) == 1 else 'are'} {kind}")
    return ", ".join(found)


@dataclass(frozen=True)
class _Group:
    """Attempts that are scored by the same channels, each at the same steps.

    Attributes:
      runs: the attempts.
      at: of each channel the steps at which it is compared; None: at all.
    """

    runs: list[Named]
    at: dict[str, np.ndarray | None]


def _groups(new: Sequence[Named], clean: Sequence[Named], channels: Sequence[str], notes: list[str]) -> list[_Group]:
    """New runs by what they have; notes say which channels are not read of which runs, and why."""
    groups: dict[tuple[object, ...], _Group] = {}
    unread: dict[str, list[str]] = {}
    ends = max(int(each.attempt.steps[-1]) for each in clean)
    for run in new:
        at: dict[str, np.ndarray | None] = {}
        for name in channels:
            one = run.series(name)
            if one is None or not len(one.steps):
                unread.setdefault(f"not read, as not there: {name}", []).append(run.name)
                continue
            how = alignment.cadence(run, clean, name)
            if isinstance(how, str):
                unread.setdefault(f"not read, as it is logged {how}: {name}", []).append(run.name)
            else:
                at[name] = how
        key = tuple((name, None if steps is None else steps.tobytes()) for name, steps in at.items())
        groups.setdefault(key, _Group([], at)).runs.append(run)
        if int(run.attempt.steps[-1]) > ends:
            notes.append(
                f"{run.name}: ends at step {run.attempt.steps[-1]}, the clean runs at {ends}: scored up to there"
            )
    notes += [f"{in_files(names)}: {note}" for note, names in unread.items()]
    for group in groups.values():
        if not group.at:
            there = listed(group.runs[0].attempt.series)
            notes.append(
                f"{in_files([run.name for run in group.runs])}: no channel in common with the clean runs; has {there}"
            )
    return [group for group in groups.values() if group.at]


@dataclass(frozen=True)
class _Scored:
    """A group's runs, scored by a monitor of what the clean runs have of its channels.

    Attributes:
      monitor: fitted and calibrated.
      limit: its threshold.
      clean, new: scores, latents, distances and values.
    """

    monitor: Monitor
    limit: float
    clean: xr.Dataset
    new: xr.Dataset

    @classmethod
    def of(
        cls,
        group: _Group,
        clean: Sequence[Named],
        split: tuple[list[int], list[int]],
        known: Mapping[str, frozenset[str]],
        options: Options,
        alpha: float,
    ) -> _Scored | None:
        names = list(group.at)
        grid = alignment.grid_of([_thinned(run, group.at) for run in clean], names)
        earlier, new = (_array(runs, group.at, grid) for runs in (clean, group.runs))
        if not measured(earlier.values[split[0]]).any():
            return None
        monitor = Monitor.fitted(
            earlier.isel(run=split[0]), earlier.isel(run=split[1]), model=options.model, training=options.training
        )
        broken = [alignment.first_not_finite(clean[i], names, known) is not None for i in split[1]]
        monitor = replace(monitor, clean=np.where(broken, np.inf, monitor.clean))
        limit = threshold(monitor.clean, alpha)
        if not np.isfinite(limit):
            worst = ", ".join(clean[i].name for i, is_so in zip(split[1], broken, strict=True) if is_so)
            raise UserError(
                f"so many clean runs have values that are not finite that no score is unusual at alpha {alpha:g}: "
                f"leave out {worst}"
            )
        return cls(monitor, limit, _seen(monitor, earlier), _seen(monitor, new))

    def with_threshold(self, limit: float) -> _Scored:
        """The same alarms on a scale whose threshold is another: scores of several monitors then have one in common."""
        return replace(self, limit=limit, new=self.new.assign(score=self.new.score + (limit - self.limit)))


def _thinned(run: Named, at: Mapping[str, np.ndarray | None]) -> Named:
    """A run at the steps at which each channel is compared."""
    series = {name: alignment.at_steps(run.series(name), steps) for name, steps in at.items()}
    return Named(run.name, replace(run.attempt, series={n: s for n, s in series.items() if s is not None}))


def _array(runs: Sequence[Named], at: Mapping[str, np.ndarray | None], grid: alignment.Grid) -> xr.DataArray:
    """Runs' values, float32 along "run", "step" and "channel"; NaN where a run has none that is finite."""
    values = np.stack(
        [
            np.stack([grid.of(alignment.at_steps(run.series(name), steps)) for name, steps in at.items()], -1)
            for run in runs
        ]
    )
    with np.errstate(over="ignore"):
        coords = {"run": [run.name for run in runs], "step": grid.steps, "channel": list(at)}
        return xr.DataArray(values.astype(np.float32), coords, ("run", "step", "channel"))


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
    scored: Sequence[_Scored],
    new: Sequence[Named],
    certain: Mapping[str, Alarm | None],
    channels: Sequence[str],
    clean_runs: int,
    calibrated: int,
    alpha: float | None,
    notes: Sequence[str],
    say: Callable[[str], None],
) -> None:
    first = dict(certain)
    largest = max(scored, key=lambda group: group.new.sizes["run"], default=None)
    if largest is not None:
        scored = [group if group is largest else group.with_threshold(largest.limit) for group in scored]
    for group in scored:
        for name, alarm in _alarms(group.new, group.limit).items():
            known = first.get(name)
            if known is None or alarm.step < known.step:
                first[name] = alarm
    alarms = pd.DataFrame([asdict(alarm) for alarm in first.values() if alarm], columns=[f.name for f in fields(Alarm)])
    alarms.to_csv(out / "alarms.csv", index=False)
    described: dict[str, object] = {
        "runs": [run.name for run in new],
        "clean_runs": clean_runs,
        "calibrated_on": calibrated,
        "alpha": alpha,
        "channels": list(channels),
        "notes": list(notes),
        "attempts": any(ATTEMPT in run.name for run in new),
    }
    if largest is not None:
        view.write(_for_page(scored, largest), out / "monitored.zarr")
        largest.monitor.save(out / "monitor.npz")
        described |= {"threshold": largest.limit, "channels": list(largest.monitor.expectation.channels.names)}
    (out / "monitored.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    for run in new:
        say(f"{run.name}: {first.get(run.name) or 'no alarm'}")


def _for_page(scored: Sequence[_Scored], largest: _Scored) -> xr.Dataset:
    """What a page shows: all groups' runs, whose scores have one threshold, and the largest group's clean runs."""
    directions = plane(largest.clean.latent.values, largest.new.latent.values)
    parts = []
    for group in scored:
        part = group.new[["score", "distance", "values"]]
        if group is largest:
            part["latent"] = (("run", "step", "component"), group.new.latent.values @ directions)
        parts.append(part)
    found = parts[0] if len(parts) == 1 else xr.concat(parts, "run", data_vars="all", join="outer", fill_value=np.nan)
    clean = xr.Dataset(
        {
            "clean_latent": (("step", "component", "quantile"), over_lanes(largest.clean.latent.values @ directions)),
            "clean_values": (("step", "channel", "quantile"), over_lanes(largest.clean["values"].values)),
        },
        {"quantile": list(QUANTILES), "step": largest.clean.step, "channel": largest.clean.channel},
    )
    return found.merge(clean, join="outer")


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


def _alarms(scored: xr.Dataset, limit: float) -> dict[str, Alarm]:
    """The first step of each run at which its score is above the threshold."""
    found: dict[str, Alarm] = {}
    for run in range(scored.sizes["run"]):
        one = scored.isel(run=run)
        above = np.flatnonzero(np.nan_to_num(one.score.values, nan=-np.inf, posinf=np.inf) > limit)
        if len(above):
            at = one.isel(step=above[0])
            order = np.argsort(-np.abs(np.nan_to_num(at.distance.values)))[:FURTHEST]
            furthest = ", ".join(f"{at.channel.values[i]} {at.distance.values[i]:.1f}" for i in order)
            name = str(scored.run.values[run])
            found[name] = Alarm(name, int(at.step), float(at.score), str(at.most.values), furthest)
    return found
