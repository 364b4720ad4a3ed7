"""One panel of lines: bands, medians, the window, legend and zoom selections, tooltips."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import altair as alt
import pandas as pd

from jaxaudit.report import style
from jaxaudit.report.series import Panel


@dataclass(frozen=True)
class Figure:
    """A figure: the file it is stored in, its heading, its chart and its caption."""

    kind: ClassVar[str] = "figure"
    file: str
    title: str
    chart: alt.ConcatChart
    caption: str

    @cached_property
    def spec(self) -> dict[str, Any]:
        """Its Vega-Lite JSON, the one source of the static files and of the page."""
        return style.specification(self.chart)


@dataclass(frozen=True)
class Axes:
    """How one panel is drawn.

    Attributes:
      aligned: whether step 0 is the onset.
      y_title: None for no title.
      x: the first and last step shown.
      y: the vertical scale.
      zoom: its zoom selection.
      pick: its legend selection.
      mark: a suffix for names inside the figure; views need explicit ones: Altair's own go stale.
      owner: whether it declares `pick`; only one panel of a figure may, as it is bound to a legend.
      letters: about how many characters a row of the legend has room for.
    """

    aligned: bool
    y_title: str | None
    x: tuple[float, float]
    y: alt.Scale
    zoom: Any
    pick: Any
    mark: str
    owner: bool = True
    letters: int = 62

    @property
    def x_title(self) -> str:
        """The title of the horizontal axis."""
        return "steps since the onset" if self.aligned else "step"


def zoom(name: str) -> alt.Parameter:
    """Pan by dragging and zoom with ctrl + wheel, along the steps."""
    return alt.selection_interval(name=name, bind="scales", encodings=["x"], zoom="wheel![event.ctrlKey]")


def pick(name: str) -> alt.Parameter:
    """Single out lines by their legend entries."""
    return alt.selection_point(name=name, fields=["label"], bind="legend")


def _colour(panel: Panel, letters: int) -> alt.Color:
    disturbed = panel.disturbed
    labels = [line.label for line in panel.lines]
    colours = [style.GREY] * (len(labels) - len(disturbed)) + style.ramp(len(disturbed))
    longest = max((len(label) for label in labels), default=0)
    one_row = sum(len(label) + 5 for label in labels) <= letters
    legend = alt.Legend(
        orient="top",
        title=None,
        labelFontSize=11,
        columnPadding=9,
        offset=4,
        columns=len(labels) if one_row else max(1, letters // (longest + 5)),
        symbolStrokeWidth=2.5,
        symbolType="stroke",
        symbolOpacity=1,
    )
    return alt.Color("label:N", scale=alt.Scale(domain=labels, range=colours), legend=legend, sort=None)


def _window(panel: Panel, axes: Axes, last: float) -> list[alt.Chart]:
    """The onset rule and the shaded windows."""
    onset = 0 if axes.aligned else panel.onset
    spans = [{"start": onset, "end": min(onset + d, last)} for d in panel.durations]
    shade = alt.Chart(alt.InlineData(values=spans)).mark_rect(color=style.SHADE, opacity=0.22, clip=True)
    rule = alt.Chart(alt.InlineData(values=[{"onset": onset}]))
    rule = rule.mark_rule(color=style.INK, strokeWidth=1, clip=True)
    start, at = (alt.X(f"{name}:Q", title=axes.x_title) for name in ("start", "onset"))
    return [shade.encode(x=start, x2="end:Q"), rule.encode(x=at)] if spans else []


def _opacity(chosen: alt.Parameter, yes: float, no: float) -> alt.OpacityValue:
    """Of what is chosen, and of all else; not as a dict, which Altair takes long to make out."""
    return alt.OpacityValue(no, condition=alt.when(chosen).then(alt.value(yes)).to_dict()["condition"])


def _layers(panel: Panel, axes: Axes) -> list[alt.Chart]:
    """Bands, medians, end marks and an invisible rule per step that carries the tooltip."""
    owned = [axes.pick, axes.zoom] if axes.owner else [axes.zoom]
    x = alt.X("step:Q", title=axes.x_title, scale=alt.Scale(domain=list(axes.x), nice=False))
    colour = _colour(panel, axes.letters)
    y: dict[str, Any] = {"title": axes.y_title, "scale": axes.y}
    strong, faint = _opacity(axes.pick, 1.0, 0.08), _opacity(axes.pick, 0.16, 0.02)
    base = alt.Chart()
    band = base.transform_filter("isValid(datum.low) && isValid(datum.high)").mark_area(clip=True)
    line = base.mark_line(clip=True, strokeWidth=1.8, strokeJoin="round")
    lost = base.transform_filter("datum.lost").mark_point(clip=True, shape="cross", angle=45, size=70, filled=True)
    # The space keeps the order: a JavaScript object puts keys that read as integers first.
    keys = [alt.Tooltip(f"{one.key}:Q", title=f"{one.label} ", format=".4~g") for one in panel.lines]
    hover = base.transform_pivot("key", value="median", groupby=["step"]).mark_rule(strokeWidth=4)
    here = alt.selection_point(
        name=f"hover_{axes.mark}", on="pointerover", clear="pointerout", fields=["step"], empty=False
    )
    tips = [alt.Tooltip("step:Q", title="step"), *keys]
    return [
        band.encode(x=x, y=alt.Y("low:Q", **y), y2="high:Q", color=colour, opacity=faint),
        line.encode(x=x, y=alt.Y("median:Q", **y), color=colour, opacity=strong)
        .properties(name=f"lines_{axes.mark}")
        .add_params(*owned),
        lost.encode(x=x, y=alt.Y("median:Q", **y), color=colour, opacity=strong),
        hover.encode(x=x, opacity=_opacity(here, 0.25, 0.0), tooltip=tips[:40], color=alt.ColorValue(style.INK))
        .properties(name=f"rules_{axes.mark}")
        .add_params(here),
    ]


def draw(panel: Panel, data: pd.DataFrame, axes: Axes, title: Any, extra: list[alt.Chart]) -> Any:
    """The layered chart of `data` (from `series.frame`, and a column `lost`), over the layers `extra`."""
    last = panel.onset + sum(panel.durations) if not len(data) else float(data["step"].max()) + 1
    layers = [*_window(panel, axes, last), *extra, *_layers(panel, axes)]
    return alt.layer(*layers, data=style.table(data)).properties(width=300, height=190, title=title)
