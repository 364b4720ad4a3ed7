"""Gymnasium's InvertedPendulum-v5 and InvertedDoublePendulum-v5."""

from jaxaudit.tasks.task import Array, MujocoTask, Physics, normal, reset_around_start


def _observe(physics: Physics) -> Array:
    return physics.xp.concat([physics.qpos, physics.qvel], axis=-1)


def _terminated(after: Physics) -> Array:
    finite = after.xp.isfinite(_observe(after)).all(-1)
    return ~finite | (abs(after.qpos[..., 1]) > 0.2)


def _reward(before: Physics, after: Physics, action: Array, dt: float) -> dict[str, Array]:
    return {"reward_survive": (~_terminated(after)).astype(after.qpos.dtype)}


INVERTED_PENDULUM = MujocoTask(
    name="InvertedPendulum-v5",
    xml="inverted_pendulum.xml",
    frame_skip=2,
    reset=reset_around_start(0.01),
    observe=_observe,
    reward=_reward,
    terminated=_terminated,
)


def _double_observe(physics: Physics) -> Array:
    xp = physics.xp
    cart, angles = physics.qpos[..., :1], physics.qpos[..., 1:]
    velocities = xp.clip(physics.qvel, -10, 10)
    force = xp.clip(physics.qfrc_constraint[..., :1], -10, 10)
    return xp.concat([cart, xp.sin(angles), xp.cos(angles), velocities, force], axis=-1)


def _double_terminated(after: Physics) -> Array:
    return after.site_xpos[..., 0, 2] <= 1


def _double_reward(before: Physics, after: Physics, action: Array, dt: float) -> dict[str, Array]:
    x, z = after.site_xpos[..., 0, 0], after.site_xpos[..., 0, 2]
    return {
        "reward_survive": 10.0 * ~_double_terminated(after),
        "distance_penalty": -0.01 * x**2 - (z - 2) ** 2,
        "velocity_penalty": -1e-3 * after.qvel[..., 1] ** 2 - 5e-3 * after.qvel[..., 2] ** 2,
    }


INVERTED_DOUBLE_PENDULUM = MujocoTask(
    name="InvertedDoublePendulum-v5",
    xml="inverted_double_pendulum.xml",
    frame_skip=5,
    reset=reset_around_start(0.1, normal),
    observe=_double_observe,
    reward=_double_reward,
    terminated=_double_terminated,
    needs=("site_xpos", "qfrc_constraint"),
)
