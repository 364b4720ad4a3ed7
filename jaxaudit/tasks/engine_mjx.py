"""MJX, MuJoCo in JAX: the physics engine for GPUs and TPUs."""

import copy
from typing import Any

import jax
import jax.numpy as jnp
import mujoco

from jaxaudit.tasks import engine
from jaxaudit.tasks._brax import State, mjx
from jaxaudit.tasks.engine import MujocoEnv, MujocoTask, PhysicsState

_PLANE, _CAPSULE = int(mujoco.mjtGeom.mjGEOM_PLANE), int(mujoco.mjtGeom.mjGEOM_CAPSULE)
_FREE, _BALL = int(mujoco.mjtJoint.mjJNT_FREE), int(mujoco.mjtJoint.mjJNT_BALL)
_A = (0.0, 0.5, 0.5, 1.0)
_B = (1 / 6, 1 / 3, 1 / 3, 1 / 6)
"""The coefficients of the classical Runge-Kutta method of order four."""


def step(model: mjx.Model, data: mjx.Data) -> mjx.Data:
    if model.opt.integrator == mujoco.mjtIntegrator.mjINT_RK4 and not model.na:
        return _runge_kutta(model, data)
    data = forward(model, data)
    if model.opt.integrator == mujoco.mjtIntegrator.mjINT_RK4:
        return mjx.rungekutta4(model, data)
    if model.opt.integrator == mujoco.mjtIntegrator.mjINT_IMPLICITFAST:
        return mjx.implicit(model, data)
    return mjx.euler(model, data)


def forward(model: mjx.Model, data: mjx.Data) -> mjx.Data:
    """Evaluates accelerations like mjx.forward, with C MuJoCo's contact frames and a refined solution."""
    data = mjx.fwd_position(model, data)
    data = mjx.make_constraint(model, _align_contacts(model, data))
    data = mjx.fwd_velocity(model, data)
    data = mjx.fwd_actuation(model, data)
    data = mjx.fwd_acceleration(model, data)
    if data._impl.efc_J.size == 0:
        return data.replace(qacc=data.qacc_smooth)
    return _refine(model, mjx.solve(model, data))


def _refine(model: mjx.Model, data: mjx.Data) -> mjx.Data:
    """Takes one more Newton step, without a line search, if it brings forces and accelerations closer to balance.

    MJX compares costs, which in float32 cannot distinguish accelerations that agree in half of their digits. As
    contacts are stiff, their forces would be accurate to 3 digits only. The step applies to models with pyramidal
    friction cones and limits alone; others stay unchanged.
    """
    impl = data._impl
    jacobian, stiffness, free = impl.efc_J, impl.efc_D, data.qfrc_smooth
    only_limits = impl.ne == 0 and impl.nf == 0 and model.opt.cone == mujoco.mjtCone.mjCONE_PYRAMIDAL
    if not only_limits:
        return data

    def force(residual: jax.Array) -> jax.Array:
        return stiffness * jnp.maximum(-residual, 0.0)

    def imbalance(inertial: jax.Array, residual: jax.Array) -> jax.Array:
        return inertial - free - jacobian.T @ force(residual)

    # Both are updated by the change of the step: computed anew, they would have the rounding errors of large numbers.
    residual = jacobian @ data.qacc - impl.efc_aref
    inertial = mjx.mul_m(model, data, data.qacc)
    before = imbalance(inertial, residual)
    hessian = mjx.full_m(model, data) + (jacobian.T * (stiffness * (residual < 0))) @ jacobian
    step = -jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor((hessian + hessian.T) / 2), before)
    residual = residual + jacobian @ step
    after = imbalance(inertial + mjx.mul_m(model, data, step), residual)
    better = (after**2).sum() < (before**2).sum()

    def if_better(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(better, new, old)

    return data.tree_replace(
        {
            "qacc": if_better(data.qacc + step, data.qacc),
            "qfrc_constraint": if_better(jacobian.T @ force(residual), data.qfrc_constraint),
            "_impl.efc_force": if_better(force(residual), impl.efc_force),
        }
    )


def _align_contacts(model: mjx.Model, data: mjx.Data) -> mjx.Data:
    """Rotates the frames of contacts between a plane and a capsule to lie along the capsule, as C MuJoCo does.

    MJX does so for lying capsules only. The rotation matters because the friction cone is a pyramid.
    """
    contact = data._impl.contact
    if not contact.geom.shape[0]:
        return data
    kinds = jnp.asarray(model.geom_type)[contact.geom]
    selected = (kinds[:, 0] == _PLANE) & (kinds[:, 1] == _CAPSULE)
    normal, axis = contact.frame[:, 0], data.geom_xmat[contact.geom[:, 1]][:, :, 2]
    tangent = axis - normal * (normal * axis).sum(1, keepdims=True)
    length = jnp.sqrt((tangent**2).sum(1, keepdims=True) + 1e-30)
    tangent = tangent / length
    frame = jnp.stack([normal, tangent, jnp.cross(normal, tangent)], axis=1)
    upright = length < 1e-6  # in float32 the remaining vector has no reliable direction
    frame = jnp.where((selected & ~upright[:, 0])[:, None, None], frame, contact.frame)
    return data.tree_replace({"_impl.contact.frame": frame})


def _runge_kutta(model: mjx.Model, data: mjx.Data) -> mjx.Data:
    """Takes a fourth-order Runge-Kutta step.

    mjx.rungekutta4 lacks the correction (Munthe-Kaas, 1998) that makes the orientation of free and ball joints accurate
    to fourth order too, which C MuJoCo has since version 4. It also compiles the dynamics four times.
    """
    dt = model.opt.timestep
    qpos, qvel = data.qpos, data.qvel

    def stage(carry, weights):
        data, velocity, acceleration, velocities, accelerations = carry
        a, b = weights
        change = a * dt * velocity
        stage_qvel = qvel + a * dt * acceleration
        data = forward(model, data.replace(qpos=_integrate(model, qpos, change), qvel=stage_qvel))
        velocity = _pull_back(model, change, stage_qvel)
        acceleration = data.qacc
        return (data, velocity, acceleration, velocities + b * velocity, accelerations + b * acceleration), None

    zero = jnp.zeros_like(qvel)
    weights = (jnp.array(_A, qvel.dtype), jnp.array(_B, qvel.dtype))
    (data, _, _, velocities, accelerations), _ = jax.lax.scan(stage, (data, zero, zero, zero, zero), weights)
    return data.replace(
        qpos=_integrate(model, qpos, dt * velocities),
        qvel=qvel + dt * accelerations,
        qacc_warmstart=data.qacc,
    )


def _rotation_indices(model: mjx.Model) -> list[tuple[int, int]]:
    """Returns the indices in positions and velocities at which the orientations of free and ball joints begin."""
    indices = []
    for kind, q, v in zip(model.jnt_type, model.jnt_qposadr, model.jnt_dofadr, strict=True):
        if kind == _FREE:
            indices.append((int(q) + 3, int(v) + 3))
        elif kind == _BALL:
            indices.append((int(q), int(v)))
    return indices


def _integrate(model: mjx.Model, qpos: jax.Array, change: jax.Array) -> jax.Array:
    """Moves positions `[nq]` by a change in the space of velocities `[nv]`."""
    parts, q, v = [], 0, 0
    for q_rotation, v_rotation in _rotation_indices(model):
        parts += [
            qpos[q:q_rotation] + change[v:v_rotation],
            _rotate(qpos[q_rotation : q_rotation + 4], change[v_rotation : v_rotation + 3]),
        ]
        q, v = q_rotation + 4, v_rotation + 3
    return jnp.concatenate([*parts, qpos[q:] + change[v:]])


def _rotate(quaternion: jax.Array, turn: jax.Array) -> jax.Array:
    """Multiplies a quaternion `[4]` by a rotation vector `[3]` in the body's frame."""
    half = 0.5 * jnp.sqrt((turn**2).sum() + 1e-30)
    w, vector = jnp.cos(half), 0.5 * jnp.sinc(half / jnp.pi) * turn
    w0, vector0 = quaternion[0], quaternion[1:]
    rotated = jnp.append(w0 * w - vector0 @ vector, w0 * vector + w * vector0 + jnp.cross(vector0, vector))
    return rotated / jnp.linalg.norm(rotated)


def _pull_back(model: mjx.Model, change: jax.Array, velocity: jax.Array) -> jax.Array:
    """Transports velocities `[nv]`, which apply after a change of the positions `[nv]`, to the beginning of the step.

    For a rotation this is the inverse differential of the exponential map.
    """
    for _, v in _rotation_indices(model):
        turn, w = change[v : v + 3], velocity[v : v + 3]
        cross = jnp.cross(turn, w)
        # (1 - x cot(x)) / 4x^2 at half the angle, to sixth order: a step turns by far less than a radian.
        square = (turn**2).sum()
        weight = 1 / 12 + square / 720 + square**2 / 30240 + square**3 / 1209600
        velocity = velocity.at[v : v + 3].set(w + 0.5 * cross + weight * jnp.cross(turn, cross))
    return velocity


_IN_IMPLEMENTATION = ("cinert", "cfrc_ext")  # MJX stores these in the data of its implementation


class MjxEnv(MujocoEnv):
    """A task on MJX in float32, with the task's number of Newton iterations.

    Divergence and non-finite actions have the same effects as on C MuJoCo: NaN in the simulation concerned.

    It runs on a CPU too, for tests. There it is slow, and batches of many hundreds can hang, because jaxlib's batched
    Cholesky factorisation deadlocks when two calls wait for the same few threads.
    """

    def __init__(self, task: MujocoTask):
        super().__init__(task)
        model = copy.copy(self.model)
        model.opt.solver = mujoco.mjtSolver.mjSOL_NEWTON
        model.opt.iterations = task.iterations
        model.opt.ls_iterations = task.ls_iterations
        self._mjx_model = mjx.put_model(model, impl="jax")
        self._blank = mjx.make_data(model, impl="jax")
        # Tracing MJX takes seconds, so a task is traced once for all programs. Inlining leaves the programs unchanged.
        self._step = jax.jit(self._step_traced, inline=True)
        self._forward = jax.jit(self._forward_traced, inline=True)

    @property
    def backend(self) -> str:
        return "mjx"

    def step(self, state: State, action: jax.Array) -> State:
        """Advances by one env step under an action `[action_size]`."""
        return self._step(state, action)

    def _step_traced(self, state: State, action: jax.Array) -> State:
        columns = state.pipeline_state.high
        factors = engine.stack_factors(state.info)
        valid = jnp.isfinite(action).all()
        model = self._mjx_model
        if factors is not None:
            valid &= engine.valid_factors(factors)
            model = _scale(model, jnp.where(valid, factors, 1.0))
        data = self._simulate(model, columns, jnp.where(valid, action, 0.0))

        new_columns = jnp.concatenate([data.qpos, data.qvel, data.act, data.qacc_warmstart])
        derived = self._derived(model, data)
        old, new = self.physics(columns), self.physics(new_columns, derived)
        if self.tracked:
            new_columns = jnp.concatenate([new_columns, new.track])
        # This is C MuJoCo's own bound, and false for NaN.
        bounded = (jnp.abs(new_columns) < mujoco.mjMAXVAL).all()
        after = jnp.where(valid, jnp.where(bounded, new_columns, jnp.nan), columns)
        alive = valid & bounded

        parts = self.task.reward(old, new, action, self.dt)
        parts = {name: jnp.where(alive, part, jnp.nan).astype(jnp.float32) for name, part in parts.items()}
        observation = self.task.observe(new)
        return state.replace(
            pipeline_state=PhysicsState(after, jnp.zeros_like(after)),
            obs=jnp.where(alive, observation, jnp.nan).astype(jnp.float32),
            reward=sum(parts.values()),
            done=(self.task.terminated(new) & alive).astype(jnp.float32),
            metrics=parts,
        )

    def initial_observation(self, qpos: jax.Array, qvel: jax.Array) -> tuple[jax.Array, PhysicsState]:
        """Returns a new episode's observation `[O]` and `track` `[k]` for positions `[nq]` and velocities `[nv]`."""
        if not self.task.needs:
            return super().initial_observation(qpos, qvel)
        data = self._forward(qpos, qvel)
        rest = jnp.zeros(self.model.na + self.model.nv)
        physics = self.physics(jnp.concatenate([qpos, qvel, rest]), self._derived(None, data))
        track = physics.track if self.tracked else jnp.zeros(0)
        return self.task.observe(physics).astype(jnp.float32), PhysicsState(track, jnp.zeros_like(track))

    def _forward_traced(self, qpos: jax.Array, qvel: jax.Array) -> mjx.Data:
        return forward(self._mjx_model, self._blank.replace(qpos=qpos, qvel=qvel))

    def _simulate(self, model: mjx.Model, columns: jax.Array, action: jax.Array) -> mjx.Data:
        nq, nv, na = self.model.nq, self.model.nv, self.model.na
        qpos, qvel, act, warmstart, _ = jnp.split(columns, (nq, nq + nv, nq + nv + na, nq + 2 * nv + na))
        data = self._blank.replace(qpos=qpos, qvel=qvel, act=act, qacc_warmstart=warmstart, ctrl=action)
        return jax.lax.fori_loop(0, self.task.frame_skip, lambda _, data: step(model, data), data)

    def _derived(self, model: mjx.Model | None, data: mjx.Data) -> dict[str, jax.Array]:
        """Returns the quantities that the task needs; contact forces are computed with a model only."""
        if model is not None and "cfrc_ext" in self.task.needs:
            data = mjx.rne_postconstraint(model, data)
        return {name: getattr(data._impl if name in _IN_IMPLEMENTATION else data, name) for name in self.task.needs}


def _scale(model: mjx.Model, factors: jax.Array) -> mjx.Model:
    """Multiplies a model's parameters by factors `[4]`."""
    changes: dict[str, Any] = {}
    for field, name in engine.SCALED_FIELDS.items():
        original = model.opt.gravity if field == "opt.gravity" else getattr(model, field)
        changes[field] = original * factors[engine.FACTORS.index(name)]
    return model.tree_replace(changes)
