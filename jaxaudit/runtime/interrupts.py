"""Ctrl-C: once, to stop when the work at hand is saved; twice, to stop at once."""

from __future__ import annotations

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
