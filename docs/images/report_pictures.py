"""Takes the pictures of report.md: parts of the report pages of two runs, as headless Chromium shows them.

jaxaudit run docs/images/report_cartpole.toml -o runs/cartpole
jaxaudit run docs/images/report_unstable.toml -o runs/unstable
python docs/images/report_pictures.py runs/cartpole runs/unstable      # takes pillow and a chromium on the path
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageChops

IMAGES = Path(__file__).resolve().parent
WIDTH, SCALE, MARGIN = 960, 1.5, 12

PARTS = {
    "verdict": ("header", 900),
    "curves": ("performance", 900),
    "map": ("map", 520),
    "dose": ("dose", 900),
    "channels": ("channels", 650),
    "metrics": ("metrics", 760),
    "glossary": ("glossary", 560),
}
"""The pictures: the part of the page, and the largest height in CSS pixels."""


def picture(page: Path, part: str, height: int, out: Path) -> None:
    """Writes one part of a page as a PNG picture of 128 colours, without the empty space around it."""
    text = page.read_text(encoding="utf-8")
    for name in ("header", "nav", "section", "footer"):
        text = re.sub(
            f"<{name}[ >].*?</{name}>",
            lambda found: found[0] if found[0].startswith((f"<{part}>", f'<section id="{part}">')) else "",
            text,
            flags=re.S,
        )
    with tempfile.TemporaryDirectory() as folder:
        copy, shot = Path(folder) / "page.html", Path(folder) / "shot.png"
        copy.write_text(text, encoding="utf-8")
        options = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking"
        options += f" --hide-scrollbars --virtual-time-budget=8000 --user-data-dir={folder}/profile"
        options += f" --force-device-scale-factor={SCALE} --window-size={WIDTH},{height} --screenshot={shot}"
        subprocess.run(["chromium", *options.split(), copy.as_uri()], check=True, capture_output=True, timeout=200)
        image = Image.open(shot).convert("RGB")
    background = Image.new("RGB", image.size, image.getpixel((0, 0)))
    left, top, right, bottom = ImageChops.difference(image, background).getbbox() or (0, 0, *image.size)
    image = image.crop(
        (max(left - MARGIN, 0), max(top - MARGIN, 0), right + MARGIN, min(bottom + MARGIN, image.height))
    )
    image.quantize(128).save(out, optimize=True)
    print(out.name, image.size, f"{out.stat().st_size / 1000:.0f} kB")


def main() -> None:
    """Takes all pictures."""
    cartpole, unstable = (Path(folder).resolve() / "report.html" for folder in sys.argv[1:3])
    for name, (part, height) in PARTS.items():
        picture(cartpole, part, height, IMAGES / f"report_{name}.png")
    picture(unstable, "header", 620, IMAGES / "report_controls.png")


if __name__ == "__main__":
    main()
