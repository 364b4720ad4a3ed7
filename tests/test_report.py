"""The report against synthetic run folders: self-contained, faithful to the stored numbers, hard to break."""

import json
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pandas as pd
import pytest
import xarray as xr

from jaxaudit import report
from jaxaudit.report import series, style
from jaxaudit.statistics import wilson

KINDS = {
    "lr_spike": ("optimization", (3.0, 10.0, 30.0, 100.0), 14.0),
    "weight_noise": ("parametric", (0.003, 0.01, 0.03), 0.02),
    "observation_noise": ("data", (0.05, 0.1, 0.2), 50.0),
    "reward_flip": ("signal", (0.1, 0.3, 0.5), 0.4),
}


def grid(kinds=KINDS, onsets=(120,), duration=10):
    rows = []
    for onset in onsets:
        tail = f" @{onset}" if len(onsets) > 1 else ""
        rows.append((f"control{tail}", "control", "control", np.nan, onset, 0, np.inf))
        for name, (dimension, magnitudes, critical) in kinds.items():
            for m in magnitudes:
                rows.append((f"{name} {m:g}{tail}", name, dimension, m, onset, duration, critical))
    columns = ["condition", "perturbation", "dimension", "magnitude", "onset", "duration", "critical"]
    return pd.DataFrame(rows, columns=columns)


def simulate(conditions, seeds, steps, offset=0.0, rng_seed=0):
    """Learning curves that fall after the onset and return, or do not, by the magnitude."""
    rng = np.random.default_rng(rng_seed)
    t = np.arange(steps)
    out = np.empty((seeds, len(conditions), steps), np.float32)
    for s in range(seeds):
        gain = 480 + 12 * rng.normal()
        base = gain * (1 - np.exp(-t / (0.12 * steps))) + 9 * rng.normal(size=steps) + offset
        for c, row in conditions.iterrows():
            if row.perturbation == "control":
                out[s, c] = base
                continue
            force = np.nan_to_num(row.magnitude / row.critical, nan=0.5) * np.exp(0.35 * rng.normal())
            after = np.maximum(t - row.onset, 0)
            drop = 1 - np.exp(-after / 6)
            back = np.exp(-after / 25) if force < 1 else 1 - 0.15 * (1 - np.exp(-after / 80))
            fall = min(force, 1.0) * (gain * 0.85) * drop * back * (t >= row.onset)
            out[s, c] = base - fall + 3 * rng.normal(size=steps) * (t >= row.onset)
    return out


def tables(conditions, performance, steps, hold=100, window=50):
    lanes = []
    for s in range(performance.shape[0]):
        for c, row in conditions.iterrows():
            j, onset = performance[s, c].astype(float), row.onset
            before = j[max(0, onset - window) : onset]
            below = ~(j[onset:] >= before.mean() - 2 * before.std())
            time = np.inf
            for start in np.flatnonzero(below):
                if below[start : start + hold].all():
                    time = float(onset + start)
                    break
            low = np.nanmin(j[onset:])
            collapsed = np.isfinite(time)
            rate = np.nan if collapsed else (j[-1] - low) / (before.mean() - low)
            lanes.append(
                {
                    "seed": s,
                    "condition": row.condition,
                    "perturbation": row.perturbation,
                    "dimension": row.dimension,
                    "magnitude": row.magnitude,
                    "onset": onset,
                    "collapse_time": time,
                    "collapse_censored": bool(collapsed and time > steps - hold),
                    "recovery_rate": rate,
                    "recovery_time": np.inf if collapsed else (-1.0 if not below.any() else 31.0),
                    "spike_intensity": 1.0 + 3 * float(np.nanvar(j[onset : onset + window]) / before.var()),
                    "performance_before": before.mean(),
                    "performance_std_before": before.std(),
                    "final_performance": j[-1],
                    "performance_minimum": low,
                    "reason": "recovery_rate: the run fully collapsed" if collapsed else "",
                }
            )
    metrics = pd.DataFrame(lanes)
    return metrics, summarise(metrics, conditions, steps)


def summarise(metrics, conditions, steps):
    rows = []
    for _, row in conditions.iterrows():
        mine = metrics[metrics.condition == row.condition]
        control = metrics[(metrics.perturbation == "control") & (metrics.onset == row.onset)]
        n = len(mine)
        early = wilson(int((mine.collapse_time < steps / 2).sum()), n)
        ever = wilson(int(np.isfinite(mine.collapse_time).sum()), n)
        final = mine.final_performance.to_numpy()
        gap = final - control.final_performance.to_numpy()
        error = 2 * gap.std() / np.sqrt(n) if n > 1 else np.nan
        spread = 2 * final.std() / np.sqrt(n) if n > 1 else np.nan
        entry = row[["condition", "perturbation", "dimension", "magnitude", "onset"]].to_dict() | {"seeds": n}
        figures = {"divergence_probability": early[:3], "collapse_probability": ever[:3]}
        figures["iqm_final_performance"] = (final.mean(), final.mean() - spread, final.mean() + spread)
        figures["paired_difference_final_performance"] = (gap.mean(), gap.mean() - error, gap.mean() + error)
        for name, (value, low, high) in figures.items():
            entry |= {name: value, f"{name}_low": low, f"{name}_high": high}
        entry["recovery_rate_median"] = mine.recovery_rate.median()
        entry["recovery_time_median"] = mine.recovery_time.median()
        entry["spike_intensity_median"] = mine.spike_intensity.median()
        rows.append(entry)
    return pd.DataFrame(rows)


def dataset(conditions, performance, extra=("x_grad", "x_inst", "x_mem", "gradient_norm")):
    seeds, _, steps = performance.shape
    rng = np.random.default_rng(1)
    dims = ("seed", "condition", "step")
    onset = conditions.onset.to_numpy()[:, None]
    after = np.clip(np.arange(steps) - onset, 0, None) * (conditions.perturbation != "control").to_numpy()[:, None]
    pulse = np.exp(-after / 15) * (after > 0)
    noise = rng.normal(size=performance.shape)
    made = {
        "x_grad": 0.35 - 0.3 * pulse + 0.03 * noise,
        "x_inst": 80 * np.exp(4 * pulse + 0.3 * noise),
        "x_mem": 0.8 - 0.5 * pulse + 0.05 * noise,
        "gradient_norm": np.exp(3 * pulse + 0.2 * noise),
    }
    variables = {"performance": (dims, performance)}
    variables |= {name: (dims, made[name].astype(np.float32)) for name in extra}
    layers = np.ones((*performance.shape, 2), np.float32)
    variables["layer_gradient_norm"] = ((*dims, "layer"), layers)
    evaluation = np.full(performance.shape, np.nan, np.float32)
    evaluation[..., ::50] = 400
    variables["evaluation_return"] = (dims, evaluation)
    names = ["perturbation", "magnitude", "onset", "duration", "dimension"]
    coords = {name: ("condition", conditions[name].to_numpy()) for name in names}
    coords |= {
        "condition": conditions.condition.to_numpy(),
        "seed": np.arange(seeds),
        "step": np.arange(steps),
    }
    attrs = {"performance_name": "mean return", "step_unit": "2048 env steps", "noise_floor": 1.7}
    return xr.Dataset(variables, coords, attrs)


def write(folder, conditions, *, seeds=8, steps=400, performance=None, status="finished", name="ppo-pendulum"):
    folder.mkdir(parents=True, exist_ok=True)
    if performance is None:
        performance = simulate(conditions, seeds, steps)
    seeds = performance.shape[0]
    dataset(conditions, performance).to_zarr(folder / "telemetry.zarr", mode="w")
    metrics, summary = tables(conditions, performance, steps)
    metrics.to_csv(folder / "metrics.csv", index=False)
    summary.to_csv(folder / "summary.csv", index=False)
    spec = f"[audit]\nname = {json.dumps(name)}\nseeds = {seeds}\nsteps = {steps}\n"
    spec += '[task]\nkind = "mujoco"\nname = "InvertedPendulum-v5"\n[learner]\nkind = "ppo"\n'
    spec += "[metrics]\nwindow = 50\nhold = 100\nhorizon = 500\n"
    (folder / "spec.toml").write_text(spec)
    environment = {
        "jaxaudit": "0.1.0", "packages": {"jax": "0.10.1"}, "device_kind": "cpu", "devices": 2,
        "wall_seconds": 123.4, "compile_seconds": 20.1, "env_steps": 4300800, "status": status,
    }  # fmt: skip
    (folder / "environment.json").write_text(json.dumps(environment))
    return metrics, summary


def specs(page):
    found = re.findall(r'<script type="application/json" id="([^"]+)">(.*?)</script>', page, re.S)
    return {name: json.loads(text) for name, text in found}


def outside_scripts(page):
    return re.sub(r"<script.*?</script>", "", page, flags=re.S)


@pytest.fixture(scope="module")
def typical(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "typical"
    metrics, summary = write(folder, grid())
    path = report.build(folder)
    return folder, path.read_text(), metrics, summary


def test_page_loads_nothing(typical):
    _, page, *_ = typical
    text = outside_scripts(page)
    assert not re.search(r"""(src|href|action|data|poster)\s*=\s*["']?\s*(https?:)?//""", text)
    assert not re.search(r"@import|url\(", text)
    assert "default-src 'none'" in page
    for spec in specs(page).values():
        assert '"url"' not in json.dumps(spec)
        assert '"href"' not in json.dumps(spec)
    assert re.findall(r"<script[^>]*\bsrc\b", page) == []


def test_figures_are_valid_files(typical):
    folder, *_ = typical
    names = {path.stem for path in (folder / "figures").iterdir()}
    assert names == {"performance", "collapse_map", "dose_response", *(f"channels_{kind}" for kind in KINDS)}
    for name in names:
        root = ElementTree.parse(folder / "figures" / f"{name}.svg").getroot()
        assert root.tag.endswith("svg")
        assert float(root.get("width")) > 200
        assert (folder / "figures" / f"{name}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_numbers_equal_the_tables(typical):
    _, page, metrics, summary = typical
    first, second = re.findall(r"<tbody>(.*?)</tbody>", page.split('id="metrics"')[1], re.S)[:2]
    columns = ["divergence_probability", "collapse_probability", "iqm_final_performance"]
    for text, row in zip(re.findall(r"<tr>(.*?)</tr>", first, re.S), summary.itertuples(), strict=True):
        values = re.findall(r'data-value="([^"]*)"', text)
        assert values[0] == row.condition
        assert [float(v) for v in values[3:6]] == pytest.approx([getattr(row, c) for c in columns], rel=1e-12)
        assert f"{row.collapse_probability_high:.3g}" in text
    shown = [re.findall(r'data-value="([^"]*)"', r) for r in re.findall(r"<tr>(.*?)</tr>", second, re.S)]
    assert [float(r[2]) for r in shown] == pytest.approx(list(metrics.collapse_time))
    assert "never" in second
    assert "<li>recovery_rate: the run fully collapsed</li>" in page
    assert "1 (1 of 8 seeds)" in first
    assert 'title="recovery_rate: the run fully collapsed' in second


def test_lines_are_the_medians_over_seeds(typical):
    _, page, *_ = typical
    conditions = grid()
    performance = simulate(conditions, 8, 400)
    spec = specs(page)["spec-performance"]
    csv = next(text for text in spec["datasets"].values() if isinstance(text, str) and ",m3,100," in text)
    rows = [line.split(",") for line in csv.splitlines()[1:]]
    strongest = {int(r[0]): [float(v) for v in r[3:6]] for r in rows if r[1] == "m3"}
    control = {int(r[0]): float(r[3]) for r in rows if r[1] == "c"}
    assert min(strongest) == 119
    assert set(control) == set(range(400))
    expected = np.quantile(performance[:, 4].astype(float), [0.5, 0.25, 0.75], axis=0)
    for step in (119, 130, 399):
        assert strongest[step] == pytest.approx(expected[:, step], rel=1e-5)


def test_verdict_names_the_culprits(typical):
    _, page, _, summary = typical
    lead = re.search(r'<p class="lead">(.*?)</p>', page, re.S).group(1)
    text = re.search(r'<ul class="verdict">(.*?)</ul>', page, re.S).group(1)
    hit = summary[summary.collapse_probability >= 0.5].perturbation.unique()
    assert set(re.findall(r"<b>(.*?)</b>", lead)) == set(hit)
    assert "critical magnitude" in text
    assert "<b>observation_noise</b> leaves it unharmed" in text
    assert "4.3 M" in page
    assert "2 min 3 s" in page


def test_hostile_text_is_harmless(tmp_path):
    evil = '<script>alert("x")</script>'
    conditions = grid({f"{evil},\n'": ("data", (1.0, 2.0), 1.5)})
    write(tmp_path / "run", conditions, seeds=2, name=evil)
    page = report.build(tmp_path / "run").read_text()
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page
    assert len(re.findall(r"<script\b", outside_scripts(page))) == 0
    for path in (tmp_path / "run" / "figures").iterdir():
        assert "<" not in path.name
        if path.suffix == ".svg":
            assert not list(ElementTree.parse(path).getroot().iter("{http://www.w3.org/2000/svg}script"))


def test_one_condition_one_seed(tmp_path):
    write(tmp_path, grid({"lr_spike": ("optimization", (10.0,), 14.0)}), seeds=1)
    page = report.build(tmp_path).read_text()
    assert "One seed" in page
    assert 'id="dose"' not in page
    assert "nan" not in outside_scripts(page).lower()


def test_control_alone(tmp_path):
    write(tmp_path, grid({}), seeds=3)
    page = report.build(tmp_path).read_text()
    assert "Only the undisturbed control was run" in page
    assert set(specs(page)) == {"spec-performance"}


def test_unusual_values(tmp_path):
    conditions = grid({"gradient_scale": ("optimization", (-0.2, 0.0, 0.2), 9.0), "a+b": ("signal", (np.nan,), 1.0)})
    performance = simulate(conditions, 3, 400, offset=-2000.0)
    performance[:, 1, 150:] = np.nan
    performance[0, 2, 130:] = np.inf
    performance[:, 3, 140:] *= 1e9
    write(tmp_path, conditions, performance=performance)
    telemetry = xr.load_dataset(tmp_path / "telemetry.zarr", engine="zarr")
    telemetry["x_mem"][:] = np.nan
    telemetry["x_grad"][:, 1:] = np.nan
    telemetry.to_zarr(tmp_path / "telemetry.zarr", mode="w")
    page = report.build(tmp_path).read_text()
    spec = specs(page)["spec-performance"]
    csv = next(text for text in spec["datasets"].values() if isinstance(text, str) and ",m0,-0.2," in text)
    lost = [line for line in csv.splitlines() if line.endswith(",1")]
    assert [line.split(",")[0] for line in lost] == ["149"]
    assert "magnitudes are not all positive" in page
    assert "a+b nan" in page
    assert "leaves out extreme values" in page
    assert "x_mem" not in json.dumps(specs(page)["spec-channels-1"])


def test_several_onsets_partly_run(tmp_path):
    conditions = grid({"lr_spike": KINDS["lr_spike"]}, onsets=(120, 240))
    performance = simulate(conditions, 4, 400)
    performance[..., 300:] = np.nan
    performance[:, conditions.onset == 240, 200:] = np.nan
    write(tmp_path, conditions, performance=performance, status="interrupted")
    page = report.build(tmp_path).read_text()
    banner = re.search(r'class="banner" role="status">(.*?)</p>', page).group(1)
    assert "interrupted" in banner
    assert "between step 200 and step 300 of 400" in banner
    assert "lr_spike at step 120" in page
    assert "lr_spike at step 240" in page
    assert "P_div is 0 by definition for an onset at or after T_max / 2 (here: 240)" in page


def test_telemetry_alone_and_nothing_at_all(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"telemetry\.zarr"):
        report.build(tmp_path)
    conditions = grid({"lr_spike": KINDS["lr_spike"]})
    performance = simulate(conditions, 2, 60)
    dataset(conditions.assign(onset=20), performance, extra=()).to_zarr(tmp_path / "telemetry.zarr")
    page = report.build(tmp_path).read_text()
    assert "not computed yet" in page
    assert 'id="metrics"' not in page
    xr.Dataset({"x": ("step", np.zeros(3))}).to_zarr(tmp_path / "other" / "telemetry.zarr")
    with pytest.raises(ValueError, match="performance"):
        report.build(tmp_path / "other")


def test_large_grid_stays_small(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxaudit.report.page._write_figures", lambda *_: None)
    kinds = {f"kind_{i}": ("data", (0.1, 0.2, 0.4, 0.8), 0.3) for i in range(10)}
    write(tmp_path, grid(kinds), steps=500)
    size = report.build(tmp_path).stat().st_size
    assert size < 6e6


def test_a_report_is_reproducible(tmp_path):
    write(tmp_path, grid({"lr_spike": ("optimization", (3.0, 30.0), 14.0)}), seeds=2)
    files = [report.build(tmp_path), tmp_path / "figures" / "performance.png"]
    first = [path.read_bytes() for path in files]
    report.build(tmp_path)
    assert [path.read_bytes() for path in files] == first


def test_spread_counts_the_lost():
    x = np.array([[1.0, np.nan, np.nan], [2, 5, np.nan], [3, 6, np.inf], [4, 7, np.nan]])
    median, low, high = series.spread(x, lost_is_worst=True)
    assert median.tolist() == [2.5, 5.5, -np.inf]
    assert low.tolist() == [1.75, -np.inf, -np.inf]
    assert high.tolist() == [3.25, 6.25, -np.inf]
    median, low, high = series.spread(x)
    assert median[:2].tolist() == [2.5, 6.0]
    assert np.isnan(median[2])
    assert np.isnan(series.spread(x[:1])[1]).all()


def test_thinning_keeps_the_onset_dense():
    steps = np.arange(10_000)
    kept = steps[series.thin(steps, 3000, 100)]
    assert len(kept) <= 400
    assert {2999, 3000, 3001} <= set(kept)
    assert {0, 9999} <= set(kept)


def test_domain_cuts_only_extremes():
    calm = np.linspace(0, 1, 200)
    assert not style.domain([calm, calm - 9], [calm])[1]
    ends, cut = style.domain([calm, np.array([-1e9, np.nan])], [calm])
    assert cut
    assert -4 < ends[0] < -3
    assert style.domain([np.array([np.nan])], [])[0] == (0.0, 1.0)
