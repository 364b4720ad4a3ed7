"""The spec of a comparison: that of an audit with [[variant]] tables and a table [compare]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jaxaudit.runs.variants.compare import FRESH, PLAIN
from jaxaudit.runtime.errors import UserError
from jaxaudit.runtime.files import parse_toml
from jaxaudit.spec.document import Spec, listed, read, remedy_values, spec_text
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
