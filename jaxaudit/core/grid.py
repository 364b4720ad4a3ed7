"""What an audit is asked to train: seeds x conditions of one learner, in fork groups; and what of it is refused."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import numpy as np

from jaxaudit.core.learner import Channel, Learner
from jaxaudit.core.perturbation import Chain, Condition, Kind, Perturbation, conditions, control
from jaxaudit.core.program import Execution, InLoopMonitor, Lanes, Program, telemetry_shapes
from jaxaudit.core.sites import Sites, find_sites
from jaxaudit.core.taps import OFFERED, Disturbance, Slot, Windows
from jaxaudit.runtime import precision
from jaxaudit.runtime.paths import matches
from jaxaudit.runtime.precision import MatmulPrecision


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


MOST_LANES = 2**24
"""Seeds x conditions of the largest grid."""

TelemetryShapes = Mapping[str, tuple[int, ...]]
Channels = Mapping[str, Channel]


@dataclass(frozen=True)
class Fork:
    """The conditions that begin at one onset; the first is the control.

    Attributes:
      onset: step.
      conditions: their positions in `Grid.conditions`.
    """

    onset: int
    conditions: tuple[int, ...]


@dataclass(frozen=True)
class Grid:
    """Seeds x conditions of one learner.

    Attributes:
      program: the structure.
      seeds: one run of the baseline each.
      conditions: the columns, grouped by onset, each group begun by its control.
      forks: the groups, by onset.
      tail: steps the baseline goes on after the last onset, to compare it with that group's control.
      sites: where the learner can be disturbed.
      batch: the most lanes of a group that run side by side; None: all.
      data: the learner's.
    """

    program: Program
    seeds: tuple[int, ...]
    conditions: tuple[Condition, ...]
    forks: tuple[Fork, ...]
    tail: int
    sites: Sites
    batch: int | None = None
    data: Any = field(default=None, compare=False, repr=False)

    @property
    def steps(self) -> int:
        """The number of steps of a run."""
        return self.program.steps

    @property
    def baseline_steps(self) -> int:
        """The number of steps that the baseline is trained for."""
        return min(self.forks[-1].onset + self.tail, self.steps)

    @property
    def lane_steps(self) -> int:
        """Learner steps the whole grid computes, padding not counted."""
        suffixes = sum(len(fork.conditions) * (self.steps - fork.onset) for fork in self.forks)
        return len(self.seeds) * (self.baseline_steps + suffixes)

    @property
    def provenance(self) -> dict[str, str]:
        """What a run of it depends on beside its spec, in words."""
        watch = self.program.watch
        return {**self.program.learner.provenance, **({} if watch is None else {"monitor": watch.provenance})}


def plan(
    learner: Learner,
    perturbations: Sequence[Perturbation | Chain],
    *,
    seeds: int | Sequence[int],
    steps: int,
    execution: Execution = "vmap",
    devices: Sequence[jax.Device] | None = None,
    tail: int = 50,
    lanes: int | Literal["auto"] = "auto",
    watch: Callable[[TelemetryShapes, Channels], InLoopMonitor] | None = None,
    model_devices: int = 1,
    matmul_precision: MatmulPrecision = "float32",
) -> Grid:
    """Returns the grid of an audit: which lanes there are, and how they are laid out in batches.

    Args:
      learner: what is trained.
      perturbations: each with its magnitude or sweep of magnitudes, window and target.
      seeds: the number of seeds, or the seeds.
      steps: the length of a run.
      execution: how a device runs its lanes: "vmap", "map" (one after another), a batch size, or "auto".
      devices: lanes are spread evenly over these; all of JAX's by default.
      model_devices: the number of devices that share each lane.
      matmul_precision: of the learner's float32 products on GPUs and TPUs, unless JAX was given one.
      tail: for how many steps the baseline is trained after the last onset.
      lanes: the most lanes in a batch; "auto" leaves it to what runs the grid, and makes one batch until then.
      watch: `watch(shapes, channels)` returns what follows the lanes and raises the alarms that interventions wait for.

    Raises:
      ValueError: learner and perturbations do not fit together; one sentence.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be a positive whole number, not {steps!r}")
    chosen = _seeds(seeds)
    unrolled = conditions(perturbations, steps)
    sites = find_sites(learner, steps)
    ordered: list[Condition] = []
    forks: list[Fork] = []
    for onset in sorted({c.onset for c in unrolled}) or [0]:
        members = [control(onset), *(c for c in unrolled if c.onset == onset)]
        forks.append(Fork(onset, tuple(range(len(ordered), len(ordered) + len(members)))))
        ordered += members
    for part in (part for condition in unrolled for part in condition.parts):
        if reason := site_misfit(part, sites):
            raise ValueError(reason)
        if "alarm" in part.kind.needs and watch is None:
            raise ValueError(f"'{part.name}' waits for a monitor's alarm, and there is no monitor")
    trained_on = tuple(devices if devices is not None else jax.devices())
    program = Program(
        learner.without_data,
        steps,
        slots_of(unrolled),
        tuple(sorted((site, tuple(paths)) for site, paths in sites.paths.items())),
        _execution(execution),
        trained_on,
        model_devices=model_devices,
        matmul_precision=precision.resolve(trained_on, matmul_precision),
    )
    _check_shared(learner, program)
    if watch is not None:
        program = replace(program, watch=watch(telemetry_shapes(program), learner.channels))
    return Grid(program, chosen, tuple(ordered), tuple(forks), tail, sites, _batch(lanes), learner.data)


def _seeds(seeds: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(seeds, int | np.integer) and not isinstance(seeds, bool):
        seeds = range(seeds)
    listed: list[Any] = list(seeds) if isinstance(seeds, Iterable) and not isinstance(seeds, str) else [None]
    if any(isinstance(s, bool) or not isinstance(s, int | np.integer) for s in listed):
        raise ValueError(f"seeds must be a positive whole number or a list of them, not {seeds!r}")
    chosen = tuple(int(s) for s in listed)
    if not chosen or min(chosen) < 0 or max(chosen) >= 2**32 or len(set(chosen)) < len(chosen):
        raise ValueError(f"seeds must be at least one, all different and from 0 to 2^32 - 1, not {list(chosen)}")
    return chosen


def _execution(execution: Execution) -> Execution:
    known = execution in ("auto", "vmap", "map") if isinstance(execution, str) else execution >= 1
    if isinstance(execution, bool) or not known:
        raise ValueError(f"execution must be 'auto', 'vmap', 'map' or a batch size of at least 1, not {execution!r}")
    return execution


def _check_shared(learner: Learner, program: Program) -> None:
    """Raises ValueError where a lane cannot be shared by as many devices as it is to be."""
    devices, shared = len(program.devices), program.model_devices
    if isinstance(shared, bool) or not isinstance(shared, int) or shared < 1:
        raise ValueError(f"model_devices must be a whole number of devices, at least 1, not {shared!r}")
    if shared == 1:
        return
    if learner.partition is None:
        raise ValueError(f"model_devices is {shared}, and '{learner.name}' cannot be split: it has no partition")
    for what, count in learner.indivisible.items():
        if count % shared:
            raise ValueError(f"model_devices is {shared}, which does not divide the model's {count} {what}")
    if devices % shared:
        raise ValueError(f"model_devices is {shared}, which does not divide the number of devices, {devices}")


def _batch(lanes: int | Literal["auto"]) -> int | None:
    if lanes == "auto":
        return None
    if isinstance(lanes, bool) or not isinstance(lanes, int) or lanes < 1:
        raise ValueError(f"lanes must be 'auto' or at least 1, not {lanes!r}")
    return lanes
