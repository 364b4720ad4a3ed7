"""C MuJoCo on the host: many simulations of a task, advanced side by side in float64, in NumPy."""

import collections
import contextlib
import copy
import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import mujoco
import numpy as np
from mujoco import mjtState
from mujoco.batch import Batch, SimulationError

from jaxaudit.runtime.machine import cores
from jaxaudit.tasks.dynamics import NAMES, SCALED
from jaxaudit.tasks.engine import load_model
from jaxaudit.tasks.task import MujocoTask

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
