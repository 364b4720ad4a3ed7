"""Optimization stability: disturbances of the update mechanism (Tables S1 and S4)."""

from __future__ import annotations

import math

import jax

from jaxaudit.core.optimizer import FIRST_MOMENT, SECOND_MOMENT
from jaxaudit.perturbations import transforms
from jaxaudit.perturbations.kinds import perturbation


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
    """Reads the learning-rate schedule at a wrong time: `magnitude` of the run late (negative) or early (positive).

    +0.1 on a schedule with a warmup of 10% skips the warmup. A constant rate has no schedule, and is refused.

    >>> float(lr_schedule_error(-0.5).apply(0.5, schedule=lambda t: 1.0 - t, progress=0.5))
    1.0
    """
    shifted = jax.numpy.clip(progress + magnitude, 0.0, 1.0)
    return value + (schedule(shifted) - schedule(progress))


@perturbation("optimization", "optimizer_state", magnitude=0.1, neutral=0.0, duration=10, limits=(0.0, math.inf))
def momentum_noise(key, value, magnitude):
    """Adds Gaussian noise of standard deviation `magnitude` to the first moment (Table S4: N(0, 0.1)).

    It enters when a step begins: once an iteration of a reinforcement learner, before its many updates.

    >>> float(momentum_noise(0.1).apply({"mu": 0.0, "nu": 1.0})["nu"])
    1.0
    """
    return transforms.on_moments(FIRST_MOMENT, lambda moments: transforms.add_noise(key, moments, magnitude), value)


@perturbation("optimization", "optimizer_state", magnitude=0.01, neutral=1.0, duration="once", limits=(0.0, math.inf))
def second_moment_drift(key, value, magnitude):
    """Multiplies Adam's second moment by `magnitude`; below one, updates are too large (Table S1: moment drift).

    It enters when a step begins, as in `momentum_noise`.

    >>> float(second_moment_drift(0.25).apply({"mu": 1.0, "nu": 4.0})["nu"])
    1.0
    """
    return transforms.on_moments(SECOND_MOMENT, lambda moments: transforms.scale(moments, magnitude), value)


@perturbation("optimization", "gradient", magnitude=0.2, neutral=0.0, duration=10, limits=(0.0, math.inf))
def gradient_scale(key, value, magnitude):
    """Multiplies each gradient by 1 + U(-magnitude, magnitude), one draw a gradient (Table S4: +-20%).

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
    """Multiplies how far probability ratios may leave one, `[low, high]`, by `magnitude`; a large factor: anywhere.

    The clipping of the surrogate objective (Schulman et al., 2017) is what holds an update near the behaviour policy.

    >>> ratio_clip_failure(10.0).apply(jax.numpy.array([0.5, 1.0]))
    Array([ 5., 10.], dtype=float32)
    """
    return transforms.scale(value, magnitude)
