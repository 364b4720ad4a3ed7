"""`Learner`, the object that an audit trains: a learning algorithm as two pure functions."""

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
    """A part of a learner's state, e.g. a replay buffer, that perturbations and interventions of the state leave alone.

    Only the learner changes it, so that it always contains everything that the learner has written in the run so far.

    Attributes:
      value: any pytree.
    """

    value: Any


def without_lasting(state: State) -> State:
    """Returns a state with None in place of its `Lasting` parts."""
    return jax.tree.map(lambda x: None if isinstance(x, Lasting) else x, state, is_leaf=_is_lasting)


def with_lasting(state: State, source: State) -> State:
    """Returns a state that is `without_lasting`, with the `Lasting` parts of `source`."""
    return jax.tree.map(lambda x, y: x if isinstance(x, Lasting) else y, source, state, is_leaf=_is_lasting)


def _is_lasting(x: Any) -> bool:
    return isinstance(x, Lasting)


class Shapes(NamedTuple):
    """The structure of a pytree and the shapes and dtypes of its leaves, on which a program depends."""

    structure: Any
    leaves: tuple[jax.ShapeDtypeStruct, ...]

    @property
    def tree(self) -> Any:
        """The pytree with a `jax.ShapeDtypeStruct` for each leaf."""
        return jax.tree.unflatten(self.structure, self.leaves)


@dataclass(frozen=True)
class Channel:
    """The description of a telemetry channel; the defaults describe a scalar that is measured at every step.

    Attributes:
      dims: the channel's own dimensions, each a name and the labels along it.
      dtype: the dtype in which it is stored, e.g. "float32" or "int32". Programs compute telemetry in float32, so whole
        numbers are exact up to 2^24.
      every: the interval between measurements: the channel is measured at the steps t with (t + 1) % every == 0. Its
        values at other steps are arbitrary.
      sparse: whether the channel is measured only at some steps, e.g. when an episode ends, and NaN at all others.
        Metrics of a sparse performance read the steps with measurements: NaN is not a collapse, infinity is. A lane
        whose parameters become NaN therefore collapses only if its performance is -inf.
      monitored: whether monitors and detectors read the channel by default; False for channels that are stored to be
        displayed, e.g. tokens.
      words: the names of the channel's whole numbers, by number, e.g. readable tokens; () if they are plain numbers.
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
        """Returns the description of a vector with labelled entries, e.g. `Channel.vector("layer", ("a", "b"))`."""
        return cls(((name, tuple(labels)),), dtype, every)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the channel, which has the numbers of labels along its dimensions."""
        return tuple(len(labels) for _, labels in self.dims)

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes every, sparse, monitored and words of the channel's variable in a dataset, unless default."""
        cadence = ({} if self.every == 1 else {"every": self.every}) | ({"sparse": 1} if self.sparse else {})
        monitored = {} if self.monitored else {"monitored": 0}
        return cadence | monitored | ({"words": list(self.words)} if self.words else {})

    @property
    def missing(self) -> float | int:
        """The value stored for a missing measurement, which is NaN, or the smallest or largest integer."""
        if self.dtype.startswith("float"):
            return float("nan")
        limits = np.iinfo(self.dtype)
        return limits.max if self.dtype.startswith("u") else limits.min

    def kept(self, values: np.ndarray) -> np.ndarray:
        """Returns the values, in which NaN means missing, in the dtype in which they are stored."""
        if self.dtype.startswith("float"):
            return values.astype(self.dtype, copy=False)
        stored = np.full(values.shape, self.missing, self.dtype)
        stored[~np.isnan(values)] = values[~np.isnan(values)]
        return stored


DTYPES = ("float32", "float16", "int32", "int16", "int8", "uint32", "uint16", "uint8")
"""The dtypes in which telemetry can be stored."""


@dataclass(frozen=True)
class Learner:
    """A training algorithm: `init` returns a state, and `step` advances it by one iteration.

    Attributes:
      init: `init(key) -> state`, where the state is any pytree of arrays. An audit calls it through `begin`.
      step: `step(state, key, taps) -> (state, telemetry)`. Telemetry is a dict of scalars and fixed-size vectors and
        contains "performance", for which higher is better. A performance that is computed from tapped values (returns
        of episodes whose observations, actions or dynamics are tapped, or a loss on tapped tokens) falls with the
        disturbance even if the learner has not become worse. Measure it separately, with `taps.closed` wherever a value
        is tapped. A value that is passed through `taps(site, value)` can be disturbed by the perturbations of that
        site.
      name: the learner's name in reports.
      step_unit: the amount of training in one step, in words, e.g. "2048 env steps".
      performance_name: what `performance` measures, in words.
      samples_per_step: the number of environment steps or tokens in one step, for rates; 0 if there is none.
      sample: the name of such samples, in the plural.
      channels: the descriptions of channels, e.g. {"layer_norm": Channel.vector("layer", ("a", "b"))}. A channel
        without a description is measured at every step, and is a scalar or has dimensions without labels. Dimensions
        with the same name have the same labels.
      data: arrays that all lanes read, e.g. a corpus, as a pytree. A step finds them in `taps.data`. Each device stores
        them once, and they are not constants of the program.
      init_reads_data: whether `init` is `init(key, data) -> state` instead, e.g. to read pretrained parameters.
      provenance: texts that identify what a run depends on besides its spec, by name, e.g. a corpus's hash. They are
        recorded, and a run continues only with the same ones. Programs do not depend on them.
      remarks: `remarks(telemetry) -> sentences` on what a user should know about the beginning of the undisturbed
        lanes, from their channels `[lane, step, ...]`, float arrays by name. The runner prints them after the first
        chunk, and reports include them.
      save: `save(folder, state, data)` writes a lane's trained parameters in a format of other programs, e.g. Hugging
        Face's, from a state of NumPy arrays and the learner's data; None if it cannot.
      absent: why a site is not tapped, a context entry not passed, or a label without parameters, by its name; the text
        is the end of a sentence.
      numbers: for some sites, numbers that their taps pass as traced context and that are known before a run, by name.
        They bound the magnitudes that mean something there.
      changed: `changed(change) -> Learner` returns this learner with other settings, for remedies that change them.
        `change(settings)` returns the new values by name. It raises ValueError, with one sentence, for a setting that
        does not exist or a value that is not allowed. None if the settings cannot be changed.
      partition: `partition(path, shape)` returns how several devices that share a lane split an array of the state or
        of `data`, by the path of its leaf ("params/wte/embedding"): "model" or None for each axis, or () for a whole
        array. An axis whose length does not divide evenly is padded on the devices. None if lanes cannot be shared.
      indivisible: the numbers of units that can only be assigned to devices as a whole, by name, e.g.
        {"attention heads": 12}.
      shapes: the shapes of `data`.
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
        for name, dim_labels in (dim for channel in self.channels.values() for dim in channel.dims):
            if labels.setdefault(name, dim_labels) != dim_labels:
                raise ValueError(f"the dimension '{name}' has other labels in one channel than in another")
        leaves, structure = jax.tree.flatten(self.data)
        shapes = tuple(jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in leaves)
        object.__setattr__(self, "shapes", Shapes(structure, shapes))

    def channel(self, name: str) -> Channel:
        """Returns the description of a channel, or the defaults of `Channel` if there is none."""
        return self.channels.get(name, Channel())

    @property
    def cadence(self) -> Cadence:
        """The steps at which the performance is measured."""
        performance = self.channel(PERFORMANCE)
        return Cadence(performance.every, performance.sparse)

    def begin(self, key: jax.Array, data: Any) -> State:
        """Returns the state before the first step, from a random key and the learner's data.

        Raises ValueError, as `jaxaudit.core.contract` describes, if it is not a tree of arrays.
        """
        return contract.with_structure_of(self._initial_state(key, data), self.state_shapes, "init")

    def advance(self, state: State, key: jax.Array, taps: Taps) -> tuple[State, Telemetry]:
        """Returns the state after a step, in the structure of the state before it, and the step's telemetry in float32.

        Raises ValueError, as `jaxaudit.core.contract` describes, if structures, shapes or dtypes change.
        """
        with contract.explain_trace_errors(self.step, "step"):
            result = self.step(contract.unwrap_functions(state), key, taps)
        after, telemetry = contract.check_step(result, state)
        return after, {name: jnp.asarray(value, jnp.float32) for name, value in telemetry.items()}

    def _initial_state(self, key: jax.Array, data: Any) -> State:
        with contract.explain_trace_errors(self.init, "init"):
            state = contract.wrap_functions(self.init(key, data) if self.init_reads_data else self.init(key))
        contract.check_leaves(state)
        return state

    @property
    def state_shapes(self) -> State:
        """The shapes and dtypes of one lane's state before the first step."""
        return _state_shapes(self.without_data)

    @property
    def without_data(self) -> Learner:
        """The learner with the shapes of its data in place of the data; programs depend on nothing else."""
        return replace(self, data=self.shapes.tree, changed=None)


@functools.lru_cache(maxsize=64)
def _state_shapes(learner: Learner) -> State:
    # Cached, because an `init` that trains takes long to trace.
    return jax.eval_shape(learner._initial_state, jax.random.key(0), learner.shapes.tree)
