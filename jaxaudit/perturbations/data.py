"""Environmental and data stability: disturbances of what the learner sees and does (Tables S1 and S4)."""

from __future__ import annotations

import math

from jaxaudit.perturbations import transforms
from jaxaudit.perturbations.factory import perturbation


@perturbation("data", "observation", magnitude=0.1, neutral=0.0, duration="end", limits=(0.0, math.inf))
def observation_noise(key, value, magnitude):
    """Adds Gaussian noise of standard deviation `magnitude`, in the task's units (Table S4: N(0, 0.1))."""
    return transforms.add_noise(key, value, magnitude)


@perturbation("data", "action", magnitude=0.05, neutral=0.0, duration="end", limits=(0.0, math.inf))
def action_noise(key, value, magnitude):
    """Adds Gaussian noise of standard deviation `magnitude` to the action the task receives (Table S4: N(0, 0.05))."""
    return transforms.add_noise(key, value, magnitude)
