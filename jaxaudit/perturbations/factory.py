"""The decorator that turns a transform into a named, registered perturbation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxaudit import registry
from jaxaudit.perturbations.core import Perturbation, Sweep, Window


@dataclass(eq=False)
class Factory:
    """Makes perturbations of one kind: `lr_spike(10.0, onset=0.3, duration=10, target="actor")`.

    `default` holds the kind's standard magnitude and window (Table S4's where the table gives one).
    """

    default: Perturbation

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
        standard = self.default
        return Perturbation(
            name=standard.name,
            dimension=standard.dimension,
            site=standard.site,
            apply=standard.apply,
            magnitude=standard.magnitude if magnitude is None else magnitude,
            neutral=standard.neutral,
            when=Window(
                standard.when.onset if onset is None else onset,
                standard.when.duration if duration is None else duration,
                period,
            ),
            target=standard.target if target is None else target,
            needs=standard.needs,
            limits=standard.limits,
            memory=standard.memory,
            whole=standard.whole,
        )


def perturbation(
    dimension: str,
    site: str,
    *,
    magnitude: float,
    neutral: float,
    duration: int | str,
    onset: float | int = 0.3,
    limits: tuple[float, float] = (float("-inf"), float("inf")),
    needs: tuple[str, ...] = (),
    target: str | None = None,
    memory: Callable[[Any], Any] | None = None,
    whole: bool = False,
) -> Callable[[Callable[..., Any]], Factory]:
    """Decorator: makes `f(key, value, magnitude, **context) -> value` a perturbation kind named like `f`.

    The keywords are the kind's standard magnitude, window, neutral magnitude, range, needed context and target, and
    whether a magnitude must be whole.
    With `memory(value) -> pytree`, which gives what the kind remembers when its window opens, it is
    `f(key, value, magnitude, memory, **context) -> (value, memory)`.
    """

    def decorate(apply: Callable[..., Any]) -> Factory:
        standard = Perturbation(
            name=apply.__name__,
            dimension=dimension,
            site=site,
            apply=apply,
            magnitude=magnitude,
            neutral=neutral,
            when=Window(onset, duration),
            target=target,
            needs=needs,
            limits=limits,
            memory=memory,
            whole=whole,
        )
        return registered(registry.perturbations, apply, standard)

    return decorate


def registered(known: registry.Registry, apply: Callable[..., Any], standard: Perturbation) -> Factory:
    """The factory of a standard perturbation, documented as `apply` is and registered under its name."""
    factory = Factory(standard)
    functools.update_wrapper(factory, apply, updated=())
    return known.register(standard.name, factory)
