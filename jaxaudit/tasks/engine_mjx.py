"""MJX, MuJoCo in JAX: the engine for GPU and TPU."""

import copy

import jax
import jax.numpy as jnp
import mujoco

from jaxaudit.tasks._brax import State, mjx
from jaxaudit.tasks.definitions import MujocoTask
from jaxaudit.tasks.engine import MujocoEnv, PhysicsState


class MjxEnv(MujocoEnv):
    """A task on MJX in float32, with the definition's Newton iterations.

    Divergence and non-finite actions give what they give on C MuJoCo: NaN, in that simulation only.

    It runs on a CPU too, for tests: there it is slow, and batches of many hundreds can hang, because jaxlib's
    batched Cholesky factorisation deadlocks when two of them wait for the same few threads.
    """

    def __init__(self, task: MujocoTask):
        super().__init__(task)
        model = copy.copy(self.model)
        model.opt.solver = mujoco.mjtSolver.mjSOL_NEWTON
        model.opt.iterations = task.iterations
        model.opt.ls_iterations = task.ls_iterations
        self._mjx_model = mjx.put_model(model, impl="jax")
        self._blank = mjx.make_data(model, impl="jax")

    @property
    def backend(self) -> str:
        """The engine's name."""
        return "mjx"

    def step(self, state: State, action: jax.Array) -> State:
        """Advance by one env step under an action `[action_size]`."""
        columns = state.pipeline_state.high
        obeyed = jnp.isfinite(action).all()
        moved = self._simulate(columns, jnp.where(obeyed, action, 0.0))
        # C MuJoCo's own bound on sane values; false for NaN.
        sane = (jnp.abs(moved) < mujoco.mjMAXVAL).all()
        after = jnp.where(obeyed, jnp.where(sane, moved, jnp.nan), columns)
        alive = obeyed & sane

        was, now = self.physics(columns), self.physics(after)
        parts = self.task.reward(was, now, action, self.dt)
        parts = {name: jnp.where(alive, part, jnp.nan).astype(jnp.float32) for name, part in parts.items()}
        observation = self.task.observe(now)
        return state.replace(
            pipeline_state=PhysicsState(after, jnp.zeros_like(after)),
            obs=jnp.where(alive, observation, jnp.nan).astype(jnp.float32),
            reward=sum(parts.values()),
            done=(self.task.terminated(now) & alive).astype(jnp.float32),
            metrics=parts,
        )

    def _simulate(self, columns: jax.Array, action: jax.Array) -> jax.Array:
        nq, nv, na = self.model.nq, self.model.nv, self.model.na
        qpos, qvel, act, warmstart = jnp.split(columns, (nq, nq + nv, nq + nv + na))
        data = self._blank.replace(qpos=qpos, qvel=qvel, act=act, qacc_warmstart=warmstart, ctrl=action)
        step = lambda _, data: mjx.step(self._mjx_model, data)  # noqa: E731
        data = jax.lax.fori_loop(0, self.task.frame_skip, step, data)
        return jnp.concatenate([data.qpos, data.qvel, data.act, data.qacc_warmstart])
