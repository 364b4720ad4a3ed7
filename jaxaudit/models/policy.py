"""The policy's head: what a network's output says of the next action, a Gaussian or a choice among several.

A head is functions of arrays. A distribution is a NamedTuple of arrays, whose leading axes are those of the
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
    """Dense layers with an activation between: `[..., d] -> [..., features]`.

    Attributes:
      hidden: widths of the hidden layers.
      features: width of the output.
      output_scale: gain of the output layer's orthogonal initialisation.
      orthogonal: orthogonal initialisation with gain sqrt(2) in the hidden layers (Andrychowicz et al., 2021);
        otherwise LeCun normal.
      activation: what follows each hidden layer.
      fan_in_uniform: instead of the two above, kernels and biases uniform within 1 / sqrt(layer's inputs), which is
        PyTorch's default and what published results of SAC and TD3 began from.
      layer_norm: layer normalisation of each hidden layer, before its activation.
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
            within = _uniform(1.0 / np.sqrt(x.shape[-1]))
            return nn.Dense(width, kernel_init=within, bias_init=within)(x)
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
      hidden: widths of the hidden layers, with ReLU between.
      layer_norm: as `MLP`'s.
    """

    hidden: tuple[int, ...]
    layer_norm: bool = False

    def setup(self) -> None:
        self.first = MLP(self.hidden, 1, activation=nn.relu, fan_in_uniform=True, layer_norm=self.layer_norm)
        self.second = MLP(self.hidden, 1, activation=nn.relu, fan_in_uniform=True, layer_norm=self.layer_norm)

    def __call__(self, observation: jax.Array, action: jax.Array) -> jax.Array:
        """Both values: `[..., O]`, `[..., A]` to `[2, ...]`."""
        seen = jnp.concatenate([observation, action], axis=-1)
        return jnp.stack([self.first(seen)[..., 0], self.second(seen)[..., 0]])

    def first_value(self, observation: jax.Array, action: jax.Array) -> jax.Array:
        """The first critic's value alone: `[..., O]`, `[..., A]` to `[...]`."""
        return self.first(jnp.concatenate([observation, action], axis=-1))[..., 0]


Params = Any
Distribution = Any

IMPOSSIBLE = -1
"""The discrete action drawn from logits that are not finite: no task takes it, so a policy that diverged shows."""


class Head(Protocol):
    """What on-policy learners ask of a policy."""

    @property
    def outputs(self) -> int:
        """The number of outputs of the network's last layer."""

    def init_params(self) -> dict[str, jax.Array]:
        """Returns the parameters that are trained beside the network's."""

    def distribution(self, output: jax.Array, params: Params) -> Distribution:
        """The distribution that an output `[..., outputs]` means under parameters that hold `init_params`'."""

    def sample(self, key: jax.Array, distribution: Distribution) -> jax.Array:
        """Samples an action of the distribution; `to_task` makes the task's of it."""

    def mode(self, distribution: Distribution) -> jax.Array:
        """Returns the most likely action, before `to_task`."""

    def to_task(self, action: jax.Array) -> jax.Array:
        """The action as the task takes it."""

    def log_probability(self, distribution: Distribution, action: jax.Array) -> jax.Array:
        """Of an action, `[...]`; a log density where actions are continuous."""

    def entropy(self, distribution: Distribution) -> jax.Array:
        """Of the distribution, `[...]`, or a scalar where it is the same for all."""

    def kl(self, old: Distribution, new: Distribution) -> jax.Array:
        """Returns the KL divergence of the old distribution from the new one, KL(old || new), `[...]`."""

    def fisher(self, distribution: Distribution, tangent: Distribution) -> Distribution:
        """The Hessian of the mean of `kl(distribution, new)` over all leading axes, at new = distribution, times a
        tangent: of the distribution's shapes.
        """


class Normal(NamedTuple):
    """Gaussians with independent entries: means `[..., A]`, log standard deviations `[A]`, the same for all."""

    mean: jax.Array
    log_std: jax.Array


class Choice(NamedTuple):
    """Chances of N actions, softmax of the logits `[..., N]`."""

    logits: jax.Array


@dataclass(frozen=True, eq=False)
class Gaussian:
    """Continuous actions `[..., A]`: the output is their mean, and "log_std" is trained beside the network.

    Attributes:
      low, high: `[A]`, bounds of the actions a task takes; the distribution knows nothing of them.
      log_std: initial logarithm of the standard deviation.
    """

    low: np.ndarray
    high: np.ndarray
    log_std: float = 0.0

    @property
    def outputs(self) -> int:
        """As many as an action has entries."""
        return len(self.low)

    def init_params(self) -> dict[str, jax.Array]:
        """Returns the parameters that are trained beside the network's."""
        return {"log_std": jnp.full(self.outputs, self.log_std)}

    def distribution(self, output: jax.Array, params: Params) -> Normal:
        """Returns the distribution's parameters, from the network's output."""
        return Normal(output, params["log_std"])

    def sample(self, key: jax.Array, distribution: Normal) -> jax.Array:
        """Samples an action of the distribution; `to_task` makes the task's of it."""
        mean, log_std = distribution
        return mean + jnp.exp(log_std) * jax.random.normal(key, mean.shape)

    def mode(self, distribution: Normal) -> jax.Array:
        """Returns the most likely action, before `to_task`."""
        return distribution.mean

    def to_task(self, action: jax.Array) -> jax.Array:
        """Returns the action as the task takes it."""
        return jnp.clip(action, self.low, self.high)

    def log_probability(self, distribution: Normal, action: jax.Array) -> jax.Array:
        """Returns the logarithm of an action's probability, or its density."""
        mean, log_std = distribution
        z = (action - mean) * jnp.exp(-log_std)
        return -0.5 * jnp.sum(z**2 + 2.0 * log_std + jnp.log(2.0 * jnp.pi), axis=-1)

    def entropy(self, distribution: Normal) -> jax.Array:
        """Returns the entropy of the distribution, in nats."""
        return jnp.sum(distribution.log_std + 0.5 * jnp.log(2.0 * jnp.pi * jnp.e), axis=-1)

    def kl(self, old: Normal, new: Normal) -> jax.Array:
        """Exact, to the last digits where the two are nearly equal."""
        wider = new.log_std - old.log_std
        moved = (new.mean - old.mean) * jnp.exp(-new.log_std)
        return jnp.sum(wider + 0.5 * jnp.expm1(-2.0 * wider) + 0.5 * moved**2, axis=-1)

    def fisher(self, distribution: Normal, tangent: Normal) -> Normal:
        """1 / variance for a mean, shared among the means; 2 for a log standard deviation."""
        mean, log_std = distribution
        weight = jnp.exp(-2.0 * log_std) / math.prod(mean.shape[:-1])
        return Normal(weight * tangent.mean, 2.0 * tangent.log_std)


@dataclass(frozen=True)
class Categorical:
    """Discrete actions, int32 `[...]` from 0 to `actions` - 1: the output is their logits.

    Attributes:
      actions: how many there are.
    """

    actions: int

    @property
    def outputs(self) -> int:
        """The number of outputs of the network's last layer."""
        return self.actions

    def init_params(self) -> dict[str, jax.Array]:
        """Returns the parameters that are trained beside the network's."""
        return {}

    def distribution(self, output: jax.Array, params: Params) -> Choice:
        """Returns the distribution's parameters, from the network's output."""
        return Choice(output)

    def sample(self, key: jax.Array, distribution: Choice) -> jax.Array:
        """An action drawn; IMPOSSIBLE where a logit is not finite."""
        return self._chosen(jax.random.categorical(key, distribution.logits), distribution)

    def mode(self, distribution: Choice) -> jax.Array:
        """The likeliest action; IMPOSSIBLE where a logit is not finite."""
        return self._chosen(jnp.argmax(distribution.logits, axis=-1), distribution)

    def _chosen(self, action: jax.Array, distribution: Choice) -> jax.Array:
        return jnp.where(jnp.isfinite(distribution.logits).all(-1), action, IMPOSSIBLE).astype(jnp.int32)

    def to_task(self, action: jax.Array) -> jax.Array:
        """Returns the action as the task takes it."""
        return action

    def log_probability(self, distribution: Choice, action: jax.Array) -> jax.Array:
        """Returns the logarithm of an action's probability, or its density."""
        # A product, and not an index, whose gradient would scatter: XLA's CPU backend does that entry by entry.
        return jnp.sum(jax.nn.one_hot(action, self.actions) * jax.nn.log_softmax(distribution.logits), axis=-1)

    def entropy(self, distribution: Choice) -> jax.Array:
        """Returns the entropy of the distribution, in nats."""
        logs = jax.nn.log_softmax(distribution.logits)
        return -jnp.sum(jnp.exp(logs) * logs, axis=-1)

    def kl(self, old: Choice, new: Choice) -> jax.Array:
        """Returns the KL divergence of the old distribution from the new one, KL(old || new), `[...]`."""
        logs, new_logs = jax.nn.log_softmax(old.logits), jax.nn.log_softmax(new.logits)
        return jnp.sum(jnp.exp(logs) * (logs - new_logs), axis=-1)

    def fisher(self, distribution: Choice, tangent: Choice) -> Choice:
        """diag(p) - p p' for the logits, shared among the distributions."""
        chances = jax.nn.softmax(distribution.logits)
        apart = tangent.logits - jnp.sum(chances * tangent.logits, axis=-1, keepdims=True)
        return Choice(chances * apart / math.prod(distribution.logits.shape[:-1]))


def head_of(env: Any, log_std: float = 0.0) -> Head:
    """The head for an environment's actions: a choice among its `actions`, where it has some, else a Gaussian.

    Args:
      env: with the attribute `actions`, or with `action_low` and `action_high`.
      log_std: what a Gaussian's standard deviation begins from, its logarithm.
    """
    actions = getattr(env, "actions", None)
    return Gaussian(env.action_low, env.action_high, log_std) if actions is None else Categorical(actions)
