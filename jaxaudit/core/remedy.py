"""`Remedy` and its kinds: changes to how a learner trains that are meant to make its training more stable."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flax import struct

from jaxaudit.core.perturbation import nothing, number_of, stateless
from jaxaudit.runtime import registry

HOOKS = {
    "penalty": "the gradient of a minibatch, before perturbations; terms that are added to the objective act here",
    "guard": "a `ProposedUpdate`, the next update with its gradient after perturbations and before clipping by norm",
    "betas": "the decay rates (beta1, beta2) of Adam's moments, for one update",
    "direction": "the optimizer's direction for one update, before it is multiplied by the learning rate",
    "trained": "the parameters and optimizer state, `Trained`, after the updates of a step",
}
"""The places where only remedies act. A remedy may also act at any site, as perturbations do."""


@struct.dataclass
class ProposedUpdate:
    """An optimizer's next update, which remedies at the hook "guard" can change.

    Attributes:
      gradient: the gradient, a tree of the parameters.
      moments: the state of the optax transformation before the update.
      keep: 1 makes the update, and 0 skips it (parameters, moments and their count stay), a float32 scalar.
      scale: the factor of the update, a float32 scalar.
    """

    gradient: Any
    moments: Any
    keep: Any
    scale: Any


@struct.dataclass
class Trained:
    """The trained parameters and the state of their optimizer.

    Attributes:
      params: the tree of the parameters.
      moments: the state of the optimizer of all or some of these parameters.
    """

    params: Any
    moments: Any


Settings = Any


@dataclass(frozen=True)
class RemedyKind:
    """A kind of remedy; calling it with a strength returns a `Remedy`.

    It transforms a value at a site or hook of the learner (`apply`), changes the learner's settings before it is built
    (`settings`), or both. A remedy at a site acts before the perturbations of that site.

    Attributes:
      name: the name of the kind, e.g. "l2_init".
      strength: the standard strength.
      site: the site of the learner or the hook (see `HOOKS`) of the transformed value; "" for a remedy that only
        changes settings.
      apply: `apply(value, strength, state, **context) -> (value, state)`, a pure function that preserves structure,
        shapes and dtypes. `strength` is a float32 scalar and data, so that another strength needs no compilation. Pass
        a module-level function, since programs are cached by it.
      neutral: the strength at which the value stays the same bit for bit; None if there is none, in which case the
        learner without the remedy is another program.
      limits: the lowest and highest strength that are allowed.
      whole: whether only integer strengths are allowed.
      needs: the names of context that `apply` takes: context of the learner at the site (see `jaxaudit.Optimizer` for
        the hooks), "minibatch" (the index of the minibatch in this step, int32), "progress" (the share of the run that
        has passed after this step; 1 outside of runs) or "key" (a random key).
      init: `init(value) -> state` returns the first state, a pytree that the lane carries; it can read only shapes and
        dtypes of `value`.
      settings: `settings(settings, strength) -> changes` returns the changed settings of the learner by name; the
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
            raise ValueError(f"remedy '{self.name}' must have both an `apply` and a site, or neither")
        if self.apply is not None and self.neutral is None:
            raise ValueError(f"remedy '{self.name}' transforms a value, and so must have a neutral strength")
        self()  # checks the standard strength

    @property
    def keeps_state(self) -> bool:
        """Whether remedies of this kind are stateful; lanes carry their state."""
        return self.init is not nothing

    def __call__(self, strength: float | None = None) -> Remedy:
        """Returns a remedy of this kind, by default with the standard strength. Raises ValueError if out of range."""
        return Remedy(self, self.strength if strength is None else strength)


@dataclass(frozen=True)
class Remedy:
    """A kind of remedy together with its strength, a number."""

    kind: RemedyKind
    strength: float

    def __post_init__(self):
        number = number_of(f"the strength of '{self.name}'", self.strength)
        low, high = self.kind.limits
        if not low <= number <= high and number != self.kind.neutral:
            raise ValueError(f"strength {self.strength!r} of '{self.name}' is outside its range {low:g} to {high:g}")
        if self.kind.whole and not number.is_integer():
            raise ValueError(f"strength {self.strength!r} of '{self.name}' must be a whole number")
        object.__setattr__(self, "strength", number)

    @property
    def name(self) -> str:
        """The name of the kind, which specs and telemetry use."""
        return self.kind.name


def remedy(
    site: str,
    *,
    strength: float,
    neutral: float,
    init: Callable[..., Any] | None = None,
    **rest: Any,
) -> Callable[[Callable[..., Any]], RemedyKind]:
    """Decorator that makes `f(value, strength, **context) -> value` a registered kind of remedy with the name of `f`.

    With `init`, which creates the state, the function is `f(value, strength, state, **context) -> (value, state)`. The
    other keywords are fields of `RemedyKind`.
    """

    def decorate(function: Callable[..., Any]) -> RemedyKind:
        apply = stateless(function) if init is None else function
        fields = {"strength": strength, "site": site, "apply": apply, "neutral": neutral, "init": init or nothing}
        return _registered(function, **fields | rest)

    return decorate


def setting(*, strength: float = 1.0, **rest: Any) -> Callable[[Callable[..., Any]], RemedyKind]:
    """Decorator that makes `f(settings, strength) -> changes` a registered kind of remedy that changes settings."""
    return lambda function: _registered(function, strength=strength, settings=function, **rest)


def _registered(function: Callable[..., Any], **fields: Any) -> RemedyKind:
    name = function.__name__
    return registry.remedies.register(name, registry.copy_function_metadata(function, RemedyKind(name=name, **fields)))
