"""Run folders with artificial learning curves, as the report reads them, and parts of the report's page."""

import json
import re

import numpy as np
import pandas as pd
import xarray as xr

from jaxaudit.analysis import results
from jaxaudit.analysis.metrics import MetricSettings

KINDS = {
    "lr_spike": ("optimization", (3.0, 10.0, 30.0, 100.0), 14.0),
    "weight_noise": ("parametric", (0.003, 0.01, 0.03), 0.02),
    "observation_noise": ("data", (0.05, 0.1, 0.2), 50.0),
    "reward_flip": ("signal", (0.1, 0.3, 0.5), 0.4),
}


def condition_table(kinds=KINDS, onsets=(120,), duration=10):
    rows = []
    for onset in onsets:
        tail = f" @{onset}" if len(onsets) > 1 else ""
        rows.append((f"control{tail}", "control", "control", np.nan, np.nan, onset, 0, np.inf, ""))
        for name, (dimension, magnitudes, critical) in kinds.items():
            for m in magnitudes:
                neutral = 1.0 if name == "lr_spike" else 0.0
                rows.append((f"{name} {m:g}{tail}", name, dimension, m, neutral, onset, duration, critical, ""))
    columns = ["condition", "perturbation", "dimension", "magnitude", "neutral", "onset", "duration", "critical"]
    columns += ["target"]
    return pd.DataFrame(rows, columns=columns)


def simulate(conditions, seeds, steps, offset=0.0, rng_seed=0):
    """Returns learning curves that fall after the onset, and recover or not, depending on the magnitude."""
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


def metric_tables(conditions, performance, steps):
    lanes = results.lane_metrics(dataset(conditions, performance, ()), MetricSettings())
    return results.lane_table(lanes), results.summary_table(lanes, steps)


CHANNELS = ("x_grad", "x_inst", "x_mem", "gradient_norm")


def dataset(conditions, performance, channels):
    seeds, _, steps = performance.shape
    rng = np.random.default_rng(1)
    dims = ("seed", "condition", "step")
    onset = conditions.onset.to_numpy()[:, None]
    after = np.clip(np.arange(steps) - onset, 0, None) * (conditions.perturbation != "control").to_numpy()[:, None]
    pulse = np.exp(-after / 15) * (after > 0)
    noise = rng.normal(size=performance.shape)
    channel_values = {
        "x_grad": 0.35 - 0.3 * pulse + 0.03 * noise,
        "x_inst": 80 * np.exp(4 * pulse + 0.3 * noise),
        "x_mem": 0.8 - 0.5 * pulse + 0.05 * noise,
        "gradient_norm": np.exp(3 * pulse + 0.2 * noise),
    }
    variables = {"performance": (dims, performance)}
    variables |= {name: (dims, channel_values[name].astype(np.float32)) for name in channels}
    layers = np.ones((*performance.shape, 2), np.float32)
    variables["layer_gradient_norm"] = ((*dims, "layer"), layers)
    evaluation = np.full(performance.shape, np.nan, np.float32)
    evaluation[..., ::50] = 400
    variables["evaluation_return"] = (dims, evaluation)
    names = ["perturbation", "magnitude", "neutral", "onset", "duration", "dimension", "target"]
    coords = {name: ("condition", conditions[name].to_numpy()) for name in names}
    coords |= {
        "condition": conditions.condition.to_numpy(),
        "seed": np.arange(seeds),
        "step": np.arange(steps),
    }
    attrs = {"performance_name": "mean return", "step_unit": "2048 env steps", "noise_floor": 1.7}
    return xr.Dataset(variables, coords, attrs)


def write_run(
    folder, conditions, *, seeds=8, steps=400, performance=None, status="finished", name="ppo-pendulum", channels=()
):
    folder.mkdir(parents=True, exist_ok=True)
    if performance is None:
        performance = simulate(conditions, seeds, steps)
    seeds = performance.shape[0]
    dataset(conditions, performance, channels).to_zarr(folder / "telemetry.zarr", mode="w")
    metrics, summary = metric_tables(conditions, performance, steps)
    metrics.to_csv(folder / "metrics.csv", index=False)
    summary.to_csv(folder / "summary.csv", index=False)
    spec = f"[audit]\nname = {json.dumps(name)}\nseeds = {seeds}\nsteps = {steps}\n"
    spec += '[task]\nkind = "mujoco"\nname = "InvertedPendulum-v5"\n[learner]\nkind = "ppo"\n'
    spec += "[metrics]\nwindow = 50\nhold = 100\nhorizon = 500\n"
    (folder / "spec.toml").write_text(spec)
    environment = {
        "jaxaudit": "0.1.0", "packages": {"jax": "0.10.1"}, "device_kind": "cpu", "devices": 2,
        "wall_seconds": 123.4, "compile_seconds": 20.1, "samples": 4300800, "sample": "env steps", "status": status,
    }  # fmt: skip
    (folder / "environment.json").write_text(json.dumps(environment))
    return metrics, summary


def embedded_specs(page):
    matches = re.findall(r'<script type="application/json" id="([^"]+)">(.*?)</script>', page, re.S)
    return {name: json.loads(text) for name, text in matches}


def without_scripts(page):
    return re.sub(r"<script.*?</script>", "", page, flags=re.S)
