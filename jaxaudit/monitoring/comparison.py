"""Detectors beside one another, on lanes they were not fitted to, at matched false alarms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from jaxaudit.analysis.statistics import wilson
from jaxaudit.monitoring.calibration import fewest_runs, threshold
from jaxaudit.monitoring.detector import ALL_CHANNELS, Detector
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


REPETITIONS = 1000
"""Of the bootstrap over seeds."""

FEWEST_SEEDS = 5
"""Clean ones and disturbed ones, for an interval of the bootstrap."""

CLEAN = "clean"
"""The condition of the lanes that nothing disturbs."""

GAINS = ("auroc", "detected", "lead_time")
"""Figures of which there is a difference between the monitor and every other detector."""


def summary(said: pd.DataFrame, mine: str, seed: int = 0) -> pd.DataFrame:
    """A row for each detector, the best by AUROC first.

    Args:
      said: what `compare` gave, of one learner.
      mine: the detector that all others are the baselines of.
      seed: of the bootstrap.

    Returns:
      columns family, where it is known; false_alarms (share of clean lanes), detected (of disturbed ones), auroc,
      lead_time (median over the lanes that collapsed, of the steps from the alarm to the collapse; minus infinity
      without an alarm), each with _low and _high; and of the last three gain_auroc, gain_detected, gain_lead_time:
      `mine` minus this one, paired, with theirs. Intervals are of the bootstrap over seeds, whose lanes come and go
      together; a share's is Wilson's over seeds where no seed's lanes disagree.
    """
    draws = _draws(said.seed.unique(), seed)
    tables = {name: table.sort_values("lane") for name, table in said.groupby("detector", sort=False)}
    figures = {name: _figures(table, draws) for name, table in tables.items()}
    rows = []
    for name, table in tables.items():
        row = {"detector": name, **_shares(table, draws)}
        if "family" in table:
            row["family"] = table.family.iloc[0]
        for figure in GAINS:
            gain = _interval(f"gain_{figure}", _less(figures[mine][figure], figures[name][figure]), _enough(table))
            row |= gain if figure == "detected" else _interval(figure, figures[name][figure], _enough(table)) | gain
        rows.append(row)
    return pd.DataFrame(rows).sort_values("auroc", ascending=False, ignore_index=True)


def best_chart(figures: pd.DataFrame, mine: str) -> pd.Series | None:
    """The row of `summary` of the best other chart of all channels, which has no model; None if there is none."""
    if "family" not in figures:
        return None
    charts = figures[(figures.family == ALL_CHANNELS) & (figures.detector != mine)]
    return None if charts.empty else charts.loc[charts.auroc.fillna(-1).idxmax()]


def by_condition(said: pd.DataFrame, detectors: Sequence[str], seed: int = 0) -> pd.DataFrame:
    """A row for each detector and condition, the clean lanes first.

    Args:
      said: what `compare` gave, of one learner.
      detectors: which.
      seed: of the bootstrap.

    Returns:
      columns detector, condition; detected, the share of lanes, of clean ones that with a false alarm; auroc, of the
      condition's lanes against the clean ones: each with _low and _high, as in `summary`.
    """
    draws = _draws(said.seed.unique(), seed)
    rows = []
    for name in detectors:
        table = said[said.detector == name]
        clean = table[table.clean]
        rows.append({"detector": name, "condition": CLEAN, **_share("detected", clean.alarm, clean.seed, draws)})
        for condition, lanes in table[~table.clean].groupby("condition", sort=False):
            both = pd.concat([clean, lanes])
            auroc = _auroc(both, draws[both.seed].to_numpy(float))
            detected = _share("detected", lanes.late_alarm, lanes.seed, draws)
            shown = detected | _interval("auroc", auroc, _enough(both))
            rows.append({"detector": name, "condition": condition, **shown})
    return pd.DataFrame(rows)


def _shares(table: pd.DataFrame, draws: pd.DataFrame) -> dict[str, float]:
    clean, disturbed = table[table.clean], table[~table.clean]
    false_alarms = _share("false_alarms", clean.alarm, clean.seed, draws)
    return false_alarms | _share("detected", disturbed.late_alarm, disturbed.seed, draws)


def _share(name: str, alarms: pd.Series, seeds: pd.Series, draws: pd.DataFrame) -> dict[str, float]:
    """Of lanes with an alarm, each lane of one of these seeds."""
    hit = alarms != NEVER
    own = hit.groupby(seeds).mean()
    # Resampling says nothing of what no seed has shown, and seeds that are all or nothing are trials.
    if own.isin((0, 1)).all() and own.mean() == hit.mean():
        estimate = wilson(int(own.sum()), len(own))
        return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
    weights = draws[seeds].to_numpy(float)
    with np.errstate(invalid="ignore"):
        shares = weights @ hit.to_numpy(float) / weights.sum(axis=1)
    return _interval(name, shares, len(own) >= FEWEST_SEEDS)


def _draws(seeds: np.ndarray, seed: int) -> pd.DataFrame:
    """How often each seed is drawn, in the sample itself (row 0) and in its bootstrap repetitions."""
    counts = np.random.default_rng(seed).multinomial(len(seeds), np.full(len(seeds), 1 / len(seeds)), REPETITIONS)
    return pd.DataFrame(np.vstack([np.ones(len(seeds), int), counts]), columns=seeds)


def _figures(table: pd.DataFrame, draws: pd.DataFrame) -> dict[str, np.ndarray]:
    """AUROC, share detected and median lead time of every draw."""
    weights = draws[table.seed].to_numpy(float)
    return {
        "auroc": _auroc(table, weights),
        "detected": _detected(table, weights),
        "lead_time": _lead_time(table, weights),
    }


def _detected(table: pd.DataFrame, weights: np.ndarray) -> np.ndarray:
    """The share of disturbed lanes with an alarm since the onset."""
    disturbed = ~table.clean.to_numpy()
    hit = table.late_alarm.to_numpy()[disturbed] != NEVER
    with np.errstate(invalid="ignore"):
        return weights[:, disturbed] @ hit.astype(float) / weights[:, disturbed].sum(axis=1)


def _auroc(table: pd.DataFrame, weights: np.ndarray) -> np.ndarray:
    """The share of pairs of a disturbed and a clean lane of one fold in which the disturbed one's score is higher."""
    clean = table.clean.to_numpy()
    score, fold = table.score.to_numpy(), table.fold.to_numpy()
    above = np.sign(_order(score)[clean][None] - _order(score)[~clean][:, None])
    concordant = 0.5 - 0.5 * above
    same = fold[clean][None] == fold[~clean][:, None]
    disturbed, control = weights[:, ~clean], weights[:, clean]
    with np.errstate(invalid="ignore"):
        return ((disturbed @ (concordant * same)) * control).sum(1) / ((disturbed @ same) * control).sum(1)


def _order(score: np.ndarray) -> np.ndarray:
    """Ranks, so that infinite scores can be subtracted; equal scores share one."""
    return np.unique(score, return_inverse=True)[1]


def _lead_time(table: pd.DataFrame, weights: np.ndarray) -> np.ndarray:
    """Weighted median of the steps from the first alarm since the onset to the collapse."""
    collapsed = (~table.clean & np.isfinite(table.collapse_time)).to_numpy()
    alarm = table.late_alarm.to_numpy()[collapsed]
    lead = np.where(alarm == NEVER, -np.inf, table.collapse_time.to_numpy()[collapsed] - alarm)
    if not len(lead):
        return np.full(len(weights), np.nan)
    order = np.argsort(lead)
    reached = weights[:, collapsed][:, order].cumsum(axis=1)
    half = (reached >= reached[:, -1:] / 2).argmax(axis=1)
    return np.where(reached[:, -1] > 0, lead[order][half], np.nan)


def _less(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The difference; of two that are the same infinity, zero."""
    with np.errstate(invalid="ignore"):
        return np.where(a == b, 0.0, a - b)


def _enough(table: pd.DataFrame) -> bool:
    """Whether clean and disturbed lanes are each of seeds enough for an interval."""
    return bool(table.groupby("clean").seed.nunique().min() >= FEWEST_SEEDS)


def _interval(name: str, values: np.ndarray, enough: bool) -> dict[str, float]:
    """The sample's own value, and the percentiles of its repetitions, where the seeds are `enough` for them."""
    repeated = np.sort(values[1:][~np.isnan(values[1:])])
    if not enough or not len(repeated):
        return {name: values[0], f"{name}_low": np.nan, f"{name}_high": np.nan}
    low, high = (repeated[round(q * (len(repeated) - 1))] for q in (0.025, 0.975))
    return {name: values[0], f"{name}_low": low, f"{name}_high": high}
