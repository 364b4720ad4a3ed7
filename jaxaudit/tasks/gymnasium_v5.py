"""The Gymnasium v5 MuJoCo tasks, each defined once for every physics engine.

Observation, reward and termination take arrays with any leading batch axes. They work on NumPy float64 arrays (in C
MuJoCo's host callback) as well as on traced JAX arrays (MJX). The parts of a reward have their names in Gymnasium's
`info`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxaudit.tasks.engine import Array, MujocoTask, Physics, control_cost, normal, reset_around_start, uniform

STANDUP_DIVISOR = 0.003  # seconds: HumanoidStandup divides by the physics step, not by the env step
TORSO = 1  # body of ant.xml
FINGERTIP, TARGET = 3, 4  # bodies of reacher.xml
HAND, OBJECT, GOAL = 10, 11, 12  # bodies of pusher_v5.xml: tips_arm, object, goal


def _observe_from(first: int, limit: float | None = None) -> Callable[[Physics], Array]:
    """Returns an observation of the positions from index `first` on and the velocities, clipped to [-limit, limit]."""

    def observe(physics: Physics) -> Array:
        velocities = physics.qvel if limit is None else physics.xp.clip(physics.qvel, -limit, limit)
        return physics.xp.concat([physics.qpos[..., first:], velocities], axis=-1)

    return observe


def _planar_reward(control_weight: float, healthy: Callable[[Physics], Array] | None = None):
    """Returns a reward of the forward velocity minus the control cost, plus 1 while `healthy` is true, if given."""

    def reward(before: Physics, after: Physics, action: Array, dt: float) -> dict[str, Array]:
        parts = {
            "reward_forward": (after.qpos[..., 0] - before.qpos[..., 0]) / dt,
            "reward_ctrl": control_cost(action, control_weight),
        }
        if healthy is not None:
            parts["reward_survive"] = healthy(after).astype(after.qpos.dtype)
        return parts

    return reward


def _pendulum_observe(physics: Physics) -> Array:
    return physics.xp.concat([physics.qpos, physics.qvel], axis=-1)


def _pendulum_terminated(after: Physics) -> Array:
    finite = after.xp.isfinite(_pendulum_observe(after)).all(-1)
    return ~finite | (abs(after.qpos[..., 1]) > 0.2)


def _pendulum_reward(before: Physics, after: Physics, action: Array, dt: float) -> dict[str, Array]:
    return {"reward_survive": (~_pendulum_terminated(after)).astype(after.qpos.dtype)}


def _double_pendulum_observe(physics: Physics) -> Array:
    xp = physics.xp
    cart, angles = physics.qpos[..., :1], physics.qpos[..., 1:]
    velocities = xp.clip(physics.qvel, -10, 10)
    force = xp.clip(physics.qfrc_constraint[..., :1], -10, 10)
    return xp.concat([cart, xp.sin(angles), xp.cos(angles), velocities, force], axis=-1)


def _double_pendulum_terminated(after: Physics) -> Array:
    return after.site_xpos[..., 0, 2] <= 1


def _double_pendulum_reward(before: Physics, after: Physics, action: Array, dt: float) -> dict[str, Array]:
    x, z = after.site_xpos[..., 0, 0], after.site_xpos[..., 0, 2]
    return {
        "reward_survive": 10.0 * ~_double_pendulum_terminated(after),
        "distance_penalty": -0.01 * x**2 - (z - 2) ** 2,
        "velocity_penalty": -1e-3 * after.qvel[..., 1] ** 2 - 5e-3 * after.qvel[..., 2] ** 2,
    }


def _hopper_healthy(after: Physics) -> Array:
    height, angle = after.qpos[..., 1], after.qpos[..., 2]
    # Gymnasium bounds all coordinates but the first two.
    bounded = (abs(after.qpos[..., 2:]) < 100).all(-1) & (abs(after.qvel) < 100).all(-1)
    return bounded & (height > 0.7) & (abs(angle) < 0.2)


def _walker_healthy(after: Physics) -> Array:
    height, angle = after.qpos[..., 1], after.qpos[..., 2]
    return (height > 0.8) & (height < 2.0) & (abs(angle) < 1.0)


def _humanoid_observe(physics: Physics) -> Array:
    """Observes all but the position in the plane, the world's body, and the root's forces, which have no actuator."""
    body_arrays = [physics.cinert, physics.cvel, physics.cfrc_ext]
    cinert, cvel, cfrc_ext = [x[..., 1:, :].reshape(*x.shape[:-2], -1) for x in body_arrays]
    forces = physics.qfrc_actuator[..., 6:]
    return physics.xp.concat([physics.qpos[..., 2:], physics.qvel, cinert, cvel, forces, cfrc_ext], axis=-1)


def _humanoid_contact_cost(physics: Physics) -> Array:
    return physics.xp.clip(5e-7 * (physics.cfrc_ext**2).sum((-2, -1)), None, 10.0)


def _humanoid_healthy(after: Physics) -> Array:
    height = after.qpos[..., 2]
    return (height > 1.0) & (height < 2.0)


def _humanoid_reward(before: Physics, after: Physics, action: Array, dt: float) -> dict[str, Array]:
    return {
        "reward_survive": 5.0 * _humanoid_healthy(after),
        "reward_forward": 1.25 * (after.track[..., 0] - before.track[..., 0]) / dt,
        "reward_ctrl": control_cost(action, 0.1),
        "reward_contact": -_humanoid_contact_cost(after),
    }


def _standup_reward(before: Physics, after: Physics, action: Array, dt: float) -> dict[str, Array]:
    """Rewards height; the part `reward_survive` is a constant that Gymnasium's `info` does not have."""
    height = after.qpos[..., 2]
    return {
        "reward_linup": height / STANDUP_DIVISOR,
        "reward_quadctrl": control_cost(action, 0.1),
        "reward_impact": -_humanoid_contact_cost(after),
        "reward_survive": after.xp.ones_like(height),
    }


def _ant_contacts(physics: Physics) -> Array:
    return physics.xp.clip(physics.cfrc_ext, -1, 1)


def _ant_observe(physics: Physics) -> Array:
    contacts = _ant_contacts(physics)[..., 1:, :]
    flat = contacts.reshape(*contacts.shape[:-2], -1)
    return physics.xp.concat([physics.qpos[..., 2:], physics.qvel, flat], axis=-1)


def _ant_healthy(after: Physics) -> Array:
    height = after.qpos[..., 2]
    finite = after.xp.isfinite(after.qpos).all(-1) & after.xp.isfinite(after.qvel).all(-1)
    return finite & (height >= 0.2) & (height <= 1.0)


def _ant_reward(before: Physics, after: Physics, action: Array, dt: float) -> dict[str, Array]:
    return {
        "reward_forward": (after.track[..., 0] - before.track[..., 0]) / dt,
        "reward_ctrl": control_cost(action, 0.5),
        "reward_contact": -5e-4 * (_ant_contacts(after) ** 2).sum((-2, -1)),
        "reward_survive": _ant_healthy(after).astype(after.qpos.dtype),
    }


def _distance(physics: Physics, first: int, second: int) -> Array:
    vector = physics.xpos[..., first, :] - physics.xpos[..., second, :]
    return physics.xp.linalg.vector_norm(vector, axis=-1)


def _reacher_reset(key: jax.Array, init_qpos: Array, init_qvel: Array) -> tuple[jax.Array, jax.Array]:
    """Draws the target's position uniformly from the disc of radius 0.2."""
    arm_key, radius_key, angle_key, velocity_key = jax.random.split(key, 4)
    radius = 0.2 * jnp.sqrt(jax.random.uniform(radius_key))
    angle = jax.random.uniform(angle_key, maxval=2 * jnp.pi)
    target = radius * jnp.stack([jnp.cos(angle), jnp.sin(angle)])
    qpos = uniform(arm_key, init_qpos, 0.1)
    qvel = uniform(velocity_key, init_qvel, 0.005)
    return qpos.at[-2:].set(target), qvel.at[-2:].set(0.0)


def _reacher_observe(physics: Physics) -> Array:
    xp = physics.xp
    angles, target = physics.qpos[..., :2], physics.qpos[..., 2:]
    to_target = (physics.xpos[..., FINGERTIP, :] - physics.xpos[..., TARGET, :])[..., :2]
    return xp.concat([xp.cos(angles), xp.sin(angles), target, physics.qvel[..., :2], to_target], axis=-1)


def _reacher_reward(before: Physics, after: Physics, action: Array, dt: float) -> dict[str, Array]:
    return {"reward_dist": -_distance(after, FINGERTIP, TARGET), "reward_ctrl": control_cost(action, 1.0)}


def _pusher_reset(key: jax.Array, init_qpos: Array, init_qvel: Array) -> tuple[jax.Array, jax.Array]:
    """Draws the object's position from a rectangle, at least 0.17 from the goal, which stays at the origin."""
    position_key, velocity_key = jax.random.split(key)

    def is_near(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jnp.linalg.norm(carry[1]) <= 0.17

    def draw(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        key, draw_key = jax.random.split(carry[0])
        return key, jax.random.uniform(draw_key, (2,), minval=jnp.array([-0.3, -0.2]), maxval=jnp.array([0.0, 0.2]))

    _, position = jax.lax.while_loop(is_near, draw, (position_key, jnp.zeros(2)))
    qpos = jnp.asarray(init_qpos, jnp.float32).at[-4:].set(jnp.append(position, jnp.zeros(2)))
    return qpos, uniform(velocity_key, init_qvel, 0.005).at[-4:].set(0.0)


def _pusher_observe(physics: Physics) -> Array:
    bodies = [physics.xpos[..., body, :] for body in (HAND, OBJECT, GOAL)]
    return physics.xp.concat([physics.qpos[..., :7], physics.qvel[..., :7], *bodies], axis=-1)


def _pusher_reward(before: Physics, after: Physics, action: Array, dt: float) -> dict[str, Array]:
    return {
        "reward_dist": -_distance(after, OBJECT, GOAL),
        "reward_ctrl": control_cost(action, 0.1),
        "reward_near": -0.5 * _distance(after, OBJECT, HAND),
    }


ALL = (
    MujocoTask(
        name="Ant-v5",
        xml="ant.xml",
        frame_skip=5,
        reset=reset_around_start(0.1, normal),
        observe=_ant_observe,
        reward=_ant_reward,
        terminated=lambda after: ~_ant_healthy(after),
        needs=("xpos", "cfrc_ext"),
        iterations=8,
        ls_iterations=8,
        track=lambda physics: physics.xpos[..., TORSO, :1],
    ),
    MujocoTask(
        name="HalfCheetah-v5",
        xml="half_cheetah.xml",
        frame_skip=5,
        reset=reset_around_start(0.1, normal),
        observe=_observe_from(1),
        reward=_planar_reward(0.1),
    ),
    MujocoTask(
        name="Hopper-v5",
        xml="hopper.xml",
        frame_skip=4,
        reset=reset_around_start(5e-3),
        observe=_observe_from(1, limit=10),
        reward=_planar_reward(1e-3, _hopper_healthy),
        terminated=lambda after: ~_hopper_healthy(after),
    ),
    MujocoTask(
        name="Humanoid-v5",
        xml="humanoid.xml",
        frame_skip=5,
        reset=reset_around_start(1e-2),
        observe=_humanoid_observe,
        reward=_humanoid_reward,
        terminated=lambda after: ~_humanoid_healthy(after),
        needs=("subtree_com", "cinert", "cvel", "qfrc_actuator", "cfrc_ext"),
        iterations=8,
        ls_iterations=8,
        track=lambda physics: physics.subtree_com[..., 0, :1],  # of the whole body
    ),
    MujocoTask(
        name="HumanoidStandup-v5",
        xml="humanoidstandup.xml",
        frame_skip=5,
        reset=reset_around_start(1e-2),
        observe=_humanoid_observe,
        reward=_standup_reward,
        needs=("cinert", "cvel", "qfrc_actuator", "cfrc_ext"),
        iterations=8,
        ls_iterations=8,
    ),
    MujocoTask(
        name="InvertedDoublePendulum-v5",
        xml="inverted_double_pendulum.xml",
        frame_skip=5,
        reset=reset_around_start(0.1, normal),
        observe=_double_pendulum_observe,
        reward=_double_pendulum_reward,
        terminated=_double_pendulum_terminated,
        needs=("site_xpos", "qfrc_constraint"),
    ),
    MujocoTask(
        name="InvertedPendulum-v5",
        xml="inverted_pendulum.xml",
        frame_skip=2,
        reset=reset_around_start(0.01),
        observe=_pendulum_observe,
        reward=_pendulum_reward,
        terminated=_pendulum_terminated,
    ),
    MujocoTask(
        name="Pusher-v5",
        xml="pusher_v5.xml",
        frame_skip=5,
        reset=_pusher_reset,
        observe=_pusher_observe,
        reward=_pusher_reward,
        max_episode_steps=100,
        needs=("xpos",),
    ),
    MujocoTask(
        name="Reacher-v5",
        xml="reacher.xml",
        frame_skip=2,
        reset=_reacher_reset,
        observe=_reacher_observe,
        reward=_reacher_reward,
        max_episode_steps=50,
        needs=("xpos",),
    ),
    MujocoTask(
        name="Swimmer-v5",
        xml="swimmer.xml",
        frame_skip=4,
        reset=reset_around_start(0.1),
        observe=_observe_from(2),
        reward=_planar_reward(1e-4),
    ),
    MujocoTask(
        name="Walker2d-v5",
        xml="walker2d_v5.xml",
        frame_skip=4,
        reset=reset_around_start(5e-3),
        observe=_observe_from(1, limit=10),
        reward=_planar_reward(1e-3, _walker_healthy),
        terminated=lambda after: ~_walker_healthy(after),
    ),
)
