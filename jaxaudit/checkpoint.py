"""Checkpoints of learner states: Orbax underneath, checked against a digest, complete or absent.

A checkpoint appears under its name by one rename, after its digest was written; what a killed process left
behind is not a checkpoint. Reading verifies the digest, so a damaged one is found before it is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import shutil
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

DIGEST = "digest.json"
UNFINISHED = ".unfinished-"


class Damaged(Exception):
    """A checkpoint whose files are not what was written."""


def save(path: Path, state: Any, note: dict[str, Any]) -> None:
    """Writes a pytree of arrays, and a JSON-able note beside it, under `path`; replaces what was there.

    Raises:
      OSError: the disk is full or not writable; what was at `path` is then still there.
    """
    unfinished = path.with_name(f"{UNFINISHED}{path.name}")
    _clear(unfinished)
    arrays = _to_arrays(state)
    try:
        with _quiet():
            ocp.save(unfinished, arrays, overwrite=True)
        content = {"note": note, "leaves": _describe(arrays), "files": _digests(unfinished)}
        (unfinished / DIGEST).write_text(json.dumps(content | {"digest": _digest(content)}, indent=1))
    except OSError:
        _clear(unfinished)
        raise
    except Exception as error:  # Orbax reports a full disk through errors of TensorStore's own
        _clear(unfinished)
        raise OSError(f"could not write checkpoint {path}: {str(error).splitlines()[0]}") from error
    remove(path)
    unfinished.rename(path)


def remove(path: Path) -> None:
    """Removes a checkpoint: it is there or it is not, never in part."""
    if path.exists():
        aside = path.with_name(f"{UNFINISHED}removed-{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def load(path: Path, like: Any) -> tuple[Any, dict[str, Any]]:
    """The state under `path`, in the structure, shapes and dtypes of `like` (arrays or `ShapeDtypeStruct`s).

    Raises:
      Damaged: files are missing or changed, or hold another structure.
    """
    note = verify(path)
    template = _to_template(like)
    recorded = json.loads((path / DIGEST).read_text())["leaves"]
    if recorded != json.loads(json.dumps(_describe(template))):
        raise Damaged(f"checkpoint {path} holds another learner's state")
    with _quiet():
        arrays = ocp.load(path, template)
    return jax.tree.map(_from_array, arrays, like), note


def verify(path: Path) -> dict[str, Any]:
    """The note of an undamaged checkpoint; raises `Damaged` otherwise."""
    try:
        content = json.loads((path / DIGEST).read_text(encoding="utf-8"))
        if content.pop("digest") == _digest(content) and content["files"] == _digests(path):
            return content["note"]
    except FileNotFoundError:
        if not path.exists():
            raise Damaged(f"checkpoint {path} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    raise Damaged(f"checkpoint {path} is damaged")


def _clear(unfinished: Path) -> None:
    """Removes what a failed or killed save left: the folder, and Orbax's own beside it."""
    for path in unfinished.parent.glob(f"{unfinished.name}*"):
        shutil.rmtree(path, ignore_errors=True)


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _digests(folder: Path) -> dict[str, str]:
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != DIGEST)
    digests = {}
    for path in files:
        with path.open("rb") as file:
            digests[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def _describe(arrays: Any) -> list:
    return [[list(np.shape(x)), str(x.dtype)] for x in jax.tree.leaves(arrays)]


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _to_arrays(state: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(jax.random.key_data(x) if _is_key(x) else x), state)


def _to_template(like: Any) -> Any:
    def empty(x: Any) -> np.ndarray:
        shape = jax.eval_shape(jax.random.key_data, x) if _is_key(x) else x
        return np.empty(shape.shape, shape.dtype)

    return jax.tree.map(empty, like)


def _from_array(array: np.ndarray, like: Any) -> Any:
    return jax.random.wrap_key_data(jnp.asarray(array)) if _is_key(like) else array


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Orbax speaks on stderr of what it raises besides, and from threads of its own."""
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    levels = [logger.level for logger in loggers]
    hooks = threading.excepthook, sys.unraisablehook
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    threading.excepthook = lambda problem: None
    sys.unraisablehook = lambda problem: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        threading.excepthook, sys.unraisablehook = hooks
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
