"""Checkpoints of lanes' states, written by Orbax and verified by a digest.

A checkpoint is renamed to its path after its digest was written, so that it is complete or absent. Loading verifies
the digest, so that damage is detected before the states are used; files that have not changed since this process last
read them are not read again for it. Each folder inside a checkpoint holds some of the lanes, so that only these are in
memory at a time.
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
"""The bytes of an array that are read or written at a time; malloc returns blocks of this size to the system."""

FOLDER_OVERHEAD_BYTES, ARRAY_OVERHEAD_BYTES = 2**18, 2**10
"""The bytes that a checkpoint takes beyond its arrays, in total and for each array; both are upper bounds."""

TIMESTAMP_RESOLUTION_NS = 50_000_000
"""The nanoseconds within which two changes of a file may leave the same modification time."""

DIGEST = "digest.json"


class Damaged(Exception):
    """A checkpoint is missing, or its files are not as they were written."""


def save(path: Path, pieces: Iterable[ProgramPiece], note: dict[str, Any]) -> None:
    """Writes lanes' states and a note, which JSON can represent, to `path`, and replaces a checkpoint that is there.

    In a run of several processes each writes the states on its devices, and the leader writes the digest.

    Raises:
      OSError: the disk is full or not writable; an earlier checkpoint at `path` is then still there.
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
                    _check_space(unfinished / "room", jax.tree.leaves(piece.states))
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
    except Exception as error:  # Orbax passes on TensorStore's own errors, for example of a full disk
        _clear(unfinished)
        raise OSError(f"could not write checkpoint {path}: {str(error).splitlines()[0]}") from error
    if hosts.is_leader():
        remove(path)
        unfinished.rename(path)
    hosts.broadcast()


def remove(path: Path) -> None:
    """Removes a checkpoint, if there is one, so that it is never there in part."""
    if path.exists():
        renamed = path.with_name(f"{UNFINISHED}removed-{path.name}")
        shutil.rmtree(renamed, ignore_errors=True)
        path.rename(renamed)
        shutil.rmtree(renamed, ignore_errors=True)


def load(path: Path, like: Any, selected: Container[int] | None = None) -> Iterator[ProgramPiece]:
    """Returns an iterator over the pieces of a checkpoint, each with the states of some lanes.

    Args:
      path: the checkpoint.
      like: a tree with the structure, shapes and dtypes of one lane's state.
      selected: numbers of lanes; only pieces with one of them are read. None for all pieces.

    Raises:
      Damaged: files are missing or changed, or hold states of another structure; before the first piece is read.
    """
    content = _read_verified(path)
    if content["leaves"] != json.loads(json.dumps(_shapes_and_dtypes(_templates(like, 1)))):
        raise Damaged(f"checkpoint {path} holds another learner's state")
    pieces = _pieces(path, content)
    lane = sum(leaf.nbytes for leaf in jax.tree.leaves(_templates(like, 1)))
    if (size := lane * max(count for _, count in pieces)) > (free := available_host_memory()):
        raise Damaged(f"checkpoint {path} needs {format_bytes(size)} in memory, and {format_bytes(free)} are available")
    read = [(a, n) for a, n in pieces if selected is None or any(i in selected for i in range(a, a + n))]
    return (ProgramPiece(first, count, _read(path / _piece_name(first), like, count)) for first, count in read)


def lanes(path: Path) -> set[int]:
    """Returns the numbers of the lanes of a checkpoint, whose states are not read; raises `Damaged` if unknown."""
    return {first + i for first, count in _pieces(path, _read_digest_file(path)) for i in range(count)}


def _pieces(path: Path, content: dict[str, Any]) -> list[tuple[int, int]]:
    """Returns the first lane and the number of lanes of every piece; raises `Damaged` if they cannot be right."""
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
    """Returns the note of an undamaged checkpoint; raises `Damaged` otherwise."""
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
    """Removes the files of a failed or killed save: its folder, and those that Orbax made beside it.

    The dot in the pattern leaves out the files of other processes, such as `onset-00000010-0001` for `onset-00000010`.
    """
    for path in (unfinished, *unfinished.parent.glob(f"{unfinished.name}.*")):
        shutil.rmtree(path, ignore_errors=True)


def _check_space(path: Path, leaves: Sequence[Any]) -> None:
    """Raises OSError if the disk has no space for some arrays, by reserving it in a temporary file.

    Orbax would write until the disk is full, and its threads would print errors after it has raised.
    """
    if not hasattr(os, "posix_fallocate"):
        return
    size = sum(x.nbytes for x in leaves) + FOLDER_OVERHEAD_BYTES + ARRAY_OVERHEAD_BYTES * len(leaves)
    try:
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):  # other errors: this file system cannot reserve
            raise
    path.unlink()


def _json_digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _file_digests(folder: Path) -> dict[str, str]:
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != DIGEST)
    digests = {}
    for path in files:
        status = path.stat()
        settled = time.time_ns() - status.st_mtime_ns > TIMESTAMP_RESOLUTION_NS
        digest = _file_digest if settled else _file_digest.__wrapped__
        digests[str(path.relative_to(folder))] = digest(path, status.st_ino, status.st_size, status.st_mtime_ns)
    return digests


@functools.lru_cache(maxsize=4096)
def _file_digest(path: Path, inode: int, size: int, modified_ns: int) -> str:
    """Returns the digest of a file; the arguments besides its path distinguish it from earlier files at that path."""
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
        # Reading the manifests first raises one error, where Orbax would report one for each array.
        for manifest in path.glob("*/manifest.ocdbt"):
            store = tensorstore.KvStore.open(
                {"driver": "ocdbt", "base": {"driver": "file", "path": f"{manifest.parent}/"}}
            )
            store.result().list().result()
        with _without_warnings():
            metadata = ocp.metadata(path).metadata
        stored = sorted(tuple(leaf.shape) for leaf in jax.tree.leaves(metadata))
        if stored != sorted((count, *leaf.shape) for leaf in jax.tree.leaves(like)):  # Orbax would pad or truncate
            raise ValueError("arrays have other shapes")
        with _orbax_context():
            return ocp.load(path, _templates(like, count))
    except (OSError, MemoryError):
        raise
    except Exception as error:  # Orbax passes on TensorStore's errors about damaged files
        raise Damaged(f"checkpoint {path} is damaged ({type(error).__name__})") from error


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Suppresses Orbax's warnings about metadata, whose misfits raise an error with a message of their own."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@functools.cache
def _ignore_reports_to_closed_loops() -> None:
    """Suppresses the tracebacks that TensorStore's threads cause after an error.

    Orbax reads all arrays of a checkpoint concurrently and closes its event loop at the first error. Each read that
    ends later finds the loop closed, which Python passes to `sys.unraisablehook`, since nothing catches the error.
    """
    previous = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            previous(unraisable)

    sys.unraisablehook = hook


def _orbax_context() -> ocp.Context:
    """Returns settings with which Orbax neither copies nor compresses arrays: floats hardly become smaller."""
    context = ocp.Context()
    context.array.saving.use_compression = False
    context.array.saving.storage_options.chunk_byte_size = FILE_CHUNK
    context.memory.deepcopy_host_arrays = False
    return context
