"""Trust region policy optimization (Schulman et al., 2015), with Table S2's hyper-parameters."""

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
    """A proposal.

    Attributes:
      change: of the parameters.
      residual: of the linear system that gives its direction, relative to the gradient's length; scalar.
    """

    change: Params
    residual: jax.Array


@struct.dataclass
class Search:
    """Where a line search stands: scalars, but for the parameters.

    Attributes:
      params: those accepted, the old ones until then.
      accepted: bool.
      backtracks: int32, how often the step was shortened.
      length: of the step accepted, in lengths of the change searched along; 0 until then.
      kl: mean divergence from the old policy to the one accepted, in nats; 0 until then.
      gain: of the surrogate; 0 until then.
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
    """The function `v -> (F + damping I) v`, F the Hessian at `params` of the mean divergence from there.

    F = J' M J, with J the Jacobian of the distribution's parameters, and M their Fisher information. Exact, and never
    negative.

    Args:
      policy: parameters to a distribution.
      fisher: a distribution and a tangent u to M u, see `Head`.
      params: where.
      damping: added to the diagonal.
    """
    distribution, forward = jax.linearize(policy, params)
    backward = jax.linear_transpose(forward, params)

    def product(vector: Params) -> Params:
        (curved,) = backward(fisher(distribution, forward(vector)))
        return along(curved, damping, vector)

    return product


def natural_step(
    product: Callable[[Params], Params], gradient: Params, max_kl: jax.typing.ArrayLike, cg_steps: int
) -> NaturalStep:
    """The step `-sqrt(2 delta / x'Ax) x` down a loss's gradient g, with `A x = g`.

    It does not depend on the gradient's length, so the system is solved for its direction: the squares in conjugate
    gradients then stay within float32. A gradient of zero gives no step, a non-finite one a step that is not finite.

    Args:
      product: `v -> A v`, see `fisher_product`.
      gradient: g, a pytree.
      max_kl: delta, in nats.
      cg_steps: conjugate gradient steps.
    """
    direction, _ = unit_gradient(gradient)
    x = conjugate_gradient(product, direction, cg_steps)
    image = product(x)
    curvature = inner(x, image)
    length = jnp.where(curvature == 0, 0.0, jnp.sqrt(2.0 * max_kl / curvature))
    off = along(direction, -1.0, image)
    return NaturalStep(jax.tree.map(lambda leaf: -length * leaf, x), jnp.sqrt(inner(off, off)))


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
    """The first of the steps `first_length * factor^i * change` that gains within the trust region.

    Where none does, or none is finite, the parameters stay as they are, bit for bit.

    Args:
      measure: parameters to their mean divergence from the old policy, and what the surrogate gains; scalars.
      params: the old ones.
      change: the direction, and the unit of length.
      max_kl: greatest divergence accepted, in nats.
      first_length: of the first step tried.
      factor: in (0, 1).
      max_backtracks: the last i.
    """

    def unfinished(search: Search) -> jax.Array:
        return ~search.accepted & (search.backtracks <= max_backtracks)

    def attempt(search: Search) -> Search:
        length = jnp.asarray(first_length) * factor ** search.backtracks.astype(jnp.float32)
        candidate = along(params, length, change)
        kl, gain = measure(candidate)
        finite = jax.tree.reduce(jnp.logical_and, jax.tree.map(lambda leaf: jnp.isfinite(leaf).all(), candidate))
        # A step that changes nothing may seem to gain, by rounding: the old policy is measured in another place.
        moved = jax.tree.reduce(jnp.logical_or, jax.tree.map(lambda a, b: (a != b).any(), candidate, params))
        good = finite & moved & (kl <= max_kl) & (gain > 0)
        taken = Search(candidate, good, search.backtracks, length, kl, gain)
        shorter = dataclasses.replace(search, backtracks=search.backtracks + 1)
        return jax.tree.map(lambda a, b: jnp.where(good, a, b), taken, shorter)

    zero = jnp.float32(0.0)
    start = Search(params, jnp.bool_(False), jnp.int32(0), zero, zero, zero)
    found = jax.lax.while_loop(unfinished, attempt, start)
    return dataclasses.replace(found, backtracks=jnp.minimum(found.backtracks, max_backtracks))


@dataclass(frozen=True)
class TRPOSettings(OnPolicySettings):
    """TRPO's hyper-parameters, beside `OnPolicySettings`; the defaults are Table S2's, else published ones.

    `minibatch_size` is the critic's; the policy's gradient is the whole batch's.

    Attributes:
      max_kl: the trust region, delta: greatest mean Kullback-Leibler divergence of new policy from old, in nats.
      cg_steps: conjugate gradient steps.
      damping: added to the diagonal of the Fisher matrix.
      fisher_every: the Fisher matrix is that of every n-th sample of the batch, in random order; 1: of all.
      backtrack_factor: by which the line search shortens a step that is not accepted.
      max_backtracks: how often it does so before it keeps the old policy.
      learning_rate: of the critic's Adam.
      critic_epochs: passes of the critic over an iteration's data.
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
        if self.backtrack_factor >= 1:
            raise ValueError(f"backtrack_factor must be less than 1, not {self.backtrack_factor}")


class TRPO(OnPolicy):
    """One iteration: collect, estimate advantages, one step of the policy within a trust region, fit the critic.

    The policy's parameters, all but the critic's, have no learning rate. What is tapped at the site
    `learning_rate` under the label "actor" is the length of the step the line search tries first, 1 being the natural
    step's: a spike there proposes too much, and the line search is the defence. The bound on the divergence is a site
    of its own, `trust_region`. Whatever is disturbed, a step that is not finite, leaves the trust region or does not
    improve the surrogate keeps the old policy bit for bit.

    In the telemetry `learning_rate` and `x_mem` are the critic's, `gradient_norm`, `x_grad` and `policy_loss` (minus
    what the accepted step gained) the policy's; `accepted`, `step_length`, `approximate_kl` are zero where no step was.
    """

    settings: TRPOSettings

    def __init__(self, env: Any, max_episode_steps: int, settings: TRPOSettings):
        optimizer = Optimizer(Adam(epsilon=1e-5), settings.learning_rate, label="critic")
        super().__init__(env, max_episode_steps, settings, optimizer)

    def trained(self, params: Params) -> Params:
        """The critic: the policy has no optimizer."""
        return params["critic"]

    def improve(
        self, params: Params, optimizer: Any, samples: Samples, key: jax.Array, taps: Taps
    ) -> tuple[Params, Any, dict[str, jax.Array]]:
        """A step of the policy and epochs of the critic, both from the same advantages; and what they tell."""
        policy_key, critic_key = jax.random.split(key)
        policy = {name: part for name, part in params.items() if name != "critic"}
        order = self.order(policy_key).ravel()
        batch = jax.tree.map(lambda x: x[order], self.flat(samples))
        policy, telemetry, policy_norms = self.improve_policy(policy, batch, taps)
        critic, optimizer, fitted, critic_norms = self.fit_critic(
            params["critic"], optimizer, samples, critic_key, taps
        )
        telemetry |= fitted
        if self.settings.telemetry == "full":
            norms = policy_norms | {"critic": critic_norms}
            telemetry["layer_gradient_norm"] = jnp.stack(jax.tree.leaves(norms))
        return policy | {"critic": critic}, optimizer, telemetry

    def improve_policy(self, policy: Params, batch: Samples, taps: Taps) -> tuple[Params, dict[str, jax.Array], Params]:
        """One natural step with a line search: the policy, telemetry, and the gradient's norm in every layer.

        The batch `[batch_size, ...]` is in random order, so that each of its parts is like the whole.
        """
        settings = self.settings
        advantage = batch.advantage
        if settings.normalize_advantages:
            advantage = (advantage - jnp.mean(advantage)) / (jnp.std(advantage) + 1e-8)
        batch = batch._replace(advantage=advantage)
        # Accelerators may multiply float32 matrices in fewer bits, too few for conjugate gradients.
        with jax.default_matmul_precision("highest"):
            parts = self.gradients(policy, batch)
            gradient, used = disturbed_gradient(jax.tree.map(lambda g: jnp.mean(g, axis=0), parts), taps)
            max_kl = taps("trust_region", jnp.float32(settings.max_kl), label="actor")
            proposal = self.proposal(policy, gradient, batch, max_kl)
            found = line_search(
                self.compared_with(policy, batch),
                policy,
                proposal.change,
                max_kl=max_kl,
                first_length=self.first_length(taps),
                factor=settings.backtrack_factor,
                max_backtracks=settings.max_backtracks,
            )
        telemetry = {
            "policy_loss": -found.gain,
            "approximate_kl": found.kl,
            "gradient_norm": unit_gradient(gradient)[1],
            "accepted": found.accepted.astype(jnp.float32),
            "backtracks": found.backtracks.astype(jnp.float32),
            "step_length": found.length,
            "cg_residual": proposal.residual,
            "x_grad": mean_pairwise_cosine(parts),
            "x_used": used,
        }
        if settings.telemetry == "full":
            telemetry["x_grad_dominant"] = dominant_share(parts)
        return found.params, telemetry, jax.tree.map(_root_mean_square_norm, parts)

    def gradients(self, policy: Params, batch: Samples) -> Params:
        """The loss's gradient in every minibatch, `[minibatches, ...]`: their mean is the batch's."""
        sizes = (self.settings.minibatches, self.settings.minibatch_size)
        chunks = jax.tree.map(lambda x: x.reshape(*sizes, *x.shape[1:]), batch)
        return jax.vmap(jax.grad(self.loss), (None, 0))(policy, chunks)

    def loss(self, policy: Params, batch: Samples) -> jax.Array:
        """Minus the surrogate `E[pi / pi_old A]`, advantages as they are: scalar."""
        distribution = self.policy(policy, batch.observation)
        log_ratio = self.head.log_probability(distribution, batch.action) - batch.log_probability
        return -jnp.mean(jnp.exp(log_ratio) * batch.advantage)

    def proposal(self, policy: Params, gradient: Params, batch: Samples, max_kl: jax.Array) -> NaturalStep:
        """The natural step, before any line search."""
        seen = batch.observation[:: self.settings.fisher_every]
        product = fisher_product(
            lambda policy: self.policy(policy, seen), self.head.fisher, policy, self.settings.damping
        )
        return natural_step(product, gradient, max_kl, self.settings.cg_steps)

    def compared_with(self, policy: Params, batch: Samples) -> Callable[[Params], tuple[jax.Array, jax.Array]]:
        """The function from new parameters to their mean divergence from `policy`, and what the surrogate gains."""
        old = self.policy(policy, batch.observation)
        old_log_probability = self.head.log_probability(old, batch.action)

        def measure(candidate: Params) -> tuple[jax.Array, jax.Array]:
            new = self.policy(candidate, batch.observation)
            log_ratio = self.head.log_probability(new, batch.action) - old_log_probability
            return jnp.mean(self.head.kl(old, new)), jnp.mean(jnp.expm1(log_ratio) * batch.advantage)

        return measure

    def first_length(self, taps: Taps) -> jax.Array:
        """Length of the first step tried, relative to the natural step: 1, unless disturbed."""
        return taps("learning_rate", jnp.float32(1.0), label="actor")

    def fit_critic(
        self, critic: Params, optimizer: Any, samples: Samples, key: jax.Array, taps: Taps
    ) -> tuple[Params, Any, dict[str, jax.Array], Params]:
        """Epochs of Adam: critic, optimizer state, telemetry, and the first epoch's gradient norms in every layer."""

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
        """Half the mean squared error of the value, scalar."""
        return 0.5 * jnp.mean((self.value({"critic": critic}, batch.observation) - batch.target) ** 2)


def _root_mean_square_norm(gradients: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.sum(gradients**2, axis=tuple(range(1, gradients.ndim)))))


def trpo(task: Any, **settings: Any) -> Learner:
    """TRPO (Schulman et al., 2015) on a task: `trpo("HalfCheetah-v5", max_kl=0.02)`.

    Args:
      task: a task's name, or a task that gives an environment.
      **settings: fields of `TRPOSettings`.

    Raises:
      ValueError: for a task or setting that does not exist or makes no sense.
    """
    chosen = checks.from_keywords(TRPOSettings, settings, "trpo")
    return on_task(TRPO, task, chosen, "trpo", chosen.batch_size)


trpo.settings = TRPOSettings  # type: ignore[attr-defined]
registry.learners.register("trpo", trpo)
