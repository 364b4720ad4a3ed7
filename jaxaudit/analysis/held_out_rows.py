"""The held-out rows of dialogues that a run has stored: who wrote which word, how probable it was, the reward."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xarray as xr

TOKENS, ROLES, LOG_PROBABILITIES, REWARDS = "shown_token", "shown_role", "shown_log_probability", "shown_reward"
"""The channels that hold them: `[seed, condition, step, row, slot]`, and the rewards without slots."""

OWN, PROMPT, TOOL, NOBODY = "own", "prompt", "tool", "end"
"""The words of ROLES: who wrote a slot."""


@dataclass(frozen=True)
class Word:
    """A token of a row.

    Attributes:
      text: its legible name, or its number.
      role: who wrote it: OWN, PROMPT or TOOL.
      log_probability: the policy's, of an own one; else NaN.
    """

    text: str
    role: str
    log_probability: float

    @property
    def own(self) -> bool:
        """Whether the policy wrote it."""
        return self.role == OWN


@dataclass(frozen=True)
class HeldOutRow:
    """A row as far as it was written, and the gold reward it got."""

    words: tuple[Word, ...]
    reward: float


def has_rows(telemetry: xr.Dataset) -> bool:
    """Whether a run stored any."""
    return {TOKENS, ROLES, LOG_PROBABILITIES, REWARDS} <= set(telemetry.data_vars)


def cadence(telemetry: xr.Dataset) -> int:
    """Steps from one measurement to the next."""
    return int(telemetry[TOKENS].attrs.get("every", 1))


def measured_near(telemetry: xr.Dataset, place: int, last: int) -> int:
    """The index of the measured step nearest to the index `place`, of those up to `last`; the later of two as near.

    Raises:
      ValueError: none is measured up to there.
    """
    every = cadence(telemetry)
    due = np.arange(every - 1, last + 1, every)
    if not due.size:
        raise ValueError(f"held-out rows are measured every {every} steps, and none is up to step {last}")
    return int(due[::-1][np.argmin(np.abs(due[::-1] - place))])


def rows_at(telemetry: xr.Dataset, seed: int, condition: int, place: int) -> list[HeldOutRow]:
    """The rows of a lane at a step, all three by position; empty where nothing was written there."""
    picked = telemetry[[TOKENS, ROLES, LOG_PROBABILITIES, REWARDS]].isel(seed=seed, condition=condition, step=place)
    picked = picked.load()
    names, roles = (picked[name].attrs.get("words", ()) for name in (TOKENS, ROLES))
    columns = (picked[name].values for name in (TOKENS, ROLES, LOG_PROBABILITIES, REWARDS))
    return [
        HeldOutRow(_words(names, roles, *row), float(reward))
        for *row, reward in zip(*columns, strict=True)
        if np.isfinite(reward)
    ]


def _words(
    names: list[str], roles: list[str], tokens: np.ndarray, by: np.ndarray, told: np.ndarray
) -> tuple[Word, ...]:
    found = []
    for token, who, log_probability in zip(tokens.tolist(), by.tolist(), told.tolist(), strict=True):
        role = roles[who] if 0 <= who < len(roles) else NOBODY
        if role != NOBODY:
            text = names[token] if 0 <= token < len(names) else str(token)
            found.append(Word(text, role, log_probability if role == OWN else float("nan")))
    return tuple(found)
