"""Finding I: is the final performance of a training apart from its stability? Many configurations, audited.

    python experiments/findings/dissociation.py train OUT.csv        # goes on where it was stopped
    python experiments/findings/dissociation.py tell OUT.csv FOLDER

Configurations of PPO and of GPT-2 differ in learning rate, clipping threshold, entropy coefficient or label smoothing,
and in epochs or width. Each is trained undisturbed, to be judged by its final performance, and disturbed half-way, to
be judged by how many seeds collapse and by how much of what the same seed gained undisturbed is lost at the end.
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
"""Steps whose mean performance is the final one: single steps are noisy."""

REPETITIONS = 1000
"""Of the bootstrap."""


@dataclass(frozen=True)
class Paradigm:
    """Learners, and how they are audited.

    Attributes:
      learners: name, and what makes it: each is compiled once.
      ranges: of the factors on the settings that vary within a learner's program, from and to.
      noise, spike: magnitudes of weight_noise and lr_spike.
      steps: of a run; disturbed at half of them.
      settings: windows of the metrics.
      execution: how lanes run.
      besides: further disturbances by name, each made from its onset.
      draws: configurations of each learner: one with all factors at 1, and points of a Halton sequence.
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
    """PPO on a pendulum."""
    given = {"learning_rate": 6e-4, "num_envs": 4, "rollout_length": 64, "evaluations": 0, "telemetry": "basic"}
    return ja.learners.ppo("InvertedPendulum-v5", **given | changed)


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
"""A setting that holds for a whole run is a perturbation from its first step on: data, which compiles nothing anew."""


def points(paradigm: Paradigm) -> list[dict[str, float]]:
    """The configurations within a learner: even in the logarithm of factors, and in what begins at zero."""
    unit = Halton(len(paradigm.ranges), seed=0).random(paradigm.draws - 1)
    found = [{name: 1.0 if low else 0.0 for name, (low, _) in paradigm.ranges.items()}]
    for row in unit:
        ends = zip(row, paradigm.ranges.items(), strict=True)
        found.append({k: float(low * (high / low) ** u if low else high * u) for u, (k, (low, high)) in ends})
    return found


def audit(paradigm: Paradigm, made: ja.Learner, seeds: Sequence[int]) -> pd.DataFrame:
    """A row for each disturbed lane of every configuration of a learner."""
    chosen = points(paradigm)
    half = paradigm.steps // 2
    disturb = {
        "lr_spike": ja.lr_spike(paradigm.spike, onset=half, duration=10),
        "weight_noise": ja.weight_noise(paradigm.noise, onset=half),
        **{name: make(half) for name, make in paradigm.besides.items()},
    }
    grid = []
    for point in chosen:
        settings = ja.chain(*(VARY[name](value) for name, value in point.items()))
        grid += [settings, *(ja.chain(settings, one) for one in disturb.values())]
    result = ja.audit(
        made, grid, seeds=seeds, steps=paradigm.steps, settings=paradigm.settings, execution=paradigm.execution
    )
    series = result.telemetry["performance"].transpose("condition", "seed", "step").values[1:]
    series = series.reshape(len(chosen), 1 + len(disturb), len(seeds), -1)
    each = [lanes(of, list(disturb), seeds, half, paradigm.settings) for of in series]
    described = [{name: round(value, 4) for name, value in point.items()} for point in chosen]
    return pd.concat([t.assign(point=i, **d) for i, (t, d) in enumerate(zip(each, described, strict=True))])


def lanes(
    series: np.ndarray, disturbances: Sequence[str], seeds: Sequence[int], onset: int, settings: MetricSettings
) -> pd.DataFrame:
    """A row for each disturbed lane of one configuration.

    Args:
      series: performance `[1 + disturbances, seeds, T]`, the undisturbed lanes first.
      disturbances: names.
      seeds: numbers.
      onset: step.
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
    """Audits the learners that are not in the file yet, and adds a learner's rows when it is done."""
    known: set[tuple[str, str]] = set()
    if out.exists():
        known = set(pd.read_csv(out)[["paradigm", "learner"]].itertuples(index=False, name=None))
    for paradigm in chosen:
        for name, make in PARADIGMS[paradigm].learners.items():
            if (paradigm, name) in known:
                continue
            began = clock.perf_counter()
            found = audit(PARADIGMS[paradigm], make(), range(seeds)).assign(paradigm=paradigm, learner=name)
            whole = pd.concat([pd.read_csv(out), found]) if out.exists() else found
            whole.to_csv(out, index=False)
            print(f"{paradigm}, {name}: {clock.perf_counter() - began:.0f} s")
            for point, rows in found.groupby("point"):
                shares = np.isfinite(rows.collapse_time).groupby(rows.disturbance).mean().round(2).to_dict()
                print(f"  {point}: reaches {rows.control.mean():.4g}, collapsed {shares}")


LEAST_GAIN = 0.1
"""Of the best configuration's gain: one that gains less has nothing to lose, and is left out."""

HARMS = {"collapse": "share of seeds that collapse", "lost": "share of the gain lost at the end"}


@dataclass(frozen=True)
class Outcomes:
    """What the lanes of a paradigm's configurations came to, under one disturbance; all `[configurations, seeds]`.

    Attributes:
      learner: of each configuration.
      learning_rate: of each configuration, its factor.
      first, control, reached: as `lanes` tells them.
      collapsed: bool.
    """

    learner: np.ndarray
    learning_rate: np.ndarray
    first: np.ndarray
    control: np.ndarray
    reached: np.ndarray
    collapsed: np.ndarray

    @classmethod
    def of(cls, rows: pd.DataFrame) -> Outcomes:
        """Of rows of lanes under one disturbance, which every seed of every configuration has one of."""
        rows = rows.sort_values(["learner", "point", "seed"])
        shape = (-1, rows.seed.nunique())
        per_lane = [rows[name].to_numpy().reshape(shape) for name in ("first", "control", "reached")]
        named = [rows[name].to_numpy().reshape(shape)[:, 0] for name in ("learner", "learning_rate")]
        return cls(*named, *per_lane, np.isfinite(rows.collapse_time.to_numpy()).reshape(shape))

    def take(self, which: np.ndarray, seeds: np.ndarray) -> Outcomes:
        """Some configurations `[n]`, and of each some seeds `[n, seeds]`; both may repeat."""
        lanes_of = (x[which[:, None], seeds] for x in (self.first, self.control, self.reached, self.collapsed))
        return Outcomes(self.learner[which], self.learning_rate[which], *lanes_of)

    def configurations(self) -> pd.DataFrame:
        """A row for each that gains more than LEAST_GAIN of what the best one does.

        `lost` is the mean over seeds of what the disturbed lane lacks at the end of the same seed's undisturbed one, as
        a share of the configuration's median gain, between -1 and 1; a lane that is not finite has lost all.
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


def rank_correlation(final: np.ndarray, harm: np.ndarray, given: np.ndarray | None = None) -> float:
    """Spearman's correlation over configurations, or the partial one given a third; NaN where one is constant."""
    ranks = [rankdata(x) for x in (final, harm, given) if x is not None]
    if any(np.ptp(rank) == 0 for rank in ranks):
        return np.nan
    matrix = np.corrcoef(ranks)
    if given is None:
        return float(matrix[0, 1])
    inverse = np.linalg.pinv(matrix)
    return float(-inverse[0, 1] / np.sqrt(inverse[0, 0] * inverse[1, 1]))


def correlations(outcomes: Outcomes) -> dict[tuple[str, bool], float]:
    """By harm, and whether given the learning rate: its correlation with the final performance."""
    table = outcomes.configurations()
    final, rate = table.final.to_numpy(), table.learning_rate.to_numpy()
    return {
        (harm, given): rank_correlation(final, table[harm].to_numpy(), rate if given else None)
        for harm in HARMS
        for given in (False, True)
    }


def tell(rows: pd.DataFrame, name: str) -> pd.DataFrame:
    """A row for each disturbance and harm: the correlation with its interval over configurations and their seeds."""
    said = []
    for disturbance, of in rows.groupby("disturbance", sort=False):
        outcomes = Outcomes.of(of)
        generator, shape = np.random.default_rng(0), outcomes.control.shape
        draws = [
            correlations(
                outcomes.take(generator.integers(shape[0], size=shape[0]), generator.integers(shape[1], size=shape))
            )
            for _ in range(REPETITIONS)
        ]
        table, found = outcomes.configurations().sort_values("final"), correlations(outcomes)
        half = len(table) // 2
        for harm, title in HARMS.items():
            row = {"paradigm": name, "disturbance": disturbance, "harm": title, "configurations": len(table)}
            row |= {"of the worse half": table[harm][:half].mean(), "of the better half": table[harm][-half:].mean()}
            for given, mark in ((False, ""), (True, ", given the rate")):
                low, high = pd.Series([draw[harm, given] for draw in draws]).quantile([0.025, 0.975])
                row |= {f"rho{mark}": found[harm, given], f"low{mark}": low, f"high{mark}": high}
            said.append(row)
    return pd.DataFrame(said)


def draw(tables: dict[str, pd.DataFrame], path: Path) -> None:
    """A point for each configuration: final performance against harm."""
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
    """Trains, or tells."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("what", choices=("train", "tell"))
    options.add_argument("lanes", type=Path, help="CSV, a row for each lane")
    options.add_argument("out", type=Path, nargs="?", help="folder of tables and figures")
    options.add_argument("--paradigm", choices=tuple(PARADIGMS), action="append", help="(all)")
    options.add_argument("--seeds", type=int, default=SEEDS, help="(%(default)s)")
    chosen = options.parse_args()
    if chosen.what == "train":
        prepare_jax()
        train(chosen.lanes, chosen.paradigm or list(PARADIGMS), chosen.seeds)
        return
    if chosen.out is None:
        options.error("tell needs a folder for tables and figures")
    chosen.out.mkdir(parents=True, exist_ok=True)
    lanes_of = dict(list(pd.read_csv(chosen.lanes).groupby("paradigm", sort=False)))
    tables = {
        name: pd.concat(
            [
                Outcomes.of(of).configurations().assign(disturbance=d)
                for d, of in rows.groupby("disturbance", sort=False)
            ]
        )
        for name, rows in lanes_of.items()
    }
    found = pd.concat([tell(rows, name) for name, rows in lanes_of.items()])
    pd.concat([table.assign(paradigm=name) for name, table in tables.items()]).to_csv(
        chosen.out / "configurations.csv", index=False, float_format="%.5g"
    )
    found.to_csv(chosen.out / "dissociation.csv", index=False, float_format="%.4g")
    print(markdown(found))
    draw(tables, chosen.out / "dissociation.png")


if __name__ == "__main__":
    main()
