"""`Perturbation` and its kinds, with the decorators that register them, and how perturbations are swept, timed and
chained into conditions.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxaudit.runtime import registry

DIMENSIONS = ("optimization", "data", "parametric", "signal")
"""The four stability dimensions (Table S1)."""

INTERVENTION = "intervention"
"""The dimension of interventions, which act while a monitor's alarm is on."""


@dataclass(frozen=True)
class Sweep:
    """Several magnitudes of one perturbation; each is a separate condition."""

    values: tuple[float, ...]


def sweep(*values: float) -> Sweep:
    """Returns several magnitudes for one perturbation: `lr_spike(sweep(3., 10., 30.))` is three conditions."""
    if not values:
        raise ValueError("sweep() needs at least one magnitude")
    return Sweep(tuple(number_of("a magnitude", value) for value in values))


@dataclass(frozen=True)
class Window:
    """The steps of a run in which a perturbation acts.

    Attributes:
      onset: the first step: a float in [0, 1) is a fraction of the run, an int is a step.
      duration: the number of steps for which it is open, "once" (one step) or "end" (until the run's last step).
      period: the number of steps from one opening to the next, until the run's end; None for a single opening.
    """

    onset: float | int = 0.3
    duration: int | str = 10
    period: int | None = None

    def __post_init__(self):
        onset, duration, period = self.onset, self.duration, self.period
        if isinstance(onset, bool) or not isinstance(onset, int | float):
            raise ValueError(f"onset must be a fraction of the run (0.3) or a step (120), not {onset!r}")
        if isinstance(onset, float) and not 0 <= onset < 1:
            raise ValueError(f"onset {onset!r} as a fraction must lie in [0, 1); a step is written without a point")
        if isinstance(onset, int) and onset < 0:
            raise ValueError(f"onset {onset} is negative; the first step is 0")
        if isinstance(duration, str):
            if duration not in ("once", "end"):
                raise ValueError(f"duration must be a number of steps, 'once' or 'end', not {duration!r}")
        elif isinstance(duration, bool) or not isinstance(duration, int) or duration < 1:
            raise ValueError(f"duration must be at least 1 step, 'once' or 'end', not {duration!r}")
        if period is not None:
            if isinstance(period, bool) or not isinstance(period, int) or period < 1:
                raise ValueError(f"period must be at least 1 step, not {period!r}")
            if duration == "end" or period < self.length:
                raise ValueError(f"period {period} is shorter than the duration {duration!r} it should repeat")

    @property
    def length(self) -> int:
        """The number of steps that one opening lasts; the duration must not be "end"."""
        return 1 if self.duration == "once" else int(self.duration)

    def resolve(self, steps: int) -> tuple[int, int, int, int]:
        """Returns (start, stop, period, length), in steps, for a run of `steps` steps.

        Raises ValueError if the window is not within the run.
        """
        start = round(self.onset * steps) if isinstance(self.onset, float) else self.onset
        if start >= steps:
            raise ValueError(f"onset {self.onset} is outside the run of {steps} steps (0 to {steps - 1})")
        if self.duration == "end":
            return start, steps, steps, steps
        if start + self.length > steps:
            raise ValueError(f"the window from step {start} for {self.length} steps ends past the run's {steps} steps")
        if self.period is None:
            return start, start + self.length, steps, self.length
        return start, steps, self.period, self.length


def window(onset: float | int = 0.3, duration: int | str = 10, period: int | None = None) -> Window:
    """Returns the steps in which a perturbation acts, from an onset, a duration and a period; see `Window`."""
    return Window(onset, duration, period)


def nothing(value: Any) -> tuple[()]:
    """Returns the state of a stateless kind, an empty tuple."""
    return ()


@dataclass(frozen=True)
class Kind:
    """A kind of perturbation: a pure transformation at one site and its standard magnitude and window.

    Calling it returns a `Perturbation`.

    Attributes:
      name: the name of the kind, e.g. "lr_spike", which identifies its random stream.
      dimension: one of the four stability dimensions.
      site: the site where it acts.
      apply: `apply(key, value, magnitude, state, **context) -> (value, state)`, a pure function that preserves
        structure, shapes and dtypes. Pass a module-level function, since programs are cached by it.
      magnitude: the standard magnitude, a number or a `Sweep` (from Table S4 if the table contains one).
      neutral: the magnitude that disturbs nothing; a lane with it is not changed at all.
      when: the standard window.
      target: the standard target; see `Perturbation`.
      needs: the names of context that `apply` takes: context of the learner's tap, "selected" (the paths in the target,
        bool `[paths]`; see `jaxaudit.runtime.paths`), "elapsed" (the share of the window that has passed, in (0, 1]) or
        "alarm" (bool).
      limits: the lowest and highest magnitude that are allowed.
      reach: `reach(numbers) -> (lowest, highest)` returns additional limits that depend on the learner, from the
        numbers in the tap's context that are known before the run, by name.
      whole: whether only integer magnitudes are allowed.
      init: `init(value) -> state` returns the state when the window opens, a pytree that the lane carries; it can read
        only shapes and dtypes of `value`.
      sized: whether `init` is `init(value, max_magnitude)`, with the largest magnitude in the grid. A larger magnitude
        then needs another program.
    """

    name: str
    dimension: str
    site: str
    apply: Callable[..., tuple[Any, Any]]
    magnitude: float | Sweep = 1.0
    neutral: float = 0.0
    when: Window = Window()
    target: str | None = None
    needs: tuple[str, ...] = ()
    limits: tuple[float, float] = (float("-inf"), float("inf"))
    reach: Callable[[Mapping[str, float]], tuple[float, float]] | None = None
    whole: bool = False
    init: Callable[..., Any] = nothing
    sized: bool = False

    def __post_init__(self):
        if self.dimension not in (*DIMENSIONS, INTERVENTION):
            raise ValueError(f"dimension {self.dimension!r} of '{self.name}' is none of {', '.join(DIMENSIONS)}")
        self()  # checks the standard magnitude

    @property
    def keeps_state(self) -> bool:
        """Whether perturbations of this kind are stateful; lanes carry their state."""
        return self.init is not nothing

    def __call__(
        self,
        magnitude: float | Sweep | None = None,
        *,
        onset: float | int | None = None,
        duration: int | str | None = None,
        period: int | None = None,
        target: str | None = None,
    ) -> Perturbation:
        """Returns a perturbation of this kind; arguments that are None are the standard ones.

        Raises ValueError if an argument is out of range.
        """
        return Perturbation(
            self,
            self.magnitude if magnitude is None else magnitude,
            Window(
                self.when.onset if onset is None else onset,
                self.when.duration if duration is None else duration,
                period,
            ),
            self.target if target is None else target,
        )


@dataclass(frozen=True)
class Perturbation:
    """A kind of perturbation with its magnitude, window and target.

    Attributes:
      kind: the kind of perturbation.
      magnitude: a number, or a `Sweep` of several.
      when: the steps in which it acts.
      target: a path pattern that limits it to parts of the value's tree, e.g. "critic"; None for the whole tree.
    """

    kind: Kind
    magnitude: float | Sweep
    when: Window = Window()
    target: str | None = None

    def __post_init__(self):
        low, high = self.kind.limits
        for value in self.magnitudes:
            number = number_of(f"magnitude of '{self.name}'", value)
            if not low <= number <= high:
                raise ValueError(f"magnitude {value!r} of '{self.name}' is outside its range {low:g} to {high:g}")
            if self.kind.whole and not number.is_integer():
                raise ValueError(f"magnitude {value!r} of '{self.name}' must be a whole number")

    @property
    def name(self) -> str:
        """The name of the kind, which specs, tables and telemetry use."""
        return self.kind.name

    @property
    def dimension(self) -> str:
        return self.kind.dimension

    @property
    def site(self) -> str:
        return self.kind.site

    @property
    def neutral(self) -> float:
        return float(self.kind.neutral)

    @property
    def magnitudes(self) -> tuple[float, ...]:
        """The magnitudes of the sweep, a tuple of one or more."""
        return self.magnitude.values if isinstance(self.magnitude, Sweep) else (self.magnitude,)

    @property
    def parts(self) -> tuple[Perturbation, ...]:
        """A tuple of the perturbation itself, as in a `Chain` of one."""
        return (self,)

    def apply(self, value: Any, key: jax.Array | None = None, **context: Any) -> Any:
        """Returns the value disturbed once, at the first magnitude, as when a window opens; the target is ignored.

        Args:
          value: the value to disturb, a pytree of arrays.
          key: the random key, `jax.random.key(0)` by default.
          **context: the context that the kind `needs`, by name.
        """
        value = jax.tree.map(jnp.asarray, value)
        magnitude = jnp.float32(self.magnitudes[0])
        state = self.kind.init(value, self.magnitudes[0]) if self.kind.sized else self.kind.init(value)
        key = jax.random.key(0) if key is None else key
        return self.kind.apply(key, value, magnitude, state, **context)[0]


@dataclass(frozen=True)
class Chain:
    """Perturbations that act together; those at one site act in their order."""

    parts: tuple[Perturbation, ...]

    @property
    def name(self) -> str:
        """The names of the parts, joined by "+", which specs, tables and telemetry use."""
        return "+".join(part.name for part in self.parts)

    @property
    def dimension(self) -> str:
        """The dimension of the parts, ignoring interventions, or "mixed" if they have several."""
        dimensions = {part.dimension for part in self.parts} - {INTERVENTION} or {INTERVENTION}
        return dimensions.pop() if len(dimensions) == 1 else "mixed"


def chain(*perturbations: Perturbation | Chain) -> Chain:
    """Returns a perturbation made of several that act together: `chain(lr_spike(10.), weight_noise(0.01))`."""
    if not perturbations:
        raise ValueError("chain() needs at least one perturbation")
    return Chain(tuple(part for p in perturbations for part in p.parts))


def retime(perturbation: Perturbation | Chain, when: Window) -> Perturbation | Chain:
    """Returns the same perturbation with another window."""
    if isinstance(perturbation, Chain):
        return Chain(tuple(replace(part, when=when) for part in perturbation.parts))
    return replace(perturbation, when=when)


@dataclass(frozen=True)
class Condition:
    """One column of the grid: perturbations at single magnitudes; the control has none.

    Attributes:
      parts: the perturbations that act, in order.
      onset: the step at which the condition's lanes fork from the baseline.
      name, dimension: the name and dimension of the perturbation or chain.
      swept: the index of the part whose magnitude is the condition's: the first part with a sweep, or 0.
    """

    parts: tuple[Perturbation, ...]
    onset: int
    name: str
    dimension: str
    swept: int = 0

    @property
    def magnitude(self) -> float:
        """The magnitude of the part with index `swept`; NaN for the control."""
        return float(self.parts[self.swept].magnitudes[0]) if self.parts else math.nan

    @property
    def neutral(self) -> float:
        """The neutral magnitude of the part with index `swept`; NaN for the control."""
        return float(self.parts[self.swept].neutral) if self.parts else math.nan


def check_perturbations(perturbations: Any) -> None:
    """Raises ValueError for a single perturbation or chain in place of a sequence of them, or for a kind of them."""
    if isinstance(perturbations, Perturbation | Chain | Kind):
        raise ValueError(
            f"perturbations must be a list, such as [{perturbations.name}(...)], not a single perturbation"
        )
    for perturbation in perturbations:
        if isinstance(perturbation, Kind):
            raise ValueError(f"'{perturbation.name}' is a kind of perturbation; call it: {perturbation.name}()")


def conditions(perturbations: Sequence[Perturbation | Chain], steps: int) -> list[Condition]:
    """Returns the conditions of a grid: for each perturbation or chain, all combinations of its swept magnitudes.

    The onset of a chain is the earliest onset of its parts. Raises ValueError if a window is not within the run of
    `steps` steps.
    """
    combinations = []
    for perturbation in perturbations:
        onset = min(part.when.resolve(steps)[0] for part in perturbation.parts)
        swept = next((i for i, part in enumerate(perturbation.parts) if len(part.magnitudes) > 1), 0)
        for values in itertools.product(*(part.magnitudes for part in perturbation.parts)):
            parts = tuple(
                replace(part, magnitude=float(value)) for part, value in zip(perturbation.parts, values, strict=True)
            )
            combinations.append(Condition(parts, onset, perturbation.name, perturbation.dimension, swept))
    return combinations


def control(onset: int) -> Condition:
    """Returns the undisturbed condition of the lanes that fork at `onset`."""
    return Condition((), onset, "control", "control")


def number_of(name: str, value: Any) -> float:
    """Returns a number, or a scalar of NumPy or JAX, as a float; raises ValueError for another value or NaN."""
    item = getattr(value, "item", None)
    number = item() if callable(item) else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise ValueError(f"{name} must be a number, not {value!r}")
    if number != number:
        raise ValueError(f"{name} must be a number, not NaN")
    return float(number)


def perturbation(
    dimension: str,
    site: str,
    *,
    magnitude: float,
    neutral: float,
    duration: int | str,
    onset: float | int = 0.3,
    init: Callable[..., Any] | None = None,
    **rest: Any,
) -> Callable[[Callable[..., Any]], Kind]:
    """Decorator that makes `f(key, value, magnitude, **context) -> value` a kind of perturbation with the name of `f`.

    The keywords are the kind's standard magnitude and window, its neutral magnitude, and the remaining fields of
    `Kind`: target, needs, limits, reach, whole and sized. With `init`, which creates the state, the function is
    `f(key, value, magnitude, state, **context) -> (value, state)`.
    """

    def decorate(function: Callable[..., Any]) -> Kind:
        return _register_kind(
            registry.perturbations,
            function,
            stateless(function) if init is None else function,
            dimension=dimension,
            site=site,
            magnitude=magnitude,
            neutral=neutral,
            when=Window(onset, duration),
            init=init or nothing,
            **rest,
        )

    return decorate


def intervention(
    site: str, *, magnitude: float, neutral: float, init: Callable[..., Any] | None = None, **rest: Any
) -> Callable[[Callable[..., Any]], Kind]:
    """Decorator that makes `f(key, value, magnitude) -> value` an intervention with the name of `f`.

    Its window is open from the onset to the end, but it acts only while the alarm is on. With `init`, which creates the
    state, the function is `f(key, value, magnitude, state, *, alarm) -> (value, state)`, and must read the alarm
    itself.
    """

    def decorate(function: Callable[..., Any]) -> Kind:
        return _register_kind(
            registry.interventions,
            function,
            _on_alarm(function) if init is None else function,
            dimension=INTERVENTION,
            site=site,
            magnitude=magnitude,
            neutral=neutral,
            when=Window(0.3, "end"),
            needs=("alarm",),
            init=init or nothing,
            **rest,
        )

    return decorate


def stateless(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function with `state` as an additional last positional argument, which it returns beside the result."""

    @functools.wraps(function)
    def apply(*arguments: Any, **context: Any) -> tuple[Any, Any]:
        *inner, state = arguments
        return function(*inner, **context), state

    return apply


def _on_alarm(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def apply(key, value, magnitude, state, *, alarm):
        changed = function(key, value, magnitude)
        return jax.tree.map(lambda new, old: jnp.where(alarm, new, old), changed, value), state

    return apply


def _register_kind(
    kinds: registry.Registry, function: Callable[..., Any], apply: Callable[..., Any], **fields: Any
) -> Kind:
    name = function.__name__
    return kinds.register(name, registry.copy_function_metadata(function, Kind(name=name, apply=apply, **fields)))
