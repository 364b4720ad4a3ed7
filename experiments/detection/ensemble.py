"""The ensemble of charts: its power, comparison with its best members, and its rate of false alarms.

    python experiments/detection/ensemble.py OUT                  # all parts; trains what OUT lacks
    python experiments/detection/ensemble.py OUT --only planted   # or ablation, power, members, false_alarms
    python experiments/detection/ensemble.py OUT --smoke          # a tiny smoke run

- planted: the share of runs in which each chart, and the ensemble, detects a simulated change (planted.py) at 5% false
  alarms per run, fitted to 50 clean runs and calibrated on 50, averaged over sets of clean runs.
- ablation: the same at exactly 5% for subsets of charts: FEW, the charts of levels, and all but one.
- power: the same for the ensemble with 20, 40, 100 and 200 clean runs.
- members: on 400 clean and 400 disturbed runs of each learner, the difference between the share that the ensemble
  detects and that of the member which detects most on other disturbed runs, with a bootstrap interval over runs.
- false_alarms: with 40 of the 400 clean runs, the share of the others with an alarm: its mean with a bootstrap interval
  over runs, and its spread over sets, compared with Beta(n + 1 - k, k) (`scoring.false_alarm_interval`).

Clipping at four standard deviations, the minimal deviations and the rates were chosen on simulated changes and on the
learners of SEEN; nothing was tuned on the other learners.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import charts
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
from charts import Study, trained
from planted import SIZES, System

import jaxaudit as ja
from jaxaudit.cli.main import prepare_jax
from jaxaudit.monitoring.ensemble import Ensemble
from jaxaudit.monitoring.monitor import Expectation
from jaxaudit.monitoring.scoring import false_alarm_interval, threshold_rank

ALPHA = 0.05
FIRST = {"clean": 91_000, "disturbed": 92_000}
SEEN = ("quadratic", "PPO", "GPT-2")
CHARTS = Ensemble()
ALL = "ensemble"

FEW = ("departure_0.03", "spread_z_0.1", "spread_e_0.1", "spread_h_0.03", "dynamics_0.03")
"""One chart for each family of changes."""


def grpo() -> ja.Learner:
    """GRPO on `hop` after a short warm start."""
    return ja.learners.grpo("hop", size="micro", prompts=4, group_size=4, performance_rows=16, warm_start=20)


def classifier() -> ja.Learner:
    """A network of two layers that classifies points on two rings, trained by Adam; one label in 200 is wrong."""
    optimizer = ja.Optimizer(optax.scale_by_adam(), 3e-3, max_norm=10.0)

    def fresh(key):
        keys = jax.random.split(key)
        return {
            "hidden": {"kernel": jax.random.normal(keys[0], (2, 32)), "bias": jnp.zeros(32)},
            "out": {"kernel": jax.random.normal(keys[1], (32, 1)) / 32**0.5, "bias": jnp.zeros(1)},
        }

    def logits(params, x):
        hidden = jnp.tanh(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
        return (hidden @ params["out"]["kernel"] + params["out"]["bias"])[:, 0]

    def batch(key, count):
        keys = jax.random.split(key, 4)
        label = jax.random.bernoulli(keys[0], 0.5, (count,))
        angle = jax.random.uniform(keys[1], (count,), maxval=2 * jnp.pi)
        radius = 1 + label + 0.15 * jax.random.normal(keys[2], (count,))
        wrong = jax.random.bernoulli(keys[3], 0.005, (count,))
        return radius[:, None] * jnp.stack([jnp.cos(angle), jnp.sin(angle)], 1), jnp.logical_xor(label, wrong)

    def init(key):
        params = fresh(key)
        return params, optimizer.init(params)

    def step(state, key, taps):
        params, memory = optimizer.disturb(*state, taps, fresh)
        x, label = batch(key, 32)

        def loss(params):
            return optax.sigmoid_binary_cross_entropy(logits(params, x), label).mean()

        value, gradient = jax.value_and_grad(loss)(params)
        params, memory, update = optimizer.update(params, memory, gradient, taps)
        held_out_x, held_out_label = batch(jax.random.fold_in(key, 1), 64)
        held_out_logits = logits(params, held_out_x)
        telemetry = {
            "performance": jnp.mean((held_out_logits > 0) == held_out_label),
            "loss": value,
            "held_out_loss": optax.sigmoid_binary_cross_entropy(held_out_logits, held_out_label).mean(),
            "largest_logit": jnp.abs(held_out_logits).max(),
            "gradient_norm": update.gradient_norm,
            "update_norm": update.update_norm,
            "hidden_norm": jnp.linalg.norm(params["hidden"]["kernel"]),
            "out_norm": jnp.linalg.norm(params["out"]["kernel"]),
        }
        return (params, memory), telemetry

    return ja.Learner(init, step, name="classifier")


def on(learner: str, disturbed: int) -> Study:
    """Returns a study of charts.py with more seeds."""
    return replace(charts.STUDIES[learner], clean=400, disturbed=disturbed)


STUDIES = {
    "quadratic": on("quadratic", 58),
    "PPO": on("PPO", 50),
    "GPT-2": on("GPT-2", 58),
    "GRPO": Study(
        grpo,
        (*charts.OPTIMIZER, charts.FLIPS, ja.weight_noise(0.01, onset=0.5)),
        steps=50,
        clean=400,
        disturbed=67,
    ),
    "classifier": Study(
        classifier,
        (
            *charts.OPTIMIZER,
            charts.FLIPS,
            ja.weight_noise(ja.sweep(0.03, 0.1), onset=0.5),
            ja.gradient_scale(0.5, onset=0.5, duration="end"),
        ),
        steps=200,
        clean=400,
        disturbed=50,
    ),
}


@dataclass(frozen=True)
class Fitted:
    """The ensemble fitted to clean runs, with scores of its charts and of all together.

    Attributes:
      expectation: the fitted expectation of clean runs.
      names: the names of the channels.
    """

    expectation: Expectation
    names: tuple[str, ...]

    @classmethod
    def to(cls, clean: np.ndarray, names: tuple[str, ...]) -> Fitted:
        """Fits the ensemble to clean runs `[n, T, d]`."""
        return cls(Expectation.fit(clean, names, CHARTS), names)

    def largest(self, runs: np.ndarray) -> np.ndarray:
        """Returns the largest scores of runs `[n, T, d]`, by the ensemble and by each chart, `[n, 1 + S]`."""
        expectation = self.expectation
        scores = expectation.normalizer.normalize(
            expectation.scores_and_latents(expectation.channels.select_columns(runs, self.names))[0]
        ).max(1)
        return np.concatenate([scores.max(1, keepdims=True), scores], 1)


def limits(calibrated: np.ndarray) -> np.ndarray:
    """Returns thresholds for each column of the largest scores `[n, ...]` of clean runs."""
    return np.sort(calibrated, axis=0)[threshold_rank(len(calibrated), ALPHA) - 1]


def planted(out: Path, smoke: bool) -> None:
    """Computes the detected shares of simulated changes, by chart, with conformal thresholds and one at exactly 5%."""
    sets, clean_count, runs = (2, 50, 20) if smoke else (20, 2000, 200)
    system, names = System(), tuple(f"c{i}" for i in range(12))
    tests = {"clean": system.runs(clean_count // 4, 99)}
    tests |= {kind: system.runs(runs, 1000 * i + 1, kind, size) for i, (kind, size) in enumerate(SIZES.items(), 1)}
    other_clean = system.runs(clean_count, 31_337)
    results: dict[str, list[np.ndarray]] = {}
    for number in range(sets):
        clean = system.runs(100, 10_000 + number)
        fitted = Fitted.to(clean[:50], names)
        limit = limits(fitted.largest(clean[50:]))
        exact = np.quantile(fitted.largest(other_clean)[:, 0], 1 - ALPHA)
        for kind, test in tests.items():
            scores = fitted.largest(test)
            shares = np.r_[(scores[:, 0] > exact).mean(), (scores > limit).mean(0)]
            results.setdefault(kind, []).append(shares)
    columns = [f"{ALL}, at exactly 5%", ALL, *CHARTS.score_names]
    table = pd.DataFrame({kind: np.mean(rows, 0) for kind, rows in results.items()}, index=columns)
    write(table.rename_axis("chart").reset_index(), out / "ensemble_planted.csv")


def ablation(out: Path, smoke: bool) -> None:
    """Computes the detected shares of simulated changes by subsets of charts, at exactly 5% false alarms."""
    sets, clean_count, runs = (2, 50, 10) if smoke else (6, 800, 100)
    system, names, kinds = System(), tuple(f"c{i}" for i in range(12)), CHARTS.score_names
    tests = {kind: system.runs(runs, 1000 * i + 1, kind, size) for i, (kind, size) in enumerate(SIZES.items(), 1)}
    other_clean = system.runs(clean_count, 31_337)
    levels = tuple(kind for kind in kinds if kind.startswith(("departure", "outlier")))
    subsets = {ALL: kinds, "five": FEW, "of levels": levels}
    subsets |= {f"without {left_out}": tuple(kind for kind in kinds if kind != left_out) for left_out in kinds}
    shares = {name: np.zeros(len(tests)) for name in subsets}
    for number in range(sets):
        fitted = Fitted.to(system.runs(50, 10_000 + number), names)
        clean, scores = fitted.largest(other_clean), [fitted.largest(test) for test in tests.values()]
        for name, subset in subsets.items():
            columns = [1 + kinds.index(kind) for kind in subset]
            limit = np.quantile(clean[:, columns].max(1), 1 - ALPHA)
            shares[name] += [(largest[:, columns].max(1) > limit).mean() / sets for largest in scores]
    write(pd.DataFrame(shares, index=list(tests)).T.rename_axis("charts").reset_index(), out / "ensemble_ablation.csv")


def power(out: Path, smoke: bool) -> None:
    """Computes the detected shares of simulated changes by the number of clean runs."""
    splits, runs = (2, 10) if smoke else (200, 50)
    system, names = System(), tuple(f"c{i}" for i in range(12))
    tests = {"clean": system.runs(runs, 99)}
    tests |= {kind: system.runs(runs, 1000 * i + 1, kind, size) for i, (kind, size) in enumerate(SIZES.items(), 1)}
    clean = system.runs(2000, 77)
    rows = []
    for count in (20, 40, 100, 200):
        calibration_count = max(count // 2, 19) if count >= 27 else count // 2
        alpha = max(ALPHA, 1 / (calibration_count + 1))
        shares = []
        for number in range(splits):
            selected = clean[np.random.default_rng(number).permutation(len(clean))[:count]]
            fitted = Fitted.to(selected[calibration_count:], names)
            limit = np.sort(fitted.largest(selected[:calibration_count])[:, 0])[
                threshold_rank(calibration_count, alpha) - 1
            ]
            shares.append([(fitted.largest(test)[:, 0] > limit).mean() for test in tests.values()])
        rows.append({"clean runs": count, "alpha": alpha} | dict(zip(tests, np.mean(shares, 0), strict=True)))
    write(pd.DataFrame(rows), out / "ensemble_power.csv")


def members(out: Path, smoke: bool, lanes: Mapping[str, object]) -> None:
    """Compares the ensemble with the member that is best on other disturbed runs."""
    splits = 2 if smoke else 20
    rows = []
    for learner, labelled in lanes.items():
        clean, disturbed = (labelled.values[labelled.table.clean.to_numpy() == kind] for kind in (True, False))
        differences, ensemble_hits, false_alarm_shares = [], [], []
        names: list[str] = []
        for number in range(splits):
            random = np.random.default_rng(number)
            order = random.permutation(len(clean))
            fit, calibrate, test = np.split(order, [len(clean) // 4, len(clean) // 4 * 2])
            fitted = Fitted.to(clean[fit], labelled.channels)
            limit = limits(fitted.largest(clean[calibrate]))
            hits = fitted.largest(disturbed) > limit
            false_alarm_shares.append((fitted.largest(clean[test])[:, 0] > limit[0]).mean())
            half = random.permutation(len(disturbed)) < len(disturbed) // 2
            best = np.empty(len(disturbed))
            for selection, tested in ((half, ~half), (~half, half)):
                member = 1 + int(hits[selection, 1:].mean(0).argmax())
                best[tested] = hits[tested, member]
                names.append(CHARTS.score_names[member - 1])
            ensemble_hits.append(hits[:, 0].astype(float))
            differences.append(ensemble_hits[-1] - best)
        own_share, difference = np.mean(ensemble_hits, 0), np.mean(differences, 0)
        estimate = ja.statistics.bootstrap(difference, statistic=np.mean)
        rows.append(
            {
                "learner": learner,
                "nothing tuned on it": learner not in SEEN,
                "detected": own_share.mean(),
                "the best member's": own_share.mean() - estimate.value,
                "gain": estimate.value,
                "low": estimate.low,
                "high": estimate.high,
                "false alarms": np.mean(false_alarm_shares),
                "the best member": max(set(names), key=names.count),
            }
        )
    write(pd.DataFrame(rows), out / "ensemble_members.csv")


def speedrun(runs: int, seed: int, steps: int = 300) -> np.ndarray:
    """Simulates curves like modded-nanogpt's logs `[n, T, 3]`: training loss, validation loss, and step time.

    The loss follows a power law to a floor with an offset for each run, with correlated noise that shrinks, and a
    linear cool-down in the last two fifths. Validation is measured at every 25th step. Step times in milliseconds have
    rare stalls.
    """
    random = np.random.default_rng(seed)
    step = np.arange(1, steps + 1)
    cool = np.clip((step - 0.6 * steps) / (0.4 * steps), 0, 1)
    curve = 3.2 + 7.5 * step**-0.55 - 0.35 * cool + 0.02 * random.normal(size=(runs, 1))
    noise = np.zeros((runs, steps))
    for t in range(steps):
        noise[:, t] = 0.6 * noise[:, t - 1] + random.standard_t(5, runs)
    loss = curve * (1 + 0.006 * noise * (1 + 20 / step))
    validation = np.where(step % 25 == 0, curve + 0.01 * random.normal(size=(runs, steps)), np.nan)
    time = 140 + 2 * random.normal(size=(runs, 1)) + random.gamma(2, 1, (runs, steps))
    time += np.where(random.random((runs, steps)) < 0.01, random.exponential(60, (runs, steps)), 0)
    return np.stack([loss, validation, time], -1).astype(np.float32)


def false_alarms(out: Path, smoke: bool, lanes: Mapping[str, object]) -> None:
    """Measures how often clean runs have alarms with a monitor of 40 clean runs."""
    splits, count, calibration_count = (3 if smoke else 200), 40, 20
    runs = {
        learner: (labelled.values[labelled.table.clean.to_numpy()], labelled.channels)
        for learner, labelled in lanes.items()
        if len(labelled.values) >= 2 * count
    }
    runs["modded-nanogpt's shape"] = (speedrun(400, 5), ("train_loss", "val_loss", "step_time"))
    rows = []
    for learner, (clean, names) in runs.items():
        alarmed, tested, rates = np.zeros(len(clean)), np.zeros(len(clean)), []
        for number in range(splits):
            order = np.random.default_rng(number).permutation(len(clean))
            fitted = Fitted.to(clean[order[calibration_count:count]], names)
            limit = limits(fitted.largest(clean[order[:calibration_count]])[:, :1])
            hits = fitted.largest(clean[order[count:]])[:, 0] > limit
            alarmed[order[count:]] += hits
            tested[order[count:]] += 1
            rates.append(hits.mean())
        estimate = ja.statistics.bootstrap(alarmed / tested, statistic=np.mean)
        low, high = false_alarm_interval(calibration_count, ALPHA)
        rows.append(
            {
                "learner": learner,
                "mean": estimate.value,
                "low": estimate.low,
                "high": estimate.high,
                "5% of sets below": np.quantile(rates, 0.05),
                "95% of sets below": np.quantile(rates, 0.95),
                "Beta's 5%": low,
                "Beta's 95%": high,
            }
        )
    write(pd.DataFrame(rows), out / "ensemble_false_alarms.csv")


def write(table: pd.DataFrame, path: Path) -> None:
    """Prints and stores a table."""
    table.to_csv(path, index=False, float_format="%.4g")
    print(path.stem, table.to_string(index=False, float_format="{:.3f}".format), sep="\n", end="\n\n", flush=True)


def main() -> None:
    """Runs the chosen parts."""
    parts = {"planted": planted, "ablation": ablation, "power": power, "members": members, "false_alarms": false_alarms}
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("out", type=Path, help="folder of the results, and of trained runs")
    options.add_argument("--only", nargs="+", choices=tuple(parts), default=tuple(parts), help="parts (all)")
    options.add_argument("--learners", nargs="+", choices=tuple(STUDIES), default=tuple(STUDIES), help="(all)")
    options.add_argument("--smoke", action="store_true", help="a smoke run with a few other seeds")
    arguments = options.parse_args()
    prepare_jax()
    arguments.out.mkdir(parents=True, exist_ok=True)
    lanes = {}
    if {"members", "false_alarms"} & set(arguments.only):
        for name in arguments.learners:
            lanes[name] = trained(name, STUDIES[name], arguments.out, arguments.smoke, FIRST)
    for name in arguments.only:
        extra = (lanes,) if name in ("members", "false_alarms") else ()
        parts[name](arguments.out, arguments.smoke, *extra)


if __name__ == "__main__":
    main()
