"""What a run's folder holds, read once; parts that are missing stay missing."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from jaxaudit.analysis.statistics.paired import excess_columns
from jaxaudit.runtime import array_store
from jaxaudit.runtime.errors import UserError
from jaxaudit.runtime.files import check_contents, parse_toml, read_text
from jaxaudit.runtime.machine import read_environment

TOKENS, ROLES, LOG_PROBABILITIES, REWARDS = "shown_token", "shown_role", "shown_log_probability", "shown_reward"
"""The channels that hold them: `[seed, condition, step, row, slot]`, and the rewards without slots."""

OWN, PROMPT, TOOL, NOBODY = "own", "prompt", "tool", "end"
"""The words of ROLES: who wrote a slot."""


@dataclass(frozen=True)
class Word:
    """A token of a row.

    Attributes:
      text: its legible name, or its number.
      role: who wrote it: OWN, PROMPT or TOOL.
      log_probability: the policy's, of an own one; else NaN.
    """

    text: str
    role: str
    log_probability: float

    @property
    def own(self) -> bool:
        """Returns whether the policy wrote the token, bool of the tokens' shape."""
        return self.role == OWN


@dataclass(frozen=True)
class HeldOutRow:
    """A row as far as it was written, and the gold reward it got."""

    words: tuple[Word, ...]
    reward: float


def has_rows(telemetry: xr.Dataset) -> bool:
    """Returns whether a run stored any held-out rows."""
    return {TOKENS, ROLES, LOG_PROBABILITIES, REWARDS} <= set(telemetry.data_vars)


def cadence(telemetry: xr.Dataset) -> int:
    """Steps from one measurement to the next."""
    return int(telemetry[TOKENS].attrs.get("every", 1))


def measured_near(telemetry: xr.Dataset, place: int, last: int) -> int:
    """The index of the measured step nearest to the index `place`, of those up to `last`; the later of two as near.

    Raises:
      ValueError: none is measured up to there.
    """
    every = cadence(telemetry)
    due = np.arange(every - 1, last + 1, every)
    if not due.size:
        raise ValueError(f"held-out rows are measured every {every} steps, and none is up to step {last}")
    return int(due[::-1][np.argmin(np.abs(due[::-1] - place))])


def rows_at(telemetry: xr.Dataset, seed: int, condition: int, place: int) -> list[HeldOutRow]:
    """The rows of a lane at a step, all three by position; empty where nothing was written there."""
    picked = telemetry[[TOKENS, ROLES, LOG_PROBABILITIES, REWARDS]].isel(seed=seed, condition=condition, step=place)
    picked = picked.load()
    names, roles = (picked[name].attrs.get("words", ()) for name in (TOKENS, ROLES))
    columns = (picked[name].values for name in (TOKENS, ROLES, LOG_PROBABILITIES, REWARDS))
    return [
        HeldOutRow(_words(names, roles, *row), float(reward))
        for *row, reward in zip(*columns, strict=True)
        if np.isfinite(reward)
    ]


def _words(
    names: list[str], roles: list[str], tokens: np.ndarray, by: np.ndarray, told: np.ndarray
) -> tuple[Word, ...]:
    found = []
    for token, who, log_probability in zip(tokens.tolist(), by.tolist(), told.tolist(), strict=True):
        role = roles[who] if 0 <= who < len(roles) else NOBODY
        if role != NOBODY:
            text = names[token] if 0 <= token < len(names) else str(token)
            found.append(Word(text, role, log_probability if role == OWN else float("nan")))
    return tuple(found)


CONTROL = "control"
_TEXT = {"condition": "", "perturbation": CONTROL, "dimension": "", "target": ""}
_NUMBERS = {"magnitude": np.nan, "neutral": -np.inf, "onset": 0, "duration": 1}


@dataclass(frozen=True)
class Run:
    """A finished or partly finished run, as stored.

    Attributes:
      folder: where it lies.
      spec: the resolved spec, and `spec_text` its TOML.
      environment: versions, device, times; may be empty.
      telemetry: dims (seed, condition, step).
      metrics: one row per lane, or None.
      summary: one row per condition, or None.
    """

    folder: Path
    spec: dict[str, Any]
    spec_text: str
    environment: dict[str, Any]
    telemetry: xr.Dataset
    metrics: pd.DataFrame | None
    summary: pd.DataFrame | None

    @property
    def name(self) -> str:
        """The name that the spec gives the audit, or the folder's name."""
        return str(self.spec.get("audit", {}).get("name") or self.folder.resolve().name)

    @property
    def remedies(self) -> str:
        """The remedies of its learner, in words that follow the learner's name: " with l2_init 0.001"; "" without."""
        tables = [one for one in self.spec.get("remedy", []) if isinstance(one, dict)]
        told = [f"{one.get('kind', 'a remedy')} {one.get('strength', '')}".strip() for one in tables]
        return f" with {', '.join(told)}" if told else ""

    @property
    def seeds(self) -> int:
        """The number of seeds in the telemetry."""
        return int(self.telemetry.sizes.get("seed", 1))

    @property
    def steps(self) -> int:
        """Steps of the whole run, computed or not."""
        planned = self.spec.get("audit", {}).get("steps")
        return int(planned) if isinstance(planned, int) else int(self.telemetry.sizes["step"])

    def setting(self, name: str, default: int) -> int:
        """Returns one of the windows in [metrics], in steps."""
        return int(self.spec.get("metrics", {}).get(name, default))

    @cached_property
    def step(self) -> np.ndarray:
        """The step of every column, int `[step]`."""
        if "step" in self.telemetry.coords:
            return self.telemetry["step"].values.astype(int)
        return np.arange(self.telemetry.sizes["step"])

    @cached_property
    def conditions(self) -> pd.DataFrame:
        """One row per condition: condition, perturbation, dimension, target, magnitude, neutral, onset, duration.

        What a run does not tell has a value that stands for it; neutral minus infinity says that harm rises.
        """
        size = self.telemetry.sizes["condition"]
        table: dict[str, Any] = {}
        for name, default in _TEXT.items():
            known = name in self.telemetry.coords
            table[name] = [str(v) for v in self.telemetry[name].values] if known else [default] * size
        for name, number in _NUMBERS.items():
            known = name in self.telemetry.coords
            table[name] = self.telemetry[name].values.astype(float) if known else np.full(size, float(number))
        frame = pd.DataFrame(table)
        for name in ("onset", "duration"):
            frame[name] = frame[name].fillna(_NUMBERS[name]).astype(int)
        return frame

    @cached_property
    def collapse_times(self) -> pd.DataFrame:
        """T_c, steps, a row for each seed and a column for each condition; raises ValueError without metrics."""
        if self.metrics is None:
            raise ValueError(f"{self.folder} has no metrics")
        return self.metrics.pivot(index="seed", columns="condition", values="collapse_time")

    def channel(self, name: str) -> np.ndarray | None:
        """A scalar channel, or an entry of another as monitors spell it ("clip_fraction[tool, after, low]").

        A channel that is measured in some steps only has its latest value in the others, NaN before the first.

        Returns:
          float64 `[seed, condition, step]`; None where it was not recorded.
        """
        variable, _, entry = name.partition("[")
        if variable not in self.telemetry:
            return None
        values, lanes = self.telemetry[variable], ("seed", "condition", "step")
        labels = entry.removesuffix("]").split(", ") if entry else []
        own = [str(dim) for dim in values.dims if dim not in lanes]
        if len(own) != len(labels) or not set(lanes) <= set(values.dims):
            return None
        for dim, label in zip(own, labels, strict=True):
            known = [str(entry) for entry in values[dim].values]
            if label not in known:
                return None
            values = values.isel({dim: known.index(label)})
        found = values.transpose(*lanes).values.astype(np.float64)
        if not self.is_sparse(variable):
            return found
        return pd.DataFrame(found.reshape(-1, found.shape[-1])).ffill(axis=1).to_numpy().reshape(found.shape)

    def is_sparse(self, channel: str) -> bool:
        """Whether a channel is measured in some steps only, by what happens in them."""
        return channel in self.telemetry and bool(self.telemetry[channel].attrs.get("sparse", 0))

    @cached_property
    def performance(self) -> np.ndarray:
        """The performance J, float64 `[seed, condition, step]`."""
        values = self.channel("performance")
        assert values is not None, "load() checks it"
        return values

    @cached_property
    def computed(self) -> np.ndarray:
        """`[condition]`: one past the last step at which any seed of the condition's onset has a value."""
        known = ~np.isnan(self.performance).all(axis=0)
        if self.is_sparse("performance"):  # it may be missing at the last steps of a run that reached them
            known = self._any_channel
        ends = np.where(known.any(-1), known.shape[-1] - known[:, ::-1].argmax(-1), 0)
        onsets = self.conditions["onset"]
        return pd.Series(ends).groupby(onsets).transform("max").to_numpy()

    @property
    def _any_channel(self) -> np.ndarray:
        """`[condition, step]`: whether any seed has a value in any channel of one number; True of a finished run."""
        lanes = ("seed", "condition", "step")
        shape = tuple(self.telemetry.sizes[name] for name in lanes[1:])
        if self.environment.get("status") == "finished":
            return np.ones(shape, bool)
        scalars = [x.transpose(*lanes) for x in self.telemetry.data_vars.values() if set(x.dims) == set(lanes)]
        return np.any([x.notnull().any("seed").values for x in scalars], axis=0)

    @property
    def finished(self) -> bool:
        """Whether every condition reached the last step."""
        status = self.environment.get("status", "finished")
        full = self.telemetry.sizes["step"] >= self.steps and bool((self.computed >= len(self.step)).all())
        return status == "finished" and full


def load(folder: Path) -> Run:
    """Read a run's folder.

    Raises:
      FileNotFoundError: there is no telemetry yet.
      UserError: something in the folder is damaged, or a link.
    """
    check_contents(folder)
    store = folder / "telemetry.zarr"
    if not store.exists():
        raise FileNotFoundError(f"{folder} holds no telemetry.zarr, so there is nothing to report yet")
    text = _text(folder / "spec.toml")
    array_store.check(store)
    telemetry = array_store.open_dataset(store)
    if "performance" not in telemetry or not {"seed", "condition", "step"} <= set(telemetry["performance"].dims):
        raise UserError(f"{store} has no channel 'performance' with dims seed, condition, step")
    metrics = table(folder / "metrics.csv")
    run = Run(
        folder=folder,
        spec=_spec(folder / "spec.toml", text),
        spec_text=text,
        environment=read_environment(folder / "environment.json"),
        telemetry=telemetry,
        metrics=metrics,
        summary=_intervals(table(folder / "summary.csv"), telemetry.sizes["seed"]),
    )
    _check_table(folder / "metrics.csv", run.metrics, ("seed", "condition", "collapse_time", "final_performance"), run)
    _check_table(folder / "summary.csv", run.summary, ("condition", "perturbation", "magnitude"), run)
    return replace(run, summary=_with_excess(run))


def _with_excess(run: Run) -> pd.DataFrame | None:
    """The summary with the columns excess_*, which runs of earlier versions do not have."""
    summary = run.summary
    if summary is None or run.metrics is None or "excess_collapse_probability" in summary:
        return summary
    if "collapse_probability" not in summary:
        return summary
    conditions = run.conditions.set_index("condition")
    controls = conditions[conditions["perturbation"] == CONTROL]
    times = run.collapse_times
    rows = []
    for condition in summary["condition"]:
        control = controls.index[controls["onset"] == conditions["onset"][condition]]
        if not len(control):
            return summary
        pair = times[condition], times[control[0]]
        early = excess_columns(*pair, kind="divergence", before=run.steps / 2)
        rows.append(early.values | excess_columns(*pair).values)
    return summary.assign(**pd.DataFrame(rows, index=summary.index))


def _check_table(path: Path, found: pd.DataFrame | None, columns: tuple[str, ...], run: Run) -> None:
    """Raises UserError where a table is not of the lanes, or of the conditions, that the telemetry has."""
    if found is None:
        return
    if missing := [column for column in columns if column not in found]:
        raise UserError(f"{path} is damaged: it has no column '{missing[0]}'")
    conditions, keys = run.conditions["condition"], [name for name in ("seed", "condition") if name in columns]
    lanes = len(conditions) * (run.seeds if "seed" in keys else 1)
    if len(found) != lanes or found.duplicated(keys).any() or set(found["condition"]) != set(conditions):
        raise UserError(f"{path} is damaged: its rows are not those of the conditions and seeds of the telemetry")
    if "magnitude" in columns:
        planned = run.conditions.set_index("condition")["magnitude"].reindex(found["condition"])
        if not np.allclose(planned, found["magnitude"], rtol=1e-5, equal_nan=True):
            raise UserError(f"{path} is damaged: its magnitudes are not those of the telemetry")
    for own, low, high, what in (
        ([c for c in found if re.fullmatch(r"(acting_)?collapse_probability", c)], 0, 1, "a probability"),
        ([c for c in found if re.fullmatch(r"excess_\w+_probability", c)], -1, 1, "an excess"),
        ([c for c in found if re.fullmatch(r"excess_\w+_(lost|spared|standing)", c)], 0, run.seeds, "a count of seeds"),
    ):
        if ((found[own] < low) | (found[own] > high)).any(axis=None):
            raise UserError(f"{path} is damaged: it has {what} outside of [{low}, {high}]")


def _intervals(summary: pd.DataFrame | None, seeds: int) -> pd.DataFrame | None:
    """The summary without its interval columns where one seed gives none that means anything."""
    if summary is None or seeds > 1:
        return summary
    return summary.drop(columns=[c for c in summary.columns if c.endswith(("_low", "_high"))])


def _text(path: Path) -> str:
    return read_text(path) if path.exists() else ""


def _spec(path: Path, text: str) -> dict[str, Any]:
    """The tables of a stored spec, which may be of an earlier version, with words and numbers this one lacks."""
    found = parse_toml(text, str(path))
    for name, kind in _TABLES.items():
        if not isinstance(found.get(name, kind()), kind):
            raise UserError(f"{path} is damaged: {name} is not a table")
    for name, value in found.get("metrics", {}).items():
        if type(value) is not int or not 0 < value < 2**31:
            raise UserError(f"{path} is damaged: {name} in [metrics] is not a number of steps")
    return found


_TABLES: dict[str, type] = dict.fromkeys(("audit", "task", "learner", "metrics", "run", "monitor"), dict) | {
    "remedy": list
}


def table(path: Path, words: Collection[str] = (*_TEXT, "reason")) -> pd.DataFrame | None:
    """A CSV file, all columns but those of `words` as numbers; None where it is not there or has no rows.

    Raises:
      UserError: it is damaged.
    """
    if not path.exists() or not path.stat().st_size:
        return None
    try:
        found = pd.read_csv(path, keep_default_na=False, dtype=dict.fromkeys(words, str))
    except ValueError as error:  # pandas' errors and those of UTF-8
        raise UserError(f"{path} is damaged: {error}") from None
    for column in found.columns.difference(list(words)):
        if not pd.api.types.is_bool_dtype(found[column]):
            found[column] = pd.to_numeric(found[column], errors="coerce")
    return found if len(found) else None
