"""Where in a program a function is being traced: in what it was begun in, or in a derivative, a loop or a batch of it.

JAX says so in no public function: this is the one place that looks at its traces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax._src import core
from jax.extend.core import jaxprs_in_params


import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Literal, ParamSpec, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R")

MatmulPrecision = Literal["float32", "tf32"]

_LOWERED: ContextVar[bool] = ContextVar("lowered", default=False)


def resolve_precision(devices: Sequence[jax.Device], wanted: MatmulPrecision) -> str | None:
    """The precision that programs on some devices are traced with.

    Args:
      devices: where they run.
      wanted: by whoever asks for the program.

    Returns:
      what `jax.default_matmul_precision` says already, by JAX_DEFAULT_MATMUL_PRECISION or another way; else `wanted`;
      None on CPUs, whose products are in float32 anyway.

    Raises:
      ValueError: `wanted` is neither "float32" nor "tf32".
    """
    if wanted not in ("float32", "tf32"):
        raise ValueError(f"matmul_precision must be 'float32' or 'tf32', not {wanted!r}")
    explicit = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    if explicit is not None:
        return str(explicit)
    return None if all(device.platform == "cpu" for device in devices) else wanted


@contextlib.contextmanager
def with_precision(precision: str | None) -> Iterator[None]:
    """Traces what is in its body with a precision that `resolve` gave."""
    if precision is None:
        yield
        return
    token = _LOWERED.set(precision == "tf32")
    try:
        with jax.default_matmul_precision("tensorfloat32" if precision == "tf32" else precision):
            yield
    finally:
        _LOWERED.reset(token)


def float32_products(function: Callable[P, R]) -> Callable[P, R]:
    """A function that is traced outside of a program, as `resolve` says for "float32" on the default devices."""

    @functools.wraps(function)
    def traced(*args: P.args, **kwargs: P.kwargs) -> R:
        with with_precision(resolve_precision(jax.devices(), "float32")):
            return function(*args, **kwargs)

    return traced


@contextlib.contextmanager
def in_float32() -> Iterator[None]:
    """Traces what is in its body in float32 where "tf32" was asked for networks; else changes nothing."""
    if not _LOWERED.get():
        yield
        return
    with jax.default_matmul_precision("float32"):
        yield


PASSED = {"JVPTrace": "grad", "LinearizeTrace": "grad", "checkpoint / remat": "remat", "cond": "cond"}
"""What runs its body once, with the values of the place around it: a trace's type, or what a function is traced for."""

NOT_ELEMENTWISE = (
    *("cond", "while", "scan", "pure_callback", "io_callback"),
    *("dot_general", "conv_general_dilated", "fft", "cholesky", "triangular_solve"),
    *("sort", "top_k", "gather", "dynamic_slice", "dynamic_update_slice", "scatter", "concatenate"),
    *("reduce_", "argmax", "argmin", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"),
)
"""Beginnings of the names of primitives whose results are not computed entry by entry."""

NAMES = {"BatchTrace": "vmap", "while_body": "while_loop", "while_cond": "while_loop"}


def here() -> Any:
    """The trace that values computed now belong to; kept by who wants to know later how far away it is."""
    return core.trace_ctx.trace


def between(home: Any) -> tuple[str, ...]:
    """Names of the transformations between `home` and here, the innermost first: "scan", "vmap", "grad", ...

    A home that is over, or of another function, is as far away as can be: all around here is named.
    """
    found, trace = [], core.trace_ctx.trace
    while trace is not None and trace is not home:
        found.append(_name(trace))
        trace = getattr(trace, "parent_trace", None)
    return tuple(found)


def repeats(name: str) -> bool:
    """Whether a transformation may run its body more than once, or on several values at a time."""
    return name not in PASSED.values()


def is_elementwise(function: Callable[..., Any], *arguments: Any) -> bool:
    """Whether all that a function does with arrays is done entry by entry, so that a compiler makes one loop out of it.

    Random numbers are, as JAX computes them.
    """

    def equations(jaxpr: Any) -> bool:
        return all(
            not equation.primitive.name.startswith(NOT_ELEMENTWISE)
            and all(equations(inner) for inner in jaxprs_in_params(equation.params))
            for equation in jaxpr.eqns
        )

    return equations(jax.make_jaxpr(function)(*arguments).jaxpr)


def _name(trace: Any) -> str:
    kind = type(trace).__name__
    if kind == "DynamicJaxprTrace":
        info = trace.frame.debug_info
        kind = "jit" if info is None else str(info.traced_for)
    return PASSED.get(kind, NAMES.get(kind, kind))
