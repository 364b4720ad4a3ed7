"""Options for XLA's fusion emitters on CPUs, where they exist.

Up to jaxlib 0.10, the emitters can be turned off. Without them most programs compile faster, and MJX's forward
kinematics of a long arm (Pusher) run a thousand times faster. Later versions refuse the option and always use the
emitters, which are no slower there.
"""

from __future__ import annotations

import functools

import jax

OPTION = "xla_cpu_use_fusion_emitters"


def emitters(used: bool) -> dict[str, bool]:
    """Returns compiler options for `jax.jit` or `compile`, which are empty if XLA does not know the option."""
    return {OPTION: used} if takes(OPTION, used) else {}


@functools.cache
def takes(option: str, value: bool | int | str) -> bool:
    """Returns whether XLA knows a compiler option, by compiling a program of one operation."""
    try:
        jax.jit(lambda x: -x, compiler_options={option: value})(0.0)
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return False
    return True
