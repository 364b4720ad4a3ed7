"""The machine and the installation that jaxaudit runs on: cores, memory, caches, and what an environment.json says."""

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
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxaudit.runtime.errors import UserError
from jaxaudit.runtime.files import UNFINISHED, read_object

PACKAGE = Path(__file__).parents[1]
KERNELS = PACKAGE.parent / "kernels"


class KernelsFinder:
    """Finds `jaxaudit.kernels` in the folder `kernels` of a source tree, and no other module.

    An installer maps that folder to `jaxaudit.kernels` as `pyproject.toml` says; a source tree on the path has no
    such mapping. The name `kernels` is not found through it, since it may belong to another package.
    """

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the specification of `jaxaudit.kernels`, None for other names."""
        if name != "jaxaudit.kernels":
            return None
        return importlib.util.spec_from_file_location(
            name, KERNELS / "__init__.py", submodule_search_locations=[str(KERNELS)]
        )


def install_kernels_finder() -> None:
    """Makes `jaxaudit.kernels` importable from a source tree that is not installed.

    The finder is appended to the others, so that the one of an editable installation comes first.
    """
    in_place = (PACKAGE / "kernels").is_dir()
    if not in_place and (KERNELS / "__init__.py").is_file() and KernelsFinder not in sys.meta_path:
        sys.meta_path.append(KernelsFinder)


def installed_version() -> str:
    """Returns the version of the installed package, or "VERSION (source tree)" if it is not installed."""
    try:
        return metadata.version("jaxaudit")
    except metadata.PackageNotFoundError:
        from jaxaudit import __version__

        return f"{__version__} (source tree)"


_ENVIRONMENT_TYPES: dict[str, Any] = {
    **dict.fromkeys(("jaxaudit", "python", "platform", "cpu", "device_kind", "precision", "byteorder", "status"), str),
    **dict.fromkeys(("forked_from", "sample", "matmul_precision"), str),
    **dict.fromkeys(("packages", "flags", "provenance", "lane_layout", "measured", "resumed_with"), dict),
    **dict.fromkeys(("devices", "model_devices", "chunks_done"), int),
    **dict.fromkeys(("wall_seconds", "compile_seconds", "samples"), int | float),
    **dict.fromkeys(("gathered", "remarks"), list),
}
"""The keys of an environment.json that are checked when it is read, with the types of their values."""


def read_environment(path: Path) -> dict[str, Any]:
    """Reads the environment.json of a run, which says what it was trained with; returns {} if there is no such file.

    Raises:
      UserError: the file is damaged, or a key that `jaxaudit` writes has a value of another type.
    """
    try:
        environment = read_object(path)
    except FileNotFoundError:
        return {}
    for name, kind in _ENVIRONMENT_TYPES.items():
        value = environment.get(name)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise UserError(f"{path} is damaged: {name} is {str(value)[:60]!r}")
    if not all(type(batch) is int for batch in environment.get("gathered") or ()):
        raise UserError(f"{path} is damaged: gathered is not a list of batches")
    execution = (environment.get("lane_layout") or {}).get("execution", "vmap")
    if execution not in ("auto", "vmap", "map") and not (type(execution) is int and execution > 0):
        raise UserError(
            f"{path} is damaged: execution must be 'auto', 'vmap', 'map' or a positive integer, "
            f"not {str(execution)[:60]!r}"
        )
    return environment


def core_count() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_claimed_cores: list[socket.socket] = []
"""The sockets with which this process claims its cores until it ends."""


def claim_cores(count: int) -> None:
    """Restricts this process to `count` cores, on which the results of XLA's sums depend; to call before JAX's import.

    Processes that call this take different cores as far as there are enough: each claims its cores by abstract sockets
    of Linux, which end with it. Nothing is done on other systems, or if no more than `count` cores are allowed.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) <= count:
        return
    free = [core for core in allowed if len(_claimed_cores) < count and _claim_core(core)]
    os.sched_setaffinity(0, (free + [core for core in allowed if core not in free])[:count])


def _claim_core(core: int) -> bool:
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0jaxaudit-core-{core}")
    except OSError:
        claim.close()
        return False
    _claimed_cores.append(claim)
    return True


def planned_threads(folder: Path) -> int | None:
    """Returns the number of cores that the run in a folder was planned for; None if its plan cannot be read."""
    try:
        return int(read_object(folder / "plan.json")["threads"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def recorded_platform(environment: Mapping[str, Any]) -> str:
    """Returns "cpu" or "gpu", the kind of device that an environment.json names; "" if it names none."""
    kind = environment.get("device_kind")
    return "" if kind is None else "cpu" if kind == "cpu" else "gpu"


def use_cpu_only() -> None:
    """Makes JAX use CPUs alone in a process that leaves the accelerators to its workers."""
    import jax

    with contextlib.suppress(RuntimeError):  # a backend is initialised already
        jax.config.update("jax_platforms", "cpu")


def prepare_jax() -> None:
    """Configures JAX with one CPU device for each core and a persistent compilation cache.

    Environment variables that set the same take precedence. With CUDA, operations are made deterministic, which exact
    replay requires.
    """
    import jax

    flags = os.environ.get("XLA_FLAGS", "")
    if has_cuda_plugin() and "xla_gpu_deterministic_ops" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_deterministic_ops=true".strip()
    if "xla_force_host_platform_device_count" not in flags and "JAX_NUM_CPU_DEVICES" not in os.environ:
        with contextlib.suppress(RuntimeError):  # a backend is initialised already
            jax.config.update("jax_num_cpu_devices", core_count())
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ and os.environ.get(CACHE_VARIABLE) != "off":
        jax.config.update("jax_compilation_cache_dir", str(compilation_cache_folder()))


@functools.cache
def collect_garbage_rarely() -> None:
    """Lets the garbage collector run less often, and not at all when the process ends.

    The objects that tracing creates stay alive, and inspecting them takes a fifth of the time of tracing. Collecting
    all imported modules at exit takes half a second of 3 in a short process.
    """
    gc.set_threshold(100_000, 50, 100)
    atexit.register(gc.freeze)  # runs after the handlers that imports register later


def processor_name() -> str:
    """Returns the name of the processor, as the operating system reports it."""
    return _cpuinfo("model name").partition(":")[2].strip() or platform.processor() or platform.machine()


def _cpuinfo(field: str) -> str:
    """Returns the first line of /proc/cpuinfo that starts with a field's name, "" if there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(field)), "")


def has_cuda_plugin() -> bool:
    """Returns whether JAX was installed with CUDA."""
    return any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))


def cache_folder() -> Path:
    """Returns the folder of files that can be created again and are kept between processes."""
    try:
        parent = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # the user has no home folder
        parent = Path(tempfile.gettempdir())
    return parent / "jaxaudit"


CACHE_VARIABLE = "JAXAUDIT_CACHE"
"""The environment variable whose value "off" keeps compiled programs from being stored for later processes."""


def compilation_cache_folder() -> Path:
    """Returns the folder of compiled programs for this kind of processor; machines may share a home folder."""
    kind = processor_name() + _cpuinfo("flags")
    return cache_folder() / f"xla-{zlib.crc32(kind.encode()):08x}"


@contextlib.contextmanager
def atomic_output(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write a file or folder to, which is renamed to `path` if the block succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=UNFINISHED) as temporary:
        output = Path(temporary) / path.name
        yield output
        with contextlib.suppress(OSError):  # another process was first
            output.rename(path)


CGROUPS = Path("/sys/fs/cgroup")


def available_host_memory() -> int:
    """Returns the bytes of host memory that this process can still allocate within the limits of its control groups."""
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":") for line in file)
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([free, *_cgroup_limits()])


def _cgroup_limits() -> Iterator[int]:
    """Yields the bytes left in each control group (version 2) of this process; cached pages of files count as free."""
    try:
        entries = Path("/proc/self/cgroup").read_text().split()
    except OSError:
        return
    group = next((entry.removeprefix("0::/") for entry in entries if entry.startswith("0::/")), None)
    for folder in () if group is None else [CGROUPS / group, *(CGROUPS / group).parents]:
        try:
            limit, used = ((folder / f"memory.{name}").read_text().strip() for name in ("max", "current"))
            fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            yield int(limit) - int(used) + int(fields["inactive_file"]) + int(fields["active_file"])
        except (OSError, KeyError, ValueError):  # the root has no such files, and "max" means no limit
            continue


def format_bytes(size: float) -> str:
    """Returns a number of bytes with a unit from B to TiB, to four digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1000:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def resident_memory() -> int:
    """Returns the bytes of this process's resident memory; 0 on systems without /proc."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def memory_map_share() -> float:
    """Returns the share of the memory maps that Linux allows a process which this process has; 0 on other systems.

    Every compiled program has thousands of maps, and the default limit (`vm.max_map_count`) is 65,530.
    """
    try:
        with open("/proc/self/maps", "rb") as maps:
            count = sum(1 for _ in maps)
        return count / int(Path("/proc/sys/vm/max_map_count").read_text())
    except OSError:
        return 0.0


def release_memory(generation: int = 2) -> None:
    """Collects garbage and returns free memory, which libraries with many threads fragment, to the operating system.

    Args:
      generation: the oldest generation to collect; 1 leaves out old objects, which saves a third of a second in a
        process that has traced programs.
    """
    gc.collect(generation)
    with contextlib.suppress(OSError, AttributeError):  # not the GNU C library
        ctypes.CDLL(None).malloc_trim(0)
