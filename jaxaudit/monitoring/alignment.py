"""Runs of logs on the steps of clean ones: which channels are compared, at which steps, and what is certain already.

Everything here that is learned of runs is learned of clean ones; of a new run only its own names and steps matter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxaudit.logs.log import Attempt, Series, describe_missing, join_names, shorten
from jaxaudit.monitoring.channels import ROUNDING
from jaxaudit.runtime.errors import UserError

MOST_STEPS = 1000
"""Of a grid; of longer ones, neighbouring steps are averaged."""

SHARED = 0.9
"""Share of a channel's steps that runs must have in common to be compared step by step."""

LENGTH = 0.9
"""Share of the median clean run's length under which a clean run is left out, as one that was cut short."""

USUAL = 3
"""Times its usual spacing for which a channel may have no value before it is called silent."""

COUNTER = 0.01
"""Relative, by which runs may differ in what counts the same."""

_CLOCK = re.compile(
    r"(?:^|[_/ .-])(?:time|times|timing|timestamp|clock|elapsed|seconds|secs|sec|wall|walltime|runtime|duration|dt|"
    r"date|epoch|epochs|steps?|iterations?|updates|episodes|frames|tokens|samples|count|counter|total|percentage)"
    r"(?:$|[_/ .-])",
    re.IGNORECASE,
)
"""In names of what grows with the run, whatever becomes of it."""

_SPEED = re.compile(
    r"(?:^|[_/ .-])(?:fps|sps|mfu|tflops|flops|throughput|runtime|elapsed|walltime|dt|it/s|timing_s|time[_ ]per.*|"
    r"(?:tok|tokens?|samples?|steps?|frames|iterations?)[ _]?(?:/|per)[ _]?s(?:ec(?:ond)?)?|"
    r"(?:step|iteration|iter|batch|epoch|data|forward|backward|learning|env|rollout|update)[_ ]?time)(?:$|[_/ .-])",
    re.IGNORECASE,
)
"""In names of how fast a machine is."""

_MOST_CELLS = 2**29

KINDS = ("NaN", "infinite")


@dataclass(frozen=True)
class Named:
    """An attempt of a run, with what messages call it."""

    name: str
    attempt: Attempt

    def series(self, channel: str) -> Series | None:
        """A channel's values, those of a column of texts as NaN; None where it has none."""
        return self.attempt.series.get(channel) or self.attempt.texts.get(channel)


@dataclass(frozen=True)
class StepGrid:
    """Where a channel is compared.

    Attributes:
      edges: int64 `[T + 1]`: the t-th value of a run is the mean of its values at steps above edges[t], up to
        edges[t + 1].
    """

    edges: np.ndarray

    @property
    def steps(self) -> np.ndarray:
        """The last step of each interval, int64 `[T]`."""
        return self.edges[1:]

    def of(self, series: Series | None) -> np.ndarray:
        """A run's values `[T]`: means of the finite ones, NaN where there is none."""
        count = len(self.edges) - 1
        if series is None:
            return np.full(count, math.nan)
        finite = np.isfinite(series.values)
        place = np.searchsorted(self.edges, series.steps[finite]) - 1
        inside = (place >= 0) & (place < count)
        place, values = place[inside], series.values[finite][inside]
        number = np.bincount(place, minlength=count)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            return np.where(number > 0, np.bincount(place, values, minlength=count) / number, math.nan)


def long_enough(clean: Sequence[Named]) -> tuple[list[Named], list[str]]:
    """The clean runs that are not cut short, and a note on those that are."""
    ends = [int(run.attempt.steps[-1]) - int(run.attempt.steps[0]) for run in clean]
    least = LENGTH * float(np.median(ends))
    kept = [run for run, end in zip(clean, ends, strict=True) if end >= least]
    short = [run.name for run, end in zip(clean, ends, strict=True) if end < least]
    if not short:
        return kept, []
    return kept, [f"{in_files(short)}: left out, as under {LENGTH:.0%} of the clean runs' median length"]


def in_files(names: Sequence[str]) -> str:
    """Names of files, for the beginning of a note."""
    plain = [name if name.isprintable() else ascii(name)[1:-1] for name in names]
    return ", ".join(plain) if len(names) <= 3 else f"in {len(names)} files ({', '.join(plain[:2])}, ...)"


def channels_of(clean: Sequence[Named], asked: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """The channels of clean runs that tell how a run goes, and notes on those that do not.

    Raises:
      UserError: one that is asked for is not in all of them, or none is.
    """
    every = dict.fromkeys(name for run in clean for name in run.attempt.series)
    common = [name for name in every if all(name in run.attempt.series for run in clean)]
    if asked:
        for name in asked:
            if name not in common:
                without = next(run for run in clean if name not in run.attempt.series)
                raise UserError(f"{without.name} {describe_missing('channel', name, without.attempt.series)}")
        return list(dict.fromkeys(asked)), []
    if not common:
        each = "; ".join(f"{run.name} has {join_names(run.attempt.series)}" for run in _different(clean))
        raise UserError(f"no channel is in all clean runs: {each}")
    notes = []
    partly = [name for name in every if name not in common]
    if partly:
        notes.append(f"not read, as not in all clean runs: {join_names(partly)}")
    kept = common
    for reason, is_so in _REASONS:
        found = [name for name in kept if is_so(name, [run.attempt.series[name] for run in clean])]
        if found and len(found) < len(kept):
            notes.append(f"left out, {reason}: {join_names(found)}; --channels can name them")
            kept = [name for name in kept if name not in found]
    return kept, notes


def _different(runs: Sequence[Named]) -> list[Named]:
    """One run for each set of channels, at most three."""
    found: dict[frozenset[str], Named] = {}
    for run in runs:
        found.setdefault(frozenset(run.attempt.series), run)
    return list(found.values())[:3]


def _constant(name: str, each: Sequence[Series]) -> bool:
    return all((one.values == one.values[0]).all() for one in each) and any(len(one.values) > 1 for one in each)


def _rises(name: str, each: Sequence[Series]) -> bool:
    """Whether a channel rises at every step, and is named as a clock or counter or is the same in all runs."""
    finite = [one.values[np.isfinite(one.values)] for one in each]
    if not all(len(values) > 2 and bool((np.diff(values) > 0).all()) for values in finite):
        return False
    return bool(_CLOCK.search(name)) or (len(each) > 1 and _scheduled(name, each, COUNTER))


def _of_the_machine(name: str, each: Sequence[Series]) -> bool:
    return bool(_SPEED.search(name))


def _scheduled(name: str, each: Sequence[Series], apart: float = ROUNDING) -> bool:
    """Whether runs have the same values wherever they have one at the same step, and those vary."""
    if len(each) < 2:
        return False
    first, second = each[0], each[1]
    if np.array_equal(first.steps, second.steps) and not np.allclose(
        first.values, second.values, rtol=2 * apart, atol=0.0, equal_nan=True
    ):
        return False
    known: dict[int, float] = {}
    shared = 0
    for one in each:
        for step, value in zip(one.steps.tolist(), one.values.tolist(), strict=True):
            before = known.setdefault(step, value)
            if before is not value:
                shared += 1
                if not abs(before - value) <= apart * max(abs(before), abs(value)):
                    return False
    return shared > 0


_REASONS = (
    ("as the same at every step of each run", _constant),
    ("as rising at every step, as clocks and counters do", _rises),
    ("as how fast the machine is", _of_the_machine),
    ("as the same function of the step in all runs, as a schedule is", _scheduled),
)


def moved(new: Sequence[Named], clean: Sequence[Named]) -> list[str]:
    """Notes on channels that are one number in all clean runs, and another one in a new run: no score can say so."""
    notes = []
    for name in dict.fromkeys(name for run in clean for name in run.attempt.series):
        values = [run.attempt.series[name].values for run in clean if name in run.attempt.series]
        usual = values[0][0]
        if len(values) < len(clean) or not all((one == usual).all() for one in values):
            continue
        for run in new:
            one = run.series(name)
            if one is None:
                continue
            other = np.flatnonzero(one.values != usual)
            if len(other):
                step, value = one.steps[other[0]], one.values[other[0]]
                notes.append(
                    f"{run.name}: {shorten(name)} is {value:g} at step {step}, and {usual:g} in every clean run"
                )
    return notes


def excepted(fitted: Sequence[Named], channels: Sequence[str]) -> dict[str, frozenset[str]]:
    """Returns, by channel, the kinds of non-finite values that clean runs have too, and which therefore say nothing."""
    found = {}
    for name in channels:
        values = np.concatenate([one.values for run in fitted if (one := run.series(name)) is not None])
        kinds = {KINDS[0]} if np.isnan(values).any() else set()
        kinds |= {KINDS[1]} if np.isinf(values).any() else set()
        if kinds:
            found[name] = frozenset(kinds)
    return found


def first_not_finite(
    run: Named, channels: Sequence[str], known: Mapping[str, frozenset[str]]
) -> tuple[int, dict[str, str]] | None:
    """The first step at which a run has a value that is not finite, and of which kind it is in which channels.

    Args:
      run: an attempt.
      channels: to look at.
      known: kinds that say nothing, as `excepted` gives them.
    """
    first: tuple[int, dict[str, str]] | None = None
    for name in channels:
        one = run.series(name)
        if one is None:
            continue
        for kind, is_so in zip(KINDS, (np.isnan(one.values), np.isinf(one.values)), strict=True):
            if kind in known.get(name, ()) or not is_so.any():
                continue
            step = int(one.steps[np.argmax(is_so)])
            if first is None or step < first[0]:
                first = (step, {})
            if step == first[0]:
                first[1][name] = kind
    return first


def longest_silences(clean: Sequence[Named], channels: Sequence[str]) -> dict[str, int]:
    """The most steps that a clean run has been without a value of each channel."""
    return {
        name: max(_longest_silence(run.attempt, name) for run in clean if name in run.attempt.series)
        for name in channels
    }


def first_silent(run: Named, longest: Mapping[str, int], channels: Sequence[str]) -> tuple[int, list[str]] | None:
    """The first step at which a channel has been silent for longer than in any clean run, while others go on.

    Silence is counted in steps from a channel's latest value on; one that is logged more seldom than in the clean runs
    throughout is not silent. `longest` is that of the clean runs.
    """
    every = run.attempt.steps
    found: dict[int, list[str]] = {}
    for name in channels:
        one = run.series(name)
        if one is None or not len(one.steps):
            continue
        own = float(np.median(np.diff(one.steps))) if len(one.steps) > 1 else 0.0
        allowed = max(longest[name], int(USUAL * own))
        ends = np.append(one.steps[1:], every[-1] + 1)
        for place in np.flatnonzero(ends - one.steps > allowed).tolist():
            others = every[(every > one.steps[place] + allowed) & (every < ends[place])]
            if len(others):
                found.setdefault(int(others[0]), []).append(name)
                break
    return min(found.items()) if found else None


def _longest_silence(attempt: Attempt, name: str) -> int:
    """The most steps of an attempt without a value of a channel."""
    every = attempt.steps
    return int(np.diff(np.concatenate([every[:1], attempt.series[name].steps, every[-1:]])).max())


def grid_of(clean: Sequence[Named], channels: Sequence[str]) -> StepGrid:
    """The steps that clean runs have in common; where they have too few, as many equal spans as a run has values."""
    each = [
        run.attempt.steps if len(channels) == len(run.attempt.series) else _steps_of(run, channels) for run in clean
    ]
    every, counts = np.unique(np.concatenate(each), return_counts=True)
    shared = every[counts >= max(1, len(clean) / 2)]
    usual = int(np.median([len(steps) for steps in each]))
    if len(shared) >= SHARED * usual:
        edges = np.concatenate([[shared[0] - 1], shared])
    else:
        edges = np.unique(np.linspace(every[0] - 1, every[-1], usual + 1).round().astype(np.int64))
    width = -(-(len(edges) - 1) // MOST_STEPS)
    if width > 1:
        edges = np.append(edges[:-1][::width], edges[-1])
    if len(clean) * len(edges) * len(channels) > _MOST_CELLS:
        raise UserError(f"{len(clean)} clean runs of {len(edges)} steps and {len(channels)} channels are too many")
    return StepGrid(edges)


def _steps_of(run: Named, channels: Sequence[str]) -> np.ndarray:
    return Attempt(run.attempt.begins, {name: run.attempt.series[name] for name in channels}).steps


@dataclass(frozen=True)
class ChannelCadence:
    """When clean runs log a channel.

    Attributes:
      common: the steps at which all of them do, int64.
      length: how often one does, the median.
      spacing: steps between two values, the median over runs.
    """

    common: np.ndarray
    length: float
    spacing: float

    @classmethod
    def of(cls, clean: Sequence[Named], name: str) -> ChannelCadence:
        """That of clean runs, all of which have the channel."""
        theirs = [each.attempt.series[name].steps for each in clean]
        common = theirs[0]
        for steps in theirs[1:]:
            if not np.array_equal(common, steps):
                common = common[np.isin(common, steps)]
        length, spacing = (float(np.median([of(steps) for steps in theirs])) for of in (len, _spacing))
        return cls(common, length, spacing)

    def kept_by(self, one: Series) -> np.ndarray | str | None:
        """How a new run logs the channel: as the clean runs do, at some of their steps only, or otherwise.

        Returns:
          None for as they do, as far as the run has come; the steps to compare it at, int64; or in words what is
          otherwise.
        """
        common = self.common
        if np.array_equal(one.steps, common):
            return None
        inside = common[(common >= one.steps[0]) & (common <= one.steps[-1])]
        if len(common) >= SHARED * self.length:
            if np.isin(one.steps, common).mean() >= SHARED:
                return None if np.isin(inside, one.steps).mean() >= SHARED else one.steps
            mine, theirs = (", ".join(map(str, steps[:2].tolist())) for steps in (one.steps, common))
            return f"at other steps ({mine}, ...) than in the clean runs ({theirs}, ...)"
        own = _spacing(one.steps)
        if own and self.spacing and not 0.5 < own / self.spacing < 2:
            return f"every {own:.3g} steps, in the clean runs every {self.spacing:.3g}"
        return None


def _spacing(steps: np.ndarray) -> float:
    return float(np.mean(np.diff(steps))) if len(steps) > 1 else 0.0


def at_steps(series: Series | None, steps: np.ndarray | None) -> Series | None:
    """A channel at some of its steps; at all where these are None."""
    if series is None or steps is None:
        return series
    kept = np.isin(series.steps, steps)
    return Series(series.steps[kept], series.values[kept])
