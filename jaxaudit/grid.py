"""What an audit is asked to train, laid out: seeds x conditions, in fork groups and batches of lanes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jaxaudit.learner import Channel, Learner, Telemetry
from jaxaudit.paths import matches
from jaxaudit.perturbations.core import Chain, Condition, Perturbation, conditions, control
from jaxaudit.program import Execution, ForkInputs, Inputs, Lanes, Program, Watch, telemetry_shapes, whole_vectors
from jaxaudit.sites import Sites, find_sites
from jaxaudit.taps import OFFERED, Disturbance, Slot, Windows

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


class Phase(NamedTuple):
    """Lanes that run side by side from one step to the end: a batch of a fork group, or of the baseline (fork None)."""

    fork: int | None
    batch: int = 0


@dataclass(frozen=True)
class Grid:
    """Seeds x conditions of one learner.

    A fork group's lanes are numbered condition after condition, the seeds of each in order; the baseline's are its
    seeds. Batches are consecutive lanes, as even as can be, and those of a group have one width: one program.

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
        """Steps of a run."""
        return self.program.steps

    @property
    def baseline_steps(self) -> int:
        """Steps the baseline is trained for."""
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

    def groups(self, baseline: bool = True) -> list[int | None]:
        """What is trained one after the other: the baseline (None) and the fork groups' positions."""
        return [*([None] if baseline else []), *range(len(self.forks))]

    def phases(self, baseline: bool = True) -> list[Phase]:
        """The batches of all groups, in the order they are trained."""
        batches = {group: -(-self.count(group) // self.share(group)) for group in self.groups(baseline)}
        return [Phase(group, batch) for group, number in batches.items() for batch in range(number)]

    def onset(self, phase: Phase) -> int:
        """The step a phase begins at."""
        return 0 if phase.fork is None else self.forks[phase.fork].onset

    def count(self, group: int | None) -> int:
        """Lanes of a group."""
        return len(self.seeds) * (1 if group is None else len(self.forks[group].conditions))

    def share(self, group: int | None) -> int:
        """Lanes of each batch of a group; the last may have fewer."""
        count = self.count(group)
        batches = -(-count // min(self.batch or count, count))
        return -(-count // batches)

    def width(self, group: int | None) -> int:
        """Lanes that a batch of a group is filled up to: devices share them evenly, and each computes all alike.

        A device that runs its lanes a few at a time has none left over, for their program would round otherwise.
        """
        devices, execution = max(1, len(self.program.devices)), self.program.execution
        each = -(-self.share(group) // devices)
        if isinstance(execution, int) and each > whole_vectors(execution):
            at_a_time = whole_vectors(execution)
            return -(-each // at_a_time) * at_a_time * devices
        return (each if execution == "map" else whole_vectors(each)) * devices

    def numbers(self, phase: Phase) -> range:
        """The numbers, within their group, of a phase's lanes."""
        share = self.share(phase.fork)
        return range(phase.batch * share, min((phase.batch + 1) * share, self.count(phase.fork)))

    def cells(self, phase: Phase) -> tuple[np.ndarray, np.ndarray]:
        """The position of each of a phase's lanes among the conditions (-1: the baseline) and among the seeds."""
        columns, seeds = np.divmod(np.array(self.numbers(phase)), len(self.seeds))
        return (columns * 0 - 1 if phase.fork is None else columns + self.forks[phase.fork].conditions[0]), seeds

    def lanes(self, phase: Phase) -> tuple[Lanes, np.ndarray]:
        """The lanes of a phase and each one's seed position; those that fill it up are the group's first."""
        columns, seeds = self.cells(phase)
        filling = self.width(phase.fork) - len(seeds)
        first = columns[:1] * 0 + (0 if phase.fork is None else self.forks[phase.fork].conditions[0])
        columns, seeds = np.r_[columns, np.repeat(first, filling)], np.r_[seeds, np.zeros(filling, int)]
        chosen = None if phase.fork is None else [self.conditions[c] for c in columns]
        return lanes_of(self.program, np.array(self.seeds)[seeds], chosen), seeds.astype(np.int32)


def lanes_of(program: Program, seeds: Sequence[int] | np.ndarray, conditions: Sequence[Condition] | None) -> Lanes:
    """Lanes of any seeds and conditions of a program's kinds, one of each a lane; None: of the baseline."""
    stacked = None
    if conditions is not None:
        distinct = {id(c): c for c in conditions}
        rows = {key: disturbance(c, program, program.steps) for key, c in distinct.items()}
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *(rows[id(c)] for c in conditions))
    return Lanes(np.array(seeds, np.uint32), stacked)


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
    watch: Callable[[TelemetryShapes, Channels], Watch] | None = None,
) -> Grid:
    """Lays out a grid, in batches of at most `lanes`; "auto" is left to who runs it, and all in one batch until then.

    `watch` makes what follows the lanes and raises the alarms that interventions wait for, from the shapes of the
    learner's telemetry and what is known of its channels.

    Raises ValueError, in one sentence, where learner and perturbations do not fit together.
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
    program = Program(
        learner.without_data,
        steps,
        _slots(unrolled),
        tuple(sorted((site, tuple(paths)) for site, paths in sites.paths.items())),
        _execution(execution),
        tuple(devices if devices is not None else jax.devices()),
    )
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


def _batch(lanes: int | Literal["auto"]) -> int | None:
    if lanes == "auto":
        return None
    if isinstance(lanes, bool) or not isinstance(lanes, int) or lanes < 1:
        raise ValueError(f"lanes must be 'auto' or at least 1, not {lanes!r}")
    return lanes


def site_misfit(perturbation: Perturbation, sites: Sites) -> str | None:
    """None, or a sentence on what a perturbation acts at that the learner does not have."""
    kind = perturbation.kind
    name, site = kind.name, kind.site
    if site not in sites:
        known = ", ".join(sorted(sites)) or "none"
        return f"perturbation '{name}' acts at site '{site}', which the learner does not tap; its sites: {known}"
    missing = sorted(set(kind.needs) - set(OFFERED) - sites.context[site])
    if missing:
        return (
            f"perturbation '{name}' needs {', '.join(missing)} at site '{site}', "
            "which the learner's tap there does not give"
        )
    if not sites.paths[site]:
        return f"perturbation '{name}' acts at site '{site}', where the learner has nothing to disturb"
    if reason := sites.lost.get(site) or (sites.loose.get(site) if kind.keeps_state else None):
        return f"perturbation '{name}' {reason}"
    if not any(matches(perturbation.target, path) for path in sites.paths[site]):
        paths = ", ".join(sites.paths[site])
        return f"target {perturbation.target!r} of '{name}' is in none of the paths at site '{site}': {paths}"
    return None


def _slots(unrolled: Sequence[Condition]) -> tuple[Slot, ...]:
    """The slots that all conditions find theirs among; the same for the same conditions in any order."""
    slots: list[Slot] = []
    for condition in sorted(unrolled, key=lambda c: (-len(c.parts), c.name)):
        _in_slots(condition, slots)
    magnitudes = [(part.kind, float(m)) for c in unrolled for part in c.parts for m in part.magnitudes]
    most = {kind: max(m for k, m in magnitudes if k == kind) for kind, _ in magnitudes if kind.sized}
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


def inputs(grid: Grid) -> Inputs:
    """The grid's data, as NumPy arrays; every group in one batch."""
    grid = replace(grid, batch=None)
    edges = [0, *(fork.onset for fork in grid.forks), grid.baseline_steps]
    by_width: dict[int, list[ForkInputs]] = {}
    for position, fork in enumerate(grid.forks):
        lanes, seeds = grid.lanes(Phase(position))
        entry = ForkInputs(np.int32(fork.onset), np.int32(position), lanes, seeds)
        by_width.setdefault(grid.width(position), []).append(entry)
    forks = tuple(jax.tree.map(lambda *leaves: np.stack(leaves), *group) for group in by_width.values())
    segments = np.array(list(itertools.pairwise(edges)), np.int32)
    return Inputs(grid.data, grid.lanes(Phase(None))[0], segments, forks)


def arrange(grid: Grid, baseline: Telemetry, forks: tuple[Telemetry, ...]) -> dict[str, np.ndarray]:
    """What `run` gave, by channel, float32 `[seed, condition, step, ...]`; before an onset it is the baseline's."""
    grid = replace(grid, batch=None)
    arrays = blank_telemetry(grid)
    place(arrays.__getitem__, grid, Phase(None), baseline, 0, grid.steps)
    taken: Counter[int] = Counter()
    widths = list(dict.fromkeys(grid.width(fork) for fork in range(len(grid.forks))))
    for position, fork in enumerate(grid.forks):
        width = grid.width(position)
        rows = {name: x[taken[width], fork.onset :] for name, x in forks[widths.index(width)].items()}
        place(arrays.__getitem__, grid, Phase(position), rows, fork.onset, grid.steps)
        taken[width] += 1
    return arrays


def blank_telemetry(grid: Grid) -> dict[str, np.ndarray]:
    """Telemetry by channel, float32 `[seed, condition, step, ...]`, all NaN."""
    lanes, shapes = (len(grid.seeds), len(grid.conditions), grid.steps), telemetry_shapes(grid.program)
    return {name: np.full((*lanes, *shape), np.nan, np.float32) for name, shape in shapes.items()}


def place(channel: Callable[[str], Any], grid: Grid, phase: Phase, rows: Telemetry, start: int, stop: int) -> None:
    """Puts a phase's steps `start` to `stop`, rows `[T, L, ...]`, where they belong.

    `channel(name)` is an array `[seed, condition, step, ...]`, NumPy's or one on disk. The baseline is the prefix of
    every condition.
    """
    conditions, seeds = grid.cells(phase)
    for name, values in rows.items():
        lanes = np.moveaxis(np.asarray(values)[: stop - start, : len(seeds)], 0, 1)
        array = channel(name)
        if phase.fork is None:
            for fork in grid.forks:
                if (end := min(stop, fork.onset)) > start:
                    prefix = lanes[:, None, : end - start]
                    shape = (len(seeds), len(fork.conditions), *prefix.shape[2:])
                    columns = slice(fork.conditions[0], fork.conditions[-1] + 1)
                    array[seeds[0] : seeds[-1] + 1, columns, start:end] = np.broadcast_to(prefix, shape)
        else:
            columns = conditions - conditions[0]
            where = (slice(None), slice(conditions[0], conditions[-1] + 1), slice(start, stop))
            shape = (len(grid.seeds), columns[-1] + 1, *lanes.shape[1:])
            block = np.empty(shape, np.float32) if len(lanes) == shape[0] * shape[1] else array[where]
            block[seeds, columns] = lanes
            array[where] = block
