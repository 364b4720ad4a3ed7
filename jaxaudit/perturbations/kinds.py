"""The decorators that turn a function into a registered kind of perturbation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxaudit.core.perturbation import INTERVENTION, Kind, Window
from jaxaudit.runtime import registry


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
        return _registered(
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
        return _registered(
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


def _registered(known: registry.Registry, function: Callable[..., Any], apply: Callable[..., Any], **fields) -> Kind:
    name = function.__name__
    return known.register(name, registry.copy_function_metadata(function, Kind(name=name, apply=apply, **fields)))
