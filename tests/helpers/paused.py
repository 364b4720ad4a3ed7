"""The quadratic learner, in slow motion, and with accidents: for tests of workers that are killed, and fail."""

import functools
import os
import resource
import signal
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from quadratic import quadratic

from jaxaudit import Learner
from jaxaudit.runtime import registry

FULL = "DISK_IS_FULL"
"""Environment variable: set, it is full at `full_at`."""


@dataclass(frozen=True)
class PausedSettings:
    """Seconds of every step; the step at which the process kills itself, raises, finds the disk full; -1: none."""

    pause: float = 0.0
    dies_at: int = -1
    fails_at: int = -1
    full_at: int = -1
    telemetry: str = "full"


@functools.cache
def paused(task, **settings):
    """`quadratic`, with a callback in every step."""
    chosen = PausedSettings(**settings)
    inner = quadratic(task)

    def wait(step):
        time.sleep(chosen.pause)
        if int(step) == chosen.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if int(step) == chosen.fails_at:
            raise RuntimeError("the accident of a test")
        if int(step) == chosen.full_at and FULL in os.environ:
            resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))
        return np.float32(0)

    def step(state, key, taps):
        zero = jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float32), taps.step, vmap_method="sequential")
        state, telemetry = inner.step(state, key, taps)
        return state, telemetry | {"performance": telemetry["performance"] + zero}

    return Learner(inner.init, step, name="paused", samples_per_step=1)


paused.settings = PausedSettings
registry.learners.register("paused", paused)
