"""Environmental and data stability of dialogues: disturbances of what a row of tokens is told.

A prompt is int32 `[P, R]`, of P prompts, and a tool's result `[N, R]`, of N rows; `NOTHING` stands after the last
token. Standard magnitudes are ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxaudit.perturbations import transforms
from jaxaudit.perturbations.kinds import perturbation

NOTHING = -1
"""In the place of a token where there is none, as in `jaxaudit.dialogues.protocol`."""


def told(key: jax.Array, value: jax.Array, probability: jax.Array, called: jax.Array, other: jax.Array) -> jax.Array:
    """Each result of `value` `[N, R]` that was `called` for (bool `[N]`) is `other`'s with `probability`."""
    chosen = called & jax.random.bernoulli(key, probability, called.shape)
    return jnp.where(chosen[:, None], other, value)


def drawn_like(key: jax.Array, value: jax.Array, tokens: jax.Array) -> jax.Array:
    """Tokens drawn evenly from `tokens` `[K]`, and nothing where `value` has none."""
    return jnp.where(value == NOTHING, NOTHING, jax.random.choice(key, jnp.asarray(tokens, value.dtype), value.shape))


@perturbation(
    "data",
    "tool_result",
    magnitude=0.2,
    neutral=0.0,
    duration="end",
    limits=(0.0, 1.0),
    needs=("called", "error"),
)
def tool_error(key, value, magnitude, *, called, error):
    """A tool that is called says with probability `magnitude` that it failed, in the dialogue's words for it.

    >>> yes, failed = jnp.array([True]), jnp.array([9, -1])
    >>> tool_error(1.0).apply(jnp.array([[3, 4]]), called=yes, error=failed)
    Array([[ 9, -1]], dtype=int32)
    """
    return told(key, value, magnitude, called, jnp.asarray(error, value.dtype))


@perturbation(
    "data",
    "tool_result",
    magnitude=0.2,
    neutral=0.0,
    duration="end",
    limits=(0.0, 1.0),
    needs=("called", "tokens"),
)
def tool_corruption(key, value, magnitude, *, called, tokens):
    """A tool that is called answers with probability `magnitude` in random tokens, as many as its result has.

    They are drawn evenly from those that results are written in: wrong, and not to be told from a right answer.

    >>> tool_corruption(1.0).apply(jnp.array([[3, -1]]), called=jnp.array([True]), tokens=jnp.array([7]))
    Array([[ 7, -1]], dtype=int32)
    """
    draw_key, token_key = jax.random.split(key)
    return told(draw_key, value, magnitude, called, drawn_like(token_key, value, tokens))


@perturbation("data", "tool_result", magnitude=0.2, neutral=0.0, duration="end", limits=(0.0, 1.0), needs=("called",))
def tool_timeout(key, value, magnitude, *, called):
    """A tool that is called gives with probability `magnitude` no answer, and the policy goes on without.

    >>> tool_timeout(1.0).apply(jnp.array([[3, 4]]), called=jnp.array([True]))
    Array([[-1, -1]], dtype=int32)
    """
    return told(key, value, magnitude, called, jnp.full_like(value, NOTHING))


@perturbation(
    "data",
    "tool_result",
    magnitude=0.5,
    neutral=0.0,
    duration="end",
    limits=(0.0, 1.0),
    needs=("called", "rare"),
)
def tool_shift(key, value, magnitude, *, called, rare):
    """A share `magnitude` of the results is written in rare tokens of the same meaning: states hardly seen before.

    `rare` int32 `[V]` is each token's rare twin, or itself.

    >>> tool_shift(1.0).apply(jnp.array([[1, -1]]), called=jnp.array([True]), rare=jnp.array([0, 5]))
    Array([[ 5, -1]], dtype=int32)
    """
    twins = jnp.asarray(rare, value.dtype)[jnp.maximum(value, 0)]
    return told(key, value, magnitude, called, jnp.where(value == NOTHING, NOTHING, twins))


def shifts(given: Mapping[str, float]) -> tuple[float, float]:
    """The least and the largest shift of difficulty that mean something, by what is known of the learner's.

    Where the `usual` difficulty is not, at most from one end of the range to the other. Rounded, so that what a user
    subtracts by hand is within.
    """
    lowest, highest = given.get("lowest", -math.inf), given.get("highest", math.inf)
    return round(lowest - given.get("usual", highest), 6), round(highest - given.get("usual", lowest), 6)


@perturbation(
    "data",
    "difficulty",
    magnitude=1.0,
    neutral=0.0,
    duration="end",
    needs=("lowest", "highest"),
    reach=shifts,
)
def difficulty_shift(key, value, magnitude, *, lowest, highest):
    """Adds `magnitude` to the prompts' difficulty `[P]`; negative ones make them easier.

    A shift that leaves the difficulties the dialogue has, `lowest` to `highest`, is refused if the learner's usual
    difficulty is known before the run; where a curriculum moves it, what leaves them is at their end.

    >>> difficulty_shift(2.0).apply(jnp.array([1.0, 4.0]), lowest=0.0, highest=5.0)
    Array([3., 5.], dtype=float32)
    """
    return jnp.clip(value + magnitude, lowest, highest)


@perturbation("data", "prompt", magnitude=0.1, neutral=0.0, duration="end", limits=(0.0, 1.0), needs=("tokens",))
def prompt_corruption(key, value, magnitude, *, tokens):
    """Each token of a prompt is a random one with probability `magnitude`, drawn evenly from those of prompts.

    The rows of a rollout group share the prompt as it is then; what is right stays what it was.

    >>> prompt_corruption(1.0).apply(jnp.array([[1, 2, -1]]), tokens=jnp.array([6]))
    Array([[ 6,  6, -1]], dtype=int32)
    """
    draw_key, token_key = jax.random.split(key)
    return transforms.replace(draw_key, value, magnitude, drawn_like(token_key, value, tokens))
