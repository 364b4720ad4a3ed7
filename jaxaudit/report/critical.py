"""The critical magnitude of a perturbation, from stored collapse times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from jaxaudit.report.series import Panel
from jaxaudit.statistics import critical_magnitude, harm_rises
from jaxaudit.stored import CONTROL, Run


@dataclass(frozen=True)
class Critical:
    """Where the share of collapsed seeds crosses one half: `text` in words, `value` NaN where it does not."""

    value: float
    low: float
    high: float
    text: str


def rows(run: Run, panel: Panel) -> pd.DataFrame:
    """The summary's rows of a panel's disturbed conditions, by rising magnitude, with `label` and `rank`."""
    if run.summary is None:
        return pd.DataFrame()
    order = {run.conditions["condition"].iloc[line.index]: line for line in panel.disturbed}
    found = run.summary[run.summary["condition"].isin(list(order))].copy()
    found["rank"] = [int(order[c].key[1:]) for c in found["condition"]]
    found["label"] = [order[c].label for c in found["condition"]]
    return found.sort_values("rank")


def critical_of(run: Run, panel: Panel, kind: str) -> Critical:
    """The magnitude at which the share of collapsed seeds crosses one half, or why there is none."""
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
    table = _collapsed(run, data, magnitudes, kind)
    found = critical_magnitude(magnitudes, table, increasing=rising, missing="count")
    if np.isfinite(found.value):
        text = f"{found.value:.3g}"
        if run.seeds > 1:
            low = f"{found.low:.3g}" if found.low > 0 else "below all tested"
            high = f"{found.high:.3g}" if np.isfinite(found.high) else "above all tested"
            text += f" (95% interval: {low} to {high})"
        return Critical(found.value, found.low, found.high, text)
    return Critical(unknown, unknown, unknown, found.reason)


def _collapsed(run: Run, data: pd.DataFrame, magnitudes: np.ndarray, kind: str) -> np.ndarray:
    """`[seeds, M]`: 1 where the lane collapsed (in time, for P_div), NaN where it is not known."""
    assert run.metrics is not None
    names = data.set_index("magnitude")["condition"].reindex(magnitudes)
    own = run.metrics[run.metrics["condition"].isin(names)]
    times = own.pivot_table(index="seed", columns="condition", values="collapse_time", dropna=False)
    x = times.reindex(columns=list(names)).to_numpy(np.float64)
    limit = run.steps / 2 if kind == "divergence_probability" else np.inf
    return np.where(np.isnan(x), np.nan, (x < limit).astype(float))


def control_share(run: Run) -> float:
    """The largest share of control lanes that collapse by themselves; NaN if not known."""
    if run.summary is None or "collapse_probability" not in run.summary:
        return float("nan")
    own = run.summary[run.summary["perturbation"] == CONTROL]["collapse_probability"]
    return float(own.max()) if len(own) else float("nan")
