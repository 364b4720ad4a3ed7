"""What scores runs, how several scores are combined into one, and thresholds for a false-alarm rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike

from jaxaudit.monitoring.telemetry import StepwiseStats

if TYPE_CHECKING:
    import jax

    from jaxaudit.monitoring.meta_state import Training

MIN_SCORE, MIN_LOG_SPREAD = 1e-6, 0.05
"""The smallest score whose logarithm is taken, and the smallest spread of a score's logarithm over clean runs."""

FOLDS = 5
"""The parts of the clean runs, each of which is scored against the others."""

Params = Any
Carry = Any


class Reference(Protocol):
    """What a scorer has learned of clean runs: a pytree of float32 arrays.

    Attributes:
      telemetry: statistics of each channel's latest standardised value, `[T, d]`.
    """

    @property
    def telemetry(self) -> StepwiseStats:
        """The statistics of each channel's latest standardised value in clean runs, `[T, d]`."""

    def whiten(self, latents: np.ndarray) -> np.ndarray:
        """Returns meta-states `[n, T, m]` minus the clean runs' mean, whitened to unit variance in clean runs."""


class Scorer(Protocol):
    """Computes S scores at every step of a run, from that step and those before it; a frozen dataclass.

    `score_runs` takes whole runs; `begin`, `score_step` and `meta_state` take one step at a time, in a JAX program.
    Telemetry is standardised; `observed` is 1 where a channel has a value at a step, else 0.
    """

    @property
    def score_names(self) -> tuple[str, ...]:
        """The names of the S scores, in order."""

    @property
    def title(self) -> str:
        """The name of the scorer in tables and figures."""

    def init(self, key: jax.Array, channels: int) -> Params:
        """Returns initial parameters for d channels; a pytree without leaves if there is nothing to train."""

    def fit(self, training: Training | None, y: np.ndarray, observed: np.ndarray, seed: int) -> Params:
        """Returns parameters trained on clean runs `[n, T, d]`."""

    def fit_reference(self, params: Params, y: np.ndarray, observed: np.ndarray) -> Any:
        """Returns the `Reference` of clean runs `[n, T, d]`."""

    def empty_reference(self) -> Any:
        """Returns a `Reference` of empty arrays, whose tree structure tells how one is read from a file."""

    def score_runs(
        self, params: Params, reference: Any, y: np.ndarray, observed: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns scores `[n, T, S]` and meta-states `[n, T, m]` of runs `[n, T, d]`."""

    def begin(self, params: Params, channels: int) -> Carry:
        """Returns what is carried from step to step, before a run's first step."""

    def score_step(
        self, params: Params, reference: Any, progress: Carry, y: jax.Array, observed: jax.Array
    ) -> tuple[Carry, jax.Array]:
        """Returns what is carried after a step, and the step's scores `[S]`; higher is more unusual."""

    def meta_state(self, params: Params, progress: Carry) -> jax.Array:
        """Returns the meta-state after a step, `[m]`."""


class ParameterFree:
    """The methods of a `Scorer` without parameters, whose meta-state is the latest telemetry of each channel."""

    def init(self, key: jax.Array, channels: int) -> Params:
        return {}

    def fit(self, training: Training | None, y: np.ndarray, observed: np.ndarray, seed: int) -> Params:
        """Returns no parameters: all that the scorer learns of clean runs is in its reference."""
        return {}

    def meta_state(self, params: Params, progress: Carry) -> jax.Array:
        """Returns the latest standardised telemetry, `[d]`; zero before a channel's first value."""
        import jax.numpy as jnp

        return jnp.nan_to_num(progress.last)


def cross_validated_scores(score: Callable[[np.ndarray, np.ndarray], np.ndarray], runs: int) -> np.ndarray:
    """Scores each of n clean runs against a reference that is fitted to other ones: `[n, T, S]`.

    Clean runs look more usual against a reference that is fitted to themselves than further clean runs will, by an
    extent that depends on the score. Fewer than three runs are scored against a reference of all of them.

    Args:
      score: returns the scores of the runs in the first mask against a reference fitted to those in the second; masks
        are bool `[n]`.
      runs: n.
    """
    everyone = np.full(runs, True)
    if runs < 3:
        return score(everyone, everyone)
    fold = np.arange(runs) % min(FOLDS, runs)
    return np.concatenate([score(fold == i, fold != i) for i in range(fold.max() + 1)])


class ScoreNormalizer(NamedTuple):
    """Brings scores of different kinds to one scale, by the largest score of each clean run.

    Attributes:
      middle: median over clean runs of the logarithm of each score's maximum over steps, `[S]`.
      spread: distance from there to the 97th percentile, `[S]`.
    """

    middle: Any
    spread: Any

    @classmethod
    def fit(cls, scores: np.ndarray) -> ScoreNormalizer:
        """Returns the normalizer of clean runs' scores `[n, T, S]`."""
        largest: np.ndarray = np.log(np.maximum(np.max(scores, axis=1), MIN_SCORE))
        middle = np.median(largest, axis=0)
        spread = np.percentile(largest, 97, axis=0) - middle
        return cls(np.float32(middle), np.float32(np.maximum(spread, MIN_LOG_SPREAD)))

    def normalize(self, scores: Any, xp: Any = np) -> Any:
        """Returns scores of S kinds, `[..., S]`, on one scale: `(log(scores) - middle) / spread`, `[..., S]`.

        A score equal to the median of the clean runs' largest scores becomes 0, and one equal to their 97th percentile
        1, or less than 1 if these runs barely differ (`MIN_LOG_SPREAD`). Scores below `MIN_SCORE` count as `MIN_SCORE`.
        `xp` is the module that computes, NumPy or `jax.numpy`.
        """
        return (xp.log(xp.maximum(scores, MIN_SCORE)) - self.middle) / self.spread

    def combine(self, scores: Any, xp: Any = np) -> Any:
        """Returns the largest of the normalised scores `[..., S]`: `[...]`."""
        return xp.max(self.normalize(scores, xp), axis=-1)


def threshold(scores: ArrayLike, alpha: float) -> float:
    """Returns the value that the score of a further clean run exceeds with a probability of at most alpha.

    A run's score is the largest of all its steps, because steps of a run depend on one another and runs do not. The
    threshold is the ceil((n + 1) (1 - alpha))-th smallest score (split conformal prediction; Vovk et al., 2005). Its
    guarantee needs the n runs and the further one to be exchangeable, and nothing else of the model or the scores.

    The probability is an average over sets of n runs to calibrate on. With one set, the false-alarm rate has the
    distribution Beta(n + 1 - k, k), where k is that rank, if scores have no ties (Vovk, 2012). For alpha = 0.05 and 19,
    100 or 500 runs its mean is 0.05, and in one set of ten it is above 0.11, 0.08 and 0.06. `false_alarm_interval`
    returns its spread.

    Args:
      scores: maxima of n clean runs that the monitor was not fitted to; infinite for a run that has diverged.
      alpha: false alarms per clean run, in (0, 1).

    Raises:
      ValueError: a score is NaN, alpha is outside (0, 1), or there are too few runs: n >= 1 / alpha - 1.
    """
    ordered = np.sort(np.asarray(scores, np.float64).ravel())
    if np.isnan(ordered).any():
        raise ValueError("a clean run's score is NaN: it cannot be ordered")
    return float(ordered[threshold_rank(len(ordered), alpha) - 1])


def threshold_rank(runs: int, alpha: float) -> int:
    """Returns the rank, counted from 1, of the score that is the threshold. Raises ValueError as `threshold` does."""
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must lie in (0, 1), not {alpha}")
    rank = math.ceil((runs + 1) * (1 - alpha) - 1e-9)
    if rank > runs:
        raise ValueError(
            f"{runs} clean runs are too few for a false-alarm rate of {alpha:g}: "
            f"it takes {min_calibration_runs(alpha)}, or an alpha of {1 / (runs + 1):.3g} and above"
        )
    return max(rank, 1)


def false_alarm_interval(runs: int, alpha: float, coverage: float = 0.9) -> tuple[float, float]:
    """Returns the interval in which the false-alarm rate lies with probability `coverage`, given n calibration runs.

    It has equal tails of Beta(n + 1 - k, k), where k is the threshold's rank: the distribution of the share of further
    runs above the threshold, for scores without ties (Vovk, 2012, "Conditional validity of inductive conformal
    predictors"). Raises ValueError as `threshold` does.
    """
    from scipy.special import betaincinv

    rank = threshold_rank(runs, alpha)
    low, high = betaincinv(runs + 1 - rank, rank, [(1 - coverage) / 2, (1 + coverage) / 2])
    return float(low), float(high)


def min_calibration_runs(alpha: float) -> int:
    """Returns the fewest clean runs that a threshold for alpha can be calibrated on: n >= 1 / alpha - 1."""
    return math.ceil(1 / alpha - 1 - 1e-9)
