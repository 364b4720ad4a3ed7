"""What jaxaudit asks of the machine it runs on: cores, memory, devices."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib.util
import os
import platform
import socket
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxaudit.runtime.errors import UserError
from jaxaudit.runtime.files import UNFINISHED, read_object


import sys
from collections.abc import Sequence
from importlib import metadata
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).parents[1]
KERNELS = PACKAGE.parent / "kernels"


class KernelsFinder:
    """Finds `jaxaudit.kernels` in a source tree's folder `kernels`, and nothing else.

    Nothing is found under the name `kernels` through it, which belongs to another package.
    """

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The specification of `jaxaudit.kernels`; its modules are found through it as usual. None for other names."""
        if name != "jaxaudit.kernels":
            return None
        return spec_from_file_location(name, KERNELS / "__init__.py", submodule_search_locations=[str(KERNELS)])


def find_kernels() -> None:
    """Lets `jaxaudit.kernels` be imported from a source tree; an installed package is left as it is.

    The finder is the last to be asked, so that an editable installation's own comes first.
    """
    in_place = (PACKAGE / "kernels").is_dir()
    if not in_place and (KERNELS / "__init__.py").is_file() and KernelsFinder not in sys.meta_path:
        sys.meta_path.append(KernelsFinder)


def installed_version() -> str:
    """The version of the installed package; of a source tree that is not installed its own, and that it is one."""
    try:
        return metadata.version("jaxaudit")
    except metadata.PackageNotFoundError:
        from jaxaudit import __version__

        return f"{__version__} (source tree)"


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


def cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_claims: list[socket.socket] = []
"""Of cores, for as long as this process lives."""


def occupy(count: int) -> None:
    """Keeps this process to so many cores: XLA's sums depend on how many it has. Before JAX is imported.

    Processes that do so take different ones, as far as there are enough: each claims its cores by names that live and
    die with it (abstract sockets of Linux). On other systems, and where no more are allowed, nothing is done.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) <= count:
        return
    free = [core for core in allowed if len(_claims) < count and _claimed(core)]
    os.sched_setaffinity(0, (free + [core for core in allowed if core not in free])[:count])


def _claimed(core: int) -> bool:
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0jaxaudit-core-{core}")
    except OSError:
        claim.close()
        return False
    _claims.append(claim)
    return True


def planned_threads(folder: Path) -> int | None:
    """How many cores the run in a folder was planned for; None where nobody knows."""
    try:
        return int(read_object(folder / "plan.json")["threads"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def platform_of(environment: Mapping[str, Any]) -> str:
    """Whether a run's environment.json tells of CPUs, "cpu", or of an accelerator, "gpu"; "" where it does not tell."""
    kind = environment.get("device_kind")
    return "" if kind is None else "cpu" if kind == "cpu" else "gpu"


def use_cpus() -> None:
    """Leaves accelerators to the workers of a process that hands out work."""
    import jax

    with contextlib.suppress(RuntimeError):  # a backend is running already
        jax.config.update("jax_platforms", "cpu")


def prepare_jax() -> None:
    """One CPU device for each core and a lasting compilation cache, unless the environment says otherwise.

    With CUDA, operations are made deterministic: exact replay needs it.
    """
    import jax

    flags = os.environ.get("XLA_FLAGS", "")
    if has_cuda_plugin() and "xla_gpu_deterministic_ops" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_deterministic_ops=true".strip()
    chosen = "xla_force_host_platform_device_count" in flags
    if not chosen and "JAX_NUM_CPU_DEVICES" not in os.environ:
        with contextlib.suppress(RuntimeError):  # a backend is running already
            jax.config.update("jax_num_cpu_devices", cores())
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ and os.environ.get(CACHE) != "off":
        jax.config.update("jax_compilation_cache_dir", str(program_cache()))


@functools.cache
def collect_garbage_seldom() -> None:
    """For a process that traces: what tracing makes lives on, and going through it takes a fifth of tracing's time.

    Nor does the process take apart all that it imported when it ends, which is half a second of 3.
    """
    gc.set_threshold(100_000, 50, 100)
    atexit.register(gc.freeze)  # registered before what imports register, it comes after that


def processor() -> str:
    """Returns the name of the processor, as the operating system has it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def has_cuda_plugin() -> bool:
    """Returns whether JAX was installed with CUDA."""
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
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=UNFINISHED) as place:
        part = Path(place) / path.name
        yield part
        with contextlib.suppress(OSError):  # another process was first
            part.rename(path)


CGROUPS = Path("/sys/fs/cgroup")


def host_memory() -> int:
    """Bytes of the host that can still be taken by this process and those it shares a limit with."""
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":") for line in file)
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([free, *_cgroup_limits()])


def _cgroup_limits() -> Iterator[int]:
    """What is left of the limits of this process's control groups (version 2); pages of files can be given back."""
    try:
        entries = Path("/proc/self/cgroup").read_text().split()
    except OSError:
        return
    own = next((entry.removeprefix("0::/") for entry in entries if entry.startswith("0::/")), None)
    for place in () if own is None else [CGROUPS / own, *(CGROUPS / own).parents]:
        try:
            limit, used = ((place / f"memory.{name}").read_text().strip() for name in ("max", "current"))
            fields = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
            yield int(limit) - int(used) + int(fields["inactive_file"]) + int(fields["active_file"])
        except (OSError, KeyError, ValueError):  # the root has no limit, and "max" is none
            continue


def readable(size: float) -> str:
    """Bytes in a unit one can read, to four digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1000:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


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
