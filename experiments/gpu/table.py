"""The table of a measurement, with a line for every result and its target; `python table.py FOLDER` prints it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

TARGETS: dict[tuple[str, int | None], float] = {
    ("GPT-2 124m, bfloat16, training step", 1): 200e3,
    ("GRPO on hop, 0.1M", 1024): 5_000,
    ("PPO on HalfCheetah, MJX, Table S2", 1024): 250e3,
    ("PPO on HalfCheetah, MJX, 2,048 environments a lane", 16): 0.8e6,
    ("quadratic", 100_000): 5e8,
}
"""Minimal rates on an H100, by the name of the result and the number of lanes."""

RATIOS = (
    ("GPT-2 124m, bfloat16, training step", 1, "PyTorch GPT-2, sdpa, bfloat16", 0.9),
    ("GPT-2 124m, float32, training step", 1, "PyTorch GPT-2, sdpa, float32", 1.0),
    ("GRPO on hop, 0.1M", 1024, "TRL GRPO, 0.1M", 300.0),
)
"""The name of a result, the number of lanes, the result it is compared with on the same machine, the minimal ratio."""

LEFT_OUT = (
    "what",
    "part",
    "second",
    "beside",
    "rate",
    "unit",
    "lanes",
    "seconds",
    "steps",
    "channels",
    "bytes_limit",
    "bytes_in_use",
)


def markdown(figures: Iterable[Mapping[str, Any]]) -> str:
    """Returns a Markdown table of the results in their order, and of the ratios that have a target."""
    figures = [figure for figure in figures if figure["what"] != "done"]
    lines = ["| s | part | what | lanes | rate | target | besides |", "|---|---|---|---|---|---|---|"]
    lines += [_line(figure) for figure in figures]
    lines += [f"| | | {words} | | | | |" for words in [*_ratios(figures), *_digests(figures)]]
    return "\n".join(lines)


def _line(figure: Mapping[str, Any]) -> str:
    rate = f"{short(figure['rate'])} {figure['unit']}" if "rate" in figure else ""
    target = TARGETS.get((figure["what"], figure.get("lanes")))
    besides = ", ".join(f"{name} {short(value)}" for name, value in figure.items() if _is_shown(name, value))
    if figure.get("beside"):
        besides += f", beside {len(figure['beside'])} others"
    cells = (figure["second"], figure["part"], figure["what"], figure.get("lanes", ""), rate)
    return "| " + " | ".join(map(str, (*cells, "" if target is None else short(target), besides[:300]))) + " |"


def _is_shown(name: str, value: Any) -> bool:
    return name not in LEFT_OUT and value not in (None, [], {})


def short(value: Any) -> str:
    """Formats a value in few characters."""
    if isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and value > 99_999):
        return f"{value:.4g}" if value == 0 or not 1e3 <= abs(value) < 1e6 else f"{value:,.0f}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {short(part)}" for name, part in value.items()) + "}"
    if isinstance(value, list):
        return "; ".join(short(part) for part in value)
    return str(value).replace("|", "/").replace("\n", " ")


def _ratios(figures: list[Mapping[str, Any]]) -> list[str]:
    lines = []
    for what, lanes, baseline, target in RATIOS:
        below = [f["rate"] for f in figures if f["what"] == baseline and "rate" in f]
        for figure in figures:
            if below and figure["what"] == what and figure.get("lanes") == lanes and "rate" in figure:
                ratio = figure["rate"] / below[-1]
                lines.append(f"{figure['part']}: {what}, {lanes} lanes / {baseline}: {short(ratio)}; target {target:g}")
    return lines


def _digests(figures: list[Mapping[str, Any]]) -> list[str]:
    """Returns lines on whether processes with equal flags have the same bits."""
    by_part = {(f["what"], f["part"]): f["digest"] for f in figures if "digest" in f}
    return [
        f"{what}: another process has {'the same' if digest == by_part[what, 'bits_again'] else 'OTHER'} bits"
        for (what, part), digest in by_part.items()
        if part == "bits" and (what, "bits_again") in by_part
    ]


if __name__ == "__main__":
    print(markdown(json.loads(line) for line in (Path(sys.argv[1]) / "figures.jsonl").read_text().splitlines()))
