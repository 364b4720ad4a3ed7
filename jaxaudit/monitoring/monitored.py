"""`jaxaudit monitor`: someone's own training runs, scored by a monitor of their earlier ones."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxaudit.logs import Log, read
from jaxaudit.logs.log import join_names
from jaxaudit.monitoring import alignment
from jaxaudit.monitoring.alignment import Named, in_files
from jaxaudit.monitoring.calibration import rank, threshold
from jaxaudit.monitoring.channels import measured
from jaxaudit.monitoring.envelope import forward_filled
from jaxaudit.monitoring.monitor import DEFAULT, Monitor, Scored, calibrated_on
from jaxaudit.monitoring.view import COMPONENTS, QUANTILES, over_lanes, plane
from jaxaudit.runtime import array_store
from jaxaudit.runtime.errors import UserError, error_prefix
from jaxaudit.runtime.files import claimed

if TYPE_CHECKING:
    from jaxaudit.monitoring.training import Training

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
    of_logs = _said(logs.values())
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
        notes += of_logs
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
    notes += of_logs
    _say(notes, say)
    _write(out, scored, new, certain, channels, len(earlier), len(calibrated), alpha, notes, say)


def _say(notes: Sequence[str], say: Callable[[str], None]) -> None:
    for note in notes:
        say(f"note: {note}")


def _said(logs: Iterable[Log]) -> list[str]:
    """What logs say of what is left out, replaced or missing in them: a note for all files that say so of some step."""
    said: dict[str, dict[str, list[str]]] = {}
    for log in logs:
        for note in (*map(str, log.left_out), *log.notes):
            said.setdefault(re.sub(r"\d+", "0", note), {}).setdefault(note, []).append(str(log.path))
    found = []
    for notes in said.values():
        paths = [path for each in notes.values() for path in each]
        of_first = f" (so in {paths[0]})" if len(notes) > 1 else ""
        found.append(f"{in_files(paths)}: {next(iter(notes))}{of_first}")
    return found


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
    return Alarm(run.name, silent[0], np.inf, SILENT, f"{join_names(silent[1])} {are} silent")


def _not_finite(kinds: Mapping[str, str]) -> str:
    """Channels and what they are, as "loss, grad_norm are NaN"."""
    found = []
    for kind in dict.fromkeys(kinds.values()):
        names = [name for name, one in kinds.items() if one == kind]
        found.append(f"{join_names(names)} {'is' if len(names) == 1 else 'are'} {kind}")
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
    cadences = {name: alignment.ChannelCadence.of(clean, name) for name in channels}
    for run in new:
        at: dict[str, np.ndarray | None] = {}
        for name in channels:
            one = run.series(name)
            if one is None or not len(one.steps):
                unread.setdefault(f"not read, as not there: {name}", []).append(run.name)
                continue
            how = cadences[name].kept_by(one)
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
            there = join_names(group.runs[0].attempt.series)
            notes.append(
                f"{in_files([run.name for run in group.runs])}: no channel in common with the clean runs; has {there}"
            )
    return [group for group in groups.values() if group.at]


@dataclass(frozen=True)
class _Runs:
    """Runs side by side.

    Attributes:
      names: of n runs.
      steps: int64 `[T]`.
      channels: d of them.
      values: float32 `[n, T, d]`, NaN where a run has none that is finite.
    """

    names: list[str]
    steps: np.ndarray
    channels: list[str]
    values: np.ndarray

    @classmethod
    def of(cls, runs: Sequence[Named], at: Mapping[str, np.ndarray | None], grid: alignment.StepGrid) -> _Runs:
        """Runs on a grid, each channel at the steps at which it is compared."""
        rows = [[grid.of(alignment.at_steps(run.series(name), steps)) for name, steps in at.items()] for run in runs]
        with np.errstate(over="ignore"):
            values = np.stack([np.stack(row, -1) for row in rows]).astype(np.float32)
        return cls([run.name for run in runs], grid.steps, list(at), values)


@dataclass(frozen=True)
class _Seen:
    """Runs, and what a monitor says of them.

    Attributes:
      runs: those, with the channels that the monitor reads.
      said: of each step.
      distance: of each channel from the clean runs, in their standard deviations, float32 `[n, T, d]`; NaN before the
        first value.
    """

    runs: _Runs
    said: Scored
    distance: np.ndarray

    @classmethod
    def of(cls, fitted: Monitor, runs: _Runs) -> _Seen:
        known = fitted.expectation
        values = known.channels.pick(runs.values, runs.channels)
        read = replace(runs, channels=list(known.channels.names), values=values)
        y, seen = known.channels.standardise(values)
        filled = forward_filled(np.where(seen > 0, y, np.nan))
        distance = np.where(np.isfinite(filled), known.reference.telemetry.standardise(filled), np.nan)
        return cls(read, fitted.score_runs(values), distance.astype(np.float32))

    def alarms(self, limit: float) -> dict[str, Alarm]:
        """The first step of each run at which its score is above the threshold."""
        found: dict[str, Alarm] = {}
        for i, name in enumerate(self.runs.names):
            above = np.flatnonzero(np.nan_to_num(self.said.score[i], nan=-np.inf, posinf=np.inf) > limit)
            if len(above):
                t = above[0]
                apart = self.distance[i, t]
                order = np.argsort(-np.abs(np.nan_to_num(apart)))[:FURTHEST]
                furthest = ", ".join(f"{self.runs.channels[k]} {apart[k]:.1f}" for k in order)
                score, kind = float(self.said.score[i, t]), str(self.said.most[i, t])
                found[name] = Alarm(name, int(self.runs.steps[t]), score, kind, furthest)
        return found


@dataclass(frozen=True)
class _Scored:
    """A group's runs, scored by a monitor of what the clean runs have of its channels.

    Attributes:
      monitor: fitted and calibrated.
      limit: its threshold.
      clean, new: what it says of the clean runs and of the group's.
    """

    monitor: Monitor
    limit: float
    clean: _Seen
    new: _Seen

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
        earlier, new = (_Runs.of(runs, group.at, grid) for runs in (clean, group.runs))
        fitted, calibrated = (earlier.values[part] for part in split)
        if not measured(fitted).any():
            return None
        monitor = Monitor.fitted(fitted, calibrated, names, model=options.model, training=options.training)
        broken = [alignment.first_not_finite(clean[i], names, known) is not None for i in split[1]]
        monitor = replace(monitor, clean=np.where(broken, np.inf, monitor.clean))
        limit = threshold(monitor.clean, alpha)
        if not np.isfinite(limit):
            worst = ", ".join(clean[i].name for i, is_so in zip(split[1], broken, strict=True) if is_so)
            raise UserError(
                f"so many clean runs have values that are not finite that no score is unusual at alpha {alpha:g}: "
                f"leave out {worst}"
            )
        return cls(monitor, limit, _Seen.of(monitor, earlier), _Seen.of(monitor, new))

    def with_threshold(self, limit: float) -> _Scored:
        """Returns the alarms on a scale with another threshold, so that several monitors' scores have the same one."""
        said = self.new.said._replace(score=self.new.said.score + (limit - self.limit))
        return replace(self, limit=limit, new=replace(self.new, said=said))


def _thinned(run: Named, at: Mapping[str, np.ndarray | None]) -> Named:
    """A run at the steps at which each channel is compared."""
    series = {name: alignment.at_steps(run.series(name), steps) for name, steps in at.items()}
    return Named(run.name, replace(run.attempt, series={n: s for n, s in series.items() if s is not None}))


def _alpha(asked: float | None, runs: int, notes: list[str]) -> float:
    if asked is not None:
        with error_prefix("jaxaudit monitor"):
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
    largest = max(scored, key=lambda group: len(group.new.runs.names), default=None)
    if largest is not None:
        scored = [group if group is largest else group.with_threshold(largest.limit) for group in scored]
    for group in scored:
        for name, alarm in group.new.alarms(group.limit).items():
            known = first.get(name)
            if known is None or alarm.step < known.step:
                first[name] = alarm
    with (out / "alarms.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, [f.name for f in fields(Alarm)], lineterminator="\n")
        table.writeheader()
        table.writerows(asdict(alarm) for alarm in first.values() if alarm)
    later = [
        f"{name}: {alarm.channels} at step {alarm.step}, after the alarm"
        for name, alarm in certain.items()
        if alarm is not None and alarm is not first[name]
    ]
    described: dict[str, object] = {
        "runs": [run.name for run in new],
        "clean_runs": clean_runs,
        "calibrated_on": calibrated,
        "alpha": alpha,
        "channels": list(channels),
        "notes": [*notes, *later],
        "attempts": any(ATTEMPT in run.name for run in new),
    }
    if largest is not None:
        array_store.write_arrays(out / "monitored.zarr", _for_page(scored, largest))
        largest.monitor.save(out / "monitor.npz")
        described |= {"threshold": largest.limit, "channels": list(largest.monitor.expectation.channels.names)}
    (out / "monitored.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    for run in new:
        alarm_or_none, later_alarm = first.get(run.name), certain[run.name]
        also = f"; {later_alarm}" if later_alarm is not None and later_alarm is not alarm_or_none else ""
        say(f"{run.name}: {alarm_or_none or 'no alarm'}{also}")


@dataclass(frozen=True)
class _Axes:
    """Steps and channels of all groups together.

    Attributes:
      steps: int64 `[T]`.
      channels: d of them.
    """

    steps: np.ndarray
    channels: list[str]

    @classmethod
    def of(cls, groups: Sequence[_Runs]) -> _Axes:
        channels = dict.fromkeys(name for runs in groups for name in runs.channels)
        return cls(np.unique(np.concatenate([runs.steps for runs in groups])), list(channels))

    def spread(self, runs: _Runs, values: np.ndarray) -> np.ndarray:
        """A group's values `[T', ...]` at the steps of all, `[T, ...]`; NaN elsewhere."""
        found = np.full((len(self.steps), *values.shape[1:]), np.nan, values.dtype)
        found[np.searchsorted(self.steps, runs.steps)] = values
        return found

    def spread_channels(self, runs: _Runs, values: np.ndarray) -> np.ndarray:
        """A group's values `[T', d', ...]` at the steps and channels of all, `[T, d, ...]`; NaN elsewhere."""
        found = np.full((len(runs.steps), len(self.channels), *values.shape[2:]), np.nan, values.dtype)
        found[:, [self.channels.index(name) for name in runs.channels]] = values
        return self.spread(runs, found)


def _for_page(scored: Sequence[_Scored], largest: _Scored) -> dict[str, array_store.LabelledArray]:
    """What a page shows: all groups' runs, whose scores have one threshold, and the largest group's clean runs."""
    clean = largest.clean
    axes = _Axes.of([group.new.runs for group in scored] + [clean.runs])
    directions = plane(clean.said.latent, largest.new.said.latent)
    score, distance, values, latent = [], [], [], []
    for group in scored:
        runs, said = group.new.runs, group.new.said
        shown = said.latent @ directions if group is largest else np.full((*said.score.shape, COMPONENTS), np.nan)
        for i in range(len(runs.names)):
            score.append(axes.spread(runs, said.score[i]))
            distance.append(axes.spread_channels(runs, group.new.distance[i]))
            values.append(axes.spread_channels(runs, runs.values[i]))
            latent.append(axes.spread(runs, shown[i]))
    clean_latent = axes.spread(clean.runs, over_lanes(clean.said.latent @ directions))
    clean_values = axes.spread_channels(clean.runs, over_lanes(clean.runs.values))
    return {
        "run": (("run",), np.array([name for group in scored for name in group.new.runs.names], object)),
        "step": (("step",), axes.steps),
        "channel": (("channel",), np.array(axes.channels, object)),
        "quantile": (("quantile",), np.array(QUANTILES)),
        "score": (("run", "step"), np.stack(score)),
        "distance": (("run", "step", "channel"), np.stack(distance)),
        "values": (("run", "step", "channel"), np.stack(values)),
        "latent": (("run", "step", "component"), np.stack(latent)),
        "clean_latent": (("step", "component", "quantile"), clean_latent),
        "clean_values": (("step", "channel", "quantile"), clean_values),
    }
