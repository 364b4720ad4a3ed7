"""Gymnasium's HalfCheetah-v5, Hopper-v5, Walker2d-v5 and Swimmer-v5: forward in a plane, on joints alone."""

from collections.abc import Callable

from jaxaudit.tasks.task import Array, MujocoTask, Physics, control_cost, normal, reset_around_start


def _observe_all_but(skipped: int) -> Callable[[Physics], Array]:
    """Observe positions and velocities, without the first positions: those in the world."""

    def observe(physics: Physics) -> Array:
        return physics.xp.concat([physics.qpos[..., skipped:], physics.qvel], axis=-1)

    return observe


def _observe_clipped(physics: Physics) -> Array:
    velocities = physics.xp.clip(physics.qvel, -10, 10)
    return physics.xp.concat([physics.qpos[..., 1:], velocities], axis=-1)


def _pay(control_weight: float, healthy: Callable[[Physics], Array] | None = None):
    """Pay velocity, charge for the action and, where there is a notion of health, pay 1 for it."""

    def reward(before: Physics, after: Physics, action: Array, dt: float) -> dict[str, Array]:
        parts = {
            "reward_forward": (after.qpos[..., 0] - before.qpos[..., 0]) / dt,
            "reward_ctrl": control_cost(action, control_weight),
        }
        if healthy is not None:
            parts["reward_survive"] = healthy(after).astype(after.qpos.dtype)
        return parts

    return reward


HALF_CHEETAH = MujocoTask(
    name="HalfCheetah-v5",
    xml="half_cheetah.xml",
    frame_skip=5,
    reset=reset_around_start(0.1, normal),
    observe=_observe_all_but(1),
    reward=_pay(0.1),
)

SWIMMER = MujocoTask(
    name="Swimmer-v5",
    xml="swimmer.xml",
    frame_skip=4,
    reset=reset_around_start(0.1),
    observe=_observe_all_but(2),
    reward=_pay(1e-4),
)


def _hopper_healthy(after: Physics) -> Array:
    height, angle = after.qpos[..., 1], after.qpos[..., 2]
    # All coordinates but the first two.
    bounded = (abs(after.qpos[..., 2:]) < 100).all(-1) & (abs(after.qvel) < 100).all(-1)
    return bounded & (height > 0.7) & (abs(angle) < 0.2)


HOPPER = MujocoTask(
    name="Hopper-v5",
    xml="hopper.xml",
    frame_skip=4,
    reset=reset_around_start(5e-3),
    observe=_observe_clipped,
    reward=_pay(1e-3, _hopper_healthy),
    terminated=lambda after: ~_hopper_healthy(after),
)


def _walker_healthy(after: Physics) -> Array:
    height, angle = after.qpos[..., 1], after.qpos[..., 2]
    return (height > 0.8) & (height < 2.0) & (abs(angle) < 1.0)


WALKER2D = MujocoTask(
    name="Walker2d-v5",
    xml="walker2d_v5.xml",
    frame_skip=4,
    reset=reset_around_start(5e-3),
    observe=_observe_clipped,
    reward=_pay(1e-3, _walker_healthy),
    terminated=lambda after: ~_walker_healthy(after),
)
