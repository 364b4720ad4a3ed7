"""Environmental and data stability of dialogues: disturbances of what a row of tokens is told.

A prompt is int32 `[P, R]`, of P prompts, and a tool's result `[N, R]`, of N rows; `NOTHING` stands after the last
token. Standard magnitudes are ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxaudit.core.perturbation import perturbation
from jaxaudit.perturbations import transforms

MOST_LAG = 8
"""The longest lag of the behaviour policy, in steps."""


@struct.dataclass
class StaleCopies:
    """Values of earlier steps, a ring.

    Attributes:
      values: a tree like the value, leaves `[lag + 1, ...]`: that of step t at t modulo the length.
      step: int32, steps since the window opened.
    """

    values: Any
    step: Any


def no_copies(value: Any, most: float) -> StaleCopies:
    """A ring for values like this one, as long as the lag `most` needs."""
    length = int(most) + 1
    return StaleCopies(jax.tree.map(lambda x: jnp.zeros((length, *x.shape), x.dtype), value), jnp.int32(0))


@perturbation(
    "parametric",
    "behaviour",
    magnitude=4.0,
    neutral=0.0,
    duration="end",
    limits=(0.0, MOST_LAG),
    whole=True,
    init=no_copies,
    sized=True,
)
def stale_policy(key, value, magnitude, state):
    """Rows are written by the policy of `magnitude` steps ago (whole steps, at most 8).

    Until there is one so old, by that of the step at which the window opened. One copy of the parameters is kept for
    every step of the longest lag; for large models there is `sync_interval`. DPO feels it `online` alone: else its rows
    are the frozen reference's, of which all copies are the same.

    >>> float(stale_policy(2).apply({"kernel": 1.0})["kernel"])  # there is nothing yet to lag behind
    1.0
    """
    lag = jnp.minimum(jnp.round(magnitude).astype(jnp.int32), state.step)

    def late(now: jax.Array, ring: jax.Array) -> jax.Array:
        return ring[(state.step - lag) % ring.shape[0]]

    values = jax.tree.map(lambda now, ring: ring.at[state.step % ring.shape[0]].set(now), value, state.values)
    return jax.tree.map(late, value, values), StaleCopies(values, state.step + 1)


@struct.dataclass
class Synced:
    """The value that was last handed over.

    Attributes:
      value: a tree like the value.
      step: int32, steps since the window opened.
    """

    value: Any
    step: Any


def never_synced(value: Any) -> Synced:
    return Synced(jax.tree.map(jnp.zeros_like, value), jnp.int32(0))


@perturbation(
    "parametric",
    "behaviour",
    magnitude=8.0,
    neutral=1.0,
    duration="end",
    limits=(1.0, math.inf),
    whole=True,
    init=never_synced,
)
def sync_interval(key, value, magnitude, state):
    """The sampler gets the policy's parameters every `magnitude` steps alone, and writes rows with them until then.

    The first time is when the window opens. One copy of the parameters is kept. As with
    `stale_policy`, DPO feels it `online` alone.

    >>> float(sync_interval(8).apply({"kernel": 1.0})["kernel"])  # handed over as the window opens
    1.0
    """
    now = state.step % jnp.round(magnitude).astype(jnp.int32) == 0
    held = jax.tree.map(lambda new, old: jnp.where(now, new, old), value, state.value)
    return held, Synced(held, state.step + 1)


@perturbation("parametric", "behaviour", magnitude=8.0, neutral=32.0, duration="end", limits=(2.0, 32.0))
def sampler_quantize(key, value, magnitude):
    """Rows are written with parameters rounded to `magnitude` bits, as in `quantize`; those trained are not.

    >>> sampler_quantize(2.0).apply(jnp.array([1.0, 0.2]))
    Array([1., 0.], dtype=float32)
    """
    return transforms.round_to_bits(value, magnitude)


@perturbation("data", "sampled_logits", magnitude=0.5, neutral=0.0, duration="end", limits=(0.0, math.inf))
def sampler_noise(key, value, magnitude):
    """Adds Gaussian noise of standard deviation `magnitude` to the logits that tokens are drawn from, at every slot.

    The trainer's logits have none: what another kernel or precision does to the sampler's.

    >>> sampler_noise(0.5).apply(jnp.zeros((4, 3))).shape
    (4, 3)
    """
    return transforms.add_noise(key, value, magnitude)


@perturbation(
    "signal",
    "log_probability",
    magnitude=0.1,
    neutral=0.0,
    duration="end",
    limits=(0.0, math.inf),
    needs=("own",),
)
def log_probability_noise(key, value, magnitude, *, own):
    """Adds Gaussian noise of standard deviation `magnitude` (nats) to the log-probabilities the sampler stored.

    Of own tokens alone, `own` bool `[N, T]`; tokens are drawn as before, and ratios to the sampler are wrong.

    >>> float(log_probability_noise(0.1).apply(jnp.zeros((1, 1)), own=jnp.array([[False]]))[0, 0])
    0.0
    """
    return jnp.where(own, transforms.add_noise(key, value, magnitude), value)


@perturbation("data", "temperature", magnitude=2.0, neutral=1.0, duration=10, limits=(0.01, math.inf))
def temperature_spike(key, value, magnitude):
    """Multiplies the temperature, that the sampler and the trainer have in common, by `magnitude`.

    >>> float(temperature_spike(2.0).apply(0.5))
    1.0
    """
    return transforms.scale(value, magnitude)


@perturbation("signal", "reward_model", magnitude=0.01, neutral=0.0, duration="end", limits=(0.0, math.inf))
def reward_model_noise(key, value, magnitude):
    """Adds Gaussian noise of standard deviation `magnitude` to the reward model's parameters, drawn anew every step.

    Rows of one step are judged by one model.

    >>> reward_model_noise(0.01).apply({"kernel": jnp.zeros((2, 3))})["kernel"].shape
    (2, 3)
    """
    return transforms.add_noise(key, value, magnitude)


@struct.dataclass
class DriftDirection:
    """What a direction in the space of parameters is drawn with.

    Attributes:
      key: key data, uint32 `[...]`.
      known: bool, whether the window has opened.
    """

    key: Any
    known: Any


def no_direction(value: Any) -> DriftDirection:
    return DriftDirection(jnp.zeros_like(jax.random.key_data(jax.random.key(0))), jnp.zeros((), bool))


@perturbation(
    "signal",
    "reward_model",
    magnitude=0.03,
    neutral=0.0,
    duration="end",
    limits=(0.0, math.inf),
    needs=("elapsed",),
    init=no_direction,
)
def reward_model_drift(key, value, magnitude, state, *, elapsed):
    """The reward model's parameters drift away, in a random direction, linearly over the window.

    Their distance at its last step is that of Gaussian noise of standard deviation `magnitude`. The direction is drawn
    when the window opens: it is not noise, and does not average out.

    >>> reward_model_drift(0.03).apply({"kernel": jnp.zeros((2, 3))}, elapsed=0.5)["kernel"].shape
    (2, 3)
    """
    data = jnp.where(state.known, state.key, jax.random.key_data(key))
    drawn = jax.random.wrap_key_data(data)
    return transforms.add_noise(drawn, value, magnitude * elapsed), DriftDirection(data, jnp.ones((), bool))


@perturbation("signal", "reference", magnitude=1.0, neutral=0.0, duration="once", limits=(0.0, 1.0), needs=("policy",))
def reference_reset(key, value, magnitude, *, policy):
    """The reference becomes the policy as it is, or moves a share `magnitude` of the way: what it learned is forgiven.

    The penalty on leaving the reference begins anew from there.

    >>> float(reference_reset().apply({"kernel": 2.0}, policy={"kernel": 3.0})["kernel"])
    3.0
    """
    return transforms.towards(value, policy, magnitude)


@perturbation("signal", "reference", magnitude=0.05, neutral=0.0, duration="end", limits=(0.0, 1.0), needs=("policy",))
def reference_drift(key, value, magnitude, *, policy):
    """The reference moves a share `magnitude` of the way towards the policy at every step, and does not hold it.

    >>> float(reference_drift(0.25).apply({"kernel": 2.0}, policy={"kernel": 6.0})["kernel"])
    3.0
    """
    return transforms.towards(value, policy, magnitude)


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
