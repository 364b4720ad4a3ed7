"""Which channels of the table a run has, by its dialogue and settings."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxaudit.core.channel_names import PERFORMANCE
from jaxaudit.core.learner import Channel
from jaxaudit.dialogues.protocol import GOLD, Dialogue, has_changes, has_demonstrations
from jaxaudit.learners.dialogue.held_out import SHOWN
from jaxaudit.learners.dialogue.network import Network
from jaxaudit.learners.dialogue.settings import DialogueSettings
from jaxaudit.learners.dialogue.telemetry.channels import TABLE, Extent, channels
from jaxaudit.learners.dialogue.telemetry.strata import LastSeen
from jaxaudit.runtime.paths import groups_of


def channels_of(dialogue: Dialogue, settings: DialogueSettings, policy: Network) -> dict[str, Channel]:
    """What is known of the telemetry before it is measured."""
    parts = parts_of(dialogue)
    extent = Extent(
        members=settings.group_size,
        slots=dialogue.length,
        parts=parts,
        layers=groups_of(jax.eval_shape(policy.init, jax.random.key(0))),
        shown=min(SHOWN, settings.performance_rows),
        every=settings.performance_every,
        split=dialogue.splits,
        words=dialogue.words,
    )
    return channels(settings.telemetry, features_of(dialogue, settings, bool(parts)), extent)


def features_of(dialogue: Dialogue, settings: DialogueSettings, parts: bool) -> list[str]:
    """Those of `channels.FEATURES` that a run has; `parts` says whether the reward has any beside gold."""
    objective, policy = settings.parts, settings.objective == "policy"
    had = {
        "tools": bool(dialogue.result_tokens),
        "parts": parts,
        "reference": objective.needs_reference or settings.telemetry == "full",
        "ratios": policy,
        "correction": policy and objective.correction != "none",
        "critic": objective.critic,
        "demonstrations": objective.critic and has_demonstrations(dialogue),
        "reward_model": settings.reward == "learned",
        "pairs": not policy,
        "mismatch": policy or settings.online,
        "sources": policy and bool(dialogue.result_tokens),
        "kl_loss": policy and objective.kl_in_loss,
        "changes": has_changes(dialogue),
    }
    return [name for name, there in had.items() if there]


def parts_of(dialogue: Dialogue) -> tuple[str, ...]:
    """Names of what the verifier tells beside the gold reward."""

    def rewarded(key: jax.Array, data: object) -> dict[str, jax.Array]:
        bound = dialogue.bind(data)
        return bound.reward(bound.reset(key, jnp.float32(dialogue.difficulty))[0])

    return tuple(sorted(jax.eval_shape(rewarded, jax.random.key(0), dialogue.data).keys() - {GOLD}))


def before_the_first(channels: Mapping[str, Channel], success: jax.Array) -> tuple[LastSeen, LastSeen]:
    """What channels of rows and updates, and those of held-out rows, say before the first step: a policy's success."""
    told, measured = (
        LastSeen.zeros({name: one.shape for name, one in channels.items() if TABLE[name].held_out == held_out})
        for held_out in (False, True)
    )
    return told, LastSeen(measured.values | {PERFORMANCE: success})
