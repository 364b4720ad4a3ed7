"""The text of a comparison: its tables, and sentences on how to read them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pandas as pd

from jaxaudit.runtime.registry import align_columns

BOUGHT = ("variant", "perturbation", "score", "plain", "difference", "ratio of thresholds", "verdict")
ACTED = ("variant", "remedy", "perturbation", "acted", "undisturbed")
PAID = ("variant", "performance", "plain", "difference", "time per step")


def text(
    bought: pd.DataFrame,
    confirmed: pd.DataFrame,
    paid: pd.DataFrame,
    acted: pd.DataFrame,
    tried: Sequence[Mapping[str, Any]],
    structures: Collection[str],
    level: float,
) -> str:
    """Returns the tables with verdicts, followed by explanations, for a terminal."""
    rows = [bought_cells(row, verdict(row, confirmed, level)) for row in bought.to_dict("records")]
    lines = ["magnitudes tried", *align_columns([magnitude_cells(one) for one in tried]), ""]
    lines += ["bought: magnitudes survived, of those tried", *align_columns([BOUGHT, *rows]), ""]
    lines += ["paid: undisturbed", *align_columns([PAID, *(paid_cells(row) for row in paid.to_dict("records"))]), ""]
    if len(acted):
        shares = [acted_cells(row) for row in acted.to_dict("records")]
        lines += [
            "acted: share of a remedy's applications, from the onset on, in which it changed something",
            *align_columns([ACTED, *shares]),
            "",
        ]
    return "\n".join([*lines, *explanations(bought, confirmed, level), *cautions(bought, structures)])


def verdict(row: dict[str, Any], confirmed: pd.DataFrame, level: float) -> str:
    """Returns a verdict on a variant under a perturbation, in a few words."""
    if not row["seeds"]:
        return "each seed collapses undisturbed in one of both"
    again = confirmed[(confirmed.variant == row["variant"]) & (confirmed.perturbation == row["perturbation"])]
    if len(again):
        one = again.iloc[0]
        if one.confirmed and (one.difference > 0) == (row["difference"] > 0):
            return f"{'helps' if one.difference > 0 else 'harms'} ({one.difference:+.2g} on fresh seeds)"
        return f"not confirmed ({one.difference:+.2g} on fresh seeds)"
    if row["difference_low"] > 0 or row["difference_high"] < 0:
        return f"{'helps' if row['difference'] > 0 else 'harms'}, on the seeds screened"
    if row["score"] == row["plain_score"] == row["magnitudes"]:
        return "both survive every magnitude: too mild to tell"
    if row["score"] == row["plain_score"] == 0:
        return "both survive no magnitude: too harsh to tell"
    if math.isnan(row["difference_low"]):
        return "too few seeds to tell"
    could = row["detectable"]
    return "no difference detected" + ("" if math.isnan(could) else f" ({could:.2g} would)")


def explanations(bought: pd.DataFrame, confirmed: pd.DataFrame, level: float) -> list[str]:
    """Returns explanations of the tables, one sentence each."""
    found = [
        "difference: score of the variant minus the plain learner's, mean over the seeds whose undisturbed lanes "
        f"collapse in neither, with its exact {100 * level:g}% interval (a sign-flip permutation test)"
    ]
    if bought.detectable.notna().any():
        found.append(
            "(... would): the true difference that this comparison would have detected with a probability of 0.8"
        )
    if not len(confirmed):
        found.append("no difference was measured again on fresh seeds")
    else:
        found.append(
            f"fresh seeds: what had an interval without zero ({len(confirmed)}), measured again; confirmed where "
            f"the p-value, adjusted by Holm's method, is at most {1 - level:.2g}"
        )
    return found


def cautions(bought: pd.DataFrame, structures: Collection[str]) -> list[str]:
    """Returns sentences on what limits the comparison, such as seeds without a score."""
    found = []
    fallen = bought[(bought.fallen > 0) | (bought.plain_fallen > 0)]
    for row in fallen.drop_duplicates(["variant", "onset"]).to_dict("records"):
        found.append(
            f"{row['variant']}: {row['fallen']} of its seeds and {row['plain_fallen']} of the plain learner's collapse "
            "undisturbed; they have no score"
        )
    given = list(dict.fromkeys(bought[bought.centre == "given"].perturbation))
    if given:
        found.append(f"magnitudes are centred on the one given, not on a margin: {', '.join(given)}")
    if structures:
        found.append(
            f"{', '.join(structures)}: another network or other settings, so that lanes share only the seed with the "
            "plain learner's, not its randomness, and differences are less precise"
        )
    return found


def bought_cells(row: dict[str, Any], said: str) -> list[str]:
    """The cells of a row under the headings `BOUGHT`, with the verdict given."""
    return [
        row["variant"],
        row["perturbation"],
        _number(row["score"]),
        _number(row["plain_score"]),
        _interval(row, "difference", "+.2g"),
        _interval(row, "ratio", ".2g") if not math.isnan(row["ratio"]) else "-",
        said,
    ]


def magnitude_cells(tried: Mapping[str, Any]) -> list[str]:
    """The cells of a ladder, `design.Ladder.json`: perturbation, onset, magnitudes, and what is in their centre."""
    magnitudes = ", ".join(f"{magnitude:.3g}" for magnitude in tried["magnitudes"])
    centre = "the plain learner's margin" if tried["centre"] == "margin" else "the magnitude given"
    return [tried["perturbation"], f"from step {tried['onset']}", magnitudes, f"(centred on {centre})"]


def paid_cells(row: dict[str, Any]) -> list[str]:
    """The cells of a row under the headings `PAID`."""
    return [
        row["variant"],
        _number(row["performance"]),
        _number(row["plain_performance"]),
        _interval(row, "performance_difference", "+.3g"),
        _interval(row, "step_time", ".3g") if "step_time" in row else "-",
    ]


def acted_cells(row: dict[str, Any]) -> list[str]:
    """The cells of a row under the headings `ACTED`."""
    shares = (row["acted"], row["acted_undisturbed"])
    return [row["variant"], row["remedy"], row["perturbation"], *("-" if math.isnan(s) else f"{s:.1%}" for s in shares)]


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3g}"


def _interval(row: dict[str, Any], name: str, how: str) -> str:
    value, low, high = (row[name + end] for end in ("", "_low", "_high"))
    if math.isnan(value):
        return "-"
    return f"{value:{how}}" if math.isnan(low) else f"{value:{how}} [{low:{how}}, {high:{how}}]"
