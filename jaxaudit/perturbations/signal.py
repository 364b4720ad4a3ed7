"""Learning-signal stability: perturbations of rewards, objectives, gradients and labels (Tables S1 and S4)."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxaudit.core.perturbation import perturbation
from jaxaudit.perturbations import transforms


@perturbation("signal", "reward", magnitude=0.5, neutral=0.0, duration="end", limits=(0.0, math.inf))
def reward_noise(key, value, magnitude):
    """Adds Gaussian noise of standard deviation `magnitude` to the rewards of training (Table S4: N(0, 0.5)).

    >>> reward_noise(0.5).apply(jnp.zeros(8)).shape
    (8,)
    """
    return transforms.add_noise(key, value, magnitude)


@perturbation("signal", "reward", magnitude=10.0, neutral=1.0, duration="end")
def reward_scale(key, value, magnitude):
    """Multiplies the rewards of training by `magnitude`; a negative factor inverts the goal.

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
    limits=(0.0, transforms.MAX_REWARD_DELAY),
    needs=("ends",),
    init=transforms.no_pending_rewards,
    whole=True,
)
def reward_delay(key, value, magnitude, state, *, ends):
    """Delays rewards `[N]` by `magnitude` env steps; an episode's last step pays all pending rewards (Table S1).

    Episodes within the window therefore keep their sum of rewards. Before the first reward arrives, rewards are zero,
    and rewards that are pending when the window closes are lost.

    >>> reward_delay(1.0).apply(jnp.array([3.0, 4.0]), ends=jnp.array([False, True]))
    Array([0., 4.], dtype=float32)
    """
    return transforms.delay_rewards(value, magnitude, state, ends)


@perturbation(
    "signal", "reward", magnitude=0.5, neutral=0.0, duration="end", limits=(0.0, math.inf), needs=("td_error",)
)
def adversarial_reward(key, value, magnitude, *, td_error):
    """Moves rewards `[N]` by up to `magnitude` against the sign of their temporal-difference error (Table S1).

    Among `transforms.CANDIDATES` uniform draws and the reward itself, it takes the one whose temporal-difference error
    is most opposed to that of the true reward.

    >>> 0.5 <= float(adversarial_reward(0.5).apply(jnp.ones(1), td_error=lambda reward: reward)[0]) <= 1.0
    True
    """
    direction = jnp.sign(td_error(value))
    return transforms.most_harmful_draw(key, value, magnitude, lambda reward: -direction * td_error(reward))


@perturbation("signal", "objective", magnitude=-1.0, neutral=1.0, duration=10)
def objective_scale(key, value, magnitude):
    """Multiplies the training loss by `magnitude` (Table S1: objective perturbations).

    A negative factor makes the learner increase the loss. Adam is nearly invariant to positive factors, except through
    gradient clipping.

    >>> float(objective_scale(-1.0).apply(2.0))
    -2.0
    """
    return transforms.scale(value, magnitude)


@perturbation("signal", "label_smoothing", magnitude=0.2, neutral=0.0, duration="end", limits=(0.0, 1.0))
def label_smoothing(key, value, magnitude):
    """Sets the label smoothing of the objective to `magnitude` (Szegedy et al., 2016; Table S4: alpha = 0.2).

    The target distribution has 1 - magnitude on the label and magnitude spread uniformly over the vocabulary.

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
    """Replaces each reward r in [0, 1] by 1 - r with probability `magnitude`, as if the verifier made an error.

    For rewards between 0 and `bound`, which is 1 for all learners of this package, r becomes `bound` - r. Learners with
    unbounded rewards, such as the scores of a reward model, offer no `bound` and cannot be disturbed in this way.

    >>> verifier_flip(1.0).apply(jnp.array([0.0, 1.0, 0.75]), bound=1.0)
    Array([1.  , 0.  , 0.25], dtype=float32)
    """
    return transforms.replace(key, value, magnitude, bound - value)


@perturbation("signal", "reward", magnitude=0.01, neutral=0.0, duration="end", needs=("lengths",))
def length_bias(key, value, magnitude, *, lengths):
    """Adds `magnitude` times the number of a row's own tokens to its reward `[N]`; negative ones favour short rows.

    `lengths` float32 `[N]` are the numbers of the rows' own tokens.

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
    """Multiplies the lambda of advantage estimation by `magnitude` and clips it to [0, 1].

    A reward at the end of a row is weighted by lambda^k at the token k own tokens before. The lambda of the critic's
    targets is separate and does not change (VC-PPO, Yuan et al., 2025).

    >>> float(signal_decay(0.5).apply(0.5))
    0.25
    """
    return jax.tree.map(lambda x: jnp.clip(x * magnitude, 0.0, 1.0), value)


@perturbation("signal", "kl_coefficient", magnitude=0.0, neutral=1.0, duration="end", limits=(0.0, math.inf))
def kl_failure(key, value, magnitude):
    """Multiplies the coefficient of the KL penalty by `magnitude`; zero switches the penalty off.

    >>> float(kl_failure(0.0).apply(0.5))
    0.0
    """
    return transforms.scale(value, magnitude)
