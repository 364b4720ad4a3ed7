"""Perturbations of dialogue learners: prompts, tool results, sampling, the reward model and the reference.

Prompts are int32 `[P, R]`, for P prompts, and tool results `[N, R]`, for N rows; both are padded with `NO_TOKEN`. The
standard magnitudes are our own.
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

MAX_LAG = 8
"""The largest lag of the behaviour policy, in steps."""


@struct.dataclass
class StaleCopies:
    """The state of `stale_policy`: a ring buffer of the values of earlier steps.

    Attributes:
      values: a tree like the value, with leaves `[lag + 1, ...]` that have the value of step t at t modulo the length.
      step: the number of steps since the window opened, an int32 scalar.
    """

    values: Any
    step: Any


def empty_ring(value: Any, max_lag: float) -> StaleCopies:
    """Returns the first state of `stale_policy`, a ring buffer for lags of up to `max_lag` steps."""
    length = int(max_lag) + 1
    return StaleCopies(jax.tree.map(lambda x: jnp.zeros((length, *x.shape), x.dtype), value), jnp.int32(0))


@perturbation(
    "parametric",
    "behaviour",
    magnitude=4.0,
    neutral=0.0,
    duration="end",
    limits=(0.0, MAX_LAG),
    whole=True,
    init=empty_ring,
    sized=True,
)
def stale_policy(key, value, magnitude, state):
    """Samples rows with the policy of `magnitude` steps ago (an integer, at most 8).

    In the first `magnitude` steps of its window, it uses the policy at which the window opened. One copy of the
    parameters is stored for every step of the longest lag, so the perturbation `sync_interval` suits large models
    better. It has no effect on DPO unless that is `online`, because otherwise the frozen reference samples the rows.

    >>> float(stale_policy(2).apply({"kernel": 1.0})["kernel"])  # there is no earlier policy yet
    1.0
    """
    lag = jnp.minimum(jnp.round(magnitude).astype(jnp.int32), state.step)

    def lagged(ring: jax.Array) -> jax.Array:
        return ring[(state.step - lag) % ring.shape[0]]

    values = jax.tree.map(lambda now, ring: ring.at[state.step % ring.shape[0]].set(now), value, state.values)
    return jax.tree.map(lagged, values), StaleCopies(values, state.step + 1)


@struct.dataclass
class Synced:
    """The state of `sync_interval`.

    Attributes:
      value: the value at the last synchronisation.
      step: the number of steps since the window opened, an int32 scalar.
    """

    value: Any
    step: Any


def not_synced(value: Any) -> Synced:
    return Synced(jax.tree.map(jnp.zeros_like, value), jnp.int32(0))


@perturbation(
    "parametric",
    "behaviour",
    magnitude=8.0,
    neutral=1.0,
    duration="end",
    limits=(1.0, math.inf),
    whole=True,
    init=not_synced,
)
def sync_interval(key, value, magnitude, state):
    """Updates the sampler's copy of the policy's parameters only every `magnitude` steps.

    The first update is at the opening of the window. One copy of the parameters is stored. As with `stale_policy`, DPO
    is affected only if it is `online`.

    >>> float(sync_interval(8).apply({"kernel": 1.0})["kernel"])  # synchronised at the opening of the window
    1.0
    """
    sync = state.step % jnp.round(magnitude).astype(jnp.int32) == 0
    synced = jax.tree.map(lambda new, old: jnp.where(sync, new, old), value, state.value)
    return synced, Synced(synced, state.step + 1)


@perturbation("parametric", "behaviour", magnitude=8.0, neutral=32.0, duration="end", limits=(2.0, 32.0))
def sampler_quantize(key, value, magnitude):
    """Samples rows with parameters rounded to `magnitude` bits, as in `quantize`; training uses exact parameters.

    >>> sampler_quantize(2.0).apply(jnp.array([1.0, 0.2]))
    Array([1., 0.], dtype=float32)
    """
    return transforms.round_to_bits(value, magnitude)


@perturbation("data", "sampled_logits", magnitude=0.5, neutral=0.0, duration="end", limits=(0.0, math.inf))
def sampler_noise(key, value, magnitude):
    """Adds Gaussian noise of standard deviation `magnitude` to the logits from which tokens are sampled.

    The trainer's logits have no noise, as if the sampler used another kernel or precision.

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
    """Adds Gaussian noise of standard deviation `magnitude` (nats) to the sampler's log-probabilities.

    Only those of the policy's own tokens are disturbed (`own`, bool `[N, T]`). Sampling does not change, but the ratios
    to the sampler's probabilities become wrong.

    >>> float(log_probability_noise(0.1).apply(jnp.zeros((1, 1)), own=jnp.array([[False]]))[0, 0])
    0.0
    """
    return jnp.where(own, transforms.add_noise(key, value, magnitude), value)


@perturbation("data", "temperature", magnitude=2.0, neutral=1.0, duration=10, limits=(0.01, math.inf))
def temperature_spike(key, value, magnitude):
    """Multiplies the temperature, which the sampler and the trainer share, by `magnitude`.

    >>> float(temperature_spike(2.0).apply(0.5))
    1.0
    """
    return transforms.scale(value, magnitude)


@perturbation("signal", "reward_model", magnitude=0.01, neutral=0.0, duration="end", limits=(0.0, math.inf))
def reward_model_noise(key, value, magnitude):
    """Adds Gaussian noise of standard deviation `magnitude` to the reward model's parameters, drawn anew every step.

    All rows of a step are scored by the same parameters.

    >>> reward_model_noise(0.01).apply({"kernel": jnp.zeros((2, 3))})["kernel"].shape
    (2, 3)
    """
    return transforms.add_noise(key, value, magnitude)


@struct.dataclass
class DriftDirection:
    """The state of `reward_model_drift`: the random key of its direction.

    Attributes:
      key: the key data, uint32 `[...]`.
      known: whether the window has opened and the key is set, a bool scalar.
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
    """Moves the reward model's parameters in a random direction, linearly over the window.

    Their distance at the window's last step is that of Gaussian noise of standard deviation `magnitude`. The direction
    is drawn when the window opens, so that the drift, unlike noise, does not average out.

    >>> reward_model_drift(0.03).apply({"kernel": jnp.zeros((2, 3))}, elapsed=0.5)["kernel"].shape
    (2, 3)
    """
    data = jnp.where(state.known, state.key, jax.random.key_data(key))
    direction_key = jax.random.wrap_key_data(data)
    return transforms.add_noise(direction_key, value, magnitude * elapsed), DriftDirection(data, jnp.ones((), bool))


@perturbation("signal", "reference", magnitude=1.0, neutral=0.0, duration="once", limits=(0.0, 1.0), needs=("policy",))
def reference_reset(key, value, magnitude, *, policy):
    """Moves the reference a share `magnitude` of the way to the policy; at 1 it becomes the current policy.

    The penalty on the divergence from the reference starts again from there.

    >>> float(reference_reset().apply({"kernel": 2.0}, policy={"kernel": 3.0})["kernel"])
    3.0
    """
    return transforms.towards(value, policy, magnitude)


@perturbation("signal", "reference", magnitude=0.05, neutral=0.0, duration="end", limits=(0.0, 1.0), needs=("policy",))
def reference_drift(key, value, magnitude, *, policy):
    """Moves the reference a share `magnitude` of the way to the policy at every step.

    >>> float(reference_drift(0.25).apply({"kernel": 2.0}, policy={"kernel": 6.0})["kernel"])
    3.0
    """
    return transforms.towards(value, policy, magnitude)


NO_TOKEN = -1
"""The padding in place of a missing token, as in `jaxaudit.dialogues.protocol`."""


def replace_called(
    key: jax.Array, value: jax.Array, probability: jax.Array, called: jax.Array, other: jax.Array
) -> jax.Array:
    """Replaces each `called` (bool `[N]`) result of `value` `[N, R]` by that of `other` with `probability`."""
    chosen = called & jax.random.bernoulli(key, probability, called.shape)
    return jnp.where(chosen[:, None], other, value)


def random_tokens_like(key: jax.Array, value: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns tokens drawn uniformly from `tokens` `[K]`, and `NO_TOKEN` where `value` has none."""
    return jnp.where(value == NO_TOKEN, NO_TOKEN, jax.random.choice(key, jnp.asarray(tokens, value.dtype), value.shape))


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
    """Replaces a called tool's result by the dialogue's error message with probability `magnitude`.

    >>> yes, failed = jnp.array([True]), jnp.array([9, -1])
    >>> tool_error(1.0).apply(jnp.array([[3, 4]]), called=yes, error=failed)
    Array([[ 9, -1]], dtype=int32)
    """
    return replace_called(key, value, magnitude, called, jnp.asarray(error, value.dtype))


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
    """Replaces a called tool's result by as many random tokens with probability `magnitude`.

    They are drawn uniformly from the tokens of results, so that they look like a correct result.

    >>> tool_corruption(1.0).apply(jnp.array([[3, -1]]), called=jnp.array([True]), tokens=jnp.array([7]))
    Array([[ 7, -1]], dtype=int32)
    """
    draw_key, token_key = jax.random.split(key)
    return replace_called(draw_key, value, magnitude, called, random_tokens_like(token_key, value, tokens))


@perturbation("data", "tool_result", magnitude=0.2, neutral=0.0, duration="end", limits=(0.0, 1.0), needs=("called",))
def tool_timeout(key, value, magnitude, *, called):
    """Removes a called tool's result with probability `magnitude`; the policy continues without it.

    >>> tool_timeout(1.0).apply(jnp.array([[3, 4]]), called=jnp.array([True]))
    Array([[-1, -1]], dtype=int32)
    """
    return replace_called(key, value, magnitude, called, jnp.full_like(value, NO_TOKEN))


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
    """Writes a share `magnitude` of the results with rare tokens of the same meaning, which are rare in training.

    `rare` int32 `[V]` contains each token's rare synonym, or the token itself.

    >>> tool_shift(1.0).apply(jnp.array([[1, -1]]), called=jnp.array([True]), rare=jnp.array([0, 5]))
    Array([[ 5, -1]], dtype=int32)
    """
    synonyms = jnp.asarray(rare, value.dtype)[jnp.maximum(value, 0)]
    return replace_called(key, value, magnitude, called, jnp.where(value == NO_TOKEN, NO_TOKEN, synonyms))


def difficulty_shift_limits(numbers: Mapping[str, float]) -> tuple[float, float]:
    """Returns the smallest and largest shift that stay within the learner's difficulties, from its `numbers`.

    If the `usual` difficulty is unknown, shifts are limited to the whole range. The limits are rounded, so that they
    include differences that a user computes in decimal.
    """
    lowest, highest = numbers.get("lowest", -math.inf), numbers.get("highest", math.inf)
    return round(lowest - numbers.get("usual", highest), 6), round(highest - numbers.get("usual", lowest), 6)


@perturbation(
    "data",
    "difficulty",
    magnitude=1.0,
    neutral=0.0,
    duration="end",
    needs=("lowest", "highest"),
    reach=difficulty_shift_limits,
)
def difficulty_shift(key, value, magnitude, *, lowest, highest):
    """Adds `magnitude` to the prompts' difficulty `[P]`; negative magnitudes make them easier.

    If the learner's usual difficulty is known before the run, a shift out of the dialogue's range, `lowest` to
    `highest`, is refused. If a curriculum changes it, difficulties are clipped to that range.

    >>> difficulty_shift(2.0).apply(jnp.array([1.0, 4.0]), lowest=0.0, highest=5.0)
    Array([3., 5.], dtype=float32)
    """
    return jnp.clip(value + magnitude, lowest, highest)


@perturbation("data", "prompt", magnitude=0.1, neutral=0.0, duration="end", limits=(0.0, 1.0), needs=("tokens",))
def prompt_corruption(key, value, magnitude, *, tokens):
    """Replaces each token of a prompt by a random token of prompts, drawn uniformly, with probability `magnitude`.

    The rows of a rollout group share the corrupted prompt. The correct answer does not change.

    >>> prompt_corruption(1.0).apply(jnp.array([[1, 2, -1]]), tokens=jnp.array([6]))
    Array([[ 6,  6, -1]], dtype=int32)
    """
    draw_key, token_key = jax.random.split(key)
    return transforms.replace(draw_key, value, magnitude, random_tokens_like(token_key, value, tokens))
