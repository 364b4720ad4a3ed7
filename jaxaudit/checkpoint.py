"""Checkpoints of learner states: Orbax underneath, checked against a digest, complete or absent.

A checkpoint appears under its name by one rename, after its digest was written; what a killed process left behind is
not a checkpoint. Reading verifies the digest, so a damaged one is found before it is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import shutil
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

DIGEST = "digest.json"


class Damaged(Exception):
    """A checkpoint whose files are not what was written."""


def save(path: Path, state: Any, note: dict[str, Any]) -> None:
    """Writes a pytree of arrays, and a JSON-able note beside it, under `path`; replaces what was there.

    Raises:
      OSError: the disk is full or not writable; what was at `path` is then still there.
    """
    unfinished = path.with_name(f".unfinished-{path.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    arrays = _to_arrays(state)
    try:
        with _quiet():
            ocp.save(unfinished, arrays, overwrite=True)
    except OSError:
        raise
    except Exception as error:  # Orbax reports a full disk through errors of TensorStore's own
        raise OSError(f"could not write checkpoint {path}: {str(error).splitlines()[0]}") from error
    digest = {"note": note, "leaves": _describe(arrays), "files": _digests(unfinished)}
    (unfinished / DIGEST).write_text(json.dumps(digest, indent=1))
    shutil.rmtree(path, ignore_errors=True)
    unfinished.rename(path)


def load(path: Path, like: Any) -> tuple[Any, dict[str, Any]]:
    """The state under `path`, in the structure, shapes and dtypes of `like` (arrays or `jax.ShapeDtypeStruct`s).

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
        digest = json.loads((path / DIGEST).read_text())
        if digest["files"] == _digests(path):
            return digest["note"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise Damaged(f"checkpoint {path} is damaged")


def _digests(folder: Path) -> dict[str, str]:
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != DIGEST)
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


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
    return jax.random.wrap_key_data(array) if _is_key(like) else array


@contextlib.contextmanager
def _quiet():
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
