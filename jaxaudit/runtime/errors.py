"""Exceptions that users meet, their messages and exit codes, and how Ctrl-C stops work."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeVar

Result = TypeVar("Result")

NO_SPACE = {code: os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)}
"""The error codes of a full disk, an exhausted quota and a file that is too large, with the system's messages."""

PEER_LOST = "Gloo ", "CoordinationService", "NCCL operation"
"""Parts of the messages with which JAX reports that another process of the run no longer answers."""

TRACEBACK = "JAXAUDIT_TRACEBACK"
"""The environment variable which, when it is set, makes unexpected errors print their traceback."""

STOP_NOTICE = b"\nstopping after this chunk (Ctrl-C again: at once, from the last checkpoint)\n"


class UserError(ValueError):
    """An error that the user can correct; its message is one sentence that names the value given and those allowed."""


class Interrupted(Exception):
    """Work was stopped at the user's request; the message says how to continue it."""


class Failed(Exception):
    """Work cannot continue for a reason that is not the user's input; the message is one sentence with that reason."""


class DrawingFailed(Failed):
    """Figures or a report could not be drawn from results that are stored; the message says why."""


@contextlib.contextmanager
def error_prefix(prefix: str) -> Iterator[None]:
    """Turns a ValueError into a UserError whose message starts with `prefix`; a UserError is passed on unchanged."""
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{prefix}: {error}") from None


def explain(error: BaseException) -> tuple[int, str]:
    """Returns the exit code and the message of an error.

    The exit code is 2 for input that the user has to correct, 130 for Ctrl-C and 1 for anything else.
    """
    if isinstance(error, UserError):
        return 2, str(error)
    if isinstance(error, Interrupted):
        return 130, str(error)
    if isinstance(error, KeyboardInterrupt):
        return 130, "stopped; a run that has begun goes on with: jaxaudit resume DIR"
    if isinstance(error, Failed):
        return 1, str(error)
    causes = list(_causes(error))

    def mention(*texts: str) -> bool:
        return any(text in str(cause) for cause in causes for text in texts)

    if any(isinstance(cause, OSError) and cause.errno in NO_SPACE for cause in causes) or mention(*NO_SPACE.values()):
        return 1, "the disk is full; with more space, go on with: jaxaudit resume DIR"
    if any(isinstance(cause, MemoryError) for cause in causes) or mention("RESOURCE_EXHAUSTED"):
        return 1, "out of memory; in [audit], lanes = N keeps at most N of them in memory at a time"
    if mention(*PEER_LOST):
        return 1, "another process of the run is gone; in as many as before, go on with: jaxaudit resume DIR"
    if isinstance(error, OSError):
        prefix = f"{error.filename}: " if error.filename else ""
        return 1, f"{prefix}{error.strerror or error}"
    return 1, f"unexpected {type(error).__name__}: {_message_line(error)} (set {TRACEBACK}=1 for the traceback)"


def error_from_exit_code(code: int, message: str) -> Exception:
    """Returns an error for which `explain` returns this exit code and message."""
    return {2: UserError, 130: Interrupted}.get(code, Failed)(message)


def _message_line(error: BaseException) -> str:
    """Returns the first line of an error's message.

    JAX reports an error of a callback with a traceback as its message; the line returned is then the exception's.
    """
    lines = str(error).splitlines() or [""]
    raised = [line for line in lines[1:] if line.strip() and not line.startswith(" ")]
    return raised[-1] if lines[0].endswith("Traceback (most recent call last):") and raised else lines[0]


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def interrupt_handler(signum: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt; a signal handler for Ctrl-C.

    JAX has a callback of the garbage collector, in which Python would print the exception and go on. A signal that
    arrives there is therefore sent again 10 ms later.
    """
    callbacks = [getattr(callback, "__code__", None) for callback in gc.callbacks]
    while frame is not None:
        if frame.f_code in callbacks:
            threading.Timer(0.01, os.kill, (os.getpid(), signum)).start()
            return
        frame = frame.f_back
    raise KeyboardInterrupt


@contextlib.contextmanager
def interrupts_handled(handler: Any) -> Iterator[None]:
    """Handles Ctrl-C by `handler` until the block ends; outside of the main thread nothing changes."""
    try:
        previous = signal.signal(signal.SIGINT, handler)
    except ValueError:  # only the main thread may install signal handlers
        yield
        return
    try:
        yield
    finally:
        if previous is not None:  # a handler that was not installed by Python cannot be restored
            signal.signal(signal.SIGINT, previous)


@contextlib.contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """Yields a function that returns whether Ctrl-C was pressed since; a second Ctrl-C raises KeyboardInterrupt."""
    received: list[int] = []

    def handle(signum: int, frame: FrameType | None) -> None:
        if received:
            interrupt_handler(signum, frame)
            return
        received.append(signum)
        os.write(2, STOP_NOTICE)  # print must not be re-entered from a signal handler

    with interrupts_handled(handle):
        yield lambda: bool(received)


def interruptible(work: Callable[[], Result]) -> Result:
    """Runs `work` in another thread, so that Ctrl-C interrupts the wait, and returns its result or raises its error.

    XLA does not let the thread that waits for it handle signals. After a KeyboardInterrupt the thread runs on until
    the process ends.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
