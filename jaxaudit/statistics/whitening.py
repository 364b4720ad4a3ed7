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
    h = np.asarray(latents, np.float64)
    covariance = np.atleast_2d(np.cov(h.reshape(-1, h.shape[-1]), rowvar=False))
    size = h.shape[-1]
    covariance = (1.0 - shrinkage) * covariance + shrinkage * np.trace(covariance) / size * np.eye(size)
    if not np.isfinite(covariance).all() or np.linalg.matrix_rank(covariance, hermitian=True) < size:
        raise ValueError("the clean latents' covariance is singular or not finite: they cannot be whitened")
    values, vectors = np.linalg.eigh(covariance)
    return vectors / np.sqrt(values)
