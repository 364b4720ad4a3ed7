"""Directives that write reference tables and entries from the package's own dataclasses, docstrings and registries.

They write Markdown, which is parsed where they stand:

- `spec-keys SECTION [NAME]`: the keys of a section of specs, with types, defaults and meanings.
- `preset-defaults`: the settings whose defaults differ between the presets of dialogue learners.
- `perturbation-kinds DIMENSION`: the perturbations of a dimension, or the interventions.
- `perturbation-index`, `remedy-kinds`: what the registries have, with links or as entries.
- `public-names MODULE [NAME ...]`: entries of public names; without names, of all that the module has.

When all pages are read, every public name must have an entry, or the build fails.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import ExtensionError
from sphinx.pycode import ModuleAnalyzer
from sphinx.transforms import SphinxTransform
from sphinx.util.docutils import SphinxDirective

import jaxaudit
from jaxaudit.analysis.metrics import MetricSettings
from jaxaudit.core.perturbation import Kind
from jaxaudit.core.remedy import RemedyKind
from jaxaudit.learners import DialogueSettings
from jaxaudit.learners.dialogue.factories import PRESETS
from jaxaudit.runs.variants.schema import compare_keys
from jaxaudit.runtime import registry
from jaxaudit.runtime.registry import first_docstring_line
from jaxaudit.spec.schema import (
    Key,
    keys_of,
    learner_keys,
    monitor_keys,
    perturbation_keys,
    perturbation_kinds,
    task_settings,
)
from jaxaudit.spec.sections import AuditSpec, RunSpec

DOCS = Path(__file__).resolve().parents[1]
REPOSITORY = DOCS.parent

LONGEST_KEY_IN_TABLE = 24
"""The most characters of a key that leave room for its type, default and meaning beside it."""

MODULES = tuple(jaxaudit._MODULES)
"""The public modules."""


class _Markdown(SphinxDirective):
    """A directive that is replaced by the Markdown that `lines` yields."""

    has_content = True
    optional_arguments = 1
    final_argument_whitespace = True

    def lines(self, *arguments: str) -> Iterable[str]:
        raise NotImplementedError

    def run(self) -> list[nodes.Node]:
        words = " ".join([*self.arguments, *self.content]).split()
        text = "\n".join(self.lines(*words))
        return self.parse_text_to_nodes(text, allow_section_headings=False)


def table(heading: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yields the lines of a Markdown table."""
    heading = list(heading)
    for row in (heading, ["---"] * len(heading), *rows):
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
    yield ""


# Specs.


class SpecKeys(_Markdown):
    """The keys of a section, as a table."""

    def lines(self, section: str, name: str = "") -> Iterator[str]:
        yield from keys_table(_section_keys(section, name))


def _section_keys(section: str, name: str) -> list[Key]:
    if section == "learner":
        return learner_keys(name)
    if section == "task":
        kind, _, inner = name.partition("/")
        return task_settings(kind)[inner]
    if section == "remedy":
        return [
            Key("kind", str, "The name of the remedy."),
            Key("strength", float, "The remedy's strength. Without it, the remedy's standard.", None),
        ]
    return {
        "audit": lambda: keys_of(AuditSpec),
        "metrics": lambda: keys_of(MetricSettings),
        "run": lambda: keys_of(RunSpec),
        "monitor": monitor_keys,
        "perturbation": perturbation_keys,
        "compare": compare_keys,
        "dialogue-learners": lambda: keys_of(DialogueSettings, leave_out=["telemetry"]),
    }[section]()


def keys_table(keys: Iterable[Key]) -> Iterator[str]:
    """Yields a table of keys, or a list of definitions where a name leaves no room for the other columns."""
    keys = list(keys)
    if max(len(key.name) for key in keys) > LONGEST_KEY_IN_TABLE:
        for key in keys:
            default = _default(key) if key.default_text in ("required", "none") else f"default {_default(key)}"
            yield from (f"`{key.name}` ({key.type_text}, {default})", f": {key.meaning}", "")
        return
    rows = ([f"`{key.name}`", key.type_text, _default(key), key.meaning] for key in keys)
    yield from table(["Key", "Type", "Default", "Meaning"], rows)


def _default(key: Key) -> str:
    return key.default_text if key.default_text in ("required", "none") else f"`{key.default_text}`"


class PresetDefaults(_Markdown):
    """The settings whose defaults differ between presets: a row for each setting, a column for each preset."""

    def lines(self) -> Iterator[str]:
        defaults = {preset: {key.name: _default(key) for key in learner_keys(preset)} for preset in PRESETS}
        names = [key.name for key in keys_of(DialogueSettings) if key.name in defaults["grpo"]]
        differing = [name for name in names if len({values[name] for values in defaults.values()}) > 1]
        rows = ([f"`{name}`", *(values[name] for values in defaults.values())] for name in differing)
        yield from table(["Key", *(f"`{preset}`" for preset in PRESETS)], rows)


# Perturbations and remedies.


class PerturbationKinds(_Markdown):
    """The kinds of a dimension: a table, and an entry for each."""

    def lines(self, dimension: str) -> Iterator[str]:
        kinds = [kind for kind in perturbation_kinds().values() if kind.dimension == dimension]
        rows = (
            [f"{{py:func}}`{kind.name} <jaxaudit.{kind.name}>`", _site(kind), _magnitude(kind), _duration(kind)]
            for kind in kinds
        )
        yield from table(["Name", "Acts on", "Standard magnitude", "Duration"], rows)
        for kind in kinds:
            yield from perturbation_entry(kind)


def perturbation_entry(kind: Kind) -> Iterator[str]:
    """Yields the entry of a kind: its call, its docstring, and its numbers."""
    low, high = kind.limits
    lasting = kind.when.duration
    signature = (
        f"magnitude={_magnitude(kind)}, *, onset={kind.when.onset}, duration={lasting!r}, period=None, "
        f"target={kind.target!r}"
    )
    facts = [
        f"Acts on {_site(kind)}.",
        f"Magnitudes: {'whole numbers ' if kind.whole else ''}from {_number(low)} to {_number(high)}; "
        f"{_number(kind.neutral)} disturbs nothing.",
    ]
    yield from entry("function", f"jaxaudit.{kind.name}({signature})", [*prose(kind), "", " ".join(facts)])


def _site(kind: Kind) -> str:
    return f"`{kind.site}`" + (f", target `{kind.target}`" if kind.target else "")


def _magnitude(kind: Kind) -> str:
    return ", ".join(_number(value) for value in kind().magnitudes)


def _number(value: float) -> str:
    return {"inf": "infinity", "-inf": "minus infinity"}.get(text := f"{value:g}", text)


def _duration(kind: Kind) -> str:
    lasting = kind.when.duration
    return {"once": "1 step", "end": "to the end"}.get(str(lasting), f"{lasting} steps")


class PerturbationIndex(_Markdown):
    """A table of all perturbations and interventions with links to their entries."""

    def lines(self) -> Iterator[str]:
        rows = (
            [f"{{py:func}}`{kind.name} <jaxaudit.{kind.name}>`", kind.dimension, plain(first_docstring_line(kind))]
            for kind in perturbation_kinds().values()
        )
        yield from table(["Name", "Dimension", "What it does"], rows)


class RemedyKinds(_Markdown):
    """An entry for each registered remedy."""

    def lines(self) -> Iterator[str]:
        for name in registry.remedies:
            kind = registry.remedies[name]
            acts = f"Acts on `{kind.site}`." if kind.site else "Changes the learner's settings."
            neutral = "" if kind.neutral is None else f" A strength of {_number(kind.neutral)} changes nothing."
            call = f"jaxaudit.remedies.{name}(strength={_number(kind.strength)})"
            yield from entry("function", call, [*prose(kind), "", f"{acts}{neutral}"])


def entry(what: str, name: str, body: Iterable[str]) -> Iterator[str]:
    """Yields an entry of the Python domain with a body of Markdown."""
    yield f"::::::{{py:{what}}} {name}"
    yield from body
    yield "::::::"
    yield ""


def prose(found: Any) -> list[str]:
    """Returns a docstring as lines of Markdown, with its doctests in fences."""
    lines: list[str] = []
    doctest = False
    for line in (inspect.getdoc(found) or "").splitlines():
        begins = line.lstrip().startswith(">>>")
        if begins and not doctest:
            lines += ["", "```pycon"]
            doctest = True
        elif doctest and not line.strip():
            lines.append("```")
            doctest = False
        lines.append(line.strip() if doctest else line)
    return [*lines, "```"] if doctest else lines


def plain(text: str) -> str:
    """Returns a line of a docstring for a table."""
    return text.strip()


# The API.


class PublicNames(_Markdown):
    """Entries of public names of `jaxaudit` or of one of its public modules."""

    def lines(self, module: str, *names: str) -> Iterator[str]:
        wanted = names or [name for name in public_names(import_module(_path(module))) if not _is_kind(module, name)]
        for name in wanted:
            yield from _entry(module, name)


def _path(module: str) -> str:
    return "jaxaudit" if module == "jaxaudit" else f"jaxaudit.{jaxaudit._MODULES[module.partition('.')[2]]}"


def _is_kind(module: str, name: str) -> bool:
    return isinstance(getattr(import_module(_path(module)), name), Kind | RemedyKind)


def _entry(module: str, name: str) -> Iterator[str]:
    found = getattr(import_module(_path(module)), name)
    if module != "jaxaudit" and getattr(jaxaudit, name, None) is found:
        what = "class" if inspect.isclass(found) else "function"
        role = "class" if inspect.isclass(found) else "func"
        yield from entry(what, f"{module}.{name}", [f"The same as {{py:{role}}}`jaxaudit.{name}`."])
    elif inspect.isclass(found) or inspect.isroutine(found) or hasattr(found, "__wrapped__"):
        directive = "autoclass" if inspect.isclass(found) else "autofunction"
        yield "```{eval-rst}"
        yield f".. {directive}:: {module}.{name}"
        if inspect.isclass(found):
            yield "   :members:"
        yield "```"
        yield ""
    else:
        yield from entry("data", f"{module}.{name}", [constant_docstring(name, found), "", f"Value: {_shown(found)}"])


def constant_docstring(name: str, value: Any) -> str:
    """Returns the docstring below the assignment of a constant, in whichever module of the package that is."""
    for module in [m for m in sys.modules if m.startswith("jaxaudit.")]:
        if getattr(sys.modules[module], name, None) is value:
            documented = ModuleAnalyzer.for_module(module).find_attr_docs()
            if lines := documented.get(("", name)):
                return "\n".join(lines)
    return ""


def _shown(value: Any) -> str:
    names = list(value) if isinstance(value, dict | tuple) else [value]
    return ", ".join(f"`{item}`" for item in names) + "."


def public_names(module: ModuleType) -> list[str]:
    """Returns the public names of a module: `__all__`, or what the package defines and documents."""
    if listed := getattr(module, "__all__", None):
        return sorted(listed)
    names = []
    for name in dir(module):
        found = getattr(module, name)
        if name.startswith("_") or isinstance(found, ModuleType):
            continue
        if (getattr(found, "__module__", None) or "").startswith("jaxaudit") or (
            name.isupper() and constant_docstring(name, found)
        ):
            names.append(name)
    return names


def expected_entries() -> Iterator[str]:
    """Yields the full names that must have an entry: all of `jaxaudit` and of its public modules."""
    for name in dir(jaxaudit):
        if name not in MODULES:
            yield f"jaxaudit.{name}"
    for module in MODULES:
        yield from (f"jaxaudit.{module}.{name}" for name in public_names(getattr(jaxaudit, module)))


def check_public_names(app: Sphinx, env: BuildEnvironment) -> None:
    """Fails if a public name has no entry."""
    if "api" not in env.all_docs:
        return
    missing = [name for name in expected_entries() if name not in env.domains["py"].objects]
    if missing:
        raise ExtensionError(f"public names without an entry: {', '.join(missing)}")


class RepositoryLinks(SphinxTransform):
    """Turns links to files of the repository that are no pages into downloads."""

    default_priority = 400

    def apply(self, **options: Any) -> None:
        for node in list(self.document.findall(addnodes.pending_xref)):
            if node.get("reftype") == "myst" and (path := repository_file(node["reftarget"])):
                download = addnodes.download_reference(
                    reftarget=f"/{os.path.relpath(path, self.env.srcdir)}", refdoc=self.env.docname, refdomain=""
                )
                download += node.children
                node.replace_self(download)


def repository_file(target: str) -> Path | None:
    """Returns the file of the repository outside the documentation that a link's target names, or None."""
    place = REPOSITORY / target.partition("#")[0]
    for path in (place, place.with_name(f"{place.name}.md")):
        if target and path.is_file() and path.is_relative_to(REPOSITORY) and not path.is_relative_to(DOCS):
            return path
    return None


def setup(app: Sphinx) -> dict[str, Any]:
    """Adds the directives and the check."""
    app.add_directive("spec-keys", SpecKeys)
    app.add_directive("preset-defaults", PresetDefaults)
    app.add_directive("perturbation-kinds", PerturbationKinds)
    app.add_directive("perturbation-index", PerturbationIndex)
    app.add_directive("remedy-kinds", RemedyKinds)
    app.add_directive("public-names", PublicNames)
    app.add_transform(RepositoryLinks)
    app.connect("env-check-consistency", check_public_names)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
