"""Monitors fitted to clean lanes of some learners, tested on the lanes of another learner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
import pandas as pd

from jaxaudit.monitoring.comparison import (
    DetectionSettings,
    LaneSplit,
    fold_thresholds,
    lane_alarms,
    split_lanes,
    summarise,
)
from jaxaudit.monitoring.detector import MonitorDetector
from jaxaudit.monitoring.labelled_lanes import LabelledLanes
from jaxaudit.monitoring.monitor import Expectation
from jaxaudit.monitoring.scoring import Params, threshold
from jaxaudit.monitoring.telemetry import ChannelScaler, varying_channels

OWN = "own"
AS_IT_IS = "as it is"
RECALIBRATED = "recalibrated"
RESTANDARDISED = "restandardised"
UNTRAINED = "untrained"


@dataclass(frozen=True)
class SplitLanes:
    """A learner's lanes and their folds.

    Attributes:
      lanes: the lanes, with the channels that all learners have.
      folds: the folds.
    """

    lanes: LabelledLanes
    folds: list[LaneSplit]

    @property
    def fit_runs(self) -> list[np.ndarray]:
        """For each fold, the clean runs `[n, T, d]` to which this learner's own monitor is fitted.

        A monitor that is tested on other learners is fitted to the runs of the first fold.
        """
        return [self.lanes.values[fold.fit] for fold in self.folds]

    @property
    def calibration_runs(self) -> np.ndarray:
        """The clean runs `[n, T, d]` that the first fold's monitor is calibrated on."""
        return self.lanes.values[self.folds[0].calibrate]


@dataclass(frozen=True)
class Source:
    """A monitor of the clean lanes of one or several learners, to be tested on another.

    Attributes:
      expectation: the scorer, fitted to the lanes' values as they are, on one scale.
      limit: its threshold.
      params: parameters of the model fitted to the same lanes with each learner's channels standardised by its own
        scale; for one learner, those of `expectation`.
    """

    expectation: Expectation
    limit: float
    params: Params

    @classmethod
    def fit(cls, learners: Sequence[SplitLanes], detector: MonitorDetector, alpha: float) -> Source:
        """Fits a monitor to clean lanes of these learners, and calibrates it on others of their clean lanes."""
        names = learners[0].lanes.channels
        runs = [learner.fit_runs[0] for learner in learners]
        expectation = detector.fit_expectation(_concatenate_cut(runs), names)
        calibration = _concatenate_cut([learner.calibration_runs for learner in learners])
        scores = expectation.score(calibration, names)
        params = expectation.params
        if len(learners) > 1:
            standardised = [ChannelScaler.fit(names, values).standardise(values) for values in runs]
            y, observed = (_concatenate_cut(parts) for parts in zip(*standardised, strict=True))
            params = detector.model.fit(detector.training, y, observed, detector.seed)
        return cls(expectation, threshold(scores.max(axis=1), alpha), params)


def transfer(
    learners: Sequence[LabelledLanes],
    detector: MonitorDetector,
    settings: DetectionSettings,
    say: Callable[[str], None] = print,
) -> pd.DataFrame:
    """Tests monitors of some learners' clean lanes on another learner's lanes.

    Monitors read the channels that all learners have. One is fitted to each other learner and, if there are several,
    one to all others together; runs of different lengths are then cut to the shortest. Step t of a run is compared to
    step t of the clean runs, and steps after their last to their last.

    The ways are: OWN, fitted to the tested learner's clean lanes fold by fold, as the reference for the others;
    AS_IT_IS, fitted to and calibrated on the other learners' lanes without any change, so that alpha promises nothing;
    RECALIBRATED, the same scores with a threshold from the tested learner's clean lanes; RESTANDARDISED, in which only
    the model's parameters are the other learners', and scale, envelopes and threshold are the tested learner's; and
    UNTRAINED, the same with random parameters, which shows what trained parameters contribute. A chart has no
    parameters, and so not the last two.

    Args:
      learners: the lanes of two or more learners.
      detector: the monitor.
      settings: folds, alpha and shares, as in `compare`.
      say: receives lines on the progress.

    Returns:
      rows of tested, fitted_to, way and the figures of `summarise`, in which gains are those of OWN over the row's; an
      empty table if the learners have no channel in common.
    """
    shared = _with_common_channels(learners, settings)
    sources: dict[str, Source] = {}
    tables = []
    for tested in shared:
        others = [learner for learner in shared if learner is not tested]
        groups = [[learner] for learner in others] + ([others] if len(others) > 1 else [])
        names = [" and ".join(learner.lanes.learner for learner in group) for group in groups]
        for name, group in zip(names, groups, strict=True):
            if name not in sources:
                say(f"{name}: fitted to be tested on other learners, {len(tested.lanes.channels)} channels")
                sources[name] = Source.fit(group, detector, settings.alpha)
        tables.append(_test(tested, {name: sources[name] for name in names}, detector, settings))
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def _with_common_channels(learners: Sequence[LabelledLanes], settings: DetectionSettings) -> list[SplitLanes]:
    """Returns the lanes with the channels that vary in every set of clean lanes that a monitor is fitted to."""
    folds = [split_lanes(lanes, settings) for lanes in learners]
    varying = [
        {name for name, varies in zip(lanes.channels, varying_channels(lanes.values[fold.fit]), strict=True) if varies}
        for lanes, lane_folds in zip(learners, folds, strict=True)
        for fold in lane_folds
    ]
    names = tuple(name for name in learners[0].channels if all(name in channels for channels in varying))
    if not names:
        return []
    shared = []
    for lanes, lane_folds in zip(learners, folds, strict=True):
        values = lanes.values[..., [lanes.channels.index(name) for name in names]]
        shared.append(SplitLanes(replace(lanes, channels=names, values=values), lane_folds))
    return shared


def _test(
    tested: SplitLanes, sources: dict[str, Source], detector: MonitorDetector, settings: DetectionSettings
) -> pd.DataFrame:
    """Returns the rows of `transfer` for one tested learner, given the monitors of the others by title."""
    lanes, folds = tested.lanes, tested.folds
    rows: list[dict[str, str]] = []
    alarms = []

    def add(fitted_to: str, way: str, scores: list[np.ndarray], limits: list[float] | None = None) -> None:
        limits = limits or fold_thresholds(scores, folds, settings.alpha)
        alarms.append(lane_alarms(str(len(rows)), lanes, scores, folds, limits))
        rows.append({"tested": lanes.learner, "fitted_to": fitted_to, "way": way})

    def add_with_params(fitted_to: str, way: str, params: Params) -> None:
        fitted = [Expectation.fit(runs, lanes.channels, detector.model, params=params) for runs in tested.fit_runs]
        add(fitted_to, way, [expectation.score(lanes.values, lanes.channels) for expectation in fitted])

    add(lanes.learner, OWN, [detector.fit(runs, lanes.channels)(lanes.values) for runs in tested.fit_runs])
    random_params = detector.model.init(jax.random.key(detector.seed), len(lanes.channels))
    has_parameters = bool(jax.tree.leaves(random_params))
    for name, source in sources.items():
        scores = [source.expectation.score(lanes.values, lanes.channels)] * len(folds)
        add(name, AS_IT_IS, scores, [source.limit] * len(folds))
        add(name, RECALIBRATED, scores)
        if has_parameters:
            add_with_params(name, RESTANDARDISED, source.params)
    if has_parameters:
        add_with_params("nothing", UNTRAINED, random_params)
    figures = summarise(pd.concat(alarms, ignore_index=True), "0").set_index("detector")
    figures = figures.loc[[str(index) for index in range(len(rows))]].reset_index(drop=True)
    return pd.DataFrame(rows).join(figures)


def _concatenate_cut(runs: Sequence[np.ndarray]) -> np.ndarray:
    """Returns runs `[n, T, d]` of several learners in one array, cut to the shortest."""
    steps = min(values.shape[1] for values in runs)
    return np.concatenate([values[:, :steps] for values in runs])
