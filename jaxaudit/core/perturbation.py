"""What a perturbation is: a kind and its data; how it is varied (`sweep`), timed (`window`), aimed and chained."""

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
"""In the place of a dimension: what a monitor's alarm sets off."""


@dataclass(frozen=True)
class Sweep:
    """Several magnitudes of one perturbation, each a condition of its own."""

    values: tuple[float, ...]


def sweep(*values: float) -> Sweep:
    """Returns several magnitudes for one perturbation: `lr_spike(sweep(3., 10., 30.))` is three conditions."""
    if not values:
        raise ValueError("sweep() needs at least one magnitude")
    return Sweep(tuple(_number("a magnitude", value) for value in values))


@dataclass(frozen=True)
class Window:
    """The steps of a run in which a perturbation acts.

    Attributes:
      onset: the first step: a float in [0, 1) is a fraction of the run, an int is a step.
      duration: steps it stays open; "once" (one step); or "end" (until the run's last step).
      period: None, or steps between one opening and the next, until the run's end.
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

        Raises ValueError where the window leaves the run.
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
    """The state of a kind that keeps none."""
    return ()


@dataclass(frozen=True)
class Kind:
    """A kind of perturbation: a pure transform at one site, and its standard; called, it makes a `Perturbation`.

    Attributes:
      name: e.g. "lr_spike"; identifies its random stream.
      dimension: one of the four stability dimensions.
      site: where it acts.
      apply: `apply(key, value, magnitude, state, **context) -> (value, state)`; pure, structure, shapes and dtypes
        kept. Give a module-level function: programs are cached by it.
      magnitude: the standard one, a number or a `Sweep` (Table S4's where the table gives one).
      neutral: the magnitude that disturbs nothing; a lane at it is left untouched.
      when: the standard window.
      target: the standard one; see `Perturbation`.
      needs: context names `apply` takes from the tap: the learner's, "selected" (bool `[paths]`, the target; see
        `jaxaudit.runtime.paths`), "elapsed" (the share of the window that has passed, in (0, 1]) or "alarm" (bool).
      limits: (lowest, highest) magnitude that means something.
      reach: `reach(numbers) -> (lowest, highest)`, further limits that depend on what the tap gives: the numbers of its
        context by name that are known before the run.
      whole: whether only whole magnitudes mean something.
      init: `init(value) -> state`, the pytree that `apply` is given when the window opens, and that the lane carries
        from then on; only shapes and dtypes of `value` can be read.
      sized: whether it is `init(value, most)`, with the largest magnitude in the grid; a larger one then takes
        another program.
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
        self()  # the standard is held to the limits, too

    @property
    def keeps_state(self) -> bool:
        """Whether perturbations of this kind have a state that lanes carry."""
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
        """A perturbation of this kind; what is not given is the standard's. Raises ValueError on a bad value."""
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
      kind: what is done to a value.
      magnitude: a number, or a `Sweep` of several.
      when: the `Window`, the steps in which it acts.
      target: a path pattern that limits it to parts of the value's tree, e.g. "critic"; None for no limit.
    """

    kind: Kind
    magnitude: float | Sweep
    when: Window = Window()
    target: str | None = None

    def __post_init__(self):
        low, high = self.kind.limits
        for value in self.magnitudes:
            number = _number(f"magnitude of '{self.name}'", value)
            if not low <= number <= high:
                raise ValueError(f"magnitude {value!r} of '{self.name}' is outside its range {low:g} to {high:g}")
            if self.kind.whole and not number.is_integer():
                raise ValueError(f"magnitude {value!r} of '{self.name}' must be a whole number")

    @property
    def name(self) -> str:
        """The name that specs, tables and telemetry use."""
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
        """The perturbation itself, in a tuple, so that it can be used as a chain of one."""
        return (self,)

    def apply(self, value: Any, key: jax.Array | None = None, **context: Any) -> Any:
        """Returns the value disturbed once, at the first magnitude, as when a window opens; the target does not matter.

        Args:
          value: what is disturbed, a pytree of arrays.
          key: random key, `jax.random.key(0)` by default.
          **context: what the kind `needs`, by name.
        """
        value = jax.tree.map(jnp.asarray, value)
        magnitude = jnp.float32(self.magnitudes[0])
        sizes = (self.magnitudes[0],) if self.kind.sized else ()
        state = self.kind.init(value, *sizes)
        drawn = jax.random.key(0) if key is None else key
        return self.kind.apply(drawn, value, magnitude, state, **context)[0]


@dataclass(frozen=True)
class Chain:
    """Perturbations that act together, in order where they act at one site."""

    parts: tuple[Perturbation, ...]

    @property
    def name(self) -> str:
        """The name that specs, tables and telemetry use."""
        return "+".join(part.name for part in self.parts)

    @property
    def dimension(self) -> str:
        """The parts' dimension, interventions apart, or "mixed"."""
        found = {part.dimension for part in self.parts} - {INTERVENTION} or {INTERVENTION}
        return found.pop() if len(found) == 1 else "mixed"


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
      parts: what acts, in order.
      onset: step.
      name, dimension: of the perturbation or chain.
      swept: which of the parts stands for the condition: the first that was swept, or the first.
    """

    parts: tuple[Perturbation, ...]
    onset: int
    name: str
    dimension: str
    swept: int = 0

    @property
    def magnitude(self) -> float:
        """The magnitude of the part that stands for the condition; NaN for the control."""
        return float(self.parts[self.swept].magnitudes[0]) if self.parts else math.nan

    @property
    def neutral(self) -> float:
        """The neutral magnitude of the part that stands for the condition; NaN for the control."""
        return float(self.parts[self.swept].neutral) if self.parts else math.nan


def conditions(perturbations: Sequence[Perturbation | Chain], steps: int) -> list[Condition]:
    """Returns the conditions of a grid: one for every combination of the magnitudes in a perturbation's or chain's
    sweeps.

    A chain's onset is the earliest of its parts'. Raises ValueError where a window leaves the run of `steps` steps.
    """
    unrolled = []
    for perturbation in perturbations:
        onset = min(part.when.resolve(steps)[0] for part in perturbation.parts)
        swept = next((i for i, part in enumerate(perturbation.parts) if len(part.magnitudes) > 1), 0)
        for values in itertools.product(*(part.magnitudes for part in perturbation.parts)):
            parts = tuple(
                replace(part, magnitude=float(value)) for part, value in zip(perturbation.parts, values, strict=True)
            )
            unrolled.append(Condition(parts, onset, perturbation.name, perturbation.dimension, swept))
    return unrolled


def control(onset: int) -> Condition:
    """Returns the undisturbed condition of the lanes that fork at `onset`."""
    return Condition((), onset, "control", "control")


def _number(what: str, value: Any) -> float:
    scalar = getattr(value, "item", None)  # of NumPy or JAX
    number = scalar() if callable(scalar) else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise ValueError(f"{what} must be a number, not {value!r}")
    if number != number:
        raise ValueError(f"{what} must be a number, not NaN")
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
    """Decorator: makes `f(key, value, magnitude, **context) -> value` a kind of perturbation named like `f`.

    The keywords are the kind's standard magnitude and window, its neutral magnitude, and the `rest` of its fields:
    target, needs, limits, reach, whole, sized. With an `init`, which makes
    its state, it is `f(key, value, magnitude, state, **context) -> (value, state)`.
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
            **rest | ({} if init is None else {"init": init}),
        )

    return decorate


def intervention(
    site: str, *, magnitude: float, neutral: float, init: Callable[..., Any] | None = None, **rest: Any
) -> Callable[[Callable[..., Any]], Kind]:
    """Decorator: makes `f(key, value, magnitude) -> value` an intervention named like `f`.

    Its window is open from the onset to the end, and it changes nothing there but while the alarm is on. With an
    `init`, which makes its state, it is `f(key, value, magnitude, state, *, alarm) -> (value, state)`, and sees to that
    itself.
    """

    def decorate(function: Callable[..., Any]) -> Kind:
        return _register_kind(
            registry.interventions,
            function,
            on_alarm(function) if init is None else function,
            dimension=INTERVENTION,
            site=site,
            magnitude=magnitude,
            neutral=neutral,
            when=Window(0.3, "end"),
            needs=("alarm",),
            **rest | ({} if init is None else {"init": init}),
        )

    return decorate


def stateless(function: Callable[..., Any]) -> Callable[..., Any]:
    """`f(key, value, magnitude, **context) -> value` in the form of all kinds, which carry a state along."""

    @functools.wraps(function)
    def apply(key, value, magnitude, state, **context):
        return function(key, value, magnitude, **context), state

    return apply


def on_alarm(function: Callable[..., Any]) -> Callable[..., Any]:
    """`f(key, value, magnitude) -> value` in the form of all kinds, which changes nothing without an alarm."""

    @functools.wraps(function)
    def apply(key, value, magnitude, state, *, alarm):
        changed = function(key, value, magnitude)
        return jax.tree.map(lambda new, old: jnp.where(alarm, new, old), changed, value), state

    return apply


def _register_kind(known: registry.Registry, function: Callable[..., Any], apply: Callable[..., Any], **fields) -> Kind:
    name = function.__name__
    return known.register(name, registry.named_like(function, Kind(name=name, apply=apply, **fields)))
