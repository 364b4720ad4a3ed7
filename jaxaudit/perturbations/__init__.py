"""The standard perturbations, one file for each stability dimension, and what composes them."""

from jaxaudit.perturbations.core import (
    DIMENSIONS,
    Chain,
    Condition,
    Perturbation,
    Sweep,
    Window,
    chain,
    conditions,
    control,
    retime,
    sweep,
    window,
)
from jaxaudit.perturbations.data import action_noise, observation_noise
from jaxaudit.perturbations.factory import Factory, perturbation
from jaxaudit.perturbations.optimization import (
    clip_failure,
    gradient_scale,
    lr_schedule_error,
    lr_spike,
    momentum_noise,
    second_moment_drift,
)
from jaxaudit.perturbations.parametric import layer_reset, quantize, weight_noise
from jaxaudit.perturbations.signal import (
    gradient_mask,
    gradient_sign_flip,
    reward_flip,
    reward_noise,
    reward_scale,
)

__all__ = [
    "DIMENSIONS",
    "Chain",
    "Condition",
    "Factory",
    "Perturbation",
    "Sweep",
    "Window",
    "action_noise",
    "chain",
    "clip_failure",
    "conditions",
    "control",
    "gradient_mask",
    "gradient_scale",
    "gradient_sign_flip",
    "layer_reset",
    "lr_schedule_error",
    "lr_spike",
    "momentum_noise",
    "observation_noise",
    "perturbation",
    "quantize",
    "retime",
    "reward_flip",
    "reward_noise",
    "reward_scale",
    "second_moment_drift",
    "sweep",
    "weight_noise",
    "window",
]
