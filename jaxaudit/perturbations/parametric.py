"""Parametric stability: disturbances of the parameters themselves (Tables S1 and S4)."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxaudit.perturbations import transforms
from jaxaudit.perturbations.factory import perturbation
from jaxaudit.taps import paths_of


@perturbation("parametric", "params", magnitude=0.01, neutral=0.0, duration="once", limits=(0.0, math.inf))
def weight_noise(key, value, magnitude):
    """Adds Gaussian noise of standard deviation `magnitude` to every parameter (Table S4: N(0, 0.01))."""
    return transforms.add_noise(key, value, magnitude)


@perturbation(
    "parametric",
    "params",
    magnitude=1.0,
    neutral=0.0,
    duration="once",
    limits=(0.0, math.inf),
    needs=("reinitialise", "selected"),
    whole=True,
)
def layer_reset(key, value, magnitude, *, reinitialise, selected):
    """Re-initialises `magnitude` layers, drawn at random from those in the target (Table S4: one layer).

    A layer is the parameters that share a parent in the tree (a kernel and its bias). Parameters that have none, as a
    policy's standard deviation beside its networks, are no layer unless there is nothing else.
    """
    parents = [path.rpartition("/")[0] for path in paths_of(value)]
    layers = sorted(set(parents) - {""}) or [""]
    selected = selected & jnp.array([parent in layers for parent in parents])
    layer_of = jnp.array([layers.index(parent) if parent in layers else 0 for parent in parents])
    in_target = jnp.zeros(len(layers), bool).at[layer_of].max(selected)
    draw_key, init_key = jax.random.split(key)
    draw = jnp.where(in_target, jax.random.uniform(draw_key, (len(layers),)), jnp.inf)
    chosen = (jnp.argsort(jnp.argsort(draw)) < magnitude) & in_target
    leaves, structure = jax.tree.flatten(value)
    fresh = jax.tree.leaves(reinitialise(init_key))
    mixed = [jnp.where(chosen[layer_of[i]] & selected[i], fresh[i], leaf) for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(structure, mixed)


@perturbation(
    "parametric",
    "params",
    magnitude=1.0,
    neutral=0.0,
    duration="once",
    limits=(0.0, 1.0),
    needs=("reinitialise",),
    target="critic",
)
def critic_reset(key, value, magnitude, *, reinitialise):
    """Moves the critic's parameters p towards fresh ones, to (1 - magnitude) p + magnitude fresh (Table S1).

    At one it is a full reset. The optimizer's moments stay. `target` is the critic unless another is given.
    """

    def moved(old: jax.Array, fresh: jax.Array) -> jax.Array:
        # A full reset heals parameters that are not finite, which the formula would keep.
        return jnp.where(magnitude >= 1.0, fresh, (1.0 - magnitude) * old + magnitude * fresh)

    return jax.tree.map(moved, value, reinitialise(key))


@perturbation("parametric", "params", magnitude=8.0, neutral=32.0, duration="once", limits=(2.0, 32.0))
def quantize(key, value, magnitude):
    """Rounds every parameter to `magnitude` bits, symmetric and uniform over each tensor's range."""
    levels = 2.0 ** (magnitude - 1.0) - 1.0

    def rounded(x: jax.Array) -> jax.Array:
        largest = jnp.max(jnp.abs(x))
        unit = jnp.where(largest > 0, largest, 1.0) / levels
        return jnp.round(x / unit) * unit

    return jax.tree.map(rounded, value)
