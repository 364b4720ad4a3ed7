"""Detectors beside one another, on lanes they were not fitted to, at matched false alarms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from jaxaudit.monitoring.calibration import fewest_runs, threshold
from jaxaudit.monitoring.detector import Detector
from jaxaudit.monitoring.lanes import LabelledLanes

NEVER = -1
"""The step of an alarm that was not given."""


@dataclass(frozen=True)
class DetectionSettings:
    """How detectors are compared.

    Attributes:
      folds: of the seeds; each is tested by detectors that saw none of it.
      alpha: false alarms per clean run.
      fitted: share of a fold's other clean runs that detectors are fitted to, in (0, 1); on the rest they are
        calibrated.
      seed: of the split.
    """

    folds: int = 4
    alpha: float = 0.05
    fitted: float = 0.35
    seed: int = 0

    def __post_init__(self):
        if self.folds < 2:
            raise ValueError(f"folds must be at least 2, not {self.folds}")
        if not 0 < self.alpha < 1:
            raise ValueError(f"alpha must lie in (0, 1), not {self.alpha:g}")
        if not 0 < self.fitted < 1:
            raise ValueError(f"fitted must lie in (0, 1), not {self.fitted:g}")


@dataclass(frozen=True)
class LaneSplit:
    """Which lanes serve what, by number, in one fold."""

    fit: np.ndarray
    calibrate: np.ndarray
    test: np.ndarray


def splits(lanes: LabelledLanes, settings: DetectionSettings) -> list[LaneSplit]:
    """The folds: a seed's lanes are all in one.

    Raises:
      ValueError: there are too few clean lanes for alpha.
    """
    table = lanes.table
    seeds = np.random.default_rng(settings.seed).permutation(np.unique(table.seed))
    clean = {int(seed): lane for lane, seed in table.seed[table.clean].items()}
    parts = []
    for fold in np.array_split(seeds, settings.folds):
        others = np.array([clean[int(seed)] for seed in seeds if seed not in fold and int(seed) in clean])
        fit = max(round(settings.fitted * len(others)), 2)
        if len(others) - fit < fewest_runs(settings.alpha):
            raise ValueError(
                f"{lanes.learner}: {len(clean)} clean lanes are too few for {settings.alpha:g} false alarms per run in "
                f"{settings.folds} folds: {len(others) - fit} are left to calibrate on, and it takes "
                f"{fewest_runs(settings.alpha)}{_without(lanes)}"
            )
        parts.append(LaneSplit(others[:fit], others[fit:], np.flatnonzero(table.seed.isin(fold))))
    return parts


def _without(lanes: LabelledLanes) -> str:
    count = lanes.collapsing
    return f" ({count} more collapse undisturbed and are no clean lanes)" if count else ""


def compare(lanes: LabelledLanes, detectors: Sequence[Detector], settings: DetectionSettings) -> pd.DataFrame:
    """What every detector says of every lane.

    Returns:
      a row for each detector and lane, with the lane's columns and: family, the detector's; fold; score, its largest;
      threshold; alarm, the first step above it, or NEVER; late_alarm, the first at or after the onset.
    """
    parts = splits(lanes, settings)
    rows = []
    for detector in detectors:
        scores = [detector.fit(lanes.values[part.fit], lanes.channels)(lanes.values) for part in parts]
        said = judged(detector.name, lanes, scores, parts, thresholds(scores, parts, settings.alpha))
        rows.append(said.assign(family=detector.family))
    return pd.concat(rows, ignore_index=True)


def thresholds(scores: Sequence[np.ndarray], parts: Sequence[LaneSplit], alpha: float) -> list[float]:
    """The threshold of every fold, from its scores `[lanes, T]` of the clean lanes it calibrates on."""
    return [threshold(found[part.calibrate].max(axis=1), alpha) for found, part in zip(scores, parts, strict=True)]


def judged(
    detector: str,
    lanes: LabelledLanes,
    scores: Sequence[np.ndarray],
    parts: Sequence[LaneSplit],
    limits: Sequence[float],
) -> pd.DataFrame:
    """What one detector says of every lane, in the columns of `compare` but its family.

    Args:
      detector: its name.
      lanes: the lanes.
      scores: for every fold, of all lanes, `[lanes, T]`; read are those of the lanes that the fold tests.
      parts: the folds.
      limits: the threshold in each.
    """
    folds = zip(scores, parts, limits, strict=True)
    rows = [_said(lanes, part.test, found[part.test], limit, fold) for fold, (found, part, limit) in enumerate(folds)]
    return pd.concat(rows, ignore_index=True).assign(detector=detector)


def _said(lanes: LabelledLanes, numbers: np.ndarray, scores: np.ndarray, limit: float, fold: int) -> pd.DataFrame:
    table = lanes.table.iloc[numbers].assign(learner=lanes.learner, lane=numbers, fold=fold)
    above = scores > limit
    since = above & (np.arange(scores.shape[1]) >= table.onset.to_numpy()[:, None])
    return table.assign(score=scores.max(axis=1), threshold=limit, alarm=_first(above), late_alarm=_first(since))


def _first(above: np.ndarray) -> np.ndarray:
    """The first step of each row that is true, or NEVER."""
    return np.where(above.any(axis=1), above.argmax(axis=1), NEVER)
