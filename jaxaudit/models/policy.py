"""Networks of policies and critics, and the heads that turn a policy network's output into a distribution of actions.

A head is a collection of functions of arrays. A distribution is a NamedTuple of arrays with the leading axes of the
observations; its entropy, divergence and log probabilities are in nats.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxaudit.kernels.linear_algebra import orthogonal


class MLP(nn.Module):
    """Dense layers with an activation between them: `[..., d] -> [..., features]`.

    Attributes:
      hidden: widths of the hidden layers.
      features: width of the output.
      output_scale: gain of the output layer's orthogonal initialisation.
      orthogonal: whether the initialisation is orthogonal, with gain sqrt(2) in the hidden layers (Andrychowicz et al.,
        2021), instead of LeCun normal.
      activation: the activation after each hidden layer.
      fan_in_uniform: whether kernels and biases are uniform within 1 / sqrt(layer's inputs) instead. This is PyTorch's
        default, and the initialisation of published results of SAC and TD3.
      layer_norm: whether each hidden layer has layer normalisation before its activation.
    """

    hidden: tuple[int, ...]
    features: int
    output_scale: float = 1.0
    orthogonal: bool = True
    activation: Callable[[jax.Array], jax.Array] = jnp.tanh
    fan_in_uniform: bool = False
    layer_norm: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in self.hidden:
            x = self._dense(x, width, np.sqrt(2.0))
            x = self.activation(nn.LayerNorm()(x) if self.layer_norm else x)
        return self._dense(x, self.features, self.output_scale)

    def _dense(self, x: jax.Array, width: int, gain: float) -> jax.Array:
        if self.fan_in_uniform:
            uniform = _uniform(1.0 / np.sqrt(x.shape[-1]))
            return nn.Dense(width, kernel_init=uniform, bias_init=uniform)(x)
        return nn.Dense(width, kernel_init=self._initializer(gain))(x)

    def _initializer(self, gain: float) -> nn.initializers.Initializer:
        if not self.orthogonal:
            return nn.initializers.lecun_normal()
        return lambda key, shape, dtype=jnp.float32, **_: orthogonal(key, shape, gain).astype(dtype)


def _uniform(bound: float) -> nn.initializers.Initializer:
    return lambda key, shape, dtype=jnp.float32, **_: jax.random.uniform(key, shape, dtype, -bound, bound)


class TwinCritic(nn.Module):
    """Two independent critics Q(s, a), with the parameters "first" and "second".

    Attributes:
      hidden: widths of the hidden layers, with ReLU between them.
      layer_norm: as in `MLP`.
    """

    hidden: tuple[int, ...]
    layer_norm: bool = False

    def setup(self) -> None:
        self.first = MLP(self.hidden, 1, activation=nn.relu, fan_in_uniform=True, layer_norm=self.layer_norm)
        self.second = MLP(self.hidden, 1, activation=nn.relu, fan_in_uniform=True, layer_norm=self.layer_norm)

    def __call__(self, observation: jax.Array, action: jax.Array) -> jax.Array:
        """Returns the values of both critics: `[..., O]`, `[..., A]` to `[2, ...]`."""
        inputs = jnp.concatenate([observation, action], axis=-1)
        return jnp.stack([self.first(inputs)[..., 0], self.second(inputs)[..., 0]])

    def first_value(self, observation: jax.Array, action: jax.Array) -> jax.Array:
        """Returns the value of the first critic only: `[..., O]`, `[..., A]` to `[...]`."""
        return self.first(jnp.concatenate([observation, action], axis=-1))[..., 0]


Params = Any
Distribution = Any

IMPOSSIBLE = -1
"""The discrete action for logits that are not finite. No task accepts it, so that a diverged policy is noticed."""


class Head(Protocol):
    """The interface of a policy's head for on-policy learners."""

    @property
    def outputs(self) -> int:
        """The number of outputs of the network's last layer."""

    def init_params(self) -> dict[str, jax.Array]:
        """Returns the parameters that are trained in addition to the network's."""

    def distribution(self, output: jax.Array, params: Params) -> Distribution:
        """Returns the distribution for an output `[..., outputs]`, under parameters that include `init_params`."""

    def sample(self, key: jax.Array, distribution: Distribution) -> jax.Array:
        """Samples an action of the distribution, which `to_task` converts to the task's action."""

    def mode(self, distribution: Distribution) -> jax.Array:
        """Returns the most likely action, before `to_task`."""

    def to_task(self, action: jax.Array) -> jax.Array:
        """Converts an action to the task's action space."""

    def log_probability(self, distribution: Distribution, action: jax.Array) -> jax.Array:
        """Returns the log probability of an action, `[...]`, or its log density if actions are continuous."""

    def entropy(self, distribution: Distribution) -> jax.Array:
        """Returns the entropy of the distribution, `[...]`, or a scalar if it is the same for all observations."""

    def kl(self, old: Distribution, new: Distribution) -> jax.Array:
        """Returns the divergence KL(old || new), `[...]`."""

    def fisher(self, distribution: Distribution, tangent: Distribution) -> Distribution:
        """Multiplies a tangent of the distribution's shapes with the Fisher information.

        The Fisher information is the Hessian of the mean of `kl(distribution, new)` over all leading axes, at new =
        distribution.
        """


class Normal(NamedTuple):
    """Gaussians with independent entries: means `[..., A]`, and shared log standard deviations `[A]`."""

    mean: jax.Array
    log_std: jax.Array


class Choice(NamedTuple):
    """Categorical distributions over N actions, given by their logits `[..., N]`."""

    logits: jax.Array


@dataclass(frozen=True, eq=False)
class Gaussian:
    """The head for continuous actions `[..., A]`: the output is their mean, and "log_std" is a parameter of its own.

    Attributes:
      low, high: `[A]`, bounds to which `to_task` clips actions. The distribution does not depend on them.
      log_std: initial logarithm of the standard deviation.
    """

    low: np.ndarray
    high: np.ndarray
    log_std: float = 0.0

    @property
    def outputs(self) -> int:
        """The number of outputs of the network's last layer."""
        return len(self.low)

    def init_params(self) -> dict[str, jax.Array]:
        """Returns the parameters that are trained in addition to the network's."""
        return {"log_std": jnp.full(self.outputs, self.log_std)}

    def distribution(self, output: jax.Array, params: Params) -> Normal:
        """Returns the distribution for the network's output."""
        return Normal(output, params["log_std"])

    def sample(self, key: jax.Array, distribution: Normal) -> jax.Array:
        """Samples actions `[..., A]`, which are not clipped to the task's bounds yet: `to_task` does that."""
        mean, log_std = distribution
        return mean + jnp.exp(log_std) * jax.random.normal(key, mean.shape)

    def mode(self, distribution: Normal) -> jax.Array:
        """Returns the most likely action, before `to_task`."""
        return distribution.mean

    def to_task(self, action: jax.Array) -> jax.Array:
        """Clips an action to the task's bounds."""
        return jnp.clip(action, self.low, self.high)

    def log_probability(self, distribution: Normal, action: jax.Array) -> jax.Array:
        """Returns the log density of an action."""
        mean, log_std = distribution
        z = (action - mean) * jnp.exp(-log_std)
        return -0.5 * jnp.sum(z**2 + 2.0 * log_std + jnp.log(2.0 * jnp.pi), axis=-1)

    def entropy(self, distribution: Normal) -> jax.Array:
        """Returns the entropy of the distribution, in nats."""
        return jnp.sum(distribution.log_std + 0.5 * jnp.log(2.0 * jnp.pi * jnp.e), axis=-1)

    def kl(self, old: Normal, new: Normal) -> jax.Array:
        """Returns KL(old || new), which is accurate to the last digits even for nearly equal distributions."""
        log_ratio = new.log_std - old.log_std
        distance = (new.mean - old.mean) * jnp.exp(-new.log_std)
        return jnp.sum(log_ratio + 0.5 * jnp.expm1(-2.0 * log_ratio) + 0.5 * distance**2, axis=-1)

    def fisher(self, distribution: Normal, tangent: Normal) -> Normal:
        """Multiplies means by 1 / variance, averaged over the means, and log standard deviations by 2."""
        mean, log_std = distribution
        weight = jnp.exp(-2.0 * log_std) / math.prod(mean.shape[:-1])
        return Normal(weight * tangent.mean, 2.0 * tangent.log_std)


@dataclass(frozen=True)
class Categorical:
    """The head for discrete actions, int32 `[...]` from 0 to `actions` - 1: the output is their logits.

    Attributes:
      actions: number of actions.
    """

    actions: int

    @property
    def outputs(self) -> int:
        """The number of outputs of the network's last layer."""
        return self.actions

    def init_params(self) -> dict[str, jax.Array]:
        """Returns the parameters that are trained in addition to the network's."""
        return {}

    def distribution(self, output: jax.Array, params: Params) -> Choice:
        """Returns the distribution for the network's output."""
        return Choice(output)

    def sample(self, key: jax.Array, distribution: Choice) -> jax.Array:
        """Samples an action, which is IMPOSSIBLE if a logit is not finite."""
        return self._impossible_unless_finite(jax.random.categorical(key, distribution.logits), distribution)

    def mode(self, distribution: Choice) -> jax.Array:
        """Returns the most likely action, which is IMPOSSIBLE if a logit is not finite."""
        return self._impossible_unless_finite(jnp.argmax(distribution.logits, axis=-1), distribution)

    def _impossible_unless_finite(self, action: jax.Array, distribution: Choice) -> jax.Array:
        return jnp.where(jnp.isfinite(distribution.logits).all(-1), action, IMPOSSIBLE).astype(jnp.int32)

    def to_task(self, action: jax.Array) -> jax.Array:
        """Returns the action unchanged, because tasks take the same integers."""
        return action

    def log_probability(self, distribution: Choice, action: jax.Array) -> jax.Array:
        """Returns the log probability of an action."""
        # A product instead of an index, whose gradient is a scatter, which XLA's CPU backend computes entry by entry.
        return jnp.sum(jax.nn.one_hot(action, self.actions) * jax.nn.log_softmax(distribution.logits), axis=-1)

    def entropy(self, distribution: Choice) -> jax.Array:
        """Returns the entropy of the distribution, in nats."""
        log_probs = jax.nn.log_softmax(distribution.logits)
        return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)

    def kl(self, old: Choice, new: Choice) -> jax.Array:
        """Returns the divergence KL(old || new), `[...]`."""
        log_probs, new_log_probs = jax.nn.log_softmax(old.logits), jax.nn.log_softmax(new.logits)
        return jnp.sum(jnp.exp(log_probs) * (log_probs - new_log_probs), axis=-1)

    def fisher(self, distribution: Choice, tangent: Choice) -> Choice:
        """Multiplies the logits' tangent by diag(p) - p p', averaged over the distributions."""
        probs = jax.nn.softmax(distribution.logits)
        centred = tangent.logits - jnp.sum(probs * tangent.logits, axis=-1, keepdims=True)
        return Choice(probs * centred / math.prod(distribution.logits.shape[:-1]))


def head_of(env: Any, log_std: float = 0.0) -> Head:
    """Returns the head for an environment's actions: `Categorical` if it has the attribute `actions`, `Gaussian`
    otherwise.

    Args:
      env: an environment with the attribute `actions`, or with `action_low` and `action_high`.
      log_std: initial logarithm of a Gaussian's standard deviation.
    """
    actions = getattr(env, "actions", None)
    return Gaussian(env.action_low, env.action_high, log_std) if actions is None else Categorical(actions)
