"""How products of float32 matrices are computed on devices that can round their factors first, as GPUs and TPUs do.

JAX's default there is TF32 or bfloat16 factors: fast, and off by 1e-3. Here float32 means float32 unless somebody asks
for less, and physics is computed in float32 even then.
"""

from __future__ import annotations

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


def resolve(devices: Sequence[jax.Device], wanted: MatmulPrecision) -> str | None:
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
def tracing(precision: str | None) -> Iterator[None]:
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
        with tracing(resolve(jax.devices(), "float32")):
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
