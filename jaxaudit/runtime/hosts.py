"""Several processes that train the same lanes together on devices of their own, by JAX's distributed runtime.

All processes run the same command. The first one, the leader, writes all files except checkpoints and decides what is
done next. In a single process the functions of this module return at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np

from jaxaudit.runtime.errors import UserError, error_from_exit_code, explain

Result = TypeVar("Result")

HEARTBEAT_TIMEOUT_SECONDS = 20
"""The time without a sign of life from one process after which the others end."""

JOIN_TIMEOUT_SECONDS = 300
"""The time within which all processes have to start."""


def join_processes(coordinator: str | None = None, processes: int | None = None, process: int | None = None) -> None:
    """Connects to the other processes of the run, which has to happen before JAX is used.

    Without arguments JAX determines them under Slurm's srun, Open MPI's mpirun and Kubernetes.

    Args:
      coordinator: the address of the first process, HOST:PORT.
      processes: the number of processes.
      process: the index of this process, from 0.

    Raises:
      UserError: the arguments are incomplete or out of range, JAX cannot determine them, or processes are missing.
    """
    arguments = coordinator, processes, process
    if any(value is not None for value in arguments) and None in arguments:
        raise UserError("--coordinator HOST:PORT, --processes N and --process I go together")
    if processes is not None and process is not None and not 0 <= process < processes:
        raise UserError(f"--process must be from 0 to {processes - 1}, not {process}")
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process,
            initialization_timeout=JOIN_TIMEOUT_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_SECONDS,
        )
    except ValueError:
        raise UserError(
            "--distributed determines its processes under srun, mpirun or Kubernetes alone; elsewhere give "
            "--coordinator HOST:PORT --processes N --process I"
        ) from None
    except RuntimeError as error:
        raise UserError(f"not all processes of the run connected: {str(error).splitlines()[0]}") from None
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Connections are made here: later a process may be busy for longer than the 30 s that Gloo waits for one.
    broadcast()


def is_distributed() -> bool:
    """Returns whether several processes train the run together."""
    return jax.process_count() > 1


def is_leader() -> bool:
    """Returns whether this process is the leader, which writes files and prints messages."""
    return jax.process_index() == 0


def broadcast(*values: int) -> list[int]:
    """Returns the leader's values in all processes, which wait for one another here."""
    if not is_distributed():
        return list(values)
    from jax.experimental import multihost_utils

    sent = np.array([0, *values], np.int32)  # JAX would not wait for the other processes with an empty array
    return multihost_utils.broadcast_one_to_all(sent).tolist()[1:]


def on_leader(work: Callable[[], Result]) -> Result | None:
    """Runs `work` in the leader while the other processes wait.

    Returns:
      The result of `work` in the leader, None in the others.

    Raises:
      Whatever `work` raises, in the leader; in the others, an error with the same exit code and no message.
    """
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
        raise error_from_exit_code(code, "")  # the leader prints the message
    return result
