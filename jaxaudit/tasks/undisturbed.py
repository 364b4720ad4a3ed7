"""Clean returns: copies of the training environments, in which the same policy acts and nothing disturbs it.

An observation, an action or a simulation that is disturbed makes returns fall at once, whether the policy has got
worse or not. So from the first opening of a window at one of those sites the copies run beside training, from the
states the training environments were in, with the same policy, noise and reset keys, and taps closed. They run until
every training environment has begun an episode after the last closing, and cost nothing before and after.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from jaxaudit.core.taps import ACTING_SITES, Taps
from jaxaudit.tasks.episodes import Episodes, EpisodeState, select


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
        """Copies nothing is asked of yet."""
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
