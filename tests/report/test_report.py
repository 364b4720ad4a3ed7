"""The report for synthetic run folders: it is self-contained, agrees with the stored numbers, and is robust."""

import dataclasses
import json
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import xarray as xr
from synthetic_runs import (
    CHANNELS,
    KINDS,
    condition_table,
    dataset,
    embedded_specs,
    simulate,
    without_scripts,
    write_run,
)

from jaxaudit import report
from jaxaudit.analysis.run_reader import load
from jaxaudit.report import audit_page, line_panels, outcomes, style
from jaxaudit.report.run_figures import collapse_map
from jaxaudit.report.verdict import _without_effect, verdict

pytestmark = pytest.mark.long


@pytest.fixture
def without_figure_files(monkeypatch):
    """Does not write the files of figures, which take most of a report's time and which these tests do not need."""
    monkeypatch.setattr("jaxaudit.report.page.write_figures", lambda *_: None)


@pytest.fixture(scope="module")
def typical_report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "typical"
    performance = simulate(condition_table(), 8, 400)
    performance[0, 7, 300:] = np.nan
    metrics, summary = write_run(folder, condition_table(), performance=performance, channels=CHANNELS)
    path = report.build(folder)
    return folder, path.read_text(), metrics, summary


def test_the_page_loads_nothing(typical_report):
    _, page, *_ = typical_report
    text = without_scripts(page)
    assert not re.search(r"""(src|href|action|data|poster)\s*=\s*["']?\s*(https?:)?//""", text)
    assert not re.search(r"@import|url\(", text)
    assert "default-src 'none'" in page
    for spec in embedded_specs(page).values():
        assert '"url"' not in json.dumps(spec)
        assert '"href"' not in json.dumps(spec)
    assert re.findall(r"<script[^>]*\bsrc\b", page) == []


def test_figures_are_valid_files(typical_report):
    folder, *_ = typical_report
    names = {path.stem for path in (folder / "figures").iterdir()}
    assert names == {"performance", "collapse_map", "dose_response", *(f"channels_{kind}" for kind in KINDS)}
    for name in names:
        root = ElementTree.parse(folder / "figures" / f"{name}.svg").getroot()
        assert root.tag.endswith("svg")
        assert float(root.get("width")) > 200
        assert (folder / "figures" / f"{name}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_selected_lines_are_opaque_and_rules_show_under_the_pointer(typical_report):
    _, page, *_ = typical_report
    panel = embedded_specs(page)["spec-performance"]["concat"][0]
    opacities = {}
    for layer in panel["layer"]:
        if opacity := layer["encoding"].get("opacity"):
            (active,) = opacity["condition"]
            opacities[layer.get("name", layer["mark"]["type"]).split("_")[0]] = active["value"], opacity["value"]
    assert opacities == {"area": (0.16, 0.02), "lines": (1.0, 0.08), "point": (1.0, 0.08), "rules": (0.25, 0.0)}
    assert {param["name"].split("_")[0] for param in embedded_specs(page)["spec-performance"]["params"]} >= {
        "hover",
        "pick",
    }


def test_channel_panels_share_a_legend_and_performance_panels_do_not(typical_report):
    _, page, *_ = typical_report
    figures = embedded_specs(page)
    channels = [name for name in figures if name.startswith("spec-channels")]
    assert channels
    for name, legend in [("spec-performance", "independent"), *((name, "shared") for name in channels)]:
        spec = figures[name]
        assert spec["resolve"]["legend"] == {"color": legend}, name
        assert spec["resolve"]["scale"] == {"color": legend, "x": "independent", "y": "independent"}, name
        assert spec["config"]["font"] == style.FONT


def test_numbers_equal_the_tables(typical_report):
    _, page, metrics, summary = typical_report
    first, second = re.findall(r"<tbody>(.*?)</tbody>", page.split('id="metrics"')[1], re.S)[:2]
    columns = ["divergence_probability", "collapse_probability", "iqm_final_performance"]
    for text, row in zip(re.findall(r"<tr>(.*?)</tr>", first, re.S), summary.itertuples(), strict=True):
        values = re.findall(r'data-value="([^"]*)"', text)
        assert values[0] == row.condition
        values_of_row = [float(v or "nan") for v in values[3:6]]
        assert values_of_row == pytest.approx([getattr(row, c) for c in columns], rel=1e-12, nan_ok=True)
        assert f"{row.collapse_probability_high:.3g}" in text
    lane_values = [
        re.findall(r'data-value="([^"]*)"', row_values) for row_values in re.findall(r"<tr>(.*?)</tr>", second, re.S)
    ]
    assert [float(row_values[2]) for row_values in lane_values] == pytest.approx(list(metrics.collapse_time))
    assert "never" in second
    reason = "recovery_rate: J never fell below J_pre after the onset, so there was nothing to recover"
    assert metrics[metrics.perturbation == "control"].recovery_rate.isna().all()
    assert f"<li>{reason}</li>" in page
    assert "J turned non-finite at step 300" in page
    assert "2 (1 of 8 seeds)" in first
    assert f'title="{reason}' in second


def test_lines_and_bands_are_quantiles_over_seeds(typical_report):
    _, page, *_ = typical_report
    conditions = condition_table()
    performance = simulate(conditions, 8, 400)
    spec = embedded_specs(page)["spec-performance"]
    csv = next(text for text in spec["datasets"].values() if isinstance(text, str) and ",m3,100," in text)
    rows = [line.split(",") for line in csv.splitlines()[1:]]
    strongest = {int(r[0]): [float(v) for v in r[3:6]] for r in rows if r[1] == "m3"}
    control = {int(r[0]): float(r[3]) for r in rows if r[1] == "c"}
    assert min(strongest) == 119
    assert set(control) == set(range(400))
    expected = np.quantile(performance[:, 4].astype(float), [0.5, 0.25, 0.75], axis=0)
    for step in (119, 130, 399):
        assert strongest[step] == pytest.approx(expected[:, step], rel=1e-5)


def test_conditions_without_any_effect_are_reported(tmp_path):
    conditions = condition_table()
    performance = simulate(conditions, 5, 400)
    disturbed = conditions.index[conditions.perturbation != "control"]
    performance[:, disturbed[0]] = performance[:, conditions.index[conditions.perturbation == "control"][0]]
    write_run(tmp_path, conditions, performance=performance, channels=CHANNELS)
    run = load(tmp_path)
    assert not _without_effect(run), "the other channels differ"
    selected = run.telemetry[["performance", "layer_gradient_norm", "evaluation_return"]]
    run = dataclasses.replace(run, telemetry=selected)
    assert _without_effect(run) == [conditions.condition[disturbed[0]]]
    (sentence,) = (text for text in verdict(run, line_panels.panels(run)).sentences if "No effect at all" in text)
    name = conditions.condition[disturbed[0]]
    assert sentence == f"No effect at all: under <b>{name}</b>, every channel is bitwise equal to the control's."


def test_the_verdict_names_the_harmful_perturbations(typical_report):
    _, page, _, summary = typical_report
    lead = re.search(r'<p class="lead">(.*?)</p>', page, re.S).group(1)
    text = re.search(r'<ul class="verdict">(.*?)</ul>', page, re.S).group(1)
    harmful = summary[summary.collapse_probability >= 0.5].perturbation.unique()
    assert set(re.findall(r"<b>(.*?)</b>", lead)) == set(harmful)
    assert "critical magnitude" in text
    assert "<b>observation_noise</b> collapses no seed at any magnitude tried" in text
    assert "in the 50 steps from the last onset, their performance differs by up to 1.7" in text
    assert "4.3 M" in page
    assert "2 min 3 s" in page


def collapses(*times):
    """Conditions and performance of lanes which collapse at these steps (None: never), at magnitudes 1, 3, ..."""
    conditions = condition_table(
        {"weight_noise": ("parametric", tuple(3.0**i for i in range(len(times))), 1.0)}, duration=1
    )
    performance = 400 + np.random.default_rng(0).normal(size=(len(times[0]), len(conditions), 400))
    performance[:] = performance[:, :1]
    for condition, of_seeds in enumerate(times, 1):
        for seed, time in enumerate(of_seeds):
            performance[seed, condition, time or 400 :] -= 300
    return conditions, performance.astype(np.float32)


def verdict_of(folder, *times):
    conditions, performance = collapses(*times)
    write_run(folder, conditions, performance=performance)
    page = report.build(folder).read_text()
    return re.sub(r"<.*?>", "", re.search(r'<ul class="verdict">(.*?)</ul>', page, re.S).group(1)), page


@pytest.mark.exhaustive
def test_collapses_are_called_late_if_most_are(tmp_path, without_figure_files):
    text, _ = verdict_of(tmp_path / "late", [150, 250, 260, 270, None, None, None])
    assert "Most of these collapses come after T_max / 2" in text
    text, _ = verdict_of(tmp_path / "early", [150, 160, 170, 270, None, None, None])
    assert "collapses the learner at magnitude 1" in text
    assert "T_max / 2" not in text


@pytest.mark.exhaustive
def test_an_absent_critical_magnitude_has_a_bound_and_a_reason(tmp_path, without_figure_files):
    """All seeds collapse at 3 and none elsewhere, so that the monotone fit stays below one half."""
    _, page = verdict_of(tmp_path, *([[None] * 6, [150] * 6] + [[None] * 6] * 2))
    expected = "critical magnitude above 27: the fitted share stays below one half"
    assert expected in page


@pytest.mark.exhaustive
def test_a_trend_before_the_onset_is_reported(tmp_path, without_figure_files):
    conditions, performance = collapses([None] * 6)
    write_run(tmp_path / "steady", conditions, performance=performance)
    performance += np.arange(400, dtype=np.float32)
    write_run(tmp_path / "rising", conditions, performance=performance)
    warning = "In the 50 steps before step 120 performance was itself rising or falling"
    assert warning not in report.build(tmp_path / "steady").read_text()
    assert warning in report.build(tmp_path / "rising").read_text()


@pytest.mark.exhaustive
def test_with_few_seeds_performance_is_not_tested(tmp_path, without_figure_files):
    text, _ = verdict_of(tmp_path, [None] * 3)
    assert "3 seeds are too few for 95% intervals of performance, so differences in performance are not tested" in text
    assert "collapses no seed at any magnitude tried (95% upper bound of the collapse probability: " in text
    assert "than its interval" not in text


@pytest.mark.exhaustive
def test_targets_of_a_perturbation_have_separate_panels(tmp_path, without_figure_files):
    conditions = condition_table({"weight_noise": ("parametric", (1.0, 1.0), 9.0)})
    conditions["target"] = ["", "actor", "critic"]
    conditions["condition"] = ["control", "a", "b"]
    write_run(tmp_path, conditions, seeds=2)
    page = report.build(tmp_path).read_text()
    assert "weight_noise of actor" in page
    assert "weight_noise of critic" in page


@pytest.mark.exhaustive
def test_hostile_text_is_harmless(tmp_path):
    evil = '<script>alert("x")</script>'
    conditions = condition_table({f"{evil},\n'": ("data", (1.0, 2.0), 1.5)})
    write_run(tmp_path / "run", conditions, seeds=2, name=evil)
    page = report.build(tmp_path / "run").read_text()
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page
    assert len(re.findall(r"<script\b", without_scripts(page))) == 0
    for path in (tmp_path / "run" / "figures").iterdir():
        assert "<" not in path.name
        if path.suffix == ".svg":
            assert not list(ElementTree.parse(path).getroot().iter("{http://www.w3.org/2000/svg}script"))


@pytest.mark.exhaustive
def test_a_run_of_one_condition_and_one_seed(tmp_path):
    write_run(tmp_path, condition_table({"lr_spike": ("optimization", (10.0,), 14.0)}), seeds=1)
    page = report.build(tmp_path).read_text()
    assert "One seed" in page
    assert 'id="dose"' not in page
    assert "nan" not in without_scripts(page).lower()


@pytest.mark.exhaustive
def test_a_run_of_the_control_only(tmp_path):
    write_run(tmp_path, condition_table({}), seeds=3)
    page = report.build(tmp_path).read_text()
    assert "Only the undisturbed control was run" in page
    assert set(embedded_specs(page)) == {"spec-performance"}


@pytest.mark.exhaustive
def test_unusual_magnitudes_and_non_finite_values(tmp_path):
    conditions = condition_table(
        {"gradient_scale": ("optimization", (-0.2, 0.0, 0.2), 9.0), "a+b": ("signal", (np.nan,), 1.0)}
    )
    performance = simulate(conditions, 3, 400, offset=-2000.0)
    performance[:, 1, 150:] = np.nan
    performance[0, 2, 130:] = np.inf
    performance[:, 3, 140:] *= 1e9
    write_run(tmp_path, conditions, performance=performance, channels=("x_grad", "x_mem"))
    telemetry = xr.load_dataset(tmp_path / "telemetry.zarr", engine="zarr")
    telemetry["x_mem"][:] = np.nan
    telemetry["x_grad"][:, 1:] = np.nan
    telemetry.to_zarr(tmp_path / "telemetry.zarr", mode="w")
    page = report.build(tmp_path).read_text()
    spec = embedded_specs(page)["spec-performance"]
    csv = next(text for text in spec["datasets"].values() if isinstance(text, str) and ",m0,-0.2," in text)
    lost = [line for line in csv.splitlines() if line.endswith(",1")]
    assert [line.split(",")[0] for line in lost] == ["149"]
    assert "magnitudes are not all positive" in page
    assert "a+b nan" in page
    assert "leaves out extreme values" in page
    assert "x_mem" not in json.dumps(embedded_specs(page)["spec-channels-1"])


@pytest.mark.exhaustive
def test_an_interrupted_run_with_several_onsets(tmp_path):
    conditions = condition_table({"lr_spike": KINDS["lr_spike"]}, onsets=(120, 240))
    performance = simulate(conditions, 4, 400)
    performance[..., 300:] = np.nan
    performance[:, conditions.onset == 240, 200:] = np.nan
    write_run(tmp_path, conditions, performance=performance, status="interrupted")
    page = report.build(tmp_path).read_text()
    banner = re.search(r'class="banner" role="status">(.*?)</p>', page).group(1)
    assert "interrupted" in banner
    assert "between step 200 and step 300 of 400" in banner
    assert "lr_spike at step 120" in page
    assert "lr_spike at step 240" in page
    assert "P_div is 0 by definition for an onset at or after T_max / 2 (here: 240)" in page


@pytest.mark.exhaustive
def test_runs_without_tables_or_telemetry(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"telemetry\.zarr"):
        report.build(tmp_path)
    conditions = condition_table({"lr_spike": KINDS["lr_spike"]})
    performance = simulate(conditions, 2, 60)
    dataset(conditions.assign(onset=20), performance, ()).to_zarr(tmp_path / "telemetry.zarr")
    page = report.build(tmp_path).read_text()
    assert "not computed yet" in page
    assert 'id="metrics"' not in page
    xr.Dataset({"x": ("step", np.zeros(3))}).to_zarr(tmp_path / "other" / "telemetry.zarr")
    with pytest.raises(ValueError, match="performance"):
        report.build(tmp_path / "other")


@pytest.mark.exhaustive
def test_the_page_of_a_large_grid_stays_small(tmp_path, without_figure_files):
    kinds = {f"kind_{i}": ("data", (0.1, 0.2, 0.4, 0.8), 0.3) for i in range(10)}
    write_run(tmp_path, condition_table(kinds), steps=500, channels=CHANNELS)
    size = report.build(tmp_path).stat().st_size
    assert size < 6e6


@pytest.mark.exhaustive
def test_a_report_is_reproducible(tmp_path):
    write_run(tmp_path, condition_table({"lr_spike": ("optimization", (3.0, 30.0), 14.0)}), seeds=2)
    files = [report.build(tmp_path), tmp_path / "figures" / "performance.png"]
    first = [path.read_bytes() for path in files]
    report.build(tmp_path)
    assert [path.read_bytes() for path in files] == first


def test_bands_count_non_finite_lanes_as_the_worst():
    values = np.array([[1.0, np.nan, np.nan], [2, 5, np.nan], [3, 6, np.inf], [4, 7, np.nan]])
    median, low, high = line_panels.median_and_band(values, lost_is_worst=True)
    assert median.tolist() == [2.5, 5.5, -np.inf]
    assert low.tolist() == [1.75, -np.inf, -np.inf]
    assert high.tolist() == [3.25, 6.25, -np.inf]
    median, low, high = line_panels.median_and_band(values)
    assert median[:2].tolist() == [2.5, 6.0]
    assert np.isnan(median[2])
    assert np.isnan(line_panels.median_and_band(values[:1])[1]).all()


def test_thinning_keeps_steps_around_the_onset():
    steps = np.arange(10_000)
    selected = steps[line_panels.select_steps(steps, 3000, 100)]
    assert len(selected) <= 400
    assert {2999, 3000, 3001} <= set(selected)
    assert {0, 9999} <= set(selected)


def test_the_axis_leaves_out_only_extreme_values():
    usual = np.linspace(0, 1, 200)
    assert not style.domain([usual, usual - 9], [usual])[1]
    ends, clipped = style.domain([usual, np.array([-1e9, np.nan])], [usual])
    assert clipped
    assert -4 < ends[0] < -3
    assert style.domain([np.array([np.nan])], [])[0] == (0.0, 1.0)


def test_of_many_panels_the_most_harmful_are_drawn(tmp_path):
    conditions = condition_table(onsets=(100, 120, 140, 160))
    rng = np.random.default_rng(0)
    performance = np.full((8, len(conditions), 400), 1.0, np.float32) + rng.normal(size=(8, 1, 400)).astype(np.float32)
    harmful = [
        index
        for index, row in conditions.iterrows()
        if (row.perturbation, row.onset) in {("weight_noise", 160), ("lr_spike", 100), ("reward_flip", 120)}
    ]
    performance[:, harmful, 170:] = -1e3
    write_run(tmp_path, conditions, performance=performance)
    run = load(tmp_path)
    groups = line_panels.panels(run)
    selected = outcomes.most_harmful(run, groups, limit=3)
    assert len(groups) == 16
    assert [(panel.perturbation, panel.onset) for panel in selected] == [
        ("lr_spike", 100),
        ("reward_flip", 120),
        ("weight_noise", 160),
    ]
    assert outcomes.most_harmful(run, groups, limit=16) == groups
    assert len(outcomes.most_harmful(dataclasses.replace(run, summary=None), groups)) == outcomes.MAX_PANELS
    note = audit_page._omitted(groups, selected)
    assert "3 of 16 panels" in note
    assert "tables contain all" in note
    assert audit_page._omitted(groups, groups) is None


@pytest.mark.exhaustive
def test_of_many_magnitudes_a_selection_with_both_ends_is_drawn(tmp_path):
    magnitudes = tuple(float(m) for m in range(1, 41))
    conditions = condition_table({"lr_spike": ("optimization", magnitudes, 20.0)})
    write_run(tmp_path, conditions, seeds=2)
    (panel,) = line_panels.panels(load(tmp_path))
    reduced = outcomes.with_fewer_lines(panel)
    assert len(reduced.disturbed) == outcomes.MAX_LINES
    assert (reduced.lines[0].key, reduced.disturbed[0].magnitude, reduced.disturbed[-1].magnitude) == ("c", 1, 40)
    assert outcomes.with_fewer_lines(reduced) is reduced
    page = report.build(tmp_path).read_text()
    assert f"A panel shows at most {outcomes.MAX_LINES} magnitudes" in page
    assert "lr_spike 2<" in page, "the tables contain all magnitudes"


@pytest.mark.exhaustive
@pytest.mark.parametrize(("count", "side_by_side", "intervals"), [(3, 2, True), (8, 1, True), (20, 1, False)])
def test_cells_show_intervals_only_if_they_are_wide_enough(count, side_by_side, intervals, tmp_path):
    magnitudes = tuple(float(m) for m in range(1, count + 1))
    write_run(tmp_path, condition_table({"lr_spike": ("optimization", magnitudes, 20.0)}))
    run = load(tmp_path)
    spec = collapse_map(run, line_panels.panels(run)).spec
    layout = spec["usermeta"]["panel"]
    assert layout["columns"] == side_by_side
    assert layout["floor"] == layout["least"], "a narrow page scrolls the map"
    for panel in spec["concat"]:
        texts = [layer["encoding"]["text"]["field"] for layer in panel["layer"] if "text" in layer["encoding"]]
        assert ("interval" in texts) is intervals
        assert min(panel["width"], layout["least"]) / count >= (60 if intervals else 40)
