"""How many lanes of many numbers become a picture: quantiles over lanes, a plane to look at latents in, and a file."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import xarray as xr

from jaxaudit.zarr_store import FORMAT

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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # steps at which no lane has one
        found = np.nanquantile(values.astype(np.float64), QUANTILES, axis=0)
    return np.moveaxis(found, 0, -1).astype(np.float32)


def write(data: xr.Dataset, path: Path) -> None:
    """Stores a dataset as zarr, whose words on what it cannot promise of strings are not the reader's business."""
    text = {name: values.astype(object) for name, values in data.coords.items() if values.dtype.kind == "U"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data.assign_coords(text).to_zarr(path, zarr_format=FORMAT)
