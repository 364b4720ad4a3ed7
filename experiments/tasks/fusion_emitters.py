"""XLA's fusion emitters for CPUs: whether a program is compiled with them, where that is a choice.

It is one up to jaxlib 0.10. Without them most programs compile faster, and MJX's forward kinematics of a long arm
(Pusher) run a thousand times faster. XLA of later jaxlibs refuses the option: it always uses the emitters, which are
no slower there.
"""

from __future__ import annotations

import functools

import jax

OPTION = "xla_cpu_use_fusion_emitters"


def emitters(used: bool) -> dict[str, bool]:
    """Compiler options for `jax.jit`, or for `compile`: empty where there is no choice."""
    return {OPTION: used} if takes(OPTION, used) else {}


@functools.cache
def takes(option: str, value: bool | int | str) -> bool:
    """Whether the XLA in use knows a compiler option, which a program of one operation is compiled with."""
    try:
        jax.jit(lambda x: -x, compiler_options={option: value})(0.0)
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return False
    return True
