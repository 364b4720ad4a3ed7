"""Remedies of Adam: its decay rates, its count, the size of its steps, and its moments."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxaudit.core.optimizer import FIRST_MOMENT, SECOND_MOMENT
from jaxaudit.core.remedy import ProposedUpdate, remedy


def _moment(state: Any, names: tuple[str, ...]) -> tuple[Any, Any]:
    """Returns (path, value) of the moment that an optax state has under one of some names.

    Raises:
      ValueError: it has none, or several.
    """
    found = [pair for name in names for pair in optax.tree.get_all_with_path(state, name)]
    if not found:
        raise ValueError(f"the optimizer's state has no '{names[0]}', as Adam's has")
    if len(found) > 1:
        raise ValueError(f"the optimizer's state has more than one '{names[0]}': it is not a single Adam")
    return found[0]


def _last_name(path: Any) -> str:
    """Returns the name of a field or dictionary key that ends a path."""
    return str(getattr(path[-1], "name", getattr(path[-1], "key", path[-1])))


def _adam_count(state: Any) -> tuple[Any, Any]:
    """Returns (path, count) of Adam's updates, which an optax state has beside the first moment."""
    beside = _moment(state, FIRST_MOMENT)[0][:-1]
    found = [pair for pair in optax.tree.get_all_with_path(state, "count") if pair[0][:-1] == beside]
    if not found:
        raise ValueError("the optimizer's state has no 'count' beside its moments, as Adam's has")
    return found[0]


@remedy("betas", strength=0.99, neutral=0.0, limits=(0.0, 0.999999))
def equal_betas(value, strength):
    """Sets the decay rates of both of Adam's moments to the strength (Dohare et al., 2023: 0.99)."""
    return tuple(jnp.full_like(beta, strength) for beta in value)


@remedy("optimizer_state", strength=1.0, neutral=0.0, limits=(0.0, 1.0), whole=True)
def adam_rel(value, strength):
    """Resets Adam's count of updates to 0 before each step, and keeps its moments (Adam-Rel: Ellis et al., 2024).

    A step is an iteration of an on-policy learner: the updates on one set of samples. Strength 1 is on, 0 off.
    """
    path, count = _adam_count(value)
    return optax.tree.set(value, lambda at, _: at == path, count=jnp.zeros_like(count))


@remedy("direction", strength=1.0, neutral=math.inf, limits=(0.0, math.inf), needs=("gradient", "moments", "betas"))
def stable_adamw(value, strength, *, gradient, moments, betas):
    """Divides each tensor's step by max(1, RMS / strength), RMS^2 the mean of gradient^2 / second moment.

    StableAdamW (Wortsman et al., 2023) with strength 1. The second moment is the one after the update, with its bias
    corrected, and at least 1e-16. A stack of equal layers counts as one tensor.
    """
    if betas is None:
        raise ValueError("the optimizer's decay rates are not known: give jaxaudit.Optimizer a jaxaudit.Adam")
    second, count = _moment(moments, SECOND_MOMENT)[1], _adam_count(moments)[1]
    correction = 1.0 - jnp.asarray(betas[1], jnp.float32) ** count.astype(jnp.float32)

    def one(direction: jax.Array, g: jax.Array, v: jax.Array) -> jax.Array:
        root = jnp.sqrt(jnp.mean(g**2 / jnp.maximum(v / correction, 1e-16)))
        return direction / jnp.maximum(1.0, root / strength)

    return jax.tree.map(one, value, gradient, second)


SPAM_PERIOD = 500
SPAM_WARMUP = 150
SPAM_BEGIN = 20


def _no_updates(value: ProposedUpdate) -> jax.Array:
    return jnp.zeros((), jnp.int32)


@remedy("guard", strength=5000.0, neutral=math.inf, limits=(0.0, math.inf), init=_no_updates)
def spam(value, strength, state):
    """Clips entries of the gradient whose square is above the strength times Adam's second moment, and resets Adam.

    SPAM (Huang et al., 2025), as in its authors' code: an entry is clipped to the root of strength times the second
    moment before the update; every 500 updates both moments are set to 0, after which nothing is clipped for 20 updates
    and the rate rises by a cosine from 0.01 over 150 updates. Adam's count is not reset.
    """
    number = state + 1
    since = jnp.where(number >= SPAM_PERIOD, number % SPAM_PERIOD, SPAM_PERIOD)
    resets = since == 0
    moments = value.moments
    for names in (FIRST_MOMENT, SECOND_MOMENT):
        path, moment = _moment(moments, names)
        blank = jax.tree.map(lambda m: jnp.where(resets, 0.0, m), moment)
        moments = optax.tree.set(moments, **{_last_name(path): blank})
    judges = (number >= SPAM_BEGIN) & (number % SPAM_PERIOD >= SPAM_BEGIN)

    def clipped(g: jax.Array, v: jax.Array) -> jax.Array:
        most = strength * v
        return jnp.where(judges & (g**2 > most), jnp.sign(g) * jnp.sqrt(most), g)

    gradient = jax.tree.map(clipped, value.gradient, _moment(moments, SECOND_MOMENT)[1])
    missing = 0.99 * 0.5 * (1.0 + jnp.cos(jnp.pi * since / (SPAM_WARMUP + 1)))
    scale = value.scale * jnp.where(since < SPAM_WARMUP, 1.0 - missing, 1.0)
    return replace(value, gradient=gradient, moments=moments, scale=scale), number
