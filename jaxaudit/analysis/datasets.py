"""Makes labelled xarray datasets of telemetry arrays, and channels that are computed from the performance."""

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


def condition_labels(grid: Grid) -> list[str]:
    """Returns a unique label for each condition, such as "lr_spike 10", or "lr_spike 10 @120" with several onsets."""
    several_onsets = len(grid.forks) > 1
    counts: Counter[str] = Counter()
    labels = []
    for condition in grid.conditions:
        magnitudes = " ".join(f"{part.magnitude:g}" for part in condition.parts)
        label = f"{condition.name} {magnitudes}".strip() + (f" @{condition.onset}" if several_onsets else "")
        counts[label] += 1
        labels.append(label if counts[label] == 1 else f"{label} #{counts[label]}")
    return labels


def find_index(kind: str, value: int | str, labels: list[str]) -> int:
    """Returns the index of a "seed" or "condition" among its labels; a condition may also be given by its index.

    Raises:
      UserError: There is no such seed or condition.
    """
    if str(value) in labels:
        return labels.index(str(value))
    if kind == "condition" and str(value).isdigit() and int(value) < len(labels):
        return int(value)
    raise UserError(unknown_name_message(kind, value, labels))


def _coordinates(grid: Grid) -> dict[str, Any]:
    conditions = grid.conditions
    windows = [c.parts[0].when.resolve(grid.steps) if c.parts else (c.onset, c.onset, 1, 0) for c in conditions]
    sites = ["+".join(dict.fromkeys(part.site for part in c.parts)) for c in conditions]
    targets = [c.parts[0].target or "" if c.parts else "" for c in conditions]
    return {
        "seed": ("seed", np.array(grid.seeds, np.int64)),
        "condition": ("condition", np.array(condition_labels(grid), dtype=object)),
        "step": ("step", np.arange(grid.steps)),
        "perturbation": ("condition", np.array([c.name for c in conditions], dtype=object)),
        "magnitude": ("condition", np.array([c.magnitude for c in conditions])),
        "neutral": ("condition", np.array([c.neutral for c in conditions])),
        "onset": ("condition", np.array([c.onset for c in conditions], np.int64)),
        "duration": ("condition", np.array([min(w[1] - w[0], w[3]) for w in windows], np.int64)),
        "dimension": ("condition", np.array([c.dimension for c in conditions], dtype=object)),
        "site": ("condition", np.array(sites, dtype=object)),
        "target": ("condition", np.array(targets, dtype=object)),
    }


def channel_cadence(data: xr.Dataset, channel: str = PERFORMANCE) -> metrics.Cadence:
    """Returns when the performance or acting performance is measured, from the attributes of a telemetry dataset."""
    return metrics.Cadence(int(data.attrs.get("performance_every", 1)), bool(data[channel].attrs.get("sparse", 0)))


def telemetry_dataset(grid: Grid, arrays: dict[str, np.ndarray]) -> xr.Dataset:
    """Returns the telemetry of a grid as a labelled dataset.

    Args:
      grid: The lanes, whose coordinates the dataset has.
      arrays: The values of each channel, `[seed, condition, step, ...]`.
    """
    coordinates, learner = _coordinates(grid), grid.program.learner
    data = {}
    for name, values in arrays.items():
        dims = DIMS + channel_dims(grid, name, values.shape[3:])
        channel = learner.channel(name)
        data[name] = (dims, channel.kept(values), channel.attributes)
    for channel in learner.channels.values():
        for dim, labels in channel.dims:
            coordinates[dim] = (dim, np.array(labels, dtype=object))
    attributes = {
        "learner": learner.name,
        "performance_name": learner.performance_name,
        "performance_every": learner.cadence.every,
        "step_unit": learner.step_unit,
        "samples_per_step": learner.samples_per_step,
    }
    return xr.Dataset(data, coordinates, attributes)


def channel_dims(grid: Grid, channel: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    """Returns the names of a channel's own dimensions, from the learner or else made from the channel's name.

    Args:
      grid: The lanes of the learner.
      channel: The name of the channel.
      shape: The shape of one value of the channel.

    Raises:
      ValueError: The learner labels dimensions of another shape.
    """
    declared = grid.program.learner.channel(channel)
    if declared.dims and declared.shape != shape:
        raise ValueError(f"channel '{channel}' has shape {shape}, and the labels of its dimensions {declared.shape}")
    return tuple(name for name, _ in declared.dims) or tuple(f"{channel}_{i}" for i in range(len(shape)))


def derived_channels(
    performance: np.ndarray, settings: metrics.MetricSettings, cadence: metrics.Cadence | None = None
) -> dict[str, np.ndarray]:
    """Computes the channels `x_inst` and `x_gen` from the performance.

    `x_inst` is the instability index, the variance over a window. `x_gen` is the exponential moving average with the
    span of the window, begun at the first finite value. Both use measured values only, and are held between them.

    Args:
      performance: J, `[..., T]`.
      settings: The windows of the metrics.
      cadence: When J is measured; by default at every step.

    Returns:
      Each channel by name, `[..., T]`.
    """
    every, sparse = cadence or metrics.Cadence()
    flat = performance.reshape(-1, performance.shape[-1])
    x_inst = np.asarray(_instability(settings.window, every, sparse)(flat))
    rate = 2.0 / (settings.window / every + 1.0)
    x_gen = np.full_like(flat, np.nan)
    average = np.full_like(flat[:, 0], np.nan)
    with np.errstate(invalid="ignore"):
        for t in range(flat.shape[1]):
            if (t + 1) % every == 0:
                updated = np.where(np.isnan(average), flat[:, t], average + rate * (flat[:, t] - average))
                average = np.where(np.isnan(flat[:, t]), average, updated) if sparse else updated
            x_gen[:, t] = average
    return {"x_inst": x_inst.reshape(performance.shape), "x_gen": x_gen.reshape(performance.shape)}


@cache
def _instability(window: int, every: int, sparse: bool) -> Callable[..., Any]:
    """Returns the compiled `instability_index` of lanes `[L, T]`, cached so that it is compiled once."""
    return jax.jit(jax.vmap(partial(metrics.instability_index, window=window, every=every, sparse=sparse)))
