"""Monitors fitted to clean lanes of some learners, tested on the lanes of another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
import pandas as pd

from jaxaudit.monitoring.calibration import threshold
from jaxaudit.monitoring.channels import Channels, measured
from jaxaudit.monitoring.comparison import DetectionSettings, LaneSplit, judged, splits, summary, thresholds
from jaxaudit.monitoring.detector import MetaState
from jaxaudit.monitoring.lanes import LabelledLanes
from jaxaudit.monitoring.model import Params
from jaxaudit.monitoring.monitor import Expectation
from jaxaudit.monitoring.scorer import Scorer

OWN = "own"
AS_IT_IS = "as it is"
RECALIBRATED = "recalibrated"
RESTANDARDISED = "restandardised"
UNTRAINED = "untrained"


@dataclass(frozen=True)
class Folded:
    """A learner's lanes, and how they are split.

    Attributes:
      lanes: the lanes, of the channels that all learners have.
      parts: the folds.
    """

    lanes: LabelledLanes
    parts: list[LaneSplit]

    @property
    def fits(self) -> list[np.ndarray]:
        """The clean runs `[n, T, d]` fitted to in every fold; to be tested on other learners, in the first."""
        return [self.lanes.values[part.fit] for part in self.parts]

    @property
    def calibrate(self) -> np.ndarray:
        """The lanes that the first fold's monitor is calibrated on."""
        return self.lanes.values[self.parts[0].calibrate]


@dataclass(frozen=True)
class Source:
    """A monitor of one learner's clean lanes, or of several learners'.

    Attributes:
      expectation: fitted to their values as they are, all on one scale.
      limit: its threshold.
      params: of the model fitted to the same lanes, every learner's channels standardised by its own; of one learner,
        those of the expectation.
    """

    expectation: Expectation
    limit: float
    params: Params

    @classmethod
    def of(cls, learners: Sequence[Folded], detector: MetaState, alpha: float) -> Source:
        """Fitted to clean lanes of these learners."""
        names = learners[0].lanes.channels
        fits = [learner.fits[0] for learner in learners]
        expectation = detector.expect(_together(fits), names)
        calibrate = _together([learner.calibrate for learner in learners])
        limit = threshold(expectation.score(expectation.channels.pick(calibrate, names)).max(axis=1), alpha)
        params = expectation.params
        if len(learners) > 1:
            read = [Channels.of(names, runs).standardise(runs) for runs in fits]
            y, seen = (_together(parts) for parts in zip(*read, strict=True))
            params = detector.model.fit(detector.training, y, seen, detector.seed)
        return cls(expectation, limit, params)


@dataclass(frozen=True)
class Trial:
    """One way to come by a monitor of the tested learner.

    Attributes:
      fitted_to: whose lanes.
      way: OWN or another.
      scores: of all its lanes in every fold, `[lanes, T]`.
      limits: the thresholds; None: from the clean lanes that each fold calibrates on.
    """

    fitted_to: str
    way: str
    scores: list[np.ndarray]
    limits: list[float] | None = None


def transfer(
    learners: Sequence[LabelledLanes],
    detector: MetaState,
    settings: DetectionSettings,
    say: Callable[[str], None] = print,
) -> pd.DataFrame:
    """How well a monitor of some learners' clean lanes does on another learner's lanes.

    It reads the channels that all learners have. Fitted to is each other learner alone and, where there are several,
    all of them together; runs of different lengths are then cut to the shortest. Step t of a run is compared to step
    t of those fitted to, a later one than theirs to their last.

    Ways: OWN, fitted to the tested learner's own clean lanes, fold by fold, the reference for the others; AS_IT_IS,
    fitted to and calibrated on the others' lanes and not touched, so that alpha promises nothing; RECALIBRATED, the
    same scores with a threshold from the tested learner's clean lanes; RESTANDARDISED, only the model's parameters
    are the others', scale, envelopes and threshold are the tested learner's; UNTRAINED, likewise with random
    parameters, which shows what parameters are worth. A chart has no parameters, and so not the last two.

    Args:
      learners: two or more.
      detector: the monitor.
      settings: folds, alpha and shares, as in `compare`.
      say: told of the progress.

    Returns:
      rows of tested, fitted_to, way and the figures of `summary`, gains being those of OWN over the row's; none if
      the learners have no channel in common.
    """
    shared = _in_common(learners, settings)
    sources: dict[str, Source] = {}
    tables = []
    for tested in shared:
        others = [learner for learner in shared if learner is not tested]
        groups = [[learner] for learner in others] + ([others] if len(others) > 1 else [])
        for group in groups:
            name = _name(group)
            if name not in sources:
                say(f"{name}: fitted to be tested on other learners, {len(tested.lanes.channels)} channels")
                sources[name] = Source.of(group, detector, settings.alpha)
        tables.append(_tested(tested, {_name(group): sources[_name(group)] for group in groups}, detector, settings))
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def _in_common(learners: Sequence[LabelledLanes], settings: DetectionSettings) -> list[Folded]:
    """The learners' lanes, of the channels that are measured in every set of clean lanes a monitor is fitted to."""
    parts = [splits(lanes, settings) for lanes in learners]
    there = [
        {name for name, measures in zip(lanes.channels, measured(lanes.values[part.fit]), strict=True) if measures}
        for lanes, folds in zip(learners, parts, strict=True)
        for part in folds
    ]
    names = tuple(name for name in learners[0].channels if all(name in some for some in there))
    if not names:
        return []
    return [Folded(_only(lanes, names), folds) for lanes, folds in zip(learners, parts, strict=True)]


def _only(lanes: LabelledLanes, names: tuple[str, ...]) -> LabelledLanes:
    places = [lanes.channels.index(name) for name in names]
    return replace(lanes, channels=names, values=lanes.values[..., places])


def _tested(
    tested: Folded, sources: dict[str, Source], detector: MetaState, settings: DetectionSettings
) -> pd.DataFrame:
    lanes, parts = tested.lanes, tested.parts
    trials = [
        Trial(lanes.learner, OWN, [_scored(detector.expect(runs, lanes.channels), lanes) for runs in tested.fits])
    ]
    random = detector.model.init(jax.random.key(detector.seed), len(lanes.channels))
    has_parameters = bool(jax.tree.leaves(random))
    for name, source in sources.items():
        found = [_scored(source.expectation, lanes)] * len(parts)
        trials += [Trial(name, AS_IT_IS, found, [source.limit] * len(parts)), Trial(name, RECALIBRATED, found)]
        if has_parameters:
            trials.append(Trial(name, RESTANDARDISED, _among_own(tested, detector.model, source.params)))
    if has_parameters:
        trials.append(Trial("nothing", UNTRAINED, _among_own(tested, detector.model, random)))
    said = [
        judged(str(place), lanes, trial.scores, parts, trial.limits or thresholds(trial.scores, parts, settings.alpha))
        for place, trial in enumerate(trials)
    ]
    figures = summary(pd.concat(said, ignore_index=True), "0").set_index("detector")
    figures = figures.loc[[str(place) for place in range(len(trials))]].reset_index(drop=True)
    known = [{"tested": lanes.learner, "fitted_to": trial.fitted_to, "way": trial.way} for trial in trials]
    return pd.DataFrame(known).join(figures)


def _scored(expectation: Expectation, lanes: LabelledLanes) -> np.ndarray:
    return expectation.score(expectation.channels.pick(lanes.values, lanes.channels))


def _among_own(tested: Folded, model: Scorer, params: Params) -> list[np.ndarray]:
    """Scores by a model of these parameters among the tested learner's own clean lanes, in every fold."""
    lanes = tested.lanes
    return [_scored(Expectation.among(runs, lanes.channels, model, params), lanes) for runs in tested.fits]


def _name(learners: Sequence[Folded]) -> str:
    return " and ".join(learner.lanes.learner for learner in learners)


def _together(runs: Sequence[np.ndarray]) -> np.ndarray:
    """Runs `[n, T, d]` of several learners, cut to the shortest."""
    steps = min(values.shape[1] for values in runs)
    return np.concatenate([values[:, :steps] for values in runs])
