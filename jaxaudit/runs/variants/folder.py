"""A comparison in a folder: an ordinary run of each variant, and tables; a comparison that was stopped is resumed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from jaxaudit.analysis.run_reader import table
from jaxaudit.core.perturbation import Chain, Perturbation
from jaxaudit.core.remedied_learner import same_beginning
from jaxaudit.runs import lifecycle as durable
from jaxaudit.runs.margins.folder import margin_of
from jaxaudit.runs.margins.search import MarginSettings
from jaxaudit.runs.margins.table import Margins
from jaxaudit.runs.run_folder import Folder
from jaxaudit.runs.run_opening import is_finished
from jaxaudit.runs.variants import scoring
from jaxaudit.runs.variants.compare import FRESH, PLAIN, TOLERANCE, Comparison, confirm, others_than
from jaxaudit.runs.variants.design import REACH, Ladder, check_windows, magnitude_ladders
from jaxaudit.runtime.backends import Workers
from jaxaudit.runtime.errors import Interrupted, UserError, error_prefix
from jaxaudit.runtime.files import UNFINISHED, check_contents, entry_names, locked, parse_toml, write_text
from jaxaudit.spec.document import Spec, listed, read, remedy_values, spec_text
from jaxaudit.spec.sections import Asked
from jaxaudit.spec.tables import TomlTable, given, section, to_text

MOST_FRESH = 1000


@dataclass(frozen=True)
class VariantSpec:
    """A table [[variant]]: other settings of the learner, or remedies.

    Attributes:
      name: the variant's name in tables.
      learner: settings that differ from [learner].
      spec: the complete spec of the variant.
    """

    name: str
    learner: Mapping[str, Any]
    spec: Spec


@dataclass(frozen=True)
class ComparisonSpec:
    """The spec of a comparison.

    Attributes:
      spec: the plain learner's.
      variants: what is compared with the plain learner.
      centre, fresh: as in `jaxaudit.compare`.
      source: the file it was read from, for error messages; equality ignores it.
    """

    spec: Spec
    variants: tuple[VariantSpec, ...]
    centre: Literal["margin", "given"] = "margin"
    fresh: int = FRESH
    source: str = field(default="spec", compare=False)

    def to_toml(self) -> str:
        """TOML text with every default written out; `parse` gives the same again."""
        own = len(self.spec.remedies)
        variants = [
            {"name": v.name, "learner": dict(v.learner) or None, "remedy": remedy_values(v.spec.remedies[own:])}
            for v in self.variants
        ]
        compare = {"centre": self.centre, "fresh": self.fresh}
        return to_text(self.spec.tables() | {"compare": compare, "variant": variants})


def load(path: Path) -> ComparisonSpec:
    """Reads the spec of a comparison from a file. Raises UserError if the file cannot be read or is not one."""
    return parse(spec_text(path), str(path), path.parent)


def parse(text: str, source: str = "spec", folder: Path = Path()) -> ComparisonSpec:
    """Reads a comparison from TOML text; `source` begins the sentence of every UserError."""
    document = parse_toml(text, source)
    own = {name: document.pop(name) for name in ("compare", "variant") if name in document}
    if "variant" not in own:
        raise UserError(f"{source}: there is no table [[variant]], so there is nothing to compare with")
    spec = read(document, source, folder)
    sections = TomlTable(own, source, ("compare", "variant"))
    table = section(sections, "compare", ["centre", "fresh"], {})
    fresh = table.get("fresh", int, FRESH)
    if not 0 <= fresh <= MOST_FRESH:
        raise UserError(f"{table.place}: fresh must be from 0 to {MOST_FRESH} seeds, not {fresh}")
    variants = tuple(_variant(values, place, document, folder) for values, place in listed(sections, "variant"))
    _check_names(variants, source)
    if not spec.perturbations:
        raise UserError(f"{source}: there is no table [[perturbation]], so there is nothing to compare under")
    centre = table.get("centre", Literal["margin", "given"], "margin")
    return ComparisonSpec(spec, variants, centre, fresh, source)


def _variant(values: Any, place: str, document: dict[str, Any], folder: Path) -> VariantSpec:
    table = TomlTable(values, place, ("name", "learner", "remedy"))
    name = table.get("name", str)
    changed = table.raw("learner")
    changed = {} if changed is None else changed
    if not isinstance(changed, dict):
        raise UserError(f"{place}: learner must be a table of settings, not {given(changed)}")
    if "kind" in changed and changed["kind"] != document["learner"].get("kind"):
        raise UserError(f"{place}: a variant has other settings of the same kind of learner, not another kind")
    remedies = table.raw("remedy")
    if not changed and not remedies:
        raise UserError(f"{place}: '{name}' has neither a [[variant.remedy]] nor other settings in 'learner'")
    if remedies is not None and not isinstance(remedies, list):
        raise UserError(f"{place}: remedies must be tables [[variant.remedy]], not {given(remedies)}")
    own = document | {"learner": document["learner"] | changed}
    if remedies:
        own["remedy"] = [*document.get("remedy", []), *remedies]
    return VariantSpec(name, changed, read(own, f"{place} ('{name}')", folder))


def _check_names(variants: tuple[VariantSpec, ...], source: str) -> None:
    seen: dict[str, str] = {slug_of(PLAIN): PLAIN}
    for variant in variants:
        if not (0 < len(variant.name) <= 100 and variant.name.isprintable() and variant.name.strip()):
            raise UserError(f"{source}: a variant's name must be 1 to 100 printable characters")
        slug = slug_of(variant.name)
        if slug in seen:
            raise UserError(f"{source}: a variant cannot be called '{variant.name}', since there is '{seen[slug]}'")
        seen[slug] = variant.name


def slug_of(name: str) -> str:
    """Returns a folder's name for a variant's name."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in name)
    return kept.strip("-.").lower() or "variant"


SPEC, PILOT, VARIANTS, CONFIRMATION = "compare.toml", "pilot", "variants", "confirmation"
BOUGHT, CONFIRMED, PAID, TIMES = "bought.csv", "confirmed.csv", "paid.csv", "step_times.csv"
ACTED = "acted.csv"
SUMMARY = "compare.json"


def compare_in(comparison: ComparisonSpec, folder: Path, workers: Workers | None = None) -> Comparison:
    """Runs a comparison in a folder, or resumes it.

    Args:
      comparison: the spec.
      folder: a new folder, or one of the same comparison. It gets `compare.toml`; `pilot`, a run of the plain learner
        for its margins; `variants/NAME`, a run of each variant; `confirmation/NAME`, runs on fresh seeds; and the
        tables of `Comparison` as CSV files.
      workers: processes that train; None: this process.

    Raises:
      UserError: the folder holds something else, or a spec cannot be run; nothing is created then.
      Interrupted: Ctrl-C; the same command resumes the comparison.
    """
    specs = {PLAIN: comparison.spec} | {variant.name: variant.spec for variant in comparison.variants}
    learners = {name: spec.build().program.learner for name, spec in specs.items()}  # or a mistake shows hours later
    _check(comparison, folder)
    with error_prefix(comparison.source):
        steps, metrics = comparison.spec.audit.steps, comparison.spec.metrics
        check_windows(magnitude_ladders(_perturbations(comparison.spec), steps), steps, metrics)
    with _locked_folder(comparison, folder):
        try:
            return _compared(specs, learners, comparison, folder, workers)
        except (Interrupted, KeyboardInterrupt):
            raise Interrupted("stopped; the same command resumes the comparison") from None


def _check(comparison: ComparisonSpec, folder: Path) -> None:
    """Raises UserError if a folder holds anything but this comparison."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} exists and is not a folder")
    found = [name for name in entry_names(folder) if not name.startswith(UNFINISHED)] if folder.exists() else []
    if not found:
        return
    check_contents(folder)
    if SPEC not in found:
        raise UserError(f"the folder {folder} exists and is not empty; give another with -o")
    if parse((folder / SPEC).read_text(encoding="utf-8"), str(folder / SPEC)).to_toml() != comparison.to_toml():
        raise UserError(f"{folder} holds another comparison; give another folder with -o")


@contextmanager
def _locked_folder(comparison: ComparisonSpec, folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {folder}: {error.strerror or error}") from None
    with locked(folder, f"the comparison in {folder}"):
        write_text(folder / SPEC, comparison.to_toml())
        yield


def _compared(
    specs: dict[str, Spec], learners: dict[str, Any], comparison: ComparisonSpec, folder: Path, workers: Workers | None
) -> Comparison:
    level = 0.95
    found = _margins(comparison.spec, folder / PILOT, workers) if comparison.centre == "margin" else None
    tried = magnitude_ladders(_perturbations(comparison.spec), comparison.spec.audit.steps, found)

    def lanes_of(name: str, place: str, some: Sequence[Ladder], seeds: Sequence[int] | None = None) -> pd.DataFrame:
        spec = _at(specs[name], name, some, seeds)
        return _lanes(spec, folder / place / slug_of(name), workers)

    lanes = {name: lanes_of(name, VARIANTS, tried) for name in specs}
    others = {name: own for name, own in lanes.items() if name != PLAIN}
    bought = scoring.bought(lanes[PLAIN], others, tried, level)
    _write(folder / BOUGHT, bought)
    fresh = others_than(sorted(set(lanes[PLAIN].seed)), comparison.fresh)
    confirmed = confirm(
        bought, tried, fresh, lambda name, some, seeds: lanes_of(name, CONFIRMATION, some, seeds), level
    )
    _write(folder / CONFIRMED, confirmed)
    paid = scoring.paid(lanes[PLAIN], others, tried, level)
    times = _step_times(specs, folder / TIMES)
    paid = paid.assign(**pd.DataFrame([scoring.relative(times[name], times[PLAIN], level) for name in others]))
    _write(folder / PAID, paid)
    acted = scoring.acted(others, tried)
    _write(folder / ACTED, acted)
    structures = tuple(name for name in others if not same_beginning(learners[name], learners[PLAIN]))
    result = Comparison(bought, confirmed, paid, acted, tuple(tried), structures, lanes, level)
    write_text(folder / SUMMARY, json.dumps(result.json(), indent=2) + "\n")
    return result


def _perturbations(spec: Spec) -> list[Perturbation | Chain]:
    return [entry.perturbation for entry in spec.expanded().perturbations if isinstance(entry, Asked)]


def _margins(spec: Spec, folder: Path, workers: Workers | None) -> Margins:
    _run(spec, folder, workers)
    chosen = MarginSettings(tolerance=TOLERANCE, reach=REACH, criterion="collapse")
    return margin_of(folder, None, None, chosen, workers)


def _at(spec: Spec, name: str, some: Sequence[Ladder], seeds: Sequence[int] | None) -> Spec:
    """Returns a variant's spec with the perturbations of some ladders, and with other seeds if given."""
    entries = tuple(Asked(one) for ladder in some for one in ladder.perturbations)
    audit = replace(spec.audit, name=f"{spec.audit.name}: {name}"[:100])
    if seeds is not None:
        audit = replace(audit, seeds=tuple(seeds))
    return replace(spec, perturbations=entries, audit=audit)


def _lanes(spec: Spec, folder: Path, workers: Workers | None) -> pd.DataFrame:
    _run(spec, folder, workers)
    found = table(folder / "metrics.csv", ("condition", "perturbation", "dimension", "site", "target", "reason"))
    if found is None:
        raise UserError(f"the run in {folder} has lost its metrics.csv; remove its folder, and it is trained again")
    return found


def _run(spec: Spec, folder: Path, workers: Workers | None) -> None:
    store = Folder(folder)
    if store.spec.exists() and is_finished(store):
        return
    print(f"{folder}:", file=sys.stderr)
    if store.spec.exists():
        durable.resume(folder, workers)
    else:
        folder.parent.mkdir(exist_ok=True)
        durable.run(spec, folder, workers)


def _step_times(specs: dict[str, Spec], path: Path) -> pd.DataFrame:
    """Returns seconds per step, a column for each variant and a row for each turn, measured once for a folder."""
    if path.exists():
        return pd.read_csv(path)
    print("time of a step: all variants, in turns", file=sys.stderr)
    grids = {name: replace(spec, perturbations=()).build() for name, spec in specs.items()}
    times = pd.DataFrame(scoring.step_seconds({name: replace(grid, tail=grid.steps) for name, grid in grids.items()}))
    _write(path, times)
    return times


def _write(path: Path, rows: pd.DataFrame) -> None:
    write_text(path, rows.to_csv(index=False))
