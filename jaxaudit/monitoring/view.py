"""How many lanes of many numbers become a picture: quantiles over lanes, a plane to look at latents in, and a file."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxaudit.runtime.array_store import FORMAT

if TYPE_CHECKING:
    import xarray as xr

QUANTILES = (0.1, 0.5, 0.9)
COMPONENTS = 2

FURTHEST = 10.0
"""The length that a latent counts for at most, so that one diverged lane does not choose the plane."""


def plane(clean: np.ndarray, others: np.ndarray) -> np.ndarray:
    """The directions `[m, COMPONENTS]` in which latents `[n, T, m]` vary most about zero, both sets counting the same.

    Steps whose latent is not finite are left out. A latent of fewer entries has directions of length zero besides.
    """
    moments = []
    for latents in (clean, others):
        rows = latents.reshape(-1, latents.shape[-1]).astype(np.float64)
        rows = rows[np.isfinite(rows).all(axis=1)]
        norm = np.linalg.norm(rows, axis=1, keepdims=True)
        rows = rows * np.minimum(1.0, FURTHEST / np.maximum(norm, 1e-9))
        moments.append(rows.T @ rows / max(len(rows), 1))
    directions = np.linalg.eigh(moments[0] + moments[1])[1][:, ::-1][:, :COMPONENTS]
    return np.pad(directions, ((0, 0), (0, COMPONENTS - directions.shape[1])))


def over_lanes(values: np.ndarray) -> np.ndarray:
    """QUANTILES over lanes, `[lanes, T, ...]` to float32 `[T, ..., quantile]`; NaN where no lane has a value."""
    ordered = np.sort(values.astype(np.float64), axis=0)  # NaN last
    count = (~np.isnan(ordered)).sum(0)
    places = [quantile * np.maximum(count - 1, 0) for quantile in QUANTILES]
    low, high = (
        np.take_along_axis(ordered, np.stack([end(place) for place in places]).astype(int), axis=0)
        for end in (np.floor, np.ceil)
    )
    share = np.stack(places) % 1
    with np.errstate(invalid="ignore"):  # infinite values are what they are
        found = np.where(low == high, low, low + share * (high - low))
    return np.moveaxis(np.where(count > 0, found, np.nan), 0, -1).astype(np.float32)


def write(data: xr.Dataset, path: Path) -> None:
    """Stores a dataset as zarr, whose words on what it cannot promise of strings are not the reader's business."""
    text = {name: values.astype(object) for name, values in data.coords.items() if values.dtype.kind == "U"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data.assign_coords(text).to_zarr(path, zarr_format=FORMAT)
