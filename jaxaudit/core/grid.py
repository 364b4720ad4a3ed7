"""The grid of an audit: seeds x conditions of one learner in fork groups, the slots where perturbations act, and the
checks that learner and perturbations fit together.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import numpy as np

from jaxaudit.core.learner import Channel, Learner
from jaxaudit.core.perturbation import Chain, Condition, Kind, Perturbation, check_perturbations, conditions, control
from jaxaudit.core.program import Execution, InLoopMonitor, Lanes, Program, telemetry_shapes
from jaxaudit.core.sites import Sites, find_sites
from jaxaudit.core.taps import OFFERED, Disturbance, Slot, Windows
from jaxaudit.runtime import tracing
from jaxaudit.runtime.paths import matches
from jaxaudit.runtime.tracing import MatmulPrecision

MOST_LANES = 2**24
"""The largest number of seeds x conditions in a grid."""


@dataclass(frozen=True)
class Fork:
    """The conditions that begin at one onset; the first is the control.

    Attributes:
      onset: the step.
      conditions: the positions of the conditions in `Grid.conditions`.
    """

    onset: int
    conditions: tuple[int, ...]


@dataclass(frozen=True)
class Grid:
    """Seeds x conditions of one learner.

    Attributes:
      program: the structure, which determines what is compiled.
      seeds: the seeds; the baseline trains each once.
      conditions: the columns, grouped by onset; the first of each group is its control.
      forks: the groups, in the order of their onsets.
      tail: the number of steps that the baseline is trained after the last onset, to compare it with that group's
        control.
      sites: where the learner can be disturbed.
      batch: the largest number of lanes of a group that run side by side; None for all of them.
      data: the learner's data.
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
        """The number of learner steps that the whole grid computes, without padding lanes."""
        fork_steps = sum(len(fork.conditions) * (self.steps - fork.onset) for fork in self.forks)
        return len(self.seeds) * (self.baseline_steps + fork_steps)

    @property
    def provenance(self) -> dict[str, str]:
        """Hashes and versions of what a run depends on besides its spec, by name."""
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
    watch: Callable[[Mapping[str, tuple[int, ...]], Mapping[str, Channel]], InLoopMonitor] | None = None,
    model_devices: int = 1,
    matmul_precision: MatmulPrecision = "float32",
) -> Grid:
    """Returns the grid of an audit: which lanes there are, and how they are laid out in batches.

    Args:
      learner: the learner to train.
      perturbations: the perturbations, each with its magnitude or sweep of magnitudes, window and target.
      seeds: the number of seeds, or the seeds.
      steps: the length of a run.
      execution: how a device runs its lanes: "vmap", "map" (one after another), a batch size, or "auto".
      devices: the devices over which lanes are spread evenly; all of JAX's by default.
      model_devices: the number of devices that share each lane.
      matmul_precision: the precision of the learner's float32 products on GPUs and TPUs, unless JAX was given one.
      tail: the number of steps for which the baseline is trained after the last onset.
      lanes: the largest number of lanes in a batch; "auto" leaves it to what runs the grid, and makes one batch until
        then.
      watch: `watch(shapes, channels)` returns the monitor that follows the lanes and raises the alarms that
        interventions wait for.

    Raises:
      ValueError: learner and perturbations do not fit together, or an argument is out of range.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be a positive whole number, not {steps!r}")
    seed_values = _seeds(seeds)
    check_perturbations(perturbations)
    disturbed = conditions(perturbations, steps)
    sites = find_sites(learner, steps)
    columns: list[Condition] = []
    forks: list[Fork] = []
    for onset in sorted({c.onset for c in disturbed}) or [0]:
        group = [control(onset), *(c for c in disturbed if c.onset == onset)]
        forks.append(Fork(onset, tuple(range(len(columns), len(columns) + len(group)))))
        columns += group
    for part in (part for condition in disturbed for part in condition.parts):
        if reason := site_misfit(part, sites):
            raise ValueError(reason)
        if "alarm" in part.kind.needs and watch is None:
            raise ValueError(f"'{part.name}' waits for a monitor's alarm, and there is no monitor")
    all_devices = tuple(devices if devices is not None else jax.devices())
    program = Program(
        learner.without_data,
        steps,
        slots_of(disturbed),
        tuple(sorted((site, tuple(paths)) for site, paths in sites.paths.items())),
        _execution(execution),
        all_devices,
        model_devices=model_devices,
        matmul_precision=tracing.resolve_precision(all_devices, matmul_precision),
    )
    _check_shared(learner, program)
    if watch is not None:
        program = replace(program, watch=watch(telemetry_shapes(program), learner.channels))
    return Grid(program, seed_values, tuple(columns), tuple(forks), tail, sites, _batch(lanes), learner.data)


def _seeds(seeds: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(seeds, int | np.integer) and not isinstance(seeds, bool):
        seeds = range(seeds)
    values: list[Any] = list(seeds) if isinstance(seeds, Iterable) and not isinstance(seeds, str) else [None]
    if any(isinstance(s, bool) or not isinstance(s, int | np.integer) for s in values):
        raise ValueError(f"seeds must be a positive whole number or a list of them, not {seeds!r}")
    values = [int(s) for s in values]
    if not values or min(values) < 0 or max(values) >= 2**32 or len(set(values)) < len(values):
        raise ValueError(f"seeds must be at least one, all different and from 0 to 2^32 - 1, not {values}")
    return tuple(values)


def _execution(execution: Execution) -> Execution:
    known = execution in ("auto", "vmap", "map") if isinstance(execution, str) else execution >= 1
    if isinstance(execution, bool) or not known:
        raise ValueError(f"execution must be 'auto', 'vmap', 'map' or a batch size of at least 1, not {execution!r}")
    return execution


def _check_shared(learner: Learner, program: Program) -> None:
    """Raises ValueError if a lane cannot be shared by the program's `model_devices`."""
    devices, shared = len(program.devices), program.model_devices
    if isinstance(shared, bool) or not isinstance(shared, int) or shared < 1:
        raise ValueError(f"model_devices must be a whole number of devices, at least 1, not {shared!r}")
    if shared == 1:
        return
    if learner.partition is None:
        raise ValueError(f"model_devices is {shared}, and '{learner.name}' cannot be split: it has no partition")
    for parts, count in learner.indivisible.items():
        if count % shared:
            raise ValueError(f"model_devices is {shared}, which does not divide the model's {count} {parts}")
    if devices % shared:
        raise ValueError(f"model_devices is {shared}, which does not divide the number of devices, {devices}")


def _batch(lanes: int | Literal["auto"]) -> int | None:
    if lanes == "auto":
        return None
    if isinstance(lanes, bool) or not isinstance(lanes, int) or lanes < 1:
        raise ValueError(f"lanes must be 'auto' or at least 1, not {lanes!r}")
    return lanes


def site_misfit(perturbation: Perturbation, sites: Sites) -> str | None:
    """Returns a sentence on what a perturbation acts on that the learner does not have, or None if they fit."""
    kind = perturbation.kind
    name, site = kind.name, kind.site
    if site not in sites:
        known = ", ".join(sorted(sites)) or "none"
        return (
            f"perturbation '{name}' acts at site '{site}', which the learner does not tap{sites.reason_absent(site)}; "
            f"its sites: {known}"
        )
    missing = sorted(set(kind.needs) - set(OFFERED) - sites.context[site])
    if missing:
        return (
            f"perturbation '{name}' needs {', '.join(missing)} at site '{site}', "
            f"which the learner's tap there does not give{''.join(map(sites.reason_absent, missing))}"
        )
    if not sites.paths[site]:
        return f"perturbation '{name}' acts at site '{site}', where the learner has nothing to disturb"
    if reason := sites.blocked.get(site) or (sites.stateless.get(site) if kind.keeps_state else None):
        return f"perturbation '{name}' {reason}"
    if not any(matches(perturbation.target, path) for path in sites.paths[site]):
        why = sites.reason_absent(str(perturbation.target).partition("/")[0])
        paths = _listed(sites.paths[site])
        return f"target {perturbation.target!r} of '{name}' is in none of the paths at site '{site}'{why}: {paths}"
    if kind.reach:
        low, high = kind.reach(sites.numbers[site])
        if outside := [m for m in perturbation.magnitudes if m != kind.neutral and not low <= m <= high]:
            return f"magnitude {outside[0]:g} of '{name}' is outside its range {low:g} to {high:g} for this learner"
    return None


def _listed(paths: Sequence[str]) -> str:
    """Returns the paths as a list in words; more than `MAX_LISTED` are counted by their first component."""
    if len(paths) <= MAX_LISTED:
        return ", ".join(paths)
    groups = Counter(path.partition("/")[0] for path in paths)
    return ", ".join(f"{name}/... ({count} paths)" if count > 1 else name for name, count in groups.items())


MAX_LISTED = 24
"""The largest number of paths that a sentence lists one by one."""


def slots_of(disturbed: Sequence[Condition]) -> tuple[Slot, ...]:
    """Returns the slots in which all parts of the conditions have a place, whatever the order of the conditions."""
    slots: list[Slot] = []
    for condition in sorted(disturbed, key=lambda c: (-len(c.parts), c.name)):
        _parts_by_slot(condition, slots)
    largest: dict[Kind, float] = {}
    for part in (part for condition in disturbed for part in condition.parts if part.kind.sized):
        largest[part.kind] = max(largest.get(part.kind, -math.inf), *map(float, part.magnitudes))
    return tuple(replace(slot, max_magnitude=largest.get(slot.kind)) for slot in slots)


def _parts_by_slot(condition: Condition, slots: list[Slot]) -> dict[int, Perturbation]:
    """Returns a condition's parts by the index of their slot, and appends the slots that are missing.

    Parts at one site are in slots of increasing index, since slots act in their order.
    """
    occurrences: Counter[str] = Counter()
    last_at_site: dict[str, int] = {}
    parts: dict[int, Perturbation] = {}
    for part in condition.parts:
        occurrence = occurrences[part.name]
        same_kind = [i for i, s in enumerate(slots) if (s.kind, s.occurrence) == (part.kind, occurrence)]
        index = next((i for i in same_kind if i > last_at_site.get(part.site, -1)), None)
        if index is None:
            index = len(slots)
            slots.append(Slot(part.kind, occurrence, len(same_kind)))
        parts[index] = part
        last_at_site[part.site] = index
        occurrences[part.name] += 1
    return parts


def disturbance(condition: Condition, program: Program, steps: int) -> Disturbance:
    """Returns a condition's data for every slot of the program; slots without a part are neutral and never open."""
    slots = list(program.slots)
    parts = _parts_by_slot(condition, slots)
    assert len(slots) == len(program.slots), "the program has a slot for every part of its conditions"
    paths = dict(program.paths)
    magnitudes, windows, targets = [], [], []
    for index, slot in enumerate(program.slots):
        part = parts.get(index)
        magnitude = float(part.magnitudes[0]) if part else slot.kind.neutral
        if part and slot.max_magnitude is not None and magnitude > slot.max_magnitude:
            raise ValueError(
                f"magnitude {magnitude:g} of '{part.name}' is above its grid's largest, {slot.max_magnitude:g}"
            )
        magnitudes.append(magnitude)
        windows.append(part.when.resolve(steps) if part else (0, 0, 1, 0))
        target = part.target if part else None
        targets.append(np.array([matches(target, path) for path in paths[slot.kind.site]], bool))
    fields = np.array(windows, np.int32).reshape(-1, 4).T
    return Disturbance(np.array(magnitudes, np.float32), Windows(*fields), tuple(targets))


def lanes_of(program: Program, seeds: Sequence[int] | np.ndarray, conditions: Sequence[Condition] | None) -> Lanes:
    """Returns lanes with the given seeds and conditions, one of each per lane, or lanes of the baseline for None.

    Lanes with the same condition object share one computation of its data.
    """
    if conditions is None:
        return Lanes(np.array(seeds, np.uint32), None)
    _, firsts, inverse = np.unique([*map(id, conditions)], return_index=True, return_inverse=True)
    rows = [disturbance(conditions[first], program, program.steps) for first in firsts]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves)[inverse], *rows)
    return Lanes(np.array(seeds, np.uint32), stacked)
