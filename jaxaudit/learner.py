"""The object an audit trains: a learning algorithm as two pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jaxaudit.taps import Taps

State = Any
Telemetry = dict[str, jax.Array]

PERFORMANCE = "performance"

ACTING = "acting_performance"
"""The channel in which a learner tells how it fares in training itself, disturbed or not, beside its performance."""


@struct.dataclass
class Lasting:
    """A part of a learner's state that stays where the state is disturbed or taken back, e.g. a replay buffer.

    It is written by the learner alone, and always holds all that the learner has written in the run so far.

    Attributes:
      value: any pytree.
    """

    value: Any


def without_lasting(state: State) -> State:
    """A state with nothing in the place of its `Lasting` parts."""
    return jax.tree.map(lambda x: None if isinstance(x, Lasting) else x, state, is_leaf=_is_lasting)


def with_lasting(state: State, of: State) -> State:
    """A state that is `without_lasting`, with the `Lasting` parts `of` another."""
    return jax.tree.map(lambda x, y: x if isinstance(x, Lasting) else y, of, state, is_leaf=_is_lasting)


def _is_lasting(x: Any) -> bool:
    return isinstance(x, Lasting)


class Shapes(NamedTuple):
    """A pytree's structure, and its leaves' shapes and dtypes: what a program knows of data."""

    structure: Any
    leaves: tuple[jax.ShapeDtypeStruct, ...]

    @property
    def tree(self) -> Any:
        """The pytree, of shapes."""
        return jax.tree.unflatten(self.structure, self.leaves)


@dataclass(frozen=True)
class Learner:
    """A training algorithm: `init` makes a state, `step` advances it by one iteration.

    Attributes:
      init: `init(key) -> state`; the state is any pytree of arrays. `begin` is how an audit calls it.
      step: `step(state, key, taps) -> (state, telemetry)`. Telemetry is a dict of scalars and fixed-size vectors
        and holds "performance": what the learner is worth, higher is better. It is taken at its word: measured on
        what was read through `taps` (returns of episodes whose observations, actions or dynamics are tapped, a loss
        on tapped tokens), it falls with the disturbance, whether the learner has got worse or not; measure it apart,
        where anything is tapped through `taps.closed`. A value passed through `taps(site, value)` can be disturbed
        by the perturbations of that site.
      name: what reports call it.
      step_unit: what one step is, in words, e.g. "2048 env steps".
      performance_name: what `performance` measures, in words.
      performance_every: it is measured at every so many steps, those t with (t + 1) % performance_every == 0; what it
        holds between is for plots, and no metric reads it.
      samples_per_step: environment steps or tokens in one step, for rates; 0 where it means nothing.
      sample: what such a sample is, in the plural.
      vectors: for telemetry that is a vector, its dimension's name and labels: {"layer_norm": ("layer", ("a", "b"))}.
      data: arrays that all lanes read, e.g. a corpus: a pytree that a step finds in `taps.data`. They are kept once a
        device, and are no constants of the program.
      init_reads_data: whether it is `init(key, data) -> state` instead, e.g. of parameters to begin with.
      provenance: what a run depends on beside its spec, in words, e.g. a corpus's hash; recorded. A run goes on with
        the same alone; programs do not depend on it.
      shapes: of `data`.
    """

    init: Callable[..., State]
    step: Callable[[State, jax.Array, Taps], tuple[State, Telemetry]]
    name: str = "learner"
    step_unit: str = "step"
    performance_name: str = "performance"
    performance_every: int = 1
    samples_per_step: int = 0
    sample: str = "env steps"
    vectors: Mapping[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict, hash=False)
    data: Any = field(default=None, compare=False, repr=False)
    init_reads_data: bool = False
    provenance: Mapping[str, str] = field(default_factory=dict, compare=False)
    shapes: Shapes = field(init=False, repr=False)

    def __post_init__(self):
        if isinstance(self.performance_every, bool) or not isinstance(self.performance_every, int):
            raise ValueError(f"performance_every must be a whole number of steps, not {self.performance_every!r}")
        if self.performance_every < 1:
            raise ValueError(f"performance_every must be at least 1, not {self.performance_every}")
        leaves, structure = jax.tree.flatten(self.data)
        shapes = tuple(jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in leaves)
        object.__setattr__(self, "shapes", Shapes(structure, shapes))

    def begin(self, key: jax.Array, data: Any) -> State:
        """The state before the first step, from a key and what the program was given as the learner's data."""
        return self.init(key, data) if self.init_reads_data else self.init(key)

    @property
    def without_data(self) -> Learner:
        """The learner with shapes in the place of its data: all that a program depends on, and light to keep."""
        return replace(self, data=self.shapes.tree)
