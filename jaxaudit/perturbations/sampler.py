"""Stability against the sampler: it writes rows with other parameters, logits or log-probabilities than are trained.

The behaviour policy is a pytree of the parameters that sample, logits are `[N, V]`, of N rows and V tokens, and stored
log-probabilities `[N, T]`, of T slots. Standard magnitudes are ours.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxaudit.perturbations import transforms
from jaxaudit.perturbations.kinds import perturbation

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
    """Nothing handed over yet."""
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
