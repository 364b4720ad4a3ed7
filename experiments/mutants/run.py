"""Mutation testing: a seeded sample of mutants, each run against the tests that import its module.

    python run.py OUT.csv [--mutants 120] [--seed 0] [--workers 2] [--limit 3600] [--only GLOB] [--tests GLOB]

A mutant is the package with one changed expression: a sign, an operator, a comparison, a constant, a condition, or the
order of branches. It is created in a copy of the repository, and is killed if a test fails or does not end within the
limit. The default tests run first, then the exhaustive ones. Columns: module, line, what, before, after, outcome,
tests, seconds. Survivors must be inspected: either a test is missing, or the mutant is equivalent. If the command is
stopped, a new call continues after the last row of OUT.csv.

A module that no test imports is tested by the tests of the modules that import it. With `--tests`, all files of the
pattern are run. If tests have run in this checkout before, copies start with its compiled programs
(`.pytest_cache/xla`), so that XLA compiles only what a mutant changes. Without them, the outcomes are the same but take
hours longer.
"""

from __future__ import annotations

import argparse
import ast
import copy
import csv
import fnmatch
import functools
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

LONG = "pytest.mark.long"
"""The mark of test files that take half a minute or more."""

WHERE = (
    "jaxaudit/learners/*.py",
    "jaxaudit/learners/rl/*.py",
    "jaxaudit/learners/dialogue/**/*.py",
    "kernels/*.py",
    "jaxaudit/analysis/metrics.py",
    "jaxaudit/analysis/statistics/*.py",
    "jaxaudit/runs/margins/*.py",
    "jaxaudit/monitoring/*.py",
    "jaxaudit/perturbations/*.py",
    "jaxaudit/tasks/episodes.py",
    "jaxaudit/core/taps.py",
    "jaxaudit/core/program.py",
)

ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult}
COMPARISONS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
LOGIC = {ast.And: ast.Or, ast.Or: ast.And, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd}
NAMES = {"minimum": "maximum", "maximum": "minimum", "min": "max", "max": "min", "mean": "sum", "sum": "mean"}
NAMES |= {"any": "all", "all": "any", "exp": "log1p", "sqrt": "abs", "argmin": "argmax", "argmax": "argmin"}


@dataclass(frozen=True)
class Mutant:
    """One change of a file, with the changed source."""

    path: str
    line: int
    what: str
    before: str
    after: str
    source: str


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yields the possible changes of a node, each with its name and a changed copy."""

    def changed(**fields) -> ast.AST:
        changed_node = copy.copy(node)
        for name, value in fields.items():
            setattr(changed_node, name, value)
        return changed_node

    if isinstance(node, ast.BinOp):
        for table, kind in ((ARITHMETIC, "arithmetic"), (LOGIC, "logic")):
            if type(node.op) in table:
                yield kind, changed(op=table[type(node.op)]())
    elif isinstance(node, ast.BoolOp):
        yield "logic", changed(op=LOGIC[type(node.op)]())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not | ast.Invert):
        yield "without the sign", node.operand
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        yield "comparison", changed(ops=[COMPARISONS[type(node.ops[0])](), *node.ops[1:]])
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "constant", changed(value=not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield "constant", changed(value=node.value + 1)
    elif isinstance(node, ast.Constant) and isinstance(node.value, float):
        yield "constant", changed(value=node.value * 1.5 + (node.value == 0.0))
    elif isinstance(node, ast.IfExp):
        yield "condition", changed(body=node.orelse, orelse=node.body)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in NAMES:
        name = copy.copy(node.func)
        name.attr = NAMES[node.func.attr]
        yield "function", changed(func=name)
    elif isinstance(node, ast.Call) and len(node.args) > 1 and getattr(node.func, "attr", "") == "where":
        yield "branches", changed(args=[node.args[0], *node.args[:0:-1]])


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yields all mutants of a file; annotations, decorators, docstrings, messages, and raise and assert remain."""
    text = path.read_text()
    tree = ast.parse(text)
    unchanged: set[int] = set()
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.FunctionDef):
            arguments = [*node.args.args, *node.args.kwonlyargs, *node.args.posonlyargs]
            parts = [node.returns, *(a.annotation for a in arguments), *node.decorator_list]
        elif isinstance(node, ast.AnnAssign):
            parts = [node.annotation]
        elif isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr):
            parts = [node]
        unchanged |= {id(inner) for part in parts if part for inner in ast.walk(part)}
    lines = text.splitlines(keepends=True)
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line.encode()))
    encoded = text.encode()
    for node in ast.walk(tree):
        if id(node) in unchanged or not hasattr(node, "lineno"):
            continue
        begin, end = (offsets[row - 1] + column for row, column in ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)))  # fmt: skip # noqa: E501
        for kind, changed_node in changes(node):
            after = f"({ast.unparse(ast.fix_missing_locations(changed_node))})"
            source = (encoded[:begin] + after.encode() + encoded[end:]).decode()
            before = encoded[begin:end].decode()
            yield Mutant(str(path.relative_to(ROOT)), node.lineno, kind, before, after, source)


def module_name(module: str) -> str:
    """Returns the module name of a file of the package."""
    dotted = module.removesuffix(".py").replace("/", ".")
    return f"jaxaudit.{dotted}" if dotted.startswith("kernels") else dotted


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Returns all nodes of a file's syntax tree."""
    return tuple(ast.walk(ast.parse(path.read_text())))


@functools.cache
def imports_of(path: Path) -> frozenset[str]:
    """Returns the modules that a file imports, and the dotted names it imports from them."""
    nodes = [node for node in nodes_of(path) if isinstance(node, ast.ImportFrom) and node.module]
    return frozenset({n.module for n in nodes} | {f"{n.module}.{a.name}" for n in nodes for a in n.names})


@functools.cache
def attributes_of(path: Path) -> frozenset[tuple[str, str]]:
    """Returns every `a.b.name` of a file as ("b", "name")."""
    attributes = (node for node in nodes_of(path) if isinstance(node, ast.Attribute))
    return frozenset((ast.unparse(node.value).rsplit(".")[-1], node.attr) for node in attributes)


@functools.cache
def importing_tests(module: str, pattern: str) -> tuple[str, ...]:
    """Returns the test files of a pattern that import a module, or its names from a package.

    If there are none, these are the tests of the modules that import it. Files that are named after the module come
    first, and long ones last.
    """
    exported = {node.name for node in nodes_of(ROOT / module) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    parents = [module_name(module).rsplit(".", depth)[0] for depth in range(1, module_name(module).count(".") + 1)]
    names = {module_name(module)} | {f"{parent}.{name}" for parent in parents for name in exported}
    used = {(alias, name) for alias in ("ja", *(p.rsplit(".")[-1] for p in parents)) for name in exported}
    files = sorted(p for p in (ROOT / "tests").rglob("test_*.py") if fnmatch.fnmatch(p.relative_to(ROOT), pattern))
    test_files = [p for p in files if names & imports_of(p) or used & attributes_of(p)]
    if not test_files:
        importing_modules = [
            str(p.relative_to(ROOT)) for p in ROOT.glob("jaxaudit/**/*.py") if module_name(module) in imports_of(p)
        ]
        test_files = [
            ROOT / test for importing_module in importing_modules for test in importing_tests(importing_module, pattern)
        ]
    stem, package = Path(module).stem, Path(module).parent.name.removesuffix("s")
    order = sorted(set(test_files), key=lambda p: (stem not in p.stem, package not in str(p), takes_long(p), p))
    return tuple(str(p.relative_to(ROOT)) for p in order)


def takes_long(test: Path) -> bool:
    """Returns whether a test file is marked as long."""
    return LONG in test.read_text()


def in_order(tests: set[str], module: str, importing: tuple[str, ...]) -> tuple[str, ...]:
    """Orders tests: files named after the module first, then those with references, and long ones last."""

    def sort_key(test: str) -> tuple[bool | str, ...]:
        name = Path(test).stem.removeprefix("test_")
        is_long = takes_long(ROOT / test)
        return Path(module).stem not in name, "reference" not in name, is_long, test not in importing, name

    return tuple(sorted(tests, key=sort_key))


SELECTIONS = ("not slow and not exhaustive", "exhaustive and not slow")
"""The marks of tests that continuous integration runs, with the faster tests first."""

NOTHING_SELECTED = 5
"""Pytest's exit status if no test is selected."""


class Copies:
    """Copies of the repository, one for each worker, in which mutants are tested by the test files of a pattern."""

    def __init__(self, place: Path, workers: int, tests: str):
        self._free = []
        self._tests = tests
        for number in range(workers):
            folder = place / str(number)
            shutil.copytree(ROOT, folder, ignore=_ignored_names)
            (folder / "jaxaudit" / "kernels").symlink_to(folder / "kernels")
            if (compiled := ROOT / ".pytest_cache" / "xla").exists():
                shutil.copytree(compiled, folder / ".pytest_cache" / "xla")
            self._free.append(folder)

    def judge(self, mutant: Mutant, limit: float) -> tuple[str, tuple[str, ...], float]:
        """Tests a mutant, and returns its outcome, the tests, and the seconds they took."""
        folder, tests = self._free.pop(), importing_tests(mutant.path, self._tests)
        if self._tests != "*":
            tests = in_order({str(p.relative_to(folder)) for p in folder.glob(self._tests)}, mutant.path, tests)
        original = (folder / mutant.path).read_text()
        start = time.monotonic()
        try:
            (folder / mutant.path).write_text(mutant.source)
            return _run_tests(folder, tests, limit), tests, time.monotonic() - start
        finally:
            (folder / mutant.path).write_text(original)
            self._free.append(folder)


def _ignored_names(folder: str, names: list[str]) -> set[str]:
    """Returns the names that are not copied: files outside the repository, and links, such as `jaxaudit/kernels`."""
    patterns = shutil.ignore_patterns(".git", ".venv", "runs", ".pytest_cache", "*.egg-info", "__pycache__")
    return patterns(folder, names) | {name for name in names if Path(folder, name).is_symlink()}


def _run_tests(folder: Path, tests: tuple[str, ...], limit: float) -> str:
    if not tests:
        return "no tests"
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    deadline = time.monotonic() + limit
    for marks in SELECTIONS:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-m", marks, *tests]
        try:
            process = subprocess.run(
                command,
                cwd=folder,
                env=environment,
                capture_output=True,
                timeout=deadline - time.monotonic(),
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "killed by time"
        if process.returncode not in (0, NOTHING_SELECTED):
            return "killed" if process.returncode in (1, 2) else f"pytest {process.returncode}"
    return "survived"


def main() -> None:
    """Samples mutants, tests them, and writes the outcomes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--mutants", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for the tests of one mutant")
    parser.add_argument("--only", default="*", help="files, e.g. 'kernels/*'")
    parser.add_argument("--tests", default="*", help="test files, e.g. 'tests/learners/*'")
    arguments = parser.parse_args()
    files = sorted({p for pattern in WHERE for p in ROOT.glob(pattern)})
    mutants = [m for p in files if fnmatch.fnmatch(str(p.relative_to(ROOT)), arguments.only) for m in mutants_of(p)]
    sample = random.Random(arguments.seed).sample(mutants, min(arguments.mutants, len(mutants)))
    print(f"{len(sample)} of {len(mutants)} mutants, seed {arguments.seed}", flush=True)
    row_count = len(list(csv.reader(arguments.out.open(newline="")))) if arguments.out.exists() else 0
    with tempfile.TemporaryDirectory() as place, arguments.out.open("a", newline="") as file:
        copies, rows = Copies(Path(place), arguments.workers, arguments.tests), csv.writer(file)
        if not row_count:
            rows.writerow(("module", "line", "what", "before", "after", "outcome", "tests", "seconds"))
        done = max(row_count - 1, 0)

        def judge_mutant(mutant: Mutant) -> tuple[Mutant, str, tuple[str, ...], float]:
            return mutant, *copies.judge(mutant, arguments.limit)

        with ThreadPoolExecutor(arguments.workers) as pool:
            for number, (m, outcome, tests, seconds) in enumerate(pool.map(judge_mutant, sample[done:]), done + 1):
                rows.writerow((m.path, m.line, m.what, m.before, m.after, outcome, " ".join(tests), f"{seconds:.0f}"))
                file.flush()
                print(f"{number}: {outcome} {m.path}:{m.line} {m.before} -> {m.after}", flush=True)


if __name__ == "__main__":
    main()
