"""The files of a report: figures as SVG and PNG, and one self-contained HTML page."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jinja2
import vl_convert
from markupsafe import Markup

from jaxaudit.report import style
from jaxaudit.report.panel import Figure

VEGA_LITE = "6.4"


def write_figures(folder: Path, figures: Iterable[Figure]) -> None:
    """Write every figure as `folder/*.svg` and `*.png`."""
    folder.mkdir(exist_ok=True)
    for figure in figures:
        svg = vl_convert.vegalite_to_svg(
            style.static(figure.spec, figure.title), vl_version=VEGA_LITE, allowed_base_urls=[]
        )
        (folder / f"{figure.file}.svg").write_text(svg, encoding="utf-8")
        (folder / f"{figure.file}.png").write_bytes(vl_convert.svg_to_png(svg, scale=2))


def write_page(page: Path, template: str, **context: Any) -> Path:
    """Fill a template and put the result in the page's place at once; the page's path."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    text = environment.get_template(template).render(bundle=_bundle(), **context)
    partial = page.with_suffix(".html.part")
    partial.write_text(text, encoding="utf-8")
    partial.replace(page)
    return page


@functools.cache
def _bundle() -> Markup:
    """Vega, Vega-Lite and Vega-Embed in one script, safe inside a script element."""
    script = vl_convert.javascript_bundle(vl_version=VEGA_LITE)  # type: ignore[call-arg]
    return Markup(script.replace("</script", "<\\/script"))
