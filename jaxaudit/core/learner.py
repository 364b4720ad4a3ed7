"""The object an audit trains: a learning algorithm as two pure functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxaudit.core import contract
from jaxaudit.core.channel_names import PERFORMANCE, Cadence
from jaxaudit.core.taps import Taps
from jaxaudit.runtime.sharding import Partition

State = Any
Telemetry = dict[str, jax.Array]


@struct.dataclass
class Lasting:
    """A part of a learner's state that stays where the state is disturbed or taken back, e.g. a replay buffer.

    It is written by the learner alone, and always holds all that the learner has written in the run so far.

    Attributes:
      value: any pytree.
    """

    value: Any


def as_kept(telemetry: Mapping[str, Any]) -> Telemetry:
    """A step's telemetry as programs keep it: float32 arrays."""
    return {name: jnp.asarray(value, jnp.float32) for name, value in telemetry.items()}


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
        """Returns the pytree of the shapes."""
        return jax.tree.unflatten(self.structure, self.leaves)


@dataclass(frozen=True)
class Channel:
    """What is known of a channel of telemetry before it is measured; the defaults are a scalar's of every step.

    Attributes:
      dims: its own dimensions, each a name and the labels along it.
      dtype: that it is kept in, e.g. "float32" or "int32". A program gives float32, so whole numbers are exact up to
        2^24.
      every: it is measured at every so many steps, those t with (t + 1) % every == 0; what it holds between is not to
        be relied on.
      sparse: it is measured in some steps only, by what happens in them, e.g. where an episode ends, and is NaN in the
        others. Metrics read a sparse performance where it was measured: NaN is no collapse, infinity is. A lane whose
        parameters turn to NaN does not collapse by that then; where it is to, its performance must be -inf.
      monitored: whether monitors and detectors read it unless they are told to; not what is stored to be looked at,
        e.g. tokens.
      words: what its whole numbers stand for, by number: of tokens, their legible names; () where they are numbers.
    """

    dims: tuple[tuple[str, tuple[str, ...]], ...] = ()
    dtype: str = "float32"
    every: int = 1
    monitored: bool = True
    words: tuple[str, ...] = ()
    sparse: bool = False

    def __post_init__(self):
        if self.sparse and (self.every != 1 or self.dims or not self.dtype.startswith("float")):
            raise ValueError("a sparse channel is a scalar of floats with every = 1: NaN says where it is not measured")
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"every must be a whole number of steps, at least 1, not {self.every!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")

    @classmethod
    def vector(cls, name: str, labels: Iterable[str], dtype: str = "float32", every: int = 1) -> Channel:
        """Returns the description of a vector with labelled entries: `Channel.vector("layer", ("a", "b"))`."""
        return cls(((name, tuple(labels)),), dtype, every)

    @property
    def shape(self) -> tuple[int, ...]:
        """The channel's own shape: the numbers of labels along its dimensions."""
        return tuple(len(labels) for _, labels in self.dims)

    @property
    def attributes(self) -> dict[str, Any]:
        """What a dataset says of it besides, where not the default: when it is measured, who reads it, and words."""
        cadence = ({} if self.every == 1 else {"every": self.every}) | ({"sparse": 1} if self.sparse else {})
        unread = {} if self.monitored else {"monitored": 0}
        return cadence | unread | ({"words": list(self.words)} if self.words else {})

    @property
    def missing(self) -> float | int:
        """What is kept where nothing was measured: NaN; of whole numbers the smallest, of unsigned ones the largest."""
        if self.dtype.startswith("float"):
            return float("nan")
        limits = np.iinfo(self.dtype)
        return limits.max if self.dtype.startswith("u") else limits.min

    def kept(self, values: np.ndarray) -> np.ndarray:
        """Values, NaN where nothing was measured, as they are kept."""
        if self.dtype.startswith("float"):
            return values.astype(self.dtype, copy=False)
        found = np.full(values.shape, self.missing, self.dtype)
        found[~np.isnan(values)] = values[~np.isnan(values)]
        return found


DTYPES = ("float32", "float16", "int32", "int16", "int8", "uint32", "uint16", "uint8")
"""Of what telemetry is kept in."""


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
      samples_per_step: environment steps or tokens in one step, for rates; 0 where it means nothing.
      sample: what such a sample is, in the plural.
      channels: what is known of the telemetry: {"layer_norm": Channel.vector("layer", ("a", "b"))}. A channel that is
        not here is a scalar of every step, or has dimensions without labels. Dimensions of one name have one set of
        labels.
      data: arrays that all lanes read, e.g. a corpus: a pytree that a step finds in `taps.data`. They are kept once a
        device, and are no constants of the program.
      init_reads_data: whether it is `init(key, data) -> state` instead, e.g. of parameters to begin with.
      provenance: what a run depends on beside its spec, in words, e.g. a corpus's hash; recorded. A run goes on with
        the same alone; programs do not depend on it.
      remarks: `remarks(telemetry) -> sentences` on what a user should know of how undisturbed lanes begin, from their
        channels `[lane, step, ...]`, float arrays by name; told by the runner after the first chunk, and in reports.
      save: `save(folder, state, data)` writes what a lane has trained as other programs read it, e.g. in Hugging Face's
        format, from a state of NumPy arrays and the learner's data; None where it cannot.
      absent: for sites that it does not tap, what its taps do not give and labels that no parameters have, why: the end
        of a sentence.
      numbers: for some of its sites, numbers that are data to its taps and known before a run, by name: they bound what
        magnitudes mean something there.
      changed: `changed(change) -> Learner`, this learner with other settings, for remedies that change them;
        `change(settings)` gives the new values by name. ValueError, in one sentence, where there is no setting of such
        a name, or the value makes no sense. None: its settings cannot be changed.
      partition: `partition(path, shape)`, how a lane's arrays are split where several devices share it: for each axis
        of the array of a leaf of the state or of `data`, by the leaf's path ("params/wte/embedding"), "model" or None;
        () where it is not. An axis may be odd: it is filled up on the devices alone. None: no lane can be shared.
      indivisible: how many there are, by name, of what is split and no device can have a part of:
        {"attention heads": 12}.
      shapes: of `data`.
    """

    init: Callable[..., State]
    step: Callable[[State, jax.Array, Taps], tuple[State, Telemetry]]
    name: str = "learner"
    step_unit: str = "step"
    performance_name: str = "performance"
    samples_per_step: int = 0
    sample: str = "env steps"
    channels: Mapping[str, Channel] = field(default_factory=dict, hash=False)
    data: Any = field(default=None, compare=False, repr=False)
    init_reads_data: bool = False
    provenance: Mapping[str, str] = field(default_factory=dict, compare=False)
    remarks: Callable[[Mapping[str, np.ndarray]], Sequence[str]] | None = field(default=None, compare=False)
    save: Callable[[Path, State, Any], None] | None = field(default=None, compare=False)
    absent: Mapping[str, str] = field(default_factory=dict, compare=False)
    numbers: Mapping[str, Mapping[str, float]] = field(default_factory=dict, compare=False)
    changed: Callable[..., Learner] | None = field(default=None, compare=False, repr=False)
    partition: Partition | None = None
    indivisible: Mapping[str, int] = field(default_factory=dict, compare=False)
    shapes: Shapes = field(init=False, repr=False)

    def __post_init__(self):
        labels: dict[str, tuple[str, ...]] = {}
        for name, along in (dim for channel in self.channels.values() for dim in channel.dims):
            if labels.setdefault(name, along) != along:
                raise ValueError(f"the dimension '{name}' has other labels in one channel than in another")
        leaves, structure = jax.tree.flatten(self.data)
        shapes = tuple(jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in leaves)
        object.__setattr__(self, "shapes", Shapes(structure, shapes))

    def channel(self, name: str) -> Channel:
        """Returns what is known of a channel; the defaults of `Channel` for one that is not described."""
        return self.channels.get(name, Channel())

    @property
    def cadence(self) -> Cadence:
        """The steps at which the performance is measured."""
        known = self.channel(PERFORMANCE)
        return Cadence(known.every, known.sparse)

    def begin(self, key: jax.Array, data: Any) -> State:
        """Returns the state before the first step, from a random key and the learner's data.

        Raises ValueError, as `jaxaudit.core.contract` describes, where it is not a tree of arrays.
        """
        return contract.as_first(self._begun(key, data), self.state_shapes, "init")

    def advance(self, state: State, key: jax.Array, taps: Taps) -> tuple[State, Telemetry]:
        """Returns the state after a step, in the structure of the state before it, and the step's telemetry in float32.

        Raises ValueError, as `jaxaudit.core.contract` describes, where structures, shapes or dtypes change.
        """
        with contract.explained(self.step, "step"):
            found = self.step(contract.functions_as_leaves(state), key, taps)
        after, telemetry = contract.checked_step(found, state)
        return after, as_kept(telemetry)

    def _begun(self, key: jax.Array, data: Any) -> State:
        with contract.explained(self.init, "init"):
            state = contract.functions_held(self.init(key, data) if self.init_reads_data else self.init(key))
        contract.check_leaves(state)
        return state

    @property
    def state_shapes(self) -> State:
        """The shapes and dtypes of one lane's state before the first step."""
        return _state_shapes(self.without_data)

    @property
    def without_data(self) -> Learner:
        """The learner with shapes in the place of its data, which is all that a program depends on."""
        return replace(self, data=self.shapes.tree, changed=None)


@functools.lru_cache(maxsize=64)
def _state_shapes(learner: Learner) -> State:
    """Kept, for an `init` that trains is long to trace."""
    return jax.eval_shape(learner._begun, jax.random.key(0), learner.shapes.tree)
