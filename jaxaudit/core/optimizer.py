"""`Optimizer`: an optax transformation with the sites gradient, clip_norm, learning_rate, optimizer_state and params,
and the hooks of remedies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
    """Statistics of one update, float32 scalars.

    Attributes:
      learning_rate: the learning rate after perturbations and remedies.
      gradient_norm: the global L2 norm of the gradient after perturbations and before clipping.
      update_norm: the global L2 norm of the change of the parameters.
      clipped: 1 if the gradient's norm was above the threshold, else 0.
      persistence: the cosine between the update and the first moment after it; NaN for optimizers without one.
      used: the cosine between the gradient after and before perturbations; 1 if it was not disturbed.
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
      betas: the decay rates of the first and second moment.
      epsilon: the constant that is added to the root of the second moment.
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
        """Returns the optimizer state before the first update."""
        return self.with_betas(*self.betas).init(params)


@dataclass(frozen=True)
class Optimizer:
    """An optax transformation whose learning rate and clipping are applied outside of it, where perturbations can
    change them.

    Attributes:
      transform: computes the direction of an update without a learning rate: `optax.scale_by_adam(eps=1e-5)`, or an
        `Adam`, whose decay rates remedies can change.
      learning_rate: a number, or a schedule of the run's progress in [0, 1].
      max_norm: the global norm to which the gradient is clipped; None for no clipping.
      label: the first component of the paths of this optimizer's values, by which a perturbation's `target` selects one
        of several optimizers.
      outside: the progress at which a schedule is evaluated outside of a run, whose length is unknown.
    """

    transform: optax.GradientTransformation | Adam
    learning_rate: float | Callable[[jax.Array], jax.Array] = 3e-4
    max_norm: float | None = None
    label: str = ""
    outside: float = 0.0

    def init(self, params: Params) -> Any:
        """Returns the optimizer state before the first update."""
        return self.transform.init(params)

    def disturb(
        self, params: Params, state: Any, taps: Taps, reinitialise: Callable[[jax.Array], Params]
    ) -> tuple[Params, Any]:
        """Passes parameters and optimizer state through the taps "params" and "optimizer_state", and returns them.

        Call it once at the beginning of a step. `reinitialise(key)` returns newly initialised parameters, which
        perturbations that reset a layer need.
        """
        params = taps("params", params, label=self.label, reinitialise=reinitialise)
        return params, taps("optimizer_state", state, label=self.label)

    def update(
        self, params: Params, state: Any, gradient: Params, taps: Taps, **context: Any
    ) -> tuple[Params, Any, OptimizerStats]:
        """Makes one update, tapping "gradient", "clip_norm" and "learning_rate". Returns (params, state, statistics).

        Remedies act at the hooks in `jaxaudit.remedies.HOOKS`. They read the learner's `context` by name: "loss", the
        minibatch's loss, a scalar; "approximate_kl", the KL divergence of the policy from the one that collected the
        samples, a scalar; and "gradient_of", a function for which `gradient_of(term, key)` is the gradient, a tree of
        the parameters, of the scalar `term(params, samples)` on another minibatch, which is sampled with the key.
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
        """Makes the update for a gradient that `gradient` has returned, and returns the same values as `update`."""
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
        direction = taps.remedy(
            "direction", direction, label=self.label, params=params, gradient=gradient, moments=state, betas=betas
        )
        rate = self._rate(taps)
        change = jax.tree.map(lambda d: -rate * d, direction)
        if keep is not None:
            change = jax.tree.map(lambda c: jnp.where(keep > 0, scale * c, 0), change)
            state = jax.tree.map(lambda new, old: jnp.where(keep > 0, new, old), state, before)
        update_norm = optax.tree.norm(change)
        stats = OptimizerStats(rate, norm, update_norm, clipped, first_moment_cosine(direction, state), used)
        return optax.apply_updates(params, change), state, stats

    def finish(
        self, params: Params, state: Any, taps: Taps, reinitialise: Callable[[jax.Array], Params]
    ) -> tuple[Params, Any]:
        """Returns (params, state) after the remedies at the hook "trained". Call it once, after a step's last update.

        `reinitialise(key)` returns newly initialised parameters.
        """
        return finish(params, state, taps, label=self.label, reinitialise=reinitialise, new_moments=self.init)

    def _direction(self, gradient: Params, state: Any, params: Params, taps: Taps) -> tuple[Params, Any, Any]:
        """Returns the direction of the update, the state after it, and Adam's decay rates (None for others)."""
        if not isinstance(self.transform, Adam):
            return *self.transform.update(gradient, state, params), None
        default = self.transform.betas
        by_default = self.transform.with_betas(*default).update(gradient, state, params)
        if not taps.helps("betas"):
            return *by_default, default
        before = tuple(map(jnp.float32, default))
        betas = taps.remedy("betas", before, label=self.label)
        by_remedy = self.transform.with_betas(*betas).update(gradient, state, params)
        # Traced rates round differently from Python numbers, so unchanged rates use the result of the numbers.
        changed = (betas[0] != before[0]) | (betas[1] != before[1])
        return *jax.tree.map(lambda new, old: jnp.where(changed, new, old), by_remedy, by_default), betas

    def _rate(self, taps: Taps) -> jax.Array:
        schedule = self.learning_rate
        if not callable(schedule):
            return taps("learning_rate", jnp.float32(schedule), label=self.label)
        progress = jnp.asarray(taps.step, jnp.float32) / taps.steps if taps.steps else jnp.float32(self.outside)
        rate = jnp.asarray(schedule(progress), jnp.float32)
        if not taps.helps("learning_rate"):
            return taps("learning_rate", rate, label=self.label, schedule=schedule, progress=progress)
        remedied = taps.remedy("learning_rate", rate, label=self.label, schedule=schedule, progress=progress)
        # The remedy's factor is undefined at a scheduled rate of 0, and taken to be 1.
        factor = jnp.where(rate == 0, 1.0, remedied / jnp.where(rate == 0, 1.0, rate))

        def remedied_schedule(progress: jax.Array) -> jax.Array:
            return factor * schedule(progress)

        return taps.disturb("learning_rate", remedied, label=self.label, schedule=remedied_schedule, progress=progress)


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

    This is `Optimizer.finish` for parameters that several optimizers train.

    Args:
      params, moments: the parameters and the optimizer state.
      taps: the taps of the step.
      label: distinguishes several calls in one step.
      reinitialise: `reinitialise(key)` returns newly initialised parameters.
      new_moments: `new_moments(params)` returns the optimizer state before the first update.
    """
    if not taps.helps("trained"):
        return params, moments
    value = remedies.Trained(params, moments)
    context = {"reinitialise": reinitialise, "new_moments": new_moments}
    trained = taps.remedy("trained", value, label=label, **context)
    return trained.params, trained.moments


def disturbed_gradient(gradient: Params, taps: Taps, label: str = "") -> tuple[Params, jax.Array]:
    """Returns the gradient after the tap "gradient", and its cosine with the gradient before perturbations, x_used.

    The cosine is 1 if this lane's gradient is not disturbed, and is only computed while some lane's gradient is.
    """
    if taps.helps("gradient"):
        gradient = taps.remedy("gradient", gradient, label=label)
        used = taps.disturb("gradient", gradient, label=label)
    else:
        used = taps("gradient", gradient, label=label)
    if not taps.disturbs("gradient"):
        return used, jnp.ones(())

    def used_cosine() -> jax.Array:
        return jnp.where(taps.disturbed("gradient"), cosine(gradient, used), 1.0)

    return used, jax.lax.cond(taps.idle("gradient") == 0, used_cosine, lambda: jnp.ones(()))


DECAYS: dict[str, Callable[[float], optax.Schedule]] = {
    "constant": lambda final: optax.constant_schedule(1.0),
    "linear": lambda final: optax.linear_schedule(1.0, final, 1),
    "cosine": lambda final: optax.cosine_decay_schedule(1.0, 1, final),
}
"""Decay schedules by name: functions of the progress in [0, 1] after the warm-up that fall from 1 to `final`."""


def warmup_decay(peak: Any, warmup: float, decay: str, final: float) -> Callable[[jax.Array], jax.Array]:
    """Returns a schedule of the run's progress in [0, 1] that rises linearly from 0 to a peak and then decays.

    Args:
      peak: the largest learning rate, a scalar, which may be traced.
      warmup: the share of the run over which the rate rises.
      decay: the shape of the decay, one of `DECAYS`; "cosine" is the decay of Loshchilov and Hutter (2017).
      final: the rate at the end of the run, as a share of the peak.
    """
    decay_schedule = DECAYS[decay](final)

    def rate(progress: jax.Array) -> jax.Array:
        rising = progress / warmup if warmup else 1.0
        decay_progress = jnp.clip((progress - warmup) / max(1.0 - warmup, 1e-9), 0.0, 1.0)
        return peak * jnp.where(progress < warmup, rising, decay_schedule(decay_progress))

    return rate


def linear_to_zero(rate: float) -> Callable[[jax.Array], jax.Array]:
    """Returns the schedule that anneals `rate` linearly to zero over the run."""
    return lambda progress: rate * (1.0 - progress)


def first_moment_cosine(direction: Params, state: Any) -> jax.Array:
    """Returns the cosine between an update direction and the optimizer's first moment, x_mem; NaN if it has none."""
    moments = (moment for name in FIRST_MOMENT for _, moment in optax.tree.get_all_with_path(state, name))
    moment = next(moments, None)
    if moment is None:
        return jnp.float32(jnp.nan)
    return cosine(direction, moment)


def cosine(first: Params, second: Params) -> jax.Array:
    """Returns the cosine of the angle between two trees with leaves of the same shapes; NaN if one is zero."""

    def inner_product(a: jax.Array, b: jax.Array) -> jax.Array:
        if is_split():  # `vdot` flattens arrays, which cannot be split among devices then
            return jnp.sum(a * b)
        return jnp.vdot(a, b, precision=jax.lax.Precision.HIGHEST)

    leaves = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return sum(inner_product(a, b) for a, b in leaves) / (optax.tree.norm(first) * optax.tree.norm(second))
