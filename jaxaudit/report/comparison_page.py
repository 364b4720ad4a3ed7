"""The report page of a comparison of variants: what each variant gains in stability, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt
import pandas as pd
from markupsafe import Markup

from jaxaudit.analysis.run_reader import read_table
from jaxaudit.report import page, style
from jaxaudit.report.line_panels import small_title
from jaxaudit.runs.variants.compare import LEVEL, magnitude_cells, verdict
from jaxaudit.runs.variants.folder import ACTED, BOUGHT, CONFIRMED, PAID, SPEC, SUMMARY
from jaxaudit.runtime.files import check_contents, parse_toml, read_object

PALETTE = ("#7b2d6b", "#e8952c", "#2f7f8f", "#b0443f", "#4d6bb3", "#6b8e3d", "#8b6f47", "#d06fae", "#3d3d3d", "#59b3a4")
"""The colours of variants, which have no order."""


def build(folder: Path) -> Path:
    """Writes `report.html`, `figures/*.svg` and `figures/*.png` for a finished comparison, from what is stored there.

    Returns:
      The path of the page.

    Raises:
      UserError: something in the folder is damaged, or a link.
      FileNotFoundError: the comparison is not finished.
    """
    folder = Path(folder)
    check_contents(folder)
    for name in (BOUGHT, PAID, SUMMARY):
        if not (folder / name).exists():
            raise FileNotFoundError(f"the comparison in {folder} is not finished: it has no {name}")
    spec_text = (folder / SPEC).read_text(encoding="utf-8")
    spec = parse_toml(spec_text, str(folder / SPEC))
    text_columns = ("variant", "perturbation", "centre")
    gains, costs = read_table(folder / BOUGHT, text_columns), read_table(folder / PAID, text_columns)
    confirmed, actions = (
        read_table(folder / CONFIRMED, text_columns),
        read_table(folder / ACTED, (*text_columns, "remedy")),
    )
    if gains is None or costs is None:
        raise FileNotFoundError(f"the comparison in {folder} has no rows")
    fresh = gains.head(0).assign(p_holm=[], confirmed=[]) if confirmed is None else confirmed
    summary = read_object(folder / SUMMARY)
    ladders = summary.get("tried", [])
    gains["verdict"] = [verdict(row, fresh, LEVEL) for row in gains.to_dict("records")]
    learner, task = spec.get("learner", {}), spec.get("task", {})
    on_task = f" on {task['name']}" if task.get("name") else ""
    return page.Page(
        kicker="Variants compared",
        heading=str(spec.get("audit", {}).get("name", folder.name)),
        about=f"{learner.get('kind', '')}{on_task}",
        summary=_summary(gains, fresh, costs, summary),
        sections=[
            page.section("comparison", "picture", _figure(gains, costs, style.slug(folder.name))),
            page.section("comparison", "bought", _gain_table(gains)),
            page.section("comparison", "again", _confirmation_table(fresh) if len(fresh) else None),
            page.section("comparison", "paid", _cost_table(costs)),
            page.section("comparison", "acted", None if actions is None else _action_table(actions)),
            page.section("comparison", "tried", _magnitude_table(ladders) if ladders else None),
            page.Section("about", "", "", "", [page.Details("Spec", [page.TextBlock(spec_text)])]),
        ],
        glossary=page.glossary("comparison"),
    ).write(folder)


def _summary(gains: pd.DataFrame, fresh: pd.DataFrame, costs: pd.DataFrame, summary: dict[str, Any]) -> page.Summary:
    helps = gains[gains.verdict.str.startswith("helps (")]
    harms = gains[gains.verdict.str.startswith("harms (")]
    if len(helps):
        lead = Markup(
            "Of {} pairs of variant and perturbation, {} better than the plain learner, confirmed on fresh seeds."
        ).format(len(gains), "one is" if len(helps) == 1 else f"{len(helps)} are")
    elif len(harms) or gains.verdict.str.contains("by its own level only").any():
        lead = Markup("No variant is shown to be better than the plain learner.")
    elif len(fresh):
        lead = Markup(
            "No variant is shown to be better than the plain learner: no difference was confirmed on fresh seeds."
        )
    elif gains.verdict.str.contains("to tell|every seed collapses").all():
        lead = Markup("The comparison cannot tell: the verdicts in the table of gains say why.")
    else:
        lead = Markup("No difference between a variant and the plain learner was detected.")
    sentences = [
        Markup("<b>{}</b> against {}: {:+.2g} of {:.0f} magnitudes on the seeds screened, {}.").format(
            row.variant, row.perturbation, row.difference, row.magnitudes, row.verdict
        )
        for row in pd.concat([helps, harms]).itertuples()
    ]
    keys = [
        ("variants", f"{gains.variant.nunique()}"),
        ("perturbations", f"{gains.perturbation.nunique()}"),
        ("seeds screened", f"{int(gains.seeds.max())}"),
    ]
    keys += [("fresh seeds", f"{int(fresh.seeds.max())}")] if len(fresh) else []
    return page.Summary(lead, sentences, [str(note) for note in summary.get("cautions", [])], keys)


def _score_columns(rows: pd.DataFrame) -> list[page.Column]:
    level = "difference by the plain learner's level"  # which tables of earlier versions lack
    return [
        page.text_column("variant"),
        page.text_column("perturbation"),
        page.number_column("score", "magnitudes survived", page.number),
        page.number_column("plain_score", "plain learner", page.number),
        page.number_column("difference", "difference", _with_sign),
        *([page.number_column("level_difference", level, _with_sign)] if "level_difference" in rows else []),
    ]


def _gain_table(rows: pd.DataFrame) -> page.Table:
    def collapsed_undisturbed(row: pd.Series) -> page.Cell:
        return page.Cell(f"{row.fallen:.0f} ({row.plain_fallen:.0f})")

    def threshold_ratio(row: pd.Series) -> page.Cell:
        reason = f"{row.ratio_seeds:.0f} seeds have a threshold between two tried magnitudes for both learners"
        return page.estimate(row, "ratio", page.number, reason=reason)

    return page.table(
        rows,
        [
            *_score_columns(rows),
            page.Column("ratio of thresholds", threshold_ratio),
            page.number_column("seeds", "seeds", page.number),
            page.Column("collapse undisturbed (plain learner)", collapsed_undisturbed),
            page.text_column("verdict"),
        ],
    )


def _confirmation_table(rows: pd.DataFrame) -> page.Table:
    columns = [
        page.number_column("p_holm", "p-value (Holm)", page.number),
        page.number_column("seeds", "seeds", page.number),
    ]
    return page.table(rows, [*_score_columns(rows), *columns])


def _cost_table(rows: pd.DataFrame) -> page.Table:
    return page.table(
        rows,
        [
            page.text_column("variant"),
            page.number_column("performance", "performance", page.number),
            page.number_column("plain_performance", "plain learner", page.number),
            page.number_column("performance_difference", "difference", _with_sign),
            *([page.number_column("step_time", "time per step (ratio)", page.number)] if "step_time" in rows else []),
        ],
    )


def _action_table(rows: pd.DataFrame) -> page.Table:
    return page.table(
        rows,
        [
            page.text_column("variant"),
            page.text_column("remedy"),
            page.text_column("perturbation"),
            page.number_column("acted", "acted, disturbed", page.percent),
            page.number_column("acted_undisturbed", "acted, undisturbed", page.percent),
        ],
    )


def _magnitude_table(ladders: Sequence[dict[str, Any]]) -> page.Table:
    cells = [magnitude_cells(ladder) for ladder in ladders]
    rows = pd.DataFrame(cells, columns=["perturbation", "from", "magnitudes", "centre"])
    titles = {"from": "onset", "magnitudes": "magnitudes", "centre": "centre"}
    return page.table(
        rows, [page.text_column("perturbation"), *(page.text_column(name, title) for name, title in titles.items())]
    )


def _with_sign(value: float) -> str:
    return ("+" if value > 0 else "") + page.number(value, digits=3)


def _figure(gains: pd.DataFrame, costs: pd.DataFrame, file: str) -> page.Figure:
    """Returns a panel for each perturbation: difference in score against difference in undisturbed performance."""
    rows = gains.merge(costs, on="variant")
    names = list(dict.fromkeys(rows.variant))
    colours = [PALETTE[i % len(PALETTE)] for i in range(len(names))]
    legend = alt.Legend(orient="top", title=None, columns=4, labelFontSize=11)
    colour = alt.Color("label:N", scale=alt.Scale(domain=names, range=colours), legend=legend, sort=None)
    bound = float(rows.magnitudes.max())
    x = alt.X(
        "difference:Q",
        title="magnitudes survived, minus plain learner",
        scale=alt.Scale(domain=[-bound, bound], nice=False),
    )
    y = alt.Y("performance_difference:Q", title="undisturbed performance, minus plain learner")
    tooltip = [alt.Tooltip("label:N", title="variant"), alt.Tooltip("verdict:N")]
    tooltip += [alt.Tooltip("difference:Q", title="difference in magnitudes survived", format=".3~g")]
    tooltip += [alt.Tooltip("performance_difference:Q", title="difference in performance", format=".3~g")]
    base = alt.Chart()
    zero = alt.Chart(alt.InlineData(values=[{"at": 0}])).mark_rule(color=style.GREY, strokeDash=[3, 3])
    interval = base.mark_rule(strokeWidth=1.5, opacity=0.6)
    charts = []
    for i, (name, data) in enumerate(rows.groupby("perturbation", sort=False)):
        layers = [
            zero.encode(x="at:Q"),
            zero.encode(y="at:Q"),
            interval.encode(x="difference_low:Q", x2="difference_high:Q", y=y, color=colour),
            interval.encode(x=x, y="performance_difference_low:Q", y2="performance_difference_high:Q", color=colour),
            base.mark_point(filled=True, size=70, opacity=1)
            .encode(x=x, y=y, color=colour, tooltip=tooltip)
            .properties(name=f"lines_{i}"),
        ]
        csv = style.inline_csv(data.rename(columns={"variant": "label"}))
        charts.append(alt.layer(*layers, data=csv).properties(width=300, height=260, title=small_title(str(name))))
    chart = style.finish(charts, 3, shared=True, min_width=300, max_width=560, gutter=90)
    caption = (
        "Right of the dashed vertical line, a variant survives more magnitudes than the plain learner; above the "
        "horizontal one, it performs better when nothing is disturbed. Lines: exact 95% intervals over the seeds "
        "screened."
    )
    return page.Figure(f"{file}_compared", "", chart, caption)
