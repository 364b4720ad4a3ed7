"""XLA programs: compiled side by side, and kept between processes."""

from __future__ import annotations

import functools
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxaudit.runtime.machine import CACHE, cores, program_cache

SIDE_BY_SIDE = 4
"""The most programs that compile at a time, on as many cores."""


def compiling(lowered: jax.stages.Lowered) -> Future[jax.stages.Compiled]:
    """Compiles a program in a thread of its own; Ctrl-C does not wait for it."""
    _kept.enter()

    def compiled() -> jax.stages.Compiled:
        try:
            return lowered.compile()
        finally:  # before anyone has the program: what the caller compiles next is not kept
            _kept.leave()

    return _threads().submit(compiled)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(cores(), SIDE_BY_SIDE), "jaxaudit-compile")


class _Kept:
    """While programs compile, JAX's cache of compiled programs, unless the caller has a say in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._ours: str | None = None

    def enter(self) -> None:
        with self._lock:
            self._inside += 1
            if not self._ours and self._free():
                self._ours = str(program_cache())
                self._switch(self._ours)

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._ours and not self._inside:
                config: Any = jax.config
                if config.jax_compilation_cache_dir == self._ours:  # or the caller has chosen one meanwhile
                    self._switch(None)
                self._ours = None

    def _free(self) -> bool:
        config: Any = jax.config
        chosen = config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache
        return not chosen and os.environ.get(CACHE) != "off"

    def _switch(self, place: str | None) -> None:
        jax.config.update("jax_compilation_cache_dir", place)
        compilation_cache.reset_cache()


_kept = _Kept()
