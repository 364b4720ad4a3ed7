"""The monitor: what clean runs are like, the scores it gives others by that, and when they are an alarm."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from flax.serialization import from_state_dict, to_state_dict
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxaudit import npz
from jaxaudit.metastate.calibration import threshold
from jaxaudit.metastate.channels import Channels, series
from jaxaudit.metastate.charts import NONE, Chart
from jaxaudit.metastate.gru import GRU
from jaxaudit.metastate.kalman import Kalman
from jaxaudit.metastate.lru import LRU
from jaxaudit.metastate.model import Params
from jaxaudit.metastate.scorer import Reference, Scorer, Yardstick, by_other_half, score_all
from jaxaudit.metastate.training import Training
from jaxaudit.precision import float32_products

MODELS: dict[str, type] = {"chart": Chart, "lru": LRU, "gru": GRU, "kalman": Kalman}

DEFAULT = "chart"
"""Of MODELS."""

VERSION = 2
"""Of the file a monitor is saved in."""


def scorer(model: str | Scorer) -> Scorer:
    """One of MODELS by its name, with its defaults; a scorer is one already.

    Raises:
      ValueError: for an unknown name.
    """
    if not isinstance(model, str):
        return model
    if model not in MODELS:
        raise ValueError(f"no model '{model}'; there are: {', '.join(MODELS)}")
    return MODELS[model]()


@dataclass(frozen=True)
class Expectation:
    """What is expected of a run, after clean ones.

    Attributes:
      model: what scores it: a chart, or a state-space model.
      channels: what it reads.
      params: its parameters.
      reference: what clean runs look like to it.
      yardstick: by which its scores become one.
    """

    model: Scorer
    channels: Channels
    params: Params
    reference: Reference
    yardstick: Yardstick

    @classmethod
    def of(
        cls, clean: np.ndarray, names: Sequence[str], model: Scorer, training: Training, seed: int = 0
    ) -> Expectation:
        """Fitted to clean runs `[n, T, d]` with channels of these names."""
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
            return np.asarray(_scored(model, params, reference, y[scored], seen[scored])[0])

        yardstick = Yardstick.of(by_other_half(score, len(y)))
        return cls(model, channels, params, model.refer(params, y, seen), yardstick)

    def scores(self, runs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Every score `[n, T, S]`, and the meta-states `[n, T, m]`, of runs `[n, T, d]` of its channels in their order.

        A score is infinite at a step without a value that every step of the clean runs had.
        """
        y, seen = self.channels.standardise(runs)
        scores, latents = _scored(self.model, self.params, self.reference, y, seen)
        gone = ((seen == 0) & self.channels.complete).any(-1)
        return np.where(gone[..., None], np.inf, scores), np.asarray(latents)

    def score(self, runs: np.ndarray) -> np.ndarray:
        """The scores as one, `[n, T]`."""
        return np.asarray(self.yardstick.combine(self.scores(runs)[0]))


@partial(jax.jit, static_argnums=0)
@float32_products
def _scored(
    model: Scorer, params: Params, reference: Reference, y: jax.Array, seen: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return jax.vmap(partial(score_all, model, params, reference))(jnp.asarray(y), jnp.asarray(seen))


def calibrated_on(runs: int, held_out: float = 0.5) -> int:
    """How many of some clean runs `Monitor.fit` keeps to calibrate on."""
    return min(max(round(held_out * runs), 1), runs - 1)


@dataclass(frozen=True)
class Monitor:
    """An expectation, and how unusual clean runs looked to it that it was not fitted to.

    That at most a share alpha of clean runs has an alarm is so on average over sets of such runs, not with each set
    (`threshold`).

    Attributes:
      expectation: what it expects.
      clean: the largest score of each of those runs, `[n]`.
      gaps: whether a step without any value is one that was not recorded, and has no score; otherwise a run that has
        no value has diverged.
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
          model: by which runs are scored, one of MODELS or its name: a `Chart`, which has nothing to train, or a
            state-space model ("lru", "gru", "kalman").
          training: how a state-space model is trained.
          held_out: share of the runs to calibrate on.
          seed: of the split and of training.
          gaps: whether steps may be missing.

        Raises:
          ValueError: there are fewer than two runs, no channel differs between them, or no such model is known.
        """
        clean = (series(clean) if isinstance(clean, xr.Dataset) else clean).transpose(..., "step", "channel")
        runs, lead = clean.values, clean.dims[0]
        if runs.ndim != 3 or len(runs) < 2:
            raise ValueError(f"a monitor takes two clean runs or more, not {clean.sizes}")
        kept = calibrated_on(len(runs), held_out)
        order = np.random.default_rng(seed).permutation(len(runs))
        parts = (clean.isel({lead: order[kept:]}), clean.isel({lead: order[:kept]}))
        return cls.fitted(*parts, model=model, training=training, seed=seed, gaps=gaps)

    @classmethod
    def fitted(
        cls,
        fitted: xr.DataArray,
        calibrated: xr.DataArray,
        *,
        model: str | Scorer = DEFAULT,
        training: Training | None = None,
        seed: int = 0,
        gaps: bool = True,
    ) -> Monitor:
        """As `fit`, of clean runs `(run, step, channel)` to fit to and of others to calibrate on."""
        names = [str(name) for name in fitted.channel.values]
        expectation = Expectation.of(fitted.values, names, scorer(model), training or Training(), seed)
        blank = cls(expectation, np.zeros(0), gaps)
        return replace(blank, clean=np.nanmax(blank.score(calibrated).score.values, axis=1))

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
        if isinstance(telemetry, xr.Dataset):
            telemetry = series(telemetry)
        runs = self.expectation.channels.select(telemetry)
        lead = runs.shape[:-2]
        scores, latents = self.expectation.scores(runs.reshape(-1, *runs.shape[-2:]))
        compared = np.asarray(self.expectation.yardstick.compare(scores))
        score = compared.max(axis=-1)
        if self.gaps:
            score = np.where(np.isfinite(runs.reshape(scores.shape[0], *runs.shape[-2:])).any(-1), score, np.nan)
        most = np.array(self.expectation.model.kinds)[compared.argmax(axis=-1)]
        dims = [str(dim) for dim in telemetry.dims if dim not in ("step", "channel")]
        data = {
            "score": ([*dims, "step"], score.reshape(*lead, -1)),
            "most": ([*dims, "step"], most.reshape(*lead, -1)),
            "latent": ([*dims, "step", "entry"], latents.reshape(*lead, *latents.shape[1:])),
        }
        coords = {name: values for name, values in telemetry.coords.items() if "channel" not in values.dims}
        return xr.Dataset(data, coords)

    def save(self, path: Path | str) -> None:
        """Writes one `.npz` file: arrays, and a description in JSON; nothing is pickled."""
        expectation = self.expectation
        kinds = {kind: name for name, kind in MODELS.items()}
        description = {
            "version": VERSION,
            "gaps": self.gaps,
            "scores": expectation.model.kinds,
            "model": kinds[type(expectation.model)],
            "settings": asdict(expectation.model),  # type: ignore[call-overload]  # every model is a dataclass
            "channels": expectation.channels.names,
        }
        arrays = {
            "clean": self.clean,
            "channels": {name: getattr(expectation.channels, name) for name in ("center", "scale", "complete")},
            "params": expectation.params,
            "reference": to_state_dict(expectation.reference),
            "yardstick": to_state_dict(expectation.yardstick),
        }
        with open(path, "wb") as file:
            leaves: dict[str, Any] = {name: np.asarray(leaf) for name, leaf in flatten_dict(arrays, sep="/").items()}
            np.savez(file, description=np.array(json.dumps(description)), **leaves)

    @classmethod
    def load(cls, path: Path | str) -> Monitor:
        """What `save` wrote.

        Raises:
          ValueError: it is not a monitor's file, or one of another version.
        """
        if Path(path).exists() and not Path(path).is_file():
            raise ValueError(f"{path} is not a file")
        try:
            arrays = npz.read(Path(path))
            description = json.loads(str(arrays.pop("description")))
            version = description["version"]
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
            raise ValueError(f"{path} is not a monitor's file") from None
        if version != VERSION:
            raise ValueError(f"{path} holds a monitor of version {version}, and this package reads {VERSION}")
        settings = {k: tuple(v) if isinstance(v, list) else v for k, v in description["settings"].items()}
        model = MODELS[description["model"]](**settings)
        if tuple(description["scores"]) != model.kinds:
            raise ValueError(f"{path} holds a monitor whose scores this package does not know")
        tree = unflatten_dict(arrays, sep="/")
        channels = Channels(tuple(description["channels"]), **tree["channels"])
        expectation = Expectation(
            model,
            channels,
            tree.get("params", {}),
            from_state_dict(model.blank(), tree["reference"]),
            from_state_dict(Yardstick(NONE, NONE), tree["yardstick"]),
        )
        return cls(expectation, tree["clean"], description["gaps"])
