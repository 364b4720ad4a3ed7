"""The detectors that a monitor has to beat."""

from __future__ import annotations

from collections.abc import Sequence

from jaxaudit.core.channel_names import ACTING, PERFORMANCE
from jaxaudit.monitoring.change_point import BOCPD
from jaxaudit.monitoring.control_charts import CUSUM, SingleChannel, SixSigma, ZClip
from jaxaudit.monitoring.detector import Detector
from jaxaudit.monitoring.multichannel_charts import CHARTS
from jaxaudit.monitoring.slowing_down import Autocorrelation, RollingVariance


def standard(channels: Sequence[str]) -> tuple[Detector, ...]:
    """The baselines for telemetry of these channels: charts of all together, each alone, and what trainers use.

    Detectors of performance, loss or gradient norm are left out where there is no such channel; that of performance
    is the one that training shows.
    """
    shown = ACTING if ACTING in channels else PERFORMANCE
    detectors: list[Detector] = [*CHARTS, *(SingleChannel(channel) for channel in channels)]
    norm = gradient_norm(channels)
    if shown in channels:
        detectors += [kind(shown) for kind in (CUSUM, RollingVariance, Autocorrelation, BOCPD)]
    if norm:
        detectors += [CUSUM(norm), BOCPD(norm)]
    if "loss" in channels:
        detectors.append(SixSigma("loss"))
    elif shown in channels:
        detectors.append(SixSigma(shown, sign=-1.0))
    if norm:
        detectors += [SixSigma(norm), ZClip(norm)]
    return tuple(detectors)


def gradient_norm(channels: Sequence[str]) -> str | None:
    """The channel of the gradient's norm: that name, else the first that starts or ends in it; not a layer's."""
    if "gradient_norm" in channels:
        return "gradient_norm"
    alike = (c for c in channels if c.startswith("gradient_norm") or c.endswith("gradient_norm"))
    return next((c for c in alike if "[" not in c), None)
