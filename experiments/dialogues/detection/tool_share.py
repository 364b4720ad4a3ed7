"""Shares of policy tokens after a tool's result, in undisturbed trainings of a dialogue at several difficulties."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).parents[2] / "findings"))

from basics import over_seeds

from jaxaudit.analysis.run_reader import CONTROL, load


def undisturbed_lanes(runs: Sequence[Path]) -> pd.DataFrame:
    """Returns a row for each undisturbed lane.

    Its columns are the seed, the share of policy tokens in the stratum tool in the first and the last tenth and over
    the run ("mean"), the calls per row, and the success at the end.
    """
    parts = []
    for folder in runs:
        run = load(folder)
        number = int(np.flatnonzero(run.conditions.perturbation == CONTROL)[0])
        tokens = run.telemetry["own_tokens"].isel(condition=number)
        share = (tokens.sel(stratum="tool") / tokens.sel(stratum="all")).transpose("seed", "step").values
        tenth = max(share.shape[1] // 10, 1)
        columns = {"seed": run.telemetry.seed.values, "first tenth": share[:, :tenth].mean(1)}
        columns |= {"last tenth": share[:, -tenth:].mean(1), "mean": share.mean(1)}
        columns |= {
            "calls a row": run.telemetry["calls"].isel(condition=number).transpose("seed", "step").values.mean(1)
        }
        columns |= {"success at the end": run.channel("performance")[:, number, -1]}
        parts.append(pd.DataFrame(columns))
    return pd.concat(parts, ignore_index=True)


SPREADS = {"mean": "std over seeds", "calls a row": None, "success at the end": "success, std over seeds"}
"""Columns of `undisturbed_lanes` that get intervals, and the names of their standard deviations over seeds."""


def tool_share_rows(lanes: dict[str, pd.DataFrame]) -> list[dict]:
    """Returns a row for each difficulty, and for differences between difficulties, as in `growth` of families.py.

    The values are means over undisturbed lanes and standard deviations over seeds, with 95% intervals over seeds.
    Differences are paired, since a seed begins from the same parameters at each difficulty.

    Raises:
      ValueError: the seeds of the difficulties differ.
    """
    seeds = next(iter(lanes.values())).seed.tolist()
    if any(table.seed.tolist() != seeds for table in lanes.values()):
        raise ValueError(f"undisturbed lanes at difficulties {', '.join(lanes)} must be of the same seeds")

    def row_of(difficulties: Sequence[str]) -> dict[str, float]:
        """Returns values of one difficulty, or the differences between two."""
        row = (
            {}
            if len(difficulties) > 1
            else {name: lanes[difficulties[0]][name].mean() for name in ("first tenth", "last tenth")}
        )
        for name, spread in SPREADS.items():
            for title, figure in ((name, _mean), (spread, _deviation)):
                if title is None:
                    continue
                values = [lanes[difficulty][name].to_numpy() for difficulty in difficulties]

                def difference(counts: np.ndarray, values=values, figure=figure) -> float:
                    *first, last = (figure(np.repeat(v, counts)) for v in values)
                    return last - sum(first)

                estimate = over_seeds(difference, seeds)
                row |= {title: estimate.value, f"{title} low": estimate.low, f"{title} high": estimate.high}
        return row

    rows = [{"difficulty": difficulty, **row_of([difficulty])} for difficulty in lanes]
    return rows + [{"difficulty": f"{b} less {a}", **row_of([a, b])} for a, b in difficulty_pairs(list(lanes))]


def difficulty_pairs(order: Sequence[str]) -> list[tuple[str, str]]:
    """Returns pairs of difficulties: neighbours, and the first and the last."""
    return list(dict.fromkeys([*itertools.pairwise(order), (order[0], order[-1])])) if len(order) > 1 else []


def _mean(values: np.ndarray) -> float:
    return float(values.mean())


def _deviation(values: np.ndarray) -> float:
    return float(values.std(ddof=1))
