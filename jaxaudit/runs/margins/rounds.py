"""What a search for margins tries next, from what it has seen: a pure function, so that a stopped search goes on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from jaxaudit.runs.margins.directions import (
    ALWAYS,
    Bracket,
    Direction,
    Median,
    bracket,
    contradictory,
    deal,
    envelope,
    is_open,
    median,
    needed,
    proposals,
    room,
)

CONTROL = -1
"""The ray of undisturbed lanes."""


@dataclass
class Probe:
    """One lane trained from its onset: a seed at one u of one ray.

    Attributes:
      round: from 1; 0 is what the run that is searched had trained already.
      ray: position of the ray, or CONTROL.
      onset: step.
      seed: position of the seed.
      u: on the ray's axis; -inf for controls.
      purpose: "control"; "scan" of the magnitudes asked for; "bracket"; "check" of the margin; or "run".
      time: its collapse time in steps, inf for never, NaN where it cannot be known; None before it was trained.
    """

    round: int
    ray: int
    onset: int
    seed: int
    u: float
    purpose: str
    time: float | None = None


Make = Callable[[int, int, float, str], Probe]
"""Makes a probe of the round at hand, of ray, seed, u and purpose."""


@dataclass(frozen=True)
class SearchConfig:
    """How a search goes.

    Attributes:
      rays: what is searched.
      limits: for each onset, the step before which a collapse counts.
      tolerance: relative, of a threshold's bracket.
      level: coverage of the intervals.
      lanes: lanes side by side.
    """

    rays: tuple[Direction, ...]
    limits: dict[int, float]
    tolerance: float
    level: float
    lanes: int

    @property
    def step(self) -> float:
        return math.log1p(self.tolerance)


@dataclass(frozen=True)
class MarginEstimate:
    """What is known of one ray.

    Attributes:
      ray: its position.
      seeds: the seeds with a known control, positions.
      unknown: how many have none, so that nothing can be said of them.
      outcomes: for each of `seeds`, u -> collapsed.
      brackets: for each of `seeds`, without the checks; see `jaxaudit.runs.margins.directions`.
      fallen: how many of `seeds` collapse undisturbed.
      aim: the median of the brackets that cutting led to.
      middle: the median of all brackets, checks included.
    """

    ray: int
    seeds: tuple[int, ...]
    unknown: int
    outcomes: tuple[dict[float, bool], ...]
    brackets: tuple[Bracket, ...]
    fallen: int
    aim: Median
    middle: Median

    @property
    def contradictory(self) -> int:
        """How many seeds survived a harsher u than one they collapsed at."""
        return sum(contradictory(seen) for seen in self.outcomes)


def found(plan: SearchConfig, probes: Iterable[Probe]) -> list[MarginEstimate]:
    """What trained probes say of every ray."""
    controls: dict[tuple[int, int], bool | None] = {}
    seen: dict[tuple[int, int], dict[float, bool]] = {}
    checks: dict[tuple[int, int], dict[float, bool]] = {}
    for probe in probes:
        if probe.time is None:
            continue
        fell = None if math.isnan(probe.time) else probe.time < plan.limits[probe.onset]
        if probe.ray == CONTROL:
            controls[probe.onset, probe.seed] = fell
        elif fell is not None:
            kept = checks if probe.purpose == "check" else seen
            kept.setdefault((probe.ray, probe.seed), {})[probe.u] = fell
    return [_one(plan, number, ray, controls, seen, checks) for number, ray in enumerate(plan.rays)]


def _one(plan: SearchConfig, number: int, ray: Direction, controls: dict, seen: dict, checks: dict) -> MarginEstimate:
    known = tuple(s for s in ray.seeds if controls.get((ray.onset, s)) is not None)
    fallen = {s for s in known if controls[ray.onset, s]}
    cut = {s: seen.get((number, s), {}) for s in known}
    every = {s: {**cut[s], **checks.get((number, s), {})} for s in known}

    def each(how: Callable[[dict, float], Bracket], outcomes: dict[int, dict]) -> tuple[Bracket, ...]:
        return tuple(ALWAYS if s in fallen else how(outcomes[s], ray.range.floor) for s in known)

    brackets = each(bracket, cut)
    # Checks are made at the aim, so they must not move it; what is reported counts them.
    aim = median(brackets, brackets, plan.level)
    middle = median(each(bracket, every), each(envelope, every), plan.level)
    unknown = len(ray.seeds) - len(known)
    return MarginEstimate(number, known, unknown, tuple(every.values()), brackets, len(fallen), aim, middle)


def next_round(plan: SearchConfig, onset: int, probes: Sequence[Probe]) -> list[Probe]:
    """What to train next at one onset; empty when all there is known.

    First the controls and the magnitudes asked for; then brackets are cut, each into as many pieces as there are
    lanes for; last, every seed is tried at the margin itself.
    """
    here = [number for number, ray in enumerate(plan.rays) if ray.onset == onset]
    tried = {(p.ray, p.seed, p.u) for p in probes if p.onset == onset}
    number = 1 + max((p.round for p in probes), default=0)

    def make(ray: int, seed: int, u: float, purpose: str) -> Probe:
        return Probe(number, ray, onset, seed, u, purpose)

    seeds = sorted({s for ray in here for s in plan.rays[ray].seeds})
    first = [make(CONTROL, s, -math.inf, "control") for s in seeds if (CONTROL, s, -math.inf) not in tried]
    for ray in here:
        wanted = [(s, u) for u in plan.rays[ray].points for s in plan.rays[ray].seeds]
        first += [make(ray, s, u, "scan") for s, u in wanted if (ray, s, u) not in tried]
    if first:
        return first
    states = [f for f in found(plan, probes) if f.ray in here]
    return _cuts(plan, states, make) or _checks(plan, states, probes, make)


def _cuts(plan: SearchConfig, states: list[MarginEstimate], make: Make) -> list[Probe]:
    open_now = [
        (f.ray, s, one)
        for f in states
        if f.seeds
        for s, one, wanted in zip(f.seeds, f.brackets, needed(f.brackets, plan.step, plan.level), strict=True)
        if wanted and is_open(one, plan.rays[f.ray].range, plan.step)
    ]
    lanes = -(-len(open_now) // plan.lanes) * plan.lanes
    counts = deal([room(one, plan.rays[ray].range, plan.step) for ray, _, one in open_now], lanes)
    return [
        make(ray, s, u, "bracket")
        for (ray, s, one), count in zip(open_now, counts, strict=True)
        for u in proposals(one, count, plan.rays[ray].range)
    ]


def _checks(plan: SearchConfig, states: list[MarginEstimate], probes: Sequence[Probe], make: Make) -> list[Probe]:
    wanted = []
    for f in states:
        u = plan.rays[f.ray].range.snap(f.aim.value) if math.isfinite(f.aim.value) else math.nan
        tried = [p.u for p in probes if p.ray == f.ray and p.purpose == "check"]
        if math.isnan(u) or any(abs(u - other) < plan.step / 2 for other in tried):
            continue
        trained = [set(seen) for seen in f.outcomes]
        wanted += [make(f.ray, s, u, "check") for s, seen in zip(f.seeds, trained, strict=True) if u not in seen]
    return wanted
