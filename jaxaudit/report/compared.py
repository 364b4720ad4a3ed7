"""The page of a comparison of variants: what each buys against what is paid for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import altair as alt
import pandas as pd
from markupsafe import Markup

from jaxaudit.analysis.run_reader import read_table as stored
from jaxaudit.report import style
from jaxaudit.report.page import Details, Page, Section, Summary, TextBlock
from jaxaudit.report.panel import Figure
from jaxaudit.report.tables import Cell, Column, Table, estimate, figures, number, table, word
from jaxaudit.runs.variants.compare import magnitude_cells, verdict
from jaxaudit.runs.variants.folder import ACTED, BOUGHT, CONFIRMED, PAID, SPEC, SUMMARY
from jaxaudit.runtime.files import check_contents, parse_toml, read_object

LEVEL = 0.95

GLOSSARY = [
    ("plain", "The learner without the variants' remedies and settings."),
    (
        "score",
        "The number of magnitudes of a perturbation at which a seed does not collapse, of those tried: 1/4, 1/2, 1, 2 "
        "and 4 times the magnitude at which half of the plain learner's seeds collapse, or times the one given.",
    ),
    (
        "bought",
        "The score of the variant minus the plain learner's, paired by seed: the mean over the seeds whose undisturbed "
        "lanes collapse in neither. Its interval and p-value are those of an exact sign-flip permutation test.",
    ),
    ("paid", "The undisturbed performance of the variant minus the plain learner's, at the end of the run, by seed."),
    (
        "acted",
        "The share of a remedy's applications, from the onset on, in which it changed what it was given: of updates, "
        "for one that acts on updates. A remedy that never acted cannot have helped.",
    ),
    ("time per step", "The time of an undisturbed step divided by the plain learner's; the two are timed in turns."),
    (
        "ratio of thresholds",
        "The magnitude at which a seed collapses, the variant's over the plain learner's: median over the seeds whose "
        "threshold lies between two magnitudes that were tried, in both.",
    ),
    (
        "fresh seeds",
        "Among many differences some exclude zero by chance. Those that do are measured again on other seeds, and the "
        "new p-values are adjusted for their number (Holm's method).",
    ),
    (
        "(... would)",
        "The true difference that a comparison with as many seeds and the same spread would have detected with a "
        "probability of 0.8.",
    ),
]


def build(folder: Path) -> Path:
    """Write `report.html` and `figures/*.svg|png` for a comparison that is finished, from what is stored.

    Returns:
      the page's path.

    Raises:
      UserError: something in the folder is damaged, or a link.
      FileNotFoundError: the comparison is not finished.
    """
    folder = Path(folder)
    check_contents(folder)
    for name in (BOUGHT, PAID, SUMMARY):
        if not (folder / name).exists():
            raise FileNotFoundError(f"the comparison in {folder} is not finished: it has no {name}")
    text = (folder / SPEC).read_text(encoding="utf-8")
    spec = parse_toml(text, str(folder / SPEC))
    words = ("variant", "perturbation", "centre")
    bought, paid = stored(folder / BOUGHT, words), stored(folder / PAID, words)
    confirmed, acted = stored(folder / CONFIRMED, words), stored(folder / ACTED, (*words, "remedy"))
    if bought is None or paid is None:
        raise FileNotFoundError(f"the comparison in {folder} has no rows")
    again = bought.head(0).assign(p_holm=[], confirmed=[]) if confirmed is None else confirmed
    saved = read_object(folder / SUMMARY)
    bought["said"] = [verdict(row, again, LEVEL) for row in bought.to_dict("records")]
    return Page(
        kicker="Variants compared",
        heading=str(spec.get("audit", {}).get("name", folder.name)),
        about=_about(spec),
        summary=_summary(bought, again, paid, saved),
        sections=[
            Section("picture", "Bought and paid", "Picture", [_picture(bought, paid, style.slug(folder.name))]),
            Section("bought", "What is bought", "Bought", [_bought(bought)]),
            Section("again", "Tried again on fresh seeds", "Fresh seeds", [_confirmed(again) if len(again) else None]),
            Section("paid", "What is paid", "Paid", [_paid(paid)]),
            Section("acted", "How often remedies acted", "Acted", [None if acted is None else _acted(acted)]),
            Section("tried", "Magnitudes tried", "Magnitudes", [_tried(saved.get("tried", []))]),
            Section("about", "", "", [Details("Spec", [TextBlock(text)])]),
        ],
        glossary=GLOSSARY,
    ).write(folder)


def _about(spec: dict[str, Any]) -> str:
    learner, task = spec.get("learner", {}), spec.get("task", {})
    on = f" on {task['name']}" if task.get("name") else ""
    return f"{learner.get('kind', '')}{on}"


def _summary(bought: pd.DataFrame, again: pd.DataFrame, paid: pd.DataFrame, saved: dict[str, Any]) -> Summary:
    helps = bought[bought.said.str.startswith("helps (")]
    harms = bought[bought.said.str.startswith("harms (")]
    if len(helps):
        pairs = "one pair" if len(helps) == 1 else f"{len(helps)} pairs"
        lead = Markup(
            "Of {} pairs of variant and perturbation, {} {} better than the plain learner, confirmed on fresh seeds."
        )
        lead = lead.format(len(bought), pairs, "is" if len(helps) == 1 else "are")
    elif len(again):
        lead = Markup(
            "No variant is shown to be better than the plain learner: no difference was confirmed on fresh seeds."
        )
        if len(harms):
            lead = Markup("No variant is shown to be better than the plain learner.")
    else:
        lead = Markup("No difference between a variant and the plain learner was detected.")
    sentences = [
        Markup("<b>{}</b> against {}: {:+.2g} of {:.0f} magnitudes on the seeds screened, {}.").format(
            row.variant, row.perturbation, row.difference, row.magnitudes, row.said
        )
        for row in pd.concat([helps, harms]).itertuples()
    ]
    keys = [
        ("variants", f"{bought.variant.nunique()}"),
        ("perturbations", f"{bought.perturbation.nunique()}"),
        ("seeds screened", f"{int(bought.seeds.max())}"),
    ]
    keys += [("fresh seeds", f"{int(again.seeds.max())}")] if len(again) else []
    return Summary(lead, sentences, [str(note) for note in saved.get("cautions", [])], keys)


def _scores() -> list[Column]:
    """The columns that screened and confirmed cells have in common."""
    return [
        word("variant"),
        word("perturbation"),
        figures("score", "score", number),
        figures("plain_score", "plain", number),
        figures("difference", "difference", _signed),
    ]


def _bought(rows: pd.DataFrame) -> Table:
    def said(row: pd.Series) -> Cell:
        return Cell(row.said, value=row.said)

    return table(
        rows,
        [
            *_scores(),
            Column("ratio of thresholds", _ratio),
            figures("seeds", "seeds", number),
            Column("collapse undisturbed (plain)", lambda row: Cell(f"{row.fallen:.0f} ({row.plain_fallen:.0f})")),
            Column("verdict", said, numeric=False),
        ],
    )


def _confirmed(rows: pd.DataFrame) -> Table:
    return table(
        rows,
        [
            *_scores(),
            figures("p_holm", "p (Holm)", number),
            figures("seeds", "seeds", number),
        ],
    )


def _paid(rows: pd.DataFrame) -> Table:
    return table(
        rows,
        [
            word("variant"),
            figures("performance", "performance", number),
            figures("plain_performance", "plain", number),
            figures("performance_difference", "difference", _signed),
            *([figures("step_time", "time per step", number)] if "step_time" in rows else []),
        ],
    )


def _acted(rows: pd.DataFrame) -> Table:
    return table(
        rows,
        [
            word("variant"),
            word("remedy"),
            word("perturbation"),
            figures("acted", "acted, disturbed", _share),
            figures("acted_undisturbed", "acted, undisturbed", _share),
        ],
    )


def _tried(ladders: list[dict[str, Any]]) -> Table | None:
    cells = [magnitude_cells(one) for one in ladders]
    if not cells:
        return None
    rows = pd.DataFrame(cells, columns=["perturbation", "from", "magnitudes", "centre"])
    return table(rows, [word(str(name)) for name in rows])


def _share(value: float) -> str:
    return f"{value:.1%}"


def _ratio(row: pd.Series) -> Cell:
    few = f"{row.ratio_seeds:.0f} seeds have a threshold between two magnitudes tried, in both"
    return estimate(row, "ratio", number, reason=few)


def _signed(value: float) -> str:
    return ("+" if value > 0 else "") + number(value, digits=3)


def _picture(bought: pd.DataFrame, paid: pd.DataFrame, file: str) -> Figure:
    """A panel for each perturbation: difference of scores against difference of undisturbed performance."""
    rows = bought.merge(paid, on="variant")
    names = list(dict.fromkeys(rows.variant))
    legend = alt.Legend(orient="top", title=None, columns=4, labelFontSize=11)
    colour = alt.Color("label:N", scale=alt.Scale(domain=names, range=_colours(len(names))), legend=legend, sort=None)
    bound = float(rows.magnitudes.max())
    charts = []
    for number_, (name, own) in enumerate(rows.groupby("perturbation", sort=False)):
        data = own.rename(columns={"variant": "label"})
        x = alt.X(
            "difference:Q",
            title="bought: magnitudes survived, less plain",
            scale=alt.Scale(domain=[-bound, bound], nice=False),
        )
        y = alt.Y("performance_difference:Q", title="paid: undisturbed performance, less plain")
        base = alt.Chart()
        zero = alt.Chart(alt.InlineData(values=[{"at": 0}]))
        tips = [alt.Tooltip(f"{one}:N") for one in ("label", "said")]
        tips += [alt.Tooltip(f"{one}:Q", format=".3~g") for one in ("difference", "performance_difference")]
        layers = [
            zero.mark_rule(color=style.GREY, strokeDash=[3, 3]).encode(x="at:Q"),
            zero.mark_rule(color=style.GREY, strokeDash=[3, 3]).encode(y="at:Q"),
            base.mark_rule(strokeWidth=1.5, opacity=0.6).encode(
                x="difference_low:Q", x2="difference_high:Q", y=y, color=colour
            ),
            base.mark_rule(strokeWidth=1.5, opacity=0.6).encode(
                x=x, y="performance_difference_low:Q", y2="performance_difference_high:Q", color=colour
            ),
            base.mark_point(filled=True, size=70, opacity=1)
            .encode(x=x, y=y, color=colour, tooltip=tips)
            .properties(name=f"lines_{number_}"),
        ]
        title = alt.TitleParams(name, fontSize=11.5, fontWeight="normal", color=style.MUTED)
        charts.append(alt.layer(*layers, data=style.table(data)).properties(width=300, height=260, title=title))
    chart = style.finish(charts, 3, shared=True, width=300, limit=560, gutter=90)
    caption = "Right of the dashed line: more magnitudes survived than by the plain learner; above it: better when "
    caption += "nothing is disturbed. Lines: 95% intervals, exact, on the seeds screened."
    return Figure(f"{file}_compared", "", chart, caption)


PALETTE = ("#7b2d6b", "#e8952c", "#2f7f8f", "#b0443f", "#4d6bb3", "#6b8e3d", "#8b6f47", "#d06fae", "#3d3d3d", "#59b3a4")


def _colours(count: int) -> list[str]:
    return [PALETTE[place % len(PALETTE)] for place in range(count)]
