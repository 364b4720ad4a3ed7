"""A process that draws: run as a script, so that it imports nothing of jaxaudit.

V8, which runs Vega, ends its process where memory is short. Here that is not the process of a run.

Reads one JSON object a line from stdin, and writes files to the folder that it is given: NAME.svg and NAME.png for
`{"file": NAME, "spec": SPEC}`, and a script of Vega, Vega-Lite and Vega-Embed for `{"bundle": NAME}`.
"""

import json
import signal
import sys
from pathlib import Path

import vl_convert

VEGA_LITE = "6.4"


def main(folder: Path) -> None:
    """Draws what each line of stdin asks for into a folder, until stdin is closed."""
    for line in sys.stdin:
        asked = json.loads(line)
        if "bundle" in asked:
            script = vl_convert.javascript_bundle(vl_version=VEGA_LITE)  # type: ignore[call-arg]
            (folder / asked["bundle"]).write_text(script, encoding="utf-8")
        else:
            svg = vl_convert.vegalite_to_svg(asked["spec"], vl_version=VEGA_LITE, allowed_base_urls=[])
            (folder / f"{asked['file']}.svg").write_text(svg, encoding="utf-8")
            (folder / f"{asked['file']}.png").write_bytes(vl_convert.svg_to_png(svg, scale=2))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that waits for this one
    main(Path(sys.argv[1]))
