"""The run in plain words: what collapses the learner, at which magnitude, and what leaves it unharmed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from markupsafe import Markup

from jaxaudit.analysis.run_reader import Run
from jaxaudit.core.perturbation import INTERVENTION
from jaxaudit.core.taps import ACTING_SITES
from jaxaudit.report.lines import ACTING
from jaxaudit.report.outcomes import EFFECT, Judged, control_of, critical_of, effect, judge, rows
from jaxaudit.report.probability import Fallen, fallen_controls
from jaxaudit.report.series import Panel
from jaxaudit.report.tables import MINUS


@dataclass(frozen=True)
class Verdict:
    """A lead sentence and the sentences behind it, as escaped markup."""

    lead: Markup
    sentences: list[Markup]


@dataclass(frozen=True)
class _Outcome:
    """What one perturbation did over its magnitudes."""

    panel: Panel
    kind: str
    sentence: Markup


def verdict(run: Run, groups: list[Panel]) -> Verdict:
    """Returns the verdict in words, from `summary.csv`."""
    groups = [panel for panel in groups if panel.disturbed]
    if run.summary is None or "collapse_probability" not in run.summary:
        return Verdict(Markup("The metrics are not computed yet, so there is no verdict."), _remarks(run))
    if not groups:
        return Verdict(Markup("Only the undisturbed control was run; nothing was put to the test."), _remarks(run))
    effects = [effect(run, panel) for panel in groups]
    outcomes = [_outcome(run, panel) for panel, told in zip(groups, effects, strict=True) if told is None]
    judged = judge(run, [o.panel for o in outcomes if o.kind == "unharmed"])
    outcomes = [_harmed(run, o, judged) if o.kind == "unharmed" else o for o in outcomes]
    sentences = [o.sentence for kind in ("collapses", "sometimes", "harmed") for o in outcomes if o.kind == kind]
    sentences += _unharmed(run, [o for o in outcomes if o.kind == "unharmed"], judged)
    sentences += _unknown([o for o in outcomes if o.kind == "unknown"])
    sentences += [sentence for told in effects if told for sentence in told]
    sentences += [told for panel in groups if (told := _acting(run, panel))]
    if judged.count:
        sentences.append(judged.sentence)
    fallen = fallen_controls(run, groups)
    lead = _lead(run, outcomes, judged) if fallen is None else _lead_beside(run, fallen, outcomes, judged)
    return Verdict(lead, [*sentences, *_caveats(run, groups)])


def _lead(run: Run, outcomes: list[_Outcome], judged: Judged) -> Markup:
    names = {kind: [o.panel.title for o in outcomes if o.kind == kind] for kind in ("collapses", "unharmed")}
    total = len(outcomes)
    if not outcomes:
        return Markup("Nothing was disturbed: interventions waited for an alarm.")
    if all(o.kind == "unknown" for o in outcomes):
        return Markup("Whether anything that was tried collapses this learner could not be computed.")
    if not names["collapses"]:
        text = Markup("Nothing that was tried collapses this learner in half of its seeds or more.")
        if run.seeds == 1:
            text = Markup("Nothing that was tried collapses this learner, for the one seed there is.")
    else:
        verb = "collapses" if len(names["collapses"]) == 1 else "collapse"
        many = Markup("{} of {} perturbations").format(len(names["collapses"]), total)
        text = (many if len(names["collapses"]) > 4 else _names(names["collapses"])) + Markup(
            " {} this learner in at least half of its seeds."
        ).format(verb)
    return text + _spotless(run, outcomes, judged, ("collapses no seed", "collapse no seed"))


def _spotless(run: Run, outcomes: list[_Outcome], judged: Judged, none: tuple[str, str]) -> Markup:
    """How many perturbations do no harm, of one and of several in the words given."""
    count = sum(o.kind == "unharmed" for o in outcomes)
    if not count or run.seeds == 1:
        return Markup("")
    collapse, cost = (none[0], "costs") if count == 1 else (none[1], "cost")
    told = [collapse] if collapse else []
    told += [f"{cost} no final performance that shows"] if judged.count else []
    if not told:
        return Markup("")
    return Markup(" {} of {} perturbations {}.").format(count, len(outcomes), " and ".join(told))


def _lead_beside(run: Run, fallen: Fallen, outcomes: list[_Outcome], judged: Judged) -> Markup:
    """The lead where controls collapse: what the perturbations add to that."""
    if not outcomes:
        return fallen.sentence + Markup("; nothing was disturbed: interventions waited for an alarm.")
    found = pd.concat([rows(run, o.panel) for o in outcomes])
    collapsing = [o.panel.title for o in outcomes if o.kind == "collapses"]
    if not (found["standing"] > 0).any():
        return fallen.sentence + Markup("; none is left that a perturbation could collapse.")
    if (found["lost"] == 0).all():
        text = fallen.sentence + Markup("; {}").format(_none_adds(outcomes, found))
        if (most := found["spared"].max()) > 0:
            text += Markup(", and up to {:.0f} of them do not when disturbed").format(most)
        if found["lost_share"].isna().any():
            text += Markup(", as far as it is known")
        return text + Markup(".") + _spotless(run, outcomes, judged, ("", ""))
    if collapsing:
        many = Markup("{} of {} perturbations").format(len(collapsing), len(outcomes))
        text = Markup("; {} {} at least half of the seeds whose control stands.").format(
            many if len(collapsing) > 4 else _names(collapsing), "collapses" if len(collapsing) == 1 else "collapse"
        )
    else:
        text = Markup("; nothing that was tried collapses half of the others or more.")
    return fallen.sentence + text + _spotless(run, outcomes, judged, ("adds no collapse", "add no collapse"))


def _none_adds(outcomes: list[_Outcome], found: pd.DataFrame) -> str:
    names = {o.panel.perturbation for o in outcomes}
    noun, count = ("magnitude", found["magnitude"].nunique()) if len(names) == 1 else ("perturbation", len(outcomes))
    return {1: f"the {noun} tried adds none", 2: f"neither {noun} adds one"}.get(count, f"no {noun} adds one")


def _names(names: list[str]) -> Markup:
    marked = [Markup("<b>{}</b>").format(name) for name in names]
    if len(marked) < 2:
        return Markup("").join(marked)
    return Markup(", ").join(marked[:-1]) + Markup(" and ") + marked[-1]


def _outcome(run: Run, panel: Panel) -> _Outcome:
    data = rows(run, panel)
    share = data["lost_share"] if "lost_share" in data else pd.Series(dtype=float)
    name = Markup("<b>{}</b>").format(panel.title)
    if share.isna().all():
        return _Outcome(panel, "unknown", Markup("{}").format(_why_unknown(run, panel, data)))
    if (share >= 0.5).any():
        return _Outcome(panel, "collapses", name + _collapses(run, panel, data))
    if (share > 0).any():
        worst = data.loc[share.idxmax()]
        text = Markup(" collapses some seeds but fewer than half: most at magnitude {} ({}).")
        text = text.format(worst["label"], _share(run, worst)) + _spared(data, worst)
        return _Outcome(panel, "sometimes", name + text)
    return _Outcome(panel, "unharmed", name)


def _unknown(outcomes: list[_Outcome]) -> list[Markup]:
    """A sentence for each reason, with all perturbations that have it."""
    reasons = dict.fromkeys(o.sentence for o in outcomes)
    titles = {why: [o.panel.title for o in outcomes if o.sentence == why] for why in reasons}
    return [_names(names) + Markup(": {}.").format(why) for why, names in titles.items()]


def _why_unknown(run: Run, panel: Panel, data: pd.DataFrame) -> str:
    """Why no seed of a perturbation is known to collapse or not to, beside its control."""
    controls = control_of(run, panel)
    if controls is not None and (controls == 1).any() and "standing" in data and not (data["standing"] > 0).any():
        return "every control of the same onset collapses, so there is nothing to compare with"
    text = "the collapse probability could not be computed"
    if run.metrics is None or "reason" not in run.metrics:
        return text
    lanes = run.metrics[run.metrics["condition"].isin(data["condition"])]
    reasons = lanes["reason"].astype(str).str.extract(r"(?:^|; )collapse_time: ([^;]+)", expand=False).dropna()
    return text if reasons.empty else f"{text}: {reasons.iloc[0]}"


def _harmed(run: Run, outcome: _Outcome, judged: Judged) -> _Outcome:
    """The outcome of a perturbation that collapses no seed, once all are judged."""
    data = rows(run, outcome.panel)
    data = data[data["condition"].isin(judged.costly)]
    if data.empty:
        return outcome
    worst = data.loc[data[EFFECT].idxmin()]
    text = Markup(" collapses no seed but costs final performance at {}: {}{}{}.").format(
        _magnitudes(data),
        "at worst " if len(data) > 1 else "",
        _signed(worst[EFFECT]),
        _interval(worst, EFFECT),
    )
    return _Outcome(outcome.panel, "harmed", outcome.sentence + text)


def _collapses(run: Run, panel: Panel, data: pd.DataFrame) -> Markup:
    hit = data[data["lost_share"] >= 0.5]
    worst = hit.loc[hit["lost_share"].idxmax()]
    text = Markup(" collapses the learner at {} ({}{}).")
    text = text.format(_magnitudes(hit), "at worst " if len(hit) > 1 else "", _share(run, worst)) + _spared(data, worst)
    beside = _beside(worst)
    critical = critical_of(run, panel, "collapse_probability", standing=beside)
    if np.isfinite(critical.value):
        half = "half of the seeds whose control stands are lost" if beside else "half of the seeds are lost"
        text += Markup(" The critical magnitude, where {}: {}.").format(half, critical.text)
    elif len(data) > 1 and len(hit) == len(data):
        text += Markup(" Every magnitude tried does, so the critical one lies outside {} to {}.").format(
            data["label"].iloc[0], data["label"].iloc[-1]
        )
    in_time, ever = (
        (hit["excess_divergence_lost"], hit["lost"])
        if beside
        else (hit.get("divergence_probability", pd.Series(np.nan, hit.index)), hit["collapse_probability"])
    )
    if (in_time < ever / 2).all():
        text += Markup(" Most of these collapses come after T_max / 2, where P_div does not count them.")
    return text


def _spared(data: pd.DataFrame, told: pd.Series) -> Markup:
    """At which other magnitude most seeds stand whose control collapses, where they are more than those told of."""
    most = data.loc[data["spared"].idxmax()]
    if not most["spared"] > told["spared"]:
        return Markup("")
    return Markup(" Most are spared at magnitude {}: {:.0f}.").format(most["label"], most["spared"])


def _beside(row: pd.Series) -> bool:
    """Whether controls of the condition's onset collapse."""
    return bool(row["standing"] < row.get("seeds", np.nan))


def _share(run: Run, row: pd.Series) -> str:
    seeds = int(row["seeds"]) if np.isfinite(row.get("seeds", np.nan)) else run.seeds
    if _beside(row):
        lost, standing, spared = (int(row[name]) for name in ("lost", "standing", "spared"))
        excess, fallen = "excess_collapse_probability", seeds - standing
        text = f"{lost} of the {standing} seeds whose control stands; {spared} of the {fallen} others are spared; "
        return text + f"excess {_signed(row[excess])}{_interval(row, excess, '.2f')}"
    p = row["collapse_probability"]
    noun = "seed" if seeds == 1 else "seeds"
    return f"{round(p * seeds)} of {seeds} {noun}{_interval(row, 'collapse_probability', '.2f')}"


def _interval(row: pd.Series, name: str, digits: str = ".3g") -> str:
    low, high = row.get(f"{name}_low", np.nan), row.get(f"{name}_high", np.nan)
    if np.isnan(low + high) or low >= high:
        return ""
    return f", 95% interval {low:{digits}} to {high:{digits}}".replace("-", MINUS)


def _signed(value: float) -> str:
    return f"{value:+.3g}".replace("-", MINUS)


def _acting(run: Run, panel: Panel) -> Markup | None:
    """A sentence where acting collapses in more seeds than the learner itself does, beside the controls of both."""
    data = rows(run, panel)
    if "acting_collapse_probability" not in data:
        return None
    seeds = data["seeds"]
    if "excess_acting_collapse_lost" in data:
        acting, learned = data["excess_acting_collapse_lost"], data["excess_collapse_lost"]
        standing = data["excess_acting_collapse_standing"], data["excess_collapse_standing"]
    else:
        acting, learned = (data[f"{kind}collapse_probability"] * seeds for kind in ("acting_", ""))
        standing = seeds, seeds
    apart = acting - learned
    if not (apart > 0).any():
        return None
    worst = apart.idxmax()
    text = " harms acting more than learning: at magnitude {} returns in training collapse in {:.0f} of {:.0f} seeds, "
    text += "and those of the same policy, undisturbed, in {:.0f}"
    if any(of[worst] < seeds[worst] for of in standing):
        text += " of {:.0f}, of those whose control stands"
    counts = [x[worst] for pair in zip((acting, learned), standing, strict=True) for x in pair]
    return Markup("<b>{}</b>").format(panel.title) + Markup(text + ".").format(data["label"][worst], *counts)


def _magnitudes(data: pd.DataFrame) -> str:
    return f"{'magnitude' if len(data) == 1 else 'magnitudes'} {', '.join(data['label'])}"


def _unharmed(run: Run, outcomes: list[_Outcome], judged: Judged) -> list[Markup]:
    if not outcomes:
        return []
    found = [rows(run, o.panel) for o in outcomes]
    beside = any(_beside(row) for data in found for _, row in data.iterrows())
    bound = "excess_collapse_probability_high" if beside else "collapse_probability_high"
    tops = [data.get(bound, pd.Series(dtype=float)).max() for data in found]
    if run.seeds == 1:
        names = _names([o.panel.title for o in outcomes])
        return [names + Markup(" did not collapse the one seed at any magnitude tried.")]
    verb = "collapses" if len(outcomes) == 1 else "collapse"
    which = "no seed whose control stands," if beside else "no seed"
    text = _names([o.panel.title for o in outcomes]) + Markup(" {} {} at any magnitude tried").format(verb, which)
    if np.isfinite(top := np.nanmax([*tops, -np.inf])):
        what = "excess over the control" if beside else "probability"
        text += Markup(" (which bounds the {} only to at most {})").format(what, f"{top:.2g}")
    most = max((row for data in found for _, row in data.iterrows()), key=lambda row: row["spared"])
    if most["spared"] > 0:
        text += Markup(", and {:.0f} of {:.0f} whose control collapses do not when disturbed ({})").format(
            most["spared"], most["seeds"] - most["standing"], most["condition"]
        )
    if judged.count:
        text += ", and no final performance is significantly below the control's"
    return [text + Markup(".")]


def _remarks(run: Run) -> list[Markup]:
    """What the learner had to say of how the run began."""
    said = [str(remark) for remark in run.environment.get("remarks", ())]
    return [Markup("{}.").format(remark[:1].upper() + remark[1:]) for remark in said if remark]


def _caveats(run: Run, groups: list[Panel]) -> list[Markup]:
    found = _remarks(run)
    if run.seeds == 1:
        found.append(Markup("One seed: nothing here has an interval, and another seed may well differ."))
    elif run.seeds < 5:
        text = "{} seeds are too few for 95% intervals of performance, so its differences are not judged."
        found.append(Markup(text).format(run.seeds))
    hold = run.setting("hold", 100)
    short = [p for p in groups if run.steps - p.onset < hold]
    if short:
        text = "Fewer than {} steps follow the onset of {}, so the run's end censors every collapse there."
        found.append(Markup(text).format(hold, _names([p.title for p in short])))
    if nothing := _without_effect(run):
        text = "Nothing at all changed under {}: every channel is bitwise the control's."
        found.append(Markup(text).format(_names(nothing)))
    if taken := _at_its_word(run, groups):
        text = "Performance is taken at the learner's word: if it is measured on what {} {}, its fall is the "
        text += "disturbance itself, and no harm to what was learned."
        verb = "disturbs" if len(taken) == 1 else "disturb"
        found.append(Markup(text).format(_names(taken), verb))
    window = run.setting("window", 50)
    if moving := [onset for onset in sorted({p.onset for p in groups}) if _trend(run, onset, window) > 0.5]:
        text = "In the {} steps before step {} performance was itself rising or falling, which widens the band that a "
        text += "collapse has to leave: a smaller window in [metrics] sees more."
        found.append(Markup(text).format(window, ", ".join(map(str, moving))))
    floor = run.telemetry.attrs.get("noise_floor")
    if isinstance(floor, int | float | np.number) and np.isfinite(float(floor)) and floor > 0:
        text = "Numerical noise floor: in the {} steps from the last onset control and baseline, which are the same "
        text += "but for rounding, come to differ by up to {} in performance."
        found.append(Markup(text).format(window, f"{float(floor):.3g}"))
    return found


def _at_its_word(run: Run, groups: list[Panel]) -> list[str]:
    """Perturbations of what a learner sees or does, where it does not tell its acting from what it is worth."""
    if run.channel(ACTING) is not None or "site" not in run.telemetry.coords:
        return []
    sites = [set(str(site).split("+")) for site in run.telemetry["site"].values]
    return [p.title for p in groups if sites[p.disturbed[0].index] & set(ACTING_SITES)]


def _without_effect(run: Run) -> list[str]:
    """Disturbed conditions whose lanes are bitwise their controls': what they aim at was not there to disturb."""
    channels = [x.transpose("condition", ...) for x in run.telemetry.data_vars.values() if "condition" in x.dims]
    # From the shortest on: nearly every condition differs in the first.
    stored = [x.values for x in sorted((x for x in channels if "step" in x.dims), key=lambda x: x.size)]
    if not run.finished or not stored:
        return []
    found = []
    for _, group in run.conditions.groupby("onset"):
        is_control = group["perturbation"] == "control"
        nothing = is_control | (group["dimension"] == INTERVENTION) | (group["magnitude"] == group["neutral"])
        disturbed = group[~nothing]
        for control in group.index[is_control]:
            same = (all(np.array_equal(x[i], x[control], equal_nan=True) for x in stored) for i in disturbed.index)
            found += [str(condition) for condition, equal in zip(disturbed["condition"], same, strict=True) if equal]
    return found


def _trend(run: Run, onset: int, window: int) -> float:
    """The share of the variance of performance before an onset that a line explains, median over seeds; 0: unknown."""
    performance = run.channel("performance")
    if performance is None or not 0 < window <= onset:
        return 0.0
    first = int(np.flatnonzero(run.conditions["onset"] == onset)[0])
    before = performance[:, first, onset - window : onset]
    before = before - before.mean(axis=1, keepdims=True)
    time = np.arange(window) - (window - 1) / 2
    total = (before**2).sum(axis=1) * (time**2).sum()
    share = np.divide((before @ time) ** 2, total, where=total > 0, out=np.zeros(len(total)))
    return float(np.median(share)) if np.isfinite(share).all() else 0.0
