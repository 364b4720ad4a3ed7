"""Aligns logged runs with clean runs: the channels and steps to compare, and alarms that are certain without a score.

All that is learned here is learned of clean runs; of a new run, only its channels' names and steps matter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxaudit.logs.log import Attempt, Series, describe_missing, join_names, shorten
from jaxaudit.monitoring.telemetry import ROUNDING_TOLERANCE
from jaxaudit.runtime.errors import UserError

MAX_STEPS = 1000
"""The most steps of a grid; in longer ones, neighbouring steps are averaged."""

MIN_SHARED = 0.9
"""The smallest share of a channel's steps that runs have in common if they are compared step by step."""

MIN_LENGTH = 0.9
"""The smallest length of a clean run, relative to the median; shorter runs count as cut short and are left out."""

SILENCE_FACTOR = 3
"""A channel is silent after this many times its usual spacing without a value."""

COUNTER_TOLERANCE = 0.01
"""The relative difference up to which the values of counters in two runs count as equal."""

_CLOCK = re.compile(
    r"(?:^|[_/ .-])(?:time|times|timing|timestamp|clock|elapsed|seconds|secs|sec|wall|walltime|runtime|duration|dt|"
    r"date|epoch|epochs|steps?|iterations?|updates|episodes|frames|tokens|samples|count|counter|total|percentage)"
    r"(?:$|[_/ .-])",
    re.IGNORECASE,
)
"""Matches names of channels that grow as training proceeds, well or badly."""

_SPEED = re.compile(
    r"(?:^|[_/ .-])(?:fps|sps|mfu|tflops|flops|throughput|runtime|elapsed|walltime|dt|it/s|timing_s|time[_ ]per.*|"
    r"(?:tok|tokens?|samples?|steps?|frames|iterations?)[ _]?(?:/|per)[ _]?s(?:ec(?:ond)?)?|"
    r"(?:step|iteration|iter|batch|epoch|data|forward|backward|learning|env|rollout|update)[_ ]?time)(?:$|[_/ .-])",
    re.IGNORECASE,
)
"""Matches names of channels that measure the speed of a machine."""

_MAX_CELLS = 2**29

NON_FINITE_KINDS = ("NaN", "infinite")


@dataclass(frozen=True)
class NamedAttempt:
    """An attempt of a run, and its name in messages."""

    name: str
    attempt: Attempt

    def series(self, channel: str) -> Series | None:
        """Returns a channel's values, NaN for those of a column of texts, or None if the attempt lacks the channel."""
        return self.attempt.series.get(channel) or self.attempt.texts.get(channel)


@dataclass(frozen=True)
class StepGrid:
    """The intervals of steps in which a channel is compared.

    Attributes:
      edges: int64 `[T + 1]`; interval t has the steps above edges[t], up to and including edges[t + 1].
    """

    edges: np.ndarray

    @property
    def steps(self) -> np.ndarray:
        """The last step of each interval, int64 `[T]`."""
        return self.edges[1:]

    def average(self, series: Series | None) -> np.ndarray:
        """Returns the mean of a channel's finite values in each interval, `[T]`; NaN where there is none."""
        count = len(self.edges) - 1
        if series is None:
            return np.full(count, math.nan)
        finite = np.isfinite(series.values)
        interval = np.searchsorted(self.edges, series.steps[finite]) - 1
        inside = (interval >= 0) & (interval < count)
        interval, values = interval[inside], series.values[finite][inside]
        number = np.bincount(interval, minlength=count)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            return np.where(number > 0, np.bincount(interval, values, minlength=count) / number, math.nan)


def drop_short_runs(clean: Sequence[NamedAttempt]) -> tuple[list[NamedAttempt], list[str]]:
    """Returns the clean runs that were not cut short, and a note on those that were."""
    lengths = [int(run.attempt.steps[-1]) - int(run.attempt.steps[0]) for run in clean]
    shortest = MIN_LENGTH * float(np.median(lengths))
    kept = [run for run, length in zip(clean, lengths, strict=True) if length >= shortest]
    short = [run.name for run, length in zip(clean, lengths, strict=True) if length < shortest]
    if not short:
        return kept, []
    return kept, [f"{file_names(short)}: left out, shorter than {MIN_LENGTH:.0%} of the clean runs' median length"]


def file_names(names: Sequence[str]) -> str:
    """Returns names of files for the beginning of a note; of more than three, the number and the first two."""
    printable = [name if name.isprintable() else ascii(name)[1:-1] for name in names]
    if len(names) <= 3:
        return ", ".join(printable)
    return f"in {len(names)} files ({', '.join(printable[:2])}, ...)"


def select_channels(clean: Sequence[NamedAttempt], names: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Returns the channels of clean runs that show how a run goes, and notes on those that are left out.

    Args:
      clean: the runs.
      names: the channels that the user wants; None selects them by the clean runs.

    Raises:
      UserError: a channel in `names` is not in all runs, or no channel is.
    """
    available = dict.fromkeys(name for run in clean for name in run.attempt.series)
    common = [name for name in available if all(name in run.attempt.series for run in clean)]
    if names:
        for name in names:
            if name not in common:
                without = next(run for run in clean if name not in run.attempt.series)
                raise UserError(f"{without.name} {describe_missing('channel', name, without.attempt.series)}")
        names = list(dict.fromkeys(names))
        unscored = [name for name in names if _is_scheduled(name, [run.attempt.series[name] for run in clean])]
        note = f"{SCHEDULE}, so that only missing and non-finite values raise an alarm: {join_names(unscored)}"
        return names, [note] if unscored else []
    if not common:
        examples: dict[frozenset[str], NamedAttempt] = {}
        for run in clean:
            examples.setdefault(frozenset(run.attempt.series), run)
        each = "; ".join(f"{run.name} has {join_names(run.attempt.series)}" for run in list(examples.values())[:3])
        raise UserError(f"no channel is in all clean runs: {each}")
    notes = []
    partly = [name for name in available if name not in common]
    if partly:
        notes.append(f"not read, not in all clean runs: {join_names(partly)}")
    kept = common
    for reason, applies in _REASONS.items():
        excluded = [name for name in kept if applies(name, [run.attempt.series[name] for run in clean])]
        if excluded and len(excluded) < len(kept):
            hint = "" if reason == SCHEDULE else "; --channels can select them"
            notes.append(f"left out, {reason}: {join_names(excluded)}{hint}")
            kept = [name for name in kept if name not in excluded]
    return kept, notes


def _is_constant(name: str, runs: Sequence[Series]) -> bool:
    constant = all((series.values == series.values[0]).all() for series in runs)
    return constant and any(len(series.values) > 1 for series in runs)


def _is_counter(name: str, runs: Sequence[Series]) -> bool:
    """Returns whether a channel rises at every step, and has the name of a clock or counter or is equal in all runs."""
    finite = [series.values[np.isfinite(series.values)] for series in runs]
    if not all(len(values) > 2 and bool((np.diff(values) > 0).all()) for values in finite):
        return False
    return bool(_CLOCK.search(name)) or (len(runs) > 1 and _is_scheduled(name, runs, COUNTER_TOLERANCE))


def _is_machine_speed(name: str, runs: Sequence[Series]) -> bool:
    return bool(_SPEED.search(name))


def _is_scheduled(name: str, runs: Sequence[Series], tolerance: float = ROUNDING_TOLERANCE) -> bool:
    """Returns whether runs have equal values at all steps that they share, and share any."""
    if len(runs) < 2:
        return False
    first, second = runs[0], runs[1]
    if np.array_equal(first.steps, second.steps) and not np.allclose(
        first.values, second.values, rtol=2 * tolerance, atol=0.0, equal_nan=True
    ):
        return False
    by_step: dict[int, float] = {}
    shared = 0
    for series in runs:
        for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True):
            before = by_step.setdefault(step, value)
            if before is not value:
                shared += 1
                if not abs(before - value) <= tolerance * max(abs(before), abs(value)):
                    return False
    return shared > 0


SCHEDULE = "the same function of the step in all clean runs, like a schedule"

_REASONS = {
    "the same at every step of each run": _is_constant,
    "rising at every step like a clock or counter": _is_counter,
    "measuring the speed of the machine": _is_machine_speed,
    SCHEDULE: _is_scheduled,
}
"""Reasons to leave a channel out, each with a test. No score can be learned for a schedule."""


def changed_schedules(new: Sequence[NamedAttempt], clean: Sequence[NamedAttempt]) -> list[str]:
    """Returns notes on channels that no score reads, and that differ in a new run from every clean run.

    These are channels with one value in all clean runs, and those that are the same function of the step in all of
    them, such as the rate of a schedule.
    """
    notes = []
    for name in dict.fromkeys(name for run in clean for name in run.attempt.series):
        runs = [run.attempt.series[name] for run in clean if name in run.attempt.series]
        if len(runs) < len(clean):
            continue
        constant = runs[0].values[0]
        if all((series.values == constant).all() for series in runs):
            expected = dict.fromkeys((step for run in new for step in run.attempt.steps.tolist()), float(constant))
            place = "in every clean run"
        elif _is_scheduled(name, runs):
            pairs = (pair for x in runs for pair in zip(x.steps.tolist(), x.values.tolist(), strict=True))
            expected = {step: value for step, value in pairs if not math.isnan(value)}
            place = "at this step in every clean run"
        else:
            continue
        for run in new:
            series = run.series(name)
            if series is None:
                continue
            for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True):
                if step in expected and not math.isclose(value, expected[step], rel_tol=2 * ROUNDING_TOLERANCE):
                    notes.append(
                        f"{run.name}: {shorten(name)} is {value:g} at step {step}, and {expected[step]:g} {place}"
                    )
                    break
    return notes


def tolerated_non_finite(fitted: Sequence[NamedAttempt], channels: Sequence[str]) -> dict[str, frozenset[str]]:
    """Returns, by channel, the NON_FINITE_KINDS that clean runs have too, and which therefore raise no alarm."""
    tolerated = {}
    for name in channels:
        values = np.concatenate([series.values for run in fitted if (series := run.series(name)) is not None])
        present = (np.isnan(values).any(), np.isinf(values).any())
        kinds = frozenset(kind for kind, occurs in zip(NON_FINITE_KINDS, present, strict=True) if occurs)
        if kinds:
            tolerated[name] = kinds
    return tolerated


def first_non_finite(
    run: NamedAttempt, channels: Sequence[str], tolerated: Mapping[str, frozenset[str]]
) -> tuple[int, dict[str, str]] | None:
    """Returns the first step at which a run has a value that is not finite, and its kind by channel; None without one.

    Args:
      run: an attempt.
      channels: the channels to check.
      tolerated: kinds that raise no alarm, from `tolerated_non_finite`.
    """
    first: tuple[int, dict[str, str]] | None = None
    for name in channels:
        series = run.series(name)
        if series is None:
            continue
        for kind, mask in zip(NON_FINITE_KINDS, (np.isnan(series.values), np.isinf(series.values)), strict=True):
            if kind in tolerated.get(name, ()) or not mask.any():
                continue
            step = int(series.steps[np.argmax(mask)])
            if first is None or step < first[0]:
                first = (step, {})
            if step == first[0]:
                first[1][name] = kind
    return first


def longest_silences(clean: Sequence[NamedAttempt], channels: Sequence[str]) -> dict[str, int]:
    """Returns, by channel, the most steps that a clean run has been without a value."""
    return {
        name: max(_longest_silence(run.attempt, name) for run in clean if name in run.attempt.series)
        for name in channels
    }


def _longest_silence(attempt: Attempt, name: str) -> int:
    steps = attempt.steps
    return int(np.diff(np.concatenate([steps[:1], attempt.series[name].steps, steps[-1:]])).max())


def first_silence(
    run: NamedAttempt, longest: Mapping[str, int], channels: Sequence[str]
) -> tuple[int, list[str]] | None:
    """Returns the first step at which channels of a run are silent while others go on, and these channels.

    A channel is silent when it has been without a value for longer than in any clean run (`longest`, from
    `longest_silences`), counted in steps from its latest value. A channel that is logged more rarely than in clean runs
    all along is not silent. None if no channel falls silent.
    """
    all_steps = run.attempt.steps
    silent: dict[int, list[str]] = {}
    for name in channels:
        series = run.series(name)
        if series is None or not len(series.steps):
            continue
        spacing = float(np.median(np.diff(series.steps))) if len(series.steps) > 1 else 0.0
        allowed = max(longest[name], int(SILENCE_FACTOR * spacing))
        ends = np.append(series.steps[1:], all_steps[-1] + 1)
        for index in np.flatnonzero(ends - series.steps > allowed).tolist():
            others = all_steps[(all_steps > series.steps[index] + allowed) & (all_steps < ends[index])]
            if len(others):
                silent.setdefault(int(others[0]), []).append(name)
                break
    return min(silent.items()) if silent else None


def common_grid(clean: Sequence[NamedAttempt], channels: Sequence[str]) -> StepGrid:
    """Returns a grid of the steps that clean runs share, or of as many equal intervals as a run has steps if too few.

    Args:
      clean: the runs, with no other channels than these.
      channels: the names of the channels.

    Raises:
      UserError: the runs have too many values.
    """
    run_steps = [run.attempt.steps for run in clean]
    all_steps, counts = np.unique(np.concatenate(run_steps), return_counts=True)
    shared = all_steps[counts >= max(1, len(clean) / 2)]
    median_length = int(np.median([len(steps) for steps in run_steps]))
    if len(shared) >= MIN_SHARED * median_length:
        edges = np.concatenate([[shared[0] - 1], shared])
    else:
        edges = np.unique(np.linspace(all_steps[0] - 1, all_steps[-1], median_length + 1).round().astype(np.int64))
    width = math.ceil((len(edges) - 1) / MAX_STEPS)
    if width > 1:
        edges = np.append(edges[:-1][::width], edges[-1])
    if len(clean) * len(edges) * len(channels) > _MAX_CELLS:
        raise UserError(f"{len(clean)} clean runs of {len(edges)} steps and {len(channels)} channels are too many")
    return StepGrid(edges)


@dataclass(frozen=True)
class ChannelCadence:
    """The steps at which clean runs log a channel.

    Attributes:
      common: the steps at which all of them log it, int64.
      length: the median number of values of a run.
      spacing: the median over runs of the mean steps between two values.
    """

    common: np.ndarray
    length: float
    spacing: float

    @classmethod
    def of_runs(cls, clean: Sequence[NamedAttempt], name: str) -> ChannelCadence:
        """Returns the cadence of a channel that all of the clean runs have."""
        run_steps = [run.attempt.series[name].steps for run in clean]
        common = run_steps[0]
        for steps in run_steps[1:]:
            if not np.array_equal(common, steps):
                common = common[np.isin(common, steps)]
        length, spacing = (float(np.median([of(steps) for steps in run_steps])) for of in (len, _mean_spacing))
        return cls(common, length, spacing)

    def compare(self, series: Series) -> np.ndarray | str | None:
        """Compares the steps at which a new run logs the channel to those of the clean runs.

        Returns:
          None if it logs as the clean runs do, as far as the run has come; the steps to compare at, int64, if it logs
          at some of their steps only; otherwise the difference as a text.
        """
        common = self.common
        if np.array_equal(series.steps, common):
            return None
        inside = common[(common >= series.steps[0]) & (common <= series.steps[-1])]
        if len(common) >= MIN_SHARED * self.length:
            if np.isin(series.steps, common).mean() >= MIN_SHARED:
                return None if np.isin(inside, series.steps).mean() >= MIN_SHARED else series.steps
            new_steps, clean_steps = (", ".join(map(str, steps[:2].tolist())) for steps in (series.steps, common))
            return f"at other steps ({new_steps}, ...) than in the clean runs ({clean_steps}, ...)"
        spacing = _mean_spacing(series.steps)
        if spacing and self.spacing and not 0.5 < spacing / self.spacing < 2:
            return f"every {spacing:.3g} steps, in the clean runs every {self.spacing:.3g}"
        return None


def _mean_spacing(steps: np.ndarray) -> float:
    return float(np.mean(np.diff(steps))) if len(steps) > 1 else 0.0


@dataclass(frozen=True)
class RunGroup:
    """Attempts that are scored by the same channels, each channel at the same steps.

    Attributes:
      runs: the attempts.
      channel_steps: the steps at which each channel is compared; None for all steps.
    """

    runs: list[NamedAttempt]
    channel_steps: dict[str, np.ndarray | None]


def group_runs(
    new: Sequence[NamedAttempt], clean: Sequence[NamedAttempt], channels: Sequence[str], notes: list[str]
) -> list[RunGroup]:
    """Groups new runs by the channels that they have; adds notes on channels that are not read of some runs."""
    groups: dict[tuple[object, ...], RunGroup] = {}
    unread: dict[str, list[str]] = {}
    clean_end = max(int(run.attempt.steps[-1]) for run in clean)
    cadences = {name: ChannelCadence.of_runs(clean, name) for name in channels}
    for run in new:
        channel_steps: dict[str, np.ndarray | None] = {}
        for name in channels:
            series = run.series(name)
            if series is None or not len(series.steps):
                unread.setdefault(f"not read, missing: {name}", []).append(run.name)
                continue
            steps = cadences[name].compare(series)
            if isinstance(steps, str):
                unread.setdefault(f"not read, logged {steps}: {name}", []).append(run.name)
            else:
                channel_steps[name] = steps
        key = tuple((name, None if steps is None else steps.tobytes()) for name, steps in channel_steps.items())
        groups.setdefault(key, RunGroup([], channel_steps)).runs.append(run)
        if (end := int(run.attempt.steps[-1])) > clean_end:
            notes.append(f"{run.name}: ends at step {end}, the clean runs at {clean_end}: scored up to there")
    notes += [f"{file_names(names)}: {note}" for note, names in unread.items()]
    for group in groups.values():
        if not group.channel_steps:
            names = file_names([run.name for run in group.runs])
            available = join_names(group.runs[0].attempt.series)
            notes.append(f"{names}: no channel in common with the clean runs; has {available}")
    return [group for group in groups.values() if group.channel_steps]


def restrict_to_steps(series: Series | None, steps: np.ndarray | None) -> Series | None:
    """Returns the part of a channel's series that was logged at some steps, an array of step numbers.

    Steps at which the channel was not logged are ignored. The series is returned as it is if `steps` is None, and None
    if there is no series.
    """
    if series is None or steps is None:
        return series
    kept = np.isin(series.steps, steps)
    return Series(series.steps[kept], series.values[kept])
