"""How XLA compiles most of the tests' programs: these are run for moments, and once."""

import sys
from typing import Any

import jax
from jax._src import compiler
from places import EXPERIMENTS

sys.path.append(str(EXPERIMENTS / "tasks"))  # fusion_emitters.py

from fusion_emitters import OPTION, emitters

_as_for_users = compiler.get_compile_options


def compile_in_a_hurry(hurry: bool = True) -> None:
    """From now on XLA leaves out most optimisations, and its fusion emitters, which take half of the time left.

    Where it always uses the emitters, as from jaxlib 0.11 on, tests/test_grid.py takes a third longer altogether.
    Nor does it cut programs up to compile parts of them side by side: the tests' processes keep all cores busy. JAX has
    no settings of its own for these two but ones for the whole process.
    """
    jax.config.update("jax_disable_most_optimizations", hurry)
    compiler.get_compile_options = _in_a_hurry if hurry else _as_for_users


def in_a_hurry() -> bool:
    """Whether programs are compiled so now."""
    return compiler.get_compile_options is _in_a_hurry


def _in_a_hurry(*args: Any, **settings: Any) -> Any:
    options = _as_for_users(*args, **settings)
    own = dict(options.env_option_overrides)  # `emitters` itself compiles a program, which has the option
    chosen = {} if OPTION in own else emitters(False)
    options.env_option_overrides = list({**chosen, "xla_cpu_parallel_codegen_split_count": 1, **own}.items())
    return options
