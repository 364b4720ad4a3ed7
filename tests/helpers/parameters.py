"""Test parameters of which a few belong to the default test run and the others to the exhaustive one."""

from __future__ import annotations

import pytest


def partly_exhaustive(count: int, total: int) -> list:
    """Returns the parameters 0 to `total` - 1. All but the first `count` are marked as exhaustive."""
    return [*range(count), *(pytest.param(number, marks=pytest.mark.exhaustive) for number in range(count, total))]
