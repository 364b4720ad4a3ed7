"""Gymnasium's Humanoid-v5 and HumanoidStandup-v5."""

from jaxaudit.tasks.task import Array, MujocoTask, Physics, control_cost, reset_around_start

_SUBSTEP = 0.003  # seconds; HumanoidStandup divides by the physics step, not by the env step


def _observe(physics: Physics) -> Array:
    """Leave out the position in the plane, the world's body and the root's forces, which no motor has."""
    of_bodies = [physics.cinert, physics.cvel, physics.cfrc_ext]
    cinert, cvel, cfrc_ext = [x[..., 1:, :].reshape(*x.shape[:-2], -1) for x in of_bodies]
    forces = physics.qfrc_actuator[..., 6:]
    return physics.xp.concat([physics.qpos[..., 2:], physics.qvel, cinert, cvel, forces, cfrc_ext], axis=-1)


def _contact_cost(physics: Physics) -> Array:
    return physics.xp.clip(5e-7 * (physics.cfrc_ext**2).sum((-2, -1)), None, 10.0)


def _healthy(after: Physics) -> Array:
    height = after.qpos[..., 2]
    return (height > 1.0) & (height < 2.0)


def _reward(before: Physics, after: Physics, action: Array, dt: float) -> dict[str, Array]:
    return {
        "reward_survive": 5.0 * _healthy(after),
        "reward_forward": 1.25 * (after.track[..., 0] - before.track[..., 0]) / dt,
        "reward_ctrl": control_cost(action, 0.1),
        "reward_contact": -_contact_cost(after),
    }


HUMANOID = MujocoTask(
    name="Humanoid-v5",
    xml="humanoid.xml",
    frame_skip=5,
    reset=reset_around_start(1e-2),
    observe=_observe,
    reward=_reward,
    terminated=lambda after: ~_healthy(after),
    needs=("subtree_com", "cinert", "cvel", "qfrc_actuator", "cfrc_ext"),
    iterations=8,
    ls_iterations=8,
    track=lambda physics: physics.subtree_com[..., 0, :1],  # of the whole body
)


def _standup_reward(before: Physics, after: Physics, action: Array, dt: float) -> dict[str, Array]:
    """Pay height; the constant, which Gymnasium's `info` leaves out, is `reward_survive`."""
    height = after.qpos[..., 2]
    return {
        "reward_linup": height / _SUBSTEP,
        "reward_quadctrl": control_cost(action, 0.1),
        "reward_impact": -_contact_cost(after),
        "reward_survive": after.xp.ones_like(height),
    }


HUMANOID_STANDUP = MujocoTask(
    name="HumanoidStandup-v5",
    xml="humanoidstandup.xml",
    frame_skip=5,
    reset=reset_around_start(1e-2),
    observe=_observe,
    reward=_standup_reward,
    needs=("cinert", "cvel", "qfrc_actuator", "cfrc_ext"),
    iterations=8,
    ls_iterations=8,
)
