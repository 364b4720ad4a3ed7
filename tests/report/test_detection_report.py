"""The pages of compared detectors and of monitored runs, against synthetic folders."""

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
from synthetic_runs import outside_scripts, specs

from jaxaudit.report import detection_page, score_figures
from jaxaudit.report.detection_page import detector_table, verdict

pytestmark = pytest.mark.exhaustive

MINE = "meta-state (LRU)"
CONDITIONS = ("lr_spike 30", "lr_spike 100", "observation_noise 0.1", "weight_noise 0.1", "weight_noise 0.3",
              "reward_noise 5", "gradient_sign_flip 0.3", "momentum_noise 0.1")  # fmt: skip
CHANNELS = ("performance", "loss", "gradient_norm", "entropy", "x_grad", "x_mem", "x_inst", "kl", "value_loss",
            "layer_gradient_norm[actor, 0]", "layer_gradient_norm[actor, 1]", "step_size", "clip_fraction")  # fmt: skip


def rows_of_detectors(channels=CHANNELS, gain=(0.031, 0.012, 0.049), lead=25.0):
    """The monitor and its baselines; `gain` over the best of them, with its interval."""
    names = ["CUSUM of performance", "BOCPD of gradient_norm", "z-clip of gradient_norm"]
    names += [f"deviation of {channel}" for channel in channels]
    table = [{"detector": MINE, "auroc": 0.943, "gain_auroc": 0.0, "gain_lead_time": 0.0, "lead_time": lead}]
    for rank, name in enumerate(names):
        lower = 0.02 * rank
        table.append({"detector": name, "auroc": 0.943 - gain[0] - lower, "gain_auroc": gain[0] + lower,
                      "gain_auroc_low": gain[1] + lower, "gain_auroc_high": gain[2] + lower,
                      "lead_time": lead - 3 * rank if rank < 9 else -np.inf,
                      "gain_lead_time": 3.0 * rank if rank < 9 else np.inf})  # fmt: skip
    frame = pd.DataFrame(table).assign(false_alarms=0.047, false_alarms_low=0.016, false_alarms_high=0.129,
                                       detected=0.8125, detected_low=0.75, detected_high=0.86)  # fmt: skip
    frame["auroc_low"], frame["auroc_high"] = frame.auroc - 0.021, frame.auroc + 0.018
    frame["lead_time_low"], frame["lead_time_high"] = frame.lead_time - 8, frame.lead_time + 12
    frame["gain_lead_time_low"], frame["gain_lead_time_high"] = frame.gain_lead_time - 5, frame.gain_lead_time + 6
    return frame.sort_values("auroc", ascending=False)


def what_was_seen(conditions=CONDITIONS, steps=240, onset=120, samples=4, seed=0):
    """Latents that go round and leave the clean ones at the onset, the further the later the condition."""
    rng = np.random.default_rng(seed)
    names = ["clean", *conditions]
    t = np.arange(steps)
    after = np.clip(t - onset, 0, None) / max(steps - onset, 1)
    force = np.arange(len(names)) ** 1.7
    centre = np.stack([3 * np.cos(2.5 * t / steps), 2 * np.sin(2.5 * t / steps)], -1)
    leave = np.stack([after * np.cos(4 * after), -after * np.sin(5 * after)], -1)
    lanes = centre + force[:, None, None, None] * leave + 0.3 * rng.normal(size=(len(names), samples, steps, 2))
    spread = np.array([-1.0, 0.0, 1.0])
    latent = lanes.mean(1)[..., None] + spread
    deviation = (1.4 + 4 * force[:, None] * after)[..., None] * np.exp(0.4 * spread)
    gain = 450 * (1 - np.exp(-t / (0.1 * steps + 1)))
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
        {"condition": names, "step": t, "quantile": [0.1, 0.5, 0.9], "onset": ("condition", onsets)},
        {"threshold": 1.1},
    )  # fmt: skip


def write_comparison(folder, *, learner="ppo on InvertedPendulum-v5", table=None, seen=None, conditions=CONDITIONS):
    folder.mkdir(parents=True)
    table = rows_of_detectors() if table is None else table
    table.to_csv(folder / "detectors.csv", index=False)
    rng = np.random.default_rng(0)
    shown = pd.DataFrame({"condition": ["clean", *conditions]})
    shown["lanes"], shown["collapsed"] = [64] + [24] * len(conditions), [0, *rng.integers(0, 24, len(conditions))]
    for name in ("CUSUM of performance", MINE, "deviation of gradient_norm", "BOCPD of gradient_norm"):
        shown[name] = [0.047, *rng.integers(0, 25, len(conditions)) / 24]
        shown[f"{name} detected_low"], shown[f"{name} detected_high"] = shown[name] / 2, (1 + shown[name]) / 2
        shown[f"{name} auroc"] = [np.nan, *rng.uniform(0.4, 1, len(conditions))]
        shown[f"{name} auroc_low"], shown[f"{name} auroc_high"] = shown[f"{name} auroc"] - 0.1, 1.0
    shown.to_csv(folder / "conditions.csv", index=False)
    about = {"learner": learner, "monitor": MINE, "alpha": 0.05, "folds": 4, "clean": 64, "disturbed": 192}
    about |= {"steps": 240, "runs": ["runs/ppo-clean", "runs/ppo-disturbed"], "channels": list(CHANNELS)}
    (folder / "comparison.json").write_text(json.dumps(about))
    (what_was_seen(conditions) if seen is None else seen).to_zarr(folder / "trajectories.zarr")
    return shown


def watched_runs(runs=("healthy", "spiked", "drifting"), steps=400, channels=CHANNELS, seed=0):
    """The first run stays as clean ones are; the others leave them at a half, the later ones further."""
    rng = np.random.default_rng(seed)
    t = np.arange(steps)
    after = np.clip(t - steps // 2, 0, None) / max(steps // 2, 1)
    force = np.arange(len(runs))
    part = np.linspace(1, 0, len(channels)) ** 3
    distance = np.abs(rng.normal(size=(len(runs), steps, len(channels))))
    distance += 12 * force[:, None, None] * after[:, None] * part
    level = 1 + np.exp(-t / (0.2 * steps + 1))[:, None] * np.ones(len(channels))
    spread = np.array([-1.0, 0.0, 1.0])
    centre = np.stack([3 * np.cos(2.5 * t / steps), 2 * np.sin(2.5 * t / steps)], -1)
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
        {"run": list(runs), "step": t, "channel": list(channels), "component": [0, 1], "quantile": [0.1, 0.5, 0.9]},
    )


def write_monitored(folder, seen=None, *, threshold=1.5, notes=()):
    folder.mkdir(parents=True)
    seen = watched_runs() if seen is None else seen
    seen.to_zarr(folder / "monitored.zarr")
    names = [str(name) for name in seen.run.values]
    about = {"runs": names, "clean_runs": 60, "calibrated_on": 30, "alpha": 0.05, "threshold": threshold}
    about |= {"channels": [str(name) for name in seen.channel.values], "notes": list(notes)}
    (folder / "monitored.json").write_text(json.dumps(about))
    rows = []
    for name, score in zip(names, seen.score.values, strict=True):
        if (above := score > threshold).any():
            at = int(above.argmax())
            furthest = "loss 7.2, gradient_norm 5.1"
            rows.append((name, int(seen.step[at]), score[at], "shift_0.05", furthest))
    alarms = pd.DataFrame(rows, columns=["run", "step", "score", "kind", "channels"])
    alarms.to_csv(folder / "alarms.csv", index=False)
    return alarms


@pytest.fixture
def page_alone(monkeypatch):
    """Builds a page without its figures' files, which take most of the time, but for their names in `files`."""

    def build(folder):
        build.files = []
        return detection_page.build(folder).read_text()

    monkeypatch.setattr(
        "jaxaudit.report.page.write_figures", lambda _, figures: build.files.extend(one.file for one in figures)
    )
    return build


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("detect")
    conditions = write_comparison(folder / "ppo")
    return folder, detection_page.build(folder).read_text(), conditions


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "watched"
    alarms = write_monitored(
        folder, watched_runs(channels=CHANNELS[:3]), notes=["2 channels are <unknown> to the monitor."]
    )
    return folder, detection_page.build(folder).read_text(), alarms


def lead(page):
    return re.sub(r"<.*?>", "", re.search(r'<p class="lead">(.*?)</p>', page, re.S).group(1))


def sentences(page):
    found = re.search(r'<ul class="verdict">(.*?)</ul>', page, re.S)
    return re.findall(r"<li>(.*?)</li>", found.group(1), re.S) if found else []


def table_rows(page):
    body = re.search(r"<tbody>(.*?)</tbody>", page, re.S).group(1)
    return re.findall(r"<tr.*?</tr>", body, re.S)


def rows_of(page, heading):
    """The table under a heading: its head and rows, as texts."""
    part = page.split(f"<h2>{heading}</h2>")[1].split("</section>")[0]
    rows = [
        re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row, re.S)
        for row in re.findall(r"<tr>.*?</tr>|<tr .*?</tr>", part, re.S)
    ]
    return [[html.unescape(re.sub("<.*?>", "", cell)) for cell in row] for row in rows]


def drawn(spec):
    """The data of a figure, as frames."""
    texts = [text for text in spec["datasets"].values() if isinstance(text, str)]
    return [pd.read_csv(io.StringIO(text), keep_default_na=False, na_values=[""]) for text in texts]


@pytest.mark.parametrize("kind", ["compared", pytest.param("watched", marks=pytest.mark.exhaustive)])
def test_pages_load_nothing_and_figures_are_files(kind, request):
    folder, page, _ = request.getfixturevalue(kind)
    names = {
        "compared": {"ppo_conditions", "ppo_onset", "ppo_latent"},
        "watched": {"score", "distance", "values", "latent"},
    }
    assert {path.stem for path in (folder / "figures").iterdir()} == names[kind]
    for name in names[kind]:
        root = ElementTree.parse(folder / "figures" / f"{name}.svg").getroot()
        assert float(root.get("width")) > 200
        assert (folder / "figures" / f"{name}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert not re.search(r"""(src|href|action|data|poster)\s*=\s*["']?\s*(https?:)?//""", outside_scripts(page))
    assert "default-src 'none'" in page
    assert len(specs(page)) == len(names[kind])


def test_verdict_of_a_comparison(compared):
    _, page, _ = compared
    assert lead(page) == (
        "meta-state (LRU) has the highest AUROC, 0.943 (95% interval 0.922 to 0.961). It beats the best baseline, "
        "CUSUM of performance, by 0.031 (95% interval 0.012 to 0.049). The monitor gave a false alarm in 4.7% of 64 "
        "clean runs (95% interval 1.6% to 12.9%), where 5% was allowed."
    )


@pytest.mark.parametrize(
    ("gain", "said"),
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
def test_the_monitor_against_the_best_baseline(gain, said):
    assert said in verdict(rows_of_detectors(gain=gain), MINE, 0.05, 64)


def test_the_gain_over_the_best_chart_is_told_beside_that_over_the_best_baseline():
    rows = rows_of_detectors()
    rows["family"] = np.where(rows.detector == MINE, "monitor", "one channel")
    assert "chart" not in verdict(rows, MINE, 0.05, 64)
    rows.loc[rows.detector == "z-clip of gradient_norm", ["detector", "family"]] = "MEWMA 0.1", "all channels"
    rows.loc[rows.detector == "deviation of loss", ["detector", "family"]] = "max |z|", "all channels"
    assert (
        "Over the best control chart of all channels without a model, <b>MEWMA 0.1</b>, the monitor gains +0.071 "
        "(95% interval +0.052 to +0.089)." in verdict(rows, MINE, 0.05, 64)
    )
    rows.loc[rows.detector == "CUSUM of performance", ["detector", "family"]] = "Hotelling's T2", "all channels"
    assert verdict(rows, MINE, 0.05, 64).count("T2") == 1


def test_the_table_tells_what_a_detector_reads():
    rows = rows_of_detectors().assign(family="all channels")
    head = [title for title, _ in detector_table(rows, MINE).head][:3]
    assert head == ["detector", "reads", "AUROC"]
    assert detector_table(rows, MINE).rows[0][1].text == "all channels"


def test_the_page_tells_what_a_detector_reads_and_the_best_chart(tmp_path, page_alone):
    rows = rows_of_detectors().assign(family="one channel")
    rows.loc[rows.detector == "deviation of loss", ["detector", "family"]] = "max |z|", "all channels"
    write_comparison(tmp_path / "ppo", table=rows)
    page = page_alone(tmp_path)
    assert "Over the best control chart of all channels without a model" in page
    assert page.count(">all channels<") == 1
    assert page.count(">one channel<") == len(rows) - 1


def test_verdict_without_baselines_monitor_or_figures():
    rows = rows_of_detectors()
    assert "baseline" not in verdict(rows[rows.detector == MINE], MINE, 0.05, 64)
    assert "monitor" not in verdict(rows[rows.detector != MINE], MINE, None, None)
    assert "no verdict" in verdict(None, MINE, 0.05, 64)
    assert "no verdict" in verdict(rows.assign(auroc=np.nan), MINE, 0.05, 64)


def test_table_of_detectors(compared):
    _, page, _ = compared
    expected = rows_of_detectors()
    shown = table_rows(page)
    further = table_rows(page.split("Further single channels (3)")[1])
    values = [re.findall(r'data-value="([^"]*)"', row) for row in [*shown, *further]]
    assert [row[0] for row in values] == list(expected.detector)
    assert len(shown) == 1 + 3 + 10
    assert [float(row[1]) for row in values] == pytest.approx(list(expected.auroc))
    marked = [row for row in shown if 'class="marked"' in row]
    assert len(marked) == 1
    assert MINE in marked[0]
    assert "17 to 37" in marked[0]
    assert "no alarm in most" in shown[10]
    assert "+\N{INFINITY}" in shown[10]


def test_without_collapses_there_is_no_lead_time():
    rows = rows_of_detectors(lead=np.nan).assign(lead_time=np.nan, gain_lead_time=np.nan)
    cells = detector_table(rows, MINE).rows[1]
    assert [cell.text for cell in cells[-2:]] == ["none collapsed"] * 2
    assert all("nan" not in cell.text + cell.interval + cell.value for cell in cells)


def test_shares_by_condition(compared):
    _, page, conditions = compared
    (cells,) = drawn(specs(page)["spec-learner-1-conditions"])
    assert list(dict.fromkeys(cells.condition)) == ["clean: false alarms", *CONDITIONS]
    assert list(dict.fromkeys(cells.detector))[:2] == [MINE, "CUSUM of performance"]
    told = cells.pivot(index="condition", columns="detector", values="p").loc["lr_spike 100"]
    stored = conditions.set_index("condition").loc["lr_spike 100"]
    assert told[MINE] == pytest.approx(stored[MINE], rel=1e-5)
    assert f"{stored.collapsed:.0f} of 24" in set(cells.share)


def test_the_table_by_condition_has_the_monitor_and_the_best_baseline(compared):
    _, page, conditions = compared
    head, *shown = rows_of(page, "Which disturbance is detected")
    assert head[3:] == [f"{name}: {what}" for name in (MINE, "CUSUM of performance") for what in ("detected", "AUROC")]
    stored = conditions.set_index("condition").loc["lr_spike 100"]
    row = next(row for row in shown if "lr_spike 100" in row[0])
    assert row[3].startswith(f"{100 * stored[MINE]:.1f}%")
    low, high = (100 * stored[f"{MINE} detected_{end}"] for end in ("low", "high"))
    assert row[3].endswith(f"{low:.1f}% to {high:.1f}%")
    assert row[6].startswith(f"{stored['CUSUM of performance auroc']:.3f}")
    assert shown[0][0] == "clean: false alarms"
    assert shown[0][4] == shown[0][6] == ""


@pytest.fixture(scope="module")
def two_learners(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    for name in ("ppo", "sac"):
        write_comparison(
            folder / name, learner=f"{name} on Ant-v5", seen=what_was_seen(("x 1",), 12, 6), conditions=("x 1",)
        )
    return folder


def test_monitors_of_other_learners(two_learners, tmp_path, page_alone):
    """Every learner's page has the rows in which it is tested, its own monitor's first and marked."""
    shutil.copytree(two_learners, tmp_path, dirs_exist_ok=True)
    ways = ["own", "as it is", "recalibrated", "restandardised", "untrained"]
    rows = pd.DataFrame({"way": ways * 2, "tested": ["ppo on Ant-v5"] * 5 + ["sac on Ant-v5"] * 5})
    rows["fitted_to"] = ["ppo on Ant-v5", *["sac on Ant-v5"] * 3, "nothing", "sac on Ant-v5", *["<ppo>"] * 3, "nothing"]
    for name in ("auroc", "gain_auroc", "false_alarms", "detected"):
        rows[name] = np.linspace(0.1, 0.9, len(rows))
        rows[f"{name}_low"], rows[f"{name}_high"] = rows[name] - 0.05, rows[name] + 0.05
    rows.loc[8, ["auroc_low", "auroc_high"]] = np.nan
    rows.to_csv(tmp_path / "transfer.csv", index=False)
    page = page_alone(tmp_path / "sac")
    assert '<a href="#learner-1-transfer">' in page
    head, *shown = rows_of(page, "Fitted to other learners")
    assert head[2:] == ["AUROC", "own monitor's gain in AUROC", "false alarms per clean run", "detected"]
    assert [row[0] for row in shown] == ["sac on Ant-v5", *["<ppo>"] * 3, "nothing"]
    assert shown[0][1] == "fitted and calibrated on its own clean lanes"
    assert [row[2] for row in shown] == [
        f"{x:.3f}" + (f" {x - 0.05:.3f} to {x + 0.05:.3f}" if place != 3 else "")
        for place, x in enumerate(rows.auroc[5:])
    ]
    assert shown[0][3] == ""
    assert shown[1][3].startswith(f"+{rows.gain_auroc[6]:.3f}")
    assert page_alone(tmp_path).count("Fitted to other learners</h2>") == 2


def test_series_around_the_onset_are_the_stored_ones(compared):
    _, page, _ = compared
    seen = what_was_seen()
    spec = specs(page)["spec-learner-1-onset"]
    assert len(spec["concat"]) == 3
    frames = [frame for frame in drawn(spec) if "median" in frame]
    for name in ("performance", "deviation", "score"):
        stored = seen[name].sel(condition="momentum_noise 0.1", step=150).values
        rows = [frame[(frame.label == "momentum_noise 0.1") & (frame.step == 30)].iloc[0] for frame in frames]
        found = [(row.low, row["median"], row.high) for row in rows]
        assert any(np.allclose(stored, values, rtol=1e-4) for values in found), name
    assert frames[0].label.nunique() == 1 + score_figures.MAX_CONDITIONS
    clean = frames[0][frames[0].key == "c"]
    assert clean.low.notna().all()
    assert frames[0].loc[(frames[0].key != "c") & (frames[0].step < 0), "low"].isna().all()
    assert '"level": 1.1' in json.dumps(spec)


def test_conditions_drawn_go_from_the_least_to_the_most_deviating():
    seen = what_was_seen(tuple(f"c{i}" for i in range(12)))
    seen = seen.isel(condition=[0, *range(12, 0, -1)])
    chosen = score_figures.select_conditions(seen)
    assert [str(seen.condition.values[place]) for place in chosen] == ["c0", "c2", "c4", "c7", "c9", "c11"]
    assert score_figures.select_conditions(seen.isel(condition=[0])) == []


def test_every_learner_has_its_part(two_learners, tmp_path, page_alone):
    shutil.copytree(two_learners, tmp_path, dirs_exist_ok=True)
    page = page_alone(tmp_path)
    assert "Detectors on 2 learners" in page
    assert page.count('class="lead"') == 2
    assert len(specs(page)) == 6
    assert set(page_alone.files) == {
        f"{name}_{figure}" for name in ("ppo", "sac") for figure in ("conditions", "onset", "latent")
    }
    alone = page_alone(tmp_path / "sac")
    assert len(specs(alone)) == 3
    assert all("Fitted to other learners</h2>" not in found for found in (page, alone))


def test_hostile_text_is_harmless(tmp_path, page_alone):
    evil = '</script><script>alert("x")</script>,\n\''
    rows = rows_of_detectors(channels=(evil,))
    write_comparison(tmp_path / "a" / "ppo", learner=evil, table=rows, seen=what_was_seen((evil,)), conditions=(evil,))
    about = json.loads((tmp_path / "a" / "ppo" / "comparison.json").read_text()) | {"runs": [evil], "channels": [evil]}
    (tmp_path / "a" / "ppo" / "comparison.json").write_text(json.dumps(about))
    write_monitored(tmp_path / "b", watched_runs(("calm", evil), channels=(evil, "loss")), notes=[evil])
    for name in ("a", "b"):
        page = page_alone(tmp_path / name)
        assert "<script>alert" not in page
        assert "&lt;script&gt;alert" in page
        assert evil in json.dumps(list(specs(page).values())).encode().decode("unicode_escape")


@pytest.mark.parametrize("gone", ["detectors.csv", "conditions.csv", "trajectories.zarr", "all"])
def test_missing_pieces_are_left_out(gone, tmp_path, page_alone):
    write_comparison(tmp_path / "ppo", seen=what_was_seen(("x 1",), 12, 6), conditions=("x 1",))
    for path in (tmp_path / "ppo").iterdir():
        if path.name == gone or (gone == "all" and path.name != "comparison.json"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    page = page_alone(tmp_path)
    ids = {"detectors.csv": "detectors", "conditions.csv": "conditions", "trajectories.zarr": "latents"}
    for name, part in ids.items():
        assert (f'id="learner-1-{part}"' in page) == (gone not in (name, "all"))
    assert ("no verdict" in page) == (gone in ("detectors.csv", "all"))


def test_a_comparison_at_its_limits(tmp_path, page_alone):
    """Two steps; clean lanes alone; and values that are not finite."""
    write_comparison(tmp_path / "short" / "ppo", seen=what_was_seen(("x 1",), steps=2, onset=1), conditions=("x 1",))
    clean = what_was_seen().isel(condition=[0])
    write_comparison(tmp_path / "clean" / "ppo", seen=clean, conditions=())
    seen = what_was_seen(("x 1", "y 2"), steps=30, onset=10)
    seen["score"][2, 20:], seen["deviation"][2, 20:], seen["performance"][1, 20:] = np.inf, np.inf, -np.inf
    seen["latent_samples"][1, :, 15:], seen["latent"][0, 5] = np.nan, np.nan
    write_comparison(tmp_path / "lost" / "ppo", seen=seen, conditions=("x 1", "y 2"))
    for name in ("short", "clean", "lost"):
        assert len(specs(page_alone(tmp_path / name))) == 3
    spec = specs((tmp_path / "lost" / "report.html").read_text())["spec-learner-1-onset"]
    lost = [frame[frame.lost == 1] for frame in drawn(spec) if "lost" in frame]
    assert sorted((int(rows.step.iloc[0]), rows.label.iloc[0]) for rows in lost) == [
        (9, "x 1"),
        (10, "y 2"),
        (10, "y 2"),
    ]


@pytest.mark.exhaustive
def test_large_folders_stay_small(tmp_path, page_alone):
    names = tuple(f"perturbation_{i} 0.{i}" for i in range(12))
    write_comparison(tmp_path / "a" / "ppo", seen=what_was_seen(names, steps=5000, onset=2000), conditions=names)
    channels = [f"layer_{i}" for i in range(40)]
    write_monitored(tmp_path / "b", watched_runs([f"run_{i}" for i in range(9)], 5000, channels))
    for name in ("a", "b"):
        assert len(page_alone(tmp_path / name)) < 4e6
    frames = drawn(specs((tmp_path / "b" / "report.html").read_text())["spec-score"])
    assert max(frame.groupby(next(c for c in ("key", "run") if c in frame)).size().max() for frame in frames) <= 600


def test_an_infinite_score_is_at_the_edge_and_the_threshold_stays_legible():
    rows = {"step": range(4), "key": "m0", "label": "a", "median": [-1.0, 0.0, 300.0, np.inf]}
    data, scale, extra, cut = score_figures.score_scale(pd.DataFrame(rows).assign(low=np.nan, high=np.nan), 1.0)
    low, top = scale["domain"]
    assert scale["type"] == "symlog"
    low_at, limit_at, top_at = (np.sign(x) * np.log1p(abs(x) / scale["constant"]) for x in (low, 1.0, top))
    assert (limit_at - low_at) / (top_at - low_at) > 0.1
    assert cut
    assert data["median"].tolist() == [-1, 0, 300, top]
    assert data["lost"].isna().tolist() == [True, True, True, False]
    assert len(extra) == 1


def test_scores_near_the_threshold_have_a_linear_axis():
    rows = pd.DataFrame({"step": range(3), "key": "m0", "label": "a", "median": [-1.0, 2.0, 3.0]})
    rows = rows.assign(low=-1.0, high=3.0)
    _, scale, _, cut = score_figures.score_scale(rows, 1.0)
    assert "type" not in scale.to_dict()
    assert not cut
    assert not score_figures.score_scale(rows, np.nan)[2]
    assert score_figures.score_scale(rows.assign(median=50.0, low=40.0), 1.0)[1]["domain"][0] < 1


def test_verdict_of_monitored_runs(watched):
    _, page, alarms = watched
    assert lead(page) == (
        "An alarm in 2 of 3 runs. False alarms occur in at most 5% of clean runs on average; for nine in ten sets of "
        "30 calibration runs, in 0.17% to 9.5%."
    )
    first = alarms.sort_values("step").iloc[0]
    beyond = f"{first.score - 1.5:.2g}"
    told = f"<b>{first.run}</b>: alarm at step {first.step}, {beyond} above the threshold; furthest from the "
    assert sentences(page)[0] == told + "clean runs, in standard deviations: loss 7.2, gradient_norm 5.1."
    assert "2 channels are &lt;unknown&gt; to the monitor." in page
    assert [re.findall(r'data-value="([^"]*)"', row)[0] for row in table_rows(page)] == list(
        alarms.sort_values("step").run
    )


def test_verdict_of_one_run_and_of_no_alarm(tmp_path, page_alone):
    write_monitored(tmp_path / "calm", watched_runs(("only",), 40, ("loss",)))
    assert lead(page_alone(tmp_path / "calm")).startswith("No alarm in the run.")
    write_monitored(tmp_path / "three", watched_runs(steps=40, channels=("loss",)), threshold=1e3)
    page = page_alone(tmp_path / "three")
    assert lead(page).startswith("No alarm in 3 runs.")
    assert 'id="alarms"' not in page
    seen = watched_runs(("lost",), 40, ("loss",))
    seen["score"][0, 25:], seen["values"][0, 25:], seen["latent"][0, 25:] = np.inf, np.nan, np.nan
    write_monitored(tmp_path / "lost", seen)
    page = page_alone(tmp_path / "lost")
    assert lead(page).startswith(
        "lost: alarm at step 25, because a value is missing that every clean run has; furthest from the clean runs, in "
        "standard deviations: loss"
    )
    assert not sentences(page)
    assert "\N{INFINITY}" in table_rows(page)[0]


def test_channels_that_moved_most_come_first(watched):
    _, page, _ = watched
    found = specs(page)
    assert [panel["title"] for panel in found["spec-distance"]["concat"]] == ["drifting", "spiked", "healthy"]
    rows = next(frame for frame in drawn(found["spec-distance"]) if frame.distance.max() > 9)
    assert list(dict.fromkeys(rows.channel))[:3] == ["performance", "loss", "gradient_norm"]
    stored = watched_runs(channels=CHANNELS[:3])["distance"].sel(run="drifting", channel="loss").values
    (told,) = rows[(rows.channel == "loss") & (rows.begin == rows.begin.max())].distance
    assert told == pytest.approx(stored[int(rows.begin.max()) :].mean(), rel=1e-4)
    assert [panel["title"]["text"] for panel in found["spec-values"]["concat"]][:2] == ["performance", "loss"]


def test_a_few_steps_and_a_step_that_is_not_there(tmp_path, page_alone):
    seen = watched_runs(steps=2, channels=("loss", "entropy"))
    for name in ("score", "latent", "distance", "values"):
        seen[name][1, 1:] = np.nan
        seen[name][2] = np.nan
    write_monitored(tmp_path / "two", seen)
    assert set(specs(page_alone(tmp_path / "two"))) == {"spec-score", "spec-distance", "spec-values", "spec-latents"}
    write_monitored(
        tmp_path / "score", watched_runs(("only",), 1).drop_vars(["latent", "distance", "values", "clean_values"])
    )
    assert set(specs(page_alone(tmp_path / "score"))) == {"spec-score"}


def test_a_monitored_folder_without_series_still_has_its_verdict(tmp_path, page_alone):
    write_monitored(tmp_path / "runs")
    shutil.rmtree(tmp_path / "runs" / "monitored.zarr")
    (tmp_path / "runs" / "alarms.csv").unlink()
    page = page_alone(tmp_path / "runs")
    assert lead(page).startswith("No alarm in 3 runs.")
    assert not specs(page)


def test_a_folder_of_neither_kind_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        detection_page.build(tmp_path)
    assert str(error.value) == (
        f"{tmp_path} contains neither compared detectors (comparison.json) nor monitored runs (monitored.json), so "
        "there is nothing to report"
    )
    assert not list(tmp_path.iterdir())
