"""What a learner's own functions give, held to what an audit needs of it: a mistake is one sentence with its place."""

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

SHOWN = 60
"""Characters of a line or a value in a sentence, at most."""


@jax.tree_util.register_static
@dataclass(frozen=True)
class Function:
    """A function that a state has in the place of an array, such as an activation of an Equinox module."""

    call: Callable[..., Any]

    def __hash__(self) -> int:
        return hash(type(self.call))


def is_function(leaf: Any) -> bool:
    """Whether a leaf of a tree is a function."""
    return callable(leaf) and not hasattr(leaf, "dtype")


def functions_held(state: State) -> State:
    """A state whose functions are part of its tree, not of its leaves, as JAX' transformations want them."""
    return jax.tree.map(lambda leaf: Function(leaf) if is_function(leaf) else leaf, state)


def functions_as_leaves(state: State) -> State:
    """A state that is `functions_held`, as the learner made it."""
    return jax.tree.map(
        lambda leaf: leaf.call if isinstance(leaf, Function) else leaf,
        state,
        is_leaf=lambda leaf: isinstance(leaf, Function),
    )


def check_leaves(state: State) -> None:
    """Raises ValueError if what `init` gave has a leaf that is no array, no number and no function."""
    for path, leaf in _leaves(state):
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
            raise ValueError(
                f"init gives a {type(leaf).__name__} at {path}, where a state has arrays and numbers; keep it outside "
                "of the state"
            )


def as_first(state: State, first: State, function: str) -> State:
    """A state in the tree that the first one had, so that what is no array in a tree is that of the first.

    A tree may hold functions, as a flax TrainState has its optimizer: one that is made anew in each trace is another
    function, and does the same.

    Args:
      state: what `init` or `step` gave.
      first: what `init` gave first, or what `step` was given.
      function: "init" or "step".

    Raises:
      ValueError: the leaves are not at the same places.
    """
    structure: Any = jax.tree.structure(first)
    if structure == jax.tree.structure(state):
        return state
    found, known = [path for path, _ in _leaves(state)], [path for path, _ in _leaves(first)]
    if found == known:
        return jax.tree.unflatten(structure, jax.tree.leaves(state))
    more, less = [path for path in found if path not in known], [path for path in known if path not in found]
    if less:
        differs = f"no array at {less[0]}, where there was one"
    else:
        differs = f"an array at {more[0]}, which was not there" if more else "its arrays in another order"
    raise ValueError(f"{function} gives a state with {differs}: a state keeps its arrays")


def checked_step(found: Any, state: State) -> tuple[State, Mapping[str, Any]]:
    """What `step` gave, `(state, telemetry)`, for the state that it was given.

    Raises:
      ValueError: it is something else, an array of the state has another shape or type, or a channel is no numbers.
    """
    if not isinstance(found, tuple) or len(found) != 2:
        what = f"{len(found)} values" if isinstance(found, tuple) else f"a {type(found).__name__}"
        raise ValueError(f"step gives {what}, where it must give two: (state, telemetry)")
    after, telemetry = found
    if not isinstance(telemetry, Mapping):
        raise ValueError(f"step gives a {type(telemetry).__name__} for telemetry, which must be a dict of channels")
    after = as_first(functions_held(after), state, "step")
    for (path, new), (_, old) in zip(_leaves(after), _leaves(state), strict=True):
        if _kind(new) != _kind(old):
            raise ValueError(f"step gives {_kind(new)} at {path}, where it got {_kind(old)}: a state keeps its types")
    for name, value in telemetry.items():
        _check_channel(name, value)
    return after, telemetry


def _check_channel(name: Any, value: Any) -> None:
    if not isinstance(name, str):
        raise ValueError(f"step's telemetry has a channel {name!r}, whose name is no text")
    if isinstance(value, Mapping):
        inner = next(iter(value), "a")
        raise ValueError(f"step's telemetry has a dict for '{name}'; make its entries channels, as '{name}/{inner}'")
    try:
        shape, kind = jnp.shape(value), None if value is None else jnp.result_type(value)
    except (TypeError, ValueError):
        shape, kind = (), None
    if kind is None or not (jnp.issubdtype(kind, jnp.number) or kind == np.dtype(bool)):
        raise ValueError(
            f"step's telemetry has {str(value)[:SHOWN]!r} ({type(value).__name__}) for '{name}', where a channel is a "
            "number or an array of numbers"
        )
    if name == PERFORMANCE and shape:
        raise ValueError(
            f"step's telemetry has an array of shape {shape} for '{PERFORMANCE}', which must be one number, e.g. a mean"
        )


@contextlib.contextmanager
def explained(function: Callable[..., Any], name: str) -> Iterator[None]:
    """Says of a trace of `init` or `step` that fails what is to be written otherwise, and where.

    Raises:
      ValueError: in the place of JAX' errors on values that are not known while a function is traced, on random keys
        in arithmetic, and on callbacks that do not say how they are mapped over lanes.
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
        given = "init(key)" if name == "init" else "step(state, key, taps)"
        raise ValueError(
            f"{name} computes with a random key{_where(function, error)}; it is called as {given}, and a key that is "
            "part of what is tapped is no number"
        ) from error
    except NotImplementedError as error:
        if "vmap_method" not in str(error):
            raise
        raise ValueError(
            f"{name} has a callback{_where(function, error)} that does not say how lanes call it; give it "
            "vmap_method='sequential', or another that jax.pure_callback has"
        ) from error


def _where(function: Callable[..., Any], error: BaseException) -> str:
    """The line of the learner's own file that an error comes from, for a sentence; "" where none is known."""
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
    return f" ({Path(file).name}, line {frames[-1].lineno}: {line[:SHOWN]})"


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree, each with its path in quotes, as a sentence names it."""
    found = jax.tree_util.tree_leaves_with_path(tree)
    named = [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in found]
    return [(f"'{path}'" if path else "the root", leaf) for path, leaf in named]


def _kind(leaf: Any) -> str:
    """Type and shape of an array, as "float32[3]"."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    if not jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return f"{dtype}[{','.join(map(str, jnp.shape(leaf)))}]"
