"""What the monitor saw of each condition: latents, their distance from the clean runs', performance and score."""

from __future__ import annotations

import numpy as np
import xarray as xr

from jaxaudit.core.channel_names import PERFORMANCE
from jaxaudit.monitoring.calibration import threshold
from jaxaudit.monitoring.comparison import DetectionSettings, splits
from jaxaudit.monitoring.lanes import LabelledLanes
from jaxaudit.monitoring.monitor import Expectation
from jaxaudit.monitoring.summary import CLEAN
from jaxaudit.monitoring.view import QUANTILES, over_lanes, plane

SAMPLES = 4


def trajectories(lanes: LabelledLanes, known: Expectation, settings: DetectionSettings) -> xr.Dataset:
    """The lanes that the first fold's monitor was not fitted to, by condition; the clean ones first.

    Args:
      lanes: the lanes.
      known: what that monitor expects.
      settings: of the comparison.

    Returns:
      latent_samples (condition, sample, step, component), up to SAMPLES lanes, and latent, its quantiles (condition,
      step, component, quantile): the plane of whitened latents in which lanes vary most; deviation, performance and
      score (condition, step, quantile), deviation being the whitened, drift-corrected distance of Table S5's MSD, with
      the clean runs' mean in the place of the undisturbed twin; coordinate onset; attribute threshold.
    """
    split = splits(lanes, settings)[0]
    scores, latents = known.scores(known.channels.pick(lanes.values, lanes.channels))
    score = np.asarray(known.yardstick.combine(scores))
    latent = known.reference.whitened(latents)
    distance = np.linalg.norm(latent, axis=-1)
    series = {
        "deviation": distance,
        "performance": lanes.values[..., lanes.channels.index(PERFORMANCE)],
        "score": np.where(np.isfinite(score), score, np.nan),
    }
    seen = latent @ plane(latent[split.calibrate], latent[~lanes.table.clean.to_numpy()])
    data: dict[str, list] = {"latent": [], "latent_samples": [], **{name: [] for name in series}}
    groups = _groups(lanes, split.fit)
    for numbers in groups.values():
        data["latent"].append(over_lanes(seen[numbers]))
        drawn = np.resize(numbers, SAMPLES) if len(numbers) else np.zeros(SAMPLES, int)
        data["latent_samples"].append(seen[drawn])
        for name, values in series.items():
            data[name].append(over_lanes(values[numbers]))
    step, quantile = ("condition", "step"), ("quantile",)
    dims = {
        "latent": (*step, "component", *quantile),
        "latent_samples": ("condition", "sample", "step", "component"),
        **dict.fromkeys(series, (*step, *quantile)),
    }
    onsets = lanes.table[~lanes.table.clean].groupby("condition").onset.first()
    return xr.Dataset(
        {name: (dims[name], np.stack(rows).astype(np.float32)) for name, rows in data.items()},
        {
            "condition": list(groups),
            "onset": ("condition", [0, *onsets[list(groups)[1:]]]),
            "quantile": list(QUANTILES),
            "step": np.arange(latent.shape[1]),
        },
        {"threshold": threshold(score[split.calibrate].max(axis=1), settings.alpha)},
    )


def _groups(lanes: LabelledLanes, fitted: np.ndarray) -> dict[str, np.ndarray]:
    """The lanes of every condition, and the clean ones that nothing was fitted to, by number."""
    table = lanes.table
    clean = np.setdiff1d(np.flatnonzero(table.clean), fitted)
    disturbed = table[~table.clean]
    return {CLEAN: clean} | {
        str(name): rows.index.to_numpy() for name, rows in disturbed.groupby("condition", sort=False)
    }
