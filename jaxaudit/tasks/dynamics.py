"""The site `dynamics`: relative factors on a model's parameters, the same on both engines.

Constants that MuJoCo derives from a model when it is compiled (mj_setConst) stay those of the undisturbed one.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

NAMES = ("friction", "gear", "gravity", "mass")

# MuJoCo's fields, each with the factor that scales it.
SCALED = {
    "body_mass": "mass",
    "body_inertia": "mass",
    "body_subtreemass": "mass",
    "geom_friction": "friction",
    "pair_friction": "friction",
    "actuator_gear": "gear",
    "opt.gravity": "gravity",
}


def neutral() -> dict[str, jax.Array]:
    """Return the factors that change nothing: scalars, float32."""
    return {name: jnp.ones((), jnp.float32) for name in NAMES}


def stacked(info: dict[str, Any]) -> jax.Array | None:
    """Return the factors that a state's `info` holds, `[4]` in the order of NAMES, or None if it holds none."""
    if "dynamics" not in info:
        return None
    return jnp.stack([jnp.asarray(info["dynamics"][name], jnp.float32) for name in NAMES])


def valid(factors: Any) -> Any:
    """Tell, `[...]`, which of the factors `[..., 4]` a simulation can run with: finite, and a positive mass."""
    xp = np if isinstance(factors, np.ndarray) else jnp
    return xp.isfinite(factors).all(-1) & (factors[..., NAMES.index("mass")] > 0)
