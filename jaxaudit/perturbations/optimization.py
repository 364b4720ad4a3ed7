"""Optimization and parametric stability: perturbations of the optimizer and of the parameters (Tables S1 and S4)."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxaudit.core.optimizer import FIRST_MOMENT, SECOND_MOMENT
from jaxaudit.core.perturbation import perturbation
from jaxaudit.perturbations import transforms
from jaxaudit.runtime.paths import places_of, spread_over_leaves


@perturbation("optimization", "learning_rate", magnitude=10.0, neutral=1.0, duration=10, limits=(0.0, math.inf))
def lr_spike(key, value, magnitude):
    """Multiplies the learning rate by `magnitude` (Table S4: 10x for 10 steps at 30% of training).

    >>> float(lr_spike(10.0).apply(0.5))
    5.0
    """
    return transforms.scale(value, magnitude)


@perturbation(
    "optimization",
    "learning_rate",
    magnitude=-0.3,
    neutral=0.0,
    duration="end",
    limits=(-1.0, 1.0),
    needs=("schedule", "progress"),
)
def lr_schedule_error(key, value, magnitude, *, schedule, progress):
    """Shifts the learning-rate schedule by `magnitude`, a share of the run: later (negative) or earlier (positive).

    With +0.1, a schedule with a warmup of 10% skips the warmup. A constant rate has no schedule and is refused.

    >>> float(lr_schedule_error(-0.5).apply(0.5, schedule=lambda t: 1.0 - t, progress=0.5))
    1.0
    """
    shifted = jnp.clip(progress + magnitude, 0.0, 1.0)
    return value + (schedule(shifted) - schedule(progress))


@perturbation("optimization", "optimizer_state", magnitude=0.1, neutral=0.0, duration=10, limits=(0.0, math.inf))
def momentum_noise(key, value, magnitude):
    """Adds Gaussian noise of standard deviation `magnitude` to the first moment (Table S4: N(0, 0.1)).

    It acts at the beginning of a step: once in an iteration of a reinforcement learner, before its updates.

    >>> float(momentum_noise(0.1).apply({"mu": 0.0, "nu": 1.0})["nu"])
    1.0
    """
    return transforms.on_moments(FIRST_MOMENT, lambda moments: transforms.add_noise(key, moments, magnitude), value)


@perturbation("optimization", "optimizer_state", magnitude=0.01, neutral=1.0, duration="once", limits=(0.0, math.inf))
def second_moment_drift(key, value, magnitude):
    """Multiplies Adam's second moment by `magnitude`; below one, updates are too large (Table S1: moment drift).

    It acts at the beginning of a step, as `momentum_noise` does.

    >>> float(second_moment_drift(0.25).apply({"mu": 1.0, "nu": 4.0})["nu"])
    1.0
    """
    return transforms.on_moments(SECOND_MOMENT, lambda moments: transforms.scale(moments, magnitude), value)


@perturbation("optimization", "gradient", magnitude=0.2, neutral=0.0, duration=10, limits=(0.0, math.inf))
def gradient_scale(key, value, magnitude):
    """Multiplies each gradient by 1 + U(-magnitude, magnitude), with one draw per gradient (Table S4: +-20%).

    >>> 0.8 <= float(gradient_scale(0.2).apply(1.0)) <= 1.2
    True
    """
    return transforms.scale(value, 1.0 + magnitude * jax.random.uniform(key, minval=-1.0, maxval=1.0))


@perturbation("optimization", "clip_norm", magnitude=100.0, neutral=1.0, duration=10, limits=(0.0, math.inf))
def clip_failure(key, value, magnitude):
    """Multiplies the gradient-clipping threshold by `magnitude`; a large factor switches clipping off (Table S1).

    >>> float(clip_failure(100.0).apply(0.5))
    50.0
    """
    return transforms.scale(value, magnitude)


@perturbation("optimization", "ratio_clip", magnitude=10.0, neutral=1.0, duration=10, limits=(0.0, math.inf))
def ratio_clip_failure(key, value, magnitude):
    """Multiplies the bounds `[low, high]` on the probability ratio's distance from 1 by `magnitude`.

    This weakens the clipping of the surrogate objective (Schulman et al., 2017), which keeps updates close to the
    behaviour policy.

    >>> ratio_clip_failure(10.0).apply(jnp.array([0.5, 1.0]))
    Array([ 5., 10.], dtype=float32)
    """
    return transforms.scale(value, magnitude)


@perturbation("parametric", "params", magnitude=0.01, neutral=0.0, duration="once", limits=(0.0, math.inf))
def weight_noise(key, value, magnitude):
    """Adds Gaussian noise of standard deviation `magnitude` to every parameter (Table S4: N(0, 0.01)).

    >>> weight_noise(0.01).apply({"kernel": jnp.zeros((2, 3))})["kernel"].shape
    (2, 3)
    """
    return transforms.add_noise(key, value, magnitude)


@perturbation(
    "parametric",
    "params",
    magnitude=1.0,
    neutral=0.0,
    duration="once",
    limits=(0.0, math.inf),
    needs=("reinitialise", "selected"),
    whole=True,
)
def layer_reset(key, value, magnitude, *, reinitialise, selected):
    """Re-initialises `magnitude` layers, drawn at random from those in the target (Table S4: one layer).

    A layer is a layer of a `Stack` or, in a tree without a `Stack`, the parameters with a common parent (a kernel and
    its bias). Other parameters, such as embeddings beside a `Stack` or a policy's standard deviation beside its
    networks, count as layers if the target contains nothing else. The optimizer's moments do not change.

    >>> params, fresh = {"layer": {"kernel": 1.0}}, {"layer": {"kernel": 0.0}}
    >>> reset = layer_reset().apply(params, reinitialise=lambda key: fresh, selected=jnp.array([True]))
    >>> float(reset["layer"]["kernel"])
    0.0
    """
    unit_of, is_layer = _units(value)
    names = sorted(set(unit_of))
    position = np.array([names.index(unit) for unit in unit_of])
    members = position == np.arange(len(names))[:, None]
    in_target = (members & selected).any(1)
    layers = in_target & (members & np.array(is_layer)).any(1)
    eligible = jnp.where(layers.any(), layers, in_target)
    draw_key, init_key = jax.random.split(key)
    draw = jnp.where(eligible, jax.random.uniform(draw_key, (len(names),)), jnp.inf)
    earlier = np.tri(len(names), k=-1, dtype=bool)  # the order of equal draws
    before = (draw < draw[:, None]) | ((draw == draw[:, None]) & earlier)  # compiles faster than a sort
    chosen = (before.sum(1) < magnitude) & eligible
    resets = spread_over_leaves(chosen[position] & selected, value)
    return jax.tree.map(jnp.where, resets, reinitialise(init_key), value)


def _units(value: Any) -> tuple[list[str], list[bool]]:
    """Returns, for each path, the name of its layer or other unit, and whether that unit is a layer."""
    places = [place for leaf in places_of(value) for place in leaf]
    parents = [place.path.rpartition("/")[0] for place in places]
    stacked = any(place.layer for place in places)
    units = [place.layer or parent or place.path for place, parent in zip(places, parents, strict=True)]
    return units, [bool(place.layer if stacked else parent) for place, parent in zip(places, parents, strict=True)]


@perturbation(
    "parametric",
    "params",
    magnitude=1.0,
    neutral=0.0,
    duration="once",
    limits=(0.0, 1.0),
    needs=("reinitialise",),
    target="critic",
)
def critic_reset(key, value, magnitude, *, reinitialise):
    """Moves the critic's parameters p to (1 - magnitude) p + magnitude times newly initialised ones (Table S1).

    At 1 it is a full reset. The optimizer's moments do not change. The default `target` is the critic. The table is
    that of the paper that the README names.

    >>> float(critic_reset(0.5).apply({"kernel": 2.0}, reinitialise=lambda key: {"kernel": 0.0})["kernel"])
    1.0
    """
    return transforms.towards(value, reinitialise(key), magnitude)


@perturbation("parametric", "params", magnitude=1.0, neutral=0.0, duration="once", target="critic/head/bias")
def value_bias(key, value, magnitude):
    """Adds `magnitude`, in units of the reward, to the bias of the critic's head, so that it overestimates all values.

    Negative magnitudes make it underestimate them. The critic's further training may undo the change. The default
    `target` is the bias of a dialogue learner's critic, "critic/head/bias".

    >>> float(value_bias(2.0).apply({"bias": 0.5})["bias"])
    2.5
    """
    return jax.tree.map(lambda x: x + magnitude, value)


@perturbation("parametric", "params", magnitude=8.0, neutral=32.0, duration="once", limits=(2.0, 32.0))
def quantize(key, value, magnitude):
    """Rounds every parameter to `magnitude` bits, symmetric and uniform over each tensor's range.

    >>> quantize(2.0).apply(jnp.array([1.0, 0.2]))
    Array([1., 0.], dtype=float32)
    """
    return transforms.round_to_bits(value, magnitude)


@perturbation("parametric", "params", magnitude=3.0, neutral=23.0, duration="once", limits=(1.0, 23.0), whole=True)
def quantize_float(key, value, magnitude):
    """Rounds every parameter to `magnitude` bits of mantissa: 7 as in bfloat16, 3 or 2 as in 8-bit formats.

    Exponents are not limited, as if tensors were scaled into the format's range.

    >>> float(quantize_float(1.0).apply(1.3))
    1.5
    """

    def rounded(x: jax.Array) -> jax.Array:
        mantissa, exponent = jnp.frexp(x)  # |mantissa| in [1/2, 1)
        steps = 2.0 ** (magnitude + 1.0)
        return jnp.ldexp(jnp.round(mantissa * steps) / steps, exponent)

    return jax.tree.map(rounded, value)
