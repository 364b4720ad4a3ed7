"""C MuJoCo behind a host callback: on a CPU about ten times faster than MJX, with nothing to compile."""

import collections
import contextlib
import copy
import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import mujoco
import numpy as np
from jax.experimental.buffer_callback import buffer_callback
from mujoco import mjtState
from mujoco.batch import Batch, SimulationError

from jaxaudit.runtime.machine import cores
from jaxaudit.tasks import engine
from jaxaudit.tasks._brax import State
from jaxaudit.tasks.engine import NAMES, SCALED, MujocoEnv, MujocoTask, PhysicsState, load_model

_DIVERGED = [
    int(warning)
    for warning in (
        mujoco.mjtWarning.mjWARN_BADQPOS,
        mujoco.mjtWarning.mjWARN_BADQVEL,
        mujoco.mjtWarning.mjWARN_BADQACC,
    )
]
# What a row of columns holds, in the order in which MuJoCo packs a state.
_COLUMNS = mjtState.mjSTATE_QPOS | mjtState.mjSTATE_QVEL | mjtState.mjSTATE_ACT | mjtState.mjSTATE_WARMSTART
_COLUMNS_AND_CTRL = int(_COLUMNS | mjtState.mjSTATE_CTRL)


class Moved(NamedTuple):
    """N simulations after a step.

    Attributes:
        columns: `[N, nq + nv + na + nv]`, NaN where diverged, as given where not alive.
        diverged: `[N]` bool.
        derived: what the task needs, `[N, ...]`; arbitrary where diverged or not alive.
    """

    columns: np.ndarray
    diverged: np.ndarray
    derived: dict[str, np.ndarray]


def advance(
    task: MujocoTask, columns: np.ndarray, ctrl: np.ndarray, alive: np.ndarray, factors: np.ndarray | None
) -> Moved:
    """Take one env step in the simulations that are alive.

    Args:
        task: the definition.
        columns: `[N, nq + nv + na + nv]`, positions, velocities, activations and warm start.
        ctrl: `[N, nu]`.
        alive: `[N]` bool.
        factors: `[N, 4]` on the model's parameters, in the order of `dynamics.NAMES`, or None.
    """
    # mj_step leaves the contact forces uncomputed, and a Batch has no call that computes them afterwards.
    move = _one_by_one if "cfrc_ext" in task.needs else _together
    if factors is None:
        return move(task, columns, ctrl, alive, None)
    shifted = alive & (factors != 1).any(1)
    moved = move(task, columns, ctrl, alive & ~shifted, None)
    if shifted.any():
        other = move(task, columns, ctrl, shifted, factors)
        moved.columns[shifted] = other.columns[shifted]
        moved.diverged[shifted] = other.diverged[shifted]
        for name, values in moved.derived.items():
            values[shifted] = other.derived[name][shifted]
    return moved


def derive(task: MujocoTask, state: np.ndarray) -> dict[str, np.ndarray]:
    """Return what a task needs, `[N, ...]` each, at positions and velocities `[N, nq + nv]` without controls."""
    with _borrowed(task, len(state), varied=False) as batch:
        row = batch.state
        row[...] = 0.0
        row[:, 1 : 1 + state.shape[1]] = state
        batch.forward()
        derived = _derived(task, batch)
    if "cfrc_ext" in task.needs:
        derived["cfrc_ext"] = np.zeros((len(state), load_model(task).nbody, 6))
    return derived


def _together(
    task: MujocoTask, columns: np.ndarray, ctrl: np.ndarray, alive: np.ndarray, factors: np.ndarray | None
) -> Moved:
    with _borrowed(task, len(columns), varied=factors is not None) as batch:
        if factors is not None:
            _vary(batch, alive, factors)
        # A row of a Batch is the time, then exactly these columns, then the controls.
        rows = batch.state[:, 1 : 1 + columns.shape[1]]
        rows[...] = columns
        batch.ctrl = ctrl
        batch.time = 0.0  # nothing is left of the batch's last use
        diverged = _step(batch, alive, task.frame_skip)
        rows[diverged] = np.nan
        return Moved(rows.copy(), diverged, _derived(task, batch))


def _step(batch: Batch, alive: np.ndarray, frame_skip: int) -> np.ndarray:
    """Step the living simulations and return a mask of those that diverged in doing so."""
    diverged = np.zeros(len(alive), bool)
    try:
        batch.step(None if alive.all() else np.flatnonzero(alive), nstep=frame_skip)
    except SimulationError as error:
        diverged[error.ids] = True
    # MuJoCo answers divergence with a warning, and resets that simulation. A warning is a row (info, count).
    if batch.warning.any():
        diverged |= batch.warning[:, _DIVERGED, 1].any(1)
        batch.warning[...] = 0
    return diverged


def _derived(task: MujocoTask, batch: Batch) -> dict[str, np.ndarray]:
    return {name: batch.bind(name).copy() for name in task.needs if name != "cfrc_ext"}


def _vary(batch: Batch, chosen: np.ndarray, factors: np.ndarray) -> None:
    """Give the chosen simulations of a batch their own parameters."""
    for field, name in SCALED.items():
        original = _field(batch.model, field)
        if original.size:
            factor = factors[chosen, NAMES.index(name)].astype(np.float64)
            batch.expand(field)[chosen] = original * factor.reshape(-1, *(1,) * original.ndim)


def _field(model: mujoco.MjModel, name: str) -> np.ndarray:
    return model.opt.gravity if name == "opt.gravity" else getattr(model, name)


idle_batches: dict[tuple[MujocoTask, int, bool], collections.deque[Batch]] = collections.defaultdict(collections.deque)


@contextlib.contextmanager
def _borrowed(task: MujocoTask, size: int, varied: bool) -> Iterator[Batch]:
    """Lend a batch of `size` simulations: an idle one, or a new one if JAX calls from several threads.

    The simulations of a varied one have parameters of their own.
    """
    idle = idle_batches[task, size, varied]
    try:
        batch = idle.pop()
    except IndexError:
        # All cores are shared evenly by JAX's devices, which each step a batch of their own.
        batch = Batch(load_model(task), size, nthread=max(1, cores() // jax.local_device_count()))
        for name in task.needs:
            if name != "cfrc_ext":
                batch.bind(name)
    try:
        yield batch
    finally:
        idle.append(batch)


class _Worker:
    """What one thread needs to run one simulation after the other."""

    def __init__(self, task: MujocoTask):
        self.shared = load_model(task)
        self.own = copy.copy(self.shared)
        self.data = mujoco.MjData(self.shared)

    def model(self, factors: np.ndarray | None) -> mujoco.MjModel:
        """The task's model, or, under factors `[4]`, this worker's own."""
        if factors is None:
            return self.shared
        for field, name in SCALED.items():
            _field(self.own, field)[...] = _field(self.shared, field) * float(factors[NAMES.index(name)])
        return self.own

    def step(self, model: mujoco.MjModel, state: np.ndarray, frame_skip: int) -> bool:
        """Do what Gymnasium does in a step, from a state `[columns and controls]`; false if it diverged."""
        mujoco.mj_setState(model, self.data, state, _COLUMNS_AND_CTRL)
        try:
            mujoco.mj_step(model, self.data, frame_skip)
        except mujoco.FatalError:  # which leaves the data in no defined condition
            self.data = mujoco.MjData(model)
            return False
        if self.data.warning.number[_DIVERGED].any():
            self.data.warning.number[:] = 0
            return False
        mujoco.mj_rnePostConstraint(model, self.data)
        return True


idle_workers: dict[MujocoTask, collections.deque[_Worker]] = collections.defaultdict(collections.deque)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(cores(), "jaxaudit-physics")


def _one_by_one(
    task: MujocoTask, columns: np.ndarray, ctrl: np.ndarray, alive: np.ndarray, factors: np.ndarray | None
) -> Moved:
    """Step in Python, on all cores: MuJoCo releases the interpreter's lock while it works."""
    states = np.concatenate([columns, ctrl], axis=1)
    shapes = {name: getattr(_shape_source(task), name).shape for name in task.needs}
    moved = Moved(
        columns.copy(),
        np.zeros(len(columns), bool),
        {name: np.zeros((len(columns), *shape)) for name, shape in shapes.items()},
    )

    def run(chosen: np.ndarray) -> None:
        try:
            worker = idle_workers[task].pop()
        except IndexError:
            worker = _Worker(task)
        for i in chosen:
            model = worker.model(None if factors is None else factors[i])
            if not worker.step(model, states[i], task.frame_skip):
                moved.diverged[i] = True
                moved.columns[i] = np.nan
                continue
            mujoco.mj_getState(model, worker.data, moved.columns[i], int(_COLUMNS))
            for name, values in moved.derived.items():
                values[i] = getattr(worker.data, name)
        idle_workers[task].append(worker)

    shares = np.array_split(np.flatnonzero(alive), 4 * cores())
    list(_threads().map(run, [share for share in shares if len(share)]))
    return moved


@functools.cache
def _shape_source(task: MujocoTask) -> mujoco.MjData:
    return mujoco.MjData(load_model(task))


class CMujocoEnv(MujocoEnv):
    """A task on C MuJoCo, in float64 on all cores: one host call per env step, whatever axes are vmapped.

    A simulation that diverges gives NaN from then on. A non-finite action gives NaN observation and reward
    and leaves the simulation where it was. Neither terminates an episode, and neither touches other
    simulations.
    """

    def __init__(self, task: MujocoTask):
        if (backend := jax.default_backend()) != "cpu":
            raise ValueError(f"physics 'c' needs JAX's 'cpu' backend, and here it is {backend!r}; use 'mjx'")
        super().__init__(task)

    @property
    def backend(self) -> str:
        return "c"

    def step(self, state: State, action: jax.Array) -> State:
        """Advance by one env step under an action `[action_size]`."""
        physics = state.pipeline_state
        outputs = {
            "high": physics.high,
            "low": physics.low,
            "observation": state.obs,
            "reward": state.reward,
            "done": state.done,
            "metrics": state.metrics,
        }
        factors = engine.stacked(state.info)
        shift = () if factors is None else (factors,)
        out = _on_host(self._advance, outputs, physics.high, physics.low, action, *shift)
        return state.replace(
            pipeline_state=PhysicsState(out["high"], out["low"]),
            obs=out["observation"],
            reward=out["reward"],
            done=out["done"],
            metrics=out["metrics"],
        )

    def first_look(self, qpos: jax.Array, qvel: jax.Array) -> tuple[jax.Array, PhysicsState]:
        """Return a new episode's observation `[O]` and tracked positions `[k]`, from `[nq]` and `[nv]`."""
        if not self.task.needs:
            return super().first_look(qpos, qvel)
        track = jax.ShapeDtypeStruct((self.tracked,), np.float32)
        outputs = {
            "high": track,
            "low": track,
            "observation": jax.ShapeDtypeStruct((self.observation_size,), np.float32),
        }
        out = _on_host(self._look, outputs, qpos, qvel)
        return out["observation"], PhysicsState(out["high"], out["low"])

    def _advance(self, _context, out, high, low, action, factors=None) -> None:
        """Step a whole batch on the host and fill the output buffers, by NumPy alone."""
        axes = np.ndim(action) - 1
        high, low, action = _rows(high, axes), _rows(low, axes), _rows(action, axes)
        with np.errstate(all="ignore"):
            before = np.add(high, low, dtype=np.float64)
            alive = np.isfinite(high).all(1) & np.isfinite(action).all(1)
            if factors is not None:
                factors = _rows(factors, axes)
                alive &= engine.valid(factors)
            action = action.astype(np.float64)
            columns = before[:, : before.shape[1] - self.tracked]
            moved = advance(self.task, columns, action, alive, factors)
            alive &= ~moved.diverged

            was, now = self.physics(before), self.physics(moved.columns, moved.derived)
            after = moved.columns
            if self.tracked:
                kept = np.where(moved.diverged[:, None], np.nan, was.track)
                track = np.where(alive[:, None], now.track, kept)
                after = np.concatenate([after, track], axis=1)
            _split(after, _rows(out["high"], axes), _rows(out["low"], axes))

            parts = self.task.reward(was, now, action, self.dt)
            unless_dead = np.where(alive, 0.0, np.nan)
            _rows(out["observation"], axes)[...] = self.task.observe(now) + unless_dead[:, None]
            _rows(out["reward"], axes)[...] = sum(parts.values()) + unless_dead
            _rows(out["done"], axes)[...] = self.task.terminated(now) & alive
            for name, part in parts.items():
                _rows(out["metrics"][name], axes)[...] = part + unless_dead

    def _look(self, _context, out, qpos, qvel) -> None:
        """Derive what the first observations of a whole batch show, on the host."""
        axes = np.ndim(qpos) - 1
        state = np.concatenate([_rows(qpos, axes), _rows(qvel, axes)], axis=1, dtype=np.float64)
        now = self.physics(state, derive(self.task, state))
        _rows(out["observation"], axes)[...] = self.task.observe(now)
        if self.tracked:
            _split(now.track, _rows(out["high"], axes), _rows(out["low"], axes))


def _on_host(function, outputs: Any, *arguments: jax.Array) -> Any:
    """Call a function of batches on the host.

    Unlike jax.pure_callback, buffer_callback passes the buffers themselves: no copies, and no JAX array inside
    the callback, waiting for which can deadlock when XLA has few threads.
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.float32), outputs)
    return buffer_callback(function, shapes, vmap_method="broadcast_all")(*arguments)


def _rows(buffer: Any, axes: int) -> np.ndarray:
    """View a buffer with its `axes` batch axes made one."""
    array = np.asarray(buffer)
    return array.reshape(-1, *array.shape[axes:])


def _split(values: np.ndarray, high: np.ndarray, low: np.ndarray) -> None:
    """Write float64 values as a sum of two float32 numbers."""
    high[...] = values
    np.subtract(values, high, out=low, casting="same_kind")
