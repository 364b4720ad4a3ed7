"""Remedies that act on single updates: on Adam's rates, count and moments, on their size, and on gradients."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxaudit.core.optimizer import FIRST_MOMENT, SECOND_MOMENT
from jaxaudit.core.remedy import ProposedUpdate, Trained, remedy


def _moment(state: Any, names: tuple[str, ...]) -> tuple[Any, Any]:
    """Returns (path, value) of the moment with one of `names` in an optax state.

    Raises ValueError if there is no such moment, or several.
    """
    matches = [pair for name in names for pair in optax.tree.get_all_with_path(state, name)]
    if not matches:
        raise ValueError(f"the optimizer's state has no '{names[0]}', unlike Adam's")
    if len(matches) > 1:
        raise ValueError(f"the optimizer's state has more than one '{names[0]}': it is not a single Adam")
    return matches[0]


def _last_name(path: Any) -> str:
    """Returns the field name or dictionary key at the end of a path."""
    return str(getattr(path[-1], "name", getattr(path[-1], "key", path[-1])))


def _adam_count(state: Any) -> tuple[Any, Any]:
    """Returns (path, count) of Adam's number of updates, which is next to the first moment in an optax state."""
    parent = _moment(state, FIRST_MOMENT)[0][:-1]
    matches = [pair for pair in optax.tree.get_all_with_path(state, "count") if pair[0][:-1] == parent]
    if not matches:
        raise ValueError("the optimizer's state has no 'count' next to its moments, unlike Adam's")
    return matches[0]


@remedy("betas", strength=0.99, neutral=0.0, limits=(0.0, 0.999999))
def equal_betas(value, strength):
    """Sets the decay rates of both of Adam's moments to the strength (Dohare et al., 2023: 0.99)."""
    return tuple(jnp.full_like(beta, strength) for beta in value)


@remedy("optimizer_state", strength=1.0, neutral=0.0, limits=(0.0, 1.0), whole=True)
def adam_rel(value, strength):
    """Resets Adam's count of updates to 0 before each step, and keeps its moments (Adam-Rel: Ellis et al., 2024).

    A step is an iteration of an on-policy learner: the updates on one set of samples. Strength 1 is on, 0 off.
    """
    count_path, count = _adam_count(value)
    return optax.tree.set(value, lambda path, _: path == count_path, count=jnp.zeros_like(count))


@remedy("direction", strength=1.0, neutral=math.inf, limits=(0.0, math.inf), needs=("gradient", "moments", "betas"))
def stable_adamw(value, strength, *, gradient, moments, betas):
    """Divides each tensor's step by max(1, RMS / strength), where RMS^2 is the mean of gradient^2 / second moment.

    With strength 1 this is StableAdamW (Wortsman et al., 2023). The second moment is the one after the update, with its
    bias corrected, and at least 1e-16. A stack of equal layers counts as one tensor.
    """
    if betas is None:
        raise ValueError("the optimizer's decay rates are not known: give jaxaudit.Optimizer a jaxaudit.Adam")
    second, count = _moment(moments, SECOND_MOMENT)[1], _adam_count(moments)[1]
    correction = 1.0 - jnp.asarray(betas[1], jnp.float32) ** count.astype(jnp.float32)

    def limit(direction: jax.Array, g: jax.Array, v: jax.Array) -> jax.Array:
        rms = jnp.sqrt(jnp.mean(g**2 / jnp.maximum(v / correction, 1e-16)))
        return direction / jnp.maximum(1.0, rms / strength)

    return jax.tree.map(limit, value, gradient, second)


SPAM_PERIOD = 500
SPAM_WARMUP = 150
SPAM_BEGIN = 20


def _no_updates(value: ProposedUpdate) -> jax.Array:
    return jnp.zeros((), jnp.int32)


@remedy("guard", strength=5000.0, neutral=math.inf, limits=(0.0, math.inf), init=_no_updates)
def spam(value, strength, state):
    """Clips entries of the gradient whose square is above the strength times Adam's second moment, and resets Adam.

    SPAM (Huang et al., 2025), as in its authors' code: an entry is clipped to the root of strength times the second
    moment before the update. Every 500 updates both moments are set to 0. After that nothing is clipped for 20 updates,
    and the update's scale rises by a cosine from 0.01 to 1 over 150 updates. Adam's count is not reset.
    """
    number = state + 1
    since = jnp.where(number >= SPAM_PERIOD, number % SPAM_PERIOD, SPAM_PERIOD)
    resets = since == 0
    moments = value.moments
    for names in (FIRST_MOMENT, SECOND_MOMENT):
        path, moment = _moment(moments, names)
        blank = jax.tree.map(lambda m: jnp.where(resets, 0.0, m), moment)
        moments = optax.tree.set(moments, **{_last_name(path): blank})
    clips = (number >= SPAM_BEGIN) & (number % SPAM_PERIOD >= SPAM_BEGIN)

    def clip(g: jax.Array, v: jax.Array) -> jax.Array:
        threshold = strength * v
        return jnp.where(clips & (g**2 > threshold), jnp.sign(g) * jnp.sqrt(threshold), g)

    gradient = jax.tree.map(clip, value.gradient, _moment(moments, SECOND_MOMENT)[1])
    missing = 0.99 * 0.5 * (1.0 + jnp.cos(jnp.pi * since / (SPAM_WARMUP + 1)))
    scale = value.scale * jnp.where(since < SPAM_WARMUP, 1.0 - missing, 1.0)
    return replace(value, gradient=gradient, moments=moments, scale=scale), number


def _no_resets(value: Trained) -> jax.Array:
    return jnp.zeros((), jnp.int32)


@remedy(
    "trained",
    strength=4.0,
    neutral=0.0,
    limits=(0.0, float("inf")),
    whole=True,
    needs=("reinitialise", "new_moments", "progress", "key"),
    init=_no_resets,
)
def periodic_reset(value, strength, state, *, reinitialise, new_moments, progress, key):
    """Replaces all parameters by newly initialised ones, and the optimizer's state by a new one, `strength` times.

    The resets are after equal parts of the run, and not at its end. Collected data stay: a replay buffer, or statistics
    of observations. Nikishin et al. (2022) reset the last layers or all; Nauman et al. (2024) reset all after fixed
    numbers of updates.
    """
    due = jnp.floor(progress * (strength + 1.0) + 1e-4).astype(jnp.int32)
    resets = (due > state) & (progress < 1.0)
    params = reinitialise(key)
    fresh = Trained(params, new_moments(params))
    changed = jax.tree.map(lambda new, old: jnp.where(resets, new, old), fresh, value)
    return changed, jnp.where(resets, due, state)


@struct.dataclass
class Begun:
    """The state of `l2_init`: the parameters before the first update.

    Attributes:
      params: the tree of the parameters; zeros before the first update.
      known: whether there has been an update, a bool scalar.
    """

    params: Any
    known: jax.Array


def _no_first_params(gradient: Any) -> Begun:
    return Begun(jax.tree.map(lambda g: jnp.zeros(g.shape, g.dtype), gradient), jnp.zeros((), bool))


@remedy("penalty", strength=1e-3, neutral=0.0, limits=(0.0, math.inf), needs=("params",), init=_no_first_params)
def l2_init(value, strength, state, *, params):
    """Adds strength * |params - first params|^2 to the objective (L2 Init: Kumar et al., 2023).

    `value` is the gradient, to which it adds 2 strength (params - first params). The first parameters are those before
    the first update.
    """
    first_params = jax.tree.map(lambda old, now: jnp.where(state.known, old, now), state.params, params)
    gradient = jax.tree.map(lambda g, now, first: g + 2.0 * strength * (now - first), value, params, first_params)
    return gradient, Begun(first_params, jnp.ones((), bool))


@remedy("direction", strength=1e-3, neutral=0.0, limits=(0.0, math.inf), needs=("params",))
def weight_decay(value, strength, *, params):
    """Decays all parameters by the learning rate times the strength at each update (Loshchilov and Hutter, 2019).

    The decay is decoupled and applies to every parameter, as in `optax.adamw` without a mask.
    """
    return jax.tree.map(lambda direction, now: direction + strength * now, value, params)


@remedy("learning_rate", strength=0.3, neutral=1.0, limits=(0.0, math.inf))
def learning_rate_scale(value, strength):
    """Multiplies the learning rate by the strength, throughout the run."""
    return value * strength


@remedy("learning_rate", strength=0.05, neutral=0.0, limits=(0.0, 1.0), needs=("progress",))
def learning_rate_warmup(value, strength, *, progress):
    """Raises the learning rate linearly from 0 over the first `strength` of the run, a share.

    The rate of step t of T, counted from 0, is multiplied by min(1, (t + 1) / (strength T)).
    """
    return value * jnp.minimum(1.0, progress / strength)


def _not_stopped(value: ProposedUpdate) -> jax.Array:
    return jnp.zeros((), bool)


@remedy(
    "guard",
    strength=0.03,
    neutral=math.inf,
    limits=(0.0, math.inf),
    needs=("approximate_kl", "minibatch"),
    init=_not_stopped,
)
def target_kl_stop(value, strength, state, *, approximate_kl, minibatch):
    """Skips the rest of a step's updates once a minibatch's approximate KL divergence exceeds the strength, in nats.

    This is `target_kl` of Stable-Baselines3 without its factor of 1.5. The divergence from the policy that collected
    the samples is the mean of rho - 1 - log rho over the minibatch, and that minibatch is skipped, too. Updates of the
    critic are skipped as well.
    """
    stopped = jnp.where(minibatch == 0, False, state) | (approximate_kl > strength)
    return replace(value, keep=jnp.where(stopped, 0.0, value.keep)), stopped


@remedy("guard", strength=1.0, neutral=0.0, limits=(0.0, 1.0), whole=True)
def nonfinite_skip(value, strength):
    """Skips updates whose gradient has an entry that is NaN or infinite, as `optax.apply_if_finite` does.

    Strength 1 is on, 0 off.
    """
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(value.gradient)]))
    return replace(value, keep=jnp.where(finite, value.keep, 0.0))


WINDOW = 128
"""The number of latest losses and gradient norms that `six_sigma_skip` stores."""


@struct.dataclass
class Recent:
    """The state of `six_sigma_skip`: the latest losses and gradient norms, `[WINDOW, 2]`, and their number so far."""

    values: jax.Array
    count: jax.Array


def _no_recent_values(value: ProposedUpdate) -> Recent:
    return Recent(jnp.zeros((WINDOW, 2)), jnp.zeros((), jnp.int32))


@remedy("guard", strength=6.0, neutral=math.inf, limits=(0.0, math.inf), needs=("loss",), init=_no_recent_values)
def six_sigma_skip(value, strength, state, *, loss):
    """Skips updates whose loss or gradient norm is too far above its mean over the previous 128 updates.

    A value is too far above if the difference is more than the strength times the standard deviation (ddof 1), or NaN.
    The remedy acts from the 64th update on. The values of skipped updates are stored like others, as in OLMo-core's
    `SkipStepOptimizer`. Unlike there, values that are not finite are not stored, since a single one would skip the next
    128 updates.
    """
    now = jnp.stack([loss, optax.tree.norm(value.gradient)]).astype(jnp.float32)
    stored = jnp.arange(WINDOW)[:, None] < state.count
    count = jnp.minimum(state.count, WINDOW)
    mean = jnp.sum(jnp.where(stored, state.values, 0.0), 0) / jnp.maximum(count, 1)
    squares = jnp.sum(jnp.where(stored, (state.values - mean) ** 2, 0.0), 0)
    within = now - mean <= strength * jnp.sqrt(squares / jnp.maximum(count - 1, 1))
    keep = jnp.all(within) | (state.count + 1 < WINDOW // 2)
    finite = jnp.all(jnp.isfinite(now))
    values = jnp.where(finite, state.values.at[state.count % WINDOW].set(now), state.values)
    return replace(value, keep=jnp.where(keep, value.keep, 0.0)), Recent(values, state.count + finite)


ZCLIP_DECAY = 0.97
ZCLIP_WARMUP = 25
ADAGC_DECAY = 0.98
ADAGC_WARMUP = 100


@struct.dataclass
class NormMoments:
    """The state of `zclip`: the mean and variance of gradient norms.

    Attributes:
      mean, variance: of the first `ZCLIP_WARMUP` norms, and then exponential averages; scalars.
      count: the number of updates so far.
    """

    mean: jax.Array
    variance: jax.Array
    count: jax.Array


def _no_norms(value: ProposedUpdate) -> NormMoments:
    return NormMoments(jnp.zeros(()), jnp.zeros(()), jnp.zeros((), jnp.int32))


@remedy("guard", strength=2.5, neutral=math.inf, limits=(0.0, math.inf), init=_no_norms)
def zclip(value, strength, state):
    """Clips gradients whose norm is more than `strength` standard deviations above its running mean.

    ZClip (Kumar et al., 2025), as in its authors' code: a norm of z standard deviations above the mean is clipped
    to mean + strength^2 / z standard deviations. Mean and variance are exponential averages of the clipped norms with a
    decay of 0.97 that start from those of the first 25 norms, which are not clipped. A norm that is not finite is
    neither clipped nor averaged.
    """
    norm = optax.tree.norm(value.gradient).astype(jnp.float32)
    std = jnp.sqrt(state.variance)
    z = (norm - state.mean) / (std + 1e-6)
    threshold = state.mean + strength * std * (strength / z)
    collecting = state.count < ZCLIP_WARMUP
    clips = ~collecting & (z > strength) & jnp.isfinite(norm)
    clipped = jnp.where(clips, threshold, norm)
    gradient = jax.tree.map(lambda g: jnp.where(clips, g * (threshold / (norm + 1e-6)), g), value.gradient)
    # Welford's recursion computes the population variance of the first norms.
    count = state.count + 1
    delta = norm - state.mean
    mean = jnp.where(collecting, state.mean + delta / count, ZCLIP_DECAY * state.mean + (1 - ZCLIP_DECAY) * clipped)
    collected = (state.variance * state.count + delta * (norm - mean)) / count
    running = ZCLIP_DECAY * state.variance + (1 - ZCLIP_DECAY) * (clipped - mean) ** 2
    after = NormMoments(mean, jnp.where(collecting, collected, running), count)
    finite = jnp.isfinite(norm)
    return replace(value, gradient=gradient), jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, state)


@struct.dataclass
class TensorNorms:
    """The state of `adagc`: the running norm of each tensor of the gradient, and the number of updates so far."""

    norms: list[jax.Array]
    count: jax.Array


def _no_tensor_norms(value: ProposedUpdate) -> TensorNorms:
    return TensorNorms([jnp.zeros(()) for _ in jax.tree.leaves(value.gradient)], jnp.zeros((), jnp.int32))


@remedy("guard", strength=1.05, neutral=math.inf, limits=(0.0, math.inf), init=_no_tensor_norms)
def adagc(value, strength, state):
    """Clips each tensor's gradient to the strength times the running norm of its clipped gradients.

    AdaGC (Wang et al., 2025): the running norm is an exponential average with a decay of 0.98. In the first 99 updates
    the whole gradient is clipped to norm 1, and a tensor's running norm is the smallest so far. A stack of equal layers
    counts as one tensor. A gradient that is not finite does not change the running norms.
    """
    leaves, structure = jax.tree.flatten(value.gradient)
    count = state.count + 1
    warming = count < ADAGC_WARMUP
    total = optax.tree.norm(value.gradient).astype(jnp.float32)
    global_factor = jnp.minimum(1.0, 1.0 / (total + 1e-8))
    clipped, norms = [], []
    for leaf, running in zip(leaves, state.norms, strict=True):
        norm = jnp.sqrt(jnp.sum(jnp.square(leaf.astype(jnp.float32))))
        tensor_factor = jnp.minimum(1.0, strength * running / jnp.maximum(norm, 1e-12))
        factor = jnp.where(warming, global_factor, tensor_factor)
        clipped.append(leaf * factor.astype(leaf.dtype))
        lowest = jnp.where(count == 1, norm * factor, jnp.minimum(running, norm * factor))
        norms.append(jnp.where(warming, lowest, ADAGC_DECAY * running + (1 - ADAGC_DECAY) * norm * factor))
    finite = jnp.isfinite(total)
    after = jax.tree.map(lambda new, old: jnp.where(finite, new, old), TensorNorms(norms, count), state)
    return replace(value, gradient=jax.tree.unflatten(structure, clipped)), after
