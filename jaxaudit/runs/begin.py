"""The claim of a new run's folder: it appears with all a run needs, or is left as it was."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxaudit.runs.run_folder import STARTING, Folder
from jaxaudit.runtime.errors import UserError
from jaxaudit.runtime.files import UNFINISHED, Claim, claimed, names


@contextmanager
def beginning(folder: Path) -> Iterator[Claim]:
    """Claims a folder for a new run, see `jaxaudit.runtime.files.claimed`; it is locked until the block ends.

    The block keeps the claim when the run's spec is written. What a process that was killed before left there is
    removed.

    Raises:
      UserError: the folder is taken or cannot be made.
    """
    hint = f"; to go on with it: jaxaudit resume {folder}" if os.path.exists(folder / "spec.toml") else ""
    with claimed(folder, is_leftover=_is_leftover, hint=hint) as claim:
        try:
            yield claim
        except OSError as error:
            if claim.kept:
                raise
            raise UserError(f"cannot make the folder {folder}: {error.strerror or error}") from None


def _is_leftover(folder: Path) -> bool:
    """Whether a folder holds a run that was killed before its spec was written, and nothing else."""
    store = Folder(folder)
    ours = {path.name for path in (store.environment, store.plan, store.checkpoints, store.telemetry, store.monitor)}
    found = {name for name in names(folder) if not name.startswith(UNFINISHED)}
    return not found or (found <= ours and store.read_environment().get("status") == STARTING)
