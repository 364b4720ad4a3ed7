"""Whitening of latents by the covariance of clean runs."""

from __future__ import annotations

from typing import Any

import numpy as np


def whitening(latents: Any, shrinkage: float = 0.0) -> np.ndarray:
    """Matrix `[d, d]` by which clean latents become uncorrelated with unit variance (`h @ matrix`).

    Args:
        latents: `[..., d]`, latents of clean runs; more than d of them.
        shrinkage: share by which the covariance is moved towards its diagonal's mean; above 0 it cannot be singular.

    Raises:
        ValueError: their covariance is not finite or is singular, so that no such matrix exists.
    """
    spread = covariance(latents, shrinkage)
    if not np.isfinite(spread).all() or np.linalg.matrix_rank(spread, hermitian=True) < len(spread):
        raise ValueError("the clean latents' covariance is singular or not finite: they cannot be whitened")
    values, vectors = np.linalg.eigh(spread)
    return vectors / np.sqrt(values)


def covariance(latents: Any, shrinkage: float = 0.0) -> np.ndarray:
    """Returns the covariance of the rows of `[..., d]`, moved by a share `shrinkage` towards its mean diagonal: `[d,
    d]`.
    """
    h = np.asarray(latents, np.float64)
    found = np.atleast_2d(np.cov(h.reshape(-1, h.shape[-1]), rowvar=False))
    return (1.0 - shrinkage) * found + shrinkage * np.trace(found) / len(found) * np.eye(len(found))
