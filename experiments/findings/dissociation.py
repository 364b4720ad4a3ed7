"""Finding I: is the final performance of a training independent of its stability? Audits of many configurations.

    python experiments/findings/dissociation.py train OUT.csv        # continues where it was stopped
    python experiments/findings/dissociation.py tell OUT.csv FOLDER

Configurations of PPO and of GPT-2 differ in learning rate, clipping threshold, entropy coefficient or label smoothing,
and in epochs or width. Each is trained undisturbed, which gives its final performance, and disturbed half-way, which
gives the share of seeds that collapse and the share of the undisturbed gain of the same seed that is lost at the end.
"""

from __future__ import annotations

import argparse
import time as clock
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import altair as alt
import jax
import numpy as np
import pandas as pd
from basics import markdown, save
from scipy.stats import rankdata
from scipy.stats.qmc import Halton
from small import small_gpt2

import jaxaudit as ja
from jaxaudit.analysis.metrics import MetricSettings, collapse_time
from jaxaudit.cli.main import prepare_jax
from jaxaudit.report import style

SEEDS = 6
LAST = 10
"""The number of last steps over which final performance is averaged, since single steps are noisy."""

REPETITIONS = 1000
"""The number of bootstrap samples."""


@dataclass(frozen=True)
class Paradigm:
    """Learners, and the settings of their audits.

    Attributes:
      learners: functions that return the learners, by name; each learner is compiled once.
      ranges: minimum and maximum of the factors on the settings that vary within a learner's program.
      noise, spike: magnitudes of weight_noise and lr_spike.
      steps: the length of a run, which is disturbed at half of it.
      settings: windows of the metrics.
      execution: the execution of lanes.
      besides: further disturbances by name, as functions of the onset.
      draws: the number of configurations of each learner: one with all factors at 1, and points of a Halton sequence.
    """

    learners: dict[str, Callable[[], ja.Learner]]
    ranges: dict[str, tuple[float, float]]
    noise: float
    spike: float
    steps: int
    settings: MetricSettings
    execution: Literal["vmap", "map"]
    besides: dict[str, Callable[[int], ja.Perturbation]] = field(default_factory=dict)
    draws: int = 8


def ppo(**changed: Any) -> ja.Learner:
    """PPO on the inverted pendulum."""
    defaults = {"learning_rate": 6e-4, "num_envs": 4, "rollout_length": 64, "evaluations": 0, "telemetry": "basic"}
    return ja.learners.ppo("InvertedPendulum-v5", **defaults | changed)


PARADIGMS = {
    "PPO": Paradigm(
        {"10 epochs": ppo, "3 epochs": partial(ppo, epochs=3)},
        {"learning_rate": (0.3, 10.0), "clip_norm": (0.1, 10.0), "entropy_coefficient": (0.1, 10.0)},
        noise=0.3,
        spike=30.0,
        steps=80,
        settings=MetricSettings(window=20, hold=20),
        execution="vmap",
    ),
    "GPT-2": Paradigm(
        {"48 wide": partial(small_gpt2, "w48"), "24 wide": partial(small_gpt2, "w24")},
        {"learning_rate": (0.1, 10.0), "clip_norm": (0.1, 100.0), "label_smoothing": (0.0, 0.2)},
        noise=0.1,
        spike=30.0,
        steps=60,
        settings=MetricSettings(window=15, hold=20),
        execution="map",
    ),
}


@ja.perturbation("signal", "entropy_coefficient", magnitude=1.0, neutral=1.0, duration="end")
def entropy_factor(key, value, magnitude):
    """Multiplies the entropy coefficient."""
    return value * magnitude


WHOLE_RUN = {"onset": 0, "duration": "end"}
VARY: dict[str, Callable[[float], ja.Perturbation]] = {
    "learning_rate": lambda factor: ja.lr_spike(factor, **WHOLE_RUN),
    "clip_norm": lambda factor: ja.clip_failure(factor, **WHOLE_RUN),
    "entropy_coefficient": lambda factor: entropy_factor(factor, onset=0),
    "label_smoothing": lambda alpha: ja.label_smoothing(alpha, onset=0),
}
"""Settings as perturbations from the first step on, which are data and need no new compilation."""


def points(paradigm: Paradigm) -> list[dict[str, float]]:
    """Returns the configurations of a learner: uniform in the logarithm of factors, or linear in ranges from zero."""
    unit = Halton(len(paradigm.ranges), seed=0).random(paradigm.draws - 1)
    configurations = [{name: 1.0 if low else 0.0 for name, (low, _) in paradigm.ranges.items()}]
    for row in unit:
        ends = zip(row, paradigm.ranges.items(), strict=True)
        configurations.append({k: float(low * (high / low) ** u if low else high * u) for u, (k, (low, high)) in ends})
    return configurations


def audit(paradigm: Paradigm, learner: ja.Learner, seeds: Sequence[int]) -> pd.DataFrame:
    """Audits all configurations of a learner, and returns a row for each disturbed lane."""
    configurations = points(paradigm)
    half = paradigm.steps // 2
    disturbances = {
        "lr_spike": ja.lr_spike(paradigm.spike, onset=half, duration=10),
        "weight_noise": ja.weight_noise(paradigm.noise, onset=half),
        **{name: make(half) for name, make in paradigm.besides.items()},
    }
    grid = []
    for point in configurations:
        settings = ja.chain(*(VARY[name](value) for name, value in point.items()))
        grid += [settings, *(ja.chain(settings, disturbance) for disturbance in disturbances.values())]
    result = ja.audit(
        learner, grid, seeds=seeds, steps=paradigm.steps, settings=paradigm.settings, execution=paradigm.execution
    )
    series = result.telemetry["performance"].transpose("condition", "seed", "step").values[1:]
    series = series.reshape(len(configurations), 1 + len(disturbances), len(seeds), -1)
    tables = [
        lanes(series_of_configuration, list(disturbances), seeds, half, paradigm.settings)
        for series_of_configuration in series
    ]
    descriptions = [{name: round(value, 4) for name, value in point.items()} for point in configurations]
    return pd.concat(
        [
            table.assign(point=i, **description)
            for i, (table, description) in enumerate(zip(tables, descriptions, strict=True))
        ]
    )


def lanes(
    series: np.ndarray, disturbances: Sequence[str], seeds: Sequence[int], onset: int, settings: MetricSettings
) -> pd.DataFrame:
    """Returns a row for each disturbed lane of one configuration.

    Args:
      series: performance `[1 + disturbances, seeds, T]`, with the undisturbed lanes first.
      disturbances: names.
      seeds: the seeds.
      onset: the step of the onset.
      settings: windows of the collapse time.

    Returns:
      columns disturbance, seed, first (the undisturbed lane's first finite performance), control and reached (mean of
      the last LAST steps of the undisturbed and the disturbed lane, NaN where one is not finite), collapse_time and
      control_collapse_time (step, infinite for none).
    """
    time = jax.jit(jax.vmap(jax.vmap(partial(collapse_time, onset=onset, window=settings.window, hold=settings.hold))))
    times = np.asarray(time(series))
    ends = series[..., -LAST:].astype(np.float64).mean(-1)
    ends = np.where(np.isfinite(ends), ends, np.nan)
    first = [row[np.isfinite(row)][0] if np.isfinite(row).any() else np.nan for row in series[0]]
    rows = []
    for number, name in enumerate(disturbances, 1):
        table = {"seed": list(seeds), "first": first, "control": ends[0], "reached": ends[number]}
        table |= {"collapse_time": times[number], "control_collapse_time": times[0]}
        rows.append(pd.DataFrame(table).assign(disturbance=name))
    return pd.concat(rows)


def train(out: Path, chosen: Sequence[str], seeds: int) -> None:
    """Audits the learners that the file lacks, and stores the rows of each."""
    stored: set[tuple[str, str]] = set()
    if out.exists():
        stored = set(pd.read_csv(out)[["paradigm", "learner"]].itertuples(index=False, name=None))
    for paradigm in chosen:
        for name, make in PARADIGMS[paradigm].learners.items():
            if (paradigm, name) in stored:
                continue
            start = clock.perf_counter()
            rows_of_learner = audit(PARADIGMS[paradigm], make(), range(seeds)).assign(paradigm=paradigm, learner=name)
            merged = pd.concat([pd.read_csv(out), rows_of_learner]) if out.exists() else rows_of_learner
            merged.to_csv(out, index=False)
            print(f"{paradigm}, {name}: {clock.perf_counter() - start:.0f} s")
            for point, rows in rows_of_learner.groupby("point"):
                shares = np.isfinite(rows.collapse_time).groupby(rows.disturbance).mean().round(2).to_dict()
                print(f"  {point}: reaches {rows.control.mean():.4g}, collapsed {shares}")


LEAST_GAIN = 0.1
"""The minimal gain, as a share of the best configuration's; configurations with less are left out."""

HARMS = {"collapse": "share of seeds that collapse", "lost": "share of the gain lost at the end"}


@dataclass(frozen=True)
class Outcomes:
    """Results of a paradigm's configurations under one disturbance.

    Attributes:
      learner: the learner of each configuration.
      learning_rate: the factor on the learning rate of each configuration.
      first, control, reached: the columns of `lanes`, `[configurations, seeds]`.
      collapsed: bool, `[configurations, seeds]`.
    """

    learner: np.ndarray
    learning_rate: np.ndarray
    first: np.ndarray
    control: np.ndarray
    reached: np.ndarray
    collapsed: np.ndarray

    @classmethod
    def of(cls, rows: pd.DataFrame) -> Outcomes:
        """Reads rows of lanes under one disturbance, with one row for every seed of every configuration."""
        rows = rows.sort_values(["learner", "point", "seed"])
        shape = (-1, rows.seed.nunique())
        per_lane = [rows[name].to_numpy().reshape(shape) for name in ("first", "control", "reached")]
        named = [rows[name].to_numpy().reshape(shape)[:, 0] for name in ("learner", "learning_rate")]
        return cls(*named, *per_lane, np.isfinite(rows.collapse_time.to_numpy()).reshape(shape))

    def take(self, which: np.ndarray, seeds: np.ndarray) -> Outcomes:
        """Selects configurations `[n]` and seeds of each `[n, seeds]`, which may repeat."""
        lanes_of = (x[which[:, None], seeds] for x in (self.first, self.control, self.reached, self.collapsed))
        return Outcomes(self.learner[which], self.learning_rate[which], *lanes_of)

    def configurations(self) -> pd.DataFrame:
        """Returns a row for each configuration that gains more than LEAST_GAIN of the best one's gain.

        `lost` is the mean over seeds of the difference between the undisturbed and the disturbed lane at the end, as a
        share of the configuration's median gain, between -1 and 1. Lanes that are not finite have lost everything.
        """
        gain = np.median(self.control - self.first, axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            lost = np.clip((self.control - self.reached) / gain[:, None], -1, 1)
        table = pd.DataFrame(
            {
                "learner": self.learner,
                "learning_rate": self.learning_rate,
                "final": self.control.mean(1),
                "gain": gain,
                "collapse": self.collapsed.mean(1),
                "lost": np.where(np.isfinite(self.reached), lost, 1.0).mean(1),
            }
        )
        return table[table.gain > LEAST_GAIN * table.gain.max()]


def rank_correlation(final: np.ndarray, harm: np.ndarray, controlled: np.ndarray | None = None) -> float:
    """Returns Spearman's correlation, or the partial one given a third variable, or NaN if one is constant."""
    ranks = [rankdata(x) for x in (final, harm, controlled) if x is not None]
    if any(np.ptp(rank) == 0 for rank in ranks):
        return np.nan
    matrix = np.corrcoef(ranks)
    if controlled is None:
        return float(matrix[0, 1])
    inverse = np.linalg.pinv(matrix)
    return float(-inverse[0, 1] / np.sqrt(inverse[0, 0] * inverse[1, 1]))


def correlations(outcomes: Outcomes) -> dict[tuple[str, bool], float]:
    """Returns correlations with the final performance, by harm and whether the learning rate is controlled for."""
    table = outcomes.configurations()
    final, rate = table.final.to_numpy(), table.learning_rate.to_numpy()
    return {
        (harm, controlled): rank_correlation(final, table[harm].to_numpy(), rate if controlled else None)
        for harm in HARMS
        for controlled in (False, True)
    }


def correlation_table(rows: pd.DataFrame, name: str) -> pd.DataFrame:
    """Returns a row for each disturbance and harm: correlations with intervals over configurations and their seeds."""
    table_rows = []
    for disturbance, rows_of_disturbance in rows.groupby("disturbance", sort=False):
        outcomes = Outcomes.of(rows_of_disturbance)
        generator, shape = np.random.default_rng(0), outcomes.control.shape
        samples = [
            correlations(
                outcomes.take(generator.integers(shape[0], size=shape[0]), generator.integers(shape[1], size=shape))
            )
            for _ in range(REPETITIONS)
        ]
        table, correlation = outcomes.configurations().sort_values("final"), correlations(outcomes)
        half = len(table) // 2
        for harm, title in HARMS.items():
            row = {"paradigm": name, "disturbance": disturbance, "harm": title, "configurations": len(table)}
            row |= {"of the worse half": table[harm][:half].mean(), "of the better half": table[harm][-half:].mean()}
            for controlled, mark in ((False, ""), (True, ", given the rate")):
                low, high = pd.Series([draw[harm, controlled] for draw in samples]).quantile([0.025, 0.975])
                row |= {f"rho{mark}": correlation[harm, controlled], f"low{mark}": low, f"high{mark}": high}
            table_rows.append(row)
    return pd.DataFrame(table_rows)


def draw(tables: dict[str, pd.DataFrame], path: Path) -> None:
    """Draws a point for each configuration, with final performance and harm."""
    panels = []
    for name, table in tables.items():
        for harm, title in HARMS.items():
            names = list(table.disturbance.unique())
            colors = [style.RAMP[k] for k in (0, 3, 2)][: len(names)]
            color = alt.Color("disturbance:N", title=None, scale=alt.Scale(domain=names, range=colors))
            points = (
                alt.Chart(table)
                .mark_point(filled=True, size=55, opacity=0.8)
                .encode(
                    x=alt.X("final:Q", title="final performance, undisturbed", scale=alt.Scale(zero=False)),
                    y=alt.Y(f"{harm}:Q", title=title, axis=alt.Axis(format=".0%")),
                    color=color,
                    shape=alt.Shape("learner:N", title=None),
                )
            )
            panels.append(points.properties(title=name, width=270, height=190))
    rows = [alt.hconcat(*panels[i : i + 2]) for i in range(0, len(panels), 2)]
    save(alt.vconcat(*(row.resolve_scale(shape="shared") for row in rows)).resolve_scale(shape="independent"), path)


def main() -> None:
    """Trains, or writes tables and figures."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("what", choices=("train", "tell"))
    options.add_argument("lanes", type=Path, help="CSV, a row for each lane")
    options.add_argument("out", type=Path, nargs="?", help="folder of tables and figures")
    options.add_argument("--paradigm", choices=tuple(PARADIGMS), action="append", help="(all)")
    options.add_argument("--seeds", type=int, default=SEEDS, help="(%(default)s)")
    arguments = options.parse_args()
    if arguments.what == "train":
        prepare_jax()
        train(arguments.lanes, arguments.paradigm or list(PARADIGMS), arguments.seeds)
        return
    if arguments.out is None:
        options.error("tell needs a folder for tables and figures")
    arguments.out.mkdir(parents=True, exist_ok=True)
    lanes_of = dict(list(pd.read_csv(arguments.lanes).groupby("paradigm", sort=False)))
    tables = {
        name: pd.concat(
            [
                Outcomes.of(rows_of_disturbance).configurations().assign(disturbance=disturbance)
                for disturbance, rows_of_disturbance in rows.groupby("disturbance", sort=False)
            ]
        )
        for name, rows in lanes_of.items()
    }
    correlation_rows = pd.concat([correlation_table(rows, name) for name, rows in lanes_of.items()])
    pd.concat([table.assign(paradigm=name) for name, table in tables.items()]).to_csv(
        arguments.out / "configurations.csv", index=False, float_format="%.5g"
    )
    correlation_rows.to_csv(arguments.out / "dissociation.csv", index=False, float_format="%.4g")
    print(markdown(correlation_rows))
    draw(tables, arguments.out / "dissociation.png")


if __name__ == "__main__":
    main()
