"""environment.json of a run: on what it was made, and how far it came."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxaudit.runtime.errors import UserError
from jaxaudit.runtime.files import read_object

_FACTS: dict[str, Any] = {
    **dict.fromkeys(("jaxaudit", "python", "platform", "cpu", "device_kind", "precision", "byteorder", "status"), str),
    **dict.fromkeys(("forked_from", "sample", "matmul_precision"), str),
    **dict.fromkeys(("packages", "flags", "provenance", "lane_layout", "measured", "resumed_with"), dict),
    **dict.fromkeys(("devices", "model_devices", "chunks_done"), int),
    **dict.fromkeys(("wall_seconds", "compile_seconds", "samples"), int | float),
    **dict.fromkeys(("gathered", "remarks"), list),
}
"""What environment.json says, and of which type that is."""


def read_environment(path: Path) -> dict[str, Any]:
    """What a run was made on, from its environment.json; empty if that was never written.

    Raises:
      UserError: it is damaged.
    """
    try:
        found = read_object(path)
    except FileNotFoundError:
        return {}
    for name, kind in _FACTS.items():
        value = found.get(name)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise UserError(f"{path} is damaged: {name} is {str(value)[:60]!r}")
    if not all(type(batch) is int for batch in found.get("gathered") or ()):
        raise UserError(f"{path} is damaged: gathered is not a list of batches")
    execution = (found.get("lane_layout") or {}).get("execution", "vmap")
    if execution not in ("auto", "vmap", "map") and not (type(execution) is int and execution > 0):
        raise UserError(f"{path} is damaged: lanes cannot run by {str(execution)[:60]!r}")
    return found
