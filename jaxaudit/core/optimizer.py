"""The optimizer's sites and hooks, served once for all: gradient, clip_norm, learning_rate, optimizer_state, params."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxaudit.core import remedy as remedies
from jaxaudit.core.taps import Taps
from jaxaudit.runtime.sharding import is_split

FIRST_MOMENT = ("mu", "trace", "momentum")
SECOND_MOMENT = ("nu",)


Params = Any


@struct.dataclass
class OptimizerStats:
    """What one update did: scalars, float32.

    Attributes:
      learning_rate: as used, disturbed or not.
      gradient_norm: global L2 norm of the gradient as used, disturbed or not, before clipping.
      update_norm: global L2 norm of the change of the parameters.
      clipped: 1 where the gradient's norm was above the threshold.
      persistence: cosine between the update and the first moment it was taken with; NaN without one.
      used: cosine between the gradient as used and as it was before any disturbance; 1 where it was not disturbed.
    """

    learning_rate: jax.Array
    gradient_norm: jax.Array
    update_norm: jax.Array
    clipped: jax.Array
    persistence: jax.Array
    used: jax.Array


@dataclass(frozen=True)
class Adam:
    """Adam, whose decay rates remedies can change, followed by other transformations of optax.

    Attributes:
      betas: decay rates of the first and second moment.
      epsilon: added to the root of the second moment.
      rest: the transformations that follow in an `optax.chain`, e.g. weight decay; None for none.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    rest: tuple[optax.GradientTransformation, ...] | None = None

    def with_betas(self, beta1: Any, beta2: Any) -> optax.GradientTransformation:
        """Returns the optax transformation with the decay rates `beta1` and `beta2`, which may be traced scalars."""
        first = optax.scale_by_adam(beta1, beta2, self.epsilon)
        return first if self.rest is None else optax.chain(first, *self.rest)

    def init(self, params: Params) -> Any:
        """Returns the optimizer state for parameters that were not updated yet."""
        return self.with_betas(*self.betas).init(params)


@dataclass(frozen=True)
class Optimizer:
    """An optax transformation whose learning rate and clipping are applied outside of it, where perturbations can reach
    them.

    Attributes:
      transform: makes the direction of an update, without a learning rate: `optax.scale_by_adam(eps=1e-5)`, or an
        `Adam`, whose decay rates remedies can change.
      learning_rate: a number, or a schedule of the run's progress in [0, 1].
      max_norm: the gradient is clipped to this global norm; None for no clipping.
      label: the first part of the paths of this optimizer's values, by which `target` tells several optimizers apart.
      outside: the progress at which a schedule is read outside of a run, whose length is not known.
    """

    transform: optax.GradientTransformation | Adam
    learning_rate: float | Callable[[jax.Array], jax.Array] = 3e-4
    max_norm: float | None = None
    label: str = ""
    outside: float = 0.0

    def init(self, params: Params) -> Any:
        """Returns the optimizer state for parameters that were not updated yet."""
        return self.transform.init(params)

    def disturb(
        self, params: Params, state: Any, taps: Taps, reinitialise: Callable[[jax.Array], Params]
    ) -> tuple[Params, Any]:
        """Returns (params, state) after the taps "params" and "optimizer_state". Call it once, at the beginning of a
        step.

        `reinitialise(key)` returns fresh parameters, which perturbations that reset a layer need.
        """
        params = taps("params", params, label=self.label, reinitialise=reinitialise)
        return params, taps("optimizer_state", state, label=self.label)

    def update(
        self, params: Params, state: Any, gradient: Params, taps: Taps, **context: Any
    ) -> tuple[Params, Any, OptimizerStats]:
        """Makes one update, tapping "gradient", "clip_norm" and "learning_rate". Returns (params, state, statistics).

        Remedies act at the hooks in `jaxaudit.remedies.HOOKS`. They read what the learner passes as `context`, by name:
        "loss", the minibatch's loss, a scalar; "approximate_kl", the KL divergence of the policy from the one that
        collected the samples, a scalar; and "gradient_of", a function: `gradient_of(term)` is the gradient, a tree of
        the parameters, of the scalar `term(params, samples)` on another minibatch, drawn independently of this one.
        """
        gradient, used = self.gradient(params, gradient, taps, **context)
        return self.follow(params, state, gradient, used, taps, **context)

    def gradient(self, params: Params, gradient: Params, taps: Taps, **context: Any) -> tuple[Params, jax.Array]:
        """Returns the gradient after penalties and perturbations, and its cosine with the gradient before the
        perturbations.
        """
        gradient = taps.remedy("penalty", gradient, label=self.label, params=params, **context)
        return disturbed_gradient(gradient, taps, self.label)

    def follow(
        self, params: Params, state: Any, gradient: Params, used: jax.Array, taps: Taps, **context: Any
    ) -> tuple[Params, Any, OptimizerStats]:
        """Makes the update for a gradient that `gradient` has returned; the results are those of `update`."""
        before, keep, scale = state, None, None
        if taps.helps("guard"):
            proposed = remedies.ProposedUpdate(gradient, state, jnp.ones(()), jnp.ones(()))
            proposed = taps.remedy("guard", proposed, label=self.label, params=params, **context)
            gradient, state, keep, scale = proposed.gradient, proposed.moments, proposed.keep, proposed.scale
        norm = optax.tree.norm(gradient).astype(jnp.float32)
        clipped = jnp.zeros(())
        if self.max_norm is not None:
            threshold = taps("clip_norm", jnp.float32(self.max_norm), label=self.label)
            clipped = (norm > threshold).astype(jnp.float32)
            gradient = jax.tree.map(lambda g: g * jnp.minimum(1.0, threshold / jnp.maximum(norm, 1e-12)), gradient)
        direction, state, betas = self._direction(gradient, state, params, taps)
        seen = {"params": params, "gradient": gradient, "moments": state, "betas": betas}
        direction = taps.remedy("direction", direction, label=self.label, **seen)
        rate = self._rate(taps)
        change = jax.tree.map(lambda d: -rate * d, direction)
        if keep is not None:
            change = jax.tree.map(lambda c: jnp.where(keep > 0, scale * c, 0), change)
            state = jax.tree.map(lambda new, old: jnp.where(keep > 0, new, old), state, before)
        done = OptimizerStats(rate, norm, optax.tree.norm(change), clipped, first_moment_cosine(direction, state), used)
        return optax.apply_updates(params, change), state, done

    def finish(
        self, params: Params, state: Any, taps: Taps, reinitialise: Callable[[jax.Array], Params]
    ) -> tuple[Params, Any]:
        """Returns (params, state) after the remedies at the hook "trained". Call it once, after a step's last update.

        `reinitialise(key)` returns fresh parameters.
        """
        return finish(params, state, taps, label=self.label, reinitialise=reinitialise, new_moments=self.init)

    def _direction(self, gradient: Params, state: Any, params: Params, taps: Taps) -> tuple[Params, Any, Any]:
        """The direction of this update, the state after it, and the decay rates, None where they are not known."""
        if not isinstance(self.transform, Adam):
            return *self.transform.update(gradient, state, params), None
        own = self.transform.betas
        found = self.transform.with_betas(*own).update(gradient, state, params)
        if not taps.helps("betas"):
            return *found, own
        before = tuple(map(jnp.float32, own))
        betas = taps.remedy("betas", before, label=self.label)
        other = self.transform.with_betas(*betas).update(gradient, state, params)
        # Rates that are traced round otherwise than numbers do: where they are not changed, the numbers' result counts.
        changed = (betas[0] != before[0]) | (betas[1] != before[1])
        return *jax.tree.map(lambda new, old: jnp.where(changed, new, old), other, found), betas

    def _rate(self, taps: Taps) -> jax.Array:
        schedule = self.learning_rate
        if not callable(schedule):
            return taps("learning_rate", jnp.float32(schedule), label=self.label)
        progress = jnp.asarray(taps.step, jnp.float32) / taps.steps if taps.steps else jnp.float32(self.outside)
        rate = jnp.asarray(schedule(progress), jnp.float32)
        if not taps.helps("learning_rate"):
            return taps("learning_rate", rate, label=self.label, schedule=schedule, progress=progress)
        helped = taps.remedy("learning_rate", rate, label=self.label, schedule=schedule, progress=progress)
        # Where the scheduled rate is 0 its factor cannot be read off it, and is 1.
        factor = jnp.where(rate == 0, 1.0, helped / jnp.where(rate == 0, 1.0, rate))

        def remedied_schedule(progress: jax.Array) -> jax.Array:
            return factor * schedule(progress)

        return taps.disturb("learning_rate", helped, label=self.label, schedule=remedied_schedule, progress=progress)


def finish(
    params: Params,
    moments: Any,
    taps: Taps,
    *,
    label: str = "",
    reinitialise: Callable[[jax.Array], Params],
    new_moments: Callable[[Params], Any],
) -> tuple[Params, Any]:
    """Returns (params, moments) after the remedies at the hook "trained".

    `Optimizer.finish` for parameters that one optimizer does not train alone.

    Args:
      params, moments: parameters and optimizer state.
      taps: the step's.
      label: tells apart several calls in one step.
      reinitialise: `reinitialise(key)`, fresh parameters.
      new_moments: `new_moments(params)`, the optimizer's state before the first update.
    """
    if not taps.helps("trained"):
        return params, moments
    value = remedies.Trained(params, moments)
    context = {"reinitialise": reinitialise, "new_moments": new_moments}
    trained = taps.remedy("trained", value, label=label, **context)
    return trained.params, trained.moments


def disturbed_gradient(gradient: Params, taps: Taps, label: str = "") -> tuple[Params, jax.Array]:
    """A gradient as it is used, tapped at "gradient", and its cosine with what it was before disturbances: x_used.

    The cosine is 1 where this lane's gradient is not disturbed, and is not computed where no lane's is.
    """
    if taps.helps("gradient"):
        gradient = taps.remedy("gradient", gradient, label=label)
        used = taps.disturb("gradient", gradient, label=label)
    else:
        used = taps("gradient", gradient, label=label)
    if not taps.disturbs("gradient"):
        return used, jnp.ones(())

    def measured() -> jax.Array:
        return jnp.where(taps.disturbed("gradient"), cosine(gradient, used), 1.0)

    return used, jax.lax.cond(taps.idle("gradient") == 0, measured, lambda: jnp.ones(()))


DECAYS: dict[str, Callable[[float], optax.Schedule]] = {
    "constant": lambda final: optax.constant_schedule(1.0),
    "linear": lambda final: optax.linear_schedule(1.0, final, 1),
    "cosine": lambda final: optax.cosine_decay_schedule(1.0, 1, final),
}
"""Schedules of the progress in [0, 1] since the warm-up, which begin at 1 and end at a share of it."""


def warmup_decay(peak: Any, warmup: float, decay: str, final: float) -> Callable[[jax.Array], jax.Array]:
    """The schedule of the run's progress in [0, 1] that rises linearly from 0 to a peak, and then falls.

    Args:
      peak: scalar, which may be traced.
      warmup: the share of the run over which it rises.
      decay: how it falls from there to the run's end, one of `DECAYS`; "cosine" is that of Loshchilov and Hutter
        (2017).
      final: the share of the peak that it falls to.
    """
    falling = DECAYS[decay](final)

    def rate(progress: jax.Array) -> jax.Array:
        rising = progress / warmup if warmup else 1.0
        passed = jnp.clip((progress - warmup) / max(1.0 - warmup, 1e-9), 0.0, 1.0)
        return peak * jnp.where(progress < warmup, rising, falling(passed))

    return rate


def linear_to_zero(rate: float) -> Callable[[jax.Array], jax.Array]:
    """The schedule that anneals `rate` linearly to zero over the run."""
    return lambda progress: rate * (1.0 - progress)


def first_moment_cosine(direction: Params, state: Any) -> jax.Array:
    """Cosine between an update direction and the optimizer's first moment: x_mem; NaN if it keeps none."""
    kept = (found for name in FIRST_MOMENT for _, found in optax.tree.get_all_with_path(state, name))
    moment = next(kept, None)
    if moment is None:
        return jnp.float32(jnp.nan)
    return cosine(direction, moment)


def _product_of_parts(one: jax.Array, other: jax.Array) -> jax.Array:
    """The inner product, each device of its part: flat arrays have no axes to be split along."""
    return jnp.sum(one * other)


def cosine(one: Params, other: Params) -> jax.Array:
    """Returns the cosine of the angle between two trees with leaves of the same shapes; NaN where one is zero."""
    product = _product_of_parts if is_split() else partial(jnp.vdot, precision=jax.lax.Precision.HIGHEST)
    inner = sum(product(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))
    return inner / (optax.tree.norm(one) * optax.tree.norm(other))
