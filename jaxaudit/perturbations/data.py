"""Environmental and data stability: perturbations of observations, actions, dynamics and text (Tables S1 and S4).

Observations are `[N, O]` and actions `[N, A]`, for N environments, in the task's units. Standard magnitudes that are in
neither table are our own.
"""

from __future__ import annotations

import math

import jax

from jaxaudit.core.perturbation import perturbation
from jaxaudit.perturbations import transforms


@perturbation("data", "observation", magnitude=0.1, neutral=0.0, duration="end", limits=(0.0, math.inf))
def observation_noise(key, value, magnitude):
    """Adds Gaussian noise of standard deviation `magnitude`, in the task's units (Table S4: N(0, 0.1)).

    >>> observation_noise(0.1).apply(jax.numpy.zeros((4, 3))).shape
    (4, 3)
    """
    return transforms.add_noise(key, value, magnitude)


@perturbation("data", "action", magnitude=0.05, neutral=0.0, duration="end", limits=(0.0, math.inf))
def action_noise(key, value, magnitude):
    """Adds Gaussian noise of standard deviation `magnitude` to the action the task receives (Table S4: N(0, 0.05)).

    >>> action_noise(0.05).apply(jax.numpy.zeros((4, 2))).shape
    (4, 2)
    """
    return transforms.add_noise(key, value, magnitude)


@perturbation(
    "data",
    "observation",
    magnitude=0.1,
    neutral=0.0,
    duration="end",
    limits=(0.0, 1.0),
    needs=("valid",),
    init=transforms.no_held_values,
)
def observation_stuck(key, value, magnitude, state, *, valid):
    """Keeps a share `magnitude` of the sensors at their readings from the opening of the window until it closes.

    Each entry of an environment's observation sticks with that probability, drawn at the opening, and through resets.

    >>> observation_stuck(1.0).apply(jax.numpy.ones((1, 2)), valid=jax.numpy.array([True]))
    Array([[1., 1.]], dtype=float32)
    """
    return transforms.stick(key, value, magnitude, state, valid)


@perturbation(
    "data",
    "action",
    magnitude=0.1,
    neutral=0.0,
    duration="end",
    limits=(0.0, 1.0),
    needs=("valid",),
    init=transforms.no_held_values,
)
def action_stuck(key, value, magnitude, state, *, valid):
    """Keeps a share `magnitude` of the actuators at their inputs from the opening of the window until it closes.

    Each entry of an environment's action sticks with that probability, drawn at the opening, and through resets.

    >>> action_stuck(1.0).apply(jax.numpy.ones((1, 2)), valid=jax.numpy.array([True]))
    Array([[1., 1.]], dtype=float32)
    """
    return transforms.stick(key, value, magnitude, state, valid)


@perturbation("data", "observation", magnitude=0.1, neutral=0.0, duration="end", limits=(0.0, 1.0))
def observation_dropped(key, value, magnitude):
    """Sets each entry of the observation to zero with probability `magnitude`, drawn anew every env step.

    >>> observation_dropped(1.0).apply(jax.numpy.ones((1, 2)))
    Array([[0., 0.]], dtype=float32)
    """
    return transforms.drop(key, value, magnitude)


@perturbation("data", "action", magnitude=0.1, neutral=0.0, duration="end", limits=(0.0, 1.0))
def action_dropped(key, value, magnitude):
    """Sets each entry of the action that the task receives to zero with probability `magnitude`, anew every env step.

    >>> action_dropped(1.0).apply(jax.numpy.ones((1, 2)))
    Array([[0., 0.]], dtype=float32)
    """
    return transforms.drop(key, value, magnitude)


@perturbation(
    "data",
    "observation",
    magnitude=2.0,
    neutral=0.0,
    duration="end",
    limits=(0.0, transforms.MAX_DELAY),
    needs=("begins", "valid"),
    init=transforms.empty_delay_lines,
    whole=True,
)
def observation_delayed(key, value, magnitude, state, *, begins, valid):
    """Delays observations by `magnitude` env steps (an integer, at most 32).

    Until there is one so old, the first of the episode, or since the window opened, is repeated.

    >>> yes = jax.numpy.array([True])
    >>> observation_delayed(2.0).apply(jax.numpy.ones((1, 2)), begins=yes, valid=yes)
    Array([[1., 1.]], dtype=float32)
    """
    return transforms.delay(value, magnitude, state, begins, valid)


@perturbation(
    "data",
    "action",
    magnitude=2.0,
    neutral=0.0,
    duration="end",
    limits=(0.0, transforms.MAX_DELAY),
    needs=("begins", "valid"),
    init=transforms.empty_delay_lines,
    whole=True,
)
def action_delayed(key, value, magnitude, state, *, begins, valid):
    """Delays the actions that the task receives by `magnitude` env steps (an integer, at most 32).

    Until there is one so old, the first of the episode, or since the window opened, is repeated.

    >>> yes = jax.numpy.array([True])
    >>> action_delayed(2.0).apply(jax.numpy.ones((1, 2)), begins=yes, valid=yes)
    Array([[1., 1.]], dtype=float32)
    """
    return transforms.delay(value, magnitude, state, begins, valid)


@perturbation(
    "data", "observation", magnitude=0.1, neutral=0.0, duration="end", limits=(0.0, math.inf), needs=("state_value",)
)
def adversarial_observation(key, value, magnitude, *, state_value):
    """Moves each entry by up to `magnitude`, in the task's units, towards the lowest state value.

    Each environment gets the observation with the lowest value among `transforms.CANDIDATES` uniform draws and the true
    one. The draws are those of the naive attack of Pattanaik et al. (2018), and the objective is that of the critic
    attack of Zhang et al. (2020, SA-MDP), which lowers the state value of the observation.

    >>> moved = adversarial_observation(0.1).apply(jax.numpy.zeros((1, 1)), state_value=lambda x: x[:, 0])
    >>> -0.1 <= float(moved[0, 0]) <= 0.0
    True
    """
    return transforms.most_harmful_draw(key, value, magnitude, lambda observation: -state_value(observation))


@perturbation("data", "tokens", magnitude=0.05, neutral=0.0, duration="end", limits=(0.0, 1.0), needs=("mask",))
def token_corruption(key, value, magnitude, *, mask):
    """Replaces each token of the text by the end-of-text token with probability `magnitude` (Table S4).

    It is replaced both in the input and as a label: the text is corrupted, not only the input. GPT-2 has no other token
    for a mask.

    >>> token_corruption(1.0).apply(jax.numpy.array([[1, 2]]), mask=9)
    Array([[9, 9]], dtype=int32)
    """
    return transforms.replace(key, value, magnitude, mask)


@perturbation("data", "tokens", magnitude=0.05, neutral=0.0, duration="end", limits=(0.0, 1.0), needs=("vocabulary",))
def token_replacement(key, value, magnitude, *, vocabulary):
    """Replaces each token of the text by one from the vocabulary, drawn uniformly, with probability `magnitude`.

    >>> token_replacement(1.0).apply(jax.numpy.array([[5, 6]]), vocabulary=1)
    Array([[0, 0]], dtype=int32)
    """
    draw_key, token_key = jax.random.split(key)
    random_tokens = jax.random.randint(token_key, value.shape, 0, vocabulary, value.dtype)
    return transforms.replace(draw_key, value, magnitude, random_tokens)


@perturbation("data", "tokens", magnitude=0.5, neutral=0.0, duration="end", limits=(0.0, 1.0), needs=("second_corpus",))
def distribution_shift(key, value, magnitude, *, second_corpus):
    """Replaces each sequence by one of a second corpus with probability `magnitude` (Table S1).

    >>> other = jax.numpy.array([[7, 8]])
    >>> distribution_shift(1.0).apply(jax.numpy.array([[1, 2]]), second_corpus=lambda key: other)
    Array([[7, 8]], dtype=int32)
    """
    return transforms.mix(key, value, magnitude, second_corpus)


@perturbation(
    "data",
    "tokens",
    magnitude=1.0,
    neutral=0.0,
    duration="end",
    limits=(0.0, 1.0),
    needs=("second_corpus", "elapsed"),
)
def distribution_drift(key, value, magnitude, *, second_corpus, elapsed):
    """Acts as `distribution_shift` with a share that grows linearly from 0 to `magnitude` at the window's last step.

    >>> text, other = jax.numpy.array([[1, 2]]), jax.numpy.array([[7, 8]])
    >>> distribution_drift(1.0).apply(text, second_corpus=lambda key: other, elapsed=1.0)
    Array([[7, 8]], dtype=int32)
    """
    return transforms.mix(key, value, magnitude * elapsed, second_corpus)


@perturbation("data", "dynamics", magnitude=0.5, neutral=0.0, duration="end", limits=(-0.99, math.inf), target="mass")
def dynamics_shift(key, value, magnitude):
    """Multiplies the simulation's mass, friction, gear or gravity by 1 + `magnitude` (Table S1).

    `target` is one of these names, by default "mass", or "*" for all four.

    >>> float(dynamics_shift(0.5).apply({"mass": 1.0})["mass"])
    1.5
    """
    return transforms.scale(value, 1.0 + magnitude)


@perturbation(
    "data",
    "dynamics",
    magnitude=0.5,
    neutral=0.0,
    duration="end",
    limits=(-0.99, math.inf),
    needs=("elapsed",),
    target="mass",
)
def dynamics_drift(key, value, magnitude, *, elapsed):
    """Multiplies mass, friction, gear or gravity by a factor that drifts from 1 to 1 + `magnitude` (Table S1).

    The drift is linear in the learner's steps and ends at the window's last step. A periodic window has one drift, from
    its first opening to the run's end. `target` is as in `dynamics_shift`.

    >>> float(dynamics_drift(0.5).apply({"mass": 1.0}, elapsed=0.5)["mass"])
    1.25
    """
    return transforms.scale(value, 1.0 + magnitude * elapsed)
