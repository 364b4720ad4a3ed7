"""Which perturbations fit a learner: each is tried in one step that is traced, not computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from jaxaudit.core.learner import Learner
from jaxaudit.core.sites import Recorder, trace
from jaxaudit.core.slots import site_misfit
from jaxaudit.core.taps import OFFERED
from jaxaudit.perturbations import Chain, Perturbation
from jaxaudit.runtime.paths import paths_of


@dataclass
class _Trial(Recorder):
    """Taps that try perturbations on the values that pass, and pass the values on as they are."""

    perturbations: Sequence[Perturbation] = ()
    refused: dict[int, str] = field(default_factory=dict)

    def disturb(self, site: str, value: Any, *, label: str = "", **context: Any) -> Any:
        """Tries every perturbation of the site that the tap's context suffices for."""
        for index, perturbation in enumerate(self.perturbations):
            needs = set(perturbation.kind.needs) - set(OFFERED)
            if perturbation.site == site and needs <= set(context) and index not in self.refused:
                self._try(index, perturbation, value, label, context)
        return super().disturb(site, value, label=label, **context)

    def _try(self, index: int, perturbation: Perturbation, value: Any, label: str, context: dict) -> None:
        selected = jnp.ones(len(paths_of(value, label)), bool)
        offered = {"selected": selected, "elapsed": jnp.float32(1.0), "alarm": jnp.bool_(True), **context}
        given = {name: offered[name] for name in perturbation.kind.needs}
        try:
            perturbation.apply(value, **given)
        except ValueError as error:
            self.refused[index] = str(error)


def misfits(
    learner: Learner, perturbations: Sequence[Perturbation | Chain], steps: int, monitored: bool = False
) -> list[str | None]:
    """For each perturbation None, or a sentence on why the learner cannot be disturbed by it.

    `monitored` says whether there are alarms for interventions to wait for.
    """
    parts = [part for perturbation in perturbations for part in perturbation.parts]
    trial = _Trial(steps=steps, perturbations=parts)
    trace(learner, trial)
    sites = trial.sites.told(learner)
    reasons = iter(
        [
            trial.refused.get(i) or site_misfit(part, sites) or (None if monitored else _waits(part))
            for i, part in enumerate(parts)
        ]
    )
    by_perturbation = [[next(reasons) for _ in perturbation.parts] for perturbation in perturbations]
    return [next(filter(None, found), None) for found in by_perturbation]


def _waits(part: Perturbation) -> str | None:
    if "alarm" not in part.kind.needs:
        return None
    return f"'{part.name}' waits for a monitor's alarm, which a spec has none of without a table [monitor]"
