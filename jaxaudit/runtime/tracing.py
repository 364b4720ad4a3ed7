"""How functions are traced: the precision of matrix products, and the transformations around a value.

GPUs and TPUs can round the factors of float32 products to TF32 or bfloat16 first, which is fast and off by 1e-3, and
JAX does so by default. Here products are computed in float32 unless the caller asks for less, and those of physics
even then.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Literal, ParamSpec, TypeVar

import jax
from jax._src import core
from jax.extend.core import jaxprs_in_params

P = ParamSpec("P")
R = TypeVar("R")

MatmulPrecision = Literal["float32", "tf32"]

_USES_TF32: ContextVar[bool] = ContextVar("uses_tf32", default=False)


def resolve_precision(devices: Sequence[jax.Device], requested: MatmulPrecision) -> str | None:
    """Returns the precision of matrix products with which programs for some devices are traced.

    Args:
      devices: the devices that run the program.
      requested: the precision that the caller asks for.

    Returns:
      The value of `jax.default_matmul_precision` if it was set, for example by JAX_DEFAULT_MATMUL_PRECISION; else None
      on CPUs, whose products are in float32 anyway; else `requested`.

    Raises:
      ValueError: `requested` is neither "float32" nor "tf32".
    """
    if requested not in ("float32", "tf32"):
        raise ValueError(f"matmul_precision must be 'float32' or 'tf32', not {requested!r}")
    explicit = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    if explicit is not None:
        return str(explicit)
    return None if all(device.platform == "cpu" for device in devices) else requested


@contextlib.contextmanager
def with_precision(precision: str | None) -> Iterator[None]:
    """Traces its body with a precision that `resolve_precision` returned."""
    if precision is None:
        yield
        return
    token = _USES_TF32.set(precision == "tf32")
    try:
        with jax.default_matmul_precision("tensorfloat32" if precision == "tf32" else precision):
            yield
    finally:
        _USES_TF32.reset(token)


def float32_products(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function that is traced outside of a grid's program, so that its products are in float32."""

    @functools.wraps(function)
    def traced(*args: P.args, **kwargs: P.kwargs) -> R:
        with with_precision(resolve_precision(jax.devices(), "float32")):
            return function(*args, **kwargs)

    return traced


@contextlib.contextmanager
def in_float32() -> Iterator[None]:
    """Traces its body with float32 products in a program whose other products are in TF32."""
    if not _USES_TF32.get():
        yield
        return
    with jax.default_matmul_precision("float32"):
        yield


RUN_ONCE = {"JVPTrace": "grad", "LinearizeTrace": "grad", "checkpoint / remat": "remat", "cond": "cond"}
"""Transformations that run their body once, with the values around it.

The keys are types of traces, or what JAX says a function is traced for; the values are the transformations' names.
"""

NOT_ELEMENTWISE = (
    *("cond", "while", "scan", "pure_callback", "io_callback"),
    *("dot_general", "conv_general_dilated", "fft", "cholesky", "triangular_solve"),
    *("sort", "top_k", "gather", "dynamic_slice", "dynamic_update_slice", "scatter", "concatenate"),
    *("reduce_", "argmax", "argmin", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"),
)
"""Prefixes of the names of primitives whose results are not computed entry by entry."""

PUBLIC_NAMES = {"BatchTrace": "vmap", "while_body": "while_loop", "while_cond": "while_loop"}


def current_trace() -> Any:
    """Returns the trace that values computed now belong to; JAX has no public function for this."""
    return core.trace_ctx.trace


def transformations_since(origin: Any) -> tuple[str, ...]:
    """Returns the names of the transformations between the trace `origin` and the current one, the innermost first.

    The names are "scan", "vmap", "grad" and so on. If `origin`, a JAX trace, has ended or does not enclose the
    current trace, the names of all transformations around the current trace are returned.
    """
    names, trace = [], core.trace_ctx.trace
    while trace is not None and trace is not origin:
        names.append(_transformation_name(trace))
        trace = getattr(trace, "parent_trace", None)
    return tuple(names)


def may_repeat(name: str) -> bool:
    """Returns whether a transformation may run its body more than once, or on several values at a time."""
    return name not in RUN_ONCE.values()


def is_elementwise(function: Callable[..., Any], *arguments: Any) -> bool:
    """Returns whether a function computes its arrays entry by entry, so that XLA fuses it into one loop.

    Random numbers count as elementwise, since JAX computes them so.
    """

    def all_elementwise(jaxpr: Any) -> bool:
        return all(
            not equation.primitive.name.startswith(NOT_ELEMENTWISE)
            and all(all_elementwise(inner) for inner in jaxprs_in_params(equation.params))
            for equation in jaxpr.eqns
        )

    return all_elementwise(jax.make_jaxpr(function)(*arguments).jaxpr)


def _transformation_name(trace: Any) -> str:
    kind = type(trace).__name__
    if kind == "DynamicJaxprTrace":
        info = trace.frame.debug_info
        kind = "jit" if info is None else str(info.traced_for)
    return RUN_ONCE.get(kind, PUBLIC_NAMES.get(kind, kind))
