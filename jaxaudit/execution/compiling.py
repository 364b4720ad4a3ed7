"""XLA programs: compiled side by side, and kept between processes."""

from __future__ import annotations

import functools
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxaudit.machine import cores, program_cache

CACHE = "JAXAUDIT_CACHE"
"""Environment variable: "off", and what is compiled for a caller is not kept for the next process."""

SIDE_BY_SIDE = 4
"""The most programs that compile at a time, on as many cores."""


def compiling(lowered: jax.stages.Lowered) -> Future[jax.stages.Compiled]:
    """Compiles a program in a thread of its own; Ctrl-C does not wait for it."""
    _kept.enter()
    compiled = _threads().submit(lowered.compile)
    compiled.add_done_callback(lambda _: _kept.leave())
    return compiled


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(cores(), SIDE_BY_SIDE), "jaxaudit-compile")


class _Kept:
    """While programs compile, JAX's cache of compiled programs, unless the caller has a say in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._ours = False

    def enter(self) -> None:
        with self._lock:
            self._inside += 1
            if not self._ours and self._free():
                self._ours = True
                self._switch(str(program_cache()))

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._ours and not self._inside:
                self._ours = False
                self._switch(None)

    def _free(self) -> bool:
        config: Any = jax.config
        chosen = config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache
        return not chosen and os.environ.get(CACHE) != "off"

    def _switch(self, place: str | None) -> None:
        jax.config.update("jax_compilation_cache_dir", place)
        compilation_cache.reset_cache()


_kept = _Kept()
