"""Errors of C MuJoCo's projected Gauss-Seidel solver and of MJX's Newton solver against a converged solution.

Humanoid and HumanoidStandup use the former, which MJX does not have. Errors are those of constraint forces after one
env step from each of 1,000 states of Gymnasium, relative to the largest force of a state, or to 1.
"""

from __future__ import annotations

import argparse
import copy

import gymnasium
import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import parity

from jaxaudit.tasks import TASKS, engine_mjx
from jaxaudit.tasks._brax import mjx


def shift(model: mujoco.MjModel) -> None:
    """Changes mass, friction, gear and gravity as in `tests/tasks/test_tasks.py`."""
    for field in (model.body_mass, model.body_inertia, model.body_subtreemass):
        field[:] *= 1.3
    model.geom_friction[:] *= 0.7
    model.actuator_gear[:] *= 1.2
    model.opt.gravity[:] *= 0.9


def with_newton(model: mujoco.MjModel, iterations: int, tolerance: float) -> mujoco.MjModel:
    """Returns the model with the Newton solver."""
    model = copy.copy(model)
    model.opt.solver = mujoco.mjtSolver.mjSOL_NEWTON
    model.opt.iterations = model.opt.ls_iterations = iterations
    model.opt.tolerance = tolerance
    return model


def split(model: mujoco.MjModel, columns) -> tuple:
    """Splits columns into positions, velocities and the solver's warm start."""
    nq, nv = model.nq, model.nv
    return columns[:nq], columns[nq : nq + nv], columns[nq + nv : nq + 2 * nv]


def on_c(model: mujoco.MjModel, reference: parity.Reference, frame_skip: int) -> np.ndarray:
    """Computes constraint forces `[T, nv]` by C MuJoCo."""
    data, forces = mujoco.MjData(model), []
    for columns, control in zip(reference.columns, controls(model, reference), strict=True):
        mujoco.mj_resetData(model, data)
        data.qpos[:], data.qvel[:], data.qacc_warmstart[:] = split(model, columns)
        data.ctrl[:] = control
        for _ in range(frame_skip):
            mujoco.mj_step(model, data)
        forces.append(data.qfrc_constraint.copy())
    return np.array(forces)


def on_mjx(model: mujoco.MjModel, reference: parity.Reference, frame_skip: int, width: int) -> np.ndarray:
    """Computes constraint forces `[T, nv]` by MJX, with the step of the tasks."""
    compiled, blank = mjx.put_model(model), mjx.make_data(model)

    def forces(columns: jax.Array, control: jax.Array) -> jax.Array:
        qpos, qvel, warmstart = split(model, columns)
        data = blank.replace(qpos=qpos, qvel=qvel, qacc_warmstart=warmstart, ctrl=control)
        data = jax.lax.fori_loop(0, frame_skip, lambda _, data: engine_mjx.step(compiled, data), data)
        return data.qfrc_constraint

    step = jax.jit(jax.vmap(forces), compiler_options=parity.OPTIONS)
    columns, control = (jnp.array(x, jnp.float32) for x in (reference.columns, controls(model, reference)))
    starts = range(0, len(columns), width)
    return np.concatenate([step(columns[at : at + width], control[at : at + width]) for at in starts])


def controls(model: mujoco.MjModel, reference: parity.Reference) -> np.ndarray:
    """Returns actions clipped to their range."""
    return np.clip(reference.action, *model.actuator_ctrlrange.T)


def cell(forces: np.ndarray, exact: np.ndarray) -> str:
    """Formats the 99th percentile and the largest error."""
    error = np.abs(forces - exact).max(1) / np.maximum(1.0, np.abs(exact).max(1))
    return f"{np.quantile(error, 0.99):.1e} ({error.max():.1e})"


def main() -> None:
    """Prints the table."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("tasks", nargs="*", default=["HumanoidStandup-v5"])
    options.add_argument("--steps", type=int, default=1000)
    options.add_argument("--width", type=int, default=100)
    arguments = options.parse_args()
    print("| task | C MuJoCo's projected Gauss-Seidel | MJX |\n|---|---|---|")
    for name in arguments.tasks:
        env = parity.build(name, "c")
        reference = parity.reference(env, arguments.steps)
        for label, change in ((name, None), (f"{name}, shifted", shift)):
            model = gymnasium.make(name).unwrapped.model
            if change:
                change(model)
            exact = on_c(with_newton(model, 100, 1e-14), reference, TASKS[name].frame_skip)
            by_gauss_seidel = on_c(model, reference, TASKS[name].frame_skip)
            by_mjx = with_newton(model, TASKS[name].iterations, model.opt.tolerance)
            by_mjx.opt.ls_iterations = TASKS[name].ls_iterations
            by_mjx = on_mjx(by_mjx, reference, TASKS[name].frame_skip, arguments.width)
            print(f"| {label} | {cell(by_gauss_seidel, exact)} | {cell(by_mjx, exact)} |", flush=True)


if __name__ == "__main__":
    main()
