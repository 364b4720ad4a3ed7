"""The audit as one pure program: baseline, forks at the onsets, lanes over seeds and conditions.

`Program` is its structure, `Lanes` its data; `advance` moves lanes from one step to another, and serves both `run` (the
whole grid as one function, here) and the engine (batch after batch, in chunks of steps).
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
from jaxaudit.core.sites import find_sites, initial_states, step_telemetry
from jaxaudit.core.taps import STATE, Disturbance, Slot, States, Taps, forget
from jaxaudit.runtime import tracing
from jaxaudit.runtime.sharding import LANE_AXIS, LANES, REPLICATED, ROWS, constrain_tree, map_over_devices

Execution = str | int
"""How the lanes of one device run: "vmap", "map" (one after the other), or a batch size (above 16 in whole eights).

"auto" is left to who runs a grid, and "vmap" until then.
"""


SCORE, ALARM = "monitor_score", "alarm"
"""Channels of a lane that is watched: how unusual it is after a step, and whether an alarm was on during it."""

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
"""Names of a grid's coordinates, which no channel can have."""

VECTOR = 8
WHOLE_VECTORS_FROM = 16


def whole_vectors(lanes: int) -> int:
    """At least as many lanes, such that a CPU computes all of them alike.

    The lanes left over by a vectorised loop are reduced in another order, and would not be bitwise the control's
    (seen from 17 lanes on).
    """
    return lanes if lanes <= WHOLE_VECTORS_FROM else -(-lanes // VECTOR) * VECTOR


class InLoopMonitor(Protocol):
    """What follows a lane's telemetry and raises an alarm; hashable, and its arrays are constants of the program."""

    @property
    def provenance(self) -> str:
        """Tells it from others that raise other alarms."""

    def begin(self) -> Any:
        """What it carries, before the first step."""

    def follow(self, watched: Any, telemetry: Telemetry) -> tuple[Any, jax.Array]:
        """A step's telemetry: what is carried on, and how unusual the lane is, a scalar; above zero is an alarm."""


@struct.dataclass
class Watched:
    """What a lane carries for the watch.

    Attributes:
      following: the watch's own.
      alarm: bool, whether the last step raised it.
    """

    following: Any
    alarm: Any


@dataclass(frozen=True)
class Program:
    """Everything a compiled audit depends on but arrays and the shapes of lanes: equal ones share a compilation.

    The learner is one `without_data`; `watch` is what interventions wait for; `model_devices` share each lane;
    `matmul_precision` is what `jaxaudit.runtime.tracing.resolve_precision` gave.
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
        """How many devices, or rows of devices that share a lane, the lanes are dealt to."""
        return max(1, len(self.devices) // self.model_devices)

    @property
    def on_gpus(self) -> bool:
        """Whether the program runs on GPUs, where a branch in a loop waits for the host."""
        return any(device.platform == "gpu" for device in self.devices)

    @property
    def across_hosts(self) -> bool:
        """Whether some of the devices are other processes'."""
        return any(device.process_index != jax.process_index() for device in self.devices)


@struct.dataclass
class Lanes:
    """L lanes side by side.

    Attributes:
      seed: uint32 `[L]`.
      disturbance: what each lane does, leading axis L; None for the baseline, whose program has no perturbations.
    """

    seed: Any
    disturbance: Disturbance | None


@struct.dataclass
class LaneState:
    """What a lane carries from step to step.

    Attributes:
      learner: the learner's state.
      perturbations: the states of those that keep one; empty in the baseline.
      watched: what the watch knows of it; None without one.
    """

    learner: State
    perturbations: States
    watched: Watched | None = None


def initial(program: Program, data: Any, seeds: jax.Array) -> LaneState:
    """The baseline's first states for `seeds` `[L]`, from the learner's data; randomness from the seed alone."""

    def one(seed: jax.Array) -> LaneState:
        return first_state(program, data, jax.random.fold_in(jax.random.key(seed), 0))

    return jax.vmap(one)(seeds)


def first_state(program: Program, data: Any, key: jax.Array) -> LaneState:
    """A lane of the baseline before its first step."""
    with tracing.with_precision(program.matmul_precision):
        return _unperturbed(program, program.learner.begin(key, data))


def first_shapes(program: Program) -> LaneState:
    """Returns the shapes and dtypes of what `first_state` returns."""
    return jax.eval_shape(functools.partial(_unperturbed, program), program.learner.state_shapes)


def _unperturbed(program: Program, state: State) -> LaneState:
    watched = None if program.watch is None else Watched(program.watch.begin(), jnp.zeros((), bool))
    return LaneState(state, {}, watched)


def forked(program: Program, baseline: LaneState, positions: jax.Array | np.ndarray) -> LaneState:
    """The states of lanes that begin as the baseline's of the seeds at `positions` `[L]`."""

    def taken(states: Any) -> Any:
        return jax.tree.map(lambda x: x[positions], states)

    return with_perturbations(program, LaneState(taken(baseline.learner), {}, taken(baseline.watched)), len(positions))


def with_perturbations(program: Program, states: LaneState, lanes: int) -> LaneState:
    """The states of `lanes` lanes as a fork group's, whose perturbations have nothing behind them."""
    blank = opening_states(program)
    filled = jax.tree.map(lambda x: jnp.broadcast_to(x, (lanes, *jnp.shape(x))), blank)
    return LaneState(states.learner, filled, states.watched)


def opening_states(program: Program) -> States:
    """The states of a lane's perturbations when their windows open."""
    if not any(slot.kind.keeps_state for slot in program.slots):
        return {}
    return initial_states(program.slots, find_sites(program.learner, program.steps))


def lane_step(
    program: Program, data: Any, state: LaneState, lane: Lanes, step: jax.Array, idle: jax.Array | None
) -> tuple[LaneState, Telemetry]:
    """One step of one lane. The learner's key depends on (seed, step), a perturbation's on its kind besides.

    `data` is the learner's.
    `idle` are for each slot the steps since the window of any lane computed with this one was last open; it must not
    be batched.
    """
    kept = state.perturbations
    if kept and lane.disturbance is not None:
        kept = forget(kept, program.slots, lane.disturbance.windows, step, opening_states(program))
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
        states=kept,
        alarm=None if state.watched is None else state.watched.alarm,
        branch_in_loops=not program.on_gpus,
    )
    begin = with_lasting(taps(STATE, without_lasting(state.learner)), of=state.learner)
    with tracing.with_precision(program.matmul_precision):
        learner, telemetry = program.learner.advance(begin, learner_key, taps)
    watched = state.watched
    if watched is not None:
        assert program.watch is not None, "or there would be nothing watched"
        with tracing.with_precision(program.matmul_precision), tracing.in_float32():
            following, unusual = program.watch.follow(watched.following, telemetry)
        telemetry |= {SCORE: unusual, ALARM: watched.alarm.astype(jnp.float32)}
        watched = Watched(following, unusual > 0)
    return LaneState(learner, taps.states or {}, watched), telemetry


def undisturbed(program: Program) -> Program:
    """The program of a baseline, which is the same whatever disturbs its forks."""
    return replace(program, slots=(), paths=())


def telemetry_shapes(program: Program) -> dict[str, tuple[int, ...]]:
    """The shape of one lane's value in each channel."""
    return _telemetry_shapes(undisturbed(program))


@functools.lru_cache(maxsize=64)
def _telemetry_shapes(program: Program) -> dict[str, tuple[int, ...]]:
    shapes = step_telemetry(program.learner, program.steps)
    if program.watch is not None:
        shapes |= {SCORE: (), ALARM: ()}
    if PERFORMANCE not in shapes:
        raise ValueError(f"the learner's telemetry has no '{PERFORMANCE}'; it has: {', '.join(sorted(shapes))}")
    if taken := sorted(shapes.keys() & RESERVED):
        raise ValueError(f"the learner's telemetry has a channel '{taken[0]}', a name that a grid's coordinates have")
    dims = {dim for name in shapes for dim, _ in program.learner.channel(name).dims}
    if taken := sorted(dims & (RESERVED | shapes.keys())):
        raise ValueError(
            f"a dimension of the learner's telemetry is called '{taken[0]}', as a channel or a coordinate is"
        )
    return shapes


def telemetry_rows(program: Program, rows: int, lanes: int) -> Telemetry:
    """Empty telemetry, NaN, float32 `[rows, lanes, ...]`."""
    shapes = telemetry_shapes(program)
    return {name: jnp.full((rows, lanes, *shape), jnp.nan, jnp.float32) for name, shape in shapes.items()}


def advance(
    program: Program, data: Any, states: LaneState, lanes: Lanes, start: Any, stop: Any, rows: Telemetry, first: Any
) -> tuple[LaneState, Telemetry]:
    """Trains lanes from step `start` to `stop` (traced: any span runs the same program).

    `data` is the learner's; `states` and `lanes` have a leading axis L; the telemetry of step t goes to row
    t - `first` of `rows`.
    """

    def shard(data, states, lanes, start, stop, rows, first):
        def body(step, carry):
            states, rows = carry

            def idle(disturbance: Disturbance | None) -> jax.Array | None:
                return None if disturbance is None else disturbance.windows.idle(step)

            each = idle(lanes.disturbance)
            least = None if each is None else _in_step(program, jnp.min(each, axis=0))

            def one(state: LaneState, lane: Lanes) -> tuple[LaneState, Telemetry]:
                # A lane on its own pays for its own open windows alone.
                own = _in_step(program, idle(lane.disturbance)) if program.execution == "map" else least
                return lane_step(program, data, state, lane, step, own)

            states, row = _each_lane(one, program.execution)(states, lanes)
            return split_states(program, states), {name: rows[name].at[step - first].set(row[name]) for name in rows}

        return jax.lax.fori_loop(start, stop, body, (split_states(program, states), rows))

    bounds = (jnp.int32(start), jnp.int32(stop), jnp.int32(first))
    specs = (REPLICATED, LANES, LANES, REPLICATED, REPLICATED, ROWS, REPLICATED)
    dealt = map_over_devices(program.devices, shard, specs, (LANES, ROWS), program.model_devices)
    return dealt(data, states, lanes, bounds[0], bounds[1], rows, bounds[2])


def split_states(program: Program, states: LaneState) -> LaneState:
    """States of lanes, each split among the devices that share it; as they are where none do."""
    partition = program.learner.partition
    return states if partition is None or program.model_devices == 1 else constrain_tree(states, partition, leading=1)


def _in_step(program: Program, idle: jax.Array | None) -> jax.Array | None:
    """The least over all rows of devices that share a lane: they take the same branches, or wait for one another."""
    if idle is None or program.model_devices == 1 or program.groups == 1:
        return idle
    return jax.lax.pmin(idle, LANE_AXIS)


def _each_lane(function: Callable, execution: Execution) -> Callable:
    if execution in ("vmap", "auto"):
        return jax.vmap(function)
    if execution == "map":
        return lambda states, lanes: jax.lax.map(lambda pair: function(*pair), (states, lanes))

    def each(states: LaneState, lanes: Lanes) -> tuple[LaneState, Telemetry]:
        # `jax.lax.map` cannot put together the results of size zero of several batches, and there is nothing in them.
        result: Any = None

        def one(pair: tuple[LaneState, Lanes]) -> list[Any]:
            nonlocal result
            leaves, structure = jax.tree.flatten(function(*pair))
            shapes = [None if jnp.size(x) else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
            result = shapes, structure
            return [x for x in leaves if jnp.size(x)]

        found = iter(jax.lax.map(one, (states, lanes), batch_size=whole_vectors(int(execution))))
        shapes, structure = result
        count = len(lanes.seed)
        full = [next(found) if x is None else jax.lax.full((count, *x.shape), 0, x.dtype) for x in shapes]
        return jax.tree.unflatten(structure, full)

    return each


@struct.dataclass
class ForkInputs:
    """The data of all fork groups of one width, leading axis the group.

    Attributes:
      onset: int32 `[G]`.
      position: index of the group's onset among all onsets, int32 `[G]`.
      lanes: `[G, L]`.
      seeds: each lane's position among the seeds, int32 `[G, L]`.
    """

    onset: Any
    position: Any
    lanes: Lanes
    seeds: Any


@struct.dataclass
class Inputs:
    """The data of a whole grid: change it as you like, nothing recompiles.

    Attributes:
      data: the learner's.
      baseline: the undisturbed lanes, `[S]`.
      segments: the baseline's spans between onsets, int32 `[O + 1, 2]`.
      forks: one entry for every width of fork group.
    """

    data: Any
    baseline: Lanes
    segments: Any
    forks: tuple[ForkInputs, ...]


def run(program: Program, inputs: Inputs) -> tuple[Telemetry, tuple[Telemetry, ...]]:
    """Trains the whole grid; pure, and can be jitted.

    Returns the telemetry of the baseline, `[T, S, ...]`, and of every width of fork groups, `[G, T, L, ...]`. Rows that
    were not computed (of the baseline after its end, of a fork before its onset) are NaN.
    """
    states = initial(program, inputs.data, jnp.asarray(inputs.baseline.seed))
    rows = telemetry_rows(program, program.steps, inputs.baseline.seed.shape[0])

    def segment(carry, span):
        states, rows = advance(program, inputs.data, carry[0], inputs.baseline, span[0], span[1], carry[1], 0)
        return (states, rows), states

    (_, baseline), at_onset = jax.lax.scan(segment, (states, rows), jnp.asarray(inputs.segments))

    def fork(group: ForkInputs) -> Telemetry:
        baseline = jax.tree.map(lambda x: x[group.position], at_onset)
        states = forked(program, baseline, group.seeds)
        rows = telemetry_rows(program, program.steps, group.lanes.seed.shape[0])
        return advance(program, inputs.data, states, group.lanes, group.onset, program.steps, rows, 0)[1]

    return baseline, tuple(jax.lax.map(fork, group) for group in inputs.forks)


@functools.lru_cache(maxsize=64)
def compiled(program: Program) -> Callable[[Inputs], tuple]:
    """Returns `run` for a program, jitted; data of the same shapes share the compilation."""
    return jax.jit(functools.partial(run, program))
