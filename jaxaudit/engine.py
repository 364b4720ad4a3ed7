"""The compiled program of a grid, on real arrays."""

from __future__ import annotations

import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxaudit.grid import Grid, Lanes, LaneState, advance, forked, initial, telemetry_shapes
from jaxaudit.learner import Telemetry


class Engine:
    """The program of a grid, compiled once for each width of lanes: `initial`, `forked` and `advance`.

    A phase is the baseline (None) or the position of a fork group. Its states have a leading axis of lanes,
    filled up to a multiple of the devices; `stored` and `restored` go between them and what a checkpoint
    holds, which is the lanes alone.
    """

    def __init__(self, grid: Grid, rows: int):
        self.grid = grid
        self.rows = rows
        self.compile_seconds = 0.0
        self._programs: dict[tuple[bool, int], jax.stages.Compiled] = {}
        self._lanes: dict[int | None, tuple[Lanes, np.ndarray]] = {}

    def lanes(self, fork: int | None) -> tuple[Lanes, np.ndarray]:
        """The lanes of a phase, and each one's seed position."""
        if fork not in self._lanes:
            self._lanes[fork] = self.grid.lanes(None if fork is None else self.grid.forks[fork])
        return self._lanes[fork]

    def count(self, fork: int | None) -> int:
        """Lanes of a phase, without those that fill up the devices."""
        return len(self.grid.seeds) * (1 if fork is None else len(self.grid.forks[fork].conditions))

    def initial(self) -> LaneState:
        """The baseline's first states."""
        return jax.jit(partial(initial, self.grid.program))(self.lanes(None)[0].seed)

    def forked(self, baseline: LaneState, fork: int) -> LaneState:
        """A fork group's states at its onset, from the baseline's, stored or not."""
        return forked(self.grid.program, baseline, self.lanes(fork)[1])

    def stored(self, fork: int | None, states: LaneState) -> LaneState:
        """The states a checkpoint holds: one for each lane."""
        return jax.tree.map(lambda x: x[: self.count(fork)], states)

    def stored_shapes(self, fork: int | None) -> LaneState:
        """Shapes and dtypes of a phase's stored states."""
        return self._shapes(fork, self.count(fork))

    def _shapes(self, fork: int | None, lanes: int) -> LaneState:
        """Shapes and dtypes of the states of a phase's lanes."""
        program = self.grid.program
        states = jax.eval_shape(partial(initial, program), jax.ShapeDtypeStruct((lanes,), np.uint32))
        if fork is None:
            return states
        return jax.eval_shape(partial(forked, program), states, jax.ShapeDtypeStruct((lanes,), np.int32))

    def restored(self, fork: int | None, states: LaneState) -> LaneState:
        """A phase's states from stored ones; the lanes that fill up the devices repeat the first."""
        count, width = self.count(fork), self.lanes(fork)[1].shape[0]
        positions = np.r_[:count, np.zeros(width - count, np.int64)]
        return jax.tree.map(lambda x: x[positions], states)

    def row_shapes(self, fork: int | None) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of a phase's chunk of telemetry, `[rows, L, ...]`."""
        leading = (self.rows, self.lanes(fork)[1].shape[0])
        shapes = telemetry_shapes(self.grid.program)
        return {name: jax.ShapeDtypeStruct((*leading, *shape), np.float32) for name, shape in shapes.items()}

    def advance(self, fork: int | None, states: LaneState, start: int, stop: int) -> tuple[LaneState, Telemetry]:
        """Trains a phase's lanes from `start` to `stop`, at most `rows` steps.

        Row t - start of the telemetry is step t; rows past the last are NaN.
        """
        program = self.program(fork)
        rows = {name: jnp.full(s.shape, jnp.nan, s.dtype) for name, s in self.row_shapes(fork).items()}
        arguments = (states, self.lanes(fork)[0], jnp.int32(start), jnp.int32(stop), rows)
        placed = jax.tree.map(jax.device_put, arguments, program.input_shardings[0])
        return jax.block_until_ready(program(*placed))

    def program(self, fork: int | None) -> jax.stages.Compiled:
        """The compiled program of a phase; fork groups of one width share it."""
        lanes = self.lanes(fork)[0]
        key = (fork is None, lanes.seed.shape[0])
        if key not in self._programs:
            begun = time.perf_counter()

            def program(states, lanes, start, stop, rows):
                return advance(self.grid.program, states, lanes, start, stop, rows, start)

            states = self._shapes(fork, len(lanes.seed))
            step = jax.ShapeDtypeStruct((), np.int32)
            lowered = jax.jit(program).lower(states, lanes, step, step, self.row_shapes(fork))
            self._programs[key] = lowered.compile()
            self.compile_seconds += time.perf_counter() - begun
        return self._programs[key]
