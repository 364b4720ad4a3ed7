"""The page of a comparison of detectors, and the choice between it and the page of monitored runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup

from jaxaudit.analysis.run_reader import table as stored
from jaxaudit.report import detection_figures, monitored, style
from jaxaudit.report.detection_tables import condition_table, detector_table, told, transfer_table
from jaxaudit.report.detectors import further, verdict
from jaxaudit.report.page import HANDLING, Block, Details, Page, Section, Summary, listing
from jaxaudit.runtime import zarr_store
from jaxaudit.runtime.files import check_contents, read_object

COMPARISON = "comparison.json"

TRANSFER = "transfer.csv"
"""In the folder that holds the learners': monitors of some tested on another."""

BESIDE = 1
"""Baselines beside the monitor in the table by condition, so that it stays legible."""

TESTED = Markup(
    "Every detector is tested on lanes that it was neither fitted to nor calibrated on. Small print: 95% intervals. "
    "Gains: the monitor's figure minus the detector's. Click a heading to sort. Exact values: "
    "<code>detectors.csv</code>."
)
BY_CONDITION = Markup(
    "The monitor and the best baseline. AUROC: the condition's lanes against the clean ones. Small print: 95% "
    "intervals. More detectors: <code>conditions.csv</code>."
)
TRANSFERRED = Markup(
    "The monitor again, fitted to clean lanes of other learners and tested on this one's, over the channels that all "
    "have. Gain: the AUROC of the monitor fitted to this learner's own lanes minus the row's, on the same lanes. Small "
    "print: 95% intervals. Exact values: <code>transfer.csv</code>."
)

GLOSSARY = [
    ("clean run", "A training that nothing disturbs. Detectors are fitted to some and calibrated on others."),
    ("score", "What a detector says of every step of a run, from that step and those before: higher is more unusual."),
    (
        "reads",
        "One channel alone, or all channels together: a control chart of their joint distance from the clean runs at "
        "the same step, which has no model (T2: of a step; MEWMA: of a moving average of that rate; max |z|: of the "
        "furthest channel).",
    ),
    (
        "false alarms per clean run",
        "Share of clean runs with an alarm at any step. The threshold is set on clean runs of its own so that the "
        "probability of one is at most alpha on average over such sets of runs; with one set it varies, the more the "
        "fewer they are. The table has the share that came about.",
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
        "Distance of the monitor's latent state, of a chart that of the telemetry itself, from the mean of the clean "
        "runs at the same step, whitened, so that clean runs have a standard deviation of 1 in every direction.",
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
      the page's path.

    Raises:
      FileNotFoundError: the folder holds neither.
      UserError: something in the folder is damaged, or a link.
    """
    folder = Path(folder)
    check_contents(folder)
    if monitored.is_here(folder):
        return monitored.build(folder)
    own = folder / COMPARISON
    found = [own] if own.exists() else sorted(folder.glob(f"*/{COMPARISON}"))
    if not found:
        raise FileNotFoundError(
            f"{folder} holds neither compared detectors ({COMPARISON}) nor monitored runs ({monitored.ABOUT}), so "
            "there is nothing to report"
        )
    parts = [_part(path.parent.resolve(), f"learner-{n}", len(found) == 1) for n, path in enumerate(found, 1)]
    name, summary, _ = parts[0]
    return Page(
        kicker="Detectors compared",
        heading=name if len(parts) == 1 else f"Detectors on {len(parts)} learners",
        summary=summary if len(parts) == 1 else None,
        sections=[section for _, _, sections in parts for section in sections],
        glossary=GLOSSARY,
    ).write(folder)


def _part(folder: Path, part: str, alone: bool) -> tuple[str, Summary, list[Section]]:
    """A learner's name, what was found in short, and its sections, whose anchors begin with `part`.

    Where it is not alone its name stands in the list of sections, in place of theirs, and over the first, which has
    the summary.
    """
    about = read_object(folder / COMPARISON)
    slug = style.slug(folder.name)
    name, mine = str(about.get("learner") or slug), str(about.get("monitor", ""))
    sections: list[Section] = []

    def add(id: str, heading: str, short: str, *blocks: Block | None) -> None:
        sections.append(Section(f"{part}-{id}", heading, short if alone else "", blocks))

    detectors = stored(folder / "detectors.csv", ("detector", "family"))
    if detectors is not None:
        detectors = detectors.sort_values("auroc", ascending=False, kind="stable")
        rest = further(detectors)
        folded = Details(f"Further single channels ({rest.sum()})", [detector_table(detectors[rest], mine)])
        best = detector_table(detectors[~rest], mine)
        add("detectors", "Detectors, the best first", "Detectors", TESTED, best, folded if rest.any() else None)
    conditions = stored(folder / "conditions.csv", ("condition", "perturbation"))
    if conditions is not None and (names := told(conditions)):
        names.sort(key=lambda detector: detector != mine)
        beside = condition_table(conditions, names[: BESIDE + (names[0] == mine)])
        shares = detection_figures.shares(conditions, mine, slug)
        add("conditions", "Which disturbance is detected", "Conditions", shares, BY_CONDITION, beside)
    transfer = stored(folder.parent / TRANSFER, ("tested", "fitted_to", "way"))
    if transfer is not None and (tested := transfer["tested"] == about.get("learner")).any():
        add("transfer", "Fitted to other learners", "Other learners", TRANSFERRED, transfer_table(transfer[tested]))
    store = folder / "trajectories.zarr"
    if store.exists():
        zarr_store.check(store)
        seen = zarr_store.open_dataset(store)
        if onset := detection_figures.around_onset(seen, slug):
            add("onset", "Around the onset", "Around the onset", HANDLING, onset)
        add("latents", "Latent trajectories", "Latent trajectories", detection_figures.latents(seen, slug))
    lists = {"Runs compared": "runs", "Channels": "channels"}
    add("about", "", "", *(listing(title, about.get(key)) for title, key in lists.items()))
    summary = _summary(about, detectors, mine)
    return name, summary, sections if alone else [Section(part, name, name, [summary], part=True), *sections]


def _summary(about: dict[str, Any], detectors: pd.DataFrame | None, mine: str) -> Summary:
    """Who is best, how the monitor compares to the best baseline, and its false alarms."""
    known = {"clean lanes": "clean", "disturbed lanes": "disturbed", "controls that collapse": "collapsing_controls"}
    known |= {"steps": "steps", "folds": "folds"}
    keys = [(label, f"{about[key]}") for label, key in known.items() if about.get(key)]
    keys += [] if detectors is None else [("detectors", f"{len(detectors)}")]
    keys += [("channels", f"{len(about['channels'])}")] if "channels" in about else []
    return Summary(verdict(detectors, mine, about.get("alpha"), about.get("clean")), keys=keys)
