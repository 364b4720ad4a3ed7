"""Remedies that pull parameters towards their first values, or towards zero."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxaudit.core.remedy import remedy


@struct.dataclass
class Begun:
    """The parameters before the first update.

    Attributes:
      params: tree of the parameters; zeros before the first update.
      known: bool scalar, whether there was an update.
    """

    params: Any
    known: jax.Array


def _unknown(gradient: Any) -> Begun:
    return Begun(jax.tree.map(lambda g: jnp.zeros(g.shape, g.dtype), gradient), jnp.zeros((), bool))


@remedy("penalty", strength=1e-3, neutral=0.0, limits=(0.0, math.inf), needs=("params",), init=_unknown)
def l2_init(value, strength, state, *, params):
    """Adds strength * |params - first params|^2 to the objective (L2 Init: Kumar et al., 2023).

    It adds 2 strength (params - first params) to the gradient. The first parameters are those before the first update.
    """
    first = jax.tree.map(lambda old, now: jnp.where(state.known, old, now), state.params, params)
    gradient = jax.tree.map(lambda g, now, begun: g + 2.0 * strength * (now - begun), value, params, first)
    return gradient, Begun(first, jnp.ones((), bool))


@remedy("direction", strength=1e-3, neutral=0.0, limits=(0.0, math.inf), needs=("params",))
def weight_decay(value, strength, *, params):
    """Decays all parameters by the learning rate times the strength at each update (Loshchilov and Hutter, 2019).

    Decoupled, and of every parameter, as `optax.adamw` does unless it is given a mask.
    """
    return jax.tree.map(lambda direction, now: direction + strength * now, value, params)
