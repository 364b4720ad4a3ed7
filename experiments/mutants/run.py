"""How many small faults the tests notice: a seeded sample of mutants, each against the tests that import its module.

    python run.py OUT.csv [--mutants 120] [--seed 0] [--workers 2] [--limit 3600] [--only GLOB] [--tests GLOB]

A mutant is the package with one expression changed: a sign, an operator, a comparison, a constant, a condition, an
argument that is left out. Each is made in a copy of the repository, so that nothing here changes, and is killed if a
test fails or does not end within the limit; the default tests come first, then the exhaustive ones. Columns: module,
line, what, before, after, outcome, tests, seconds. What survives is to be read by a person: either a test is missing,
or the mutant does the same. Stopped, the same command goes on after the last in OUT.csv.

A module that no test imports is put to the tests of those that import it. With `--tests`, every file of the pattern is
run. Where the tests have run here before, copies begin with what they compiled (`.pytest_cache/xla`): XLA then works
only on what a mutant changes. Without it the outcomes are the same, some hours later.
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
"""What stands in test files that take half a minute or more."""

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
    """One change: of the `number`-th node of a file's syntax tree, in one of the ways there are."""

    path: str
    line: int
    what: str
    before: str
    after: str
    source: str


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """The ways in which a node may be changed, each with its name and a changed copy."""

    def changed(**fields) -> ast.AST:
        other = copy.copy(node)
        for name, value in fields.items():
            setattr(other, name, value)
        return other

    if isinstance(node, ast.BinOp):
        for table, what in ((ARITHMETIC, "arithmetic"), (LOGIC, "logic")):
            if type(node.op) in table:
                yield what, changed(op=table[type(node.op)]())
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
    """All mutants of a file; annotations, docstrings, messages and what is raised stay."""
    text = path.read_text()
    tree = ast.parse(text)
    spared: set[int] = set()
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.FunctionDef):
            arguments = [*node.args.args, *node.args.kwonlyargs, *node.args.posonlyargs]
            parts = [node.returns, *(a.annotation for a in arguments), *node.decorator_list]
        elif isinstance(node, ast.AnnAssign):
            parts = [node.annotation]
        elif isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr):
            parts = [node]
        spared |= {id(inner) for part in parts if part for inner in ast.walk(part)}
    lines = text.splitlines(keepends=True)
    starts = [0]
    for one in lines:
        starts.append(starts[-1] + len(one.encode()))
    raw = text.encode()
    for node in ast.walk(tree):
        if id(node) in spared or not hasattr(node, "lineno"):
            continue
        begin, end = (starts[row - 1] + column for row, column in ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)))  # fmt: skip # noqa: E501
        for what, other in changes(node):
            after = f"({ast.unparse(ast.fix_missing_locations(other))})"
            source = (raw[:begin] + after.encode() + raw[end:]).decode()
            before = raw[begin:end].decode()
            yield Mutant(str(path.relative_to(ROOT)), node.lineno, what, before, after, source)


def named(module: str) -> str:
    """How a file of the package is imported."""
    dotted = module.removesuffix(".py").replace("/", ".")
    return f"jaxaudit.{dotted}" if dotted.startswith("kernels") else dotted


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """A file's syntax tree, flat."""
    return tuple(ast.walk(ast.parse(path.read_text())))


@functools.cache
def imports_of(path: Path) -> frozenset[str]:
    """The modules that a file imports, and the names it imports from them, dotted."""
    found = [node for node in nodes_of(path) if isinstance(node, ast.ImportFrom) and node.module]
    return frozenset({n.module for n in found} | {f"{n.module}.{a.name}" for n in found for a in n.names})


@functools.cache
def attributes_of(path: Path) -> frozenset[tuple[str, str]]:
    """Every `a.b.name` of a file as ("b", "name")."""
    found = (node for node in nodes_of(path) if isinstance(node, ast.Attribute))
    return frozenset((ast.unparse(node.value).rsplit(".")[-1], node.attr) for node in found)


@functools.cache
def importing_tests(module: str, pattern: str) -> tuple[str, ...]:
    """The test files of a pattern that import a module or its names from a package.

    Where there is none, those of the modules that import it. Files that are named after the module come first, and the
    ones that take long come last.
    """
    exported = {node.name for node in nodes_of(ROOT / module) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    parents = [named(module).rsplit(".", depth)[0] for depth in range(1, named(module).count(".") + 1)]
    wanted = {named(module)} | {f"{parent}.{name}" for parent in parents for name in exported}
    used = {(alias, name) for alias in ("ja", *(p.rsplit(".")[-1] for p in parents)) for name in exported}
    files = sorted(p for p in (ROOT / "tests").rglob("test_*.py") if fnmatch.fnmatch(p.relative_to(ROOT), pattern))
    found = [p for p in files if wanted & imports_of(p) or used & attributes_of(p)]
    if not found:
        above = [str(p.relative_to(ROOT)) for p in ROOT.glob("jaxaudit/**/*.py") if named(module) in imports_of(p)]
        found = [ROOT / test for other in above for test in importing_tests(other, pattern)]
    stem, package = Path(module).stem, Path(module).parent.name.removesuffix("s")
    order = sorted(set(found), key=lambda p: (stem not in p.stem, package not in str(p), takes_long(p), p))
    return tuple(str(p.relative_to(ROOT)) for p in order)


def takes_long(test: Path) -> bool:
    """Whether a test file is marked as one of half a minute or more."""
    return LONG in test.read_text()


def in_order(tests: set[str], module: str, importing: tuple[str, ...]) -> tuple[str, ...]:
    """Files named after a module first, then references, which compare most, and the ones that take long last."""

    def turn(test: str) -> tuple[bool | str, ...]:
        name = Path(test).stem.removeprefix("test_")
        long = takes_long(ROOT / test)
        return Path(module).stem not in name, "reference" not in name, long, test not in importing, name

    return tuple(sorted(tests, key=turn))


SELECTIONS = ("not slow and not exhaustive", "exhaustive and not slow")
"""What continuous integration runs, the quicker tests first."""

NOTHING_SELECTED = 5
"""Pytest's exit status where no test has the marks asked for."""


class Copies:
    """Copies of the repository, one for each worker, in which mutants are put to the test files of a pattern."""

    def __init__(self, place: Path, workers: int, tests: str):
        self._free = []
        self._tests = tests
        for number in range(workers):
            folder = place / str(number)
            shutil.copytree(ROOT, folder, ignore=_left)
            (folder / "jaxaudit" / "kernels").symlink_to(folder / "kernels")
            if (compiled := ROOT / ".pytest_cache" / "xla").exists():
                shutil.copytree(compiled, folder / ".pytest_cache" / "xla")
            self._free.append(folder)

    def judge(self, mutant: Mutant, limit: float) -> tuple[str, tuple[str, ...], float]:
        """What becomes of a mutant, the tests it was put to, and the seconds that took."""
        folder, tests = self._free.pop(), importing_tests(mutant.path, self._tests)
        if self._tests != "*":
            tests = in_order({str(p.relative_to(folder)) for p in folder.glob(self._tests)}, mutant.path, tests)
        original = (folder / mutant.path).read_text()
        begun = time.monotonic()
        try:
            (folder / mutant.path).write_text(mutant.source)
            return _tested(folder, tests, limit), tests, time.monotonic() - begun
        finally:
            (folder / mutant.path).write_text(original)
            self._free.append(folder)


def _left(folder: str, names: list[str]) -> set[str]:
    """What a copy does without: what is not of the repository, and links, `jaxaudit/kernels` above all."""
    patterns = shutil.ignore_patterns(".git", ".venv", "runs", ".pytest_cache", "*.egg-info", "__pycache__")
    return patterns(folder, names) | {name for name in names if Path(folder, name).is_symlink()}


def _tested(folder: Path, tests: tuple[str, ...], limit: float) -> str:
    if not tests:
        return "no tests"
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    ends = time.monotonic() + limit
    for marks in SELECTIONS:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-m", marks, *tests]
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, timeout=ends - time.monotonic(), check=False
            )
        except subprocess.TimeoutExpired:
            return "killed by time"
        if done.returncode not in (0, NOTHING_SELECTED):
            return "killed" if done.returncode in (1, 2) else f"pytest {done.returncode}"
    return "survived"


def main() -> None:
    """Draws, judges, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--mutants", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for the tests of one")
    parser.add_argument("--only", default="*", help="files, e.g. 'kernels/*'")
    parser.add_argument("--tests", default="*", help="test files, e.g. 'tests/learners/*'")
    given = parser.parse_args()
    files = sorted({p for pattern in WHERE for p in ROOT.glob(pattern)})
    every = [m for p in files if fnmatch.fnmatch(str(p.relative_to(ROOT)), given.only) for m in mutants_of(p)]
    drawn = random.Random(given.seed).sample(every, min(given.mutants, len(every)))
    print(f"{len(drawn)} of {len(every)} mutants, seed {given.seed}", flush=True)
    before = len(list(csv.reader(given.out.open(newline="")))) if given.out.exists() else 0
    with tempfile.TemporaryDirectory() as place, given.out.open("a", newline="") as file:
        copies, rows = Copies(Path(place), given.workers, given.tests), csv.writer(file)
        if not before:
            rows.writerow(("module", "line", "what", "before", "after", "outcome", "tests", "seconds"))
        judged_already = max(before - 1, 0)

        def judged(mutant: Mutant) -> tuple[Mutant, str, tuple[str, ...], float]:
            return mutant, *copies.judge(mutant, given.limit)

        with ThreadPoolExecutor(given.workers) as pool:
            for number, (m, outcome, tests, seconds) in enumerate(
                pool.map(judged, drawn[judged_already:]), judged_already + 1
            ):
                rows.writerow((m.path, m.line, m.what, m.before, m.after, outcome, " ".join(tests), f"{seconds:.0f}"))
                file.flush()
                print(f"{number}: {outcome} {m.path}:{m.line} {m.before} -> {m.after}", flush=True)


if __name__ == "__main__":
    main()
