"""A run's beginning: its folder appears with all a run needs, or is left as it was."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxaudit.errors import UserError
from jaxaudit.runner.checkpoint import UNFINISHED
from jaxaudit.runner.store import STARTING, Folder


@contextmanager
def beginning(folder: Path) -> Iterator[Folder]:
    """A new run's folder: what is made inside goes again if anything is raised.

    What a process killed inside left behind counts as free. Raises UserError if the folder is taken or cannot
    be made.
    """
    try:
        _check_free(folder)
        missing = [p for p in [folder.absolute(), *folder.absolute().parents] if not p.exists()]
        store = Folder(folder)
        try:
            yield store
        except BaseException:
            _clear(folder)
            for path in missing:
                if path.is_dir() and not any(path.iterdir()):
                    path.rmdir()
            raise
    except OSError as error:
        raise UserError(f"cannot make the folder {folder}: {error.strerror or error}") from None


def _check_free(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} exists and is not a folder")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if _is_leftover(folder):
        with Folder(folder).held():  # or it is no leftover, but a run that another process begins
            _clear(folder)
        return
    hint = f"; to go on with it: jaxaudit resume {folder}" if (folder / "spec.toml").exists() else ""
    raise UserError(f"the folder {folder} exists and is not empty{hint}")


def _is_leftover(folder: Path) -> bool:
    """Whether a folder holds a run that was killed before its spec was written, and nothing else."""
    store = Folder(folder)
    ours = {path.name for path in (store.environment, store.plan, store.checkpoints, store.telemetry, store.monitor)}
    names = {path.name for path in folder.iterdir() if not path.name.startswith(UNFINISHED)}
    if not names or not names <= ours:
        return not names
    return store.read_environment().get("status") == STARTING


def _clear(folder: Path) -> None:
    if folder.is_dir():
        for path in folder.iterdir():
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
