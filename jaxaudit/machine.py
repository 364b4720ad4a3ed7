"""The machine jaxaudit runs on."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import os
import platform
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def collect_garbage_seldom() -> None:
    """For a process that traces: what tracing makes lives on, and going through it takes a fifth of tracing's time."""
    gc.set_threshold(100_000, 50, 100)


def processor() -> str:
    """The processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def has_cuda_plugin() -> bool:
    """Whether JAX was installed with CUDA."""
    return any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))


def caches() -> Path:
    """The folder of what is worth keeping between runs and can be made again."""
    try:
        place = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # nobody's home
        place = Path(tempfile.gettempdir())
    return place / "jaxaudit"


CACHE = "JAXAUDIT_CACHE"
"""Environment variable: "off", and what is compiled is not kept for the next process."""


def program_cache() -> Path:
    """The folder of compiled programs, one for every kind of processor: a home may be shared by machines."""
    kind = processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        kind += next((line for line in lines if line.startswith("flags")), "")
    return caches() / f"xla-{zlib.crc32(kind.encode()):08x}"


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A place to write a file or folder to, which is at `path` at once when all is written, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".part-") as place:
        part = Path(place) / path.name
        yield part
        with contextlib.suppress(OSError):  # another process was first
            part.rename(path)


def resident() -> int:
    """Bytes of memory this process holds; zero where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def give_back(generation: int = 2) -> None:
    """Frees what nothing but a circle refers to, and gives the system back what is free.

    Libraries that compile, read and write in many threads leave it all over. `generation`: of the garbage collector;
    1 passes over what has lived long, which takes a third of a second in a process that has traced programs.
    """
    gc.collect(generation)
    with contextlib.suppress(OSError, AttributeError):  # not the GNU C library
        ctypes.CDLL(None).malloc_trim(0)
