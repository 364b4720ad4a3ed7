"""The script of the process that draws figures; it imports nothing from jaxaudit.

V8, which runs Vega, aborts its process if memory runs out, and this keeps the process of a run alive.

The script reads one JSON object per line from stdin, and writes files to the folder that is its argument: NAME.svg and
NAME.png for `{"file": NAME, "spec": SPEC}`, and one script with Vega, Vega-Lite and Vega-Embed for `{"bundle": NAME}`.
"""

import json
import signal
import sys
from pathlib import Path

import vl_convert

VEGA_LITE = "6.4"


def main(folder: Path) -> None:
    """Writes what each line of stdin requests into a folder, until stdin is closed."""
    for line in sys.stdin:
        request = json.loads(line)
        if "bundle" in request:
            script = vl_convert.javascript_bundle(vl_version=VEGA_LITE)  # type: ignore[call-arg]
            (folder / request["bundle"]).write_text(script, encoding="utf-8")
        else:
            svg = vl_convert.vegalite_to_svg(request["spec"], vl_version=VEGA_LITE, allowed_base_urls=[])
            (folder / f"{request['file']}.svg").write_text(svg, encoding="utf-8")
            (folder / f"{request['file']}.png").write_bytes(vl_convert.svg_to_png(svg, scale=2))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the process that waits for this one
    main(Path(sys.argv[1]))
