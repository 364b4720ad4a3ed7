"""The command `jaxaudit monitor`: scores logged training runs by a monitor that is fitted to earlier, clean ones."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxaudit.logs import Log, read
from jaxaudit.logs.log import join_names
from jaxaudit.monitoring import alignment
from jaxaudit.monitoring.alignment import NamedAttempt, file_names
from jaxaudit.monitoring.monitor import DEFAULT, Monitor, Scored, calibration_count
from jaxaudit.monitoring.page_arrays import monitored_arrays
from jaxaudit.monitoring.scoring import threshold, threshold_rank
from jaxaudit.monitoring.telemetry import forward_fill, varying_channels
from jaxaudit.runtime import array_store
from jaxaudit.runtime.errors import UserError, error_prefix
from jaxaudit.runtime.files import claimed

if TYPE_CHECKING:
    from jaxaudit.monitoring.meta_state import Training

DEFAULT_ALPHA = 0.05
"""The false alarms per clean run if the user chooses none and there are enough clean runs."""

MIN_CLEAN_RUNS = 4
"""The fewest clean runs that a monitor is fitted to; with fewer, only alarms without a score are reported."""

MIN_CALIBRATED, MIN_CALIBRATED_FROM = 19, 27
"""With 27 clean runs or more, at least 19 are calibrated on: as many as DEFAULT_ALPHA takes."""

ATTEMPT = ", attempt "
"""Part of the names of attempts, if a run was restarted from a checkpoint."""

NOT_FINITE, SILENT = "not finite", "silent"
"""The kinds of alarms without a score: a value is not finite, or a channel has fallen silent."""

FURTHEST = 3
"""The number of channels that an alarm names."""


@dataclass(frozen=True)
class Alarm:
    """The first alarm of an attempt, a row of alarms.csv.

    Attributes:
      run: the name of the attempt.
      step: the step of the alarm.
      score: the score at the step; infinite for an alarm without a score.
      kind: NOT_FINITE, SILENT, or the name of the most unusual score.
      channels: a text on the channels that are not finite or silent, or that are furthest from the clean runs.
    """

    run: str
    step: int
    score: float
    kind: str
    channels: str

    def __str__(self) -> str:
        without_score = self.kind in (NOT_FINITE, SILENT)
        return f"alarm at step {self.step}{': ' if without_score else ', furthest: '}{self.channels}"


@dataclass(frozen=True)
class Options:
    """The user's choices.

    Attributes:
      channels: the channels to read; None reads all that the clean runs share, except clocks and settings.
      step: the column that counts steps; None takes the first with a usual name.
      alpha: false alarms per clean run; None takes DEFAULT_ALPHA, or more if there are few clean runs.
      model: the name of the scorer, one of `monitor.MODELS`.
      training: the settings of a state-space model's training.
    """

    channels: tuple[str, ...] | None = None
    step: str | None = None
    alpha: float | None = None
    model: str = DEFAULT
    training: Training | None = None


def monitor_logs(
    files: Sequence[Path],
    clean: Sequence[Path],
    out: Path,
    options: Options | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Scores runs by a monitor that is fitted to one part of the clean runs and calibrated on the other.

    Writes monitored.json, monitored.zarr, alarms.csv and monitor.npz to the folder `out`.

    Raises:
      UserError: a file cannot be read, there are fewer than two clean runs, they have no channel in common, or too many
        clean runs to calibrate on have values that are not finite.
    """
    with claimed(out, hint="; name another with -o") as claim:
        _monitor_logs(files, clean, out, options or Options(), say)
        claim.keep()


def _monitor_logs(
    files: Sequence[Path], clean_files: Sequence[Path], out: Path, options: Options, say: Callable[[str], None]
) -> None:
    logs = {path: read(path, options.step) for path in dict.fromkeys((*clean_files, *files))}
    log_notes = _notes_of_logs(logs.values())
    clean = _attempts([logs[path] for path in clean_files], latest_only=True)
    new = _attempts([logs[path] for path in files])
    if len(clean) < 2:
        raise UserError(f"a monitor learns from two earlier runs or more, not {len(clean)}")
    clean, notes = alignment.drop_short_runs(clean)
    channels, channel_notes = alignment.select_channels(clean, options.channels)
    notes += [*channel_notes, *alignment.changed_schedules(new, clean)]
    split = _split(len(clean))
    fitted, calibrated = split
    tolerated = alignment.tolerated_non_finite([clean[i] for i in fitted], channels)
    notes += [
        f"{name} may be not finite ({', '.join(sorted(kinds))}) without an alarm, because it is in clean runs"
        for name, kinds in tolerated.items()
    ]
    silences = alignment.longest_silences(clean, channels)
    certain = {run.name: _certain_alarm(run, silences, channels, tolerated) for run in new}
    groups: list[ScoredGroup] = []
    alpha = None
    if len(clean) < MIN_CLEAN_RUNS:
        calibrated = []
        notes.append(
            f"{len(clean)} clean runs are too few to fit a monitor to, which takes {MIN_CLEAN_RUNS}: alarms are "
            "only for values that are not finite and channels that fall silent"
        )
    else:
        for i in calibrated:
            if (broken := alignment.first_non_finite(clean[i], channels, tolerated)) is not None:
                step, kinds = broken
                notes.append(
                    f"{clean[i].name}: {_non_finite_text(kinds)} at step {step}, so it counts as a run with an alarm"
                )
        alpha = _alpha(options.alpha, len(calibrated), notes)
        for group in alignment.group_runs(new, clean, channels, notes):
            scored = ScoredGroup.fit(group, clean, split, tolerated, options, alpha)
            if scored is not None:
                groups.append(scored)
        if not groups and not any(certain.values()):
            raise UserError(
                "no channel of a new run differs between the earlier runs: there is nothing to learn from them"
            )
    notes += log_notes
    for note in notes:
        say(f"note: {note}")
    about: dict[str, Any] = {
        "runs": [run.name for run in new],
        "clean_runs": len(clean),
        "calibrated_on": len(calibrated),
        "alpha": alpha,
        "channels": list(channels),
        "notes": notes,
        "attempts": any(ATTEMPT in run.name for run in new),
    }
    _write(out, groups, certain, about, say)


def _notes_of_logs(logs: Iterable[Log]) -> list[str]:
    """Returns what logs note on parts that are left out, replaced or missing.

    Notes that differ only in numbers, such as steps, become one for all files.
    """
    by_pattern: dict[str, dict[str, list[str]]] = {}
    for log in logs:
        for note in (*map(str, log.left_out), *log.notes):
            by_pattern.setdefault(re.sub(r"\d+", "0", note), {}).setdefault(note, []).append(str(log.path))
    merged = []
    for paths_by_note in by_pattern.values():
        paths = [path for note_paths in paths_by_note.values() for path in note_paths]
        example = f" (in {paths[0]})" if len(paths_by_note) > 1 else ""
        merged.append(f"{file_names(paths)}: {next(iter(paths_by_note))}{example}")
    return merged


def _attempts(logs: Sequence[Log], latest_only: bool = False) -> list[NamedAttempt]:
    """Returns all attempts of all runs of some logs, or each run's latest, with their names."""
    named = []
    for run in (run for log in logs for run in log.runs):
        if latest_only or len(run.attempts) == 1:
            named.append(NamedAttempt(run.name, run.latest))
            continue
        for number, attempt in enumerate(run.attempts, 1):
            named.append(NamedAttempt(f"{run.name}{ATTEMPT}{number} of {len(run.attempts)}", attempt))
    return named


def _split(runs: int) -> tuple[list[int], list[int]]:
    """Returns the indices of the clean runs that a monitor is fitted to, and of those that it is calibrated on."""
    count = calibration_count(runs)
    if runs >= MIN_CALIBRATED_FROM:
        count = max(count, MIN_CALIBRATED)
    order = np.random.default_rng(0).permutation(runs)
    return sorted(order[count:].tolist()), sorted(order[:count].tolist())


def _certain_alarm(
    run: NamedAttempt, silences: Mapping[str, int], channels: Sequence[str], tolerated: Mapping[str, frozenset[str]]
) -> Alarm | None:
    """Returns the first alarm of an attempt that needs no score; None if there is none."""
    present = [name for name in channels if run.series(name) is not None]
    broken = alignment.first_non_finite(run, present, tolerated)
    silence = alignment.first_silence(run, silences, present)
    if broken is not None and (silence is None or broken[0] <= silence[0]):
        return Alarm(run.name, broken[0], np.inf, NOT_FINITE, _non_finite_text(broken[1]))
    if silence is not None:
        verb = "is" if len(silence[1]) == 1 else "are"
        return Alarm(run.name, silence[0], np.inf, SILENT, f"{join_names(silence[1])} {verb} silent")
    return None


def _non_finite_text(kinds: Mapping[str, str]) -> str:
    """Returns a text such as "loss, grad_norm are NaN", given the kind of each channel's value."""
    parts = []
    for kind in dict.fromkeys(kinds.values()):
        names = [name for name, channel_kind in kinds.items() if channel_kind == kind]
        parts.append(f"{join_names(names)} {'is' if len(names) == 1 else 'are'} {kind}")
    return ", ".join(parts)


@dataclass(frozen=True)
class LoggedRuns:
    """Values of several runs on one grid.

    Attributes:
      names: the names of the n runs.
      steps: int64 `[T]`.
      channels: the names of the d channels.
      values: float32 `[n, T, d]`, NaN where a run has no finite value.
    """

    names: list[str]
    steps: np.ndarray
    channels: list[str]
    values: np.ndarray

    @classmethod
    def on_grid(cls, runs: Sequence[NamedAttempt], channels: list[str], grid: alignment.StepGrid) -> LoggedRuns:
        """Returns the channels of runs on a grid."""
        rows = [np.stack([grid.average(run.series(name)) for name in channels], -1) for run in runs]
        with np.errstate(over="ignore"):
            values = np.stack(rows).astype(np.float32)
        return cls([run.name for run in runs], grid.steps, channels, values)


@dataclass(frozen=True)
class ScoredRuns:
    """Runs and their scores.

    Attributes:
      runs: the runs, with the channels that the monitor reads.
      scored: the scores of each step.
      distance: each channel's distance from the clean runs in their standard deviations, float32 `[n, T, d]`; NaN
        before the first value.
    """

    runs: LoggedRuns
    scored: Scored
    distance: np.ndarray

    @classmethod
    def score(cls, monitor: Monitor, runs: LoggedRuns) -> ScoredRuns:
        expectation = monitor.expectation
        values = expectation.channels.select_columns(runs.values, runs.channels)
        selected = replace(runs, channels=list(expectation.channels.names), values=values)
        y, observed = expectation.channels.standardise(values)
        filled = forward_fill(np.where(observed > 0, y, np.nan))
        distance = np.where(np.isfinite(filled), expectation.reference.telemetry.standardise(filled), np.nan)
        return cls(selected, monitor.score_runs(values), distance.astype(np.float32))

    def alarms(self, limit: float) -> dict[str, Alarm]:
        """Returns the first alarm of each run whose score exceeds the threshold, by the run's name."""
        alarms: dict[str, Alarm] = {}
        for i, name in enumerate(self.runs.names):
            above = np.flatnonzero(np.nan_to_num(self.scored.score[i], nan=-np.inf, posinf=np.inf) > limit)
            if len(above):
                t = above[0]
                distance = self.distance[i, t]
                order = np.argsort(-np.abs(np.nan_to_num(distance)))[:FURTHEST]
                furthest = ", ".join(f"{self.runs.channels[k]} {distance[k]:.1f}" for k in order)
                score, kind = float(self.scored.score[i, t]), str(self.scored.most[i, t])
                alarms[name] = Alarm(name, int(self.runs.steps[t]), score, kind, furthest)
        return alarms


@dataclass(frozen=True)
class ScoredGroup:
    """A group's runs, scored by a monitor of the clean runs with the group's channels.

    Attributes:
      monitor: the fitted and calibrated monitor.
      limit: its threshold.
      clean, new: the scores of the clean runs and of the group's.
    """

    monitor: Monitor
    limit: float
    clean: ScoredRuns
    new: ScoredRuns

    @classmethod
    def fit(
        cls,
        group: alignment.RunGroup,
        clean: Sequence[NamedAttempt],
        split: tuple[list[int], list[int]],
        tolerated: Mapping[str, frozenset[str]],
        options: Options,
        alpha: float,
    ) -> ScoredGroup | None:
        """Fits a monitor and scores a group's runs; returns None if no channel differs between the clean runs.

        Raises:
          UserError: too many clean runs to calibrate on have values that are not finite.
        """
        names = list(group.channel_steps)
        restricted = [_restricted(run, group.channel_steps) for run in clean]
        grid = alignment.common_grid(restricted, names)
        clean_runs, new_runs = (LoggedRuns.on_grid(runs, names, grid) for runs in (restricted, group.runs))
        fitted, calibrated = (clean_runs.values[indices] for indices in split)
        if not varying_channels(fitted).any():
            return None
        monitor = Monitor.fitted(fitted, calibrated, names, model=options.model, training=options.training)
        broken = [alignment.first_non_finite(clean[i], names, tolerated) is not None for i in split[1]]
        monitor = replace(monitor, clean=np.where(broken, np.inf, monitor.clean))
        limit = threshold(monitor.clean, alpha)
        if not np.isfinite(limit):
            broken_names = ", ".join(clean[i].name for i, is_broken in zip(split[1], broken, strict=True) if is_broken)
            raise UserError(
                f"so many clean runs have values that are not finite that no score is unusual at alpha {alpha:g}: "
                f"leave out {broken_names}"
            )
        return cls(monitor, limit, ScoredRuns.score(monitor, clean_runs), ScoredRuns.score(monitor, new_runs))

    def with_threshold(self, limit: float) -> ScoredGroup:
        """Returns the group with scores shifted to another threshold, so that all groups have the same."""
        scored = self.new.scored._replace(score=self.new.scored.score + (limit - self.limit))
        return replace(self, limit=limit, new=replace(self.new, scored=scored))


def _restricted(run: NamedAttempt, channel_steps: Mapping[str, np.ndarray | None]) -> NamedAttempt:
    """Returns a run with only these channels, each at its steps in `channel_steps`, or at all of its steps for None."""
    series = {name: alignment.restrict_to_steps(run.series(name), steps) for name, steps in channel_steps.items()}
    present = {name: values for name, values in series.items() if values is not None}
    return replace(run, attempt=replace(run.attempt, series=present))


def _alpha(chosen: float | None, calibrated: int, notes: list[str]) -> float:
    """Returns the user's alpha, or the default, or the lowest that so few runs allow, which is noted.

    Raises:
      UserError: the user's alpha is outside (0, 1), or takes more runs to calibrate on.
    """
    if chosen is not None:
        with error_prefix("jaxaudit monitor"):
            threshold_rank(calibrated, chosen)
        return chosen
    lowest = 1 / (calibrated + 1)
    if lowest > DEFAULT_ALPHA:
        notes.append(
            f"{calibrated} earlier runs to calibrate on allow {lowest:.1%} false alarms per clean run, "
            f"not {DEFAULT_ALPHA:.0%}"
        )
    return max(DEFAULT_ALPHA, lowest)


def _write(
    out: Path,
    groups: Sequence[ScoredGroup],
    certain: Mapping[str, Alarm | None],
    about: dict[str, Any],
    say: Callable[[str], None],
) -> None:
    """Writes the folder, and says each run's verdict.

    Args:
      out: the folder.
      groups: the scored groups of runs.
      certain: each run's first alarm without a score, by its name.
      about: the contents of monitored.json that do not depend on the scores.
      say: receives a line for each run.
    """
    first = dict(certain)
    largest = max(groups, key=lambda group: len(group.new.runs.names), default=None)
    if largest is not None:
        groups = [group if group is largest else group.with_threshold(largest.limit) for group in groups]
    for group in groups:
        for name, alarm in group.new.alarms(group.limit).items():
            earlier = first.get(name)
            if earlier is None or alarm.step < earlier.step:
                first[name] = alarm
    with (out / "alarms.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, [field.name for field in fields(Alarm)], lineterminator="\n")
        table.writeheader()
        table.writerows(asdict(alarm) for alarm in first.values() if alarm)
    later = {name: alarm for name, alarm in certain.items() if alarm is not None and alarm is not first[name]}
    later_notes = [f"{name}: {alarm.channels} at step {alarm.step}, after the alarm" for name, alarm in later.items()]
    about = {**about, "notes": [*about["notes"], *later_notes]}
    if largest is not None:
        array_store.write_arrays(out / "monitored.zarr", monitored_arrays(groups, largest))
        largest.monitor.save(out / "monitor.npz")
        about |= {"threshold": largest.limit, "channels": list(largest.monitor.expectation.channels.names)}
    (out / "monitored.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    for name in about["runs"]:
        also = f"; {later[name]}" if name in later else ""
        say(f"{name}: {first[name] or _without_alarm(name, groups)}{also}")


def _without_alarm(name: str, groups: Sequence[ScoredGroup]) -> str:
    """Returns the text for a run without an alarm: how near its largest score is to the threshold."""
    for group in groups:
        if name in group.new.runs.names:
            scores = group.new.scored.score[group.new.runs.names.index(name)]
            if np.isfinite(scores).any():
                return f"no alarm, largest score {np.nanmax(scores):.2f} of {group.limit:.2f}"
    return "no alarm"
