"""Errors a user meets, and the sentence and exit code of any."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator


import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

Result = TypeVar("Result")

ASKED = b"\nstopping after this chunk (Ctrl-C again: at once, from the last checkpoint)\n"


def interrupt(signum: int, frame: FrameType | None) -> None:
    """A handler of Ctrl-C: raises KeyboardInterrupt, a little later if the garbage collector is at work.

    In a callback of the collector, of which JAX has one, Python would print the exception and go on.
    """
    callbacks = [getattr(callback, "__code__", None) for callback in gc.callbacks]
    while frame is not None:
        if frame.f_code in callbacks:
            threading.Timer(0.01, os.kill, (os.getpid(), signum)).start()
            return
        frame = frame.f_back
    raise KeyboardInterrupt


@contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """While inside, Ctrl-C makes the function it yields return True; a second one raises KeyboardInterrupt."""
    asked: list[int] = []

    def ask(signum: int, frame: FrameType | None) -> None:
        if asked:
            interrupt(signum, frame)
            return
        asked.append(signum)
        os.write(2, ASKED)  # print may not be entered again from a signal

    try:
        previous = signal.signal(signal.SIGINT, ask)
    except ValueError:  # not in the main thread: nobody's Ctrl-C to catch
        yield lambda: False
        return
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, previous)


def interruptible(work: Callable[[], Result]) -> Result:
    """What `work` returns or raises, done in another thread: XLA would keep Ctrl-C waiting in this one.

    After a KeyboardInterrupt the thread still runs; only the end of the process ends it.
    """
    done: list[Result] = []
    failed: list[BaseException] = []

    def attempt() -> None:
        try:
            done.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]


NO_SPACE = {code: os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)}
"""What a file system says when it, a quota or a limit is reached, with its words."""

PEER_LOST = "Gloo ", "CoordinationService", "NCCL operation"
"""What JAX's errors say of where one of several processes no longer answers."""

TRACEBACK = "JAXAUDIT_TRACEBACK"
"""Environment variable: set, an error that is not the user's shows its traceback."""


class UserError(ValueError):
    """Something a user can mend; its message is one sentence that says what was given and what is allowed."""


class Interrupted(Exception):
    """Work stopped at the user's wish; the message says how to go on."""


class Failed(Exception):
    """Work that cannot go on, through no word of the user; the message is one sentence that says why."""


class Undrawn(Failed):
    """Figures or a report that could not be drawn from results that are stored; the message says why."""


@contextlib.contextmanager
def placed(place: str) -> Iterator[None]:
    """Turns a ValueError into a UserError that names the place; a UserError names it already."""
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{place}: {error}") from None


def explain(error: BaseException) -> tuple[int, str]:
    """Exit code and sentence for a failure: 2 the user's input is wrong; 130 Ctrl-C; 1 anything else."""
    if isinstance(error, UserError):
        return 2, str(error)
    if isinstance(error, Interrupted):
        return 130, str(error)
    if isinstance(error, KeyboardInterrupt):
        return 130, "stopped; a run that has begun goes on with: jaxaudit resume DIR"
    if isinstance(error, Failed):
        return 1, str(error)
    messages = [str(cause) for cause in _causes(error)]
    if any(isinstance(cause, OSError) and cause.errno in NO_SPACE for cause in _causes(error)) or any(
        words in message for message in messages for words in NO_SPACE.values()
    ):
        return 1, "the disk is full; with more space, go on with: jaxaudit resume DIR"
    if any(isinstance(cause, MemoryError) for cause in _causes(error)) or any(
        "RESOURCE_EXHAUSTED" in message for message in messages
    ):
        return (
            1,
            "out of memory; in [audit], lanes = N keeps at most N of them in memory at a time",
        )
    if any(words in message for message in messages for words in PEER_LOST):
        return 1, "another process of the run is gone; in as many as before, go on with: jaxaudit resume DIR"
    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        return 1, f"{place}{error.strerror or error}"
    return 1, f"unexpected {type(error).__name__}: {_words(error)} (set {TRACEBACK}=1 for the traceback)"


def error_of(code: int, sentence: str) -> Exception:
    """An error of which `explain` gives this exit code and sentence."""
    return {2: UserError, 130: Interrupted}.get(code, Failed)(sentence)


def _words(error: BaseException) -> str:
    """A message's first line; of one that is a traceback, as JAX gives of a callback, what was raised."""
    lines = str(error).splitlines() or [""]
    raised = [line for line in lines[1:] if line.strip() and not line.startswith(" ")]
    return raised[-1] if lines[0].endswith("Traceback (most recent call last):") and raised else lines[0]


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
