"""Bisection of the seeds' thresholds: which lanes a margin search trains next, and what trained lanes say of margins.

All functions are pure, so a search that was stopped continues from the probes it has stored.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxaudit.analysis.statistics import ranks
from jaxaudit.runs.margins.directions import Direction

DECADE = math.log(10.0)

CONTROL = -1
"""The index that `Probe.direction` has for undisturbed lanes."""

END_TOLERANCE = 0.1
"""The tolerance of an end of the median's interval, as a share of its distance from the median."""

Outcomes = Mapping[float, bool]
"""Whether a seed collapsed, by the log scales at which it was trained."""


class Bracket(NamedTuple):
    """An interval of log scales that contains a threshold: above `low`, at or below `high`; infinite if unbounded."""

    low: float
    high: float

    @property
    def width(self) -> float:
        """The length of the interval; zero where both ends are the same infinity."""
        return 0.0 if self.low == self.high else self.high - self.low

    @property
    def middle(self) -> float:
        """The middle of the interval; infinite where an end is."""
        return self.low if self.low == self.high else (self.low + self.high) / 2

    @property
    def is_bounded(self) -> bool:
        """Whether both ends of the bracket are finite."""
        return math.isfinite(self.low) and math.isfinite(self.high)


BELOW_ALL = Bracket(-math.inf, -math.inf)
"""The bracket of a seed that collapses undisturbed."""


def fit_bracket(outcomes: Outcomes, floor: float = -math.inf) -> Bracket:
    """Returns the neighbouring log scales around the threshold that contradicts the fewest outcomes, the mildest of
    several.

    Args:
      outcomes: the outcomes of one seed.
      floor: the lower end where the seed collapsed at all log scales.
    """
    scales = sorted(outcomes)
    collapsed = np.array([outcomes[scale] for scale in scales], bool)
    contradicted = np.r_[0, collapsed.cumsum()] + np.r_[(~collapsed)[::-1].cumsum()[::-1], 0]
    cut = int(contradicted.argmin())
    return Bracket(scales[cut - 1] if cut else floor, scales[cut] if cut < len(scales) else math.inf)


def outer_bracket(outcomes: Outcomes, floor: float = -math.inf) -> Bracket:
    """Returns the bracket from below the mildest collapse to above the harshest survival.

    It is `fit_bracket` unless the outcomes contradict each other. The arguments are the same.
    """
    scales = sorted(outcomes)
    first = next((i for i, scale in enumerate(scales) if outcomes[scale]), len(scales))
    last = next((i for i in reversed(range(len(scales))) if not outcomes[scales[i]]), -1)
    low = scales[first - 1] if first else floor
    return Bracket(low, scales[last + 1] if last + 1 < len(scales) else math.inf)


def is_contradictory(outcomes: Outcomes) -> bool:
    """Returns whether the seed survived at a harsher log scale than one at which it collapsed."""
    collapsed = [outcomes[scale] for scale in sorted(outcomes)]
    return collapsed != sorted(collapsed)


def proposals(bracket: Bracket, count: int, direction: Direction) -> list[float]:
    """Returns at most `count` log scales to try inside a bracket.

    They are evenly spaced, or one decade apart where the bracket is unbounded on one side.
    """
    steps = range(1, count + 1)
    if bracket.is_bounded:
        scales = [bracket.low + bracket.width * i / (count + 1) for i in steps]
    elif math.isfinite(bracket.low):
        scales = [min(bracket.low + DECADE * i, direction.high) for i in steps]
    elif math.isfinite(bracket.high):
        scales = [max(bracket.high - DECADE * i, direction.low) for i in steps]
    else:
        scales = []
    return sorted({scale for scale in map(direction.snap, scales) if bracket.low < scale < bracket.high})


class MedianEstimate(NamedTuple):
    """The median threshold with its interval, as log scales; -inf or inf where it is beyond what was tried."""

    value: float
    low: float
    high: float
    coverage: float


def median_threshold(
    brackets: Sequence[Bracket], outer_brackets: Sequence[Bracket], level: float = 0.95
) -> MedianEstimate:
    """Returns the median of the thresholds in brackets, with an interval between order statistics of the outer ends.

    The median is NaN where half of the thresholds are -inf and half inf, or there are none. The interval is NaN for a
    single threshold.
    """
    n = len(brackets)
    if not n:
        return MedianEstimate(math.nan, math.nan, math.nan, 0.0)
    middles = sorted(bracket.middle for bracket in brackets)
    with np.errstate(invalid="ignore"):
        value = float(np.mean([middles[(n - 1) // 2], middles[n // 2]]))
    low_rank, high_rank, coverage = ranks(n, level)
    if n < 2:
        return MedianEstimate(value, math.nan, math.nan, coverage)
    low = sorted(bracket.low for bracket in outer_brackets)[low_rank - 1]
    high = sorted(bracket.high for bracket in outer_brackets)[high_rank - 1]
    return MedianEstimate(value, low, high, coverage)


def affects_median(brackets: Sequence[Bracket], tolerance: float, level: float = 0.95) -> list[bool]:
    """Returns, for each bracket, whether narrowing it can still change the median or its confidence interval.

    The q-th smallest threshold lies between the q-th smallest lower and the q-th smallest upper end. A bracket matters
    if it overlaps such a span of the median or of an end of the interval, and that span is wider than the tolerance.
    An end that is far from the median has a larger tolerance (`END_TOLERANCE`).
    """
    n = len(brackets)
    low_rank, high_rank, _ = ranks(n, level)
    lows, highs = sorted(b.low for b in brackets), sorted(b.high for b in brackets)
    low, middle, next_middle, high = (
        Bracket(lows[rank - 1], highs[rank - 1]) for rank in (low_rank, (n + 1) // 2, n // 2 + 1, high_rank)
    )
    distances = [(middle, 0.0), (next_middle, 0.0), (low, middle.low - low.high), (high, high.low - next_middle.high)]
    wide = [span for span, distance in distances if span.width > max(tolerance, END_TOLERANCE * distance)]
    return [any(b.low < span.high and span.low < b.high for span in wide) for b in brackets]


def searchable_width(bracket: Bracket, direction: Direction, tolerance: float) -> tuple[float, int]:
    """Returns a bracket's width within the range that can be tried, and the largest useful number of `proposals`."""
    width = Bracket(max(bracket.low, direction.low), min(bracket.high, direction.high)).width
    count = bracket.width / tolerance - 1 if bracket.is_bounded else width / DECADE
    return width, max(1, math.ceil(count - 1e-9))


def allocate_lanes(widths: Sequence[tuple[float, int]], lanes: int) -> list[int]:
    """Returns how many of the `lanes` each bracket gets: one, and more where the remaining pieces are widest.

    Args:
      widths: `searchable_width` of each bracket.
      lanes: the number of lanes to allocate, at least one for each bracket.
    """
    counts = [1] * len(widths)
    widest_pieces = [(-width / 2, i) for i, (width, most) in enumerate(widths) if most > 1]
    heapq.heapify(widest_pieces)
    for _ in range(lanes - len(counts)):
        if not widest_pieces:
            break
        _, i = heapq.heappop(widest_pieces)
        counts[i] += 1
        width, most = widths[i]
        if counts[i] < most:
            heapq.heappush(widest_pieces, (-width / (counts[i] + 1), i))
    return counts


@dataclass
class Probe:
    """One lane that is trained from its onset: a seed at one log scale of one direction.

    Attributes:
      round: the round of the search, from 1; 0 for lanes that the searched run had trained already.
      direction: the index of the direction, or CONTROL.
      onset: the step at which the lane begins.
      seed: the index of the seed.
      log_scale: the log scale of the magnitude in the direction; -inf for controls.
      purpose: "control"; "scan" of the magnitudes that were given; "bracket"; "check" of the margin; or "run".
      collapse_time: in steps; inf for never, NaN if it cannot be known, None before the lane is trained.
    """

    round: int
    direction: int
    onset: int
    seed: int
    log_scale: float
    purpose: str
    collapse_time: float | None = None


@dataclass(frozen=True)
class SearchConfig:
    """The directions of a search, and how they are searched.

    Attributes:
      directions: where margins are searched.
      limits: for each onset, the step before which a collapse counts.
      tolerance: the relative tolerance of a threshold.
      level: the confidence level of the intervals.
      lanes: the number of lanes that are trained side by side.
    """

    directions: tuple[Direction, ...]
    limits: dict[int, float]
    tolerance: float
    level: float
    lanes: int

    @property
    def log_tolerance(self) -> float:
        """The tolerance of a threshold's log scale."""
        return math.log1p(self.tolerance)


@dataclass(frozen=True)
class MarginEstimate:
    """The margin in one direction, estimated from trained probes.

    Attributes:
      index, direction: the direction, and its index in the search.
      seeds: the indices of the seeds whose control has a known outcome.
      outcomes: for each of `seeds`, whether it collapsed, by log scale; checks are included.
      brackets: for each of `seeds`, the bracket of its threshold; checks are not included.
      n_collapsed_undisturbed: how many of `seeds` collapse undisturbed.
      bisected: the median of `brackets`, at which the search checks all seeds.
      median: the median threshold with all outcomes, checks included.
    """

    index: int
    direction: Direction
    seeds: tuple[int, ...]
    outcomes: list[dict[float, bool]]
    brackets: list[Bracket]
    n_collapsed_undisturbed: int
    bisected: MedianEstimate
    median: MedianEstimate

    @property
    def n_contradictory(self) -> int:
        """The number of seeds that survived at a harsher log scale than one at which they collapsed."""
        return sum(map(is_contradictory, self.outcomes))

    @property
    def half_collapse_undisturbed(self) -> bool:
        """Whether at least half of the seeds collapse undisturbed, so that there is no margin."""
        return self.n_collapsed_undisturbed * 2 >= len(self.seeds)


def estimate_margins(config: SearchConfig, probes: Iterable[Probe]) -> list[MarginEstimate]:
    """Returns the margin estimate of every direction, from the probes that were trained."""
    controls: dict[tuple[int, int], bool] = {}
    bisected: defaultdict[tuple[int, int], dict[float, bool]] = defaultdict(dict)
    checks: defaultdict[tuple[int, int], dict[float, bool]] = defaultdict(dict)
    for probe in probes:
        if probe.collapse_time is None or math.isnan(probe.collapse_time):
            continue
        collapsed = probe.collapse_time < config.limits[probe.onset]
        if probe.direction == CONTROL:
            controls[probe.onset, probe.seed] = collapsed
        else:
            outcomes = checks if probe.purpose == "check" else bisected
            outcomes[probe.direction, probe.seed][probe.log_scale] = collapsed
    estimates = []
    for index, direction in enumerate(config.directions):
        seeds = tuple(seed for seed in direction.seeds if (direction.onset, seed) in controls)
        undisturbed = [controls[direction.onset, seed] for seed in seeds]
        without_checks = [bisected[index, seed] for seed in seeds]
        with_checks = [bisected[index, seed] | checks[index, seed] for seed in seeds]
        brackets = _brackets(fit_bracket, direction, undisturbed, without_checks)
        all_brackets = _brackets(fit_bracket, direction, undisturbed, with_checks)
        outer_brackets = _brackets(outer_bracket, direction, undisturbed, with_checks)
        # All seeds are checked at the median of `brackets`, so checks must not move it.
        median_bisected = median_threshold(brackets, brackets, config.level)
        median = median_threshold(all_brackets, outer_brackets, config.level)
        estimates.append(
            MarginEstimate(index, direction, seeds, with_checks, brackets, sum(undisturbed), median_bisected, median)
        )
    return estimates


def _brackets(
    bracket_of: Callable[[Outcomes, float], Bracket],
    direction: Direction,
    collapsed_undisturbed: Sequence[bool],
    outcomes: Sequence[Outcomes],
) -> list[Bracket]:
    pairs = zip(collapsed_undisturbed, outcomes, strict=True)
    return [BELOW_ALL if collapsed else bracket_of(seed, direction.floor) for collapsed, seed in pairs]


def next_round(config: SearchConfig, onset: int, probes: Sequence[Probe]) -> list[Probe]:
    """Returns the lanes to train next at one onset; none when the search there is complete.

    The first round trains the controls and the magnitudes that were given. The next ones narrow brackets, each divided
    into as many pieces as there are lanes for. At last every seed is trained at the margin itself.
    """
    at_onset = {index: direction for index, direction in enumerate(config.directions) if direction.onset == onset}
    probed = {(p.direction, p.seed, p.log_scale) for p in probes if p.onset == onset}
    number = 1 + max((p.round for p in probes), default=0)
    seeds = sorted({seed for direction in at_onset.values() for seed in direction.seeds})
    first = [Probe(number, CONTROL, onset, seed, -math.inf, "control") for seed in seeds]
    for index, direction in at_onset.items():
        pairs = [(scale, seed) for scale in direction.initial for seed in direction.seeds]
        first += [Probe(number, index, onset, seed, scale, "scan") for scale, seed in pairs]
    first = [p for p in first if (p.direction, p.seed, p.log_scale) not in probed]
    if first:
        return first
    estimates = [estimate for estimate in estimate_margins(config, probes) if estimate.index in at_onset]
    return _bracket_probes(config, estimates, number) or _check_probes(config, estimates, probes, number)


def _bracket_probes(config: SearchConfig, estimates: list[MarginEstimate], number: int) -> list[Probe]:
    tolerance = config.log_tolerance
    open_brackets = []
    for estimate in estimates:
        if not estimate.seeds:
            continue
        affects = affects_median(estimate.brackets, tolerance, config.level)
        for seed, bracket, matters in zip(estimate.seeds, estimate.brackets, affects, strict=True):
            if matters and bracket.width > tolerance and proposals(bracket, 1, estimate.direction):
                open_brackets.append((estimate, seed, bracket))
    lanes = -(-len(open_brackets) // config.lanes) * config.lanes
    widths = [searchable_width(bracket, estimate.direction, tolerance) for estimate, _, bracket in open_brackets]
    return [
        Probe(number, estimate.index, estimate.direction.onset, seed, scale, "bracket")
        for (estimate, seed, bracket), count in zip(open_brackets, allocate_lanes(widths, lanes), strict=True)
        for scale in proposals(bracket, count, estimate.direction)
    ]


def _check_probes(
    config: SearchConfig, estimates: list[MarginEstimate], probes: Sequence[Probe], number: int
) -> list[Probe]:
    new = []
    for estimate in estimates:
        index, direction = estimate.index, estimate.direction
        margin = direction.snap(estimate.bisected.value)
        if not math.isfinite(margin):
            continue
        checked = [p.log_scale for p in probes if p.direction == index and p.purpose == "check"]
        if any(abs(margin - scale) < config.log_tolerance / 2 for scale in checked):
            continue
        pairs = zip(estimate.seeds, estimate.outcomes, strict=True)
        untrained = [seed for seed, outcomes in pairs if margin not in outcomes]
        new += [Probe(number, index, direction.onset, seed, margin, "check") for seed in untrained]
    return new
