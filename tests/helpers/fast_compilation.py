"""A faster way for XLA to compile the tests' programs, most of which run once and for moments."""

import sys
from typing import Any

import jax
from directories import EXPERIMENTS
from jax._src import compiler

sys.path.append(str(EXPERIMENTS / "tasks"))  # fusion_emitters.py

from fusion_emitters import OPTION, emitters

_default_options = compiler.get_compile_options


def set_fast_compilation(enabled: bool = True) -> None:
    """Sets whether XLA leaves out most optimizations and its fusion emitters, which take half of the remaining time.

    Where XLA always uses the emitters, as from jaxlib 0.11 on, tests/core/test_grid.py takes a third longer. With fast
    compilation XLA also does not split programs to compile their parts in parallel, because the tests' processes keep
    all cores busy. JAX can set these two options only for the entire process.
    """
    jax.config.update("jax_disable_most_optimizations", enabled)
    compiler.get_compile_options = _fast_options if enabled else _default_options


def fast_compilation_enabled() -> bool:
    """Returns whether programs are currently compiled in the fast way."""
    return compiler.get_compile_options is _fast_options


def _fast_options(*args: Any, **settings: Any) -> Any:
    options = _default_options(*args, **settings)
    # `emitters` itself compiles a program, whose options already contain this one.
    overrides = dict(options.env_option_overrides)
    extra = {} if OPTION in overrides else emitters(False)
    options.env_option_overrides = list({**extra, "xla_cpu_parallel_codegen_split_count": 1, **overrides}.items())
    return options
