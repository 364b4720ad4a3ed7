"""A calculator's annotations in answers, as GSM8K has them (Cobbe et al., 2021): "3*7 = <<3*7=21>>21"."""

from __future__ import annotations

import re

from jaxaudit.dialogues import tool_syntax

ANNOTATION = re.compile(r"<<([^<>=]*)=[^<>]*>>")


def left_out(text: str, tool: bool) -> str:
    """A text without its annotations; with the tool, those that it calculates are calls: "3*7 = <<3*7>>21".

    One that the tool cannot calculate, or whose result is not what follows, is left out there too.
    """
    return ANNOTATION.sub(lambda found: _call(found) if tool else "", text)


def _call(found: re.Match[str]) -> str:
    """The call that an annotation is, or nothing."""
    call = f"<<{found[1]}>>"
    result, behind = tool_syntax.evaluated(call.encode()), found.string[found.end() :]
    follows = result is not None and re.match(rf"{result}(?!\d)", behind) is not None
    return call if follows else ""
