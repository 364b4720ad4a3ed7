"""Gymnasium's Reacher-v5 and Pusher-v5: an arm in a plane of targets, whose positions are joints of the model."""

import jax
import jax.numpy as jnp

from jaxaudit.tasks.task import Array, MujocoTask, Physics, control_cost, uniform


def _distance(vector: Array) -> Array:
    return vector.__array_namespace__().linalg.vector_norm(vector, axis=-1)


_FINGERTIP, _TARGET = 3, 4  # bodies of reacher.xml


def _to_target(physics: Physics) -> Array:
    return physics.xpos[..., _FINGERTIP, :] - physics.xpos[..., _TARGET, :]


def _reacher_reset(key: jax.Array, init_qpos: Array, init_qvel: Array) -> tuple[jax.Array, jax.Array]:
    """Put the target anywhere on the disc of radius 0.2."""
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
    to_target = _to_target(physics)[..., :2]
    return xp.concat([xp.cos(angles), xp.sin(angles), target, physics.qvel[..., :2], to_target], axis=-1)


def _reacher_reward(before: Physics, after: Physics, action: Array, dt: float) -> dict[str, Array]:
    return {"reward_dist": -_distance(_to_target(after)), "reward_ctrl": control_cost(action, 1.0)}


REACHER = MujocoTask(
    name="Reacher-v5",
    xml="reacher.xml",
    frame_skip=2,
    reset=_reacher_reset,
    observe=_reacher_observe,
    reward=_reacher_reward,
    max_episode_steps=50,
    needs=("xpos",),
)


_HAND, _OBJECT, _GOAL = 10, 11, 12  # bodies of pusher_v5.xml: tips_arm, object, goal


def _pusher_reset(key: jax.Array, init_qpos: Array, init_qvel: Array) -> tuple[jax.Array, jax.Array]:
    """Put the object on its rectangle, but not within 0.17 of the goal, which stays at the origin."""
    place_key, velocity_key = jax.random.split(key)

    def near(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jnp.linalg.norm(carry[1]) <= 0.17

    def again(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        key, draw_key = jax.random.split(carry[0])
        return key, jax.random.uniform(draw_key, (2,), minval=jnp.array([-0.3, -0.2]), maxval=jnp.array([0.0, 0.2]))

    _, place = jax.lax.while_loop(near, again, (place_key, jnp.zeros(2)))
    qpos = jnp.asarray(init_qpos, jnp.float32).at[-4:].set(jnp.append(place, jnp.zeros(2)))
    return qpos, uniform(velocity_key, init_qvel, 0.005).at[-4:].set(0.0)


def _pusher_observe(physics: Physics) -> Array:
    bodies = [physics.xpos[..., body, :] for body in (_HAND, _OBJECT, _GOAL)]
    return physics.xp.concat([physics.qpos[..., :7], physics.qvel[..., :7], *bodies], axis=-1)


def _pusher_reward(before: Physics, after: Physics, action: Array, dt: float) -> dict[str, Array]:
    thing = after.xpos[..., _OBJECT, :]
    return {
        "reward_dist": -_distance(thing - after.xpos[..., _GOAL, :]),
        "reward_ctrl": control_cost(action, 0.1),
        "reward_near": -0.5 * _distance(thing - after.xpos[..., _HAND, :]),
    }


PUSHER = MujocoTask(
    name="Pusher-v5",
    xml="pusher_v5.xml",
    frame_skip=5,
    reset=_pusher_reset,
    observe=_pusher_observe,
    reward=_pusher_reward,
    max_episode_steps=100,
    needs=("xpos",),
)
