"""Reads a run's folder: its spec, telemetry, tables, and the held-out rows that a dialogue learner stored."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from jaxaudit.analysis.metrics import MetricSettings
from jaxaudit.analysis.statistics.paired import excess_columns
from jaxaudit.runtime import array_store
from jaxaudit.runtime.errors import UserError
from jaxaudit.runtime.files import check_contents, parse_toml, read_text
from jaxaudit.runtime.machine import read_environment

TOKENS, ROLES, LOG_PROBABILITIES, REWARDS = "shown_token", "shown_role", "shown_log_probability", "shown_reward"
"""The channels of held-out rows: `[seed, condition, step, row, slot]`, and the rewards without slots."""

_ROW_CHANNELS = [TOKENS, ROLES, LOG_PROBABILITIES, REWARDS]

OWN, PROMPT, TOOL, NOBODY = "own", "prompt", "tool", "end"
"""The roles of a slot: written by the policy, part of the prompt, written by a tool, or empty."""

_LANE_DIMS = ("seed", "condition", "step")


@dataclass(frozen=True)
class RowToken:
    """A token of a held-out row.

    Attributes:
      text: The token's text, or its number if it has none.
      role: Who wrote it: OWN, PROMPT or TOOL.
      log_probability: The policy's log-probability of a token that it wrote itself; NaN for others.
    """

    text: str
    role: str
    log_probability: float

    @property
    def is_own(self) -> bool:
        """Whether the policy wrote the token itself."""
        return self.role == OWN


@dataclass(frozen=True)
class HeldOutRow:
    """The tokens of a held-out prompt and the policy's response, and the gold reward of the response."""

    tokens: tuple[RowToken, ...]
    reward: float


def has_held_out_rows(telemetry: xr.Dataset) -> bool:
    """Returns whether a run stored any held-out rows."""
    return set(_ROW_CHANNELS) <= set(telemetry.data_vars)


def held_out_cadence(telemetry: xr.Dataset) -> int:
    """Returns the number of steps from one measurement of held-out rows to the next, as the telemetry records it.

    It is 1 if nothing is recorded. The telemetry must have held-out rows (see `has_held_out_rows`).
    """
    return int(telemetry[TOKENS].attrs.get("every", 1))


def nearest_step(telemetry: xr.Dataset, index: int, last: int) -> int:
    """Returns the index of the step nearest to `index` at which held-out rows were measured.

    Args:
      telemetry: The telemetry of a run with held-out rows.
      index: The index of a step.
      last: The largest index that may be returned. Of two equally near steps, the later one is returned.

    Raises:
      ValueError: No step up to `last` was measured.
    """
    every = held_out_cadence(telemetry)
    measured = np.arange(every - 1, last + 1, every)
    if not measured.size:
        raise ValueError(f"held-out rows are measured every {every} steps, and none is up to step {last}")
    return int(measured[::-1][np.argmin(np.abs(measured[::-1] - index))])


def held_out_rows(telemetry: xr.Dataset, seed: int, condition: int, step: int) -> list[HeldOutRow]:
    """Returns the rows of a lane at a step, all given by index; empty if no rows were stored there."""
    lane = telemetry[_ROW_CHANNELS].isel(seed=seed, condition=condition, step=step).load()
    texts, roles = (lane[name].attrs.get("words", ()) for name in (TOKENS, ROLES))
    columns = (lane[name].values for name in _ROW_CHANNELS)
    return [
        HeldOutRow(_row_tokens(texts, roles, *row), float(reward))
        for *row, reward in zip(*columns, strict=True)
        if np.isfinite(reward)
    ]


def _row_tokens(
    texts: list[str], role_names: list[str], tokens: np.ndarray, roles: np.ndarray, log_probabilities: np.ndarray
) -> tuple[RowToken, ...]:
    row = []
    for token, code, log_prob in zip(tokens.tolist(), roles.tolist(), log_probabilities.tolist(), strict=True):
        role = role_names[code] if 0 <= code < len(role_names) else NOBODY
        if role != NOBODY:
            text = texts[token] if 0 <= token < len(texts) else str(token)
            row.append(RowToken(text, role, log_prob if role == OWN else float("nan")))
    return tuple(row)


CONTROL = "control"
"""The name of the undisturbed condition's perturbation."""

_TEXT_COLUMNS = {"condition": "", "perturbation": CONTROL, "dimension": "", "target": ""}
_NUMBER_COLUMNS = {"magnitude": np.nan, "neutral": -np.inf, "onset": 0, "duration": 1}
"""The columns of `Run.conditions`, with their values for runs of earlier versions, which lack some.

A neutral magnitude of minus infinity means that larger magnitudes do more harm.
"""


@dataclass(frozen=True)
class Run:
    """A finished or partly finished run, as it is stored.

    Attributes:
      folder: The run's folder.
      spec: The tables of the resolved spec.
      spec_text: The TOML text of the resolved spec.
      environment: Versions, device and times; may be empty.
      telemetry: A dataset with dims (seed, condition, step).
      metrics: A table with one row per lane, or None.
      summary: A table with one row per condition, or None.
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
        """The remedies of the learner as a suffix of its name, such as " with l2_init 0.001", or an empty string."""
        tables = [table for table in self.spec.get("remedy", []) if isinstance(table, dict)]
        texts = [f"{table.get('kind', 'a remedy')} {table.get('strength', '')}".strip() for table in tables]
        return f" with {', '.join(texts)}" if texts else ""

    @property
    def seeds(self) -> int:
        """The number of seeds in the telemetry."""
        return int(self.telemetry.sizes.get("seed", 1))

    @property
    def steps(self) -> int:
        """The number of steps that every lane has when the run is finished, as the spec says.

        It is the number of steps in the telemetry if the spec does not say it.
        """
        planned = self.spec.get("audit", {}).get("steps")
        return int(planned) if isinstance(planned, int) else int(self.telemetry.sizes["step"])

    def setting(self, name: str, default: int) -> int:
        """Returns a window of the section [metrics], in steps."""
        return int(self.spec.get("metrics", {}).get(name, default))

    @cached_property
    def step(self) -> np.ndarray:
        """The steps of the telemetry, int `[step]`."""
        if "step" in self.telemetry.coords:
            return self.telemetry["step"].values.astype(int)
        return np.arange(self.telemetry.sizes["step"])

    @cached_property
    def conditions(self) -> pd.DataFrame:
        """A table with one row per condition.

        Its columns are condition, perturbation, dimension, target, magnitude, neutral, onset and duration; those that a
        run lacks have a default value.
        """
        size = self.telemetry.sizes["condition"]
        columns: dict[str, Any] = {}
        for name, text in _TEXT_COLUMNS.items():
            known = name in self.telemetry.coords
            columns[name] = [str(value) for value in self.telemetry[name].values] if known else [text] * size
        for name, number in _NUMBER_COLUMNS.items():
            known = name in self.telemetry.coords
            columns[name] = self.telemetry[name].values.astype(float) if known else np.full(size, float(number))
        table = pd.DataFrame(columns)
        for name in ("onset", "duration"):
            table[name] = table[name].fillna(_NUMBER_COLUMNS[name]).astype(int)
        return table

    @cached_property
    def collapse_times(self) -> pd.DataFrame:
        """T_c in steps, with one row for each seed and one column for each condition. Raises ValueError if unknown."""
        if self.metrics is None:
            raise ValueError(f"{self.folder} has no metrics")
        return self.metrics.pivot(index="seed", columns="condition", values="collapse_time")

    def channel(self, name: str) -> np.ndarray | None:
        """Returns a scalar channel, or one entry of another channel.

        Args:
          name: The name of a channel; an entry is given by its labels, such as "clip_fraction[tool, after, low]".

        Returns:
          float64 `[seed, condition, step]`, or None if there is no such channel or entry. A sparse channel is held from
          one measurement to the next, and is NaN before the first.
        """
        variable, _, entry = name.partition("[")
        if variable not in self.telemetry:
            return None
        values = self.telemetry[variable]
        labels = entry.removesuffix("]").split(", ") if entry else []
        own_dims = [str(dim) for dim in values.dims if dim not in _LANE_DIMS]
        if len(own_dims) != len(labels) or not set(_LANE_DIMS) <= set(values.dims):
            return None
        for dim, label in zip(own_dims, labels, strict=True):
            known = [str(value) for value in values[dim].values]
            if label not in known:
                return None
            values = values.isel({dim: known.index(label)})
        array = values.transpose(*_LANE_DIMS).values.astype(np.float64)
        if not self.is_sparse(variable):
            return array
        return pd.DataFrame(array.reshape(-1, array.shape[-1])).ffill(axis=1).to_numpy().reshape(array.shape)

    def is_sparse(self, channel: str) -> bool:
        """Returns whether a channel is measured only at some steps, depending on what happens in them."""
        return channel in self.telemetry and bool(self.telemetry[channel].attrs.get("sparse", 0))

    @cached_property
    def performance(self) -> np.ndarray:
        """The performance J, float64 `[seed, condition, step]`."""
        values = self.channel("performance")
        assert values is not None, "load() checks it"
        return values

    @cached_property
    def computed(self) -> np.ndarray:
        """The number of computed steps of each condition, int `[condition]`; conditions of one onset share it."""
        has_value = ~np.isnan(self.performance).all(axis=0)
        if self.is_sparse("performance"):  # it may be missing at the last steps of a run that reached them
            has_value = self._has_any_value
        ends = np.where(has_value.any(-1), has_value.shape[-1] - has_value[:, ::-1].argmax(-1), 0)
        onsets = self.conditions["onset"]
        return pd.Series(ends).groupby(onsets).transform("max").to_numpy()

    @property
    def _has_any_value(self) -> np.ndarray:
        """Whether any seed has a value in any scalar channel, bool `[condition, step]`; all True in a finished run."""
        shape = tuple(self.telemetry.sizes[dim] for dim in _LANE_DIMS[1:])
        if self.environment.get("status") == "finished":
            return np.ones(shape, bool)
        variables = self.telemetry.data_vars.values()
        scalars = [x.transpose(*_LANE_DIMS) for x in variables if set(x.dims) == set(_LANE_DIMS)]
        return np.any([x.notnull().any("seed").values for x in scalars], axis=0)

    @property
    def finished(self) -> bool:
        """Whether every condition reached the last step."""
        status = self.environment.get("status", "finished")
        complete = self.telemetry.sizes["step"] >= self.steps and bool((self.computed >= len(self.step)).all())
        return status == "finished" and complete


def in_memory(telemetry: xr.Dataset, metrics: pd.DataFrame, summary: pd.DataFrame, settings: MetricSettings) -> Run:
    """Returns a finished run that is not stored, from an audit's telemetry, tables and windows of the metrics."""
    return Run(
        folder=Path(),
        spec={"metrics": asdict(settings)},
        spec_text="",
        environment={},
        telemetry=telemetry,
        metrics=metrics,
        summary=_drop_intervals_of_one_seed(summary, telemetry.sizes["seed"]),
    )


def load(folder: Path) -> Run:
    """Reads a run's folder.

    Raises:
      FileNotFoundError: There is no telemetry yet.
      UserError: Something in the folder is damaged, or a link.
    """
    check_contents(folder)
    store = folder / "telemetry.zarr"
    if not store.exists():
        raise FileNotFoundError(f"{folder} holds no telemetry.zarr, so there is nothing to report yet")
    spec_path = folder / "spec.toml"
    spec_text = read_text(spec_path) if spec_path.exists() else ""
    array_store.check(store)
    telemetry = array_store.open_dataset(store)
    if "performance" not in telemetry or not set(_LANE_DIMS) <= set(telemetry["performance"].dims):
        raise UserError(f"{store} has no channel 'performance' with dims seed, condition, step")
    metrics = read_table(folder / "metrics.csv")
    run = Run(
        folder=folder,
        spec=_parse_spec(spec_path, spec_text),
        spec_text=spec_text,
        environment=read_environment(folder / "environment.json"),
        telemetry=telemetry,
        metrics=metrics,
        summary=_drop_intervals_of_one_seed(read_table(folder / "summary.csv"), telemetry.sizes["seed"]),
    )
    _check_table(folder / "metrics.csv", run.metrics, ("seed", "condition", "collapse_time", "final_performance"), run)
    _check_table(folder / "summary.csv", run.summary, ("condition", "perturbation", "magnitude"), run)
    return replace(run, summary=_add_excess(run))


def _drop_intervals_of_one_seed(summary: pd.DataFrame | None, seeds: int) -> pd.DataFrame | None:
    if summary is None or seeds > 1:
        return summary
    return summary.drop(columns=[column for column in summary.columns if column.endswith(("_low", "_high"))])


def _add_excess(run: Run) -> pd.DataFrame | None:
    """Returns the summary with the columns excess_*, which runs of earlier versions lack, if they can be computed."""
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
        divergence = excess_columns(*pair, kind="divergence", before=run.steps / 2)
        rows.append(divergence.values | excess_columns(*pair).values)
    return summary.assign(**pd.DataFrame(rows, index=summary.index))


def _check_table(path: Path, table: pd.DataFrame | None, columns: tuple[str, ...], run: Run) -> None:
    """Raises UserError if a table does not have one row for each lane, or for each condition, of the telemetry."""
    if table is None:
        return
    if missing := [column for column in columns if column not in table]:
        raise UserError(f"{path} is damaged: it has no column '{missing[0]}'")
    conditions, keys = run.conditions["condition"], [name for name in ("seed", "condition") if name in columns]
    rows = len(conditions) * (run.seeds if "seed" in keys else 1)
    if len(table) != rows or table.duplicated(keys).any() or set(table["condition"]) != set(conditions):
        raise UserError(f"{path} is damaged: its rows are not those of the conditions and seeds of the telemetry")
    if "magnitude" in columns:
        planned = run.conditions.set_index("condition")["magnitude"].reindex(table["condition"])
        if not np.allclose(planned, table["magnitude"], rtol=1e-5, equal_nan=True):
            raise UserError(f"{path} is damaged: its magnitudes are not those of the telemetry")
    for pattern, low, high, meaning in (
        (r"(acting_)?collapse_probability", 0, 1, "a probability"),
        (r"excess_\w+_probability", -1, 1, "an excess"),
        (r"excess_\w+_(lost|spared|standing)", 0, run.seeds, "a count of seeds"),
    ):
        values = table[[column for column in table if re.fullmatch(pattern, column)]]
        if ((values < low) | (values > high)).any(axis=None):
            raise UserError(f"{path} is damaged: it has {meaning} outside of [{low}, {high}]")


_SPEC_TABLES: dict[str, type] = {
    **dict.fromkeys(("audit", "task", "learner", "metrics", "run", "monitor"), dict),
    "remedy": list,
}


def _parse_spec(path: Path, text: str) -> dict[str, Any]:
    """Returns the tables of a stored spec, which may be of an earlier version and have keys that this one lacks."""
    tables = parse_toml(text, str(path))
    for name, expected in _SPEC_TABLES.items():
        if not isinstance(tables.get(name, expected()), expected):
            raise UserError(f"{path} is damaged: {name} is not a table")
    for name, value in tables.get("metrics", {}).items():
        if type(value) is not int or not 0 < value < 2**31:
            raise UserError(f"{path} is damaged: {name} in [metrics] is not a number of steps")
    return tables


def read_table(path: Path, text_columns: Collection[str] = (*_TEXT_COLUMNS, "reason")) -> pd.DataFrame | None:
    """Reads a CSV file, or returns None if it does not exist or has no rows.

    Args:
      path: The file.
      text_columns: The columns that are texts; all others are converted to numbers, unless they are bool.

    Raises:
      UserError: The file is damaged.
    """
    if not path.exists() or not path.stat().st_size:
        return None
    try:
        table = pd.read_csv(path, keep_default_na=False, dtype=dict.fromkeys(text_columns, str))
    except ValueError as error:  # errors of pandas and of UTF-8
        raise UserError(f"{path} is damaged: {error}") from None
    for column in table.columns.difference(list(text_columns)):
        if not pd.api.types.is_bool_dtype(table[column]):
            table[column] = pd.to_numeric(table[column], errors="coerce")
    return table if len(table) else None
