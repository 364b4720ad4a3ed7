"""Vectorised environments: episodes, time limits, returns, and the environment-side sites of perturbations.

Every array has the environments as its leading axis, `[N]`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxaudit.core.taps import ACTING_SITES, Taps
from jaxaudit.runtime.tracing import in_float32
from jaxaudit.tasks._brax import Env, State


@struct.dataclass
class EpisodeState:
    """The state of N environments and of their episodes.

    Attributes:
      env: brax state, without any disturbance.
      observation: `[N, O]`, the observation on which the learner acts next.
      length: `[N]` int32, number of steps in the running episode.
      head_start: `[N]` int32, number of steps by which the running episode's time limit is early. It staggers the first
        episodes, so that they do not all end together, and is zero from the second episode on.
      running_return: `[N]`, undisturbed return of the running episode so far.
      last_return, last_length: `[N]`, of the latest full episode.
      has_finished: `[N]` bool, whether there was a full episode.
      pool: reset states to draw from, or None if the environment resets cheaply.
    """

    env: State
    observation: jax.Array
    length: jax.Array
    head_start: jax.Array
    running_return: jax.Array
    last_return: jax.Array
    last_length: jax.Array
    has_finished: jax.Array
    pool: State | None


@struct.dataclass
class Transition:
    """One step of N environments from the learner's point of view.

    Attributes:
      observation: `[N, O]`, the observation on which the action was chosen.
      action: `[N, A]`, or int32 `[N]` if actions are discrete: the policy's action, before any disturbance.
      reward: `[N]`.
      terminated: `[N]` bool, whether the task ended the episode, so that no value follows.
      truncated: `[N]` bool, whether the time limit ended the episode, so that the value of `final_observation` follows.
      final_observation: `[N, O]`, the observation after the step and before any reset.
    """

    observation: jax.Array
    action: jax.Array
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    final_observation: jax.Array


class Episodes:
    """N copies of an environment with a time limit and automatic reset, as pure functions of an `EpisodeState`.

    Args:
      env: an unbatched brax `Env`, or one of MuJoCo Playground, with flat observations. If its attribute `cheap_reset`
        is true every reset is new; otherwise resets are drawn from the pool that `refresh` fills. If its attribute
        `actions` exists and is not None, it is the number of discrete actions.
      num_envs: N.
      max_episode_steps: the time limit.

    Raises:
      ValueError: N or the time limit is not positive.
    """

    def __init__(self, env: Env, num_envs: int, max_episode_steps: int):
        for name, value in (("num_envs", num_envs), ("max_episode_steps", max_episode_steps)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        self.env = env
        self.num_envs = num_envs
        self.max_episode_steps = max_episode_steps
        self._cheap_reset = getattr(env, "cheap_reset", False)
        self._discrete = getattr(env, "actions", None) is not None

    def init(self, key: jax.Array) -> EpisodeState:
        """Resets all environments; environment i starts with i/N of its time limit used."""
        env_key, pool_key = jax.random.split(key)
        env = self._reset(env_key)
        head_start = np.arange(self.num_envs) * self.max_episode_steps // self.num_envs
        zero = jnp.zeros(self.num_envs)
        count = jnp.zeros(self.num_envs, jnp.int32)
        return EpisodeState(
            env=env,
            observation=env.obs,
            length=count,
            head_start=jnp.array(head_start, jnp.int32),
            running_return=zero,
            last_return=zero,
            last_length=count,
            has_finished=jnp.zeros(self.num_envs, bool),
            pool=None if self._cheap_reset else self._reset(pool_key),
        )

    def refresh(self, state: EpisodeState, key: jax.Array) -> EpisodeState:
        """Refills the pool of reset states. It is meant to be called once per iteration of the learner."""
        return state if self._cheap_reset else dataclasses.replace(state, pool=self._reset(key))

    def step(
        self,
        state: EpisodeState,
        key: jax.Array,
        action: jax.Array,
        taps: Taps,
        value: Callable[[jax.Array], jax.Array] | None = None,
        discount: float = 1.0,
    ) -> tuple[EpisodeState, Transition]:
        """Takes one step in every environment, and resets those whose episode ends.

        The taps have a context. At `action` and `observation`, `begins` `[N]` says where the value is the first of an
        episode, and `valid` `[N]` which rows are used. At `reward`, `ends` `[N]` says where the value is the last of an
        episode. `observation` is tapped twice: for the observation after the step, and for the first observation of new
        episodes. With a `value`, observations have the context `state_value`, and rewards have `td_error`, a function
        of a reward `[N]`.

        Args:
          state: the environments' state.
          key: PRNG key of the reset states.
          action: the policy's action, `[N, A]`, or int32 `[N]` if actions are discrete.
          taps: called at the sites `action` (if actions are continuous), `dynamics` (if the environment has an
            attribute of that name), `observation` and `reward`.
          value: the learner's state value in units of the task's rewards, observations `[N, O]` to `[N]`, for
            perturbations that target it.
          discount: discount factor of the value in `td_error`.
        """
        all_true, all_false = jnp.ones(self.num_envs, bool), jnp.zeros(self.num_envs, bool)
        # Perturbations of actions scale them and add to them, which has no meaning for discrete actions.
        sent_action = action if self._discrete else taps("action", action, begins=state.length == 0, valid=all_true)
        env = self._advance(state.env, sent_action, taps)
        length = state.length + 1
        terminated = env.done > 0.5
        truncated = (length + state.head_start >= self.max_episode_steps) & ~terminated
        done = terminated | truncated

        context: dict[str, Any] = {} if value is None else {"state_value": value}
        next_env = select(done, self._reset_states(state, key), env)
        final_observation = taps("observation", env.obs, begins=all_false, valid=all_true, **context)
        first_observation = taps("observation", next_env.obs, begins=done, valid=done, **context)
        observation = select(done, first_observation, final_observation)
        if value is not None:
            context = {"td_error": _td_error(value, discount, state.observation, final_observation, terminated)}

        running_return = state.running_return + env.reward
        finished = terminated | (truncated & (state.head_start == 0))
        next_state = EpisodeState(
            env=next_env,
            observation=observation,
            length=jnp.where(done, 0, length),
            head_start=jnp.where(done, 0, state.head_start),
            running_return=jnp.where(done, 0.0, running_return),
            last_return=jnp.where(finished, running_return, state.last_return),
            last_length=jnp.where(finished, length, state.last_length),
            has_finished=state.has_finished | finished,
            pool=state.pool,
        )
        return next_state, Transition(
            observation=state.observation,
            action=action,
            reward=taps("reward", env.reward, ends=done, **context),
            terminated=terminated,
            truncated=truncated,
            final_observation=final_observation,
        )

    def _advance(self, env: State, action: jax.Array, taps: Taps) -> State:
        """Steps all environments, under disturbed dynamics if there are any."""
        if not (hasattr(self.env, "dynamics") and taps.disturbs("dynamics")):
            return self._step(env, action)
        factors = taps("dynamics", self.env.dynamics)
        factors = jax.tree.map(lambda x: jnp.broadcast_to(x, self.num_envs), factors)
        disturbed = env.replace(info=env.info | {"dynamics": factors})
        after = self._step(disturbed, action)
        return after.replace(info={name: x for name, x in after.info.items() if name != "dynamics"})

    def _step(self, env: State, action: jax.Array) -> State:
        with in_float32():
            return jax.vmap(self.env.step)(env, action)

    def _reset(self, key: jax.Array) -> State:
        with in_float32():
            return jax.vmap(self.env.reset)(jax.random.split(key, self.num_envs))

    def _reset_states(self, state: EpisodeState, key: jax.Array) -> State:
        if self._cheap_reset:
            return self._reset(key)
        indices = jax.random.randint(key, (self.num_envs,), 0, self.num_envs)
        return jax.tree.map(lambda leaf: leaf[indices], state.pool)


def _td_error(
    value: Callable[[jax.Array], jax.Array],
    discount: float,
    before: jax.Array,
    after: jax.Array,
    terminated: jax.Array,
) -> Callable[[jax.Array], jax.Array]:
    """Returns the temporal-difference error as a function of a reward `[N]`, computed only when it is called."""
    return lambda reward: reward + discount * jnp.where(terminated, 0.0, value(after)) - value(before)


def performance(state: EpisodeState) -> jax.Array:
    """Returns the mean, over environments, of the undisturbed return of their latest full episode.

    It is NaN until an environment has finished an episode, and while any running or latest return is not finite.
    Divergence is therefore visible at once, even if the episode never ends.
    """
    finished = state.has_finished.sum()
    mean = jnp.where(state.has_finished, state.last_return, 0.0).sum() / finished
    return jnp.where(jnp.isfinite(state.running_return).all() & jnp.isfinite(mean), mean, jnp.nan)


def mean_length(state: EpisodeState) -> jax.Array:
    """Returns the mean length of the environments' latest full episodes, or NaN if none has finished one."""
    return jnp.where(state.has_finished, state.last_length, 0).sum() / state.has_finished.sum()


def evaluate(
    env: Env,
    policy: Callable[[jax.Array], jax.Array],
    key: jax.Array,
    episodes: int,
    max_episode_steps: int,
) -> jax.Array:
    """Runs new, undisturbed episodes to their end, and returns their returns, `[episodes]`.

    Args:
      env: a brax `Env`, unbatched.
      policy: maps observations `[episodes, O]` to actions `[episodes, A]`, or `[episodes]` if they are discrete.
      key: PRNG key of the initial states.
      episodes: number of episodes, which run in parallel.
      max_episode_steps: the time limit.
    """

    def unfinished(carry: tuple[jax.Array, State, jax.Array, jax.Array]) -> jax.Array:
        t, _, running, _ = carry
        return (t < max_episode_steps) & running.any()

    def advance(carry: tuple[jax.Array, State, jax.Array, jax.Array]):
        t, state, running, returns = carry
        action = policy(state.obs)
        with in_float32():
            state = jax.vmap(env.step)(state, action)
        returns = returns + jnp.where(running, state.reward, 0.0)
        return t + 1, state, running & ~(state.done > 0.5), returns

    with in_float32():
        state = jax.vmap(env.reset)(jax.random.split(key, episodes))
    start = (jnp.int32(0), state, jnp.ones(episodes, bool), jnp.zeros(episodes))
    return jax.lax.while_loop(unfinished, advance, start)[-1]


def select(condition: jax.Array, new: Any, old: Any) -> Any:
    """Selects per environment, by a condition `[N]`, in every leaf `[N, ...]` of two trees of the same structure."""

    def select_leaf(new: jax.Array, old: jax.Array) -> jax.Array:
        selected = jnp.where(condition.reshape(-1, *(1,) * (old.ndim - 1)), new, old)
        return selected if selected.dtype == old.dtype else selected.astype(old.dtype)

    return jax.tree.map(select_leaf, new, old)


@struct.dataclass
class CleanEnvs:
    """Undisturbed copies of N environments.

    Attributes:
      episodes: the copies' state, without a pool: their resets are drawn from the training environments' pool.
      awaited: `[N]` bool, the training environments whose episode or latest return was disturbed. While there is one,
        the copies are used in the place of all training environments.
    """

    episodes: EpisodeState
    awaited: jax.Array


class Undisturbed:
    """Creates and advances the `CleanEnvs` of one lane, as pure functions.

    Args:
      episodes: the training environments' functions.
      iteration_steps: number of steps of each environment in one iteration of the learner.
    """

    def __init__(self, episodes: Episodes, iteration_steps: int):
        self._num_envs = episodes.num_envs
        self._most_iterations = -(-episodes.max_episode_steps // iteration_steps)

    def init(self, training: EpisodeState) -> CleanEnvs:
        return CleanEnvs(dataclasses.replace(training, pool=None), jnp.zeros(self._num_envs, bool))

    def begin(self, copies: CleanEnvs, training: EpisodeState, taps: Taps) -> CleanEnvs:
        """Returns the copies with which an iteration of the learner begins.

        If the lane is disturbed at an acting site in this iteration, and the copies are not in use yet, they are set to
        the present state of the training environments. Otherwise their state is returned as it is. Whenever the lane is
        disturbed, all N environments are marked as `awaited`, so that the copies are in use until every environment has
        begun an undisturbed episode.

        Args:
          copies: the copies after the iteration before.
          training: the state of the N training environments before the iteration.
          taps: the step's taps.
        """
        if not taps.disturbs(*ACTING_SITES):
            return copies
        opened = taps.disturbed(*ACTING_SITES)
        starts = opened & ~copies.awaited.any()
        current = dataclasses.replace(training, pool=None)
        episodes = jax.tree.map(lambda new, old: jnp.where(starts, new, old), current, copies.episodes)
        return CleanEnvs(episodes, copies.awaited | opened)

    def follow(
        self,
        copies: CleanEnvs,
        training: EpisodeState,
        ended: jax.Array,
        taps: Taps,
        advance: Callable[[Taps, EpisodeState], EpisodeState],
    ) -> tuple[CleanEnvs, EpisodeState]:
        """Advances the copies in the same way as the training environments.

        Args:
          copies: the copies before.
          training: the training environments after they were advanced.
          ended: `[N]` bool, the environments in which an episode has ended in that time.
          taps: the step's taps.
          advance: `(taps, episodes) -> episodes`, the function that advanced the training environments.

        Returns:
          the copies, and the training environments. The latter take over the copies' returns when the last of them has
            begun an undisturbed episode.
        """
        if not taps.disturbs(*ACTING_SITES):
            return copies, training

        def advance_copies(episodes: EpisodeState) -> EpisodeState:
            advanced = advance(taps.closed, dataclasses.replace(episodes, pool=training.pool))
            return dataclasses.replace(advanced, pool=None)

        # After this many iterations all disturbed episodes have ended. All lanes share the count, so this is a branch.
        needed = taps.idle(*ACTING_SITES) <= self._most_iterations
        episodes = jax.lax.cond(needed, advance_copies, lambda episodes: episodes, copies.episodes)
        awaited = copies.awaited & (~ended | taps.disturbed(*ACTING_SITES))
        settled = copies.awaited.any() & ~awaited.any()
        record = {
            name: jnp.where(settled, getattr(episodes, name), getattr(training, name))
            for name in ("last_return", "last_length", "has_finished")
        }
        return CleanEnvs(episodes, awaited), dataclasses.replace(training, **record)

    def clean(self, copies: CleanEnvs, training: EpisodeState) -> EpisodeState:
        """Returns the undisturbed episodes: the copies while one is awaited, else the training environments."""
        training = dataclasses.replace(training, pool=None)
        return select(jnp.broadcast_to(copies.awaited.any(), self._num_envs), copies.episodes, training)
