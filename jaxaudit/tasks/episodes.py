"""Many environments stepped side by side: episodes, time limits, returns, and the environment-side sites.

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
    """The state of N environments, and of the episodes in them.

    Attributes:
        env: brax state, before any disturbance.
        observation: `[N, O]`, what the learner sees and acts on next.
        length: `[N]` int32, steps taken in the running episode.
        head_start: `[N]` int32, steps by which the running episode's time limit comes early. Zero from the
            second episode on: the first ones are staggered so that they do not all end together.
        running_return: `[N]`, undisturbed reward of the running episode so far.
        last_return, last_length: `[N]`, of the latest full episode.
        has_finished: `[N]` bool, whether there was one.
        pool: reset states to draw from, or None where the environment resets cheaply.
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
    """One step of N environments, as the learner saw it.

    Attributes:
        observation: `[N, O]`, what the action was chosen on.
        action: `[N, A]`, or int32 `[N]` where actions are discrete: what the policy chose. What was sent to the
            environment may have been disturbed.
        reward: `[N]`.
        terminated: `[N]` bool: the task ended the episode, and there is no value after it.
        truncated: `[N]` bool: the time limit did, and the value of `final_observation` still counts.
        final_observation: `[N, O]`, the observation this step led to, before any reset.
    """

    observation: jax.Array
    action: jax.Array
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    final_observation: jax.Array


class Episodes:
    """N copies of an environment with a time limit and automatic reset; pure functions of an `EpisodeState`.

    Args:
        env: a brax `Env` (MuJoCo Playground's will do), unbatched, with flat observations. Where its
            attribute `cheap_reset` is true every reset is new, elsewhere one from the pool `refresh` fills. Its
            attribute `actions`, if it has one that is not None, says that they are discrete, and how many.
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
        """Reset all environments; environment i starts i/N of the way to its time limit."""
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
        """Refill the pool of reset states. Call it once per learner iteration."""
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
        """Take one step in every environment, resetting those whose episode ends.

        The taps' context: at `action` and `observation`, `begins` `[N]` says where the value is an episode's first
        and `valid` `[N]` which rows count at all; at `reward`, `ends` `[N]` says where it is an episode's last.
        `observation` is tapped twice, for what this step led to and for the first observation of the episodes that
        begin. With a `value`, observations get `state_value` and rewards get `td_error`: a function of a reward `[N]`.

        Args:
            state: where the environments stand.
            key: decides the reset states.
            action: `[N, A]`, or int32 `[N]` where actions are discrete: the policy's.
            taps: called at the sites `action` (where actions are continuous), `dynamics` (where the environment has
                an attribute of that name), `observation` and `reward`.
            value: the learner's state value in the task's rewards, observations `[N, O]` to `[N]`, for perturbations
                that aim at it.
            discount: of the value, in `td_error`.
        """
        everywhere, nowhere = jnp.ones(self.num_envs, bool), jnp.zeros(self.num_envs, bool)
        # What disturbs actions scales them and adds to them: it has no meaning for a choice.
        sent = action if self._discrete else taps("action", action, begins=state.length == 0, valid=everywhere)
        env = self._advance(state.env, sent, taps)
        length = state.length + 1
        terminated = env.done > 0.5
        truncated = (length + state.head_start >= self.max_episode_steps) & ~terminated
        done = terminated | truncated

        aimed: dict[str, Any] = {} if value is None else {"state_value": value}
        next_env = select(done, self._fresh(state, key), env)
        final_observation = taps("observation", env.obs, begins=nowhere, valid=everywhere, **aimed)
        first_observation = taps("observation", next_env.obs, begins=done, valid=done, **aimed)
        observation = select(done, first_observation, final_observation)
        if value is not None:
            aimed = {"td_error": _td_error(value, discount, state.observation, final_observation, terminated)}

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
            reward=taps("reward", env.reward, ends=done, **aimed),
            terminated=terminated,
            truncated=truncated,
            final_observation=final_observation,
        )

    def _advance(self, env: State, action: jax.Array, taps: Taps) -> State:
        """One step of all environments, under disturbed dynamics where there are any."""
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

    def _fresh(self, state: EpisodeState, key: jax.Array) -> State:
        if self._cheap_reset:
            return self._reset(key)
        drawn = jax.random.randint(key, (self.num_envs,), 0, self.num_envs)
        return jax.tree.map(lambda leaf: leaf[drawn], state.pool)


def _td_error(
    value: Callable[[jax.Array], jax.Array],
    discount: float,
    before: jax.Array,
    after: jax.Array,
    terminated: jax.Array,
) -> Callable[[jax.Array], jax.Array]:
    """The temporal-difference error of a reward `[N]`: computed only if a perturbation asks."""
    return lambda reward: reward + discount * jnp.where(terminated, 0.0, value(after)) - value(before)


def performance(state: EpisodeState) -> jax.Array:
    """Return the mean, over environments, of the undisturbed return of their latest full episode.

    NaN until an environment has finished one, and while any running or latest return is not finite:
    divergence shows at once, even where the episode never ends.
    """
    finished = state.has_finished.sum()
    mean = jnp.where(state.has_finished, state.last_return, 0.0).sum() / finished
    return jnp.where(jnp.isfinite(state.running_return).all() & jnp.isfinite(mean), mean, jnp.nan)


def mean_length(state: EpisodeState) -> jax.Array:
    """Mean length of the latest full episodes, of the environments that have finished one; NaN before any has."""
    return jnp.where(state.has_finished, state.last_length, 0).sum() / state.has_finished.sum()


def evaluate(
    env: Env,
    policy: Callable[[jax.Array], jax.Array],
    key: jax.Array,
    episodes: int,
    max_episode_steps: int,
) -> jax.Array:
    """Run fresh, undisturbed episodes to their end and give their returns, `[episodes]`.

    Args:
        env: a brax `Env`, unbatched.
        policy: observations `[episodes, O]` to actions `[episodes, A]`, or `[episodes]` where they are discrete.
        key: decides the initial states.
        episodes: how many to run side by side.
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


def select(where: jax.Array, new: Any, old: Any) -> Any:
    """Select per environment, by `where` `[N]`, in every leaf `[N, ...]` of two like trees."""

    def one(new: jax.Array, old: jax.Array) -> jax.Array:
        chosen = jnp.where(where.reshape(-1, *(1,) * (old.ndim - 1)), new, old)
        return chosen if chosen.dtype == old.dtype else chosen.astype(old.dtype)

    return jax.tree.map(one, new, old)


@struct.dataclass
class CleanEnvs:
    """Copies of N environments.

    Attributes:
        episodes: where they stand, without a pool: they draw resets from the training environments' own.
        awaited: `[N]` bool, the training environments whose episode, or latest return, was disturbed. The copies
            stand for all of them while there is one.
    """

    episodes: EpisodeState
    awaited: jax.Array


class Undisturbed:
    """What keeps and moves `CleanEnvs`; pure functions of one lane's.

    Args:
        episodes: of the training environments.
        iteration_steps: steps each of them takes in one iteration of the learner.
    """

    def __init__(self, episodes: Episodes, iteration_steps: int):
        self._num_envs = episodes.num_envs
        self._longest = -(-episodes.max_episode_steps // iteration_steps)

    def init(self, training: EpisodeState) -> CleanEnvs:
        return CleanEnvs(dataclasses.replace(training, pool=None), jnp.zeros(self._num_envs, bool))

    def begin(self, copies: CleanEnvs, training: EpisodeState, taps: Taps) -> CleanEnvs:
        """The copies at an iteration's beginning; where a window opens they begin as the training environments are."""
        if not taps.disturbs(*ACTING_SITES):
            return copies
        opened = taps.disturbed(*ACTING_SITES)
        fresh = opened & ~copies.awaited.any()
        now = dataclasses.replace(training, pool=None)
        episodes = jax.tree.map(lambda new, old: jnp.where(fresh, new, old), now, copies.episodes)
        return CleanEnvs(episodes, copies.awaited | opened)

    def follow(
        self,
        copies: CleanEnvs,
        training: EpisodeState,
        ended: jax.Array,
        taps: Taps,
        advance: Callable[[Taps, EpisodeState], EpisodeState],
    ) -> tuple[CleanEnvs, EpisodeState]:
        """Moves the copies as the training environments have moved.

        Args:
            copies: as they were before.
            training: as the training environments are after.
            ended: `[N]` bool, those in which an episode has ended in that time.
            taps: the step's.
            advance: `(taps, episodes) -> episodes`, what moved them.

        Returns:
            the copies; and the training environments, which take over the copies' record of returns when the last of
            them has begun an episode that nothing disturbs.
        """
        if not taps.disturbs(*ACTING_SITES):
            return copies, training

        def moved(episodes: EpisodeState) -> EpisodeState:
            after = advance(taps.closed, dataclasses.replace(episodes, pool=training.pool))
            return dataclasses.replace(after, pool=None)

        # No episode is longer, so that none is awaited later; and the same for all lanes, so that this is a branch.
        needed = taps.idle(*ACTING_SITES) <= self._longest
        episodes = jax.lax.cond(needed, moved, lambda episodes: episodes, copies.episodes)
        left = copies.awaited & (~ended | taps.disturbed(*ACTING_SITES))
        settled = copies.awaited.any() & ~left.any()
        record = {
            name: jnp.where(settled, getattr(episodes, name), getattr(training, name))
            for name in ("last_return", "last_length", "has_finished")
        }
        return CleanEnvs(episodes, left), dataclasses.replace(training, **record)

    def clean(self, copies: CleanEnvs, training: EpisodeState) -> EpisodeState:
        """The episodes that nothing disturbs: the copies' where one is awaited, else the training environments'."""
        own = dataclasses.replace(training, pool=None)
        return select(jnp.broadcast_to(copies.awaited.any(), self._num_envs), copies.episodes, own)
