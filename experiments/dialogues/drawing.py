"""Helpers of the figures of these experiments: names and colours of learners, and statistics over seeds."""

from __future__ import annotations

import sys
from pathlib import Path

import altair as alt
import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).parent.parent))

from figures import markdown, save

__all__ = ["COLORS", "NAMES", "colored", "format_range", "markdown", "save", "seed_range"]

NAMES = {"ppo_lm": "PPO", "grpo": "GRPO", "dapo": "DAPO", "dpo": "DPO", "dpo-1e-4": "DPO, rate 1e-4"}
COLORS = dict(zip(NAMES.values(), ("#2c7fb8", "#b02f72", "#e8952c", "#4d4d4d", "#9aa0aa"), strict=True))


def seed_range(frame: pd.DataFrame, by: list[str], value: str) -> pd.DataFrame:
    """Returns mean, minimum and maximum over seeds."""
    statistics = frame.groupby(by, sort=False)[value].agg(["mean", "min", "max"]).reset_index()
    return statistics


def colored(names: dict[str, str], field: str = "learner", title: str | None = None) -> alt.Color:
    """Returns an encoding of colours by name."""
    scale = alt.Scale(domain=list(names), range=list(names.values()))
    return alt.Color(f"{field}:N", title=title, scale=scale, legend=alt.Legend(symbolOpacity=1, symbolType="circle"))


def format_range(values: np.ndarray, form: str = ".2f") -> str:
    """Formats a mean with the minimum and maximum over seeds."""
    return f"{values.mean():{form}} [{values.min():{form}}, {values.max():{form}}]"
