"""Telemetry arrays as labelled xarray datasets: names and coordinates of lanes, channels and what follows from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import numpy as np
import xarray as xr

from jaxaudit.analysis import metrics
from jaxaudit.core.channel_names import PERFORMANCE
from jaxaudit.core.grid import Grid
from jaxaudit.runtime.errors import UserError
from jaxaudit.runtime.registry import unknown_name_message

DIMS = ("seed", "condition", "step")


def labels(grid: Grid) -> list[str]:
    """A short name for each condition, unique in the grid: "lr_spike 10", or "lr_spike 10 @120" with several onsets."""
    several = len(grid.forks) > 1
    names = []
    for condition in grid.conditions:
        swept = " ".join(f"{part.magnitude:g}" for part in condition.parts)
        at = f" @{condition.onset}" if several else ""
        names.append(f"{condition.name} {swept}".strip() + at)
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(name if seen[name] == 1 else f"{name} #{seen[name]}")
    return unique


def position(what: str, given: int | str, allowed: list[str]) -> int:
    """Where a "seed" is among those allowed; of a "condition", its label or its own position may be given.

    Raises UserError if it is not there.
    """
    if str(given) in allowed:
        return allowed.index(str(given))
    if what == "condition" and str(given).isdigit() and int(given) < len(allowed):
        return int(given)
    raise UserError(unknown_name_message(what, given, allowed))


def coordinates(grid: Grid) -> dict[str, Any]:
    """The coordinates of every dataset of a grid: along seed, condition and step."""
    conditions = grid.conditions
    windows = [c.parts[0].when.resolve(grid.steps) if c.parts else (c.onset, c.onset, 1, 0) for c in conditions]
    return {
        "seed": ("seed", np.array(grid.seeds, np.int64)),
        "condition": ("condition", np.array(labels(grid), dtype=object)),
        "step": ("step", np.arange(grid.steps)),
        "perturbation": ("condition", np.array([c.name for c in conditions], dtype=object)),
        "magnitude": ("condition", np.array([c.magnitude for c in conditions])),
        "neutral": ("condition", np.array([c.neutral for c in conditions])),
        "onset": ("condition", np.array([c.onset for c in conditions], np.int64)),
        "duration": ("condition", np.array([min(w[1] - w[0], w[3]) for w in windows], np.int64)),
        "dimension": ("condition", np.array([c.dimension for c in conditions], dtype=object)),
        "site": ("condition", np.array(["+".join(dict.fromkeys(p.site for p in c.parts)) for c in conditions], object)),
        "target": (
            "condition",
            np.array([c.parts[0].target or "" if c.parts else "" for c in conditions], dtype=object),
        ),
    }


def attributes(grid: Grid) -> dict[str, Any]:
    """What the datasets of a grid say of themselves."""
    learner = grid.program.learner
    return {
        "learner": learner.name,
        "performance_name": learner.performance_name,
        "performance_every": learner.cadence.every,
        "step_unit": learner.step_unit,
        "samples_per_step": learner.samples_per_step,
    }


def cadence(data: xr.Dataset, channel: str = PERFORMANCE) -> metrics.Cadence:
    """When the performance, or acting performance, is measured, as a run's telemetry says."""
    return metrics.Cadence(int(data.attrs.get("performance_every", 1)), bool(data[channel].attrs.get("sparse", 0)))


def telemetry(grid: Grid, arrays: dict[str, np.ndarray]) -> xr.Dataset:
    """Telemetry `[seed, condition, step, ...]` by channel as a labelled dataset."""
    coords, learner = coordinates(grid), grid.program.learner
    data = {}
    for name, values in arrays.items():
        dims = DIMS + channel_dims(grid, name, values.shape[3:])
        channel = learner.channel(name)
        data[name] = (dims, channel.kept(values), channel.attributes)
    for name, names in (dim for channel in learner.channels.values() for dim in channel.dims):
        coords[name] = (name, np.array(names, dtype=object))
    return xr.Dataset(data, coords, attributes(grid))


def channel_dims(grid: Grid, channel: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    """Names of a channel's own dimensions: the learner's, or made from the channel's name.

    Raises ValueError where the learner's have another shape.
    """
    known = grid.program.learner.channel(channel)
    if known.dims and known.shape != shape:
        raise ValueError(f"channel '{channel}' has shape {shape}, and the labels of its dimensions {known.shape}")
    return tuple(name for name, _ in known.dims) or tuple(f"{channel}_{i}" for i in range(len(shape)))


def derived(
    performance: np.ndarray, settings: metrics.MetricSettings, when: metrics.Cadence | None = None
) -> dict[str, np.ndarray]:
    """Channels that follow from the performance `[..., T]`: x_inst (its variance over a window), x_gen (smoothed).

    x_gen is the exponential moving average with the window's span, begun at the first finite value. Both are of the
    values that were measured, and held between.
    """
    every, sparse = when or metrics.Cadence()
    flat = performance.reshape(-1, performance.shape[-1])
    x_inst = np.asarray(_instability(settings.window, every, sparse)(flat))
    rate = 2.0 / (settings.window / every + 1.0)
    x_gen = np.full_like(flat, np.nan)
    current = np.full_like(flat[:, 0], np.nan)
    with np.errstate(invalid="ignore"):
        for t in range(flat.shape[1]):
            if (t + 1) % every == 0:
                moved = np.where(np.isnan(current), flat[:, t], current + rate * (flat[:, t] - current))
                current = np.where(np.isnan(flat[:, t]), current, moved) if sparse else moved
            x_gen[:, t] = current
    return {"x_inst": x_inst.reshape(performance.shape), "x_gen": x_gen.reshape(performance.shape)}


@cache
def _instability(window: int, every: int, sparse: bool) -> Callable[..., Any]:
    """`instability_index` of lanes `[L, T]`; kept, or every call would compile it again."""
    return jax.jit(jax.vmap(partial(metrics.instability_index, window=window, every=every, sparse=sparse)))
