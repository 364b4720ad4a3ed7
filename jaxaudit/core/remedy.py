"""What a remedy is: a change to how a learner trains that is meant to make its training more stable."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flax import struct

from jaxaudit.core.perturbation import nothing
from jaxaudit.runtime import registry

HOOKS = {
    "penalty": "the gradient of a minibatch, before it is disturbed: what is added to the objective acts here",
    "guard": "a `ProposedUpdate`, the update to be made, with the gradient as it is disturbed, before clipping by norm",
    "betas": "the decay rates (beta1, beta2) of Adam's moments, for one update",
    "direction": "the optimizer's direction for one update, before it is multiplied by the learning rate",
    "trained": "parameters and optimizer state, `Trained`, after the updates of a step",
}
"""Places where remedies act and perturbations do not. A remedy may act at any site, too."""


@struct.dataclass
class ProposedUpdate:
    """An update of an optimizer that is about to be made, as remedies at the hook "guard" may change it.

    Attributes:
      gradient: tree of the parameters.
      moments: the state of the optax transformation, before the update.
      keep: float32 scalar; 0 leaves parameters, moments, their count and weight decay as they are, 1 updates them.
      scale: float32 scalar that multiplies the update.
    """

    gradient: Any
    moments: Any
    keep: Any
    scale: Any


@struct.dataclass
class Trained:
    """What is trained: parameters, and the state of the optimizer that trains them.

    Attributes:
      params: tree of the parameters.
      moments: the optimizer's state, of these parameters or of some of them.
    """

    params: Any
    moments: Any


Settings = Any


@dataclass(frozen=True)
class RemedyKind:
    """A kind of remedy; called with a strength, it makes a `Remedy`.

    It transforms a value at a site or hook of the learner (`apply`), changes the learner's settings before it is built
    (`settings`), or both. A remedy at a site acts before perturbations of that site do.

    Attributes:
      name: e.g. "l2_init".
      strength: the standard one.
      site: of the value that it transforms: a site of the learner, or one of `HOOKS`; "" where it changes settings
        alone.
      apply: `apply(value, strength, state, **context) -> (value, state)`; pure, structure, shapes and dtypes kept.
        `strength` is a float32 scalar, and data: other strengths compile nothing. Give a module-level function:
        programs are cached by it.
      neutral: the strength at which the value is left as it is, bit for bit; None where there is none: the learner
        without the remedy is another program then.
      limits: (lowest, highest) strength that means something.
      whole: whether only whole strengths mean something.
      needs: names of context that `apply` takes: what the learner gives at the site (of the hooks, see
        `jaxaudit.Optimizer`), and "minibatch" (the number of the minibatch in this step, int32), "progress" (the share
        of the run that is over after this step; 1 outside of runs) or "key" (a random key).
      init: `init(value) -> state`, the pytree that `apply` is given first, and that the lane carries from then on; only
        shapes and dtypes of `value` can be read.
      settings: `settings(settings, strength) -> changes`, what it changes of the settings of the learner, by name; the
        strength is a Python float.
    """

    name: str
    strength: float
    site: str = ""
    apply: Callable[..., tuple[Any, Any]] | None = None
    neutral: float | None = None
    limits: tuple[float, float] = (float("-inf"), float("inf"))
    whole: bool = False
    needs: tuple[str, ...] = ()
    init: Callable[..., Any] = nothing
    settings: Callable[[Settings, float], Mapping[str, Any]] | None = None

    def __post_init__(self):
        if self.apply is None and self.settings is None:
            raise ValueError(f"remedy '{self.name}' changes nothing: it has neither an `apply` nor `settings`")
        if bool(self.site) != (self.apply is not None):
            raise ValueError(f"remedy '{self.name}' has an `apply` and a site, or neither")
        if self.apply is not None and self.neutral is None:
            raise ValueError(f"remedy '{self.name}' transforms a value, and so has a neutral strength")
        self()

    @property
    def keeps_state(self) -> bool:
        """Whether remedies of this kind have a state that lanes carry."""
        return self.init is not nothing

    def __call__(self, strength: float | None = None) -> Remedy:
        """A remedy of this kind, of the standard strength unless given. Raises ValueError for one out of its range."""
        return Remedy(self, self.strength if strength is None else strength)


@dataclass(frozen=True)
class Remedy:
    """A kind of remedy with its strength, a number."""

    kind: RemedyKind
    strength: float

    def __post_init__(self):
        strength = self.strength
        scalar = getattr(strength, "item", None)  # of NumPy or JAX
        number = scalar() if callable(scalar) else strength
        if isinstance(number, bool) or not isinstance(number, int | float) or number != number:
            raise ValueError(f"the strength of '{self.name}' must be a number, not {strength!r}")
        low, high = self.kind.limits
        if not low <= number <= high and number != self.kind.neutral:
            raise ValueError(f"strength {number!r} of '{self.name}' is outside its range {low:g} to {high:g}")
        if self.kind.whole and not float(number).is_integer():
            raise ValueError(f"strength {number!r} of '{self.name}' must be a whole number")
        object.__setattr__(self, "strength", float(number))

    @property
    def name(self) -> str:
        """The name of the kind of remedy, which specs and telemetry use."""
        return self.kind.name


def remedy(
    site: str,
    *,
    strength: float,
    neutral: float,
    init: Callable[..., Any] | None = None,
    **rest: Any,
) -> Callable[[Callable[..., Any]], RemedyKind]:
    """Decorator: makes `f(value, strength, **context) -> value` a registered kind of remedy named like `f`.

    With an `init`, which makes its state, it is `f(value, strength, state, **context) -> (value, state)`. The other
    keywords are fields of `RemedyKind`.
    """

    def decorate(function: Callable[..., Any]) -> RemedyKind:
        apply = _stateless(function) if init is None else function
        kept = {} if init is None else {"init": init}
        fields = {"strength": strength, "site": site, "apply": apply, "neutral": neutral} | kept | rest
        return _registered(function, **fields)

    return decorate


def setting(*, strength: float = 1.0, **rest: Any) -> Callable[[Callable[..., Any]], RemedyKind]:
    """Decorator: makes `f(settings, strength) -> changes` a registered kind of remedy that changes settings alone."""
    return lambda function: _registered(function, strength=strength, settings=function, **rest)


def _stateless(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def apply(value, strength, state, **context):
        return function(value, strength, **context), state

    return apply


def _registered(function: Callable[..., Any], **fields: Any) -> RemedyKind:
    name = function.__name__
    return registry.remedies.register(name, registry.copy_function_metadata(function, RemedyKind(name=name, **fields)))
