"""The command `jaxaudit compare`: a comparison of variants in a folder, with an ordinary run of each, and tables."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from jaxaudit.analysis.run_reader import read_table
from jaxaudit.core.learner import Learner
from jaxaudit.core.perturbation import Chain, Perturbation
from jaxaudit.execution.engine import forget_programs
from jaxaudit.runs import lifecycle as durable
from jaxaudit.runs.margins.folder import created_and_locked, search_margins, stored_names
from jaxaudit.runs.margins.search import MarginSettings
from jaxaudit.runs.run_folder import Folder
from jaxaudit.runs.run_opening import is_finished
from jaxaudit.runs.variants import scoring
from jaxaudit.runs.variants.compare import FRESH, LEVEL, PLAIN, TOLERANCE, Centre, Comparison, compare_learners
from jaxaudit.runs.variants.scoring import REACH, Ladder, check_windows, magnitude_ladders
from jaxaudit.runtime.backends import Workers
from jaxaudit.runtime.errors import Interrupted, UserError, error_prefix
from jaxaudit.runtime.files import parse_toml, write_text
from jaxaudit.spec.document import Spec, read_spec, read_spec_text, remedy_tables
from jaxaudit.spec.sections import PerturbationEntry
from jaxaudit.spec.tables import TomlTable, describe_value, read_section, read_table_list, to_toml_text

MOST_FRESH = 1000
"""The largest number of fresh seeds that a spec may ask for."""

SPEC, PILOT, VARIANTS, CONFIRMATION = "compare.toml", "pilot", "variants", "confirmation"
SUMMARY, TIMES = "compare.json", "step_times.csv"

BOUGHT, CONFIRMED, PAID, ACTED = "bought.csv", "confirmed.csv", "paid.csv", "acted.csv"
"""The files of the tables of `Comparison`, each named as its field."""


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
      spec: the plain learner's spec.
      variants: the variants that are compared with the plain learner.
      centre, fresh: as in `jaxaudit.compare`.
      source: the file it was read from, for error messages; equality ignores it.
    """

    spec: Spec
    variants: tuple[VariantSpec, ...]
    centre: Centre = "margin"
    fresh: int = FRESH
    source: str = field(default="spec", compare=False)

    def to_toml(self) -> str:
        """Returns TOML text with every default written out, which `parse` reads as an equal spec."""
        n_plain = len(self.spec.remedies)
        variants = [
            {"name": v.name, "learner": dict(v.learner) or None, "remedy": remedy_tables(v.spec.remedies[n_plain:])}
            for v in self.variants
        ]
        compare = {"centre": self.centre, "fresh": self.fresh}
        return to_toml_text(self.spec.tables() | {"compare": compare, "variant": variants})


def load(path: Path) -> ComparisonSpec:
    """Reads the spec of a comparison from a file. Raises UserError if the file cannot be read or is not valid."""
    return parse(read_spec_text(path), str(path), path.parent)


def parse(text: str, source: str = "spec", folder: Path = Path()) -> ComparisonSpec:
    """Reads the spec of a comparison from TOML text.

    Args:
      text: the TOML document.
      source: the name of the document, with which the message of every UserError begins.
      folder: the folder to which paths in the spec are relative.

    Raises:
      UserError: the text is not TOML, or not a valid spec.
    """
    document = parse_toml(text, source)
    own_tables = {name: document.pop(name) for name in ("compare", "variant") if name in document}
    if "variant" not in own_tables:
        similar = difflib.get_close_matches("variant", document, n=1)
        hint = f" (did you mean it by [[{similar[0]}]]?)" if similar else ""
        raise UserError(f"{source}: there is no table [[variant]]{hint}, so there is nothing to compare with")
    spec = read_spec(document, source, folder)
    sections = TomlTable(own_tables, source, ("compare", "variant"))
    options = read_section(sections, "compare", ["centre", "fresh"], {})
    fresh = options.get("fresh", int, FRESH)
    if not 0 <= fresh <= MOST_FRESH:
        raise UserError(f"{options.place}: fresh must be from 0 to {MOST_FRESH} seeds, not {fresh}")
    variants = tuple(
        _variant(values, place, document, folder) for values, place in read_table_list(sections, "variant")
    )
    _check_names(variants, source)
    if not spec.perturbations:
        raise UserError(f"{source}: there is no table [[perturbation]], so there is nothing to compare under")
    return ComparisonSpec(spec, variants, options.get("centre", Centre, "margin"), fresh, source)


def _variant(values: Any, place: str, document: dict[str, Any], folder: Path) -> VariantSpec:
    variant = TomlTable(values, place, ("name", "learner", "remedy"))
    name = variant.get("name", str)
    settings = variant.raw("learner")
    settings = {} if settings is None else settings
    if not isinstance(settings, dict):
        raise UserError(f"{place}: learner must be a table of settings, not {describe_value(settings)}")
    if "kind" in settings and settings["kind"] != document["learner"].get("kind"):
        raise UserError(f"{place}: a variant has other settings of the same kind of learner, not another kind")
    remedies = variant.raw("remedy")
    if not settings and not remedies:
        raise UserError(f"{place}: '{name}' has neither a [[variant.remedy]] nor other settings in 'learner'")
    if remedies is not None and not isinstance(remedies, list):
        raise UserError(f"{place}: remedies must be tables [[variant.remedy]], not {describe_value(remedies)}")
    variant_document = document | {"learner": document["learner"] | settings}
    if remedies:
        variant_document["remedy"] = [*document.get("remedy", []), *remedies]
    return VariantSpec(name, settings, read_spec(variant_document, f"{place} ('{name}')", folder))


def _check_names(variants: tuple[VariantSpec, ...], source: str) -> None:
    name_of: dict[str, str] = {slug_of(PLAIN): PLAIN}
    for variant in variants:
        if not (0 < len(variant.name) <= 100 and variant.name.isprintable() and variant.name.strip()):
            raise UserError(f"{source}: a variant's name must be 1 to 100 printable characters")
        slug = slug_of(variant.name)
        if slug in name_of:
            raise UserError(f"{source}: a variant cannot be called '{variant.name}', since there is '{name_of[slug]}'")
        name_of[slug] = variant.name


def slug_of(name: str) -> str:
    """Returns the name of a variant's folder: lower-case ASCII letters, digits, dots, underscores and hyphens."""
    slug = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in name)
    return slug.strip("-.").lower() or "variant"


def compare_in(comparison: ComparisonSpec, folder: Path, workers: Workers | None = None) -> Comparison:
    """Runs a comparison in a folder, or resumes it.

    Args:
      comparison: the spec.
      folder: a new folder, or one of the same comparison. It gets `compare.toml`; `pilot`, a run of the plain learner
        for its margins; `variants/NAME`, a run of each variant; `confirmation/NAME`, runs on fresh seeds; and the
        tables of `Comparison` as CSV files.
      workers: the processes that train; None: this process.

    Raises:
      UserError: the folder holds something else, or a spec cannot be run; nothing is created then.
      Interrupted: Ctrl-C; the same command resumes the comparison.
    """
    specs = {PLAIN: comparison.spec} | {variant.name: variant.spec for variant in comparison.variants}
    # All learners are built before anything is trained, or an error in a spec would show hours later.
    learners = {name: spec.build().program.learner for name, spec in specs.items()}
    if stored_names(folder, SPEC):
        stored = parse((folder / SPEC).read_text(encoding="utf-8"), str(folder / SPEC))
        if stored.to_toml() != comparison.to_toml():
            raise UserError(f"{folder} holds another comparison; give another folder with -o")
    with error_prefix(comparison.source):
        steps, metrics = comparison.spec.audit.steps, comparison.spec.metrics
        check_windows(magnitude_ladders(_perturbations(comparison.spec), steps), steps, metrics)
    with created_and_locked(folder, "the comparison"):
        write_text(folder / SPEC, comparison.to_toml())
        try:
            return _run_comparison(specs, learners, comparison, folder, workers)
        except (Interrupted, KeyboardInterrupt):
            raise Interrupted("stopped; the same command resumes the comparison") from None


def _run_comparison(
    specs: dict[str, Spec],
    learners: dict[str, Learner],
    comparison: ComparisonSpec,
    folder: Path,
    workers: Workers | None,
) -> Comparison:
    margins = None
    if comparison.centre == "margin":
        _run(comparison.spec, folder / PILOT, workers)
        settings = MarginSettings(tolerance=TOLERANCE, reach=REACH, criterion="collapse")
        margins = search_margins(folder / PILOT, None, None, settings, workers)
    ladders = magnitude_ladders(_perturbations(comparison.spec), comparison.spec.audit.steps, margins)

    def train(name: str, ladders: Sequence[Ladder], fresh_seeds: Sequence[int] | None) -> pd.DataFrame:
        spec = specs[name]
        audit = replace(spec.audit, name=f"{spec.audit.name}: {name}"[:100])
        if fresh_seeds is not None:
            audit = replace(audit, seeds=tuple(fresh_seeds))
        entries = tuple(PerturbationEntry(perturbation) for ladder in ladders for perturbation in ladder.perturbations)
        path = folder / (VARIANTS if fresh_seeds is None else CONFIRMATION) / slug_of(name)
        _run(replace(spec, perturbations=entries, audit=audit), path, workers)
        lanes = read_table(path / "metrics.csv", ("condition", "perturbation", "dimension", "site", "target", "reason"))
        if lanes is None:
            raise UserError(f"the run in {path} has lost its metrics.csv; remove its folder, and it is trained again")
        return lanes

    def store(name: str, rows: pd.DataFrame) -> None:
        write_text(folder / f"{name}.csv", rows.to_csv(index=False))

    time_steps = partial(_step_times, specs, folder / TIMES)
    result = compare_learners(learners, ladders, comparison.fresh, train, time_steps, level=LEVEL, store=store)
    write_text(folder / SUMMARY, json.dumps(result.json(), indent=2) + "\n")
    return result


def _perturbations(spec: Spec) -> list[Perturbation | Chain]:
    return [entry.perturbation for entry in spec.expanded().perturbations if isinstance(entry, PerturbationEntry)]


def _run(spec: Spec, folder: Path, workers: Workers | None) -> None:
    store = Folder(folder)
    exists = store.spec.exists()
    if exists and is_finished(store):
        return
    print(f"{folder}:", file=sys.stderr)
    if exists:
        durable.resume(folder, workers)
    else:
        folder.parent.mkdir(exist_ok=True)
        durable.run(spec, folder, workers)
    forget_programs()  # no other run of the comparison has the same programs


def _step_times(specs: dict[str, Spec], path: Path) -> pd.DataFrame:
    """Returns the table of `scoring.time_steps`, which is measured once and stored at `path`."""
    if path.exists():
        return pd.read_csv(path)
    grids = {name: replace(spec, perturbations=()).build() for name, spec in specs.items()}
    grids = {name: replace(grid, tail=grid.steps) for name, grid in grids.items()}
    times = scoring.time_steps(grids.pop(PLAIN), grids, say=partial(print, file=sys.stderr))
    write_text(path, times.to_csv(index=False))
    return times
