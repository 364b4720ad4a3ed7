"""What a worker does: a call, on its own cores, that ends with a value or one sentence."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import traceback
from typing import Any

from jaxaudit.runtime.errors import TRACEBACK, explain
from jaxaudit.runtime.interrupts import interruptible
from jaxaudit.runtime.machine import collect_garbage_seldom, occupy, prepare_jax


def perform(call: str, arguments: dict[str, Any], cpus: int, folder: str) -> dict[str, Any]:
    """Calls a function by its name, `module:function`, with so many cores; gives the fields of an `Ended`.

    JAX is made ready before the function's module is imported.

    Args:
      call: the function.
      arguments: by name.
      cpus: cores; see `jaxaudit.runtime.machine.occupy`.
      folder: where relative paths begin.
    """
    occupy(cpus)
    os.chdir(folder)
    collect_garbage_seldom()
    prepare_jax()
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            value = interruptible(lambda: _called(call, arguments))
    except Exception as error:
        code, sentence = explain(error)
        if code == 1 and os.environ.get(TRACEBACK):
            said.write(traceback.format_exc())
        return {"error": sentence, "code": code, "said": said.getvalue()}
    except SystemExit as asked:  # by submitit, to be queued again; a computation still running is not waited for
        os._exit(int(asked.code or 0))
    return {"value": value, "said": said.getvalue()}


def _called(call: str, arguments: dict[str, Any]) -> Any:
    module, _, function = call.partition(":")
    return getattr(importlib.import_module(module), function)(**arguments)
