"""Checks what a learner's functions return; each error is one sentence that names the place of the mistake."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxaudit.core.channel_names import PERFORMANCE

State = Any

MAX_CHARACTERS = 60
"""The largest number of characters of a code line or a value that an error message quotes."""


@jax.tree_util.register_static
@dataclass(frozen=True)
class Function:
    """A leaf of a state that is a function instead of an array, such as an activation of an Equinox module."""

    call: Callable[..., Any]

    def __hash__(self) -> int:
        return hash(type(self.call))


def _is_function(leaf: Any) -> bool:
    return callable(leaf) and not hasattr(leaf, "dtype")


def wrap_functions(state: State) -> State:
    """Returns a state whose functions are part of the tree's structure, since JAX transformations need array leaves."""
    return jax.tree.map(lambda leaf: Function(leaf) if _is_function(leaf) else leaf, state)


def unwrap_functions(state: State) -> State:
    """Returns a state whose functions are leaves again; this reverses `wrap_functions`."""
    return jax.tree.map(
        lambda leaf: leaf.call if isinstance(leaf, Function) else leaf,
        state,
        is_leaf=lambda leaf: isinstance(leaf, Function),
    )


def check_leaves(state: State) -> None:
    """Raises ValueError if a state that `init` returned has a leaf other than an array, a number or a function."""
    for path, leaf in _leaves(state):
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
            raise ValueError(
                f"init returns a {type(leaf).__name__} at {path}, where a state has arrays and numbers; keep it "
                "outside of the state"
            )


def with_structure_of(state: State, reference: State, function: str) -> State:
    """Returns a state in the tree structure of a reference, so that static parts of the tree are the reference's.

    A tree may contain functions, as a flax TrainState contains its optimizer. Each trace may create such a function
    anew, which compares unequal although it does the same.

    Args:
      state: the state that `init` or `step` returned.
      reference: the state that `init` returned first, or that `step` was called with.
      function: "init" or "step", for the error message.

    Raises:
      ValueError: the leaves have other paths.
    """
    structure: Any = jax.tree.structure(reference)
    if structure == jax.tree.structure(state):
        return state
    paths, expected = [path for path, _ in _leaves(state)], [path for path, _ in _leaves(reference)]
    if paths == expected:
        return jax.tree.unflatten(structure, jax.tree.leaves(state))
    added, missing = [p for p in paths if p not in expected], [p for p in expected if p not in paths]
    if missing:
        difference = f"no array at {missing[0]}, where there was one"
    elif added:
        difference = f"an array at {added[0]}, which was not there"
    else:
        difference = "its arrays in another order"
    raise ValueError(f"{function} returns a state with {difference}: a state keeps its arrays")


def check_step(result: Any, state: State) -> tuple[State, Mapping[str, Any]]:
    """Returns the checked result of `step`, the state and telemetry, for the state that it was called with.

    Raises:
      ValueError: the result is not a pair, an array of the state has another shape or dtype, or a channel is not
        numeric.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        values = f"{len(result)} values" if isinstance(result, tuple) else f"a {type(result).__name__}"
        raise ValueError(f"step returns {values}, where it must return two: (state, telemetry)")
    after, telemetry = result
    if not isinstance(telemetry, Mapping):
        raise ValueError(f"step returns a {type(telemetry).__name__} for telemetry, which must be a dict of channels")
    after = with_structure_of(wrap_functions(after), state, "step")
    for (path, new), (_, old) in zip(_leaves(after), _leaves(state), strict=True):
        if _type_of(new) != _type_of(old):
            raise ValueError(
                f"step returns {_type_of(new)} at {path}, where it got {_type_of(old)}: a state keeps its types"
            )
    for name, value in telemetry.items():
        _check_channel(name, value)
    return after, telemetry


def _check_channel(name: Any, value: Any) -> None:
    if not isinstance(name, str):
        raise ValueError(f"step's telemetry has a channel {name!r}, whose name is not a string")
    if isinstance(value, Mapping):
        entry = next(iter(value), "a")
        raise ValueError(f"step's telemetry has a dict for '{name}'; make its entries channels, as '{name}/{entry}'")
    try:
        shape, dtype = jnp.shape(value), None if value is None else jnp.result_type(value)
    except (TypeError, ValueError):
        shape, dtype = (), None
    if dtype is None or not (jnp.issubdtype(dtype, jnp.number) or dtype == np.dtype(bool)):
        quoted = repr(str(value)[:MAX_CHARACTERS])
        raise ValueError(
            f"step's telemetry has {quoted} ({type(value).__name__}) for '{name}', where a channel is a number or an "
            "array of numbers"
        )
    if name == PERFORMANCE and shape:
        raise ValueError(
            f"step's telemetry has an array of shape {shape} for '{PERFORMANCE}', which must be one number, e.g. a mean"
        )


@contextlib.contextmanager
def explain_trace_errors(function: Callable[..., Any], name: str) -> Iterator[None]:
    """Replaces errors in a trace of `init` or `step` by sentences that say what to write instead, and where.

    Args:
      function: the learner's function, whose file is searched for the line of the error.
      name: "init" or "step".

    Raises:
      ValueError: replaces JAX's errors on values that are unknown while a function is traced, on random keys in
        arithmetic, and on callbacks without a `vmap_method`.
    """
    try:
        yield
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
        raise ValueError(
            f"{name} takes the value of an array in Python{_where(function, error)}, which is not known while it is "
            "traced; use jnp.where or jax.lax.cond for if, jax.numpy for NumPy, and no float() or int()"
        ) from error
    except TypeError as error:
        if "key<" not in str(error):
            raise
        call = "init(key)" if name == "init" else "step(state, key, taps)"
        raise ValueError(
            f"{name} computes with a random key{_where(function, error)}; it is called as {call}, and a key that is "
            "part of a tapped value is not a number"
        ) from error
    except NotImplementedError as error:
        if "vmap_method" not in str(error):
            raise
        raise ValueError(
            f"{name} has a callback{_where(function, error)} that does not say how lanes call it; give it "
            "vmap_method='sequential', or another method of jax.pure_callback"
        ) from error


def _where(function: Callable[..., Any], error: BaseException) -> str:
    """Returns the line of the function's file that an error comes from, in parentheses; "" if it is unknown."""
    while not hasattr(function, "__code__"):
        inner = getattr(function, "func", None) or getattr(function, "__wrapped__", None)
        if inner is None:
            return ""
        function = inner
    file = function.__code__.co_filename
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    if not frames:
        return ""
    line = (frames[-1].line or "").strip()
    return f" ({Path(file).name}, line {frames[-1].lineno}: {line[:MAX_CHARACTERS]})"


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    """Returns the leaves of a tree, each with its quoted path for an error message."""
    named = [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
    return [(f"'{path}'" if path else "the root", leaf) for path, leaf in named]


def _type_of(leaf: Any) -> str:
    """Returns the dtype and shape of an array, e.g. "float32[3]"."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    if not jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return f"{dtype}[{','.join(map(str, jnp.shape(leaf)))}]"
