"""The report pages of compared detectors and of monitored runs, for synthetic folders."""

import html
import io
import json
import re
import shutil
import xml.etree.ElementTree as ElementTree

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from synthetic_runs import embedded_specs, without_scripts

from jaxaudit.report import detection_page, score_figures
from jaxaudit.report.detection_page import detector_table, verdict

pytestmark = pytest.mark.exhaustive

MONITOR = "meta-state (LRU)"
CONDITIONS = ("lr_spike 30", "lr_spike 100", "observation_noise 0.1", "weight_noise 0.1", "weight_noise 0.3",
              "reward_noise 5", "gradient_sign_flip 0.3", "momentum_noise 0.1")  # fmt: skip
CHANNELS = ("performance", "loss", "gradient_norm", "entropy", "x_grad", "x_mem", "x_inst", "kl", "value_loss",
            "layer_gradient_norm[actor, 0]", "layer_gradient_norm[actor, 1]", "step_size", "clip_fraction")  # fmt: skip


def rows_of_detectors(channels=CHANNELS, gain=(0.031, 0.012, 0.049), lead_time=25.0):
    """A table of the monitor and baselines, with the monitor's `gain` over the best of them and its interval."""
    names = ["CUSUM of performance", "BOCPD of gradient_norm", "z-clip of gradient_norm"]
    names += [f"deviation of {channel}" for channel in channels]
    table = [{"detector": MONITOR, "auroc": 0.943, "gain_auroc": 0.0, "gain_lead_time": 0.0, "lead_time": lead_time}]
    for rank, name in enumerate(names):
        lower = 0.02 * rank
        table.append({"detector": name, "auroc": 0.943 - gain[0] - lower, "gain_auroc": gain[0] + lower,
                      "gain_auroc_low": gain[1] + lower, "gain_auroc_high": gain[2] + lower,
                      "lead_time": lead_time - 3 * rank if rank < 9 else -np.inf,
                      "gain_lead_time": 3.0 * rank if rank < 9 else np.inf})  # fmt: skip
    frame = pd.DataFrame(table).assign(false_alarms=0.047, false_alarms_low=0.016, false_alarms_high=0.129,
                                       detected=0.8125, detected_low=0.75, detected_high=0.86)  # fmt: skip
    frame["auroc_low"], frame["auroc_high"] = frame.auroc - 0.021, frame.auroc + 0.018
    frame["lead_time_low"], frame["lead_time_high"] = frame.lead_time - 8, frame.lead_time + 12
    frame["gain_lead_time_low"], frame["gain_lead_time_high"] = frame.gain_lead_time - 5, frame.gain_lead_time + 6
    return frame.sort_values("auroc", ascending=False)


def trajectories(conditions=CONDITIONS, steps=240, onset=120, samples=4, seed=0):
    """Trajectories in which disturbed conditions leave the clean one at the onset, later ones further."""
    rng = np.random.default_rng(seed)
    names = ["clean", *conditions]
    steps_axis = np.arange(steps)
    after = np.clip(steps_axis - onset, 0, None) / max(steps - onset, 1)
    force = np.arange(len(names)) ** 1.7
    centre = np.stack([3 * np.cos(2.5 * steps_axis / steps), 2 * np.sin(2.5 * steps_axis / steps)], -1)
    departure = np.stack([after * np.cos(4 * after), -after * np.sin(5 * after)], -1)
    lanes = centre + force[:, None, None, None] * departure + 0.3 * rng.normal(size=(len(names), samples, steps, 2))
    spread = np.array([-1.0, 0.0, 1.0])
    latent = lanes.mean(1)[..., None] + spread
    deviation = (1.4 + 4 * force[:, None] * after)[..., None] * np.exp(0.4 * spread)
    gain = 450 * (1 - np.exp(-steps_axis / (0.1 * steps + 1)))
    performance = (gain * (1 - np.minimum(force / force.max(), 1)[:, None] * np.minimum(3 * after, 1)))[..., None]
    score = (-1.5 + 1.2 * force[:, None] * after + 0.2 * rng.normal(size=(len(names), steps)))[..., None]
    quantiles, series = ("quantile",), ("condition", "step")
    onsets = [0, *[onset] * len(conditions)]
    return xr.Dataset(
        {
            "latent_samples": (("condition", "sample", "step", "component"), lanes),
            "latent": ((*series, "component", *quantiles), latent),
            "deviation": ((*series, *quantiles), deviation),
            "performance": ((*series, *quantiles), performance + 20 * spread),
            "score": ((*series, *quantiles), score + 0.5 * spread),
        },
        {"condition": names, "step": steps_axis, "quantile": [0.1, 0.5, 0.9], "onset": ("condition", onsets)},
        {"threshold": 1.1},
    )  # fmt: skip


def write_comparison(folder, *, learner="ppo on InvertedPendulum-v5", table=None, data=None, conditions=CONDITIONS):
    folder.mkdir(parents=True)
    table = rows_of_detectors() if table is None else table
    table.to_csv(folder / "detectors.csv", index=False)
    rng = np.random.default_rng(0)
    by_condition = pd.DataFrame({"condition": ["clean", *conditions]})
    by_condition["lanes"], by_condition["collapsed"] = (
        [64] + [24] * len(conditions),
        [0, *rng.integers(0, 24, len(conditions))],
    )
    for name in ("CUSUM of performance", MONITOR, "deviation of gradient_norm", "BOCPD of gradient_norm"):
        by_condition[name] = [0.047, *rng.integers(0, 25, len(conditions)) / 24]
        by_condition[f"{name} detected_low"], by_condition[f"{name} detected_high"] = (
            by_condition[name] / 2,
            (1 + by_condition[name]) / 2,
        )
        by_condition[f"{name} auroc"] = [np.nan, *rng.uniform(0.4, 1, len(conditions))]
        by_condition[f"{name} auroc_low"], by_condition[f"{name} auroc_high"] = by_condition[f"{name} auroc"] - 0.1, 1.0
    by_condition.to_csv(folder / "conditions.csv", index=False)
    about = {"learner": learner, "monitor": MONITOR, "alpha": 0.05, "folds": 4, "clean": 64, "disturbed": 192}
    about |= {"steps": 240, "runs": ["runs/ppo-clean", "runs/ppo-disturbed"], "channels": list(CHANNELS)}
    (folder / "comparison.json").write_text(json.dumps(about))
    (trajectories(conditions) if data is None else data).to_zarr(folder / "trajectories.zarr")
    return by_condition


def monitored_runs(runs=("healthy", "spiked", "drifting"), steps=400, channels=CHANNELS, seed=0):
    """Monitored runs: the first stays like clean ones, the others leave them after half of the steps, ever further."""
    rng = np.random.default_rng(seed)
    steps_axis = np.arange(steps)
    after = np.clip(steps_axis - steps // 2, 0, None) / max(steps // 2, 1)
    force = np.arange(len(runs))
    weights = np.linspace(1, 0, len(channels)) ** 3
    distance = np.abs(rng.normal(size=(len(runs), steps, len(channels))))
    distance += 12 * force[:, None, None] * after[:, None] * weights
    level = 1 + np.exp(-steps_axis / (0.2 * steps + 1))[:, None] * np.ones(len(channels))
    spread = np.array([-1.0, 0.0, 1.0])
    centre = np.stack([3 * np.cos(2.5 * steps_axis / steps), 2 * np.sin(2.5 * steps_axis / steps)], -1)
    latent = centre + 0.2 * rng.normal(size=(len(runs), steps, 2))
    latent += 6 * force[:, None, None] * np.stack([after, after**2], -1)
    score = -1 + 8 * force[:, None] * after + 0.3 * rng.normal(size=(len(runs), steps))
    return xr.Dataset(
        {
            "score": (("run", "step"), score),
            "latent": (("run", "step", "component"), latent),
            "distance": (("run", "step", "channel"), distance),
            "values": (("run", "step", "channel"), level + 0.1 * distance),
            "clean_latent": (("step", "component", "quantile"), centre[..., None] + 0.5 * spread),
            "clean_values": (("step", "channel", "quantile"), level[..., None] + 0.1 * spread),
        },
        {
            "run": list(runs),
            "step": steps_axis,
            "channel": list(channels),
            "component": [0, 1],
            "quantile": [0.1, 0.5, 0.9],
        },
    )


def write_monitored(folder, data=None, *, threshold=1.5, notes=()):
    folder.mkdir(parents=True)
    data = monitored_runs() if data is None else data
    data.to_zarr(folder / "monitored.zarr")
    names = [str(name) for name in data.run.values]
    about = {"runs": names, "clean_runs": 60, "calibrated_on": 30, "alpha": 0.05, "threshold": threshold}
    about |= {"channels": [str(name) for name in data.channel.values], "notes": list(notes)}
    (folder / "monitored.json").write_text(json.dumps(about))
    rows = []
    for name, score in zip(names, data.score.values, strict=True):
        if (above := score > threshold).any():
            first = int(above.argmax())
            furthest = "loss 7.2, gradient_norm 5.1"
            rows.append((name, int(data.step[first]), score[first], "shift_0.05", furthest))
    alarms = pd.DataFrame(rows, columns=["run", "step", "score", "kind", "channels"])
    alarms.to_csv(folder / "alarms.csv", index=False)
    return alarms


@pytest.fixture
def page_without_figures(monkeypatch):
    """Builds a page without writing its figures, which takes most of the time; their names are kept in `files`."""

    def build(folder):
        build.files = []
        return detection_page.build(folder).read_text()

    monkeypatch.setattr(
        "jaxaudit.report.page.write_figures", lambda _, figures: build.files.extend(one.file for one in figures)
    )
    return build


@pytest.fixture(scope="module")
def comparison_page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("detect")
    conditions = write_comparison(folder / "ppo")
    return folder, detection_page.build(folder).read_text(), conditions


@pytest.fixture(scope="module")
def monitored_page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "watched"
    alarms = write_monitored(
        folder, monitored_runs(channels=CHANNELS[:3]), notes=["2 channels are <unknown> to the monitor."]
    )
    return folder, detection_page.build(folder).read_text(), alarms


def lead_text(page):
    return re.sub(r"<.*?>", "", re.search(r'<p class="lead">(.*?)</p>', page, re.S).group(1))


def sentences(page):
    match = re.search(r'<ul class="verdict">(.*?)</ul>', page, re.S)
    return re.findall(r"<li>(.*?)</li>", match.group(1), re.S) if match else []


def table_row_html(page):
    body = re.search(r"<tbody>(.*?)</tbody>", page, re.S).group(1)
    return re.findall(r"<tr.*?</tr>", body, re.S)


def rows_of(page, heading):
    """Returns the cells of the table under a heading, as text, with its head as the first row."""
    part = page.split(f"<h2>{heading}</h2>")[1].split("</section>")[0]
    rows = [
        re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row, re.S)
        for row in re.findall(r"<tr>.*?</tr>|<tr .*?</tr>", part, re.S)
    ]
    return [[html.unescape(re.sub("<.*?>", "", cell)) for cell in row] for row in rows]


def figure_data(spec):
    """Returns the data of a figure as data frames."""
    texts = [text for text in spec["datasets"].values() if isinstance(text, str)]
    return [pd.read_csv(io.StringIO(text), keep_default_na=False, na_values=[""]) for text in texts]


@pytest.mark.parametrize("kind", ["comparison_page", pytest.param("monitored_page", marks=pytest.mark.exhaustive)])
def test_pages_load_nothing_and_figures_are_valid_files(kind, request):
    folder, page, _ = request.getfixturevalue(kind)
    names = {
        "comparison_page": {"ppo_conditions", "ppo_onset", "ppo_latent"},
        "monitored_page": {"score", "distance", "values", "latent"},
    }
    assert {path.stem for path in (folder / "figures").iterdir()} == names[kind]
    for name in names[kind]:
        root = ElementTree.parse(folder / "figures" / f"{name}.svg").getroot()
        assert float(root.get("width")) > 200
        assert (folder / "figures" / f"{name}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert not re.search(r"""(src|href|action|data|poster)\s*=\s*["']?\s*(https?:)?//""", without_scripts(page))
    assert "default-src 'none'" in page
    assert len(embedded_specs(page)) == len(names[kind])


def test_the_verdict_of_a_comparison(comparison_page):
    _, page, _ = comparison_page
    assert lead_text(page) == (
        "meta-state (LRU) has the highest AUROC, 0.943 (95% interval 0.922 to 0.961). It beats the best baseline, "
        "CUSUM of performance, by 0.031 (95% interval 0.012 to 0.049). The monitor gave a false alarm in 4.7% of 64 "
        "clean runs (95% interval 1.6% to 12.9%), where 5% was allowed."
    )


@pytest.mark.parametrize(
    ("gain", "sentence"),
    [
        ((0.02, 0.01, 0.03), "It beats the best baseline, <b>CUSUM of performance</b>, by 0.020 (95% interval"),
        ((0.02, -0.01, 0.05), "It does not differ significantly from the best baseline, <b>CUSUM of performance</b>: "
         "its AUROC differs by +0.020 (95% interval \N{MINUS SIGN}0.010 to +0.050)."),
        ((-0.02, -0.03, 0.01), "The monitor does not differ significantly from it: its AUROC differs by "
         "\N{MINUS SIGN}0.020"),
        ((-0.02, -0.03, -0.01), "The monitor is beaten by it, by 0.020 (95% interval 0.010 to 0.030)."),
        ((0.02, np.nan, np.nan), "<b>CUSUM of performance</b>: its AUROC differs by +0.020."),
    ],
)  # fmt: skip
def test_the_verdict_compares_the_monitor_with_the_best_baseline(gain, sentence):
    assert sentence in verdict(rows_of_detectors(gain=gain), MONITOR, 0.05, 64)


def test_the_verdict_has_the_gain_over_the_best_chart():
    rows = rows_of_detectors()
    rows["family"] = np.where(rows.detector == MONITOR, "monitor", "one channel")
    assert "chart" not in verdict(rows, MONITOR, 0.05, 64)
    rows.loc[rows.detector == "z-clip of gradient_norm", ["detector", "family"]] = "MEWMA 0.1", "all channels"
    rows.loc[rows.detector == "deviation of loss", ["detector", "family"]] = "max |z|", "all channels"
    assert (
        "Over the best control chart of all channels without a model, <b>MEWMA 0.1</b>, the monitor gains +0.071 "
        "(95% interval +0.052 to +0.089)." in verdict(rows, MONITOR, 0.05, 64)
    )
    rows.loc[rows.detector == "CUSUM of performance", ["detector", "family"]] = "Hotelling's T2", "all channels"
    assert verdict(rows, MONITOR, 0.05, 64).count("T2") == 1


def test_the_table_says_which_channels_a_detector_reads():
    rows = rows_of_detectors().assign(family="all channels")
    head = [title for title, _ in detector_table(rows, MONITOR).head][:3]
    assert head == ["detector", "reads", "AUROC"]
    assert detector_table(rows, MONITOR).rows[0][1].text == "all channels"


def test_the_page_says_what_detectors_read_and_the_best_chart(tmp_path, page_without_figures):
    rows = rows_of_detectors().assign(family="one channel")
    rows.loc[rows.detector == "deviation of loss", ["detector", "family"]] = "max |z|", "all channels"
    write_comparison(tmp_path / "ppo", table=rows)
    page = page_without_figures(tmp_path)
    assert "Over the best control chart of all channels without a model" in page
    assert page.count(">all channels<") == 1
    assert page.count(">one channel<") == len(rows) - 1


def test_verdicts_without_baselines_monitor_or_values():
    rows = rows_of_detectors()
    assert "baseline" not in verdict(rows[rows.detector == MONITOR], MONITOR, 0.05, 64)
    assert "monitor" not in verdict(rows[rows.detector != MONITOR], MONITOR, None, None)
    assert "no verdict" in verdict(None, MONITOR, 0.05, 64)
    assert "no verdict" in verdict(rows.assign(auroc=np.nan), MONITOR, 0.05, 64)


def test_the_table_of_detectors_equals_the_stored_one(comparison_page):
    _, page, _ = comparison_page
    expected = rows_of_detectors()
    rows = table_row_html(page)
    further_rows = table_row_html(page.split("Further single channels (3)")[1])
    values = [re.findall(r'data-value="([^"]*)"', row) for row in [*rows, *further_rows]]
    assert [row[0] for row in values] == list(expected.detector)
    assert len(rows) == 1 + 3 + 10
    assert [float(row[1]) for row in values] == pytest.approx(list(expected.auroc))
    marked = [row for row in rows if 'class="marked"' in row]
    assert len(marked) == 1
    assert MONITOR in marked[0]
    assert "17 to 37" in marked[0]
    assert "no alarm in most" in rows[10]
    assert "+\N{INFINITY}" in rows[10]


def test_without_collapses_the_table_has_no_lead_time():
    rows = rows_of_detectors(lead_time=np.nan).assign(lead_time=np.nan, gain_lead_time=np.nan)
    cells = detector_table(rows, MONITOR).rows[1]
    assert [cell.text for cell in cells[-2:]] == ["none collapsed"] * 2
    assert all("nan" not in cell.text + cell.interval + cell.value for cell in cells)


def test_shares_by_condition_equal_the_stored_ones(comparison_page):
    _, page, conditions = comparison_page
    (cells,) = figure_data(embedded_specs(page)["spec-learner-1-conditions"])
    assert list(dict.fromkeys(cells.condition)) == ["clean: false alarms", *CONDITIONS]
    assert list(dict.fromkeys(cells.detector))[:2] == [MONITOR, "CUSUM of performance"]
    shares = cells.pivot(index="condition", columns="detector", values="p").loc["lr_spike 100"]
    stored = conditions.set_index("condition").loc["lr_spike 100"]
    assert shares[MONITOR] == pytest.approx(stored[MONITOR], rel=1e-5)
    assert f"{stored.collapsed:.0f} of 24" in set(cells.share)


def test_the_table_by_condition_has_the_monitor_and_the_best_baseline(comparison_page):
    _, page, conditions = comparison_page
    head, *rows = rows_of(page, "Which disturbance is detected")
    assert head[3:] == [
        f"{name}: {quantity}" for name in (MONITOR, "CUSUM of performance") for quantity in ("detected", "AUROC")
    ]
    stored = conditions.set_index("condition").loc["lr_spike 100"]
    row = next(row for row in rows if "lr_spike 100" in row[0])
    assert row[3].startswith(f"{100 * stored[MONITOR]:.1f}%")
    low, high = (100 * stored[f"{MONITOR} detected_{end}"] for end in ("low", "high"))
    assert row[3].endswith(f"{low:.1f}% to {high:.1f}%")
    assert row[6].startswith(f"{stored['CUSUM of performance auroc']:.3f}")
    assert rows[0][0] == "clean: false alarms"
    assert rows[0][4] == rows[0][6] == ""


@pytest.fixture(scope="module")
def two_learners(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    for name in ("ppo", "sac"):
        write_comparison(
            folder / name, learner=f"{name} on Ant-v5", data=trajectories(("x 1",), 12, 6), conditions=("x 1",)
        )
    return folder


def test_transferred_monitors_are_on_the_tested_learners_page(two_learners, tmp_path, page_without_figures):
    """A learner's page has the rows in which it is tested, with its own monitor's row first."""
    shutil.copytree(two_learners, tmp_path, dirs_exist_ok=True)
    ways = ["own", "as it is", "recalibrated", "restandardised", "untrained"]
    rows = pd.DataFrame({"way": ways * 2, "tested": ["ppo on Ant-v5"] * 5 + ["sac on Ant-v5"] * 5})
    rows["fitted_to"] = ["ppo on Ant-v5", *["sac on Ant-v5"] * 3, "nothing", "sac on Ant-v5", *["<ppo>"] * 3, "nothing"]
    for name in ("auroc", "gain_auroc", "false_alarms", "detected"):
        rows[name] = np.linspace(0.1, 0.9, len(rows))
        rows[f"{name}_low"], rows[f"{name}_high"] = rows[name] - 0.05, rows[name] + 0.05
    rows.loc[8, ["auroc_low", "auroc_high"]] = np.nan
    rows.to_csv(tmp_path / "transfer.csv", index=False)
    page = page_without_figures(tmp_path / "sac")
    assert '<a href="#learner-1-transfer">' in page
    head, *cells = rows_of(page, "Fitted to other learners")
    assert head[2:] == ["AUROC", "own monitor's gain in AUROC", "false alarms per clean run", "detected"]
    assert [row[0] for row in cells] == ["sac on Ant-v5", *["<ppo>"] * 3, "nothing"]
    assert cells[0][1] == "fitted and calibrated on its own clean lanes"
    assert [row[2] for row in cells] == [
        f"{x:.3f}" + (f" {x - 0.05:.3f} to {x + 0.05:.3f}" if index != 3 else "")
        for index, x in enumerate(rows.auroc[5:])
    ]
    assert cells[0][3] == ""
    assert cells[1][3].startswith(f"+{rows.gain_auroc[6]:.3f}")
    assert page_without_figures(tmp_path).count("Fitted to other learners</h2>") == 2


def test_series_around_the_onset_equal_the_stored_ones(comparison_page):
    _, page, _ = comparison_page
    stored_data = trajectories()
    spec = embedded_specs(page)["spec-learner-1-onset"]
    assert len(spec["concat"]) == 3
    frames = [frame for frame in figure_data(spec) if "median" in frame]
    for name in ("performance", "deviation", "score"):
        stored = stored_data[name].sel(condition="momentum_noise 0.1", step=150).values
        rows = [frame[(frame.label == "momentum_noise 0.1") & (frame.step == 30)].iloc[0] for frame in frames]
        values_by_frame = [(row.low, row["median"], row.high) for row in rows]
        assert any(np.allclose(stored, triple, rtol=1e-4) for triple in values_by_frame), name
    assert frames[0].label.nunique() == 1 + score_figures.MAX_CONDITIONS
    clean = frames[0][frames[0].key == "c"]
    assert clean.low.notna().all()
    assert frames[0].loc[(frames[0].key != "c") & (frames[0].step < 0), "low"].isna().all()
    assert '"level": 1.1' in json.dumps(spec)


def test_selected_conditions_span_the_range_of_deviations():
    data = trajectories(tuple(f"c{i}" for i in range(12)))
    data = data.isel(condition=[0, *range(12, 0, -1)])
    selected = score_figures.select_conditions(data)
    assert [str(data.condition.values[index]) for index in selected] == ["c0", "c2", "c4", "c7", "c9", "c11"]
    assert score_figures.select_conditions(data.isel(condition=[0])) == []


def test_every_learner_has_a_section(two_learners, tmp_path, page_without_figures):
    shutil.copytree(two_learners, tmp_path, dirs_exist_ok=True)
    page = page_without_figures(tmp_path)
    assert "Detectors on 2 learners" in page
    assert page.count('class="lead"') == 2
    assert len(embedded_specs(page)) == 6
    assert set(page_without_figures.files) == {
        f"{name}_{figure}" for name in ("ppo", "sac") for figure in ("conditions", "onset", "latent")
    }
    single_page = page_without_figures(tmp_path / "sac")
    assert len(embedded_specs(single_page)) == 3
    assert all("Fitted to other learners</h2>" not in html_page for html_page in (page, single_page))


def test_hostile_text_is_harmless(tmp_path, page_without_figures):
    evil = '</script><script>alert("x")</script>,\n\''
    rows = rows_of_detectors(channels=(evil,))
    write_comparison(tmp_path / "a" / "ppo", learner=evil, table=rows, data=trajectories((evil,)), conditions=(evil,))
    about = json.loads((tmp_path / "a" / "ppo" / "comparison.json").read_text()) | {"runs": [evil], "channels": [evil]}
    (tmp_path / "a" / "ppo" / "comparison.json").write_text(json.dumps(about))
    write_monitored(tmp_path / "b", monitored_runs(("calm", evil), channels=(evil, "loss")), notes=[evil])
    for name in ("a", "b"):
        page = page_without_figures(tmp_path / name)
        assert "<script>alert" not in page
        assert "&lt;script&gt;alert" in page
        assert evil in json.dumps(list(embedded_specs(page).values())).encode().decode("unicode_escape")


@pytest.mark.parametrize("missing", ["detectors.csv", "conditions.csv", "trajectories.zarr", "all"])
def test_sections_without_data_are_left_out(missing, tmp_path, page_without_figures):
    write_comparison(tmp_path / "ppo", data=trajectories(("x 1",), 12, 6), conditions=("x 1",))
    for path in (tmp_path / "ppo").iterdir():
        if path.name == missing or (missing == "all" and path.name != "comparison.json"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    page = page_without_figures(tmp_path)
    ids = {"detectors.csv": "detectors", "conditions.csv": "conditions", "trajectories.zarr": "latents"}
    for name, section in ids.items():
        assert (f'id="learner-1-{section}"' in page) == (missing not in (name, "all"))
    assert ("no verdict" in page) == (missing in ("detectors.csv", "all"))


def test_a_comparison_with_extreme_data_is_reported(tmp_path, page_without_figures):
    """Covers two steps, clean lanes only, and non-finite values."""
    write_comparison(tmp_path / "short" / "ppo", data=trajectories(("x 1",), steps=2, onset=1), conditions=("x 1",))
    clean = trajectories().isel(condition=[0])
    write_comparison(tmp_path / "clean" / "ppo", data=clean, conditions=())
    data = trajectories(("x 1", "y 2"), steps=30, onset=10)
    data["score"][2, 20:], data["deviation"][2, 20:], data["performance"][1, 20:] = np.inf, np.inf, -np.inf
    data["latent_samples"][1, :, 15:], data["latent"][0, 5] = np.nan, np.nan
    write_comparison(tmp_path / "lost" / "ppo", data=data, conditions=("x 1", "y 2"))
    for name in ("short", "clean", "lost"):
        assert len(embedded_specs(page_without_figures(tmp_path / name))) == 3
    spec = embedded_specs((tmp_path / "lost" / "report.html").read_text())["spec-learner-1-onset"]
    lost = [frame[frame.lost == 1] for frame in figure_data(spec) if "lost" in frame]
    assert sorted((int(rows.step.iloc[0]), rows.label.iloc[0]) for rows in lost) == [
        (9, "x 1"),
        (10, "y 2"),
        (10, "y 2"),
    ]


@pytest.mark.exhaustive
def test_pages_of_large_folders_stay_small(tmp_path, page_without_figures):
    names = tuple(f"perturbation_{i} 0.{i}" for i in range(12))
    write_comparison(tmp_path / "a" / "ppo", data=trajectories(names, steps=5000, onset=2000), conditions=names)
    channels = [f"layer_{i}" for i in range(40)]
    write_monitored(tmp_path / "b", monitored_runs([f"run_{i}" for i in range(9)], 5000, channels))
    for name in ("a", "b"):
        assert len(page_without_figures(tmp_path / name)) < 4e6
    frames = figure_data(embedded_specs((tmp_path / "b" / "report.html").read_text())["spec-score"])
    assert max(frame.groupby(next(c for c in ("key", "run") if c in frame)).size().max() for frame in frames) <= 600


def test_infinite_scores_are_at_the_edge_of_a_symlog_axis():
    rows = {"step": range(4), "key": "m0", "label": "a", "median": [-1.0, 0.0, 300.0, np.inf]}
    data, scale, extra, clipped = score_figures.score_scale(pd.DataFrame(rows).assign(low=np.nan, high=np.nan), 1.0)
    low, top = scale["domain"]
    assert scale["type"] == "symlog"
    low_at, limit_at, top_at = (np.sign(x) * np.log1p(abs(x) / scale["constant"]) for x in (low, 1.0, top))
    assert (limit_at - low_at) / (top_at - low_at) > 0.1
    assert clipped
    assert data["median"].tolist() == [-1, 0, 300, top]
    assert data["lost"].isna().tolist() == [True, True, True, False]
    assert len(extra) == 1


def test_scores_near_the_threshold_have_a_linear_axis():
    rows = pd.DataFrame({"step": range(3), "key": "m0", "label": "a", "median": [-1.0, 2.0, 3.0]})
    rows = rows.assign(low=-1.0, high=3.0)
    _, scale, _, clipped = score_figures.score_scale(rows, 1.0)
    assert "type" not in scale.to_dict()
    assert not clipped
    assert not score_figures.score_scale(rows, np.nan)[2]
    assert score_figures.score_scale(rows.assign(median=50.0, low=40.0), 1.0)[1]["domain"][0] < 1


def test_the_verdict_of_monitored_runs(monitored_page):
    _, page, alarms = monitored_page
    assert lead_text(page) == (
        "An alarm in 2 of 3 runs. False alarms occur in at most 5% of clean runs on average; for nine in ten sets of "
        "30 calibration runs, in 0.17% to 9.5%."
    )
    first = alarms.sort_values("step").iloc[0]
    beyond = f"{first.score - 1.5:.2g}"
    expected = f"<b>{first.run}</b>: alarm at step {first.step}, {beyond} above the threshold; furthest from the "
    assert sentences(page)[0] == expected + "clean runs, in standard deviations: loss 7.2, gradient_norm 5.1."
    assert "2 channels are &lt;unknown&gt; to the monitor." in page
    assert [re.findall(r'data-value="([^"]*)"', row)[0] for row in table_row_html(page)] == list(
        alarms.sort_values("step").run
    )


def test_verdicts_of_a_single_run_and_without_alarms(tmp_path, page_without_figures):
    write_monitored(tmp_path / "calm", monitored_runs(("only",), 40, ("loss",)))
    assert lead_text(page_without_figures(tmp_path / "calm")).startswith("No alarm in the run.")
    write_monitored(tmp_path / "three", monitored_runs(steps=40, channels=("loss",)), threshold=1e3)
    page = page_without_figures(tmp_path / "three")
    assert lead_text(page).startswith("No alarm in 3 runs.")
    assert 'id="alarms"' not in page
    data = monitored_runs(("lost",), 40, ("loss",))
    data["score"][0, 25:], data["values"][0, 25:], data["latent"][0, 25:] = np.inf, np.nan, np.nan
    write_monitored(tmp_path / "lost", data)
    page = page_without_figures(tmp_path / "lost")
    assert lead_text(page).startswith(
        "lost: alarm at step 25, because a value is missing that every clean run has; furthest from the clean runs, in "
        "standard deviations: loss"
    )
    assert not sentences(page)
    assert "\N{INFINITY}" in table_row_html(page)[0]


def test_channels_are_ordered_by_their_distance(monitored_page):
    _, page, _ = monitored_page
    figures = embedded_specs(page)
    assert [panel["title"] for panel in figures["spec-distance"]["concat"]] == ["drifting", "spiked", "healthy"]
    rows = next(frame for frame in figure_data(figures["spec-distance"]) if frame.distance.max() > 9)
    assert list(dict.fromkeys(rows.channel))[:3] == ["performance", "loss", "gradient_norm"]
    stored = monitored_runs(channels=CHANNELS[:3])["distance"].sel(run="drifting", channel="loss").values
    (last_distance,) = rows[(rows.channel == "loss") & (rows.begin == rows.begin.max())].distance
    assert last_distance == pytest.approx(stored[int(rows.begin.max()) :].mean(), rel=1e-4)
    assert [panel["title"]["text"] for panel in figures["spec-values"]["concat"]][:2] == ["performance", "loss"]


def test_runs_with_few_or_missing_steps_are_reported(tmp_path, page_without_figures):
    data = monitored_runs(steps=2, channels=("loss", "entropy"))
    for name in ("score", "latent", "distance", "values"):
        data[name][1, 1:] = np.nan
        data[name][2] = np.nan
    write_monitored(tmp_path / "two", data)
    assert set(embedded_specs(page_without_figures(tmp_path / "two"))) == {
        "spec-score",
        "spec-distance",
        "spec-values",
        "spec-latents",
    }
    write_monitored(
        tmp_path / "score", monitored_runs(("only",), 1).drop_vars(["latent", "distance", "values", "clean_values"])
    )
    assert set(embedded_specs(page_without_figures(tmp_path / "score"))) == {"spec-score"}


def test_a_monitored_folder_without_series_has_a_verdict(tmp_path, page_without_figures):
    write_monitored(tmp_path / "runs")
    shutil.rmtree(tmp_path / "runs" / "monitored.zarr")
    (tmp_path / "runs" / "alarms.csv").unlink()
    page = page_without_figures(tmp_path / "runs")
    assert lead_text(page).startswith("No alarm in 3 runs.")
    assert not embedded_specs(page)


def test_a_folder_of_neither_kind_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        detection_page.build(tmp_path)
    assert str(error.value) == (
        f"{tmp_path} contains neither compared detectors (comparison.json) nor monitored runs (monitored.json), so "
        "there is nothing to report"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("count", "width"), [(4, 110), (12, 30)])
def test_titles_of_the_maps_columns_do_not_overlap_on_a_narrow_page(count, width):
    """Horizontal titles take 110 pixels, and tilted ones 30."""
    names = [f"deviation of channel {number}" for number in range(count)]
    table = pd.DataFrame({"condition": ["clean", "lr_spike 30"], **dict.fromkeys(names, 0.5)})
    layout = score_figures.detection_map(table, names[0], names, "map").spec["usermeta"]["panel"]
    assert layout["floor"] / count >= width
