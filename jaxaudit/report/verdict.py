"""The verdict on a run in sentences: what collapses the learner, at which magnitude, and what leaves it unharmed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from markupsafe import Markup

from jaxaudit.analysis.results import onsets_in_trend
from jaxaudit.analysis.run_reader import CONTROL, Run
from jaxaudit.core.channel_names import ACTING
from jaxaudit.core.perturbation import INTERVENTION
from jaxaudit.core.taps import ACTING_SITES
from jaxaudit.report.line_panels import Panel
from jaxaudit.report.outcomes import (
    DIFFERENCE,
    CollapsedControls,
    CostTests,
    collapsed_controls,
    condition_rows,
    control_collapses,
    cost_tests,
    critical_magnitude,
    intervention_sentences,
)
from jaxaudit.report.page import MINUS

MAX_NAMES = 4
"""The most perturbations that the lead sentence names; more are counted."""


@dataclass(frozen=True)
class Verdict:
    """The verdict as escaped markup.

    Attributes:
      lead: the main result.
      sentences: a sentence or two on each perturbation, and then what the reader has to beware of.
    """

    lead: Markup
    sentences: list[Markup]


@dataclass(frozen=True)
class _Outcome:
    """What one perturbation does, over all its magnitudes.

    Attributes:
      panel: the perturbation.
      kind: "collapses" (at least half of the seeds), "sometimes" (fewer), "costs" (final performance), "unharmed" or
        "unknown".
      sentence: a sentence on it; for "unharmed" its name, and for "unknown" the reason.
    """

    panel: Panel
    kind: str
    sentence: Markup


def verdict(run: Run, panels: Sequence[Panel]) -> Verdict:
    """Returns the verdict on a run, which is computed from its `summary.csv` and `metrics.csv`."""
    panels = [panel for panel in panels if panel.disturbed]
    if run.summary is None or "collapse_probability" not in run.summary:
        return Verdict(Markup("The metrics are not computed yet, so there is no verdict."), _remarks(run))
    if not panels:
        return Verdict(Markup("Only the undisturbed control was run, so there is nothing to judge."), _remarks(run))
    interventions = [intervention_sentences(run, panel) for panel in panels]
    outcomes = [_outcome(run, panel) for panel, found in zip(panels, interventions, strict=True) if found is None]
    tests = cost_tests(run, [o.panel for o in outcomes if o.kind == "unharmed"])
    outcomes = [_with_costs(run, o, tests) if o.kind == "unharmed" else o for o in outcomes]
    sentences = [o.sentence for kind in ("collapses", "sometimes", "costs") for o in outcomes if o.kind == kind]
    sentences += _unharmed_sentences(run, [o.panel for o in outcomes if o.kind == "unharmed"], tests)
    sentences += _unknown_sentences([o for o in outcomes if o.kind == "unknown"])
    sentences += [sentence for found in interventions for sentence in found or ()]
    sentences += [sentence for panel in panels if (sentence := _acting_sentence(run, panel))]
    if tests.count:
        sentences.append(tests.sentence)
    controls = collapsed_controls(run, panels)
    if controls is None:
        lead = _lead(run, outcomes, tests)
    else:
        lead = _lead_with_collapsed_controls(run, controls, outcomes, tests)
    return Verdict(lead, [*sentences, *_caveats(run, panels)])


def _lead(run: Run, outcomes: list[_Outcome], tests: CostTests) -> Markup:
    if not outcomes:
        return Markup("Nothing was disturbed: interventions waited for an alarm.")
    if all(o.kind == "unknown" for o in outcomes):
        return Markup("It could not be computed whether any perturbation collapses this learner.")
    collapsing = [o.panel.title for o in outcomes if o.kind == "collapses"]
    if collapsing:
        verb = "collapses" if len(collapsing) == 1 else "collapse"
        text = _names_or_count(collapsing, len(outcomes)) + Markup(
            " {} this learner in at least half of its seeds."
        ).format(verb)
    elif run.seeds == 1:
        text = Markup("No perturbation collapses this learner, with the one seed that was run.")
    else:
        text = Markup("No perturbation collapses this learner in half of its seeds or more.")
    return text + _unharmed_count(run, outcomes, tests, ("collapses no seed", "collapse no seed"))


def _unharmed_count(run: Run, outcomes: list[_Outcome], tests: CostTests, verbs: tuple[str, str]) -> Markup:
    """Returns a sentence on how many perturbations do no harm; `verbs` is the predicate in singular and plural."""
    count = sum(o.kind == "unharmed" for o in outcomes)
    if not count or run.seeds == 1:
        return Markup("")
    singular, plural = verbs
    predicates = [singular if count == 1 else plural] if plural else []
    if tests.count:
        predicates.append(f"{'does' if count == 1 else 'do'} not significantly lower final performance")
    if not predicates:
        return Markup("")
    return Markup(" {} of {} perturbations {}.").format(count, len(outcomes), " and ".join(predicates))


def _lead_with_collapsed_controls(
    run: Run, controls: CollapsedControls, outcomes: list[_Outcome], tests: CostTests
) -> Markup:
    """Returns a lead sentence on what the perturbations add to the collapses of the controls."""
    if not outcomes:
        return controls.sentence + Markup("; nothing was disturbed: interventions waited for an alarm.")
    rows = pd.concat([condition_rows(run, o.panel) for o in outcomes])
    if not (rows["control_survives"] > 0).any():
        return controls.sentence + Markup("; no seed is left that a perturbation could collapse.")
    if (rows["added"] == 0).all():
        text = controls.sentence + Markup("; {}").format(_none_adds_a_collapse(outcomes, rows))
        if (most := rows["avoided"].max()) > 0:
            text += Markup(", and up to {:.0f} of them survive when disturbed").format(most)
        if rows["added_share"].isna().any():
            text += Markup(", as far as is known")
        return text + Markup(".") + _unharmed_count(run, outcomes, tests, ("", ""))
    collapsing = [o.panel.title for o in outcomes if o.kind == "collapses"]
    if collapsing:
        text = Markup("; {} {} at least half of the seeds whose control survives.").format(
            _names_or_count(collapsing, len(outcomes)), "collapses" if len(collapsing) == 1 else "collapse"
        )
    else:
        text = Markup("; no perturbation collapses half of the other seeds or more.")
    return controls.sentence + text + _unharmed_count(run, outcomes, tests, ("adds no collapse", "add no collapse"))


def _none_adds_a_collapse(outcomes: list[_Outcome], rows: pd.DataFrame) -> str:
    if len({o.panel.perturbation for o in outcomes}) == 1:
        noun, count = "magnitude", rows["magnitude"].nunique()
    else:
        noun, count = "perturbation", len(outcomes)
    subject = {1: f"the {noun} tried adds no", 2: f"neither {noun} adds a"}.get(count, f"no {noun} adds a")
    return f"{subject} collapse"


def _names_or_count(names: list[str], total: int) -> Markup:
    if len(names) > MAX_NAMES:
        return Markup("{} of {} perturbations").format(len(names), total)
    return _enumeration(names)


def _enumeration(names: list[str]) -> Markup:
    bold = [Markup("<b>{}</b>").format(name) for name in names]
    if len(bold) < 2:
        return Markup("").join(bold)
    return Markup(", ").join(bold[:-1]) + Markup(" and ") + bold[-1]


def _outcome(run: Run, panel: Panel) -> _Outcome:
    rows = condition_rows(run, panel)
    share = rows["added_share"] if "added_share" in rows else pd.Series(dtype=float)
    name = Markup("<b>{}</b>").format(panel.title)
    if share.isna().all():
        return _Outcome(panel, "unknown", Markup("{}").format(_why_unknown(run, panel, rows)))
    if (share >= 0.5).any():
        return _Outcome(panel, "collapses", name + _collapse_text(run, panel, rows))
    if (share > 0).any():
        worst = rows.loc[share.idxmax()]
        text = Markup(" collapses some seeds but fewer than half: most at magnitude {} ({}).")
        text = text.format(worst["label"], _collapse_share(run, worst)) + _avoided_text(rows, worst)
        return _Outcome(panel, "sometimes", name + text)
    return _Outcome(panel, "unharmed", name)


def _why_unknown(run: Run, panel: Panel, rows: pd.DataFrame) -> str:
    controls = control_collapses(run, panel)
    any_collapses = controls is not None and (controls == 1).any()
    if any_collapses and "control_survives" in rows and not (rows["control_survives"] > 0).any():
        return "every control of the same onset collapses, so there is nothing to compare with"
    text = "the collapse probability could not be computed"
    if run.metrics is None or "reason" not in run.metrics:
        return text
    lanes = run.metrics[run.metrics["condition"].isin(rows["condition"])]
    reasons = lanes["reason"].astype(str).str.extract(r"(?:^|; )collapse_time: ([^;]+)", expand=False).dropna()
    return text if reasons.empty else f"{text}: {reasons.iloc[0]}"


def _unknown_sentences(outcomes: list[_Outcome]) -> list[Markup]:
    """Returns a sentence for each reason, which names all perturbations that have it."""
    reasons = dict.fromkeys(o.sentence for o in outcomes)
    return [
        _enumeration([o.panel.title for o in outcomes if o.sentence == reason]) + Markup(": {}.").format(reason)
        for reason in reasons
    ]


def _with_costs(run: Run, outcome: _Outcome, tests: CostTests) -> _Outcome:
    """Returns the outcome of a perturbation that collapses no seed, once its costs have been tested."""
    rows = condition_rows(run, outcome.panel)
    rows = rows[rows["condition"].isin(tests.significant)]
    if rows.empty:
        return outcome
    worst = rows.loc[rows[DIFFERENCE].idxmin()]
    text = Markup(
        " collapses no seed, but final performance is significantly below the control's at {}: {}{}{}."
    ).format(
        _magnitudes(rows),
        "at worst " if len(rows) > 1 else "",
        _signed(worst[DIFFERENCE]),
        _interval(worst, DIFFERENCE),
    )
    return replace(outcome, kind="costs", sentence=outcome.sentence + text)


def _collapse_text(run: Run, panel: Panel, rows: pd.DataFrame) -> Markup:
    hit = rows[rows["added_share"] >= 0.5]
    worst = hit.loc[hit["added_share"].idxmax()]
    text = Markup(" collapses the learner at {} ({}{}).").format(
        _magnitudes(hit), "at worst " if len(hit) > 1 else "", _collapse_share(run, worst)
    )
    text += _avoided_text(rows, worst)
    with_collapsed_controls = _has_collapsed_controls(worst)
    critical = critical_magnitude(run, panel, "collapse_probability", surviving_controls=with_collapsed_controls)
    if np.isfinite(critical.value):
        seeds = "the seeds whose control survives" if with_collapsed_controls else "the seeds"
        text += Markup(" The critical magnitude, at which half of {} collapse: {}.").format(seeds, critical.text)
    elif len(rows) > 1 and len(hit) == len(rows):
        text += Markup(" Every magnitude tried does, so the critical one lies outside {} to {}.").format(
            rows["label"].iloc[0], rows["label"].iloc[-1]
        )
    if with_collapsed_controls:
        early, ever = hit["excess_divergence_lost"], hit["added"]
    else:
        early = hit.get("divergence_probability", pd.Series(np.nan, hit.index))
        ever = hit["collapse_probability"]
    if (early < ever / 2).all():
        text += Markup(" Most of these collapses come after T_max / 2, where P_div does not count them.")
    return text


def _avoided_text(rows: pd.DataFrame, described: pd.Series) -> Markup:
    """Returns a sentence on the magnitude with the most avoided collapses, unless the described one has as many."""
    most = rows.loc[rows["avoided"].idxmax()]
    if not most["avoided"] > described["avoided"]:
        return Markup("")
    verb = "survives" if most["avoided"] == 1 else "survive"
    return Markup(" At magnitude {}, {:.0f} of the seeds whose control collapses {}, the most of all.").format(
        most["label"], most["avoided"], verb
    )


def _has_collapsed_controls(row: pd.Series) -> bool:
    return bool(row["control_survives"] < row.get("seeds", np.nan))


def _collapse_share(run: Run, row: pd.Series) -> str:
    seeds = int(row["seeds"]) if np.isfinite(row.get("seeds", np.nan)) else run.seeds
    if _has_collapsed_controls(row):
        added, survives, avoided = (int(row[name]) for name in ("added", "control_survives", "avoided"))
        excess = "excess_collapse_probability"
        return (
            f"{added} of the {survives} seeds whose control survives; {avoided} of the other {seeds - survives} "
            f"survive when disturbed; excess over the control {_signed(row[excess])}{_interval(row, excess, '.2f')}"
        )
    noun = "seed" if seeds == 1 else "seeds"
    count = round(row["collapse_probability"] * seeds)
    return f"{count} of {seeds} {noun}{_interval(row, 'collapse_probability', '.2f')}"


def _interval(row: pd.Series, name: str, digits: str = ".3g") -> str:
    low, high = row.get(f"{name}_low", np.nan), row.get(f"{name}_high", np.nan)
    if np.isnan(low + high) or low >= high:
        return ""
    return f", 95% interval {low:{digits}} to {high:{digits}}".replace("-", MINUS)


def _signed(value: float) -> str:
    return f"{value:+.3g}".replace("-", MINUS)


def _magnitudes(rows: pd.DataFrame) -> str:
    return f"{'magnitude' if len(rows) == 1 else 'magnitudes'} {', '.join(rows['label'])}"


def _acting_sentence(run: Run, panel: Panel) -> Markup | None:
    """Returns a sentence if acting performance collapses in more seeds than performance, each beside its controls."""
    rows = condition_rows(run, panel)
    if "acting_collapse_probability" not in rows:
        return None
    seeds = rows["seeds"]
    if "excess_acting_collapse_lost" in rows:
        acting, learned = rows["excess_acting_collapse_lost"], rows["excess_collapse_lost"]
        acting_total, learned_total = rows["excess_acting_collapse_standing"], rows["excess_collapse_standing"]
    else:
        acting, learned = rows["acting_collapse_probability"] * seeds, rows["collapse_probability"] * seeds
        acting_total, learned_total = seeds, seeds
    difference = acting - learned
    if not (difference > 0).any():
        return None
    worst = difference.idxmax()
    text = "<b>{}</b> harms acting more than learning: at magnitude {}, acting performance collapses in {:.0f} of "
    text += "{:.0f} seeds, and the performance of the same policy without the disturbance in {:.0f} of {:.0f}"
    if acting_total[worst] < seeds[worst] or learned_total[worst] < seeds[worst]:
        text += ", counting only seeds whose control survives"
    counts = acting[worst], acting_total[worst], learned[worst], learned_total[worst]
    return Markup(text + ".").format(panel.title, rows["label"][worst], *counts)


def _unharmed_sentences(run: Run, panels: list[Panel], tests: CostTests) -> list[Markup]:
    if not panels:
        return []
    names = _enumeration([panel.title for panel in panels])
    if run.seeds == 1:
        return [names + Markup(" did not collapse the one seed at any magnitude tried.")]
    frames = [condition_rows(run, panel) for panel in panels]
    rows = [row for frame in frames for _, row in frame.iterrows()]
    with_collapsed_controls = any(_has_collapsed_controls(row) for row in rows)
    text = names + Markup(" {} {} at any magnitude tried").format(
        "collapses" if len(panels) == 1 else "collapse",
        "no seed whose control survives" if with_collapsed_controls else "no seed",
    )
    kind = "excess_collapse_probability" if with_collapsed_controls else "collapse_probability"
    bounds = [frame.get(f"{kind}_high", pd.Series(dtype=float)).max() for frame in frames]
    if np.isfinite(bound := np.nanmax([*bounds, -np.inf])):
        quantity = "excess over the control" if with_collapsed_controls else "collapse probability"
        text += Markup(" (95% upper bound of the {}: {})").format(quantity, f"{bound:.2g}")
    most = max(rows, key=lambda row: row["avoided"])
    if most["avoided"] > 0:
        text += Markup(", and {:.0f} of {:.0f} whose control collapses survive when disturbed ({})").format(
            most["avoided"], most["seeds"] - most["control_survives"], most["condition"]
        )
    if tests.count:
        text += ", and no final performance is significantly below the control's"
    return [text + Markup(".")]


def _remarks(run: Run) -> list[Markup]:
    """Returns the learner's own remarks on how training began."""
    remarks = [str(remark) for remark in run.environment.get("remarks", ())]
    return [Markup("{}.").format(remark[:1].upper() + remark[1:]) for remark in remarks if remark]


def _caveats(run: Run, panels: list[Panel]) -> list[Markup]:
    sentences = _remarks(run)
    if run.seeds == 1:
        sentences.append(Markup("One seed: no result has an interval, and another seed may behave differently."))
    elif run.seeds < 5:
        text = "{} seeds are too few for 95% intervals of performance, so differences in performance are not tested."
        sentences.append(Markup(text).format(run.seeds))
    hold = run.setting("hold", 100)
    if late := [panel for panel in panels if run.steps - panel.onset < hold]:
        text = "Fewer than {} steps follow the onset of {}, so every collapse there is censored by the run's end."
        sentences.append(Markup(text).format(hold, _enumeration([panel.title for panel in late])))
    if no_effect := _without_effect(run):
        text = "No effect at all: under {}, every channel is bitwise equal to the control's."
        sentences.append(Markup(text).format(_enumeration(no_effect)))
    if unseparated := _acting_not_separated(run, panels):
        text = "The learner reports no acting performance. If its performance is measured while {} {}, a drop may "
        text += "be the disturbance itself rather than harm to what was learned."
        verb = "acts" if len(unseparated) == 1 else "act"
        sentences.append(Markup(text).format(_enumeration(unseparated), verb))
    window = run.setting("window", 50)
    if run.channel("performance") is not None and (onsets := onsets_in_trend(run.telemetry, window)):
        text = "In the {} steps before step {} performance was itself rising or falling, which widens the band that a "
        text += "collapse has to leave. A smaller window in [metrics] makes collapses easier to detect."
        sentences.append(Markup(text).format(window, ", ".join(map(str, onsets))))
    floor = run.telemetry.attrs.get("noise_floor")
    if isinstance(floor, int | float | np.number) and np.isfinite(float(floor)) and floor > 0:
        text = "Numerical noise floor: control and baseline would be equal without rounding errors; in the {} steps "
        text += "from the last onset, their performance differs by up to {}."
        sentences.append(Markup(text).format(window, f"{float(floor):.3g}"))
    return sentences


def _acting_not_separated(run: Run, panels: list[Panel]) -> list[str]:
    """Returns the perturbations of what the learner sees or does, if it reports no acting performance."""
    if run.channel(ACTING) is not None or "site" not in run.telemetry.coords:
        return []
    sites = [set(str(site).split("+")) for site in run.telemetry["site"].values]
    return [p.title for p in panels if sites[p.disturbed[0].index] & set(ACTING_SITES)]


def _without_effect(run: Run) -> list[str]:
    """Returns disturbed conditions whose lanes are bitwise equal to their controls', as where a target is absent."""
    channels = [x.transpose("condition", ...) for x in run.telemetry.data_vars.values() if "condition" in x.dims]
    # The smallest channel comes first, because nearly every condition differs in it.
    stored = [x.values for x in sorted((x for x in channels if "step" in x.dims), key=lambda x: x.size)]
    if not run.finished or not stored:
        return []
    conditions = []
    for _, group in run.conditions.groupby("onset"):
        is_control = group["perturbation"] == CONTROL
        is_neutral = (group["dimension"] == INTERVENTION) | (group["magnitude"] == group["neutral"])
        disturbed = group[~(is_control | is_neutral)]
        for control in group.index[is_control]:
            for index, condition in disturbed["condition"].items():
                if all(np.array_equal(x[index], x[control], equal_nan=True) for x in stored):
                    conditions.append(str(condition))
    return conditions
