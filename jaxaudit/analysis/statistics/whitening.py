"""Whitening of latents by the covariance of clean runs."""

from __future__ import annotations

from typing import Any

import numpy as np


def whitening(latents: Any, shrinkage: float = 0.0) -> np.ndarray:
    """Returns the matrix `[d, d]` that makes clean latents uncorrelated with unit variance (`latents @ matrix`).

    Args:
        latents: `[..., d]`, the latents of clean runs; more than d of them.
        shrinkage: as for `covariance`; above 0 the covariance cannot be singular.

    Raises:
        ValueError: the covariance is not finite or is singular, so that no whitening matrix exists.
    """
    matrix = covariance(latents, shrinkage)
    if not np.isfinite(matrix).all() or np.linalg.matrix_rank(matrix, hermitian=True) < len(matrix):
        raise ValueError("the clean latents' covariance is singular or not finite: they cannot be whitened")
    values, vectors = np.linalg.eigh(matrix)
    return vectors / np.sqrt(values)


def covariance(latents: Any, shrinkage: float = 0.0) -> np.ndarray:
    """Returns the covariance `[d, d]` of latents `[..., d]`, shrunk towards a multiple of the identity.

    Args:
        latents: `[..., d]`.
        shrinkage: the weight, 0 to 1, of the identity times the mean variance; the sample covariance has the rest.
    """
    x = np.asarray(latents, np.float64)
    sample = np.atleast_2d(np.cov(x.reshape(-1, x.shape[-1]), rowvar=False))
    return (1.0 - shrinkage) * sample + shrinkage * np.trace(sample) / len(sample) * np.eye(len(sample))
