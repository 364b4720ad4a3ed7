"""Checkpoints of lanes' states: Orbax underneath, checked against a digest, complete or absent.

A checkpoint appears under its name by one rename, after its digest was written; what a killed process left
behind is not a checkpoint. Reading verifies the digest, so a damaged one is found before it is used; files that are as
they were when this process last read them are not read for it again. A folder inside holds some lanes, so that no more
than these are in memory at once.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore
from orbax.checkpoint import v1 as ocp

from jaxaudit.core.grid import MOST_LANES
from jaxaudit.execution.engine import ProgramPiece
from jaxaudit.runtime import hosts
from jaxaudit.runtime.files import UNFINISHED, read_object
from jaxaudit.runtime.machine import available_host_memory, format_bytes, release_memory

FILE_CHUNK = 2**26
"""Bytes of an array that are read or written at once; large enough that malloc has the system clear them away."""

FOLDER_OVERHEAD_BYTES, ARRAY_OVERHEAD_BYTES = 2**18, 2**10
"""Bytes that a checkpoint takes besides its arrays, and besides each of them: more than ever seen."""

TIMESTAMP_RESOLUTION_NS = 50_000_000
"""Nanoseconds in which a file may be changed twice and tell the same time of its change."""

DIGEST = "digest.json"


class Damaged(Exception):
    """A checkpoint whose files are not what was written."""


def save(path: Path, pieces: Iterable[ProgramPiece], note: dict[str, Any]) -> None:
    """Writes lanes' states, and a JSON-able note beside them, under `path`; replaces what was there.

    Of several processes each writes what its devices hold, and the first what goes with it.

    Raises:
      OSError: the disk is full or not writable; what was at `path` is then still there.
    """
    unfinished = path.with_name(f"{UNFINISHED}{path.name}")
    content: dict[str, Any] = {"note": note, "leaves": [], "pieces": []}
    try:
        if hosts.is_leader():
            _clear(unfinished)
            unfinished.mkdir()
        hosts.broadcast()
        with _orbax_context():
            for piece in pieces:
                if hosts.is_leader():
                    _reserve(unfinished / "room", jax.tree.leaves(piece.states))
                ocp.save(unfinished / _piece_name(piece.first), piece.states)
                content["leaves"] = _shapes_and_dtypes(piece.states)
                content["pieces"].append([piece.first, piece.lanes])
                large = piece.large
                del piece
                if large:
                    release_memory(1)
        if hosts.is_leader():
            content["files"] = _file_digests(unfinished)
            (unfinished / DIGEST).write_text(json.dumps(content | {"digest": _json_digest(content)}, indent=1))
    except OSError:
        _clear(unfinished)
        raise
    except Exception as error:  # Orbax reports a full disk through errors of TensorStore's own
        _clear(unfinished)
        raise OSError(f"could not write checkpoint {path}: {str(error).splitlines()[0]}") from error
    if hosts.is_leader():
        remove(path)
        unfinished.rename(path)
    hosts.broadcast()


def remove(path: Path) -> None:
    """Removes a checkpoint: it is there or it is not, never in part."""
    if path.exists():
        aside = path.with_name(f"{UNFINISHED}removed-{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def load(path: Path, like: Any, wanted: Container[int] | None = None) -> Iterator[ProgramPiece]:
    """The states under `path`, a piece at a time; only pieces with `wanted` lanes if these are given.

    `like` gives the structure, shapes and dtypes of one lane's state.

    Raises:
      Damaged: files are missing or changed, or hold another structure; before the first piece.
    """
    content = _read_verified(path)
    if content["leaves"] != json.loads(json.dumps(_shapes_and_dtypes(_templates(like, 1)))):
        raise Damaged(f"checkpoint {path} holds another learner's state")
    pieces = _pieces(path, content)
    lane = sum(leaf.nbytes for leaf in jax.tree.leaves(_templates(like, 1)))
    if (size := lane * max(count for _, count in pieces)) > (free := available_host_memory()):
        raise Damaged(f"checkpoint {path} needs {format_bytes(size)} in memory, and {format_bytes(free)} are available")
    chosen = [(a, n) for a, n in pieces if wanted is None or any(i in wanted for i in range(a, a + n))]
    return (ProgramPiece(first, count, _read(path / _piece_name(first), like, count)) for first, count in chosen)


def lanes(path: Path) -> set[int]:
    """The numbers of the lanes under `path`, without a look at their states; raises `Damaged` if it cannot be told."""
    return {first + i for first, count in _pieces(path, _read_digest_file(path)) for i in range(count)}


def _pieces(path: Path, content: dict[str, Any]) -> list[tuple[int, int]]:
    """The first lane and the number of lanes of every piece of a checkpoint. Raises `Damaged`."""
    try:
        pieces = [(first, count) for first, count in content["pieces"]]
    except (KeyError, TypeError, ValueError):
        raise Damaged(f"checkpoint {path} is damaged") from None
    numbers = [number for piece in pieces for number in piece]
    if (
        not pieces
        or not all(type(number) is int and number >= 0 for number in numbers)
        or min(count for _, count in pieces) < 1
        or sum(count for _, count in pieces) > MOST_LANES
    ):
        raise Damaged(f"checkpoint {path} is damaged")
    return pieces


def verify(path: Path) -> dict[str, Any]:
    """The note of an undamaged checkpoint; raises `Damaged` otherwise."""
    return _read_verified(path)["note"]


def _read_verified(path: Path) -> dict[str, Any]:
    content = _read_digest_file(path)
    try:
        if content.pop("digest") == _json_digest(content) and content["files"] == _file_digests(path):
            content["note"], content["leaves"]
            return content
    except (OSError, KeyError, RecursionError):
        pass
    raise Damaged(f"checkpoint {path} is damaged")


def _read_digest_file(path: Path) -> dict[str, Any]:
    try:
        content = read_object(path / DIGEST)
    except (OSError, ValueError):
        content = None
    if not isinstance(content, dict):
        raise Damaged(f"checkpoint {path} is {'damaged' if path.exists() else 'missing'}")
    return content


def _clear(unfinished: Path) -> None:
    """Removes what a failed or killed save left: the folder, and Orbax's own beside it.

    A name that only begins alike, `onset-00000010-0001` beside `onset-00000010`, is another process's at this moment.
    """
    for path in (unfinished, *unfinished.parent.glob(f"{unfinished.name}.*")):
        shutil.rmtree(path, ignore_errors=True)


def _reserve(path: Path, leaves: Sequence[Any]) -> None:
    """Raises OSError where there is no room for these arrays.

    Orbax would write until there is none, and its threads speak of it on stderr when it has raised.
    """
    if not hasattr(os, "posix_fallocate"):
        return
    size = sum(x.nbytes for x in leaves) + FOLDER_OVERHEAD_BYTES + ARRAY_OVERHEAD_BYTES * len(leaves)
    try:
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):  # and not a file system that cannot reserve
            raise
    path.unlink()


def _json_digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _file_digests(folder: Path) -> dict[str, str]:
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != DIGEST)
    digests = {}
    for path in files:
        state = path.stat()
        settled = time.time_ns() - state.st_mtime_ns > TIMESTAMP_RESOLUTION_NS
        digest_of = _file_digest if settled else _file_digest.__wrapped__
        digests[str(path.relative_to(folder))] = digest_of(path, state.st_ino, state.st_size, state.st_mtime_ns)
    return digests


@functools.lru_cache(maxsize=4096)
def _file_digest(path: Path, inode: int, size: int, changed: int) -> str:
    """The digest of a file, whose state tells it from what was there before."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _piece_name(first: int) -> str:
    return f"lanes-{first:06d}"


def _shapes_and_dtypes(arrays: Any) -> list:
    return [[list(x.shape[1:]), str(x.dtype)] for x in jax.tree.leaves(arrays)]


def _templates(like: Any, count: int) -> Any:
    return jax.tree.map(lambda x: np.empty((count, *x.shape), x.dtype), like)


def _read(path: Path, like: Any, count: int) -> Any:
    _ignore_reports_to_closed_loops()
    try:
        for manifest in path.glob("*/manifest.ocdbt"):  # here one error is one error, in Orbax one for each array
            store = tensorstore.KvStore.open(
                {"driver": "ocdbt", "base": {"driver": "file", "path": f"{manifest.parent}/"}}
            )
            store.result().list().result()
        with _without_warnings():
            metadata = ocp.metadata(path).metadata
        stored = sorted(tuple(leaf.shape) for leaf in jax.tree.leaves(metadata))
        if stored != sorted((count, *leaf.shape) for leaf in jax.tree.leaves(like)):  # Orbax would fill up or cut off
            raise ValueError("arrays have other shapes")
        with _orbax_context():
            return ocp.load(path, _templates(like, count))
    except (OSError, MemoryError):
        raise
    except Exception as error:  # Orbax reports what TensorStore says of files that are not what it wrote
        raise Damaged(f"checkpoint {path} is damaged ({type(error).__name__})") from error


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Keeps Orbax's warnings off the terminal: what it warns of here is refused in a sentence."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@functools.cache
def _ignore_reports_to_closed_loops() -> None:
    """Keeps the tracebacks of TensorStore's threads out of what a user reads.

    Orbax reads all arrays of a checkpoint concurrently and closes its event loop at the first error. Each read that
    ends later finds the loop closed, which Python passes to `sys.unraisablehook` since nobody is there to catch it.
    """
    before = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            before(unraisable)

    sys.unraisablehook = hook


def _orbax_context() -> ocp.Context:
    """Orbax without copies of whole arrays: states stay as they are until they are written. Floats hardly compress."""
    context = ocp.Context()
    context.array.saving.use_compression = False
    context.array.saving.storage_options.chunk_byte_size = FILE_CHUNK
    context.memory.deepcopy_host_arrays = False
    return context
