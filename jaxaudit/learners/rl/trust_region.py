"""One step within a trust region (Schulman et al., 2015, appendix C): direction, length, and a line search."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jaxaudit.kernels.coherence import unit_gradient
from jaxaudit.kernels.conjugate_gradient import along, conjugate_gradient, inner
from jaxaudit.models.policy import Distribution

Params = Any


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
