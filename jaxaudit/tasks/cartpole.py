"""CartPole-v1 of Gymnasium's classic control in JAX, a task with discrete actions for runs of seconds."""

import math

import jax
import jax.numpy as jnp

from jaxaudit.runtime import registry
from jaxaudit.tasks._brax import Env, State

FACTORS = ("gear", "gravity", "mass")

GRAVITY = 9.8  # m/s^2
CART_MASS, POLE_MASS = 1.0, 0.1  # kg
HALF_LENGTH = 0.5  # m, of the pole
FORCE = 10.0  # N
TIMESTEP = 0.02  # s
POSITION_LIMIT = 2.4  # m
ANGLE_LIMIT = math.radians(12.0)
SPREAD = 0.05  # of initial values, in m, m/s, rad and rad/s


@registry.tasks.register("CartPole-v1")
class CartPole(Env):
    """A pole on a cart that action 0 pushes to the left and action 1 to the right; unbatched, in float32.

    The observation is the simulation's state: the cart's position (m) and velocity (m/s), the pole's angle (rad) and
    angular velocity (rad/s). The reward of every step is 1. An episode ends when the cart is more than 2.4 m from the
    middle or the pole more than 12 degrees from upright.

    A state's `info["dynamics"]`, if there is one, has factors on the force, gravity and both masses, as `dynamics`
    does. If a factor is not finite, the mass is not positive, or the action is neither 0 nor 1, observation and reward
    are NaN, the simulation stays unchanged, and the episode does not end.

    Attributes:
      actions: number of actions.
      max_episode_steps: the time limit, which is not enforced here.
      cheap_reset: whether a full reset in each step costs little.
      action_size: 1, because an action is one int32.
    """

    actions = 2
    max_episode_steps = 500
    cheap_reset = True
    observation_size, action_size, backend = 4, 1, "jax"

    @property
    def dynamics(self) -> dict[str, jax.Array]:
        """The factors on force ("gear"), gravity and mass that leave the dynamics unchanged: scalars, float32."""
        return {name: jnp.ones((), jnp.float32) for name in FACTORS}

    def reset(self, rng: jax.Array) -> State:
        physics = jax.random.uniform(rng, (4,), minval=-SPREAD, maxval=SPREAD)
        zero = jnp.zeros((), jnp.float32)
        return State(physics, physics, zero, zero)

    def step(self, state: State, action: jax.Array) -> State:
        """Advances by one env step under an action, a scalar int32."""
        before = state.pipeline_state
        # With a constant mass, XLA would divide differently, and neutral factors would change the last bit.
        factors = jax.lax.optimization_barrier(state.info.get("dynamics") or self.dynamics)
        valid = jnp.isfinite(jnp.stack([factors[name] for name in FACTORS])).all() & (factors["mass"] > 0)
        valid &= (action == 0) | (action == 1)
        after = jnp.where(valid, advance(before, action, factors), before)
        nan_if_invalid = jnp.where(valid & jnp.isfinite(after).all(), 0.0, jnp.nan)
        fallen = (jnp.abs(after[0]) > POSITION_LIMIT) | (jnp.abs(after[2]) > ANGLE_LIMIT)
        return state.replace(
            pipeline_state=after,
            obs=after + nan_if_invalid,
            reward=1.0 + nan_if_invalid,
            done=(fallen & valid).astype(jnp.float32),
        )


def advance(physics: jax.Array, action: jax.Array, factors: dict[str, jax.Array]) -> jax.Array:
    """Returns a state `[4]` after one Euler step (Barto, Sutton and Anderson, 1983, without friction)."""
    _, x_dot, theta, theta_dot = physics
    sin, cos = jnp.sin(theta), jnp.cos(theta)
    force = jnp.where(action == 1, FORCE, -FORCE) * factors["gear"]
    mass = (CART_MASS + POLE_MASS) * factors["mass"]
    pole = POLE_MASS * factors["mass"]
    push = (force + pole * HALF_LENGTH * theta_dot**2 * sin) / mass
    theta_acc = (GRAVITY * factors["gravity"] * sin - cos * push) / (HALF_LENGTH * (4.0 / 3.0 - pole * cos**2 / mass))
    x_acc = push - pole * HALF_LENGTH * theta_acc * cos / mass
    return physics + TIMESTEP * jnp.stack([x_dot, x_acc, theta_dot, theta_acc])
