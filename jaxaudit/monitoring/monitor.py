"""The monitor: what clean runs are like, the scores it gives others by that, and when they are an alarm."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from jaxaudit.monitoring.calibration import threshold
from jaxaudit.monitoring.channels import Channels, series
from jaxaudit.monitoring.scorer import Reference, ScoreNormalizer, Scorer, by_other_parts
from jaxaudit.runtime import array_store

if TYPE_CHECKING:
    import xarray as xr

    from jaxaudit.monitoring.model import Params
    from jaxaudit.monitoring.training import Training

MODELS = {
    "ensemble": ("ensemble", "Ensemble"),
    "chart": ("charts", "Chart"),
    "lru": ("state_space", "LRU"),
    "gru": ("state_space", "GRU"),
    "kalman": ("state_space", "Kalman"),
}
"""Module and class of what runs can be scored by; all but the first need JAX, so that each is imported when named."""

DEFAULT = "ensemble"
"""Of MODELS."""

VERSION, READ = 3, (2, 3)
"""Of the file a monitor is saved in, and which can be read: one of version 2 is no ensemble, and else the same."""

Tree = TypeVar("Tree")


def scorer(model: str | Scorer, **settings: Any) -> Scorer:
    """One of MODELS by its name, with its defaults but for `settings`; a scorer is one already.

    Raises:
      ValueError: for an unknown name.
    """
    if not isinstance(model, str):
        return model
    if model not in MODELS:
        raise ValueError(f"no model '{model}'; there are: {', '.join(MODELS)}")
    module, name = MODELS[model]
    found: Scorer = getattr(importlib.import_module(f"jaxaudit.monitoring.{module}"), name)(**settings)
    return found


@dataclass(frozen=True)
class Expectation:
    """What is expected of a run, after clean ones.

    Attributes:
      model: what scores it: charts, or a state-space model.
      channels: what it reads.
      params: its parameters.
      reference: what clean runs look like to it.
      yardstick: by which its scores become one.
    """

    model: Scorer
    channels: Channels
    params: Params
    reference: Reference
    yardstick: ScoreNormalizer

    @classmethod
    def of(
        cls, clean: np.ndarray, names: Sequence[str], model: Scorer, training: Training | None = None, seed: int = 0
    ) -> Expectation:
        """Fitted to clean runs `[n, T, d]` with channels of these names; `training` is of a model with parameters."""
        channels = Channels.of(names, clean)
        y, seen = channels.standardise(channels.pick(clean, names))
        return cls.among(clean, names, model, model.fit(training, y, seen, seed))

    @classmethod
    def among(cls, clean: np.ndarray, names: Sequence[str], model: Scorer, params: Params) -> Expectation:
        """A model whose parameters are known, among clean runs `[n, T, d]`: all but the parameters is from these."""
        channels = Channels.of(names, clean)
        y, seen = channels.standardise(channels.pick(clean, names))

        def score(scored: np.ndarray, referred: np.ndarray) -> np.ndarray:
            reference = model.refer(params, y[referred], seen[referred])
            return model.score_runs(params, reference, y[scored], seen[scored])[0]

        yardstick = ScoreNormalizer.of(by_other_parts(score, len(y)))
        return cls(model, channels, params, single_precision(model.refer(params, y, seen)), yardstick)

    def scores(self, runs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Every score `[n, T, S]`, and the meta-states `[n, T, m]`, of runs `[n, T, d]` of its channels in their order.

        A score is infinite at a step without a value that every step of the clean runs had.
        """
        y, seen = self.channels.standardise(runs)
        scores, latents = self.model.score_runs(self.params, self.reference, y, seen)
        gone = ((seen == 0) & self.channels.complete).any(-1)
        return np.where(gone[..., None], np.inf, scores), latents

    def score(self, runs: np.ndarray) -> np.ndarray:
        """The scores combined into one, `[n, T]`."""
        return np.asarray(self.yardstick.combine(self.scores(runs)[0]))


class Scored(NamedTuple):
    """What a monitor says of n runs of T steps.

    Attributes:
      score: `[n, T]`, higher is more unusual; NaN in a gap.
      most: which kind of score was the most unusual, text `[n, T]`.
      latent: the meta-state, `[n, T, m]`.
    """

    score: np.ndarray
    most: np.ndarray
    latent: np.ndarray


def calibrated_on(runs: int, held_out: float = 0.5) -> int:
    """How many of some clean runs `Monitor.fit` keeps to calibrate on."""
    return min(max(round(held_out * runs), 1), runs - 1)


@dataclass(frozen=True)
class Monitor:
    """Scores runs by how unusual they are beside clean runs, with a threshold for alarms that is calibrated on clean
    runs.

    At most a share alpha of further clean runs has an alarm. This holds on average over sets of clean runs that the
    monitor is calibrated on, and not for each set (`threshold`).

    Attributes:
      expectation: what was fitted to some of the clean runs.
      clean: the largest score of each of the other clean runs, `[n]`.
      gaps: whether a step without any value was not recorded, and so has no score; otherwise a run without any value
        has diverged.
    """

    expectation: Expectation
    clean: np.ndarray
    gaps: bool = False

    @classmethod
    def fit(
        cls,
        clean: xr.Dataset | xr.DataArray,
        *,
        model: str | Scorer = DEFAULT,
        training: Training | None = None,
        held_out: float = 0.5,
        seed: int = 0,
        gaps: bool = False,
    ) -> Monitor:
        """Fitted to some clean runs and calibrated on the others.

        Args:
          clean: telemetry along step and one other dimension: a dataset, such as the control lanes of an audit's,
            `result.telemetry.isel(condition=0)`, or an array (run, step, channel).
          model: by which runs are scored, a scorer or the name of one of MODELS: "ensemble", several control charts,
            or "chart", one; both have nothing to train. Or a state-space model ("lru", "gru", "kalman").
          training: how a state-space model is trained.
          held_out: share of the runs to calibrate on.
          seed: of the split and of training.
          gaps: whether steps may be missing.

        Raises:
          ValueError: there are fewer than two runs, no channel differs between them, or no such model is known.
        """
        import xarray as xr

        clean = (series(clean) if isinstance(clean, xr.Dataset) else clean).transpose(..., "step", "channel")
        runs, names = clean.values, [str(name) for name in clean.channel.values]
        if runs.ndim != 3 or len(runs) < 2:
            raise ValueError(f"a monitor takes two clean runs or more, not {clean.sizes}")
        kept = calibrated_on(len(runs), held_out)
        order = np.random.default_rng(seed).permutation(len(runs))
        parts = (runs[order[kept:]], runs[order[:kept]])
        return cls.fitted(*parts, names, model=model, training=training, seed=seed, gaps=gaps)

    @classmethod
    def fitted(
        cls,
        fitted: np.ndarray,
        calibrated: np.ndarray,
        names: Sequence[str],
        *,
        model: str | Scorer = DEFAULT,
        training: Training | None = None,
        seed: int = 0,
        gaps: bool = True,
    ) -> Monitor:
        """Fits a monitor to clean runs `[n, T, d]` and calibrates it on others, given the names of their d channels."""
        expectation = Expectation.of(fitted, names, scorer(model), training, seed)
        blank = cls(expectation, np.zeros(0), gaps)
        said = blank.score_runs(expectation.channels.pick(calibrated, names))
        return replace(blank, clean=np.nanmax(said.score, axis=1))

    def threshold(self, alpha: float) -> float:
        """The score that a further clean run is above with a probability of at most alpha. Raises ValueError.

        The probability is an average over the clean runs it might have been calibrated on; with those in `clean` alone
        the false-alarm rate is Beta(n + 1 - k, k) distributed, k = ceil((n + 1) (1 - alpha)): for alpha = 0.05, nine
        times in ten between 0.3% and 15% with 19 runs, 2.0% and 8.9% with 100 (`calibration.rate_interval`).
        """
        return threshold(self.clean, alpha)

    def score(self, telemetry: xr.Dataset | xr.DataArray) -> xr.Dataset:
        """What it says of runs.

        Args:
          telemetry: a dataset along (..., step), or an array (..., step, channel); further channels are left aside.

        Returns:
          `score` (..., step), higher is more unusual, NaN in a gap; `most` (..., step), which kind of score was the
          most unusual; `latent` (..., step, entry).

        Raises:
          ValueError: a channel it reads is not there.
        """
        import xarray as xr

        if isinstance(telemetry, xr.Dataset):
            telemetry = series(telemetry)
        runs = self.expectation.channels.select(telemetry)
        lead = runs.shape[:-2]
        said = self.score_runs(runs.reshape(-1, *runs.shape[-2:]))
        dims = [str(dim) for dim in telemetry.dims if dim not in ("step", "channel")]
        data = {
            "score": ([*dims, "step"], said.score.reshape(*lead, -1)),
            "most": ([*dims, "step"], said.most.reshape(*lead, -1)),
            "latent": ([*dims, "step", "entry"], said.latent.reshape(*lead, *said.latent.shape[1:])),
        }
        coords = {name: values for name, values in telemetry.coords.items() if "channel" not in values.dims}
        return xr.Dataset(data, coords)

    def score_runs(self, runs: np.ndarray) -> Scored:
        """Scores an array `[n, T, d]` of the channels in `expectation.channels.names`, in that order; as `score`."""
        scores, latents = self.expectation.scores(runs)
        compared = np.asarray(self.expectation.yardstick.compare(scores))
        score = compared.max(axis=-1)
        if self.gaps:
            score = np.where(np.isfinite(runs).any(-1), score, np.nan)
        most = np.array(self.expectation.model.kinds)[compared.argmax(axis=-1)]
        return Scored(score, most, latents)

    def save(self, path: Path | str) -> None:
        """Writes one `.npz` file: arrays, and a description in JSON; nothing is pickled."""
        expectation = self.expectation
        names = {kind: name for name, (_, kind) in MODELS.items()}
        description = {
            "version": VERSION,
            "gaps": self.gaps,
            "scores": expectation.model.kinds,
            "model": names[type(expectation.model).__name__],
            "settings": asdict(expectation.model),  # type: ignore[call-overload]  # every model is a dataclass
            "channels": expectation.channels.names,
        }
        arrays = {
            "clean": self.clean,
            "channels": {name: getattr(expectation.channels, name) for name in ("center", "scale", "complete")},
            "params": expectation.params,
            "reference": expectation.reference,
            "yardstick": expectation.yardstick,
        }
        with open(path, "wb") as file:
            leaves: dict[str, Any] = _flattened(arrays)
            np.savez(file, description=np.array(json.dumps(description)), **leaves)

    @classmethod
    def load(cls, path: Path | str) -> Monitor:
        """Returns the monitor that `save` has written.

        Raises:
          ValueError: it is not a monitor's file, or of another version.
        """
        if Path(path).exists() and not Path(path).is_file():
            raise ValueError(f"{path} is not a file")
        try:
            arrays = array_store.read_npz(Path(path))
            description = json.loads(str(arrays.pop("description")))
            version = description["version"]
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
            raise ValueError(f"{path} is not a monitor's file") from None
        if version not in READ:
            known = " and ".join(map(str, READ))
            raise ValueError(f"{path} holds a monitor of version {version}, and this package reads {known}")
        settings = {k: tuple(v) if isinstance(v, list) else v for k, v in description["settings"].items()}
        model = scorer(description["model"], **settings)
        if tuple(description["scores"]) != model.kinds:
            raise ValueError(f"{path} holds a monitor whose scores this package does not know")
        none = np.zeros(0)
        standards = {name: arrays[f"channels/{name}"] for name in ("center", "scale", "complete")}
        expectation = Expectation(
            model,
            Channels(tuple(description["channels"]), **standards),
            _nested(arrays, "params/"),
            _restored(model.blank(), arrays, "reference"),
            _restored(ScoreNormalizer(none, none), arrays, "yardstick"),
        )
        return cls(expectation, arrays["clean"], description["gaps"])


def single_precision(tree: Tree) -> Tree:
    """A tree of NamedTuples, tuples and arrays, its arrays as float32."""
    if not isinstance(tree, tuple):
        found: Any = np.float32(tree)  # type: ignore[arg-type]
        return found
    parts = [single_precision(part) for part in tree]
    made: Any = type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    return made


def _children(tree: Any) -> dict[str, Any] | None:
    """The parts of a node of a tree by name; None of a leaf."""
    if isinstance(tree, Mapping):
        return dict(tree)
    if isinstance(tree, tuple):
        return dict(zip(getattr(tree, "_fields", map(str, range(len(tree)))), tree, strict=True))
    return None


def _flattened(tree: Any, path: str = "") -> dict[str, np.ndarray]:
    """The leaves of a tree by their paths, parts separated by "/"."""
    children = _children(tree)
    if children is None:
        return {path: np.asarray(tree)}
    found: dict[str, np.ndarray] = {}
    for name, child in children.items():
        found |= _flattened(child, f"{path}/{name}" if path else name)
    return found


def _restored(blank: Tree, arrays: Mapping[str, np.ndarray], path: str) -> Tree:
    """A tree of NamedTuples and tuples in the shape of `blank`, whose leaves are among the arrays."""
    children = _children(blank)
    if children is None:
        leaf: Any = arrays[path]
        return leaf
    parts = [_restored(child, arrays, f"{path}/{name}") for name, child in children.items()]
    made: Any = type(blank)(*parts) if hasattr(blank, "_fields") else tuple(parts)
    return made


def _nested(arrays: Mapping[str, np.ndarray], path: str) -> Any:
    """The dictionary of dictionaries that the arrays under a path were."""
    found: dict[str, Any] = {}
    for name, array in arrays.items():
        if name.startswith(path):
            *inner, last = name[len(path) :].split("/")
            node = found
            for part in inner:
                node = node.setdefault(part, {})
            node[last] = array
    return found
