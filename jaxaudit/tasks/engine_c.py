"""C MuJoCo behind a host callback: on a CPU about ten times faster than MJX, with nothing to compile."""

import collections
import contextlib
from collections.abc import Iterator

import jax
import mujoco
import numpy as np
from jax.experimental.buffer_callback import buffer_callback
from mujoco.batch import Batch, SimulationError

from jaxaudit.machine import cores
from jaxaudit.tasks._brax import State
from jaxaudit.tasks.definitions import MujocoTask
from jaxaudit.tasks.engine import MujocoEnv, PhysicsState, load_model

_DIVERGED = [
    int(warning)
    for warning in (
        mujoco.mjtWarning.mjWARN_BADQPOS,
        mujoco.mjtWarning.mjWARN_BADQVEL,
        mujoco.mjtWarning.mjWARN_BADQACC,
    )
]


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
        """The engine's name."""
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
        outputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.float32), outputs)
        # Unlike jax.pure_callback this passes the buffers themselves: no copies, and no JAX array inside the
        # callback, waiting for which can deadlock when XLA has few threads.
        advance = buffer_callback(self._advance, outputs, vmap_method="broadcast_all")
        out = advance(physics.high, physics.low, action)
        return state.replace(
            pipeline_state=PhysicsState(out["high"], out["low"]),
            obs=out["observation"],
            reward=out["reward"],
            done=out["done"],
            metrics=out["metrics"],
        )

    def _advance(self, _context, out, high, low, action) -> None:
        """Step a whole batch on the host and fill the output buffers, by NumPy alone."""
        batch_axes = np.ndim(action) - 1

        def rows(buffer) -> np.ndarray:
            array = np.asarray(buffer)
            return array.reshape(-1, *array.shape[batch_axes:])

        high, low, action = rows(high), rows(low), rows(action)
        with _borrowed(self.task, len(high)) as batch, np.errstate(all="ignore"):
            # A row of a Batch is the time, then exactly the columns of PhysicsState, then the controls.
            columns = batch.state[:, 1 : 1 + high.shape[1]]
            np.add(high, low, out=columns, dtype=np.float64)
            batch.ctrl = action
            batch.time = 0.0  # nothing is left of the batch's last use
            before = columns.copy()
            alive = np.isfinite(high).all(1) & np.isfinite(action).all(1)
            diverged = _step(batch, alive, self.task.frame_skip)
            columns[diverged] = np.nan
            after = columns.copy()

            alive &= ~diverged
            out_high = rows(out["high"])
            out_high[...] = after
            np.subtract(after, out_high, out=rows(out["low"]), casting="same_kind")

            was, now = self.physics(before), self.physics(after)
            parts = self.task.reward(was, now, action.astype(np.float64), self.dt)
            unless_dead = np.where(alive, 0.0, np.nan)
            rows(out["observation"])[...] = self.task.observe(now) + unless_dead[:, None]
            rows(out["reward"])[...] = sum(parts.values()) + unless_dead
            rows(out["done"])[...] = self.task.terminated(now) & alive
            for name, part in parts.items():
                rows(out["metrics"][name])[...] = part + unless_dead


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


def _threads() -> int:
    """Cores for one batch: all of them shared evenly by JAX's devices, which each step a batch of their own."""
    return max(1, cores() // jax.local_device_count())


_idle: dict[tuple[MujocoTask, int], collections.deque[Batch]] = collections.defaultdict(collections.deque)


@contextlib.contextmanager
def _borrowed(task: MujocoTask, size: int) -> Iterator[Batch]:
    """Lend a batch of `size` simulations: an idle one, or a new one if JAX calls from several threads."""
    idle = _idle[task, size]
    try:
        batch = idle.pop()
    except IndexError:
        batch = Batch(load_model(task), size, nthread=_threads())
    try:
        yield batch
    finally:
        idle.append(batch)
