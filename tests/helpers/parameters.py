"""Parameters of tests, a few for the default run and the others for the exhaustive one."""

from __future__ import annotations

import pytest


def some_of(count: int, of: int) -> list:
    """Returns the parameters 0 to `of - 1`, of which all but the first `count` are marked as exhaustive."""
    return [*range(count), *(pytest.param(number, marks=pytest.mark.exhaustive) for number in range(count, of))]
