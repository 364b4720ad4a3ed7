"""What the findings' scripts share: runs by name, resampled seeds, and the figures' look."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from figures import markdown, save, with_interval

from jaxaudit.analysis.statistics import Estimate

__all__ = ["REPETITIONS", "asked", "markdown", "over_seeds", "pairs", "said", "save", "with_interval"]

REPETITIONS = 1000
"""Of a bootstrap over seeds."""


def pairs(given: Sequence[str]) -> dict[str, list[Path]]:
    """Folders by name, from "NAME=FOLDER" each; a name may be given several times."""
    found: dict[str, list[Path]] = {}
    for one in given:
        name, mark, folder = one.partition("=")
        if not mark or not Path(folder).is_dir():
            raise SystemExit(f"NAME=FOLDER is what is asked for, with a folder that is there, not {one}")
        found.setdefault(name, []).append(Path(folder))
    return found


def asked(description: str | None, folders: str) -> tuple[Path, dict[str, list[Path]]]:
    """The command line's folder of results, which is made, and folders by name.

    Args:
      description: the script's docstring.
      folders: what its arguments "NAME=FOLDER" are.
    """
    options = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    options.add_argument("out", type=Path, help="folder of tables and figures")
    options.add_argument("folders", nargs="+", metavar="NAME=FOLDER", help=folders)
    chosen = options.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    return chosen.out, pairs(chosen.folders)


def over_seeds(statistic: Callable[[np.ndarray], float], seeds: Sequence[int], seed: int = 0) -> Estimate:
    """A statistic of how often each of the seeds is taken, with its percentile bootstrap interval over seeds.

    Args:
      statistic: from counts `[seeds]`, in the seeds' order, to a figure; NaN where a draw gives none.
      seeds: whose lanes are taken or left together.
      seed: of the resampling.
    """
    size = len(seeds)
    value = float(statistic(np.ones(size, int)))
    draws = np.random.default_rng(seed).multinomial(size, np.full(size, 1 / size), REPETITIONS)
    found = np.array([statistic(counts) for counts in draws])
    found = np.sort(found[~np.isnan(found)])
    if not len(found):
        return Estimate(value, np.nan, np.nan, size)
    low, high = (float(found[round(q * (len(found) - 1))]) for q in (0.025, 0.975))
    return Estimate(value, low, high, size)


def said(estimate: Estimate, form: str = ".2f") -> str:
    """A figure and its interval, or a dash."""
    return with_interval(estimate, form) if not np.isnan(estimate.value) else "-"
