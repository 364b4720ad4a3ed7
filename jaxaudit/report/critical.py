"""How many seeds each condition collapses, beside the control, and at which magnitude half of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from jaxaudit.analysis.run_reader import Run
from jaxaudit.analysis.statistics import collapsed, critical_beside, harm_rises
from jaxaudit.report.series import CONTROL_KEY, Panel


@dataclass(frozen=True)
class Critical:
    """Where the share of collapsed seeds crosses one half: `text` in words, `value` NaN where it does not."""

    value: float
    low: float
    high: float
    text: str


def rows(run: Run, panel: Panel) -> pd.DataFrame:
    """The summary's rows of a panel's disturbed conditions, by rising magnitude.

    Beside the summary's columns: `label` and `rank`; of the seeds whose control does not collapse, `standing`, how many
    collapse, `lost`, and their share, `lost_share`; and `spared`, the seeds of which the control alone collapses.
    """
    if run.summary is None:
        return pd.DataFrame()
    order = {run.conditions["condition"].iloc[line.index]: line for line in panel.disturbed}
    found = run.summary[run.summary["condition"].isin(list(order))].copy()
    found["rank"] = [int(order[c].key[1:]) for c in found["condition"]]
    found["label"] = [order[c].label for c in found["condition"]]
    if "excess_collapse_probability" in found:
        for name in ("lost", "spared", "standing"):
            found[name] = found[f"excess_collapse_{name}"]
        known = found["excess_collapse_probability"].notna() & (found["standing"] > 0)
        found["lost_share"] = (found["lost"] / found["standing"]).where(known)
    elif "collapse_probability" in found:
        found["lost_share"] = found["collapse_probability"]
        found["lost"] = found["collapse_probability"] * run.seeds
        found["standing"], found["spared"] = run.seeds, 0
    return found.sort_values("rank")


def critical_of(run: Run, panel: Panel, kind: str, *, standing: bool = False) -> Critical:
    """The magnitude at which the share of collapsed seeds crosses one half, or why there is none.

    Args:
      run: what is stored.
      panel: the perturbation.
      kind: "collapse_probability", or "divergence_probability" of collapse before the half of the run.
      standing: whether only seeds count whose control does not collapse.
    """
    unknown = float("nan")
    data = rows(run, panel)
    magnitudes = np.unique([line.magnitude for line in panel.disturbed])
    if len(magnitudes) < 2 or len(magnitudes) < len(panel.disturbed) or run.metrics is None or kind not in data:
        return Critical(unknown, unknown, unknown, "")
    if not (np.isfinite(magnitudes) & (magnitudes > 0)).all():
        return Critical(unknown, unknown, unknown, "no critical magnitude: magnitudes are not all positive")
    share = data.set_index("magnitude")[kind].reindex(magnitudes)
    if share.isna().any():
        return Critical(unknown, unknown, unknown, "not known: a share is missing")
    try:
        rising = harm_rises(magnitudes, panel.neutral)
    except ValueError as error:
        return Critical(unknown, unknown, unknown, f"no critical magnitude: {error}")
    names = list(data.set_index("magnitude")["condition"].reindex(magnitudes))
    table, control = _collapsed(run, names, kind), control_of(run, panel, kind)
    if control is None:
        control = np.zeros(len(table))
    found = critical_beside(magnitudes, table, control, standing=standing, increasing=rising, missing="count")
    if np.isfinite(found.value):
        text = f"{found.value:.3g}"
        if run.seeds > 1:
            low = f"{found.low:.3g}" if found.low > 0 else "below all tested"
            high = f"{found.high:.3g}" if np.isfinite(found.high) else "above all tested"
            text += f" (95% interval: {low} to {high})"
        return Critical(found.value, found.low, found.high, text)
    return Critical(unknown, unknown, unknown, found.reason)


def control_of(run: Run, panel: Panel, kind: str = "collapse_probability") -> np.ndarray | None:
    """Whether each seed's control collapses, `[seeds]`: 1, 0 or NaN where it is not known; None without a control."""
    if run.metrics is None or panel.lines[0].key != CONTROL_KEY:
        return None
    return _collapsed(run, [run.conditions["condition"].iloc[panel.lines[0].index]], kind)[:, 0]


def _collapsed(run: Run, conditions: list[str], kind: str) -> np.ndarray:
    """`[seeds, conditions]`: 1 where the lane collapsed (in time, for P_div), NaN where it is not known."""
    times = run.collapse_times.reindex(columns=conditions).to_numpy(np.float64)
    return collapsed(times, run.steps / 2 if kind == "divergence_probability" else np.inf)
