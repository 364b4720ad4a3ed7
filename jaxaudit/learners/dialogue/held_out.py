"""Performance: the gold reward of rows that nothing disturbs, on the same prompts and draws for all lanes and steps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxaudit.dialogues.protocol import END, Dialogue
from jaxaudit.learners.dialogue.collection import Collector
from jaxaudit.learners.dialogue.settings import Numbers
from jaxaudit.taps import Taps

KEY = 0x4E1D
"""Of the prompts and draws."""

SHOWN = 2
"""Rows of a measurement that are kept to be read."""


@struct.dataclass
class Measured:
    """A measurement.

    Attributes:
      success: mean gold reward of rows sampled at the training temperature.
      greedy: that of rows of the likeliest tokens, in full telemetry; else None.
      tokens, role: of `SHOWN` sampled rows, int32 `[SHOWN, T]`, in full telemetry; else None.
      log_probability: of their own tokens, float32 `[SHOWN, T]`.
    """

    success: Any
    greedy: Any = None
    tokens: Any = None
    role: Any = None
    log_probability: Any = None

    @property
    def telemetry(self) -> dict[str, jax.Array]:
        """Its channels."""
        found = {"performance": self.success}
        if self.greedy is not None:
            found["greedy_success"] = self.greedy
            found |= {
                "held_out_tokens": self.tokens,
                "held_out_role": self.role,
                "held_out_log_probability": self.log_probability,
            }
        return found


def unmeasured(dialogue: Dialogue, success: jax.Array, telemetry: str) -> Measured:
    """What is held before the first measurement."""
    if telemetry == "basic":
        return Measured(success)
    shape = (SHOWN, dialogue.length)
    return Measured(success, success, jnp.zeros(shape, jnp.int32), jnp.full(shape, END, jnp.int32), jnp.zeros(shape))


def measure(collector: Collector, params: Any, base: Any, dialogue: Dialogue, numbers: Numbers) -> Measured:
    """Samples held-out rows of a policy."""
    rows, key = collector.settings.performance_rows, jax.random.key(KEY)
    if collector.settings.telemetry == "basic":
        return Measured(jnp.mean(collector.undisturbed(params, base, dialogue, numbers, key, rows).gold))
    greedy = jnp.arange(2 * rows) >= rows
    found = collector.undisturbed(params, base, dialogue, numbers, key, 2 * rows, greedy)
    shown = jax.tree.map(lambda x: x[:SHOWN], (found.tokens, found.role, found.log_probability))
    return Measured(jnp.mean(found.gold[:rows]), jnp.mean(found.gold[rows:]), *shown)


def measure_when_due(
    collector: Collector,
    latest: Measured,
    params: Any,
    base: Any,
    dialogue: Dialogue,
    numbers: Numbers,
    taps: Taps,
) -> Measured:
    """`measure` at the learner's cadence, between them the latest."""
    every = collector.settings.performance_every
    if every == 1:
        return measure(collector, params, base, dialogue, numbers)
    due = (jnp.asarray(taps.step) + 1) % every == 0
    return jax.lax.cond(due, lambda: measure(collector, params, base, dialogue, numbers), lambda: latest)
