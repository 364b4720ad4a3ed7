"""The audit as one pure program: a baseline, forks at the onsets, and lanes over seeds and conditions.

`Program` is its structure and `Lanes` are its data. `advance` trains lanes from one step to another. Both `run`, which
trains the whole grid in one function, and the engine, which trains batch after batch in chunks of steps, use it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxaudit.core.channel_names import PERFORMANCE
from jaxaudit.core.learner import Learner, State, Telemetry, with_lasting, without_lasting
from jaxaudit.core.sites import find_sites, step_telemetry
from jaxaudit.core.taps import ROOT, STATE, Disturbance, Slot, States, Taps, reset_opening_states
from jaxaudit.runtime import tracing
from jaxaudit.runtime.sharding import LANE_AXIS, LANES, REPLICATED, ROWS, constrain_tree, map_over_devices

Execution = str | int
"""How the lanes of one device run: "vmap", "map" (one after the other), or a batch size.

Batch sizes above 16 are rounded up to multiples of 8. "auto" lets `autotune` choose, and means "vmap" until then.
"""


SCORE, ALARM = "monitor_score", "alarm"
"""Channels of a monitored lane: the score after each step, and whether an alarm was on during the step."""

RESERVED = frozenset(
    (
        "seed",
        "condition",
        "step",
        "perturbation",
        "magnitude",
        "neutral",
        "onset",
        "duration",
        "dimension",
        "site",
        "target",
    )
)
"""The names of a grid's coordinates, which channels cannot have."""

VECTOR = 8
WHOLE_VECTORS_FROM = 16


def round_up_to_vectors(lanes: int) -> int:
    """Returns the least number of lanes, at least `lanes`, for which a CPU computes all lanes bitwise alike.

    The lanes left over by a vectorised loop are reduced in another order and would differ bitwise from the control
    (observed from 17 lanes on).
    """
    return lanes if lanes <= WHOLE_VECTORS_FROM else -(-lanes // VECTOR) * VECTOR


class InLoopMonitor(Protocol):
    """A monitor that follows a lane's telemetry inside the program and raises alarms.

    It is hashable, and its arrays are constants of the program.
    """

    @property
    def provenance(self) -> str:
        """A text, such as a hash, that differs between monitors which raise different alarms."""

    def begin(self) -> Any:
        """Returns the monitor's state before the first step."""

    def follow(self, watched: Any, telemetry: Telemetry) -> tuple[Any, jax.Array]:
        """Returns the monitor's state after a step and the lane's score, a scalar; a score above zero is an alarm."""


@struct.dataclass
class Watched:
    """The monitor's part of a lane's state.

    Attributes:
      following: the state of the `InLoopMonitor`.
      alarm: whether the last step raised an alarm, a bool scalar.
    """

    following: Any
    alarm: Any


@dataclass(frozen=True)
class Program:
    """Everything that a compiled audit depends on, except arrays and the number of lanes.

    Equal programs share a compilation.

    Attributes:
      learner: the learner, `without_data`.
      steps: the length of a run.
      slots: the places where perturbations act, in order.
      paths: for each site, its name and the paths of its leaves.
      execution: how a device runs its lanes.
      devices: the devices over which lanes are spread.
      watch: the monitor whose alarms interventions wait for, or None.
      model_devices: the number of devices that share each lane.
      matmul_precision: the result of `jaxaudit.runtime.tracing.resolve_precision`.
    """

    learner: Learner
    steps: int
    slots: tuple[Slot, ...]
    paths: tuple[tuple[str, tuple[str, ...]], ...]
    execution: Execution = "vmap"
    devices: tuple[jax.Device, ...] = ()
    watch: InLoopMonitor | None = None
    model_devices: int = 1
    matmul_precision: str | None = None

    @property
    def groups(self) -> int:
        """The number of devices, or of rows of devices that share a lane, over which lanes are spread."""
        return max(1, len(self.devices) // self.model_devices)

    @property
    def on_gpus(self) -> bool:
        """Whether the program runs on GPUs, where each branch in a loop waits for the host."""
        return any(device.platform == "gpu" for device in self.devices)

    @property
    def across_hosts(self) -> bool:
        """Whether some of the devices belong to other processes."""
        return any(device.process_index != jax.process_index() for device in self.devices)


@struct.dataclass
class Lanes:
    """The data of L lanes that run side by side.

    Attributes:
      seed: the seed of each lane, uint32 `[L]`.
      disturbance: the perturbations of each lane, with leading axis L; None for the baseline, whose program has none.
    """

    seed: Any
    disturbance: Disturbance | None


@struct.dataclass
class LaneState:
    """The state of a lane, which is carried from step to step.

    Attributes:
      learner: the learner's state.
      perturbations: the states of stateful perturbations; empty in the baseline.
      watched: the monitor's state; None without a monitor.
    """

    learner: State
    perturbations: States
    watched: Watched | None = None


def initial_states(program: Program, data: Any, seeds: jax.Array) -> LaneState:
    """Returns the baseline's states before the first step for `seeds` `[L]`, which alone determine the random keys."""

    def initial_state(seed: jax.Array) -> LaneState:
        key = jax.random.fold_in(jax.random.key(seed), 0)
        with tracing.with_precision(program.matmul_precision):
            return _without_perturbations(program, program.learner.begin(key, data))

    return jax.vmap(initial_state)(seeds)


def initial_shapes(program: Program) -> LaneState:
    """Returns the shapes and dtypes of one lane's state of the baseline before its first step."""
    return jax.eval_shape(functools.partial(_without_perturbations, program), program.learner.state_shapes)


def _without_perturbations(program: Program, state: State) -> LaneState:
    watched = None if program.watch is None else Watched(program.watch.begin(), jnp.zeros((), bool))
    return LaneState(state, {}, watched)


def forked_states(program: Program, baseline: LaneState, positions: jax.Array | np.ndarray) -> LaneState:
    """Returns the states of lanes that continue from the baseline's states of the seeds at `positions` `[L]`."""

    def take(states: Any) -> Any:
        return jax.tree.map(lambda x: x[positions], states)

    return with_perturbations(program, LaneState(take(baseline.learner), {}, take(baseline.watched)), len(positions))


def with_perturbations(program: Program, states: LaneState, lanes: int) -> LaneState:
    """Returns baseline states of `lanes` lanes with the states of perturbations whose windows have not been open."""
    perturbations = jax.tree.map(lambda x: jnp.broadcast_to(x, (lanes, *jnp.shape(x))), opening_states(program))
    return LaneState(states.learner, perturbations, states.watched)


def opening_states(program: Program) -> States:
    """Returns the states of a lane's perturbations when their windows open."""
    stateful = [slot for slot in program.slots if slot.kind.keeps_state]
    if not stateful:
        return {}
    values = find_sites(program.learner, program.steps).values
    return {
        slot.id: {label or ROOT: slot.init(value) for label, value in values[slot.kind.site].items()}
        for slot in stateful
    }


def lane_step(
    program: Program, data: Any, state: LaneState, lane: Lanes, step: jax.Array, idle: jax.Array | None
) -> tuple[LaneState, Telemetry]:
    """Returns the state of one lane after a step, and the step's telemetry.

    The learner's random key depends on (seed, step). A perturbation's depends on (seed, step), the name of its kind,
    and its occurrence. The telemetry is one value of each channel; a monitor adds its score and alarm.

    Args:
      program: the structure.
      data: the learner's data.
      state: the lane's state before the step.
      lane: the lane's seed and perturbations.
      step: the step, an int32 scalar.
      idle: int32 `[K]`, for each of the program's K slots (places where perturbations act) the number of steps since
        its window was last open in any of the lanes that are computed together: 0 while one is open. Slots whose
        windows are closed are skipped by a branch on it, so `jax.vmap` must not map over it. None for the baseline.
    """
    perturbations = state.perturbations
    if perturbations and lane.disturbance is not None:
        windows = lane.disturbance.windows
        perturbations = reset_opening_states(perturbations, program.slots, windows, step, opening_states(program))
    seed = jax.random.key(lane.seed)
    learner_key = jax.random.fold_in(jax.random.fold_in(seed, 1), step)
    taps = Taps(
        step,
        program.steps,
        data=data,
        slots=program.slots if lane.disturbance is not None else (),
        paths=dict(program.paths),
        key=jax.random.fold_in(jax.random.fold_in(seed, 2), step),
        lane=lane.disturbance,
        idle=idle,
        states=perturbations,
        alarm=None if state.watched is None else state.watched.alarm,
        branch_in_loops=not program.on_gpus,
    )
    begin = with_lasting(taps(STATE, without_lasting(state.learner)), state.learner)
    with tracing.with_precision(program.matmul_precision):
        learner, telemetry = program.learner.advance(begin, learner_key, taps)
    watched = state.watched
    if watched is not None:
        assert program.watch is not None, "a monitor's state has a monitor"
        with tracing.with_precision(program.matmul_precision), tracing.in_float32():
            following, score = program.watch.follow(watched.following, telemetry)
        telemetry |= {SCORE: score, ALARM: watched.alarm.astype(jnp.float32)}
        watched = Watched(following, score > 0)
    return LaneState(learner, taps.states or {}, watched), telemetry


def baseline_program(program: Program) -> Program:
    """Returns the program of the grid's baseline, which does not depend on the perturbations."""
    return replace(program, slots=(), paths=())


def telemetry_shapes(program: Program) -> dict[str, tuple[int, ...]]:
    """Returns the shape of one lane's value in each channel, for one step."""
    return _telemetry_shapes(baseline_program(program))


@functools.lru_cache(maxsize=64)
def _telemetry_shapes(program: Program) -> dict[str, tuple[int, ...]]:
    shapes = step_telemetry(program.learner, program.steps)
    if program.watch is not None:
        shapes |= {SCORE: (), ALARM: ()}
    if PERFORMANCE not in shapes:
        raise ValueError(f"the learner's telemetry has no '{PERFORMANCE}'; it has: {', '.join(sorted(shapes))}")
    if clashes := sorted(shapes.keys() & RESERVED):
        raise ValueError(f"the learner's telemetry has a channel '{clashes[0]}', a name that a grid's coordinates have")
    dims = {dim for name in shapes for dim, _ in program.learner.channel(name).dims}
    if clashes := sorted(dims & (RESERVED | shapes.keys())):
        raise ValueError(
            f"a dimension of the learner's telemetry is called '{clashes[0]}', as a channel or a coordinate is"
        )
    return shapes


def empty_telemetry(program: Program, rows: int, lanes: int) -> Telemetry:
    """Returns telemetry that is NaN everywhere, float32 `[rows, lanes, ...]` by channel."""
    shapes = telemetry_shapes(program)
    return {name: jnp.full((rows, lanes, *shape), jnp.nan, jnp.float32) for name, shape in shapes.items()}


def advance(
    program: Program, data: Any, states: LaneState, lanes: Lanes, start: Any, stop: Any, rows: Telemetry, first: Any
) -> tuple[LaneState, Telemetry]:
    """Trains lanes from step `start` to `stop`, which may be traced, so that one compiled program runs any span.

    Args:
      program: the structure.
      data: the learner's data.
      states: the states of the lanes at `start`, with leading axis L.
      lanes: the data of the lanes, with leading axis L.
      start, stop: the first step, and the step after the last.
      rows: telemetry `[T, L, ...]` by channel; the telemetry of step t replaces row t - `first`.
      first: the step of the first row.

    Returns:
      The states at `stop` and the telemetry.
    """

    def shard(data, states, lanes, start, stop, rows, first):
        def body(step, carry):
            states, rows = carry

            def idle(disturbance: Disturbance | None) -> jax.Array | None:
                return None if disturbance is None else disturbance.windows.idle(step)

            by_lane = idle(lanes.disturbance)
            any_lane = None if by_lane is None else _min_over_rows(program, jnp.min(by_lane, axis=0))

            def step_lane(state: LaneState, lane: Lanes) -> tuple[LaneState, Telemetry]:
                # Lanes that run one after the other compute perturbations only while their own windows are open.
                lane_idle = _min_over_rows(program, idle(lane.disturbance)) if program.execution == "map" else any_lane
                return lane_step(program, data, state, lane, step, lane_idle)

            states, row = _map_lanes(step_lane, program.execution)(states, lanes)
            return split_states(program, states), {name: rows[name].at[step - first].set(row[name]) for name in rows}

        return jax.lax.fori_loop(start, stop, body, (split_states(program, states), rows))

    specs = (REPLICATED, LANES, LANES, REPLICATED, REPLICATED, ROWS, REPLICATED)
    sharded = map_over_devices(program.devices, shard, specs, (LANES, ROWS), program.model_devices)
    start, stop, first = jnp.int32(start), jnp.int32(stop), jnp.int32(first)
    return sharded(data, states, lanes, start, stop, rows, first)


def split_states(program: Program, states: LaneState) -> LaneState:
    """Returns the states with constraints that split each lane among its devices; unchanged if no lane is shared."""
    partition = program.learner.partition
    return states if partition is None or program.model_devices == 1 else constrain_tree(states, partition, leading=1)


def _min_over_rows(program: Program, idle: jax.Array | None) -> jax.Array | None:
    """Returns the minimum over all rows of devices that share a lane.

    All rows must take the same branches, since a branch may contain collective operations.
    """
    if idle is None or program.model_devices == 1 or program.groups == 1:
        return idle
    return jax.lax.pmin(idle, LANE_AXIS)


def _map_lanes(function: Callable, execution: Execution) -> Callable:
    if execution in ("vmap", "auto"):
        return jax.vmap(function)
    if execution == "map":
        return lambda states, lanes: jax.lax.map(lambda pair: function(*pair), (states, lanes))

    def map_in_batches(states: LaneState, lanes: Lanes) -> tuple[LaneState, Telemetry]:
        # `jax.lax.map` cannot concatenate the batches of results of size zero, so that these are created afterwards.
        result: Any = None

        def nonempty_leaves(pair: tuple[LaneState, Lanes]) -> list[Any]:
            nonlocal result
            leaves, structure = jax.tree.flatten(function(*pair))
            empty_shapes = [None if jnp.size(x) else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
            result = empty_shapes, structure
            return [x for x in leaves if jnp.size(x)]

        batch_size = round_up_to_vectors(int(execution))
        nonempty = iter(jax.lax.map(nonempty_leaves, (states, lanes), batch_size=batch_size))
        empty_shapes, structure = result
        count = len(lanes.seed)
        leaves = [next(nonempty) if x is None else jax.lax.full((count, *x.shape), 0, x.dtype) for x in empty_shapes]
        return jax.tree.unflatten(structure, leaves)

    return map_in_batches


@struct.dataclass
class ForkInputs:
    """The data of all fork groups of one width, with the group as leading axis.

    Attributes:
      onset: the onset of each group, int32 `[G]`.
      position: the index of the group's onset among all onsets, int32 `[G]`.
      lanes: the data of the lanes, `[G, L]`.
      seeds: the position of each lane's seed among the seeds, int32 `[G, L]`.
    """

    onset: Any
    position: Any
    lanes: Lanes
    seeds: Any


@struct.dataclass
class Inputs:
    """The data of a whole grid; other values of the same shapes use the same compiled program.

    Attributes:
      data: the learner's data.
      baseline: the lanes of the baseline, `[S]`.
      segments: the first and last steps of the baseline's segments between onsets, int32 `[O + 1, 2]`.
      forks: one entry for every width of fork group.
    """

    data: Any
    baseline: Lanes
    segments: Any
    forks: tuple[ForkInputs, ...]


def run(program: Program, inputs: Inputs) -> tuple[Telemetry, tuple[Telemetry, ...]]:
    """Trains the whole grid, as a pure function that can be jitted.

    Returns the telemetry of the baseline, `[T, S, ...]`, and of every width of fork groups, `[G, T, L, ...]`. Rows that
    were not computed (those of the baseline after its end and of a fork before its onset) are NaN.
    """
    states = initial_states(program, inputs.data, jnp.asarray(inputs.baseline.seed))
    rows = empty_telemetry(program, program.steps, inputs.baseline.seed.shape[0])

    def segment(carry, span):
        states, rows = advance(program, inputs.data, carry[0], inputs.baseline, span[0], span[1], carry[1], 0)
        return (states, rows), states

    (_, baseline), at_onset = jax.lax.scan(segment, (states, rows), jnp.asarray(inputs.segments))

    def fork(group: ForkInputs) -> Telemetry:
        baseline = jax.tree.map(lambda x: x[group.position], at_onset)
        states = forked_states(program, baseline, group.seeds)
        rows = empty_telemetry(program, program.steps, group.lanes.seed.shape[0])
        return advance(program, inputs.data, states, group.lanes, group.onset, program.steps, rows, 0)[1]

    return baseline, tuple(jax.lax.map(fork, group) for group in inputs.forks)


@functools.lru_cache(maxsize=64)
def compiled(program: Program) -> Callable[[Inputs], tuple]:
    """Returns the jitted function `run` for a program; inputs of the same shapes share the compilation."""
    return jax.jit(functools.partial(run, program))
