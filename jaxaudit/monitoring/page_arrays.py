"""Arrays that report pages show: quantiles over lanes, latents projected to a plane, and the scores of logged runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxaudit.monitoring.monitor_logs import LoggedRuns, ScoredGroup
    from jaxaudit.runtime.array_store import LabelledArray

QUANTILES = (0.1, 0.5, 0.9)
COMPONENTS = 2

MAX_LENGTH = 10.0
"""The length to which latents are shortened for the plane, so that one diverged lane does not determine it."""


def projection_plane(clean: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Returns the first principal directions `[m, COMPONENTS]` of latents `[n, T, m]`, which are not centred.

    `clean` and `others` have the same weight in total, and steps with a latent that is not finite are left out. If m
    is less than COMPONENTS, the remaining directions are zero.
    """
    moments = []
    for latents in (clean, others):
        rows = latents.reshape(-1, latents.shape[-1]).astype(np.float64)
        rows = rows[np.isfinite(rows).all(axis=1)]
        norm = np.linalg.norm(rows, axis=1, keepdims=True)
        rows = rows * np.minimum(1.0, MAX_LENGTH / np.maximum(norm, 1e-9))
        moments.append(rows.T @ rows / max(len(rows), 1))
    directions = np.linalg.eigh(moments[0] + moments[1])[1][:, ::-1][:, :COMPONENTS]
    return np.pad(directions, ((0, 0), (0, COMPONENTS - directions.shape[1])))


def lane_quantiles(values: np.ndarray, quantiles: Sequence[float] = QUANTILES) -> np.ndarray:
    """Returns quantiles over lanes, `[lanes, T, ...]` to float64 `[T, ..., quantile]`; NaN where no lane has a value.

    They are those of `numpy.nanquantile`, which is slower, but between equal infinite values they are infinite, and
    between -inf and a finite value they are -inf.
    """
    ordered = np.sort(values.astype(np.float64), axis=0)  # NaN comes last.
    count = (~np.isnan(ordered)).sum(0)
    positions = [quantile * np.maximum(count - 1, 0) for quantile in quantiles]
    low, high = (
        np.take_along_axis(ordered, np.stack([rounded(position) for position in positions]).astype(int), axis=0)
        for rounded in (np.floor, np.ceil)
    )
    fraction = np.stack(positions) % 1
    with np.errstate(invalid="ignore"):
        between = np.where(np.isneginf(low), low, low + fraction * (high - low))
    return np.moveaxis(np.where(count > 0, np.where(low == high, low, between), np.nan), 0, -1)


@dataclass(frozen=True)
class _Axes:
    """The steps and channels of several groups of runs together.

    Attributes:
      steps: int64 `[T]`.
      channels: the names of the d channels.
    """

    steps: np.ndarray
    channels: list[str]

    @classmethod
    def union(cls, groups: Sequence[LoggedRuns]) -> _Axes:
        channels = dict.fromkeys(name for runs in groups for name in runs.channels)
        return cls(np.unique(np.concatenate([runs.steps for runs in groups])), list(channels))

    def align_steps(self, runs: LoggedRuns, values: np.ndarray) -> np.ndarray:
        """Returns a group's values `[T', ...]` at all steps, `[T, ...]`; NaN at steps that the group lacks."""
        aligned = np.full((len(self.steps), *values.shape[1:]), np.nan, values.dtype)
        aligned[np.searchsorted(self.steps, runs.steps)] = values
        return aligned

    def align(self, runs: LoggedRuns, values: np.ndarray) -> np.ndarray:
        """Returns a group's values `[T', d', ...]` at all steps and channels, `[T, d, ...]`; NaN where it has none."""
        aligned = np.full((len(runs.steps), len(self.channels), *values.shape[2:]), np.nan, values.dtype)
        aligned[:, [self.channels.index(name) for name in runs.channels]] = values
        return self.align_steps(runs, aligned)


def monitored_arrays(groups: Sequence[ScoredGroup], largest: ScoredGroup) -> dict[str, LabelledArray]:
    """Returns the arrays of monitored.zarr: the new runs of all groups, and the clean runs of the largest group.

    Scores of all groups have the threshold of the largest. Latents are those of the largest group's monitor.
    """
    clean = largest.clean
    axes = _Axes.union([group.new.runs for group in groups] + [clean.runs])
    plane = projection_plane(clean.scored.latent, largest.new.scored.latent)
    score, distance, values, latent = [], [], [], []
    for group in groups:
        runs, scored = group.new.runs, group.new.scored
        missing = np.full((*scored.score.shape, COMPONENTS), np.nan)
        projected = scored.latent @ plane if group is largest else missing
        for i in range(len(runs.names)):
            score.append(axes.align_steps(runs, scored.score[i]))
            distance.append(axes.align(runs, group.new.distance[i]))
            values.append(axes.align(runs, runs.values[i]))
            latent.append(axes.align_steps(runs, projected[i]))
    clean_latent = axes.align_steps(clean.runs, lane_quantiles(clean.scored.latent @ plane).astype(np.float32))
    clean_values = axes.align(clean.runs, lane_quantiles(clean.runs.values).astype(np.float32))
    return {
        "run": (("run",), np.array([name for group in groups for name in group.new.runs.names], object)),
        "step": (("step",), axes.steps),
        "channel": (("channel",), np.array(axes.channels, object)),
        "quantile": (("quantile",), np.array(QUANTILES)),
        "score": (("run", "step"), np.stack(score)),
        "distance": (("run", "step", "channel"), np.stack(distance)),
        "values": (("run", "step", "channel"), np.stack(values)),
        "latent": (("run", "step", "component"), np.stack(latent)),
        "clean_latent": (("step", "component", "quantile"), clean_latent),
        "clean_values": (("step", "channel", "quantile"), clean_values),
    }
