"""Compares detectors on lanes that they were not fitted to, at the same false-alarm rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from jaxaudit.analysis.statistics import wilson
from jaxaudit.monitoring.detector import ALL_CHANNELS, Detector
from jaxaudit.monitoring.labelled_lanes import LabelledLanes
from jaxaudit.monitoring.scoring import min_calibration_runs, threshold

NEVER = -1
"""The alarm step of a lane without an alarm."""

CLEAN = "clean"
"""The condition of clean lanes in tables."""

GAIN_FIGURES = ("auroc", "detected", "lead_time")
"""The figures by which the monitor is compared to every other detector."""

REPETITIONS = 1000
"""The number of bootstrap repetitions over seeds."""

MIN_SEEDS = 5
"""The fewest seeds with clean lanes, and with disturbed lanes, for a bootstrap interval."""


@dataclass(frozen=True)
class DetectionSettings:
    """The settings of a comparison of detectors.

    Attributes:
      folds: the number of folds of the seeds; each is tested by detectors that were fitted to other folds.
      alpha: false alarms per clean run.
      fitted: the share of the other folds' clean lanes that detectors are fitted to, in (0, 1); they are calibrated on
        the rest.
      seed: the seed of the split into folds.
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
    """The indices of the lanes of one fold that detectors are fitted to, calibrated on, and tested on."""

    fit: np.ndarray
    calibrate: np.ndarray
    test: np.ndarray


def split_lanes(lanes: LabelledLanes, settings: DetectionSettings) -> list[LaneSplit]:
    """Returns the folds; all lanes of a seed are in one fold.

    Raises:
      ValueError: there are too few clean lanes for alpha.
    """
    table = lanes.table
    seeds = np.random.default_rng(settings.seed).permutation(np.unique(table.seed))
    clean = {int(seed): lane for lane, seed in table.seed[table.clean].items()}
    folds = []
    for test_seeds in np.array_split(seeds, settings.folds):
        others = np.array([clean[int(seed)] for seed in seeds if seed not in test_seeds and int(seed) in clean])
        fit_count = max(round(settings.fitted * len(others)), 2)
        if len(others) - fit_count < min_calibration_runs(settings.alpha):
            raise ValueError(
                f"{lanes.learner}: {len(clean)} clean lanes are too few for {settings.alpha:g} false alarms per run in "
                f"{settings.folds} folds: {len(others) - fit_count} are left to calibrate on, and it takes "
                f"{min_calibration_runs(settings.alpha)}{_collapsing_note(lanes)}"
            )
        test = np.flatnonzero(table.seed.isin(test_seeds))
        folds.append(LaneSplit(others[:fit_count], others[fit_count:], test))
    return folds


def _collapsing_note(lanes: LabelledLanes) -> str:
    count = lanes.collapsing
    return f" ({count} more collapse undisturbed and are no clean lanes)" if count else ""


def compare(lanes: LabelledLanes, detectors: Sequence[Detector], settings: DetectionSettings) -> pd.DataFrame:
    """Fits every detector in every fold, and returns its score and alarm for every lane.

    In each fold a detector is fitted to clean lanes of the other folds, and its threshold is calibrated on the rest of
    their clean lanes. A lane's row is from the fold that tests it.

    Returns:
      A row per detector and lane, with the columns of `lanes.table` and: learner; lane, its index; detector, the name;
      family, the detector's `family`; fold, the number of the fold that tests the lane; score, the largest of all
      steps; threshold; alarm, the first step with a score above the threshold, or NEVER; late_alarm, the first such
      step at or after the onset, or NEVER.

    Raises:
      ValueError: there are too few clean lanes for alpha.
    """
    folds = split_lanes(lanes, settings)
    tables = []
    for detector in detectors:
        scores = [detector.fit(lanes.values[fold.fit], lanes.channels)(lanes.values) for fold in folds]
        limits = fold_thresholds(scores, folds, settings.alpha)
        alarms = lane_alarms(detector.name, lanes, scores, folds, limits)
        tables.append(alarms.assign(family=detector.family))
    return pd.concat(tables, ignore_index=True)


def fold_thresholds(scores: Sequence[np.ndarray], folds: Sequence[LaneSplit], alpha: float) -> list[float]:
    """Returns the threshold of every fold, given its scores `[lanes, T]` of all lanes."""
    return [
        threshold(fold_scores[fold.calibrate].max(axis=1), alpha)
        for fold_scores, fold in zip(scores, folds, strict=True)
    ]


def lane_alarms(
    detector: str,
    lanes: LabelledLanes,
    scores: Sequence[np.ndarray],
    folds: Sequence[LaneSplit],
    limits: Sequence[float],
) -> pd.DataFrame:
    """Returns one detector's score and alarm for every lane, in the columns of `compare` except the family.

    Args:
      detector: the name of the detector.
      lanes: the lanes.
      scores: the scores `[lanes, T]` in every fold; those of the lanes that the fold tests are used.
      folds: the folds.
      limits: the threshold of every fold.
    """
    tables = []
    for number, (fold_scores, fold, limit) in enumerate(zip(scores, folds, limits, strict=True)):
        tested = fold_scores[fold.test]
        table = lanes.table.iloc[fold.test].assign(learner=lanes.learner, lane=fold.test, fold=number)
        above = tested > limit
        late = above & (np.arange(tested.shape[1]) >= table.onset.to_numpy()[:, None])
        tables.append(
            table.assign(
                score=tested.max(axis=1), threshold=limit, alarm=_first_true(above), late_alarm=_first_true(late)
            )
        )
    return pd.concat(tables, ignore_index=True).assign(detector=detector)


def _first_true(above: np.ndarray) -> np.ndarray:
    """Returns the first step of each row `[n, T]` that is true, or NEVER: `[n]`."""
    return np.where(above.any(axis=1), above.argmax(axis=1), NEVER)


def summarise(alarms: pd.DataFrame, monitor: str, seed: int = 0) -> pd.DataFrame:
    """Returns a row of figures for each detector, the best by AUROC first.

    Args:
      alarms: the table of `compare`, for one learner.
      monitor: the name of the detector that gains are computed for.
      seed: the seed of the bootstrap.

    Returns:
      columns detector; family, if it is a column of `alarms`; false_alarms, the share of clean lanes with an alarm;
      detected, the share of disturbed lanes with an alarm since the onset; auroc; lead_time, the median over lanes that
      collapsed of the steps from the alarm to the collapse, minus infinity without an alarm; and gain_auroc,
      gain_detected and gain_lead_time, the monitor's figure minus this one, paired by lane. Each figure has an interval
      in columns with _low and _high. Intervals are bootstrap intervals over seeds, which are resampled with all their
      lanes; a share has Wilson's interval over seeds if no seed's lanes disagree.
    """
    draws = _bootstrap_draws(alarms.seed.unique(), seed)
    tables = {name: table.sort_values("lane") for name, table in alarms.groupby("detector", sort=False)}
    figures = {name: _bootstrap_figures(table, draws) for name, table in tables.items()}
    rows = []
    for name, table in tables.items():
        clean, disturbed = table[table.clean], table[~table.clean]
        enough = _enough_seeds(table)
        row = {"detector": name, **_share_interval("false_alarms", clean.alarm, clean.seed, draws)}
        row |= _share_interval("detected", disturbed.late_alarm, disturbed.seed, draws)
        if "family" in table:
            row["family"] = table.family.iloc[0]
        for figure in GAIN_FIGURES:
            if figure != "detected":
                row |= _bootstrap_interval(figure, figures[name][figure], enough)
            gain = _difference(figures[monitor][figure], figures[name][figure])
            row |= _bootstrap_interval(f"gain_{figure}", gain, enough)
        rows.append(row)
    return pd.DataFrame(rows).sort_values("auroc", ascending=False, ignore_index=True)


def best_chart(figures: pd.DataFrame, monitor: str) -> pd.Series | None:
    """Returns the row of `summarise` with the best chart of all channels, other than the monitor; None without one."""
    if "family" not in figures:
        return None
    charts = figures[(figures.family == ALL_CHANNELS) & (figures.detector != monitor)]
    return None if charts.empty else charts.loc[charts.auroc.fillna(-1).idxmax()]


def summarise_by_condition(alarms: pd.DataFrame, detectors: Sequence[str], seed: int = 0) -> pd.DataFrame:
    """Returns a row of figures for each detector and condition, the clean lanes first.

    Args:
      alarms: the table of `compare`, for one learner.
      detectors: the names of the detectors to summarise.
      seed: the seed of the bootstrap.

    Returns:
      columns detector, condition; detected, the share of lanes with an alarm since the onset, or with any alarm for
      clean lanes; auroc, of the condition's lanes against the clean ones. Both have _low and _high as in `summarise`.
    """
    draws = _bootstrap_draws(alarms.seed.unique(), seed)
    rows = []
    for name in detectors:
        table = alarms[alarms.detector == name]
        clean = table[table.clean]
        false_alarms = _share_interval("detected", clean.alarm, clean.seed, draws)
        rows.append({"detector": name, "condition": CLEAN, **false_alarms})
        for condition, lanes in table[~table.clean].groupby("condition", sort=False):
            both = pd.concat([clean, lanes])
            auroc = _auroc(both, draws[both.seed].to_numpy(float))
            figures = _share_interval("detected", lanes.late_alarm, lanes.seed, draws)
            figures |= _bootstrap_interval("auroc", auroc, _enough_seeds(both))
            rows.append({"detector": name, "condition": condition, **figures})
    return pd.DataFrame(rows)


def _share_interval(name: str, alarms: pd.Series, seeds: pd.Series, draws: pd.DataFrame) -> dict[str, float]:
    """Returns the share of lanes with an alarm and its interval, given the alarm and the seed of each lane."""
    alarmed = alarms != NEVER
    seed_shares = alarmed.groupby(seeds).mean()
    # Seeds that are all or nothing are trials, and resampling them would say nothing of what none has shown.
    if seed_shares.isin((0, 1)).all() and seed_shares.mean() == alarmed.mean():
        estimate = wilson(int(seed_shares.sum()), len(seed_shares))
        return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
    weights = draws[seeds].to_numpy(float)
    with np.errstate(invalid="ignore"):
        shares = weights @ alarmed.to_numpy(float) / weights.sum(axis=1)
    return _bootstrap_interval(name, shares, len(seed_shares) >= MIN_SEEDS)


def _bootstrap_draws(seeds: np.ndarray, seed: int) -> pd.DataFrame:
    """Returns how often each seed is drawn in the sample itself (row 0) and in each bootstrap repetition."""
    counts = np.random.default_rng(seed).multinomial(len(seeds), np.full(len(seeds), 1 / len(seeds)), REPETITIONS)
    return pd.DataFrame(np.vstack([np.ones(len(seeds), int), counts]), columns=seeds)


def _bootstrap_figures(table: pd.DataFrame, draws: pd.DataFrame) -> dict[str, np.ndarray]:
    """Returns AUROC, the share detected and the median lead time of every draw."""
    weights = draws[table.seed].to_numpy(float)
    return {
        "auroc": _auroc(table, weights),
        "detected": _detected(table, weights),
        "lead_time": _lead_time(table, weights),
    }


def _detected(table: pd.DataFrame, weights: np.ndarray) -> np.ndarray:
    """Returns the share of disturbed lanes with an alarm since the onset, for weights `[draws, lanes]`: `[draws]`."""
    disturbed = ~table.clean.to_numpy()
    alarmed = table.late_alarm.to_numpy()[disturbed] != NEVER
    with np.errstate(invalid="ignore"):
        return weights[:, disturbed] @ alarmed.astype(float) / weights[:, disturbed].sum(axis=1)


def _auroc(table: pd.DataFrame, weights: np.ndarray) -> np.ndarray:
    """Returns the share of pairs of a disturbed and a clean lane in a fold in which the disturbed score is higher."""
    clean = table.clean.to_numpy()
    # Scores may be infinite, and their ranks can be subtracted.
    ranks = np.unique(table.score.to_numpy(), return_inverse=True)[1]
    fold = table.fold.to_numpy()
    concordant = 0.5 - 0.5 * np.sign(ranks[clean][None] - ranks[~clean][:, None])
    same_fold = fold[clean][None] == fold[~clean][:, None]
    disturbed, control = weights[:, ~clean], weights[:, clean]
    with np.errstate(invalid="ignore"):
        concordant_pairs = ((disturbed @ (concordant * same_fold)) * control).sum(1)
        return concordant_pairs / ((disturbed @ same_fold) * control).sum(1)


def _lead_time(table: pd.DataFrame, weights: np.ndarray) -> np.ndarray:
    """Returns the weighted median of the steps from the first alarm since the onset to the collapse."""
    collapsed = (~table.clean & np.isfinite(table.collapse_time)).to_numpy()
    alarm = table.late_alarm.to_numpy()[collapsed]
    lead = np.where(alarm == NEVER, -np.inf, table.collapse_time.to_numpy()[collapsed] - alarm)
    if not len(lead):
        return np.full(len(weights), np.nan)
    order = np.argsort(lead)
    cumulative = weights[:, collapsed][:, order].cumsum(axis=1)
    median = (cumulative >= cumulative[:, -1:] / 2).argmax(axis=1)
    return np.where(cumulative[:, -1] > 0, lead[order][median], np.nan)


def _difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns a - b, and zero where both are the same infinity."""
    with np.errstate(invalid="ignore"):
        return np.where(a == b, 0.0, a - b)


def _enough_seeds(table: pd.DataFrame) -> bool:
    """Returns whether clean and disturbed lanes both have MIN_SEEDS seeds or more."""
    return bool(table.groupby("clean").seed.nunique().min() >= MIN_SEEDS)


def _bootstrap_interval(name: str, values: np.ndarray, enough: bool) -> dict[str, float]:
    """Returns values[0] as the estimate, and the 2.5th and 97.5th percentiles of the others, NaN if not `enough`."""
    repeated = np.sort(values[1:][~np.isnan(values[1:])])
    if not enough or not len(repeated):
        return {name: values[0], f"{name}_low": np.nan, f"{name}_high": np.nan}
    low, high = (repeated[round(q * (len(repeated) - 1))] for q in (0.025, 0.975))
    return {name: values[0], f"{name}_low": low, f"{name}_high": high}
