"""The page of a comparison of detectors, and the choice between it and the page of monitored runs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import xarray as xr
from markupsafe import Markup

from jaxaudit.report import detection_figures, monitored, style
from jaxaudit.report.detection_tables import condition_table, told, transfer_table
from jaxaudit.report.detectors import detector_table, further, verdict
from jaxaudit.report.output import write_figures, write_page
from jaxaudit.report.panel import Figure
from jaxaudit.report.tables import Table
from jaxaudit.stored import table

COMPARISON = "comparison.json"

TRANSFER = "transfer.csv"
"""In the folder that holds the learners': monitors of some tested on another."""

BESIDE = 1
"""Baselines beside the monitor in the table by condition, so that it stays legible."""

GLOSSARY = [
    ("clean run", "A training that nothing disturbs. Detectors are fitted to some and calibrated on others."),
    ("score", "What a detector says of every step of a run, from that step and those before: higher is more unusual."),
    (
        "false alarms per clean run",
        "Share of clean runs with an alarm at any step. The threshold is set on clean runs of its own so that the "
        "probability of one is at most alpha; the table has the share that came about.",
    ),
    ("detected", "Share of disturbed lanes with an alarm at or after the onset."),
    (
        "AUROC",
        "Probability that a disturbed lane's largest score is above a clean lane's, both tested by the same detector; "
        "0.5 is chance, 1 is perfect, and no threshold enters.",
    ),
    (
        "lead time",
        "Steps from the first alarm since the onset to the collapse, median over the lanes that collapse; negative "
        "where the alarm comes after it.",
    ),
    (
        "gain",
        "The monitor's figure minus the detector's, on the same lanes.",
    ),
    (
        "intervals",
        "95%, over seeds: lanes of a seed are alike, so a bootstrap takes or leaves them together. A share of seeds "
        "with one lane each, as those of clean runs and of one condition, has Wilson's interval.",
    ),
    (
        "meta-state deviation",
        "Distance of the monitor's latent state from the mean of the clean runs at the same step, whitened, so that "
        "clean runs have a standard deviation of 1 in every direction.",
    ),
    ("onset", "The step at which the perturbation's window opens."),
    (
        "fitted to other learners",
        "Over the channels that all learners have, a monitor is fitted to clean lanes of other learners. Not touched, "
        "it measures in their units; recalibrated, only its threshold is this learner's; with their parameters alone, "
        "channels' scales, the envelopes of clean runs at each step and the threshold are this learner's. Several "
        "learners' runs are cut to the shortest; a step later than theirs is compared to their last.",
    ),
]


def build(folder: Path) -> Path:
    """Write `report.html` and `figures/*.svg|png` for compared detectors or for monitored runs, from what is stored.

    Args:
      folder: what `jaxaudit detect` or `jaxaudit monitor` wrote.

    Returns:
      the page's path: one self-contained file that loads nothing.

    Raises:
      FileNotFoundError: the folder holds neither.
    """
    folder = Path(folder)
    if monitored.is_here(folder):
        return monitored.build(folder)
    learners = [_load(path.parent) for path in _comparisons(folder)]
    if not learners:
        raise FileNotFoundError(
            f"{folder} holds neither compared detectors ({COMPARISON}) nor monitored runs ({monitored.ABOUT}), so "
            "there is nothing to report"
        )
    write_figures(folder / "figures", [figure for learner in learners for figure in learner.figures.values()])
    return write_page(folder / "report.html", "detection.html", learners=learners, glossary=GLOSSARY)


def _comparisons(folder: Path) -> list[Path]:
    """The descriptions in the folder itself or in its subfolders."""
    own = folder / COMPARISON
    return [own] if own.exists() else sorted(folder.glob(f"*/{COMPARISON}"))


@dataclass(frozen=True)
class Learner:
    """One learner's comparison, as stored.

    Attributes:
      slug: the folder's name.
      about: what was compared.
      detectors: a row for each, the best AUROC first; None where it is not stored.
      conditions: a row for each, or None.
      seen: what the monitor saw of each condition, or None.
      transfer: a row for each monitor fitted to other learners' lanes, or None.
    """

    slug: str
    about: dict[str, Any]
    detectors: pd.DataFrame | None
    conditions: pd.DataFrame | None
    seen: xr.Dataset | None
    transfer: pd.DataFrame | None

    @property
    def name(self) -> str:
        """Of learner and task."""
        return str(self.about.get("learner") or self.slug)

    @property
    def mine(self) -> str:
        """The name of the detector that the others are compared to."""
        return str(self.about.get("monitor", ""))

    @cached_property
    def figures(self) -> dict[str, Figure]:
        """Those there is something stored for."""
        found = {
            "conditions": None
            if self.conditions is None
            else detection_figures.shares(self.conditions, self.mine, self.slug),
            "latents": None if self.seen is None else detection_figures.latents(self.seen, self.slug),
            "onset": None if self.seen is None else detection_figures.around_onset(self.seen, self.slug),
        }
        return {name: figure for name, figure in found.items() if figure is not None}

    @property
    def keys(self) -> list[tuple[str, str]]:
        """The strip under the verdict."""
        known = {"clean lanes": "clean", "disturbed lanes": "disturbed", "steps": "steps", "folds": "folds"}
        found = [(label, f"{self.about[key]}") for label, key in known.items() if key in self.about]
        if self.detectors is not None:
            found.append(("detectors", f"{len(self.detectors)}"))
        if "channels" in self.about:
            found.append(("channels", f"{len(self.about['channels'])}"))
        return found

    @property
    def verdict(self) -> Markup:
        """Who is best, how the monitor compares to the best baseline, and its false alarms."""
        return verdict(self.detectors, self.mine, self.about.get("alpha"), self.about.get("clean"))

    @property
    def table(self) -> Table | None:
        """All detectors but the single channels that are not among the best of them."""
        return None if self.detectors is None else detector_table(self.detectors[~further(self.detectors)], self.mine)

    @property
    def rest(self) -> Table | None:
        """The other single channels."""
        rest = None if self.detectors is None else self.detectors[further(self.detectors)]
        return None if rest is None or rest.empty else detector_table(rest, self.mine)

    @property
    def by_condition(self) -> Table | None:
        """The monitor's figures of every condition, and the best baseline's."""
        if self.conditions is None or not (names := told(self.conditions)):
            return None
        others = [name for name in names if name != self.mine]
        return condition_table(self.conditions, [*(name for name in names if name == self.mine), *others[:BESIDE]])

    @property
    def transferred(self) -> Table | None:
        """Monitors of other learners' lanes, tested on this one's."""
        return None if self.transfer is None else transfer_table(self.transfer)


def _load(folder: Path) -> Learner:
    store = folder / "trajectories.zarr"
    detectors = table(folder / "detectors.csv", ("detector",))
    about = json.loads((folder / COMPARISON).read_text(encoding="utf-8"))
    return Learner(
        slug=style.slug(folder.resolve().name),
        about=about,
        detectors=None if detectors is None else detectors.sort_values("auroc", ascending=False, kind="stable"),
        conditions=table(folder / "conditions.csv", ("condition", "perturbation")),
        seen=xr.open_zarr(store, chunks=None) if store.exists() else None,
        transfer=_transfer(folder.resolve().parent / TRANSFER, about.get("learner")),
    )


def _transfer(file: Path, learner: str | None) -> pd.DataFrame | None:
    """The rows in which this learner is tested, or None."""
    rows = table(file, ("tested", "fitted_to", "way"))
    found = None if rows is None else rows[rows["tested"] == learner]
    return None if found is None or found.empty else found
