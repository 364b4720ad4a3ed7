"""What a monitor needs of what it scores runs by, be it a chart or a state-space model; and how scores become one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from jaxaudit.monitoring.envelope import StepwiseStats

if TYPE_CHECKING:
    import jax

    from jaxaudit.monitoring.model import Params
    from jaxaudit.monitoring.training import Training

LEAST, LEAST_SPREAD = 1e-6, 0.05
"""Of a score, and of the spread of its logarithm over clean runs."""

Carry = Any


class Reference(Protocol):
    """What clean runs look like; a pytree of float32 arrays.

    Attributes:
      telemetry: each channel's latest standardised value, `[T, d]`.
    """

    @property
    def telemetry(self) -> StepwiseStats:
        """Each channel's latest standardised value, `[T, d]`."""

    def whitened(self, latents: np.ndarray) -> np.ndarray:
        """Distances of meta-states `[n, T, m]` from the clean runs', in their standard deviations, uncorrelated."""


class Scorer(Protocol):
    """Scores of several kinds of every step of a run, from that step and those before; a frozen dataclass.

    `score_runs` takes whole runs at once; `begin`, `score` and `meta_state` take a step inside a JAX program.

    Telemetry is standardised, `[d]`; `seen` is 1 where a channel has a value at a step, else 0.
    """

    @property
    def kinds(self) -> tuple[str, ...]:
        """The names of the S kinds of score, in their order."""

    @property
    def title(self) -> str:
        """The name of the scorer in tables and figures."""

    def init(self, key: jax.Array, channels: int) -> Params:
        """Fresh parameters for d channels; no leaves where there is nothing to learn."""

    def fit(self, training: Training | None, y: np.ndarray, seen: np.ndarray, seed: int) -> Params:
        """Parameters for clean runs `[n, T, d]`."""

    def refer(self, params: Params, y: np.ndarray, seen: np.ndarray) -> Any:
        """A `CleanReference` of clean runs `[n, T, d]`."""

    def blank(self) -> Any:
        """A `CleanReference` in whose shape one is read from a file."""

    def score_runs(
        self, params: Params, reference: Any, y: np.ndarray, seen: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Scores `[n, T, S]` and meta-states `[n, T, m]` of runs `[n, T, d]`."""

    def begin(self, params: Params, channels: int) -> Carry:
        """What is carried, before a run's first step."""

    def score(
        self, params: Params, reference: Any, progress: Carry, y: jax.Array, seen: jax.Array
    ) -> tuple[Carry, jax.Array]:
        """A step on: what is carried, and the scores `[S]`, higher the more unusual."""

    def meta_state(self, params: Params, progress: Carry) -> jax.Array:
        """What the run is like after a step, `[m]`."""


PARTS = 5
"""Of clean runs, each of which is scored against the others."""


def by_other_parts(score: Callable[[np.ndarray, np.ndarray], np.ndarray], runs: int) -> np.ndarray:
    """Scores `[n, T, S]` of n clean runs, each against a reference from the parts of them that it is not in.

    Against a reference they are part of, runs look more usual than further ones will, in some scores by far more than
    in others; against one from much fewer runs they look less usual. Of two runs there is no such part.

    Args:
      score: scores of some of the runs against a reference from others, which are which bool `[n]` each.
      runs: n.
    """
    everyone = np.full(runs, True)
    if runs < 3:
        return score(everyone, everyone)
    part = np.arange(runs) % min(PARTS, runs)
    return np.concatenate([score(part == i, part != i) for i in range(part.max() + 1)])


class ScoreNormalizer(NamedTuple):
    """By which scores of different kinds become one: what the largest of a clean run's steps is usually like.

    Attributes:
      middle: median, over clean runs, of the logarithm of each score's largest value, `[S]`.
      spread: from there to the 97th percentile, `[S]`.
    """

    middle: Any
    spread: Any

    @classmethod
    def of(cls, scores: np.ndarray) -> ScoreNormalizer:
        """Returns the normalizer of clean runs' scores `[n, T, S]`."""
        largest: np.ndarray = np.log(np.maximum(np.max(scores, axis=1), LEAST))
        middle = np.median(largest, axis=0)
        spread = np.percentile(largest, 97, axis=0) - middle
        return cls(np.float32(middle), np.float32(np.maximum(spread, LEAST_SPREAD)))

    def compare(self, scores: Any, numpy: Any = np) -> Any:
        """Scores `[..., S]` on one scale: 0 and 1 are what middle and spread of clean runs' largest ones are.

        In NumPy or `jax.numpy`, whichever `numpy` is.
        """
        return (numpy.log(numpy.maximum(scores, LEAST)) - self.middle) / self.spread

    def combine(self, scores: Any, numpy: Any = np) -> Any:
        """The one of the scores `[..., S]` that is the most unusual: `[...]`."""
        return numpy.max(self.compare(scores, numpy), axis=-1)
