"""MJX, MuJoCo in JAX: the engine for GPU and TPU."""

import copy
from typing import Any

import jax
import jax.numpy as jnp
import mujoco

from jaxaudit.tasks import dynamics, mjx_step
from jaxaudit.tasks._brax import State, mjx
from jaxaudit.tasks.engine import MujocoEnv, PhysicsState
from jaxaudit.tasks.task import MujocoTask

_IN_IMPLEMENTATION = ("cinert", "cfrc_ext")  # MJX keeps these apart from what all its implementations share


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
        # To trace MJX takes seconds: a task is traced once, wherever programs step it. Inlined, they stay as they were.
        self._step = jax.jit(self._step_traced, inline=True)
        self._forward = jax.jit(self._forward_traced, inline=True)

    @property
    def backend(self) -> str:
        """The engine's name."""
        return "mjx"

    def step(self, state: State, action: jax.Array) -> State:
        """Advance by one env step under an action `[action_size]`."""
        return self._step(state, action)

    def _step_traced(self, state: State, action: jax.Array) -> State:
        columns = state.pipeline_state.high
        factors = dynamics.stacked(state.info)
        obeyed = jnp.isfinite(action).all()
        model = self._mjx_model
        if factors is not None:
            obeyed &= dynamics.valid(factors)
            model = _scaled(model, jnp.where(obeyed, factors, 1.0))
        data = self._simulate(model, columns, jnp.where(obeyed, action, 0.0))

        moved = jnp.concatenate([data.qpos, data.qvel, data.act, data.qacc_warmstart])
        derived = self._derived(model, data)
        was, now = self.physics(columns), self.physics(moved, derived)
        if self.tracked:
            moved = jnp.concatenate([moved, now.track])
        # C MuJoCo's own bound on sane values; false for NaN.
        sane = (jnp.abs(moved) < mujoco.mjMAXVAL).all()
        after = jnp.where(obeyed, jnp.where(sane, moved, jnp.nan), columns)
        alive = obeyed & sane

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

    def first_look(self, qpos: jax.Array, qvel: jax.Array) -> tuple[jax.Array, PhysicsState]:
        """Return a new episode's observation `[O]` and tracked positions `[k]`, from `[nq]` and `[nv]`."""
        if not self.task.needs:
            return super().first_look(qpos, qvel)
        data = self._forward(qpos, qvel)
        rest = jnp.zeros(self.model.na + self.model.nv)
        now = self.physics(jnp.concatenate([qpos, qvel, rest]), self._derived(None, data))
        track = now.track if self.tracked else jnp.zeros(0)
        return self.task.observe(now).astype(jnp.float32), PhysicsState(track, jnp.zeros_like(track))

    def _forward_traced(self, qpos: jax.Array, qvel: jax.Array) -> mjx.Data:
        return mjx_step.forward(self._mjx_model, self._blank.replace(qpos=qpos, qvel=qvel))

    def _simulate(self, model: mjx.Model, columns: jax.Array, action: jax.Array) -> mjx.Data:
        nq, nv, na = self.model.nq, self.model.nv, self.model.na
        qpos, qvel, act, warmstart, _ = jnp.split(columns, (nq, nq + nv, nq + nv + na, nq + 2 * nv + na))
        data = self._blank.replace(qpos=qpos, qvel=qvel, act=act, qacc_warmstart=warmstart, ctrl=action)
        return jax.lax.fori_loop(0, self.task.frame_skip, lambda _, data: mjx_step.step(model, data), data)

    def _derived(self, model: mjx.Model | None, data: mjx.Data) -> dict[str, jax.Array]:
        """Return what the task needs; the contact forces only with a model."""
        if model is not None and "cfrc_ext" in self.task.needs:
            data = mjx.rne_postconstraint(model, data)
        return {name: getattr(data._impl if name in _IN_IMPLEMENTATION else data, name) for name in self.task.needs}


def _scaled(model: mjx.Model, factors: jax.Array) -> mjx.Model:
    """Multiply a model's parameters by factors `[4]`."""
    changes: dict[str, Any] = {}
    for field, name in dynamics.SCALED.items():
        original = model.opt.gravity if field == "opt.gravity" else getattr(model, field)
        changes[field] = original * factors[dynamics.NAMES.index(name)]
    return model.tree_replace(changes)
