"""Undisturbed trainings of a dialogue at several difficulties: how many of a policy's tokens follow a tool's result."""

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


def undisturbed(runs: Sequence[Path]) -> pd.DataFrame:
    """A row for each undisturbed lane: its seed, the share of its own tokens in the stratum tool in the first tenth,
    in the last and over the run ("mean"), the calls of a row, and success at the end."""
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
"""Of `undisturbed`, what intervals are given of, and what its standard deviation over seeds is called."""


def tool_shares(lanes: dict[str, pd.DataFrame]) -> list[dict]:
    """A row for each difficulty, and one for what it has more at one than at another (as in `growth`): means over
    undisturbed lanes of what `undisturbed` tells and standard deviations over seeds, with 95% intervals over seeds.

    Differences are paired: a seed begins from the same parameters at each difficulty.

    Raises:
      ValueError: the difficulties' seeds are not the same.
    """
    seeds = next(iter(lanes.values())).seed.tolist()
    if any(table.seed.tolist() != seeds for table in lanes.values()):
        raise ValueError(f"undisturbed lanes at difficulties {', '.join(lanes)} must be of the same seeds")

    def row_of_some(these: Sequence[str]) -> dict[str, float]:
        """Of one difficulty, or what the second of two has more than the first."""
        row = {} if len(these) > 1 else {name: lanes[these[0]][name].mean() for name in ("first tenth", "last tenth")}
        for name, spread in SPREADS.items():
            for title, figure in ((name, _mean), (spread, _deviation)):
                if title is None:
                    continue
                values = [lanes[one][name].to_numpy() for one in these]

                def more(counts: np.ndarray, values=values, figure=figure) -> float:
                    *first, last = (figure(np.repeat(v, counts)) for v in values)
                    return last - sum(first)

                known = over_seeds(more, seeds)
                row |= {title: known.value, f"{title} low": known.low, f"{title} high": known.high}
        return row

    rows = [{"difficulty": one, **row_of_some([one])} for one in lanes]
    return rows + [{"difficulty": f"{b} less {a}", **row_of_some([a, b])} for a, b in compared(list(lanes))]


def compared(order: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of difficulties: neighbours, and the first and the last."""
    return list(dict.fromkeys([*itertools.pairwise(order), (order[0], order[-1])])) if len(order) > 1 else []


def _mean(values: np.ndarray) -> float:
    return float(values.mean())


def _deviation(values: np.ndarray) -> float:
    return float(values.std(ddof=1))
