"""Perturbations in a program: whether they fit a learner's sites, the slots they act in, and lanes' data for these."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np

from jaxaudit.core.perturbation import Condition, Kind, Perturbation
from jaxaudit.core.program import Lanes, Program
from jaxaudit.core.sites import Sites
from jaxaudit.core.taps import OFFERED, Disturbance, Slot, Windows
from jaxaudit.runtime.paths import matches


def site_misfit(perturbation: Perturbation, sites: Sites) -> str | None:
    """Returns a sentence on what a perturbation acts on that the learner does not have, or None."""
    kind = perturbation.kind
    name, site = kind.name, kind.site
    if site not in sites:
        known = ", ".join(sorted(sites)) or "none"
        why = f", for {sites.absent[site]}" if site in sites.absent else ""
        return f"perturbation '{name}' acts at site '{site}', which the learner does not tap{why}; its sites: {known}"
    missing = sorted(set(kind.needs) - set(OFFERED) - sites.context[site])
    if missing:
        why = "".join(f", for {sites.absent[what]}" for what in missing if what in sites.absent)
        return (
            f"perturbation '{name}' needs {', '.join(missing)} at site '{site}', "
            f"which the learner's tap there does not give{why}"
        )
    if not sites.paths[site]:
        return f"perturbation '{name}' acts at site '{site}', where the learner has nothing to disturb"
    if reason := sites.lost.get(site) or (sites.loose.get(site) if kind.keeps_state else None):
        return f"perturbation '{name}' {reason}"
    if not any(matches(perturbation.target, path) for path in sites.paths[site]):
        part = str(perturbation.target).partition("/")[0]
        why = f", for {sites.absent[part]}" if part in sites.absent else ""
        paths = _listed(sites.paths[site])
        return f"target {perturbation.target!r} of '{name}' is in none of the paths at site '{site}'{why}: {paths}"
    if kind.reach:
        low, high = kind.reach(sites.numbers[site])
        if beyond := [m for m in perturbation.magnitudes if m != kind.neutral and not low <= m <= high]:
            return f"magnitude {beyond[0]:g} of '{name}' is outside its range {low:g} to {high:g} for this learner"
    return None


def _listed(paths: Sequence[str]) -> str:
    """Paths in words; of many, how many begin with the same name."""
    if len(paths) <= MOST_LISTED:
        return ", ".join(paths)
    groups = Counter(path.partition("/")[0] for path in paths)
    return ", ".join(f"{name}/... ({count} paths)" if count > 1 else name for name, count in groups.items())


MOST_LISTED = 24
"""Paths that a sentence names one by one."""


def slots_of(unrolled: Sequence[Condition]) -> tuple[Slot, ...]:
    """The slots that all conditions find theirs among; the same for the same conditions in any order."""
    slots: list[Slot] = []
    for condition in sorted(unrolled, key=lambda c: (-len(c.parts), c.name)):
        _in_slots(condition, slots)
    most: dict[Kind, float] = {}
    for part in (part for condition in unrolled for part in condition.parts if part.kind.sized):
        most[part.kind] = max(most.get(part.kind, -math.inf), *map(float, part.magnitudes))
    return tuple(replace(slot, most=most.get(slot.kind)) for slot in slots)


def _in_slots(condition: Condition, slots: list[Slot]) -> dict[int, Perturbation]:
    """A condition's parts by the slots they act in, in order where they share a site; slots it lacks are added."""
    seen: Counter[str] = Counter()
    after: dict[str, int] = {}
    found: dict[int, Perturbation] = {}
    for part in condition.parts:
        occurrence = seen[part.name]
        alike = [i for i, s in enumerate(slots) if (s.kind, s.occurrence) == (part.kind, occurrence)]
        place = next((i for i in alike if i > after.get(part.site, -1)), None)
        if place is None:
            place = len(slots)
            slots.append(Slot(part.kind, occurrence, len(alike)))
        found[place] = part
        after[part.site] = place
        seen[part.name] += 1
    return found


def disturbance(condition: Condition, program: Program, steps: int) -> Disturbance:
    """A condition's data for every slot of the program; slots it has no part for are neutral and never open."""
    slots = list(program.slots)
    parts = _in_slots(condition, slots)
    assert len(slots) == len(program.slots), "the program has other conditions"
    paths = dict(program.paths)
    magnitudes, windows, targets = [], [], []
    for index, slot in enumerate(program.slots):
        part = parts.get(index)
        magnitude = float(part.magnitudes[0]) if part else slot.kind.neutral
        if part and slot.most is not None and magnitude > slot.most:
            raise ValueError(f"magnitude {magnitude:g} of '{part.name}' is above its grid's largest, {slot.most:g}")
        magnitudes.append(magnitude)
        windows.append(part.when.resolve(steps) if part else (0, 0, 1, 0))
        target = part.target if part else None
        targets.append(np.array([matches(target, path) for path in paths[slot.kind.site]], bool))
    columns = np.array(windows, np.int32).reshape(-1, 4).T
    return Disturbance(np.array(magnitudes, np.float32), Windows(*columns), tuple(targets))


def lanes_of(program: Program, seeds: Sequence[int] | np.ndarray, conditions: Sequence[Condition] | None) -> Lanes:
    """Lanes of any seeds and conditions of a program's kinds, one of each a lane; None: of the baseline.

    Many lanes of one condition are that condition many times, the same object.
    """
    if conditions is None:
        return Lanes(np.array(seeds, np.uint32), None)
    _, firsts, which = np.unique([*map(id, conditions)], return_index=True, return_inverse=True)
    rows = [disturbance(conditions[first], program, program.steps) for first in firsts]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves)[which], *rows)
    return Lanes(np.array(seeds, np.uint32), stacked)
