"""Processes that train the same lanes together, each with devices of its own: JAX's distributed runtime.

All run the same command. The first leads: it alone writes files, but for checkpoints, and says what all do next. In a
process by itself everything here is trivial.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from jaxaudit.runtime.errors import UserError, error_of, explain

Result = TypeVar("Result")

HEARTBEAT_SECONDS = 20
"""After so long without a sign of life of one, the others end."""

PATIENCE_SECONDS = 300
"""For all to come."""


def join(coordinator: str | None = None, processes: int | None = None, process: int | None = None) -> None:
    """Joins the others, before JAX is asked for anything; where nothing is given, JAX finds its place by itself.

    It does so under Slurm's srun, Open MPI's mpirun and Kubernetes.

    Args:
      coordinator: HOST:PORT of the first process.
      processes: how many there are.
      process: which this is, from 0.

    Raises:
      UserError: its place is not known, or the others do not come.
    """
    import jax

    given = coordinator, processes, process
    if any(value is not None for value in given) and None in given:
        raise UserError("--coordinator HOST:PORT, --processes N and --process I go together")
    if processes is not None and process is not None and not 0 <= process < processes:
        raise UserError(f"--process must be from 0 to {processes - 1}, not {process}")
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process,
            initialization_timeout=PATIENCE_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except ValueError:
        raise UserError(
            "--distributed finds its place under srun, mpirun or Kubernetes alone; elsewhere give "
            "--coordinator HOST:PORT --processes N --process I"
        ) from None
    except RuntimeError as error:
        raise UserError(f"not all of the run's processes came together: {str(error).splitlines()[0]}") from None
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    broadcast()  # connections are made now: later one may be long at something else, and for them Gloo waits 30 s


def several() -> bool:
    """Returns whether several processes train the run together."""
    import jax

    return jax.process_count() > 1


def is_leader() -> bool:
    """Returns whether this process leads: writes files and talks to the user."""
    import jax

    return jax.process_index() == 0


def broadcast(*values: int) -> list[int]:
    """What the first process says, in all of them; they wait for one another."""
    if not several():
        return list(values)
    from jax.experimental import multihost_utils

    said = np.array([0, *values], np.int32)  # nothing at all would not be waited for
    return multihost_utils.broadcast_one_to_all(said).tolist()[1:]


def on_leader(work: Callable[[], Result]) -> Result | None:
    """What some work gives in the first process, while the others wait; None in these. It fails in all or in none."""
    result, failure = None, None
    if is_leader():
        try:
            result = work()
        except BaseException as error:
            failure = error
    (code,) = broadcast(0 if failure is None else explain(failure)[0])
    if failure is not None:
        raise failure
    if code:
        raise error_of(code, "")  # the first says why
    return result
