"""Size of the package and dependencies between its parts, counted in its syntax trees.

    python census.py [--lists]

Prints one line for each count; `--lists` adds the items: cycles, repeated class names, modules with one importer, and
short docstrings. Nothing is imported from the package.

Definitions:
  code        lines with a token other than a comment or a docstring.
  arrows      pairs of packages (or top-level modules), one of which imports the other, anywhere in a file.
  cycles      strongly connected components of more than one package in the graph of these arrows; imports only for
              type checkers do not count.
  Any         annotations of arguments, results and fields in which `Any` occurs, directly or through an alias that a
              module of the package defines (`Params = Any`).
  short       docstrings of six words or fewer.
  one importer  modules that are imported by exactly one other module of the package.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "jaxaudit"
KERNELS = ROOT / "kernels"
SHORT = 6

Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def sources() -> dict[str, ast.Module]:
    """Returns the syntax tree of every module, by dotted name."""
    trees = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if KERNELS.name not in path.relative_to(PACKAGE).parts:
            trees[dotted(path.relative_to(ROOT))] = ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted(KERNELS.glob("*.py")):
        trees[f"jaxaudit.{dotted(path.relative_to(ROOT))}"] = ast.parse(path.read_text(encoding="utf-8"))
    return trees


def dotted(path: Path) -> str:
    """Returns the module name of a file's path."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def path_of(module: str) -> Path:
    """Returns the file of a module."""
    parts = module.split(".")
    path = KERNELS.joinpath(*parts[2:]) if parts[1:2] == ["kernels"] else ROOT.joinpath(*parts)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def definitions(tree: ast.Module) -> Iterator[tuple[str, Definition]]:
    """Yields the module and its classes and functions, nested ones included, each with its name."""
    yield "", tree
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node


def lines(module: str, tree: ast.Module) -> tuple[int, int]:
    """Counts the (lines of code, lines of docstrings) of a module."""
    docstrings: set[int] = set()
    for _, node in definitions(tree):
        for statement in node.body:  # docstrings of attributes are bare strings, too
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                docstrings.update(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    ignored = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
    }
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(path_of(module).read_text(encoding="utf-8")).readline):
        if token.type not in ignored:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings), len(docstrings)


def imports(tree: ast.Module, trees: dict[str, ast.Module]) -> Iterator[tuple[str, bool]]:
    """Yields the package's modules that a module imports, and whether only for type checkers."""
    guarded = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [
                f"{node.module}.{alias.name}" if f"{node.module}.{alias.name}" in trees else node.module
                for alias in node.names
            ]
        for name in names:
            if name in trees:
                yield name, node in guarded


def package_of(module: str) -> str:
    """Returns the package below jaxaudit that contains a module, or the module itself at the top."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "jaxaudit"


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Returns the strongly connected components of more than one node."""

    def reachable(start: str) -> set[str]:
        visited: set[str] = set()
        pending = [start]
        while pending:
            for successor in graph[pending.pop()] - visited:
                visited.add(successor)
                pending.append(successor)
        return visited

    reach = {node: reachable(node) for node in graph}
    components = {frozenset(b for b in reach[a] if a in reach.get(b, ())) for a in graph}
    return sorted(sorted(component) for component in components if len(component) > 1)


def aliases(trees: dict[str, ast.Module]) -> set[str]:
    """Returns the names that stand for Any: module-level assignments whose value contains Any or another such name."""
    names = {"Any"}
    while True:
        more = {
            target.id
            for tree in trees.values()
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Name | ast.Subscript | ast.BinOp | ast.Attribute)
            for target in node.targets
            if isinstance(target, ast.Name) and names & names_in(node.value)
        }
        if more <= names:
            return names
        names |= more


def names_in(node: ast.AST) -> set[str]:
    """Returns the names and attributes in an expression."""
    names = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
    return names | {child.attr for child in ast.walk(node) if isinstance(child, ast.Attribute)}


def annotations(tree: ast.Module) -> Iterator[ast.expr]:
    """Yields all annotations of arguments, results and fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation:
            yield node.annotation
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns:
            yield node.returns


def short_docstrings(module: str, tree: ast.Module) -> Iterator[tuple[bool, str, str]]:
    """Yields (whether the name is public, name, docstring) for each docstring of at most `SHORT` words."""
    for name, node in definitions(tree):
        text = ast.get_docstring(node)
        if text is not None and len(text.split()) <= SHORT:
            yield not name.startswith("_"), f"{module}.{name}".rstrip("."), text


def main() -> None:
    """Prints the census."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lists", action="store_true", help="also list the items")
    options = parser.parse_args()
    trees = sources()
    line_counts = [lines(module, tree) for module, tree in trees.items()]
    importers: dict[str, set[str]] = defaultdict(set)
    graph: dict[str, set[str]] = {package_of(module): set() for module in trees}
    arrows: set[tuple[str, str]] = set()
    for module, tree in trees.items():
        for other, for_types in imports(tree, trees):
            if other != module:
                importers[other].add(module)
            if package_of(other) != package_of(module):
                arrows.add((package_of(module), package_of(other)))
                if not for_types and module != "jaxaudit":
                    graph[package_of(module)].add(package_of(other))
    standing_for_any = aliases(trees)
    any_count = sum(bool(standing_for_any & names_in(item)) for tree in trees.values() for item in annotations(tree))
    classes = Counter(
        node.name for tree in trees.values() for _, node in definitions(tree) if isinstance(node, ast.ClassDef)
    )
    repeated = sorted(name for name, count in classes.items() if count > 1)
    short = [item for module, tree in trees.items() for item in short_docstrings(module, tree)]
    single = sorted(module for module in trees if len(importers[module]) == 1 and path_of(module).stem != "__init__")
    counts = {
        "files": len(trees),
        "modules at the top": sum(module.count(".") == 1 and path_of(module).stem != "__init__" for module in trees),
        "lines of code": sum(code for code, _ in line_counts),
        "lines of docstrings": sum(docstring for _, docstring in line_counts),
        "import arrows between packages": len(arrows),
        "cycles between packages": len(cycles(graph)),
        "annotations with Any": any_count,
        "docstrings of six words or fewer": len(short),
        "of these, of public names": sum(public for public, _, _ in short),
        "class names that occur more than once": len(repeated),
        "modules with one importer": len(single),
    }
    for name, number in counts.items():
        print(f"{number:>7,}  {name}")
    if options.lists:
        print("\ncycles:", *(" <-> ".join(item) for item in cycles(graph)), sep="\n  ")
        print("\nclass names that occur more than once:", ", ".join(f"{name} ({classes[name]})" for name in repeated))
        print("\nmodules with one importer:", *(f"{item} <- {min(importers[item])}" for item in single), sep="\n  ")
        print("\nshort docstrings:", *(f"{name}: {text}" for _, name, text in short), sep="\n  ")


if __name__ == "__main__":
    main()
