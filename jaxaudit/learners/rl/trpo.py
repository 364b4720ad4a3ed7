"""Trust region policy optimization (Schulman et al., 2015), with the hyper-parameters of the paper's Table S2."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jaxaudit.core.learner import Learner
from jaxaudit.core.optimizer import Adam, Optimizer, disturbed_gradient
from jaxaudit.core.taps import Taps
from jaxaudit.kernels.coherence import dominant_share, mean_pairwise_cosine, unit_gradient
from jaxaudit.kernels.linear_algebra import along, conjugate_gradient, inner
from jaxaudit.learners.rl import settings as checks
from jaxaudit.learners.rl.on_policy import OnPolicy, OnPolicySettings, Params, Samples
from jaxaudit.learners.rl.on_task import on_task
from jaxaudit.models.policy import Distribution
from jaxaudit.runtime import registry


class NaturalStep(NamedTuple):
    """A natural gradient step before the line search.

    Attributes:
      change: the change of the parameters.
      residual: norm of the residual of the linear system that determines the direction, relative to the gradient's
        norm; scalar.
    """

    change: Params
    residual: jax.Array


@struct.dataclass
class Search:
    """The state of a line search: scalars, except for the parameters.

    Attributes:
      params: the accepted parameters, or the old ones while no step is accepted.
      accepted: bool, whether a step was accepted.
      backtracks: int32, how many times the step was shortened.
      length: length of the accepted step, in units of the change that is searched along; 0 if none.
      kl: mean divergence of the accepted policy from the old one, in nats; 0 if none.
      gain: the accepted policy's gain of the surrogate; 0 if none.
    """

    params: Params
    accepted: jax.Array
    backtracks: jax.Array
    length: jax.Array
    kl: jax.Array
    gain: jax.Array


def fisher_product(
    policy: Callable[[Params], Distribution],
    fisher: Callable[[Distribution, Distribution], Distribution],
    params: Params,
    damping: float,
) -> Callable[[Params], Params]:
    """Returns the function `v -> (F + damping I) v`, where F is the Hessian of the mean divergence from the policy at
    `params`.

    F = J' M J, where J is the Jacobian of the distribution's parameters and M is their Fisher information. The product
    is exact, and F is positive semi-definite.

    Args:
      policy: maps parameters to a distribution.
      fisher: maps a distribution and a tangent u to M u, see `Head`.
      params: the parameters at which F is taken.
      damping: added to the diagonal.
    """
    distribution, forward = jax.linearize(policy, params)
    backward = jax.linear_transpose(forward, params)

    def product(vector: Params) -> Params:
        (fisher_vector,) = backward(fisher(distribution, forward(vector)))
        return along(fisher_vector, damping, vector)

    return product


def natural_step(
    product: Callable[[Params], Params], gradient: Params, max_kl: jax.typing.ArrayLike, cg_steps: int
) -> NaturalStep:
    """Returns the step `-sqrt(2 delta / x'Ax) x` along a loss's gradient g, where `A x = g`.

    The step does not depend on the gradient's length. The system is therefore solved for the gradient's direction, so
    that the squares in conjugate gradients stay in float32's range. A gradient of zero results in no step, and a
    non-finite gradient in a step that is not finite.

    Args:
      product: `v -> A v`, see `fisher_product`.
      gradient: g, a pytree.
      max_kl: delta, in nats.
      cg_steps: number of conjugate gradient steps.
    """
    direction, _ = unit_gradient(gradient)
    x = conjugate_gradient(product, direction, cg_steps)
    image = product(x)
    curvature = inner(x, image)
    length = jnp.where(curvature == 0, 0.0, jnp.sqrt(2.0 * max_kl / curvature))
    residual = along(direction, -1.0, image)
    return NaturalStep(jax.tree.map(lambda leaf: -length * leaf, x), jnp.sqrt(inner(residual, residual)))


def line_search(
    measure: Callable[[Params], tuple[jax.Array, jax.Array]],
    params: Params,
    change: Params,
    *,
    max_kl: jax.typing.ArrayLike,
    first_length: jax.typing.ArrayLike,
    factor: float,
    max_backtracks: int,
) -> Search:
    """Finds the first of the steps `first_length * factor^i * change` that has a gain and stays in the trust region.

    If no step does, or none is finite, the parameters stay the same, bit for bit.

    Args:
      measure: maps parameters to their mean divergence from the old policy and their gain of the surrogate; scalars.
      params: the old parameters.
      change: the direction of the search and its unit of length.
      max_kl: the largest divergence that is accepted, in nats.
      first_length: length of the first step that is tried.
      factor: factor by which the step is shortened, in (0, 1).
      max_backtracks: the largest i.
    """

    def unfinished(search: Search) -> jax.Array:
        return ~search.accepted & (search.backtracks <= max_backtracks)

    def attempt(search: Search) -> Search:
        length = jnp.asarray(first_length) * factor ** search.backtracks.astype(jnp.float32)
        candidate = along(params, length, change)
        kl, gain = measure(candidate)
        finite = jax.tree.reduce(jnp.logical_and, jax.tree.map(lambda leaf: jnp.isfinite(leaf).all(), candidate))
        # A step that changes nothing may appear to gain by rounding, because the old policy is evaluated separately.
        moved = jax.tree.reduce(jnp.logical_or, jax.tree.map(lambda a, b: (a != b).any(), candidate, params))
        good = finite & moved & (kl <= max_kl) & (gain > 0)
        accepted = Search(candidate, good, search.backtracks, length, kl, gain)
        shortened = dataclasses.replace(search, backtracks=search.backtracks + 1)
        return jax.tree.map(lambda a, b: jnp.where(good, a, b), accepted, shortened)

    zero = jnp.float32(0.0)
    start = Search(params, jnp.bool_(False), jnp.int32(0), zero, zero, zero)
    end = jax.lax.while_loop(unfinished, attempt, start)
    return dataclasses.replace(end, backtracks=jnp.minimum(end.backtracks, max_backtracks))


@dataclass(frozen=True)
class TRPOSettings(OnPolicySettings):
    """TRPO's hyper-parameters, which are those of `OnPolicySettings` and its own.

    The defaults are those of the paper's Table S2, and those of published results where the table has none.
    `minibatch_size` applies to the critic; the policy's gradient is that of the whole batch.

    Attributes:
      max_kl: the trust region delta, the largest mean Kullback-Leibler divergence of the new policy from the old, in
        nats.
      cg_steps: number of conjugate gradient steps.
      damping: added to the diagonal of the Fisher matrix.
      fisher_every: the Fisher matrix is estimated from every n-th sample of the batch, in random order. 1 means all.
      backtrack_factor: factor by which the line search shortens a step that is not accepted.
      max_backtracks: how many times the line search shortens a step before it keeps the old policy.
      learning_rate: learning rate of the critic's Adam.
      critic_epochs: number of the critic's passes over an iteration's samples.
    """

    max_kl: float = 0.01
    cg_steps: int = 15
    damping: float = 0.1
    fisher_every: int = 1
    backtrack_factor: float = 0.8
    max_backtracks: int = 10
    learning_rate: float = 1e-3
    critic_epochs: int = 10

    def __post_init__(self):
        super().__post_init__()
        checks.at_least_one(self, "cg_steps", "fisher_every", "critic_epochs")
        checks.positive(self, "max_kl", "learning_rate", "backtrack_factor")
        checks.not_negative(self, "damping", "max_backtracks")
        checks.check_each(self, ("backtrack_factor",), lambda value: value < 1, "be less than 1")


class TRPO(OnPolicy):
    """TRPO, which takes one step of the policy within a trust region and fits the critic.

    The policy's parameters, which are all but the critic's, have no learning rate. The value that is tapped at the site
    `learning_rate` with the label "actor" is the length of the line search's first step, relative to the natural step:
    a spike there proposes too large a step, and the line search is the defence. The bound on the divergence has the
    site `trust_region`. The line search keeps the old policy, bit for bit, if no step is finite, stays in the trust
    region and improves the surrogate, whatever is disturbed.

    In the telemetry `learning_rate` and `x_mem` are the critic's. `gradient_norm`, `x_grad` and `policy_loss` (minus
    the accepted step's gain) are the policy's. `accepted`, `step_length` and `approximate_kl` are zero if no step was
    accepted.
    """

    settings: TRPOSettings

    def __init__(self, env: Any, max_episode_steps: int, settings: TRPOSettings):
        optimizer = Optimizer(Adam(epsilon=1e-5), settings.learning_rate, label="critic")
        super().__init__(env, max_episode_steps, settings, optimizer)

    def trained(self, params: Params) -> Params:
        """Returns the critic's parameters, because the policy has no optimizer."""
        return params["critic"]

    def improve(
        self, params: Params, optimizer: Any, samples: Samples, key: jax.Array, taps: Taps
    ) -> tuple[Params, Any, dict[str, jax.Array]]:
        """Takes one step of the policy and fits the critic, and returns parameters, optimizer state and telemetry."""
        policy_key, critic_key = jax.random.split(key)
        policy = {name: part for name, part in params.items() if name != "critic"}
        order = self.order(policy_key).ravel()
        batch = jax.tree.map(lambda x: x[order], self.flat(samples))
        policy, telemetry, policy_norms = self.improve_policy(policy, batch, taps)
        critic, optimizer, critic_telemetry, critic_norms = self.fit_critic(
            params["critic"], optimizer, samples, critic_key, taps
        )
        telemetry |= critic_telemetry
        if self.settings.telemetry == "full":
            norms = policy_norms | {"critic": critic_norms}
            telemetry["layer_gradient_norm"] = jnp.stack(jax.tree.leaves(norms))
        return policy | {"critic": critic}, optimizer, telemetry

    def improve_policy(self, policy: Params, batch: Samples, taps: Taps) -> tuple[Params, dict[str, jax.Array], Params]:
        """Takes one natural step with a line search.

        The batch `[batch_size, ...]` must be in random order, so that every part of it is representative.

        Returns:
          the policy, its telemetry, and the gradient's norm in every layer.
        """
        settings = self.settings
        batch = batch._replace(advantage=self.scaled_advantages(batch.advantage))
        # Conjugate gradients need full float32 products, which accelerators may compute with fewer bits.
        with jax.default_matmul_precision("highest"):
            parts = self.gradients(policy, batch)
            gradient, used = disturbed_gradient(jax.tree.map(lambda g: jnp.mean(g, axis=0), parts), taps)
            max_kl = taps("trust_region", jnp.float32(settings.max_kl), label="actor")
            proposal = self.proposal(policy, gradient, batch, max_kl)
            search = line_search(
                self.comparison(policy, batch),
                policy,
                proposal.change,
                max_kl=max_kl,
                first_length=self.first_length(taps),
                factor=settings.backtrack_factor,
                max_backtracks=settings.max_backtracks,
            )
        telemetry = {
            "policy_loss": -search.gain,
            "approximate_kl": search.kl,
            "gradient_norm": unit_gradient(gradient)[1],
            "accepted": search.accepted.astype(jnp.float32),
            "backtracks": search.backtracks.astype(jnp.float32),
            "step_length": search.length,
            "cg_residual": proposal.residual,
            "x_grad": mean_pairwise_cosine(parts),
            "x_used": used,
        }
        if settings.telemetry == "full":
            telemetry["x_grad_dominant"] = dominant_share(parts)
        return search.params, telemetry, jax.tree.map(_root_mean_square_norm, parts)

    def gradients(self, policy: Params, batch: Samples) -> Params:
        """Returns the loss's gradient for every minibatch, `[minibatches, ...]`; their mean is the batch's gradient."""
        sizes = (self.settings.minibatches, self.settings.minibatch_size)
        chunks = jax.tree.map(lambda x: x.reshape(*sizes, *x.shape[1:]), batch)
        return jax.vmap(jax.grad(self.loss), (None, 0))(policy, chunks)

    def loss(self, policy: Params, batch: Samples) -> jax.Array:
        """Returns minus the surrogate `E[pi / pi_old A]`, a scalar, with the batch's advantages as they are."""
        distribution = self.policy(policy, batch.observation)
        log_ratio = self.head.log_probability(distribution, batch.action) - batch.log_probability
        return -jnp.mean(jnp.exp(log_ratio) * batch.advantage)

    def proposal(self, policy: Params, gradient: Params, batch: Samples, max_kl: jax.Array) -> NaturalStep:
        """Returns the natural step before the line search."""
        observations = batch.observation[:: self.settings.fisher_every]
        product = fisher_product(
            lambda policy: self.policy(policy, observations), self.head.fisher, policy, self.settings.damping
        )
        return natural_step(product, gradient, max_kl, self.settings.cg_steps)

    def comparison(self, policy: Params, batch: Samples) -> Callable[[Params], tuple[jax.Array, jax.Array]]:
        """Returns the function from new parameters to their mean divergence from `policy` and their gain of the
        surrogate.
        """
        old = self.policy(policy, batch.observation)
        old_log_probability = self.head.log_probability(old, batch.action)

        def measure(candidate: Params) -> tuple[jax.Array, jax.Array]:
            new = self.policy(candidate, batch.observation)
            log_ratio = self.head.log_probability(new, batch.action) - old_log_probability
            return jnp.mean(self.head.kl(old, new)), jnp.mean(jnp.expm1(log_ratio) * batch.advantage)

        return measure

    def first_length(self, taps: Taps) -> jax.Array:
        """Returns the length of the first step that is tried, relative to the natural step: 1, unless disturbed."""
        return taps("learning_rate", jnp.float32(1.0), label="actor")

    def fit_critic(
        self, critic: Params, optimizer: Any, samples: Samples, key: jax.Array, taps: Taps
    ) -> tuple[Params, Any, dict[str, jax.Array], Params]:
        """Fits the critic by epochs of Adam.

        Returns:
          the critic, its optimizer state, telemetry, and the first epoch's gradient norm in every layer.
        """

        def minibatch(taps: Taps, carry: tuple[Params, Any], batch: Samples):
            def objective(critic: Params) -> tuple[jax.Array, jax.Array]:
                loss = self.value_loss(critic, batch)
                return taps("objective", loss, label="critic"), loss

            gradient, loss = jax.grad(objective, has_aux=True)(carry[0])
            critic, optimizer, update = self.optimizer.update(*carry, gradient, taps, loss=loss)
            return (critic, optimizer), (loss, update, jax.tree.map(lambda g: jnp.sum(g**2), gradient))

        (critic, optimizer), (losses, updates, squares) = self.epochs(
            minibatch, (critic, optimizer), samples, self.settings.critic_epochs, key, taps
        )
        telemetry = {
            "value_loss": jnp.mean(losses),
            "learning_rate": jnp.mean(updates.learning_rate),
            "x_mem": jnp.mean(updates.persistence),
        }
        return critic, optimizer, telemetry, jax.tree.map(lambda s: jnp.sqrt(jnp.mean(s[0])), squares)

    def value_loss(self, critic: Params, batch: Samples) -> jax.Array:
        """Returns half the mean squared error of the value, a scalar."""
        return 0.5 * jnp.mean((self.value({"critic": critic}, batch.observation) - batch.target) ** 2)


def _root_mean_square_norm(gradients: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.sum(gradients**2, axis=tuple(range(1, gradients.ndim)))))


def trpo(task: Any, **settings: Any) -> Learner:
    """Returns TRPO (Schulman et al., 2015) on a task, for example `trpo("HalfCheetah-v5", max_kl=0.02)`.

    Args:
      task: a task's name, or a task that provides an environment.
      **settings: fields of `TRPOSettings`.

    Raises:
      ValueError: the task or a setting does not exist, or a setting has a value that is not allowed.
    """
    trpo_settings = checks.from_keywords(TRPOSettings, settings, "trpo")
    return on_task(TRPO, task, trpo_settings, "trpo", trpo_settings.batch_size)


trpo.settings = TRPOSettings  # type: ignore[attr-defined]
registry.learners.register("trpo", trpo)
