"""Helpers of the findings' scripts: folders by name, bootstraps over seeds, and figures."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from figures import markdown, save, with_interval

from jaxaudit.analysis.statistics import Estimate

__all__ = [
    "REPETITIONS",
    "folders_by_name",
    "format_estimate",
    "markdown",
    "over_seeds",
    "parse_arguments",
    "save",
    "with_interval",
]

REPETITIONS = 1000
"""The number of bootstrap samples of seeds."""


def folders_by_name(arguments: Sequence[str]) -> dict[str, list[Path]]:
    """Returns folders by name, from arguments "NAME=FOLDER"; a name may occur several times."""
    folders: dict[str, list[Path]] = {}
    for argument in arguments:
        name, mark, folder = argument.partition("=")
        if not mark or not Path(folder).is_dir():
            raise SystemExit(f"arguments must be NAME=FOLDER with existing folders, not {argument}")
        folders.setdefault(name, []).append(Path(folder))
    return folders


def parse_arguments(description: str | None, folders: str) -> tuple[Path, dict[str, list[Path]]]:
    """Parses the command line; returns the folder of results, which is created, and folders by name.

    Args:
      description: the docstring of the script.
      folders: the help text of the arguments "NAME=FOLDER".
    """
    options = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    options.add_argument("out", type=Path, help="folder of tables and figures")
    options.add_argument("folders", nargs="+", metavar="NAME=FOLDER", help=folders)
    arguments = options.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    return arguments.out, folders_by_name(arguments.folders)


def over_seeds(statistic: Callable[[np.ndarray], float], seeds: Sequence[int], seed: int = 0) -> Estimate:
    """Returns a statistic with its percentile bootstrap interval over seeds.

    Args:
      statistic: function of the counts `[seeds]` of each seed in a sample; NaN if it is undefined for a sample.
      seeds: the seeds; all lanes of a seed are resampled together.
      seed: seed of the bootstrap.
    """
    size = len(seeds)
    value = float(statistic(np.ones(size, int)))
    draws = np.random.default_rng(seed).multinomial(size, np.full(size, 1 / size), REPETITIONS)
    samples = np.array([statistic(counts) for counts in draws])
    samples = np.sort(samples[~np.isnan(samples)])
    if not len(samples):
        return Estimate(value, np.nan, np.nan, size)
    low, high = (float(samples[round(q * (len(samples) - 1))]) for q in (0.025, 0.975))
    return Estimate(value, low, high, size)


def format_estimate(estimate: Estimate, form: str = ".2f") -> str:
    """Formats an estimate and its interval, or a dash for NaN."""
    return with_interval(estimate, form) if not np.isnan(estimate.value) else "-"
