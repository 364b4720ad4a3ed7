"""C MuJoCo behind a host callback: on a CPU about ten times faster than MJX, with nothing to compile."""

from typing import Any

import jax
import numpy as np
from jax.experimental.buffer_callback import buffer_callback

from jaxaudit.tasks import dynamics, simulations
from jaxaudit.tasks._brax import State
from jaxaudit.tasks.engine import MujocoEnv, PhysicsState
from jaxaudit.tasks.task import MujocoTask


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
        factors = dynamics.stacked(state.info)
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
                alive &= dynamics.valid(factors)
            action = action.astype(np.float64)
            columns = before[:, : before.shape[1] - self.tracked]
            moved = simulations.advance(self.task, columns, action, alive, factors)
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
        now = self.physics(state, simulations.derive(self.task, state))
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
