"""Gymnasium's Ant-v5."""

from jaxaudit.tasks.task import Array, MujocoTask, Physics, control_cost, normal, reset_around_start

_TORSO = 1


def _contacts(physics: Physics) -> Array:
    return physics.xp.clip(physics.cfrc_ext, -1, 1)


def _observe(physics: Physics) -> Array:
    contacts = _contacts(physics)[..., 1:, :]
    flat = contacts.reshape(*contacts.shape[:-2], -1)
    return physics.xp.concat([physics.qpos[..., 2:], physics.qvel, flat], axis=-1)


def _healthy(after: Physics) -> Array:
    height = after.qpos[..., 2]
    finite = after.xp.isfinite(after.qpos).all(-1) & after.xp.isfinite(after.qvel).all(-1)
    return finite & (height >= 0.2) & (height <= 1.0)


def _reward(before: Physics, after: Physics, action: Array, dt: float) -> dict[str, Array]:
    return {
        "reward_forward": (after.track[..., 0] - before.track[..., 0]) / dt,
        "reward_ctrl": control_cost(action, 0.5),
        "reward_contact": -5e-4 * (_contacts(after) ** 2).sum((-2, -1)),
        "reward_survive": _healthy(after).astype(after.qpos.dtype),
    }


ANT = MujocoTask(
    name="Ant-v5",
    xml="ant.xml",
    frame_skip=5,
    reset=reset_around_start(0.1, normal),
    observe=_observe,
    reward=_reward,
    terminated=lambda after: ~_healthy(after),
    needs=("xpos", "cfrc_ext"),
    iterations=8,
    ls_iterations=8,
    track=lambda physics: physics.xpos[..., _TORSO, :1],
)
