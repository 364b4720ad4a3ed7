"""Results in a notebook: the HTML of `Result` and `Margins`, to the letter, and charts that every renderer can draw."""

import dataclasses
import html
import itertools
import re
import subprocess
import sys

import numpy as np
import pytest
import vl_convert
from synthetic_runs import condition_table, dataset, simulate

import jaxaudit as ja
from jaxaudit.analysis.metrics import MetricSettings
from jaxaudit.analysis.result_table import MAX_ROWS
from jaxaudit.runs.margins.bisection import CONTROL, SearchConfig, next_round
from jaxaudit.runs.margins.directions import directions
from jaxaudit.runs.margins.table import Margins

MINUS = "\N{MINUS SIGN}"
KINDS = {"lr_spike": ("optimization", (3.0, 30.0), 20.0)}


def audit(fallen=(0, 8), controls=0, *, seeds=8, steps=400, onset=120, kinds=KINDS, **attrs):
    """A result whose performance alternates between 100 and 101, and is 0 from the onset on where a seed falls."""
    conditions = condition_table(kinds, (onset,))
    performance = np.broadcast_to(100.0 + np.arange(steps) % 2, (seeds, len(conditions), steps)).copy()
    for condition, count in enumerate((controls, *fallen)):
        performance[:count, condition, onset:] = 0
    data = dataset(conditions, performance, ())
    data.attrs |= {"learner": "ppo"} | attrs
    return ja.Result(data, MetricSettings())


def rows(text):
    """The table of a block, with its head: the cells' texts without tags."""
    found = re.findall(r"<tr>(.*?)</tr>", text, re.S)
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.S) for row in found]
    return [[html.unescape(re.sub(r"<[^>]*>", "", cell)) for cell in row] for row in cells]


def paragraphs(text, kind):
    return [html.unescape(found) for found in re.findall(rf'<p class="{kind}">(.*?)</p>', text, re.S)]


def heading(text):
    return html.unescape(re.sub(r"<[^>]*>", "", re.search(r"<p>(.*?)</p>", text, re.S)[1]))


def test_an_audit_as_html():
    text = audit()._repr_html_()
    assert heading(text) == "Audit of ppo: 8 seeds, 3 conditions, 400 steps of 2048 env steps; onset at step 120."
    assert rows(text) == [
        ["condition", "share that collapses", "final mean return", "difference from the control"],
        ["control", "0.00 [0.00, 0.32]", "101 [101, 101]", ""],
        ["lr_spike 3", "0.00 [0.00, 0.32]", "101 [101, 101]", "0 [0, 0]"],
        ["lr_spike 30", "1.00 [0.68, 1.00]", "0 [0, 0]", f"{MINUS}101 [{MINUS}101, {MINUS}101]"],
    ]
    assert paragraphs(text, "warning") == []
    assert paragraphs(text, "note") == [
        "Collapse: performance falls out of the band that it had before the onset, and stays out. Final performance "
        "and its difference, paired by seed: interquartile means over seeds. In brackets: 95% intervals."
    ]


def test_an_audit_as_text():
    assert str(audit((2, 8), 2)).splitlines() == [
        "Audit of ppo: 8 seeds, 3 conditions, 400 steps of 2048 env steps; onset at step 120.",
        "warning: 2 of 8 seeds collapse undisturbed (control)",
        "",
        "condition    share that collapses  added to the control  final mean return  difference from the control",
        "control      0.25 [0.07, 0.59]                           101 [25.2, 101]",
        "lr_spike 3   0.25 [0.07, 0.59]     0.00 [-0.26, 0.26]    101 [25.2, 101]    0 [0, 0]",
        "lr_spike 30  1.00 [0.68, 1.00]     0.75 [0.28, 0.93]     0 [0, 0]           -101 [-101, -25.2]",
        "",
        "Collapse: performance falls out of the band that it had before the onset, and stays out. Final performance "
        "and its difference, paired by seed: interquartile means over seeds. In brackets: 95% intervals.",
        "Added to the control: the share of seeds that collapse, minus the share whose control collapses.",
    ]


def test_it_loads_and_runs_nothing():
    text = audit()._repr_html_()
    assert not re.search(r"<script|<link|<img|@import|url\(|https?:|\bon\w+=", text)
    assert text.startswith('<div class="jaxaudit-result">')
    assert text.endswith("</div>")


def test_text_is_escaped():
    hostile = '<script>alert("1")</script>&'
    kinds = {hostile: ("data", (1.0,), 0.0)}
    text = audit((8,), 1, kinds=kinds, learner=hostile, performance_name=hostile, step_unit=hostile)._repr_html_()
    assert "<script" not in text
    assert heading(text).count(hostile) == 2
    assert [row[0] for row in rows(text)[1:]] == ["control", f"{hostile} 1"]
    assert f"final {hostile}" in rows(text)[0]


def test_controls_that_collapse_are_warned_of_and_subtracted():
    text = audit((2, 8), 2)._repr_html_()
    assert paragraphs(text, "warning") == ["Warning: 2 of 8 seeds collapse undisturbed (control)"]
    assert [row[2] for row in rows(text)] == [
        "added to the control",
        "",
        f"0.00 [{MINUS}0.26, 0.26]",
        "0.75 [0.28, 0.93]",
    ]
    assert paragraphs(text, "note")[1].startswith("Added to the control:")
    half = audit((8, 8), 4)
    assert half.warnings == ["4 of 8 seeds collapse undisturbed (control), so there is no critical magnitude"]
    assert "no effect" in half.critical_magnitude("lr_spike").reason or np.isnan(half.critical_magnitude("lr_spike")[0])


def test_what_is_not_a_number_is_given_with_its_reason():
    result = audit()
    result.telemetry["performance"][:, 2, 300:] = np.nan
    result.telemetry["performance"][0, 1, 300:] = np.nan
    result.telemetry["performance"][:, :, 119] = np.nan
    text = result._repr_html_()
    assert [row[2] for row in rows(text)[2:]] == [
        "n/a 1 of the 8 seeds have no value",
        "n/a none of the 8 seeds has a value",
    ]
    assert "nan" not in text
    gap, unknown = paragraphs(text, "warning")
    assert "the undisturbed seed 0 is NaN at step 119 and a number again at step 120" in gap
    assert unknown == (
        "Warning: for 15 of 24 lanes it is unknown whether they collapse: J is non-finite before the onset, at step "
        "119, so J_pre is undefined"
    )


def test_an_infinite_performance():
    result = audit((8, 8))
    result.telemetry["performance"][:, 2, -1] = -np.inf
    assert rows(result._repr_html_())[3][2].startswith(f"{MINUS}\N{INFINITY}")


@pytest.mark.parametrize(
    ("seeds", "warning"),
    [(1, "there is one seed, so there are no intervals"), (4, "with fewer than 5 seeds, only shares have intervals")],
)
def test_few_seeds(seeds, warning):
    result = audit((0, seeds), seeds=seeds)
    assert result.warnings == [warning]
    text = result._repr_html_()
    last = rows(text)[3]
    assert last[2:] == ["0", f"{MINUS}101"]
    assert last[1] == ("1.00" if seeds == 1 else "1.00 [0.51, 1.00]")
    assert ("intervals" in paragraphs(text, "note")[0]) == (seeds > 1)
    assert heading(text).startswith("Audit of ppo: 1 seed, 3" if seeds == 1 else "Audit of ppo: 4 seeds, 3")


def test_windows_that_the_run_is_too_short_for():
    result = audit(steps=200, onset=150)
    assert result.warnings == ["only 50 of hold = 100 steps follow the onset: every collapse is censored"]


def test_several_onsets_have_a_column():
    conditions = condition_table(KINDS, (120, 150))
    result = ja.Result(dataset(conditions, simulate(conditions, 5, 400), ()), MetricSettings())
    text = result._repr_html_()
    assert heading(text).endswith("onsets at steps 120, 150.")
    assert [row[:2] for row in rows(text)[:3]] == [
        ["condition", "onset"],
        ["control @120", "120"],
        ["lr_spike 3 @120", "120"],
    ]


def test_many_conditions():
    result = audit((), kinds={"lr_spike": ("optimization", tuple(range(2, 102)), 0.0)}, seeds=1, onset=150)
    text = result._repr_html_()
    assert len(rows(text)) == 1 + MAX_ROWS
    assert paragraphs(text, "note")[0] == f"{101 - MAX_ROWS} more conditions: `summary` has all of them."
    assert len(result.summary) == 101


def render(chart):
    """The texts of a chart, drawn from what every renderer of Altair is given."""
    svg = vl_convert.vegalite_to_svg(chart.to_dict())
    texts = re.findall(r"<text[^>]*>(.*?)</text>", svg, re.S)
    return html.unescape(re.sub(r"<[^>]*>", " ", " ".join(texts)))


def test_a_chart_has_what_the_page_of_a_report_has_and_its_caption():
    result = audit((2, 8))
    text = render(result.plot())
    for part in ("lr_spike", "onset 120, lasts 10 steps", "mean return", "control 3 30", "Line: median over 8 seeds"):
        assert part in text, part
    text = render(result.plot("map"))
    for part in ("P_div: collapse before T_max / 2", "0.25", "0.07 to 0.59", "Each cell: the magnitude"):
        assert part in text, part
    assert "critical: " in render(result.plot("dose_response"))


@pytest.mark.exhaustive
def test_a_neutral_zero_is_left_out_of_the_dose_response():
    with_zero = audit((0, 1, 8), kinds={"weight_noise": ("parametric", (0.0, 1.0, 4.0), 2.0)})
    without = audit((1, 8), kinds={"weight_noise": ("parametric", (1.0, 4.0), 2.0)})
    text = render(with_zero.plot("dose_response"))
    assert text == render(without.plot("dose_response"))
    assert f"critical: {with_zero.critical_magnitude('weight_noise').value:.3g} " in text


def test_a_performance_that_rises_before_the_onset_is_warned_of():
    result = audit()
    assert result.warnings == []
    result.telemetry["performance"] += np.minimum(np.arange(400), 120)
    (warning,) = ja.Result(result.telemetry, MetricSettings()).warnings
    assert warning.startswith("in the 50 steps before step 120 performance was itself rising or falling")


def test_a_chart_is_one_of_altairs_that_can_be_changed():
    chart = audit().plot().properties(title="mine")
    assert "mine" in render(chart)
    names = [parameter["name"] for parameter in chart.to_dict()["params"]]
    assert len(names) == len(set(names))


@pytest.mark.exhaustive
def test_one_seed_and_no_perturbation_are_drawn():
    assert "There is one seed" in render(audit((0, 1), seeds=1).plot())
    alone = audit((), kinds={})
    assert "undisturbed" in render(alone.plot())
    with pytest.raises(ValueError, match="figure 'dose_response' needs a perturbation with two magnitudes"):
        alone.plot("dose_response")


def test_an_unknown_figure():
    with pytest.raises(ValueError, match="must be one of 'performance', 'map', 'dose_response', not 'channels'"):
        audit().plot("channels")


@pytest.mark.exhaustive
def test_more_panels_than_a_reader_can_follow():
    kinds = {f"noise_{i:02}": ("data", (1.0,), 0.0) for i in range(14)}
    spec = audit((8,), kinds=kinds, seeds=1).plot().to_dict()
    assert "Of 14 panels, the 12 most harmful ones are drawn." in " ".join(spec["title"]["text"])
    assert len(spec["concat"]) == 12


@pytest.mark.exhaustive
@pytest.mark.parametrize("package", ["altair", "vl_convert"])
def test_a_missing_package_is_named_each_time(package):
    code = f"""if True:
        import importlib.util, sys
        from jaxaudit.runtime import registry
        sys.modules[{package!r}] = None
        for _ in range(2):
            try:
                registry.plots["audit"]
            except (ModuleNotFoundError, ValueError) as error:
                print(type(error).__name__, {package!r} in str(error))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() in (["ModuleNotFoundError True"] * 2, ["ValueError True"] * 2), done.stderr


def search(thresholds, kinds=None, tolerance=0.02):
    """The margins of seeds with these thresholds (magnitudes), and no training."""
    sought = [ja.weight_noise(0.1, onset=20)] if kinds is None else kinds
    found = directions(sought, 100, len(thresholds), 1000.0)
    plan = SearchConfig(tuple(found), {20: 50.0}, tolerance, 0.95, 16)
    probes = []
    for _ in itertools.count():
        asked = next_round(plan, 20, probes)
        if not asked:
            return Margins(plan, tuple(probes), tuple(range(len(thresholds))), "divergence", 100)
        for p in asked:
            fell = (
                p.direction != CONTROL and plan.directions[p.direction].magnitudes(p.log_scale)[0] >= thresholds[p.seed]
            )
            probes.append(dataclasses.replace(p, collapse_time=25.0 if fell else np.inf))


def test_margins_as_html():
    margins = search([0.2, 0.3, 0.4, 0.5, 0.6, 0.7])
    text = margins._repr_html_()
    assert heading(text) == "Stability margins: 1 perturbation, 6 seeds, 100 steps."
    printed = str(margins).splitlines()
    assert rows(text) == [re.split(r"  +", line) for line in printed[:2]]
    assert rows(text)[1][0] == "weight_noise"
    assert rows(text)[1][7].startswith("holds to at least")
    assert paragraphs(text, "note") == printed[3:]
    assert paragraphs(text, "note")[0].startswith("margin: the magnitude from which half of the seeds collapse")


def test_the_names_of_margins_are_escaped():
    margins = search([0.2, 0.3])
    (direction,) = margins.plan.directions
    plan = dataclasses.replace(margins.plan, directions=(dataclasses.replace(direction, name="<b>&"),))
    text = dataclasses.replace(margins, plan=plan)._repr_html_()
    assert "&lt;b&gt;&amp;" in text
    assert rows(text)[1][0] == "<b>&"


def test_a_chart_of_margins():
    margins = search([0.2, 0.3, 0.4, 0.5, 0.6, np.inf, np.inf, 0.0])
    spec = margins.plot().to_dict()
    text = render(margins.plot())
    for part in ("weight_noise", "times the standard magnitude", "Point: the margin", "1 2"):
        assert part in text, part
    tables = [data for data in spec["datasets"].values() if isinstance(data, str)]
    (ranges,) = (table.splitlines() for table in tables if table.startswith("name,first"))
    row = dict(zip(ranges[0].split(","), ranges[1].split(","), strict=True))
    assert float(row["margin"]) == pytest.approx(margins.table["safety_factor"][0], rel=1e-5)
    assert float(row["low"]) == pytest.approx(float(row["first"]), rel=1e-5), (
        "the interval begins below all that was tried"
    )
    assert float(row["high"]) == pytest.approx(float(row["last"]), rel=1e-5)
    (thresholds,) = (table.splitlines()[1:] for table in tables if table.startswith("name,threshold"))
    assert sorted(float(line.split(",")[1]) for line in thresholds) == pytest.approx([20, 30, 40, 50, 60], rel=0.25)


def test_a_margin_that_is_not_reached_is_drawn_without_a_point():
    spec = search([np.inf] * 6).plot().to_dict()
    (ranges,) = (data for data in spec["datasets"].values() if isinstance(data, str) and data.startswith("name,first"))
    assert dict(zip(*(line.split(",") for line in ranges.splitlines()), strict=True))["margin"] == ""
    vl_convert.vegalite_to_svg(spec)
