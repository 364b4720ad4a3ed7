"""The monitor: it learns what clean runs are like, scores other runs by that, and raises alarms at a threshold."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from jaxaudit.monitoring.scoring import Params, Reference, ScoreNormalizer, Scorer, cross_validated_scores, threshold
from jaxaudit.monitoring.telemetry import ChannelScaler, stack_channels
from jaxaudit.runtime import array_store

if TYPE_CHECKING:
    import xarray as xr

    from jaxaudit.monitoring.meta_state import Training

MODELS = {
    "ensemble": ("ensemble", "Ensemble"),
    "chart": ("charts", "Chart"),
    "lru": ("state_space", "LRU"),
    "gru": ("state_space", "GRU"),
    "kalman": ("state_space", "Kalman"),
}
"""The module and class of each scorer by name. All but the first need JAX, so each is imported when it is used."""

DEFAULT = "ensemble"

VERSION, READABLE_VERSIONS = 3, (2, 3)
"""The version of the file that `Monitor.save` writes, and those that `load` reads. Version 2 had no ensemble."""

Tree = TypeVar("Tree")


def scorer(model: str | Scorer, **settings: Any) -> Scorer:
    """Returns the scorer of a name in MODELS, with these settings; a scorer is returned as it is.

    Raises:
      ValueError: the name is unknown.
    """
    if not isinstance(model, str):
        return model
    if model not in MODELS:
        raise ValueError(f"no model '{model}'; there are: {', '.join(MODELS)}")
    module, name = MODELS[model]
    instance: Scorer = getattr(importlib.import_module(f"jaxaudit.monitoring.{module}"), name)(**settings)
    return instance


@dataclass(frozen=True)
class Expectation:
    """A scorer fitted to clean runs: all that is needed to score further runs.

    Attributes:
      model: the scorer: charts, or a state-space model.
      channels: the channels that it reads, with their scales.
      params: the model's parameters.
      reference: what the model has learned of clean runs besides.
      normalizer: combines the model's scores into one.
    """

    model: Scorer
    channels: ChannelScaler
    params: Params
    reference: Reference
    normalizer: ScoreNormalizer

    @classmethod
    def fit(
        cls,
        clean: np.ndarray,
        names: Sequence[str],
        model: Scorer,
        training: Training | None = None,
        seed: int = 0,
        params: Params = None,
    ) -> Expectation:
        """Fits a scorer to clean runs `[n, T, d]` with channels of these names.

        Args:
          clean: the runs.
          names: the names of the d channels.
          model: the scorer.
          training: the settings of training, for a model with parameters.
          seed: the seed of training.
          params: parameters of a trained model; all else is fitted to the runs. None: they are trained.
        """
        channels = ChannelScaler.fit(names, clean)
        y, observed = channels.standardise(channels.select_columns(clean, names))
        if params is None:
            params = model.fit(training, y, observed, seed)

        def score(scored: np.ndarray, referred: np.ndarray) -> np.ndarray:
            reference = model.fit_reference(params, y[referred], observed[referred])
            return model.score_runs(params, reference, y[scored], observed[scored])[0]

        normalizer = ScoreNormalizer.fit(cross_validated_scores(score, len(y)))
        reference = single_precision(model.fit_reference(params, y, observed))
        return cls(model, channels, params, reference, normalizer)

    def scores_and_latents(self, runs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns all scores `[n, T, S]` and the meta-states `[n, T, m]` of runs `[n, T, d]` of its channels, in order.

        Scores are infinite at a step without a value of a channel that is complete in clean runs.
        """
        y, observed = self.channels.standardise(runs)
        scores, latents = self.model.score_runs(self.params, self.reference, y, observed)
        diverged = ((observed == 0) & self.channels.complete).any(-1)
        return np.where(diverged[..., None], np.inf, scores), latents

    def score(self, runs: np.ndarray, names: Sequence[str]) -> np.ndarray:
        """Returns the combined scores `[n, T]` of runs `[n, T, d]` with channels of these names, in any order."""
        scores, _ = self.scores_and_latents(self.channels.select_columns(runs, names))
        return np.asarray(self.normalizer.combine(scores))


class Scored(NamedTuple):
    """The scores of n runs of T steps.

    Attributes:
      score: the combined score, `[n, T]`; higher is more unusual, NaN in a gap.
      most: the name of the most unusual of the scores, text `[n, T]`.
      latent: the meta-state, `[n, T, m]`.
    """

    score: np.ndarray
    most: np.ndarray
    latent: np.ndarray


def calibration_count(runs: int, held_out: float = 0.5) -> int:
    """Returns how many of n clean runs `Monitor.fit` holds out for calibration: at least 1, at most n - 2."""
    return max(min(round(held_out * runs), runs - 2), 1)


@dataclass(frozen=True, repr=False)
class Monitor:
    """Scores runs by how unusual they are compared to clean runs, and has a threshold for alarms.

    The threshold is calibrated on clean runs: at most a share alpha of further clean runs has an alarm. This holds on
    average over sets of clean runs to calibrate on, and not for each set (`threshold`).

    Attributes:
      expectation: the scorer, fitted to some of the clean runs.
      clean: the largest score of each of the other clean runs, `[n]`.
      gaps: whether a step without any value counts as not recorded, and has no score; otherwise a run without any
        value has diverged.
    """

    expectation: Expectation
    clean: np.ndarray
    gaps: bool = False

    def __repr__(self) -> str:
        names = self.expectation.channels.names
        return (
            f"Monitor of {len(names)} channels ({', '.join(names)}): {self.expectation.model.title}, calibrated on "
            f"{len(self.clean)} clean runs"
        )

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
        """Fits a monitor to some clean runs and calibrates it on the others.

        Args:
          clean: a dataset with a variable for each channel along (run, step) or (seed, step), such as the control lanes
            of an audit, `result.telemetry.isel(condition=0)`; or an array (run, step, channel) with names of channels.
          model: the scorer, or its name in MODELS: "ensemble" (several control charts) and "chart" (one) have nothing
            to train; "lru", "gru" and "kalman" are state-space models.
          training: the settings of a state-space model's training.
          held_out: the share of the runs to calibrate on.
          seed: the seed of the split and of training.
          gaps: whether steps may be missing.

        Raises:
          ValueError: there are fewer than three runs, no channel differs between them, or the model's name is unknown.
        """
        import xarray as xr

        clean = (stack_channels(clean) if isinstance(clean, xr.Dataset) else clean).transpose(..., "step", "channel")
        runs, names = clean.values, [str(name) for name in clean.channel.values]
        if runs.ndim != 3 or len(runs) < 3:
            sizes = ", ".join(f"{dim} {size}" for dim, size in clean.sizes.items())
            raise ValueError(
                f"a monitor takes three clean runs or more, two to fit it to and one to calibrate it on, not {sizes}"
            )
        count = calibration_count(len(runs), held_out)
        order = np.random.default_rng(seed).permutation(len(runs))
        fitted, calibrated = runs[order[count:]], runs[order[:count]]
        return cls.fitted(fitted, calibrated, names, model=model, training=training, seed=seed, gaps=gaps)

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
        """Returns a monitor that is fitted to clean runs and calibrated on others, both `[n, T, d]`.

        Args:
          fitted: the clean runs to fit to.
          calibrated: the clean runs to calibrate on.
          names: the names of the d channels.
          model, training, seed, gaps: as in `fit`.
        """
        expectation = Expectation.fit(fitted, names, scorer(model), training, seed)
        uncalibrated = cls(expectation, np.zeros(0), gaps)
        scored = uncalibrated.score_runs(expectation.channels.select_columns(calibrated, names))
        return replace(uncalibrated, clean=np.nanmax(scored.score, axis=1))

    def threshold(self, alpha: float) -> float:
        """Returns the score that a further clean run exceeds with a probability of at most alpha.

        The probability is an average over the clean runs that the monitor might have been calibrated on. Given those in
        `clean`, the false-alarm rate has the distribution Beta(n + 1 - k, k), with k = ceil((n + 1) (1 - alpha)). For
        alpha = 0.05 it is nine times in ten between 0.3% and 15% with 19 runs, and between 2.0% and 8.9% with 100
        (`scoring.false_alarm_interval`).

        Raises:
          ValueError: alpha is outside (0, 1), or there are too few runs in `clean` for it.
        """
        return threshold(self.clean, alpha)

    def score(self, telemetry: xr.Dataset | xr.DataArray) -> xr.Dataset:
        """Scores runs.

        Args:
          telemetry: a dataset whose variables have a dimension step, and may have run, seed and condition; or an array
            (..., step, channel). Further channels are ignored.

        Returns:
          A dataset with `score` (..., step), which is higher the more unusual the run is, and NaN in a gap; `most`
          (..., step), the name of the most unusual of the scores; and `latent` (..., step, entry), the meta-state.

        Raises:
          ValueError: a channel that the monitor reads is missing.
        """
        import xarray as xr

        if isinstance(telemetry, xr.Dataset):
            telemetry = stack_channels(telemetry)
        runs = self.expectation.channels.select(telemetry)
        lead = runs.shape[:-2]
        scored = self.score_runs(runs.reshape(-1, *runs.shape[-2:]))
        dims = [str(dim) for dim in telemetry.dims if dim not in ("step", "channel")]
        data = {
            "score": ([*dims, "step"], scored.score.reshape(*lead, -1)),
            "most": ([*dims, "step"], scored.most.reshape(*lead, -1)),
            "latent": ([*dims, "step", "entry"], scored.latent.reshape(*lead, *scored.latent.shape[1:])),
        }
        coords = {name: values for name, values in telemetry.coords.items() if "channel" not in values.dims}
        return xr.Dataset(data, coords)

    def score_runs(self, runs: np.ndarray) -> Scored:
        """Scores an array `[n, T, d]` of the channels in `expectation.channels.names`, in that order, as `score`."""
        scores, latents = self.expectation.scores_and_latents(runs)
        normalised = np.asarray(self.expectation.normalizer.normalize(scores))
        score = normalised.max(axis=-1)
        if self.gaps:
            score = np.where(np.isfinite(runs).any(-1), score, np.nan)
        most = np.array(self.expectation.model.score_names)[normalised.argmax(axis=-1)]
        return Scored(score, most, latents)

    def save(self, path: Path | str) -> None:
        """Writes the monitor to one `.npz` file of arrays and a description in JSON; nothing is pickled."""
        expectation = self.expectation
        names = {class_name: name for name, (_, class_name) in MODELS.items()}
        description = {
            "version": VERSION,
            "gaps": self.gaps,
            "scores": expectation.model.score_names,
            "model": names[type(expectation.model).__name__],
            "settings": asdict(expectation.model),  # type: ignore[call-overload]  # every model is a dataclass
            "channels": expectation.channels.names,
        }
        arrays = {
            "clean": self.clean,
            "channels": {name: getattr(expectation.channels, name) for name in ("center", "scale", "complete")},
            "params": expectation.params,
            "reference": expectation.reference,
            "yardstick": expectation.normalizer,
        }
        with open(path, "wb") as file:
            leaves: dict[str, Any] = _flattened(arrays)
            np.savez(file, description=np.array(json.dumps(description)), **leaves)

    @classmethod
    def load(cls, path: Path | str) -> Monitor:
        """Reads a monitor that `save` has written.

        Raises:
          ValueError: the file is not a monitor's, or has an unknown version or unknown scores.
        """
        if Path(path).exists() and not Path(path).is_file():
            raise ValueError(f"{path} is not a file")
        try:
            arrays = array_store.read_npz(Path(path))
            description = json.loads(str(arrays.pop("description")))
            version = description["version"]
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
            raise ValueError(f"{path} is not a monitor's file") from None
        if version not in READABLE_VERSIONS:
            readable = " and ".join(map(str, READABLE_VERSIONS))
            raise ValueError(f"{path} holds a monitor of version {version}, and this package reads {readable}")
        settings = {k: tuple(v) if isinstance(v, list) else v for k, v in description["settings"].items()}
        model = scorer(description["model"], **settings)
        if tuple(description["scores"]) != model.score_names:
            raise ValueError(f"{path} holds a monitor whose scores this package does not know")
        scales = {name: arrays[f"channels/{name}"] for name in ("center", "scale", "complete")}
        expectation = Expectation(
            model,
            ChannelScaler(tuple(description["channels"]), **scales),
            _nested(arrays, "params/"),
            _restored(model.empty_reference(), arrays, "reference"),
            ScoreNormalizer(arrays["yardstick/middle"], arrays["yardstick/spread"]),
        )
        return cls(expectation, arrays["clean"], description["gaps"])


def single_precision(tree: Tree) -> Tree:
    """Returns a tree of NamedTuples, tuples and arrays with its arrays as float32."""
    arrays = {path: np.float32(array) for path, array in _flattened(tree).items()}
    return _restored(tree, arrays, "")


def _children(tree: Any) -> dict[str, Any] | None:
    """Returns the children of a node by name, and None for a leaf."""
    if isinstance(tree, Mapping):
        return dict(tree)
    if isinstance(tree, tuple):
        return dict(zip(getattr(tree, "_fields", map(str, range(len(tree)))), tree, strict=True))
    return None


def _joined(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _flattened(tree: Any, path: str = "") -> dict[str, np.ndarray]:
    """Returns the leaves of a tree by their paths, such as "reference/telemetry/mean"."""
    children = _children(tree)
    if children is None:
        return {path: np.asarray(tree)}
    leaves: dict[str, np.ndarray] = {}
    for name, child in children.items():
        leaves |= _flattened(child, _joined(path, name))
    return leaves


def _restored(like: Tree, arrays: Mapping[str, Any], path: str) -> Tree:
    """Returns a tree with the structure of `like`, made of NamedTuples and tuples, whose leaves are the arrays."""
    children = _children(like)
    if children is None:
        leaf: Any = arrays[path]
        return leaf
    restored = [_restored(child, arrays, _joined(path, name)) for name, child in children.items()]
    node: Any = type(like)(*restored) if hasattr(like, "_fields") else tuple(restored)
    return node


def _nested(arrays: Mapping[str, np.ndarray], path: str) -> Any:
    """Returns the arrays under a path as nested dictionaries."""
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        if name.startswith(path):
            *inner, last = name[len(path) :].split("/")
            node = tree
            for part in inner:
                node = node.setdefault(part, {})
            node[last] = array
    return tree
