"""The quadratic learner with pauses and failures, for tests of workers that fail or are killed."""

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

DISK_FULL_VARIABLE = "DISK_IS_FULL"
"""The environment variable that enables `full_at`."""


@dataclass(frozen=True)
class PausedSettings:
    """The settings of `paused`. A step of -1 means never.

    Attributes:
      pause: The seconds that every step waits.
      dies_at: The step at which the process kills itself.
      fails_at: The step at which an exception is raised.
      full_at: The step from which on files cannot grow, as if the disk were full.
    """

    pause: float = 0.0
    dies_at: int = -1
    fails_at: int = -1
    full_at: int = -1
    telemetry: str = "full"


@functools.cache
def paused(task, **settings):
    """Returns `quadratic` with a callback in every step."""
    values = PausedSettings(**settings)
    inner = quadratic(task)

    def wait(step):
        time.sleep(values.pause)
        if int(step) == values.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if int(step) == values.fails_at:
            raise RuntimeError("a failure on purpose")
        if int(step) == values.full_at and DISK_FULL_VARIABLE in os.environ:
            jax.config.update("jax_enable_compilation_cache", False)  # its entries would stay truncated
            resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))
        return np.float32(0)

    def step(state, key, taps):
        zero = jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float32), taps.step, vmap_method="sequential")
        state, telemetry = inner.step(state, key, taps)
        return state, telemetry | {"performance": telemetry["performance"] + zero}

    return Learner(inner.init, step, name="paused", samples_per_step=1)


paused.settings = PausedSettings
registry.learners.register("paused", paused)
