"""Learning-signal stability: disturbances of what the learner is told to improve (Tables S1 and S4)."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxaudit.core.perturbation import perturbation
from jaxaudit.perturbations import transforms


@perturbation("signal", "reward", magnitude=0.5, neutral=0.0, duration="end", limits=(0.0, math.inf))
def reward_noise(key, value, magnitude):
    """Adds Gaussian noise of standard deviation `magnitude` to the reward learned from (Table S4: N(0, 0.5)).

    >>> reward_noise(0.5).apply(jnp.zeros(8)).shape
    (8,)
    """
    return transforms.add_noise(key, value, magnitude)


@perturbation("signal", "reward", magnitude=10.0, neutral=1.0, duration="end")
def reward_scale(key, value, magnitude):
    """Multiplies the reward learned from by `magnitude`; a negative factor inverts the goal.

    >>> float(reward_scale(10.0).apply(1.0))
    10.0
    """
    return transforms.scale(value, magnitude)


@perturbation("signal", "reward", magnitude=0.1, neutral=0.0, duration="end", limits=(0.0, 1.0))
def reward_flip(key, value, magnitude):
    """Inverts each reward's sign with probability `magnitude`.

    >>> float(reward_flip(1.0).apply(2.0))
    -2.0
    """
    return transforms.flip_signs(key, value, magnitude)


@perturbation(
    "signal",
    "reward",
    magnitude=16.0,
    neutral=0.0,
    duration="end",
    limits=(0.0, transforms.MOST_REWARD_STEPS),
    needs=("ends",),
    init=transforms.nothing_due,
    whole=True,
)
def reward_delay(key, value, magnitude, state, *, ends):
    """Rewards `[N]` arrive `magnitude` env steps late; an episode's last step pays what is still due (Table S1).

    So an episode within the window keeps its sum. Before the first arrives rewards are zero, and what is still due
    when the window closes is lost.

    >>> reward_delay(1.0).apply(jnp.array([3.0, 4.0]), ends=jnp.array([False, True]))
    Array([0., 4.], dtype=float32)
    """
    return transforms.pay_late(value, magnitude, state, ends)


@perturbation(
    "signal", "reward", magnitude=0.5, neutral=0.0, duration="end", limits=(0.0, math.inf), needs=("td_error",)
)
def adversarial_reward(key, value, magnitude, *, td_error):
    """Moves rewards `[N]` by up to `magnitude`, against what the learner would conclude from them (Table S1).

    Of `transforms.CANDIDATES` uniform draws and the reward itself it takes the one whose temporal-difference error
    is most opposed to the true reward's: a pleasant surprise is lessened or turned into a disappointment, and the
    reverse.

    >>> 0.5 <= float(adversarial_reward(0.5).apply(jnp.ones(1), td_error=lambda reward: reward)[0]) <= 1.0
    True
    """
    direction = jnp.sign(td_error(value))
    return transforms.worst_draw(key, value, magnitude, lambda reward: -direction * td_error(reward))


@perturbation("signal", "objective", magnitude=-1.0, neutral=1.0, duration=10)
def objective_scale(key, value, magnitude):
    """Multiplies the loss whose gradient is taken by `magnitude` (Table S1: objective perturbations).

    A negative factor makes the learner go uphill; of positive ones Adam sees little but through the clipping before it.

    >>> float(objective_scale(-1.0).apply(2.0))
    -2.0
    """
    return transforms.scale(value, magnitude)


@perturbation("signal", "label_smoothing", magnitude=0.2, neutral=0.0, duration="end", limits=(0.0, 1.0))
def label_smoothing(key, value, magnitude):
    """The label smoothing of the objective becomes `magnitude` (Szegedy et al., 2016; Table S4: alpha = 0.2).

    The target is (1 - magnitude) on the label and magnitude spread evenly over the vocabulary.

    >>> float(label_smoothing(0.25).apply(0.0))
    0.25
    """
    return jax.tree.map(lambda x: jnp.full_like(x, magnitude), value)


@perturbation("signal", "gradient", magnitude=0.1, neutral=0.0, duration=10, limits=(0.0, 1.0))
def gradient_sign_flip(key, value, magnitude):
    """Inverts the sign of a random fraction `magnitude` of the gradient's entries (Table S4: 10%).

    >>> float(gradient_sign_flip(1.0).apply(2.0))
    -2.0
    """
    return transforms.flip_signs(key, value, magnitude)


@perturbation("signal", "gradient", magnitude=0.1, neutral=0.0, duration=10, limits=(0.0, 1.0))
def gradient_mask(key, value, magnitude):
    """Sets a random fraction `magnitude` of the gradient's entries to zero.

    >>> float(gradient_mask(1.0).apply(2.0))
    0.0
    """
    return transforms.drop(key, value, magnitude)


@perturbation("signal", "reward", magnitude=0.1, neutral=0.0, duration="end", limits=(0.0, 1.0), needs=("bound",))
def verifier_flip(key, value, magnitude, *, bound):
    """Each reward r, of right (1) or wrong (0), is 1 - r with probability `magnitude`: the verifier errs.

    It is of rewards that lie between 0 and `bound`, which is 1 for all learners here; r becomes `bound` - r. Scores
    without bounds, as a reward model's, have no opposite.

    >>> verifier_flip(1.0).apply(jnp.array([0.0, 1.0, 0.75]), bound=1.0)
    Array([1.  , 0.  , 0.25], dtype=float32)
    """
    return transforms.replace(key, value, magnitude, bound - value)


@perturbation("signal", "reward", magnitude=0.01, neutral=0.0, duration="end", needs=("lengths",))
def length_bias(key, value, magnitude, *, lengths):
    """Adds `magnitude` for each of a row's own tokens to its reward `[N]`; a negative one favours short rows.

    `lengths` float32 `[N]` are the rows' own tokens.

    >>> length_bias(0.5).apply(jnp.array([1.0, 0.0]), lengths=jnp.array([2.0, 3.0]))
    Array([2. , 1.5], dtype=float32)
    """
    return value + magnitude * lengths


@perturbation("signal", "advantage", magnitude=0.5, neutral=0.0, duration="end", limits=(0.0, math.inf), needs=("own",))
def advantage_noise(key, value, magnitude, *, own):
    """Adds Gaussian noise of standard deviation `magnitude` to the normalised advantages `[N, T]` of own tokens.

    >>> float(advantage_noise(0.5).apply(jnp.ones((1, 1)), own=jnp.array([[False]]))[0, 0])
    1.0
    """
    return jnp.where(own, transforms.add_noise(key, value, magnitude), value)


@perturbation("signal", "gae_lambda", magnitude=0.5, neutral=1.0, duration="end", limits=(0.0, math.inf))
def signal_decay(key, value, magnitude):
    """Multiplies the lambda of advantage estimation by `magnitude`, within [0, 1].

    A reward at a row's end reaches the token k own tokens before it times lambda^k; the lambda of the critic's targets
    is another one and stays as it is, so that the critic learns what it did (VC-PPO, Yuan et al., 2025).

    >>> float(signal_decay(0.5).apply(0.5))
    0.25
    """
    return jax.tree.map(lambda x: jnp.clip(x * magnitude, 0.0, 1.0), value)


@perturbation("signal", "kl_coefficient", magnitude=0.0, neutral=1.0, duration="end", limits=(0.0, math.inf))
def kl_failure(key, value, magnitude):
    """Multiplies the weight of the penalty on leaving the reference by `magnitude`; zero switches it off.

    >>> float(kl_failure(0.0).apply(0.5))
    0.0
    """
    return transforms.scale(value, magnitude)
